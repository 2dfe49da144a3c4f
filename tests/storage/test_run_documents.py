"""What a run folder says that somebody else may have written: refused in one line, with bounded memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from medfl.core.errors import InputError, MedflError, RunError
from medfl.core.names import outside_walls
from medfl.core.untrusted import Refused, read_bytes, read_json, read_table
from medfl.data.partition.rules import _by_file
from medfl.datasets.readers.conventions import channel_names
from medfl.policy.audit import verify
from medfl.report import folds
from medfl.storage.files import file_sha256, load_state, load_weights, save_state, save_weights
from medfl.storage.run_documents import (
    brings_code,
    read_rows,
    read_run,
    read_run_document,
    read_summary,
    round_lines,
    state_file,
)
from medfl.storage.run_folder import RunFolder
from medfl.storage.run_integrity import read_verified_run, verified_manifest
from tests.storage.test_run_folder import server
from tests.storage.test_run_integrity import made
from tests.support.toy import run_record

DEEP = "[" * 100_000 + "]" * 100_000


def edited(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file; what `change` returns is written unless it is None."""
    document = json.loads(path.read_text())
    new = change(document)
    path.write_text(json.dumps(document if new is None else new))


def one_line(error: pytest.ExceptionInfo[MedflError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 1000
    return text


# run.json


RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "rounds above the most": lambda d: d.update(rounds=10**9),
    "a negative number of rounds": lambda d: d.update(rounds=-1),
    "a negative seed": lambda d: d.update(seed=-1),
    "a task that nobody has": lambda d: d.update(task="x"),
    "a learning rate that is not a number": lambda d: d.update(lr=float("nan")),
    "an infinite learning rate": lambda d: d.update(lr=float("inf")),
    "a cohort above one": lambda d: d.update(cohort=2.0),
    "a negative count": lambda d: d["data"].update(counts={"train": -3}),
    "a count that is too large": lambda d: d["data"].update(counts={"train": 10**40}),
    "an entry of the data without a meaning": lambda d: d["data"].update(more=1),
    "no source": lambda d: d["data"].pop("source"),
    "no sites": lambda d: d["partition"].pop("sites"),
    "a text of three numbers": lambda d: d.update(text={"plm": "x", "sha256": "y", "shape": "abc"}),
    "public data without teachers' hashes": lambda d: d.update(public={"teachers": [["a"]]}),
    "a command that is no text": lambda d: d.update(command=3),
    "rounds resumed that are no list": lambda d: d.update(resumed=7),
    "classes that are no texts": lambda d: d.update(classes=[1, 2]),
    "half a character": lambda d: d.update(command="\ud800"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_is_wrong(tmp_path: Path, name: str) -> None:
    path = made(tmp_path / "run").path / "run.json"
    edited(path, RECORDS[name])
    with pytest.raises(InputError, match=r"run\.json") as error:
        read_run(path)
    one_line(error)


@pytest.mark.parametrize(
    "text", [DEEP, '{"a":' * 100_000, "[]", "null", "", "\x00", '{"rounds": 1e999}', "9" * 5000]
)
def test_a_text_that_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"run\.json") as error:
        read_run(path)
    one_line(error)


def test_too_many_values_are_not_built(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("[" + "[]," * 9_000_000 + "[]]")
    with pytest.raises(InputError, match="more than 2000000 values"):
        read_json(path, "a", "b")


def test_names_are_counted_while_they_are_read(tmp_path: Path) -> None:
    """They take ten times as long as other values; a run has some for each site and each metric of it."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps([{f"k{part}.{i}": 0 for i in range(3000)} for part in range(100)]))
    with pytest.raises(InputError, match="too many names"):
        read_json(path, "a", "b")


def test_a_state_larger_than_the_machine_is_not_begun_with(tmp_path: Path) -> None:
    """A file with holes takes no room on a disk; whoever writes it mends its sum, or takes it away."""
    folder = made(tmp_path / "run")
    file = folder.state / "000003-server.safetensors"
    os.truncate(file, 2**42)
    with pytest.raises(RunError, match=r"000003-server\.safetensors: .*of at most [0-9]+ bytes"):
        load_state(file)
    with pytest.raises(InputError, match=r"000003-server\.safetensors is .* larger than memory"):
        verified_manifest(RunFolder(folder.path))


def test_a_line_of_a_table_is_measured_before_the_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sites.csv"
    path.write_bytes(b"site,a\nx," + b"y" * 2**24 + b"\n")
    with pytest.raises(InputError, match="a line of more than 16 MiB"):
        read_rows(path)


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe, folder, large = tmp_path / "pipe", tmp_path / "folder", tmp_path / "large"
    os.mkfifo(pipe)
    folder.mkdir()
    with large.open("wb") as file:
        file.truncate(2**40)
    for path, why in (
        (pipe, "plain"),
        (folder, "plain"),
        (large, "of at most 1048576 bytes"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(Refused, match=why):
            read_bytes(path, 2**20)
    with pytest.raises(OSError, match="plain"):
        file_sha256(pipe)
    with pytest.raises(InputError, match="plain"):
        verify(pipe)
    with pytest.raises(Refused, match="null"):
        read_bytes(Path("a\0b"), 9)


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("run.json", "{}", read_run_document),
        ("summary.json", '{"rounds": 1, "seconds": 1.0}', read_summary),
        ("rounds.jsonl", '{"round": 1}\n', round_lines),
        ("sites.csv", "site\na\n", read_rows),
    ],
)
def test_a_run_s_file_that_is_a_link_is_not_followed(
    name: str, content: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere" / name
    elsewhere.parent.mkdir()
    elsewhere.write_text(content)
    read(elsewhere)
    path = tmp_path / name
    path.symlink_to(elsewhere)
    with pytest.raises(InputError, match=f"{name} is a link; "):
        read(path)


# The manifest


def not_a_state(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda d: d.update(server=name)


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a round of 1e9": lambda d: d.update(round=10**9),
    "a round of 1e9 with a point": lambda d: d.update(round=1e9),
    "a negative round": lambda d: d.update(round=-1),
    "a round that is no number": lambda d: d.update(round=None),
    "sites that are numbers": lambda d: d.update(sites={"a": 3}),
    "rounds that are texts": lambda d: d.update(rounds={"a": "3", "b": "3"}),
    "a site without a round": lambda d: d["rounds"].pop("a"),
    "sums that are no texts": lambda d: d.update(sha256={d["server"]: 3}),
    "a list of sums": lambda d: d.update(sha256=[1]),
    "a best State that is a number": lambda d: d.update(best=4),
    "a record that is a list": lambda d: d.update(record=[]),
    "a best round without its value": lambda d: d["record"].update(best={"round": 1}),
    "a best round that is a text": lambda d: d["record"].update(best={"round": "1", "value": 0.5}),
    "absent sites that are a number": lambda d: d["record"].update(absent=3),
    "bytes that are negative": lambda d: d["record"].update(bytes_up=-1),
    "seconds that are not a number": lambda d: d["record"].update(seconds=float("nan")),
    "times left out that are texts": lambda d: d["record"].update(left_out={"a": "x"}),
    "a file above": not_a_state("../run.json"),
    "a file by its whole path": not_a_state("/etc/passwd"),
    "the folder": not_a_state(""),
    "the manifest itself": not_a_state("manifest.json"),
    "a name with a null": not_a_state("000003-server\0.safetensors"),
    "a name with a line break": not_a_state("000003-server.safetensors\n"),
    "a best file above": lambda d: d.update(best="../best.safetensors"),
    "a site's file above": lambda d: d.update(
        sites={"a": "../../000003-site-a.safetensors", "b": "x"}
    ),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_is_wrong(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path / "run")
    edited(folder.state / "manifest.json", MANIFESTS[name])
    with pytest.raises(InputError, match=r"manifest\.json .*restore the file") as error:
        verified_manifest(RunFolder(folder.path))
    one_line(error)


@pytest.mark.parametrize(
    "name", ["000003-server.safetensors", "000003-site-a.safetensors", "000002-best.safetensors"]
)
def test_a_state_that_is_a_link_is_not_followed(tmp_path: Path, name: str) -> None:
    """The file that it leads to is a whole State with the recorded sum."""
    folder = made(tmp_path / "run")
    file = folder.state / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="neither a plain file nor a folder"):
        verified_manifest(RunFolder(folder.path))
    with pytest.raises(InputError, match="is no plain file of this folder"):
        RunFolder(folder.path).manifest()
    with pytest.raises(RunError, match="no plain file"):
        load_state(file)


def test_a_folder_of_states_that_is_a_link_is_not_emptied(tmp_path: Path) -> None:
    """The first commit of a run removes what it does not know from `state`."""
    folder = RunFolder.create(tmp_path / "run")
    folder.write_run(run_record(), {})
    folder.state.rmdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    folder.state.symlink_to(tmp_path / "home")
    with pytest.raises(InputError, match="state is neither a plain file nor a folder"):
        verified_manifest(RunFolder(folder.path))
    with pytest.raises(InputError, match="no plain file of this folder"):
        state_file(folder.path, "000001-server.safetensors")


@pytest.mark.parametrize(
    "where",
    ["predictions/site-a", "local/state", "events/x/y", "state/deeper/z", "sites/0a/x", "pictures"],
)
def test_a_link_anywhere_in_what_a_run_writes_is_not_followed(tmp_path: Path, where: str) -> None:
    folder = made(tmp_path / "run")
    (tmp_path / "home").mkdir()
    link = folder.path / where
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "home")
    with pytest.raises(InputError, match=f"{link.name} is neither a plain file nor a folder"):
        verified_manifest(RunFolder(folder.path))


def test_links_in_a_run_folder_are_refused_but_in_flare_s_own(tmp_path: Path) -> None:
    """FLARE's folder is removed before it is created."""
    folder = made(tmp_path / "run")
    (folder.path / "flare" / "run-1").mkdir(parents=True)
    (folder.path / "flare" / "latest-run").symlink_to("run-1")
    assert verified_manifest(RunFolder(folder.path)) is not None
    (folder.path / "flare" / "/".join("d" * 110)).mkdir(parents=True)
    assert verified_manifest(RunFolder(folder.path)) is not None
    (folder.path / "wandb").symlink_to(tmp_path)
    with pytest.raises(InputError, match="wandb is neither a plain file nor a folder"):
        verified_manifest(RunFolder(folder.path))


def test_folders_in_folders_without_end_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    (folder.path / "/".join("d" * 110)).mkdir(parents=True)
    with pytest.raises(InputError, match="d is neither a plain file nor a folder"):
        verified_manifest(RunFolder(folder.path))


@pytest.mark.parametrize(
    "code", [{"a": {"_target_": "torch.nn.Linear"}}, {"b": ["$1 + 1"]}], ids=str
)
def test_a_record_that_brings_code_is_not_read_outside_of_walls(
    code: dict[str, object], tmp_path: Path
) -> None:
    """Also where it did not when the command was read; unless the user has typed the same."""
    run = run_record(bundle="mednist", bundle_path=str(tmp_path), config=code)
    (tmp_path / "run.json").write_text(json.dumps(run.to_dict()))
    record = {"folds": 2, "bundle": "mednist", "images": ["a", "b"], "command": None}
    empty = {"options": {}, "requested": {}, "settings": {}}
    (tmp_path / "folds.json").write_text(json.dumps({**record, **empty, "config": code}))

    def read() -> None:
        read_run(tmp_path / "run.json")
        folds.read_record(tmp_path)
        outside_walls.set([])
        for read_one in (
            lambda: read_run(tmp_path / "run.json"),
            lambda: folds.read_record(tmp_path),
        ):
            with pytest.raises(InputError, match="brings expressions or components, without walls"):
                read_one()

        outside_walls.set(["--config=a={_target_: torch.nn.Linear}", "--config=b=[$1 + 1]"])
        read_run(tmp_path / "run.json")
        folds.read_record(tmp_path)

    copy_context().run(read)


@pytest.mark.parametrize(("filler", "codes"), [(2**21, 50), (0, 5000)])
def test_what_a_record_shares_with_its_bundle_is_found_in_bounded_time(
    filler: int, codes: int, tmp_path: Path
) -> None:
    """More goes behind the walls: the process outside of them would search for hours."""
    shared = [f"$a{number}" for number in range(codes)]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "federated.yaml").write_text("#" * filler + ",".join(shared))
    assert brings_code(str(tmp_path), {"x": shared})
    if not filler:
        assert not brings_code(str(tmp_path), {"x": shared[:50]})


def test_a_temporary_file_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    other = tmp_path / "other"
    other.write_text("dear")
    (folder.path / ".summary.json.tmp").symlink_to(other)
    folder.write_summary({"rounds": 3})
    assert other.read_text() == "dear"
    assert (folder.path / "summary.json").is_file()


def test_a_pipe_in_the_place_of_a_state_is_not_waited_for(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    (folder.state / "000003-server.safetensors").unlink()
    os.mkfifo(folder.state / "000003-server.safetensors")
    with pytest.raises(InputError, match="neither a plain file nor a folder"):
        verified_manifest(RunFolder(folder.path))


# rounds.jsonl


@pytest.mark.parametrize(
    "line", ['{"round": "4"}', '{"round": null}', '{"round": 4, "seconds": []}', DEEP, "9" * 5000]
)
def test_a_line_after_the_last_round_of_any_kind_is_dropped(tmp_path: Path, line: str) -> None:
    folder = made(tmp_path / "run")
    with (folder.path / "rounds.jsonl").open("a") as file:
        file.write(line + "\n")
    assert [entry["round"] for entry in RunFolder(folder.path).truncate_rounds(3)] == [1, 2, 3]
    assert len((folder.path / "rounds.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("line", ['{"round": "2"}', '{"round": 1e9}', '{"round": [2]}', DEEP])
def test_a_line_of_a_round_that_is_wrong(tmp_path: Path, line: str) -> None:
    folder = made(tmp_path / "run")
    lines = (folder.path / "rounds.jsonl").read_text().splitlines()
    (folder.path / "rounds.jsonl").write_text("\n".join([lines[0], line, lines[2], ""]))
    with pytest.raises(InputError, match=r"rounds\.jsonl, whose line 2 is not that of round 2"):
        verified_manifest(RunFolder(folder.path))


# summary.json and tables


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"rounds": "3", "seconds": 1}', '{"rounds": 3, "seconds": null}', DEEP]
)
def test_a_summary_that_is_wrong(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(InputError, match=r"summary\.json"):
        read_summary(tmp_path / "summary.json")


def test_rows_that_lack_nearly_all_columns_are_not_filled_up(tmp_path: Path) -> None:
    """A header of 90,000 columns over 90,000 rows of one cell would be 8.1e9 cells."""
    (tmp_path / "sites.csv").write_text(",".join(["site"] * 90_000) + "\n" + "a\n" * 90_000)
    with pytest.raises(Refused, match="rows without most of its 90000 columns"):
        read_table(tmp_path / "sites.csv")
    with pytest.raises(InputError, match=r"sites\.csv rows without"):
        read_rows(tmp_path / "sites.csv")


def test_a_number_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    """Python's int() fails at 4300 digits, wherever a reader of a table calls it."""
    (tmp_path / "t.csv").write_text(f"id,site\na,{'9' * 5000}\n")
    with pytest.raises(Refused, match="a number of 5000 digits; at most 64"):
        read_table(tmp_path / "t.csv")
    (tmp_path / "dataset.json").write_text(json.dumps({"channel_names": {"9" * 5000: "CT"}}))
    assert channel_names(tmp_path / "dataset.json") == ()


def test_a_table_of_millions_of_columns_is_refused_by_its_header(tmp_path: Path) -> None:
    (tmp_path / "sites.csv").write_text(",".join(map(str, range(200_000))) + "\n1\n")
    with pytest.raises(InputError, match=r"sites\.csv more than 100000 columns"):
        read_rows(tmp_path / "sites.csv")


def test_what_a_file_says_does_not_make_an_error_long(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("x" * 100_000 + ",b\n1,2\n")
    with pytest.raises(InputError, match="has no column id") as error:
        _by_file(str(tmp_path / "p.csv"), {})
    assert len(str(error.value)) < 5000
    given = InputError("a" * 100_000, "b", "c")
    assert len(str(given)) < 2000
    assert given._parts[0] == "a" * 100_000, "a worker hands on the whole"


# States and weights


TREES = [
    "[]", "3", "null", '{"dict": []}', '{"dict": {"a": 3}}', '{"dict": {"a": {"tensor": "0"}}}', '{"list": []}',
    '{"dict": {"a": {"tensor": 99}}}', '{"dict": {"a": {"value": [1]}}}', '{"dict": {}, "list": []}', '{"value": 3}',
    '{"dict": {"a": {"other": 1}}}', '{"list":[' * 50_000, "",
]  # fmt: skip


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_a_state_whose_description_is_wrong(tmp_path: Path, tree: str) -> None:
    import safetensors.torch
    import torch

    safetensors.torch.save_file({"0": torch.zeros(2)}, tmp_path / "x", metadata={"tree": tree})
    with pytest.raises(RunError, match="cannot read the saved state") as error:
        load_state(tmp_path / "x")
    one_line(error)


def header(entries: Any, room: int = 8) -> bytes:
    told = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(told).to_bytes(8, "little") + told + bytes(room)


def entry(shape: list[int], *offsets: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


LIES = {
    "1e9 elements in 8 bytes": header({"w": entry([10**9], 0, 8)}),
    "1e9 elements beyond the file": header({"w": entry([10**9], 0, 4 * 10**9)}),
    "more elements than numbers count": header({"w": entry([2**62, 8], 0, 8)}),
    "a negative side": header({"w": entry([-2], 0, 8)}),
    "offsets that overlap": header({"v": entry([2], 0, 8), "w": entry([1], 4, 8)}),
    "a gap": header({"v": entry([1], 4, 8)}),
    "offsets in the wrong order": header({"w": entry([2], 8, 0)}),
    "another type": header({"w": entry([2], 0, 8, dtype="F33")}),
    "no offsets": header({"w": {"dtype": "F32", "shape": [2]}}),
    "a header beyond the file": (10**6).to_bytes(8, "little") + b"{}",
    "a header of 2^63 bytes": (2**63).to_bytes(8, "little") + b"{}",
    "a header that is deep": header(DEEP.encode()),
    "a header that is a list": header([]),
    "nothing": b"",
}


@pytest.mark.parametrize("name", LIES)
def test_tensors_that_lie(tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_bytes(LIES[name])
    for load in (load_state, load_weights):
        with pytest.raises(RunError, match="cannot read the") as error:
            load(tmp_path / "x")
        one_line(error)


def test_weights_from_a_folder_or_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none"):
        with pytest.raises(RunError, match="cannot read the weights"):
            load_weights(path)


def test_whole_files_are_taken(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    assert read_verified_run(folder.path / "run.json")[0] == run_record()
    manifest = verified_manifest(RunFolder(folder.path))
    assert manifest is not None
    assert (
        file_sha256(state_file(folder.path, manifest["server"]))
        == manifest["sha256"][manifest["server"]]
    )
    save_state(tmp_path / "s", {"a": [1, None, "x", {"b": float("inf")}]})
    assert load_state(tmp_path / "s") == {"a": [1, None, "x", {"b": float("inf")}]}
    save_weights(tmp_path / "w", server(1)["weights"])
    (tmp_path / "link").symlink_to(tmp_path / "w")
    assert load_weights(tmp_path / "link").keys() == server(1)["weights"].keys()


def test_semicolons_part_a_table_whose_header_has_a_comma_too(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("\ufeffDatei;Länge, mm;Klinik\r\na.png;3;Köln\r\n".encode())
    _, [(_, row)] = read_table(tmp_path / "t.csv")
    assert row == {"Datei": "a.png", "Länge, mm": "3", "Klinik": "Köln"}


def test_lines_are_counted_from_the_file_s_first_one(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("\n,,\nsep=;\nfile;label\na;1\nb;2\n")
    assert [number for number, _ in read_table(path)[1]] == [5, 6]
