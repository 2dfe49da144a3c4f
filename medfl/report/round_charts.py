"""A report's charts of the rounds: learning curves and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medfl.evaluation import metrics
from medfl.report import charts
from medfl.report.charts import Chart
from medfl.report.run_files import MODEL_KINDS, RunFiles

_COSTS = (
    ("Seconds a round", 1, (
        ("received", "seconds_train", "training"), ("personal", "seconds_server", "server"),
        ("local", "seconds_eval", "evaluation"),
    )),
    ("Megabytes a round", 1e6, (
        ("received", "bytes_up", "to the server"), ("personal", "bytes_down", "to the sites"),
    )),
)  # fmt: skip
"""Title, unit, and of each part its colour on the page, its entry of a round and what it is."""


def learning_curves(run: RunFiles) -> list[Chart]:
    """Return the charts that have data: the key metric with a band over the sites, and the training loss."""
    rounds = run.rounds
    key = run.key
    judged = run.judged
    numbers = [entry["round"] for entry in rounds]
    # the judged model only, as in the tables: what sites have before the average is no model of theirs
    curves = {judged: [_metric(entry, "val", key) for entry in rounds]}
    site_values = []
    for entry in rounds:
        site_values.append([_metric(site, judged, key) for site in _site_entries(entry)])

    chance = None
    if key == "balanced_accuracy" and run.classes:
        chance = 1 / len(run.classes)

    bounded = key in metrics.METRICS and metrics.is_share(key)
    title = f"{run.title(key)} on the validation set"
    svg = charts.lines(
        title, numbers, curves, site_values, band_of=judged, bounded=bounded, chance=chance
    )
    model = dict(MODEL_KINDS)[judged]
    legend = [(judged, model)]
    caption = ""
    if any(map(any, site_values)):
        legend.append(("band", f"{model.lower()}, lowest to highest site"))
        caption = "Line: all validation images pooled. Band: each site's own validation images."

    if chance is not None:
        caption += " Dotted: guessing."

    scores = Chart(title, legend, svg, caption)
    site_losses = []
    for entry in rounds:
        site_losses.append([site.get("train_loss") for site in _site_entries(entry)])

    mean = {judged: [entry.get("train_loss") for entry in rounds]}
    svg = charts.lines("Training loss", numbers, mean, site_losses, band_of=judged)
    legend = [(judged, "mean over the cohort"), ("band", "lowest to highest site")]
    caption = "The method's own loss, as the sites report it while training."
    losses = Chart("Training loss", legend, svg, caption)
    return [chart for chart in (scores, losses) if chart.svg is not None]


def costs(run: RunFiles) -> list[Chart]:
    """Return the charts of seconds and megabytes of each round, where the rounds have them."""
    rounds = run.rounds
    drawn = list[Chart]()
    numbers = [entry["round"] for entry in rounds]
    for title, unit, names in _COSTS:
        parts = {colour: [entry.get(name) for entry in rounds] for colour, name, _ in names}
        legend = [(colour, text) for colour, _, text in names]
        if numbers and (svg := charts.stacked(title, numbers, parts, unit)) is not None:
            drawn.append(Chart(title, legend, svg))

    return drawn


def _metric(entry: Mapping[str, Any], group: str, metric: str) -> float | None:
    return (entry.get(group) or {}).get(metric)


def _site_entries(entry: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return tuple((entry.get("sites") or {}).values())
