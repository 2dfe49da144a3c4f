"""The Gaussian classifiers against their definitions, in float64 unless said otherwise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.methods._parts.text_classifier import (
    TextGaussians,
    adapt,
    centred,
    embeddings_of,
    finite_loss,
    variances,
)
from tests.support.embeddings import structured, unit

TAUS = (1.0, 7.5, 12.5, 17.5, 50.0)
both = pytest.mark.parametrize("covariance", ["full", "diag"])


def features(embeddings: Tensor, count: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Half of the samples near a class mean, half anywhere; random labels."""
    classes, _, size = embeddings.shape
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=draws)
    noise = torch.randn(count, size, generator=draws, dtype=torch.float64) / math.sqrt(size)
    near = embeddings.mean(1)[labels] + noise
    h = torch.where((torch.arange(count) % 2 == 0)[:, None], near, noise)
    return nn.functional.normalize(h, dim=1), labels


def exact(h: Tensor, labels: Tensor, gaussians: TextGaussians, nodes: int = 80) -> Tensor:
    """L-infinity (eq. 3): Gauss-Hermite over a = tau h.e_y, negatives by the Gaussian moment generating function."""
    x, w = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(nodes))
    mean, q = (
        gaussians.tau * (h * gaussians.mean[labels]).sum(1),
        own(gaussians.quadratic(h), labels),
    )
    others = gaussians.logits(h).scatter(1, labels[:, None], -torch.inf).logsumexp(1)
    a = mean[:, None] + gaussians.tau * q.sqrt()[:, None] * x
    return (torch.logaddexp(a, others[:, None]) * w).sum(1) / w.sum() - mean


def own(values: Tensor, labels: Tensor) -> Tensor:
    return values.gather(1, labels[:, None])[:, 0]


# A worked example


def test_three_classes_in_four_dimensions_by_hand() -> None:
    """tau = 5, h = (0.6, 0.8, 0, 0), y = 0.

    Class 0 has prompts (1, 0, 0, 0) and (0.6, 0.8, 0, 0): mu = (0.8, 0.4, 0, 0), differences (0.2, -0.4, 0, 0) and its
    negative, so V = (0.08, 0.32, 0, 0) with M - 1 = 1. Class 1 the same in the last two dimensions, class 2 twice
    (0, 1, 0, 0): V = 0.
    tau h.mu = (5 (0.48 + 0.32), 0, 5 * 0.8) = (4, 0, 4).
    Full: h.(0.2, -0.4) = 0.12 - 0.32 = -0.2, q_0 = 2 * 0.04 = 0.08; F_0 = 4 + 12.5 * 0.08 = 5, F = (5, 0, 4).
    Loss: ln(e^5 + 1 + e^4) - 4, which is CE(F, 0) + 12.5 * 0.08 = ln(1 + e^-5 + e^-1) + 1.
    Diagonal: q_0 = 0.36 * 0.08 + 0.64 * 0.32 = 0.2336, F_0 = 4 + 2.92 = 6.92.
    """
    embeddings = torch.zeros(3, 2, 4, dtype=torch.float64)
    embeddings[0, 0, 0] = embeddings[1, 0, 2] = 1
    embeddings[0, 1, :2] = embeddings[1, 1, 2:] = torch.tensor([0.6, 0.8], dtype=torch.float64)
    embeddings[2, :, 1] = 1
    h = torch.tensor([[0.6, 0.8, 0, 0]], dtype=torch.float64)
    y = torch.tensor([0])
    expected = torch.zeros(3, 4, dtype=torch.float64)
    expected[0, 0] = expected[1, 2] = 0.08
    expected[0, 1] = expected[1, 3] = 0.32
    torch.testing.assert_close(variances(embeddings), expected, rtol=0, atol=1e-15)
    full, diag = (TextGaussians.of(embeddings, 5.0, kind) for kind in ("full", "diag"))
    torch.testing.assert_close(
        full.mean[0], torch.tensor([0.8, 0.4, 0, 0], dtype=torch.float64), rtol=0, atol=1e-15
    )
    for gaussians, logits in ((full, [5.0, 0.0, 4.0]), (diag, [6.92, 0.0, 4.0])):
        torch.testing.assert_close(
            gaussians.logits(h)[0], torch.tensor(logits, dtype=torch.float64), rtol=0, atol=1e-12
        )
    assert full.surrogate(h, y).item() == pytest.approx(
        math.log(math.exp(5) + 1 + math.exp(4)) - 4, abs=1e-12
    )
    assert full.surrogate(h, y).item() == pytest.approx(
        math.log(1 + math.exp(-5) + math.exp(-1)) + 1, abs=1e-12
    )
    assert diag.surrogate(h, y).item() == pytest.approx(
        math.log(math.exp(6.92) + 1 + math.exp(4)) - 4, abs=1e-12
    )


# The checks that both papers' cards number: FedCB's and FedBM's


def test_closed_form() -> None:
    """FedCB 2, FedBM 1: D = K = 2, mu = I, variances 0.01 and 0.02, tau = 10, y = 0."""
    mean = torch.eye(2, dtype=torch.float64)
    v = torch.tensor([[0.01, 0.01], [0.02, 0.02]], dtype=torch.float64)
    factors = torch.stack([0.1 * mean, math.sqrt(0.02) * mean])
    h, labels = mean, torch.tensor([0, 0])
    for spread in (v, factors):
        loss = TextGaussians(mean, spread, 10.0).surrogate(h, labels)
        assert loss[0].item() == pytest.approx(0.5000748490, abs=1e-9)
        assert loss[1].item() == pytest.approx(11.0000275361, abs=1e-9)
    points = TextGaussians(mean, None, 10.0).surrogate(h, labels)
    assert points[1].item() == pytest.approx(10.0000453989, abs=1e-9)
    assert points[1].item() != pytest.approx(1.3132616875, abs=1), "tau belongs inside the softmax"


def test_the_factor_gives_the_covariance_without_a_matrix() -> None:
    """FedCB 1: h' Sigma_k h = ||A_k h||^2 = the prompts' sample variance of h.E, and h.mu their mean."""
    embeddings, h = unit(8, 28, 512), unit(16, 512, seed=1)
    gaussians = TextGaussians.of(embeddings, 12.5)
    similarity = torch.einsum("bd,kmd->bkm", h, embeddings)
    torch.testing.assert_close(gaussians.quadratic(h), similarity.var(2), rtol=0, atol=1e-12)
    torch.testing.assert_close(h @ gaussians.mean.T, similarity.mean(2), rtol=0, atol=1e-12)
    small, direction = embeddings[:, :, :16], h[:, :16]
    sigma = torch.stack([part.T.cov() for part in small])
    wanted = torch.einsum("bd,kde,be->bk", direction, sigma, direction)
    torch.testing.assert_close(
        TextGaussians.of(small, 1.0).quadratic(direction), wanted, rtol=0, atol=1e-12
    )


@both
@pytest.mark.parametrize("tau", TAUS)
def test_the_two_forms_of_the_loss_are_one(covariance: str, tau: float) -> None:
    """FedCB 3, FedBM 2: CE(F, y) + tau^2/2 q_y = logsumexp F - tau h.mu_y."""
    embeddings = structured(0.3)
    h, y = features(embeddings)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        gaussians = TextGaussians.of(embeddings.to(dtype), tau, covariance)
        x = h.to(dtype)
        long = nn.functional.cross_entropy(gaussians.logits(x), y, reduction="none")
        long = long + 0.5 * tau**2 * own(gaussians.quadratic(x), y)
        torch.testing.assert_close(gaussians.surrogate(x, y), long, rtol=tolerance, atol=tolerance)


@both
@pytest.mark.parametrize("tau", TAUS)
def test_the_gradient(covariance: str, tau: float) -> None:
    """FedCB 8, FedBM 3: tau (sum_k p_k mu_k - mu_y) + tau^2 sum_k p_k Sigma_k h."""
    embeddings = structured(0.3)
    h, y = features(embeddings)
    gaussians = TextGaussians.of(embeddings, tau, covariance)
    leaf = h.clone().requires_grad_()
    gaussians.surrogate(leaf, y).sum().backward()
    p = gaussians.logits(h).softmax(1)
    if covariance == "diag":
        turned = h * (p @ variances(embeddings))
    else:
        a = centred(embeddings)
        turned = torch.einsum("bk,kmd,bkm->bd", p, a, torch.einsum("bd,kmd->bkm", h, a))
    wanted = tau * (p @ gaussians.mean - gaussians.mean[y]) + tau**2 * turned
    torch.testing.assert_close(leaf.grad, wanted, rtol=1e-12, atol=1e-12)


def test_no_variance_is_cross_entropy_and_the_same_variance_everywhere_adds_a_constant() -> None:
    """FedCB 4, FedBM 4."""
    embeddings, tau = structured(0.3), 12.5
    h, y = features(embeddings)
    points = TextGaussians.of(embeddings, tau, "none")
    plain = nn.functional.cross_entropy(tau * h @ points.mean.T, y, reduction="none")
    torch.testing.assert_close(points.surrogate(h, y), plain, rtol=0, atol=1e-12)
    cosine = nn.functional.cosine_similarity(h[:, None], points.mean[None], dim=2)
    on_sphere = TextGaussians.of(embeddings, tau, "none", renormalise=True)
    torch.testing.assert_close(on_sphere.logits(h), tau * cosine, rtol=0, atol=1e-12)
    assert (points.logits(h) - tau * cosine).abs().max() > 1e-2, "only with means of unit norm"
    s2 = 0.013
    size = embeddings.shape[2]
    same = torch.full_like(points.mean, s2)
    factors = (math.sqrt(s2) * torch.eye(size, dtype=torch.float64)).expand(5, size, size)
    for spread in (same, factors):
        loss = TextGaussians(points.mean, spread, tau).surrogate(h, y)
        torch.testing.assert_close(loss, plain + 0.5 * tau**2 * s2, rtol=0, atol=1e-12)


@both
@pytest.mark.parametrize("tau", TAUS)
def test_the_bound_holds_and_its_gap_is_bounded(covariance: str, tau: float) -> None:
    """FedCB 5, FedBM 5: 0 <= bound - exact <= tau^2/2 q_y, and exact >= its own Jensen bound from below."""
    embeddings = structured(0.3, classes=8, size=512)
    h, y = features(embeddings, 64)
    gaussians = TextGaussians.of(embeddings, tau, covariance)
    gap = gaussians.surrogate(h, y) - exact(h, y, gaussians)
    assert gap.min() >= -1e-12
    assert (gap - 0.5 * tau**2 * own(gaussians.quadratic(h), y)).max() <= 1e-12
    mean = tau * own(h @ gaussians.mean.T, y)
    below = gaussians.logits(h).scatter(1, y[:, None], mean[:, None]).logsumexp(1) - mean
    assert (exact(h, y, gaussians) - below).min() >= -1e-12


def test_the_unscaled_misprint_is_no_bound() -> None:
    """With F = h.mu + tau/2 q in the softmax the "bound" falls below eq. 3 for most samples with random labels."""
    embeddings = structured(0.3, classes=8, size=512)
    h, y = features(embeddings, 64)
    gaussians = TextGaussians.of(embeddings, 12.5)
    q = own(gaussians.quadratic(h), y)
    mean, quadratic = gaussians.mean.numpy(), gaussians.quadratic(h).numpy()
    shown = np.exp(h.numpy() @ mean.T + 12.5 / 2 * quadratic)
    share = shown[range(64), y] / shown.sum(1)
    misprint = torch.from_numpy(-np.log(share)) + 0.5 * 12.5**2 * q
    torch.testing.assert_close(gaussians.printed(h, y), misprint, rtol=0, atol=1e-10)
    wrong = (h * gaussians.mean[y]).sum(1) < 0.2  # far from the class
    assert (misprint < exact(h, y, gaussians))[wrong].double().mean() > 0.5
    points = TextGaussians(torch.eye(2).double(), None, 10.0)
    example = points.printed(torch.tensor([[0.0, 1.0]]).double(), torch.tensor([0]))
    assert example.item() == pytest.approx(1.313, abs=1e-3)  # K = 2, the wrong class; eq. 3 has 10


@both
def test_monte_carlo_of_the_expectation(covariance: str) -> None:
    """FedCB 5, FedBM 6: 20,000 positives with closed-form negatives agree with the quadrature and respect the bound.

    Positives are drawn from the Gaussian itself with its full or diagonal factor, not through the scalar a.
    """
    embeddings, tau, count = structured(0.3), 12.5, 20_000
    h, y = features(embeddings, 8)
    gaussians = TextGaussians.of(embeddings, tau, covariance)
    draws = torch.Generator().manual_seed(3)
    others = gaussians.logits(h).scatter(1, y[:, None], -torch.inf).logsumexp(1)
    for index in range(len(h)):
        spread = gaussians.spread[y[index]]
        factor = spread.sqrt().diag() if covariance == "diag" else spread
        noise = torch.randn(count, len(factor), generator=draws, dtype=torch.float64)
        a = tau * ((gaussians.mean[y[index]] + noise @ factor) @ h[index])
        values = torch.logaddexp(a, others[index]) - a
        error = 4 * values.std() / math.sqrt(count)
        one = slice(index, index + 1)
        assert (values.mean() - exact(h[one], y[one], gaussians)[0]).abs() <= error
        assert gaussians.surrogate(h[one], y[one])[0] >= values.mean() - error


def test_sampled_negatives_agree_roughly() -> None:
    """FedBM 6: means over sampled negatives carry a shared bias, so only to 0.05."""
    embeddings, tau, count = structured(0.1), 12.5, 20_000
    h, y = features(embeddings, 8)
    gaussians = TextGaussians.of(embeddings, tau, "diag")
    draws = torch.Generator().manual_seed(4)
    noise = torch.randn(5, count, 32, generator=draws, dtype=torch.float64)
    e = gaussians.mean[:, None] + noise * gaussians.spread.sqrt()[:, None]
    similarity = tau * torch.einsum("bd,knd->bkn", h, e)
    inside = similarity.logsumexp(2) - math.log(count)
    others = inside.scatter(1, y[:, None], -torch.inf).logsumexp(1, keepdim=True)
    positive = similarity[torch.arange(len(h)), y]
    sampled = (torch.logaddexp(positive, others) - positive).mean(1)
    torch.testing.assert_close(sampled, exact(h, y, gaussians), rtol=0, atol=0.05)


def test_finite_prompts_follow_the_full_covariance_not_the_diagonal() -> None:
    """FedCB 6: K = 5, M = 24, D = 32, tau = 12.5, 16 features around their class means, ten draws of everything."""
    for spread, full_limit, diag_least in ((0.1, 2e-3, 3e-3), (0.3, 2e-2, 3e-2)):
        for seed in range(10):
            embeddings = structured(spread, seed)
            _, y = features(embeddings, seed=seed)
            h = nn.functional.normalize(
                embeddings.mean(1)[y] + 0.5 * unit(16, 32, seed=seed), dim=1
            )
            finite = finite_loss(h, y, embeddings, 12.5)
            full, diag = (
                exact(h, y, TextGaussians.of(embeddings, 12.5, kind)) for kind in ("full", "diag")
            )
            assert (finite - full).abs().max() < full_limit
            assert (finite - diag).abs().max() > diag_least


def test_the_finite_loss_by_its_definition() -> None:
    """Eq. 1 written out; identical prompts make it a cross-entropy (FedCB 6)."""
    embeddings = structured(0.3, classes=3, prompts=4, size=6)
    h, y = features(embeddings, 5)
    wanted = []
    for x, label in zip(h, y.tolist(), strict=True):
        weight = [[math.exp(12.5 * float(x @ e)) for e in prompts] for prompts in embeddings]
        others = sum(sum(weight[k]) / 4 for k in range(3) if k != label)
        wanted.append(sum(-math.log(p / (p + others)) for p in weight[label]) / 4)
    torch.testing.assert_close(
        finite_loss(h, y, embeddings, 12.5),
        torch.tensor(wanted, dtype=torch.float64),
        rtol=1e-12,
        atol=0,
    )
    same = embeddings[:, :1].expand(-1, 4, -1)
    plain = nn.functional.cross_entropy(12.5 * h @ same[:, 0].T, y, reduction="none")
    torch.testing.assert_close(finite_loss(h, y, same, 12.5), plain, rtol=0, atol=1e-12)


def test_the_diagonal_is_the_full_one_where_that_is_diagonal() -> None:
    """FedCB 7: prompts mu +- c e_d have a diagonal covariance; traces always agree."""
    size, classes = 6, 3
    mean = unit(classes, size)
    steps = 0.1 * torch.arange(1, size + 1, dtype=torch.float64).diag()
    embeddings = torch.cat([mean[:, None] + steps, mean[:, None] - steps], 1)
    h = unit(7, size, seed=2)
    full, diag = (TextGaussians.of(embeddings, 12.5, kind) for kind in ("full", "diag"))
    torch.testing.assert_close(full.logits(h), diag.logits(h), rtol=0, atol=1e-12)
    sample = structured(0.3)
    trace = centred(sample).square().sum((1, 2))
    torch.testing.assert_close(trace, variances(sample).sum(1), rtol=0, atol=1e-12)
    torch.testing.assert_close(variances(sample), sample.var(1), rtol=0, atol=1e-15)
    norms = sample.mean(1).square().sum(1)  # FedBM 7, FedCB 7
    torch.testing.assert_close(trace, 24 / 23 * (1 - norms), rtol=0, atol=1e-12)
    longer = 1.01 * sample
    assert not torch.allclose(
        variances(longer).sum(1), 24 / 23 * (1 - longer.mean(1).square().sum(1))
    )


def test_order_of_prompts_and_of_classes() -> None:
    """FedCB 9."""
    embeddings, order = structured(0.3), torch.tensor([3, 0, 4, 1, 2])
    h, _ = features(embeddings)
    shuffled = embeddings[:, torch.randperm(24, generator=torch.Generator().manual_seed(0))]
    for kind in ("full", "diag"):
        gaussians = TextGaussians.of(embeddings, 12.5, kind)
        torch.testing.assert_close(
            TextGaussians.of(shuffled, 12.5, kind).logits(h),
            gaussians.logits(h),
            rtol=0,
            atol=1e-12,
        )
        permuted = TextGaussians.of(embeddings[order], 12.5, kind).logits(h)
        torch.testing.assert_close(permuted, gaussians.logits(h)[:, order], rtol=0, atol=1e-12)


def test_two_prompts_are_enough_for_a_distribution() -> None:
    two = structured(0.3).float()[:, :2]
    network = adapt(
        nn.Sequential(nn.Linear(4, 5)),
        two,
        classifier="text_distribution",
        covariance="full",
        tau=12.5,
    )
    assert network(torch.rand(3, 4)).shape == (3, 5)
    with pytest.raises(InputError, match="one prompt a class with classifier=text_distribution"):
        adapt(network, two[:, :1], classifier="text_distribution", covariance="full", tau=12.5)


def test_one_prompt_has_no_variance_and_ranks_stay_below_the_number_of_prompts() -> None:
    """FedCB 10, FedBM 7."""
    single = unit(4, 1, 64)
    assert torch.equal(variances(single), torch.zeros(4, 64, dtype=torch.float64))
    assert TextGaussians.of(single, 12.5).logits(unit(3, 64)).isfinite().all()
    assert all(torch.linalg.matrix_rank(a) == 9 for a in centred(unit(4, 10, 64)))


@both
def test_the_largest_logit_does_not_depend_on_the_scale(covariance: str) -> None:
    """FedCB 13, FedBM 19; eq. 5 is F / tau."""
    embeddings = structured(0.3)
    h, _ = features(embeddings, 64)
    logits = TextGaussians.of(embeddings, 12.5, covariance).logits(h)
    assert torch.equal(logits.argmax(1), (logits / 12.5).argmax(1))
    assert not torch.allclose(logits.softmax(1), (logits / 12.5).softmax(1), atol=0.01)


@pytest.mark.slow
def test_the_law_of_the_sampler() -> None:
    """FedBM 8: 400,000 draws, D = 16, M = 10; without jitter the rank is at most M - 1.

    The tolerance on the covariance is wider than the jitter of 1e-4; this one shows in the trace, and in the directions
    that no prompt has, where it is all there is.
    """
    embeddings = structured(0.3, classes=2, prompts=10, size=16)
    for kind in ("full", "diag"):
        gaussians = TextGaussians.of(embeddings, 12.5, kind)
        for label in range(2):
            draws = torch.Generator().manual_seed(label)
            z = gaussians.draw(torch.full((400_000,), label), draws)
            wanted = embeddings[label].T.cov()
            wanted = wanted if kind == "full" else wanted.diag().diag()
            wanted = wanted + 1e-4 * torch.eye(16, dtype=torch.float64)
            assert (z.T.cov() - wanted).abs().max() < 3e-4
            assert (z.T.cov() - wanted).trace().abs() < 16 * 5e-5
            if kind == "full":
                without = torch.linalg.svd(centred(embeddings)[label]).Vh[9:]
                assert (without @ z.T).var(1).numpy() == pytest.approx([1e-4] * 7, rel=0.02)
            assert (z.mean(0) - embeddings[label].mean(0)).abs().max() < 1.5e-3
    sigma = centred(embeddings)[0].T @ centred(embeddings)[0]
    torch.testing.assert_close(sigma, embeddings[0].T.cov(), rtol=0, atol=1e-12)
    assert torch.linalg.matrix_rank(sigma) <= 9


def test_a_draw_belongs_to_its_label_and_its_generator() -> None:
    gaussians = TextGaussians.of(structured(0.1), 12.5)
    labels = torch.tensor([4, 0, 0, 2, 1, 3] * 20)
    z = gaussians.draw(labels, torch.Generator().manual_seed(1))
    assert torch.equal(torch.cdist(z, gaussians.mean).argmin(1), labels)
    assert not z.requires_grad
    assert torch.equal(z, gaussians.draw(labels, torch.Generator().manual_seed(1)))
    assert not torch.allclose(z[1], z[2])


def test_mixed_precision_leaves_the_losses_alone() -> None:
    """tau 12.5 times a similarity in bfloat16 would be off by 0.05."""
    embeddings, h = structured(0.3).float(), unit(6, 32, seed=1).float()
    labels, gaussians = torch.arange(6) % 5, TextGaussians.of(embeddings, 12.5)
    wide, precise = (
        (h.double(), labels, embeddings.double()),
        TextGaussians.of(embeddings.double(), 12.5),
    )
    losses = [
        (lambda: finite_loss(h, labels, embeddings, 12.5), finite_loss(*wide, 12.5)),
        (lambda: gaussians.surrogate(h, labels), precise.surrogate(*wide[:2])),
    ]
    for loss, exactly in losses:
        with torch.autocast("cpu", torch.bfloat16):
            mixed = loss()
        assert torch.equal(mixed, loss())
        torch.testing.assert_close(mixed.double(), exactly, rtol=1e-4, atol=1e-4)


def test_embeddings_are_a_buffer_of_any_head_and_in_no_state_dict() -> None:
    """So they go with the network to another device and are in no upload."""
    network, embeddings = nn.Sequential(nn.Flatten(), nn.Linear(4, 5)), structured(0.3).float()
    before = list(network.state_dict())
    for again in (embeddings, embeddings + 1):
        adapt(network, again, classifier="trainable", covariance="full", tau=12.5)
        assert torch.equal(dict(network[1].named_buffers())["embeddings"], again)
        assert torch.equal(embeddings_of(network), again)
    assert list(network.state_dict()) == before
    assert all(parameter.requires_grad for parameter in network.parameters())
