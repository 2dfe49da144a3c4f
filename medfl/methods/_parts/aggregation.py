"""Means over a group of replies, in sorted site order, never in order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from medfl.core.errors import RunError
from medfl.core.message import Message, Weights

_BLOCK = 32768
"""Numbers summed at a time on a CPU: their float64 sum and the buffer beside it stay in its cache."""


def sample_shares(replies: Mapping[str, Message]) -> dict[str, float]:
    """Return p_k = n_k / sum of n over the round's participants (McMahan et al. 2017, FedAvg).

    Raises:
        RunError: a reply does not have its n_k.
    """
    without = [name for name in sorted(replies) if "samples" not in replies[name].scalars]
    if without:
        raise RunError(f"site {without[0]!r}: its reply does not say of how many items it is")
    total = sum(replies[name].scalars["samples"] for name in sorted(replies))
    return {name: replies[name].scalars["samples"] / total for name in sorted(replies)}


def uniform_shares(replies: Mapping[str, Message]) -> dict[str, float]:
    """Return 1/S for each of the S participants."""
    return {name: 1 / len(replies) for name in sorted(replies)}


def weighted_mean(replies: Mapping[str, Message], group: str, shares: Mapping[str, float]) -> dict[str, Tensor]:
    """Average one tensor group with the given shares (they sum to 1).

    Floating tensors, BatchNorm's running statistics among them, are averaged; integer counters such as
    `num_batches_tracked` take the maximum, since the mean of counters means nothing.

    Block by block the replies are added to a float64 sum, which is rounded once at the end: replies that lie on disk
    need not fit in memory, many small shares lose nothing, and no large tensor is written but the mean.
    """
    parts = {name: replies[name][group] for name in sorted(replies)}
    first, *others = parts
    out: dict[str, Tensor] = {}
    with torch.no_grad():
        for key, like in parts[first].items():
            if not like.is_floating_point():
                out[key] = like.clone()
                for name in others:
                    torch.maximum(out[key], parts[name][key], out=out[key])
                continue
            read = {name: slices(weights, key) for name, weights in parts.items()}
            mean = torch.empty_like(like, memory_format=torch.contiguous_format)
            flat, size = mean.view(-1), max(1, like.numel() if like.device.type != "cpu" else _BLOCK)
            wide = torch.empty(min(size, like.numel()), dtype=torch.float64, device=like.device)
            for start in range(0, like.numel(), size):
                stop = min(start + size, like.numel())
                total = read[first](start, stop).to(torch.float64, copy=True).mul_(shares[first])
                for name in others:  # widened first: adding float32 to float64 takes twice as long
                    total.add_(wide[: stop - start].copy_(read[name](start, stop)), alpha=shares[name])
                flat[start:stop] = total
            out[key] = mean
    return out


def slices(weights: Weights, name: str) -> Callable[[int, int], Tensor]:
    """Return what gives the numbers start..stop of a tensor; of a reply on disk those are read and no more."""
    read = getattr(weights, "part", None)
    if read is not None:
        return partial(read, name)
    flat = weights[name].reshape(-1)
    return lambda start, stop: flat[start:stop]


def mean_with_drift(
    replies: Mapping[str, Message], received: Weights, drift: Weights, num_sites: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the next weights and mean drift of FedDyn and FedDC: the participants' plain mean plus the mean drift.

    A site's drift is the sum of w_k - w over its rounds; an absent one's stays, so that the mean over all sites grows
    by the participants' part of the mean step. Tensors without a drift, such as buffers, are averaged by samples.

    Args:
        replies: of the round's participants.
        received: the weights w that they started from.
        drift: trainable parameter -> mean drift of all sites before this round.
        num_sites: all sites.
    """
    mean = weighted_mean(replies, "weights", uniform_shares(replies))
    part = len(replies) / num_sites
    fresh = {name: old + part * (mean[name] - received[name]) for name, old in drift.items()}
    weights = weighted_mean(replies, "weights", sample_shares(replies))
    return weights | {name: mean[name] + value for name, value in fresh.items()}, fresh
