"""Losses that shape the features of a batch by class: decorrelation inside a class, a margin between classes.

From "Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping" (Fan et al., 2023); equation
numbers are theirs. B samples, K classes, d features. All shapes depend only on the arguments: no loop over classes and
nothing that depends on the number of samples per class, so that a GPU never has to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from medfl.methods._parts.prototypes import class_indices
from medfl.methods.base import Collated
from medfl.training import Site

STDS = ("unbiased", "biased")
INTRA_SCALES = ("paper", "mean_offdiag", "released")

FeatureLoss = Callable[[Tensor, Tensor], Tensor]
"""(features (B, d), class indices (B,)) -> scalar."""


def intra_class_loss(
    features: Tensor,
    labels: Tensor,
    *,
    std: str = "unbiased",
    min_count: int = 2,
    eps: float = 1e-8,
    scale: str = "paper",
) -> Tensor:
    """Return the decorrelation of the features inside each class, eq. 3: the mean over classes of ||M^c||_F^2.

    M^c = 1/(n_c - 1) sum z z', where z are the features of class c minus their mean, divided by their standard
    deviation; with the unbiased one M^c is the correlation matrix. Gradients pass through mean and deviation.

    Args:
        features: (B, d).
        labels: (B,) class indices.
        std: divisor of the variance, "unbiased" (n_c - 1) or "biased" (n_c).
        min_count: classes with fewer samples in the batch are skipped, at least 2; with exactly 2 the value is d^2
            and the gradient 0, whatever the features. Without any class the loss is 0.
        eps: added to the variance, so that a feature without any drops out.
        scale: "paper"; "mean_offdiag", the mean over classes of the mean squared entry of M^c off the diagonal; or
            "released", sum_c (n_c - 1)^2 times that mean, over the samples used (the authors' code).
    """
    # (B, B): which samples have the same class. Its products are sums over each sample's class.
    same_class = (labels[:, None] == labels).to(features.dtype)
    n = same_class.sum(1, keepdim=True)
    degrees = (n - 1).clamp(min=1)
    centred = features - same_class @ features / n
    # Twice: rounding residues would count for a constant feature.
    centred = centred - same_class @ centred / n
    # (B, d), of the class of each sample
    variance = same_class @ centred.square() / (degrees if std == "unbiased" else n)
    z = centred * (variance + eps).rsqrt()

    used = (n >= max(min_count, 2)).to(n.dtype)

    if scale == "released":
        weight = used / used.sum().clamp(min=1)
    else:
        weight = used / degrees.square() / (used / n).sum().clamp(min=1)

    # ||Z'Z||_F = ||ZZ'||_F of each class: one matrix (B, B) has them all
    value = (weight * same_class * (z @ z.T).square()).sum()
    if scale == "paper":
        return value

    # without the diagonal, d (d - 1) entries are left
    d = features.shape[1]
    diagonal = (same_class @ z.square()).square().sum(1, keepdim=True) / n  # (B, 1)
    return (value - (weight * diagonal).sum()) / max(d * (d - 1), 1)


def inter_class_loss(
    features: Tensor,
    labels: Tensor,
    table: Tensor,
    known: Tensor,
    *,
    owned: Tensor | None = None,
    margin: bool = True,
) -> Tensor:
    """Return the margin of the features to the prototypes g of the other classes, eq. 4.

    Each sample of class c costs max(||z - g_c|| - ||z - g_j||, 0) for each other class j. Costs are averaged over the
    samples of a class, then over the classes of the batch and over the other classes j. A class without a prototype is
    in neither. Without any pair of classes: 0.

    Args:
        features: (B, d).
        labels: (B,) class indices.
        table: (K, d), the prototypes, finite; constant.
        known: (K,) bool, which of them exist.
        owned: (K,) bool, the classes j, including those of the batch; default all.
        margin: without it a sample costs ||z - g_c||.
    """
    member = labels[:, None] == torch.arange(len(table), device=labels.device)  # (B, K)
    other_classes = known if owned is None else known & owned
    counts = member.sum(0)
    pairs = ((counts > 0) & known).sum() * (other_classes.sum() - 1)
    # Of a sample of each class in each of its pairs.
    share = known.to(features.dtype) / (counts * pairs).clamp(min=1)  # (K,)
    # `vector_norm` has the gradient 0 at 0, where the norm's own formula gives NaN.
    apart = torch.linalg.vector_norm(features[:, None] - table.detach(), dim=2)  # (B, K)
    apart_from_own = apart.gather(1, labels[:, None])
    cost = (apart_from_own - apart).relu() if margin else apart_from_own
    total: Tensor = (share[labels, None] * (other_classes & ~member) * cost).sum()

    return total


def shaped(site: Site, loss: FeatureLoss) -> Site:
    """Return the site with a loss on the features added to whatever it trains, in float32 also with mixed precision."""
    before = site.penalty

    def penalty(features: Tensor, targets: Collated) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            exact = features.to(torch.promote_types(features.dtype, torch.float32))
            added = loss(exact, class_indices(targets))

        if before is None:
            return added

        return before(features, targets) + added

    return replace(site, penalty=penalty)
