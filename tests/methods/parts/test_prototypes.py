"""Class statistics of features, against means and covariances written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from medfl.data.prepared import Shard, Stacked
from medfl.methods._parts.prototypes import (
    Gaussians,
    class_counts,
    class_indices,
    collect,
    distance,
    features,
    gaussians,
    pool,
    pooled_means,
)
from tests.support.toy import bits, classifier, shaken

CPU = torch.device("cpu")


def shard(x: Tensor, y: Tensor, labelled: bool = False) -> Shard:
    items = [{"id": str(i), **({"label": int(c)} if labelled else {})} for i, c in enumerate(y)]
    return Shard.of(Stacked(items, x, y), range(len(x)))


def identity(d: int, num_classes: int = 3) -> nn.Module:
    """A network whose feature is its input."""
    return nn.Sequential(nn.Identity(), nn.Linear(d, num_classes)).double()


def drawn(n: int, d: int = 4, seed: int = 0, num_classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(num_classes, (n,), generator=generator)
    return torch.randn(n, d, generator=generator, dtype=torch.float64) + 50 * y[:, None], y


# Labels


@pytest.mark.parametrize(
    "targets", [torch.tensor([2, 0, 1]), torch.tensor([[2.0], [0], [1]]), torch.eye(3)[[2, 0, 1]]]
)
def test_class_indices(targets: Tensor) -> None:
    assert class_indices(targets).tolist() == [2, 0, 1]


@pytest.mark.parametrize("labelled", [False, True])
def test_class_counts(labelled: bool) -> None:
    assert class_counts(
        shard(torch.zeros(4, 1), torch.tensor([2, 0, 2, 2]), labelled), 4
    ).tolist() == [1, 0, 3, 0]


# Means


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_means_by_hand(batch_size: int) -> None:
    """Class 0: (1, 2), (3, 4) -> (2, 3). Class 2: (5, 5). Class 1 is absent -> zeros."""
    x = torch.tensor([[1.0, 2], [5, 5], [3, 4]]).double()
    means, counts = collect(identity(2), shard(x, torch.tensor([0, 2, 0])), batch_size, 3, CPU)
    assert means.tolist() == [[2, 3], [0, 0], [5, 5]]
    assert counts.tolist() == [2, 0, 1]


def test_normalised_features() -> None:
    """(3, 4) and (0, 2) have directions (0.6, 0.8) and (0, 1), mean (0.3, 0.9)."""
    x = torch.tensor([[3.0, 4], [0, 2]]).double()
    means, _ = collect(identity(2), shard(x, torch.zeros(2).long()), 2, 3, CPU, normalised=True)
    assert means[0].tolist() == pytest.approx([0.3, 0.9])


def test_features_are_taken_in_evaluation_mode_and_the_modes_are_put_back() -> None:
    network = classifier(norm=True, dropout=0.5)()
    network[3].eval()
    x = torch.randn(9, 8)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    got = torch.cat([f for f, _ in features(network, shard(x, torch.zeros(9).long()), 4, CPU)])
    assert [network[i].training for i in (1, 3, 4)] == [True, False, True]
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(got, network.eval()[:4](x))
    assert not got.requires_grad


def test_random_transforms_are_left_out() -> None:
    x = torch.tensor([[1.0, 2], [5, 5], [3, 4]]).double()
    plain = shard(x, torch.tensor([0, 2, 0]))
    moving = shaken(plain)
    assert not torch.equal(next(moving.batches(3))[0], x)
    found = collect(identity(2), moving, 2, 3, CPU)
    assert bits(found) == bits(collect(identity(2), plain, 2, 3, CPU))
    assert bits(gaussians(identity(2), moving, 2, 3, CPU).means) == bits(found[0])


def test_a_site_without_items_has_no_means() -> None:
    with pytest.raises(ValueError, match="without items"):
        collect(
            identity(2), Shard.of(Stacked([], torch.zeros(0, 2), torch.zeros(0)), []), 4, 3, CPU
        )


def test_merging_by_samples_is_the_mean_of_everything_and_plain_is_the_mean_of_the_owners() -> None:
    """Class 0: means 1 (3 items) and 5 (1 item): by samples 2, plain 3; class 1 has one owner, class 2 nobody."""
    means = [torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([[5.0], [7.0], [0.0]])]
    counts = [torch.tensor([3, 0, 0]), torch.tensor([1, 2, 0])]
    tables = [{"means": mean, "counts": count} for mean, count in zip(means, counts, strict=True)]
    owners = [{**table, "counts": table["counts"].clamp(max=1)} for table in tables]
    assert pooled_means(tables)[0][:, 0].tolist() == [2, 7, 0]
    assert pooled_means(owners)[0][:, 0].tolist() == [3, 7, 0]
    assert pooled_means(tables)[1].tolist() == [4, 2, 0]


def test_distance() -> None:
    """(1, 1) to (1, 3): (0 + 4) / 2 = 2."""
    assert distance(torch.ones(1, 2), torch.tensor([[1.0, 3], [1, 1]])).tolist() == [[2, 0]]


# Gaussians


def test_pooled_statistics_are_those_of_the_pooled_features() -> None:
    sizes = [30, 2, 17, 1]
    data = [drawn(n, seed=i) for i, n in enumerate(sizes)]
    parts = [gaussians(identity(4), shard(x, y), 8, 3, CPU) for x, y in data]
    whole = pool(parts)
    x, y = (torch.cat(column) for column in zip(*data, strict=True))
    for c in range(3):
        assert whole.counts[c] == (y == c).sum() > 2
        torch.testing.assert_close(whole.means[c], x[y == c].mean(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(whole.covariances[c], torch.cov(x[y == c].T), rtol=0, atol=1e-12)
    turned = pool(parts[::-1])
    torch.testing.assert_close(turned.covariances, whole.covariances, rtol=0, atol=1e-12)


def test_pooled_covariance_is_the_papers_formula() -> None:
    """Sum (n_i - 1)/(n - 1) S_i + sum n_i/(n - 1) m_i m_i' - n/(n - 1) m m'."""
    parts = [gaussians(identity(4), shard(*drawn(n, seed=n)), 8, 3, CPU) for n in (20, 31)]
    whole = pool(parts)
    for c in range(3):
        n, m = int(whole.counts[c]), whole.means[c]  # integer tensors divide to float32
        expected = -n / (n - 1) * torch.outer(m, m)
        for part in parts:
            expected = expected + (int(part.counts[c]) - 1) / (n - 1) * part.covariances[c]
            expected = expected + int(part.counts[c]) / (n - 1) * torch.outer(
                part.means[c], part.means[c]
            )
        torch.testing.assert_close(whole.covariances[c], expected, rtol=0, atol=1e-9)


def test_one_item_has_covariance_zero_and_an_absent_class_is_nothing() -> None:
    """Two sites with one item each, 0 and 2: pooled mean 1, variance 2."""
    parts = [
        gaussians(
            identity(1), shard(torch.tensor([[v]]).double(), torch.zeros(1).long()), 4, 3, CPU
        )
        for v in (0.0, 2.0)
    ]
    assert not any(part.covariances.any() for part in parts)
    whole = pool(parts)
    assert whole.counts.tolist() == [2, 0, 0]
    assert (whole.means[0].item(), whole.covariances[0].item()) == (1, 2)
    assert not whole.covariances[1:].any()
    assert pool(parts[1:]).means[0].item() == 2


def test_samples_have_the_mean_and_covariance_even_if_it_is_singular() -> None:
    covariance = torch.tensor([[4.0, 2], [2, 1]]).double()[None]  # rank one
    model = Gaussians(torch.tensor([9]), torch.tensor([[1.0, -1]]).double(), covariance)
    x = model.sample(0, 20_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(x.mean(0), model.means[0], rtol=0, atol=0.05)
    torch.testing.assert_close(torch.cov(x.T), covariance[0], rtol=0.05, atol=0)
    assert torch.equal(x, model.sample(0, 20_000, torch.Generator().manual_seed(0)))
