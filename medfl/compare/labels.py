"""What runs are called beside each other: the method, and the least that sets one apart from the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from medfl.report import RunFiles
from medfl.report.formatting import setting

_SETTINGS = (
    "bundle", "rounds", "local_epochs", "batch_size", "lr", "lr_decay", "decay_per", "site_weights", "keep_optimizer",
    "cohort", "amp", "messages", "aggregation", "site_labels", "partial_loss",
)  # fmt: skip


def labels(runs: Sequence[RunFiles]) -> list[str]:
    """Return each run's method with the options in which runs of that method differ."""
    return _with_differing([run.method for run in runs], runs, [run.options for run in runs], str)


def labels_with_settings(runs: Sequence[RunFiles]) -> list[str]:
    """Return each run's method with the options and settings in which runs of that method differ."""
    return _with_differing(labels(runs), runs, list(map(settings, runs)), setting)


def unique_labels(runs: Sequence[RunFiles]) -> list[str]:
    """Return a label for each run that no other has: with partition, seed, folder or number where it needs them."""
    unique = labels(runs)
    parts: tuple[Callable[[RunFiles], str], ...] = (
        lambda run: run.partition,
        lambda run: f"seed {run.record.get('seed')}",
        lambda run: run.path.name,
        lambda run: str(run.path),
    )

    for part in parts:
        for label in [label for label, count in Counter(unique).items() if count > 1]:
            places = [i for i, name in enumerate(unique) if name == label]
            if len({part(runs[i]) for i in places}) > 1:
                for i in places:
                    unique[i] = f"{label}, {part(runs[i])}"

    count = Counter(unique)
    return [f"{label} ({i})" if count[label] > 1 else label for i, label in enumerate(unique, 1)]


def settings(run: RunFiles) -> dict[str, object]:
    """Return what decides how well a run does beside its method and options."""
    return {name: run.record[name] for name in _SETTINGS if name in run.record} | dict(
        run.record.get("config") or {}
    )


def _with_differing(
    labels: Sequence[str],
    runs: Sequence[RunFiles],
    values: Sequence[Mapping[str, object]],
    text: Callable[[object], str],
) -> list[str]:
    """Return the labels with the values in which a run differs from another of its method."""
    extended = []
    for label, run, values_of_run in zip(labels, runs, values, strict=True):
        rivals = []
        for rival, values_of_rival in zip(runs, values, strict=True):
            if rival.method == run.method:
                rivals.append(values_of_rival)

        for name, value in values_of_run.items():
            if any(rival.get(name) != value for rival in rivals):
                label += f" {name}={text(value)}"

        extended.append(label)

    return extended
