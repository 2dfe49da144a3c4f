"""Protocols of bundles, and the presets laid over them."""

from __future__ import annotations

import pytest

from medfl.bundle.bundle import Bundle, shipped
from medfl.bundle.protocol import options_for, resolved
from medfl.core.errors import InputError
from medfl.runs.plan import Request, make_plan

PROTOCOL = {
    "rounds": 200,
    "lr": 0.1,
    "methods": {"fedbm": {"tau": 12.5, "g_lr": 1.0}, "fedprox": None},
    "config": {"network": "resnet20", "image_size": 32},
    "presets": {
        "quick": {"about": "small", "rounds": 2, "config": {"network": "small_cnn"}},
        "warm": {
            "rounds": 3,
            "lr_decay": 0.5,
            "methods": {"fedbm": {"tau": 7.5}, "fedcb": {"tau": 1.0}},
        },
        "odd": {"runds": 3},
    },
}


def test_a_protocol_is_completed() -> None:
    found = resolved("x", {})
    assert (found["sites"], found["partition"], found["rounds"], found["lr"]) == (
        4,
        "iid",
        10,
        None,
    )
    assert options_for(found, "fedavg") == {}
    found = resolved("x", PROTOCOL)
    assert (found["sites"], found["rounds"], found["lr"]) == (4, 200, 0.1)
    assert options_for(found, "fedprox") == {}


def test_presets_are_laid_over_it_in_their_order() -> None:
    found = resolved("x", PROTOCOL, ["quick", "warm"])
    assert (found["rounds"], found["lr"], found["lr_decay"]) == (3, 0.1, 0.5)
    assert resolved("x", PROTOCOL, ["warm", "quick"])["rounds"] == 2
    assert found["config"] == {"network": "small_cnn", "image_size": 32}
    assert options_for(found, "fedbm") == {"tau": 7.5, "g_lr": 1.0}
    assert options_for(found, "fedcb") == {"tau": 1.0}
    assert PROTOCOL["methods"]["fedbm"] == {"tau": 12.5, "g_lr": 1.0}, (
        "the protocol itself is not changed"
    )


@pytest.mark.parametrize(
    ("preset", "text"),
    [
        (
            "nosuch",
            r"preset 'nosuch' of bundle 'x'; its presets are: quick, warm, odd; see medfl bundles x",
        ),
        (
            "odd",
            r"'runds' in preset 'odd' of bundle 'x'; a preset sets batch_size, cohort, .*; take 'runds' out",
        ),
    ],
)
def test_a_preset_that_is_not_there_or_sets_nonsense_is_refused(preset: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        resolved("x", PROTOCOL, [preset])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"methods": "a"}, "methods 'a'"),
        ({"methods": {"fedavg": [1]}}, r"methods: fedavg '\[1\]'"),
        ({"config": "a"}, "config 'a'"),
        ({"presets": "a"}, "presets 'a'"),
        ({"presets": {"a": 3}}, "presets: a '3'"),
        ({"presets": {"a": {"config": [1]}}}, "presets: a: config"),
        ({"presets": {"a": {"methods": {"fedavg": 1}}}}, "presets: a: methods: fedavg '1'"),
    ],
)
def test_what_has_to_be_a_table_is_refused_as_anything_else(
    values: dict[str, object], text: str
) -> None:
    with pytest.raises(
        InputError, match=rf"^{text}.* in the federated.yaml of bundle 'x'; a table"
    ):
        resolved("x", values, ["a"])


def test_the_presets_of_all_bundles_resolve() -> None:
    seen = set()
    for name in shipped():
        protocol = Bundle(name).protocol
        for preset, values in (protocol.get("presets") or {}).items():
            assert values["about"]
            assert resolved(name, protocol, [preset])["config"] is not None
            seen.add(preset)
    assert {"sgd", "beta-0.1"} <= seen


def test_the_authors_commands_for_kvasir_at_beta_01() -> None:
    """Card of FedBM, section 4: tau 7.5 and lambda_dis 0.1 at beta 0.1; SGD 0.01, momentum 0.9, decay 5e-4."""
    request = Request(
        "kvasir_v2", "fedbm", presets=["beta-0.1", "sgd"], data="phantom", config={"network": "small_cnn"}, rounds=1,
        seed=1,
    )  # fmt: skip
    made = make_plan(request)
    assert (
        made.run.options["tau"],
        made.run.options["lambda_dis"],
        made.run.options["synthetic_batch"],
    ) == (
        7.5,
        0.1,
        32,
    )
    assert (made.run.partition.spec, made.run.lr) == ("dirichlet:0.1", 0.01)
    assert made.run.config["network"] == "small_cnn"
    optimizer = made.bundle.optimizer(made.bundle.network(), lr=made.run.lr)
    group = optimizer.param_groups[0]
    assert (type(optimizer).__name__, group["lr"], group["momentum"], group["weight_decay"]) == (
        "SGD",
        0.01,
        0.9,
        5e-4,
    )
