"""A run's numbers in Weights & Biases, of which a stand-in is here: it is imported only when it is asked for."""

from __future__ import annotations

import importlib
import json
import struct
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from medfl.core.errors import InputError
from medfl.runtimes.output import tracking
from medfl.runtimes.output.events import Events, scalars
from medfl.runtimes.output.tracking import parse, tracked
from medfl.storage.run_folder import RunFolder
from tests.support.toy import run_record


class Server:
    """What the stand-in was told: id -> step -> numbers, and how each run was begun and ended."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[int, dict[str, float]]] = {}
        self.begun: list[dict[str, Any]] = []
        self.ended: list[int] = []
        self.fail_from = 10**9

    def init(
        self, *, project: str, id: str | None, resume: str, name: str, dir: str, config: Any
    ) -> Any:
        ident = id or f"run{len(self.runs)}"
        told = self.runs.setdefault(ident, {})
        self.begun.append(
            {"project": project, "resume": resume, "name": name, "dir": dir, "config": config}
        )

        def log(numbers: dict[str, float], step: int) -> None:
            if step >= self.fail_from:
                raise ConnectionError("no network")
            assert step >= max(told, default=0), "it takes no earlier step"
            told[step] = numbers

        step = max(told, default=0)
        return types.SimpleNamespace(
            id=ident, step=step, log=log, finish=lambda exit_code: self.ended.append(exit_code)
        )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    module = types.ModuleType("wandb")
    module.init = made.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def entry(round_: int) -> dict[str, Any]:
    return {
        "round": round_, "train_loss": 1 / round_, "val_global": {"accuracy": round_ / 10}, "val_personal": None,
        "bytes_up": 10 * round_, "bytes_down": 7, "seconds": 0.25,
    }  # fmt: skip


def play(folder: RunFolder, track: str | None, rounds: range) -> list[str]:
    said: list[str] = []
    done = rounds.start - 1
    with Events(folder.path / "events", done, *tracked(folder, track, said.append)) as events:
        for round_ in rounds:
            folder.append_round(entry(round_))
            events.log(entry(round_))
    return said


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "a-run")
    made.write_run(run_record(method="fedprox", options={"mu": 0.1}), {"runtime": "simulator"})
    return made


def test_the_numbers_and_settings_are_there_and_a_resumed_run_goes_on(
    folder: RunFolder, server: Server
) -> None:
    said = play(folder, "wandb:lungs", range(1, 3))
    assert said == ["Weights & Biases: run run0 of project lungs"]
    assert server.runs["run0"] == {round_: scalars(entry(round_)) for round_ in (1, 2)}
    begun = server.begun[0]
    assert (begun["project"], begun["name"], begun["dir"]) == ("lungs", "a-run", str(folder.path))
    assert (begun["config"]["options.mu"], begun["config"]["sites"]) == (0.1, 3)
    assert not any(
        str(value) in ("/data/toy", "/bundles/toy") for value in begun["config"].values()
    )
    assert json.loads((folder.path / "wandb.json").read_text()) == {
        "project": "lungs",
        "run_id": "run0",
    }
    play(folder, None, range(3, 5))
    assert list(server.runs) == ["run0"]
    assert list(server.runs["run0"]) == [1, 2, 3, 4]
    assert server.ended == [0, 0]


def test_a_failure_is_said_once_and_what_is_lacking_is_written_later(
    folder: RunFolder, server: Server
) -> None:
    server.fail_from = 2
    said = play(folder, "wandb", range(1, 4))
    assert len(said) == 2
    assert said[1].startswith(
        "Weights & Biases at project medfl: ConnectionError: no network; the run goes on without"
    )
    assert list(server.runs["run0"]) == [1]
    server.fail_from = 10**9
    play(folder, None, range(4, 5))
    assert list(server.runs["run0"]) == [1, 2, 3, 4]


def test_what_is_cut_short_is_said(folder: RunFolder, server: Server) -> None:
    def stopped() -> None:
        with Events(folder.path / "events", 0, *tracked(folder, "wandb", str)) as events:
            events.log(entry(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert server.ended == [1]


def test_without_it_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        InputError, match=r"--track wandb; it needs .*; pip install 'medfl-monai\[wandb\]'"
    ):
        parse("wandb")
    with pytest.raises(InputError, match="mlflow or mlflow:URI, wandb or wandb:PROJECT"):
        parse("wandb:")


def test_nothing_imports_it_unasked(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    importlib.reload(tracking)
    assert play(folder, None, range(1, 3)) == []


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: after 7 bytes a log in blocks of 32 KiB of chunks, as LevelDB writes them."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if (left := 2**15 - at % 2**15) < 7 or not kind:
            at += left
            continue
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield whole
            whole = b""


def offline(folder: RunFolder) -> tuple[dict[str, Any], dict[int, dict[str, float]], list[int]]:
    """Read what the real package wrote offline, by its own schema: settings, numbers by round, and exit codes."""
    from wandb.proto.wandb_internal_pb2 import Record

    config, told, ended = dict[str, Any](), dict[int, dict[str, float]](), list[int]()
    for file in sorted(folder.path.glob("wandb/offline-run-*/run-*.wandb")):
        for record in map(Record.FromString, records(file.read_bytes())):
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            row = {
                i.key or "/".join(i.nested_key): json.loads(i.value_json)
                for i in record.history.item
            }
            if row:
                told[record.history.step.num] = {
                    name: v for name, v in row.items() if not name.startswith("_")
                }
            ended += [record.exit.exit_code] if record.HasField("exit") else []
    return config, told, ended


def test_the_package_itself_writes_the_numbers_and_settings(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip(
        "wandb", reason="Weights & Biases is not installed: pip install 'medfl-monai[wandb]'"
    )
    for name, value in (
        ("MODE", "offline"),
        ("SILENT", "true"),
        ("CACHE_DIR", str(tmp_path / "cache")),
    ):
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert len(play(folder, "wandb:lungs", range(1, 3))) == 1
    assert len(play(folder, None, range(3, 5))) == 1
    config, told, ended = offline(folder)
    assert told == {round_: pytest.approx(scalars(entry(round_))) for round_ in range(1, 5)}
    assert (config["options.mu"], config["sites"], config["runtime"], config["method"]) == (
        0.1,
        3,
        "simulator",
        "fedprox",
    )
    assert not any(text in json.dumps(config) for text in ("/data/toy", "/bundles/toy"))
    assert ended == [0, 0]
