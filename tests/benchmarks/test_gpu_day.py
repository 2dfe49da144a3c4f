"""benchmarks/gpu_day.py and gpu_kit.py as far as they need neither a GPU nor a network."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from medfl import datasets
from medfl.bundle.open import phantom_folder
from medfl.cli import main
from tests.benchmarks.test_gpu import loaded
from tests.support.phantoms import draw_small
from tests.support.programs import python_path

ROOT = Path(__file__).resolve().parents[2]


def day(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, ROOT / "benchmarks" / "gpu_day.py", *arguments]
    return subprocess.run([str(word) for word in words], capture_output=True, text=True)


def documents(out: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = loaded("gpu_day", monkeypatch)
    monkeypatch.setattr(module, "STAGES", dict(module.STAGES))
    return module


def stage(script: Any, tmp_path: Path, name: str = "busy", minutes: float = 5.0) -> Any:
    where = tmp_path / "out", tmp_path / "work", tmp_path / "kit"
    return script.Day(name, *where, minutes, minutes, True, "cpu")


def test_the_stages_are_listed_with_what_they_answer() -> None:
    lines = day("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines][:8] == [
        "environment", "tests", "table3", "steps", "volumes", "fedhelp", "fedmr", "busy",
    ]  # fmt: skip
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize("arguments", [[], ["busy"], ["--out", "here"]])
def test_what_is_missing_is_said_in_a_line(
    arguments: list[str],
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", *arguments])
    assert script.main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert len(printed.err.splitlines()) == 1


def test_a_command_is_cut_when_the_time_is_over_and_goes_on(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call finds the rows of the first; a stage that is done is not done again."""
    monkeypatch.setattr(script, "STOPPING", 2)
    monkeypatch.setattr(script, "SHORTEST", 1)

    def busy(day: Any) -> None:
        """Count calls."""
        day.add({"name": f"call {len(day.rows) + 1}"})
        if len(day.rows) < 2:
            day.command("-c", "import time; time.sleep(60)")

    script.STAGES["busy"] = busy
    first = stage(script, tmp_path, minutes=(script.STOPPING + 1.5) / 60)
    assert script.run(first) == 3
    found = documents(tmp_path / "out")["busy"]
    assert (found["status"], [row["name"] for row in found["rows"]]) == ("cut", ["call 1"])
    assert script.run(stage(script, tmp_path)) == 0
    assert script.run(stage(script, tmp_path)) == 0
    found = documents(tmp_path / "out")["busy"]
    assert (found["status"], [row["name"] for row in found["rows"]]) == (
        "done",
        ["call 1", "call 2"],
    )
    assert "done before" in (tmp_path / "out" / "busy.log").read_text()


def test_a_stage_that_fails_says_why_and_is_no_success(script: Any, tmp_path: Path) -> None:
    def busy(day: Any) -> None:
        """Fail."""
        raise RuntimeError("no such thing")

    script.STAGES["busy"] = busy
    assert script.run(stage(script, tmp_path)) == 1
    assert documents(tmp_path / "out")["busy"]["error"] == "RuntimeError: no such thing"


def test_a_protocol_that_does_not_fit_has_fewer_rounds(
    script: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Two runs of 2 s a round are 200 rounds in 800 s; of the stage's 300 s, 280 s are left: 70 rounds."""
    made = stage(script, tmp_path, "table3")
    made.document["seconds"], made.total = 20.0, 5.0
    trained: list[tuple[str, int]] = []

    def train(name: str, rounds: int, *arguments: str) -> dict[str, Any]:
        trained.append((name, rounds))
        lines = [json.dumps({"seconds": 2.0, "seconds_server": 0.0})] * rounds
        made.folder(name).mkdir(parents=True, exist_ok=True)
        (made.folder(name) / "rounds.jsonl").write_text("\n".join(lines))
        return {"name": name, "rounds": rounds}

    monkeypatch.setattr(made, "train", train)
    made.protocol({"a": [], "b": []}, 200, {"a": [67.4, 3.6]})
    assert trained == [("a", 7), ("b", 7), ("a", 70), ("b", 70)]
    found = documents(tmp_path / "out")["table3"]
    assert (found["rounds"], found["of_rounds"]) == (70, 200)
    assert [row["published"] for row in found["rows"]] == [[67.4, 3.6], None]


def test_a_run_travels_in_pieces_and_goes_on(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["gpu_stages"], "PIECE", 50_000)
    work, other = tmp_path / "work", tmp_path / "other"
    run = work / "runs" / "table3-fedavg-0"
    config = [
        "--config",
        "network=two_conv",
        "--config",
        "image_size=28",
        "--eval-every",
        "0",
        "--quiet",
    ]
    flags = ["mednist", "--data", "phantom", "--sites", "2", "--rounds", "1", *config]
    assert main(["run", *flags, "--out", str(run)]) == 0
    (work / "table3.json").write_text(
        json.dumps({"stage": "table3", "rows": [{"name": "fedavg-0", "rounds": 1, "of_rounds": 2}]})
    )
    parts = 1
    for part in range(20):
        made = stage(script, tmp_path, "checkpoint")
        made.part, made.out = part, tmp_path / f"part{part}"
        made.out.mkdir()
        assert script.run(made) == 0
        parts = documents(made.out)["checkpoint"]["rows"][0]["parts"]
        if part + 1 == parts:
            break
    assert parts > 1
    for part in range(parts):
        taken = stage(script, tmp_path, "restore")
        taken.work, taken.pieces = other, tmp_path / f"part{part}"
        other.mkdir(exist_ok=True)
        assert script.run(taken) == 0
    assert documents(tmp_path / "out")["restore"]["rows"][0]["complete"]
    assert json.loads((other / "table3.json").read_text())["rows"][0]["name"] == "fedavg-0"
    resumed = other / "runs" / "table3-fedavg-0"
    assert main(["run", "--resume", "--rounds", "2", "--out", str(resumed), "--quiet"]) == 0
    assert json.loads((resumed / "summary.json").read_text())["rounds"] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_stages_run_dry(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage starts programs as the day does; the runs of the others are made in this process."""
    started = script.Day.command

    def command(day: Any, *words: str | Path) -> tuple[int, str]:
        if day.stage == "environment" or words[:2] != ("-m", "medfl"):
            return started(day, *words)
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            code = main([str(word) for word in words[2:]])
        return code, said.getvalue()

    monkeypatch.setattr(script.Day, "command", command)
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--dry", "--out", str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", python_path())
    draw_small(monkeypatch, ham10000=60)  # one of its stages needs as many
    phantom_folder("mednist")  # small also for the programs
    assert script.main() == 0, [path.read_text()[-2000:] for path in tmp_path.glob("*.log")]
    found = documents(tmp_path)
    assert {name: one["status"] for name, one in found.items()} == dict.fromkeys(found, "done")
    assert len(found) == 8
    assert all(one["dry"] and one["cpu_seconds"] > 0 for one in found.values())
    rows = {row["name"]: row for row in found["table3"]["rows"]}
    assert set(rows) == {"fedavg-0", "fedetf-0", "fedcb-0", "fedbm-0"}
    assert rows["fedbm-0"]["published"] == {
        "accuracy": [0.7275, 0.0088],
        "f1_macro": [0.4543, 0.0313],
    }
    assert all(row["data_source"] == "phantom" for row in rows.values())


# The kit


def test_the_kits_images_are_those_of_the_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn images in the place of the real ones; the wheels need a network and are left out."""
    kit = loaded("gpu_kit", monkeypatch)
    drawn = datasets.write_phantom("ham10000", tmp_path / "drawn", per_class=10, size=40)
    source = tmp_path / "data" / "ham10000"
    source.mkdir(parents=True)
    for name in ("labels.csv", "dermamnist_split.csv"):
        (drawn / name).rename(source / name)
    for centre in kit.CENTRES:
        with zipfile.ZipFile(source / f"images_{centre}.zip", "w") as made:
            for path in sorted((drawn / f"images_{centre}").glob("*.jpg")):
                made.write(path, path.name)
    kit.skin(source, tmp_path / "kit")
    with (
        zipfile.ZipFile(tmp_path / "kit" / "images_rosendahl.zip") as made,
        made.open(made.namelist()[0]) as file,
    ):
        assert Image.open(file).size == (128, 128)
    assert main(["data", "check", "ham10000", "--data", str(tmp_path / "kit")]) == 0


def test_a_kit_without_its_images_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = loaded("gpu_kit", monkeypatch)
    monkeypatch.setattr(
        sys, "argv", ["gpu_kit.py", "--data", str(tmp_path), "--out", str(tmp_path / "kit")]
    )
    assert kit.main() == 2
    assert capsys.readouterr().err.startswith(
        f"error: --data {tmp_path}; a folder with ham10000/labels.csv"
    )
    assert not (tmp_path / "kit").exists()


def test_without_simpleitk_and_pydicom_everything_but_dicom_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "SimpleITK", None)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    volumes = datasets.write_phantom("hippocampus", tmp_path / "volumes", per_class=10, size=24)
    assert main(["data", "check", "hippocampus", "--data", str(volumes)]) == 0
