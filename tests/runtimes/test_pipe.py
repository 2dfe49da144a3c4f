"""States over a socket, of whose two ends one may be hostile."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from medfl.core.errors import RunError
from medfl.runtimes.monai_fl.pipe import _KINDS, Pipe
from medfl.storage.files import join_state, load_state, save_state, split_state

Ends = tuple[socket.socket, socket.socket]


class Stopped(Exception):
    """A keeper has had enough."""


def patience(times: int) -> Callable[[], None]:
    """Return what a pipe calls while it waits; the last time it raises."""
    left = [times]

    def wait() -> None:
        left[0] -= 1
        if not left[0]:
            raise Stopped

    return wait


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def test_a_state_crosses_with_its_bits(ends: Ends) -> None:
    state = {"a": {"b": torch.randn(1_000_000)}, "n": [1, 2.5, None, "text"]}
    sender = threading.Thread(target=Pipe(ends[0]).send, args=(state,))
    sender.start()
    arrived = Pipe(ends[1]).receive()
    sender.join()
    assert torch.equal(arrived["a"]["b"], state["a"]["b"])  # type: ignore[index,call-overload]
    assert arrived["n"] == state["n"]


def test_bytes_that_come_one_by_one_do_not_keep_a_keeper_from_looking_after_the_worker(
    ends: Ends,
) -> None:
    def drip() -> None:
        ends[1].sendall(struct.pack("!QQ", 1000, 1000))
        for _ in range(100):
            try:
                ends[1].send(b" ")
            except OSError:
                return
            time.sleep(0.02)

    threading.Thread(target=drip, daemon=True).start()
    with pytest.raises(Stopped):
        Pipe(ends[0], patience(3)).receive()


def test_a_worker_that_does_not_read_does_not_hold_its_keeper(ends: Ends) -> None:
    with pytest.raises(Stopped):
        Pipe(ends[0], patience(2)).send({"x": torch.zeros(4_000_000)})


def test_a_worker_that_says_nothing_does_not_hold_its_keeper(ends: Ends) -> None:
    with pytest.raises(Stopped):
        Pipe(ends[0], patience(2)).receive()


@pytest.mark.parametrize("sizes", [(2**27, 0), (0, 2**27), (2**64 - 1, 2**64 - 1)])
def test_nothing_is_read_of_what_is_too_large(ends: Ends, sizes: tuple[int, int]) -> None:
    ends[1].sendall(struct.pack("!QQ", *sizes))
    with pytest.raises(RunError, match="at most"):
        Pipe(ends[0]).receive()


FLOAT = "torch.float32"


@pytest.mark.parametrize(
    ("forms", "problem"),
    [
        ([["0", [2**60], FLOAT]], "at most"),
        ([[f"{i}", [2**30], FLOAT] for i in range(1000)], "at most"),
        ([["0", [0, 2**70], FLOAT]], "through a pipe"),
        ([["0", [-1, -1], FLOAT]], "of the type"),
        ([["0", [1.5], FLOAT]], "without names and shapes"),
        ([["0", [1], "torch.quint8"]], "of the type torch.quint8"),
        ([["0", [1], []]], "of the type"),
        ([[0, [1], FLOAT]], "without names and shapes"),
        ([0], "through a pipe"),
        (7, "through a pipe"),
        ([["1", [1], FLOAT]], "through a pipe"),
    ],
)
def test_forms_that_no_state_has(ends: Ends, forms: object, problem: str) -> None:
    tree = json.dumps({"dict": {"x": {"tensor": 0}}}).encode()
    described = json.dumps(forms).encode()
    head = struct.pack("!QQ", len(tree), len(described))
    ends[1].sendall(head + tree + described + bytes(64))
    with pytest.raises(RunError, match=problem):
        Pipe(ends[0]).receive()


@pytest.mark.parametrize("dtype", _KINDS.values())
def test_every_type_of_a_saved_state_crosses(ends: Ends, dtype: torch.dtype) -> None:
    state = {"x": torch.arange(6).reshape(2, 3).T.to(dtype), "0": torch.ones((), dtype=dtype)}
    state["none"] = torch.empty((0, 3), dtype=dtype)
    Pipe(ends[0]).send(state)
    arrived = Pipe(ends[1]).receive()
    assert arrived.keys() == state.keys()
    for name, tensor in state.items():
        assert arrived[name].dtype == dtype
        assert arrived[name].tolist() == tensor.tolist()


def repeated(times: int) -> dict[str, object]:
    return {"dict": {"x": {"list": [{"tensor": 0}] * times}}}


@pytest.mark.parametrize("times", [2, 1000])
def test_a_tensor_stands_at_one_place_as_a_saved_state_has_a_copy_for_each(
    times: int, tmp_path: Path
) -> None:
    tensors = {"0": torch.zeros(10)}
    tree = json.dumps(repeated(times))
    with pytest.raises(KeyError):
        join_state(tree, dict(tensors))

    path = tmp_path / "state.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"tree": tree})
    with pytest.raises(RunError, match="cannot read the saved state"):
        load_state(path)


def test_tensors_that_share_memory_are_kept_as_several(tmp_path: Path) -> None:
    tied = torch.arange(3.0)
    state = {"x": [tied, tied, tied[1:]]}
    save_state(tmp_path / "state.safetensors", state)
    for arrived in (load_state(tmp_path / "state.safetensors"), join_state(*split_state(state))):
        assert [tensor.tolist() for tensor in arrived["x"]] == [[0, 1, 2], [0, 1, 2], [1, 2]]
