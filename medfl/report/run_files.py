"""A run folder as reports and comparisons read it: its files, and how its metrics are called."""

from __future__ import annotations

from medfl.evaluation import metrics
from medfl.evaluation.mask_metrics import KINDS as OF_STRUCTURES, slug
from medfl.storage.run_reader import RunReader

MODEL_KINDS = (("received", "Global model"), ("personal", "Personalised"), ("local", "Local only"))
"""The models that a site's test items are scored with, and their titles."""


class RunFiles(RunReader):
    """A run folder with the names and titles of its metrics."""

    def title(self, metric: str) -> str:
        """Return a metric's title with its unit, which older runs do not state."""
        title = metrics.title(metric)
        units = (self.summary or {}).get("units") or {}
        unit = units.get(metric, "mm or pixels" if metric.startswith("hd95") else "")
        return f"{title} ({unit})" if unit else title

    @property
    def structure_metrics(self) -> list[str]:
        """The metrics that any structure has."""
        kinds = set[str]().union(*self.structures.values())
        return [kind for kind in OF_STRUCTURES if kind in kinds]

    def metric_names(self) -> list[str]:
        """Return the names of all pooled metrics, the key metric first, then in the order of `metrics.METRICS`.

        Those of single structures are in `structures`.
        """
        names = {name for _, _, values in self.pooled() for name in values}
        if not names:
            names = {name for entry in self.rounds[-1:] for name in entry.get("val") or {}}

        listed = [name for name in metrics.METRICS if name in names and name != self.key]
        names -= {self.key, *listed, "round", "classes"}
        for structure in self.structures:
            for kind in OF_STRUCTURES:
                metric = f"{kind}_{slug(structure)}"
                names -= {metric, f"{metric}_cases"}

        return [self.key, *listed, *sorted(names)]
