"""Several runs of one bundle on one HTML page, side by side: metrics, sites and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from medfl import methods
from medfl.compare.checks import MUST_AGREE, require_same
from medfl.compare.cost_curves import embedded
from medfl.compare.labels import unique_labels
from medfl.core.errors import InputError
from medfl.evaluation import bootstrap, metrics
from medfl.evaluation.undefined import told_by
from medfl.report import RunFiles, charts
from medfl.report.charts import Chart
from medfl.report.differences import between_models
from medfl.report.formatting import setting
from medfl.report.page import context
from medfl.report.prediction_analysis import PredictionAnalysis, analyse_predictions
from medfl.report.run_files import MODEL_KINDS
from medfl.report.templating import rendered
from medfl.storage.files import write_atomic

ByRound = Mapping[int, float | None]  # round -> value, None or left out where there is none

_SETTINGS = (
    "rounds", "local_epochs", "batch_size", "lr", "lr_decay", "decay_per", "site_weights", "keep_optimizer", "cohort",
    "eval_every", "messages", "device",
)  # fmt: skip


def write_page(folders: Sequence[Path], file: Path) -> Path:
    """Write one page of these run folders, unfinished ones too, and return its path.

    Raises:
        InputError: a folder is not a run's or damaged, the file is no HTML file, or the runs are of different bundles,
            tasks, key metrics or kinds of data, or more than can be told apart.
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
    """Return a chart with a line for each curve, by colour name; without a picture where no curve has a value."""
    numbers = sorted({number for curve in curves.values() for number in curve})
    lines = {}
    for tone, curve in curves.items():
        lines[tone] = list(map(curve.get, numbers))

    # no band of sites: the lines of several runs would hide under theirs
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
    """A run on the page: its name, its colour, its row of the table of runs, and its test predictions if any."""

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
        # paired differences need the same test cases, so that runs on other images have none
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
        "run": first.record,
        "key": first.key,
        "key_title": key_title,
        "higher": metrics.higher_is_better(first.key),
        "phantom": first.phantom,
        "rows": [entry.row for entry in entries],
        "differences": differences,
        "differing": _differing(runs),
        "same_images": same_images,
        "classes": first.classes,
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
    summary = run.summary or {}
    # a run that is not finished has no summary: its rounds are added up instead
    sent = sum(summary.get(way, 0) for way in ("bytes_up", "bytes_down"))
    seconds = summary.get("seconds")
    if not sent:
        sent = sum(entry.get("bytes_up", 0) + entry.get("bytes_down", 0) for entry in run.rounds)

    if not seconds:
        seconds = sum(entry.get("seconds", 0) for entry in run.rounds)

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
        values = {name: setting(run.record[name]) for name in _SETTINGS if name in run.record}
        values |= {"partition": run.partition, "seed": str(run.record.get("seed"))}
        for section, kind in (("options", "option"), ("config", "config")):
            for name, value in (run.record.get(section) or {}).items():
                values[f"{name} ({kind})"] = setting(value)

        by_run.append(values)
        for name, value in _defaults(run).items():
            defaults[f"{name} (option)"] = setting(value)

    rows = []
    for name in dict.fromkeys(name for values in by_run for name in values):
        texts = [values.get(name, "–") for values in by_run]
        # a run without an option does not differ from a run with the option's default
        if len(set(texts)) > 1 and not set(texts) <= {"–", defaults.get(name, "")}:
            rows.append((name, texts))

    return rows


def _defaults(run: RunFiles) -> dict[str, object]:
    """Return the option defaults of a shipped method; {} for others, whose modules a report does not import."""
    if run.method not in methods.names():
        return {}
    return {
        entry["name"]: entry["default"]
        for entry in methods.options_of(methods.method_class(run.method))
    }


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
    """Return each site's metric in each run, None where the runs have different sites."""
    if len({tuple(entry.run.site_names) for entry in entries}) > 1:
        return None

    columns = _columns(entries)
    if not any(entry.run.finished for entry in entries):
        return None

    sizes = [
        [(run.size(site, "train"), run.size(site, "test")) for site in run.site_names]
        for run, *_ in entries
    ]
    rows = []
    scale = 1.0  # the bars' full length
    for site, (train, test) in zip(entries[0].run.site_names, sizes[0], strict=True):
        values = [(tone, by_site.get(site)) for tone, by_site in columns]
        rows.append((site, train, test, values))
        scale = max([scale, *(by_site[site] for _, by_site in columns if site in by_site)])

    return {
        "rows": rows,
        "scale": scale,
        "local": any(tone == "local" for tone, _ in columns),
        "classes_of": {site: entries[0].run.classes_of(site) for site in entries[0].run.site_names},
        "same": all(sizes_of_run == sizes[0] for sizes_of_run in sizes),
    }


def _columns(entries: Sequence[_Entry]) -> list[tuple[str, dict[str, float]]]:
    """Return (colour, site -> value) of each bar of a site: those of the runs and of their Local references.

    A Local reference that all runs share comes last, one of a single run after that run; one that is on the page as a
    run is left out.
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
    if first and all(by_site == first for by_site in references):
        return runs if first in shown else [*runs, ("local", first)]

    columns = []
    for column, reference in zip(runs, references, strict=True):
        columns.append(column)
        if reference and reference not in shown:
            columns.append(("local", reference))

    return columns


def _roc(entries: Sequence[_Entry]) -> dict[str, object] | None:
    """Draw each run's curve: that of the second of two classes, else the mean of the classes'."""
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
            title = title or f"ROC curve of {area['name']}"

        rows.append((entry.name, entry.tone, area))

    if not rows:
        return None

    return {"title": title, "svg": charts.roc(title, by_tone), "rows": rows}
