"""FedOpt against its equations, and against PyTorch's optimisers where those are the same, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.methods import load
from tests.support.toy import (
    Optimizer,
    Toy,
    adam,
    bits,
    blobs,
    classifier,
    cross_entropy,
    linear,
    sgd,
    simulate,
)

HALVES = [["a", "c"], ["b", "d"], ["a", "b"], ["c", "d"]]


def close(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def two_sites() -> Toy:
    """Sites a: f = w^2 / 2, one item; b: f = (w - 4)^2 / 2, three items; rate 0.5, one step a round, w = 1.

    A round has D = (-w + 3 (4 - w)) / 8 = (3 - w) / 2.
    """
    data = {
        name: (torch.ones(n, 1).double(), torch.full((n,), y).double())
        for name, n, y in (("a", 1, 0.0), ("b", 3, 4.0))
    }
    toy = Toy(data, lambda: linear(1), optimizer=sgd(0.5))
    toy.networks.initial["weight"].fill_(1)
    return toy


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # D = 1, m = 1, w = 2; D = 0.5, m = 0.5 + 0.5, w = 3
        ({"optimizer": "sgd", "momentum": 0.5, "server_lr": 1.0}, (2.0, 3.0)),
        # tau 1: v = 1 + 1, m = 0.5, w = 1 + 2 * 0.5 / (1.41421 + 1) = 1.41421
        # D = 0.79289, v = 2.62868, m = 0.64645, w = 1.41421 + 1.29289 / 2.62132 = 1.90744
        (
            {"optimizer": "adagrad", "momentum": 0.5, "server_lr": 2.0, "tau": 1.0},
            (1.41421356, 1.90743570),
        ),
        # v = 0.75 + 0.25, m = 0.5, w = 1 + 1 / 2; D = 0.75, v = 0.75 + 0.140625, m = 0.625, w = 1.5 + 1.25 / 1.943729
        (
            {"optimizer": "adam", "momentum": 0.5, "beta2": 0.75, "server_lr": 2.0, "tau": 1.0},
            (1.5, 2.14309366),
        ),
        # v - D^2 = 0: v = 1, w = 1.5; D = 0.75: v = 1 - 0.25 * 0.5625, m = 0.625, w = 1.5 + 1.25 / 1.927024
        (
            {"optimizer": "yogi", "momentum": 0.5, "beta2": 0.75, "server_lr": 2.0, "tau": 1.0},
            (1.5, 2.14866835),
        ),
    ],
)
def test_two_rounds_by_hand(options: dict, expected: tuple[float, float]) -> None:
    for rounds, weight in enumerate(expected, 1):
        outcome = simulate(load("fedopt", **options), two_sites(), rounds)
        close(outcome.server["weights"]["weight"], torch.tensor([[weight]]).double(), 1e-7)


def test_yogi_s_v_may_shrink_by_no_more_than_its_share_of_the_square() -> None:
    """v = tau^2 = 1 is below D^2 = 4 at w = -1: v <- 1 + 0.25 * 4."""
    toy = two_sites()
    toy.networks.initial["weight"].fill_(-1)
    server = simulate(load("fedopt", optimizer="yogi", beta2=0.75, tau=1.0), toy).server
    assert server["v"]["weight"].item() == 2.0


@pytest.mark.parametrize("optimizer", [sgd(0.1), sgd(0.1, momentum=0.9), adam(0.01)])
@pytest.mark.parametrize("cohorts", [None, HALVES])
def test_plain_sgd_of_rate_1_is_fedavg_bit_for_bit(
    optimizer: Optimizer, cohorts: list | None
) -> None:
    data = blobs({"a": 9, "b": 6, "c": 11, "d": 5})
    toy = Toy(data, classifier(norm=True), cross_entropy, optimizer, batch_size=4, epochs=2)
    neutral = load("fedopt", optimizer="sgd", server_lr=1.0, momentum=0.0)
    ours, fedavg = (simulate(method, toy, 4, cohorts) for method in (neutral, load("fedavg")))
    assert bits(ours.server) == bits(fedavg.server)
    assert bits(ours.states) == bits(fedavg.states)


@pytest.mark.parametrize(
    ("options", "peer"),
    [
        (
            {"optimizer": "sgd", "server_lr": 0.3, "momentum": 0.9},
            lambda p: torch.optim.SGD(p, 0.3, momentum=0.9),
        ),
        (
            {"optimizer": "sgd", "server_lr": 0.3, "momentum": 0.0},
            lambda p: torch.optim.SGD(p, 0.3),
        ),
        (
            {"optimizer": "adagrad", "server_lr": 0.3, "tau": 0.1},
            lambda p: torch.optim.Adagrad(p, 0.3, initial_accumulator_value=0.01, eps=0.1),
        ),
    ],
)
def test_steps_are_pytorch_s(
    lines: Toy, options: dict, peer: Callable[[list], torch.optim.Optimizer]
) -> None:
    """PyTorch's optimiser, given minus the mean change as gradient, goes the same way for six rounds."""
    history = [
        server["weights"]["weight"].clone()
        for server in simulate(load("fedopt", **options), lines, 6).history
    ]
    weight = history[0].clone().requires_grad_()
    optimizer = peer([weight])
    for ours in history:
        close(ours, weight.detach())
        lines.networks.initial["weight"].copy_(weight.detach())
        mean = simulate(load("fedavg"), lines).server["weights"]["weight"]
        weight.grad = weight.detach() - mean
        optimizer.step()
    assert (history[-1] - history[0]).norm() > 0.1


def test_the_defaults_are_the_paper_s_and_ours() -> None:
    """Tau 1e-3 and beta2 0.99; a first step of rate 1 of sgd, 0.01 of the others: D = 1, m = 0.1 (of adagrad 1)."""
    assert (load("fedopt").optimizer, load("fedopt").tau, load("fedopt").beta2) == (
        "adam",
        1e-3,
        0.99,
    )
    v = {"adam": 0.99e-6 + 0.01, "yogi": 1e-6 + 0.01, "adagrad": 1e-6 + 1}
    for optimizer, square in v.items():
        wanted = 1 + 0.01 * (1.0 if optimizer == "adagrad" else 0.1) / (square**0.5 + 1e-3)
        after = simulate(load("fedopt", optimizer=optimizer), two_sites()).server
        close(after["weights"]["weight"], torch.tensor([[wanted]]).double(), 1e-7)
        close(after["v"]["weight"], torch.tensor([[square]]).double(), 1e-7)
    close(
        simulate(load("fedopt", optimizer="sgd"), two_sites()).server["weights"]["weight"],
        torch.tensor([[2.0]]).double(),
    )


def test_adam_s_steps_are_pytorch_s_without_its_corrections(lines: Toy) -> None:
    """PyTorch divides m by 1 - b1^t and v by 1 - b2^t and starts at v = 0; written out, tau^2 decays as b2^t tau^2.

    So PyTorch's own m and v, as it keeps them, give w + eta m / (sqrt(v + b2^t tau^2) + tau).
    """
    options = {"optimizer": "adam", "server_lr": 0.3, "momentum": 0.8, "beta2": 0.7, "tau": 0.1}
    history = [
        server["weights"]["weight"].clone()
        for server in simulate(load("fedopt", **options), lines, 4).history
    ]
    weight = history[0].clone().requires_grad_()
    optimizer = torch.optim.Adam([weight], betas=(0.8, 0.7))
    for t, (ours, after) in enumerate(zip(history, history[1:], strict=False), 1):
        lines.networks.initial["weight"].copy_(ours)
        weight.data.copy_(ours)
        weight.grad = ours - simulate(load("fedavg"), lines).server["weights"]["weight"]
        optimizer.step()
        kept = optimizer.state[weight]
        v = kept["exp_avg_sq"] + 0.7**t * 0.1**2
        close(after, ours - 0.3 * kept["exp_avg"] / (v.sqrt() + 0.1), 1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "yogi", "adagrad"])
def test_buffers_are_averaged_and_kept_out_of_the_optimiser(optimizer: str) -> None:
    toy = Toy(blobs({"a": 9, "b": 6}), classifier(norm=True), cross_entropy, sgd(0.1), batch_size=4)
    ours, fedavg = (
        simulate(m, toy).server for m in (load("fedopt", optimizer=optimizer), load("fedavg"))
    )
    with toy.networks.scope():
        trained = {name for name, _ in toy.networks.lease(toy.initial).named_parameters()}
    assert ours["m"].keys() == trained
    buffers = fedavg["weights"].keys() - trained
    assert len(buffers) == 3
    assert all(bits(ours["weights"][name]) == bits(fedavg["weights"][name]) for name in buffers)


def test_a_tensor_with_two_names_moves_under_both() -> None:
    def tied() -> nn.Module:
        network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
        network[2].weight = network[0].weight
        return network

    toy = Toy(blobs({"a": 9, "b": 6}), tied, cross_entropy, sgd(0.1), batch_size=4)
    weights = simulate(load("fedopt"), toy, 2).server["weights"]
    assert bits(weights["0.weight"]) == bits(weights["2.weight"])


@pytest.mark.parametrize(
    "options", [{"optimizer": "lamb"}, {"server_lr": -1.0}, {"momentum": 2.0}, {"tau": 0.0}]
)
def test_options_out_of_their_limits_are_refused(options: dict) -> None:
    with pytest.raises(InputError):
        load("fedopt", **options)
