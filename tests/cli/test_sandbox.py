"""`medfl run --sandbox`: the same weights as without, and what a hostile bundle cannot do in it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from medfl import datasets
from medfl.bundle.bundle import shipped_root
from medfl.cli import verbs as cli
from medfl.core import sandbox

landlock = pytest.mark.skipif(sandbox.abi() < 4, reason="the kernel's Landlock is missing, or older than ABI 4")
SMALL = ["--config=network=small_cnn", "--config=image_size=16", "--sites=2", "--batch-size=8"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom("mednist", tmp_path_factory.mktemp("data") / "mednist", per_class=10, size=16)


def started(place: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "medfl", *arguments], cwd=place, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def medfl(place: Path, *arguments: str) -> tuple[int, str]:
    """Run medfl as a program; return its exit code and what it said on stderr."""
    process = started(place, arguments)
    _, stderr = process.communicate(timeout=300)
    return process.returncode, stderr


@landlock
def test_the_weights_are_those_without_it_also_after_a_kill(data: Path, tmp_path: Path) -> None:
    run = ["run", "mednist", "--data", str(data), *SMALL]
    inside, name = [*run, "--jobs", "2", "--sandbox"], "runs/mednist-fedavg-0"
    process = started(tmp_path, [*inside, "--rounds", "100000"])
    manifest, deadline = tmp_path / name / "state" / "manifest.json", time.monotonic() + 180
    while not manifest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    rounds = json.loads(manifest.read_text())["round"] + 2
    code, stderr = medfl(tmp_path, *inside, "--out", name, "--resume", "--rounds", str(rounds))
    assert code == 0, stderr
    line = f"sandbox: Landlock ABI {sandbox.abi()}: writes below {name} only, no network, no programs"
    assert stderr.splitlines()[0] == line
    assert "ermission" not in stderr
    private = Path(os.environ["XDG_CACHE_HOME"]) / "medfl" / "sandbox"
    assert [path for path in private.iterdir() if (path / "tmp").is_dir()]
    assert cli.main([*run, "--jobs", "1", "--rounds", str(rounds), "--out", str(tmp_path / "without")]) == 0
    for file in ("weights.safetensors", "best.safetensors", "predictions.csv"):
        assert (tmp_path / name / file).read_bytes() == (tmp_path / "without" / file).read_bytes()
    records = [json.loads((tmp_path / folder / "run.json").read_text()) for folder in (name, "without")]
    assert records[0]["run_hash"] == records[1]["run_hash"]
    assert (tmp_path / name / "report.html").is_file()


@landlock
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs a C++ compiler")
def test_a_compiled_run_may_execute_the_compiler_and_says_so(data: Path, tmp_path: Path) -> None:
    run = ["run", "mednist", "--data", str(data), *SMALL, "--jobs=1", "--rounds=1", "--compile", "--sandbox"]
    code, stderr = medfl(tmp_path, *run, "--out=compiled")
    assert code == 0, stderr
    assert ", no network, programs /bin, " in stderr.splitlines()[0]
    assert "ermission" not in stderr


ATTACKS = {
    "touch": "$[__import__('pathlib').Path('CANARY').touch(), 'small_cnn'][1]",
    "move": "$[__import__('pathlib').Path.replace(__import__('pathlib').Path('VICTIM'), 'CANARY'), 'small_cnn'][1]",
    "program": {"_target_": "subprocess.run", "args": ["touch", "CANARY"], "check": True},
    "socket": "$__import__('socket').create_connection(('127.0.0.1', PORT)).close() or 'small_cnn'",
}


@landlock
@pytest.mark.parametrize(
    "attack", ["touch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("move", "program", "socket"))]
)
def test_a_hostile_bundle_that_was_let_in_does_no_harm(attack: str, data: Path, tmp_path: Path) -> None:
    """The gate is off (--trust); each attack succeeds without the sandbox, so that it is the sandbox that stops it."""
    root = shipped_root()
    assert root is not None
    bundle, canary, victim = tmp_path / "bundle", tmp_path / "canary", tmp_path / "victim"
    shutil.copytree(root / "mednist", bundle, ignore=shutil.ignore_patterns("models"))
    victim.write_text("precious")
    file = bundle / "configs" / "train.yaml"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        value = json.dumps(ATTACKS[attack]).replace("CANARY", str(canary)).replace("VICTIM", str(victim))
        value = value.replace("PORT", str(server.getsockname()[1]))
        assert "  name: '@network_name'" in file.read_text()
        file.write_text(file.read_text().replace("  name: '@network_name'", f"  name: {value}"))
        run = [
            "run",
            str(bundle),
            "--data",
            str(data),
            "--config=image_size=16",
            "--sites=2",
            "--jobs=1",
            "--rounds=1",
            "--trust",
        ]
        code, stderr = medfl(tmp_path, *run, "--sandbox", "--out", "inside")
        assert code == 2, stderr
        assert "PermissionError" in stderr
        assert not canary.exists()
        assert victim.read_text() == "precious"
        with pytest.raises(BlockingIOError):
            server.accept()
        cli.main([*run, "--out", str(tmp_path / "without")])
        if attack == "socket":
            server.accept()[0].close()
        else:
            assert canary.exists()


@landlock
def test_a_run_that_is_refused_leaves_an_empty_folder_and_one_line(tmp_path: Path) -> None:
    code, stderr = medfl(
        tmp_path, "run", "mednist", "--data=phantom", "--sandbox", "--out=a", "--preset=odd", "--quiet"
    )
    assert code == 2
    assert stderr.startswith("error: preset 'odd'")
    assert stderr.count("\n") == 1
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize("flags", [["--runtime=flare"], ["--track=mlflow:http://localhost:5000"], ["--from=run.json"]])
def test_what_needs_connections_or_names_no_folder_is_refused(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("medfl.runs.early.read_run", lambda file: None)
    bundle = [] if "--from=run.json" in flags else ["mednist"]
    assert cli.main(["run", *bundle, "--sandbox", *flags]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: --sandbox with {flags[0].replace('=', ' ', 1).removesuffix(' run.json')}; "
    )
    assert list(tmp_path.iterdir()) == []


def test_without_landlock_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sandbox, "abi", lambda: 0)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "mednist", "--data=phantom", "--sandbox"]) == 2
    error = "error: a sandbox; a Linux kernel of at least 5.13 with Landlock switched on; run it there, or without\n"
    assert capsys.readouterr().err == error
