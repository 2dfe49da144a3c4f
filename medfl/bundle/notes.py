"""What a user should know of a bundle that is not shipped: what runs here, and what of its training does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import RandomSampler, SequentialSampler

from medfl.bundle.configuration import Configuration, own_modules, target_name
from medfl.bundle.sections import Section


def notes(root: Path, config: Configuration, trainer: str, train: Section) -> Iterator[str]:
    """Yield the notes of a bundle.

    Args:
        root: its folder.
        config: its training configuration.
        trainer: id of its trainer.
        train: its training data.
    """
    inferer, amp = (config.raw(f"{trainer}#{part}")[1] for part in ("inferer", "amp"))
    sampler, modules = getattr(train.loader, "sampler", None), sorted(own_modules(root))
    if modules:
        yield f"its own Python ({', '.join(modules)}) runs with your rights"
    if any(config.nodes("LrScheduleHandler")):
        yield "its learning rate schedule is not run; --lr-decay multiplies the rate after each round"
    if any(config.nodes("CheckpointLoader")):
        yield "its checkpoints are not loaded"
    if amp and config.content(f"{trainer}#amp"):
        yield "mixed precision is chosen with --amp, not by its trainer"
    if inferer and target_name(inferer) != "SimpleInferer":
        yield "its training inferer is not used"
    if not isinstance(sampler, RandomSampler | SequentialSampler | None):
        yield f"its {type(sampler).__name__} is not used: a local epoch takes each item of a site once"
    if not train.source.is_list:
        yield "its items have no names: they are numbered, and divided with --partition iid"
    if config.dropped:
        yield f"scored without {', '.join(sorted(config.dropped))}"
