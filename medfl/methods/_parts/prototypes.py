"""Class statistics of features: counts, means (prototypes) and covariances, at one site and over all sites.

Features are the input of the head, of shape (B, d). A site's statistics come from one pass in evaluation mode without
gradients and without random transforms. K is the number of classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, one_hot

from medfl.core import Weights
from medfl.data import Shard
from medfl.methods._parts.class_heads import class_count
from medfl.methods.base import Group
from medfl.networks.heads import feature_size, features_and_output, head
from medfl.training import Site, evaluating

OWN, OTHERS, MISSING = DISTANCES = (
    "own class",
    "other classes of the site",
    "classes missing at the site",
)
"""Pairs whose distances between class means and prototypes are observed; names of observed numbers."""


def prototype_groups(*, counts: bool) -> tuple[Group, ...]:
    """Return the groups of methods that send class prototypes both ways; class sizes are sent up if `counts`."""
    both = Group("prototypes", smaller=True)
    if counts:
        return (both, Group("counts", down=False))

    return (both,)


def class_indices(targets: Tensor) -> Tensor:
    """Return class indices (B,) of targets (B,), (B, 1) or one-hot (B, K)."""
    if targets.ndim == 2 and targets.shape[1] > 1:
        return targets.argmax(1)
    return targets.reshape(len(targets)).long()


def pixel_classes(masks: Tensor) -> Tensor:
    """Return the class index of each pixel (B, P) of masks (B, 1, H, W[, D]) or one-hot (B, K, H, W[, D])."""
    classes = masks.argmax(1) if masks.shape[1] > 1 else masks[:, 0]
    return classes.flatten(1).long()


def class_counts(shard: Shard, num_classes: int) -> Tensor:
    """Return the number of items per class at a site, (K,) int64; from the data list if it has labels.

    An image without a label (-1) is not counted.
    """
    labels = torch.tensor(shard.labels, dtype=torch.int64)
    if len(labels) < len(shard):
        labels = torch.cat([class_indices(y).cpu() for _, y in shard.batches(256)])
    return torch.bincount(labels[labels >= 0], minlength=num_classes)


def class_prior(counts: Tensor, strength: float = 1.0) -> Tensor:
    """Return the term that balanced softmax adds to a site's logits: strength * log(n_c / max n), (K,) float32.

    Cross-entropy of z + log n is -log(n_y e^(z_y) / sum_c n_c e^(z_c)) (Ren et al. 2020); dividing by the largest count
    does not change it and makes equal counts exactly 0. An absent class counts 1e-12, so that its log is finite.

    Args:
        counts: (K,), the site's items per class.
        strength: gamma; 0 is plain cross-entropy.
    """
    # clamped, so that a class without items gets a large penalty and no infinite one
    return strength * (counts.double().clamp(min=1e-12) / counts.max()).log().float()


def log_prior(site: Site, num_classes: int, gamma: float) -> Tensor | float:
    """Return balanced softmax's addition to a site's logits, (K,) on its device: gamma log n; 0 if gamma is 0."""
    if gamma:
        return class_prior(class_counts(site.train, num_classes), gamma).to(site.device)

    return 0.0


def features(
    network: nn.Module,
    shard: Shard,
    batch_size: int,
    device: torch.device,
    *,
    normalised: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield features (B, d) and class indices (B,) in the shard's order; the network's mode is restored at the end.

    Random transforms are omitted (`Shard.deterministic`).

    Args:
        network: on `device`.
        shard: a site's items.
        batch_size: items per forward pass.
        device: of the network.
        normalised: divide each feature by its Euclidean norm.
    """
    with evaluating(network), torch.no_grad():
        for x, y in shard.deterministic().batches(batch_size):
            value, _ = features_and_output(network, x.to(device))
            yield normalize(value, dim=1) if normalised else value, class_indices(y).to(device)


def collect(
    network: nn.Module,
    shard: Shard,
    batch_size: int,
    num_classes: int,
    device: torch.device,
    *,
    normalised: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the class means of the features (K, d), zero for an absent class, and the counts (K,) int64.

    The arguments are those of `features`; sums are computed in float64, the means have the features' dtype. If the head
    is a convolution, features and counts are per pixel.
    """
    sums = torch.zeros(num_classes, feature_size(network), dtype=torch.float64, device=device)
    counts = torch.zeros(num_classes, dtype=torch.int64, device=device)
    if isinstance(head(network), nn.Linear):
        if not len(shard):
            raise ValueError("class means of a site without items")
        for values, labels in features(network, shard, batch_size, device, normalised=normalised):
            # in float64: a mean of many float32 features would lose digits
            sums.index_add_(0, labels, values.double())
            counts += torch.bincount(labels, minlength=num_classes)
    else:
        with evaluating(network), torch.no_grad():
            for x, y in shard.deterministic().batches(batch_size):
                maps, _ = features_and_output(network, x.to(device))
                labels_of = pixel_classes(y).to(device)
                for values, labels in zip(maps.flatten(2), labels_of, strict=True):
                    # (d, P) and (P,) of one image: sums by a matrix product, without sorting pixels.
                    members = one_hot(labels, num_classes)
                    sums += members.T.double() @ values.T.double()
                    counts += members.sum(0)

    means = sums / counts.clamp(min=1)[:, None]
    return means.to(next(head(network).parameters()).dtype), counts


def class_means(
    network: nn.Module, site: Site, *, normalised: bool = False
) -> tuple[Tensor, Tensor]:
    """Apply `collect` to a site's training items."""
    settings = site.settings
    return collect(
        network,
        site.train,
        settings.batch_size,
        class_count(network),
        site.device,
        normalised=normalised,
    )


def pooled_means(tables: Sequence[Weights]) -> tuple[Tensor, Tensor]:
    """Average the sites' class means, each weighted by its count.

    Args:
        tables: "means" (K, d) and "counts" (K,) of each site, in sorted site order.

    Returns:
        The means (K, d), zero for a class without items, and the total counts (K,).
    """
    # S sites: (S, K, d) and (S, K)
    means = torch.stack([table["means"] for table in tables])
    counts = torch.stack([table["counts"] for table in tables])
    total = counts.sum(0)
    # sum_i n_ic mu_ic / n_c, in float64
    sums = torch.einsum("sk,skd->kd", counts.double(), means.double())
    return (sums / total.double().clamp(min=1)[:, None]).to(means.dtype), total


def distance(values: Tensor, prototypes: Tensor) -> Tensor:
    """Return the mean squared difference (B, K) between features (B, d) and prototypes (K, d)."""
    return (values[:, None] - prototypes).square().mean(2)


@dataclass(frozen=True)
class Gaussians:
    """One Gaussian per class.

    Attributes:
        counts: (K,) int64.
        means: (K, d), zero for an absent class.
        covariances: (K, d, d), unbiased; zero for a class with fewer than two items.
    """

    counts: Tensor
    means: Tensor
    covariances: Tensor

    def sample(self, label: int, number: int, generator: torch.Generator) -> Tensor:
        """Draw features (number, d) of a class, in the means' type; the covariance may be singular."""
        # not Cholesky: a covariance of fewer features than dimensions is singular
        values, vectors = torch.linalg.eigh(self.covariances[label].double())  # (d,) and (d, d)
        # Sigma = V diag(lambda) V', so V diag(sqrt lambda) is a root; rounding may make a lambda
        # negative.
        root = vectors * values.clamp(min=0).sqrt()
        noise = torch.randn(number, len(root), generator=generator, dtype=torch.float64).to(
            root.device
        )
        drawn: Tensor = self.means[label].double() + noise @ root.T
        return drawn.to(self.means.dtype)


def gaussians(
    network: nn.Module, shard: Shard, batch_size: int, num_classes: int, device: torch.device
) -> Gaussians:
    """Return count, mean and unbiased covariance of each class's features at one site, in float64."""
    values, labels = zip(*features(network, shard, batch_size, device), strict=True)
    value = torch.cat(values).double()  # (N, d)
    label = torch.cat(labels)
    counts = torch.bincount(label, minlength=num_classes)
    means = value.new_zeros(num_classes, value.shape[1])
    covariances = value.new_zeros(num_classes, value.shape[1], value.shape[1])

    for c in counts.nonzero()[:, 0].tolist():
        members = value[label == c]
        means[c] = members.mean(0)
        # one item has no covariance
        if len(members) > 1:
            centred = members - means[c]
            covariances[c] = centred.T @ centred / (len(members) - 1)

    return Gaussians(counts, means, covariances)


def pool(parts: Sequence[Gaussians]) -> Gaussians:
    """Return the class Gaussians of all sites' features together, in float64 (Luo et al. 2021, CCVR).

    mu_c = sum_i n_ic mu_ic / n_c and Sigma_c = sum_i [(n_ic - 1) Sigma_ic + n_ic (mu_ic - mu_c)(mu_ic - mu_c)'] /
    (n_c - 1): the paper's n_ic mu_ic mu_ic' and n_c mu_c mu_c', with their difference computed before it can cancel.
    """
    number = torch.stack([part.counts for part in parts])  # (sites, K)
    means = torch.stack([part.means.double() for part in parts])
    covariances = torch.stack([part.covariances.double() for part in parts])
    counts = number.sum(0)
    mean = torch.einsum("sk,skd->kd", number.double(), means) / counts.clamp(min=1)[:, None]
    apart = means - mean  # (sites, K, d)
    # sum_i (n_ic - 1) Sigma_ic
    within = torch.einsum("sk,skde->kde", (number - 1).clamp(min=0).double(), covariances)
    # sum_i n_ic (mu_ic - mu_c)(mu_ic - mu_c)'
    between = torch.einsum("sk,skd,ske->kde", number.double(), apart, apart)

    return Gaussians(counts, mean, (within + between) / (counts - 1).clamp(min=1)[:, None, None])
