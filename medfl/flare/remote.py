"""A run whose server has the sites' names and reported metrics, but no images other than its own, if any."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch

from medfl.core import SECTIONS, Config, Document, Metrics, Print, Run, RunError
from medfl.data import Prepared, Stacked
from medfl.flare.server import Asking, FlareWorkers
from medfl.methods.base import Method
from medfl.problem import Problem, prepared_sections
from medfl.runtimes import FailedReply, Federation
from medfl.storage import CALIBRATION_SUMS, RunFolder, write_json

Reported = Mapping[str, float]


def federation_of_names(bundle: Problem, method: Method, run: Run, held_out: bool) -> Federation:
    """Return a federation whose sites have names but no images.

    With `held_out` the global model is scored on the bundle's validation and test items, on which no site trains.
    """
    nothing = Stacked([], torch.empty(0), torch.empty(0))
    sections: dict[str, Prepared] = dict.fromkeys(SECTIONS, nothing)
    if held_out:
        sections |= prepared_sections(bundle)

    return Federation(bundle, method, run, prepared={**sections, "train": nothing})


def write_fingerprints(
    asking: Asking, sites: Sequence[str], folder: Path, least: int, say: Print
) -> None:
    """Write the fingerprint of each site into a folder, for `medfl plan`.

    Raises:
        RunError: fewer than `least` sites have answered (0: not all of them); says why.
    """
    folder.mkdir(exist_ok=True)
    reasons = []
    files = []
    for name, answer in asking.fingerprints(sites):
        if isinstance(answer, FailedReply):
            reasons.append(answer.why)
            say(f"note: {answer.why}")
        else:
            files.append(folder / f"{name}.json")
            write_json(files[-1], answer.document())

    if len(files) < (least or len(sites)):
        raise RunError("; ".join(reasons))

    say(f"next: medfl plan {' '.join(map(str, sorted(files)))} --out FOLDER")


class ReportedRunFolder(RunFolder):
    """A run folder with the metrics that sites reported on their own items: `told` and `samples` of each site.

    Means over sites are weighted by their numbers of cases. For metrics that are not means over cases, such as AUROC,
    this mean differs from the value on the pooled cases.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._workers: FlareWorkers | None = None

    def follow(self, workers: FlareWorkers) -> None:
        """From now on write what the sites report to these workers."""
        self._workers = workers

    @property
    def workers(self) -> FlareWorkers:
        """The workers to which the sites report."""
        assert self._workers is not None
        return self._workers

    def append_round(self, entry: Config) -> None:
        """Append a line, with the metrics reported in this round."""
        assert isinstance(entry, dict)
        workers = self.workers
        sites = entry["sites"]
        samples = {name: workers.samples.get(name, 0) for name in sites}
        losses = {name: site.get("train_loss", math.nan) for name, site in sites.items()}
        entry["train_loss"] = _mean(losses, samples)

        for name, site in sites.items():
            site["samples"] = samples[name]
            if name in workers.reported:
                site["told"] = dict(workers.reported[name])

        entry["told"] = mean_reported(workers.reported)
        super().append_round(entry)
        workers.reported = {}

    def write_table(self, name: str, rows: Sequence[Config]) -> None:
        """Write a table; that of the sites with the metrics reported last."""
        if name == "sites.csv":
            sites = self.rounds()[-1]["sites"] if self.rounds() else {}
            rows = [self._reported_row(row, sites.get(row["site"], {})) for row in rows]
        if rows:
            super().write_table(name, rows)

    def write_summary(self, summary: Config) -> None:
        """Write the summary, with means of the last reported metrics and the sites' facts about their data."""
        last = self.rounds()[-1]["told"] if self.rounds() else {}
        final = mean_reported(self.workers.reported)
        facts = self.workers.by_kind(summary)
        if self.workers.sets:
            self.workers.save_sets(self.path / CALIBRATION_SUMS)

        super().write_summary({**summary, **facts, "told": {**last, **final}})

    def _reported_row(self, row: Config, site: Config) -> Document:
        name = row["site"]
        reported = {**site.get("told", {}), **self.workers.reported.get(name, {})}
        samples = site.get("samples", self.workers.samples.get(name, 0))
        columns = {f"told_{metric}": value for metric, value in reported.items()}
        for column, value in row.items():
            if column.startswith("received_"):
                columns[column] = value

        return {"site": name, "train": samples, **columns}


def mean_reported(reported: Mapping[str, Reported]) -> Metrics:
    """Return the means of the sites' metrics, weighted by their numbers of cases, and the total numbers."""
    means = {}
    for key in dict.fromkeys(chain.from_iterable(reported.values())):
        section, _, metric = key.partition("/")
        values = {name: metrics[key] for name, metrics in reported.items() if key in metrics}
        counts = {name: int(reported[name].get(f"{section}/cases", 0)) for name in values}
        if metric == "cases":
            means[key] = float(sum(counts.values()))
        else:
            means[key] = _mean(values, counts)

    return means


def _mean(values: Mapping[str, float], weights: Mapping[str, int]) -> float:
    """Return the weighted mean of the values that are not NaN, NaN if there are none."""
    total = 0
    weighted_sum = 0.0
    for name, value in values.items():
        if not math.isnan(value):
            total += weights[name]
            weighted_sum += value * weights[name]

    return weighted_sum / total if total else math.nan
