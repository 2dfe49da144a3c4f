"""Images and labels stacked in arrays, as torchvision keeps MNIST, SVHN and CIFAR on disk; read without torchvision.

A container is an idx file (array "idx"), a MATLAB file (its variables), or the folder or tar archive of CIFAR's batches
(arrays "train_images", "train_labels", "test_images", "test_labels"). Images are (N, H, W[, C]) uint8, labels (N,).
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medfl.core import Array, open_plain, read_bytes
from medfl.storage.pickled_arrays import STAND_INS, latin1

CIFAR10 = "cifar-10-batches-py"
CIFAR100 = "cifar-100-python"
_FILES: Mapping[str, Mapping[str, Sequence[str]]] = {
    CIFAR10: {
        "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
        "test": ("test_batch",),
    },
    CIFAR100: {"train": ("train",), "test": ("test",)},
}
_LABELS = {CIFAR10: "labels", CIFAR100: "fine_labels"}
ARCHIVES = {CIFAR10: "cifar-10-python.tar.gz", CIFAR100: "cifar-100-python.tar.gz"}
# More than both, in bytes and as a multiple of the packed size, is no image or stack.
_UNPACKED = 2**31
_RATIO = 100
_ALLOWED: Mapping[str, Any] = {**STAND_INS, "_codecs.encode": latin1}
"""What the pickle of an array may ask for, and what it gets: nothing that runs code or is NumPy's own."""


def most_unpacked(packed: int) -> int:
    """Return how many bytes an image or stack of so many packed bytes may have."""
    return max(_UNPACKED, _RATIO * packed)


def check_unpacked(size: int, packed: int) -> None:
    """Raise a ValueError if so many bytes that unpack to `size` would fill the memory with next to nothing."""
    if size > most_unpacked(packed):
        raise ValueError(f"{packed} bytes would unpack to {size} or more")


def unpacked(content: bytes) -> bytes:
    """Return what gzip packed; a ValueError if it would fill the memory."""
    with gzip.open(io.BytesIO(content)) as packed:
        data = packed.read(most_unpacked(len(content)) + 1)
    check_unpacked(len(data), len(content))
    return data


def load(path: str | Path, name: str) -> Array:
    """Return an array of a container.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, is something else, or has no such array.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        open_plain(path).close()

    try:
        if path.suffix == ".mat":
            return _matlab(path, name)
        if "-ubyte" in path.name:
            return _idx(path)

        return _cifar(path, name)
    except (OSError, ValueError):
        raise
    except Exception as error:  # the readers of damaged files raise whatever they stumble over
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _idx(path: Path) -> Array:
    """Read an idx file: two zero bytes, type 8 (unsigned byte), number of axes, their lengths (big-endian), values."""
    content = path.read_bytes()
    content = unpacked(content) if path.suffix == ".gz" else content
    axes = content[3] if len(content) > 3 else 0
    if len(content) >= 4 + 4 * axes:
        shape = np.frombuffer(content, ">u4", axes, offset=4)
    else:
        shape = np.zeros(0)

    values = np.frombuffer(content, np.uint8, offset=min(4 + 4 * axes, len(content)))
    if content[:3] != b"\0\0\x08" or not axes or values.size != math.prod(shape.tolist()):
        raise ValueError("it is not an idx file of bytes, or is cut off")

    return values.reshape(list(map(int, shape)))


def _matlab(path: Path, name: str) -> Array:
    """Read SVHN's "X" (H, W, C, N) as (N, H, W, C) or its "y" (N, 1), where 10 is digit 0, as (N,) with 0."""
    from scipy.io import loadmat, whosmat

    for _, shape, _ in whosmat(path):
        check_unpacked(8 * math.prod(shape), path.stat().st_size)

    variables = loadmat(path, variable_names=[name])
    if name not in variables:
        raise ValueError(f"it has no variable {name!r}")

    values: Array = variables[name]
    if values.ndim == 4:
        return np.ascontiguousarray(values.transpose(3, 0, 1, 2))

    return values.reshape(-1) % 10


def _cifar(path: Path, name: str) -> Array:
    kind = CIFAR100 if "100" in path.name else CIFAR10
    part, _, content = name.partition("_")
    batches = list(map(_unpickled, _texts(path, kind, _FILES[kind][part])))
    if content == "labels":
        return np.array([label for batch in batches for label in batch[_LABELS[kind]]])

    values = np.concatenate([np.asarray(batch["data"]) for batch in batches])
    # A row is the red, the green and the blue plane of an image, one after the other.
    side = math.isqrt(values.shape[1] // 3)
    return np.ascontiguousarray(values.reshape(-1, 3, side, side).transpose(0, 2, 3, 1))


def _texts(path: Path, kind: str, files: Sequence[str]) -> list[bytes]:
    """Read files of the folder, or members of the archive in one pass: to go back in it is to unpack it anew."""
    if path.is_dir():
        return [read_bytes(path / file, _UNPACKED) for file in files]

    texts = {}
    size = 0
    with tarfile.open(path) as archive:
        for member in archive:
            file = member.name.removeprefix("./").removeprefix(f"{kind}/")
            size += member.size  # what is passed over is unpacked too
            check_unpacked(size, path.stat().st_size)
            if file in files and (opened := archive.extractfile(member)):
                texts[file] = opened.read()

    return [texts[file] for file in files]


class _Unpickler(pickle.Unpickler):
    """Rebuilds arrays, numbers, texts and lists; a pickle that asks for anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what an array is rebuilt with."""
        if f"{module}.{name}" not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image needs")
        return _ALLOWED[f"{module}.{name}"]


def _unpickled(text: bytes) -> Mapping[str, Any]:
    batch = _Unpickler(io.BytesIO(text), encoding="latin1").load()
    if not isinstance(batch, Mapping):
        raise ValueError(f"it holds a {type(batch).__name__}, not a batch of images")
    return batch


# Writing, for phantoms


def write_idx(path: Path, values: Array) -> None:
    """Write a packed idx file of bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes(), mtime=0))


def write_svhn(path: Path, images: Array, labels: Array) -> None:
    """Write a MATLAB file with the variables of SVHN."""
    target = io.BytesIO()
    variables = {
        "X": images.transpose(1, 2, 3, 0),
        "y": np.where(labels == 0, 10, labels).astype(np.uint8)[:, None],
    }
    from scipy.io import savemat

    savemat(target, variables, do_compression=True)
    title = b"MATLAB 5.0 MAT-file, phantom of SVHN"  # in the place of one with the time of day
    path.write_bytes(title.ljust(116) + target.getvalue()[116:])


def write_cifar(kind: str, folder: Path, stacks: Mapping[str, tuple[Array, Array]]) -> None:
    """Write the batches of CIFAR10 or CIFAR100, as equal as can be, from images and labels of "train" and "test"."""
    (folder / kind).mkdir(parents=True, exist_ok=True)
    for part, (images, labels) in stacks.items():
        files = _FILES[kind][part]
        rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        batches = zip(
            np.array_split(rows, len(files)), np.array_split(labels, len(files)), strict=True
        )
        for file, (data, classes) in zip(files, batches, strict=True):
            batch = {
                "batch_label": file,
                "data": np.ascontiguousarray(data),
                _LABELS[kind]: classes.tolist(),
            }
            (folder / kind / file).write_bytes(pickle.dumps(batch, protocol=2))
