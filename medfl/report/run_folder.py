"""What a run folder holds, read once and checked."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfl.core.errors import InputError
from medfl.evaluation import metrics
from medfl.report import forms

_RUN_FOLDER = "a folder that `medfl run` wrote"
_NEEDED = ("method", "bundle", "task", "key_metric", "data", "partition", "rounds")
KINDS = (("received", "Global model"), ("personal", "Personalised"), ("local", "Local only"))
"""The models that a site's test items are scored with, and their titles."""
POOLED = {
    "received": ("global", "Global", ("last", "best")),
    "personal": ("personal", "Personal", ("last", "best")),
    "sites": ("site_models", "Each site's model", ("mean", "sd")),
    "local": ("local", "Local models", ("mean", "sd")),
}
"""Kind -> its key in summary.json, its title, and what is told of it."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """What the judged models predict for N test cases.

    Attributes:
        ids: of the cases.
        sites: whose each case is, "" where nobody's.
        label: (N,) reference classes; empty where the task is no classification.
        predicted: (N,) most probable classes; empty likewise.
        probabilities: (N, K), None where the file has none.
        scores: metric -> (N,) of other tasks, NaN where a case has none.
    """

    ids: Sequence[str]
    sites: Sequence[str]
    label: NDArray[np.int64]
    predicted: NDArray[np.int64]
    probabilities: NDArray[np.float64] | None
    scores: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class RunFolder:
    """What a run folder holds, read once; `summary` and `predictions` are None where the run did not get that far.

    Attributes:
        sites: one dict per site as in `sites.csv`, blank cells left out.
    """

    path: Path
    run: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    sites: Sequence[Mapping[str, str]]
    summary: Mapping[str, Any] | None
    predictions: Predictions | None

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
            raise damaged(path / "run.json", f"lacks {', '.join(missing)}")
        _check(path / "run.json", run, forms.RUN)
        for entry in run.get("resumed") or ():
            _check(path / "run.json", {**dict.fromkeys(forms.RESUMED), **entry}, forms.RESUMED, "resumed.")
        if any(count < 0 for counts in (run.get("site_class_counts") or {}).values() for count in counts):
            raise damaged(path / "run.json", "has a negative count under site_class_counts")
        if run["data"].get("source") not in ("real", "phantom"):
            raise damaged(path / "run.json", "does not say whether its data are real or phantom")
        file = path / "summary.json"
        summary = _object(file, file.read_bytes()) if file.is_file() else None
        _check(file, summary or {}, forms.SUMMARY)
        return cls(
            path,
            run,
            _read_rounds(path / "rounds.jsonl"),
            [{name: cell for name, cell in row.items() if cell} for _, row in _read_csv(path / "sites.csv")],
            summary,
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
            raise damaged(self.path / "sites.csv", f"has no number in column {column} ({error})") from None
        return {site: value for site, value in values.items() if math.isfinite(value)}

    def pooled(self) -> list[tuple[str, str, Mapping[str, Any]]]:
        """Return (kind, "last", "best", "mean" or "sd", {"round", metric…}) of the pooled test metrics in the summary.

        Mean and sd are over the sites' own models, each on everybody's test items; one site has no sd.
        """
        if self.summary is None:
            return []
        given = {kind: self.summary.get(name) for kind, (name, _, _) in POOLED.items()}
        if not any(given.values()):
            given[self.judged] = self.summary
        return [
            (kind, what, got[what])
            for kind, got in given.items() if got
            for what in POOLED[kind][2] if got.get(what) and (what != "sd" or len(self.site_names) > 1)
        ]  # fmt: skip

    def title(self, metric: str) -> str:
        """Return a metric's name with its unit, as people write it; older runs do not say which unit it is."""
        known = (self.summary or {}).get("units") or {}
        unit = known.get(metric, "mm or pixels" if metric == "hd95" else "")
        return f"{metrics.title(metric)} ({unit})" if unit else metrics.title(metric)

    def metric_names(self) -> list[str]:
        """Return the names of all pooled metrics, the key metric first, then in the order of `metrics.METRICS`."""
        found = {name for _, _, values in self.pooled() for name in values}
        if not found:
            found = {name for entry in self.rounds[-1:] for name in entry.get("val") or {}}
        known = [name for name in metrics.METRICS if name in found and name != self.key]
        return [self.key, *known, *sorted(found - {"round", self.key, *known})]


def _read_rounds(path: Path) -> list[Mapping[str, Any]]:
    """Read the rounds; a last line without its line break was cut off by a crash and is left out."""
    if not path.is_file():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    rounds: list[Mapping[str, Any]] = [
        _object(path, line, f" line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if any("round" not in entry for entry in rounds):
        raise damaged(path, "has a line without a round number")
    for entry in rounds:
        _check(path, entry, forms.ROUND)
    return rounds


def _check(path: Path, document: Mapping[str, Any], form: Mapping[str, Any], within: str = "") -> None:
    """Raise the error of a damaged file unless what a report reads of it is of its kind."""
    for wrong in forms.odd(document, form, within):
        raise damaged(path, wrong)


def _read_csv(path: Path) -> list[tuple[int, dict[str, str]]]:
    if not path.is_file():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            rows = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise damaged(path, f"is not a CSV table ({error})") from None
    for number, row in rows:
        if None in row or (path.name == "sites.csv" and not row.get("site")):
            raise damaged(path, f"line {number} does not fit its header")
    return rows


def _read_predictions(path: Path, classes: int) -> Predictions | None:
    if not path.is_file():
        return None
    rows = _read_csv(path)
    columns = list(rows[0][1]) if rows else []
    ids, sites = [row.get("id", "") for _, row in rows], [row.get("site", "") for _, row in rows]
    nothing = np.zeros(0, np.int64)
    if not classes or (columns and "predicted" not in columns):  # scores of cases, no classes
        names = [name for name in columns if name not in ("id", "site")]
        return Predictions(ids, sites, nothing, nothing, None, {name: _numbers(path, rows, name) for name in names})
    pairs = []
    for number, row in rows:
        try:
            pair = (int(row["label"]), int(row["predicted"]))
        except (KeyError, ValueError):
            raise damaged(path, f"line {number} has no class numbers under label and predicted") from None
        if not all(0 <= value < classes for value in pair):
            raise damaged(path, f"line {number} has a class outside 0 to {classes - 1}")
        pairs.append(pair)
    found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    chances = [name for name in columns if name.startswith("p_")]
    known = len(chances) == classes  # else written by something older
    probabilities = np.stack([_numbers(path, rows, name) for name in chances], 1) if known else None
    if probabilities is not None and not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise damaged(path, "has a probability that is not between 0 and 1")
    return Predictions(ids, sites, found[:, 0], found[:, 1], probabilities, {})


def _numbers(path: Path, rows: Sequence[tuple[int, Mapping[str, str]]], name: str) -> NDArray[np.float64]:
    """Return a column as numbers, NaN where a cell is blank."""
    try:
        return np.array([float(row[name] or "nan") for _, row in rows])
    except ValueError as error:
        raise damaged(path, f"has no number in column {name} ({error})") from None


def _object(path: Path, data: bytes, where: str = "") -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise damaged(path, f"is not JSON{where} ({error})") from None
    if not isinstance(found, dict):
        raise damaged(path, f"holds no JSON object{where}")
    return found


def damaged(path: Path, what: str) -> InputError:
    """Return the error that names a file of a run folder and what is wrong with it."""
    return InputError(f"{path} {what}", f"a report is made from {_RUN_FOLDER}", "restore the file or repeat the run")
