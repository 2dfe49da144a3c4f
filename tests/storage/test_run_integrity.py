"""What a run goes on with is looked at before anything of it is changed."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from medfl.core.errors import InputError
from medfl.core.run import hash_as_recorded, withdrawn_settings
from medfl.storage.files import file_sha256, save_state
from medfl.storage.run_folder import RunFolder
from medfl.storage.run_integrity import read_verified_run, verified_manifest
from tests.storage.test_run_folder import commit, server
from tests.support.toy import run_record


def made(path: Path, rounds: int = 3) -> RunFolder:
    """A run of three rounds with two sites; the second was the best."""
    folder = RunFolder.create(path)
    folder.write_run(run_record(), {})
    for round_ in range(1, rounds + 1):
        folder.append_round({"round": round_})
        if round_ <= 2:
            folder.save_best(round_, server(round_))
            folder.write_weights("best", server(round_)["weights"])
        record = {"best": {"round": min(round_, 2), "value": 0.5}}
        commit(folder, round_, server(round_), {"a": {"x": round_}, "b": {"y": round_}}, record)
    return folder


def content(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_whole_folder_is_gone_on_with(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    manifest = verified_manifest(RunFolder(folder.path))
    assert manifest is not None
    assert manifest["round"] == 3
    assert set(manifest["sha256"]) == {path.name for path in folder.state.glob("*.safetensors")}
    assert RunFolder(folder.path).best_state()["weights"]["w"].item() == 2
    assert len(manifest["sha256"]) == 4


def aged(folder: Path) -> None:
    """Have all files last changed an hour ago."""
    then = time.time() - 3600
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


def test_a_state_is_read_again_only_where_its_file_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = made(tmp_path / "run"), list[str]()

    def counted(path: Path) -> str:
        read.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr("medfl.storage.run_integrity.file_sha256", counted)
    for _ in range(2):
        verified_manifest(RunFolder(folder.path))
    assert len(read) == 8, "what changed a moment ago is read each time"
    aged(folder.path)
    read.clear()
    for _ in range(2):
        manifest = verified_manifest(RunFolder(folder.path))
    assert manifest is not None
    assert sorted(read) == sorted(manifest["sha256"])
    broken = folder.state / manifest["sites"]["a"]
    flipped(broken)
    with pytest.raises(InputError, match=re.escape(f"{broken} is not as the run wrote it")):
        verified_manifest(RunFolder(folder.path))


def test_before_the_first_round_there_is_nothing_to_lose(tmp_path: Path) -> None:
    """A kill leaves at most the line and the States of round 1."""
    folder = made(tmp_path / "run", rounds=0)
    assert verified_manifest(folder) is None
    folder.append_round({"round": 1})
    save_state(folder.state_path(1, "a"), {"x": 1})
    assert verified_manifest(folder) is None


def test_a_kill_at_any_moment_of_a_round_is_no_damage(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    save_state(folder.state_path(4, "a"), {"x": 4})
    with (folder.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4}\n{"rou')
    again = RunFolder(folder.path)
    again.save_best(4, server(4))
    again.write_weights("best", server(4)["weights"])
    assert verified_manifest(RunFolder(folder.path)) is not None
    assert RunFolder(folder.path).best_state()["weights"]["w"].item() == 2, "round 4 is not over"


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a site's State": (
        lambda p: flipped(p / "state" / "000003-site-a.safetensors"),
        "000003-site-a",
    ),
    "a bit of the server's State": (
        lambda p: flipped(p / "state" / "000003-server.safetensors"),
        "000003-server",
    ),
    "a bit of the best State": (
        lambda p: flipped(p / "state" / "000002-best.safetensors"),
        "000002-best",
    ),
    "no State of a site": (
        lambda p: (p / "state" / "000003-site-b.safetensors").unlink(),
        "000003-site-b.* missing",
    ),
    "no best State": (
        lambda p: (p / "state" / "000002-best.safetensors").unlink(),
        "000002-best.* missing",
    ),
    "no best weights": (lambda p: (p / "best.safetensors").unlink(), "best.safetensors is missing"),
    "no manifest": (lambda p: (p / "state" / "manifest.json").unlink(), "manifest.json is missing"),
    "no rounds": (lambda p: (p / "rounds.jsonl").unlink(), "rounds.jsonl.* line 1 "),
    "a short table": (
        lambda p: (p / "rounds.jsonl").write_text('{"round": 1}\n'),
        "rounds.jsonl.* line 2 ",
    ),
    "a round twice": (
        lambda p: (p / "rounds.jsonl").write_text(
            '{"round": 1}\n{"round": 1}\n{"round": 2}\n{"round": 3}\n'
        ),
        "rounds.jsonl.* line 2 ",
    ),
    "a damaged line": (
        lambda p: (p / "rounds.jsonl").write_bytes(b'{"round": 1}\n{"ro\xff}\n{"round": 3}\n'),
        "rounds.jsonl.* line 2 ",
    ),
    "a line that is no round": (
        lambda p: (p / "rounds.jsonl").write_text("1\n2\n3\n"),
        "rounds.jsonl.* line 1 ",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_in_a_line_and_nothing_is_changed(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path / "run")
    damage, told = DAMAGE[name]
    damage(folder.path)
    before = content(folder.path)
    with pytest.raises(InputError, match=f"{told}.*restore .* start the run anew"):
        verified_manifest(RunFolder(folder.path))
    assert content(folder.path) == before


@pytest.mark.parametrize("left", ["rounds.jsonl", "summary.json", "000003-server.safetensors"])
def test_states_that_are_gone_are_not_taken_for_a_new_run(tmp_path: Path, left: str) -> None:
    folder = made(tmp_path / "run")
    (folder.path / "summary.json").write_text("{}")
    for path in [*folder.path.rglob("*.json*"), *folder.state.iterdir()]:
        if path.is_file() and path.name not in (left, "run.json"):
            path.unlink()
    with pytest.raises(InputError, match="manifest.json is missing, though rounds are done"):
        verified_manifest(RunFolder(folder.path))


def test_an_older_folder_without_sums_is_gone_on_with(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    manifest = {k: v for k, v in (folder.manifest() or {}).items() if k not in ("sha256", "best")}
    (folder.state / "manifest.json").write_text(json.dumps(manifest))
    (folder.state / "000002-best.safetensors").rename(folder.state / "best-server.safetensors")
    again = RunFolder(folder.path)
    assert verified_manifest(again) == manifest
    commit(again, 4, server(4), {"a": {"x": 4}}, manifest["record"])
    assert again.best_state()["weights"]["w"].item() == 2
    assert set((again.manifest() or {})["sha256"]) == {
        path.name for path in folder.state.glob("*.safetensors")
    }


@pytest.mark.parametrize(
    "text", ["[]", "null", "{}", '{"round": "3", "server": "x", "sites": {}, "record": {}}']
)
def test_an_odd_manifest_is_our_own_error(tmp_path: Path, text: str) -> None:
    folder = made(tmp_path / "run")
    (folder.state / "manifest.json").write_text(text)
    with pytest.raises(InputError, match="manifest.json (holds no|lacks|has) .*; restore the file"):
        verified_manifest(folder)


def test_an_edited_record_is_another_run(tmp_path: Path) -> None:
    path = made(tmp_path / "run").path / "run.json"
    assert read_verified_run(path)[0] == run_record()
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "lr": 0.3}))
    with pytest.raises(InputError, match="run hash .* as medfl wrote it.*; restore the file"):
        read_verified_run(path)
    path.write_text(json.dumps({**document, "command": "another", "bundle_path": "/moved"}))
    assert read_verified_run(path)[0].bundle_path == "/moved", "what is not hashed may change"


CAPTURED_HASH = "f8b8ece922b1bde0424a15a808c5ef2496967fcbb8ef86b182fad17b4671b4d6"
"""The hash that 0.7 gave to `run_record` with capture and four sites a pack."""


def test_a_record_with_settings_that_were_withdrawn_is_read(tmp_path: Path) -> None:
    """Releases to 0.7 wrote capture and pack into the record and into the hash, where they were not at defaults."""
    path = made(tmp_path / "run").path / "run.json"
    document = json.loads(path.read_text())
    older = {**document, "capture": True, "pack": 4, "run_hash": CAPTURED_HASH}
    path.write_text(json.dumps(older))
    assert read_verified_run(path)[0] == run_record()
    path.write_text(json.dumps({**older, "pack": 5}))
    with pytest.raises(InputError, match="run hash .* as medfl wrote it"):
        read_verified_run(path)


def test_withdrawn_settings_at_their_defaults_are_no_part_of_a_hash() -> None:
    document = run_record().to_dict()
    assert (
        run_record().run_hash == "60d7022ae49cfbb471cd90deead47fe0d473bb5054391502d884ea7a5ed28db6"
    ), "as of 0.7"
    assert hash_as_recorded({**document, "capture": False, "pack": 1}) == run_record().run_hash
    assert withdrawn_settings({**document, "capture": False, "pack": 4}) == {"pack": 4}
