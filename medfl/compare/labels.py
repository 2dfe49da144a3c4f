"""Labels of runs shown together: the method, and the minimum that distinguishes it from the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from medfl.report import RunFiles
from medfl.report.formatting import setting

TRAINING = (
    "rounds",
    "local_epochs",
    "batch_size",
    "lr",
    "lr_decay",
    "decay_per",
    "site_weights",
    "keep_optimizer",
    "cohort",
)
"""Training settings of sites, in the order used in tables."""
_SETTINGS = ("bundle", *TRAINING, "amp", "messages", "aggregation", "site_labels", "partial_loss")


def labels(runs: Sequence[RunFiles]) -> list[str]:
    """Return each run's method with the options in which runs of that method differ."""
    return _with_differing([run.method for run in runs], runs, [run.options for run in runs], str)


def labels_with_settings(runs: Sequence[RunFiles]) -> list[str]:
    """Return each run's method with the options and settings in which runs of that method differ."""
    return _with_differing(labels(runs), runs, list(map(settings, runs)), setting)


def unique_labels(runs: Sequence[RunFiles]) -> list[str]:
    """Return a unique label for each run: with partition, seed, folder or number if necessary."""
    unique = labels(runs)
    parts = (
        lambda run: run.partition,
        lambda run: f"seed {run.record.get('seed')}",
        lambda run: run.path.name,
        lambda run: str(run.path),
    )

    # from the most informative to what always distinguishes, each only for labels that are still equal
    for part in parts:
        for label in [label for label, count in Counter(unique).items() if count > 1]:
            places = [i for i, name in enumerate(unique) if name == label]
            if len({part(runs[i]) for i in places}) > 1:
                for i in places:
                    unique[i] = f"{label}, {part(runs[i])}"

    count = Counter(unique)
    labelled = []
    for i, label in enumerate(unique, 1):
        labelled.append(f"{label} ({i})" if count[label] > 1 else label)

    return labelled


def settings(run: RunFiles) -> dict[str, object]:
    """Return the settings that affect a run's performance beside its method and options."""
    values = {}
    # records of earlier versions lack later settings
    for name in _SETTINGS:
        if name in run.record:
            values[name] = run.record[name]

    return {**values, **(run.record.get("config") or {})}


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
