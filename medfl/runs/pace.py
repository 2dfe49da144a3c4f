"""How many steps a round has: fitted to the smallest site where a protocol leaves it open, and said in any case."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from medfl.core.run import Run

AUTO = "auto"
FEW = 10
"""Steps a round below which a network hardly moves."""
_WANTED, _LEAST_BATCH, _MOST_EPOCHS = 20, 2, 10
_RISE = 0.005


def fitted(chosen: Mapping[str, Any], smallest: int, most: int) -> dict[str, Any]:
    """Return a protocol's values with numbers in the place of "auto".

    A batch is a power of two, 2 at least, that the smallest site's images fill four times; local epochs are so many
    that this site has 20 steps a round, 10 at most.

    Args:
        chosen: by name, among them `batch_size` and `local_epochs`.
        smallest: training images of the smallest site.
        most: the bundle's own batch size.
    """
    values = dict(chosen)
    if values["batch_size"] == AUTO:
        quarter = 2 ** int(math.log2(max(smallest // 4, 1)))
        values["batch_size"] = min(most, max(quarter, _LEAST_BATCH))
    if values["local_epochs"] == AUTO:
        epoch = math.ceil(max(smallest, 1) / (values["batch_size"] or most))
        values["local_epochs"] = min(math.ceil(_WANTED / epoch), _MOST_EPOCHS)
    return values


def steps(run: Run) -> str:
    """Say how many steps a site has in a round, and what to do where they are few."""
    counts = {name: len(ids["train"]) for name, ids in run.partition.sites.items()}
    each = {name: run.local_epochs * math.ceil(count / run.batch_size) for name, count in counts.items()}
    least, most = min(each.values()), max(each.values())
    shown = str(least) if least == most else f"{least} to {most}"
    line = f"steps a round: {shown} (batch {run.batch_size}, local epochs {run.local_epochs})"
    if least >= FEW or run.method == "central":
        return line
    name = min(each, key=lambda site: each[site])
    better = fitted({"batch_size": AUTO, "local_epochs": AUTO}, counts[name], run.batch_size)
    advice = f"--batch-size {better['batch_size']} --local-epochs {better['local_epochs']}"
    return f"{line}; few at {name}, which has {counts[name]} training images: more are had with {advice}"


def still_rising(scores: Sequence[float], command: str) -> str:
    """Return a line where a validation metric was still rising at the end of a run, "" where it was not.

    Args:
        scores: of each round that was validated; higher is better.
        command: that goes on with the run.
    """
    part = len(scores) // 3
    if part < 1 or not all(map(math.isfinite, scores)):
        return ""
    before, last = max(scores[:-part]), max(scores[-part:])
    if last - before < _RISE or scores[-1] < last - (last - before) / 2:
        return ""
    return f"validation was still rising at the end, from {before:.3f} to {last:.3f}: go on with {command}"
