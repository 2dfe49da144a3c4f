"""A round ends with a sound State of the server, or a refused site: whatever a site puts into its reply."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from medfl.core.errors import InputError, RunError
from medfl.core.message import Message, is_finite
from medfl.core.run import PartitionRecord
from medfl.methods import load
from medfl.runtimes.attendance import Tolerance
from medfl.runtimes.federation import Federation
from medfl.runtimes.server.claims import check_counts
from medfl.runtimes.server.next_state import NextState, first_state, next_state, odd_replies
from medfl.runtimes.step import introduce, site_step
from medfl.storage.files import State
from tests.support.toy import (
    CLASSIFYING,
    SECTIONS,
    WITHOUT_IMAGES,
    ToyBundle,
    bits,
    public_blobs,
    run_record,
)

ROUNDS = 3
ITEMS = {"x": (0, 1, 2), "y": (3, 4, 5, 8), "z": (6, 9, 10, 7)}
"""Site z has no item of class 2."""


class Round(NamedTuple):
    """A round's replies, and what the server had before."""

    federation: Federation
    round: int
    server: State
    replies: Mapping[str, Message]
    states: Mapping[str, State]
    seen: Sequence[State]


def federation(method: str, **changes: Any) -> Federation:
    made = load(method, {"large": "x"} if method == "fedhelp" else WITHOUT_IMAGES.get(method))
    if method == "fedhelp":  # with one network for all: the toy bundle has no other

        class Same(type(made)):
            def site_networks(self, names):
                return dict.fromkeys(names, {})

        made = Same(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made)})
    sites = {
        name: {section: [f"{section}{i}" for i in where] for section in SECTIONS}
        for name, where in ITEMS.items()
    }
    record = run_record(method=method, partition=PartitionRecord("file", 0, (), sites), **changes)
    return Federation(ToyBundle(), made, record, public=public_blobs())


@cache
def played(method: str, sites: int = 3) -> list[Round]:
    """Honest rounds."""
    made, found = federation(method), []
    made.leave_out({3: [], 2: ["z"], 1: ["x", "z"]}[sites] if not made.method.pools_data else [])
    with made.scope():
        first = {name: introduce(made, name) for name in made.participants}
        server = made.method.init_server(made.host(0), made.networks.initial, first)
    states: dict[str, State] = {}
    for round_ in range(1, ROUNDS + 1):
        results = {}
        for name in made.participants:
            with made.scope():
                down = made.method.broadcast(made.host(round_), server, name)
            results[name] = site_step(made, round_, name, states.get(name), down)
        replies = {name: result.reply for name, result in results.items()}
        states = {name: result.state for name, result in results.items()}
        found.append(Round(made, round_, server, replies, states, ()))
        server = made.aggregate(round_, server, replies)
    return found


def settled(
    played: Round, replies: Mapping[str, Message], least: int | None = 1
) -> tuple[NextState, dict[str, str], list[str]]:
    """Check replies as they arrive, and settle the round."""
    made, left_out, said, arrived = played.federation, dict[str, str](), [], {}
    for name, reply in replies.items():
        try:
            made.message_rules(name).check_reply(reply)
            made.message_rules(name).check_complete(reply)
            check_counts(made, name, reply, len(made.participant_shard(name, "train")))
        except RunError as error:
            expect(str(error).startswith(f"site {name!r}"), error)
            if least is None:
                raise
            left_out[name] = str(error)
            continue
        arrived[name] = reply
    if not arrived:
        raise RunError("; ".join(left_out.values()))
    after = next_state(
        made, played.round, played.server, arrived, Tolerance(least), left_out, said.append
    )
    return after, left_out, said


def expect(holds: bool, error: Exception) -> None:
    assert holds, str(error)


def finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return is_finite(value)
    if isinstance(value, Mapping):
        return all(finite(member) for member in value.values())
    if isinstance(value, list | tuple):
        return all(finite(member) for member in value)
    return not isinstance(value, float) or abs(value) < float("inf")


def go_on(played: Round, server: State) -> None:
    """Let an honest site train in the next round: nothing but its numbers may go wrong."""
    made, round_ = played.federation, played.round + 1
    name = made.participants[0]
    with made.scope():
        down = made.method.broadcast(made.host(round_), server, name)
    try:
        site_step(made, round_, name, played.states[name], down)
    except RunError as error:  # finite numbers of any size may be sent, but not learnt from
        expect("loss is" in str(error) or "NaN or infinite" in str(error), error)


# Nothing is wrong


@pytest.mark.parametrize("method", CLASSIFYING)
@pytest.mark.parametrize("sites", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_of_honest_replies_none_is_refused_and_nothing_changes(method: str, sites: int) -> None:
    for one in played(method, sites):
        after, left_out, said = settled(one, one.replies, None)
        assert (left_out, said) == ({}, [])
        assert after.replies == one.replies
        assert bits(after.server) == bits(
            one.federation.aggregate(one.round, one.server, one.replies)
        )
        assert after.observed == one.federation.method.observed(after.server, one.replies)


def test_of_a_round_in_which_nothing_is_wrong_the_server_s_half_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, asked = played("fedproto")[1], []
    inner = Federation.aggregate
    monkeypatch.setattr(
        Federation,
        "aggregate",
        lambda self, *given: asked.append(len(given[2])) or inner(self, *given),
    )
    settled(one, one.replies)
    assert asked == [3]


# What a site may put into its reply

Change = Callable[[Message, int], Message]


def of_group(change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> Change:
    """Change one of the groups of a reply."""

    def changed(reply: Message, at: int) -> Message:
        groups = sorted(reply.tensors)
        if not groups:
            return reply
        group = groups[at % len(groups)]
        return Message({**reply.tensors, group: change(dict(reply[group]))}, reply.scalars)

    return changed


def of_tensor(change: Callable[[Tensor], Tensor]) -> Change:
    """Change one of the tensors of a reply."""

    def changed(reply: Message, at: int) -> Message:
        flat = reply.flat()
        keys = sorted(key for key in flat if not key.startswith("scalars/"))
        if keys:
            flat[keys[at % len(keys)]] = change(flat[keys[at % len(keys)]])
        return Message.from_flat(flat)

    return changed


def renamed(name: str) -> Change:
    """Give a tensor another name; the rest of its group stays."""
    return of_group(
        lambda part: {
            **dict(list(part.items())[1:]),
            name: next(iter(part.values()), torch.ones(1)),
        }
    )


def added(name: str) -> Change:
    return of_group(lambda part: {**part, name: next(iter(part.values()), torch.ones(1))})


def scalar(value: float | None) -> Change:
    """Change one of the numbers of a reply, or take it out."""

    def changed(reply: Message, at: int) -> Message:
        numbers = dict(reply.scalars)
        if numbers:
            name = sorted(numbers)[at % len(numbers)]
            numbers = (
                {**numbers, name: value}
                if value is not None
                else {k: v for k, v in numbers.items() if k != name}
            )
        return Message(reply.tensors, numbers)

    return changed


def without_group(reply: Message, at: int) -> Message:
    groups = sorted(reply.tensors)
    gone = groups[at % len(groups)] if groups else None
    return Message(
        {group: part for group, part in reply.tensors.items() if group != gone}, reply.scalars
    )


def swapped(reply: Message, at: int) -> Message:
    groups = sorted(reply.tensors)
    turned = groups[at % max(1, len(groups)) :] + groups[: at % max(1, len(groups))]
    return Message(
        {group: reply[other] for group, other in zip(groups, turned, strict=True)}, reply.scalars
    )


CHANGES: Mapping[str, Change] = {
    "nothing at all": lambda reply, at: Message(),
    "no group": without_group,
    "empty group": of_group(lambda part: {}),
    "half a group": of_group(lambda part: dict(list(part.items())[::2])),
    "groups in each other's place": swapped,
    "no tensor": of_group(lambda part: dict(list(part.items())[1:])),
    "renamed": renamed("evil"),
    "class 99": renamed("99"),
    "class -1": renamed("-1"),
    "class 007": renamed("007"),
    "a class more": added("3"),
    "a name more": added("zzz"),
    "a first name more": added("!"),
    "a group more": lambda reply, at: Message(
        {**reply.tensors, "evil": {"0": torch.ones(2)}}, reply.scalars
    ),
    "a dimension more": of_tensor(lambda t: t[None]),
    "one number": of_tensor(lambda t: t.reshape(-1)[:1].reshape(()) if t.numel() else t),
    "one in a list": of_tensor(lambda t: t.reshape(-1)[:1]),
    "flat": of_tensor(lambda t: t.reshape(-1)),
    "short": of_tensor(lambda t: t[:-1] if t.ndim else t),
    "long": of_tensor(lambda t: torch.cat([t, t]) if t.ndim else t.repeat(2)),
    "narrow": of_tensor(lambda t: t[..., :-1] if t.ndim else t),
    "empty": of_tensor(lambda t: t.new_empty(0)),
    "double": of_tensor(lambda t: t.double()),
    "half": of_tensor(lambda t: t.half()),
    "whole": of_tensor(lambda t: t.to(torch.int64)),
    "small whole": of_tensor(lambda t: t.to(torch.int8)),
    "bool": of_tensor(lambda t: t.bool()),
    "zero": of_tensor(torch.zeros_like),
    "negative": of_tensor(lambda t: -t - 1 if t.dtype != torch.bool else t),
    "huge": of_tensor(
        lambda t: (
            torch.full_like(t, 3e38) if t.is_floating_point() else torch.full_like(t, 2**31 - 1)
        )
    ),
    "NaN": of_tensor(lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else t),
    "no number": scalar(None),
    "number 0": scalar(0.0),
    "number -1": scalar(-1.0),
    "number 1e308": scalar(1e308),
    "number 1e15": scalar(1e15),
    "number 1e-300": scalar(1e-300),
    "number NaN": scalar(float("nan")),
}


def outcome(
    method: str, round_: int, sites: int, changes: Sequence[tuple[str, int]], least: int | None
) -> str:
    """Return how a round ends whose site y has changed its reply so: never but by a refused site or a sound State."""
    one = played(method, sites)[round_ - 1]
    name = "central" if one.federation.method.pools_data else "y"
    reply = one.replies[name]
    for what, at in changes:
        reply = CHANGES[what](reply, at)
    try:
        after, left_out, said = settled(one, {**one.replies, name: reply}, least)
    except (RunError, InputError) as error:
        expect(re.search(rf"\b{name}\b", str(error)) is not None and "\n" not in str(error), error)
        return "ended"
    assert finite(after.server)
    assert set(after.replies) == set(one.replies) - set(left_out)
    if left_out:
        assert name in left_out
        rest = {site: one.replies[site] for site in after.replies}
        expected = one.federation.aggregate(one.round, one.server, rest)
        assert bits(after.server) == bits(expected)
    go_on(one, after.server)
    return "refused" if left_out else "taken"


@pytest.mark.parametrize("method", CLASSIFYING)
@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 30)), min_size=1, max_size=3
    ),
    round_=st.integers(1, ROUNDS),
    sites=st.sampled_from([3, 3, 2, 1]),
    least=st.sampled_from([1, 1, 2, None]),
)
def test_any_reply_is_taken_or_refused_by_name(
    method: str, changes: list[tuple[str, int]], round_: int, sites: int, least: int | None
) -> None:
    outcome(method, round_, sites, changes, min(least, sites) if least else None)


@pytest.mark.slow
@pytest.mark.parametrize("method", CLASSIFYING)
def test_each_change_of_each_tensor_is_taken_or_refused_by_name(method: str) -> None:
    for what in CHANGES:
        for at, (round_, sites) in enumerate(((1, 3), (3, 2), (2, 1))):
            outcome(method, round_, sites, [(what, at)], 1)


# Who is refused, and what is said


def changed(one: Round, **changes: tuple[str, int]) -> dict[str, Message]:
    """Return a round's replies, some of them changed."""
    bad = {name: CHANGES[what](one.replies[name], at) for name, (what, at) in changes.items()}
    return {**one.replies, **bad}


REFUSED: Mapping[str, tuple[str, dict[str, tuple[str, int]], dict[str, str]]] = {
    "lacks a group": ("scaffold", {"y": ("no group", 0)}, {"y": "no group 'control'"}),
    "lacks a tensor": ("feddc", {"z": ("no tensor", 0)}, {"z": "'0.weight' is missing"}),
    "lacks a number": ("fednova", {"x": ("no number", 0)}, {"x": "'effective_steps' is missing"}),
    "lacks the count": ("fedbn", {"x": ("no number", 0)}, {"x": "lacks the number of training samples"}),
    "two lack something": (
        "fedsm",
        {"x": ("empty group", 4), "y": ("no group", 2)},
        {"x": "'weights/0.bias' is missing in its reply", "y": "no group 'selector'"},
    ),
    "another form": (
        "fedproto", {"y": ("short", 0)}, {"y": "'prototypes/0' is (5,) torch.float32; expected (6,) torch.float32"},
    ),
    "parameters of another form": (
        "pfedbayes", {"y": ("flat", 1)}, {"y": "'rho/0.weight' is (48,) torch.float32; expected (6, 8) torch.float32"},
    ),
    "parameters of another name": ("scaffold", {"y": ("a name more", 0)}, {"y": "'control/zzz' is no tensor of the"}),
    "no class": ("fedproto", {"y": ("renamed", 0)}, {"y": "next State: 'prototypes/evil' was not in it before"}),
    "a class that has no count": ("pfedpm", {"y": ("class 99", 1)}, {"y": "'99' is missing"}),
    "a first name more": ("fedsm", {"x": ("a first name more", 2)}, {"x": "'selector/!' was not in it before"}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_the_site_is_named_and_nobody_else_is_refused(what: str) -> None:
    method, changes, expected = REFUSED[what]
    one = played(method)[1]
    after, left_out, said = settled(one, changed(one, **changes))
    assert left_out.keys() == expected.keys()
    for name, text in expected.items():
        assert text in left_out[name]
    rest = {name: one.replies[name] for name in one.replies if name not in expected}
    assert bits(after.server) == bits(one.federation.aggregate(one.round, one.server, rest))
    assert after.observed == one.federation.method.observed(after.server, rest)
    for name in left_out:
        arrival = name not in after.replies and not any(
            f"without site {name!r}" in line for line in said
        )
        assert arrival or f"round 2: without site {name!r}: {left_out[name]}" in said


def test_without_a_minimum_of_replies_the_first_bad_one_ends_the_run() -> None:
    one = played("scaffold")[1]
    with pytest.raises(
        RunError,
        match="^site 'y': the server's half can do nothing with its reply: no group 'control'",
    ):
        settled(one, changed(one, y=("no group", 0)), None)


def test_a_state_that_is_not_finite_is_not_gone_on_with() -> None:
    """The counts of a class, all of them 0, divide its mean."""
    one = played("fedmr", 1)[1]
    with pytest.raises(
        RunError, match="^site 'y': .*next State: 'prototypes/0' has NaN or infinite values"
    ):
        settled(one, changed(one, y=("zero", 0)), None)


def test_with_too_few_replies_the_last_good_round_is_kept() -> None:
    one = played("fednova")[1]
    bad = changed(one, x=("no number", 0), y=("no number", 0))
    with pytest.raises(
        RunError,
        match=r"^round 2: 2 of 3 sites do not answer, and at least 2 .* continue with --resume",
    ):
        settled(one, bad, 2)


def test_of_two_sites_that_differ_the_server_s_own_message_decides() -> None:
    first, second = played("fedproto", 2)[:2]

    def bad(one: Round) -> dict[str, Message]:
        short = {name: tensor[:5] for name, tensor in one.replies["x"]["prototypes"].items()}
        return {**one.replies, "x": Message({"prototypes": short})}

    _, left_out, _ = settled(second, bad(second))
    assert left_out == {"x": "'prototypes/0' is (5,) torch.float32; expected (6,) torch.float32"}
    with pytest.raises(
        RunError, match="'prototypes/0' is .* the other sites' is another"
    ) as caught:
        settled(first, bad(first))
    assert re.search(r"x: .*; y: ", str(caught.value))


def test_the_form_of_most_is_right() -> None:
    def reply(size: int, **more: Tensor) -> Message:
        return Message({"means": {"0": torch.ones(size), "1": torch.ones(size)}, "other": more})

    assert odd_replies({"x": reply(3), "y": reply(3), "z": reply(4)}, {}).keys() == {"z"}
    assert odd_replies({"x": reply(3), "y": reply(4)}, {"means": {"2": torch.ones(4)}}).keys() == {
        "x"
    }
    assert odd_replies({"x": reply(3), "y": reply(4)}, {"means": {"2": torch.ones(5)}}).keys() == {
        "x",
        "y",
    }
    assert odd_replies({"x": reply(3, a=torch.ones(1)), "y": reply(3, b=torch.ones(2))}, {}) == {}
    crooked = Message({"means": {"0": torch.ones(3), "1": torch.ones(2)}})
    assert odd_replies({"x": reply(3), "y": crooked}, {}) == {
        "y": "'means/1' is (2,) torch.float32; expected (3,) torch.float32"
    }


@dataclasses.dataclass(frozen=True)
class Broken(type(load("fedbn"))):
    """A method whose server half has an error of its own."""

    error: type[Exception] = KeyError

    def aggregate(self, host, server, replies, num_sites):
        raise self.error("the server's half fails")


def test_what_fails_with_every_reply_is_nobodys_fault() -> None:
    one = played("fedbn")[1]
    made = federation("fedbn")
    for error, text in (
        (RunError, "^the server's half fails$"),
        (
            KeyError,
            r"^round 2: the server's half fails with each reply \('x', 'y', 'z'\): the server's half fails$",
        ),
        (ZeroDivisionError, "ZeroDivisionError: the server's half fails$"),
    ):
        made.method = Broken(error=error)
        with pytest.raises(RunError, match=text) as caught:
            next_state(made, 2, one.server, one.replies, Tolerance(1), {}, str)
        assert error is RunError or isinstance(caught.value.__cause__, error)


def test_many_sites_are_searched_by_halves() -> None:
    """Of 64 replies one lacks a number: some 2 log2 64 attempts, not 64."""
    one, asked = played("fednova")[1], []
    made = federation("fednova")
    made.names = made.participants = [f"s{i:02d}" for i in range(64)]
    replies = dict.fromkeys(made.names, one.replies["x"])
    replies["s41"] = Message(replies["s41"].tensors, {"samples": 3.0})
    inner = made.aggregate
    made.aggregate = lambda *given: asked.append(len(given[2])) or inner(*given)
    left_out: dict[str, str] = {}
    next_state(made, 2, one.server, replies, Tolerance(1), left_out, str)
    assert left_out.keys() == {"s41"}
    assert len(asked) <= 14


# Introductions


def introduced(method: str, **options: Any) -> tuple[Federation, dict[str, Message]]:
    made = federation(method)
    made.method = dataclasses.replace(made.method, **options)
    return made, {name: Message({}, {"features": 6.0}) for name in made.participants}


def test_honest_introductions_are_taken_as_they_are() -> None:
    for method in ("fedproto", "scaffold", "proxyfl", "feddyn"):
        made = federation(method)
        with made.scope():
            given = {name: introduce(made, name) for name in made.participants}
            expected = made.method.init_server(made.host(0), made.networks.initial, given)
        absent: dict[str, str] = {}
        assert bits(first_state(made, given, Tolerance(), absent, str)) == bits(expected)
        assert absent == {}


@pytest.mark.parametrize("least", [None, 2])
def test_an_introduction_that_lacks_a_number_is_refused(least: int | None) -> None:
    made, given = introduced("fedproto")
    absent, said = {}, []
    given["y"] = Message({}, {"nonsense": 1.0})
    if least is None:
        with pytest.raises(RunError, match="^site 'y': .* 'features' is missing$"):
            first_state(made, given, Tolerance(), absent, said.append)
        return
    assert first_state(made, given, Tolerance(least), absent, said.append) == {"prototypes": {}}
    assert absent.keys() == {"y"}
    assert said == [f"introductions: without site 'y': {absent['y']}"]


def test_sites_that_do_not_go_together_are_told_so() -> None:
    made, given = introduced("fedproto")
    given["y"] = Message({}, {"features": 7.0})
    with pytest.raises(InputError, match="features of length 6 at x, z; length 7 at y"):
        first_state(made, given, Tolerance(1), {}, str)
