"""The gate: what it refuses, how it clips, what noise it adds, and what it says is not covered."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from medfl.core.errors import RunError
from medfl.core.message import Message
from medfl.policy.gate import Gate, normal
from medfl.policy.policy import Outbound
from medfl.policy.privacy import Account
from tests.support.toy import bits

pytest.importorskip("dp_accounting")


def repeated(seed: int) -> Callable[[int], bytes]:
    """Entropy that is the same in each test run."""
    generator = torch.Generator().manual_seed(seed)
    return lambda count: (
        torch.randint(256, (count,), generator=generator, dtype=torch.uint8).numpy().tobytes()
    )


def gate(rules: Outbound, account: Account | None = None) -> Gate:
    return Gate(rules, account or Account(), "clinic", repeated(1))


BASE = {
    "a": torch.tensor([1.0, 2.0]),
    "b": torch.tensor([3.0]),
    "n": torch.tensor(7),
    "m.running_var": torch.ones(2),
}
DOWN = Message({"weights": BASE})


def moved(by: float = 3.0, **others: torch.Tensor) -> Message:
    """A reply whose change is (by, 0, 0), so that its norm is `by`."""
    weights = {**BASE, "a": torch.tensor([1.0 + by, 2.0]), "n": torch.tensor(9), **others}
    return Message({"weights": weights}, {"samples": 5})


def test_rules_that_do_not_touch_the_weights_leave_a_reply_as_it_is() -> None:
    reply = moved()
    out = gate(Outbound(keys=("weights", "scalars"), max_bytes=10**6)).reply(reply, DOWN, 5)
    assert out is reply


def test_what_is_not_among_the_keys_refuses_the_reply_and_is_named() -> None:
    with pytest.raises(
        RunError,
        match=r"^site 'clinic': its outbound policy refuses: 'scalars/samples' is not among",
    ):
        gate(Outbound(keys=("weights",))).reply(moved(), DOWN, 5)
    with pytest.raises(RunError, match=r"'weights/a' is not among its keys \(4 such\)"):
        gate(Outbound(keys=("scalars",))).reply(moved(), DOWN, 5)


def test_a_message_that_is_too_large_is_refused() -> None:
    message = moved()
    gate(Outbound(max_bytes=message.num_bytes)).check_size(message)
    with pytest.raises(
        RunError, match=f"its message has {message.num_bytes} bytes, more than max_bytes"
    ):
        gate(Outbound(max_bytes=message.num_bytes - 1)).check_size(message)


def test_a_change_is_scaled_down_to_the_clip_over_all_weights_together() -> None:
    """The change is (3, 0), (4,): norm 5; clipped to 1 it is (0.6, 0), (0.8,). The counter leaves as it came."""
    reply = moved(3.0, b=torch.tensor([7.0]))
    out = gate(Outbound(clip=1.0)).reply(reply, DOWN, 5)["weights"]
    assert torch.allclose(out["a"], torch.tensor([1.6, 2.0]))
    assert torch.allclose(out["b"], torch.tensor([3.8]))
    assert (out["n"], out["a"].dtype) == (torch.tensor(7), torch.float32)


def test_a_change_within_the_clip_is_not_changed_by_a_bit() -> None:
    """Of 0.3, and of 2 in the counter: within 3 together, and of the weights alone within 1."""
    reply = moved(0.3)
    assert bits(gate(Outbound(clip=3.0)).reply(reply, DOWN, 5)) == bits(reply)
    out = gate(Outbound(clip=1.0)).reply(reply, DOWN, 5)["weights"]
    assert bits({**out, "n": reply["weights"]["n"]}) == bits(dict(reply["weights"]))
    assert out["n"] == 7


def test_no_counter_carries_what_the_clip_holds_back() -> None:
    reply = Message(
        {"weights": {**moved(0.0).tensors["weights"], "n": torch.tensor(10**12)}}, {"samples": 5}
    )
    assert gate(Outbound(clip=1.0)).reply(reply, DOWN, 5)["weights"]["n"] == 7


def test_other_groups_are_neither_clipped_nor_noised() -> None:
    reply = Message({**moved().tensors, "prototypes": {"p": torch.ones(2)}}, {"samples": 5})
    out = gate(Outbound(clip=1.0, noise=1.0)).reply(reply, DOWN, 5)
    assert bits(out["prototypes"]) == bits(reply["prototypes"])


@pytest.mark.parametrize("rules", [{"clip": 1.0}, {"noise": 1.0}, {"clip": 1.0, "noise": 1.0}])
def test_a_reply_that_they_could_not_limit_is_refused(rules: dict[str, float]) -> None:
    """The entries of AsymFedAvg are a whole network; a reply of nothing may leave."""
    entries = Message({"entries": {"w[2]": torch.ones(2)}}, {"samples": 5})
    with pytest.raises(RunError, match="a reply without weights, which are what clip and noise"):
        gate(Outbound(**rules)).reply(entries, DOWN, 5)

    nothing = Message({}, {"samples": 5})
    assert gate(Outbound(**rules)).reply(nothing, DOWN, 5) == nothing
    assert gate(Outbound()).reply(entries, DOWN, 5) == entries


def test_noise_has_its_deviation_around_the_clipped_change() -> None:
    size = 40_000
    base = {"w": torch.full((size,), 5.0, dtype=torch.float64)}
    weights = base["w"].clone()
    weights[0] += 100
    reply = Message({"weights": {"w": weights}})
    out = gate(Outbound(clip=1.0, noise=0.5)).reply(reply, Message({"weights": base}), 5)[
        "weights"
    ]["w"]
    noise = (out - base["w"]).numpy()
    noise[0] -= 1.0  # the change, clipped
    assert kstest(noise / 0.5, "norm").pvalue > 0.01
    assert noise.std() == pytest.approx(0.5, rel=0.02)


def test_noise_leaves_counters_as_they_came_and_variances_above_zero() -> None:
    out = gate(Outbound(clip=1.0, noise=50.0)).reply(moved(), DOWN, 5)["weights"]
    assert out["n"] == 7
    assert bool((out["m.running_var"] >= 0).all())
    assert {name: tensor.dtype for name, tensor in out.items()} == {
        name: t.dtype for name, t in BASE.items()
    }


def test_noise_is_never_the_same_twice_unless_entropy_is_given() -> None:
    rules = Outbound(clip=1.0, noise=1.0)
    one, other = (
        Gate(rules, Account(), "x").reply(moved(), DOWN, 5)["weights"]["a"] for _ in range(2)
    )
    assert not torch.equal(one, other)
    assert not np.array_equal(normal(3), normal(3))
    torch.manual_seed(0)
    first = normal(3)
    torch.manual_seed(0)
    assert not np.array_equal(first, normal(3))


def test_normal_numbers_are_finite_at_the_ends_of_the_uniform_ones() -> None:
    assert np.isfinite(normal(1, lambda count: b"\x00" * count)).all()
    assert np.isfinite(normal(1, lambda count: b"\xff" * count)).all()
    assert normal(1, lambda count: b"\x00" * count)[0] == pytest.approx(
        -normal(1, lambda count: b"\xff" * count)[0]
    )


@pytest.mark.parametrize(
    "rules", [Outbound(clip=1.0), Outbound(clip=1.0, noise=1.0), Outbound(noise=1.0)]
)
def test_weights_without_a_counterpart_cannot_be_limited(rules: Outbound) -> None:
    with pytest.raises(RunError, match="'weights/a' has no counterpart in what was received"):
        gate(rules).reply(moved(), Message(), 5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rules", [Outbound(clip=1.0), Outbound(clip=1.0, noise=1.0)])
def test_a_change_without_a_length_cannot_be_limited(rules: Outbound, value: float) -> None:
    with pytest.raises(RunError, match="NaN or infinite numbers"):
        gate(rules).reply(moved(b=torch.tensor([value])), DOWN, 5)


def test_the_number_of_training_images_is_covered_and_other_numbers_are_not() -> None:
    rules = Outbound(clip=1.0, noise=4.0)
    for scalars, named in (
        ({"samples": 5.0}, ""),
        ({"samples": 6.0}, "scalars/samples"),
        ({"tau": 2.0}, "scalars/tau"),
    ):
        found = gate(rules)
        reply = Message({"weights": BASE}, scalars)
        found.charge_noised_reply()
        found.charge_without_noise(found.reply(reply, DOWN, 5), 5)
        assert found.account.words().endswith(named or "(the number of images is sent exactly)")
        assert math.isfinite(found.account.epsilon()) == (not named)


def test_without_noise_the_words_are_no_formal_privacy() -> None:
    for rules in (Outbound(clip=1.0), Outbound(noise=1.0), Outbound(keys=("weights", "scalars"))):
        found = gate(rules)
        found.charge_without_noise(moved(), 5)
        assert (
            found.account.words()
            == "1 reply: no formal privacy, for replies left without clipping and noise"
        )


def test_a_budget_refuses_the_round_that_would_go_beyond_it() -> None:
    free = gate(Outbound(clip=1.0, noise=8.0))
    for _ in range(3):
        free.charge_noised_reply()
    budget = free.account.epsilon() + 1e-6
    found = gate(Outbound(clip=1.0, noise=8.0, epsilon=budget))
    for _ in range(3):
        found.charge_noised_reply()
        found.charge_without_noise(moved(), 5)
    with pytest.raises(
        RunError,
        match=r"the budget is epsilon .* another reply would make it .* \(3 replies: epsilon",
    ):
        found.charge_noised_reply()
    assert found.account.replies == 3


def test_a_round_is_on_the_account_before_it_is_known_how_it_ends() -> None:
    found = gate(Outbound(clip=1.0, noise=8.0))
    found.charge_noised_reply()
    assert found.account.replies == 1
    found.charge_without_noise(moved(), 5)
    assert found.account.replies == 1


def test_with_a_budget_nothing_leaves_that_noise_does_not_cover() -> None:
    found = gate(Outbound(clip=1.0, noise=8.0, epsilon=50.0))
    with pytest.raises(
        RunError, match="'scalars/tau' would leave without noise, and epsilon is a budget for all"
    ):
        found.reply(Message({"weights": BASE}, {"tau": 1.0}), DOWN, 5)
    with pytest.raises(
        RunError, match=r"'scalars/classes \(introduction\)' would leave without noise"
    ):
        found.charge_introduction(Message({}, {"classes": 3}), from_images=True)
    with pytest.raises(RunError, match="'metrics/train/accuracy' would leave without noise"):
        found.charge_numbers("metrics", ["train/accuracy"], from_images=True)
    found.charge_introduction(Message(), from_images=True)
    found.charge_numbers("metrics", ["validate/accuracy"], from_images=False)
    assert found.account.epsilon() == 0


def test_the_training_loss_stays_where_noise_is_and_where_keys_do_not_name_it() -> None:
    told = {"train_loss": 0.5, "steps": 3}
    assert gate(Outbound(max_bytes=1)).allowed_numbers(told, "train_loss") == told
    assert gate(Outbound(keys=("told/train_loss",))).allowed_numbers(told, "train_loss") == told
    for rules in (Outbound(keys=("weights",)), Outbound(clip=1.0, noise=1.0)):
        assert gate(rules).allowed_numbers(told, "train_loss") == {"steps": 3}
        assert gate(rules).allowed_numbers({**told, "labels": [1]}, "labels", "channels") == told


@pytest.mark.parametrize(("base", "change"), [(2.0**53, 1.5), (2.0**54, 2.5), (-(2.0**53), -1.5)])
def test_large_numbers_of_a_server_do_not_round_a_change_before_it_has_its_noise(
    base: float, change: float
) -> None:
    """Rounded up first, it would move by more than the clip; by NumPy, of two numbers side by side."""
    seed = next(s for s in range(9) if normal(1, repeated(s))[0] * change < 0)
    drawn = float(normal(1, repeated(seed))[0])
    rules = Outbound(clip=abs(change), noise=0.6 / abs(drawn))
    weights = torch.tensor([base], dtype=torch.float64)
    down = Message({"weights": {"a": weights}})
    moved_by = Message({"weights": {"a": weights + change}})  # rounded up, so clipped to the change
    left = Gate(rules, Account(), "clinic", repeated(seed)).reply(moved_by, down, 5)
    assert float(left["weights"]["a"][0]) == np.float64(base) + np.float64(
        change - np.sign(change) * 0.6
    )
    assert float(left["weights"]["a"][0]) == base
