"""The trainer and the evaluator in a bundle's configuration, found and read without creating them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from monai.inferers import SimpleInferer
from monai.metrics import DiceMetric

from medfl.bundle.configuration import Configuration, target_name
from medfl.core import Config, InputError
from medfl.evaluation import METRICS, higher_is_better
from medfl.evaluation.mask_metrics import KINDS

_TRAINERS = ("train#trainer", "trainer")
_EVALUATORS = ("validate#evaluator", "evaluator", "val#evaluator", "validator")


def find_trainer(config: Configuration) -> str:
    """Return the id of a bundle's trainer; InputError if it lacks one, or what federated training needs of it."""
    trainers = []
    for place in map(config.raw, _TRAINERS):
        if isinstance(place[1], Mapping):
            trainers.append(place)

    if not trainers:
        raise InputError(
            f"{config.file} has no id 'train#trainer' (nor a flat 'trainer'); it has {', '.join(config.ids)}",
            "federated training needs a SupervisedTrainer",
            f"add an id 'trainer' with the SupervisedTrainer to {config.file.name}",
        )

    key, node = trainers[0]
    if not target_name(node).endswith("Trainer"):
        raise InputError(
            f"{config.file}: id {key!r} is a {node.get('_target_')}",
            "federated training needs a trainer, MONAI's or the bundle's own",
            "make it a SupervisedTrainer, or give another bundle's folder",
        )

    parts = ["train_data_loader"]
    # another trainer calls its networks and losses as it likes
    if not own_trainer_class(config, key):
        parts = ["network", "loss_function", "optimizer", *parts]

    for part in parts:
        if part not in node:
            raise InputError(
                f"{config.file} has no id '{key}#{part}'", "a trainer has it", "add it"
            )

    return key


def own_trainer_class(config: Configuration, trainer: str) -> str:
    """Return the class of a trainer whose steps differ from MONAI's SupervisedTrainer, else ""."""
    node = config.raw(trainer)[1]
    name = target_name(node)
    if name == "SupervisedTrainer" and node.get("iteration_update") is None:
        return ""

    return name


def find_evaluator(config: Configuration) -> str | None:
    """Return the id of the evaluator that the trainer calls, else one with a usual name."""
    called = [f"{key}#validator" for key, _ in config.nodes("ValidationHandler")]
    for key, node in map(config.raw, [*called, *_EVALUATORS]):
        if isinstance(node, Mapping) and "val_data_loader" in node:
            return key
    return None


def scoring(config: Configuration) -> tuple[Any, Any]:
    """Return the evaluator's inferer (default MONAI's simplest) and its postprocessing (default None)."""
    engine = find_evaluator(config)
    inferer = _part(config, f"{engine}#inferer")
    return inferer or SimpleInferer(), _part(config, f"{engine}#postprocessing")


def _part(config: Configuration, key: str) -> Any:
    return config.evaluated(key) if key in config else None


def key_metric(config: Configuration, loss: Any) -> tuple[str, Any]:
    """Return name and ignite metric of the evaluator, or the loss if it has none.

    "dice" is MONAI's Dice, and no other metric gets the name of one of medfl's. A metric for which lower is better, by
    `metric_cmp_fn` or else by its class (for MONAI, higher would be better), is named accordingly.
    """
    evaluator = find_evaluator(config)
    key, metrics = config.raw(f"{evaluator}#key_val_metric")
    if not isinstance(metrics, Mapping) or not metrics:
        return "loss", loss

    name = next(iter(metrics))
    metric = config.evaluated(f"{key}#{name}")
    function = getattr(metric, "metric_fn", None)
    if isinstance(function, DiceMetric):
        return "dice", metric

    # these names are for medfl's own definitions
    if name in METRICS or name.startswith(KINDS):
        name = f"own_{name}"

    kind = f"{type(metric).__name__}_{type(function).__name__}"
    lowers = not higher_is_better(re.sub("(?=[A-Z][a-z])", "_", kind))
    if config.raw(f"{evaluator}#metric_cmp_fn")[1] is not None:
        lowers = config.evaluated(f"{evaluator}#metric_cmp_fn")(0.0, 1.0)

    if lowers and higher_is_better(name):
        name += "_error"  # the direction must follow from the name alone

    return name, metric


def is_disabled(config: Configuration, key: str, node: Config) -> bool:
    """Tell whether a component is disabled: by `_disabled_`, which may be an expression."""
    if "_disabled_" not in node:
        return False

    value = config.evaluated(f"{key}#_disabled_")
    if isinstance(value, str):
        return value.strip().lower() == "true"

    return bool(value)


def find_schedule(config: Configuration) -> str:
    """Return the id of the schedule that a handler of the bundle steps once per epoch, "" if there is none."""
    for key, node in config.nodes("LrScheduleHandler"):
        by_epoch = node.get("epoch_level", True) is True and "step_transform" not in node
        if by_epoch and "lr_scheduler" in node and not is_disabled(config, key, node):
            return config.raw(f"{key}#lr_scheduler")[0]
    return ""
