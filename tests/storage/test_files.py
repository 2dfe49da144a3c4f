"""Files that are the old or the new one, and exact States."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from medfl.core.errors import RunError
from medfl.storage.atomic import atomic_replace, write_atomic
from medfl.storage.files import (
    load_pickled,
    load_state,
    load_weights,
    read_weights,
    save_state,
    save_weights,
    state_round,
    to_device,
    weights_sha256,
)
from tests.support.toy import bits, classifier

STATE = {
    "weights": {
        "float": torch.randn(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(5).bfloat16(),
        "counter": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "double": torch.randn(2, 2).double(),
        "strided": torch.randn(4, 6).T[1:],
    },
    "phase": 2,
    "loss": 0.1 + 0.2,
    "huge": 2**62,
    "nan": float("inf"),
    "name": "é∑/…",
    "flag": True,
    "nothing": None,
    "list": [1, {"t": torch.randn(2)}, [], "x"],
    "empty": {},
    "a/b.c": {"0": torch.randn(1)},
}


def test_a_state_survives_bit_for_bit(tmp_path: Path) -> None:
    save_state(tmp_path / "s", STATE)
    loaded = load_state(tmp_path / "s")
    assert bits(loaded) == bits(STATE)
    assert list(loaded["weights"]) == list(STATE["weights"])
    save_state(tmp_path / "again", loaded)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "s").read_bytes()


def test_tied_weights_and_views_are_stored_each_for_itself(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    tied = {"a": base, "b": base, "whole": base.view(2, 3), "part": base[2:4], "start": base[:1]}
    save_state(tmp_path / "s", tied)
    save_weights(tmp_path / "w", tied)
    for loaded in (load_state(tmp_path / "s"), load_weights(tmp_path / "w")):
        assert bits(loaded) == bits(tied)
        loaded["a"].zero_()
        assert loaded["b"].tolist() == list(range(6))


def test_a_tuple_comes_back_as_a_list(tmp_path: Path) -> None:
    save_state(tmp_path / "s", {"x": (1, 2)})
    assert load_state(tmp_path / "s") == {"x": [1, 2]}


@pytest.mark.parametrize("value", [object(), np.zeros(1), {1, 2}, {3: 1}, b"y"])
def test_other_types_are_refused_and_nothing_is_written(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match="a State"):
        save_state(tmp_path / "s", {"x": value})
    assert not any(tmp_path.iterdir())


def test_a_trained_parameter_is_stored_without_its_graph(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    save_state(tmp_path / "s", {"p": parameter, "q": parameter * 2})
    loaded = load_state(tmp_path / "s")
    assert not loaded["p"].requires_grad
    assert loaded["q"].tolist() == [2, 2]


@pytest.mark.parametrize("load", [load_state, load_weights])
def test_missing_and_damaged_files_raise_our_own_error(tmp_path: Path, load) -> None:
    path = tmp_path / "s"
    with pytest.raises(RunError, match=str(path)):
        load(path)
    save_state(path, STATE)
    data = path.read_bytes()
    for damaged in (b"", data[:5], data[:40], data[:-1], b"{}" * 50):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=str(path)):
            load(path)


def test_weights_are_a_plain_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = classifier(norm=True)().state_dict()
    save_weights(tmp_path / "w", weights)
    assert bits(load_file(tmp_path / "w")) == bits(dict(sorted(weights.items())))
    assert bits(load_weights(tmp_path / "w")) == bits(load_file(tmp_path / "w"))


def test_the_file_is_whole_before_it_takes_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "f", []
    path.write_bytes(b"old")
    replace = os.replace

    def spy(source, target):
        seen.append((Path(source).read_bytes(), Path(target).read_bytes()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    write_atomic(path, b"new")
    assert seen == [(b"new", b"old")]
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert path.read_bytes() == b"new"


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failing_rename_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    save_state(path, {"x": 1})
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        RunError,
        match=r"state \(\d+ bytes\): no space left.*; repeat, with a new --out",
    ):
        save_state(path, {"x": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    assert load_state(path) == {"x": 1}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_while_writing_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "state"
    write_atomic(path, b"old")
    plain = Path.open

    def open_on_full_disk(self: Path, mode: str):
        self.touch()
        return plain(Path("/dev/full"), mode)

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    with pytest.raises(RunError, match="no space left"):
        write_atomic(path, b"new" * 10**6)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    assert path.read_bytes() == b"old"


def test_a_missing_folder_is_our_own_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No such file or directory"):
        write_atomic(tmp_path / "nowhere" / "f", b"x")


def test_the_hash_is_that_of_the_contract() -> None:
    """Sorted names, each followed by its raw little-endian bytes; computed here with NumPy and struct-like layouts."""
    weights = {
        "b.weight": torch.tensor([[1.5, -2.0]]),
        "a.count": torch.tensor(258),
        "c": torch.zeros(0),
        "d": torch.tensor([1.0], dtype=torch.bfloat16),
    }
    text = b"a.count" + (258).to_bytes(8, "little")
    text += b"b.weight" + np.array([1.5, -2.0], "<f4").tobytes()
    text += b"c" + b"d" + b"\x80\x3f"  # 1.0 in bfloat16 is 0x3f80
    assert weights_sha256(weights) == hashlib.sha256(text).hexdigest()


def test_the_hash_ignores_order_and_layout_and_sees_every_bit() -> None:
    x = torch.randn(3, 4)
    reference = weights_sha256({"a": x, "b": x + 1})
    assert weights_sha256({"b": x + 1, "a": x.T.contiguous().T}) == reference
    assert weights_sha256({"a": x + 1, "b": x}) != reference
    assert weights_sha256({"a": -torch.zeros(1)}) != weights_sha256({"a": torch.zeros(1)})
    bumped = torch.nextafter(x, torch.full_like(x, torch.inf))
    assert weights_sha256({"a": bumped, "b": x + 1}) != reference


def test_a_state_moves_to_a_device_whole() -> None:
    state = {"a": torch.ones(2), "b": {"c": [torch.zeros(1), 3, "x"]}, "n": 1.5}
    placed = to_device(state, torch.device("meta"))
    assert placed["a"].device.type == placed["b"]["c"][0].device.type == "meta"
    assert (placed["b"]["c"][1:], placed["n"]) == ([3, "x"], 1.5)
    assert state["a"].device.type == "cpu"
    assert to_device(state, torch.device("cpu"))["a"] is state["a"]


def test_a_state_s_file_says_its_round(tmp_path: Path) -> None:
    """Files of medfl 0.6.0 do not: the round is in their names, and so it is where a file is damaged."""
    said, older, damaged, other = (
        tmp_path / name for name in ("x", "000007-site-a.safetensors", "000008", "y")
    )
    save_state(said, STATE, 12)
    assert bits(load_state(said)) == bits(STATE)
    save_state(older, STATE)
    damaged.write_bytes(b"half")
    save_state(other, STATE)
    save_state(wrong := tmp_path / "000009-site-a", STATE, -1)
    assert [state_round(path) for path in (said, older, damaged, other, wrong)] == [12, 7, 8, 0, 9]


@pytest.mark.parametrize("sandboxed", [False, True])
def test_weights_are_as_readable_as_the_files_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandboxed: bool
) -> None:
    """A sandbox lets no program change permissions."""
    if sandboxed:
        monkeypatch.setattr(Path, "chmod", Mock(side_effect=PermissionError))
    write_atomic(tmp_path / "table.csv", b"a")
    save_weights(tmp_path / "weights.safetensors", {"w": torch.zeros(2)})
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("table.csv", "weights.safetensors"), modes["table.csv"])
    assert load_weights(tmp_path / "weights.safetensors")["w"].tolist() == [0, 0]


def test_what_torch_cannot_save_on_a_full_disk_is_our_own_error(tmp_path: Path) -> None:
    """Its writer has no number of the system; a limit of file sizes stands for the disk."""
    resource = pytest.importorskip("resource")
    (tmp_path / "model.pt").write_bytes(b"old")
    before, ignored = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with (
            pytest.raises(RunError, match="no space left"),
            atomic_replace(tmp_path / "model.pt", 8000) as temporary,
        ):
            torch.save({"w": torch.zeros(2000)}, temporary)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


class _Asks:
    def __init__(self, what: Callable[..., object], *given: object) -> None:
        self._asked = what, given

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._asked


@pytest.mark.parametrize("asked", [_Asks(torch.Tensor, 2**20), _Asks(bytearray, 2**20)])
@pytest.mark.parametrize("plain", [True, False])
def test_a_pickle_takes_no_more_memory_than_its_file(
    tmp_path: Path, asked: object, plain: bool
) -> None:
    path = tmp_path / "a.pt"
    torch.save(
        {"model": {"a": asked}}, path, pickle_protocol=2, _use_new_zipfile_serialization=plain
    )
    with pytest.raises(
        pickle.UnpicklingError, match="it holds (torch.Tensor|__builtin__.bytearray)"
    ):
        load_pickled(path)


def test_a_file_of_weights_is_not_packed(tmp_path: Path) -> None:
    path, packed = tmp_path / "a.pt", tmp_path / "b.pt"
    shared = torch.zeros(2**20)
    weights = {"a": shared, "tied": shared}
    torch.save({"model": weights, "epoch": 3}, path)
    assert bits({"a": load_pickled(path)["model"]["tied"]}) == bits({"a": shared})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            new.writestr(item.filename, old.read(item))
    assert len(torch.load(packed, weights_only=True)["model"]["a"]) == 2**20  # PyTorch unpacks it
    with pytest.raises(ValueError, match="would unpack to more"):
        load_pickled(packed)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no plain file"):
        load_pickled(tmp_path / "pipe")


def test_what_was_hashed_is_what_was_read(tmp_path: Path) -> None:
    """A file that is mapped to memory would change the tensors, and end the process where it is cut off."""
    path = tmp_path / "a.safetensors"
    save_weights(path, {"a": torch.zeros(2**20)})
    content = path.read_bytes()
    weights, sha256 = read_weights(path)
    assert sha256 == hashlib.sha256(content).hexdigest()
    with path.open("r+b") as file:
        file.write(content[:-4096] + b"\1" * 4096)
    assert not weights["a"].any()
    os.truncate(path, 4096)
    assert not weights["a"].any()
    os.truncate(path, 2**42)  # a file with holes takes no room
    with pytest.raises(RunError, match="of at most [0-9]+ bytes"):
        read_weights(path)
