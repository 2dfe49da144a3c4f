"""report.html of a run: the template's context, and the file."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from medfl.core.settings import COMPUTING, SETTINGS
from medfl.core.task import SECTIONS
from medfl.evaluation import bootstrap, metrics
from medfl.evaluation.mask_metrics import slug
from medfl.report import folds, round_charts, saved_pictures
from medfl.report.differences import LEAST_OF_CLASS, Differences
from medfl.report.formatting import setting
from medfl.report.prediction_analysis import analyse_predictions
from medfl.report.run_files import MODEL_KINDS, RunFiles
from medfl.report.templating import environment
from medfl.storage.files import write_atomic
from medfl.storage.places import FOLDS
from medfl.storage.run_documents import damaged
from medfl.storage.run_reader import SUMMARY_KINDS

_SHOWN = (
    "key",
    "judged",
    "personal_model",
    "phantom",
    "public",
    "finished",
    "rise",
    "rounds",
    "summary",
)
"""What the page is given of `RunFiles` by the same name."""


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run folder, or that of a cross-validation, and return its path.

    The page needs nothing but itself: no script, no file, no network. The same folder gives the same bytes.

    Raises:
        InputError: the folder is not a run's, or a file in it is damaged.
    """
    if (Path(run_folder) / FOLDS).is_file():
        return folds.write(Path(run_folder)).path / "report.html"

    run = RunFiles(Path(run_folder))
    page = environment().get_template("report.html.j2").render(context(run))
    path = run.path / "report.html"
    write_atomic(path, page.encode())

    return path


def context(run: RunFiles) -> dict[str, Any]:
    """Return what the page of one run shows.

    Raises:
        InputError: a picture in the run folder is damaged.
    """
    record = run.record
    judged = run.judged
    higher = metrics.higher_is_better(run.key)
    kinds = [(kind, title, run.site_values(kind, run.key)) for kind, title in MODEL_KINDS]
    kinds = [entry for entry in kinds if entry[2]]
    values = {kind: by_site for kind, _, by_site in kinds}
    both = [site for site in values.get(judged, {}) if site in values.get("local", {})]

    if judged != "local":
        gains = {site: values[judged][site] - values["local"][site] for site in both}
    else:
        gains = {}

    differences = Differences(run)
    tested = Counter(run.predictions.sites if run.predictions else ())
    pooled = run.pooled()
    picture = run.path / "partition.png"

    return {
        "run": {**record, "data": {**record["data"], "notes": _notes(record["data"])}},
        "titles": {name: run.title(name) for name in (run.key, *run.metric_names())},
        "higher": higher,
        **{name: getattr(run, name) for name in _SHOWN},
        "sites": [
            (site, *(run.size(site, section) for section in SECTIONS)) for site in run.site_names
        ],
        **{kind: (run.summary or {}).get(kind) or {} for kind in ("labels", "channels")},
        "metric_names": run.metric_names(),
        "definitions": metrics.METRICS,
        "pooled": pooled,
        "pooled_titles": {kind: title for kind, (_, title, _) in SUMMARY_KINDS.items()},
        "headline": {when: entry for kind, when, entry in pooled if kind == judged},
        "kinds": kinds,
        "spreads": [
            (kind, title, metrics.spread(by_site, higher)) for kind, title, by_site in kinds
        ],
        "scale": max([1.0, *(value for _, _, by_site in kinds for value in by_site.values())]),
        "gains": gains,
        "everybody": differences.everybody(),
        "against_local": differences.sentence(),
        "differences": [
            (
                site,
                tested[site],
                differences.against_local.get(site),
                differences.against_others.get(site),
            )
            for site in run.site_names
            if site in differences.against_local or site in differences.against_others
        ],
        "pooled_difference": differences.pooled,
        "learning": round_charts.learning_curves(run),
        "costs": round_charts.costs(run),
        "traffic": _traffic(run),
        "changes": _changes(run),
        "class_counts": _class_counts(run),
        "partition_picture": b64encode(picture.read_bytes()).decode()
        if picture.is_file()
        else None,
        **_predicted(run),
        **_pictures(run),
        "settings": _settings(record),
    }


def _notes(data: Mapping[str, Any]) -> list[str]:
    """Return the remarks on the images without the path of the data folder, because reports are shared."""
    folder = str(data.get("folder") or "")
    return [
        note.replace(folder, "the data folder") if folder else note
        for note in data.get("notes") or ()
    ]


def _predicted(run: RunFiles) -> dict[str, Any]:
    """Return what the page shows of the test predictions."""
    analysis = analyse_predictions(run)
    last = (run.summary or {}).get("rounds")  # the round of the predictions
    return {
        "classified": bool(run.classes) and run.record["task"] == "classification",
        "predictions": analysis is not None,
        **_structures(run),
        "intervals": analysis.intervals if analysis else {},
        "intervals_method": analysis.describe_intervals()
        if analysis and analysis.intervals
        else "",
        "level": f"{100 * bootstrap.LEVEL:g} %",
        "confusion": analysis.confusion() if analysis else None,
        "confusions": analysis.confusions() if analysis else [],
        "roc": analysis.roc() if analysis else None,
        "calibration": analysis.calibration() if analysis else None,
        "worst": analysis.worst() if analysis else [],
        "each": analysis.each if analysis else {},
        "few_cases": analysis.cases() if analysis else None,
        "least": bootstrap.LEAST,
        "least_of_class": LEAST_OF_CLASS,
        "exact": [
            when
            for kind, when, values in run.pooled()
            if kind == run.judged and values.get("round") == last
        ],
    }


def _structures(run: RunFiles) -> dict[str, Any]:
    """Return what the page shows of single structures: on all test cases, and their Dice at each site."""
    kinds = run.structure_metrics
    columns = [
        [run.site_values(run.judged, f"{kind}_{slug(name)}") for kind in ("dice", "cases")]
        for name in run.structures
    ]

    return {
        "structure_titles": [run.title(kind) for kind in kinds],
        "structures": [
            (name, scores.get("cases"), [(scores.get(kind), f"{kind}_{slug(name)}") for kind in kinds])
            for name, scores in run.structures.items()
        ],
        "structure_sites": [
            (site, [(dice.get(site), int(cases.get(site, 0))) for dice, cases in columns])
            for site in run.site_names if any(site in cases for _, cases in columns)
        ],
    }  # fmt: skip


def _traffic(run: RunFiles) -> dict[str, Any] | None:
    """Return the mean bytes of a site's messages in a round, how many they are, and the bytes before round 1."""
    rows = []
    for entry in run.rounds:
        sites = len(entry.get("cohort") or ()) - len(entry.get("left_out") or ())
        if sites > 0 and "bytes_up" in entry and "bytes_down" in entry:
            rows.append((entry["bytes_up"], entry["bytes_down"], sites))

    visits = sum(sites for *_, sites in rows)
    if not visits:
        return None

    up = sum(row[0] for row in rows)
    down = sum(row[1] for row in rows)
    before = (run.summary or {}).get("bytes_up", up) - up
    return {
        "up": up / visits,
        "down": down / visits,
        "visits": visits,
        "rounds": len(rows),
        "before": before if run.finished and before > 0 else 0,
        "messages": run.record.get("messages", "lossless"),
    }


def _changes(run: RunFiles) -> list[tuple[str, float | None, float, float, int, int]]:
    """Return site, median norm of its changes, shares of the mean by its images and as counted, rounds cut, rounds.

    Of rules that bound norms or shares; without a bound of norms there is no norm.
    """
    rows = []
    for site in run.site_names:
        observed = [
            seen for entry in run.rounds if f"share/{site}" in (seen := entry.get("observed") or {})
        ]
        if observed:
            norms = [one[f"norm/{site}"] for one in observed if "clip" in one]
            said = fmean(one.get(f"said/{site}", one[f"share/{site}"]) for one in observed)
            shortened = sum(one[f"norm/{site}"] > one["clip"] for one in observed if "clip" in one)
            counted = fmean(one[f"share/{site}"] for one in observed)
            rows.append(
                (site, median(norms) if norms else None, said, counted, shortened, len(observed))
            )

    return rows


def _settings(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return every setting of the run as text; not the data folder, because reports are shared."""
    computing = [name for name, one in SETTINGS.items() if one.group == COMPUTING]
    names = ("runtime", "seed", "device", *computing, "threads")
    rows = [(name, setting(run[name])) for name in names if name in run]
    for section in ("options", "config"):
        rows += [
            (f"{name} ({section[:6]})", setting(value))
            for name, value in (run.get(section) or {}).items()
        ]

    versions = dict(run.get("versions") or {})
    rows += [(name, setting(value)) for name, value in versions.items()]
    for entry in run.get("resumed") or ():
        other = {
            name: value for name, value in entry["versions"].items() if versions.get(name) != value
        }
        rows += [
            (f"{name}, from round {entry['round'] + 1}", setting(value))
            for name, value in other.items()
        ]
        versions |= other

    return rows


def _class_counts(run: RunFiles) -> dict[str, Any] | None:
    counts = run.record.get("site_class_counts") or {}
    classes = run.classes
    rows = [(site, counts[site]) for site in run.site_names if site in counts]
    if not rows or any(len(row) != len(classes) for _, row in rows):
        return None
    return {"classes": classes, "rows": rows, "most": max(1, *(max(row) for _, row in rows))}


def _pictures(run: RunFiles) -> dict[str, Any]:
    try:
        models, more_grids = saved_pictures.model_pictures(run.path)
        masks, more_sites = saved_pictures.mask_pictures(run.path)
        worst = saved_pictures.worst_images(run.path)
    except OSError as error:
        raise damaged(run.path / "pictures", f"cannot be shown: {error}") from None

    return {
        "pictures": [picture.embedded for picture in models],
        "more_pictures": more_grids,
        "segmented": [picture.embedded for picture in masks],
        "more_sites": more_sites,
        "worst_images": [picture.embedded for picture in worst],
    }
