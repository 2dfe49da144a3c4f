"""A network with adapters inside a block."""

from __future__ import annotations

import torch
from torch import nn

from medfl.methods._parts.adapting import adapting
from tests.support.toy import classifier


def test_norms_beside_adapters_go_by_their_running_statistics_and_are_put_back() -> None:
    network = classifier(norm=True)().train()
    pairs = {"0.weight": (torch.zeros(2, 8), torch.zeros(6, 2))}
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with adapting(network, pairs, 1.0, ["4.weight", "4.bias"], trains_a=True) as trained:
        assert [layer.training for layer in network[:3]] == [True, False, True]  # type: ignore[index]
        network(torch.randn(5, 8)).sum().backward()
        assert all(p.requires_grad == p_is_trained(name) for name, p in network.named_parameters())
    assert set(trained) == {"0.weight"}
    assert network[1].training  # type: ignore[index]
    assert list(network.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    with adapting(network, {}, 1.0, ["1.running_mean", "1.weight"], trains_a=True):
        assert network[1].training  # type: ignore[index]  # its statistics are trained too


def p_is_trained(name: str) -> bool:
    """Tell whether it is a factor or of the head."""
    return name.startswith("4.") or name.rpartition(".")[2] in ("a", "b")


def test_norms_without_running_statistics_stay_in_training() -> None:
    network = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6, track_running_stats=False)).train()
    with adapting(network, {}, 1.0, [], trains_a=True):
        assert network[1].training
