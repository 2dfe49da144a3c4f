"""MNIST, SVHN and CIFAR as torchvision lays them out: idx files, MATLAB files, pickled batches; and what is refused."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.io

import medfl.datasets as datasets
from medfl.core.errors import InputError
from medfl.datasets.readers import stacks
from medfl.datasets.readers.reading import container_uri, split_uri
from tests.support.cohorts import SIZES

STACKED = ("mnist", "fmnist", "svhn", "cifar10", "cifar100")
PIXELS = np.random.default_rng(0).integers(0, 256, (10, 4, 4, 3), dtype=np.uint8)


def images(name: str, folder: Path, section: str = "test") -> list[tuple[int, bytes]]:
    items = datasets.datalist(name, folder, section)
    return [(item["label"], datasets.read_pixels(item["image"]).tobytes()) for item in items]


def idx(path: Path, *values: int, shape: tuple[int, ...], head: bytes = b"\0\0\x08") -> None:
    """Write an idx file as its description says: magic number, axes, lengths as big-endian 32-bit integers, bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    path.write_bytes(head + bytes([len(shape)]) + sizes + bytes(values))


def mnist(folder: Path, rows: int = 20) -> None:
    for stem in ("train", "t10k"):
        idx(folder / f"{stem}-images-idx3-ubyte", *range(rows * 6), shape=(rows, 2, 3))
        idx(folder / f"{stem}-labels-idx1-ubyte", *(row % 10 for row in range(rows)), shape=(rows,))


@pytest.mark.parametrize("name", STACKED)
def test_validation_is_carved_from_the_published_training_images(
    phantoms: dict[str, Path], name: str
) -> None:
    data, folder = datasets.get(name), phantoms[name]
    found = datasets.sections(name, folder)
    assert datasets.splits(name, folder) == ("official",)
    parts = {
        section: {item["id"].partition("_")[0] for item in items}
        for section, items in found.items()
    }
    assert parts == {"train": {"train"}, "validate": {"train"}, "test": {"test"}}
    counts = {section: Counter(item["label"] for item in items) for section, items in found.items()}
    total = SIZES.get(name, 30)
    for label in range(len(data.classes)):
        assert counts["test"][label] == total // 5
        assert counts["validate"][label] == pytest.approx(0.08 * total, abs=1)
    sizes = {datasets.read_pixels(item["image"]).shape for item in found["test"]}
    assert sizes == {(32, 32, data.channels)}


@pytest.mark.parametrize("place", [".", "raw", "MNIST/raw"])
def test_idx_files(tmp_path: Path, place: str) -> None:
    folder, packed = tmp_path / "plain", tmp_path / "packed"
    mnist(folder / place)
    found = datasets.datalist("mnist", folder, "test")
    assert [item["label"] for item in found] == [row % 10 for row in range(20)]
    assert datasets.read_pixels(found[3]["image"]).ravel().tolist() == [18, 19, 20, 21, 22, 23]
    assert datasets.read_pixels(found[3]["image"]).shape == (2, 3, 1)
    (packed / place).mkdir(parents=True)
    for path in (folder / place).iterdir():
        (packed / place / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert images("mnist", packed) == images("mnist", folder)
    assert datasets.checksum("mnist", packed) == datasets.checksum("mnist", folder)


def test_an_image_may_be_changed(tmp_path: Path) -> None:
    """The rows of an array are loaded once for all; a transform that works in place must not change them."""
    mnist(tmp_path)
    item = datasets.datalist("mnist", tmp_path, "test")[3]
    read = datasets.ReadPixelsd("image")
    read(item)["image"].zero_()
    assert read(item)["image"].ravel().tolist() == [18, 19, 20, 21, 22, 23]


def test_svhn_calls_digit_0_class_10(tmp_path: Path) -> None:
    """X is (H, W, C, N) and y runs from 1 to 10."""
    y = np.arange(1, 11, dtype=np.uint8)[:, None]
    for part in ("train", "test"):
        scipy.io.savemat(
            tmp_path / f"{part}_32x32.mat", {"X": PIXELS.transpose(1, 2, 3, 0), "y": y}
        )
    found = datasets.datalist("svhn", tmp_path, "test")
    assert [item["label"] for item in found] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert np.array_equal(datasets.read_pixels(found[7]["image"]), PIXELS[7])


def batch(labels: dict[str, list[int]], pixels: np.ndarray = PIXELS) -> bytes:
    """A batch as it was published: by Python 2, so keys and raw bytes are its strings; channels before rows."""
    text = pickle.dumps(
        {"data": pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1), **labels}, protocol=2
    )
    return text.replace(b"numpy._core", b"numpy.core")


def test_cifar_batches_plain_and_packed(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number, file in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (folder / file).write_bytes(batch({"labels": [number] * 10}))
    found = {
        section: datasets.datalist("cifar10", tmp_path, section)
        for section in ("train", "validate", "test")
    }
    assert Counter(i["label"] for s in ("train", "validate") for i in found[s]) == dict.fromkeys(
        range(5), 10
    )
    assert {item["label"] for item in found["test"]} == {5}
    second = next(
        item for items in found.values() for item in items if item["id"] == "train_000017"
    )
    assert second["label"] == 1
    assert np.array_equal(datasets.read_pixels(second["image"]), PIXELS[7])
    before = datasets.checksum("cifar10", tmp_path)
    assert datasets.locate("cifar10", tmp_path) == tmp_path
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        for file in sorted(folder.iterdir(), reverse=True):
            archive.add(file, f"cifar-10-batches-py/{file.name}")
    shutil.rmtree(folder)
    assert ".tar.gz!" in datasets.datalist("cifar10", tmp_path, "test")[0]["image"]
    assert datasets.checksum("cifar10", tmp_path) == before


def test_cifar100_takes_the_fine_labels(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python").mkdir()
    for part in ("train", "test"):
        text = batch({"fine_labels": [*range(90, 100)], "coarse_labels": [1] * 10})
        (tmp_path / "cifar-100-python" / part).write_bytes(text)
    assert [item["label"] for item in datasets.datalist("cifar100", tmp_path, "test")] == [
        *range(90, 100)
    ]
    assert (datasets.get("cifar100").classes[0], datasets.get("cifar100").classes[99]) == (
        "apple",
        "worm",
    )
    assert len(set(datasets.get("cifar100").classes)) == 100


class _Evil:
    def __init__(self, call: object, *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call, self.arguments


@pytest.mark.parametrize(
    ("evil", "asked"),
    [
        (_Evil(os.system, "touch {}"), "system"),
        (_Evil(eval, "open('{}', 'w')"), "eval"),
        (_Evil(np.save, "{}", 1), "numpy"),
        (_Evil(getattr, np, "save"), "getattr"),
    ],
)
def test_a_pickle_that_wants_more_than_arrays_is_refused(
    tmp_path: Path, evil: _Evil, asked: str
) -> None:
    (tmp_path / "cifar-100-python").mkdir()
    mark = tmp_path / "mark"
    evil.arguments = tuple(a.format(mark) if isinstance(a, str) else a for a in evil.arguments)
    if evil.call is getattr:
        evil.arguments = ("text", "upper")
    for part in ("train", "test"):
        text = pickle.dumps({"data": evil, "fine_labels": [1]}, protocol=2)
        (tmp_path / "cifar-100-python" / part).write_bytes(text)
    with pytest.raises(
        InputError,
        match=rf"cifar-100-python cannot be read \(UnpicklingError: it asks for .*{asked}",
    ):
        datasets.datalist("cifar100", tmp_path, "train")
    assert not mark.exists()


@pytest.mark.parametrize(
    "content", [b"", b"nonsense" * 9, pickle.dumps([1, 2]), batch({"labels": [1]})[:-80]]
)
def test_damaged_batches_are_told_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cifar-100-python").mkdir()
    for part in ("train", "test"):
        (tmp_path / "cifar-100-python" / part).write_bytes(content)
    with pytest.raises(InputError, match=r"cifar-100-python cannot be read \(.+\)") as caught:
        datasets.datalist("cifar100", tmp_path, "train")
    assert "\n" not in str(caught.value)


def test_a_damaged_archive_and_a_missing_member_are_told(tmp_path: Path) -> None:
    path = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(path, "w:gz"):
        pass
    with pytest.raises(
        InputError, match=r"cifar-100-python.tar.gz cannot be read \(KeyError: 'train'\)"
    ):
        datasets.datalist("cifar100", tmp_path, "train")
    path.write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"cifar-100-python.tar.gz cannot be read"):
        datasets.datalist("cifar100", tmp_path, "train")


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("train-images-idx3-ubyte", {"shape": (20, 2, 4)}),
        ("train-images-idx3-ubyte", {"shape": (20, 2, 3), "head": b"\0\0\x0d"}),
        ("t10k-labels-idx1-ubyte", {"shape": (200,)}),
        ("t10k-labels-idx1-ubyte", {"shape": ()}),
    ],
)
def test_damaged_idx_files_are_told(tmp_path: Path, file: str, changed: dict) -> None:
    mnist(tmp_path)
    idx(tmp_path / file, *range(120 if "images" in file else 20), **changed)
    with pytest.raises(
        InputError,
        match=rf"{file} cannot be read \(it is not an idx file of bytes, or is cut off\)",
    ):
        datasets.datalist("mnist", tmp_path, "train")
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(InputError, match="is not an idx file"):
        datasets.datalist("mnist", tmp_path, "train")


def test_labels_that_do_not_fit_are_told(tmp_path: Path) -> None:
    mnist(tmp_path)
    idx(tmp_path / "t10k-labels-idx1-ubyte", *([0] * 19), 10, shape=(20,))
    with pytest.raises(
        InputError, match=r"t10k-labels-idx1-ubyte: idx\[19\] is 10, the labels are 0 to 9"
    ):
        datasets.datalist("mnist", tmp_path, "train")
    idx(tmp_path / "t10k-labels-idx1-ubyte", *([0] * 19), shape=(19,))
    with pytest.raises(InputError, match="20 test images but 19 labels"):
        datasets.datalist("mnist", tmp_path, "train")


@pytest.mark.parametrize("content", [b"", b"MATLAB 5.0 MAT-file".ljust(200), b"\x01" * 500])
def test_damaged_matlab_files_are_told(tmp_path: Path, content: bytes) -> None:
    for part in ("train", "test"):
        (tmp_path / f"{part}_32x32.mat").write_bytes(content)
    with pytest.raises(InputError, match=r"train_32x32.mat cannot be read") as caught:
        datasets.datalist("svhn", tmp_path, "train")
    assert "\n" not in str(caught.value)
    scipy.io.savemat(tmp_path / "train_32x32.mat", {"X": PIXELS})
    with pytest.raises(InputError, match="it has no variable 'y'"):
        datasets.datalist("svhn", tmp_path, "train")


def test_files_of_other_data_sets_are_not_taken(tmp_path: Path) -> None:
    """Fashion-MNIST has the file names of MNIST: below a common folder the name between tells them apart."""
    mnist(tmp_path / "FashionMNIST" / "raw")
    assert datasets.locate("fmnist", tmp_path) == tmp_path
    with pytest.raises(InputError, match="holds no mnist data"):
        datasets.locate("mnist", tmp_path)
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    with pytest.raises(InputError, match="holds no mnist data"):
        datasets.locate("mnist", tmp_path)


@pytest.mark.parametrize("name", ["svhn", "cifar10", "mnist"])
def test_the_same_seed_gives_the_same_files(tmp_path: Path, name: str) -> None:
    def written(run: str) -> dict[str, bytes]:
        folder = datasets.write_phantom(name, tmp_path / run, per_class=10, size=16)
        return {
            str(p.relative_to(folder)): p.read_bytes()
            for p in sorted(folder.rglob("*"))
            if p.is_file()
        }

    assert written("a") == written("b")


def test_uris_of_rows() -> None:
    for path, part in (
        ("/a/b.npz", "images#3"),
        ("/a/train-images-idx3-ubyte.gz", "idx#3"),
        ("/a/t10k-images-idx3-ubyte", "idx#3"),
        ("/a/test_32x32.mat", "X#3"),
        ("/a!/cifar-10-batches-py", "train_images#3"),
        ("/a/cifar-100-python.tar.gz", "test_images#3"),
    ):
        assert split_uri(f"{path}!{part}") == (path, part)
        assert container_uri(f"{path}!{part}") == f"{path}!{part[:-1]}0"
    for uri in ("/a/b.zip!c#1.jpg", "/a/b.json!10:20", "/a/b!c#1.jpg", "/a/b.jpg"):
        assert container_uri(uri) == uri
    assert split_uri("/a/b!c#1.jpg") == ("/a/b!c#1.jpg", "")
    with pytest.raises(ValueError, match="KeyError"):
        stacks.load("/nowhere/cifar-10-batches-py", "extra_images")


def test_stacks_do_not_unpack_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_UNPACKED", 2**20)
    zeros = bytes(2**24)
    (tmp_path / "a-ubyte.gz").write_bytes(gzip.compress(zeros))
    scipy.io.savemat(tmp_path / "a.mat", {"X": np.zeros(2**24, np.uint8)}, do_compression=True)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        for name in ("other", "cifar-10-batches-py/test_batch"):
            member = tarfile.TarInfo(name)
            member.size = len(zeros)
            archive.addfile(member, io.BytesIO(zeros))
    for file, name in (
        ("a-ubyte.gz", "idx"),
        ("a.mat", "X"),
        ("cifar-10-python.tar.gz", "test_images"),
    ):
        with pytest.raises(ValueError, match="would unpack to"):
            stacks.load(tmp_path / file, name)


@pytest.mark.parametrize("name", ["train_32x32.mat", "train-images-idx3-ubyte", "batches"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "batches":
        path.mkdir()
        for number in range(1, 6):
            os.mkfifo(path / f"data_batch_{number}")
    else:
        os.mkfifo(path)
    with pytest.raises((OSError, ValueError), match="no plain file"):
        stacks.load(path, "train_images")
