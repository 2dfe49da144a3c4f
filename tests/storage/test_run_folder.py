"""What a run leaves, and what a kill at any moment may leave."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from medfl.core.errors import InputError, RunError
from medfl.storage.files import load_state, load_weights, save_state
from medfl.storage.run_documents import read_rows, require_plain
from medfl.storage.run_folder import RunFolder
from medfl.storage.run_reader import RunReader
from tests.support.toy import bits, run_record


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "out")
    made.write_run(run_record(), {"command": "medfl run toy"})
    return made


def server(value: float) -> dict:
    return {"weights": {"w": torch.tensor([value])}}


def commit(folder: RunFolder, round_: int, value: dict, states: dict, record: dict) -> None:
    """Save the sites' States as those who train there do, and then the round."""
    for name, state in states.items():
        save_state(folder.state_path(round_, name), state)
    folder.accept_states(round_, [*states])
    folder.commit(round_, value, record)


def load(path: Path) -> tuple[dict, dict]:
    """What a process that opens the folder anew finds: the server's State and those of the sites."""
    folder = RunFolder(path)
    manifest = folder.manifest()
    return folder.server_state(manifest), {
        name: load_state(folder.newest_state(name).path) for name in manifest["sites"]
    }


# Making and opening


def test_a_new_or_empty_folder_is_taken_and_another_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("new/deep", "empty"):
        RunFolder.create(tmp_path / name)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    for name in ("full", "file"):
        with pytest.raises(InputError, match=f"{name} exists and is not empty; .*--resume"):
            RunFolder.create(tmp_path / name)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["x"]
    RunFolder.create(tmp_path / "full", beside=("x",))


def test_a_folder_that_cannot_be_made_is_our_own_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be made"):
        RunFolder.create(tmp_path / "file" / "below")


def test_only_a_run_can_be_opened(tmp_path: Path, folder: RunFolder) -> None:
    with pytest.raises(InputError, match="holds no run"):
        RunFolder.existing(tmp_path)
    assert RunFolder.existing(folder.path).read_run()[0] == run_record()


def test_the_record_is_read_back_with_its_hash(folder: RunFolder) -> None:
    run, document = folder.read_run()
    assert run == run_record()
    assert document["run_hash"] == run.run_hash
    assert document["command"] == "medfl run toy"


@pytest.mark.parametrize("text", ["", "{", "[1", '{"bundle": "x"}', "\xff"])
def test_a_damaged_record_is_bad_input(folder: RunFolder, text: str) -> None:
    (folder.path / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError):
        folder.read_run()


# State


def test_commit_and_load(folder: RunFolder) -> None:
    assert folder.manifest() is None
    states = {"a": {"c": torch.randn(3)}, "b": {"c": torch.randn(3)}}
    commit(folder, 1, server(1), states, {"best": {"round": 1, "value": 0.5}})
    commit(
        folder, 2, server(2), {"b": {"c": torch.zeros(3)}}, {"best": {"round": 2, "value": 0.75}}
    )
    manifest = RunFolder(folder.path).manifest()
    assert (manifest["round"], manifest["record"]) == (2, {"best": {"round": 2, "value": 0.75}})
    loaded, sites = load(folder.path)
    assert bits(loaded) == bits(server(2))
    assert bits(sites) == bits({"a": states["a"], "b": {"c": torch.zeros(3)}})


def test_old_and_leftover_files_are_removed(folder: RunFolder) -> None:
    commit(folder, 1, server(1), {"a": {"x": 1}}, {})
    for name in (".000009.server.safetensors.tmp", "000007.a.safetensors"):
        (folder.state / name).write_bytes(b"half")
    commit(RunFolder(folder.path), 2, server(2), {}, {})
    manifest = folder.manifest()
    named = {"manifest.json", manifest["server"], *manifest["sites"].values()}
    assert {p.name for p in folder.state.iterdir()} == named
    assert load(folder.path)[1] == {"a": {"x": 1}}


def test_a_site_keeps_the_newest_of_its_files_only(folder: RunFolder) -> None:
    for round_, names in enumerate(("ab", "a", "b", "b"), start=1):
        commit(folder, round_, server(round_), {name: {"x": round_} for name in names}, {})
        assert folder.manifest()["round"] == round_
    assert load(folder.path)[1] == {"a": {"x": 2}, "b": {"x": 4}}
    assert {p.name for p in folder.state.iterdir()} == {
        "manifest.json", "000004-server.safetensors", "000002-site-a.safetensors", "000004-site-b.safetensors",
    }  # fmt: skip


def test_what_was_saved_but_not_committed_is_not_found_again(folder: RunFolder) -> None:
    commit(folder, 1, server(1), {"a": {"x": 1}}, {})
    for name in ("a", "b"):
        save_state(folder.state_path(2, name), {"x": 2})
    folder.accept_states(2, ["a", "b"])
    assert (
        load_state(folder.newest_state("a").path)
        == load_state(folder.newest_state("b").path)
        == {"x": 2}
    )
    again = RunFolder(folder.path)  # after a kill
    assert load_state(again.newest_state("a").path) == {"x": 1}
    assert again.newest_state("b") is None
    commit(again, 2, server(2), {"a": {"x": 3}}, {})
    assert load(folder.path)[1] == {"a": {"x": 3}}
    assert not folder.state_path(2, "b").exists()


BEST = {round_: {"best": {"round": round_, "value": 0.5}} for round_ in (1, 2)}


@pytest.mark.parametrize("at", range(4))
def test_a_full_disk_at_any_write_keeps_the_last_round(
    folder: RunFolder, monkeypatch, at: int
) -> None:
    """Round 2 writes the server's State, two sites' and the manifest; each of the four renames fails once."""
    commit(folder, 1, server(1), {"a": {"x": 1}}, BEST[1])
    replace, calls = os.replace, []

    def failing(source, target):
        calls.append(target)
        if len(calls) == at + 1:
            raise OSError(errno.ENOSPC, "full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(RunError, match="no space left"):
        commit(folder, 2, server(2), {"a": {"x": 2}, "b": {"x": 3}}, BEST[2])
    monkeypatch.undo()
    manifest = folder.manifest()
    assert (manifest["round"], manifest["record"]) == (1, BEST[1])
    loaded, sites = load(folder.path)
    assert bits(loaded) == bits(server(1))
    assert sites == {"a": {"x": 1}}
    commit(folder, 2, server(2), {"a": {"x": 2}, "b": {"x": 3}}, BEST[2])
    assert load(folder.path)[1] == {"a": {"x": 2}, "b": {"x": 3}}
    assert len(list(folder.state.iterdir())) == 4


def test_damaged_state_is_our_own_error(folder: RunFolder) -> None:
    commit(folder, 1, server(1), {"a": {"x": 1}}, {})
    manifest = folder.manifest()
    (folder.state / manifest["sites"]["a"]).write_bytes(b"short")
    with pytest.raises(RunError, match="cannot read the saved state"):
        load(folder.path)
    (folder.state / "manifest.json").write_text('{"round": 1, "serv')
    with pytest.raises(InputError, match="manifest.json: not valid JSON"):
        folder.manifest()


@pytest.mark.parametrize(
    "name",
    ["a/b", "..", ".", "", "a b", "Zürich", "x" * 300, "a%2fb", "a.b", "CON", "\u2603"],
)
def test_any_site_name_is_a_file_of_the_folder(folder: RunFolder, name: str) -> None:
    commit(folder, 1, server(1), {name: {"x": 1}, "other": {"x": 2}}, {})
    assert load(folder.path)[1] == {name: {"x": 1}, "other": {"x": 2}}
    assert {p.parent for p in folder.path.rglob("*.safetensors")} == {folder.state}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("a/b", "a%2fb"),
        ("x" * 300, "x" * 301),
        ("a.b", "a_b"),
        ("\u2603", "&03"),
    ],
)
def test_different_sites_have_different_files(folder: RunFolder, left: str, right: str) -> None:
    commit(folder, 1, server(1), {left: {"x": 1}, right: {"x": 2}}, {})
    assert load(folder.path)[1] == {left: {"x": 1}, right: {"x": 2}}


def test_a_site_may_be_called_server(folder: RunFolder) -> None:
    commit(folder, 1, server(1), {"server": {"x": 1}}, {})
    loaded, sites = load(folder.path)
    assert bits(loaded) == bits(server(1))
    assert sites == {"server": {"x": 1}}


# Rounds


def test_rounds_are_read_back_and_cut_at_the_last_committed_one(folder: RunFolder) -> None:
    assert folder.rounds() == []
    for round_ in (1, 2, 3):
        folder.append_round({"round": round_, "val": {"auroc": 0.1}})
    assert [entry["round"] for entry in folder.rounds()] == [1, 2, 3]
    assert [entry["round"] for entry in folder.truncate_rounds(2)] == [1, 2]
    assert [entry["round"] for entry in folder.rounds()] == [1, 2]
    folder.append_round({"round": 3})
    assert [
        json.loads(line)["round"]
        for line in (folder.path / "rounds.jsonl").read_text().splitlines()
    ] == [1, 2, 3]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_half_written_last_line_is_dropped(folder: RunFolder, cut: int) -> None:
    path = folder.path / "rounds.jsonl"
    folder.append_round({"round": 1, "x": [1, 2, 3]})
    whole = path.read_bytes()
    folder.append_round({"round": 2, "x": [1, 2, 3]})
    path.write_bytes(path.read_bytes()[: len(whole) + cut])
    assert [entry["round"] for entry in folder.rounds()] == [1]
    folder.truncate_rounds(1)
    assert path.read_bytes() == whole
    folder.append_round({"round": 2})
    assert [entry["round"] for entry in folder.rounds()] == [1, 2]


def test_a_line_without_its_newline_is_not_run_into(folder: RunFolder) -> None:
    path = folder.path / "rounds.jsonl"
    folder.append_round({"round": 1})
    path.write_bytes(path.read_bytes()[:-1])
    folder.truncate_rounds(1)
    folder.append_round({"round": 2})
    assert [entry["round"] for entry in folder.rounds()] == [1, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_while_appending_is_our_own_error(folder: RunFolder) -> None:
    (folder.path / "rounds.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match="rounds.jsonl.*--resume"):
        folder.append_round({"round": 1})


# Results


def test_tables_have_the_columns_of_all_rows(folder: RunFolder) -> None:
    folder.write_table("t.csv", [{"site": "a, b", "x": 1}, {"site": "c", "y": 2.5}])
    assert (folder.path / "t.csv").read_text() == 'site,x,y\n"a, b",1,\nc,,2.5\n'


def test_no_cell_is_a_formula_and_names_come_back(folder: RunFolder) -> None:
    folder.write_table("sites.csv", [{"site": "=cmd()", "x": -1.5}, {"site": "north", "x": 2}])
    assert (folder.path / "sites.csv").read_text() == "site,x\n'=cmd(),-1.5\nnorth,2\n"
    assert [row["site"] for _, row in read_rows(folder.path / "sites.csv")] == ["=cmd()", "north"]


@pytest.mark.parametrize("name", ["=cmd()", "@x", "-1+a|b", "'=1"])
def test_no_name_of_a_column_is_a_formula(folder: RunFolder, name: str) -> None:
    """A bundle calls its own metric as it likes."""
    folder.write_table("predictions.csv", [{"id": "a", name: 0.5}])
    written = (folder.path / "predictions.csv").read_text()
    assert next(csv.reader(io.StringIO(written)))[1] == f"'{name}"
    assert read_rows(folder.path / "predictions.csv") == [(2, {"id": "a", name: "0.5"})]


def test_weights_and_summary(folder: RunFolder) -> None:
    folder.write_weights("best", {"w": torch.ones(2)})
    assert load_weights(folder.path / "best.safetensors")["w"].tolist() == [1, 1]
    folder.write_summary({"status": "finished", "names": ("a", "b")})
    assert json.loads((folder.path / "summary.json").read_text()) == {
        "status": "finished",
        "names": ["a", "b"],
        "table_rows": {},
    }


WEIGHTS = {
    "b/w": torch.randn(3, 5),
    "a/w": torch.randn(2).double(),
    "a/flag": torch.tensor([True, False, True]),
    "half": torch.randn(3).half(),
    "brain": torch.randn(5).bfloat16(),
    "count": torch.tensor(7),
    "empty": torch.zeros(0, 4),
    "turned": torch.randn(4, 3).T,
}


def test_weights_that_are_no_dict_are_written_one_by_one_and_read_as_any(folder: RunFolder) -> None:
    folder.write_weights("streamed", MappingProxyType(WEIGHTS))
    folder.write_weights("whole", WEIGHTS)
    streamed, whole = (
        load_weights(folder.path / f"{name}.safetensors") for name in ("streamed", "whole")
    )
    assert bits(streamed) == bits(dict(sorted(WEIGHTS.items()))) == bits(whole)


def test_a_full_disk_keeps_the_weights_that_were_streamed_before(
    folder: RunFolder, monkeypatch
) -> None:
    folder.write_weights("best", MappingProxyType({"w": torch.ones(2)}))

    def full(source, target):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunError, match="best.safetensors .*; free space or check its rights"):
        folder.write_weights("best", MappingProxyType(WEIGHTS))
    assert load_weights(folder.path / "best.safetensors")["w"].tolist() == [1, 1]
    assert not [path for path in folder.path.iterdir() if path.name.endswith(".tmp")]


def test_a_manifest_of_medfl_0_6_has_the_rounds_in_the_names_of_files(folder: RunFolder) -> None:
    """It lists file names only; on FLARE the files themselves are at the sites."""
    commit(folder, 1, server(1), {"a": {"x": 1}, "b": {"x": 1}}, {})
    commit(folder, 2, server(2), {"b": {"x": 2}}, {})
    manifest = folder.manifest()
    assert manifest.pop("rounds") == {"a": 1, "b": 2}
    (folder.state / "manifest.json").write_text(json.dumps(manifest))
    again = RunFolder(folder.path)
    assert [again.newest_state(name).round for name in "ab"] == [1, 2]
    assert again.newest_state("c") is None
    commit(again, 3, server(3), {"a": {"x": 3}}, {})
    assert again.manifest()["rounds"] == {"a": 3, "b": 2}


@pytest.mark.parametrize("name", ["sites.csv", "predictions.csv"])
@pytest.mark.parametrize("change", [lambda lines: lines[:-1], lambda lines: [*lines, lines[-1]]])
def test_a_table_that_was_cut_or_doubled_after_the_run_is_refused(
    tmp_path: Path, name: str, change: Callable[[list[str]], list[str]]
) -> None:
    """Reports, comparisons and exports took what was left of it as all."""
    folder = RunFolder(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    folder.write_table(name, [{"site": n, "id": n} for n in "abc"])
    folder.write_summary({"rounds": 1, "seconds": 1.0})
    path = tmp_path / name

    def read() -> object:
        reader = RunReader(tmp_path)
        return reader.sites if name == "sites.csv" else reader.prediction_table

    assert read()
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    with pytest.raises(InputError, match=rf"{name} changed since the run ended"):
        read()

    # its columns may be sorted, or others be added
    path.write_text("x,site,id\n,a,a\n,b,b\n,c,c\n")
    assert read()


@pytest.mark.parametrize(
    "name", ["summary.json", "predictions.csv", "calibration.json", "rounds.jsonl"]
)
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_taken_for_missing(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    """A folder called summary.json made an ended run an unfinished one."""
    (tmp_path / "run.json").write_text("{}")
    make(tmp_path / name)
    reader = RunReader(tmp_path)
    with pytest.raises(InputError, match=rf"{name}(:| it cannot be read| is a link)"):
        _ = (reader.summary, reader.prediction_table, reader.promised, reader.rounds)

    with pytest.raises(InputError, match=name):
        require_plain(tmp_path)
