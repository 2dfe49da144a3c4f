"""Colour PNG files of 16 bits, as SimpleITK and other programs write them."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import SimpleITK
import torch
from PIL import Image

from medfl.core.errors import InputError
from medfl.datasets import ReadPixelsd, read_pair
from medfl.datasets.readers.reading import read_pixels


def write(path: Path, pixels: np.ndarray) -> str:
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(pixels, isVector=pixels.ndim == 3), str(path))
    assert path.read_bytes()[24] == 16
    return str(path)


def drawn(channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 16, (12, 17, channels), dtype=np.uint16)


def with_orientation(path: Path, orientation: int) -> None:
    """Add a chunk of EXIF to a PNG file, after its first."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    content = path.read_bytes()
    path.write_bytes(content[:33] + chunk + content[33:])


@pytest.mark.parametrize("channels", [3, 4])
def test_all_bits_are_read(channels: int, tmp_path: Path) -> None:
    pixels = drawn(channels)
    uri = write(tmp_path / "a.png", pixels)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.write(uri, "in/a.png")
    for place in (uri, f"{tmp_path}/a.zip!in/a.png"):
        found = read_pixels(place)
        assert found.dtype == np.uint16
        assert np.array_equal(found, pixels)
    assert np.array_equal(read_pixels(uri, channels=3, convert=True), pixels[..., :3])


def test_they_become_tensors_as_grey_ones_do(tmp_path: Path) -> None:
    pixels = drawn()
    item = ReadPixelsd("image", channels=1, convert=True)(
        {"image": write(tmp_path / "a.png", pixels)}
    )
    assert item["image"].dtype == torch.int32
    grey = pixels.astype(float) @ [0.299, 0.587, 0.114]
    assert np.abs(item["image"].numpy()[0] - grey).max() <= 0.5
    flat = np.full((8, 8, 3), 40000, np.uint16)
    assert (read_pixels(write(tmp_path / "b.png", flat), size=(4, 6)) == 40000).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_they_are_upright(orientation: int, tmp_path: Path) -> None:
    """As the same picture in 8 bits is, of which Pillow knows."""
    pixels = drawn()
    deep, plain = tmp_path / "deep.png", tmp_path / "plain.png"
    write(deep, pixels)
    Image.fromarray((pixels >> 8).astype(np.uint8)).save(plain)
    for path in (deep, plain):
        with_orientation(path, orientation)
    assert np.array_equal(read_pixels(str(deep)) >> 8, read_pixels(str(plain)))


def test_a_mask_keeps_its_class_indices(tmp_path: Path) -> None:
    """The upper bits alone would be 0 everywhere."""
    mask = np.zeros((12, 17, 3), np.uint16)
    mask[3:6, 4:9] = 2
    _, found, _ = read_pair(
        write(tmp_path / "a.png", drawn()), write(tmp_path / "m.png", mask), classes=3
    )
    assert np.array_equal(found, mask[..., 0])


def test_what_cannot_be_read_is_refused_by_its_name(tmp_path: Path) -> None:
    whole = Path(write(tmp_path / "a.png", drawn()))
    (tmp_path / "cut.png").write_bytes(whole.read_bytes()[:-400])
    with pytest.raises(InputError, match=r"image .*cut\.png cannot be read \("):
        read_pixels(str(tmp_path / "cut.png"))
    write(tmp_path / "veiled.png", drawn(2))
    with pytest.raises(
        InputError,
        match=r"veiled\.png cannot be read \(it is grey with transparency, or of inks, in 16 bits",
    ):
        read_pixels(str(tmp_path / "veiled.png"))


def test_other_files_are_read_as_before(tmp_path: Path) -> None:
    grey = drawn()[..., 0]
    assert np.array_equal(read_pixels(write(tmp_path / "grey.png", grey))[..., 0], grey)
    colour = (drawn() >> 8).astype(np.uint8)
    packed = io.BytesIO()
    Image.fromarray(colour).save(packed, "PNG")
    (tmp_path / "b.png").write_bytes(packed.getvalue())
    assert np.array_equal(read_pixels(str(tmp_path / "b.png")), colour)
