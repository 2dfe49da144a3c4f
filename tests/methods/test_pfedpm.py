"""pFedPM against its equations; check numbers are those of the method's card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.seeding import stream
from medfl.core.task import Task
from medfl.methods import load, pfedpm
from medfl.methods._parts.prototype_exchange import average_prototypes, prototype_loss, table
from medfl.methods.pfedpm import Relation, class_distance, mix, relation_loss, relation_step
from medfl.networks import build
from medfl.networks.heads import feature_size, features_and_output, head_name
from medfl.storage.files import load_state, save_state
from medfl.training.network_pool import Networks
from medfl.training.site import Site, snapshot
from tests.support.options import numbers
from tests.support.toy import Toy, bits, blobs, classifier, judged, sgd, simulate

METHOD = load("pfedpm")
RELATION = load("pfedpm", predict="relation")
CLASSES = Task("classification", ("p", "q", "r"))
NAN = float("nan")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(left: torch.Tensor, right: torch.Tensor | float) -> None:
    torch.testing.assert_close(
        left, torch.as_tensor(right, dtype=left.dtype).expand_as(left), rtol=0, atol=1e-12
    )


class Scaled(nn.Module):
    """Feature s x, then a linear layer (which has no say: the tests' loss is 0); float64."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.head = nn.Linear(2, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.scale * x)


def nothing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0 * output.sum()


def scaled(**settings: int) -> Toy:
    """Site a has only class 0, site b alone has class 1."""
    data = {
        "a": (torch.tensor([[3.0, 4]]).double(), torch.tensor([0])),
        "b": (torch.tensor([[6.0, 8], [0, 2]]).double(), torch.tensor([0, 1])),
    }
    return Toy(data, Scaled, nothing, sgd(0.05), **settings)


def lists(prototypes: dict) -> dict:
    return {c: [round(number, 12) for number in value.tolist()] for c, value in prototypes.items()}


# The method


def test_two_rounds_by_hand() -> None:
    """h = s x, s = 1, rate 0.05, lambda = 2, a = 0.5, no other loss.

    Round 1: there is no C~, nothing moves. Sent: a (3, 4); b (6, 8) and (0, 2). C^0 = (4.5, 6), C^1 = (0, 2).
    Round 2, a: C~^0 = (3.75, 5) = 1.25 (3, 4); l = 2 * 5 |1.25 - s|, derivative -10, s = 1.5, sent (4.5, 6).
    b: C~^0 = (5.25, 7) = 0.875 (6, 8), C~^1 = (0, 2); l = 2 [10 |0.875 - s| / 2 + 2 |1 - s| / 2], derivative 10 (0 at
    C~ = C), s = 0.5, sent (3, 4) and (0, 1). C^0 = (3.75, 5), C^1 = (0, 1).
    """
    method = load("pfedpm", lam=2.0, a=0.5)
    first, second = (simulate(method, scaled(), rounds) for rounds in (1, 2))
    assert lists(first.server["prototypes"]) == {"0": [4.5, 6], "1": [0, 2]}
    assert [first.states[name]["weights"]["scale"].item() for name in "ab"] == [1, 1]
    assert [round(second.states[name]["weights"]["scale"].item(), 12) for name in "ab"] == [
        1.5,
        0.5,
    ]
    assert lists(second.server["prototypes"]) == {"0": [3.75, 5], "1": [0, 1]}


def test_features_of_the_end_or_over_the_batches() -> None:
    """As above with two epochs. a: s = 1, then 1.5, where the derivative is 10, then 1.

    After training (3, 4); over the two batches (1 + 1.5) / 2 (3, 4) = (3.75, 5). The count stays 1.
    """
    for features, sent in (("final", [3, 4]), ("running", [3.75, 5])):
        outcome = simulate(load("pfedpm", lam=2.0, a=0.5, features=features), scaled(epochs=2), 2)
        assert lists(outcome.replies["a"]["prototypes"]) == {"0": sent}
        assert outcome.replies["a"]["counts"]["0"].item() == 1


def sent(
    means: dict[str, dict[int, torch.Tensor]], counts: dict[str, dict[int, int]]
) -> dict[str, Message]:
    return {
        name: Message(
            {
                "prototypes": {str(c): value for c, value in own.items()},
                "counts": {str(c): torch.tensor(n) for c, n in counts[name].items()},
            }
        )
        for name, own in means.items()
    }


def aggregated(agg: str, replies: dict[str, Message]) -> dict[str, torch.Tensor]:
    toy = scaled()
    return load("pfedpm", agg=agg).aggregate(toy.host(), {"prototypes": {}}, replies, 3)[
        "prototypes"
    ]


def test_class_features_are_averaged_over_their_owners() -> None:
    """Checks 1 and 2."""
    counts = {"a": {1: 2}, "b": {1: 5}, "c": {1: 3}}
    pooled = {name: drawn(own[1], 4, seed=i) for i, (name, own) in enumerate(counts.items())}
    replies = sent({name: {1: values.mean(0)} for name, values in pooled.items()}, counts)
    weighted, uniform, literal = (
        aggregated(agg, replies)["1"] for agg in ("weighted", "uniform", "literal")
    )
    close(weighted, torch.cat(list(pooled.values())).mean(0))
    close(uniform, sum(values.mean(0) for values in pooled.values()) / 3)
    close(literal, weighted / 3)
    same = sent(dict.fromkeys(counts, {1: drawn(4)}), counts)
    for agg, divisor in (("weighted", 1), ("uniform", 1), ("literal", 3)):
        close(aggregated(agg, same)["1"], drawn(4) / divisor)
    equal = sent(
        {name: {1: values.mean(0)} for name, values in pooled.items()},
        dict.fromkeys(counts, {1: 4}),
    )
    close(aggregated("weighted", equal)["1"], uniform)


def test_literal_keeps_what_nobody_reported() -> None:
    toy, before = scaled(), {"0": drawn(4), "1": drawn(4, seed=1)}
    replies = sent({"a": {1: drawn(4)}, "b": {1: drawn(4)}}, {"a": {1: 1}, "b": {1: 1}})
    after = load("pfedpm", agg="literal").aggregate(toy.host(), {"prototypes": before}, replies, 2)[
        "prototypes"
    ]
    assert bits(after["0"]) == bits(before["0"])
    close(after["1"], drawn(4) / 2)


def test_mixing() -> None:
    """Check 3: C~ - C = (1 - a)(C_bar - C); a = 1 is C and a = 0 is C_bar to the bit; a missing class is C_bar."""
    known, own = drawn(3, 5), {"0": drawn(5, seed=1), "2": drawn(5, seed=2)}
    for a in (0.0, 0.3, 0.4, 0.9, 1.0):
        mixed = mix(known, own, a)
        assert bits(mixed[1]) == bits(known[1])
        for c in (0, 2):
            close(mixed[c] - own[str(c)], (1 - a) * (known[c] - own[str(c)]))
            if a in (0, 1):
                assert bits(mixed[c]) == bits(own[str(c)] if a else known[c])
    assert bits(mix(known, {}, 0.4)) == bits(known)
    unknown = torch.where(torch.tensor([[True], [False], [True]]), known, NAN)
    assert mix(unknown, own, 0.4).isnan().any(1).tolist() == [False, True, False]


def test_live_mixing_only_scales_lambda(classes: Toy) -> None:
    """Check 4: with C the mean of the batch itself, ||C~ - C|| = (1 - a)||C_bar - C||."""
    values, label, known = drawn(6, 4), torch.tensor([0, 2, 2, 0, 1, 2]), drawn(3, 4, seed=1)
    live = {str(c): values[label == c].mean(0) for c in range(3)}
    for a in (0.0, 0.3, 1.0):
        close(
            class_distance(values, label, mix(known, live, a)),
            (1 - a) * class_distance(values, label, known),
        )
    for reg, left in (("class_l2", 0.5), ("sample_mse", 0.25)):
        scaled_down = simulate(load("pfedpm", mix="live", a=0.5, lam=1.0, reg=reg), classes, 3)
        smaller = simulate(load("pfedpm", a=0.0, lam=left, reg=reg), classes, 3)
        assert bits(scaled_down.server) == bits(smaller.server)
    assert bits(simulate(load("pfedpm", a=0.5), classes, 3).server) != bits(
        simulate(load("pfedpm", mix="live", a=0.5), classes, 3).server
    )


def test_the_gradients_of_the_pull() -> None:
    """Check 5: class by class (C - C~) / (B ||C - C~||), norm 1/B a row; sample by sample 2 (h - C~) / (B d)."""
    values, target = drawn(5, 4).requires_grad_(), drawn(3, 4, seed=1)
    label = torch.ones(5, dtype=torch.int64)
    (gradient,) = torch.autograd.grad(class_distance(values, label, target), values)
    apart_by = values.detach().mean(0) - target[1]
    close(gradient, (apart_by / (5 * apart_by.norm())).expand(5, 4))
    close(gradient.norm(dim=1), 1 / 5)
    (gradient,) = torch.autograd.grad(prototype_loss(values, label, target), values)
    close(gradient, 2 * (values.detach() - target[1]) / (5 * 4))
    met = torch.stack(
        [target[0], torch.arange(4).double(), target[2]]
    )  # C = C~: zero loss, zero gradient, not NaN
    level = met[label].requires_grad_()
    for loss in (class_distance(level, label, met), prototype_loss(level, label, met)):
        assert loss.item() == 0
        (gradient,) = torch.autograd.grad(loss, level)
        assert not gradient.any()
    assert class_distance(values, label, target) <= (values - target[1]).norm(dim=1).mean()


def test_several_classes_weigh_by_their_share_and_unknown_ones_nothing() -> None:
    """B = 4: class 0 twice, classes 1 and 2 once, class 2 unknown: 2/4 ||m_0 - C_0|| + 1/4 ||h - C_1||."""
    values, label = drawn(4, 3).requires_grad_(), torch.tensor([0, 2, 0, 1])
    target = torch.cat([drawn(2, 3, seed=1), torch.full((1, 3), NAN, dtype=torch.float64)])
    loss = class_distance(values, label, target)
    expected = (values[[0, 2]].mean(0) - target[0]).norm() / 2 + (values[3] - target[1]).norm() / 4
    close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, values)
    assert not gradient[1].any()


# The relation head


def test_the_relation_loss_of_constant_scores() -> None:
    """Check 6: r^2 - 2 r / 10 + 1/10 with ten classes, 0 for one-hot scores."""
    label, mixed = torch.arange(10).repeat(3), drawn(10, 4)
    for r, value in ((0.0, 0.1), (0.1, 0.09), (0.5, 0.25), (1.0, 0.9)):
        constant = lambda h, means, r=r: torch.full((len(h), len(means)), r, dtype=torch.float64)  # noqa: E731
        close(relation_loss(constant, drawn(30, 4), label, mixed), value)
    perfect = lambda h, means: nn.functional.one_hot(label, 10).double()  # noqa: E731
    close(relation_loss(perfect, drawn(30, 4), label, mixed), 0.0)


def test_gradients_stay_apart() -> None:
    """Check 7: (12) trains the relation head alone, (9) the network alone."""
    network, relation = classifier()(), Relation(6)
    x, y, mixed = torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1]), torch.randn(3, 6)
    h, _ = features_and_output(network, x)
    relation_loss(relation, h, y, mixed).backward()
    assert all(p.grad is None for p in network.parameters())
    assert all(p.grad is not None for p in relation.parameters())
    relation.zero_grad()
    h, logits = features_and_output(network, x)
    (cross_entropy(logits, y) + class_distance(h, y, mixed)).backward()
    assert all(p.grad is None for p in relation.parameters())


def test_scores_go_with_their_classes() -> None:
    """Check 8."""
    relation, h, means = Relation(6).double(), drawn(4, 6), drawn(5, 6, seed=1)
    scores, order = relation(h, means), torch.tensor([3, 0, 4, 1, 2])
    assert scores.shape == (4, 5)
    assert ((scores > 0) & (scores < 1)).all()
    close(relation(h, means[order]), scores[:, order])
    assert torch.equal(scores.softmax(1).argmax(1), scores.argmax(1))
    swapped = torch.stack([relation(means[i : i + 1], h)[0] for i in range(5)], 1)
    assert not torch.allclose(swapped, scores)  # the order of a pair is fixed


def test_the_size_of_the_relation_head() -> None:
    """Check 12: d = 50: 2 * 3 * 32 + 32, 32 * 25 * 8 + 8, 8 + 1. Odd and small d have one too."""
    assert sum(p.numel() for p in Relation(50).parameters()) == 6641
    for d in (1, 2, 7):
        assert Relation(d)(torch.rand(3, d), torch.rand(2, d)).shape == (3, 2)


RELATIONS = [
    {},
    {"predict": "relation"},
    {"predict": "relation", "relation_update": "after_epochs"},
    {"predict": "relation", "relation_optimizer": "sgd", "features": "running"},
]


@pytest.mark.parametrize("options", RELATIONS)
def test_lambda_zero_is_local_training_bit_for_bit(classes: Toy, options: dict) -> None:
    """Check 9: whether or not the relation head learns, with BatchNorm, dropout and a last batch of one sample."""
    data = {**classes.data, "d": blobs({"d": 5}, seed=4)["d"]}
    toy = replace(classes, data=data, optimizer=sgd(0.1, momentum=0.9, weight_decay=0.01))
    method = load("pfedpm", lam=0.0, **options)
    shared, alone = simulate(method, toy, 3), simulate(load("local"), toy, 3)
    for name in toy.names:
        assert bits(shared.states[name]["weights"]) == bits(alone.states[name]["weights"])
        if options:
            assert bits(shared.states[name]["relation"]) != bits(
                method.init_site(toy.site(name))["relation"]
            )
    pulled = simulate(METHOD, toy, 2)
    assert bits(pulled.states["a"]["weights"]) != bits(
        simulate(load("local"), toy, 2).states["a"]["weights"]
    )


def test_the_relation_head_learns_and_its_optimiser_is_new_each_round(classes: Toy) -> None:
    """Round 1 leaves it as it was drawn (check 13); in round 2 each weight moves by the rate at Adam's first step."""
    toy = replace(classes, batch_size=100)
    first, second, third = (simulate(RELATION, toy, rounds).states["a"] for rounds in (1, 2, 3))
    with toy.networks.scope():
        drawn_at_start = RELATION.init_site(toy.site("a", 1))["relation"]
    assert bits(first["relation"]) == bits(drawn_at_start)
    assert first["mixed"] == {}
    for before, after in ((first, second), (second, third)):
        moved = torch.cat(
            [
                (after["relation"][k] - before["relation"][k]).flatten().abs()
                for k in before["relation"]
            ]
        )
        assert moved.max() < 1.01e-3
        assert moved.quantile(0.9) > 0.99e-3


@pytest.mark.parametrize("update", ["batch", "after_epochs"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_when_and_how_the_relation_head_learns(
    classes: Toy, monkeypatch: pytest.MonkeyPatch, update: str, optimizer: str
) -> None:
    """Its steps, done again by hand: on each batch with the network as it is by then, or with the trained one."""
    method = load(
        "pfedpm", predict="relation", relation_update=update, relation_optimizer=optimizer
    )
    toy = replace(classes, epochs=2, batch_size=8)
    before = simulate(method, toy)
    seen: list[tuple[dict, torch.Tensor, torch.Tensor]] = []

    def noted(relation, optimizer, mixed, network, x, label):
        seen.append((snapshot(network), x.clone(), label))
        return relation_step(relation, optimizer, mixed, network, x, label)

    monkeypatch.setattr(pfedpm, "relation_step", noted)
    with toy.networks.scope():
        site, down = toy.site("a", 2), method.broadcast(toy.host(2), before.server, "a")
        after, _ = method.local_update(site, before.states["a"], down)
    with stream(site.seed, "local" if update == "batch" else "relation epochs") as generator:
        batches = [batch for _ in range(2) for batch in site.train.batches(8, generator)]
    assert [bits((x, y)) for _, x, y in seen] == [bits(batch) for batch in batches]
    trained = [bits(weights) == bits(after["weights"]) for weights, _, _ in seen]
    assert trained == [update == "after_epochs"] * (len(seen) - 1) + [True]
    assert all(bits(weights) != bits(before.states["a"]["weights"]) for weights, _, _ in seen)

    relation, mixed = Relation(6), table(after["mixed"], 3)
    relation.load_state_dict(before.states["a"]["relation"])
    steps = {
        "adam": torch.optim.Adam(relation.parameters(), lr=1e-3),
        "sgd": torch.optim.SGD(relation.parameters(), lr=0.01, momentum=0.5),
    }[optimizer]
    network = toy.networks.fresh()
    for weights, x, y in seen:
        network.load_state_dict(weights)
        with torch.no_grad():
            h, _ = features_and_output(network.eval(), x)
        steps.zero_grad()
        (relation(h, mixed) - nn.functional.one_hot(y, 3)).square().mean().backward()
        steps.step()
    for name, value in snapshot(relation).items():
        torch.testing.assert_close(after["relation"][name], value, rtol=1e-6, atol=1e-8)


def test_by_which_head_sites_are_judged_is_told(classes: Toy) -> None:
    """Site c was in round 1 only, when there were no class features: its decision head judges it."""
    cohorts = [["a", "b", "c"], ["a", "b"]]
    first, second = simulate(RELATION, classes, 1, cohorts), simulate(RELATION, classes, 2, cohorts)
    names = ("sites judged by relation heads", "by decision heads")
    told = [RELATION.observed(outcome.server, outcome.replies) for outcome in (first, second)]
    assert [[numbers[name] for name in names] for numbers in told] == [[0, 3], [2, 1]]
    with classes.networks.scope():
        down = RELATION.broadcast(classes.host(3), second.server, "c")
        judges = [
            RELATION.predictor(classes.site(name, 3), second.states[name], down)
            for name in ("a", "c")
        ]
    assert [type(judge).__name__ == "Judged" for judge in judges] == [True, False]
    assert not set(names) & set(METHOD.observed(simulate(METHOD, classes).server, {}))


def test_the_relation_head_tells_classes_apart() -> None:
    """Three classes at two sites that lack one each: after some rounds each predicts nearly all its images."""
    data = blobs({"a": 24, "b": 24}, labels={"a": (0, 1), "b": (1, 2)})
    toy = Toy(data, classifier(), cross_entropy, sgd(0.1, momentum=0.5), batch_size=8, epochs=10)
    outcome = simulate(RELATION, toy, 4)
    for name in toy.names:
        with toy.networks.scope():
            network = RELATION.predictor(toy.site(name), outcome.states[name], Message()).eval()
            x, y = toy.data[name]
            assert (network(x).argmax(1) == y).double().mean() > 0.9


def test_r_pfedpm_is_judged_by_the_head_and_features_that_it_was_trained_against(
    classes: Toy,
) -> None:
    """Not by newer ones; and body and head of what is judged are the network's."""
    outcome = simulate(RELATION, classes, 3, [["a", "b"], ["a", "c"], ["b", "c"]])
    state, x = outcome.states["a"], classes.data["b"][0]
    with classes.networks.scope():
        down = RELATION.broadcast(classes.host(3), outcome.server, "a")
        network = RELATION.predictor(classes.site("a", 3), state, down).eval()
        plain = classes.networks.lease(state["weights"]).eval()
        relation = Relation(6)
        relation.load_state_dict(state["relation"])
        with torch.no_grad():
            h, logits = features_and_output(plain, x)
            means = torch.stack([state["mixed"][str(c)] for c in range(3)])
            assert torch.equal(network(x), relation(h, means))
            assert torch.equal(features_and_output(network, x)[0], h)
            assert (
                torch.equal(METHOD.predictor(classes.site("a", 3), state, down).eval()(x), logits)
                is False
            )
        assert head_name(network) == f"network.{head_name(plain)}"
        assert feature_size(network) == 6
        decision = {key: value for key, value in state.items() if key not in ("relation", "mixed")}
        assert torch.equal(METHOD.predictor(classes.site("a", 3), decision, down).eval()(x), logits)
    assert bits(means) != bits(
        torch.stack([outcome.server["prototypes"][str(c)] for c in range(3)])
    )


def test_r_pfedpm_keeps_the_contract(classes: Toy, tmp_path: Path) -> None:
    """Repeats bit for bit, over the wire too; its states survive files; before round 2 the decision head predicts."""
    first, again, wired = (
        simulate(RELATION, classes, 3, wire=wire) for wire in (False, False, True)
    )
    for other in (again, wired):
        assert bits([other.server, other.states]) == bits([first.server, first.states])
    for name, state in first.states.items():
        save_state(tmp_path / name, state)
        assert bits(load_state(tmp_path / name)) == bits(state)
        assert (
            bits(judged(RELATION, classes, simulate(RELATION, classes, 1), name)).keys()
            == classes.initial.keys()
        )
        assert all(
            not t.is_floating_point() or t.isfinite().all()
            for t in judged(RELATION, classes, first, name).values()
        )


# Classes that some or all sites lack


def four_sites() -> Toy:
    labels = {"a": (0, 1, 2), "b": (1, 2, 3), "c": (4, 5), "d": (7,)}
    generator, data = torch.Generator().manual_seed(0), {}
    for name, own in labels.items():
        y = torch.tensor(own).repeat(6)
        data[name] = (
            torch.randn(len(y), 8, generator=generator) + 2 * nn.functional.one_hot(y, 8),
            y,
        )
    network = lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 10))  # noqa: E731
    return Toy(data, network, cross_entropy, sgd(0.1), batch_size=4)


@pytest.mark.parametrize("mask", [False, True])
def test_a_class_that_nobody_has_is_never_predicted(mask: bool) -> None:
    """Check 13: 4 sites cover 7 of 10 classes; others' classes are, unless masked; d has one, of nobody else."""
    toy, method = four_sites(), load("pfedpm", predict="relation", mask_to_local=mask)
    outcome = simulate(method, toy, 3)
    assert sorted(outcome.server["prototypes"]) == ["0", "1", "2", "3", "4", "5", "7"]
    x = 10 * torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    for name in toy.names:
        with toy.networks.scope(), torch.no_grad():
            network = method.predictor(toy.site(name), outcome.states[name], Message()).eval()
            scores = network(x)
        own = set(toy.data[name][1].tolist())
        low = {c for c in range(10) if (scores[:, c] < -29).all()}
        assert low == set(range(10)) - own if mask else {6, 8, 9}
        assert sorted(outcome.states[name]["mixed"]) == sorted(outcome.server["prototypes"])
    mixed = torch.where(torch.arange(10)[:, None] < 7, drawn(10, 4), NAN)
    constant = lambda h, means: torch.full((len(h), len(means)), 0.5, dtype=torch.float64)  # noqa: E731
    close(
        relation_loss(constant, drawn(2, 4), torch.tensor([8, 9]), mixed), 0.25
    )  # all 7 targets are 0


def test_the_decision_head_may_be_masked_too() -> None:
    toy, method = four_sites(), load("pfedpm", mask_to_local=True)
    outcome = simulate(method, toy, 2)
    with toy.networks.scope(), torch.no_grad():
        network = method.predictor(toy.site("c"), outcome.states["c"], Message()).eval()
        plain = METHOD.predictor(toy.site("c"), outcome.states["c"], Message()).eval()
        x = torch.randn(50, 8)
        assert set(network(x).argmax(1).tolist()) <= {4, 5}
        assert torch.equal(network(x)[:, 4:6], plain(x)[:, 4:6])


def test_a_class_without_a_present_owner_keeps_its_features() -> None:
    toy = four_sites()
    outcome = simulate(METHOD, toy, 2, [["a", "d"], ["a"]])
    first, second = (server["prototypes"] for server in outcome.history[1:])
    assert bits(first["7"]) == bits(second["7"])
    assert bits(first["1"]) != bits(second["1"])


# What travels


def test_the_upload_is_own_classes_times_d() -> None:
    """Check 10: |C_i| d floats and |C_i| counts; 20 sites of 4 classes with d = 50 send 4,000 floats."""
    generator, data = torch.Generator().manual_seed(0), {}
    for i in range(20):
        own = torch.randperm(10, generator=generator)[:4]
        data[f"site{i:02}"] = (torch.randn(8, 6, generator=generator), own.repeat(2))
    network = lambda: nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 10))  # noqa: E731
    toy = Toy(data, network, cross_entropy)
    for agg, counts in (("weighted", 4), ("literal", 4), ("uniform", 0)):
        outcome, floats = simulate(load("pfedpm", agg=agg), toy, 2), 0
        for name, reply in outcome.replies.items():
            flat = Message.decode(reply.encode()).flat()
            known = {str(c) for c in data[name][1].tolist()}
            features = {key: t for key, t in flat.items() if t.is_floating_point()}
            assert features.keys() == {f"prototypes/{c}" for c in known}
            assert {(t.shape, t.dtype) for t in features.values()} == {((50,), torch.float32)}
            others = {key: t for key, t in flat.items() if key not in features}
            assert {(key, t.shape, t.dtype, int(t)) for key, t in others.items()} == {
                (f"counts/{c}", (), torch.int64, 2) for c in (known if counts else ())
            }
            floats += sum(t.numel() for t in features.values())
        assert floats == 4000
        for message in outcome.down.values():
            assert set(message.tensors) == {"prototypes"}
            assert sum(t.numel() for t in message.flat().values()) == 50 * len(
                outcome.server["prototypes"]
            )


MH = ("two_conv_18", "two_conv", "two_conv_22")


def size(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def test_the_papers_numbers_of_parameters() -> None:
    """Checks 10 and 11, of the networks that bundles name: -mh deals them to sites 0-6, 7-13 and 14-19."""
    made = {name: build(name, 1, 10) for name in MH}
    assert [size(network) for network in made.values()] == [19738, 21840, 23942]
    assert {feature_size(network) for network in made.values()} == {50}
    mnist = made["two_conv"]
    convolutions = [layer for layer in mnist.modules() if isinstance(layer, nn.Conv2d)]
    assert (20 * size(mnist), 20 * size(*convolutions)) == (436800, 105600)
    assert round(20 * size(mnist) / (20 * 4 * 50)) == 109
    names = [f"site-{i}" for i in range(20)]
    dealt = load("pfedpm", bodies=",".join(MH)).site_networks(names)
    assert [config["network"] for config in dealt.values()] == [MH[0]] * 7 + [MH[1]] * 7 + [
        MH[2]
    ] * 6


class Bodies(Toy):
    """Sites whose networks have other numbers of channels."""

    def site(self, name: str, round_: int = 1) -> Site:
        self.pools = getattr(self, "pools", {})
        body = load("pfedpm", bodies=",".join(MH)).site_networks(self.names)[name]["network"]
        pool = self.pools.setdefault(
            name, Networks(lambda: build(body, 1, 10), 0, torch.device("cpu"))
        )
        return replace(super().site(name, round_), networks=pool)


def digits() -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.rand(6, 1, 28, 28, generator=generator), torch.arange(6) % 3) for name in "abc"
    }


@pytest.mark.parametrize("predict", ["decision", "relation"])
def test_sites_with_other_networks_share_features(predict: str) -> None:
    """Check 11: bodies of 18, 20 and 22 channels."""
    toy = Bodies(digits(), lambda: build("two_conv", 1, 10), cross_entropy, sgd(0.01), batch_size=3)
    method = load("pfedpm", predict=predict, bodies=",".join(MH))
    outcome = simulate(method, toy, 2, wire=True)
    assert sorted(outcome.server["prototypes"]) == ["0", "1", "2"]
    entering = {
        name: state["weights"]["fc1.weight"].shape[1] for name, state in outcome.states.items()
    }
    assert entering == {"a": 18 * 16, "b": 20 * 16, "c": 22 * 16}
    for name in toy.names:
        network = method.predictor(toy.site(name), outcome.states[name], Message())
        assert network(toy.data[name][0]).shape == (6, 10)
    alone = simulate(load("local"), toy, 2)
    apart_from_each_other = simulate(load("pfedpm", predict=predict, lam=0.0), toy, 2)
    for name in toy.names:
        assert bits(apart_from_each_other.states[name]["weights"]) == bits(
            alone.states[name]["weights"]
        )


def test_features_of_other_lengths_are_refused_by_site() -> None:
    """Before round 1 where networks are known to differ, and whenever they arrive."""

    class Odd(Toy):
        def site(self, name: str, round_: int = 1) -> Site:
            width = {"a": 6, "b": 6, "c": 4}[name]
            factory = lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))  # noqa: E731
            return replace(
                super().site(name, round_), networks=Networks(factory, 0, torch.device("cpu"))
            )

    toy = Odd(blobs({"a": 4, "b": 4, "c": 4}), classifier(), cross_entropy)
    text = "features of length 4 at c; length 6 at a, b; networks may differ"
    for name in ("pfedpm", "fedproto"):
        with pytest.raises(InputError, match=text):
            simulate(load(name, bodies="6,4"), toy, 0)
        with pytest.raises(InputError, match=text):
            simulate(load(name), toy, 1)
    with pytest.raises(InputError, match="length 3 at c; length 5 at earlier rounds"):
        average_prototypes(
            {"0": drawn(5)}, {"c": Message({"prototypes": {"1": drawn(3)}})}, by_samples=False
        )


# Options


def test_it_trains_as_fedproto_with_that_methods_settings(classes: Toy) -> None:
    ours = simulate(load("pfedpm", a=0.0, agg="uniform", reg="sample_mse", lam=1.0), classes, 3)
    theirs = simulate(load("fedproto"), classes, 3)
    assert bits(ours.server) == bits(theirs.server)
    assert bits(ours.replies) == bits(theirs.replies)


def test_with_a_of_one_a_site_is_held_by_its_own_features() -> None:
    """Frozen mixing anchors at what it sent: the others' data are no matter then."""
    toy = Toy(blobs({"a": 9, "b": 9}), classifier(), cross_entropy, batch_size=4)
    other = replace(toy, data={**toy.data, "b": blobs({"b": 9}, seed=7)["b"]})
    method = load("pfedpm", a=1.0)
    assert bits(simulate(method, toy, 3).states["a"]) == bits(
        simulate(method, other, 3).states["a"]
    )
    assert bits(simulate(method, toy, 3).states["a"]) != bits(
        simulate(load("local"), toy, 3).states["a"]
    )
    assert bits(simulate(METHOD, toy, 3).states["a"]) != bits(
        simulate(METHOD, other, 3).states["a"]
    )


def test_sites_may_start_from_weights_of_their_own(classes: Toy) -> None:
    """The same ones whenever they come in."""
    method = load("pfedpm", same_init=False)
    with classes.networks.scope():
        starts = [method.init_site(classes.site(name, 1))["weights"] for name in classes.names]
        late = method.init_site(classes.site("a", 7))["weights"]
        common = METHOD.init_site(classes.site("a", 1))["weights"]
    assert len({str(bits(weights)) for weights in [*starts, classes.initial]}) == 4
    assert bits(late) == bits(starts[0])
    assert bits(common) == bits(classes.initial)


def test_features_of_a_length_asked_for() -> None:
    network = load("pfedpm", feature_size=4).adapt(classifier(norm=True)(), CLASSES)
    values, logits = features_and_output(network.eval(), torch.randn(2, 8))
    assert (values.shape, logits.shape) == ((2, 4), (2, 3))
    assert (values >= 0).all()
    assert METHOD.adapt(network, CLASSES) is network


def test_bad_input() -> None:
    with pytest.raises(
        InputError, match=r"a=1.5 for method 'pfedpm'; a is float >= 0 and <= 1; see medfl methods"
    ):
        load("pfedpm", a=1.5)
    with pytest.raises(InputError, match="each of the 3 classes"):
        METHOD.adapt(nn.Linear(4, 1), CLASSES)


def test_the_cards_defaults_and_limits() -> None:
    assert numbers("pfedpm") == {
        "a": (0.4, 0.0, 1.0), "lam": (0.1, 0.0), "mask_to_local": (False,), "same_init": (True,), "feature_size": (0, 0)
    }  # fmt: skip
