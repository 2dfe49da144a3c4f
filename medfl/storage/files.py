"""Files replaced atomically, never half-written; States and weights as safetensors."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from medfl.core.errors import RunError
from medfl.core.message import Tensors, Weights
from medfl.core.untrusted import JSON_VALUES, printable, read_plain
from medfl.storage.checkpoints import PlainUnpickler, ScriptModule, script_tensors

_ROUND = "round"
"""In a State's file: name of the tensor with its round; the State's own tensors are numbered."""
_LEVELS = 200
"""Of a State's description, two for each of the State's own."""
_MAGIC = 0x1950A86A20F9469CFC6C
"""Begins a file of PyTorch before 1.6."""
State = dict[str, Any]
"""A plain, possibly nested dict of tensors, numbers, strings and lists: all that survives a round."""


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` by way of a sibling file and a rename.

    Raises:
        RunError: the disk is full or the folder cannot be written; the old file is untouched.
    """
    with atomic_replace(path, len(data)) as temporary:
        temporary.write_bytes(data)


def _write_tensors(path: Path, named: Tensors, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically; `save_file` needs no second copy of the tensors, unlike its bytes."""
    with atomic_replace(path, sum(tensor.nbytes for tensor in named.values())) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        safetensors.torch.save_file(named, temporary, metadata=metadata)
        # safetensors gives rights to the owner only; a sandbox lets none be changed.
        with suppress(PermissionError):
            temporary.chmod(mode)


@contextmanager
def atomic_replace(path: Path, size: int) -> Iterator[Path]:
    """Yield a sibling file to write, which replaces `path` at the end of the block."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with writing(f"{path} ({size} bytes)"):
            temporary.unlink(missing_ok=True)  # a link there would be written through
            yield temporary
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def writing(
    target: Path | str, advice: str = "free some space, then go on (a run with --resume)"
) -> Iterator[None]:
    """Raise a RunError where what the block writes to `target` cannot be written."""
    try:
        yield
    except (OSError, safetensors.SafetensorError, RuntimeError) as error:
        # torch.save's of a full disk names its writer; any other is no failure to write.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise RunError(
            f"cannot write {target}: {_reason(error)}; what was saved before is intact; {advice}"
        ) from error


def _reason(error: Exception) -> str:
    """Return why a file cannot be written; the Rust writer has the system's error number only in its text."""
    if isinstance(error, OSError):
        number = error.errno
    else:
        number = None

    if number is None and (match := re.search(r"os error (\d+)", str(error))):
        number = int(match[1])

    if isinstance(error, RuntimeError) or number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "no space left on the disk"

    return os.strerror(number) if number else str(error)


def save_state(path: Path, state: Mapping[str, object], round_: int | None = None) -> None:
    """Write a State atomically: tensors and round as safetensors, its shape and numbers as JSON in the header."""
    tree, numbered = split_state(state)
    if round_ is not None:
        numbered[_ROUND] = torch.tensor(round_)

    _write_tensors(path, numbered, {"tree": tree})


def load_state(path: Path) -> State:
    """Invert `save_state`; RunError if the file is missing, damaged, or a link."""
    try:
        _require_plain(path)
        with safetensors.safe_open(path, framework="pt") as file:
            tree = (file.metadata() or {})["tree"]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)

        return join_state(tree, tensors)
    except Exception as error:  # the Rust reader raises its own type for each kind of damage
        raise RunError(f"cannot read the saved state {path}: {printable(error, 200)}") from error


def split_state(state: Mapping[str, object]) -> tuple[str, Tensors]:
    """Return a State's shape and numbers as JSON, and its tensors, contiguous on the CPU, by their numbers in it."""
    tensors = []

    def strip(node: object) -> object:
        if isinstance(node, Tensor):
            tensors.append(node.detach().cpu().contiguous())
            return {"tensor": len(tensors) - 1}

        if isinstance(node, Mapping):
            if not all(isinstance(key, str) for key in node):
                raise TypeError(f"a State has string keys only; got {list(node)[:3]}")
            return {"dict": {key: strip(value) for key, value in node.items()}}

        if isinstance(node, list | tuple):
            return {"list": list(map(strip, node))}
        if node is None or isinstance(node, bool | int | float | str):
            return {"value": node}

        raise TypeError(
            f"a State holds tensors, numbers, strings, lists and dicts; got {type(node).__name__}"
        )

    tree = json.dumps(strip(state))
    return tree, {str(index): tensor for index, tensor in enumerate(_unshared(tensors))}


def join_state(tree: str, tensors: Tensors) -> State:
    """Invert `split_state`; an error of any type if it is something else."""
    shape = read_plain(tree, is_json=True, nodes=JSON_VALUES, depth=_LEVELS, constants=True)
    state: State = _filled(shape, tensors)
    if not isinstance(state, dict):
        raise ValueError("it holds no names and values")

    return state


def _filled(node: Any, tensors: Tensors) -> Any:
    """Return a part of a State from its description by `save_state`; ValueError or KeyError if it is none."""
    if not isinstance(node, dict) or len(node) != 1:
        raise ValueError(f"{node!r:.60} describes no part of a state")

    ((kind, value),) = node.items()
    if kind == "tensor" and type(value) is int:
        return tensors.pop(str(value))  # once: a copy of it each time would fill a disk
    if kind == "dict" and isinstance(value, dict):
        return {key: _filled(child, tensors) for key, child in value.items()}
    if kind == "list" and isinstance(value, list):
        return [_filled(child, tensors) for child in value]
    if kind == "value" and (value is None or isinstance(value, bool | int | float | str)):
        return value

    raise ValueError(f"{node!r:.60} describes no part of a state")


def _require_plain(path: Path, links: bool = False) -> None:
    if not path.is_file() or (path.is_symlink() and not links):  # a pipe would be waited for
        raise ValueError("there is no plain file")


def state_round(path: Path) -> int:
    """Return the round of a State's file; one of medfl 0.6.0, damaged, or elsewhere has it in its name only, else 0."""
    try:
        _require_plain(path)
        with safetensors.safe_open(path, framework="pt") as file:
            if (number := int(file.get_tensor(_ROUND))) >= 0:
                return number
            raise ValueError(f"{number} is no round")
    except Exception:  # the Rust reader raises its own type for each kind of damage, and for a tensor that is not there
        digits = re.match(r"\d{6}", path.name)
        return int(digits[0]) if digits else 0


def to_device(state: State, device: torch.device) -> State:
    """Return the same State with its tensors on `device`: files are read to the CPU."""
    placed: State = tree_map_only(Tensor, lambda tensor: tensor.to(device), state)
    return placed


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write plain values as JSON, indented; raises as `write_atomic`."""
    write_atomic(path, (json.dumps(document, indent=1, default=list) + "\n").encode())


def save_weights(path: Path, weights: Weights) -> None:
    """Write weights atomically as a plain safetensors file under their own names."""
    names = sorted(weights)
    tensors = _unshared([weights[name].detach().cpu().contiguous() for name in names])
    _write_tensors(path, dict(zip(names, tensors, strict=True)))


def load_weights(path: Path) -> Tensors:
    """Read weights written by `save_weights`; RunError if the file is missing or damaged."""
    try:
        _require_plain(path, links=True)
        return dict(safetensors.torch.load_file(path))
    except Exception as error:  # as above
        raise RunError(f"cannot read the weights {path}: {printable(error, 200)}") from error


def load_pickled(path: Path) -> Any:
    """Read tensors and plain values that `torch.save` wrote; Parameters come as tensors, and all on the CPU.

    Of TorchScript these are the tensors by name, a `ScriptModule`, and no code of it is read. Nothing else is rebuilt
    (`PlainUnpickler`), and the file has to have as many bytes as its tensors take.

    Raises:
        ValueError or UnpicklingError: it holds something else, or would take more; damage raises other errors, too.
    """
    _require_plain(path, links=True)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(0)
        try:
            if start == b"PK\3\4":
                return _from_archive(file, size)

            return _from_stream(file, size)
        except (EOFError, IndexError, struct.error) as error:  # which say nothing
            raise ValueError("it is cut off or damaged") from error


def _from_archive(file: BinaryIO, size: int) -> Any:
    with zipfile.ZipFile(file) as archive:
        # Stored as it is, and no bytes twice: else a small file could fill the memory.
        members = archive.infolist()
        folder = members[0].filename.partition("/")[0]
        # TorchScript packs its code, of which nothing is read
        read_here = (f"{folder}/data/", f"{folder}/data.pkl", f"{folder}/byteorder")
        members = [member for member in members if member.filename.startswith(read_here)]
        packed = any(member.compress_type for member in members)
        if packed or sum(member.file_size for member in members) > size:
            raise ValueError(
                f"its {size} bytes would unpack to more, which torch.save never writes"
            )

        for member in members:
            if not member.CRC:
                del member.CRC  # torch.save may be told to write none

        order = f"{folder}/byteorder"
        if order in archive.namelist() and archive.read(order) != sys.byteorder.encode():
            raise ValueError("it was written on a machine with the other order of bytes")

        def read(key: str, _: int) -> Tensor:
            member = archive.getinfo(f"{folder}/data/{key}")
            held = torch.empty(member.file_size, dtype=torch.uint8)
            with archive.open(member) as content:
                _fill(held, content)

            return held

        pickled = io.BytesIO(archive.read(f"{folder}/data.pkl"))
        loaded = PlainUnpickler(pickled, size, read).load()
        return script_tensors(loaded) if isinstance(loaded, ScriptModule) else loaded


def _from_stream(file: BinaryIO, size: int) -> Any:
    """Read what PyTorch wrote before 1.6: pickles, and the bytes of the storages that the last of them names."""
    unpickler = PlainUnpickler(file, size, lambda _, length: torch.empty(length, dtype=torch.uint8))
    if unpickler.load() != _MAGIC:
        raise ValueError("torch.save did not write it")

    _, _, loaded, keys = (unpickler.load() for _ in range(4))
    if not isinstance(keys, list) or sorted(keys) != sorted(unpickler.storages):
        raise ValueError("it does not have the numbers of all its tensors")

    for key in keys:
        file.seek(8, os.SEEK_CUR)  # their count
        _fill(unpickler.storages[key], file)

    return loaded


def _fill(held: Tensor, content: Any) -> None:
    if content.readinto(held.numpy()) != len(held):
        raise ValueError("it is cut off or damaged")


def weights_sha256(weights: Weights) -> str:
    """Hash the sorted tensor names, each followed by its raw little-endian bytes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        # reshape(-1) first: a 0-dimensional tensor has no byte view
        numbers = weights[name].detach().cpu().contiguous().reshape(-1)
        digest.update(numbers.view(torch.uint8).numpy().tobytes())

    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, read piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _unshared(tensors: list[Tensor]) -> list[Tensor]:
    """Clone tensors that share a storage (tied weights, views): safetensors refuses shared storage."""
    pointers: set[int] = set()
    unshared = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # Empty tensors have no memory, or one address for all of them.
        if tensor.numel():
            if storage.data_ptr() in pointers or storage.nbytes() != tensor.nbytes:
                tensor = tensor.clone()
            pointers.add(storage.data_ptr())
        unshared.append(tensor)

    return unshared
