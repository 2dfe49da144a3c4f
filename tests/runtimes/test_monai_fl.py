"""MONAI FL: the simulator's results bit for bit, a host that only averages, and what a site sends, checks and stops."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.fl.client import MonaiAlgo
from monai.fl.utils.constants import ExtraItems, FlPhase, FlStatistics, ModelType, WeightType
from monai.fl.utils.exchange_object import ExchangeObject
from monai.utils import set_determinism
from torch import Tensor, nn

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.cli import verbs as cli
from medfl.core.errors import InputError, RunError
from medfl.core.message import Message
from medfl.core.run import PartitionRecord
from medfl.core.seeding import stream
from medfl.evaluation.evaluators import ClassEvaluator
from medfl.methods import has_fedavg_server, load, names
from medfl.runs import launch
from medfl.runtimes import profiling
from medfl.runtimes.federation import Federation
from medfl.runtimes.launch import Launch
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.monai_fl.client import MedflClientAlgo
from medfl.runtimes.monai_fl.exchange import Exchange
from medfl.runtimes.monai_fl.view import Aborted
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.runtimes.step import introduce
from medfl.storage.files import load_state, load_weights
from medfl.storage.run_folder import RunFolder
from tests.runtimes.test_smaller_messages import Wide
from tests.support.sweeps import FEW, mostly_slow
from tests.support.toy import (
    CLASSIFYING,
    WITHOUT_IMAGES,
    ToyBundle,
    bits,
    blobs,
    public_blobs,
    run_record,
)
from tests.zoo.build import ZOO

RUNTIMES = ("simulator", "monai-fl")
NEED_A_BUNDLE = {"fedhelp"}
"""Methods whose sites have different networks; they run on phantoms below."""


def federation(
    method: str = "fedavg", bundle: ToyBundle | None = None, **changes: Any
) -> Federation:
    made = load(method, WITHOUT_IMAGES.get(method))
    return Federation(
        bundle or ToyBundle(), made, run_record(method=method, **changes), public=public_blobs()
    )


def left(out: Path) -> dict[str, Any]:
    """What a run leaves, but for the time that it took and how it was called."""
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    timeless = {
        k: v for k, v in summary.items() if not k.startswith("seconds") and k != "peak_memory_bytes"
    }
    weights = {path.name: bits(load_weights(path)) for path in sorted(out.glob("*.safetensors"))}
    states = {
        path.name: bits(load_state(path)) for path in sorted((out / "state").glob("*.safetensors"))
    }
    return {
        "rounds": [
            {k: v for k, v in entry.items() if not k.startswith("seconds")} for entry in rounds
        ],
        "summary": timeless,
        "tables": {path.name: path.read_text() for path in sorted(out.glob("*.csv"))},
        "weights": weights,
        "states": states,
    }


# The same results as the simulator's


def simulate(
    out: Path, made: Federation, workers: Callable[[Federation, int], Workers]
) -> dict[str, Any]:
    folder = RunFolder.create(out)
    folder.write_run(made.run, {})
    Simulator(Execution(made, folder), workers).execute()
    return left(out)


@pytest.mark.parametrize(
    "method",
    mostly_slow(
        sorted(set(CLASSIFYING) - NEED_A_BUNDLE), (*FEW, "fedmd", "fedmr", "fedproto", "pfedpm")
    ),
)
def test_every_method_leaves_what_the_simulator_leaves(tmp_path: Path, method: str) -> None:
    settings = {"rounds": 2, "cohort": 0.67, "eval_every": 2}
    expected = simulate(tmp_path / "simulator", federation(method, **settings), Workers)
    assert simulate(tmp_path / "monai-fl", federation(method, **settings), Exchange) == expected


@pytest.mark.parametrize(
    ("method", "messages"), [("scaffold", "topk:0.1"), ("scaffold", "float16"), ("fedmd", "int8")]
)
def test_smaller_messages_are_made_and_opened_at_the_two_ends(
    tmp_path: Path, method: str, messages: str
) -> None:
    settings = {"rounds": 3, "messages": messages, "bundle": Wide()}
    expected = simulate(tmp_path / "simulator", federation(method, **settings), Workers)
    assert simulate(tmp_path / "monai-fl", federation(method, **settings), Exchange) == expected


def test_a_profile_has_the_parts_of_a_site_s_work(tmp_path: Path) -> None:
    made, said = federation("ditto", rounds=2), []
    folder = RunFolder.create(tmp_path / "run")
    folder.write_run(made.run, {})
    Simulator(Execution(made, folder, Launch(profile=True, say=said.append)), Exchange).execute()
    spans = json.loads((tmp_path / "run" / "profile.json").read_text())["traceEvents"]
    names = {span["name"] for span in spans}
    assert {"site x", "site y", "site z"} < names
    assert {profiling.DATA, profiling.TRAINING, profiling.EVALUATION, profiling.MESSAGES} < names
    simulate(tmp_path / "plain", federation("ditto", rounds=2), Exchange)
    assert left(tmp_path / "run") == left(tmp_path / "plain")


SIX = {
    "fedavg": {},
    "scaffold": {},
    "fedbm": {"g_iterations": 2, "g_batch": 4, "synthetic_batch": 2},
    "fedmr": {},
    "pfedpm": {},
    "fedhelp": {"large": "site-1", "large_network": "resnet20"},
}


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=16
    )


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Public images."""
    return datasets.write_phantom(
        "mnist", tmp_path_factory.mktemp("digits") / "data", per_class=10, size=28
    )


CONFIG = {"network": "small_cnn", "image_size": 16}


def run(scans: Path, out: Path, method: str, runtime: str, **changes: Any) -> dict[str, Any]:
    options, resume = changes.pop("options", SIX.get(method, {})), changes.pop("resume", False)
    requested = {
        "method": method, "data": str(scans), "sites": 3, "partition": "iid", "cohort": 1.0, "rounds": 2,
        "local_epochs": 1, "batch_size": 8, **changes,
    }  # fmt: skip
    return launch.federate(
        "mednist",
        options=options,
        config=CONFIG,
        requested=requested,
        out=out,
        jobs=1,
        runtime=runtime,
        resume=resume,
    )


@pytest.mark.parametrize(
    "method", mostly_slow((name for name in SIX if name != "scaffold"), ("fedbm", "fedhelp"))
)
def test_law1_a_phantom_run_is_the_same_bit_for_bit(
    scans: Path, digits: Path, tmp_path: Path, method: str
) -> None:
    """SCAFFOLD's is the one that the other runtime resumes, below."""
    options = {**SIX[method], **({"public": f"mnist:{digits}"} if method == "fedhelp" else {})}
    summaries = [run(scans, tmp_path / name, method, name, options=options) for name in RUNTIMES]
    assert len({summary["run_hash"] for summary in summaries}) == 1
    assert len({summary["weights_sha256"] for summary in summaries}) == 1
    simulator, monai = (left(tmp_path / name) for name in RUNTIMES)
    assert monai == simulator
    assert json.loads((tmp_path / "monai-fl" / "run.json").read_text())["runtime"] == "monai-fl"


def test_law1_a_bundle_that_is_not_ours_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    """Segmentation with MONAI's own post-processing and metric, scored case by case."""
    bundle = ZOO["seg2d_csv_flat"](tmp_path)
    requested = {"method": "ditto", "sites": 2, "rounds": 1, "partition": "iid"}
    for runtime in RUNTIMES:
        out = tmp_path / runtime
        launch.federate(
            str(bundle.path),
            config=bundle.overrides,
            requested=requested,
            out=out,
            jobs=1,
            runtime=runtime,
        )
    simulator, monai = (left(tmp_path / name) for name in RUNTIMES)
    assert monai == simulator


@pytest.mark.parametrize("first", RUNTIMES)
def test_law1_a_run_that_is_resumed_by_the_other_runtime(
    scans: Path, tmp_path: Path, first: str
) -> None:
    """SCAFFOLD's control variates are in the sites' States, and a cohort of two of three leaves one out."""
    (other,) = set(RUNTIMES) - {first}
    whole = run(scans, tmp_path / "whole", "scaffold", first, rounds=3, cohort=0.67)
    run(scans, tmp_path / "parts", "scaffold", first, rounds=1, cohort=0.67)
    parts = run(scans, tmp_path / "parts", "scaffold", other, rounds=3, cohort=0.67, resume=True)
    assert (parts["run_hash"], parts["weights_sha256"]) == (
        whole["run_hash"],
        whole["weights_sha256"],
    )
    assert left(tmp_path / "parts") == left(tmp_path / "whole")


def test_the_command_line_runs_it_and_refuses_several_processes(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "run",
        "mednist",
        "--data",
        str(scans),
        "--sites",
        "2",
        "--partition",
        "iid",
        "--rounds",
        "1",
    ]
    command += [f"--config={key}={value}" for key, value in CONFIG.items()]
    command += ["--local-epochs", "1", "--out", str(tmp_path / "out"), "--runtime", "monai-fl"]
    assert cli.main([*command, "--jobs", "2"]) == 2
    assert "error: --jobs 2 with --runtime monai-fl; " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert cli.main(command) == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "finished"


# A host of MONAI FL, by hand


def started(made: Federation, host: str = "medfl", **settings: Any) -> dict[str, MedflClientAlgo]:
    sites = {name: MedflClientAlgo(made, host=host, **settings) for name in made.participants}
    for name, site in sites.items():
        site.initialize({ExtraItems.CLIENT_NAME: name, ExtraItems.APP_ROOT: "/nowhere"})
    return sites


def said(weights: Mapping[str, Any], round_: int | None = None, **settings: Any) -> ExchangeObject:
    statistics = {} if round_ is None else {"round": round_}
    return ExchangeObject(
        weights=dict(weights),
        **{"weight_type": WeightType.WEIGHTS, "statistics": statistics, **settings},
    )


def broadcast(made: Federation, name: str, round_: int = 1) -> ExchangeObject:
    """What the server of a run that has just begun says to a site."""
    host = made.host(0)
    introductions = {site: introduce(made, site) for site in made.participants}
    with made.scope():
        server = made.method.init_server(host, made.networks.initial, introductions)
        return said(
            {k: v.clone() for k, v in made.method.broadcast(host, server, name).flat().items()},
            round_,
        )


def averaged(replies: Sequence[ExchangeObject]) -> dict[str, np.ndarray]:
    """Average as hosts do that know nothing of the tensors: everything in float64, counters too."""
    counts = [reply.statistics[FlStatistics.DATA_COUNT] for reply in replies]
    return {
        key: np.sum(
            [
                n * reply.weights[key].numpy().astype(float)
                for n, reply in zip(counts, replies, strict=True)
            ],
            0,
        )
        / sum(counts)
        for key in replies[0].weights
    }


def averaging(
    sites: Mapping[str, MedflClientAlgo], rounds: int, start: Mapping[str, Any] | None = None
) -> Any:
    """Run rounds of a host that has never heard of medfl."""
    weights: Mapping[str, Any] = start or next(iter(sites.values())).get_weights().weights
    for _ in range(rounds):
        for site in sites.values():
            site.train(said(weights))
        weights = averaged([site.get_weights() for site in sites.values()])
    return weights


AVERAGED = {name for name in CLASSIFYING if has_fedavg_server(load(name))}


@pytest.mark.parametrize("method", sorted(AVERAGED - NEED_A_BUNDLE))
def test_a_plain_averaging_host_gives_the_simulator_s_weights(tmp_path: Path, method: str) -> None:
    """As the host averages in float64 and the simulator in float32, up to rounding."""
    made = federation(method, rounds=3)
    weights = averaging(started(made, "averaging"), 3)
    simulate(tmp_path / "run", federation(method, rounds=3), Workers)
    (file,) = (tmp_path / "run" / "state").glob("0*-server.safetensors")
    expected = load_state(file)["weights"]
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            assert torch.allclose(torch.as_tensor(weights[name]).float(), tensor, atol=1e-5), name


def test_the_methods_for_a_plain_averaging_host_are_those_of_the_method_table() -> None:
    """Of these FedAvg and FedProx as papers say; SCAFFOLD's server averages control variates too."""
    table = (Path(__file__).parents[2] / "docs" / "methods.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.split(" | ")] for line in table if line.startswith("| [`")
    ]
    said = {row[0].split("`")[1]: row[4] for row in rows if row[0].split("`")[1] in names()}
    assert said == {name: "yes" if has_fedavg_server(load(name)) else "no" for name in names()}
    assert (said["fedavg"], said["fedprox"], said["scaffold"], said["central"]) == (
        "yes",
        "yes",
        "no",
        "no",
    )


def test_a_site_goes_on_from_its_folder_after_a_restart(tmp_path: Path) -> None:
    """FedPer's heads are personal, and the learning rate halves each round, which the site counts itself."""
    made = federation("fedper", bundle=ToyBundle(norm=False))
    whole = averaging(started(made, "averaging"), 3)
    first = averaging(started(made, "averaging", folder=tmp_path), 1)
    again = averaging(started(made, "averaging", folder=tmp_path), 2, first)
    assert bits(torch.as_tensor(again["0.weight"])) == bits(torch.as_tensor(whole["0.weight"]))
    kept = sorted(path.name for path in next(tmp_path.rglob("x")).iterdir())
    assert kept == ["000002.safetensors", "000003.safetensors"]
    assert set(load_state(next(tmp_path.rglob("x")) / kept[1])["weights"]) == {"4.weight", "4.bias"}


def test_a_round_that_the_server_repeats_begins_from_the_same_state(tmp_path: Path) -> None:
    made = federation("ditto")
    for folder in (None, tmp_path):
        site = started(made, folder=folder)["x"]
        replies = []
        for round_ in (1, 2, 2):
            site.train(broadcast(made, "x", round_))
            replies.append((bits(site.get_weights().weights), bits(site.states.newest(round_))))
        assert replies[1] == replies[2] != replies[0]
        assert site.states.last == 2


def test_a_server_may_say_which_state_counts() -> None:
    """The reply of round 2 was refused: round 3 begins from the State of round 1."""
    made = federation("ditto")
    replies = {}
    for refused in (False, True):
        site = started(made)["x"]
        for round_, kept in ((1, 0), (2, 1), (3, 1)) if refused else ((1, 0), (3, 1)):
            asked = broadcast(made, "x", round_)
            asked.statistics["kept"] = kept
            site.train(asked)
        replies[refused] = bits(site.get_weights().weights), bits(site.states.of(3))
    assert replies[True] == replies[False]
    for kept, text in (
        (2, "this site's State of round 2, which is not here"),
        ("1", "its round is '1', no whole number"),
    ):
        asked = broadcast(made, "x", 4)
        asked.statistics["kept"] = kept
        with pytest.raises(RunError, match=text):
            site.train(asked)


def test_a_site_with_nothing_but_its_own_images_replies_as_in_the_whole_federation() -> None:
    for method in ("scaffold", "fedbn"):
        whole = federation(method)
        for name, ids in whole.run.partition.sites.items():
            own = Federation(
                ToyBundle(),
                load(method),
                dataclasses.replace(
                    whole.run, partition=PartitionRecord("iid", 0, (), {name: ids})
                ),
            )
            replies = []
            for made in (whole, own):
                site = MedflClientAlgo(made, name)
                site.initialize()
                site.train(broadcast(whole, name))
                replies.append(bits(site.get_weights().weights))
            assert replies[0] == replies[1]


def test_a_bundle_is_opened_for_one_site_when_the_host_initializes_it(scans: Path) -> None:
    settings = {"data": str(scans), "local_epochs": 1, "lr": 0.01}
    site = launch.site_algo(
        "mednist", "clinic", config=CONFIG, requested=settings, host="averaging"
    )
    with pytest.raises(RunError, match=r"site 'clinic' is not initialized; call initialize first"):
        site.get_weights()
    site.initialize({ExtraItems.CLIENT_NAME: "clinic"})
    before = site.get_weights()
    assert before.statistics == {FlStatistics.DATA_COUNT: 42}
    site.train(said(before.weights))
    after = site.get_weights()
    assert (
        set(before.weights)
        == set(Bundle("mednist", CONFIG).network().state_dict())
        == set(after.weights)
    )
    assert any(
        not torch.equal(before.weights[name], tensor) for name, tensor in after.weights.items()
    )
    assert 0 <= site.evaluate(said(after.weights)).metrics["accuracy"] <= 1


# What leaves a site


class Kept(Exchange):
    """Remembers all that crosses."""

    crossed: list[tuple[str, ExchangeObject]]

    def __init__(self, federation: Federation, jobs: int = 1) -> None:
        super().__init__(federation, jobs)
        Kept.crossed = []

    def _arrived(self, name: str, told: ExchangeObject) -> Message:
        self.crossed.append(("up", told))
        return super()._arrived(name, told)

    def _sent(self, *arguments: Any) -> tuple[ExchangeObject, int]:
        made = super()._sent(*arguments)
        self.crossed.append(("down", made[0]))
        return made


@pytest.mark.parametrize("method", ["fedbn", "fedper", "pfedpm"])
def test_nothing_personal_crosses_and_the_sample_count_always_does(
    tmp_path: Path, method: str
) -> None:
    made = federation(method, rounds=2)
    with made.scope():
        personal = made.method.personal_names(made.networks.lease(made.networks.initial))
        body = set(made.networks.initial) - personal
    simulate(tmp_path / "run", made, Kept)
    sites = dict(zip(made.names, (3, 5, 4), strict=True))
    ups = [told for way, told in Kept.crossed if way == "up"]
    assert [told.statistics[FlStatistics.DATA_COUNT] for told in ups] == [*sites.values()] * 3
    for _, told in Kept.crossed:
        sent = {key.removeprefix("weights/") for key in told.weights if key.startswith("weights/")}
        assert sent in (set(), body)
        assert not sent & personal
        assert told.optim is None
        assert all(isinstance(value, int | float) for value in told.statistics.values())
    assert personal or method == "pfedpm"


def test_what_a_site_sent_does_not_change_when_it_goes_on() -> None:
    made = federation()
    site = started(made)["x"]
    site.train(broadcast(made, "x"))
    first = site.get_weights().weights
    before = bits(first)
    site.train(broadcast(made, "x", 2))
    assert bits(first) == before
    assert bits(site.get_weights().weights) != before


def test_each_training_has_a_new_optimiser() -> None:
    """SGD with momentum 0.9 in the bundle: whatever was before, the same weights give the same reply."""
    made = federation()
    site, fresh = started(made)["x"], started(made)["x"]
    site.train(broadcast(made, "x", 1))
    for each in (site, fresh):
        each.train(broadcast(made, "x", 2))
    assert bits(site.get_weights().weights) == bits(fresh.get_weights().weights)


def test_a_personal_model_is_scored(tmp_path: Path) -> None:
    """FedPer's head is the site's own: what `evaluate` says is what the simulator reports of it."""
    simulate(tmp_path / "run", federation("fedper", rounds=1), Workers)
    reported = json.loads((tmp_path / "run" / "rounds.jsonl").read_text())["sites"]
    made = federation("fedper")
    sites = started(made, "averaging")
    start = sites["x"].get_weights().weights
    for site in sites.values():
        site.train(said(start))
    replies = {name: Message({"weights": site.get_weights().weights}, {"samples": made.site(name, 1).num_samples})
               for name, site in sites.items()}  # fmt: skip
    weights = made.method.aggregate(made.host(1), {}, replies, 3)["weights"]
    for name, site in sites.items():
        assert site.evaluate(said(weights)).metrics == pytest.approx(reported[name]["personal"])
    other = started(made, "averaging")["y"]
    assert (
        other.evaluate(said(weights)).metrics["loss"]
        != sites["y"].evaluate(said(weights)).metrics["loss"]
    )


# What a site accepts


NAN, INF = torch.full((6,), float("nan")), torch.full((6,), float("inf"))


def flipped(weights: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return {**weights, key: value}


def dropped(weights: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in weights.items() if name != key}


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda w: dropped(w, "weights/0.bias"), r"missing 'weights/0.bias' \(1 such\)"),
    "unexpected": (lambda w: flipped(w, "weights/9.bias", torch.ones(2)), r"unexpected 'weights/9.bias' \(1 such\)"),
    "flattened": (
        lambda w: flipped(w, "weights/0.weight", w["weights/0.weight"].flatten()),
        r"'weights/0.weight' is \(48,\) torch.float32; expected \(6, 8\) torch.float32",
    ),
    "float64": (
        lambda w: flipped(w, "weights/0.bias", w["weights/0.bias"].double()),
        r"'weights/0.bias' is \(6,\) torch.float64; expected \(6,\) torch.float32",
    ),
    "nan": (lambda w: flipped(w, "weights/0.bias", NAN), "'weights/0.bias' has NaN or inf"),
    "inf": (lambda w: flipped(w, "weights/0.bias", INF), "'weights/0.bias' has NaN or inf"),
    "array": (lambda w: flipped(w, "weights/0.bias", np.full(6, np.nan, np.float32)), "'weights/0.bias' has NaN"),
    "nan elsewhere": (lambda w: flipped(w, "control/0.bias", NAN), "'control/0.bias' has NaN"),
    "form elsewhere": (lambda w: flipped(w, "control/0.bias", torch.ones(1)), r"'control/0.bias' is \(1,\).*\(6,\)"),
    "name elsewhere": (lambda w: flipped(w, "control/up", torch.ones(1)), "'control/up' is no tensor of the network"),
    "sparse": (lambda w: flipped(w, "weights/0.bias", torch.ones(6).to_sparse()), "expected a dense tensor"),
    "complex": (lambda w: flipped(w, "weights/0.bias", torch.ones(6) * 1j), "has the type torch.complex64"),
    "half a character": (lambda w: flipped(w, "weights/\ud800", torch.ones(6)), "is no name, it would steer"),
    "objects": (lambda w: flipped(w, "weights/0.bias", np.array([object()] * 6)), "has the type object"),
    "text": (lambda w: flipped(w, "weights/0.bias", "/etc/passwd"), "'weights/0.bias' is a str; expected a dense"),
    "a list": (lambda w: flipped(w, "weights/0.bias", [0.0] * 6), "'weights/0.bias' is a list"),
    "no group": (lambda w: flipped(w, "bias", torch.ones(6)), "'bias' is not named group/name"),
    "empty group": (lambda w: flipped(w, "/bias", torch.ones(6)), "'/bias' is not named group/name"),
    "a number as name": (lambda w: {**w, 7: torch.ones(6)}, "the name '7' is no text"),
    "two numbers": (lambda w: flipped(w, "scalars/a", torch.ones(2)), r"'scalars/a' is \(2,\); expected one number"),
    "infinite number": (lambda w: flipped(w, "scalars/a", torch.tensor(float("inf"))), "'scalars/a' is inf"),
    "nothing": (lambda w: None, "its weights are NoneType, no mapping"),
    "not the method's": (
        lambda w: {k: v for k, v in w.items() if k.startswith("weights/")},
        r"round 2: training fails with the server's message: KeyError: .*no group 'control'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_message_is_refused_in_one_line_and_changes_nothing(what: str) -> None:
    made = federation("scaffold")
    site, spared = started(made)["x"], started(made)["x"]
    for each in (site, spared):
        each.train(broadcast(made, "x", 1))
    before = bits(site.states.newest(9))
    change, text = BAD[what]
    good = broadcast(made, "x", 2)
    weights = change(dict(good.weights))
    data = said(weights or {}, 2)
    data.weights = weights
    with pytest.raises(RunError, match=text) as caught:
        site.train(data)
    assert str(caught.value).startswith("site 'x'")
    assert "\n" not in str(caught.value)
    with pytest.raises(
        RunError, match="site 'x' has nothing to send: its last training did not end"
    ):
        site.get_weights()
    assert (bits(site.states.newest(9)), site.states.last, site.phase) == (before, 1, FlPhase.IDLE)
    if what != "not the method's":  # scoring needs no control variates
        with pytest.raises(RunError, match=text):
            site.evaluate(data)
    for each in (site, spared):
        each.train(good)
    assert bits(site.get_weights().weights) == bits(spared.get_weights().weights)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"weight_type": WeightType.WEIGHT_DIFF}, "its weight type is fl_weight_diff"),
        ({"optim": {"state": {}}}, "it has the state of an optimiser"),
        ({"statistics": {"round": "2"}}, "its round is '2', no whole number"),
        ({"statistics": {"round": -1}}, "its round is '-1', no whole number"),
        ({"statistics": {"round": True}}, "its round is 'True', no whole number"),
        (
            {"statistics": {"round": 10**6 + 1}},
            "its round is '1000001', no whole number to 1000000",
        ),
        ({"statistics": {"round": 10**5000}}, "its round is 'a number of thousands of digits', no"),
    ],
)
def test_what_comes_with_the_tensors_is_checked_too(settings: dict[str, Any], text: str) -> None:
    made = federation()
    site = started(made)["y"]
    with pytest.raises(RunError, match=f"site 'y': the server's message: {text}"):
        site.train(said(broadcast(made, "y").weights, **settings))
    with pytest.raises(RunError, match="it is a dict, no ExchangeObject"):
        site.train({"weights": {}})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w: {**w, "0.weight": w["0.weight"].flatten()}, r"'weights/0.weight' is \(48,\)"),
        (lambda w: dropped(w, "1.num_batches_tracked"), "missing 'weights/1.num_batches_tracked'"),
        (lambda w: {**w, "weights/0.weight": w["0.weight"]}, "unexpected 'weights/weights/0.weight'"),
        (lambda w: {**w, "0.bias": np.full(6, 1e300)}, "'weights/0.bias' has NaN or infinite values"),
        (lambda w: {**w, "1.num_batches_tracked": np.array(np.nan)}, "'weights/1.num_batches_tracked' has NaN"),
    ],
)  # fmt: skip
def test_averaged_weights_are_checked_too(change: Callable[[Any], Any], text: str) -> None:
    site = started(federation(), "averaging")["x"]
    weights = dict(site.get_weights().weights)
    with pytest.raises(RunError, match=f"site 'x': the server's message: {text}"):
        site.train(said(change(weights)))
    site.train(said(weights))


def test_a_section_is_scored_once_however_often_it_is_asked_for() -> None:
    made = federation()
    site = started(made)["x"]
    site.train(broadcast(made, "x"), {"judge": ["test", "validate"] * 10**6 + ["elsewhere"]})
    assert [*site.cases] == ["validate", "test"]


@pytest.mark.parametrize("host", ["medfl", "averaging"])
def test_a_host_that_counts_rounds_from_0_is_told(host: str) -> None:
    """FLARE does: the order of a round's images is drawn from its number, so it would train another run."""
    made = federation()
    site = started(made, host)["x"]
    weights = broadcast(made, "x").weights if host == "medfl" else site.get_weights().weights
    with pytest.raises(
        RunError,
        match="site 'x': the server's message: its round is 0, after none; rounds count from",
    ):
        site.train(said(weights, 0))
    site.train(said(weights, 1))


@pytest.mark.parametrize(
    ("method", "changes", "text"),
    [
        (
            "scaffold",
            {},
            "method 'scaffold' with a plain averaging host; such a host does for methods that keep FedAvg's",
        ),
        (
            "fedavg",
            {"messages": "int8"},
            "--messages int8 with a plain averaging host; it takes lossless ones",
        ),
        (
            "fedavg",
            {"aggregation": "median"},
            "--aggregation median with a plain averaging host; it takes the mean",
        ),
        (
            "fedavg",
            {"site_weights": "uniform"},
            "--site-weights uniform with a plain averaging host; it weighs by",
        ),
        (
            "fedavg",
            {"max_share": 0.5},
            "--max-share 0.5 with a plain averaging host; it has no cap on shares",
        ),
    ],
)
def test_what_averaging_does_not_do_is_refused_at_the_start(
    method: str, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        started(federation(method, **changes), "averaging")


def test_other_bad_input_is_one_line() -> None:
    made = federation()
    with pytest.raises(InputError, match=r"^host 'flare'; one of medfl or averaging; choose one$"):
        MedflClientAlgo(made, host="flare")
    for site, called in (
        (MedflClientAlgo(made), "w"),
        (MedflClientAlgo(made, "x"), "y"),
        (MedflClientAlgo(made), None),
    ):
        with pytest.raises(InputError, match="its name here is "):
            site.initialize({ExtraItems.CLIENT_NAME: called} if called else None)
    site = started(made)["x"]
    with pytest.raises(
        InputError, match=r"section 'all'; one of train, validate or test; choose one"
    ):
        site.evaluate(broadcast(made, "x"), {"section": "all"})
    with pytest.raises(
        InputError, match=r"site 'x': model type fl_best_model; a site keeps no such model"
    ):
        site.get_weights({ExtraItems.MODEL_TYPE: ModelType.BEST_MODEL})
    site.finalize()
    with pytest.raises(RunError, match="site 'x' is not initialized"):
        site.train(broadcast(made, "x"))


@pytest.mark.parametrize(
    ("ask", "extra", "text"),
    [
        ("train", 5, "extra 5; keys and values, judge of type list, tuple or set"),
        ("train", [("judge", "test")], r"extra \[\('judge', 'test'\)\]; keys and values, judge of"),
        ("train", {"judge": 5}, "extra {'judge': 5}; .* judge of type list"),
        ("train", {"judge": "test"}, "extra {'judge': 'test'}; .* judge of type list"),
        ("evaluate", {"section": np.array([1, 2])}, "section of type str"),
        ("evaluate", {"section": ["test"]}, "section of type str"),
        ("get_weights", "best", "extra best; keys and values, fl_model_type"),
        ("get_weights", {ExtraItems.MODEL_TYPE: "a\nb"}, r"model type a\\nb; a site keeps no such model"),
        ("get_data_stats", np.ones(2), "fingerprint of type bool"),
        ("get_data_stats", {"fingerprint": np.ones(2)}, "fingerprint of type bool"),
        ("initialize", {ExtraItems.CLIENT_NAME: 5}, "fl_client_name of type str"),
        ("initialize", "x", "extra x; keys and values, fl_client_name"),
    ],
)  # fmt: skip
def test_what_a_host_says_beside_a_question_is_checked(ask: str, extra: Any, text: str) -> None:
    made = federation()
    site = started(made)["x"]
    message = (broadcast(made, "x"),) if ask in ("train", "evaluate") else ()
    with pytest.raises(InputError, match=text) as caught:
        getattr(site, ask)(*message, extra)
    assert "\n" not in str(caught.value)


def test_types_that_no_setter_of_monai_s_has_seen_are_refused() -> None:
    made = federation()
    site = started(made)["x"]
    for name, value in (
        ("_statistics", 5),
        ("_statistics", np.ones(2)),
        ("_weight_type", np.ones(2)),
        ("_weight_type", []),
    ):
        message = broadcast(made, "x")
        setattr(message, name, value)
        with pytest.raises(
            RunError, match="site 'x': the server's message: its (statistics|weight type)"
        ):
            site.train(message)


# Stopping


class Slow(ToyBundle):
    """Calls somebody in the second forward pass of each phase, of which a site with batches of one has several."""

    def __init__(self, call: Callable[[], None]) -> None:
        inner, outer = ToyBundle(norm=False).network, self

        class Network(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner()

            def forward(self, x: Tensor) -> Tensor:
                vars(outer)["passes"] += 1
                if outer.passes == 2:
                    call()
                return self.inner(x)

        super().__init__(network=Network, evaluator=ClassEvaluator(batch_size=1))
        vars(self).update(passes=0)


@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_abort_ends_training_and_evaluation_before_the_next_batch(phase: str) -> None:
    """From another thread, as hosts do; the pass that it interrupts waits for it."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(20)

    bundle = Slow(wait)
    made = federation("ditto", bundle=bundle, batch_size=1)
    site = started(made)["y"]
    vars(bundle)["passes"] = 10
    site.train(broadcast(made, "y", 1))
    before = bits(site.states.newest(9))
    vars(bundle)["passes"] = 0
    found: list[BaseException] = []

    def work() -> None:
        try:
            getattr(site, phase)(broadcast(made, "y", 2))
        except Aborted as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(20)
    site.abort()
    go_on.set()
    thread.join(20)
    what = {"train": "training", "evaluate": "evaluation"}[phase]
    assert [str(error) for error in found] == [
        f"site 'y': {what} aborted; its State is that of the round before"
    ]
    assert bundle.passes == 2
    assert (bits(site.states.newest(9)), site.states.last) == (before, 1)
    vars(bundle)["passes"] = 10
    site.train(broadcast(made, "y", 2))
    fresh = started(federation("ditto", bundle=bundle, batch_size=1))["y"]
    for round_ in (1, 2):
        fresh.train(broadcast(made, "y", round_))
    assert bits(site.get_weights().weights) == bits(fresh.get_weights().weights)


def test_abort_is_heard_where_a_method_makes_its_own_batches() -> None:
    """Per-FedAvg draws from the prepared images: its step goes on to its end, but nothing of it is kept."""
    bundle = Slow(lambda: site.abort())
    made = federation("perfedavg", bundle=bundle)
    site = started(made)["y"]
    vars(bundle)["passes"] = 0
    with pytest.raises(Aborted, match="site 'y': training aborted"):
        site.train(broadcast(made, "y"))
    assert site.states.last == 0
    with pytest.raises(RunError, match="nothing to send"):
        site.get_weights()


def test_abort_of_a_site_at_rest_changes_nothing() -> None:
    made = federation()
    site = started(made)["x"]
    site.abort()
    site.train(broadcast(made, "x"))
    site.abort()
    assert site.get_weights().statistics[FlStatistics.NUM_EXECUTED_ITERATIONS] == 1


def test_finalize_stops_a_training_and_initialize_begins_anew() -> None:
    bundle = Slow(lambda: site.finalize())
    made = federation(bundle=bundle, batch_size=1)
    site = started(made)["x"]
    vars(bundle)["passes"] = 0
    with pytest.raises(Aborted):
        site.train(broadcast(made, "x"))
    site.initialize()
    site.train(broadcast(made, "x"))
    assert site.get_weights().weight_type == WeightType.WEIGHTS


# Statistics


def test_statistics_are_those_of_the_site_s_images() -> None:
    """Site y has items 3 to 7 of each section; numpy says what they are. Feature j of (B, 8) is channel j here."""
    made = federation()
    site = started(made)["y"]
    asked = {FlStatistics.HIST_BINS: 4, FlStatistics.HIST_RANGE: [-2, 2]}
    told = site.get_data_stats(asked).statistics
    sections = (("train", "train", 0), ("eval", "validate", 1))
    rows = {
        part: blobs({name: 12}, seed=seed)[name][0][3:8].numpy() for part, name, seed in sections
    }
    rows["total_data"] = np.concatenate([rows["train"], rows["eval"]])
    assert list(told) == list(rows)
    for part, x in rows.items():
        found = told[part]
        assert (found["data_count"], found["fail_count"]) == (len(x), 0)
        images = found["data_stats"]["image_stats"]
        assert images["channels"] == 8
        assert images["intensity"]["mean"] == pytest.approx(x.mean(0).tolist(), abs=1e-6)
        assert images["intensity"]["stdev"] == pytest.approx(x.std(0).tolist(), abs=1e-6)
        for channel, histogram in enumerate(found["data_stats"]["image_histogram"]):
            assert histogram["counts"] == np.histogram(x[:, channel], 4, (-2, 2))[0].tolist()
            assert histogram["bin_edges"] == [-2, -1, 0, 1, 2]
    assert told["train"]["class_counts"] == {
        "p": 2,
        "q": 2,
        "r": 1,
    }  # labels 0, 1, 2, 0, 1 of items 3 to 7
    assert told["total_data"]["class_counts"] == {"p": 4, "q": 4, "r": 2}
    json.dumps(told)
    assert "image_histogram" not in site.get_data_stats().statistics["train"]["data_stats"]


def test_statistics_of_a_site_without_validation_images() -> None:
    record = run_record()
    held = {name: {**ids, "validate": []} for name, ids in record.partition.sites.items()}
    made = federation(partition=PartitionRecord("file", 0, (), held))
    told = started(made)["x"].get_data_stats().statistics
    assert told["eval"] == {
        "data_count": 0, "fail_count": 0, "data_stats": {}, "class_counts": {"p": 0, "q": 0, "r": 0},
    }  # fmt: skip
    assert told["total_data"]["data_stats"] == told["train"]["data_stats"]


@pytest.mark.parametrize(
    ("bins", "limits"),
    [
        (0, (0, 1)),
        (4, None),
        (None, (0, 1)),
        (4, (1, 0)),
        (4, (0, 1, 2)),
        ("a", (0, 1)),
        (10**9, (0, 1)),
        (float("inf"), (0, 1)),
    ],
)
def test_bins_that_are_none_are_refused(bins: Any, limits: Any) -> None:
    site = started(federation())["x"]
    with pytest.raises(
        InputError, match="a whole number from 1 to 1000, and the two ends of the range"
    ):
        site.get_data_stats({FlStatistics.HIST_BINS: bins, FlStatistics.HIST_RANGE: limits})


# MONAI's own ClientAlgo

SHIPPED = {
    "mednist": {"network_name": "small_cnn", "image_size": 16},
    "skin_lesion": {"network_name": "unet8", "image_size": 16},
}


@pytest.fixture
def contained() -> Iterator[None]:
    """Bundles seed everything when they are initialized."""
    with stream(0, "monai"):
        yield
        set_determinism(None)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.usefixtures("contained")
def test_a_shipped_bundle_runs_under_monai_s_own_algo_as_it_is(name: str, tmp_path: Path) -> None:
    """Two sites with every second training image each, three rounds of averaging."""
    data = datasets.write_phantom(name, tmp_path / "data", per_class=10, size=16)
    root, folders = (
        Bundle(name).root,
        dict.fromkeys(("output_dir", "ckpt_dir"), str(tmp_path / "out")),
    )
    mine = {"dataset_dir": str(data), "device": "cpu", **folders, **SHIPPED[name]}
    every = f"$medfl.datasets.datalist({name!r}, @dataset_dir, 'train', @split)"
    sites, initial = [], Bundle(name, SHIPPED[name]).network().state_dict()
    for index in range(2):
        settings = {**mine, "train::dataset::data": f"{every}[{index}::2]"}
        site = MonaiAlgo(
            bundle_root=str(root), local_epochs=1, send_weight_diff=False, train_kwargs=settings, eval_kwargs=settings,
            config_train_filename="configs/train.yaml",
            config_evaluate_filename=["configs/train.yaml", "configs/evaluate.yaml"],
        )  # fmt: skip
        with pytest.warns(UserWarning, match="executing the bundle config"):
            site.initialize({ExtraItems.CLIENT_NAME: f"site-{index}"})
        sites.append(site)
    weights = initial
    for round_ in range(1, 4):
        replies = []
        for site in sites:
            site.train(said(weights), {})
            replies.append(
                {key: tensor.clone() for key, tensor in site.get_weights({}).weights.items()}
            )
            assert site.trainer.state.epoch == round_
        assert bits(replies[0]) != bits(replies[1])
        weights = {key: sum(reply[key] for reply in replies) / 2 for key in initial}
    metrics = sites[0].evaluate(said(weights), {}).metrics
    assert Bundle(name, SHIPPED[name]).key_metric in metrics
    assert all(np.isfinite(value) for value in metrics.values())
    for site in sites:
        site.finalize()
