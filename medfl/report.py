"""A run folder as one self-contained HTML page and as the plain-text table printed at the end of a run.

Both read only the folder's files, so a report can be made again anywhere, long after the run and without the data.
"""

from __future__ import annotations

import base64
import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from medfl import charts, metrics, overlays, pictures, terminal
from medfl.errors import InputError
from medfl.storage import write_atomic

_RUN_FOLDER = "a folder that `medfl run` wrote"
_NEEDED = ("method", "bundle", "task", "key_metric", "data", "partition", "rounds")
_KINDS = (("received", "Global model"), ("personal", "Personalised"), ("local", "Local only"))
_POOLED = {
    "received": ("global", "Global", ("last", "best")),
    "personal": ("personal", "Personal", ("last", "best")),
    "sites": ("site_models", "Each site's model", ("mean", "sd")),
    "local": ("local", "Local models", ("mean", "sd")),
}
"""Kind -> its key in summary.json, its title, and what is told of it."""
_PARTS = ("received", "personal", "local")  # the page's colours, here for the parts of a cost
_COSTS = (
    (
        "Seconds a round",
        1,
        (("seconds_train", "training"), ("seconds_server", "server"), ("seconds_eval", "evaluation")),
    ),
    ("Megabytes a round", 1e6, (("bytes_up", "to the server"), ("bytes_down", "to the sites"))),
)
_TABLE_SITES = 24


@dataclass(frozen=True)
class RunFolder:
    """What a run folder holds, read once; `summary` and `predictions` are None where the run did not get that far.

    Attributes:
        sites: one dict per site as in `sites.csv`, blank cells left out.
        predictions: (N, 2) reference and predicted class numbers.
    """

    path: Path
    run: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    sites: Sequence[Mapping[str, str]]
    summary: Mapping[str, Any] | None
    predictions: np.ndarray[Any, np.dtype[np.int64]] | None

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Read a run folder.

        Raises:
            InputError: the folder is not a run's, or a file in it is damaged; the file is named.
        """
        if not (path / "run.json").is_file():
            raise InputError(f"{path} has no run.json", f"a report is made from {_RUN_FOLDER}", "check the path")
        run = _object(path / "run.json", (path / "run.json").read_bytes())
        missing = [name for name in _NEEDED if name not in run]
        if missing:
            raise _damaged(path / "run.json", f"lacks {', '.join(missing)}")
        if not isinstance(run["data"], dict) or run["data"].get("source") not in ("real", "phantom"):
            raise _damaged(path / "run.json", "does not say whether its data are real or phantom")
        summary = path / "summary.json"
        return cls(
            path,
            run,
            _read_rounds(path / "rounds.jsonl"),
            [{name: cell for name, cell in row.items() if cell} for _, row in _read_csv(path / "sites.csv")],
            _object(summary, summary.read_bytes()) if summary.is_file() else None,
            _read_predictions(path / "predictions.csv", len(run.get("classes") or ())),
        )

    @property
    def key(self) -> str:
        """The metric by which the run is judged."""
        return str(self.run["key_metric"])

    @property
    def phantom(self) -> bool:
        """Whether the images were drawn by a program."""
        return bool(self.run["data"]["source"] == "phantom")

    @property
    def public(self) -> Mapping[str, Any] | None:
        """The run's public data, None where it used none."""
        found: Mapping[str, Any] | None = self.run.get("public")
        return found

    @property
    def finished(self) -> bool:
        """Whether all rounds asked for are there, with a summary."""
        return self.summary is not None and len(self.rounds) >= int(self.run["rounds"])

    @property
    def judged(self) -> str:
        """The kind of model the run is judged by: "received" (the global model) or "personal"."""
        source = self.summary or (self.rounds[-1] if self.rounds else {})
        return "personal" if source.get("judged") == "personal" else "received"

    @cached_property
    def site_names(self) -> tuple[str, ...]:
        """The sites in the order of `sites.csv`, or of the partition before that file exists."""
        return tuple(row["site"] for row in self.sites) or tuple(self.run["partition"].get("sites", ()))

    def size(self, site: str, section: str) -> int:
        """Return how many items of a section the site has."""
        return len(self.run["partition"].get("sites", {}).get(site, {}).get(section, ()))

    def site_values(self, kind: str, metric: str) -> dict[str, float]:
        """Return the test metric of each site that has it; `kind` is received, personal or local."""
        column = f"{kind}_{metric}"
        try:
            values = {row["site"]: float(row[column]) for row in self.sites if column in row}
        except ValueError as error:
            raise _damaged(self.path / "sites.csv", f"has no number in column {column} ({error})") from None
        return {site: value for site, value in values.items() if math.isfinite(value)}

    def pooled(self) -> list[tuple[str, str, Mapping[str, Any]]]:
        """Return (kind, "last", "best", "mean" or "sd", {"round", metric…}) of the pooled test metrics in the summary.

        Mean and sd are over the sites' own models, each on everybody's test items.
        """
        if self.summary is None:
            return []
        given = {kind: self.summary.get(name) for kind, (name, _, _) in _POOLED.items()}
        if not any(given.values()):
            given[self.judged] = self.summary
        return [
            (kind, what, got[what]) for kind, got in given.items() if got for what in _POOLED[kind][2] if got.get(what)
        ]

    def metric_names(self) -> list[str]:
        """Return the names of all pooled metrics, the key metric first, then in the order of `metrics.METRICS`."""
        found = {name for _, _, values in self.pooled() for name in values}
        if not found:
            found = {name for entry in self.rounds[-1:] for name in entry.get("val") or {}}
        known = [name for name in metrics.METRICS if name in found and name != self.key]
        return [self.key, *known, *sorted(found - {"round", self.key, *known})]


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run folder and return its path.

    The page needs nothing but itself: no script, no file, no network. The same folder gives the same bytes.

    Raises:
        InputError: the folder is not a run's, or a file in it is damaged.
    """
    folder = RunFolder.read(Path(run_folder))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("medfl"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=_number, count=_count, bytes=_bytes, seconds=_seconds, title=metrics.title)
    page = environment.get_template("report.html.j2").render(_context(folder))
    path = folder.path / "report.html"
    write_atomic(path, page.encode())
    return path


def result_table(run_folder: Path) -> str:
    """Return the plain-text table that ends a run, at most 100 columns wide.

    Of more than 24 sites only the worst are listed. The last line says whether the data are real or phantom.

    Raises:
        InputError: as for `write_report`.
    """
    folder = RunFolder.read(Path(run_folder))
    names = [folder.key] + (["accuracy"] if folder.key != "accuracy" and "accuracy" in folder.metric_names() else [])
    columns = [(name, kind, folder.site_values(kind, name)) for name in names for kind, _ in _KINDS]
    columns = [column for column in columns if column[2]]
    if 45 + 9 * len(columns) > terminal.width():  # a narrow terminal: the key metric alone
        columns = [column for column in columns if column[0] == folder.key]
    lines = [*_site_lines(folder, columns), *_pooled_lines(folder)]
    summary = folder.summary or {}
    if not folder.finished:
        lines.append(f"unfinished: {len(folder.rounds)} of {folder.run['rounds']} rounds")
    sent = [f"{way} {_bytes(summary[f'bytes_{way}'])}" for way in ("up", "down") if f"bytes_{way}" in summary]
    if "seconds" in summary:
        sent.append(f"time {_seconds(summary['seconds'])}")
    if sent:
        lines.append("total     " + ", ".join(sent))
    lines.append(_data_line(folder))
    return "\n".join(lines)


def _site_lines(folder: RunFolder, columns: Sequence[tuple[str, str, Mapping[str, float]]]) -> list[str]:
    """Two heading lines, the sites, then mean, sd and worst of each column."""
    shown = list(folder.site_names)
    if len(shown) > _TABLE_SITES:
        sign = 1 if metrics.higher_is_better(folder.key) else -1
        judged = folder.site_values(folder.judged, folder.key)
        shown = sorted(shown, key=lambda site: sign * judged.get(site, math.inf * sign))[: _TABLE_SITES - 4]
    # a gap opens each metric's group of columns
    gaps = ["  " if i == 0 or columns[i - 1][0] != name else "" for i, (name, _, _) in enumerate(columns)]

    def line(label: str, train: str, test: str, cells: Sequence[str]) -> str:
        return f"{label:<24} {train:>7} {test:>7}" + "".join(f"{g}{c:>9}" for g, c in zip(gaps, cells, strict=True))

    widths = {name: sum(9 for column in columns if column[0] == name) for name, _, _ in columns}
    head = line("site", "train", "test", [kind for _, kind, _ in columns])
    rule = "─" * len(head)
    lines = [
        " " * 40 + "".join(f"  {metrics.title(name)[:width]:>{width}}" for name, width in widths.items()),
        head,
        rule,
    ]
    for site in shown:
        cells = [_number(values.get(site)) for _, _, values in columns]
        lines.append(line(_plain(site), str(folder.size(site, "train")), str(folder.size(site, "test")), cells))
    if len(shown) < len(folder.site_names):
        lines.append(f"… {len(folder.site_names) - len(shown)} better sites are in sites.csv")
    spreads = [metrics.spread(values, metrics.higher_is_better(name)) for name, _, values in columns]
    if not columns:
        return [text.rstrip() for text in lines]
    lines += [rule, line("mean", "", "", [_number(s["mean"]) for s in spreads])]
    lines += [line("sd", "", "", [_number(s["sd"]) for s in spreads])]
    return [*lines, line("worst", "", "", [_number(s["worst"]) for s in spreads])]


def _pooled_lines(folder: RunFolder) -> list[str]:
    """One line for each model's last and best round, with as many metrics as fit."""
    pooled = folder.pooled()
    if not pooled:
        return []
    lines = ["", f"{'pooled test set':<22} {'round':>5}"]
    lines += [
        f"{_POOLED[kind][1].lower()} {what}".ljust(22) + f" {values.get('round', '–'):>5}"
        for kind, what, values in pooled
    ]
    for name in folder.metric_names():
        cells = [_plain(name), *(_number(values.get(name)) for _, _, values in pooled)]
        width = max(map(len, cells)) + 2
        if len(lines[1]) + width <= terminal.width():
            lines[1:] = [f"{line}{cell:>{width}}" for line, cell in zip(lines[1:], cells, strict=True)]
    return [*lines, ""]


def _data_line(folder: RunFolder) -> str:
    public = folder.public
    shared = ""
    if public:
        drawn = public["data"]["source"] == "phantom"
        shared = f"; {'PHANTOM' if drawn else 'real'} public data: {_plain(str(public['bundle']), 40)}"
        if public["teachers"]:
            shared += f", teachers: {_plain(', '.join(str(name) for name, _ in public['teachers']), 60)}"
    if folder.phantom:
        return f"PHANTOM data: images drawn by a program; these numbers say nothing about patients{shared}"
    checksum = str(folder.run["data"].get("checksum") or "")
    own = f"real data: {_plain(str(folder.run['bundle']), 40)}" + (f", checksum {checksum[:16]}" if checksum else "")
    return own + shared


def _context(folder: RunFolder) -> dict[str, Any]:
    run, judged = folder.run, folder.judged
    higher = metrics.higher_is_better(folder.key)
    kinds = [(kind, title, folder.site_values(kind, folder.key)) for kind, title in _KINDS]
    kinds = [entry for entry in kinds if entry[2]]
    values = {kind: known for kind, _, known in kinds}
    both = [site for site in values.get(judged, {}) if site in values.get("local", {})]
    sign = 1 if higher else -1
    pooled = folder.pooled()
    picture = folder.path / "partition.png"
    return {
        "run": run,
        "key": folder.key,
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
        "pooled_titles": {kind: title for kind, (_, title, _) in _POOLED.items()},
        "headline": {when: found for kind, when, found in pooled if kind == judged},
        "kinds": kinds,
        "spreads": [(kind, title, metrics.spread(known, higher)) for kind, title, known in kinds],
        "scale": max([1.0, *(value for _, _, known in kinds for value in known.values())]),
        "against_local": (sum(sign * values[judged][s] > sign * values["local"][s] for s in both), len(both)),
        "charts": _charts(folder),
        "class_counts": _class_counts(folder),
        "picture": base64.b64encode(picture.read_bytes()).decode() if picture.is_file() else None,
        "confusion": _confusion(folder),
        **_pictures(folder),
        "settings": _settings(run),
    }


def _settings(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every setting of the run as text; the data folder stays out, for reports are passed on."""
    names = ("runtime", "seed", "device", "amp", "threads")
    rows = [(name, _text(run[name])) for name in names if name in run]
    for section in ("options", "config"):
        rows += [(f"{name} ({section[:6]})", _text(value)) for name, value in (run.get(section) or {}).items()]
    return rows + [(name, _text(value)) for name, value in (run.get("versions") or {}).items()]


def _class_counts(folder: RunFolder) -> dict[str, Any] | None:
    counts, classes = folder.run.get("site_class_counts") or {}, folder.run.get("classes") or []
    rows = [(site, counts[site]) for site in folder.site_names if site in counts]
    if not rows or any(len(row) != len(classes) for _, row in rows):
        return None
    most = max(max(row) for _, row in rows)
    return {"classes": classes, "rows": rows, "most": max(most, 1)}


def _confusion(folder: RunFolder) -> dict[str, Any] | None:
    if folder.predictions is None or not len(folder.predictions):
        return None
    classes = folder.run["classes"]
    counts = metrics.confusion(folder.predictions[:, 0], folder.predictions[:, 1], len(classes))
    rows, columns, hits = counts.sum(1), counts.sum(0), np.diag(counts)
    return {
        "classes": classes,
        "rows": counts.tolist(),
        "shares": (counts / np.maximum(rows, 1)[:, None]).tolist(),
        "reference": rows.tolist(),
        "recall": [float(h / n) if n else None for h, n in zip(hits, rows, strict=True)],
        "precision": [float(h / n) if n else None for h, n in zip(hits, columns, strict=True)],
    }


def _pictures(folder: RunFolder) -> dict[str, Any]:
    try:
        found, more = pictures.shown(folder.path)
        cases, others = overlays.shown(folder.path)
    except OSError as error:
        raise _damaged(folder.path / "pictures", f"cannot be shown: {error}") from None
    shown, segmented = (
        [(picture.title, picture.caption, base64.b64encode(picture.png).decode()) for picture in some]
        for some in (found, cases)
    )
    return {"pictures": shown, "more_pictures": more, "segmented": segmented, "more_sites": others}


def _charts(folder: RunFolder) -> list[dict[str, Any]]:
    """The charts that have data: title, what each colour is, and the drawing."""
    rounds, key, judged = folder.rounds, folder.key, folder.judged
    numbers = [entry["round"] for entry in rounds]
    classes = folder.run.get("classes") or ()
    curves = {
        kind: [_of(entry, f"val_{_POOLED[kind][0]}", key) for entry in rounds] for kind in ("received", "personal")
    }
    if all(value is None for line in curves.values() for value in line):
        curves = {judged: [_of(entry, "val", key) for entry in rounds]}
    sites = [[_of(site, judged, key) for site in _sites(entry)] for entry in rounds]
    chance = 1 / len(classes) if key == "balanced_accuracy" and classes else None
    band = ("band", "lowest to highest site")
    title = f"{metrics.title(key)} on the validation set"
    shown = [kind for kind, line in curves.items() if any(value is not None for value in line)]
    bounded = key in metrics.METRICS and metrics.higher_is_better(key)
    svg = charts.lines(title, numbers, curves, sites, band_of=judged, bounded=bounded, chance=chance)
    found = [(title, [*((kind, dict(_KINDS)[kind]) for kind in shown), band], svg)]
    losses = [[site.get("train_loss") for site in _sites(entry)] for entry in rounds]
    curve = {judged: [entry.get("train_loss") for entry in rounds]}
    svg = charts.lines("Training loss", numbers, curve, losses, band_of=judged)
    found.append(("Training loss", [(judged, "mean over the cohort"), band], svg))
    for title, unit, names in _COSTS:
        parts = {
            colour: [entry.get(name) for entry in rounds] for colour, (name, _) in zip(_PARTS, names, strict=False)
        }
        legend = [(colour, text) for colour, (_, text) in zip(_PARTS, names, strict=False)]
        found.append((title, legend, charts.stacked(title, numbers, parts, unit)))
    return [{"title": title, "legend": legend, "svg": svg} for title, legend, svg in found if svg is not None]


def _of(entry: Mapping[str, Any], group: str, metric: str) -> float | None:
    return (entry.get(group) or {}).get(metric)


def _read_rounds(path: Path) -> list[Mapping[str, Any]]:
    """Read the rounds; a last line without its line break was cut off by a crash and is left out."""
    if not path.is_file():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    rounds: list[Mapping[str, Any]] = [
        _object(path, line, f" line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if any("round" not in entry for entry in rounds):
        raise _damaged(path, "has a line without a round number")
    return rounds


def _read_csv(path: Path) -> list[tuple[int, dict[str, str]]]:
    if not path.is_file():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            rows = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise _damaged(path, f"is not a CSV table ({error})") from None
    for number, row in rows:
        if None in row or (path.name == "sites.csv" and not row.get("site")):
            raise _damaged(path, f"line {number} does not fit its header")
    return rows


def _read_predictions(path: Path, classes: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    if not path.is_file():
        return None
    pairs, rows = [], _read_csv(path)
    if not classes or (rows and "predicted" not in rows[0][1]):
        return None  # not a classification: scores of cases, no classes
    for number, row in rows:
        try:
            pair = (int(row["label"]), int(row["predicted"]))
        except (KeyError, ValueError):
            raise _damaged(path, f"line {number} has no class numbers under label and predicted") from None
        if not all(0 <= value < classes for value in pair):
            raise _damaged(path, f"line {number} has a class outside 0 to {classes - 1}")
        pairs.append(pair)
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _object(path: Path, data: bytes, where: str = "") -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise _damaged(path, f"is not JSON{where} ({error})") from None
    if not isinstance(found, dict):
        raise _damaged(path, f"holds no JSON object{where}")
    return found


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path} {what}", f"a report is made from {_RUN_FOLDER}", "restore the file or repeat the run")


def _sites(entry: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return tuple((entry.get("sites") or {}).values())


def _plain(text: str, width: int = 24) -> str:
    """Make a user's name safe for a terminal and cut it to a width."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= width else text[: width - 1] + "…"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def _count(value: float) -> str:
    return f"{int(value):,}".replace(",", "\u202f")


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{int(value)} B"


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.3g} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
