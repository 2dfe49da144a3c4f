from __future__ import annotations

import io
import multiprocessing
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.transforms import ScaleIntensityRanged
from PIL import Image, ImageOps

from medfl.core.errors import InputError
from medfl.datasets import ReadPixelsd
from medfl.datasets.readers.reading import archive, content_key, read_pixels


@pytest.fixture
def picture() -> np.ndarray:
    rows, columns = np.mgrid[0:48, 0:64]
    return np.stack([rows * 5, columns * 3, 255 - rows * 2], axis=-1).astype(np.uint8)


@pytest.fixture
def uris(tmp_path, picture) -> dict[str, str]:
    """The same picture in each place that an image can lie."""
    Image.fromarray(picture).save(tmp_path / "a.png")
    Image.fromarray(picture).save(tmp_path / "a.jpg", quality=95)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.write(tmp_path / "a.png", "in/a.png")
    np.savez_compressed(tmp_path / "a.npz", images=np.stack([picture, 255 - picture]))
    return {
        "png": f"{tmp_path}/a.png",
        "jpg": f"{tmp_path}/a.jpg",
        "zip": f"{tmp_path}/a.zip!in/a.png",
        "npz": f"{tmp_path}/a.npz!images#0",
    }


@pytest.mark.parametrize("place", ["png", "zip", "npz"])
def test_same_pixels_from_every_place(uris, picture, place):
    item = ReadPixelsd("image", channels=3)({"image": uris[place], "label": 2})
    assert type(item["image"]) is torch.Tensor
    assert item["image"].dtype == torch.uint8
    assert item["label"] == 2
    assert np.array_equal(item["image"].numpy(), picture.transpose(2, 0, 1))


def test_an_item_without_an_id_is_named_by_its_image(uris):
    assert ReadPixelsd("image")({"image": uris["zip"]})["id"] == uris["zip"]
    assert ReadPixelsd("image")({"image": uris["png"], "id": "own"})["id"] == "own"


@pytest.mark.parametrize("place", ["png", "jpg", "zip", "npz"])
@pytest.mark.parametrize("size", [16, (12, 20), (96, 128)])
def test_resize_gives_the_size_and_keeps_the_content(uris, picture, place, size):
    found = ReadPixelsd("image", size=size)({"image": uris[place]})["image"]
    assert found.shape == (3, *((size, size) if isinstance(size, int) else size))
    assert np.allclose(found.float().mean((1, 2)), picture.mean((0, 1)), atol=3)


def test_resize_is_antialiased(tmp_path):
    """A one-pixel checkerboard averages to grey; picking pixels would give black or white."""
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    np.savez(
        tmp_path / "b.npz",
        u8=board[None],
        u16=board[None].astype(np.uint16) * 257,
        f=board[None] / 255,
    )
    for name, grey in (("u8", 127.5), ("u16", 127.5 * 257), ("f", 0.5)):
        found = read_pixels(f"{tmp_path}/b.npz!{name}#0", (8, 8)).astype(float)
        assert np.allclose(found[2:-2, 2:-2], grey, rtol=0.02), name


def test_grey_and_depth(tmp_path):
    Image.fromarray(np.full((8, 8), 300, np.uint16)).save(tmp_path / "deep.png")
    item = ReadPixelsd("image")({"image": str(tmp_path / "deep.png")})
    assert item["image"].shape == (1, 8, 8)
    assert item["image"].dtype == torch.int32  # with uint16 PyTorch computes nothing
    assert int(item["image"].max()) == 300
    assert ScaleIntensityRanged("image", 0, 600, 0, 1)(item)["image"].max() == 0.5
    np.savez(tmp_path / "b.npz", u4=np.full((1, 4, 4), 70000, np.uint32))
    assert ReadPixelsd("image")({"image": f"{tmp_path}/b.npz!u4#0"})["image"].unique().tolist() == [
        70000
    ]
    Image.fromarray(np.eye(8) > 0).save(tmp_path / "bit.png")
    assert set(np.unique(read_pixels(str(tmp_path / "bit.png")))) == {0, 255}


@pytest.mark.parametrize("turn", range(10))  # 0 and 9 are none
@pytest.mark.parametrize("ending", ["jpg", "png", "tif"])
def test_pictures_are_upright(tmp_path, picture, turn, ending):
    """As Pillow turns them, whole or scaled in the decoder; TIFF files, which it turns itself, not twice."""
    exif = Image.Exif()
    exif[0x0112] = turn
    path = tmp_path / f"a.{ending}"
    Image.fromarray(picture).save(path, exif=exif, **({"quality": 95} if ending == "jpg" else {}))
    with Image.open(path) as image:
        expected = np.array(ImageOps.exif_transpose(image))
        assert expected.shape == ((64, 48, 3) if 5 <= turn <= 8 else (48, 64, 3))
    assert np.array_equal(read_pixels(str(path)), expected)
    small = read_pixels(str(path), (expected.shape[0] // 4, expected.shape[1] // 4)).astype(float)
    assert np.abs(small - expected.reshape(len(small), 4, -1, 4, 3).mean((1, 3))).max() < 8


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_turns_nothing(tmp_path, picture):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(picture).save(tmp_path / "a.jpg", exif=exif)
    data = (tmp_path / "a.jpg").read_bytes()
    head = data.index(b"Exif\0\0") + 6
    (tmp_path / "a.jpg").write_bytes(data[:head] + b"XXXX" + data[head + 4 :])
    assert read_pixels(str(tmp_path / "a.jpg")).shape == (48, 64, 3)


def test_several_pages_are_refused(tmp_path, picture):
    pages = [
        Image.fromarray(picture),
        Image.fromarray(255 - picture),
        Image.fromarray(picture[::2, ::2]),
    ]
    pages[0].save(tmp_path / "m.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(
        InputError, match=r"m\.tif has 3 pages; one picture in each file; save each"
    ) as caught:
        read_pixels(str(tmp_path / "m.tif"))
    assert "\n" not in str(caught.value)
    pages[2].encoderinfo = {"tiffinfo": {254: 1}}  # a smaller copy is no page
    pages[0].save(tmp_path / "t.tif", save_all=True, append_images=pages[2:])
    with Image.open(tmp_path / "t.tif") as image:
        assert image.n_frames == 2
    assert np.array_equal(read_pixels(str(tmp_path / "t.tif")), picture)


@pytest.mark.parametrize(
    ("mode", "channels"), [("RGB", 1), ("L", 3), ("RGBA", 3), ("RGBA", 1), ("LA", 1), ("CMYK", 3)]
)
def test_channels_are_refused_or_converted(tmp_path, mode, channels):
    path = tmp_path / ("c.jpg" if mode == "CMYK" else "c.png")
    Image.new("RGB", (8, 8), (10, 200, 60)).convert(mode).save(path)
    if mode != "CMYK":  # decoded as RGB
        with pytest.raises(
            InputError, match=rf"c\.png has {len(mode)} channels; the data set has {channels}"
        ):
            ReadPixelsd("image", channels=channels)({"image": str(path)})
    found = ReadPixelsd("image", channels=channels, convert=True)({"image": str(path)})["image"]
    assert found.shape == (channels, 8, 8)
    expected = [127.3] if channels == 1 else [10, 200, 60] if mode != "L" else [127.3] * 3
    assert np.allclose(found.float().mean((1, 2)), expected, atol=4)


def _jpeg(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


def test_broken_images_are_named(tmp_path, picture):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    (tmp_path / "cut.jpg").write_bytes(_jpeg(noise)[:2000])
    (tmp_path / "text.jpg").write_text("not an image")
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as file:
        file.writestr("cut.jpg", _jpeg(noise)[:2000])
    (tmp_path / "no.zip").write_bytes(b"PK")
    uris = [
        "cut.jpg",
        "text.jpg",
        "gone.jpg",
        "z.zip!cut.jpg",
        "z.zip!gone.jpg",
        "no.zip!a.jpg",
        "no.npz!a#0",
    ]
    for uri in uris:
        with pytest.raises(InputError) as caught:
            ReadPixelsd("image", size=16)({"image": str(tmp_path / uri)})
        assert uri.split("!")[0] in str(caught.value)
        assert "\n" not in str(caught.value)
    np.savez(tmp_path / "n.npz", images=picture[None])
    for part in ("labels#0", "images#7"):
        with pytest.raises(InputError, match=r"n\.npz"):
            read_pixels(f"{tmp_path}/n.npz!{part}")


def test_a_page_of_postscript_starts_no_program(tmp_path, monkeypatch):
    mark, program = tmp_path / "mark", tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    page = tmp_path / "page.png"
    page.write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EndProlog\nshowpage\n%%EOF\n"
    )
    with pytest.raises(InputError, match="page.png cannot be read"):
        read_pixels(str(page))
    with Image.open(page) as image, pytest.raises(OSError, match="Ghostscript"):
        image.load()  # as MONAI's readers do
    assert not mark.exists()


@pytest.mark.parametrize("name", ["picture.mhd", "picture.dcm"])
def test_a_header_that_begins_as_dicom_reads_no_other_file(tmp_path, name):
    (tmp_path / "secret").write_bytes(bytes(100))
    head = "ObjectType = Image\nNDims = 3\nComment = "
    head += "x" * (128 - len(head)) + "DICM\nDimSize = 10 10 1\nElementType = MET_UCHAR\n"
    (tmp_path / name).write_text(f"{head}ElementDataFile = {tmp_path / 'secret'}\n")
    with pytest.raises(InputError, match="cannot be read"):
        read_pixels(str(tmp_path / name))


def test_damaged_zip_member_is_named(tmp_path, uris):
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[data.index(b"IDAT") + 6] ^= 0xFF
    (tmp_path / "bad.zip").write_bytes(data)
    with pytest.raises(InputError, match=r"bad\.zip!in/a\.png cannot be read"):
        read_pixels(f"{tmp_path}/bad.zip!in/a.png")


def test_bad_arguments():
    with pytest.raises(InputError, match="channels 1 or 3"):
        ReadPixelsd("image", convert=True)
    with pytest.raises(InputError, match="image size 0"):
        ReadPixelsd("image", size=0)


def test_handles_are_kept_until_the_file_changes(tmp_path, uris):
    kept = archive(tmp_path / "a.zip")
    assert archive(tmp_path / "a.zip") is kept
    with zipfile.ZipFile(tmp_path / "a.zip", "a") as file:
        file.writestr("more.txt", "x")
    assert "more.txt" in archive(tmp_path / "a.zip").namelist()


def _read_many(uri: str, expected: int) -> bool:
    return all(int(read_pixels(uri).astype(int).sum()) == expected for _ in range(50))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_processes_do_not_share_file_offsets(uris):
    expected = int(read_pixels(uris["zip"]).astype(int).sum())
    reader = ReadPixelsd("image")
    assert pickle.loads(pickle.dumps(reader)).size is None
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert all(pool.starmap(_read_many, [(uris["zip"], expected)] * 6))


def test_content_key_is_that_of_the_content(uris, tmp_path):
    assert content_key(uris["png"]) == content_key(uris["zip"])
    assert content_key(uris["png"]) != content_key(uris["jpg"])
    assert content_key(uris["npz"]).split(":")[0] == str(2 * 48 * 64 * 3 + 128)
    with pytest.raises(InputError, match=r"gone\.png"):
        content_key(f"{tmp_path}/gone.png")


def test_a_row_of_flat_numbers_is_no_picture_of_one_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "flat.npz", images=np.arange(48, dtype=np.uint8).reshape(3, 16))
    with pytest.raises(InputError, match="has 16 channels"):
        read_pixels(f"{tmp_path / 'flat.npz'}!images#0", channels=1)
