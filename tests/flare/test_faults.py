"""A provisioned FLARE federation, with TLS between processes of its own, and what can go wrong in it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from medfl import datasets
from medfl.flare import job as flare_job
from medfl.flare.parts import SIMULATED
from medfl.runs import launch
from medfl.storage.run_folder import RunFolder
from tests.flare.test_parity import CONFIG, left
from tests.support.local_federation import SERVER, LocalFederation
from tests.support.programs import python_path

pytestmark = [
    pytest.mark.flare,
    pytest.mark.slow,
    pytest.mark.xdist_group("provisioned federation"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # FLARE's own
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

SITES = ["site-1", "site-2"]
STAND_IN = "tests.support.failing_flare_site.StandIn"


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=16
    )


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """One for all tests: each puts back what it broke."""
    environment = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    with LocalFederation(
        tmp_path_factory.mktemp("federation"), SITES, [*SIMULATED, STAND_IN], environment
    ) as made:
        made.start()
        made.ready(240)
        yield made


class Job:
    """A run in a folder, its simulator's twin, and the job that a federation is given."""

    def __init__(self, scans: Path, place: Path, method: str, rounds: int) -> None:
        self.place, self.out = place, place / "run"
        self.twin = place / "twin"
        requested = {
            "method": method, "data": str(scans), "sites": 2, "partition": "iid", "rounds": rounds, "local_epochs": 1,
            "batch_size": 8,
        }  # fmt: skip
        launch.federate("mednist", config=CONFIG, requested=requested, out=self.twin, jobs=1)
        run, about = RunFolder(self.twin).read_run()
        RunFolder.create(self.out).write_run(
            run, {k: v for k, v in about.items() if k != "run_hash"}
        )
        self.run = run

    def exported(
        self, does: Mapping[int, str] | None = None, site: str = "site-2", **settings: Any
    ) -> Path:
        made, _ = flare_job.local_recipe(self.run, self.out, **settings)
        place = self.place / f"job{len(list(self.place.glob('job*')))}"
        flare_job.write_job(made, place)
        job = place / str(made.name)
        if does:
            (path,) = job.rglob("config_fed_client.json")
            document = json.loads(path.read_text())
            executor = document["executors"][0]["executor"]
            executor["path"] = STAND_IN
            executor["args"] |= {
                "site": site,
                "does": {str(round_): what for round_, what in does.items()},
            }
            path.write_text(json.dumps(document))
        return job

    def rounds(self) -> list[dict[str, Any]]:
        return RunFolder(self.out).rounds()

    def failure(self) -> str:
        document = json.loads((self.out / "flare" / "failed.json").read_text())
        return str(document.get("text") or "; ".join(document["parts"]))

    def done(self, round_: int) -> Callable[[], bool]:
        path = self.out / "state" / "manifest.json"
        return lambda: path.is_file() and json.loads(path.read_text())["round"] >= round_


def until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


def test_what_a_site_sends_is_refused_and_the_others_go_on_nor_is_it_waited_for(
    federation: LocalFederation, scans: Path, tmp_path: Path
) -> None:
    """Cut-off bytes, a header that says that two gigabytes follow, and at last no answer at all."""
    does = {1: "nan", 2: "shape", 3: "extra", 4: "pickle", 6: "truncated", 7: "claim", 8: "silent"}
    job = Job(scans, tmp_path, "fedavg", 8)
    federation.submit(job.exported(does, min_replies=1, deadline=10.0))
    until((job.out / "flare" / "done").is_file, 240)
    said = [entry.get("left_out", {}) for entry in job.rounds()]
    unreadable = "is a Unreadable; expected a dense tensor"
    texts = {
        1: "'weights/fc.bias' has NaN", 2: "'weights/fc.bias' is (3,)", 3: "'weights/backdoor' must not leave it",
        4: "is a str", 6: unreadable, 7: unreadable, 8: "no answer within 10 s",
    }  # fmt: skip
    assert said[4] == {}
    for round_, text in texts.items():
        assert list(said[round_ - 1]) == ["site-2"]
        assert text in said[round_ - 1]["site-2"]
    assert said[7] == {"site-2": "no answer within 10 s"}
    assert json.loads((job.out / "summary.json").read_text())["left_out"] == {"site-2": 7}


def test_a_site_killed_in_a_round_is_left_out_and_may_come_back(
    federation: LocalFederation, scans: Path, tmp_path: Path
) -> None:
    job = Job(scans, tmp_path, "fedavg", 3)
    federation.submit(job.exported({2: "slow"}, min_replies=1, deadline=15.0))
    until((job.out / "flare" / "site-2-2.json").is_file, 240)
    federation.kill("site-2")
    until((job.out / "flare" / "done").is_file, 240)
    said = [entry.get("left_out", {}) for entry in job.rounds()]
    assert said[0] == {}
    assert list(said[1]) == list(said[2]) == ["site-2"]
    federation.start("site-2")
    federation.ready(240)


def test_law1_a_run_goes_on_after_a_full_disk_a_killed_job_and_a_killed_server(
    federation: LocalFederation, scans: Path, tmp_path: Path
) -> None:
    """One run, of which each job does a part; the last one beside a site of another federation, which is not let in.

    That one's kit points at our server; ours gives the simulator's bits as if nobody were there.
    """
    job = Job(scans, tmp_path, "ditto", 5)
    status = federation.wait(federation.submit(job.exported({2: "disk full"})))
    assert status.startswith("FINISHED:")
    assert "COMPLETED" not in status
    assert "site-2" in job.failure()
    assert "no space left on the disk" in job.failure()
    assert len(job.rounds()) == 1

    number = federation.submit(job.exported({3: "slow"}))
    until((job.out / "flare" / "site-2-3.json").is_file, 240)
    federation.kill_jobs("site-2")
    assert "COMPLETED" not in federation.wait(number)
    assert len(job.rounds()) == 2

    federation.submit(job.exported({4: "slow"}))
    until((job.out / "flare" / "site-2-4.json").is_file, 240)
    federation.kill(SERVER)
    assert job.done(3)()
    assert not job.done(5)()
    federation.start(SERVER)
    federation.ready(240)

    with LocalFederation(tmp_path / "other", ["site-1"], SIMULATED) as other:
        paths = [made.kit("site-1") / "startup" / "fed_client.json" for made in (federation, other)]
        ours, theirs = (json.loads(path.read_text()) for path in paths)
        theirs["servers"] = ours["servers"]
        paths[1].write_text(json.dumps(theirs))
        other.start("site-1")
        until(
            lambda: (
                "CERTIFICATE_VERIFY_FAILED" in other.log("site-1")
                or "certificate" in other.log("site-1").lower()
            ),
            90,
        )
        assert federation.wait(federation.submit(job.exported())) == "FINISHED:COMPLETED"
    assert left(job.out) == left(job.twin)
