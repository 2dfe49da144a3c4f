"""The audit log: a chain that shows every change, torn lines that stay, and nothing that is not in it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from medfl.cli import verbs as cli
from medfl.cli.audit_log import text
from medfl.core.errors import InputError, RunError
from medfl.core.message import Message
from medfl.policy import audit
from medfl.policy.audit import Audit, describe_message, verify


def written(path: Path, count: int = 4) -> Path:
    log = Audit(path, "clinic")
    for number in range(count):
        log.add(
            {
                "round": number,
                "direction": "came",
                "kind": "train",
                "numbers": {"samples": number / 2},
            }
        )
    return path


def test_each_line_has_the_hash_of_the_one_before(tmp_path: Path) -> None:
    lines = written(tmp_path / "log").read_bytes().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["before"] for entry in entries] == [
        None,
        *(hashlib.sha256(line).hexdigest() for line in lines[:-1]),
    ]
    assert {entry["site"] for entry in entries} == {"clinic"}
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0
    found = verify(tmp_path / "log")
    assert (len(found.entries), found.problems, found.notes) == (4, (), ())
    assert found.last == hashlib.sha256(lines[-1]).hexdigest()


def test_the_log_goes_on_in_another_process_of_the_site(tmp_path: Path) -> None:
    written(written(tmp_path / "log", 2), 3)
    found = verify(tmp_path / "log")
    assert (len(found.entries), found.problems) == (5, ())


def _many(path: Path) -> None:
    written(path, 25)


def test_processes_that_write_at_the_same_time_make_one_chain(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_many, args=(tmp_path / "log",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    found = verify(tmp_path / "log")
    assert (len(found.entries), found.problems) == (75, ())


CHANGES: dict[str, Any] = {
    "a number changed": lambda lines: [lines[0], lines[1].replace(b"0.5", b"0.7"), *lines[2:]],
    "a space added": lambda lines: [lines[0] + b" ", *lines[1:]],
    "a line removed": lambda lines: [lines[0], *lines[2:]],
    "the first line removed": lambda lines: lines[1:],
    "a line put in": lambda lines: [
        *lines[:2],
        json.dumps({"round": 9, "before": "0" * 64}).encode(),
        *lines[2:],
    ],
    "two lines exchanged": lambda lines: [lines[0], lines[2], lines[1], lines[3]],
    "a line twice": lambda lines: [*lines[:2], lines[1], *lines[2:]],
    "a line made unreadable": lambda lines: [lines[0], lines[1][:20], *lines[2:]],
    "a line of another kind": lambda lines: [lines[0], b"[1]", *lines[2:]],
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_is_changed_breaks_the_chain(what: str, tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    path.write_bytes(
        b"".join(line + b"\n" for line in CHANGES[what](path.read_bytes().splitlines()))
    )
    found = verify(path)
    assert found.problems
    with pytest.raises(InputError, match="each line names the sha256 of the one before"):
        found.require()


def test_lines_cut_off_the_end_show_by_a_hash_that_was_noted(tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    noted = verify(path).last
    written(path, 1)
    assert verify(path, noted[:12]).problems == ()
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    assert verify(path).problems == ()
    assert verify(path, noted).problems == (
        f"no line has the sha256 {noted}: lines are missing at the end",
    )


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_last_line_is_told_and_the_log_goes_on_after_it(cut: int, tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    path.write_bytes(path.read_bytes()[:-cut])
    found = verify(path)
    assert (found.problems, found.notes) == ((), ("line 4 was cut short, by a crash perhaps",))
    said: list[str] = []
    log = Audit(path, "clinic", said.append)
    assert said == [
        f"note: the last line of {path} was cut short, by a crash perhaps; it stays, the log goes on"
    ]
    log.add({"round": 5})
    log.add({"round": 6})
    lines = [json.loads(line) for line in path.read_bytes().splitlines()[4:]]
    assert [line.get("after_torn") for line in lines] == [True, None]
    assert verify(path).problems == ()
    broken = path.read_bytes().replace(b'"after_torn": true, ', b"")
    path.write_bytes(broken)
    assert verify(path).problems


def test_a_log_that_cannot_be_written_stops_what_would_leave(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="in a folder that exists"):
        Audit(tmp_path / "none" / "log")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="a file that can be written"):
        Audit(tmp_path / "folder")
    log = Audit(tmp_path / "log")
    (tmp_path / "log").unlink()
    (tmp_path / "log").mkdir()
    with pytest.raises(
        RunError, match=r"cannot be written \(Is a directory\); nothing leaves that is not in it"
    ):
        log.add({"round": 1})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_full_disk_is_told(tmp_path: Path) -> None:
    log = Audit(tmp_path / "log")
    (tmp_path / "log").unlink()
    (tmp_path / "log").symlink_to("/dev/full")
    with pytest.raises(RunError, match="No space left on device"):
        log.add({"round": 1})


def test_a_message_is_described_by_what_it_is_encoded_as() -> None:
    names = [f"layer{i}.weight" for i in range(6)]
    weights = {name: torch.full((2, 2), 0.5) for name in names}
    message = Message(
        {"weights": weights, "control": {"a": torch.tensor([3.0, 4.0])}}, {"samples": 7}
    )
    about = describe_message(message, norms=True)
    assert about["sha256"] == hashlib.sha256(message.encode()).hexdigest()
    assert (about["bytes"], about["tensors"], about["numbers"]) == (
        message.num_bytes,
        7,
        {"samples": 7.0},
    )
    assert about["groups"]["control"] == {"tensors": 1, "numbers": 2, "names": "a", "norm": 5.0}
    assert about["groups"]["weights"]["norm"] == pytest.approx(24**0.5 / 2, rel=1e-5)
    assert (
        about["groups"]["weights"]["names"]
        == "layer0.weight, layer1.weight, layer2.weight, ... layer5.weight (6)"
    )
    assert "norm" not in describe_message(message)["groups"]["control"]


def test_an_empty_log_is_intact(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    found = verify(tmp_path / "log")
    assert (found.entries, found.problems, found.last) == ((), (), "")
    assert text(found)[-1] == "INTACT"


def test_the_command_shows_the_table_and_refuses_a_broken_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "log")
    Audit(path, "clinic").add(
        {"round": 9, "direction": "refused", "kind": "train", "reason": "no \x1b[31m tensor"}
    )
    assert cli.main(["site", "audit", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "INTACT"
    assert "\x1b" not in shown
    assert "no \\x1b[31m tensor" in shown
    assert cli.main(["site", "audit", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["intact"]
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.7"))
    assert cli.main(["site", "audit", str(path)]) == 2
    captured = capsys.readouterr()
    assert "BROKEN in 1 place" in captured.out
    assert captured.err.startswith("error: audit log ")
    assert "line 3 does not follow the one before it" in captured.err
    assert cli.main(["site", "audit", str(tmp_path / "none")]) == 2


@pytest.mark.slow
def test_a_hostile_message_stays_a_line_that_can_be_read(tmp_path: Path) -> None:
    """Names of 500 characters with line ends in them, of all the numbers, groups and tensors that are taken."""
    long = "\n" + "x" * 499
    groups = {f"{i}{long}": {f"0{long}": torch.ones(1)} for i in range(256)}
    message = Message(groups, {f"{i}{long}": 1.0 for i in range(1024)})
    log = Audit(tmp_path / "log", "clinic")
    about = describe_message(message)
    log.add({"direction": "came", **about})
    log.add({"direction": "refused", "reason": "y" * 3_000_000, "what": [long] * 10_000})
    log.add({"direction": "came", **describe_message(Message({}, {"samples": 1}))})
    found = verify(tmp_path / "log")
    assert (len(found.entries), found.problems, found.notes) == (3, (), ())
    came, refused, _ = found.entries
    assert came["tensors"] == 256
    assert came["sha256"] == hashlib.sha256(message.encode()).hexdigest()
    assert (len(refused["reason"]), refused["cut"] > 1_000_000) == (4000, True)
    assert max(len(line) for line in (tmp_path / "log").read_bytes().splitlines()) < 1 << 19


def test_a_last_line_that_no_log_has_is_refused_and_not_searched(tmp_path: Path) -> None:
    """To look for its beginning in a file of gigabytes took hours."""
    path = written(tmp_path / "log")
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + 2**21)
    with pytest.raises(InputError, match="its last line has more than 1048576 bytes"):
        Audit(path, "clinic")
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(InputError, match="its last line has more than 1048576 bytes"):
        Audit(path, "clinic")


def test_a_long_log_is_verified_whole_and_its_last_lines_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_MOST_LINES", 3)
    path = written(tmp_path / "log", 9)
    noted = hashlib.sha256(path.read_bytes().splitlines()[1]).hexdigest()
    found = verify(path, noted)
    assert [entry["round"] for entry in found.entries] == [6, 7, 8]
    assert (found.lines, found.problems) == (9, ())
    assert text(found)[0] == "9 lines read; the last 3 of them:"
    assert found.as_dict()["lines"] == 9
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    assert verify(path).problems == ("line 1 does not follow the one before it",)


@pytest.mark.parametrize("line", [b"\n", b"{}\n"])
def test_a_log_of_nothing_but_damage_is_not_read_to_its_end(
    line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_MOST_LINES", 3)
    path = tmp_path / "log"
    path.write_bytes(line * 1000)
    found = verify(path)
    assert len(found.problems) + len(found.notes) < 10
    assert found.problems[-1] == "what follows is not read: too much of it is damaged"


@pytest.mark.parametrize("noted", ["", "abc", "xyz12345", "0" * 65])
def test_what_identifies_no_line_is_no_noted_hash(noted: str, tmp_path: Path) -> None:
    path = written(tmp_path / "log")
    with pytest.raises(InputError, match="8 to 64 hexadecimal digits"):
        verify(path, noted)
    assert cli.main(["site", "audit", str(path), "--noted", noted]) == 2
