"""States and weights as safetensors files, and files of weights that others wrote."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import struct
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from medfl.core import (
    JSON_VALUES,
    MOST_BYTES,
    RunError,
    Tensors,
    Weights,
    beginning,
    byte_count,
    map_values,
    open_plain,
    printable,
    read_plain,
)
from medfl.storage.atomic import atomic_replace, write_atomic
from medfl.storage.checkpoints import PlainUnpickler, ScriptModule, script_tensors

_ROUND = "round"
"""In a State's file: name of the tensor with its round; the State's own tensors are numbered."""
_LEVELS = 200
"""Of a State's description, two for each of the State's own."""
_MAGIC = 0x1950A86A20F9469CFC6C
"""Magic number of a file of PyTorch before 1.6."""
State = dict[str, Any]
"""A plain, possibly nested dict of tensors, numbers, strings and lists: all that persists between rounds."""


def _write_tensors(path: Path, named: Tensors, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically; `save_file` needs no second copy of the tensors, unlike its bytes."""
    with atomic_replace(path, byte_count(named)) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        safetensors.torch.save_file(named, temporary, metadata=metadata)
        # safetensors makes files readable by the owner only
        try:
            temporary.chmod(mode)
        except PermissionError:  # in a sandbox
            with temporary.open("rb") as private:
                temporary.unlink()
                with temporary.open("xb") as file:
                    shutil.copyfileobj(private, file)


def save_state(path: Path, state: Mapping[str, object], round_: int | None = None) -> None:
    """Write a State atomically: tensors and round as safetensors, its structure and numbers as JSON in the header."""
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
    """Return a State's structure and numbers as JSON, and its tensors, contiguous on the CPU, by number."""
    tensors = []

    def strip(node: object) -> object:
        if isinstance(node, Tensor):
            tensors.append(node.detach().cpu().contiguous())
            return {"tensor": len(tensors) - 1}

        if isinstance(node, Mapping):
            if not all(isinstance(key, str) for key in node):
                raise TypeError(f"a State has string keys only; got {list(node)[:3]}")
            return {"dict": map_values(strip, node)}

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
    """Invert `split_state`; raises any type of error for other input."""
    shape = read_plain(tree, is_json=True, nodes=JSON_VALUES, depth=_LEVELS, constants=True)
    state = _filled(shape, tensors)
    if not isinstance(state, dict):
        raise ValueError("it holds no names and values")

    return state


def _filled(node: Any, tensors: Tensors) -> Any:
    """Return a part of a State from its description by `save_state`; ValueError or KeyError if it is invalid."""
    if not isinstance(node, dict) or len(node) != 1:
        raise ValueError(f"{node!r:.60} describes no part of a state")

    ((kind, value),) = node.items()
    if kind == "tensor" and type(value) is int:
        return tensors.pop(str(value))  # once: repeated copies could fill a disk
    if kind == "dict" and isinstance(value, dict):
        return {key: _filled(child, tensors) for key, child in value.items()}
    if kind == "list" and isinstance(value, list):
        return [_filled(child, tensors) for child in value]
    if kind == "value" and (value is None or isinstance(value, bool | int | float | str)):
        return value

    raise ValueError(f"{node!r:.60} describes no part of a state")


def _require_plain(path: Path) -> None:
    if path.is_symlink():
        raise ValueError("it is a link, and no plain file")
    open_plain(path, MOST_BYTES).close()


def state_round(path: Path) -> int:
    """Return the round of a State's file; if it is of medfl 0.6.0, damaged or elsewhere, from its name, else 0."""
    try:
        _require_plain(path)
        with safetensors.safe_open(path, framework="pt") as file:
            if (number := int(file.get_tensor(_ROUND))) >= 0:
                return number
            raise ValueError(f"{number} is no round")
    # The Rust reader raises its own type for each kind of damage, and for a missing tensor.
    except Exception:
        digits = re.match(r"\d{6}", path.name)
        return int(digits[0]) if digits else 0


def to_device(state: State, device: torch.device) -> State:
    """Return the same State with its tensors on `device`: files are read to the CPU."""
    placed: State = tree_map_only(Tensor, lambda tensor: tensor.to(device), state)
    return placed


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write plain values as indented JSON; raises as `write_atomic`."""
    write_atomic(path, (json.dumps(document, indent=1, default=list) + "\n").encode())


def save_weights(path: Path, weights: Weights) -> None:
    """Write weights atomically as a plain safetensors file under their own names."""
    names = sorted(weights)
    tensors = _unshared([weights[name].detach().cpu().contiguous() for name in names])
    _write_tensors(path, dict(zip(names, tensors, strict=True)))


def load_weights(path: Path) -> Tensors:
    """Read weights written by `save_weights`; RunError if the file is missing or damaged.

    They are of this process alone: in a file that is mapped to memory others could change them, or cut them off.
    """
    return read_weights(path)[0]


def read_weights(path: Path) -> tuple[Tensors, str]:
    """Return weights as `load_weights` does, and the SHA-256 of the bytes that they were made of."""
    try:
        content, sha256 = hashed(path)
        return dict(safetensors.torch.load(content.getvalue())), sha256
    except Exception as error:  # the Rust reader's, as above
        raise RunError(f"cannot read the weights {path}: {printable(error, 200)}") from error


def hashed(path: Path) -> tuple[io.BytesIO, str]:
    """Return the content of a plain file, and its SHA-256: what is read of it is what was hashed.

    Raises:
        OSError: it cannot be read, or would take more than half of the machine's memory.
    """
    with open_plain(path, MOST_BYTES) as file:
        content = file.read()

    return io.BytesIO(content), hashlib.sha256(content).hexdigest()


def load_pickled(source: Path | io.BytesIO) -> Any:
    """Read tensors and plain values that `torch.save` wrote; Parameters come as tensors, and all on the CPU.

    For TorchScript the result is a `ScriptModule` of the tensors by name, and none of its code is read. Nothing else is
    rebuilt (`PlainUnpickler`), and the file must have as many bytes as its tensors take.

    Raises:
        ValueError or UnpicklingError: it contains something else, or would take more; damage may raise other errors.
    """
    with open_plain(source, MOST_BYTES) if isinstance(source, Path) else source as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        start = file.read(4)
        file.seek(0)
        try:
            if start == b"PK\3\4":
                return _from_archive(file, size)
            # b"\x80" begins a pickle of protocol 2
            if start and start[:1] != b"\x80":
                raise ValueError(f"torch.save did not write it; {beginning(file)}")

            return _from_stream(file, size)
        except (EOFError, IndexError, struct.error) as error:  # which have no message
            raise ValueError("it is cut off or damaged") from error


def _from_archive(file: IO[bytes], size: int) -> Any:
    with zipfile.ZipFile(file) as archive:
        # Uncompressed, and no bytes twice: otherwise a small file could fill the memory.
        members = archive.infolist()
        folder = members[0].filename.partition("/")[0] if members else ""
        if f"{folder}/data.pkl" not in archive.namelist():
            raise ValueError("torch.save did not write it; it is another archive")

        # TorchScript compresses its code, none of which is read
        read_here = (f"{folder}/data/", f"{folder}/data.pkl", f"{folder}/byteorder")
        members = [member for member in members if member.filename.startswith(read_here)]
        packed = any(member.compress_type for member in members)
        if packed or sum(member.file_size for member in members) > size:
            raise ValueError(
                f"its {size} bytes would unpack to more, which torch.save never writes"
            )

        for member in members:
            if not member.CRC:
                del member.CRC  # torch.save can be configured to write none

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


def _from_stream(file: IO[bytes], size: int) -> Any:
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
    """Return the SHA-256 of a file's bytes, read in pieces; OSError as for `hashed`."""
    digest = hashlib.sha256()
    with open_plain(path, MOST_BYTES) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _unshared(tensors: list[Tensor]) -> list[Tensor]:
    """Clone tensors that share a storage (tied weights, views): safetensors refuses shared storage."""
    pointers = set()
    unshared = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # Empty tensors have no memory, or share one address.
        if tensor.numel():
            if storage.data_ptr() in pointers or storage.nbytes() != tensor.nbytes:
                tensor = tensor.clone()
            pointers.add(storage.data_ptr())
        unshared.append(tensor)

    return unshared
