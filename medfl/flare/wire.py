"""The format of messages between server and sites on NVIDIA FLARE: named tensors and a few numbers.

An `FLModel` has all tensors in `params`, which FLARE streams: a message (`Message.flat`) under `message/`, the outcomes
of single cases under `cases/`, tables of outcomes (`evaluation.tally`) under `tally/`, a site's facts about its data
under `site/`, the bytes of its fingerprint as `fingerprint/json`. Its `meta` has only numbers from a fixed list. A
question is FLARE's task name, one of `TASKS`. There are no paths, no text except names, no configuration; a site that
fails says why in one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from medfl.core import (
    SECTIONS,
    Document,
    Message,
    Metrics,
    RunError,
    Tensors,
    Weights,
    cpu_copies,
    is_name,
    printable,
    within,
)
from medfl.evaluation import Cases, CasesByName

(
    INTRODUCE,
    FINGERPRINT,
    EXAMINE,
    TRAIN,
    TRAIN_TO_SCORE,
    SCORE_SITE,
    SCORE_ON_ALL,
    COPY_WEIGHTS,
    SEGMENT,
) = TASKS = (
    "introduce",
    "fingerprint",
    "evaluate",
    "train",
    "try",
    "judge",
    "abroad",
    "weights",
    "masks",
)
"""Questions to a site. The last three are for simulations: elsewhere their answers stay at the sites."""

FINGERPRINT_BYTES = "fingerprint/json"
"""Name of the tensor with a site's fingerprint, in its file format."""
ROUND = "round"
LOSS = "train_loss"
STEPS = "steps"
SAMPLES = "samples"
SAVE = "save"
SETS = "sets"
FAILED = "failed"
RENEWED = "renewed"
NUMBERS = frozenset({ROUND, LOSS, STEPS, SAMPLES, SAVE, SETS, RENEWED, *SECTIONS})
"""Names of the numbers in `meta`: a section is 1 if it is requested, `RENEWED` if training produced a State.

`SETS` requests calibration tables for scores, numbered as in `Kind.set_scores` from 1 on; 0 for none.
"""

_RESERVED = frozenset({"server", "admin", "relay"})
_MAX_REASON = 400
_MAX_SITE_NAME = 63
_MAX_METRICS = 10_000
_MAX_METRIC_NAME = 200
_LARGEST = 2**53
"""The largest integer: above it a float skips some."""


@dataclass(frozen=True)
class Payload:
    """A question or an answer.

    Attributes:
        tensors: by their names on the wire.
        numbers: by names in `NUMBERS`.
        failure_reason: why a site has no answer; "" if it has one.
        metrics: by name, from a site that shows no cases.
    """

    tensors: Weights = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    failure_reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def group(self, group: str) -> Tensors:
        """Return the tensors named `group/...`, without that prefix."""
        members = {}
        for name, tensor in self.tensors.items():
            prefix, separator, member = name.partition("/")
            if separator and prefix == group:
                members[member] = tensor

        return members

    def whole_number(self, name: str) -> int:
        """Return a number that must be a non-negative integer.

        Raises:
            RunError: it is missing or another number.
        """
        value = self.numbers.get(name)
        if value is None or value != int(value) or not 0 <= value <= _LARGEST:
            raise RunError(
                f"the number {name!r} is {printable(value, 40)}; expected a whole one from 0 to {_LARGEST}"
            )
        return int(value)

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections that are asked for."""
        return tuple(filter(self.numbers.get, SECTIONS))


def message_payload(message: Message, numbers: Mapping[str, float], extra: Weights) -> Payload:
    """Return a payload with a message, its tensors copied to the CPU: a network's own keep changing."""
    tensors = {f"message/{name}": tensor for name, tensor in message.flat().items()}
    return Payload(cpu_copies({**tensors, **extra}), dict(numbers))


def question_numbers(round_: int, sections: Iterable[str] = (), **numbers: float) -> Metrics:
    """Return the numbers of a question."""
    return {ROUND: round_, **dict.fromkeys(sections, 1), **numbers}


def state_rounds(rounds: Mapping[str, int]) -> Tensors:
    """Return the round of the State that each site continues from (0: none), as tensors `kept/<site>`.

    As tensors they keep questions to several sites equal, so that these are sent as one.
    """
    # one name per site: all sites of a question get the same tensors
    return {f"kept/{site}": torch.tensor(rounds[site], dtype=torch.int64) for site in rounds}


def state_round(payload: Payload, site: str) -> int:
    """Return the round of the State that a site continues from.

    Raises:
        RunError: the server did not send it.
    """
    round_ = payload.tensors.get(f"kept/{site}")
    if round_ is None or round_.dtype != torch.int64 or round_.ndim or round_ < 0:
        raise RunError(
            f"site {site!r}: the server does not say from which of the site's States to go on"
        )
    return int(round_)


def failure(why: object) -> Payload:
    """Return the answer of a site that failed."""
    return Payload(failure_reason=_line(str(why)) or "it does not say why")


# To and from FLModel


def to_model(payload: Payload) -> Any:
    """Return a payload as an FLModel."""
    from nvflare.app_common.abstract.fl_model import FLModel

    meta: Document = dict(payload.numbers)
    if payload.failure_reason:
        meta[FAILED] = payload.failure_reason
    return FLModel(params=dict(payload.tensors), metrics=dict(payload.metrics) or None, meta=meta)


def from_model(model: Any, sender: str) -> Payload:
    """Return the payload of a received model, its types checked; a message's names, shapes and values come later.

    Raises:
        RunError: a value is neither a dense tensor of real numbers nor a number.
    """
    mappings = []
    for part in (model.params, model.meta, model.metrics):
        problem = f"a {type(part).__name__} in the place of names and values"
        _require(part is None or isinstance(part, Mapping), sender, problem)
        mappings.append({} if part is None else part)

    params, meta, metrics = mappings
    tensors = {}
    for name, value in params.items():
        _require(isinstance(name, str), sender, f"the name {printable(name, 40)!r} is no text")
        problem = f"{printable(name)!r} is a {type(value).__name__}; expected a dense tensor of real numbers"
        dense = isinstance(value, Tensor) and value.layout == torch.strided
        odd = dense and (
            value.is_quantized or value.is_nested or value.is_meta or value.is_complex()
        )
        _require(dense and not odd, sender, problem)
        tensors[name] = value.detach()

    for name in metrics:
        readable = isinstance(name, str) and name.isprintable() and len(name) <= _MAX_METRIC_NAME
        _require(readable, sender, f"a metric is called {printable([name], 60)}")

    problem = f"it tells {len(metrics)} metrics; at most {_MAX_METRICS}"
    _require(len(metrics) <= _MAX_METRICS, sender, problem)
    numbers = within(meta, NUMBERS)

    # no infinity or NaN, nor what a sum would make one of
    for name, value in {**numbers, **metrics}.items():
        plain = isinstance(name, str) and isinstance(value, int | float) and abs(value) < 1e300
        _require(plain, sender, f"the number {printable(name)!r} is {printable(value, 40)}")

    failed = meta.get(FAILED, "")
    _require(isinstance(failed, str), sender, "the reason of its failure is no text")
    return Payload(
        tensors, numbers, _line(failed), {str(name): float(v) for name, v in metrics.items()}
    )


def _line(text: str) -> str:
    """Return another machine's text as one line of printable characters, shortened."""
    plain = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    if len(plain) <= _MAX_REASON:
        return plain

    return plain[: _MAX_REASON - 3] + "..."


def _require(holds: bool, sender: str, problem: str) -> None:
    if not holds:
        raise RunError(f"{sender}: {problem}")


# Cases


def with_cases(payload: Payload, cases: Mapping[str, Cases]) -> Payload:
    """Add outcomes, section -> cases, as `cases/<section>/<value>`, without their ids, which both ends know."""
    tensors = {}
    for section, outcome in cases.items():
        for name, tensor in outcome.values.items():
            tensors[f"cases/{section}/{name}"] = tensor

    numbers = {**payload.numbers, **dict.fromkeys(cases, 1)}
    return replace(payload, tensors={**payload.tensors, **cpu_copies(tensors)}, numbers=numbers)


def read_cases(payload: Payload, ids: Mapping[str, Sequence[str]], sender: str) -> CasesByName:
    """Return the outcomes in a payload that `with_cases` made, section -> cases.

    `ids` are section that was asked for -> ids of its cases, in their order.

    Raises:
        RunError: sections that were not asked for, or a number of outcomes other than that of the cases.
    """
    values: dict[str, Tensors] = {section: {} for section in payload.sections}
    for key, tensor in payload.group("cases").items():
        section, _, name = key.partition("/")
        problem = f"outcomes of {printable(section)!r}, which it does not announce"
        _require(section in values, sender, problem)
        values[section][name] = tensor

    for section, tensors in values.items():
        _require(section in ids, sender, f"outcomes of {section!r}, which nobody asked for")
        _require(bool(tensors) or not ids[section], sender, f"no outcomes of {section!r}")

    try:
        cases = {}
        for section, tensors in values.items():
            cases[section] = Cases(tuple(ids[section]), tensors)

        return cases
    except ValueError as error:
        raise RunError(f"{sender}: {printable(error, 200)}") from error


# Names


def wire_names(participants: Sequence[str]) -> dict[str, str]:
    """Return participant -> its name in FLARE: the same, unless FLARE does not allow one of them."""
    if all(map(is_flare_name, participants)):
        return {name: name for name in participants}
    return {name: f"participant-{index}" for index, name in enumerate(participants, 1)}


def is_flare_name(name: str) -> bool:
    """Return whether FLARE, which takes no dots, allows a site's name."""
    return (
        is_name(name)
        and "." not in name
        and len(name) <= _MAX_SITE_NAME
        and name.lower() not in _RESERVED
    )
