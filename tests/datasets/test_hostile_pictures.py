"""Pictures and series of strangers: one line says why they are not read, whatever their reader stumbles over."""

import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK as sitk
from PIL import Image, TiffImagePlugin

from medfl.core.errors import InputError
from medfl.core.untrusted import printable
from medfl.datasets.readers import dicom, stacks
from medfl.datasets.readers.reading import read_pixels
from medfl.datasets.readers.volumes import read_volume

GREY = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))


def tiff(path: Path, pages: int, kind: Any = 0) -> None:
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    if kind:
        tags[254] = kind
        tags.tagtype[254] = 2 if isinstance(kind, str) else 11
    GREY.save(path, save_all=True, append_images=[GREY] * (pages - 1), tiffinfo=tags)


@pytest.mark.parametrize("kind", ["abc", 1.5])
def test_a_page_says_in_any_form_what_it_is(kind: Any, tmp_path: Path) -> None:
    tiff(tmp_path / "a.tif", 2, kind)
    with pytest.raises(InputError, match="has 2 pages"):
        read_pixels(str(tmp_path / "a.tif"))


def test_a_chain_of_pages_is_not_followed_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiff(tmp_path / "a.tif", 150)
    seen = []
    seek = TiffImagePlugin.TiffImageFile.seek
    monkeypatch.setattr(
        TiffImagePlugin.TiffImageFile, "seek", lambda self, n: seen.append(n) or seek(self, n)
    )
    with pytest.raises(InputError, match="has 100 pages"):
        read_pixels(str(tmp_path / "a.tif"))
    assert max(seen) == 99


def test_a_damaged_member_of_an_archive(tmp_path: Path) -> None:
    GREY.resize((256, 256)).save(tmp_path / "a.png")
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_LZMA) as file:
        file.write(tmp_path / "a.png", "a.png")
    content = bytearray((tmp_path / "a.zip").read_bytes())
    content[55:120] = b"\xff" * 65
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(InputError, match="cannot be read"):
        read_pixels(f"{tmp_path / 'a.zip'}!a.png")


@pytest.mark.parametrize("kind", ["<U4", "|S4", "<M8[s]", "|V4", "<f16", "<c16", "<m8[D]"])
def test_arrays_of_other_things_than_numbers(kind: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 8, 8), kind))
    with pytest.raises(InputError, match="it holds .* values|cannot be read"):
        read_pixels(f"{tmp_path / 'a.npz'}!x#0")


def test_arrays_of_another_byte_order_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(128, dtype=">i2").reshape(2, 8, 8))
    pixels = read_pixels(f"{tmp_path / 'a.npz'}!x#1")
    assert pixels.dtype.isnative
    assert pixels[0, 0, 0] == 64


@dicom.own_locale()
def test_pictures_do_not_unpack_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes a row in the file, eight a value in memory."""
    monkeypatch.setattr(stacks, "_UNPACKED", 2**19)
    deep = sitk.GetImageFromArray(np.zeros((300, 300, 3), np.uint16), isVector=True)
    sitk.WriteImage(deep, str(tmp_path / "a.png"), True)
    flat = sitk.GetImageFromArray(np.zeros((1, 600, 600), np.uint8))
    sitk.WriteImage(flat, str(tmp_path / "a.dcm"))
    monkeypatch.setattr("os.path.getsize", lambda path: 1000)  # as where the file is deflated
    for name in ("a.png", "a.dcm"):
        with pytest.raises(InputError, match="would unpack to"):
            read_pixels(str(tmp_path / name))


@dicom.own_locale()
@pytest.mark.parametrize(
    "positions", [("1\\2", "1\\3"), ("0\\0\\0", "0\\1"), ("nan\\0\\0", "nan\\0\\0"), ("x", "y")]
)
def test_positions_of_slices_that_are_none(positions: tuple[str, str], tmp_path: Path) -> None:
    for index in range(2):
        picture = sitk.GetImageFromArray(np.full((1, 8, 8), index, np.int16))
        for tag, value in (("0020|000e", "1.2.3"), ("0008|0060", "CT"), ("0020|0032", "7\\7\\7")):
            picture.SetMetaData(tag, value)
        writer = sitk.ImageFileWriter()
        writer.KeepOriginalImageUIDOn()
        file = tmp_path / f"{index}.dcm"
        writer.SetFileName(str(file))
        writer.Execute(picture)
        content = file.read_bytes()
        assert content.count(b"7\\7\\7 ") == 1
        file.write_bytes(content.replace(b"7\\7\\7 ", positions[index].ljust(6).encode()[:6]))
    with pytest.raises(InputError, match="DICOM"):
        read_volume(str(tmp_path))


def test_a_number_of_many_digits_is_said_in_few() -> None:
    assert printable(10**5000, 40) == "a number of thousands of digits"
    assert printable("Lücke 骨") == "Lücke 骨"
    assert printable("a\x1bb\u202ec\u200bd\u0627e\ud800\n") == (
        r"a\x1bb\u202ec\u200bd\u0627e\ud800\n"
    )
    assert printable("x" * 50, 40) == "x" * 37 + "..."
    assert (
        printable(Path("/deep") / ("x" * 50) / "a.png", 20) == "..." + "x" * 11 + "/a.png"
    )  # the file is named


def test_what_pillow_warns_of_is_not_on_the_terminal(tmp_path: Path) -> None:
    """Of a palette's transparency, of damaged EXIF: neither changes a pixel."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8))
    picture.quantize(8).save(tmp_path / "a.png", transparency=bytes([0, 10]))
    picture.save(tmp_path / "b.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12")
    names = ("a.png", "b.jpg")
    # a program of its own: pytest has its own filters
    code = "import sys\nfrom medfl.datasets.readers.reading import read_pixels\n[*map(read_pixels, sys.argv[1:])]"
    program = [sys.executable, "-c", code, *(str(tmp_path / name) for name in names)]
    ended = subprocess.run(program, check=True, capture_output=True, text=True)
    assert ended.stderr == ""
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right = np.asarray(Image.open(tmp_path / name).convert("RGB"))
            assert np.array_equal(read_pixels(str(tmp_path / name)), right)
