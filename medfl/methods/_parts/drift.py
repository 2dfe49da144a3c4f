"""Weights corrected by the drift of the sites: FedDyn and FedDC."""

from __future__ import annotations

from medfl.core import Messages, Tensors, Weights
from medfl.methods.base import (
    difference,
    moved_by,
    sample_shares,
    uniform_shares,
    weighted_mean,
)


def mean_with_drift(
    replies: Messages, received: Weights, drift: Weights, num_sites: int
) -> tuple[Tensors, Tensors]:
    """Return the server's next weights and mean drift: the participants' plain mean plus the mean drift.

    A site's drift is the sum of w_k - w over its rounds; that of absent sites is unchanged, so that the mean over all
    sites grows by the participants' share of the mean step. Tensors without a drift, such as buffers, are averaged by
    samples.

    Args:
        replies: of the round's participants.
        received: the weights w that they started from.
        drift: trainable parameter -> mean drift of all sites before this round.
        num_sites: all sites.
    """
    mean = weighted_mean(replies, "weights", uniform_shares(replies))
    # Mean over participants times this factor is their sum divided by all sites.
    part = len(replies) / num_sites
    fresh = moved_by(drift, difference(mean, received, drift), part)
    weights = weighted_mean(replies, "weights", sample_shares(replies))
    return weights | moved_by(fresh, mean), fresh
