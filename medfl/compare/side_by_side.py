"""Several runs of one bundle on one HTML page, side by side: metrics, sites and costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medfl import methods
from medfl.compare.checks import MUST_AGREE as SAME
from medfl.compare.checks import require_same
from medfl.compare.cost_curves import embedded
from medfl.compare.labels import unique_labels
from medfl.core.errors import InputError
from medfl.evaluation import bootstrap, metrics, roc
from medfl.report import RunFiles, charts
from medfl.report.charts import Chart
from medfl.report.differences import between_models
from medfl.report.formatting import setting
from medfl.report.page import context
from medfl.report.prediction_analysis import PredictionAnalysis, analyse_predictions
from medfl.report.run_files import MODEL_KINDS
from medfl.report.templating import environment
from medfl.storage.files import write_atomic

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
    name, values = (
        ("report.html.j2", context(runs[0]))
        if len(runs) == 1
        else ("several.html.j2", _context(runs))
    )
    page = environment().get_template(name).render(values)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, page.encode())

    return file


def _check(runs: Sequence[RunFiles]) -> None:
    classes = {"classes": lambda run: ", ".join(run.classes)}
    require_same(
        runs, "one page compares like with like", "write a page of each kind", {**SAME, **classes}
    )
    if len(runs) > charts.TONES:
        raise InputError(
            f"{len(runs)} runs",
            f"one page tells {charts.TONES} apart",
            f"give {charts.TONES} at most; medfl compare makes tables of more",
        )


def _context(runs: Sequence[RunFiles]) -> dict[str, Any]:
    _check(runs)
    key = runs[0].key
    higher = metrics.higher_is_better(runs[0].key)
    labels = unique_labels(runs)
    analyses = [analyse_predictions(run) for run in runs]
    rows = [
        _row(run, label, f"tone-{i}", analyses[i])
        for i, (run, label) in enumerate(zip(runs, labels, strict=True))
    ]
    analysed = [
        (row, analysis)
        for row, analysis in zip(rows, analyses, strict=True)
        if analysis is not None
    ]
    titles = {run.title(key) for run in runs}
    checksums = {str(run.record["data"].get("checksum") or "") for run in runs}

    return {
        "run": runs[0].record,
        "key": key,
        "key_title": titles.pop() if len(titles) == 1 else metrics.title(key),
        "higher": higher,
        "phantom": runs[0].phantom,
        "rows": rows,
        "differences": [
            (row, difference)
            for row, run in zip(rows[1:], runs[1:], strict=True)
            if len(checksums) == 1 and (difference := between_models(run, runs[0])) is not None
        ],
        "differing": _differing(runs),
        "same_images": len(checksums) == 1,
        "classes": runs[0].classes,
        "level": f"{100 * bootstrap.LEVEL:g} %",
        "learning": _learning(runs, labels),
        "cost_curves": embedded(runs),
        "sites": _sites(runs),
        "confusions": [(row["name"], analysis.confusion()) for row, analysis in analysed],
        "roc": _roc(analysed),
        "calibrations": [
            (row["name"], row["tone"], calibration)
            for row, analysis in analysed
            if (calibration := analysis.calibration()) is not None
        ],
        "silent": [
            row["name"] for row, analysis in zip(rows, analyses, strict=True) if analysis is None
        ],
    }


def _row(
    run: RunFiles, name: str, tone: str, analysis: PredictionAnalysis | None
) -> dict[str, Any]:
    """Return a run's row of the table of runs."""
    judged = {when: values for kind, when, values in run.pooled() if kind == run.judged}
    summary = run.summary or {}
    sent = [entry.get("bytes_up", 0) + entry.get("bytes_down", 0) for entry in run.rounds]
    return {
        "name": name,
        "tone": tone,
        "run": run.record,
        "done": len(run.rounds),
        "finished": run.finished,
        "judged": dict(MODEL_KINDS)[run.judged],
        "sites": len(run.site_names),
        "last": (judged.get("last") or {}).get(run.key),
        "best": (judged.get("best") or {}).get(run.key),
        "ends": analysis.intervals.get(run.key) if analysis and run.finished else None,
        "spread": metrics.spread(
            run.site_values(run.judged, run.key), metrics.higher_is_better(run.key)
        ),
        "bytes": sum(summary.get(way, 0) for way in ("bytes_up", "bytes_down")) or sum(sent),
        "seconds": summary.get("seconds") or sum(entry.get("seconds", 0) for entry in run.rounds),
        "weights": summary.get("weights_sha256"),
    }


def _differing(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """Return the settings in which the runs differ, each with its value in every run."""
    by_run: list[dict[str, str]] = []
    for run in runs:
        values = {name: setting(run.record[name]) for name in _SETTINGS if name in run.record}
        values |= {"partition": run.partition, "seed": str(run.record.get("seed"))}
        for section in ("options", "config"):
            values |= {
                f"{name} ({section[:6]})": setting(v)
                for name, v in (run.record.get(section) or {}).items()
            }

        by_run.append(values)

    names = dict.fromkeys(name for values in by_run for name in values)
    table = [(name, [values.get(name, "–") for values in by_run]) for name in names]
    defaults = {
        f"{name} (option)": setting(value) for run in runs for name, value in _defaults(run).items()
    }
    return [
        row
        for row in table
        if len({*row[1]}) > 1 and not {*row[1]} <= {"–", defaults.get(row[0], "")}
    ]


def _defaults(run: RunFiles) -> dict[str, Any]:
    """Return the option defaults of a shipped method; {} for others, whose modules a report does not import."""
    if run.method not in methods.names():
        return {}
    return {
        entry["name"]: entry["default"]
        for entry in methods.options_of(methods.method_class(run.method))
    }


def _learning(runs: Sequence[RunFiles], labels: Sequence[str]) -> list[Chart]:
    """Draw the runs' key metric and loss over the rounds."""
    numbers = sorted({entry["round"] for run in runs for entry in run.rounds})
    read: tuple[tuple[str, Callable[[Mapping[str, Any]], float | None]], ...] = (
        (
            f"{metrics.title(runs[0].key)} on the validation set",
            lambda e: (e.get("val") or {}).get(runs[0].key),
        ),
        ("Training loss", lambda e: e.get("train_loss")),
    )
    legend = [(f"tone-{i}", name) for i, name in enumerate(labels)]
    drawn = list[Chart]()

    for title, value in read:
        lines = {}
        for i, run in enumerate(runs):
            by_round = {entry["round"]: value(entry) for entry in run.rounds}
            lines[f"tone-{i}"] = [by_round.get(number) for number in numbers]

        if numbers:
            svg = charts.lines(title, numbers, lines, [[] for _ in numbers], band_of="local")
        else:
            svg = None

        if svg is not None:
            if title == "Training loss":
                caption = "Each method's own loss: compare runs of one method only."
            else:
                caption = ""

            drawn.append(Chart(title, legend, svg, caption))

    return drawn


def _sites(runs: Sequence[RunFiles]) -> dict[str, Any] | None:
    """Return each site's metric in each run, None where the runs have different sites."""
    if len({tuple(run.site_names) for run in runs}) > 1:
        return None

    columns = _columns(runs)
    sizes = {
        tuple((run.size(site, "train"), run.size(site, "test")) for site in run.site_names)
        for run in runs
    }
    if not any(by_site for _, by_site in columns):
        return None

    first = runs[0]
    return {
        "rows": [
            (
                site,
                first.size(site, "train"),
                first.size(site, "test"),
                [(tone, of.get(site)) for tone, of in columns],
            )
            for site in first.site_names
        ],
        "scale": max([1.0, *(value for _, by_site in columns for value in by_site.values())]),
        "local": any(tone == "local" for tone, _ in columns),
        "same": len(sizes) == 1,
    }


def _columns(runs: Sequence[RunFiles]) -> list[tuple[str, dict[str, float]]]:
    """Return (colour, site -> value) of each bar of a site: those of the runs and of their Local references.

    A Local reference that all runs share comes last, one of a single run after that run; one that is on the page as a
    run is left out.
    """
    columns = [(f"tone-{i}", run.site_values(run.judged, run.key)) for i, run in enumerate(runs)]
    shown = [
        by_site for (_, by_site), run in zip(columns, runs, strict=True) if run.method == "local"
    ]
    references = [run.site_values("local", run.key) for run in runs]
    first = references[0]

    if first and all(by_site == first for by_site in references):
        if first in shown:
            return columns

        return [*columns, ("local", first)]

    beside = [
        [("local", by_site)] if by_site and by_site not in shown else [] for by_site in references
    ]
    return [
        column
        for column_of_run, local in zip(columns, beside, strict=True)
        for column in (column_of_run, *local)
    ]


def _roc(analysed: Sequence[tuple[Mapping[str, Any], PredictionAnalysis]]) -> dict[str, Any] | None:
    """Draw each run's curve: that of the second of two classes, else the mean of the classes'."""
    drawn = [
        (row, analysis.curves, entry) for row, analysis in analysed if (entry := analysis.roc())
    ]
    if not drawn:
        return None

    by_tone = {
        row["tone"]: roc.macro(curves) if entry["mean"] else (curves[0].fpr, curves[0].tpr)
        for row, curves, entry in drawn
    }
    table = [
        (row["name"], row["tone"], entry["mean"] or entry["rows"][0]) for row, _, entry in drawn
    ]
    first = drawn[0][2]
    one_class = "" if first["mean"] else first["rows"][0]["name"]

    if one_class:
        title = f"ROC curve of {one_class}"
    else:
        title = "Mean ROC curve over the classes"

    return {"title": title, "svg": charts.roc(title, by_tone), "rows": table}
