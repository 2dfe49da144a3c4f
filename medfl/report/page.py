"""The page: what the template is given, and the file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from medfl.core.settings import COMPUTING, SETTINGS
from medfl.core.storage import write_atomic
from medfl.evaluation import bootstrap, metrics
from medfl.report import drawn, overlays, pictures, words
from medfl.report.outcomes import outcomes
from medfl.report.run_folder import KINDS, POOLED, RunFolder, damaged


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run folder and return its path.

    The page needs nothing but itself: no script, no file, no network. The same folder gives the same bytes.

    Raises:
        InputError: the folder is not a run's, or a file in it is damaged.
    """
    folder = RunFolder.read(Path(run_folder))
    page = environment().get_template("report.html.j2").render(context(folder))
    path = folder.path / "report.html"
    write_atomic(path, page.encode())
    return path


@cache
def environment() -> jinja2.Environment:
    """Return the templates' environment: what is not in a template's context is an error, and names are text."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("medfl.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(number=words.number, count=words.count, bytes=words.size, interval=words.interval, sd=words.sd)
    made.filters.update(seconds=words.duration, signed=words.signed, title=metrics.title)
    return made


def context(folder: RunFolder) -> dict[str, Any]:
    """Return what the page of one run shows.

    Raises:
        InputError: a picture in the folder is damaged.
    """
    run, judged = folder.run, folder.judged
    higher = metrics.higher_is_better(folder.key)
    kinds = [(kind, title, folder.site_values(kind, folder.key)) for kind, title in KINDS]
    kinds = [entry for entry in kinds if entry[2]]
    values = {kind: known for kind, _, known in kinds}
    both = [site for site in values.get(judged, {}) if site in values.get("local", {})]
    sign = 1 if higher else -1
    gains = {site: values[judged][site] - values["local"][site] for site in both} if judged != "local" else {}
    pooled = folder.pooled()
    picture = folder.path / "partition.png"
    return {
        "run": {**run, "data": {**run["data"], "notes": _notes(run["data"])}},
        "key": folder.key,
        "titles": {name: folder.title(name) for name in (folder.key, *folder.metric_names())},
        "higher": higher,
        "judged": judged,
        "phantom": folder.phantom,
        "public": folder.public,
        "finished": folder.finished,
        "rounds": folder.rounds,
        "summary": folder.summary,
        "sites": [
            (site, *(folder.size(site, section) for section in ("train", "validate", "test")))
            for site in folder.site_names
        ],
        "metric_names": folder.metric_names(),
        "definitions": metrics.METRICS,
        "pooled": pooled,
        "pooled_titles": {kind: title for kind, (_, title, _) in POOLED.items()},
        "headline": {when: found for kind, when, found in pooled if kind == judged},
        "kinds": kinds,
        "spreads": [(kind, title, metrics.spread(known, higher)) for kind, title, known in kinds],
        "scale": max([1.0, *(value for _, _, known in kinds for value in known.values())]),
        "gains": gains,
        "against_local": (sum(sign * gain > 0 for gain in gains.values()), len(gains)),
        "learning": drawn.learning(folder),
        "costs": drawn.costs(folder),
        "traffic": _traffic(folder),
        "class_counts": _class_counts(folder),
        "partition_picture": _encoded(picture.read_bytes()) if picture.is_file() else None,
        **_predicted(folder),
        **_pictures(folder),
        "settings": _settings(run),
    }


def _notes(data: Mapping[str, Any]) -> list[str]:
    """Return the remarks on the images without the folder where they lie, for reports are passed on."""
    place = str(data.get("folder") or "")
    return [note.replace(place, "the data folder") if place else note for note in data.get("notes") or ()]


def _predicted(folder: RunFolder) -> dict[str, Any]:
    """Return what the test predictions say, and why something is missing."""
    found = outcomes(folder)
    segmentation = not (folder.run.get("classes") or ()) or folder.run["task"] != "classification"
    shown: dict[str, Any] = {
        "classified": not segmentation,
        "predictions": found is not None,
        "intervals": found.intervals if found else {},
        "intervals_method": found.method() if found and found.intervals else "",
        "level": f"{100 * bootstrap.LEVEL:g} %",
        "confusion": found.confusion() if found else None,
        "confusions": found.confusions() if found else [],
        "roc": found.roc() if found else None,
        "calibration": found.calibration() if found else None,
        "worst": found.worst() if found else [],
    }
    shown["exact"] = [when for kind, when, values in folder.pooled() if kind == folder.judged and _last(folder, values)]
    return shown


def _last(folder: RunFolder, values: Mapping[str, Any]) -> bool:
    """Tell whether these metrics are of the last round, as the predictions are."""
    return bool(values.get("round") == (folder.summary or {}).get("rounds"))


def _traffic(folder: RunFolder) -> dict[str, Any] | None:
    """Return what crossed the wire a site and round, on average and at least and most over the rounds."""
    rows = []
    for entry in folder.rounds:
        sites = len(entry.get("cohort") or ()) - len(entry.get("left_out") or ())
        if sites > 0 and "bytes_up" in entry and "bytes_down" in entry:
            rows.append((entry["bytes_up"], entry["bytes_down"], sites))
    visits = sum(sites for *_, sites in rows)
    if not visits:
        return None
    up, down = sum(row[0] for row in rows), sum(row[1] for row in rows)
    before = (folder.summary or {}).get("bytes_up", up) - up
    return {
        "up": up / visits,
        "down": down / visits,
        "visits": visits,
        "rounds": len(rows),
        "before": before if folder.finished and before > 0 else 0,
        "messages": folder.run.get("messages", "lossless"),
    }


def _settings(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every setting of the run as text; the data folder stays out, for reports are passed on."""
    computing = [name for name, one in SETTINGS.items() if one.group == COMPUTING]
    names = ("runtime", "seed", "device", *computing, "threads")
    rows = [(name, words.setting(run[name])) for name in names if name in run]
    for section in ("options", "config"):
        rows += [(f"{name} ({section[:6]})", words.setting(value)) for name, value in (run.get(section) or {}).items()]
    known = dict(run.get("versions") or {})
    rows += [(name, words.setting(value)) for name, value in known.items()]
    for entry in run.get("resumed") or ():
        other = {name: value for name, value in entry["versions"].items() if known.get(name) != value}
        rows += [(f"{name}, from round {entry['round'] + 1}", words.setting(value)) for name, value in other.items()]
        known |= other
    return rows


def _class_counts(folder: RunFolder) -> dict[str, Any] | None:
    counts, classes = folder.run.get("site_class_counts") or {}, folder.run.get("classes") or []
    rows = [(site, counts[site]) for site in folder.site_names if site in counts]
    if not rows or any(len(row) != len(classes) for _, row in rows):
        return None
    most = max(max(row) for _, row in rows)
    return {"classes": classes, "rows": rows, "most": max(most, 1)}


def _pictures(folder: RunFolder) -> dict[str, Any]:
    try:
        found, more = pictures.shown(folder.path)
        cases, others = overlays.shown(folder.path)
        worst = pictures.worst(folder.path)
    except OSError as error:
        raise damaged(folder.path / "pictures", f"cannot be shown: {error}") from None
    return {
        "pictures": _shown(found),
        "more_pictures": more,
        "segmented": _shown(cases),
        "more_sites": others,
        "worst_images": _shown(worst),
    }


def _shown(some: Sequence[pictures.Picture]) -> list[tuple[str, str, str]]:
    return [(picture.title, picture.caption, _encoded(picture.png)) for picture in some]


def _encoded(png: bytes) -> str:
    return base64.b64encode(png).decode()
