"""What a report draws of the rounds: learning curves and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medfl.evaluation import metrics
from medfl.report import charts
from medfl.report.run_folder import KINDS, POOLED, RunFolder

_PARTS = ("received", "personal", "local")  # the page's colours, here for the parts of a cost
_COSTS = (
    (
        "Seconds a round",
        1,
        (("seconds_train", "training"), ("seconds_server", "server"), ("seconds_eval", "evaluation")),
    ),
    ("Megabytes a round", 1e6, (("bytes_up", "to the server"), ("bytes_down", "to the sites"))),
)

Chart = dict[str, Any]
"""title, legend (colour and text pairs), svg, caption."""


def learning(folder: RunFolder) -> list[Chart]:
    """Return the curves that have data: the key metric with a band over the sites, and the training loss."""
    rounds, key, judged = folder.rounds, folder.key, folder.judged
    numbers = [entry["round"] for entry in rounds]
    classes = folder.run.get("classes") or ()
    curves = {
        kind: [_of(entry, f"val_{POOLED[kind][0]}", key) for entry in rounds] for kind in ("received", "personal")
    }
    if all(value is None for line in curves.values() for value in line):
        curves = {judged: [_of(entry, "val", key) for entry in rounds]}
    sites = [[_of(site, judged, key) for site in _sites(entry)] for entry in rounds]
    chance = 1 / len(classes) if key == "balanced_accuracy" and classes else None
    shown = [kind for kind, line in curves.items() if any(value is not None for value in line)]
    bounded = key in metrics.METRICS and metrics.higher_is_better(key)
    title = f"{folder.title(key)} on the validation set"
    svg = charts.lines(title, numbers, curves, sites, band_of=judged, bounded=bounded, chance=chance)
    band = [("band", f"{dict(KINDS)[judged].lower()}, lowest to highest site")] if any(_known(sites)) else []
    legend = [*((kind, dict(KINDS)[kind]) for kind in shown), *band]
    dotted = " Dotted: guessing." if chance is not None else ""
    said = "Lines: all validation images pooled. Band: each site's own validation images." if band else ""
    found = [(title, legend, svg, said + dotted)]
    losses = [[site.get("train_loss") for site in _sites(entry)] for entry in rounds]
    curve = {judged: [entry.get("train_loss") for entry in rounds]}
    svg = charts.lines("Training loss", numbers, curve, losses, band_of=judged)
    legend = [(judged, "mean over the cohort"), ("band", "lowest to highest site")]
    found.append(("Training loss", legend, svg, "The method's own loss, as the sites report it while training."))
    return [_chart(*entry) for entry in found if entry[2] is not None]


def costs(folder: RunFolder) -> list[Chart]:
    """Return seconds and megabytes of each round, where the rounds say them."""
    rounds, found = folder.rounds, []
    numbers = [entry["round"] for entry in rounds]
    for title, unit, names in _COSTS:
        parts = {
            colour: [entry.get(name) for entry in rounds] for colour, (name, _) in zip(_PARTS, names, strict=False)
        }
        legend = [(colour, text) for colour, (_, text) in zip(_PARTS, names, strict=False)]
        svg = charts.stacked(title, numbers, parts, unit) if numbers else None
        if svg is not None:
            found.append(_chart(title, legend, svg, ""))
    return found


def _chart(title: str, legend: Sequence[tuple[str, str]], svg: Any, caption: str) -> Chart:
    return {"title": title, "legend": legend, "svg": svg, "caption": caption}


def _known(sites: Sequence[Sequence[float | None]]) -> list[float]:
    return [value for values in sites for value in values if value is not None]


def _of(entry: Mapping[str, Any], group: str, metric: str) -> float | None:
    return (entry.get(group) or {}).get(metric)


def _sites(entry: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return tuple((entry.get("sites") or {}).values())
