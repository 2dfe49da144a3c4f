"""Central: pooled data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from medfl.methods import load
from tests.support.toy import Toy, bits, regression, sgd, simulate

METHOD = load("central")


def test_one_step_by_hand() -> None:
    """Pooled items (x, y) = (1, 3), (2, 0), f(w) = mean of (w x - y)^2 / 2, w = 1, rate 0.1.

    The gradient is ((1 - 3) 1 + (2 - 0) 2) / 2 = 1, so w = 0.9.
    """
    data = {
        "a": (torch.ones(1, 1).double(), torch.tensor([3.0]).double()),
        "b": (torch.full((1, 1), 2.0).double(), torch.zeros(1).double()),
    }
    toy = Toy(data, lambda: torch.nn.Linear(1, 1, bias=False).double(), optimizer=sgd(0.1))
    toy.networks.initial["weight"].fill_(1)
    outcome = simulate(METHOD, toy)
    assert list(outcome.replies) == ["central"]
    assert outcome.server["weights"]["weight"].item() == pytest.approx(0.9, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_full_step_equals_fedavgs(dtype: torch.dtype) -> None:
    """sum_k (n_k / n) grad f_k = grad f, without BatchNorm and dropout."""
    data = {
        name: (x.to(dtype), y.to(dtype))
        for name, (x, y) in regression({"a": 3, "b": 10, "c": 7}).items()
    }
    toy = Toy(data, lambda: torch.nn.Linear(3, 1, dtype=dtype), optimizer=sgd(0.1))
    pooled, averaged = (
        simulate(load(name), toy, 3).server["weights"] for name in ("central", "fedavg")
    )
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    for name, tensor in pooled.items():
        torch.testing.assert_close(averaged[name], tensor, rtol=0, atol=tolerance)


def test_how_the_pool_was_split_is_no_matter(classes: Toy) -> None:
    x, y = (torch.cat(parts) for parts in zip(*classes.data.values(), strict=True))
    split = {
        name: (x[part], y[part])
        for name, part in (("p", slice(0, 2)), ("q", slice(2, 20)), ("r", slice(20, 26)))
    }
    other = replace(classes, data=split)
    assert bits(simulate(METHOD, other, 3).server) == bits(simulate(METHOD, classes, 3).server)


@pytest.mark.parametrize(("keep", "same"), [(True, True), (False, False)])
def test_the_optimiser_lives_over_the_whole_run_or_a_round(keep: bool, same: bool) -> None:
    """Full-batch momentum in 6 rounds of 2 epochs equals 12 epochs in one go only if the velocity is kept."""
    toy = Toy(regression({"a": 5, "b": 7}), optimizer=sgd(0.05, momentum=0.9), epochs=2)
    rounds = simulate(load("central", keep_optimizer=keep), toy, 6)
    at_once = simulate(METHOD, replace(toy, epochs=12), 1)
    close = torch.allclose(
        rounds.server["weights"]["weight"], at_once.server["weights"]["weight"], rtol=0, atol=1e-12
    )
    assert close is same
    assert bool(rounds.states["central"]) is keep


def test_rebuilding_the_optimiser_every_round_is_fedavg_at_one_site(classes: Toy) -> None:
    toy = replace(classes, data={"central": classes.data["a"]}, optimizer=sgd(0.1, momentum=0.9))
    rebuilt = simulate(load("central", keep_optimizer=False), toy, 3)
    assert bits(rebuilt.server) == bits(simulate(load("fedavg"), toy, 3).server)
    assert bits(simulate(METHOD, toy, 3).server) != bits(rebuilt.server)


def test_the_kept_state_of_plain_descent_changes_nothing() -> None:
    toy = Toy(regression({"a": 8}), optimizer=sgd(0.1), batch_size=3)
    kept, rebuilt = (
        simulate(load("central", keep_optimizer=keep), toy, 3).server for keep in (True, False)
    )
    assert bits(kept) == bits(rebuilt)


def test_it_is_marked_as_pooling() -> None:
    assert METHOD.pools_data
    assert METHOD.judged == "global"
    assert not load("fedavg").pools_data
