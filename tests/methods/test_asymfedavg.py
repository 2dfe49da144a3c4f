"""AsymFedAvg: what fits in name and shape is averaged, all else stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from medfl.core.errors import InputError, RunError
from medfl.core.message import Message
from medfl.methods import load
from medfl.training.network_pool import Networks
from medfl.training.site import Site
from tests.support.toy import Toy, bits, blobs, cross_entropy, judged, sgd, simulate

METHOD = load("asymfedavg")
SITES = {"a": 9, "b": 6, "c": 11, "d": 8}
WIDTHS = {"a": (6,), "b": (6,), "c": (6, 5), "d": (4,)}
"""Hidden layers of each site's network: c is deeper, d narrower."""


def network(*widths: int) -> nn.Module:
    """Layers 0, 1, ... of these widths, and `head`; only the head of a and b has the same shape."""
    layers = nn.Sequential()
    before = 8
    for number, width in enumerate(widths):
        layers.add_module(
            str(number), nn.Sequential(nn.Linear(before, width), nn.BatchNorm1d(width))
        )
        before = width
    layers.add_module("head", nn.Linear(before, 3))
    return layers


class Different(Toy):
    """Sites whose networks have other depths and widths."""

    def site(self, name: str, round_: int = 1) -> Site:
        self.pools = getattr(self, "pools", {})
        pool = self.pools.setdefault(
            name, Networks(lambda: network(*WIDTHS[name]), self.seed, torch.device("cpu"))
        )
        return replace(super().site(name, round_), networks=pool)


def different(sites: dict[str, int] = SITES) -> Different:
    return Different(blobs(sites), lambda: network(6), cross_entropy, sgd(0.1), batch_size=4)


def test_sites_with_equal_networks_are_fedavg_bit_for_bit(classes: Toy) -> None:
    for cohorts in (None, [["a", "b", "c"], ["b"], ["a", "c"]]):
        ours = simulate(METHOD, classes, 3, cohorts)
        theirs = simulate(load("fedavg"), classes, 3, cohorts)
        own = {
            f"{name}{list(value.shape)}": value for name, value in theirs.server["weights"].items()
        }
        assert bits(ours.server["entries"]) == bits(own)
        for name in classes.names:
            assert bits(judged(METHOD, classes, ours, name)) == bits(theirs.server["weights"])


def test_each_entry_is_the_mean_over_the_sites_that_have_it() -> None:
    """Layer 0 of width 6 is that of a, b and c, the head (3, 6) that of a and b; float64 sums, rounded once."""
    outcome = simulate(METHOD, different(), 2, wire=True)
    entries = outcome.server["entries"]
    owners = {"0.0.weight[6, 8]": "abc", "0.1.running_var[6]": "abc", "head.weight[3, 6]": "ab"}
    for key, names in owners.items():
        shares = np.array([SITES[name] for name in names], float)
        parts = [outcome.replies[name]["entries"][key].double().numpy() for name in names]
        expected = np.tensordot(shares / shares.sum(), np.stack(parts), 1)
        np.testing.assert_allclose(entries[key].double().numpy(), expected, rtol=1e-7, atol=1e-9)


def test_what_does_not_fit_stays_at_its_site() -> None:
    toy = different()
    outcome = simulate(METHOD, toy, 2)
    own = {"1.0.weight[5, 6]", "head.weight[3, 5]", "0.0.weight[4, 8]", "head.weight[3, 4]"}
    for message in [*outcome.down.values(), *outcome.replies.values()]:
        assert not own & message["entries"].keys()
        assert message["entries"]

    # the bias of the head has one shape at all sites, d shares no weight
    assert {key for key in outcome.replies["d"]["entries"] if "weight" in key} == set()
    assert "head.bias[3]" in outcome.replies["d"]["entries"]
    for name, key in (("c", "head.weight"), ("d", "0.0.weight"), ("c", "1.0.weight")):
        kept = judged(METHOD, toy, outcome, name)[key]
        assert bits(kept) == bits(outcome.states[name]["weights"][key])


def test_common_entries_start_the_same_at_all_sites() -> None:
    """Networks of other shapes draw other numbers; the first site's are taken."""
    toy = different()
    begun = simulate(METHOD, toy, 0)
    first = toy.site("a").initial_weights["0.0.weight"]
    assert bits(begun.server["entries"]["0.0.weight[6, 8]"]) == bits(first)
    for name in "bc":
        assert bits(judged(METHOD, toy, begun, name)["0.0.weight"]) == bits(first)


def test_networks_without_a_common_layer_are_refused() -> None:
    class Apart(Toy):
        def site(self, name: str, round_: int = 1) -> Site:
            width = {"a": 6, "b": 5}[name]
            pool = Networks(lambda: nn.Linear(8, width, bias=False), 0, torch.device("cpu"))
            return replace(super().site(name, round_), networks=pool)

    toy = Apart(blobs({"a": 4, "b": 4}), lambda: nn.Linear(8, 6), cross_entropy)
    with pytest.raises(InputError, match="without a common layer"):
        simulate(METHOD, toy, 0)


def test_an_entry_of_another_form_names_its_sender() -> None:
    toy = different()
    outcome = simulate(METHOD, toy)
    key = "head.bias[3]"
    wrong = Message({"entries": {key: torch.zeros(1)}}, {"samples": 9})
    with pytest.raises(RunError, match=r"site 'a': 'entries/head.bias\[3\]' has the shape \[1\]"):
        METHOD.aggregate(toy.host(), outcome.server, {"a": wrong}, 4)
    with pytest.raises(RunError, match="the server: 'entries/head.bias"):
        METHOD.predictor(toy.site("a"), outcome.states["a"], wrong)
