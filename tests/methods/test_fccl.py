"""FCCL: the correlation of logits, both phases, what stays at a site."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.seeding import stream
from medfl.core.task import Task
from medfl.data.prepared import Shard, Stacked
from medfl.data.public import Public
from medfl.methods import load
from medfl.methods.fccl import collaboration, cross_correlation, standardised
from medfl.training.network_pool import Networks
from medfl.training.site import Site
from tests.support.toy import (
    Toy,
    adam,
    bits,
    blobs,
    classifier,
    cross_entropy,
    judged,
    public_blobs,
    sgd,
    simulate,
)

METHOD = load("fccl")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def asked(number: int, mean: Tensor | None = None) -> Message:
    """A broadcast that asks for the first items, with the mean logits of as many."""
    positions = torch.arange(number)
    if mean is None:
        return Message({"positions": {"asked": positions}})
    return Message(
        {"positions": {"asked": positions, "scored": positions}, "scores": {"public": mean}}
    )


# The correlation


def test_logits_that_are_the_same_correlate_up_to_the_unbiased_deviation() -> None:
    """The card's check, K = 8 and B = 64: the diagonal is (B - 1) / B and its terms sum to K / B^2 = 0.001953125."""
    z = drawn(64, 8)
    diagonal = cross_correlation(z, z).diagonal()
    torch.testing.assert_close(
        diagonal, torch.full((8,), 63 / 64, dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert collaboration(z, 3 * z + 1, 0.0).item() == pytest.approx(0.001953125, abs=1e-12)


def test_logits_of_opposite_sign_correlate_negatively() -> None:
    """The card's check."""
    z = drawn(64, 8)
    diagonal = cross_correlation(z, -z).diagonal()
    torch.testing.assert_close(
        diagonal, torch.full((8,), -63 / 64, dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("seed", range(5))
def test_independent_logits_are_one_away_from_the_target_off_the_diagonal(seed: int) -> None:
    """The card's check: with (M_uv + 1)^2 near 1 the K (K - 1) terms sum to about 56 (mean 56 + 56 / B)."""
    z, other = drawn(64, 8, seed=seed), drawn(64, 8, seed=100 + seed)
    off = (collaboration(z, other, 1.0) - collaboration(z, other, 0.0)).item()
    assert off == pytest.approx(56, abs=6)


def test_the_loss_by_hand() -> None:
    """z = z~ = ((1, 0), (0, 1)): columns standardised to +-1/sqrt 2, M = ((1/2, -1/2), (-1/2, 1/2)).

    (1/2 - 1)^2 twice, and lambda (-1/2 + 1)^2 twice: 0.5 + 0.5 lambda. With z~ = -z the signs of M
    turn: 4.5 + 4.5 lambda.
    """
    z = torch.eye(2, dtype=torch.float64)
    for lam in (0.0, 0.0051, 2.0):
        assert collaboration(z, z, lam).item() == pytest.approx(0.5 + 0.5 * lam, abs=1e-12)
        assert collaboration(z, -z, lam).item() == pytest.approx(4.5 + 4.5 * lam, abs=1e-12)


def test_the_others_are_constant() -> None:
    z, other = drawn(6, 3).requires_grad_(), drawn(6, 3, seed=1).requires_grad_()
    collaboration(z, other, 0.1).backward()
    assert other.grad is None
    assert z.grad.abs().sum() > 0


def test_a_class_without_variance_gives_no_nan() -> None:
    """It counts as 0: (0 - 1)^2 on the diagonal, (0 + 1)^2 off it, and no gradient of its own."""
    z = drawn(6, 3)
    z[:, 1] = 0.1
    z.requires_grad_()
    loss = collaboration(z, drawn(6, 3, seed=1), 0.5)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(z.grad).all()
    m = cross_correlation(z.detach(), drawn(6, 3, seed=1))
    torch.testing.assert_close(m[1], torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-9)
    assert torch.isfinite(cross_correlation(z.detach(), torch.ones(6, 3))).all()


def test_maps_are_standardised_over_batch_and_cells() -> None:
    z, other = drawn(2, 3, 4, 5), drawn(2, 3, 4, 5, seed=1)
    rows = [value.movedim(1, -1).reshape(-1, 3) for value in (z, other)]
    torch.testing.assert_close(
        collaboration(z, other, 0.3), collaboration(*rows, 0.3), rtol=0, atol=1e-12
    )
    assert standardised(z).shape == (40, 3)
    one = drawn(1, 3, 4, 5)
    assert torch.isfinite(cross_correlation(one, one)).all()


def test_the_correlation_is_exact_with_mixed_precision() -> None:
    z = drawn(64, 8).float()
    with torch.autocast("cpu", torch.bfloat16):
        m = cross_correlation(z, z)
    assert m.dtype == torch.float32
    torch.testing.assert_close(m.diagonal(), torch.full((8,), 63 / 64))


# The public phase


@pytest.mark.parametrize("lam", [0.0051, 1.0])
def test_a_public_step_descends_the_loss(lam: float) -> None:
    """One step of rate 0.1 on all items, against the gradient of L_col by torch.corrcoef, M = corrcoef (B - 1) / B."""
    x, w, mean = drawn(9, 8), drawn(3, 8, seed=1), drawn(9, 3, seed=2)
    public = Public("made", Shard.of(Stacked([{}] * 9, x, torch.zeros(9)), range(9)), Task())
    data = {"a": (x, torch.zeros(9, dtype=torch.int64))}
    toy = Toy(
        data,
        lambda: nn.Linear(8, 3, bias=False).double(),
        cross_entropy,
        sgd(0.1),
        epochs=0,
        public=public,
    )
    with toy.networks.scope():
        state = {"weights": {"weight": w}, "frozen": {"weight": w}}
        after, _ = load("fccl", lam=lam).local_update(toy.site("a"), state, asked(9, mean))
    v = w.clone().requires_grad_()
    m = torch.corrcoef(torch.cat([(x @ v.T).T, mean.T]))[:3, 3:] * 8 / 9
    eye = torch.eye(3, dtype=torch.float64)
    (eye * (m - 1) ** 2 + lam * (1 - eye) * (m + 1) ** 2).sum().backward()
    torch.testing.assert_close(after["weights"]["weight"], w - 0.1 * v.grad, rtol=0, atol=1e-10)


def test_a_last_item_alone_joins_the_batch_before(classes: Toy) -> None:
    """Nine items in batches of four: without a norm one item would have no variance."""
    toy = replace(classes, network=classifier(), public=public_blobs(9), epochs=0)
    with toy.networks.scope():
        state = {"weights": toy.initial, "frozen": toy.initial}
        mean = drawn(9, 3).float()
        after, reply = load("fccl", public_batch_size=4).local_update(
            toy.site("a"), state, asked(9, mean)
        )
    assert all(torch.isfinite(value).all() for value in after["weights"].values())
    assert reply["scores"]["public"].shape == (9, 3)
    assert bits(after["weights"]) != bits(toy.initial)


def test_the_mean_has_a_sites_own_previous_logits_in_its_own_slot(classes: Toy) -> None:
    """The card's reading of the public code: those that its model of the previous round gave."""
    for toy in (classes, replace(classes, data={"a": classes.data["a"]})):
        outcome = simulate(METHOD, toy, 2)
        mean = torch.stack([outcome.replies[name]["scores"]["public"] for name in toy.names]).mean(
            0
        )
        torch.testing.assert_close(outcome.server["consensus"]["scores"], mean)
        down = METHOD.broadcast(toy.host(3), outcome.server, "a")
        assert torch.equal(down["positions"]["scored"], outcome.down["a"]["positions"]["asked"])


@pytest.mark.parametrize(("choice", "moved"), [("track", True), ("no_track", False)])
def test_public_batches_move_running_statistics_or_not(
    classes: Toy, choice: str, moved: bool
) -> None:
    toy = replace(classes, epochs=0)
    with toy.networks.scope():
        state = {"weights": toy.initial, "frozen": toy.initial}
        mean = drawn(10, 3).float()
        after, _ = load("fccl", public_bn=choice).local_update(
            toy.site("a"), state, asked(10, mean)
        )
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(after["weights"][name], toy.initial[name]) is not moved
    assert not torch.equal(after["weights"]["4.weight"], toy.initial["4.weight"])


# The private phase


def test_a_private_step_by_hand() -> None:
    """x = 1 of class 0, two logits z = w = (0, ln 3): p = (1/4, 3/4). The frozen model's are (0, 0): q = (1/2, 1/2).

    Cross-entropy has the gradient p - (1, 0) = (-3/4, 3/4), KL(q || p) has p - q = (-1/4, 1/4), and the model of the
    previous round is this one: 0. Rate 1: w = (1, ln 3 - 1).
    """
    data = {"a": (torch.ones(1, 1).double(), torch.tensor([0]))}
    network = lambda: nn.Linear(1, 2, bias=False).double()  # noqa: E731
    public = Public(
        "made",
        Shard.of(Stacked([{}] * 2, torch.ones(2, 1).double(), torch.zeros(2)), range(2)),
        Task(),
    )
    toy = Toy(data, network, cross_entropy, sgd(1.0), public=public)
    w, q = (
        torch.tensor(value, dtype=torch.float64)[:, None] for value in ([0, math.log(3)], [0, 0])
    )
    with toy.networks.scope():
        state = {"weights": {"weight": w}, "frozen": {"weight": q}}
        after, _ = METHOD.local_update(toy.site("a"), state, asked(2))
    expected = torch.tensor([[1.0], [math.log(3) - 1]], dtype=torch.float64)
    torch.testing.assert_close(after["weights"]["weight"], expected, rtol=0, atol=1e-12)
    assert bits(after["frozen"]["weight"]) == bits(q)


@pytest.mark.parametrize("optimizer", [sgd(0.2, momentum=0.9), adam(0.01)])
@pytest.mark.parametrize(("frozen", "previous"), [(1.0, 1.0), (0.5, 0.0), (0.0, 2.0)])
def test_both_references_hold_the_model(
    optimizer: Callable, frozen: float, previous: float
) -> None:
    """A private phase without a public one, against a loop of its own; the previous model is the State's."""
    x, y = blobs({"a": 10})["a"]
    toy = Toy(
        {"a": (x.double(), y)},
        lambda: classifier()().double(),
        cross_entropy,
        optimizer,
        epochs=2,
        batch_size=4,
    )
    toy = replace(
        toy,
        public=Public("made", Shard.of(Stacked([{}] * 3, x[:3].double(), y[:3]), range(3)), Task()),
    )
    first = {name: value + 0.3 * drawn(*value.shape, seed=1) for name, value in toy.initial.items()}
    with toy.networks.scope():
        method = load("fccl", frozen_weight=frozen, previous_weight=previous)
        site = toy.site("a")
        after, _ = method.local_update(site, {"weights": toy.initial, "frozen": first}, asked(3))
    model, held, before = (toy.networks.fresh() for _ in range(3))
    held.load_state_dict(first)
    stepper = optimizer(model)
    with stream(site.seed, "local") as generator:
        for _ in range(2):
            for x, y in site.train.batches(4, generator):
                log_q, loss = model(x).log_softmax(1), cross_entropy(model(x), y)
                for weight, reference in ((frozen, held), (previous, before)):
                    p = reference(x).softmax(1).detach()
                    loss = loss + weight * (p * (p.log() - log_q)).sum(1).mean()
                stepper.zero_grad()
                loss.backward()
                stepper.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(after["weights"][name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_without_both_phases_it_is_local_training_bit_for_bit(classes: Toy, settings: dict) -> None:
    """With BatchNorm, dropout and short batches too; each part alone changes it from round 2 on."""
    toy = replace(classes, optimizer=sgd(0.1, **settings), epochs=2)
    neutral = {"public_epochs": 0, "frozen_weight": 0.0, "previous_weight": 0.0}
    off, local = load("fccl", neutral), load("local")
    apart, alone = simulate(off, toy, 3), simulate(local, toy, 3)
    for name in toy.names:
        assert bits(apart.states[name]["weights"]) == bits(alone.states[name]["weights"])
        assert bits(judged(off, toy, apart, name)) == bits(judged(local, toy, alone, name))
    for part in neutral:
        method = load("fccl", {key: value for key, value in neutral.items() if key != part})
        first, second = (simulate(method, toy, rounds) for rounds in (1, 2))
        assert bits(first.states["a"]["weights"]) == bits(
            simulate(local, toy, 1).states["a"]["weights"]
        )
        assert bits(second.states["a"]["weights"]) != bits(
            simulate(local, toy, 2).states["a"]["weights"]
        )


def test_the_frozen_model_is_the_first_rounds_and_stays(classes: Toy) -> None:
    cohorts = [["a", "b"], ["b", "c"], ["a", "b", "c"]]
    one, two, three = (simulate(METHOD, classes, rounds, cohorts) for rounds in (1, 2, 3))
    for name, first in (("a", one), ("b", one), ("c", two)):
        state = first.states[name]
        assert bits(state["frozen"]) == bits(state["weights"])
        assert bits(three.states[name]["frozen"]) == bits(state["weights"])
        assert bits(three.states[name]["weights"]) != bits(state["weights"])
    local = simulate(load("local"), classes, 2, cohorts)
    assert bits(two.states["c"]["weights"]) == bits(local.states["c"]["weights"]), (
        "it has no public phase at first"
    )


def test_the_journal_tells_of_private_training_only(classes: Toy) -> None:
    outcome = simulate(METHOD, classes, 1)
    with classes.networks.scope():
        site = classes.site("a", 2)
        METHOD.local_update(
            site, outcome.states["a"], METHOD.broadcast(classes.host(2), outcome.server, "a")
        )
        load("fccl", initial_epochs=2).local_update(site, {"weights": classes.initial}, asked(4))
    assert [report.steps for report in site.journal] == [3, 3]


# What travels


class Bodies(Toy):
    """Sites b and c have other networks."""

    def __post_init__(self) -> None:
        super().__post_init__()

        def other():
            return nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))  # noqa: E731

        self.other = Networks(other, 1, torch.device("cpu"))

    def site(self, name: str, round_: int = 1) -> Site:
        site = replace(super().site(name, round_), common=self.networks)
        return replace(site, networks=self.other) if name in "bc" else site


def test_networks_of_any_architecture_learn_and_only_public_logits_leave() -> None:
    data = blobs({"a": 9, "b": 6, "c": 11})
    toy = Bodies(data, classifier(norm=True), cross_entropy, batch_size=4, public=public_blobs(12))
    outcome = simulate(load("fccl", bodies="one,other", alignment=8), toy, 3, wire=True)
    for name in toy.names:
        initial = toy.initial if name == "a" else dict(toy.other.initial)
        assert outcome.states[name].keys() == {"weights", "frozen"}
        assert outcome.states[name]["weights"].keys() == initial.keys()
        assert bits(outcome.states[name]["weights"]) != bits(initial)
        assert set(outcome.replies[name].flat()) == {"scores/public"}
        scores = outcome.replies[name]["scores"]["public"]
        assert scores.numel() * scores.element_size() == 4 * 8 * 3
        assert METHOD.personal_names(toy.site(name).network()) == set(initial)
    with toy.networks.scope():
        assert METHOD.global_predictor(toy.host(), outcome.server) is None


def test_it_trains_with_mixed_precision(classes: Toy) -> None:
    """Logits travel in single precision all the same."""
    plain, mixed = (simulate(METHOD, replace(classes, amp=amp), 2) for amp in (False, True))
    for name in classes.names:
        assert mixed.replies[name]["scores"]["public"].dtype == torch.float32
        assert all(torch.isfinite(value).all() for value in mixed.states[name]["weights"].values())
        assert bits(mixed.states[name]) != bits(plain.states[name])


# Refusals


@pytest.mark.parametrize("name", ["alignment", "public_batch_size"])
def test_one_public_item_at_a_time_is_refused(name: str) -> None:
    with pytest.raises(
        InputError,
        match=f"{name}=1; logits are standardised over 2 public items or more; take at least 2",
    ):
        load("fccl", {name: 1})


def test_public_data_of_one_item_or_none_are_refused(classes: Toy) -> None:
    with pytest.raises(
        InputError, match=r"1 public item of 'toy-public'; standardising takes 2 or more"
    ):
        METHOD.check(replace(classes, public=public_blobs(1)).site("a"))
    with pytest.raises(InputError, match="a run without public data"):
        METHOD.check(replace(classes, public=None).site("a"))
    METHOD.check(classes.site("a"))
