"""FedMD: what is asked and answered, the consensus, digest and revisit, transfer learning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.task import Task
from medfl.data.prepared import Shard, Stacked
from medfl.data.public import Public
from medfl.methods import load
from medfl.methods._parts.public import Scored, on_public
from medfl.methods._parts.score_exchange import batch_size, reduced
from medfl.storage.files import State
from medfl.training import Networks, Site, evaluating
from medfl.training.site import fit
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

METHOD = load("fedmd")
PQR = Task("classification", ("p", "q", "r"))


def public_of(x: Tensor, y: Tensor | None = None, task: Task = PQR, depth: int = 0) -> Public:
    labels = torch.zeros(len(x), dtype=torch.int64) if y is None else y
    return Public(
        "made",
        Shard.of(Stacked([{"id": f"{i}"} for i in range(len(x))], x, labels), range(len(x))),
        task,
        (),
        depth,
    )


def flat(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def update(
    options: dict, toy: Toy, name: str, state: State, down: Message, **site: object
) -> tuple[State, Message]:
    with toy.networks.scope():
        return load("fedmd", options).local_update(replace(toy.site(name), **site), state, down)


def asked(number: int, consensus: Tensor | None = None) -> Message:
    """A broadcast that asks for the first items, with a consensus on as many."""
    positions = torch.arange(number)
    if consensus is None:
        return Message({"positions": {"asked": positions}})
    return Message(
        {"positions": {"asked": positions, "scored": positions}, "scores": {"public": consensus}}
    )


# Digest and revisit


@pytest.mark.parametrize(("loss", "expected"), [("l1", [0.5, 2.5]), ("mse", [1.0, 1.0])])
def test_a_digest_step_by_hand(loss: str, expected: list[float]) -> None:
    """One public x = 1, two scores f = w = (0, 3), consensus (1, 1), rate 1.

    Mean of |f - f~|: the gradient is (-1, 1) / 2. Mean of squares: 2 (-1, 2) / 2.
    """
    data = {"a": (torch.ones(1, 1).double(), torch.tensor([0]))}
    toy = Toy(data, lambda: nn.Linear(1, 2, bias=False).double(), cross_entropy, sgd(1.0), epochs=0)
    toy = replace(toy, public=public_of(flat([1])))
    state = {"weights": {"weight": flat([0], [3])}, "started": True}
    after, reply = update({"digest_loss": loss}, toy, "a", state, asked(1, torch.ones(1, 2)))
    assert after["weights"]["weight"][:, 0].tolist() == expected
    assert reply["scores"]["public"].tolist() == [expected]


@pytest.mark.parametrize("optimizer", [sgd(0.05, momentum=0.9), adam(0.01)])
def test_a_site_digests_the_newest_consensus_and_then_revisits_its_data(
    classes: Toy, optimizer: Callable
) -> None:
    """Round 2 against the two trainings, one after the other, each with an optimiser of its own."""
    toy = replace(classes, optimizer=optimizer, epochs=2)
    options = {"digest_batch_size": 4, "digest_epochs": 2, "alignment": 7}
    first, second = (simulate(load("fedmd", options), toy, rounds) for rounds in (1, 2))
    consensus = first.server["consensus"]
    mean = torch.stack([first.replies[name]["scores"]["public"] for name in toy.names]).mean(0)
    torch.testing.assert_close(consensus["scores"], mean)
    assert torch.equal(consensus["positions"], first.history[0]["positions"])
    with toy.networks.scope():
        site, model = toy.site("b", 2), toy.networks.lease(first.states["b"]["weights"])
        x, _ = toy.public.at(consensus["positions"])
        pairs = Shard.of(Stacked([{}] * 7, x, consensus["scores"]), range(7))
        settings = replace(site.settings, epochs=2, batch_size=4)
        distance = lambda net, x, y: (net(x) - y).abs().mean()  # noqa: E731
        fit(
            model,
            replace(site, train=pairs, settings=settings),
            objective=distance,
            purpose="digest",
        )
        fit(model, site)
        expected = dict(model.state_dict())
        for name, value in second.states["b"]["weights"].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_without_digest_it_is_local_training_bit_for_bit(classes: Toy, settings: dict) -> None:
    """With BatchNorm, dropout and short batches too; with a digest round 1 is Local's and round 2 is not."""
    toy = replace(classes, optimizer=sgd(0.1, **settings), epochs=2)
    off, local = load("fedmd", digest_epochs=0), load("local")
    apart, alone = simulate(off, toy, 3), simulate(local, toy, 3)
    for name in toy.names:
        assert bits(apart.states[name]["weights"]) == bits(alone.states[name]["weights"])
        assert bits(judged(off, toy, apart, name)) == bits(judged(local, toy, alone, name))
    for rounds, same in ((1, True), (2, False)):
        with_digest, alone = simulate(METHOD, toy, rounds), simulate(local, toy, rounds)
        for name in toy.names:
            assert (
                bits(judged(METHOD, toy, with_digest, name)) == bits(alone.states[name]["weights"])
            ) is same


def whole_numbers() -> nn.Module:
    """A linear network whose outputs are exact in any order of summation."""
    layer = nn.Linear(8, 3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_((8 * parameter).round())
    return layer


def test_a_site_alone_agrees_with_itself() -> None:
    """The card's check: the consensus is its own scores, and the digest, of loss 0, moves nothing."""
    public = public_of(
        torch.randint(-3, 4, (9, 8), generator=torch.Generator().manual_seed(0)).float()
    )
    toy = Toy(blobs({"a": 6}), whole_numbers, cross_entropy, sgd(0.5), epochs=0, public=public)
    outcome = simulate(load("fedmd", digest_epochs=3, digest_batch_size=4), toy, 3)
    assert bits(outcome.server["consensus"]["scores"]) == bits(
        outcome.replies["a"]["scores"]["public"]
    )
    assert bits(outcome.states["a"]["weights"]) == bits(toy.initial)
    other = Toy(blobs({"a": 6, "b": 6}), whole_numbers, cross_entropy, sgd(0.5), public=public)
    assert bits(simulate(METHOD, other, 2).states["a"]) != bits(
        simulate(load("fedmd", digest_epochs=0), other, 2).states["a"]
    )


def test_the_journal_tells_of_private_training_only(classes: Toy) -> None:
    outcome = simulate(METHOD, classes, 1)
    with classes.networks.scope():
        site = classes.site("a", 2)
        load("fedmd", initial_epochs=2).local_update(site, {"weights": classes.initial}, asked(4))
        load("fedmd").local_update(
            site, outcome.states["a"], METHOD.broadcast(classes.host(2), outcome.server, "a")
        )
    assert [report.steps for report in site.journal] == [3, 3]


# The consensus


def test_the_consensus_is_the_plain_mean_of_the_participants_in_any_order(classes: Toy) -> None:
    """The card's check; how many items a site has is no matter."""
    scores = {"c": flat([1, 2], [4, 0]), "a": flat([0, 1], [5, -3]), "b": flat([5, 0], [0, 0])}
    replies = {
        name: Message({"scores": {"public": value}}, {"samples": len(name)})
        for name, value in scores.items()
    }
    server = {"positions": torch.tensor([2, 5])}
    found = [
        METHOD.aggregate(classes.host(), server, {name: replies[name] for name in order}, 9)[
            "consensus"
        ]
        for order in ("abc", "cab", "bca")
    ]
    torch.testing.assert_close(found[0]["scores"], flat([2, 1], [3, -1]), rtol=0, atol=1e-12)
    assert found[0]["positions"].tolist() == [2, 5]
    assert bits(found[0]) == bits(found[1]) == bits(found[2])


def test_who_takes_part_digests_what_the_last_participants_agreed_on(classes: Toy) -> None:
    """a and b, then b and c, then a: c has nothing to digest at first, and a gets the mean of b and c."""
    outcome = simulate(METHOD, classes, 2, [["a", "b"], ["c", "b"]])
    local = simulate(load("local"), classes, 2, [["a", "b"], ["c", "b"]])
    assert bits(outcome.states["c"]["weights"]) == bits(local.states["c"]["weights"])
    assert bits(outcome.states["b"]["weights"]) != bits(local.states["b"]["weights"])
    mean = (outcome.replies["b"]["scores"]["public"] + outcome.replies["c"]["scores"]["public"]) / 2
    down = METHOD.broadcast(classes.host(3), outcome.server, "a")
    torch.testing.assert_close(down["scores"]["public"], mean)
    assert torch.equal(down["positions"]["scored"], outcome.down["b"]["positions"]["asked"])


# What travels


def test_scores_are_those_of_the_trained_model_in_evaluation_mode(classes: Toy) -> None:
    outcome = simulate(load("fedmd", alignment=6, digest_batch_size=4), classes, 2)
    for name in classes.names:
        positions = outcome.down[name]["positions"]["asked"]
        with classes.networks.scope(), torch.no_grad():
            model = classes.networks.lease(outcome.states[name]["weights"])
            with evaluating(model):
                expected = model(classes.public.at(positions)[0])
        torch.testing.assert_close(outcome.replies[name]["scores"]["public"], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_four_bytes_a_score_travel_each_way(dtype: torch.dtype) -> None:
    """The card's check: 4 N_a K bytes up and down; the positions are the server's to draw and come on top."""
    public = public_of(torch.randn(40, 8, dtype=dtype, generator=torch.Generator().manual_seed(0)))
    data = {name: (x.to(dtype), y) for name, (x, y) in blobs({"a": 5, "b": 4}).items()}
    toy = Toy(data, lambda: classifier()().to(dtype), cross_entropy, public=public)
    outcome = simulate(load("fedmd", alignment=30), toy, 2)
    down = METHOD.broadcast(toy.host(3), outcome.server, "a")
    for scores in (outcome.replies["a"]["scores"]["public"], down["scores"]["public"]):
        assert scores.numel() * scores.element_size() == 4 * 30 * 3
    assert set(outcome.replies["a"].flat()) == {"scores/public"}
    assert set(down.flat()) == {"positions/asked", "positions/scored", "scores/public"}


def test_each_round_has_its_own_draw_of_public_items(classes: Toy) -> None:
    toy = replace(classes, public=public_blobs(40))
    outcome = simulate(load("fedmd", alignment=12), toy, 3)
    draws = [state["positions"].tolist() for state in outcome.history]
    for positions in draws:
        assert len(positions) == len({*positions}) == 12
        assert positions == sorted(positions)
        assert set(positions) <= set(range(40))
    assert len({tuple(positions) for positions in draws}) == 4
    for number in (0, 40, 5000):
        assert simulate(load("fedmd", alignment=number), toy, 0).server[
            "positions"
        ].tolist() == list(range(40))


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


def test_networks_of_any_architecture_learn_and_nothing_of_them_leaves() -> None:
    data = blobs({"a": 9, "b": 6, "c": 11})
    toy = Bodies(data, classifier(norm=True), cross_entropy, batch_size=4, public=public_blobs())
    outcome = simulate(load("fedmd", bodies="one,other"), toy, 3, wire=True)
    for name in toy.names:
        initial = toy.initial if name == "a" else dict(toy.other.initial)
        assert outcome.states[name]["weights"].keys() == initial.keys()
        assert bits(outcome.states[name]["weights"]) != bits(initial)
        assert outcome.replies[name]["scores"]["public"].shape == (10, 3)
        assert METHOD.personal_names(toy.site(name).network()) == set(initial)
    with toy.networks.scope():
        assert METHOD.global_predictor(toy.host(), outcome.server) is None


def test_a_run_without_public_data_is_refused() -> None:
    toy = Toy(blobs({"a": 5}), classifier(), cross_entropy)
    text = (
        r"a run without public data; this method learns from some; add --set public=BUNDLE\[:DIR\]"
    )
    with pytest.raises(InputError, match=text):
        METHOD.check(toy.site("a"))
    with pytest.raises(InputError, match=text):
        simulate(METHOD, toy)


# Transfer learning


def test_public_labels_of_the_sites_classes_are_learned_first() -> None:
    """One step of rate 1 from w = 0 on x = 1, 1 of classes 1, 2: w = mean of (onehot - 1/3)."""
    public = public_of(torch.ones(2, 1).double(), torch.tensor([1, 2]))
    data = {"a": (torch.ones(1, 1).double(), torch.tensor([0]))}
    toy = Toy(
        data,
        lambda: nn.Linear(1, 3, bias=False).double(),
        cross_entropy,
        sgd(1.0),
        epochs=0,
        public=public,
    )
    start = {"weights": {"weight": torch.zeros(3, 1).double()}}
    options = {"pretrain_epochs": 1}
    state, _ = update(options, toy, "a", start, asked(2), task=PQR)
    torch.testing.assert_close(
        state["weights"]["weight"][:, 0], flat([-1 / 3, 1 / 6, 1 / 6])[0], rtol=0, atol=1e-12
    )
    again, _ = update(options, toy, "a", state, asked(2), task=PQR)
    assert bits(again) == bits(state), "once"
    others = (("q", "p", "r"), ("p", "q"), ())
    for task in (
        *(Task("classification", names) for names in others),
        Task("segmentation", PQR.classes),
    ):
        skipped, _ = update(options, toy, "a", start, asked(2), task=task)
        assert bits(skipped["weights"]) == bits(start["weights"])


def test_a_first_participation_may_train_longer(classes: Toy) -> None:
    """On the site's own data, before the epochs of that round, and once."""
    method = load("fedmd", initial_epochs=3, digest_epochs=0)
    outcome, later = simulate(method, classes, 1), simulate(method, classes, 2)
    with classes.networks.scope():
        model = classes.networks.lease(classes.initial)
        fit(model, classes.site("c").for_epochs(3), purpose="initial")
        fit(model, classes.site("c"))
        assert bits(outcome.states["c"]["weights"]) == bits(dict(model.state_dict()))
        fit(model, classes.site("c", 2))
        assert bits(later.states["c"]["weights"]) == bits(dict(model.state_dict()))


# BatchNorm


@pytest.mark.parametrize(("choice", "moved"), [("track", True), ("no_track", False)])
def test_public_batches_move_running_statistics_or_not(
    classes: Toy, choice: str, moved: bool
) -> None:
    toy = replace(classes, epochs=0)
    state = {"weights": toy.initial, "started": True}
    options = {"public_bn": choice, "digest_batch_size": 3}
    after, _ = update(
        options,
        toy,
        "a",
        state,
        asked(10, torch.randn(10, 3, generator=torch.Generator().manual_seed(1))),
    )
    for name, value in after["weights"].items():
        buffer = "running" in name or "num_batches" in name
        assert torch.equal(value, toy.initial[name]) is (buffer and not moved), name


# Maps


def test_maps_are_averaged_over_cells_and_never_enlarged() -> None:
    """Cells of 2 x 2; a side that is shorter than asked stays."""
    z = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert reduced(z, 2).tolist() == [[[[2.5, 4.5], [10.5, 12.5]]]]
    assert torch.equal(reduced(z, 32), z)
    assert reduced(torch.zeros(2, 3, 6, 4, 5), 5).shape == (2, 3, 5, 4, 5)
    volume = torch.arange(8.0).reshape(1, 1, 2, 2, 2)
    assert reduced(volume, 1).item() == 3.5


def test_half_precision_is_left_before_scores_are_compared() -> None:
    for shape in ((2, 3), (2, 3, 4, 4)):
        assert reduced(torch.zeros(shape, dtype=torch.float16), 2).dtype == torch.float32
        assert reduced(torch.zeros(shape, dtype=torch.float64), 2).dtype == torch.float64


@pytest.mark.parametrize("depth", [0, 6])
def test_maps_of_scores_travel_at_the_reduced_size(depth: int) -> None:
    """Flat public images for networks of images and of volumes."""
    kind = nn.Conv3d if depth else nn.Conv2d
    public = public_of(
        torch.randn(5, 1, 8, 12, generator=torch.Generator().manual_seed(0)), depth=depth
    )
    sides = (6,) * (3 if depth else 2)
    data = {
        name: (torch.randn(3, 1, *sides), torch.zeros(3, *sides, dtype=torch.int64))
        for name in "ab"
    }
    toy = Toy(data, lambda: kind(1, 2, 3, padding=1), cross_entropy, sgd(0.1), public=public)
    outcome = simulate(load("fedmd", map_size=4), toy, 2)
    for name in toy.names:
        assert outcome.replies[name]["scores"]["public"].shape == (5, 2, 4, 4)
        assert torch.isfinite(outcome.states[name]["weights"]["weight"]).all()
    local = simulate(load("local"), toy, 2)
    assert bits(outcome.states["a"]["weights"]) != bits(local.states["a"]["weights"])


def test_it_trains_with_mixed_precision(classes: Toy) -> None:
    """Scores travel in single precision all the same."""
    plain, mixed = (simulate(METHOD, replace(classes, amp=amp), 2) for amp in (False, True))
    for name in classes.names:
        assert mixed.replies[name]["scores"]["public"].dtype == torch.float32
        assert all(torch.isfinite(value).all() for value in mixed.states[name]["weights"].values())
        assert bits(mixed.states[name]) != bits(plain.states[name])


# Items with scores


def test_the_defaults_and_a_step_s_public_items() -> None:
    """As many as are asked for; else the code's number, in segmentation the run's batch size, and two at least."""
    assert (METHOD.alignment, METHOD.initial_epochs, METHOD.map_size) == (5000, 0, 32)
    toy = Toy(blobs({"a": 4}), classifier(), batch_size=5)
    with toy.networks.scope():
        site = toy.site("a")
    masks = replace(site, task=Task("segmentation", ("background", "lung")))
    single = replace(masks, settings=replace(site.settings, batch_size=1))
    assert [batch_size(one, 0, 256) for one in (site, masks, single)] == [256, 5, 2]
    assert [batch_size(one, 9, 256) for one in (site, masks, single)] == [9, 9, 9]


def test_each_public_item_comes_with_its_own_score() -> None:
    public, positions = public_blobs(10), torch.tensor([1, 4, 5, 8, 9])
    made = Scored(public, positions, 10.0 * positions)
    assert made.ids([0, 3]) == ["public1", "public8"]
    order = torch.tensor([3, 0, 4, 2, 1])
    batches = list(made.batches(order, 2, torch.Generator()))
    assert [len(x) for x, _ in batches] == [2, 2, 1]
    assert torch.cat([y for _, y in batches]).tolist() == [80, 10, 90, 50, 40]
    assert torch.equal(torch.cat([x for x, _ in batches]), public.at(positions[order])[0])
    labels = torch.cat([y for _, y in Scored(public, positions).batches(order, 3, None)])
    assert torch.equal(labels, public.at(positions[order])[1])


def test_a_last_batch_of_one_item_is_a_batch() -> None:
    toy = Toy(blobs({"a": 4}), classifier())
    with toy.networks.scope():
        made = on_public(toy.site("a"), public_blobs(10), torch.arange(5), None, 1, 2)
    assert [len(x) for x, _ in made.train.batches(2)] == [2, 2, 1]


def test_a_batch_that_would_be_too_small_joins_the_one_before() -> None:
    made = Scored(public_blobs(10), torch.arange(9), torch.arange(9), least=2)
    sizes = lambda count, size: [len(x) for x, _ in made.batches(torch.arange(count), size, None)]  # noqa: E731
    assert sizes(9, 4) == [4, 5]
    assert sizes(6, 4) == [4, 2]
    assert sizes(1, 4) == [1]
