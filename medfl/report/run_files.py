"""A run folder as reports and comparisons read it: its files, and how its metrics are called."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from medfl.core.arrays import Integers
from medfl.core.names import slug
from medfl.evaluation import metrics
from medfl.evaluation.bootstrap import Draws
from medfl.evaluation.mask_metrics import KINDS as OF_STRUCTURES
from medfl.evaluation.metrics import METRICS, OVER_CLASSES, Cases, higher_is_better
from medfl.evaluation.undefined import listed
from medfl.storage.run_reader import RunReader, Table

if TYPE_CHECKING:
    from medfl.problem.tasks.kind import Kind, Redrawn, Wanted

_RISE = 0.005  # of a metric from 0 to 1, of others this share: less is noise
MODEL_KINDS = (("received", "Global model"), ("personal", "Personalised"), ("local", "Local only"))
"""The models that a site's test items are scored with, and their titles."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of the judged models for test cases.

    Attributes:
        cases: what they are.
        sites: the site of each case, "" where it has none.
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
        sites = [self.sites[row] for row in rows]
        return Predictions(self.cases.select(rows.tolist()), sites, self.kind)


class RunFiles(RunReader):
    """A run folder with its predictions, and the names and titles of its metrics."""

    @cached_property
    def kind(self) -> Kind:
        """The kind of its task."""
        from medfl.problem.tasks import KINDS  # here: it imports MONAI, which takes seconds

        return KINDS.get(str(self.record.get("task")), KINDS["other"])

    @cached_property
    def predictions(self) -> Predictions | None:
        """`predictions.csv`, None where the run did not get that far."""
        return self._predictions(self.prediction_table)

    @cached_property
    def newcomers(self) -> Predictions | None:
        """What sites without training items are given, of a method with a model for each site; None without any."""
        return self._predictions(self.newcomer_table)

    def _predictions(self, table: Table | None) -> Predictions | None:
        if table is None:
            return None

        return Predictions(self.kind.read(table, self.classes), table.texts("site"), self.kind)

    @property
    def classes_at(self) -> tuple[int, Mapping[str, int]]:
        """How many classes or findings the sites' test cases have, and each site's; 0 and {} where all have all."""
        sites = (self.summary or {}).get("sites") or {}
        return int(sites.get("of_classes") or 0), sites.get("classes_at") or {}

    def spread(self, model: str, metric: str) -> metrics.Spread:
        """Return mean, standard deviation and worst site of a metric, the worst is one that has all classes."""
        values = self.site_values(model, metric)
        count, classes = self.classes_at
        ranked = None
        if count and metric in OVER_CLASSES:
            ranked = [site for site in values if classes.get(site) == count]

        return metrics.spread(values, higher_is_better(metric), ranked)

    def classes_of(self, site: str) -> str:
        """Return over how many classes a site's means are, "" where it is all, or not known."""
        count, classes = self.classes_at
        if classes.get(site, count) == count:
            return ""

        plural = "classes" if self.kind.noun == "class" else f"{self.kind.noun}s"
        return f"{classes[site]} of {count} {plural}"

    @property
    def unequal_classes(self) -> str:
        """What is said of sites' means that are not over all classes or findings, "" where they are."""
        name = metrics.title(self.key)
        remarks = []
        left_out = ((self.summary or {}).get("sites") or {}).get("left_out") or ()
        if left_out:
            why = "which too few of their test images have or lack"
            remarks.append(f"{name} of single sites is not over {listed(left_out)}, {why}")

        fewer = [f"{site} {text}" for site in self.site_names if (text := self.classes_of(site))]
        if fewer:
            count, classes = self.classes_at
            if count in classes.values():
                worst = "the worst site is one of the others"
            else:
                worst = "no site has all, so none is called the worst"

            remarks.append(f"{name} is a mean over fewer at some sites ({listed(fewer)}): {worst}")

        return "; ".join(remarks)

    @property
    def said(self) -> tuple[str, ...]:
        """What is said of the key metric where it is undefined, or a mean over fewer classes at some sites."""
        return (*self.undefined, *filter(None, [self.unequal_classes]))

    @property
    def rise(self) -> tuple[float, float] | None:
        """The best validation metric before the last third of the rounds and in it, None where it no longer got better.

        Where less is better it is one that still fell.
        """
        scores = [row["val"][self.key] for row in self.rounds if self.key in (row.get("val") or ())]
        part = len(scores) // 3
        finite = all(isinstance(score, int | float) and math.isfinite(score) for score in scores)
        if part < 1 or not finite or (self.summary or {}).get("status") == "stopped":
            return None

        higher = higher_is_better(self.key)
        best_of = max if higher else min
        before = best_of(scores[:-part])
        last = best_of(scores[-part:])
        sign = 1 if higher else -1
        gain = sign * (last - before)
        least = _RISE if higher else _RISE * abs(before)
        # A rise that is lost again by half at the end was chance.
        if gain < least or sign * scores[-1] < sign * last - gain / 2:
            return None

        return before, last

    def title(self, metric: str) -> str:
        """Return a metric's title with its unit, which older runs do not state."""
        title = metrics.title(metric)
        units = (self.summary or {}).get("units") or {}
        unit = units.get(metric, "mm or pixels" if metric.startswith("hd95") else "")
        return f"{title} ({unit})" if unit else title

    @property
    def structure_metrics(self) -> list[str]:
        """The metrics that any structure, finding or number has."""
        kinds = set[str]().union(*self.structures.values())
        return [kind for kind in METRICS if kind in kinds]

    def metric_names(self) -> list[str]:
        """Return the names of all pooled metrics, the key metric first, then in the order of `METRICS`.

        Those of single structures are in `structures`.
        """
        names = {name for _, _, values in self.pooled() for name in values}
        if not names:
            names = {name for entry in self.rounds[-1:] for name in entry.get("val") or {}}

        listed = [name for name in METRICS if name in names and name != self.key]
        names -= {self.key, *listed, "round", "classes"}
        for structure in self.structures:
            for kind in OF_STRUCTURES:
                metric = f"{kind}_{slug(structure)}"
                names -= {metric, f"{metric}_cases"}

        return [self.key, *listed, *sorted(names)]
