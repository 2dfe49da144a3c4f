"""A server that lies to an honest site, in what each method sends: the site says so in a line, or trains.

What is sent has the names that the method expects; it is of another shape or kind, missing, huge or negative.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from medfl.core.errors import RunError
from medfl.core.message import is_finite
from medfl.data.prepared import Stacked
from medfl.methods import load
from medfl.methods.fedhelp import FedHelp
from medfl.runtimes.federation import Federation
from medfl.runtimes.monai_fl.client import MedflClientAlgo
from tests.runtimes.test_guard import site
from tests.runtimes.test_monai_fl import NEED_A_BUNDLE, broadcast, said
from tests.support.grey_squares import QUICK, images, network, quick
from tests.support.sweeps import mostly_slow
from tests.support.toy import (
    CLASSIFYING,
    WITHOUT_IMAGES,
    ToyBundle,
    bits,
    public_blobs,
    run_record,
)

FEW = ("fedavg", "fedbm", "fedproto", "fedsm", "l2gd", "scaffold")
LONG = 20
"""Seconds for one answer, of which an honest one takes a hundredth."""
LIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "missing": lambda t: None,
    "empty": lambda t: t.reshape(-1)[:0],
    "flat": lambda t: t.reshape(-1),
    "longer": lambda t: torch.cat([t.reshape(-1), t.reshape(-1)]),
    "deeper": lambda t: t[None],
    "whole": lambda t: t.round().to(torch.int64),
    "double": lambda t: t.double(),
    "true": lambda t: t > 0,
    "NaN": lambda t: torch.full_like(t.double(), torch.nan).to(t.dtype),
    "sparse": lambda t: t.to_sparse(),
    "without an end": lambda t: t.reshape(-1)[:1].expand(2**40),
    "described": lambda t: t.to("meta"),
    "words": lambda t: "x" * 2**20,
    "turned": lambda t: t.T if t.ndim == 2 else t.flip(0),
    "huge": lambda t: torch.full_like(t.double(), 3e38).to(t.dtype),
    "negative": lambda t: -t.double().abs().add(1).mul(1e6).to(t.dtype),
}
NUMBERS = (-1.0, 0.0, 0.5, 1e6, 1e8, 1e12, 1e300, torch.nan, torch.inf)


def lies(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield hostile messages: each tensor beside the weights, the first of them, and each number, in turn."""
    groups: dict[str, str] = {}
    for key in weights:
        groups.setdefault(key.partition("/")[0], key)

    for group, key in groups.items():
        without = {k: v for k, v in weights.items() if k.partition("/")[0] != group}
        yield f"no {group}", without
        yield f"more {group}", {**weights, f"{group}/x y": torch.ones(2)}
        for word, lie in LIES.items():
            told = dict(weights)
            changed = lie(told.pop(key))
            yield f"{key} {word}", told if changed is None else {**told, key: changed}

    for key in weights:
        if key.startswith("scalars/"):
            for number in NUMBERS:
                yield f"{key} {number}", {**weights, key: torch.tensor(number, dtype=torch.float64)}

    yield "a group of its own", {**weights, "shell/x": torch.ones(3)}


@contextmanager
def in_time(what: str) -> Iterator[None]:
    def late(*_: Any) -> None:
        pytest.fail(f"{what}: no answer after {LONG} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONG)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def kept(algo: MedflClientAlgo) -> Any:
    state = algo.states.newest(10)
    return None if state is None else bits(state)


NAMED = ("site 'x'", "the server", "'adapters/")
METHODS = sorted(set(CLASSIFYING) - NEED_A_BUNDLE - {"central"})
OPTIONS = {"l2gd": {"coin": 0.5}}


@pytest.mark.parametrize("method", mostly_slow(METHODS, FEW))
def test_a_site_refuses_by_name_or_trains_and_keeps_its_state(method: str) -> None:
    options = {**WITHOUT_IMAGES.get(method, {}), **OPTIONS.get(method, {})}
    record = run_record(method=method, options=options)
    made = Federation(ToyBundle(), load(method, options), record, public=public_blobs())
    _refuses_or_trains(made)


class Pictures(ToyBundle):
    """Grey squares, of which a generator can make more."""

    def prepared(self, section: str, *, jobs: int = 1, progress: bool = False) -> Stacked:
        x, y = images({section: 12})[section]
        return Stacked(
            [{"id": f"{section}{i}", "label": int(label)} for i, label in enumerate(y)], x, y
        )


def test_a_site_refuses_a_generator_that_does_not_fit_it() -> None:
    record = run_record(method="fedbm", options=QUICK)
    made = Federation(Pictures(network=network), quick(g_start=0), record)
    told = broadcast(made, "x").weights
    assert {"generator", "scalars", "weights"} <= {key.partition("/")[0] for key in told}
    _refuses_or_trains(made)


@pytest.mark.parametrize("large", ["x", "y"])
def test_a_site_of_fedhelp_refuses_by_name_or_trains(
    large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a large site and as a small one; in a bundle the large network is another one."""
    monkeypatch.setattr(FedHelp, "site_networks", lambda _, names: dict.fromkeys(names, {}))
    record = run_record(method="fedhelp", options={"large": large})
    method = load("fedhelp", {"large": large})
    _refuses_or_trains(Federation(ToyBundle(), method, record, public=public_blobs(classes=3)))


def _refuses_or_trains(made: Federation) -> None:
    told = broadcast(made, "x").weights
    for what, weights in lies(told):
        algo = site(made)
        with in_time(what):
            try:
                algo.train(said(weights, 1))
            except RunError as error:
                text = str(error)
                assert text.startswith(NAMED), (what, text)
                assert "\n" not in text, what
                assert "MemoryError" not in text, what
                assert kept(algo) is None, f"{what}: a State was kept"
            else:
                reply = algo.get_weights().weights
                assert all(map(is_finite, reply.values())), what
