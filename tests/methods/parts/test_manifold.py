"""The losses on features against correlation matrices and distances written out; numbers in brackets are the checks of
FedMR's card."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor

from medfl.methods._parts.manifold import INTRA_SCALES, inter_class_loss, intra_class_loss, shaped
from tests.support.toy import Toy, blobs, classifier, cross_entropy, sgd

ONES = torch.zeros(64, dtype=torch.int64)
"""Labels of one class."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alone(z: Tensor, **options: object) -> Tensor:
    """The intra-class loss of samples of one class, nothing added to the variance."""
    return intra_class_loss(z, ONES[: len(z)], **{"eps": 0.0, **options})


def gradient(loss, z: Tensor) -> Tensor:
    z = z.clone().requires_grad_()
    return torch.autograd.grad(loss(z), z)[0]


def three_classes(seed: int = 0, d: int = 16) -> tuple[Tensor, Tensor]:
    """12 samples of class 0, 17 of class 2, one of class 3, none of class 1; mixed."""
    labels = torch.tensor([0] * 12 + [2] * 17 + [3])[
        torch.randperm(30, generator=torch.Generator().manual_seed(1))
    ]
    return drawn(30, d, seed=seed) @ drawn(d, d, seed=9) + 5, labels


# Intra-class loss


def test_lemma_1() -> None:
    """[1] sum (lambda - mean)^2 = ||M||^2 - d, M the correlation matrix; its trace is d."""
    z = drawn(40, 16) @ drawn(16, 16, seed=1)
    m = torch.corrcoef(z.T)
    values = torch.linalg.eigvalsh(m)
    assert m.trace().item() == pytest.approx(16, abs=1e-12)
    assert alone(z).item() == pytest.approx(
        ((values - values.mean()) ** 2).sum().item() + 16, abs=1e-10
    )


def test_lemma_1_with_the_biased_deviation() -> None:
    """[1] M is n/(n - 1) times the correlation matrix, so d becomes d (n/(n - 1))^2."""
    z = drawn(40, 16) @ drawn(16, 16, seed=1)
    m = 40 / 39 * torch.corrcoef(z.T)
    values = torch.linalg.eigvalsh(m)
    expected = ((values - values.mean()) ** 2).sum().item() + 16 * (40 / 39) ** 2
    assert alone(z, std="biased").item() == pytest.approx(expected, abs=1e-10)
    assert m.trace().item() == pytest.approx(16 * 40 / 39)


def test_a_collapsed_class() -> None:
    """[2] Every feature is an affine image of one number: ||M||^2 = d^2."""
    z = drawn(20, 1) * drawn(16, seed=1) + drawn(16, seed=2)
    assert alone(z).item() == pytest.approx(256, rel=1e-10)


def test_uncorrelated_features_are_the_minimum() -> None:
    """[3] Columns of a Hadamard matrix: ||M||^2 = d, and no gradient."""
    z = torch.tensor(hadamard(32)[:, 1:17]).double()
    assert alone(z).item() == pytest.approx(16, abs=1e-10)
    assert gradient(alone, z).abs().max() < 1e-12


def test_two_samples_say_nothing() -> None:
    """[4] ||M||^2 = d^2 and no gradient, whatever the features."""
    z = drawn(2, 7)
    assert alone(z).item() == pytest.approx(49, abs=1e-10)
    assert gradient(alone, z).abs().max() < 1e-10
    assert gradient(lambda z: alone(z, eps=1e-8), z).abs().max() < 1e-2


def test_three_samples_say_something() -> None:
    """[4] d^2/2 <= ||M||^2 <= d^2, with a gradient."""
    for seed in range(20):
        assert 49 / 2 <= alone(drawn(3, 7, seed=seed)).item() <= 49
    assert gradient(alone, drawn(3, 7)).abs().max() > 1e-3


def test_the_rank_bounds_the_value() -> None:
    """||M||^2 >= d^2/(n - 1) where n - 1 < d."""
    for n in (3, 5, 8):
        assert alone(drawn(n, 12, seed=n)).item() >= 144 / (n - 1)


@pytest.mark.parametrize("labels", [[0], [0, 1, 2]])
@pytest.mark.parametrize("scale", INTRA_SCALES)
def test_single_samples_give_a_loss_of_zero_that_backward_takes(
    labels: list[int], scale: str
) -> None:
    """[4] Also a batch of one sample."""
    z = drawn(len(labels), 5).requires_grad_()
    loss = intra_class_loss(z, torch.tensor(labels), scale=scale)
    assert (loss.item(), loss.shape) == (0, ())
    (loss + z.sum()).backward()
    assert torch.equal(z.grad, torch.ones_like(z))


def test_it_sees_neither_shift_nor_scale_of_a_feature() -> None:
    """[5] l(a z + b) = l(z); hence sum_i dl/dz_ij = 0 and sum_i z_ij dl/dz_ij = 0."""
    z = drawn(20, 6) @ drawn(6, 6, seed=1)
    moved = z * torch.tensor([1.0, -2, 0.5, 3, -1, 7]) + drawn(6, seed=3)
    assert alone(moved).item() == pytest.approx(alone(z).item(), rel=1e-10)
    slope = gradient(alone, z)
    assert slope.abs().max() > 1e-3
    assert slope.sum(0).abs().max() < 1e-10
    assert (z * slope).sum(0).abs().max() < 1e-10


def test_the_form_over_samples_is_the_one_over_features() -> None:
    """[6] ||Z'Z||_F = ||ZZ'||_F, with more and with fewer samples than features."""
    for n, d in ((30, 7), (9, 40)):
        z = drawn(n, d)
        ready = (z - z.mean(0)) / z.std(0)
        expected = (ready.T @ ready).square().sum().item() / (n - 1) ** 2
        assert alone(z).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scale", INTRA_SCALES)
@pytest.mark.parametrize("value", [0.1, 1000.1, -30000.7])
def test_constant_features_have_no_correlation(scale: str, value: float) -> None:
    """In float32 their mean is not exactly themselves."""
    z = torch.full((7, 5), value, dtype=torch.float32)
    assert intra_class_loss(z, torch.zeros(7).long(), scale=scale).item() == pytest.approx(
        0, abs=1e-6
    )


def test_it_is_the_mean_over_classes() -> None:
    """Eq. 3 with a loop over classes; the class of one sample does not count."""
    z, labels = three_classes()
    own = [torch.corrcoef(z[labels == c].T).square().sum().item() for c in (0, 2)]
    assert intra_class_loss(z, labels).item() == pytest.approx(sum(own) / 2, rel=1e-7)


def test_min_count() -> None:
    """Two samples of class 1 (value d^2) count with 2 and do not with 3."""
    z, labels = torch.cat([drawn(9, 4), drawn(2, 4, seed=1)]), torch.tensor([0] * 9 + [1] * 2)
    nine = torch.corrcoef(z[:9].T).square().sum().item()
    assert intra_class_loss(z, labels).item() == pytest.approx((nine + 16) / 2, rel=1e-6)
    assert intra_class_loss(z, labels, min_count=3).item() == pytest.approx(nine, rel=1e-6)


def test_the_released_scale() -> None:
    """[7] 1/29 sum_{n = 12, 17} (n - 1)^2 / (d (d - 1)) (||M||^2 - d), d = 16."""
    z, labels = three_classes()
    own = {n: torch.corrcoef(z[labels == c].T).square().sum().item() for n, c in ((12, 0), (17, 2))}
    expected = sum((n - 1) ** 2 / (16 * 15) * (value - 16) for n, value in own.items()) / 29
    assert intra_class_loss(z, labels, scale="released").item() == pytest.approx(expected, rel=1e-7)


def test_the_released_scale_of_two_samples() -> None:
    """Two points are a line: every correlation is 1 or -1, so 1/2 (2 - 1)^2."""
    assert alone(drawn(2, 5), scale="released").item() == pytest.approx(0.5)


def test_the_released_scale_is_the_papers_for_classes_of_one_size() -> None:
    """mu1 = mu_code (n - 1)^2 / (n d (d - 1)): the same gradients, here n = 9, d = 5."""
    z, labels = drawn(18, 5) @ drawn(5, 5, seed=1), torch.tensor([0, 1] * 9)
    slopes = [
        gradient(lambda z, s=s: intra_class_loss(z, labels, scale=s), z)
        for s in ("released", "paper")
    ]
    torch.testing.assert_close(slopes[0], slopes[1] * 64 / (9 * 5 * 4), rtol=1e-6, atol=1e-9)


def test_the_mean_squared_correlation() -> None:
    z, labels = three_classes()
    off = ~torch.eye(16, dtype=torch.bool)
    own = [torch.corrcoef(z[labels == c].T)[off].square().mean().item() for c in (0, 2)]
    assert intra_class_loss(z, labels, scale="mean_offdiag").item() == pytest.approx(
        sum(own) / 2, rel=1e-7
    )


@pytest.mark.parametrize(("n", "d", "expected"), [(20, 10, 14.737), (8, 32, 173.71)])
def test_gaussian_features(n: int, d: int, expected: float) -> None:
    """[8] E ||M||^2 = d + d (d - 1)/(n - 1); 3000 draws, 30 of them as the classes of one batch."""
    assert d + d * (d - 1) / (n - 1) == pytest.approx(expected, abs=0.005)
    z, labels = drawn(100, 30 * n, d), torch.arange(30).repeat(n)
    mean = sum(intra_class_loss(batch, labels).item() for batch in z) / 100
    assert mean == pytest.approx(expected, rel=0.01)


def test_features_without_variance_drop_out() -> None:
    """[9] 3 of 8 are constant: the trace is 5, and the lemma holds with (tr M)^2/d."""
    z = drawn(20, 8) @ drawn(8, 8, seed=1)
    z[:, [1, 4, 6]] = torch.tensor([0.0, 2, -7]).double()
    m = torch.corrcoef(z.T).nan_to_num()
    assert m.trace().item() == pytest.approx(5)
    values = torch.linalg.eigvalsh(m)
    expected = ((values - values.mean()) ** 2).sum().item() + 25 / 8
    assert alone(z, eps=1e-8).item() == pytest.approx(expected, rel=1e-6)
    slope = gradient(lambda z: alone(z, eps=1e-8), z)
    assert slope.isfinite().all()
    assert slope[:, [1, 4, 6]].abs().max() < 1e-12


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_descent_on_it_alone(seed: int) -> None:
    """[17] From nearly collapsed features, 200 steps of 0.01: it falls at every step, below 0.6 of its start."""
    z = drawn(30, 1, seed=seed) * drawn(8, seed=seed + 10) + 0.1 * drawn(30, 8, seed=seed + 20)
    values = []
    for _ in range(200):
        z.requires_grad_()
        values.append(alone(z))
        z = (z - 0.01 * torch.autograd.grad(values[-1], z)[0]).detach()
    values = [v.item() for v in values]
    assert all(after < before for before, after in zip(values, values[1:], strict=False))
    assert values[-1] < 0.6 * values[0]


# Inter-class loss


def prototypes(k: int = 4, d: int = 5) -> tuple[Tensor, Tensor]:
    return 2 * drawn(k, d, seed=7), torch.ones(k, dtype=torch.bool)


def loop(
    z: Tensor, y: Tensor, g: Tensor, known: list[int], owned: list[int], margin: bool = True
) -> float:
    """Eq. 4 with loops."""
    others = [c for c in known if c in owned]
    anchors = [c for c in set(y.tolist()) if c in known]
    total = 0.0
    for c in anchors:
        own = z[y == c]
        for j in others:
            if j != c:
                near, far = (own - g[c]).norm(dim=1), (own - g[j]).norm(dim=1) if margin else 0.0
                total += (near - far).clamp(min=0).mean().item()
    return total / max(len(anchors) * (len(others) - 1), 1)


@pytest.mark.parametrize("margin", [True, False])
@pytest.mark.parametrize("scope", ["all", "present"])
@pytest.mark.parametrize("known", [[0, 1, 2, 3], [0, 2, 3], [1], [3], []])
def test_it_is_eq_4_with_loops(known: list[int], scope: str, margin: bool) -> None:
    """Classes 0, 1 and 3 in the batch, the site owns 2 as well; a class without a prototype is neither c nor j."""
    y, table = torch.tensor([0, 0, 1, 3, 3, 3, 1, 0, 0]), prototypes(5)[0]
    z, present = 2 * drawn(9, 5), torch.tensor([True, True, True, True, False])
    mask = torch.zeros(5, dtype=torch.bool)
    mask[known] = True
    owned = present if scope == "present" else None
    expected = loop(
        z, y, table, known, [0, 1, 2, 3] if scope == "present" else [0, 1, 2, 3, 4], margin
    )
    table[~mask] = 0
    value = inter_class_loss(z, y, table, mask, owned=owned, margin=margin)
    assert value.item() == pytest.approx(expected, rel=1e-12)
    assert (expected > 0) == (len(known) > 1)


def test_all_classes_push_where_only_the_present_ones_did() -> None:
    """A site with class 0 alone: nothing pushes in "present", the prototypes of 1 to 3 do in "all"."""
    table, known = prototypes()
    z, y = table[[1, 2]], torch.tensor([0, 0])
    only = torch.tensor([True, False, False, False])
    assert inter_class_loss(z, y, table, known, owned=only).item() == 0
    assert inter_class_loss(z, y, table, known).item() > 0.5


def test_on_the_own_prototype_it_is_zero() -> None:
    """[10] z = g_y: exactly 0, and so is the gradient, though the norm has none there."""
    table, known = prototypes()
    y = torch.tensor([0, 3, 1, 1])
    slope = gradient(lambda z: inter_class_loss(z, y, table, known), table[y])
    assert inter_class_loss(table[y], y, table, known).item() == 0
    assert torch.equal(slope, torch.zeros_like(slope))
    pulled = gradient(lambda z: inter_class_loss(z, y, table, known, margin=False), table[y])
    assert torch.equal(pulled, torch.zeros_like(pulled))


def test_on_each_others_prototype_it_is_their_distance() -> None:
    """[10] Two classes, swapped: ||g_0 - g_1||."""
    table, known = prototypes()
    both = torch.tensor([True, True, False, False])
    value = inter_class_loss(table[[1, 0]], torch.tensor([0, 1]), table, known, owned=both)
    assert value.item() == (table[0] - table[1]).norm().item()


def test_a_hinge_is_at_most_the_distance_of_the_prototypes() -> None:
    """[11] 0 <= max(||z - g_c|| - ||z - g_j||, 0) <= ||g_c - g_j||, for each sample and pair."""
    table, known = prototypes()
    for c in range(4):
        for j in set(range(4)) - {c}:
            pair = torch.tensor([k in (c, j) for k in range(4)])
            for z in 20 * drawn(10, 1, 5, seed=c):
                value = inter_class_loss(z, torch.tensor([c]), table, known, owned=pair).item()
                assert 0 <= value <= (table[c] - table[j]).norm().item() + 1e-12


def test_the_gradient_of_the_margin() -> None:
    """[12] Two classes, present: (u_c - u_j)/(2 n_c) on active samples, u = (z - g)/||z - g||; 0 on the others."""
    table, known = prototypes(2)
    y = torch.tensor([0, 0, 0, 1, 1])
    z = 2 * drawn(5, 5, seed=3)
    slope = gradient(lambda z: inter_class_loss(z, y, table, known, owned=known), z)
    active = []
    for i, c in enumerate(y.tolist()):
        near, far = z[i] - table[c], z[i] - table[1 - c]
        active.append(bool(near.norm() > far.norm()))
        expected = (
            (near / near.norm() - far / far.norm()) / (2 * [3, 2][c])
            if active[-1]
            else torch.zeros(5).double()
        )
        assert (slope[i] - expected).abs().max() < 1e-12
    assert set(active) == {True, False}


def test_prototypes_are_constant() -> None:
    table, known = prototypes()
    table.requires_grad_()
    z = drawn(3, 5).requires_grad_()
    inter_class_loss(z, torch.tensor([0, 1, 2]), table, known).backward()
    assert table.grad is None
    assert z.grad.abs().max() > 0


# In a step


@pytest.mark.parametrize(("size", "d"), [(12, 16), (64, 5)])
def test_no_step_waits_for_the_device(size: int, d: int) -> None:
    """Tensors without values: whatever asks for one (.item(), a shape that depends on values) fails on them."""
    z = torch.empty(size, d, device="meta", requires_grad=True)
    labels = torch.empty(size, dtype=torch.int64, device="meta")
    table, known = torch.empty(4, d, device="meta"), torch.empty(4, dtype=torch.bool, device="meta")
    for scale in INTRA_SCALES:
        intra_class_loss(z, labels, scale=scale).backward()
    for owned in (None, known):
        inter_class_loss(z, labels, table, known, owned=owned).backward()
    assert z.grad.shape == (size, d)
    for waits in (
        lambda: z.sum().item(),
        lambda: z[z > 0],
        labels.unique,
        labels.nonzero,
        lambda: bool(known.any()),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            waits()


def test_it_is_computed_in_single_precision_with_mixed_precision() -> None:
    """bfloat16 features: the same bits as from their float32 values without autocast, though matmul is autocast."""
    toy = Toy(blobs({"a": 4}), classifier(), cross_entropy, sgd(0.1))
    z, labels = drawn(20, 6).bfloat16(), torch.arange(20) % 3
    site = shaped(toy.site("a"), lambda features, labels: intra_class_loss(features, labels))
    with torch.autocast("cpu", torch.bfloat16):
        value = site.penalty(z, labels[:, None])
    assert value.dtype == torch.float32
    assert value.item() == intra_class_loss(z.float(), labels).item()
    double = shaped(toy.site("a"), lambda features, labels: features.sum()).penalty(
        z.double(), labels
    )
    assert double.dtype == torch.float64


def test_losses_on_one_site_add_up() -> None:
    toy = Toy(blobs({"a": 4}), classifier(), cross_entropy, sgd(0.1))
    site = shaped(shaped(toy.site("a"), lambda z, y: z.sum()), lambda z, y: 10 * y.sum())
    assert site.penalty(torch.ones(2, 3), torch.tensor([1, 2])).item() == 36
    assert toy.site("a").penalty is None


def test_large_means_do_not_hurt() -> None:
    """float32 features far from 0: the deviation is taken after the mean."""
    z = drawn(30, 8)
    exact = alone(z, eps=1e-8).item()
    assert alone((z + 1000).float(), eps=1e-8).item() == pytest.approx(exact, rel=1e-3)
    assert math.isfinite(exact)
