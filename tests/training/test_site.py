"""The network pool and what a site hands out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medfl.core.seeding import stream
from medfl.training.layers import evaluating, split_names
from medfl.training.network_pool import Networks
from medfl.training.site import merged, snapshot
from tests.support.toy import Toy, bits, blobs, classifier


def pool(seed: int = 0) -> Networks:
    return Networks(classifier(norm=True), seed, torch.device("cpu"))


def test_two_leases_are_two_networks_and_both_come_back() -> None:
    networks = pool()
    weights = {name: tensor + 1 for name, tensor in networks.initial.items()}
    with networks.scope():
        first, second = networks.lease(networks.initial), networks.lease(weights)
        assert first is not second
        assert bits(snapshot(first)) == bits(networks.initial)
        assert bits(snapshot(second)) == bits(weights)
    with networks.scope():
        again = {id(networks.lease(networks.initial)) for _ in range(2)}
    assert again == {id(first), id(second)}


def test_nothing_is_built_anew_once_the_pool_is_large_enough() -> None:
    built = []

    def factory() -> nn.Module:
        built.append(1)
        return classifier()()

    networks = Networks(factory, 0, torch.device("cpu"))
    for _ in range(3):
        with networks.scope():
            networks.lease(networks.initial)
            networks.lease(networks.initial)
    assert len(built) == 2


def test_networks_come_back_after_an_error_and_from_inner_scopes() -> None:
    networks = pool()
    inner: list[nn.Module] = []

    def fail() -> None:
        with networks.scope():
            inner.append(networks.lease(networks.initial))
            raise KeyError

    with networks.scope():
        outer = networks.lease(networks.initial)
        with pytest.raises(KeyError):
            fail()
        assert networks.lease(networks.initial) is inner[0]
        assert inner[0] is not outer


def test_a_lease_is_a_copy() -> None:
    networks = pool()
    kept = bits(networks.initial)
    with networks.scope():
        model = networks.lease(networks.initial)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(1)
    assert bits(networks.initial) == kept


def test_a_lease_is_as_new_whatever_was_done_to_it() -> None:
    networks = pool()
    with networks.scope():
        model = networks.lease(networks.initial)
        model.eval()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    with networks.scope():
        again = networks.lease(networks.initial)
        assert again is model
        assert all(module.training for module in again.modules())
        assert all(parameter.requires_grad for parameter in again.parameters())


class Remembering(nn.Module):
    """Keeps of what it sees: a sum in a buffer that is not saved, a mean in the place of one that is, and a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("total", torch.zeros(()), persistent=False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("last", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum()
        self.mean, self.last = x.mean(0), x
        return self.layer(x)


def test_nothing_of_one_sites_images_is_left_in_a_network_for_the_next() -> None:
    networks = Networks(Remembering, 0, torch.device("cpu"))
    with networks.scope():
        seen = networks.lease(networks.initial)
        seen(torch.ones(3, 2))
        assert snapshot(seen)["mean"].tolist() == [1, 1]
    with networks.scope():
        again = networks.lease({**networks.initial, "mean": torch.tensor([5.0, 6.0])})
        assert again is seen
        assert (again.total.item(), again.mean.tolist(), again.last) == (0, [5, 6], None)
        assert snapshot(again)["mean"].tolist() == [5, 6]


def test_what_the_bundle_froze_stays_frozen() -> None:
    def frozen() -> nn.Module:
        network = classifier()()
        network[0].requires_grad_(False)
        return network

    networks = Networks(frozen, 0, torch.device("cpu"))
    with networks.scope():
        networks.lease(networks.initial).requires_grad_(True)
    with networks.scope():
        flags = {
            name: p.requires_grad for name, p in networks.lease(networks.initial).named_parameters()
        }
    assert flags == {"0.weight": False, "0.bias": False, "4.weight": True, "4.bias": True}


def test_weights_that_do_not_fit_are_refused() -> None:
    networks = pool()
    weights = dict(networks.initial)
    with networks.scope():
        for wrong, text in (
            (
                {k: v for k, v in weights.items() if k != "4.bias"},
                "'4.bias' is in one of them only",
            ),
            ({**weights, "5.bias": torch.zeros(3)}, "'5.bias' is in one of them only"),
            (
                {**weights, "4.bias": torch.zeros(1)},
                r"'4.bias' has shape \(1,\); the network's is \(3,\)",
            ),
        ):
            with pytest.raises(ValueError, match=text):
                networks.lease(wrong)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    first = pool()
    torch.rand(3)
    second = pool()
    with second.scope():
        second.lease({name: tensor * 0 for name, tensor in first.initial.items()})
    assert bits(second.initial) == bits(first.initial)
    assert bits(snapshot(second.fresh())) == bits(first.initial)
    assert bits(pool(seed=1).initial) != bits(first.initial)
    with stream(0, "network"):
        assert bits(snapshot(classifier(norm=True)())) == bits(first.initial)


def test_a_path_names_another_draw_of_the_weights() -> None:
    networks = pool()
    drawn = [
        snapshot(networks.fresh(*path))
        for path in ((), ("site", "a"), ("site", "b"), ("centre", 1))
    ]
    assert len({str(bits(weights)) for weights in drawn}) == 4
    torch.rand(3)
    assert bits(snapshot(pool().fresh("site", "a"))) == bits(drawn[1])


def test_evaluating_puts_every_layers_own_mode_back() -> None:
    network = classifier(norm=True, dropout=0.5)()
    network[1].eval()
    before, x = snapshot(network), torch.rand(4, 8)

    def fail() -> None:
        with evaluating(network):
            assert torch.equal(network(x), network(x))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert bits(snapshot(network)) == bits(before)
    assert [module.training for module in network] == [True, False, True, True, True]
    assert network.training


def test_site_and_host_share_the_pool_and_own_what_they_build() -> None:
    toy = Toy(blobs({"a": 4, "b": 6}), classifier())
    site, host = toy.site("b"), toy.host()
    assert site.num_samples == len(site.train) == 6
    assert site.device == host.device == torch.device("cpu")
    assert (
        bits(dict(site.initial_weights))
        == bits(snapshot(site.network()))
        == bits(snapshot(host.network()))
    )
    with toy.networks.scope():
        assert site.model(toy.initial) is not host.model(toy.initial)
    assert not hasattr(host, "train")


def test_split_names_goes_by_type_and_finds_all_names_of_a_shared_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.same = self.body[1]
            self.bn = nn.Linear(2, 2)

    network = Twice()
    tensors = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {f"{prefix}.{name}" for prefix in ("body.1", "same") for name in tensors}
    assert split_names(network, (nn.BatchNorm1d,)) == expected
    assert split_names(nn.BatchNorm1d(2), (nn.BatchNorm1d,)) == set(tensors)
    assert split_names(network, (nn.LSTM,)) == set()


def test_merged_prefers_what_is_personal() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    assert merged({"a": one, "b": one}, {"b": two}) == {"a": one, "b": two}
