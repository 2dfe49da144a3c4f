"""Robust aggregation: against SciPy and NumPy, and what a poisoned reply can and cannot move."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import trim_mean
from torch import Tensor

from medfl.core.errors import InputError, RunError
from medfl.core.message import Message, Weights
from medfl.methods.base import sample_shares, uniform_shares, weighted_mean
from medfl.runtimes import spilled_replies
from medfl.runtimes.server import robust
from medfl.runtimes.server.robust import Aggregation, cap_counts
from medfl.runtimes.spilled_replies import Replies
from tests.support.toy import bits

ALIKE = ("median", "trimmed:0.2", "trimmed:0.4", "krum:2", "multikrum:2")
CLIPPED = ("clip:0.3", "clip:auto")
every_rule = pytest.mark.parametrize("rule", ALIKE + CLIPPED)


def replies(
    count: int = 9, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Message]:
    """Sites near to each other, with a matrix, a scalar, an empty tensor and a counter."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    made = {}
    for i in range(count):
        weights = {
            "w": (centre + 0.1 * torch.randn(4, 3, generator=generator, dtype=torch.float64)).to(
                dtype
            ),
            "b": torch.randn((), generator=generator, dtype=torch.float64).to(dtype),
            "none": torch.zeros(0, 2, dtype=dtype),
            "batches": torch.tensor(10 + i),
        }
        made[f"s{i}"] = Message({"weights": weights}, {"samples": 5.0 * (i + 1)})
    return made


def combined(
    rule: str, given: Mapping[str, Message], before: Weights | None = None
) -> dict[str, Tensor]:
    """Apply a rule to changes from `before`, or from 0."""
    before = before or {
        name: torch.zeros_like(tensor) for name, tensor in given[min(given)]["weights"].items()
    }
    return Aggregation.parse(rule).combined(given, before)


def stacked(given: Mapping[str, Message], name: str) -> np.ndarray:
    return np.stack([message["weights"][name].double().numpy() for message in given.values()])


# What is computed


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 10])
def test_the_median_is_numpys(count: int) -> None:
    given = replies(count, torch.float64)
    found = combined("median", given)
    for name in ("w", "b"):
        np.testing.assert_array_equal(found[name].numpy(), np.median(stacked(given, name), axis=0))


@pytest.mark.parametrize("count", [1, 4, 5, 10])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.2, 0.25, 0.4])
def test_the_trimmed_mean_is_scipys(count: int, fraction: float) -> None:
    given = replies(count, torch.float64)
    found = combined(f"trimmed:{fraction}", given)
    for name in ("w", "b"):
        np.testing.assert_allclose(
            found[name].numpy(), trim_mean(stacked(given, name), fraction, 0), rtol=1e-14
        )


def test_a_fraction_is_taken_as_it_is_written() -> None:
    """0.29 of 100 are 29, although 0.29 * 100 is 28.999…: the 29 that are far out at each end are gone."""
    values = [-1e6] * 29 + [1.0] * 42 + [1e6] * 29
    given = {
        f"{i:03d}": Message({"weights": {"w": torch.tensor([v])}}) for i, v in enumerate(values)
    }
    assert combined("trimmed:0.29", given)["w"].item() == 1.0


def by_hand(given: Mapping[str, Message], bad: int) -> list[str]:
    """Sites by Krum's score, each distance written out."""
    flat = {
        n: np.concatenate([m["weights"][k].double().numpy().ravel() for k in ("w", "b")])
        for n, m in given.items()
    }
    scores = {}
    for name, own in flat.items():
        distances = sorted(
            ((own - other) ** 2).sum() for site, other in flat.items() if site != name
        )
        scores[name] = sum(distances[: len(flat) - bad - 2])
    return sorted(scores, key=scores.__getitem__)


@pytest.mark.parametrize(("count", "bad"), [(3, 0), (5, 1), (9, 2), (9, 3), (12, 1)])
def test_krum_chooses_the_reply_nearest_to_its_neighbours(count: int, bad: int) -> None:
    given = replies(count)
    order = by_hand(given, bad)
    assert bits(combined(f"krum:{bad}", given)) == bits(given[order[0]]["weights"])
    chosen = {name: given[name] for name in order[: count - bad - 2]}
    assert bits(combined(f"multikrum:{bad}", given)) == bits(
        weighted_mean(chosen, "weights", uniform_shares(chosen))
    )


def test_of_equal_replies_krum_chooses_the_first_by_name() -> None:
    weights = [{"w": torch.ones(2), "mark": torch.tensor(i)} for i in range(5)]
    given = {f"s{i}": Message({"weights": weights[i]}) for i in (3, 1, 4, 0, 2)}
    assert combined("krum:1", given)["mark"] == 0


def test_nothing_trimmed_from_sites_of_equal_size_is_fedavgs_mean() -> None:
    given = {
        name: Message(message.tensors, {"samples": 7})
        for name, message in replies(dtype=torch.float64).items()
    }
    found, mean = (
        combined("trimmed:0", given),
        weighted_mean(given, "weights", sample_shares(given)),
    )
    for name in ("w", "b", "none"):
        torch.testing.assert_close(found[name], mean[name], rtol=1e-14, atol=1e-15)


def test_a_counter_takes_the_middle_value() -> None:
    given = replies()
    given["s0"] = Message(
        {"weights": {**given["s0"]["weights"], "batches": torch.tensor(2**62)}}, {}
    )
    for rule in ("median", "trimmed:0.2"):
        assert combined(rule, given)["batches"] == 15, "of 11 to 18 and 2**62"


def changed(
    moves: Mapping[str, tuple[float, ...]], samples: Mapping[str, int]
) -> dict[str, Message]:
    """Replies whose one tensor was (1, 1) before."""
    return {
        name: Message(
            {"weights": {"w": 1 + torch.tensor(move, dtype=torch.float64)}},
            {"samples": samples[name]},
        )
        for name, move in moves.items()
    }


BEFORE = {"w": torch.ones(2).double()}


def test_long_changes_are_shortened_and_weigh_as_before() -> None:
    """a: 1 image, change (3, 4) of norm 5, at most 2.5: (1.5, 2); b: 3 images, (0, -2), as it is.

    1 + (1.5, 2) / 4 + 3 (0, -2) / 4 = (1.375, 0). The middle norm is 3.5: (2.1, 2.8), and 1 + (0.525, 0.7 - 1.5).
    """
    given = changed({"a": (3.0, 4.0), "b": (0.0, -2.0)}, {"a": 1, "b": 3})
    expected = {"clip:2.5": (1.375, 0.0), "clip:auto": (1.525, 0.2), "clip:5": (1.75, 0.5)}
    for rule, weights in expected.items():
        torch.testing.assert_close(
            combined(rule, given, BEFORE)["w"],
            torch.tensor(weights, dtype=torch.float64),
            rtol=0,
            atol=1e-15,
        )
    told = Aggregation.parse("clip:auto").observed(given, BEFORE)
    assert told == {"clip": 3.5, "norm/a": 5.0, "norm/b": 2.0, "share/a": 0.25, "share/b": 0.75}
    assert not Aggregation.parse("median").observed(given, BEFORE)


@pytest.mark.parametrize(
    ("counts", "most", "expected"),
    [
        ((1.0, 2.0, 3.0), 0.5, (1.0, 2.0, 3.0)),  # nobody is above
        ((1.0, 2.0, 7.0), 0.5, (1.0, 2.0, 3.0)),  # 3 of 6
        ((1.0, 1.0, 1e12), 0.5, (1.0, 1.0, 2.0)),
        ((1.0, 9.0, 9.0, 2.0), 0.4, (1.0, 6.0, 6.0, 2.0)),  # two of them: 6 of 15
        (
            (1.0, 3.2, 9.0),
            0.4,
            (1.0, 2.0, 2.0),
        ),  # the second is above only once the first is shortened
        ((4.0, 1.0), 0.5, (1.0, 1.0)),
        ((1.0, 2.0, 4.0), 0.3, (1.0, 1.0, 1.0)),  # of three nobody can have less than a third
        ((5.0,), 0.5, (1.0,)),
    ],
)
def test_a_cap_on_shares(
    counts: tuple[float, ...], most: float, expected: tuple[float, ...]
) -> None:
    names = "abcd"[: len(counts)]
    assert cap_counts(dict(zip(names, counts, strict=True)), most) == pytest.approx(
        dict(zip(names, expected, strict=True))
    )


def test_a_bound_that_nobody_reaches_is_fedavg_bit_for_bit() -> None:
    given = replies()
    assert bits(combined("clip:1e6", given)) == bits(
        weighted_mean(given, "weights", sample_shares(given))
    )


@pytest.mark.parametrize("rule", CLIPPED)
def test_no_counter_carries_what_a_bound_holds_back(rule: str) -> None:
    """Norms are of floating tensors: also where each is 0, one site's whole numbers count no more than the others'."""
    before = {"w": torch.zeros(2), "n": torch.tensor(5)}
    given = {
        name: Message(
            {"weights": {"w": torch.zeros(2), "n": torch.tensor(count)}}, {"samples": samples}
        )
        for name, count, samples in (("a", 10**12, 9.0), ("b", 6, 1.0), ("c", 7, 1.0))
    }
    assert combined(rule, given, before)["n"] == 7


def test_where_most_sites_stand_still_none_moves_the_mean() -> None:
    given = changed({"a": (0.0, 0.0), "b": (0.0, 0.0), "c": (1e9, 0.0)}, {"a": 1, "b": 1, "c": 100})
    torch.testing.assert_close(
        combined("clip:auto", given, BEFORE)["w"], BEFORE["w"], rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("size", [1e3, 1e30, 1e300])
def test_a_bad_site_moves_a_clipped_mean_by_its_share_of_the_bound(size: float) -> None:
    moves = {"a": (1.0, 0.0), "b": (0.0, 1.0), "c": (0.6, 0.8)}
    samples = dict.fromkeys(moves, 10)
    honest = combined("clip:auto", changed(moves, samples), BEFORE)["w"]
    spoilt = combined("clip:auto", changed({**moves, "c": (-size, size)}, samples), BEFORE)["w"]
    assert (spoilt - honest).norm() <= 2 * 1.0 / 3 + 1e-12


# What must not matter


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_forms_stay_and_the_order_of_replies_is_of_no_matter(rule: str, dtype: torch.dtype) -> None:
    given = replies(dtype=dtype)
    found = combined(rule, given)
    assert {k: (t.shape, t.dtype) for k, t in found.items()} == {
        k: (t.shape, t.dtype) for k, t in given["s0"]["weights"].items()
    }
    for names in (reversed(given), sorted(given, key=lambda name: hash(name))):
        assert bits(combined(rule, {name: given[name] for name in names})) == bits(found)


@every_rule
def test_neither_blocks_nor_the_disk_change_a_bit(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = replies()
    plain = combined(rule, given)
    monkeypatch.setattr(robust, "_BLOCK", 9 * 5)  # of 12 numbers 5, 5 and 2
    monkeypatch.setattr(spilled_replies, "BUDGET", 0)
    filed = Replies(list(given), tmp_path)
    for name, message in given.items():
        filed.add(name, message)
    for what in (given, filed):
        found = combined(rule, what)
        for name, tensor in plain.items():
            if "krum" in rule:
                assert bits(found[name]) == bits(tensor)
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_of_a_reply_on_disk_only_a_block_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from medfl.runtimes.spilled_replies import TensorStore

    monkeypatch.setattr(spilled_replies, "BUDGET", 0)
    filed, read, part = Replies(["a", "b", "c"], tmp_path), [], TensorStore.part
    for name in ("a", "b", "c"):
        filed.add(name, Message({"weights": {"w": torch.randn(100)}}))

    def counted(stock: TensorStore, place: object, start: int, stop: int) -> Tensor:
        read.append(stop - start)
        return part(stock, place, start, stop)

    monkeypatch.setattr(TensorStore, "part", counted)
    monkeypatch.setattr(robust, "_BLOCK", 30)
    combined("median", filed, {"w": torch.zeros(100)})
    assert sorted(read) == [10] * 30 + [100], "once whole, for its form"


# What a bad site can do


def poisoned(kind: str, count: int) -> dict[str, Message]:
    """The first `count` of nine sites send something far away, with as many samples as they like."""
    given = replies()
    for i in range(count):
        weights = dict(given[f"s{i}"]["weights"])
        weights |= {
            name: tensor * (1000 if kind == "x1000" else -1) for name, tensor in weights.items()
        }
        given[f"s{i}"] = Message({"weights": weights}, {"samples": 1e9})
    return given


@pytest.mark.parametrize("kind", ["x1000", "sign"])
@pytest.mark.parametrize(
    ("rule", "count"),
    [("median", 4), ("trimmed:0.2", 1), ("trimmed:0.4", 3), ("krum:2", 2), ("multikrum:2", 2)],
)
def test_bad_sites_do_not_move_it_out_of_the_good_ones(rule: str, count: int, kind: str) -> None:
    """Every coordinate stays between the smallest and the largest value of the good sites."""
    given = poisoned(kind, count)
    good = stacked({name: given[name] for name in list(given)[count:]}, "w")
    found = combined(rule, given)["w"].numpy()
    assert (found >= good.min(0)).all()
    assert (found <= good.max(0)).all()


@pytest.mark.parametrize("kind", ["x1000", "sign"])
def test_one_bad_site_moves_the_mean_as_far_as_it_likes(kind: str) -> None:
    given = poisoned(kind, 1)
    mean = weighted_mean(given, "weights", sample_shares(given))["w"]
    bad, good = given["s0"]["weights"]["w"], replies()["s0"]["weights"]["w"]
    assert (mean - bad).norm() < 0.01 * (mean - good).norm()


# What is asked for


@pytest.mark.parametrize(
    "text",
    [
        "mean",
        "clip:auto",
        "clip:2.5",
        "median",
        "trimmed:0.0",
        "trimmed:0.25",
        "krum:0",
        "krum:12",
        "multikrum:1",
    ],
)
def test_a_rule_reads_what_it_writes(text: str) -> None:
    assert str(Aggregation.parse(text)) == text


def test_a_fraction_is_written_in_one_way() -> None:
    assert str(Aggregation.parse("trimmed:2e-1")) == "trimmed:0.2"
    assert str(Aggregation.parse("krum:03")) == "krum:3"
    assert str(Aggregation.parse("clip:1")) == "clip:1.0"


@pytest.mark.parametrize(
    "text",
    ["average", "mean:1", "median:", "trimmed", "trimmed:", "trimmed:x", "trimmed:0.5", "trimmed:-0.1",
     "trimmed:nan", "krum", "krum:", "krum:-1", "krum:1.5", "krum:²", "multikrum:x",
     "clip", "clip:", "clip:0", "clip:-1", "clip:nan", "clip:inf", "clip:x"],
)  # fmt: skip
def test_another_rule_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=f"^--aggregation {text}"):
        Aggregation.parse(text)


@pytest.mark.parametrize("kind", ["krum", "multikrum"])
def test_krum_needs_two_f_and_three_replies(kind: str) -> None:
    rule = Aggregation.parse(f"{kind}:2")
    assert rule.least == 7
    combined(str(rule), replies(7))
    with pytest.raises(
        RunError, match=rf"--aggregation {kind}:2 with 6 replies: it needs at least 7"
    ):
        combined(str(rule), replies(6))
