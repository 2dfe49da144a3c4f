"""The number of steps per round and run: fitted to the smallest site if a protocol leaves it open."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from medfl.core import Config, Document, Run

AUTO = "auto"
FEW = 10
"""Steps per round below which a network hardly changes."""
_WANTED = 20  # steps per round
_LEAST_BATCH = 2
_MOST_EPOCHS = 10
_IN_ALL = {"segmentation": 240}  # steps of a whole run
_IN_ALL_ELSE = 640  # an image says one class, a mask one for each pixel
_LEAST_ROUNDS = 5
_MOST_ROUNDS = 30
_MOST_IMAGES = 20_000  # total over all rounds: more takes hours on a CPU


def fit_schedule(chosen: Config, sizes: Collection[int], most: int, task: str) -> Document:
    """Return a protocol's values with numbers in place of "auto".

    The smallest site decides. The batch is the largest power of two that its images fill four times, at least 2. Local
    epochs give it 20 steps per round, but are at most 10. Rounds give it 240 steps in the whole run for segmentation,
    640 otherwise; they are 5 to 30, and above 5 only while all sites together train on at most 20,000 images.

    Args:
        chosen: by name, among them `batch_size`, `local_epochs` and `rounds`.
        sizes: training images of each site.
        most: the bundle's own batch size.
        task: its kind.
    """
    values = dict(chosen)
    # the smallest site decides: with the others' batch it would take one step per round
    smallest = min(filter(None, sizes), default=1)
    if values["batch_size"] == AUTO:
        # at least four steps per epoch, with a power of two as batch
        quarter = 2 ** int(math.log2(max(smallest // 4, 1)))
        values["batch_size"] = min(most, max(quarter, _LEAST_BATCH))

    epoch = math.ceil(smallest / (values["batch_size"] or most))
    if values["local_epochs"] == AUTO:
        values["local_epochs"] = min(math.ceil(_WANTED / epoch), _MOST_EPOCHS)

    if values["rounds"] == AUTO:
        epochs = values["local_epochs"]
        enough = min(math.ceil(_IN_ALL.get(task, _IN_ALL_ELSE) / (epochs * epoch)), _MOST_ROUNDS)
        values["rounds"] = max(
            min(enough, _MOST_IMAGES // (epochs * max(sum(sizes), 1))), _LEAST_ROUNDS
        )

    return values


def rounds_note(chosen: Config, run: Run) -> tuple[str, ...]:
    """Return a line on a run's rounds if its protocol left them open, otherwise nothing."""
    if chosen["rounds"] != AUTO:
        return ()
    least = min(_trained(run).values(), default=1)
    count = run.rounds * run.local_epochs * math.ceil(least / run.batch_size)
    return (
        f"{run.rounds} rounds, fitted to the smallest site, whose {least} training images then make {count} steps in "
        "all; --rounds N for another number",
    )


def standstill(
    scores: Mapping[int, float | None], higher_is_better: bool, patience: int
) -> tuple[int, int] | None:
    """Return the best round, and the round at which early stopping would have ended a run without losing it.

    None if that saves less than a quarter of the rounds, or a round has no score.

    Args:
        scores: validation metric of each round, in ascending order.
        higher_is_better: of the metric.
        patience: rounds without improvement.
    """
    sign = 1 if higher_is_better else -1
    best = min(scores, default=0)
    end = None
    for number, score in scores.items():
        if score is None:
            return None
        if sign * score > sign * (scores[best] or 0.0):
            best = number
            if end is not None:
                return None
        elif end is None and number - best >= patience:
            end = number

    # saving less than a quarter of the rounds is not worth advice
    if end is None or end > 0.75 * max(scores):
        return None

    return best, end


def _trained(run: Run) -> dict[str, int]:
    """Return site -> training images, for sites that have some."""
    counts = {}
    for name, ids in run.partition.sites.items():
        if ids["train"]:
            counts[name] = len(ids["train"])

    return counts


def steps_note(run: Run) -> str:
    """Report the number of steps per site and round, with advice if there are few."""
    counts = _trained(run)
    if not run.rounds or not counts:
        return "nothing is trained"

    steps = {}
    for name, count in counts.items():
        steps[name] = run.local_epochs * math.ceil(count / run.batch_size)

    least = min(steps.values())
    most = max(steps.values())
    extent = str(least) if least == most else f"{least} to {most}"
    line = f"steps a round: {extent} (batch {run.batch_size}, local epochs {run.local_epochs})"

    if least >= FEW or run.method == "central":
        return line

    name = min(steps, key=lambda site: steps[site])
    better = fit_schedule(
        {"batch_size": AUTO, "local_epochs": AUTO, "rounds": 1}, [counts[name]], run.batch_size, ""
    )
    flags = []
    for setting in ("batch_size", "local_epochs"):
        if better[setting] != getattr(run, setting):
            flags.append(f"--{setting.replace('_', '-')} {better[setting]}")

    line += f"; few at {name}, which has {counts[name]} training images"
    return f"{line}: for more use {' '.join(flags)}" if flags else line
