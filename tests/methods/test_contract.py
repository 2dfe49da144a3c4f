"""What every shipped method keeps, whatever it computes; a new file in medfl/methods is tested by being there."""

from __future__ import annotations

import dataclasses
import inspect
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from medfl import methods
from medfl.core.errors import InputError
from medfl.core.message import Message, is_finite
from medfl.methods import Method
from medfl.storage.files import load_state, save_state
from tests.support.toy import (
    WITHOUT_IMAGES,
    Outcome,
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
    three_classes,
)

COMPOSED = ("fedsm",)
"""Methods that judge by several networks in one: the global one and the site's."""
RELAYING = ("proxyfl",)
"""Methods whose server hands weights on as they are."""
DISTILLING = ("fedkemf",)
"""Methods whose server trains a network on what the sites' say, and averages nothing."""


def prefixes(name: str, site: str) -> tuple[str, ...]:
    return ("w_g.", f"experts.{'abc'.index(site)}.") if name in COMPOSED else ("",)


every_method = pytest.mark.parametrize("name", methods.names())


def load(name: str, options: dict | None = None) -> Method:
    return methods.load(name, {**WITHOUT_IMAGES.get(name, {}), **(options or {})})


@cache
def sites(name: str) -> Toy:
    """Return the three sites with the network that a method makes, the same for all tests."""
    return three_classes().adapted(load(name))


@cache
def played(name: str) -> Outcome:
    """Play two rounds of a method once; no test changes what they leave, and one sees to it that no method does."""
    return simulate(load(name), sites(name), 2)


@pytest.fixture
def classes(name: str) -> Toy:
    return sites(name)


def finite(tree: object) -> bool:
    if isinstance(tree, torch.Tensor):
        return is_finite(tree)
    return all(map(finite, tree.values())) if isinstance(tree, dict) else True


def row_by_row(tree: object) -> bool:
    """Whether tensors lie in memory as those that were read from a file do: a product's bits depend on it."""
    if isinstance(tree, torch.Tensor):
        return tree.is_contiguous()
    return all(map(row_by_row, tree.values())) if isinstance(tree, dict) else True


def participants(method: Method, toy: Toy) -> list[str]:
    return ["central"] if method.pools_data else toy.names


# How it presents itself


def test_the_names_are_the_files_and_packages_of_the_folder() -> None:
    entries = {path.stem for path in Path(methods.__file__).parent.glob("[a-z]*")} - {"base"}
    assert set(methods.names()) == entries
    assert entries >= {
        "local",
        "central",
        "fedavg",
        "fedprox",
        "scaffold",
        "fedbn",
        "ditto",
        "fedhelp",
        "fedlora",
    }


@every_method
def test_it_says_what_it_is(name: str) -> None:
    cls = methods.method_class(name)
    module = inspect.getmodule(cls)
    assert module.METHOD is cls
    assert cls.__name__.lower() == name
    assert cls.paper.strip()
    assert cls.judged in ("global", "personal")
    assert len(module.__doc__.strip().splitlines()) > 1
    assert cls.__doc__
    assert not cls.__doc__.startswith(f"{cls.__name__}("), (
        "the docstring is the one dataclass makes up"
    )
    assert dataclasses.is_dataclass(cls)
    assert cls.__dataclass_params__.frozen


@every_method
def test_its_options_are_documented_and_checked(name: str) -> None:
    cls = methods.method_class(name)
    for entry in methods.options_of(cls):
        assert entry["help"].strip()
        assert entry["default"] is not dataclasses.MISSING
        assert methods.load(name, {entry["name"]: entry["default"]}) == methods.load(name)
        text = str(entry["default"])  # as typed on a command line
        assert methods.load(name, {entry["name"]: text}) == methods.load(name)
        with pytest.raises(InputError, match=entry["name"]):
            methods.load(name, {entry["name"]: object()})
    text = rf"option 'nosuch' of method '{name}'; its options are: .+; see medfl methods"
    with pytest.raises(InputError, match=text):
        methods.load(name, nosuch=1)


# How it behaves


@every_method
def test_two_rounds_learn_and_stay_finite(name: str, classes: Toy) -> None:
    method, outcome = load(name), played(name)
    assert finite(outcome.server)
    assert finite(outcome.states)
    assert all(map(row_by_row, (outcome.server, outcome.states)))
    for site in participants(method, classes):
        weights = judged(method, classes, outcome, site)
        assert finite(weights)
        assert bits(weights) != bits(classes.initial)


@every_method
def test_it_repeats_bit_for_bit_on_networks_used_before(name: str, classes: Toy) -> None:
    method, first = load(name), played(name)
    torch.rand(3)
    second, fresh = simulate(method, classes, 2), simulate(method, replace(classes), 2)
    for other in (second, fresh):
        assert bits([other.server, other.states, other.replies]) == bits(
            [first.server, first.states, first.replies]
        )


@every_method
def test_states_survive_files_and_messages_the_wire(
    name: str, classes: Toy, tmp_path: Path
) -> None:
    method, outcome = load(name), played(name)
    for index, state in enumerate([outcome.server, *outcome.states.values()]):
        save_state(tmp_path / str(index), state)
        assert bits(load_state(tmp_path / str(index))) == bits(state)
    for message in [*outcome.down.values(), *outcome.replies.values()]:
        received = Message.decode(message.encode())
        assert bits(received.flat()) == bits(message.flat())
        assert message.num_bytes == (len(message.encode()) if message.flat() else 0)
    wired = simulate(method, classes, 2, wire=True)
    assert bits([wired.server, wired.states]) == bits([outcome.server, outcome.states])
    for site in participants(method, classes):
        assert bits(judged(method, classes, wired, site)) == bits(
            judged(method, classes, outcome, site)
        )


@every_method
def test_a_run_continues_from_saved_states(name: str, classes: Toy, tmp_path: Path) -> None:
    """Round 3 after a restart equals round 3 without one; the optimiser has a state of its own here."""
    method, toy = load(name), replace(classes, optimizer=adam(0.01))
    two = simulate(method, toy, 2)
    three = simulate(method, toy, 3, after=two)
    restarted = replace(toy)

    def loaded(state: dict) -> dict:
        save_state(tmp_path / "state", state)
        return load_state(tmp_path / "state")

    server, states, replies = loaded(two.server), {n: loaded(s) for n, s in two.states.items()}, {}
    for site in participants(method, toy):
        with restarted.networks.scope():
            down = method.broadcast(restarted.host(3), server, site)
            states[site], replies[site] = method.local_update(
                restarted.site(site, 3), states[site], down
            )
    with restarted.networks.scope():
        server = method.aggregate(restarted.host(3), server, replies, len(states))
    assert bits([server, states]) == bits([three.server, three.states])


@every_method
def test_the_order_of_replies_is_no_matter(name: str, classes: Toy) -> None:
    method, outcome = load(name), played(name)
    turned = dict(reversed(outcome.replies.items()))
    server = method.aggregate(classes.host(2), outcome.history[1], turned, len(turned))
    assert bits(server) == bits(outcome.server)


@every_method
def test_it_changes_nothing_that_it_is_given(name: str, classes: Toy) -> None:
    method, toy = load(name), replace(classes, optimizer=sgd(0.1, momentum=0.9))
    before = simulate(method, toy, 1)
    given = [before.server, before.states, before.replies, before.history]
    kept = bits([*given, dict(toy.networks.initial)])
    after = simulate(method, toy, 2, after=before)
    with toy.networks.scope():
        for site in participants(method, toy):
            down = method.broadcast(toy.host(2), before.server, site)
            sent = bits(down)
            for _ in range(2):  # a second call with the same arguments gives the same
                state, reply = method.local_update(toy.site(site, 2), before.states[site], down)
                assert bits([state, reply]) == bits([after.states[site], after.replies[site]])
            method.predictor(toy.site(site, 2), before.states[site], down)
            assert bits(down) == sent
        method.aggregate(toy.host(2), before.server, after.replies, 3)
        method.global_predictor(toy.host(2), before.server)
    assert bits([*given, dict(toy.networks.initial)]) == kept


@every_method
def test_personal_tensors_are_in_no_message(name: str, classes: Toy) -> None:
    method, outcome = load(name), played(name)
    personal = method.personal_names(classes.networks.fresh())
    assert personal <= set(classes.initial)
    for message in [*outcome.down.values(), *outcome.replies.values()]:
        sent = {tensor for group in message.tensors.values() for tensor in group}
        assert not personal & sent
    for reply in outcome.replies.values():
        if "weights" in reply:
            assert set(reply["weights"]) == set(classes.initial) - personal


@every_method
def test_it_declares_the_groups_of_its_messages(name: str, classes: Toy) -> None:
    """Also with prototypes shared beside the weights, and other options; forms are the network's where so said."""
    forms = {key: (tensor.shape, tensor.dtype) for key, tensor in classes.initial.items()}
    other = {"fedproto": {"weights": "samples"}, "pfedpm": {"agg": "uniform"}, "fedmr": {"mu2": 0}}
    options = [other[name]] if name in other else []
    if methods.method_class(name).takes_prototypes:
        options.append({"prototypes": True})
    outcomes = [(load(name), played(name))]
    outcomes += [(load(name, given), simulate(load(name, given), classes, 2)) for given in options]
    for method, outcome in outcomes:
        declared = {group.name: group for group in method.groups()}
        for reply in outcome.replies.values():
            assert reply.tensors.keys() - {"weights"} == {
                group.name for group in declared.values() if group.up
            }
        for down in outcome.down.values():
            assert down.tensors.keys() - {"weights"} <= {
                group.name for group in declared.values() if group.down
            }
        for message in [*outcome.down.values(), *outcome.replies.values()]:
            for group in (
                group for group in declared if declared[group].like_weights and group in message
            ):
                assert all((t.shape, t.dtype) == forms[key] for key, t in message[group].items())


@every_method
@pytest.mark.parametrize("norm", [False, True])
def test_one_sample_an_absent_class_and_a_last_batch_of_one_are_fine(name: str, norm: bool) -> None:
    data = blobs({"a": 1, "b": 5, "c": 9}, labels={"b": (0, 2), "c": (1,)})
    method = load(name)
    toy = Toy(
        data, classifier(norm=norm), cross_entropy, sgd(0.1), batch_size=4, public=public_blobs()
    ).adapted(method)
    outcome = simulate(method, toy, 2)
    assert finite(outcome.server)
    assert finite(outcome.states)
    for reply in outcome.replies.values():
        assert all(is_finite(tensor) for tensor in reply.flat().values())


SHARING = [
    ("fedproto", {}), ("pfedpm", {}), ("pfedpm", {"predict": "relation"}), ("fedmr", {}), ("fedproc", {}),
    ("moon", {"prototypes": True}),
]  # fmt: skip
"""Methods and options by which sites share prototypes."""


@pytest.mark.parametrize(("name", "options"), SHARING)
def test_sites_with_one_class_each_share_no_prototype(name: str, options: dict) -> None:
    """A site's last batch is of one sample, and what it is judged by is finite."""
    data = blobs({"a": 7, "b": 4, "c": 1}, labels={"a": (0,), "b": (1,), "c": (2,)})
    method = load(name, options)
    toy = Toy(data, classifier(), cross_entropy, sgd(0.1), batch_size=3).adapted(method)
    outcome = simulate(method, toy, 2)
    assert finite(outcome.server)
    assert finite(outcome.states)
    for site, reply in outcome.replies.items():
        assert reply.flat()
        assert all(is_finite(tensor) for tensor in reply.flat().values())
        assert all(map(math.isfinite, reply.scalars.values()))
        with toy.networks.scope():
            down = method.broadcast(toy.host(3), outcome.server, site)
            network = method.predictor(toy.site(site, 3), outcome.states[site], down).eval()
            for x, _ in data.values():
                assert is_finite(network(x))


@every_method
def test_sites_may_be_absent(name: str, classes: Toy) -> None:
    method = load(name)
    cohorts = [["central"]] * 3 if method.pools_data else [["a"], ["c", "b"], ["b"]]
    outcome = simulate(method, classes, 3, cohorts)
    assert finite(outcome.server)
    if not method.pools_data:
        once = simulate(method, classes, 1, cohorts)
        assert bits(outcome.states["a"]) == bits(once.states["a"]), "an absent site keeps its State"


@every_method
def test_counters_are_never_averaged_and_statistics_are(name: str, classes: Toy) -> None:
    method, outcome = load(name), played(name)
    key, counter = "1.running_mean", "1.num_batches_tracked"
    source = next(iter(outcome.replies.values()))
    if "weights" not in source or key not in source["weights"]:
        assert {key, counter} <= method.personal_names(classes.networks.fresh())
        return
    if name in RELAYING + DISTILLING:
        return

    def made(mean: float, count: int) -> Message:
        weights = {**source["weights"], key: torch.full((6,), mean), counter: torch.tensor(count)}
        return Message({**source.tensors, "weights": weights}, {**source.scalars, "samples": 5})

    replies = {"a": made(1.0, 3), "b": made(4.0, 8), "c": made(4.0, 6)}
    weights = method.aggregate(classes.host(2), outcome.history[1], replies, 3)["weights"]
    torch.testing.assert_close(weights[key], torch.full((6,), 3.0))
    assert (weights[counter].item(), weights[counter].dtype) == (8, torch.int64)


@every_method
def test_the_predictor_is_usable_before_and_after_training(name: str, classes: Toy) -> None:
    options = [entry["name"] for entry in methods.options_of(methods.method_class(name))]
    start = (
        {"personal_start": "zero"} if name == "fedrod" else {}
    )  # else a copy of the generic head
    given = {**start, **{option: 0 for option in options if option.startswith("finetune")}}
    method = load(name, given)
    trained = simulate(method, classes, 2) if given else played(name)
    for rounds, outcome in ((0, simulate(method, classes, 0)), (2, trained)):
        for site in participants(method, classes):
            weights = judged(method, classes, outcome, site)
            for prefix in prefixes(name, site):
                part = {
                    key.removeprefix(prefix): value
                    for key, value in weights.items()
                    if key.startswith(prefix)
                }
                assert set(part) == set(classes.initial)
                assert rounds or bits(part) == bits(classes.initial)
        with classes.networks.scope():
            network = method.global_predictor(classes.host(), outcome.server)
            if network is not None:
                assert network.eval()(classes.data["a"][0]).shape == (9, 3)
            else:
                assert method.judged == "personal"
