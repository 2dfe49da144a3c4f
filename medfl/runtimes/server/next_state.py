"""Decides which replies of a round the server can aggregate; the others are refused, and their sites named.

On arrival a reply is checked by the rules common to all methods (`MessageRules`).
Only a method's own server half knows what else its replies contain: class means of the classes that a site has,
covariances, a selector. So it is tried. A reply is refused

    if a tensor has another form than in most other replies, or a group whose tensors are named by class has different
    forms between classes; in a tie the server's own message decides, and without one all are refused;
    if its change is far beyond the others' (`claims`);
    if the server's half fails with it, or its next State has NaN or infinite values, another form than before under the
    same name, or a group of tensors with other names (a State may gain groups, classes and sites); the next broadcast
    and what the server reports about the round (`observed`) are tried too.

Only after a failure are replies left out to find the cause: those that fail alone, found by bisection, or else those
without which the others succeed. So a round without errors costs only a check of the State. The server's half is a
function of its arguments, and attempts leave nothing behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import NamedTuple, TypeVar

from torch import Tensor

from medfl.core import (
    Config,
    InputError,
    MedflError,
    Message,
    Messages,
    Metrics,
    Print,
    RunError,
    Weights,
    is_finite,
    not_among,
    pick,
    printable,
    without,
)
from medfl.runtimes.attendance import Attendance, Tolerance
from medfl.runtimes.federation import Federation
from medfl.runtimes.rules import BrokenRule, check_state, check_unchanged, object_versions
from medfl.runtimes.server.claims import check_shares, far_replies
from medfl.runtimes.server.robust import shares_under_cap, with_effective_counts
from medfl.storage import RunFolder, State, to_device

Form = tuple[tuple[int, ...], str]
T = TypeVar("T")


class NextState(NamedTuple):
    """Outcome of a round: the server's next State, the replies it was made from, and the method's observations."""

    server: State
    replies: Messages
    observed: Mapping[str, float]


def next_state(
    federation: Federation,
    round_: int,
    server: State,
    replies: Messages,
    tolerance: Tolerance,
    left_out: dict[str, str],
    say: Print,
) -> NextState:
    """Return the server's next State, made from the usable replies.

    They are from the cohort and passed `MessageRules.check_reply`. `left_out` has the reason for each site without a
    reply, and receives those of refused sites.

    Raises:
        RunError: a reply is refused and too few are left, with site and tensor; or aggregation fails with each reply.
        InputError: raised by the aggregation, or a site exceeds its share of the weight.
    """
    cohort = federation.cohort(round_)
    method = federation.run.method
    # if a method changes its State in place, a second attempt would start from the first one's
    before = object_versions(server)
    attendance = Attendance(cohort, tolerance.min_replies, left_out, f"round {round_}", say)

    def attempt(names: Sequence[str]) -> NextState:
        try:
            return _checked_state(federation, round_, server, _only(replies, names))
        finally:
            # also after a failure: the next attempt starts from the same State
            check_unchanged(method, server, before)

    with federation.networks.scope():
        # the server's broadcast decides ties between forms
        sent = federation.method.broadcast(federation.host(round_), server, cohort[0]).tensors

    # forms first: distances are defined only between tensors of the same form
    attendance.drop(odd_replies(replies, sent, federation.like_weights))
    attendance.drop(far_replies(federation, without(replies, left_out), sent))
    result = _from_usable(replies, attempt, BrokenRule, attendance)
    check_shares(federation, attendance.label, result.replies, tolerance.max_share)

    return result


def first_state(
    federation: Federation,
    introductions: Messages,
    tolerance: Tolerance,
    absent: dict[str, str],
    say: Print,
) -> State:
    """Return the server's first State, made from the usable introductions.

    They passed `MessageRules.check_reply`; `absent` has each site without one, and receives refused ones, with reasons.

    Raises:
        RunError: an introduction is refused and too few are left, or the server's half fails with each.
        InputError: the sites do not fit together.
    """
    method = federation.method
    least = tolerance.min_replies
    attendance = Attendance([*introductions, *absent], least, absent, "introductions", say)

    def attempt(names: Sequence[str]) -> State:
        with federation.scope():
            usable = _only(introductions, names)
            first = method.init_server(federation.host(0), federation.networks.initial, usable)

        check_state(federation.run.method, "the server's State", first)
        for why in _flaws(first, None, "", federation.names, federation.task.num_classes):
            raise _Unusable(f"the server's first State: {why}")

        return first

    return _from_usable(introductions, attempt, InputError, attendance)


def resumed_state(federation: Federation, folder: RunFolder, manifest: Config) -> State:
    """Return the server's State of a resumed run, after trying what the next round needs from it.

    Raises:
        InputError: the file is not a State of this run's method and network.
        RunError: the file is damaged.
    """
    server = to_device(folder.server_state(manifest), federation.networks.device)
    round_ = manifest["round"] + 1
    method = federation.method
    try:
        for why in _flaws(server, None, "", federation.names, federation.task.num_classes):
            raise _Unusable(why)
        with federation.scope():
            name = federation.cohort(round_)[0]
            down = method.broadcast(federation.host(round_), server, name)
            # weights have the same forms down and up
            weights = Message({"weights": down.tensors.get("weights", {})})
            federation.message_rules(name).check_reply(weights)
            method.global_predictor(federation.host(round_), server)
    except Exception as error:  # a State of any form may make it fail in any way
        raise InputError(
            f"{folder.state / manifest['server']} is no State of method {federation.run.method!r}: "
            f"{_in_one_line(error)}",
            "the server's State as the run wrote it",
            "restore it, or start the run anew in another folder",
        ) from error

    return server


def _from_usable(
    messages: Messages,
    attempt: Callable[[Sequence[str]], T],
    fatal: type[InputError],
    attendance: Attendance,
) -> T:
    """Return the result of an attempt with the messages, refusing those that make it fail."""
    while True:
        names = not_among(messages, attendance.left_out)
        try:
            return attempt(names)
        except fatal:
            raise
        except Exception as error:  # a message of any form may make it fail in any way
            reasons = _at_fault(names, attempt, error, attendance.label)

        attendance.drop(reasons)


def _only(messages: Messages, names: Sequence[str]) -> Messages:
    if len(names) == len(messages):
        return messages

    return pick(messages, names)


class _Unusable(Exception):
    """The server cannot continue from a State."""


def _checked_state(
    federation: Federation, round_: int, server: State, replies: Messages
) -> NextState:
    """Return the server's next State; `_Unusable` if it cannot continue from there."""
    after = federation.aggregate(round_, server, replies)
    check_state(federation.run.method, "the server's State", after)
    for why in _flaws(after, server, "", federation.names, federation.task.num_classes):
        raise _Unusable(f"the server's next State: {why}")

    with federation.networks.scope():
        # these replies are to blame for a failure in the next round, and later nobody could tell which
        for name in replies:
            federation.method.broadcast(federation.host(round_ + 1), after, name)

        weighed = with_effective_counts(replies, federation.run)
        before = server.get("weights")
        observed: Metrics = {}
        if before:
            observed |= federation.aggregation.observed(weighed, before)

        observed |= shares_under_cap(replies, federation.run)
        return NextState(after, replies, {**observed, **federation.method.observed(after, replies)})


# Whose fault it is


def _at_fault(
    names: Sequence[str], attempt: Callable[[Sequence[str]], object], error: Exception, label: str
) -> dict[str, str]:
    """Return which replies made an attempt fail, and why.

    Raises:
        RunError: it fails with each of several alone: then none, or all, are to blame.
        InputError: as above, if it is one.
    """

    def failure(some: Sequence[str]) -> Exception | None:
        try:
            attempt(some)
        except Exception as raised:  # as above
            return raised

        return None

    def alone(some: Sequence[str], failed: Exception | None) -> dict[str, Exception]:
        if failed is None:
            return {}

        if len(some) == 1:
            return {some[0]: failed}

        # bisection: with one bad reply among n, about 2 log n attempts instead of n
        half = len(some) // 2
        first = some[:half]
        second = some[half:]
        return alone(first, failure(first)) | alone(second, failure(second))

    # if each fails alone, the fault is in the server's half or in the State, not in a reply
    at_fault = alone(names, error) if names else {}
    if len(at_fault) == len(names) > 1 or not names:
        if isinstance(error, MedflError):
            raise error
        sites = ", ".join(map(repr, names)) or "nobody"
        raise RunError(
            f"{label}: the server's half fails with each reply ({sites}): {_in_one_line(error)}"
        ) from error

    if not at_fault:
        # no part fails by itself: two replies contradict each other, or one contradicts all others
        needed_absent = []
        for name in names:
            others_fail = failure([present for present in names if present != name])
            if others_fail is None:
                needed_absent.append(name)

        at_fault = dict.fromkeys(needed_absent or names, error)

    unusable = "the server's half can do nothing with its reply"
    return {name: f"{unusable}: {_in_one_line(why)}" for name, why in at_fault.items()}


def _in_one_line(error: Exception) -> str:
    """Return an error in one line, without advice for somebody else."""
    if isinstance(error, KeyError) and error.args:
        text = str(error.args[0])
        # a sentence, else the key itself
        if " " in text:
            return printable(text, 200)

        return f"'{printable(text)}' is missing"

    text = error._parts[0] if isinstance(error, InputError) else str(error)
    kind = ""
    if not isinstance(error, MedflError | _Unusable):
        kind = f"{type(error).__name__}: "

    return kind + printable(" ".join(text.split()), 200).replace("\\'", "'")


# Forms


def odd_replies(
    replies: Messages,
    broadcast: Mapping[str, Weights],
    checked_groups: Collection[str] = ("weights",),
) -> dict[str, str]:
    """Return which replies have a tensor of another form than most, and what differs.

    If the replies do not decide, the broadcast does; forms of `checked_groups` were checked on arrival.
    """
    forms = {name: _forms(message.tensors, checked_groups) for name, message in replies.items()}
    expected = _forms(broadcast, checked_groups)
    reasons = {}
    for key in sorted(set().union(*forms.values())):
        site_forms = {name: form[key] for name, form in forms.items() if key in form}
        counts: Counter[Form] = Counter()
        for form in site_forms.values():
            counts.update(form.values())

        (most, count), *_ = counts.most_common(1)
        usual: Form | None = most
        tied = {form for form, number in counts.items() if number == count}
        if len(tied) > 1:
            usual = next(iter(tied & {*expected.get(key, {}).values()}), None)

        expectation = "the other sites' is another"
        if usual is not None:
            expectation = f"expected {_form_text(usual)}"

        for name, form in site_forms.items():
            wrong = [tensor for tensor, tensor_form in form.items() if tensor_form != usual]
            if wrong and name not in reasons:
                tensor = printable(wrong[0], 80)
                reasons[name] = f"{tensor!r} is {_form_text(form[wrong[0]])}; {expectation}"

    return reasons


def _forms(
    tensors: Mapping[str, Weights], checked_groups: Collection[str]
) -> dict[str, dict[str, Form]]:
    """Return key -> flat name -> form; tensors that are named by class share one key."""
    forms: dict[str, dict[str, Form]] = {}
    for group, members in tensors.items():
        if group in checked_groups:
            continue

        for name, tensor in members.items():
            key = f"{group}/{'#' if _is_class(name) else name}"
            forms.setdefault(key, {})[f"{group}/{name}"] = _form(tensor)

    return forms


def _form(tensor: Tensor) -> Form:
    return tuple(tensor.shape), str(tensor.dtype)


def _form_text(form: Form) -> str:
    return f"{form[0]} {form[1]}"


def _is_class(name: str) -> bool:
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def _flaws(
    after: object, before: object, path: str, sites: Sequence[str], classes: int
) -> Iterator[str]:
    """Describe what is wrong with a part of a State, given its previous value or None."""
    if isinstance(after, Tensor):
        if not is_finite(after):
            yield f"{path!r} has NaN or infinite values"
        if isinstance(before, Tensor) and _form(before) != _form(after):
            yield f"{path!r} is {_form_text(_form(after))}; before it was {_form_text(_form(before))}"
    elif isinstance(after, float) and (after != after or abs(after) == float("inf")):
        yield f"{path!r} is {after}"
    elif isinstance(after, Mapping):
        entries = before if isinstance(before, Mapping) else {}
        values = [*after.values(), *entries.values()]
        # entries of the State itself are not a group: a method may add some at any time
        if path and values and all(isinstance(value, Tensor) for value in values):
            yield from _naming_flaws(after, entries, path, sites, classes)

        for name, value in after.items():
            entry_path = f"{path}/{name}".removeprefix("/")
            yield from _flaws(value, entries.get(name), entry_path, sites, classes)
    elif isinstance(after, list | tuple):
        listed = before if isinstance(before, list | tuple) else ()
        pairs = zip(after, chain(listed, repeat(None)), strict=False)
        for index, (value, old) in enumerate(pairs):
            yield from _flaws(value, old, f"{path}/{index}", sites, classes)


def _naming_flaws(
    after: Weights,
    was: Weights,
    path: str,
    sites: Sequence[str],
    classes: int,
) -> Iterator[str]:
    """Describe what is wrong with the names of a group of tensors in a State."""
    # names of sites or classes may be added: they appear round by round
    lost = was.keys() - after.keys()
    new = after.keys() - was.keys() - set(sites)
    by_class = any(map(_is_class, after)) and all(map(_is_class, was))
    if lost:
        yield f"{path + '/' + min(lost)!r} is gone"

    for name in sorted(new) if was or by_class else ():
        if not by_class or not _is_class(name) or (classes and int(name) >= classes):
            no_class = " and is no class" if by_class else ""
            yield f"{printable(path + '/' + name, 80)!r} was not in it before{no_class}"
