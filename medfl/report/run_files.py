"""A run folder for reports and comparisons: its files, and the names of its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from medfl.core import Integers, listed, slug, within
from medfl.evaluation import (
    METRICS,
    OVER_CLASSES,
    Cases,
    Draws,
    direction,
    higher_is_better,
    metrics,
)
from medfl.evaluation.mask_metrics import KINDS as OF_STRUCTURES
from medfl.evaluation.undefined import NAMED
from medfl.storage import RunReader, Table

if TYPE_CHECKING:
    from medfl.problem.tasks.kind import Kind, Redrawn, Wanted

_RISE = 0.005  # for a metric from 0 to 1, for others this share: less is noise
MODEL_KINDS = (("received", "Global model"), ("personal", "Personalised"), ("local", "Local only"))
"""The models with which a site's test items are scored, and their titles."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of the judged models for test cases.

    Attributes:
        cases: the outcomes.
        sites: the site of each case, "" if it has none.
        kind: of the task.
    """

    cases: Cases
    sites: Sequence[str]
    kind: Kind

    def __len__(self) -> int:
        return len(self.cases)

    @property
    def ids(self) -> Sequence[str]:
        """The ids of the cases."""
        return self.cases.ids

    @property
    def strata(self) -> Integers:
        """(N,) groups that a bootstrap resamples separately."""
        return self.kind.strata(self.cases)

    def redrawn(self, draws: Draws, wanted: Wanted = None) -> Redrawn:
        """Return the metrics in each draw (draws, N)."""
        return self.kind.redrawn(self.cases, draws, wanted)

    def select(self, rows: Integers) -> Predictions:
        """Return some of the cases, by their indices."""
        sites = np.array(self.sites)[rows].tolist()
        return Predictions(self.cases.select(rows.tolist()), sites, self.kind)


class RunFiles(RunReader):
    """A run folder with its predictions, and the names and titles of its metrics."""

    @cached_property
    def kind(self) -> Kind:
        """The kind of its task."""
        from medfl.problem.tasks import KINDS  # here, since it imports MONAI, which takes seconds

        return KINDS.get(str(self.record.get("task")), KINDS["other"])

    @cached_property
    def predictions(self) -> Predictions | None:
        """`predictions.csv`, None if the run did not get that far."""
        return self._predictions(self.prediction_table)

    @cached_property
    def newcomers(self) -> Predictions | None:
        """Predictions for sites without training items, for a method with a model per site; None without any."""
        return self._predictions(self.newcomer_table)

    def _predictions(self, table: Table | None) -> Predictions | None:
        if table is None:
            return None

        return Predictions(self.kind.read(table, self.classes), table.texts("site"), self.kind)

    @property
    def classes_at(self) -> tuple[int, Mapping[str, int]]:
        """Number of classes or findings in the sites' test cases, and each site's; 0 and {} if all have all."""
        sites = self.summary.get("sites") or {}
        return int(sites.get("of_classes") or 0), sites.get("classes_at") or {}

    def spread(self, model: str, metric: str) -> metrics.Spread:
        """Return mean, standard deviation and worst site of a metric; the worst site has all classes."""
        values = self.site_values(model, metric)
        count, classes = self.classes_at
        ranked = None
        if count and metric in OVER_CLASSES:
            # a site with fewer classes is not ranked
            ranked = [site for site in values if classes.get(site) == count]

        return metrics.spread(values, higher_is_better(metric), ranked)

    def classes_of(self, site: str) -> str:
        """Return how many classes a site's means cover, "" if all, or if unknown."""
        count, classes = self.classes_at
        if classes.get(site, count) == count:
            return ""

        plural = "classes" if self.kind.noun == "class" else f"{self.kind.noun}s"
        return f"{classes[site]} of {count} {plural}"

    @property
    def unequal_classes(self) -> str:
        """Note on sites' means that do not cover all classes or findings, "" if they do."""
        name = metrics.title(self.key)
        remarks = []
        left_out = (self.summary.get("sites") or {}).get("left_out") or ()
        if left_out:
            why = "which too few of their test images have or lack"
            remarks.append(f"{name} of single sites is not over {listed(left_out, NAMED)}, {why}")

        fewer = []
        for site in self.site_names:
            if text := self.classes_of(site):
                fewer.append(f"{site} {text}")

        if fewer:
            count, classes = self.classes_at
            worst = "no site has all, so none is called the worst"
            if count in classes.values():
                worst = "the worst site is one of the others"

            remarks.append(
                f"{name} is a mean over fewer at some sites ({listed(fewer, NAMED)}): {worst}"
            )

        return "; ".join(remarks)

    @property
    def said(self) -> tuple[str, ...]:
        """Notes on a key metric that is undefined, or a mean over fewer classes at some sites."""
        return (*self.undefined, *filter(None, [self.unequal_classes]))

    @property
    def rise(self) -> tuple[float, float] | None:
        """The best validation metric before and within the last third of the rounds, None if it no longer improved.

        If lower is better, it improved if it still fell.
        """
        scores = []
        for row in self.rounds:
            if self.key in (row.get("val") or ()):
                scores.append(row["val"][self.key])

        part = len(scores) // 3
        finite = all(isinstance(score, int | float) and math.isfinite(score) for score in scores)
        if part < 1 or not finite or self.summary.get("status") == "stopped":
            return None

        higher = higher_is_better(self.key)
        sign = direction(self.key)
        best_of = max if higher else min
        before = best_of(scores[:-part])
        last = best_of(scores[-part:])
        gain = sign * (last - before)
        least = _RISE if higher else _RISE * abs(before)
        # An improvement of which half is lost again at the end was chance.
        if gain < least or sign * scores[-1] < sign * last - gain / 2:
            return None

        return before, last

    def title(self, metric: str) -> str:
        """Return a metric's title with its unit, which older runs do not give."""
        title = metrics.title(metric)
        units = self.summary.get("units") or {}
        unit = units.get(metric, "mm or pixels" if metric.startswith("hd95") else "")
        return f"{title} ({unit})" if unit else title

    @property
    def structure_metrics(self) -> list[str]:
        """The metrics that any structure, finding or number has."""
        return list(within(METRICS, set().union(*self.structures.values())))

    def metric_names(self) -> list[str]:
        """Return the names of all pooled metrics, the key metric first, then in the order of `METRICS`.

        Those of single structures are in `structures`.
        """
        names = set().union(*(values for _, _, values in self.pooled()))
        # an unfinished run has no pooled metrics, but those of its last round
        if not names and self.rounds:
            names.update(self.rounds[-1].get("val") or ())

        listed = [name for name in METRICS if name in names and name != self.key]
        names -= {self.key, *listed, "round", "classes"}
        for structure in self.structures:
            for kind in OF_STRUCTURES:
                metric = f"{kind}_{slug(structure)}"
                names -= {metric, f"{metric}_cases"}

        return [self.key, *listed, *sorted(names)]
