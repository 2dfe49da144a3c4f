"""Smaller messages: what is lost, what is not, how many bytes cross, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from medfl.core.compression import Compression
from medfl.core.errors import InputError, RunError
from medfl.core.message import Message
from tests.support.toy import bits

EXACT = frozenset({"norm.weight", "norm.running_var", "embeddings"})
SMALLER = ("float16", "bfloat16", "int8", "topk:0.1")
every_form = pytest.mark.parametrize("form", SMALLER)


def of(form: str) -> Compression:
    made = Compression.parse(form)
    return Compression(
        made.kind,
        made.fraction,
        EXACT,
        frozenset({"weights", "control", "header", "prototypes", "scores"}),
    )


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def network(seed: int = 0, scale: float = 1.0) -> dict[str, Tensor]:
    """Two kernels, one of 200 rows of 9 numbers, and everything that goes as it is."""
    return {
        "conv.weight": scale * draw(8, 16, 3, 3, seed=seed),
        "depthwise.weight": scale * draw(200, 1, 3, 3, seed=seed + 50),
        "conv.bias": draw(8, seed=seed),
        "norm.weight": draw(100, seed=seed),
        "norm.running_var": draw(100, seed=seed).abs(),
        "norm.num_batches_tracked": torch.tensor(seed),
        "embeddings": draw(4, 64, seed=seed),
        "half": draw(9, 9, seed=seed).half(),
        "table": torch.arange(100),
    }


def weights(named: dict[str, Tensor], **groups: dict[str, Tensor]) -> Message:
    return Message({"weights": named, **groups}, {"samples": 7})


def crossed(
    form: str,
    message: Message,
    base: dict[str, Tensor],
    seed: int = 0,
    unsent: dict[str, Tensor] | None = None,
) -> tuple[Message, dict[str, Tensor]]:
    """Return a reply as the server has it, by way of its bytes, and the error feedback."""
    wire, rest = of(form).reply(message, weights(base), seed, unsent or {})
    return of(form).decompress_reply(
        Message.decode(wire.encode()), weights(base), "site 'x'"
    ), dict(rest)


# What is asked for


@pytest.mark.parametrize(
    ("text", "canonical"),
    [("lossless", "lossless"), ("int8", "int8"), ("bfloat16", "bfloat16"), ("topk:0.01", "topk:0.01"),
     ("topk:1e-2", "topk:0.01"), ("topk:.5", "topk:0.5")],
)  # fmt: skip
def test_what_is_asked_for_has_one_spelling(text: str, canonical: str) -> None:
    made = Compression.parse(text)
    assert str(made) == canonical
    assert Compression.parse(canonical) == made


@pytest.mark.parametrize("text", ["", "int4", "int8:2", "topk", "float16:", "INT8"])
def test_an_unknown_form_is_refused(text: str) -> None:
    with pytest.raises(
        InputError,
        match=rf"^--messages ?{text}; lossless, float16, bfloat16, int8 or topk:FRACTION",
    ):
        Compression.parse(text)


@pytest.mark.parametrize(
    "text", ["topk:", "topk:0", "topk:-0.1", "topk:0.51", "topk:nan", "topk:x", "topk:1:2"]
)
def test_a_fraction_that_saves_nothing_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=f"--messages {text}; a fraction above 0 and at most 0.5"):
        Compression.parse(text)


def test_lossless_hands_on_the_very_message() -> None:
    form, message, unsent = Compression(), weights(network()), {}
    wire, rest = form.reply(message, message, 0, unsent)
    assert wire is message
    assert rest is unsent
    assert form.decompress_reply(message, message, "x") is form.broadcast(message, 0) is message
    assert form.decompress_broadcast(message) is message


# What goes as it is


@every_form
@pytest.mark.parametrize("up", [True, False])
def test_what_is_small_exact_or_no_float_is_untouched_and_forms_stay(form: str, up: bool) -> None:
    sent, base = (
        weights(network(1), odd={"large": draw(500)}, counts={"0": torch.arange(99)}),
        network(2),
    )
    if up:
        received, _ = crossed(form, sent, base)
    else:
        wire = of(form).broadcast(sent, 0)
        received = of(form).decompress_broadcast(Message.decode(wire.encode()))
    assert received.scalars == sent.scalars
    flat, wanted = received.flat(), sent.flat()
    assert flat.keys() == wanted.keys()
    assert all((t.shape, t.dtype) == (wanted[n].shape, wanted[n].dtype) for n, t in flat.items())
    touched = {name for name in flat if bits(flat[name]) != bits(wanted[name])}
    expected = {"weights/conv.weight", "weights/depthwise.weight"}
    assert touched == (set() if form.startswith("topk") and not up else expected)


@pytest.mark.parametrize("form", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("group", ["control", "header", "prototypes", "scores"])
def test_groups_that_are_no_weights_are_made_smaller_one_by_one(form: str, group: str) -> None:
    value = draw(64)
    message = Message({group: {"0": value, "1": draw(63)}})
    received, _ = crossed(form, message, network())
    assert bits(received[group]["1"]) == bits(message[group]["1"])
    assert bits(received[group]["0"]) != bits(value)
    torch.testing.assert_close(
        received[group]["0"], value, rtol=0, atol=float(value.abs().max()) / 120
    )


# Half precision


@pytest.mark.parametrize(("form", "unit"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_half_precision_rounds_to_nearest(form: str, unit: float) -> None:
    """With p significant bits (11 and 8) the relative error is at most 2^-p; 1 + 2^-p lies halfway and becomes 1."""
    values = draw(1000, 4)
    values[0] = torch.tensor([1 + 2 * unit, 1 + unit, 1 + 1.01 * unit, -3.0])
    wire = of(form).broadcast(weights({"w": values}), 0)
    received = of(form).decompress_broadcast(wire)["weights"]["w"]
    assert received[0].tolist() == [1 + 2 * unit, 1.0, 1 + 2 * unit, -3.0]
    assert ((received - values).abs() <= unit * values.abs()).all()
    assert ((received - values).abs() > unit / 4 * values.abs()).any()


@pytest.mark.parametrize(
    ("form", "limit"), [("float16", 65504.0), ("bfloat16", 3.3895313892515355e38)]
)
def test_numbers_beyond_half_precision_go_as_they_are(form: str, limit: float) -> None:
    inside, beyond = torch.full((8, 8), -limit), torch.full((8, 8), limit * 1.002)
    wire = of(form).broadcast(weights({"inside": inside, "beyond": beyond}), 0)
    assert set(wire["weights"]) == {"beyond"}
    received = of(form).decompress_broadcast(wire)["weights"]
    assert bits(received) == bits({"beyond": beyond, "inside": inside})


@pytest.mark.parametrize("form", ["float16", "bfloat16", "int8"])
def test_the_server_adds_the_change_to_what_it_sent(form: str) -> None:
    """w = 1000.3 reaches the site as v (1000.5 in float16); it trains to v + 2^-6, and the server has w + 2^-6.

    Of 2^-6 nothing is lost in any form. Sent whole, v + 2^-6 would become v again in half precision, and so on forever.
    """
    w = {"w": torch.full((8, 8), 1000.3)}
    v = of(form).decompress_broadcast(of(form).broadcast(weights(w), 3))
    assert (
        form == "int8"
        or v["weights"]["w"][0, 0].item() == {"float16": 1000.5, "bfloat16": 1000.0}[form]
    )
    step = 2.0**-6
    trained = weights({"w": v["weights"]["w"] + step})
    wire, _ = of(form).reply(trained, v, 5, {})
    received = of(form).decompress_reply(wire, weights(w), "x")["weights"]["w"]
    torch.testing.assert_close(received, w["w"] + step, rtol=0, atol=2e-4)


# 8 bits


def test_eight_bits_by_hand() -> None:
    """Two rows of 64; row 1: max 254, s = 2, so even numbers are exact and 3 becomes 2 or 4; row 2: s = 2^-7."""
    rows = torch.zeros(2, 64)
    rows[0, :5] = torch.tensor([254.0, -254.0, 2.0, 3.0, -3.0])
    rows[1, :3] = torch.tensor([-127 / 128, 0.5, 1 / 128])
    wire = of("int8").broadcast(weights({"w": rows}), 0)
    assert wire["weights@scales@float32"]["scales"].tolist() == [2.0, 1 / 128]
    assert wire["weights@int8@float32"]["w"][0, :3].tolist() == [127, -127, 1]
    assert wire["weights@int8@float32"]["w"][1, :4].tolist() == [-127, 64, 1, 0]
    seen = set()
    for seed in range(40):
        received = of("int8").decompress_broadcast(
            of("int8").broadcast(weights({"w": rows}), seed)
        )["weights"]["w"]
        seen.add(tuple(received[0, 3:5].tolist()))
        received[0, 3:5] = rows[0, 3:5]
        assert torch.equal(received, rows)
    assert seen == {(2.0, -2.0), (2.0, -4.0), (4.0, -2.0), (4.0, -4.0)}


def test_short_rows_share_one_scale() -> None:
    wire = of("int8").broadcast(weights(network()), 0)
    assert (
        len(wire["weights@scales@float32"]["scales"]) == 8 + 1
    )  # conv's 8 rows of 144; depthwise's 200 rows of 9


def test_rounding_to_eight_bits_is_unbiased_and_less_than_a_step_off() -> None:
    """q is one of two neighbours, its variance at most s^2 / 4: the mean of n draws has an sd below s / (2 sqrt n).

    In 1,000 numbers five such deviations are not exceeded; the mean over all of them is closer still.
    """
    value, n = draw(10, 100), 2000
    scale = value.abs().amax(1, keepdim=True) / 127
    total = torch.zeros_like(value, dtype=torch.float64)
    for seed in range(n):
        received = of("int8").decompress_broadcast(
            of("int8").broadcast(weights({"w": value}), seed)
        )["weights"]["w"]
        assert ((received - value).abs() <= scale * 1.0001).all()
        total += received.double()
    error = (total / n - value) / (scale / (2 * n**0.5))
    assert error.abs().max() < 5
    assert abs(error.mean()) < 5 / 1000**0.5
    assert error.abs().mean() > 0.2  # it does round


def test_rounding_depends_on_the_seed_alone() -> None:
    named, proto = network(), {"prototypes": {str(i): draw(70, seed=i) for i in range(3)}}
    left = of("int8").broadcast(weights(named, **proto), 4)
    turned = Message(
        {
            "prototypes": dict(reversed(proto["prototypes"].items())),
            "weights": dict(reversed(named.items())),
        }
    )
    right = of("int8").broadcast(turned, 4)
    assert bits(left.tensors) == bits(right.tensors)
    assert bits(of("int8").broadcast(weights(named), 5).tensors) != bits(
        of("int8").broadcast(weights(named), 4).tensors
    )


def test_extremes_neither_wrap_nor_become_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 max / (max / 127) reaches 127.00001, which rounds up to 128 where u is 0; int8 would hold -128.

    Rows of zeros, and rows too small for a scale, become zero.
    """
    monkeypatch.setattr(
        torch, "rand", lambda shape, *, generator, dtype: torch.zeros(shape, dtype=dtype)
    )
    values = torch.cat([draw(2000, 64).abs() + 1, torch.zeros(1, 64), torch.full((1, 64), 1e-44)])
    assert (values.amax(1) / (values.amax(1) / 127) > 127).any()
    received = of("int8").decompress_broadcast(of("int8").broadcast(weights({"w": values}), 0))[
        "weights"
    ]["w"]
    assert torch.equal(received[-2:], torch.zeros(2, 64))
    torch.testing.assert_close(received[:-2].amax(1), values[:-2].amax(1))
    assert (received[:-2] > 0).all()


# Bytes


def test_bytes_of_encoded_messages() -> None:
    """100 rows of 1,000 numbers: 400,000 bytes become 200,000; 100,000 with 400 of scales; 1,000 entries of 8.

    A header of some hundred bytes is added.
    """
    message, base = weights({"w": draw(100, 1000)}), weights({"w": draw(100, 1000, seed=1)})
    content = {"float16": 200_000, "bfloat16": 200_000, "int8": 100_400, "topk:0.01": 8_000}
    for form, expected in content.items():
        wire, _ = of(form).reply(message, base, 0, {})
        assert len(wire.encode()) == wire.num_bytes
        assert expected < wire.num_bytes < expected + 400
        down = of(form).broadcast(message, 0).num_bytes
        assert down == (message.num_bytes if form.startswith("topk") else wire.num_bytes)


# The largest changes, and error feedback


def test_the_largest_changes_by_hand() -> None:
    """128 numbers in two tensors, a sixteenth leaves: the 8 largest |a| of both together.

    Round 1: changes 1, ..., 40 in a and -0.5, ..., -20 in b, else 0: 33, ..., 40 of a leave, the others are kept as e.
    Round 2: the same changes again make a + e = 2, ..., 64 there, 33, ..., 40 where they left, and -1, ..., -40 in b:
    2 * 25, ..., 2 * 32 leave.
    """
    ramp = torch.cat([torch.arange(1.0, 41.0), torch.zeros(24)]).reshape(4, 16)
    form, step = Compression("topk", 8 / 128), {"b": -ramp / 2, "a": ramp}
    base = {name: torch.full((4, 16), 100.0) for name in step}
    trained = weights({name: base[name] + value for name, value in step.items()})
    wire, unsent = form.reply(trained, weights(base), 0, {})
    sent = wire["weights@topk@float32"]
    assert sent["indices"].dtype == torch.int32
    assert sent["indices"].tolist() == list(range(32, 40))
    assert sent["values"].tolist() == list(range(33, 41))
    received = form.decompress_reply(wire, weights(base), "x")["weights"]
    assert received["a"].flatten()[30:42].tolist() == [100.0, 100.0, *range(133, 141), 100.0, 100.0]
    assert torch.equal(received["b"], base["b"])
    assert unsent["a"].flatten()[30:42].tolist() == [31, 32] + [0] * 10
    assert torch.equal(unsent["b"], step["b"])
    wire, unsent = form.reply(trained, weights(base), 0, unsent)
    sent = wire["weights@topk@float32"]
    assert sent["indices"].tolist() == list(range(24, 32))
    assert sent["values"].tolist() == list(range(50, 66, 2))
    assert unsent["a"].flatten()[22:34].tolist() == [46, 48] + [0] * 8 + [33, 34]


def test_what_was_sent_and_what_is_kept_add_up_to_all_changes() -> None:
    """Sum over rounds of (2): a_t = d_t + e_t, e_(t+1) = a_t - sent_t, so sum sent + e_T = sum d + e_0, exactly.

    The changes are multiples of 2^-10 in float64, so that no sum of theirs is rounded.
    """
    form, unsent = Compression("topk", 0.05), {}
    base = {
        "a": torch.zeros(10, 20, dtype=torch.float64),
        "b": torch.zeros(100, dtype=torch.float64),
    }
    true, sent = ({name: torch.zeros_like(value) for name, value in base.items()} for _ in range(2))
    for round_ in range(12):
        change = {
            n: (draw(*v.shape, seed=round_, dtype=torch.float64) * 1024).round() / 1024
            for n, v in base.items()
        }
        wire, unsent = form.reply(weights(change), weights(base), 0, unsent)
        assert len(wire["weights@topk@float64"]["values"]) == 15
        received = form.decompress_reply(Message.decode(wire.encode()), weights(base), "x")[
            "weights"
        ]
        for name in base:
            true[name] += change[name]
            sent[name] += received[name]
    for name in base:
        assert torch.equal(sent[name] + unsent[name], true[name])
        assert unsent[name].count_nonzero() > 0
        assert sent[name].count_nonzero() > 0


def test_each_type_has_its_own_positions() -> None:
    base = {
        "a": torch.zeros(100),
        "b": torch.zeros(100, dtype=torch.float64),
        "c": torch.zeros(100),
    }
    change = {name: draw(100, seed=ord(name), dtype=value.dtype) for name, value in base.items()}
    wire, unsent = of("topk:0.1").reply(weights(change), weights(base), 0, {})
    assert {label: len(wire[label]["values"]) for label in wire.tensors if "@" in label} == {
        "weights@topk@float32": 20, "weights@topk@float64": 10
    }  # fmt: skip
    received = of("topk:0.1").decompress_reply(wire, weights(base), "x")["weights"]
    assert all(torch.equal(received[n] + unsent[n], change[n]) for n in base)
    assert {n: t.dtype for n, t in received.items()} == {n: t.dtype for n, t in base.items()}


@pytest.mark.parametrize("lacking", ["absent", "shape", "everything"])
def test_weights_that_differ_from_the_broadcasts_go_as_they_are(lacking: str) -> None:
    base, mine, unsent = network(), network(1), {"conv.weight": draw(8, 16, 3, 3)}
    if lacking == "absent":
        mine.pop("conv.weight")
    elif lacking == "shape":
        mine["conv.weight"] = draw(8, 8, 3, 3)
    else:
        base = {}
    wire, rest = of("topk:0.1").reply(weights(mine), weights(base), 0, unsent)
    assert bits(wire) == bits(weights(mine))
    assert rest is unsent
    assert bits(of("topk:0.1").decompress_reply(wire, weights(base), "x")) == bits(weights(mine))


def test_every_form_but_top_k_keeps_no_error_feedback() -> None:
    for form in ("float16", "bfloat16", "int8"):
        _, rest = of(form).reply(weights(network(1)), weights(network()), 0, {})
        assert rest == {}


# What is refused


@pytest.fixture
def base() -> Message:
    return weights({"v": draw(10, 10), "w": draw(2, 64)})


def tampered(form: str, base: Message, changes: dict[str, dict[str, Tensor | None]]) -> Message:
    """Return a reply with these tensors in the place of its own, on the wire; None takes one out."""
    wire, _ = of(form).reply(weights({n: t + 1 for n, t in base["weights"].items()}), base, 0, {})
    groups = {group: dict(named) for group, named in wire.tensors.items()}
    for group, named in changes.items():
        groups.setdefault(group, {}).update({n: t for n, t in named.items() if t is not None})
        for name in (n for n, t in named.items() if t is None):
            groups[group].pop(name)
    return Message.decode(
        Message({g: named for g, named in groups.items() if named}, wire.scalars).encode()
    )


TOP, EIGHT, SCALES, HALF = (
    f"weights@{what}@float32" for what in ("topk", "int8", "scales", "float16")
)
NAN = float("nan")


def positions(*first: int) -> Tensor:
    """22 positions of 228 numbers, the first of them given."""
    return torch.tensor([*first, *range(100, 122)], dtype=torch.int32)[:22]


@pytest.mark.parametrize(
    ("form", "changes", "text"),
    [
        ("topk:0.1", {TOP: {"indices": positions(-1)}}, "'.*indices' is not ascending in 0 to 227"),
        (
            "topk:0.1",
            {TOP: {"indices": positions() + 107}},
            "'.*indices' is not ascending in 0 to 227",
        ),
        ("topk:0.1", {TOP: {"indices": positions(3, 3)}}, "'.*indices' is not ascending"),
        ("topk:0.1", {TOP: {"indices": positions(4, 3)}}, "'.*indices' is not ascending"),
        (
            "topk:0.1",
            {TOP: {"indices": positions().long()}},
            r"'.*indices' is \(22,\) torch.int64; expected .*int32",
        ),
        (
            "topk:0.1",
            {TOP: {"indices": positions()[:21]}},
            r"'.*indices' is \(21,\) .*; expected \(22,\)",
        ),
        (
            "topk:0.1",
            {TOP: {"values": torch.zeros(23)}},
            r"'.*values' is \(23,\) .*; expected \(22,\)",
        ),
        (
            "topk:0.1",
            {TOP: {"values": torch.zeros(22).half()}},
            "'.*values' is .*float16; expected .*float32",
        ),
        (
            "topk:0.1",
            {TOP: {"values": torch.full((22,), NAN)}},
            "'.*values' has NaN or infinite values",
        ),
        (
            "topk:0.1",
            {TOP: {"values": None}},
            r"'weights@topk@float32' has \['indices'\]; expected .*'values'",
        ),
        ("topk:0.1", {TOP: {"more": torch.zeros(1)}}, "'weights@topk@float32' has .*'more'"),
        ("topk:0.1", {"weights": {"v": torch.zeros(10, 10)}}, "'weights/v' comes twice"),
        (
            "topk:0.1",
            {TOP.replace("32", "64"): {"indices": positions()}},
            "'weights@topk@float64' has .*; expected no such group",
        ),
        (
            "topk:0.1",
            {"control@topk@float32": {"indices": positions()}},
            "'control@.* has .*; expected no such group",
        ),
        ("topk:0.1", {EIGHT: {"v": torch.zeros(3)}}, "unexpected group 'weights@int8@float32'"),
        ("int8", {EIGHT: {"v": torch.zeros(10, 10)}}, "'.*/v' is .*float32; expected .*int8"),
        ("int8", {SCALES: {"scales": torch.tensor([1, NAN, 1])}}, "'.*scales' has NaN"),
        (
            "int8",
            {SCALES: {"scales": torch.tensor([1, 1, -1.0])}},
            "'.*scales' has a scale below 0",
        ),
        (
            "int8",
            {SCALES: {"scales": torch.tensor([1, 1, 3e38])}},
            "'.*scales' has a scale .* too large",
        ),
        ("int8", {SCALES: {"scales": torch.ones(4)}}, r"'.*scales' is \(4,\) .*; expected \(3,\)"),
        (
            "int8",
            {SCALES: {"scales": torch.ones(3).double()}},
            "'.*scales' is .*float64; expected .*float32",
        ),
        ("int8", {SCALES: {"scales": None}}, "'weights@scales@float32' is not one tensor 'scales'"),
        (
            "int8",
            {SCALES: {"more": torch.ones(1)}},
            "'weights@scales@float32' is not one tensor 'scales'",
        ),
        (
            "int8",
            {"scores@scales@float32": {"scales": torch.ones(1)}},
            "unexpected group 'scores@scales@float32'",
        ),
        (
            "int8",
            {"statistics@int8@float32": {"x": torch.ones(1).char()}},
            "unexpected group 'statistics@int8",
        ),
        ("int8", {"weights": {"v": torch.zeros(10, 10)}}, "'weights/v' comes twice"),
        (
            "float16",
            {HALF: {"v": torch.full((10, 10), NAN).half()}},
            "'weights@float16@float32/v' has NaN",
        ),
        ("float16", {HALF: {"v": torch.zeros(10, 10)}}, "'.*/v' is .*float32; expected .*float16"),
        (
            "bfloat16",
            {HALF: {"q": torch.zeros(99).half()}},
            "unexpected group 'weights@float16@float32'",
        ),
        (
            "float16",
            {"weights@float16@int64": {"q": torch.zeros(9).half()}},
            "unexpected group 'weights@float16@int64'",
        ),
    ],
)
def test_a_tampered_message_is_refused(form: str, changes: dict, text: str, base: Message) -> None:
    with pytest.raises(RunError, match=f"^site 'x': {text}") as caught:
        of(form).decompress_reply(tampered(form, base, changes), base, "site 'x'")
    assert "\n" not in str(caught.value)


@every_form
def test_the_tampered_messages_are_accepted_as_they_were(form: str, base: Message) -> None:
    received = of(form).decompress_reply(tampered(form, base, {}), base, "site 'x'")
    assert received["weights"].keys() == base["weights"].keys()


def test_broadcasts_are_looked_at_too(base: Message) -> None:
    wire = of("int8").broadcast(base, 0)
    bad = Message({**wire.tensors, SCALES: {"scales": torch.full((3,), NAN)}})
    with pytest.raises(RunError, match=r"^the server: '.*scales' has NaN"):
        of("int8").decompress_broadcast(bad)
