"""Bits, signs, polarity and palettes of pictures as other programs write them; values as NumPy and tifffile have."""

from __future__ import annotations

import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import ExifTags, Image

from medfl.core.errors import InputError
from medfl.datasets.readers.pairs import read_pair
from medfl.datasets.readers.reading import read_pixels

RANDOM = np.random.default_rng(0)


def drawn(kind: str, channels: int = 0) -> np.ndarray:
    shape = (6, 8, channels) if channels else (6, 8)
    if kind.startswith("f"):
        return RANDOM.random(shape).astype(kind)
    limits = np.iinfo(kind)
    return RANDOM.integers(limits.min, limits.max, shape, dtype=kind, endpoint=True)


KINDS: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    **{f"grey {kind}": (drawn(kind), {}) for kind in ("uint8", "int8", "uint16", "int16", "uint32")},
    **{f"grey {kind}": (drawn(kind), {}) for kind in ("int32", "float32")},
    "grey uint16, big-endian": (drawn("uint16"), {"byteorder": ">"}),
    "grey uint16, packed": (drawn("uint16"), {"compression": "zlib", "predictor": True}),
    **{f"rgb {kind}": (drawn(kind, 3), {"photometric": "rgb"}) for kind in ("uint8", "uint16")},
    "rgb uint16, big-endian": (drawn("uint16", 3), {"photometric": "rgb", "byteorder": ">"}),
    "rgb uint16, packed": (drawn("uint16", 3), {"photometric": "rgb", "compression": "zlib", "predictor": True}),
    **{
        f"rgb uint16 in planes, {order}": (
            drawn("uint16", 3),
            {"photometric": "rgb", "planarconfig": "separate", "byteorder": order, "rowsperstrip": 4},
        )
        for order in "<>"
    },
    "rgba uint16": (drawn("uint16", 4), {"photometric": "rgb", "extrasamples": ["unassalpha"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_tiff_has_all_its_bits_and_signs(tmp_path: Path, name: str) -> None:
    pixels, options = KINDS[name]
    apart = options.get("planarconfig") == "separate"
    stored = np.moveaxis(pixels, -1, 0) if apart else pixels
    tifffile.imwrite(tmp_path / "x.tif", stored, **{"photometric": "minisblack", **options})
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.write(tmp_path / "x.tif", "x.tif")
    for uri in (f"{tmp_path}/x.tif", f"{tmp_path}/z.zip!x.tif"):
        found = read_pixels(uri)
        assert np.array_equal(found.squeeze(-1) if pixels.ndim == 2 else found, pixels)
    assert np.array_equal(tifffile.imread(tmp_path / "x.tif"), stored)


@pytest.mark.parametrize("kind", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_that_lies_on_its_side_stands(tmp_path: Path, kind: str, orientation: int) -> None:
    """Pillow maps the bytes of a plain file without turning its sides; here it reads them as a stream."""
    pixels = drawn(kind)
    path = tmp_path / "x.tif"
    tag = (ExifTags.Base.Orientation, 3, 1, orientation)
    tifffile.imwrite(path, pixels, photometric="minisblack", extratags=[tag])
    turns = [
        pixels, pixels[:, ::-1], pixels[::-1, ::-1], pixels[::-1], pixels.T, np.rot90(pixels, -1),
        pixels[::-1, ::-1].T, np.rot90(pixels),
    ]  # fmt: skip
    found = read_pixels(str(path))[..., 0]
    assert np.array_equal(found, turns[orientation - 1])
    with Image.open(BytesIO(path.read_bytes())) as image:
        assert np.array_equal(found, np.array(image))


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", ["bool", "uint8", "uint16", "int8", "int16", "int32"])
def test_white_is_the_highest_value_whatever_a_tiff_stores(
    tmp_path: Path, kind: str, order: str
) -> None:
    """PhotometricInterpretation 0, WhiteIsZero; ImageJ writes the high byte first."""
    pixels = drawn("uint8") > 127 if kind == "bool" else drawn(kind)
    tifffile.imwrite(tmp_path / "x.tif", pixels, photometric="miniswhite", byteorder=order)
    expected = 255 * ~pixels if kind == "bool" else ~pixels
    found = read_pixels(f"{tmp_path}/x.tif")[..., 0]
    assert np.array_equal(found, expected)
    assert found.dtype == {"bool": "uint8", "int16": "int32"}.get(kind, kind)


@pytest.mark.parametrize("kind", ["int8", "int16", "int32"])
def test_signed_values_of_which_none_is_below_zero_are_turned_too(
    tmp_path: Path, kind: str
) -> None:
    """Pillow reads those of 16 bits and more as unsigned."""
    pixels = drawn("uint8").astype(kind) & 127
    tifffile.imwrite(tmp_path / "x.tif", pixels, photometric="miniswhite")
    assert np.array_equal(read_pixels(f"{tmp_path}/x.tif")[..., 0], ~pixels)


@pytest.mark.parametrize(
    ("pixels", "options", "message"),
    [
        (drawn("float32"), {"photometric": "miniswhite"}, "0 is white in it"),
        # ITK makes colours with transparency of it, which were taken as four channels
        (
            np.tile(drawn("int8"), (6, 4)),
            {"tile": (16, 16)},
            "it has 8 bits a channel, or lies in tiles",
        ),
        (
            np.moveaxis(drawn("uint16", 3), -1, 0),
            {"photometric": "rgb", "planarconfig": "separate", "compression": "zlib"},
            "its channels lie apart by PlanarConfiguration, and packed",
        ),
        (drawn("uint16", 4), {"photometric": "separated"}, "it is .*of inks"),
        (
            drawn("uint16", 3),
            {"photometric": "rgb", "extratags": [(274, 3, 1, 6)]},
            "it lies on its side by Orientation",
        ),
        (drawn("float64"), {}, r"a TIFF with BitsPerSample \(64,\), .*SampleFormat \(3,\)"),
        (
            drawn("float32", 3),
            {"photometric": "rgb"},
            r"a TIFF with BitsPerSample \(32, 32, 32\), .*SampleFormat \(3, 3, 3\)",
        ),
    ],
)
def test_what_would_lose_bits_is_refused(
    tmp_path: Path, pixels: np.ndarray, options: dict[str, Any], message: str
) -> None:
    tifffile.imwrite(tmp_path / "x.tif", pixels, **options)
    with pytest.raises(InputError, match=rf"x\.tif cannot be read \({message}"):
        read_pixels(f"{tmp_path}/x.tif")


MASK = (drawn("uint8") % 3).astype(np.uint8)
COLOURS = [0, 0, 0, 255, 0, 0, 0, 255, 0]


def with_palette(palette: list[int]) -> Image.Image:
    picture = Image.fromarray(MASK)
    picture.putpalette(palette)
    return picture


def test_a_mask_with_a_palette_of_colours_is_its_indices(tmp_path: Path) -> None:
    """As the masks of PASCAL VOC; an image with one is its colours."""
    image = tmp_path / "image.png"
    with_palette(COLOURS).save(image)
    colours = np.array(COLOURS).reshape(3, 3)[MASK]
    opaque = np.full((6, 8, 1), 255, np.uint8)
    masks = {
        "palette": with_palette(COLOURS),
        "greys": with_palette([0, 0, 0, 1, 1, 1, 2, 2, 2]),
        "opaque": Image.fromarray(np.concatenate([np.repeat(MASK[..., None], 3, 2), opaque], 2)),
        "grey, opaque": Image.fromarray(np.concatenate([MASK[..., None], opaque], 2)),
    }
    for name, picture in masks.items():
        picture.save(tmp_path / f"{name}.png")
        pixels, mask, _ = read_pair(str(image), f"{tmp_path}/{name}.png", classes=3)
        assert np.array_equal(mask, MASK), name
        assert np.array_equal(pixels, colours)


@pytest.mark.parametrize("bits", [2, 4])
def test_a_mask_of_few_bits_is_its_values_and_an_image_its_shades(
    tmp_path: Path, bits: int
) -> None:
    """They were 0, 17 and 34, or 0, 85 and 170: other classes than in a mask of 8 bits beside it."""
    Image.fromarray(MASK).save(tmp_path / "x.png", bits=bits)
    assert np.array_equal(read_pixels(f"{tmp_path}/x.png", is_mask=True)[..., 0], MASK)
    shades = MASK * (255 // (2**bits - 1))
    assert np.array_equal(read_pixels(f"{tmp_path}/x.png")[..., 0], shades)


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
def test_a_mask_with_0_as_white_is_refused(tmp_path: Path, kind: str) -> None:
    """ImageJ writes foreground as 255 and calls it black; classes 0, 1, 2 were 255, 254, 253."""
    tifffile.imwrite(tmp_path / "x.tif", MASK.astype(kind), photometric="miniswhite")
    with pytest.raises(InputError, match="0 is white in it by PhotometricInterpretation"):
        read_pixels(f"{tmp_path}/x.tif", is_mask=True)


def test_a_tiff_of_a_volume_is_no_picture(tmp_path: Path) -> None:
    """Its first slice was taken."""
    voxels = np.stack([drawn("uint8")] * 3)
    options = {"photometric": "minisblack", "volumetric": True, "tile": (3, 16, 16)}
    tifffile.imwrite(tmp_path / "x.tif", voxels, **options)
    with pytest.raises(InputError, match="has 3 pages"):
        read_pixels(f"{tmp_path}/x.tif")


def test_pictures_of_which_only_the_first_was_taken_are_refused(tmp_path: Path) -> None:
    """An animation; a stack of ImageJ, which above 4 GiB has one directory for all slices; two stains in one file."""
    first = Image.fromarray(MASK * np.uint8(100))
    second = Image.fromarray(MASK[::-1] * np.uint8(100))
    for kind in ("PNG", "GIF", "WEBP"):
        first.save(tmp_path / "x.png", kind, save_all=True, append_images=[second])
        with pytest.raises(InputError, match="has 2 pages"):
            read_pixels(f"{tmp_path}/x.png")

    # cameras add a small copy, for their screens
    first.save(tmp_path / "x.jpg", "MPO", save_all=True, append_images=[second])
    assert read_pixels(f"{tmp_path}/x.jpg").shape == (6, 8, 1)

    text = "ImageJ=1.54f\nimages=3\nslices=3\n"
    tifffile.imwrite(tmp_path / "x.tif", drawn("uint16"), description=text, metadata=None)
    with (tmp_path / "x.tif").open("ab") as file:
        file.write(drawn("uint16").tobytes() * 2)
    with pytest.raises(InputError, match="has 3 pages"):
        read_pixels(f"{tmp_path}/x.tif")

    stains = np.stack([drawn("uint8")] * 2, -1)
    tifffile.imwrite(tmp_path / "x.tif", stains, photometric="minisblack", planarconfig="contig")
    with pytest.raises(InputError, match="a second channel, of which ExtraSamples says nothing"):
        read_pixels(f"{tmp_path}/x.tif")


def test_a_tiff_that_is_not_known_says_why(tmp_path: Path, recwarn: Any) -> None:
    """Colours of 16 bits in tiles had "16 bits a channel: save it with 8 or 16"; the other had no tags."""
    colours = np.zeros((32, 32, 3), np.uint16) + np.arange(32, dtype=np.uint16)[:, None]
    tifffile.imwrite(tmp_path / "x.tif", colours, photometric="rgb", tile=(16, 16))
    with pytest.raises(InputError, match="it has 16 bits a channel, or lies in tiles: save it"):
        read_pixels(f"{tmp_path}/x.tif")

    tifffile.imwrite(tmp_path / "x.tif", colours[..., 0], bigtiff=True, byteorder=">")
    with pytest.raises(InputError, match="no tag, or a BigTIFF in big-endian order"):
        read_pixels(f"{tmp_path}/x.tif")


def test_a_palette_of_black_and_white_is_its_shades(tmp_path: Path) -> None:
    picture = Image.fromarray(MASK % 2)
    picture.putpalette([255, 255, 255, 0, 0, 0])
    picture.save(tmp_path / "mask.png")
    Image.fromarray(drawn("uint8")).save(tmp_path / "image.png")
    _, mask, _ = read_pair(f"{tmp_path}/image.png", f"{tmp_path}/mask.png", classes=2)
    assert np.array_equal(mask, 1 - MASK % 2)
