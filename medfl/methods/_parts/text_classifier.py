"""Classifiers built from text: one Gaussian per class over prompt embeddings, frozen, in place of a trained head.

The mathematics that FedCB ("Stealing Knowledge from Pre-trained Language Models for Federated Classifier Debiasing",
Zhu et al., MICCAI 2024) and FedBM ("FedBM: Stealing Knowledge from Pre-trained Language Models for Heterogeneous
Federated Learning", Zhu et al., Medical Image Analysis 2025) share; equation numbers are the same in both.

E (K, M, D): unit-norm embeddings of M prompts for each of K classes; h (B, D): unit-norm image features; tau multiplies
similarities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from medfl.core import InputError, Task, split_commas
from medfl.methods._parts.prototypes import class_indices
from medfl.methods.base import Collated
from medfl.networks.heads import Head, feature_size, features_and_output, head, replace_head
from medfl.training import Objective

CLASSIFIERS = ("trainable", "random_frozen", "text_mean", "text_distribution", "text_printed")
DISTRIBUTIONS = CLASSIFIERS[3:]
COVARIANCES = ("full", "diag", "none")
_DISTINCT = 1e-4  # two class means this close are the same phrase to the language model
_JITTER = 1e-4


# Statistics of the prompts, eq. 2


def centred(embeddings: Tensor) -> Tensor:
    """Return A (K, M, D), rows (E_km - mu_k) / sqrt(M - 1), so that A_k' A_k is the covariance; 0 where M = 1."""
    apart = embeddings - embeddings.mean(1, keepdim=True)
    return apart / math.sqrt(max(1, embeddings.shape[1] - 1))


def variances(embeddings: Tensor) -> Tensor:
    """Return V (K, D), the unbiased variance of each dimension over the prompts; 0 where M = 1."""
    return centred(embeddings).square().sum(1)


@dataclass(frozen=True)
class TextGaussians:
    """K class distributions in the text space.

    Attributes:
        mean: mu (K, D).
        spread: A (K, M, D) for full covariances, V (K, D) for diagonal ones, None for points.
        tau: inverse temperature.
    """

    mean: Tensor
    spread: Tensor | None
    tau: float

    @classmethod
    def of(
        cls, embeddings: Tensor, tau: float, covariance: str = "full", renormalise: bool = False
    ) -> TextGaussians:
        """Estimate them from prompt embeddings; `renormalise` scales the means to unit norm."""
        mean = embeddings.mean(1)
        if renormalise:
            mean = normalize(mean, dim=1)
        if covariance == "none":
            return cls(mean, None, tau)

        if covariance == "full":
            spread = centred(embeddings)
        else:
            spread = variances(embeddings)

        return cls(mean, spread, tau)

    def quadratic(self, h: Tensor) -> Tensor:
        """Return q (B, K) = h' Sigma_k h, without a D x D matrix: ||A_k h||^2, or sum_d h_d^2 V_kd."""
        if self.spread is None:
            return h.new_zeros(len(h), len(self.mean))
        if self.spread.ndim == 2:
            return h.square() @ self.spread.T
        # A_k h: one number per prompt, instead of D x D entries of Sigma_k.
        return torch.einsum("bd,kmd->bkm", h, self.spread).square().sum(2)

    def logits(self, h: Tensor) -> Tensor:
        """Return F (B, K) = tau h mu_k + tau^2 / 2 q_k (eq. 4; eq. 5 is F / tau)."""
        with torch.autocast(h.device.type, enabled=False):  # half precision would blur tau^2
            # tau mu_k h + tau^2 / 2 h' Sigma_k h, the logarithm of the Gaussian's moment-generating function
            logits = self.tau * (h @ self.mean.T)
            if self.spread is None:
                return logits

            return logits + 0.5 * self.tau**2 * self.quadratic(h)

    def surrogate(self, h: Tensor, labels: Tensor) -> Tensor:
        """Return the upper bound of eq. 3 for each sample (B,): CE(F, y) + tau^2 / 2 q_y (eq. 4).

        Computed as logsumexp_k F_k - tau h mu_y, the same number.
        """
        own_similarity = self.tau * (h * self.mean[labels]).sum(1)
        return self.logits(h).logsumexp(1) - own_similarity

    def printed(self, h: Tensor, labels: Tensor) -> Tensor:
        """Return eq. 4 as printed in the main text, without tau in the softmax, which is not a bound of eq. 3."""
        spread = self.quadratic(h).gather(1, labels[:, None])[:, 0]
        unscaled = self.logits(h) / self.tau
        return cross_entropy(unscaled, labels, reduction="none") + 0.5 * self.tau**2 * spread

    def draw(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Draw z ~ N(mu_y, Sigma_y + 1e-4 I) for each label (eq. 9), on the CPU in the mean's precision.

        With full covariance z = mu + sum_m xi_m A_m + 0.01 eps, which has exactly this distribution and needs no
        Cholesky factor.
        """
        mean = self.mean.cpu()
        dtype = self.mean.dtype
        labels = labels.cpu()
        noise = torch.randn(len(labels), mean.shape[1], generator=generator, dtype=dtype)  # (N, D)
        z = mean[labels] + math.sqrt(_JITTER) * noise

        if self.spread is None:
            return z

        spread = self.spread.cpu()
        if spread.ndim == 2:
            noise = torch.randn(z.shape, generator=generator, dtype=dtype)
            return z + spread[labels].sqrt() * noise

        # (N, M), a number for each prompt
        xi = torch.randn(len(labels), spread.shape[1], generator=generator, dtype=dtype)
        # Class by class: (n, M, D) factors of all samples would be large.
        for index in range(len(spread)):
            of_class = labels == index
            z[of_class] += xi[of_class] @ spread[index]

        return z


def finite_loss(h: Tensor, labels: Tensor, embeddings: Tensor, tau: float) -> Tensor:
    """Return the loss over the prompts themselves for each sample (B,), eq. 1.

    The mean over the true class's prompts is outside the logarithm, that over the others' inside.
    """
    with torch.autocast(h.device.type, enabled=False):  # half precision would blur tau
        similarity = tau * torch.einsum("bd,kmd->bkm", h, embeddings)  # (B, K, M)

    prompts = embeddings.shape[1]
    is_own_class = nn.functional.one_hot(labels, len(embeddings)).bool()
    # log of the sum over the other classes of the mean over prompts of e^similarity
    by_class = similarity.logsumexp(2).masked_fill(is_own_class, -torch.inf)  # (B, K)
    other_classes = by_class.logsumexp(1, keepdim=True) - math.log(prompts)
    positive = similarity[is_own_class]  # (B, M)

    return (torch.logaddexp(positive, other_classes) - positive).mean(1)


# The head


class TextHead(nn.Linear):
    """The head h = normalise(W x + b), followed by frozen Gaussian logits: (B, d) -> F (B, K).

    Weight and bias keep the names and the place of the head that they replace, so optimisers built for the bundle's
    network fit. Embeddings and statistics are buffers outside the state dict: they are not parameters and are not
    uploaded.
    """

    embeddings: Tensor
    mean: Tensor
    spread: Tensor | None

    def __init__(
        self,
        features: int,
        embeddings: Tensor,
        tau: float,
        covariance: str,
        *,
        renormalise: bool,
        unscaled_evaluation: bool,
    ) -> None:
        super().__init__(features, embeddings.shape[2])
        self.tau = tau
        self.covariance = covariance
        self.renormalise = renormalise
        self.unscaled_evaluation = unscaled_evaluation

        for name in ("embeddings", "mean", "spread"):
            self.register_buffer(name, None, persistent=False)

        install(self, embeddings)

    @property
    def gaussians(self) -> TextGaussians:
        """The class distributions."""
        return TextGaussians(self.mean, self.spread, self.tau)

    def unit(self, features: Tensor) -> Tensor:
        """Return h (B, D), unit norm; in float32 also under mixed precision."""
        projected = nn.functional.linear(features, self.weight, self.bias)
        return normalize(projected.to(self.mean.dtype), dim=1)

    def forward(self, features: Tensor) -> Tensor:
        """Return F (B, K); F / tau in evaluation mode if the authors' test-time scale is requested."""
        logits = self.gaussians.logits(self.unit(features))
        if self.unscaled_evaluation and not self.training:
            return logits / self.tau

        return logits


def install(layer: Head, embeddings: Tensor) -> None:
    """Give a head its prompt embeddings; a `TextHead` re-estimates its Gaussians."""
    placed = embeddings.detach().to(layer.weight.device, layer.weight.dtype)
    if "embeddings" not in layer._buffers:
        # outside the state dict: the server sends the embeddings, and nobody averages them
        layer.register_buffer("embeddings", None, persistent=False)

    layer.embeddings = placed
    if isinstance(layer, TextHead):
        gaussians = TextGaussians.of(placed, layer.tau, layer.covariance, layer.renormalise)
        layer.mean = gaussians.mean
        layer.spread = gaussians.spread


def embeddings_of(network: nn.Module) -> Tensor:
    """Return the prompt embeddings (K, M, D) in a network's head."""
    return torch.as_tensor(head(network).embeddings)


def adapt(
    network: nn.Module,
    embeddings: Tensor | None,
    *,
    classifier: str,
    covariance: str,
    tau: float,
    renormalise: bool = False,
    unscaled_evaluation: bool = False,
) -> nn.Module:
    """Give a network the head of one of `CLASSIFIERS`; a head other than `TextHead` only holds the embeddings.

    Raises:
        InputError: a distribution is requested of a single prompt.
    """
    layer = head(network)
    if classifier in ("trainable", "random_frozen"):
        if embeddings is not None:
            install(layer, embeddings)
        for parameter in layer.parameters():
            parameter.requires_grad_(classifier == "trainable")
        return network

    assert embeddings is not None
    covariance = covariance if classifier in DISTRIBUTIONS else "none"
    if covariance != "none" and embeddings.shape[1] < 2:
        raise InputError(
            "one prompt a class with classifier=text_distribution",
            "a distribution needs two prompts or more",
            "add prompts, raise prompt_fraction, or set classifier=text_mean",
        )

    text_head = TextHead(
        feature_size(network),
        embeddings,
        tau,
        covariance,
        renormalise=renormalise,
        unscaled_evaluation=unscaled_evaluation,
    ).to(layer.weight.device, layer.weight.dtype)

    return replace_head(network, text_head)


def text_objective(finite: bool = False, printed: bool = False) -> Objective:
    """Return the loss of a network with a `TextHead`: eq. 4, also as printed, or eq. 1 over the prompts themselves."""

    def objective(network: nn.Module, x: Collated, y: Collated) -> Tensor:
        features, _ = features_and_output(network, x)
        layer = head(network)
        assert isinstance(layer, TextHead)
        h = layer.unit(features)
        labels = class_indices(y)

        if finite:
            return finite_loss(h, labels, layer.embeddings, layer.tau).mean()

        if printed:
            return layer.gaussians.printed(h, labels).mean()

        return layer.gaussians.surrogate(h, labels).mean()

    return objective


# Which embeddings


def embeddings_for(task: Task, plm: str, fraction: float, swap: str) -> Tensor:
    """Return the prompt embeddings (K, M, D) requested by a method's options; call it inside a stream.

    Raises:
        InputError: there are none for this task, or they do not fit it.
    """
    embeddings = swapped(task.embeddings(plm), task.classes, swap)
    check(embeddings, task.classes)
    return select(embeddings, fraction)


def select(embeddings: Tensor, fraction: float) -> Tensor:
    """Keep a random share of the prompts, at least one; smaller shares are subsets of larger ones.

    Draws from the global generator: call it inside a stream.
    """
    order = torch.randperm(embeddings.shape[1])
    # drawn whole, then cut: a larger fraction keeps the prompts of a smaller one
    return embeddings[:, order[: max(1, round(fraction * len(order)))].sort().values]


def swapped(embeddings: Tensor, classes: Sequence[str], pair: str) -> Tensor:
    """Exchange the text of two classes given as "DR,MH"; "" changes nothing.

    Raises:
        InputError: they are not two of the classes.
    """
    if not pair:
        return embeddings

    names = split_commas(pair)
    if len(names) != 2 or not set(names) <= set(classes):
        raise InputError(
            f"swap={pair}", f"two of the classes {', '.join(classes)}", "write it as in swap=DR,MH"
        )

    order = list(range(len(embeddings)))
    first, second = map(list(classes).index, names)
    # The classes keep their places; only their texts change hands.
    order[first], order[second] = second, first
    return embeddings[order]


def check(embeddings: Tensor, classes: Sequence[str]) -> None:
    """Check that there is one distinct text per class.

    Raises:
        InputError: another number of classes, or two classes with the same text; names them.
    """
    if len(embeddings) != len(classes):
        raise InputError(
            f"text embeddings of {len(embeddings)} classes",
            f"the bundle has {len(classes)}: {', '.join(classes)}",
            "make them anew with medfl concepts",
        )

    means = embeddings.double().mean(1)
    # by differences: matrix products would lose the digits of near points
    apart = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist")
    apart.fill_diagonal_(torch.inf)
    if apart.min() <= _DISTINCT:
        first, second = divmod(int(apart.argmin()), len(apart))
        raise InputError(
            f"classes {classes[first]!r} and {classes[second]!r} have the same text to this language model",
            "class means differ by more than 1e-4",
            "give them different words; many models do not see upper and lower case",
        )
