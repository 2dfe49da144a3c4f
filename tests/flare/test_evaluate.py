"""FLARE jobs that only examine a model: what is offered, what sites take and tell, and that figures are equal."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("nvflare")

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.cli.verbs import main
from medfl.core.errors import InputError, RunError
from medfl.core.run import Run
from medfl.evaluation import conformal
from medfl.flare import offer as flare_offer, wire
from medfl.flare.files import read_run
from medfl.flare.parts import ALLOWED
from medfl.flare.remote import ReportedRunFolder
from medfl.flare.server import FlareWorkers
from medfl.flare.site import FlareSite
from medfl.flare.site_config import SiteConfig, accepted_run, open_server, open_site
from medfl.flare.wire import Payload
from medfl.policy.policy import Outbound
from medfl.report import write_report
from medfl.report.formatting import interval
from medfl.runs.calibrate import Options, calibrate
from medfl.runs.result import load_run
from medfl.runtimes.launch import Launch
from medfl.runtimes.monai_fl.client import MedflClientAlgo
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.storage.files import load_weights, save_weights
from medfl.storage.places import CALIBRATION_SUMS
from medfl.storage.run_folder import RunFolder
from tests.flare.test_server import Near
from tests.support.local_federation import SERVER, LocalFederation

SITES = ["north", "south"]
CONFIG = {"network": "small_cnn", "image_size": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251 (a network for a test)
        weights = Bundle("mednist", CONFIG).network().state_dict()
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_weights(path, weights)
    return path


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("scans")
    return {
        name: datasets.write_phantom("mednist", place / name, per_class=20 + 9 * i, size=16, seed=i)
        for i, name in enumerate(SITES)
    }


@pytest.fixture(scope="module")
def job(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job's app, as `medfl flare export --evaluate` writes it."""
    document = flare_offer.export(
        "mednist", SITES, tmp_path_factory.mktemp("job") / "out", evaluate=True, config=CONFIG,
        requested={"init": str(model)}, rehearsal=True,
    )  # fmt: skip
    assert document["rounds"] == 0
    return Path(document["job"]) / "app"


@pytest.fixture(scope="module")
def alone(
    model: Path, scans: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """What a simulation of each site finds."""
    place = tmp_path_factory.mktemp("alone")
    for name in SITES:
        flags = ["--config", "network=small_cnn", "--config", "image_size=16", "--sites", "1"]
        data = ["--data", str(scans[name]), "--out", str(place / name), "--quiet"]
        assert main(["evaluate", str(model), "mednist", *flags, *data]) == 0

    return {name: place / name for name in SITES}


def config_of(
    scans: dict[str, Path], name: str, policy: str = "", bundle: str = "mednist"
) -> SiteConfig:
    permits = ("network", "network_name", "image_size")
    return SiteConfig(bundle, "unused", str(scans[name]), permits=permits, policy=policy)


class Apart(Near):
    """Sites with images of their own in this process."""

    def __init__(
        self,
        job: Path,
        run: Run,
        scans: dict[str, Path],
        rules: Outbound | None,
        log: Path,
        change: Callable[[str, str, Payload], Payload | None] | None = None,
    ) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.dropped: list[int] = []
        self.gone: dict[str, str] = {}
        self.ended = False
        self._change = change or (lambda site, word, payload: payload)
        self.sites = {}
        for name in SITES:
            algo = MedflClientAlgo(
                lambda name=name: open_site(
                    run, name, config_of(scans, name, bundle=run.bundle), job / "config"
                ),
                name, outbound=rules, audit=log / f"{name}.jsonl",
            )  # fmt: skip
            self.sites[name] = FlareSite(algo, name, job="evaluate", rounds=0)


def examined(
    out: Path, job: Path, scans: dict[str, Path], rules: Outbound | None = None, sets: int = 0,
    **changes: Any,
) -> tuple[Path, Apart]:  # fmt: skip
    run = read_run(str(job))
    federation = open_server(run, SiteConfig(run.bundle, str(out)), job / "config")
    RunFolder.create(out)
    folder = ReportedRunFolder(out)
    about = {"task": federation.bundle.task, "classes": [*federation.bundle.classes]}
    folder.write_run(federation.run, {**about, "key_metric": federation.bundle.key_metric})
    link = Apart(job, run, scans, rules, out.parent, **changes)

    def workers(made: Any, _: int) -> FlareWorkers:
        flare_workers = FlareWorkers(made, link, simulated=False, sets=sets)
        folder.follow(flare_workers)
        return flare_workers

    Simulator(Execution(federation, folder, Launch(resume=True)), workers).execute()
    return out, link


def rows_of(folder: Path) -> dict[str, dict[str, str]]:
    return {
        row["site"]: row for row in csv.DictReader((folder / "sites.csv").read_text().splitlines())
    }


def test_sites_tell_what_a_simulation_of_each_finds(
    job: Path, alone: dict[str, Path], scans: dict[str, Path], tmp_path: Path
) -> None:
    folder, link = examined(tmp_path / "run", job, scans)
    assert {word for word, _ in link.asked} == {wire.INTRODUCE, wire.EXAMINE}
    rows = rows_of(folder)
    hits = 0.0
    for name, out in alone.items():
        found = json.loads((out / "summary.json").read_text())["last"]
        for metric in ("accuracy", "balanced_accuracy", "f1_macro"):
            assert float(rows[name][f"received_{metric}"]) == pytest.approx(found[metric])
        # as a bound says, which is wide for a network that has learnt nothing
        assert abs(float(rows[name]["received_auroc"]) - found["auroc"]) <= 0.5
        assert float(rows[name]["received_loss"]) == pytest.approx(found["loss"], rel=1e-5)
        cases = len((out / "predictions.csv").read_text().splitlines()) - 1
        hits += found["accuracy"] * cases
        low, high = (float(rows[name][f"received_accuracy_{end}"]) for end in ("low", "high"))
        assert low <= found["accuracy"] <= high

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["last"]["accuracy"] == pytest.approx(hits / summary["examined"]["cases"])
    assert 0 < summary["examined"]["auroc_error"] <= 0.5
    assert "accuracy" in summary["examined"]["intervals"]
    page = write_report(folder).read_text()
    assert "and off by at most" in page
    assert "Counts alone:" in page
    assert (
        interval(
            (
                float(rows["north"]["received_balanced_accuracy_low"]),
                float(rows["north"]["received_balanced_accuracy_high"]),
            )
        )
        in page
    )
    entries = [json.loads(line) for line in (tmp_path / "north.jsonl").read_text().splitlines()]
    assert entries[-1]["kind"] == "evaluate"
    assert entries[-1]["numbers"]["test/cases"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("bundle", "metric"), [("chest_xray14", "loss"), ("bone_age", "mae")])
def test_findings_and_numbers_are_told(bundle: str, metric: str, tmp_path: Path) -> None:
    """What a simulation of the one site finds; areas under curves within the bound that is told."""
    config = {"network_name": "small_cnn", "image_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)  # noqa: TID251 (a network for a test)
        save_weights(tmp_path / "model.safetensors", Bundle(bundle, config).network().state_dict())

    folders = {}
    for seed, name in enumerate(SITES):
        folders[name] = datasets.write_phantom(
            bundle, tmp_path / f"data-{name}", per_class=10, size=16, seed=seed
        )

    document = flare_offer.export(
        bundle, SITES, tmp_path / "job", evaluate=True, config=config,
        requested={"init": str(tmp_path / "model.safetensors")}, rehearsal=True,
    )  # fmt: skip
    folder, _ = examined(tmp_path / "run", Path(document["job"]) / "app", folders)
    rows = rows_of(folder)
    assert [*rows] == SITES
    flags = ["--config", "network_name=small_cnn", "--config", "image_size=16", "--sites", "1"]
    flags += ["--partition", "iid", "--data", str(folders["south"])]
    flags += ["--out", str(tmp_path / "south"), "--quiet"]
    assert main(["evaluate", str(tmp_path / "model.safetensors"), bundle, *flags]) == 0
    alone = json.loads((tmp_path / "south" / "summary.json").read_text())["last"]
    assert float(rows["south"][f"received_{metric}"]) == pytest.approx(alone[metric], rel=1e-5)

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["last"][metric] > 0


def test_small_cells_stay_at_the_site(job: Path, scans: dict[str, Path], tmp_path: Path) -> None:
    told: dict[str, Payload] = {}

    def keep(site: str, word: str, payload: Payload) -> Payload:
        if word == wire.EXAMINE:
            told[site] = payload
        return payload

    folder, _ = examined(tmp_path / "run", job, scans, Outbound(min_count=6), change=keep)
    for payload in told.values():
        assert "tally/test/confusion" not in payload.tensors
        for name, tensor in payload.tensors.items():
            if "/mean/" not in name:
                assert tensor.min() >= 6, name

    summary = json.loads((folder / "summary.json").read_text())
    assert "f1_macro" not in summary["last"]
    assert summary["last"]["accuracy"] >= 0

    folder, _ = examined(tmp_path / "none", job, scans, Outbound(min_count=10_000))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["last"] == {"round": 0}
    assert summary["undefined"] == ["balanced_accuracy does not follow from what the sites tell"]


@pytest.mark.parametrize("scores", ["lac", "aps"])
def test_what_sites_tell_calibrates_as_their_images_do(
    scores: str, job: Path, alone: dict[str, Path], scans: dict[str, Path], tmp_path: Path
) -> None:
    """One question; each site's own threshold, coverage, size and abstentions are those of a simulation of it."""
    sets = 1 + ("lac", "aps").index(scores)
    folder, link = examined(tmp_path / "run", job, scans, sets=sets)
    assert [word for word, _ in link.asked].count(wire.EXAMINE) == 1
    told = calibrate(load_run(folder), Options(0.8, share="alone"))
    assert told["scores"] == scores
    rows = {(row["name"], row["way"]): row for row in told["rows"]}
    for name in SITES:
        out = shutil.copytree(alone[name], tmp_path / name)
        here = calibrate(load_run(out), Options(0.8, scores, "alone"))["rows"][0]
        assert rows[name, "alone"] == {**here, "name": name}

    pooled = calibrate(load_run(folder), Options(0.8))["rows"]
    assert pooled[1]["threshold"] == pooled[4]["threshold"] == pooled[-2]["threshold"]
    with pytest.raises(InputError, match="told their sums"):
        calibrate(load_run(folder), Options(0.8, by="sex"))

    sums = load_weights(folder / CALIBRATION_SUMS)
    for damage in ({conformal.SCORES: torch.tensor(9)}, {"north": torch.zeros(1)}):
        save_weights(folder / CALIBRATION_SUMS, {**sums, **damage})
        with pytest.raises(InputError, match="export the job again"):
            calibrate(load_run(folder), Options(0.8))


def test_what_calibrates_is_agreed_and_small_cells_stay(
    job: Path, scans: dict[str, Path], tmp_path: Path
) -> None:
    told: dict[str, Payload] = {}

    def keep(site: str, word: str, payload: Payload) -> Payload:
        if word == wire.EXAMINE:
            told[site] = payload
        return payload

    examined(tmp_path / "run", job, scans, Outbound(min_count=6), sets=1, change=keep)
    for payload in told.values():
        for part in ("validate/sets", "test/sets"):
            histogram = payload.tensors[f"tally/{part}"]
            assert len(histogram) == 1
            assert histogram[histogram > 0].min() >= 6

    keys = (
        "metrics/test/cases",
        "metrics/test/confusion",
        "metrics/test/scores/*",
        "metrics/test/mean/*",
    )
    examined(tmp_path / "without", job, scans, Outbound(keys=keys))
    with pytest.raises(RunError, match="site 'north'"):
        examined(tmp_path / "with", job, scans, Outbound(keys=keys), sets=1)
    log = (tmp_path / "north.jsonl").read_text()
    assert "its outbound policy refuses: 'metrics/validate/sets' is not among its keys" in log


def test_what_is_no_table_of_sets_is_refused(
    job: Path, scans: dict[str, Path], tmp_path: Path
) -> None:
    def change(site: str, word: str, payload: Payload) -> Payload:
        if word != wire.EXAMINE:
            return payload
        table = payload.tensors["tally/test/sets"] - 5
        return replace(payload, tensors={**payload.tensors, "tally/test/sets": table})

    with pytest.raises(RunError, match="its table of sets is none of a site's scores"):
        examined(tmp_path / "run", job, scans, sets=1, change=change)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"calibrate": "lac"}, "--calibrate lac without --evaluate"),
        ({"calibrate": "risk", "evaluate": True}, "--calibrate risk; lac or aps"),
    ],
)
def test_what_no_job_can_calibrate(
    settings: dict[str, Any], text: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"^{text}"):
        flare_offer.export(
            "mednist", SITES, tmp_path / "out", config=CONFIG, requested={"init": str(model)},
            rehearsal=True, **settings,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_what_may_leave_is_agreed_by_name(
    job: Path, scans: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="site 'north'"):
        examined(tmp_path / "run", job, scans, Outbound(keys=("metrics/test/cases",)))
    log = (tmp_path / "north.jsonl").read_text()
    assert "its outbound policy refuses: 'metrics/test/confusion' is not among its keys" in log


@pytest.mark.parametrize("word", [wire.TRAIN, wire.TRAIN_TO_SCORE, wire.SCORE_SITE])
def test_a_job_that_examines_is_answered_nothing_else(
    word: str, job: Path, scans: dict[str, Path], tmp_path: Path
) -> None:
    link = Apart(job, read_run(str(job)), scans, None, tmp_path)
    reason = link.sites["north"].answer(word, Payload()).failure_reason
    assert f"site 'north' is asked for '{word}'; it answers introduce, evaluate" in reason


def test_a_job_examines_one_model(job: Path, scans: dict[str, Path], tmp_path: Path) -> None:
    """By a few hundred, made for it, a server could ask for the label of each case."""
    link = Apart(job, read_run(str(job)), scans, None, tmp_path)
    question = Payload(numbers=wire.question_numbers(0, ("test",)))
    for text in (
        "does not say from which",
        "site 'north' tells a job of 0 rounds once: test",
    ):
        assert text in link.sites["north"].answer(wire.EXAMINE, question).failure_reason


def test_a_job_that_trains_asks_for_no_tables(
    job: Path, scans: dict[str, Path], tmp_path: Path
) -> None:
    run = replace(read_run(str(job)), rounds=1)
    site = FlareSite(
        MedflClientAlgo(lambda: open_site(run, "north", config_of(scans, "north"))), "north"
    )
    assert "is asked for 'evaluate'" in site.answer(wire.EXAMINE, Payload()).failure_reason


@pytest.mark.parametrize(
    ("policy", "rounds", "text"),
    [
        ("jobs: [evaluate]", 2, "a job to train; evaluate, as its policy says"),
        ("jobs: [train]", 0, "a job to evaluate; train, as its policy says"),
        ("jobs: [evaluate]", 0, ""),
        ("jobs: [train, evaluate]", 2, ""),
        ("methods: [fedavg]", 0, ""),
    ],
)
def test_the_policy_says_which_jobs_a_site_takes(
    policy: str, rounds: int, text: str, job: Path, scans: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(policy)
    run = replace(read_run(str(job)), rounds=rounds)
    config = config_of(scans, "north", str(file))
    if not text:
        accepted_run(run, "north", config)
        return
    with pytest.raises(InputError, match=f"^site 'north' refuses the run: {text}") as caught:
        accepted_run(run, "north", config)
    assert caught.value.safe_to_send
    assert "\n" not in str(caught.value)


def test_a_site_examines_no_method_with_parts_of_its_own(job: Path, scans: dict[str, Path]) -> None:
    examines = read_run(str(job))
    for changes, text in (
        ({"method": "fedbn"}, "method fedavg and weights to begin with"),
        ({"init": ""}, "a job to plan; train and evaluate, as its policy says"),
    ):
        with pytest.raises(InputError, match=text):
            accepted_run(replace(examines, **changes), "north", config_of(scans, "north"))


@pytest.mark.parametrize(
    ("requested", "text"),
    [
        ({}, "--evaluate without a model"),
        ({"init": "nowhere.safetensors"}, "weights nowhere.safetensors"),
        ({"init": "MODEL", "method": "fedbn"}, "--evaluate with --method fedbn"),
        ({"init": "MODEL", "rounds": 3}, "--evaluate with --rounds 3"),
    ],
)
def test_what_no_job_can_examine(
    requested: dict[str, Any], text: str, model: Path, tmp_path: Path
) -> None:
    if requested.get("init") == "MODEL":
        requested = {**requested, "init": str(model)}
    with pytest.raises(InputError) as caught:
        flare_offer.export(
            "mednist", SITES, tmp_path / "out", evaluate=True, config=CONFIG, requested=requested,
            rehearsal=True,
        )  # fmt: skip
    assert str(caught.value).startswith(text)
    assert not (tmp_path / "out").exists()


@pytest.mark.flare
@pytest.mark.slow
@pytest.mark.xdist_group("provisioned federation")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # FLARE's own
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_provisioned_site_examines_and_refuses_to_train(
    model: Path, scans: dict[str, Path], tmp_path: Path
) -> None:
    """Processes, certificates and TLS; the site's policy has one word, and its figures are a simulation's."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("jobs: [evaluate]\n")
    with LocalFederation(tmp_path / "federation", ["north"], ALLOWED) as federation:
        shared = {"bundle": "mednist", "permits": [*CONFIG]}
        own = {"data": str(scans["north"]), "policy": str(policy), "audit": "audit.jsonl"}
        for name, more in ((SERVER, {}), ("north", own)):
            settings = {**shared, **more, "folder": str(tmp_path / name)}
            (federation.kit(name) / "local" / "medfl.yaml").write_text(yaml.safe_dump(settings))

        federation.start()
        federation.ready()
        asked = {"init": str(model)}
        for evaluate in (True, False):
            requested = asked if evaluate else {**asked, "rounds": 1}
            document = flare_offer.export(
                "mednist", ["north"], tmp_path / f"job-{evaluate}", evaluate=evaluate, config=CONFIG,
                requested=requested, rehearsal=True,
            )  # fmt: skip
            federation.wait(federation.submit(Path(document["job"])))

    out = tmp_path / "alone"
    flags = ["--config", "network=small_cnn", "--config", "image_size=16", "--sites", "1"]
    data = ["--data", str(scans["north"]), "--out", str(out), "--quiet"]
    assert main(["evaluate", str(model), "mednist", *flags, *data]) == 0
    alone = json.loads((out / "summary.json").read_text())["last"]
    (examined_at,) = (tmp_path / SERVER).glob("mednist-evaluate-*")
    summary = json.loads((examined_at / "summary.json").read_text())
    for metric in ("accuracy", "balanced_accuracy", "f1_macro"):
        assert summary["last"][metric] == pytest.approx(alone[metric])
    assert "received_accuracy_low" in rows_of(examined_at)["north"]
    assert (examined_at / "report.html").is_file()

    (refused_at,) = (tmp_path / SERVER).glob("mednist-fedavg-*")
    error = (refused_at / "flare" / "failed.json").read_text()
    assert "site 'north' refuses the run: a job to train; evaluate, as its policy says" in error
