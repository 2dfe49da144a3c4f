"""Means over a group of replies, in sorted site order, never in order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor, nn

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


def shares_by(weights: str, replies: Mapping[str, Message]) -> dict[str, float]:
    """Return what an option `weights` says: the shares of a plain mean ("uniform"), or by samples ("samples")."""
    return uniform_shares(replies) if weights == "uniform" else sample_shares(replies)


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


def step_towards(old: Weights, mean: Weights, beta: float, names: Collection[str]) -> dict[str, Tensor]:
    """Return (1 - beta) old + beta mean of the named tensors, and the mean of all others."""
    moved = {} if beta == 1 else {name: old[name] + beta * (mean[name] - old[name]) for name in names}
    return {**mean, **moved}


def trained_names(network: nn.Module) -> list[str]:
    """Return the names of the trainable parameters in a state dict, all those of a shared one."""
    return [name for name, p in network.named_parameters(remove_duplicate=False) if p.requires_grad]
