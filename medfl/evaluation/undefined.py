"""Messages about a metric without a value: on which images, how often, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from medfl.core import listed
from medfl.evaluation.findings import LEAST
from medfl.evaluation.metrics import METRICS, Cases

NAMED = 6  # maximum of rounds, sites, seeds or folds in a line


def reason(name: str, metrics: Mapping[str, object] | None, cases: Cases | None) -> str:
    """Return why a metric is missing for these cases, "" if it is not."""
    if cases is None or not len(cases):
        return "there are none"

    metrics = metrics or {}
    if name in metrics:
        return ""
    if name == "auroc" and cases.is_classification:
        return "all of them are of one class"
    if name not in METRICS and name not in cases.values:
        return "the bundle's own metric has no value"
    if "findings" in cases.values:
        least = LEAST if "decisions" in cases.values else 1
        return f"no finding is known to be there in {least} of them and absent in {least}"
    if "target" in cases.values:
        unknown = cases.values["target"].isnan().all(0)
        if unknown.all():
            return "the number of none is known"
        if unknown.any():
            return f"{int(unknown.sum())} of the {len(unknown)} numbers are known of none"

    if name not in cases.values:
        names = metrics.keys() - {"round", "classes"}
        return f"it is none of {', '.join(sorted(names))}"

    structures = [values for column, values in cases.values.items() if column.startswith("dice_")]
    if structures and all(values.isnan().all() for values in structures):
        return "no reference mask has a structure"

    return "none of them has it"


def of_rounds(name: str, reasons: Mapping[int, str]) -> list[str]:
    """Return notes on a validation metric; `reasons` say why scored rounds lack it, "" if they do not."""
    lacking = []
    for number, why in reasons.items():
        if why:
            lacking.append(str(number))

    if not lacking:
        return []

    where = f"{len(lacking)} of {len(reasons)} rounds"
    best = "there is no best round"
    if len(lacking) < len(reasons):
        where += f" ({listed(lacking, NAMED)})"
        best = "the best round is one of the others"

    why = "; ".join(dict.fromkeys(filter(None, reasons.values())))
    return [f"{name} is undefined on the validation images in {where}: {why}; {best}"]


def of_tests(
    name: str, metrics: Mapping[str, object] | None, cases: Cases | None, sites: Mapping[str, str]
) -> list[str]:
    """Return notes on a metric that test images lack: all of them, some, or those of some sites.

    Args:
        name: of the metric.
        metrics: of all test images.
        cases: their outcomes.
        sites: site -> why its images lack the metric, "" if they have it.
    """
    if why := reason(name, metrics, cases):
        return [f"{name} is undefined on the test images: {why}"]

    lines = []
    if metrics and cases is not None and f"{name}_cases" in metrics:
        scored = f"{metrics[f'{name}_cases']:.0f} of {len(cases)} test images"
        lines.append(f"{name} is the mean over {scored}: the others have none")

    by_reason: dict[str, list[str]] = {}
    for site, why in sites.items():
        if why:
            by_reason.setdefault(why, []).append(site)

    if by_reason:
        where = ", ".join(f"{listed(names, NAMED)} ({why})" for why, names in by_reason.items())
        count = list(sites.values()).count("")
        lines.append(
            f"{name} is undefined on the test images of {where}; the mean is over {count} of {len(sites)} sites"
        )

    return lines


def told_by(said: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """Return each line once, with the first three who say it; `said` has pairs of speaker and lines."""
    names: dict[str, list[str]] = {}
    for name, lines in said:
        for line in lines:
            names.setdefault(line, []).append(name)

    return [f"{line} ({listed(sayers, 3, '; ')})" for line, sayers in names.items()]
