"""NVIDIA FLARE's simulator, with its processes: the simulator's results bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from medfl import datasets
from medfl.cli import verbs as cli
from medfl.core.errors import InputError, RunError
from medfl.runs import launch
from medfl.storage.files import load_state, load_weights
from tests.runs.test_own_key_metric import METRICS, foreign
from tests.support.toy import bits

pytest.importorskip("nvflare")

from medfl.flare import job
from medfl.flare.job import kill_tree

pytestmark = pytest.mark.flare

OPTIONS: dict[str, dict[str, Any]] = {
    "fedbm": {"g_iterations": 2, "g_batch": 4, "synthetic_batch": 2},
    "fedhelp": {"large": "site-1", "large_network": "resnet20"},
}
"""Methods that take texts along, and have other networks; every other one is in test_server.py."""
CONFIG = {"network": "small_cnn", "image_size": 16}
FLAGS = (
    "--config=network=small_cnn", "--config=image_size=16", "--sites=2", "--partition=iid", "--cohort=1.0",
    "--local-epochs=1", "--batch-size=8",
)  # fmt: skip
"""The settings of `run`, on a command line."""


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


def run(scans: Path, out: Path, method: str, runtime: str, **changes: Any) -> dict[str, Any]:
    options, resume = changes.pop("options", OPTIONS.get(method, {})), changes.pop("resume", False)
    requested = {
        "method": method, "data": str(scans), "sites": 2, "partition": "iid", "cohort": 1.0, "rounds": 2,
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


def left(out: Path) -> dict[str, Any]:
    """What a run leaves, but for the time that it took, how it was called and the States, which the sites keep."""
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    return {
        "rounds": [
            {k: v for k, v in entry.items() if not k.startswith("seconds")} for entry in rounds
        ],
        "summary": {
            k: v
            for k, v in summary.items()
            if not k.startswith("seconds") and k != "peak_memory_bytes"
        },
        "tables": {path.name: path.read_text() for path in sorted(out.glob("*.csv"))},
        "weights": {
            path.name: bits(load_weights(path)) for path in sorted(out.glob("*.safetensors"))
        },
        "server": {
            p.name: bits(load_state(p)) for p in sorted((out / "state").glob("*server.safetensors"))
        },
    }


@pytest.mark.parametrize("method", OPTIONS)
def test_law1_flare_gives_the_simulator_s_bits(
    scans: Path, digits: Path, tmp_path: Path, method: str
) -> None:
    options = {**OPTIONS[method], **({"public": f"mnist:{digits}"} if method == "fedhelp" else {})}
    for runtime in ("simulator", "flare"):
        run(scans, tmp_path / runtime, method, runtime, options=options)
    assert left(tmp_path / "flare") == left(tmp_path / "simulator")
    assert json.loads((tmp_path / "flare" / "run.json").read_text())["runtime"] == "flare"
    assert not (tmp_path / "flare" / "flare").exists()


def test_files_that_a_process_writes_after_the_end_go_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that was killed the processes end some seconds later."""
    place, remove = tmp_path / "flare", shutil.rmtree
    place.mkdir()
    (place / "done").touch()
    (tmp_path / "summary.json").write_text(json.dumps({"rounds": 1, "seconds": 1.0}))
    late = ["output.txt"]

    def removed(path: Path, **settings: Any) -> None:
        remove(path, **settings)
        if late:
            path.mkdir()
            (path / late.pop()).touch()

    monkeypatch.setattr(shutil, "rmtree", removed)
    job._result(tmp_path, "a test")
    assert not place.exists()


def test_what_is_killed_writes_no_more_nor_does_what_it_has_started(tmp_path: Path) -> None:
    """FLARE's processes write their last lines for seconds after a run's end, each in a session of its own."""
    place = tmp_path / "flare"
    writes = "while True: place.mkdir(exist_ok=True); (place / 'log').write_text('line')"
    writer = f"from pathlib import Path; place = Path({str(place)!r})\n{writes}"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {writer!r}], start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", starts])
    while not (place / "log").exists():
        assert process.poll() is None
        time.sleep(0.01)
    kill_tree(process)
    shutil.rmtree(place)
    time.sleep(0.2)
    assert not place.exists()


def test_law1_a_run_killed_in_a_round_goes_on_with_resume(scans: Path, tmp_path: Path) -> None:
    """SCAFFOLD sends more than weights, and keeps a State at its sites; all is killed after round 1."""
    whole = run(scans, tmp_path / "whole", "scaffold", "simulator", rounds=3)
    out = tmp_path / "cut"
    words = ["run", "mednist", f"--data={scans}", "--method=scaffold", "--rounds=3", *FLAGS]
    child = subprocess.Popen(
        [sys.executable, "-m", "medfl", *words, "--runtime=flare", f"--out={out}"],
        start_new_session=True,
    )
    manifest = out / "state" / "manifest.json"
    for _ in range(1200):
        if manifest.is_file() or child.poll() is not None:
            break
        time.sleep(0.1)
    assert manifest.is_file()
    os.killpg(child.pid, signal.SIGTERM)
    assert child.wait(30) != 0
    assert json.loads(manifest.read_text())["round"] < 3
    with pytest.raises(
        InputError,
        match="--resume with --runtime simulator; the sites of a run on FLARE keep their",
    ):
        run(scans, out, "scaffold", "simulator", rounds=3, resume=True)
    again = run(scans, out, "scaffold", "flare", rounds=3, resume=True)
    assert (again["run_hash"], again["weights_sha256"]) == (
        whole["run_hash"],
        whole["weights_sha256"],
    )
    assert left(out) == left(tmp_path / "whole")


@pytest.mark.parametrize(("task", "rounds"), [("multilabel", 0), ("regression", 1)])
def test_law1_findings_and_numbers_are_the_same_trained_and_examined(
    task: str, rounds: int, tmp_path: Path
) -> None:
    """Numbers trained for a round, findings of a model that is only examined.

    Of a bundle with a key metric of its own, which is computed of all sites' cases.
    """
    folder = foreign(tmp_path, task)
    settings = {"method": "fedavg", "sites": 2, "partition": "iid", "batch_size": 8}
    if not rounds:
        model = tmp_path / "model"
        launch.federate(str(folder), requested={**settings, "rounds": 1}, out=model, jobs=1)
        settings["init"] = f"run:{model}"
    for runtime in ("simulator", "flare"):
        launch.federate(
            str(folder), requested={**settings, "rounds": rounds}, out=tmp_path / runtime, jobs=1, runtime=runtime
        )  # fmt: skip

    found = left(tmp_path / "flare")
    assert found == left(tmp_path / "simulator")
    assert METRICS[task][0] in found["summary"]["last"]


def test_a_segmentation_with_odd_names_and_predictions_is_the_same(tmp_path: Path) -> None:
    """Sites are called in the run as centres are, which FLARE would not take; masks are written where they belong."""
    data = datasets.write_phantom("skin_lesion", tmp_path / "data", per_class=12, size=16)
    items = [
        str(item["id"])
        for part in ("train", "validate", "test")
        for item in datasets.datalist("skin_lesion", data, part)
    ]
    table = tmp_path / "sites.csv"
    table.write_text(
        "id,site\n" + "".join(f"{ident},St. {'AB'[i % 2]}\n" for i, ident in enumerate(items))
    )
    for runtime in ("simulator", "flare"):
        launch.federate(
            "skin_lesion", config={"network": "unet8", "image_size": 16}, out=tmp_path / runtime, jobs=1,
            requested={"method": "fedper", "data": str(data), "partition": f"file:{table}", "rounds": 1,
                       "local_epochs": 1, "batch_size": 4},
            save_predictions=True, runtime=runtime,
        )  # fmt: skip
    assert left(tmp_path / "flare") == left(tmp_path / "simulator")
    written = [sorted(p.relative_to(out) for p in out.rglob("predictions/**/*") if p.is_file())
               for out in (tmp_path / "simulator", tmp_path / "flare")]  # fmt: skip
    assert written[0] == written[1] != []


def test_a_failure_at_a_site_is_one_line(scans: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"^site 'site-\d', round 1: the training loss is (nan|inf) at step \d+"
    ):
        run(scans, tmp_path / "run", "fedavg", "flare", lr=1e30)


def test_the_command_line_refuses_what_it_cannot_do(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [
        "run",
        "mednist",
        "--data",
        str(scans),
        "--sites",
        "2",
        "--rounds",
        "1",
        "--out",
        str(out),
    ]
    for more, text in (
        (["--jobs", "2"], "error: --jobs 2 with --runtime flare; each of its sites is a process"),
        (["--profile"], "error: --profile with --runtime flare"),
    ):
        assert cli.main([*command, "--runtime", "flare", *more]) == 2
        assert text in capsys.readouterr().err
        assert not out.exists()


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
def test_a_federation_with_certificates_on_this_machine_is_the_same(
    scans: Path, tmp_path: Path
) -> None:
    for runtime in ("simulator", "flare-poc"):
        run(scans, tmp_path / runtime, "fedper", runtime, rounds=1)
    assert left(tmp_path / "flare-poc") == left(tmp_path / "simulator")


def test_the_recipe_runs_in_flare_s_own_environment(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SimEnv` as FLARE's users know it, given the classes that it may make; every process starts by itself."""
    monkeypatch.delenv("MEDFL_TESTS_WARM")
    from nvflare.recipe.sim_env import SimEnv

    from medfl.flare.files import allow_classes
    from medfl.flare.job import local_recipe
    from medfl.flare.parts import SIMULATED
    from medfl.storage.run_folder import RunFolder

    run(scans, tmp_path / "simulator", "fedavg", "simulator", rounds=1)
    recorded, _ = RunFolder(tmp_path / "simulator").read_run()
    folder = RunFolder.create(tmp_path / "flare")
    folder.write_run(recorded, {})
    recipe, clients = local_recipe(recorded, folder.path)
    allow_classes(tmp_path / "work" / recipe.name / "local" / "resources.json", SIMULATED)
    recipe.run(SimEnv(clients=clients, num_threads=2, workspace_root=str(tmp_path / "work")))
    assert left(tmp_path / "flare") == left(tmp_path / "simulator")
