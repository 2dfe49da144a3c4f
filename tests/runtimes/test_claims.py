"""What a site claims is held against what the server knows: counts, shares of the weight, norms of changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medfl.core.errors import InputError, RunError
from medfl.core.message import Message
from medfl.methods import load
from medfl.runtimes.attendance import Tolerance
from medfl.runtimes.federation import Federation
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.monai_fl.exchange import Exchange
from medfl.runtimes.server.claims import FARTHEST, check_counts, far_replies
from medfl.storage.files import load_weights
from tests.runtimes.test_robust_server import Faulty, every_runtime, forked, run
from tests.support.toy import ToyBundle, bits, run_record

Spoil = Callable[[Message], Message]


def claiming(count: float) -> Spoil:
    return lambda reply: Message(reply.tensors, {**reply.scalars, "samples": count})


def moved(factor: float) -> Spoil:
    """Site y's weights, so much larger."""
    return lambda reply: Message(
        {"weights": {n: (t * factor).to(t) for n, t in reply["weights"].items()}}, reply.scalars
    )


# Numbers of items


@pytest.mark.parametrize(
    ("count", "workers"),
    [
        *((count, Workers) for count in (1e12, 2.5, 0.0, -3.0, 6.0)),
        (1e12, forked),
        (6.0, Exchange),
    ],
)
def test_a_number_of_items_that_the_site_does_not_have_is_refused(
    tmp_path: Path, workers: Any, count: float
) -> None:
    """Site y has 5: with 1e12 its weights were the mean, exactly."""
    ran = run(tmp_path / "bad", Faulty(spoil=claiming(count)), workers, Tolerance(2), rounds=2)
    assert [list(entry.get("left_out", {})) for entry in ran.rounds] == [[], ["y"]]
    why = ran.rounds[1]["left_out"]["y"]
    assert (
        f"gives a number of items that cannot be true: {count:.17g}; expected a whole number from 1 to 5"
        in why
    )
    with pytest.raises(
        RunError, match="^site 'y': its reply gives a number of items that cannot be true"
    ):
        run(tmp_path / "strict", Faulty(spoil=claiming(count)), workers, rounds=2)


def test_a_site_without_items_says_0_and_no_other_number() -> None:
    made = Federation(ToyBundle(), load("fedavg"), run_record())
    check_counts(made, "y", Message({}, {"samples": 0}), 0)
    with pytest.raises(RunError, match="expected a whole number from 0 to 0"):
        check_counts(made, "y", Message({}, {"samples": 1}), 0)


@pytest.mark.parametrize("count", [math.nan, math.inf, -math.inf])
def test_a_number_of_items_that_is_none_is_told_as_the_others_are(count: float) -> None:
    made = Federation(ToyBundle(), load("fedavg"), run_record())
    with pytest.raises(RunError, match="expected a whole number from 1 to 4"):
        check_counts(made, "y", Message({}, {"samples": count}), 4)


@pytest.mark.parametrize("count", [1e12, 0.5, -1.0])
def test_numbers_of_items_of_a_class_are_whole_ones_too(count: float) -> None:
    made = Federation(ToyBundle(), load("fedavg"), run_record())
    counts = torch.tensor([3, 0, count], dtype=torch.float64)
    replies = [
        Message({"counts": {"0": torch.tensor(3), "2": counts[2]}}),
        Message({"prototypes": {"counts": counts, "means": torch.ones(3, 2)}}),
    ]
    for reply, key in zip(replies, ("counts/2", "prototypes/counts"), strict=True):
        with pytest.raises(
            RunError, match=f"site 'y': '{key}' gives a number of items that cannot be true"
        ):
            check_counts(made, "y", reply, 4)
    check_counts(made, "y", Message({"counts": {"0": torch.tensor(4.0), "1": torch.tensor(0)}}), 4)


def test_an_introduction_that_claims_more_items_is_left_out(tmp_path: Path) -> None:
    class Boasting(type(load("feddyn"))):
        def introduce(self, site):
            return Message({}, {"samples": 10.0**12 if site.name == "z" else site.num_samples})

    ran = run(tmp_path / "run", Boasting(), Workers, Tolerance(2), rounds=1)
    assert list(ran.summary["absent"]) == ["z"]


# Changes


@every_runtime
def test_a_change_that_is_far_beyond_the_others_is_refused(tmp_path: Path, workers: Any) -> None:
    ran = run(tmp_path / "bad", Faulty(spoil=moved(1e30)), workers, Tolerance(2), rounds=2)
    assert [list(entry.get("left_out", {})) for entry in ran.rounds] == [[], ["y"]]
    assert "its change of 'weights' has the norm" in ran.rounds[1]["left_out"]["y"]
    assert (
        max(float(t.abs().max()) for t in load_weights(ran.out / "weights.safetensors").values())
        < 1e3
    )
    with pytest.raises(RunError, match="^site 'y': its change of 'weights' has the norm"):
        run(tmp_path / "strict", Faulty(spoil=moved(1e30)), workers, rounds=2)


def test_the_middle_change_decides_and_a_thousand_times_it_is_the_limit() -> None:
    made = Federation(ToyBundle(), load("fedavg"), run_record())
    zero = {"weights": {"w": torch.full((4,), 7.0), "n": torch.tensor(3)}}

    def replies(*moves: float) -> dict[str, Message]:
        return {
            f"s{i}": Message(
                {"weights": {"w": torch.full((4,), 7.0 + by), "n": torch.tensor(10**9)}}
            )
            for i, by in enumerate(moves)
        }

    assert not far_replies(made, replies(1.0, 1.0, FARTHEST), zero)
    assert list(far_replies(made, replies(1.0, 1.0, 1.01 * FARTHEST), zero)) == ["s2"]
    assert list(far_replies(made, replies(1.0, 1e9, 1e30, 1.0, 2.0), zero)) == ["s1", "s2"]
    wide = {
        name: Message({"weights": {"w": t["weights"]["w"].double()}})
        for name, t in replies(1.0, 1.0, 1.0).items()
    }
    wide["s1"] = Message({"weights": {"w": torch.full((4,), -1.7e308, dtype=torch.float64)}})
    assert list(far_replies(made, wide, zero)) == ["s1"]
    assert not far_replies(
        made, replies(0.0, 0.0, 1.0), zero
    )  # the others have nothing left to learn
    assert not far_replies(made, replies(1.0, 1e30), zero)  # of two nobody can say which is wrong
    robust = Federation(ToyBundle(), load("fedavg"), run_record(aggregation="median"))
    assert not far_replies(robust, replies(1.0, 1.0, 1e30), zero)


def test_a_number_beside_the_weights_is_bounded_as_they_are() -> None:
    """FedNova divides a change by the site's steps: of 1e-300 steps it is as large as one likes."""
    made = Federation(ToyBundle(), load("fednova"), run_record(method="fednova"))
    steps = {"x": 4.0, "y": 4.0, "z": 4e6}
    replies = {
        name: Message({}, {"samples": 5, "effective_steps": count}) for name, count in steps.items()
    }
    assert list(far_replies(made, replies, {})) == ["z"]
    weights = {"weights": dict(made.networks.initial)}
    steps = {"x": 1e-300, "y": 4.0}
    replies = {
        name: Message(weights, {"samples": 5, "effective_steps": n}) for name, n in steps.items()
    }
    with pytest.raises(
        RunError, match="^site 'x': its reply says that its effective steps are 1e-300"
    ):
        made.method.aggregate(made.host(1), weights, replies, 2)


@pytest.mark.parametrize("rule", ["median", "trimmed:0.34"])
def test_what_bears_bad_replies_goes_on_bearing_them(tmp_path: Path, rule: str) -> None:
    both = lambda reply: claiming(1e12)(moved(1e6)(reply))  # noqa: E731
    ran = run(tmp_path / "bad", Faulty(spoil=both), aggregation=rule, rounds=2)
    assert "left_out" not in ran.rounds[1]
    assert (
        max(float(t.abs().max()) for t in load_weights(ran.out / "weights.safetensors").values())
        < 1e3
    )


# Shares


@every_runtime
def test_a_cap_bounds_a_site_s_weight(tmp_path: Path, workers: Any) -> None:
    """Sites x, y and z have 3, 5 and 4 items; with at most 0.4 of the weight y counts as 0.4 / 0.6 * 7 of them."""
    ran = run(tmp_path / "run", load("fedavg"), workers, rounds=1, max_share=0.4)
    told = ran.rounds[0]["observed"]
    assert {name: told[f"said/{name}"] for name in "xyz"} == {"x": 3 / 12, "y": 5 / 12, "z": 4 / 12}
    assert {name: told[f"share/{name}"] for name in "xyz"} == pytest.approx(
        {"x": 1.8 / 7, "y": 0.4, "z": 2.4 / 7}
    )
    plain = run(tmp_path / "plain", load("fedavg"), workers, rounds=1)
    assert ran.summary["weights_sha256"] != plain.summary["weights_sha256"]
    assert "observed" not in plain.rounds[0]
    loose = run(tmp_path / "loose", load("fedavg"), workers, rounds=1, max_share=0.5)
    assert loose.summary["weights_sha256"] == plain.summary["weights_sha256"]


@pytest.mark.parametrize(
    ("method", "settings", "other"),
    [
        (load("fedavg"), {"aggregation": "median"}, "--aggregation median"),
        (load("fedavg"), {"site_weights": "uniform"}, "--site-weights uniform"),
        (load("fedbn", weights="uniform"), {"method": "fedbn"}, "--set weights=uniform"),
    ],
)
def test_a_cap_where_sites_count_the_same_is_refused(
    method: Any, settings: dict[str, Any], other: str
) -> None:
    with pytest.raises(InputError) as caught:
        Federation(ToyBundle(), method, run_record(max_share=0.4, **settings))
    assert (
        str(caught.value)
        == f"--max-share 0.4 with {other}; sites count the same there; leave one of them out"
    )


@every_runtime
def test_across_machines_a_share_of_more_than_half_ends_the_run_and_names_the_site(
    tmp_path: Path, workers: Any
) -> None:
    """Site y has 5 of 12 items."""
    limit = Tolerance(max_share=0.41)
    with pytest.raises(InputError) as caught:
        run(tmp_path / "bad", load("fedper"), workers, tolerance=limit, rounds=1)
    assert str(caught.value) == (
        "round 1: site 'y' has 41.7% of the weight, 5 of 12 items; one of three or more sites has at most 41%; "
        "begin anew with --max-share 0.41 to count it for no more, or with --max-share 1 to allow it"
    )
    run(tmp_path / "capped", load("fedper"), workers, tolerance=limit, rounds=1, max_share=0.4)
    free = run(tmp_path / "free", load("fedper"), workers, tolerance=limit, rounds=1, max_share=1.0)
    plain = run(tmp_path / "plain", load("fedper"), workers, rounds=1)
    one, other = (bits(load_weights(ran.out / "weights.safetensors")) for ran in (free, plain))
    assert one == other


def test_two_sites_and_equal_weights_have_no_limit(tmp_path: Path) -> None:
    low = Tolerance(max_share=0.1)
    run(
        tmp_path / "uniform",
        load("fedbn", weights="uniform"),
        method="fedbn",
        rounds=1,
        tolerance=low,
    )
    run(tmp_path / "median", load("fedper"), rounds=1, tolerance=low, aggregation="median")
    few = run_record().partition
    two = type(few)(few.spec, few.seed, (), {name: few.sites[name] for name in ("x", "y")})
    run(tmp_path / "two", load("fedper"), rounds=1, tolerance=low, partition=two)
