"""What a user should know about a third-party bundle: what runs here, and which parts of its training do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import RandomSampler, SequentialSampler

from medfl.bundle.configuration import Configuration, own_modules, target_name
from medfl.bundle.engines import find_evaluator, is_disabled, own_trainer_class
from medfl.bundle.zoo import compatibility
from medfl.policy.policy import Policy
from medfl.problem import Section


def notes(
    root: Path, policy: Policy, config: Configuration, trainer: str, train: Section, scheduled: bool
) -> Iterator[str]:
    """Yield the notes of a bundle."""
    trainer_class = own_trainer_class(config, trainer)
    inferer = config.raw(f"{trainer}#inferer")[1]
    amp = config.raw(f"{trainer}#amp")[1]
    sampler = getattr(train.loader, "sampler", None)
    modules = sorted(own_modules(root))

    if modules and policy.runs_scripts:
        yield f"its own Python ({', '.join(modules)}) is run"

    for key, path in config.lists.items():
        yield f"{key} is {path}"

    yield from map(compatibility.said, sorted(config.adapted))
    if (handlers := list(config.nodes("LrScheduleHandler"))) and not scheduled:
        why = " goes by steps or a metric, and"
        if trainer_class:
            why = ""
        elif all(is_disabled(config, key, node) for key, node in handlers):
            why = " is disabled, and"

        yield f"its learning rate schedule{why} is not run; --lr-decay multiplies the rate"

    if any(config.nodes("CheckpointLoader")):
        yield "its checkpoints are not loaded"

    if amp and config.evaluated(f"{trainer}#amp"):
        yield "its trainer's mixed precision is for a GPU: a run on one has it"

    if inferer and not trainer_class and target_name(inferer) != "SimpleInferer":
        yield "its training inferer is not used"

    if not isinstance(sampler, RandomSampler | SequentialSampler | None):
        yield f"its {type(sampler).__name__} is not used: a local epoch takes each item of a site once"

    if not train.source.is_list:
        yield "its items have no names: they are numbered, and divided with --partition iid"

    if config.dropped:
        yield f"scored without {', '.join(sorted(config.dropped))}"

    if trainer_class:
        scored = "" if find_evaluator(config) else ", and nothing is scored"
        yield f"its {trainer_class} takes its steps by itself, without its handlers{scored}"
        run = f"$@{trainer}.run()"
        for _, texts in map(config.raw, config.ids):
            if isinstance(texts, list) and run in texts:
                if left_out := [str(text) for text in texts if text != run]:
                    yield f"what it does beside running it is left out: {', '.join(left_out)}"

                break
