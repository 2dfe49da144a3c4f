"""Several runs of one bundle on one HTML page, side by side, and a comparison's folder: metrics, sites and costs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from medfl import methods
from medfl.compare.checks import MUST_AGREE, require_same
from medfl.compare.comparison import Comparison
from medfl.compare.cost_curves import embedded
from medfl.compare.labels import TRAINING, unique_labels
from medfl.compare.left_out import notes, rows_of, table
from medfl.compare.sites import matrices
from medfl.compare.tables import all_tables
from medfl.core import InputError, formatted_table, map_values
from medfl.evaluation import bootstrap, metrics, told_by
from medfl.report import RunFiles, charts
from medfl.report.charts import Chart
from medfl.report.differences import between_models
from medfl.report.formatting import setting
from medfl.report.page import context
from medfl.report.prediction_analysis import PredictionAnalysis, analyse_predictions
from medfl.report.run_files import MODEL_KINDS
from medfl.report.templating import rendered
from medfl.storage import GRID, write_atomic

ByRound = Mapping[int, float | None]  # round -> value, None or missing if there is none

_SETTINGS = (*TRAINING, "eval_every", "messages", "device")


def write_page(folders: Sequence[Path], file: Path) -> Path:
    """Write one page of these run folders, unfinished ones too, and return its path.

    Raises:
        InputError: a folder is not a run's or damaged, the file is not HTML, or the runs are of different bundles,
            tasks, key metrics or kinds of data, or too many to be distinguished.
    """
    if file.suffix.lower() not in (".html", ".htm"):
        raise InputError(
            f"--out {file}", "the page is an HTML file", f"give {file.with_suffix('.html')}"
        )

    runs = [RunFiles(Path(folder)) for folder in folders]
    if len(runs) == 1:
        name = "report.html.j2"
        values = context(runs[0])
    else:
        name = "several.html.j2"
        values = _context(runs)

    page = rendered(name, values)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, page)

    return file


def over_rounds(
    title: str, legend: Sequence[tuple[str, str]], curves: Mapping[str, ByRound], caption: str = ""
) -> Chart:
    """Return a chart with a line for each curve, by colour name; without a picture if no curve has a value."""
    numbers = sorted(set().union(*curves.values()))
    lines = {}
    for tone, curve in curves.items():
        lines[tone] = list(map(curve.get, numbers))

    # no band of sites: it would hide lines of several runs
    svg = charts.lines(title, numbers, lines, [[] for _ in numbers], band_of="local")
    return Chart(title, legend, svg, caption)


def _check(runs: Sequence[RunFiles]) -> None:
    classes = {"classes": lambda run: ", ".join(run.classes)}
    require_same(
        runs,
        "one page compares like with like",
        "write a page of each kind",
        {**MUST_AGREE, **classes},
    )
    if len(runs) > charts.TONES:
        raise InputError(
            f"{len(runs)} runs",
            f"one page tells {charts.TONES} apart",
            f"give {charts.TONES} at most; medfl compare makes tables of more",
        )


class _Entry(NamedTuple):
    """A run on the page: its name, colour, row of the table of runs, and test predictions if any."""

    run: RunFiles
    name: str
    tone: str
    row: Mapping[str, object]
    analysis: PredictionAnalysis | None


def _context(runs: Sequence[RunFiles]) -> dict[str, object]:
    _check(runs)
    first = runs[0]
    entries = []
    for i, (run, name) in enumerate(zip(runs, unique_labels(runs), strict=True)):
        analysis = analyse_predictions(run)
        entries.append(
            _Entry(run, name, f"tone-{i}", _row(run, name, f"tone-{i}", analysis), analysis)
        )

    titles = {run.title(first.key) for run in runs}
    if len(titles) == 1:
        key_title = titles.pop()
    else:
        key_title = metrics.title(first.key)

    checksums = {str(run.record["data"].get("checksum") or "") for run in runs}
    same_images = len(checksums) == 1
    differences = []
    confusions = []
    calibrations = []
    silent = []
    for entry in entries:
        # paired differences need the same test cases, so runs on other images have none
        if same_images and entry.run is not first:
            difference = between_models(entry.run, first)
            if difference is not None:
                differences.append((entry.row, difference))

        if entry.analysis is None:
            silent.append(entry.name)
            continue

        if confusion := entry.analysis.confusion():
            confusions.append((entry.name, confusion))

        calibration = entry.analysis.calibration()
        if calibration is not None:
            calibrations.append((entry.name, entry.tone, calibration))

    return {
        "first": first,
        "key_title": key_title,
        "higher": metrics.higher_is_better(first.key),
        "rows": [entry.row for entry in entries],
        "differences": differences,
        "differing": _differing(runs),
        "same_images": same_images,
        "level": f"{100 * bootstrap.LEVEL:g} %",
        "learning": _learning(entries),
        "cost_curves": embedded(runs),
        "sites": _sites(entries),
        "confusions": confusions,
        "roc": _roc(entries),
        "calibrations": calibrations,
        "silent": silent,
        "undefined": told_by((entry.name, entry.run.said) for entry in entries),
    }


def _row(
    run: RunFiles, name: str, tone: str, analysis: PredictionAnalysis | None
) -> dict[str, object]:
    """Return a run's row of the table of runs."""
    scores = {when: values for kind, when, values in run.pooled() if kind == run.judged}
    summary = run.summary
    sent = 0
    seconds = 0
    # an unfinished run has no summary: its rounds are summed instead
    entries = run.rounds
    if summary:
        entries = [summary]

    for entry in entries:
        sent += entry.get("bytes_up", 0) + entry.get("bytes_down", 0)
        seconds += entry.get("seconds", 0)

    ends = None
    if analysis and run.finished:
        ends = analysis.intervals.get(run.key)

    return {
        "name": name,
        "tone": tone,
        "run": run.record,
        "done": len(run.rounds),
        "finished": run.finished,
        "judged": dict(MODEL_KINDS)[run.judged],
        "sites": len(run.site_names),
        "last": (scores.get("last") or {}).get(run.key),
        "best": (scores.get("best") or {}).get(run.key),
        "ends": ends,
        "spread": run.spread(run.judged, run.key),
        "bytes": sent,
        "seconds": seconds,
        "weights": summary.get("weights_sha256"),
    }


def _differing(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Return the settings in which the runs differ, each with its value in every run."""
    by_run = []
    defaults = {}
    for run in runs:
        values = {}
        for name in _SETTINGS:
            if name in run.record:
                values[name] = setting(run.record[name])

        values |= {"partition": run.partition, "seed": str(run.record.get("seed"))}
        for section, kind in (("options", "option"), ("config", "config")):
            for name, value in (run.record.get(section) or {}).items():
                values[f"{name} ({kind})"] = setting(value)

        by_run.append(values)
        for name, value in _defaults(run).items():
            defaults[f"{name} (option)"] = setting(value)

    rows = []
    for name in dict.fromkeys(chain.from_iterable(by_run)):
        texts = [values.get(name, "–") for values in by_run]
        # a run without an option equals a run with the option's default
        if len(set(texts)) > 1 and not set(texts) <= {"–", defaults.get(name, "")}:
            rows.append((name, texts))

    return rows


def _defaults(run: RunFiles) -> dict[str, object]:
    """Return the option defaults of a shipped method; {} for others, whose modules a report does not import."""
    if run.method not in methods.names():
        return {}
    options = methods.options_of(methods.method_class(run.method))
    return {option["name"]: option["default"] for option in options}


def _learning(entries: Sequence[_Entry]) -> list[Chart]:
    """Draw the runs' key metric and loss over the rounds."""
    key = entries[0].run.key
    legend = []
    scores = {}
    losses = {}
    for entry in entries:
        legend.append((entry.tone, entry.name))
        rounds = entry.run.rounds
        scores[entry.tone] = {row["round"]: (row.get("val") or {}).get(key) for row in rounds}
        losses[entry.tone] = {row["round"]: row.get("train_loss") for row in rounds}

    drawn = [
        over_rounds(f"{metrics.title(key)} on the validation set", legend, scores),
        over_rounds(
            "Training loss",
            legend,
            losses,
            "Each method's own loss: compare runs of one method only.",
        ),
    ]
    return [chart for chart in drawn if chart.svg is not None]


def _sites(entries: Sequence[_Entry]) -> dict[str, object] | None:
    """Return each site's metric in each run, None if the runs have different sites."""
    if len({tuple(entry.run.site_names) for entry in entries}) > 1:
        return None

    columns = _columns(entries)
    if not any(entry.run.finished for entry in entries):
        return None

    first = entries[0].run
    sizes = list(map(_sizes, entries))
    rows = []
    scale = 1.0  # full length of the bars
    for site, (train, test) in sizes[0].items():
        values = [(tone, by_site.get(site)) for tone, by_site in columns]
        rows.append((site, train, test, values))
        for _, by_site in columns:
            scale = max(scale, by_site.get(site, scale))

    return {
        "rows": rows,
        "scale": scale,
        "local": any(tone == "local" for tone, _ in columns),
        "classes_of": {site: first.classes_of(site) for site in first.site_names},
        "same": all(sizes_of_run == sizes[0] for sizes_of_run in sizes),
    }


def _sizes(entry: _Entry) -> dict[str, tuple[int, int]]:
    """Return each site's training and test items."""
    run = entry.run
    sizes = {}
    for site in run.site_names:
        sizes[site] = (run.size(site, "train"), run.size(site, "test"))
    return sizes


def _columns(entries: Sequence[_Entry]) -> list[tuple[str, dict[str, float]]]:
    """Return (colour, site -> value) for each bar of a site: those of the runs and of their Local references.

    A Local reference shared by all runs comes last, that of a single run after the run; one that is on the page as a
    run is omitted.
    """
    runs = []
    references = []
    shown = []
    for run, _, tone, *_ in entries:
        by_site = run.site_values(run.judged, run.key)
        runs.append((tone, by_site))
        references.append(run.site_values("local", run.key))
        if run.method == "local":
            shown.append(by_site)

    first = references[0]
    # runs with the same seed and partition have the same Local models: one bar suffices
    if first and all(by_site == first for by_site in references):
        return runs if first in shown else [*runs, ("local", first)]

    columns = []
    for column, reference in zip(runs, references, strict=True):
        columns.append(column)
        if reference and reference not in shown:
            columns.append(("local", reference))

    return columns


def _roc(entries: Sequence[_Entry]) -> dict[str, object] | None:
    """Draw each run's curve: that of the second of two classes, else the mean over the classes."""
    by_tone = {}
    rows = []
    title = ""
    for entry in entries:
        analysis = entry.analysis
        drawn = analysis and analysis.roc()
        if not analysis or not drawn:
            continue

        area = drawn["mean"]
        if area:
            by_tone[entry.tone] = area["curve"]
            noun = "classes" if analysis.is_classification else "findings"
            title = title or f"Mean ROC curve over the {noun}"
        else:
            area = drawn["rows"][0]
            by_tone[entry.tone] = (analysis.curves[0].fpr, analysis.curves[0].tpr)
            # with two classes the curves mirror each other: one suffices
            title = title or f"ROC curve of {area['name']}"

        rows.append((entry.name, entry.tone, area))

    if not rows:
        return None

    return {"title": title, "svg": charts.roc(title, by_tone), "rows": rows}


# A comparison's folder as one HTML page: its tables, learning curves and costs.

_BASE = "fedavg"  # the others are tested against it if it is present


def is_grid(folder: Path) -> bool:
    """Tell whether `medfl compare` wrote a folder."""
    return (folder / GRID).is_file()


def runs_of(folder: Path) -> list[RunFiles]:
    """Return the runs in a comparison's folder, including unfinished ones, sorted by name."""
    return [RunFiles(file.parent) for file in sorted(folder.glob("*/*/seed-*/run.json"))]


def write_grid_page(folder: Path) -> Path:
    """Write `report.html` into a comparison's folder and return its path.

    Raises:
        InputError: none of its runs is finished and scored, or one is damaged.
    """
    runs = runs_of(folder)
    finished = [run for run in runs if run.summary]
    if not finished:
        raise InputError(
            f"{folder} with 0 finished runs, none of them scored",
            "a comparison has finished runs",
            "repeat its medfl compare, which runs what is missing",
        )

    path = folder / "report.html"
    write_atomic(path, rendered("grid.html.j2", _grid_context(Comparison(finished), len(runs))))
    return path


def _grid_context(comparison: Comparison, begun: int) -> dict[str, object]:
    methods = comparison.methods
    if _BASE in methods:
        against = _BASE
    else:
        against = methods[0]

    tables = []
    for title, text in all_tables(comparison, against, against, "html"):
        tables.append((title, Markup(text)))  # noqa: S704

    costs = []
    for partition in comparison.partitions:
        picture = embedded(comparison.runs(partition))
        if picture:
            costs.append((partition, *picture))

    left_out = rows_of(comparison)
    return {
        "comparison": comparison,
        "share": metrics.is_share(comparison.key),
        "begun": begun,
        "against": against,
        "tables": tables,
        "left_out": left_out and Markup(formatted_table(*table(left_out), "html")),  # noqa: S704
        "left_out_notes": left_out and notes(left_out),
        "cross_site": list(matrices(comparison)),
        "learning": [_grid_learning(comparison, partition) for partition in comparison.partitions],
        "costs": costs,
    }


def _grid_learning(comparison: Comparison, partition: str) -> Chart:
    """Draw each method's validation metric over the rounds, the mean over its seeds."""
    rows = comparison.on(partition)
    curves = {}
    legend = []
    personal = []
    # the page has no more colours
    for i, row in enumerate(rows[: charts.TONES]):
        by_round = defaultdict(list)
        for run in row.runs.values():
            for number, _, _, value in run.progress():
                # by round, not by index: seeds may have been evaluated in different rounds
                by_round[number].append(value)

        curves[f"tone-{i}"] = map_values(statistics.fmean, by_round)
        legend.append((f"tone-{i}", row.method))
        if any(run.judged == "personal" for run in row.runs.values()):
            personal.append(row.method)

    caption = "Lines are means over the seeds."
    if len(rows) > len(legend):
        caption += f" {len(rows) - len(legend)} more methods are not drawn."

    if personal:
        caption += f" Each site's own model on the site's own images, which is another question: {', '.join(personal)}."

    return over_rounds(
        f"{metrics.title(comparison.key)} on the validation set, {partition}",
        legend,
        curves,
        caption,
    )
