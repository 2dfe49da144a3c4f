"""RunReader: the files of a run folder, each read and checked on first use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from os.path import lexists
from pathlib import Path
from typing import Self

import numpy as np

from medfl.core import Config, Floats, InputError, Metrics, Run
from medfl.storage.places import CALIBRATION
from medfl.storage.run_documents import (
    MANIFEST,
    NEWCOMERS,
    damaged,
    read_calibration,
    read_manifest,
    read_round,
    read_rows,
    read_run_document,
    read_summary,
    require_entries,
    round_lines,
    run_of,
)

_REQUIRED = ("method", "bundle", "task", "key_metric", "data", "partition", "rounds")

SUMMARY_KINDS = {
    "received": ("global", "Global", ("last", "best")),
    "personal": ("personal", "Personal", ("last", "best")),
    "sites": ("site_models", "Each site's model", ("mean", "sd")),
    "local": ("local", "Local models", ("mean", "sd")),
}
"""Kind -> its key in summary.json, its title, and the entries below that key."""

Rows = Sequence[tuple[int, Config]]
"""The rows of a table, each with its line number."""


@dataclass(frozen=True)
class Table:
    """A table of a run folder.

    Attributes:
        path: the file, which errors name.
        rows: each with its line number.
    """

    path: Path
    rows: Rows

    @property
    def columns(self) -> list[str]:
        """The names of its columns, [] without any row."""
        return list(self.rows[0][1]) if self.rows else []

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a column, "" if it is missing."""
        return tuple(str(row.get(name, "")) for _, row in self.rows)

    def numbers(self, name: str) -> Floats:
        """Return a column as numbers, NaN if a cell is blank."""
        try:
            cells = [row[name] for _, row in self.rows]
            return np.array([math.nan if cell in ("", None) else float(cell) for cell in cells])
        except (KeyError, ValueError) as error:
            raise self.damaged(f"has no number in column {name} ({error})") from None

    def damaged(self, what: str) -> InputError:
        """Return the error that names the file and what is wrong with it."""
        return damaged(self.path, what)


class RunReader:
    """A run folder, finished or not.

    Opening it reads nothing. A damaged file raises an InputError that names it, on first use.

    Raises:
        InputError: the folder has no run.json.
    """

    def __init__(self, path: Path) -> None:
        if not (path / "run.json").is_file():
            raise InputError(
                f"{path} has no run.json",
                "a folder that `medfl run` or `medfl compare` wrote",
                "check the path",
            )

        self.path = path

    @classmethod
    def from_record(cls, record: Config, **read: object) -> Self:
        """Return a reader of data already in memory, under the names of the attributes below and of a subclass's."""
        reader = cls.__new__(cls)
        nothing = {"path": Path(), "rounds": (), "sites": (), "summary": {}}
        vars(reader).update({**nothing, "record": record, **read})
        return reader

    # The files

    @cached_property
    def document(self) -> Config:
        """`run.json`; older versions wrote fewer entries."""
        return read_run_document(self.path / "run.json")

    @cached_property
    def record(self) -> Config:
        """`run.json` with all entries that a report needs."""
        file = self.path / "run.json"
        require_entries(file, self.document, _REQUIRED)
        if self.document["data"].get("source") not in ("real", "phantom"):
            raise damaged(file, "does not say whether its data are real or phantom")
        return self.document

    @cached_property
    def run(self) -> Run:
        """The run in `run.json`; InputError also if it names a module that the user has not allowed."""
        return run_of(self.path / "run.json", dict(self.document))

    @cached_property
    def rounds(self) -> Sequence[Config]:
        """The lines of `rounds.jsonl`; a last one without its line break was cut off by a crash and is omitted."""
        path = self.path / "rounds.jsonl"
        lines = enumerate(round_lines(path)[:-1], 1)
        return [read_round(path, line, number) for number, line in lines if line.strip()]

    @cached_property
    def sites(self) -> Sequence[Mapping[str, str]]:
        """The rows of `sites.csv` without blank cells."""
        table = self._table("sites.csv")
        rows = table.rows if table else ()
        return [{name: cell for name, cell in row.items() if cell} for _, row in rows]

    @cached_property
    def summary(self) -> Config:
        """`summary.json`, {} if the run did not get that far."""
        file = self.path / "summary.json"
        return read_summary(file) if lexists(file) else {}

    @cached_property
    def manifest(self) -> Config | None:
        """`state/manifest.json`, None before the first round is committed."""
        file = self.path / "state" / MANIFEST
        return read_manifest(self.path) if lexists(file) else None

    @cached_property
    def prediction_table(self) -> Table | None:
        """`predictions.csv`, None if the run did not get that far."""
        return self._table("predictions.csv", ("id",))

    @cached_property
    def newcomer_table(self) -> Table | None:
        """`newcomers.csv`, None if there is none."""
        return self._table(NEWCOMERS)

    def _table(self, name: str, columns: Sequence[str] = ()) -> Table | None:
        path = self.path / name
        if not lexists(path):
            return None

        table = Table(path, read_rows(path, columns))
        count = len(table.rows)
        recorded = (self.final_summary.get("table_rows") or {}).get(name, count)
        if count != recorded:
            raise table.damaged(f"changed since the run ended: {count} rows, not {recorded}")

        return table

    @cached_property
    def promised(self) -> Config | None:
        """`calibration.json`, None if the run is not calibrated."""
        file = self.path / CALIBRATION
        return read_calibration(file) if lexists(file) else None

    def sha256_of(self, which: str) -> str:
        """Return the recorded SHA-256 of the "last" or "best" weights, "" if the run was interrupted."""
        key = {"last": "weights_sha256", "best": "best_sha256"}[which]
        return str(self.final_summary.get(key) or "")

    def calibration(self, which: str, model: str) -> Config | None:
        """Return calibration.json if it is for these weights and this kind of `model`: global or personal."""
        document = self.promised
        if document is None:
            return None

        fits = (document["weights_sha256"], document["model"]) == (self.sha256_of(which), model)
        return document if fits else None

    # The run

    @property
    def key(self) -> str:
        """The metric by which the run is judged."""
        return str(self.record["key_metric"])

    @property
    def method(self) -> str:
        """The name of its method."""
        return str(self.record["method"])

    @property
    def options(self) -> Config:
        """The options of its method."""
        return self.record.get("options") or {}

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of a classification, as its predictions number them if the record names none."""
        names = self.record.get("classes") or ()
        if not names and self.record["task"] == "classification" and self.prediction_table:
            columns = self.prediction_table.columns
            names = [name[2:] for name in columns if name.startswith("p_")]

        return tuple(names)

    @property
    def seed(self) -> int:
        """The run's seed, 0 in older runs without one."""
        return int(self.record.get("seed") or 0)

    @property
    def partition(self) -> str:
        """The spec of its partition."""
        return str(self.record["partition"].get("spec"))

    @property
    def phantom(self) -> bool:
        """Whether the images are phantoms."""
        return bool(self.record["data"]["source"] == "phantom")

    @property
    def public(self) -> Config | None:
        """The run's public data, None if it used none."""
        return self.record.get("public")

    # How far it came

    @property
    def finished(self) -> bool:
        """Whether the summary and all rounds are there: those requested, or up to where a callback stopped the run."""
        if not self.summary:
            return False
        if self.summary.get("status") == "stopped":
            last = self.summary["rounds"]
        else:
            last = self.record["rounds"]

        return len(self.rounds) >= int(last)

    @property
    def final_summary(self) -> Config:
        """The summary of the last committed round, {} if the run was interrupted or is being continued."""
        if not self.summary or self.manifest is None:
            return self.summary
        # A run that is continued has rounds that its old summary does not know.
        if self.manifest["round"] == self.summary["rounds"]:
            return self.summary

        return {}

    @property
    def best_round(self) -> Config | None:
        """The number and the validation metric of the best round, None if no round was evaluated."""
        manifest = self.manifest or {"record": {}}
        return manifest["record"].get("best") or self.final_summary.get("best")

    @property
    def undefined(self) -> Sequence[str]:
        """The run's notes on an undefined key metric."""
        return self.summary.get("undefined") or ()

    def progress(self) -> list[tuple[int, float, float, float]]:
        """Return (round, bytes so far, seconds so far, key metric) of the rounds with a known validation metric."""
        points = []
        sent = 0.0
        seconds = 0.0
        for entry in self.rounds:
            sent += entry.get("bytes_up", 0) + entry.get("bytes_down", 0)
            seconds += entry.get("seconds", 0)
            value = (entry.get("val") or {}).get(self.key)
            if value is not None:
                points.append((int(entry["round"]), sent, seconds, float(value)))

        return points

    # Models and sites

    @property
    def judged(self) -> str:
        """The kind of model by which the run is judged: "received" (the global model) or "personal"."""
        source = self.summary or (self.rounds[-1] if self.rounds else {})
        if source.get("judged") == "personal":
            return "personal"

        return "received"

    @property
    def personal_model(self) -> str:
        """Description of this run's personal models; "" if it has none, or an older run does not say."""
        columns = chain.from_iterable(self.sites)
        if not any(column.startswith("personal_") for column in columns):
            return ""
        return str(self.summary.get("personal_model") or "")

    @cached_property
    def site_names(self) -> tuple[str, ...]:
        """The sites in the order of `sites.csv`, then the partition's further ones."""
        planned = self.record["partition"].get("sites") or ()
        return tuple(dict.fromkeys([*(row["site"] for row in self.sites), *planned]))

    def size(self, site: str, section: str) -> int:
        """Return the number of items of a section at the site."""
        sites = self.record["partition"].get("sites") or {}
        return len(sites.get(site, {}).get(section, ()))

    def site_values(self, kind: str, metric: str) -> Metrics:
        """Return site -> test metric for sites that have it; `kind` is received, personal or local."""
        column = f"{kind}_{metric}"
        try:
            values = {row["site"]: float(row[column]) for row in self.sites if column in row}
        except ValueError as error:
            raise damaged(
                self.path / "sites.csv", f"has no number in column {column} ({error})"
            ) from None
        return {site: value for site, value in values.items() if math.isfinite(value)}

    def pooled(self) -> list[tuple[str, str, Config]]:
        """Return (kind, "last", "best", "mean" or "sd", {"round", metric…}) of the pooled test metrics in the summary.

        Mean and sd are over the sites' own models, each on all test items; one site has no sd.
        """
        if not self.summary:
            return []

        # Without entries by kind, those of the judged model are at the top.
        by_kind = {kind: self.summary.get(key) for kind, (key, _, _) in SUMMARY_KINDS.items()}
        if not any(by_kind.values()):
            by_kind[self.judged] = self.summary

        pooled = []
        for kind, entries in by_kind.items():
            for name in SUMMARY_KINDS[kind][2]:
                if entries and entries.get(name) and (name != "sd" or len(self.site_names) > 1):
                    pooled.append((kind, name, entries[name]))

        return pooled

    @property
    def structures(self) -> Mapping[str, Config]:
        """Structure -> metrics and cases of the judged model after the last round; {} if there are none."""
        return (self.summary.get("last") or {}).get("classes") or {}

    @property
    def largest_components(self) -> list[str]:
        """Structures of which the global model keeps only the largest component; an evaluation's are configured."""
        configured = (self.record.get("config") or {}).get("largest_component")
        if isinstance(configured, list):
            return configured

        summary = self.summary.get("global") or self.summary
        structures = (summary.get("last") or {}).get("classes") or {}
        return [name for name in structures if structures[name].get("largest_component")]
