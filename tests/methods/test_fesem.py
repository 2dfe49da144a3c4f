"""FeSEM: clusters of sites by their weights; check numbers are those of the method's card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.task import Task
from medfl.methods import load
from medfl.methods.fesem import nearest
from medfl.training.site import snapshot
from tests.support.toy import Toy, bits, blobs, classifier, cross_entropy, judged, simulate

METHOD = load("fesem")


def sent(values: dict[str, float], samples: dict[str, int] | None = None) -> dict[str, Message]:
    weights = {
        name: {"weight": torch.tensor([[value, 0, 0]]).double()} for name, value in values.items()
    }
    return {
        name: Message({"weights": w}, {"samples": (samples or {}).get(name, 1)})
        for name, w in weights.items()
    }


def state(centres: list[float], assignment: dict[str, int], chosen: int | None = None) -> dict:
    made = [{"weight": torch.tensor([[value, 0, 0]]).double()} for value in centres]
    chosen = len(made) if chosen is None else chosen
    return {"weights": made[0], "others": made[1:], "assignment": assignment, "chosen": chosen}


def centres(server: dict) -> list[float]:
    return [w["weight"][0, 0].item() for w in (server["weights"], *server["others"])]


def test_a_round_by_hand(lines: Toy) -> None:
    """Centres 0 and 10; w = 1, 4, 6, 5. E: 0, 0, 1 and, both being 5 away, the lowest. M: (1 + 4 + 5) / 3 and 6.

    By samples 1, 2, 1, 3: (1 + 8 + 15) / 6 = 4. In round 1 the first centres are 1, the first site's, and 6, the
    farthest from it; E: 0, 1, 1, 1; M: 1 and 5.
    """
    values, before = {"a": 1.0, "b": 4.0, "c": 6.0, "d": 5.0}, {"a": 0, "b": 0, "c": 0, "d": 0}
    after = METHOD.aggregate(lines.host(), state([0, 10], before), sent(values), 4)
    assert after["assignment"] == {"a": 0, "b": 0, "c": 1, "d": 0}
    assert centres(after) == pytest.approx([10 / 3, 6], abs=1e-15)
    by_samples = sent(values, {"a": 1, "b": 2, "c": 1, "d": 3})
    after = load("fesem", weights="samples").aggregate(
        lines.host(), state([0, 10], before), by_samples, 4
    )
    assert centres(after) == pytest.approx([4, 6], abs=1e-15)
    after = METHOD.aggregate(lines.host(), state([0, 0], before, chosen=0), sent(values), 4)
    assert (after["assignment"], after["chosen"]) == ({"a": 0, "b": 1, "c": 1, "d": 1}, 2)
    assert centres(after) == pytest.approx([1, 5], abs=1e-15)


def test_fewer_different_sites_than_centres(lines: Toy) -> None:
    method = load("fesem", clusters=4)
    before = state([0, 0, 0, 0], {"a": 0, "b": 0, "c": 0, "d": 0}, chosen=0)
    after = method.aggregate(lines.host(), before, sent({"a": 1, "b": 3, "c": 1}), 4)
    assert after["assignment"] == {"a": 0, "b": 1, "c": 0, "d": 0}
    assert centres(after) == [1, 3, 0, 0]
    assert after["chosen"] == 2
    # next round: 0.2 is nearer to an initial 0 than to 1, but that is no centre; 9, then 5, are farthest from 1 and 3
    after = method.aggregate(lines.host(), after, sent({"a": 9, "b": 5, "c": 0.2, "d": 2.9}), 4)
    assert (after["assignment"], after["chosen"]) == ({"a": 2, "b": 3, "c": 0, "d": 1}, 4)
    assert centres(after) == pytest.approx([0.2, 2.9, 9, 5])


def test_a_cohort_of_one_finds_its_centres_round_by_round(classes: Toy) -> None:
    """No centre stays the untrained model that all began with."""
    outcome = simulate(load("fesem"), classes, 2, [["a"], ["b"]])
    found = [outcome.server["weights"], *outcome.server["others"]]
    assert all(bits(dict(centre)) != bits(classes.initial) for centre in found)
    assert outcome.server["assignment"] == {"a": 0, "b": 1, "c": 0}


def test_an_empty_centre_and_an_absent_site_stay(lines: Toy) -> None:
    before = state([0, 100], {"a": 0, "b": 0, "c": 1, "d": 1})
    after = METHOD.aggregate(lines.host(), before, sent({"a": 2, "c": 4}), 4)
    assert after["assignment"] == {"a": 0, "b": 0, "c": 0, "d": 1}
    assert centres(after) == [3, 100]


def test_ties_go_to_the_lowest_and_buffers_do_not_count() -> None:
    one, two = ({"w": torch.tensor([value]), "mean": torch.tensor([0.0])} for value in (1.0, -1.0))
    assert nearest({"w": torch.tensor([0.0]), "mean": torch.tensor([0.0])}, [one, two], ["w"]) == 0
    far = {**one, "mean": torch.tensor([9.0])}
    assert nearest({"w": torch.tensor([0.4]), "mean": torch.tensor([0.0])}, [two, far], ["w"]) == 1


@pytest.mark.parametrize("start", ["spread", "random"])
def test_one_centre_is_fedavg_with_a_plain_mean(classes: Toy, start: str) -> None:
    """Check 1, bit for bit: sites of one size have equal shares in FedAvg; by samples it is FedAvg for any sizes."""
    equal = replace(classes, data=blobs({"a": 8, "b": 8, "c": 8}))
    for toy, weights in ((equal, "uniform"), (classes, "samples")):
        one = simulate(load("fesem", clusters=1, start=start, weights=weights), toy, 3)
        assert bits(one.server["weights"]) == bits(
            simulate(load("fedavg"), toy, 3).server["weights"]
        )
        assert one.server["others"] == []


def test_the_objective_never_increases(lines: Toy) -> None:
    """Check 2: sum_i min_k ||w_i - W_k||^2 over E- and M-steps, with frozen w_i."""
    generator = torch.Generator().manual_seed(0)
    names = [f"s{i:02}" for i in range(60)]
    weights = {name: {"weight": torch.randn(1, 3, generator=generator).double()} for name in names}
    replies = {name: Message({"weights": w}, {"samples": 1}) for name, w in weights.items()}
    method = load("fesem", clusters=3)
    server = method.init_server(
        lines.host(0), lines.networks.initial, {name: Message() for name in names}
    )

    def objective(server: dict, assignment: dict) -> float:
        found = [server["weights"], *server["others"]]
        return sum(
            float((weights[n]["weight"] - found[assignment[n]]["weight"]).square().sum())
            for n in names
        )

    values, groups = [], []
    for _ in range(12):
        after = method.aggregate(lines.host(), server, replies, 60)
        values += [objective(server, after["assignment"]), objective(after, after["assignment"])]
        groups.append(after["assignment"])
        server = after
    values = values[1:]  # before the first E-step there are no centres
    assert all(later <= earlier + 1e-12 for earlier, later in zip(values, values[1:], strict=False))
    assert values[-1] < values[0]
    assert groups[-1] == groups[-2] != groups[0]


def test_as_many_far_centres_as_sites_is_local(classes: Toy) -> None:
    """Check 3, bit for bit."""
    local = load("local")
    starts = {name: snapshot(classes.networks.fresh("start", name)) for name in classes.names}
    states, server = {}, {"assignment": {"a": 0, "b": 1, "c": 2}, "chosen": 3}
    server |= {"weights": starts["a"], "others": [starts["b"], starts["c"]]}
    method, states = (
        load("fesem", clusters=3),
        {name: {"weights": start} for name, start in starts.items()},
    )
    for round_ in (1, 2, 3):
        replies = {}
        for name in classes.names:
            with classes.networks.scope():
                site, down = (
                    classes.site(name, round_),
                    method.broadcast(classes.host(round_), server, name),
                )
                replies[name] = method.local_update(site, {}, down)[1]
                states[name], _ = local.local_update(
                    classes.site(name, round_), states[name], Message()
                )
        with classes.networks.scope():
            server = method.aggregate(classes.host(round_), server, replies, 3)
        for k, name in enumerate(classes.names):
            assert bits([server["weights"], *server["others"]][k]) == bits(states[name]["weights"])


def test_sites_are_dealt_to_random_centres(classes: Toy) -> None:
    introductions = {f"s{i:02}": Message() for i in range(10)}
    dealt = []
    for seed in range(4):
        toy = replace(classes, seed=seed)
        with toy.networks.scope():
            server = load("fesem", clusters=4, start="random").init_server(
                toy.host(0), toy.networks.initial, introductions
            )
        dealt.append(server["assignment"])
        assert sorted([*server["assignment"].values()].count(k) for k in range(4)) == [2, 2, 3, 3]
    assert len({str(sorted(d.items())) for d in dealt}) == 4


def test_centres_start_alike_or_apart(classes: Toy) -> None:
    for start, different in (("spread", 1), ("random", 3)):
        with classes.networks.scope():
            method = load("fesem", clusters=3, start=start)
            server = method.init_server(
                classes.host(0), classes.networks.initial, {"a": Message(), "b": Message()}
            )
        found = [server["weights"], *server["others"]]
        assert len({str(bits(weights)) for weights in found}) == different
        assert bits(found[0]) == bits(classes.initial)


def test_unlike_sites_part() -> None:
    """Two sites with swapped labels each: the clusters find them, and each centre serves its own."""
    same = blobs({"a": 30, "b": 30}, seed=1)
    data = {
        **same,
        **{
            n: (x, 2 - y)
            for n, (x, y) in zip("cd", blobs({"c": 30, "d": 30}, seed=2).values(), strict=True)
        },
    }
    toy = Toy(data, classifier(), cross_entropy, batch_size=10, epochs=5)
    for server in simulate(METHOD, toy, 3).history[1:]:
        assert server["assignment"] == {"a": 0, "b": 0, "c": 1, "d": 1}


def test_groups_by_the_number_of_classes() -> None:
    """a has 1 class, b 3, c 2; the mean is 2: a | b, c. Never changed by distances."""
    toy = Toy(
        blobs({"a": 6, "b": 6, "c": 6}, labels={"a": (0,), "c": (0, 2)}),
        classifier(),
        cross_entropy,
    )
    method = load("fesem", assign="by_class_count")
    outcome = simulate(method, toy, 2)
    assert outcome.server["assignment"] == {"a": 0, "b": 1, "c": 1}
    mean = sum(outcome.replies[name]["weights"]["0.weight"] for name in "bc") / 2
    torch.testing.assert_close(outcome.server["others"][0]["0.weight"], mean)
    assert bits(outcome.server["weights"]) == bits(dict(outcome.replies["a"]["weights"]))


def test_a_site_is_judged_by_its_centre_or_its_own_model(classes: Toy) -> None:
    local = load("fesem", predict="local")
    outcome = simulate(METHOD, classes, 2)
    own = simulate(local, classes, 2, [["a", "b"], ["a", "b"]])
    for name in classes.names:
        centre = [outcome.server["weights"], *outcome.server["others"]][
            outcome.server["assignment"][name]
        ]
        assert bits(judged(METHOD, classes, outcome, name)) == bits(centre)
    assert bits(judged(local, classes, own, "a")) == bits(dict(own.replies["a"]["weights"]))
    centre = [own.server["weights"], *own.server["others"]][own.server["assignment"]["c"]]
    assert bits(judged(local, classes, own, "c")) == bits(centre)
    assert not any(outcome.states.values())
    with classes.networks.scope():
        assert METHOD.global_predictor(classes.host(), outcome.server) is None


def test_bad_input() -> None:
    with pytest.raises(
        InputError, match="clusters=3 with assign=by_class_count; that makes two groups"
    ):
        load("fesem", clusters=3, assign="by_class_count")
    with pytest.raises(InputError, match="by_class_count in a segmentation task"):
        load("fesem", assign="by_class_count").adapt(classifier()(), Task("segmentation"))
