"""FLARE jobs that ask for fingerprints: a site tells what its file would have, if its policy says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("nvflare")

from medfl.cli.verbs import main
from medfl.core.errors import InputError, RunError
from medfl.core.run import Run
from medfl.flare import offer, wire
from medfl.flare.files import read_run
from medfl.flare.parts import ALLOWED
from medfl.flare.remote import write_fingerprints
from medfl.flare.server import Asking
from medfl.flare.site import FlareSite
from medfl.flare.site_config import SiteConfig, accepted_run, open_site
from medfl.flare.wire import Payload
from medfl.policy.policy import Outbound
from medfl.runtimes.monai_fl.client import FINGERPRINT, MedflClientAlgo
from medfl.runtimes.monai_fl.held import HeldSite
from tests.flare.test_server import Near
from tests.starter.test_plan import draw, hospital
from tests.support.local_federation import SERVER, LocalFederation

SITES = ["north", "south"]
AGREES = "jobs: [plan]\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each site, 16 cases, of which 13 or so are looked at."""
    place = tmp_path_factory.mktemp("sites")
    for seed, name in enumerate(SITES):
        draw(place / name, 16, seed)

    return {name: place / name for name in SITES}


@pytest.fixture(scope="module")
def bundle(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle that says where images and masks are, as a site makes it for all."""
    path: Path = tmp_path_factory.mktemp("bundles") / "organs"
    where = ["--images", str(folders["north"] / "images"), "--masks"]
    where += [str(folders["north"] / "masks"), "--classes", "organ,tumour"]
    assert main(["new", str(path), *where, "--no-plan"]) == 0
    return path


@pytest.fixture(scope="module")
def job(bundle: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("job") / "out"
    command = ["flare", "export", str(bundle), "--data", str(folders["north"]), "--plan"]
    assert (
        main([*command, "--sites", ",".join(SITES), "--min-replies", "1", "--out", str(out)]) == 0
    )
    (job,) = out.iterdir()
    return job


@pytest.fixture(scope="module")
def run(job: Path) -> Run:
    return read_run(str(job / "app"))


def plan_of(files: list[Path], out: Path) -> bytes:
    assert main(["plan", *map(str, files), "--memory", "1", "--out", str(out)]) == 0
    return (out / "docs" / "plan.json").read_bytes()


def written(bundle: Path, folders: dict[str, Path], out: Path, names: list[str]) -> list[Path]:
    """What sites give in files."""
    out.mkdir()
    files = []
    for name in names:
        files.append(out / f"{name}.json")
        command = ["site", "fingerprint", str(bundle), "--data", str(folders[name])]
        assert main([*command, "--out", str(files[-1])]) == 0

    return files


class Apart(Near):
    """Sites with images of their own in this process."""

    def __init__(
        self,
        run: Run,
        bundle: Path,
        folders: dict[str, Path],
        change: Callable[[str, str, Payload], Payload | None] | None = None,
        **settings: Any,
    ) -> None:
        self.asked = []
        self.dropped = []
        self.gone = {}
        self.ended = False
        self._change = change or (lambda site, word, payload: payload)
        self.sites = {}
        settings = {"jobs": ["plan"], **settings}
        policy = folders["north"].parent / "policy.yaml"
        policy.write_text(AGREES)
        for name in SITES:
            config = SiteConfig(str(bundle), "unused", str(folders[name]), policy=str(policy))
            algo = MedflClientAlgo(
                lambda name=name, config=config: open_site(run, name, config), name, **settings
            )
            self.sites[name] = FlareSite(algo, name, job="plan")


def asked(
    run: Run, bundle: Path, folders: dict[str, Path], out: Path, least: int = 0, **settings: Any
) -> tuple[Path, list[str]]:
    return gathered(Apart(run, bundle, folders, **settings), out, least)


def gathered(link: Apart, out: Path, least: int = 0) -> tuple[Path, list[str]]:
    said: list[str] = []
    write_fingerprints(Asking(link), SITES, out, least, said.append)
    return out, said


@pytest.fixture(scope="module")
def answers(
    run: Run, bundle: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Payload]:
    """What the sites say, which takes them seconds to find out."""
    said: dict[str, Payload] = {}

    def keep(site: str, word: str, payload: Payload) -> Payload:
        said[site] = payload
        return payload

    asked(run, bundle, folders, tmp_path_factory.mktemp("answers") / "told", change=keep)
    return said


def test_a_planning_round_gives_the_plan_of_the_files(
    run: Run, bundle: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """And each site's audit log has what left."""
    log = tmp_path / "audit.jsonl"
    told, said = asked(run, bundle, folders, tmp_path / "told", audit=log)
    files = written(bundle, folders, tmp_path / "files", SITES)
    for file in files:
        assert json.loads((told / file.name).read_bytes()) == json.loads(file.read_bytes())

    by_wire = plan_of(sorted(told.iterdir()), tmp_path / "a" / "planned")
    assert by_wire == plan_of(files, tmp_path / "b" / "planned")
    assert said[-1].startswith("next: medfl plan")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["kind"], line["direction"]) for line in lines] == [("plan", "left")] * 2
    assert lines[0]["numbers"]["cases"] >= 10
    assert "organ" not in log.read_text()


def test_a_host_of_monai_fl_asks_for_the_same(
    run: Run, bundle: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    (file,) = written(bundle, folders, tmp_path / "files", ["north"])
    algo = Apart(run, bundle, folders).sites["north"].algo
    algo.initialize({"client_name": "north"})
    assert algo.get_data_stats({FINGERPRINT: True}).statistics == json.loads(file.read_bytes())

    silent = Apart(run, bundle, folders, jobs=[]).sites["north"].algo
    silent.initialize({"client_name": "north"})
    with pytest.raises(InputError, match="site 'north': plan; train and evaluate, as its policy"):
        silent.get_data_stats({FINGERPRINT: True})


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (Outbound(keys=("weights",)), "'fingerprint/form' is not among its keys"),
        (Outbound(min_count=99), "fewer than 99 training cases"),
        (Outbound(clip=1.0, noise=1.0, epsilon=8.0), "would leave without noise"),
    ],
)
def test_what_a_policy_keeps_back_does_not_leave(
    rules: Outbound, problem: str, run: Run, bundle: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    log = tmp_path / "audit.jsonl"
    with pytest.raises(RunError, match="site 'north' could not answer") as caught:
        asked(run, bundle, folders, tmp_path / "told", outbound=rules, audit=log)

    assert problem not in str(caught.value)  # the server is told nothing of the site
    assert problem in log.read_text()
    assert not list((tmp_path / "told").iterdir())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"form": NaN}', "NaN, which is not JSON"),
        (b'{"form": "x"}', "'grid' is a required property"),
        (b"[]", "[]"),
        (b"\xff", "UTF-8"),
        (b"", "not valid JSON"),
        (b" " * 20_000_001, "more than 20000000 bytes"),
        (None, "fingerprint/json"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_hostile_fingerprint_is_refused_by_name(
    content: bytes | None,
    problem: str,
    run: Run,
    bundle: Path,
    folders: dict[str, Path],
    answers: dict[str, Payload],
    tmp_path: Path,
) -> None:
    def spoil(site: str, word: str, payload: Payload) -> Payload:
        if site != "south":
            return payload
        if content is None:
            return Payload()
        return Payload(
            {wire.FINGERPRINT_BYTES: torch.from_numpy(np.frombuffer(content, np.uint8).copy())}
        )

    link = Apart(run, bundle, folders, change=spoil)
    link.sites = {
        name: SimpleNamespace(answer=lambda *_, name=name: answers[name]) for name in SITES
    }
    told, said = gathered(link, tmp_path / "told", least=1)
    assert [path.name for path in told.iterdir()] == ["north.json"]
    assert said[0].startswith("note: site 'south': ")
    assert problem in said[0]


def test_a_job_that_plans_is_answered_nothing_else(
    run: Run, bundle: Path, folders: dict[str, Path]
) -> None:
    site = Apart(run, bundle, folders).sites["north"]
    for word in (wire.TRAIN, wire.EXAMINE, wire.INTRODUCE):
        reason = site.answer(word, Payload()).failure_reason
        assert f"site 'north' is asked for '{word}'; it answers fingerprint" in reason

    for job in ("train", "evaluate"):
        reason = replace(site, job=job).answer(wire.FINGERPRINT, Payload()).failure_reason
        assert "is asked for 'fingerprint'; it answers" in reason


@pytest.mark.parametrize("policy", ["", "jobs: [train, evaluate]\n"])
def test_a_site_whose_policy_does_not_name_it_refuses(
    policy: str, run: Run, bundle: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(policy)
    config = SiteConfig(str(bundle), "unused", str(folders["north"]), policy=str(file))
    text = "a job to plan; train and evaluate, as its policy says"
    with pytest.raises(InputError, match=f"^site 'north' refuses the run: {text}"):
        accepted_run(run, "north", config)

    assert accepted_run(run, None, config if policy == "" else replace(config, policy="")) == run
    file.write_text(AGREES)
    accepted_run(run, "north", config)
    with pytest.raises(InputError, match="a job to plan has seed 1; seed 0"):
        accepted_run(replace(run, seed=1), "north", config)


def test_a_worker_is_believed_where_the_policy_pins_the_bundle_s_files() -> None:
    told = hospital((64, 64, 64), (1, 1, 1))
    site = HeldSite.__new__(HeldSite)
    site.name = "north"
    site._stated = {}
    for text, problem in ((told.encoded().decode(), ""), ("[]", "north': its worker: ")):
        site._worker = SimpleNamespace(
            is_running=True, ask=lambda *_, text=text, **__: {"fingerprint": text}
        )  # type: ignore[assignment]
        site._is_reviewed = False
        with pytest.raises(RunError, match="whose files its policy does not pin"):
            site.fingerprint(10, 0.0)

        site._is_reviewed = True
        if not problem:
            assert site.fingerprint(10, 0.0) == told
            continue

        with pytest.raises(InputError, match=problem):
            site.fingerprint(10, 0.0)


@pytest.mark.parametrize(
    ("requested", "problem"),
    [
        ({"rounds": 3}, "--plan with --rounds 3"),
        ({"seed": 1}, "--plan with --seed 1"),
        ({"init": "x"}, "--plan with --init x"),
        ({"method": "fedbn"}, "--plan with --method fedbn"),
    ],
)
def test_nothing_is_trained_for_a_plan(requested: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=problem):
        offer.export("hippocampus", SITES, tmp_path / "out", plan=True, requested=requested)


@pytest.mark.flare
@pytest.mark.slow
@pytest.mark.xdist_group("provisioned federation")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # FLARE's own
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_provisioned_site_tells_its_fingerprint_and_another_refuses(
    job: Path, bundle: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Processes, certificates and TLS; a worker inside walls reads the cases of the bundle that a policy pins."""
    accepts = tmp_path / "words.yaml"
    accepts.write_text(AGREES)
    pinned = tmp_path / "policy.yaml"
    command = ["site", "inspect", str(bundle), "--policy", str(accepts)]
    assert main([*command, "--write-policy", str(pinned)]) == 0
    with LocalFederation(tmp_path / "federation", SITES, ALLOWED) as federation:
        for name in (SERVER, *SITES):
            settings = {"bundle": str(bundle), "folder": str(tmp_path / name)}
            if name != SERVER:
                settings |= {"data": str(folders[name]), "audit": "audit.jsonl"}
            if name == "north":
                settings["policy"] = str(pinned)

            (federation.kit(name) / "local" / "medfl.yaml").write_text(yaml.safe_dump(settings))

        federation.start()
        federation.ready()
        federation.wait(federation.submit(job))

    (asked_at,) = (tmp_path / SERVER).glob("organs-plan-*")
    assert [path.name for path in (asked_at / "fingerprints").iterdir()] == ["north.json"]
    said = (asked_at / "flare" / "said.txt").read_text()
    assert "site 'south' refuses the run: a job to plan; train and evaluate" in said
    files = written(bundle, folders, tmp_path / "files", ["north"])
    by_wire = plan_of([asked_at / "fingerprints" / "north.json"], tmp_path / "a" / "planned")
    assert by_wire == plan_of(files, tmp_path / "b" / "planned")
