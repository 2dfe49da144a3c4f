"""A run whose server holds no images of the sites: names, numbers that they tell, and perhaps images of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from medfl.bundle.bundle import Bundle
from medfl.bundle.sections import SECTIONS
from medfl.core.run import Run
from medfl.core.run_folder import RunFolder
from medfl.data.prepared import Batch, Prepared, Stacked
from medfl.flare.server import FlareWorkers
from medfl.methods.base import Method
from medfl.runtimes.federation import Federation, prepared_sections

Reported = Mapping[str, float]


def federation_of_names(bundle: Bundle, method: Method, run: Run, held_out: bool) -> Federation:
    """Return a federation whose sites have names and no images.

    Args:
        bundle: the bundle, on the server's own images if there are any.
        method: the method.
        run: its partition has no items.
        held_out: score the global model on the bundle's validation and test items, which no site trains on.
    """
    nothing: dict[str, Prepared] = dict.fromkeys(SECTIONS, _Nothing([], torch.empty(0), torch.empty(0)))
    own = prepared_sections(bundle) if held_out else nothing
    return Federation(bundle, method, run, prepared={**own, "train": nothing["train"]})


class _Nothing(Stacked):
    """No items, of no shape."""

    def batches(self, indices: Tensor, size: int, generator: torch.Generator | None) -> Iterator[Batch]:
        """Yield nothing."""
        yield from ()


class ReportedRunFolder(RunFolder):
    """A run folder with what the sites told of their own items: `told` and `samples` of each site.

    Means over sites are weighted by the number of cases; of metrics that are no means over cases, as AUROC, such a mean
    is not what the pooled cases would give.
    """

    workers: FlareWorkers | None = None

    def append_round(self, entry: Mapping[str, Any]) -> None:
        """Append a line, with what was told in this round."""
        assert isinstance(entry, dict)
        workers, sites = self.workers, entry["sites"]
        assert workers is not None
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

    def write_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table; that of the sites with what they told last."""
        workers = self.workers
        if name == "sites.csv" and workers is not None:
            told = {**(self.rounds()[-1]["sites"] if self.rounds() else {})}
            rows = [{"site": row["site"], **_row(told.get(row["site"], {}), workers, row["site"])} for row in rows]
        if rows:
            super().write_table(name, rows)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, with the means of what was told last."""
        last = self.rounds()[-1]["told"] if self.rounds() else {}
        final = mean_reported(self.workers.reported) if self.workers else {}
        super().write_summary({**summary, "told": {**last, **final}})


def mean_reported(told: Mapping[str, Reported]) -> dict[str, float]:
    """Return the mean of what sites told, weighted by the number of cases, which are added."""
    keys = dict.fromkeys(key for metrics in told.values() for key in metrics)
    found: dict[str, float] = {}
    for key in keys:
        section, _, metric = key.partition("/")
        counts = {name: int(metrics.get(f"{section}/cases", 0)) for name, metrics in told.items() if key in metrics}
        found[key] = (
            float(sum(counts.values()))
            if metric == "cases"
            else _mean({name: told[name][key] for name in counts}, counts)
        )
    return found


def _mean(values: Mapping[str, float], weights: Mapping[str, int]) -> float:
    """Return the weighted mean of those that are numbers, NaN if there are none."""
    known = {name: value for name, value in values.items() if value == value}
    total = sum(weights[name] for name in known)
    return sum(value * weights[name] for name, value in known.items()) / total if total else math.nan


def _row(site: Mapping[str, Any], workers: FlareWorkers, name: str) -> dict[str, Any]:
    told = {**site.get("told", {}), **workers.reported.get(name, {})}
    return {"train": site.get("samples", workers.samples.get(name, 0)), **{f"told_{k}": v for k, v in told.items()}}
