"""Weights corrected by how far sites drift from them: FedDyn and FedDC."""

from __future__ import annotations

from medfl.core.message import Messages, Tensors, Weights
from medfl.methods.base import sample_shares, uniform_shares, weighted_mean


def mean_with_drift(
    replies: Messages, received: Weights, drift: Weights, num_sites: int
) -> tuple[Tensors, Tensors]:
    """Return the next weights and mean drift of the server: the participants' plain mean plus the mean drift.

    A site's drift is the sum of w_k - w over its rounds; an absent one's stays, so that the mean over all sites grows
    by the participants' part of the mean step. Tensors without a drift, such as buffers, are averaged by samples.

    Args:
        replies: of the round's participants.
        received: the weights w that they started from.
        drift: trainable parameter -> mean drift of all sites before this round.
        num_sites: all sites.
    """
    mean = weighted_mean(replies, "weights", uniform_shares(replies))
    # Mean over participants times this is the sum over them, divided by all sites.
    part = len(replies) / num_sites
    fresh = {name: old + part * (mean[name] - received[name]) for name, old in drift.items()}
    weights = weighted_mean(replies, "weights", sample_shares(replies))
    return weights | {name: mean[name] + value for name, value in fresh.items()}, fresh
