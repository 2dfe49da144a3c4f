"""Every setting is declared once, and no verb takes a flag and loses it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from medfl import networks
from medfl.bundle.bundle import Bundle
from medfl.cli import arguments, main, verbs as cli
from medfl.core.errors import InputError
from medfl.core.run import Run
from medfl.core.settings import ADDED_LATER, SETTINGS, Setting
from medfl.runs import initial_weights
from medfl.runs.plan import Request, make_plan
from medfl.storage.files import load_weights, save_weights, weights_sha256
from tests.support.toy import run_record

OTHER: dict[str, Any] = {
    "cohort": 0.5, "rounds": 3, "local_epochs": 2, "batch_size": 5, "lr": 0.003, "lr_decay": 0.9, "seed": 7,
    "device": "cpu", "threads": 2, "eval_every": 2, "messages": "int8", "aggregation": "median",
    "max_share": 0.6, "metrics": "dice", "init": "start.safetensors", "decay_per": "epoch", "site_weights": "uniform",
    "patience": 3, "site_labels": "a=liver", "partial_loss": "naive", "unlabelled": "b",
    "site_channels": "a=0", "site_spacing": "a=1x1x2", "channel_drop": 0.3,
}  # fmt: skip
"""A value of each setting that is not its default; switches are True."""
OF_OTHERS = ("site_labels", "site_channels", "site_spacing", "channel_drop", "unlabelled")
"""What is for other bundles and methods: test_site_labels, test_site_channels, test_site_spacing, test_fedsemi."""
VERBS = {
    "run": ["run", "mednist"],
    "compare": ["compare", "mednist", "--methods", "fedavg", "--out", "grid"],
    "simulate": ["flare", "simulate", "mednist"],
    "poc": ["flare", "poc", "mednist"],
    "export": ["flare", "export", "mednist", "--sites", "a,b", "--out", "job"],
}


def value_of(one: Setting) -> Any:
    return True if one.kind is bool else OTHER[one.name]


def recorded(one: Setting) -> Any:
    """Return what a run's record says of a setting: of weights their hash."""
    value = value_of(one)
    return value if one.name != "init" else f"sha256:{weights_sha256(load_weights(Path(value)))}"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have weights to begin with in the current folder."""
    monkeypatch.chdir(tmp_path)
    save_weights(tmp_path / OTHER["init"], networks.build("two_conv", 1, 6).state_dict())


def flags(one: Setting) -> list[str]:
    return [one.flag] if one.kind is bool else [one.flag, str(value_of(one))]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return cli.parser()


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_flag_that_a_verb_takes_is_not_lost(
    name: str, verb: str, parser: argparse.ArgumentParser
) -> None:
    """What a verb does not take it refuses; `compare` has seeds of its own, sites of a job choose their device."""
    one = SETTINGS[name]
    left_out = {"compare": ("seed", "aggregation", "max_share"), "export": ("device",)}.get(
        verb, ()
    )
    if name in left_out:
        with pytest.raises(InputError, match=f"unknown {one.flag}"):
            parser.parse_args([*VERBS[verb], *flags(one)])
        return
    options = parser.parse_args([*VERBS[verb], *flags(one)])
    assert arguments.given_settings(options) == {name: value_of(one)}


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in OF_OTHERS])
def test_what_is_asked_for_is_in_the_run(name: str) -> None:
    small = {"data": "phantom", "sites": 2, "config": {"network": "two_conv", "image_size": 28}}
    asked = {**small, name: value_of(SETTINGS[name])}
    run = make_plan(Request("mednist", "fedavg", **asked)).run
    assert getattr(run, name) == recorded(SETTINGS[name])
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize(
    "without", [("max_share",), ("aggregation", "site_weights")]
)  # a cap is for a weighted mean
def test_an_exported_job_has_every_setting(tmp_path: Path, without: tuple[str, ...]) -> None:
    pytest.importorskip("nvflare")
    others = ("device", "portable", "metrics", *without, *OF_OTHERS)
    given = {name: one for name, one in SETTINGS.items() if name not in others}
    words = [word for one in given.values() for word in flags(one)]
    config = ["--config", "network=two_conv", "--config", "image_size=28", "--rehearsal"]
    assert main([*VERBS["export"], *words, *config]) == 0
    (record,) = (tmp_path / "job").rglob("run.json")
    document = json.loads(record.read_text())
    assert {name: document[name] for name in given} == {
        name: recorded(one) for name, one in given.items()
    }
    carried, *_ = (tmp_path / "job").rglob("init.json")
    masks = ["flare", "export", "lung_cxr", "--sites", "a,b", "--metrics", "dice", "--rehearsal"]
    assert main([*masks, "--out", str(tmp_path / "masks")]) == 0
    (record,) = (tmp_path / "masks").rglob("run.json")
    assert json.loads(record.read_text())["metrics"] == "dice"
    bundle = Bundle("mednist", {"network": "two_conv", "image_size": 28})
    restored = initial_weights.restored(bundle, run_record(init=document["init"]), carried.parent)
    assert restored.start is not None
    assert bundle.start is None


def test_settings_that_came_later_leave_older_records_as_they_were() -> None:
    record = run_record()
    assert not ADDED_LATER.keys() & record.to_dict().keys()
    later = {"messages", "aggregation", "tf32", "channels_last", "compile", "max_share", "metrics"}
    later |= {
        "init",
        "decay_per",
        "site_weights",
        "keep_optimizer",
        "score_trained",
        "patience",
        "site_labels",
        "partial_loss",
        "site_channels",
        "site_spacing",
        "channel_drop",
        "unlabelled",
        "portable",
    }
    assert set(ADDED_LATER) == later


@pytest.mark.parametrize("name", SETTINGS)
def test_the_schema_of_a_setting_is_its_kind_and_limits(name: str) -> None:
    one = SETTINGS[name]
    check = Draft202012Validator(one.schema)
    assert check.is_valid(value_of(one))
    assert not check.is_valid(["a", "list"])
    if one.minimum is not None:
        assert check.is_valid(one.minimum)
        assert not check.is_valid(one.minimum - 1)
    if one.above is not None:
        assert not check.is_valid(one.above)
    assert check.is_valid(None) == one.optional
