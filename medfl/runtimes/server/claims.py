"""Claims of a site that the server cannot verify: its number of items, and how far its training moved the weights.

A number of items is an integer, at least 1 and at most what the site had when it introduced itself (0 if it had none).
Two rules hold among three or more replies:

- A reply is refused if the change of a group of its tensors, or a number beside them, exceeds `FARTHEST` times the
  round's median. The median is honest if more than half of the replies are.
- No reply may have more of the weight than the share that the server allows, if the run has no cap of its own
  (`--max-share`).

None of this applies if all replies have equal weight, whatever their number and distance (`--aggregation median` and
others), because those rules tolerate what is refused here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from medfl.core import InputError, Message, Messages, Metrics, RunError, Weights, printable
from medfl.runtimes.federation import Federation
from medfl.runtimes.server.robust import sample_counts

FARTHEST = 1000.0
"""Maximum ratio of a change to the median norm of a round's changes."""
# number of replies from which there is a majority to compare one with
_SEVERAL = 3
_COUNT = "counts"


def check_counts(federation: Federation, name: str, message: Message, most: int) -> None:
    """Check that a site's numbers of items are plausible: of all items, and of each class if the method sends these.

    Raises:
        RunError: one is not; names the site, the number and the allowed range.
    """
    if not federation.aggregation.counts_samples:
        return
    for label, low, values in _counts(message, min(1, most)):
        # written so that NaN, which compares false, is rejected
        wrong = values[~((values == values.round()) & (low <= values) & (values <= most))]
        if wrong.numel():
            raise RunError(
                f"site {name!r}: {label} gives a number of items that cannot be true: {float(wrong[0]):.17g}; expected "
                f"a whole number from {low} to {most:,}, the number of its items"
            )


def _counts(message: Message, low: int) -> Iterator[tuple[str, int, Tensor]]:
    """Yield name, minimum and values of everything that counts items; a class may have none."""
    if "samples" in message.scalars:
        yield "its reply", low, torch.tensor(message.scalars["samples"], dtype=torch.float64)
    # numbers of items by class are a group "counts", or a tensor of that name in one of the method's groups
    for group, members in message.tensors.items():
        for name in members if group == _COUNT else members.keys() & {_COUNT}:
            yield f"'{group}/{name}'", 0, members[name].double()


def far_replies(
    federation: Federation, replies: Messages, broadcast: Mapping[str, Weights]
) -> dict[str, str]:
    """Return site -> reason for replies with a change of a group, or a number, over `FARTHEST` times the median.

    A tensor that the server did not send has changed from 0.
    """
    reasons: dict[str, str] = {}
    if len(replies) < _SEVERAL or not federation.aggregation.counts_samples:
        return reasons

    norms: defaultdict[str, Metrics] = defaultdict(dict)
    numbers: defaultdict[str, Metrics] = defaultdict(dict)
    for name, message in replies.items():
        for group, members in message.tensors.items():
            norms[group][name] = _change(members, broadcast.get(group, {}))

        for key, number in message.scalars.items():
            numbers[key][name] = abs(number)

    numbers.pop("samples", None)
    # if a site is far off in several, the first by name is reported
    for group in sorted(norms):
        reasons = _far(f"its change of {group!r} has the norm", norms[group]) | reasons

    for key in sorted(numbers):
        label = f"its 'scalars/{printable(key, 60)}' has the size"
        reasons = _far(label, numbers[key]) | reasons

    return reasons


def _far(label: str, sizes: Mapping[str, float]) -> dict[str, str]:
    """Return the sites whose size is far beyond the median, with the reason."""
    middle = sorted(sizes.values())[len(sizes) // 2]
    # if most have not moved at all, any change is infinitely many times the median
    if len(sizes) < _SEVERAL or middle <= 0:
        return {}

    reasons = {}
    for name, size in sizes.items():
        if size > FARTHEST * middle:
            reasons[name] = (
                f"{label} {size:.3g}, the round's middle one is {middle:.3g}; at most {FARTHEST:g} times that is taken"
            )

    return reasons


def _change(members: Weights, before: Weights) -> float:
    """Return the L2 norm of a reply's change in a group; infinite if it overflows the type."""
    norms = []
    for name, tensor in members.items():
        if tensor.is_floating_point():
            sent = before.get(name)
            change = tensor
            if sent is not None and sent.shape == tensor.shape:
                change = tensor - sent.to(tensor)

            # half precision overflows at 65,504
            wide = torch.promote_types(change.dtype, torch.float32)
            norms.append(float(torch.linalg.vector_norm(change, dtype=wide)))

    return math.hypot(*norms)


def check_shares(federation: Federation, label: str, replies: Messages, most: float | None) -> None:
    """Check that no site has more of the weight of the replies, by numbers of items, than the server allows.

    `most` is the largest share of one among three or more; None: any. A run with its own cap has no such limit.

    Raises:
        InputError: a site has more; names it.
    """
    if most is None or federation.run.max_share is not None or federation.equal_weight_flag:
        return

    # one of two always has half or more
    counts = sample_counts(replies)
    if len(counts) < _SEVERAL:
        return

    name = max(counts, key=lambda site: counts[site])
    total = sum(counts.values())
    if counts[name] > most * total:
        raise InputError(
            f"{label}: site {name!r} has {counts[name] / total:.1%} of the weight, {counts[name]:,.0f} of {total:,.0f} "
            "items",
            f"one of three or more sites has at most {most:.0%}",
            f"begin anew with --max-share {most:g} to count it for no more, or with --max-share 1 to allow it",
        )
