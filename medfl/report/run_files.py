"""The files of a run folder, read once and checked."""

from __future__ import annotations

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
from medfl.evaluation.mask_metrics import KINDS as OF_STRUCTURES
from medfl.evaluation.mask_metrics import slug
from medfl.storage.run_documents import damaged, read_round, read_rows, read_run_document, read_summary, round_lines

_SOURCE = "a folder that `medfl run` or `medfl compare` wrote"
_REQUIRED = ("method", "bundle", "task", "key_metric", "data", "partition", "rounds")
_RISE = 0.005
MODEL_KINDS = (("received", "Global model"), ("personal", "Personalised"), ("local", "Local only"))
"""The models that a site's test items are scored with, and their titles."""
SUMMARY_KINDS = {
    "received": ("global", "Global", ("last", "best")),
    "personal": ("personal", "Personal", ("last", "best")),
    "sites": ("site_models", "Each site's model", ("mean", "sd")),
    "local": ("local", "Local models", ("mean", "sd")),
}
"""Kind -> its key in summary.json, its title, and the entries below that key."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of the judged models for N test cases.

    Attributes:
        ids: of the cases.
        sites: the site of each case, "" where it has none.
        label: (N,) reference classes; empty for other tasks than classification.
        predicted: (N,) most probable classes; likewise.
        probabilities: (N, K), None where the file has none.
        scores: for other tasks metric -> (N,), NaN where a case has none.
    """

    ids: Sequence[str]
    sites: Sequence[str]
    label: NDArray[np.int64]
    predicted: NDArray[np.int64]
    probabilities: NDArray[np.float64] | None
    scores: Mapping[str, NDArray[np.float64]]

    @property
    def strata(self) -> NDArray[np.int64]:
        """(N,) within which the cases are drawn again: the reference classes, else one of all cases."""
        return self.label if len(self.label) else np.zeros(len(self.ids), np.int64)


@dataclass(frozen=True)
class RunFiles:
    """The files of a run folder; `summary` and `predictions` are None where the run did not get that far.

    Attributes:
        record: `run.json`.
        rounds: the lines of `rounds.jsonl`.
        sites: the rows of `sites.csv` without blank cells.
    """

    path: Path
    record: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    sites: Sequence[Mapping[str, str]]
    summary: Mapping[str, Any] | None
    predictions: Predictions | None

    @classmethod
    def read(cls, path: Path) -> RunFiles:
        """Read the files of a run folder.

        Raises:
            InputError: the folder is not a run's, or a file in it is damaged; the file is named.
        """
        file = path / "run.json"
        if not file.is_file():
            raise InputError(f"{path} has no run.json", f"a report is made from {_SOURCE}", "check the path")
        record = read_run_document(file, _REQUIRED)
        if record["data"].get("source") not in ("real", "phantom"):
            raise damaged(file, "does not say whether its data are real or phantom")
        file = path / "summary.json"
        summary = read_summary(file) if file.is_file() else None
        rounds = _read_rounds(path / "rounds.jsonl")
        file = path / "sites.csv"
        rows = read_rows(file) if file.is_file() else []
        sites = [{name: cell for name, cell in row.items() if cell} for _, row in rows]
        predictions = _read_predictions(path / "predictions.csv", len(record.get("classes") or ()))
        return cls(path, record, rounds, sites, summary, predictions)

    @property
    def key(self) -> str:
        """The metric by which the run is judged."""
        return str(self.record["key_metric"])

    @property
    def method(self) -> str:
        """The name of its method."""
        return str(self.record["method"])

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of its method."""
        return self.record.get("options") or {}

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of a classification."""
        return tuple(self.record.get("classes") or ())

    @property
    def seed(self) -> int:
        """The seed that it was given, 0 in older runs without one."""
        return int(self.record.get("seed") or 0)

    @property
    def partition(self) -> str:
        """The spec of its partition."""
        return str(self.record["partition"].get("spec"))

    @property
    def phantom(self) -> bool:
        """Whether the images were drawn by a program."""
        return bool(self.record["data"]["source"] == "phantom")

    @property
    def public(self) -> Mapping[str, Any] | None:
        """The run's public data, None where it used none."""
        return self.record.get("public")

    @property
    def finished(self) -> bool:
        """Whether all requested rounds and the summary are there, or those up to where a callback ended the run."""
        if self.summary is None:
            return False
        last = self.summary["rounds"] if self.summary.get("status") == "stopped" else self.record["rounds"]
        return len(self.rounds) >= int(last)

    @property
    def rise(self) -> tuple[float, float] | None:
        """The best validation metric before the last third of the rounds and in it, None where it no longer rose."""
        scores = [row["val"][self.key] for row in self.rounds if self.key in (row.get("val") or ())]
        part = len(scores) // 3
        finite = all(isinstance(score, int | float) and math.isfinite(score) for score in scores)
        if part < 1 or not finite or (self.summary or {}).get("status") == "stopped":
            return None
        before, last = max(scores[:-part]), max(scores[-part:])
        if last - before < _RISE or scores[-1] < last - (last - before) / 2:
            return None
        return before, last

    @property
    def judged(self) -> str:
        """The kind of model by which the run is judged: "received" (the global model) or "personal"."""
        source = self.summary or (self.rounds[-1] if self.rounds else {})
        return "personal" if source.get("judged") == "personal" else "received"

    @property
    def personal_model(self) -> str:
        """What a personal model of this run is, in words; "" where it has none, or an older run does not say."""
        some = any(name.startswith("personal_") for row in self.sites for name in row)
        return str((self.summary or {}).get("personal_model") or "") if some else ""

    @cached_property
    def site_names(self) -> tuple[str, ...]:
        """The sites in the order of `sites.csv`, then those of the partition that it does not have, or not yet."""
        planned = self.record["partition"].get("sites") or ()
        return tuple(dict.fromkeys([*(row["site"] for row in self.sites), *planned]))

    def size(self, site: str, section: str) -> int:
        """Return how many items of a section the site has."""
        return len((self.record["partition"].get("sites") or {}).get(site, {}).get(section, ()))

    def site_values(self, kind: str, metric: str) -> dict[str, float]:
        """Return site -> test metric of the sites that have it; `kind` is received, personal or local."""
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
        by_kind = {kind: self.summary.get(name) for kind, (name, _, _) in SUMMARY_KINDS.items()}
        if not any(by_kind.values()):
            by_kind[self.judged] = self.summary
        return [
            (kind, what, entries[what])
            for kind, entries in by_kind.items() if entries
            for what in SUMMARY_KINDS[kind][2] if entries.get(what) and (what != "sd" or len(self.site_names) > 1)
        ]  # fmt: skip

    def progress(self) -> list[tuple[int, float, float, float]]:
        """Return (round, bytes so far, seconds so far, key metric) of the rounds whose validation metric is known."""
        points, sent, seconds = [], 0.0, 0.0
        for entry in self.rounds:
            sent += entry.get("bytes_up", 0) + entry.get("bytes_down", 0)
            seconds += entry.get("seconds", 0)
            value = (entry.get("val") or {}).get(self.key)
            if value is not None:
                points.append((int(entry["round"]), sent, seconds, float(value)))
        return points

    def title(self, metric: str) -> str:
        """Return a metric's title with its unit, which older runs do not state."""
        units = (self.summary or {}).get("units") or {}
        unit = units.get(metric, "mm or pixels" if metric.startswith("hd95") else "")
        return f"{metrics.title(metric)} ({unit})" if unit else metrics.title(metric)

    @property
    def structures(self) -> Mapping[str, Mapping[str, Any]]:
        """Structure -> metrics and cases of the judged model after the last round; {} where none are told apart."""
        return ((self.summary or {}).get("last") or {}).get("classes") or {}

    @property
    def structure_metrics(self) -> list[str]:
        """The metrics that any structure has."""
        return [kind for kind in OF_STRUCTURES if any(kind in scores for scores in self.structures.values())]

    def metric_names(self) -> list[str]:
        """Return the names of all pooled metrics, the key metric first, then in the order of `metrics.METRICS`.

        Those of single structures are in `structures`.
        """
        names = {name for _, _, values in self.pooled() for name in values}
        if not names:
            names = {name for entry in self.rounds[-1:] for name in entry.get("val") or {}}
        listed = [name for name in metrics.METRICS if name in names and name != self.key]
        single = {f"{kind}_{slug(name)}" for name in self.structures for kind in OF_STRUCTURES}
        single |= {"round", "classes", *(f"{name}_cases" for name in single)}
        return [self.key, *listed, *sorted(names - {self.key, *listed} - single)]


def _read_rounds(path: Path) -> list[Mapping[str, Any]]:
    """Read the rounds; a last line without its line break was cut off by a crash and is left out."""
    lines = enumerate(round_lines(path)[:-1], 1)
    return [read_round(path, line, number) for number, line in lines if line.strip()]


def _read_predictions(path: Path, classes: int) -> Predictions | None:
    if not path.is_file():
        return None
    rows = read_rows(path)
    columns = list(rows[0][1]) if rows else []
    ids, sites = [row.get("id", "") for _, row in rows], [row.get("site", "") for _, row in rows]
    no_classes = np.zeros(0, np.int64)
    if not classes or (columns and "predicted" not in columns):  # scores instead of classes
        scores = {name: _numbers(path, rows, name) for name in columns if name not in ("id", "site")}
        return Predictions(ids, sites, no_classes, no_classes, None, scores)
    pairs = []
    for number, row in rows:
        try:
            pair = (int(row["label"]), int(row["predicted"]))
        except (KeyError, ValueError):
            raise damaged(path, f"line {number} has no class numbers under label and predicted") from None
        if not all(0 <= value < classes for value in pair):
            raise damaged(path, f"line {number} has a class outside 0 to {classes - 1}")
        pairs.append(pair)
    label, predicted = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    names = [name for name in columns if name.startswith("p_")]
    complete = len(names) == classes  # files of older versions lack some
    probabilities = np.stack([_numbers(path, rows, name) for name in names], 1) if complete else None
    if probabilities is not None and not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise damaged(path, "has a probability that is not between 0 and 1")
    return Predictions(ids, sites, label, predicted, probabilities, {})


def _numbers(path: Path, rows: Sequence[tuple[int, Mapping[str, str]]], name: str) -> NDArray[np.float64]:
    """Return a column as numbers, NaN where a cell is blank."""
    try:
        return np.array([float(row[name] or "nan") for _, row in rows])
    except ValueError as error:
        raise damaged(path, f"has no number in column {name} ({error})") from None
