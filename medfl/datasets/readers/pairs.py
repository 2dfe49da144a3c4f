"""Pictures with their reference masks: paired by file name, read and checked together.

A mask file has one channel (or equal colour channels, or a palette) with the value of each pixel's class; of two
classes the second may also be 255, as in an 8-bit or 1-bit picture of the mask. A mask in several files (left and right
lung) is their URIs joined by ` | `: a pixel has the highest class that a file gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from medfl.core import Bytes, InputError, alike, composed
from medfl.datasets.readers import matching
from medfl.datasets.readers.mask_values import Classes, class_indices
from medfl.datasets.readers.reading import (
    JOINED,
    Files,
    Pixels,
    palette_of,
    read_pixels,
    resize,
)
from medfl.datasets.readers.splitting import Record
from medfl.datasets.readers.tables import (
    Table,
    check_row,
    first,
    image_files,
    image_index,
    read_csv,
)

Mask = Bytes
Shape = tuple[int, int]


def mask_index(roots: Iterable[Path]) -> dict[str, str]:
    """Return the URI of each mask by its image's file name without suffix: `<name>[_mask|_segmentation].png`.

    Raises:
        InputError: two masks of one name; names both.
    """
    index: dict[str, str] = {}
    for stem, uri in image_index(roots).items():
        name = matching.MASK_END.sub("", stem)
        if name in index:
            raise InputError(
                f"masks {index[name]} and {uri} are both of image {name}",
                "one for each image",
                "remove one of them",
            )

        index[name] = uri

    return index


def picture_paths(root: Path) -> Files:
    """Return (path without suffix, URI) of all pictures below a folder or in a zip archive.

    The folder that an archive has around all of it, by its own name, is no part of the paths.
    """
    files = image_files(root)
    around = ""
    if root.is_file() and all(name.startswith(f"{root.stem}/") for name, _ in files):
        around = f"{root.stem}/"
    return [(name.removeprefix(around).rpartition(".")[0], uri) for name, uri in files]


def matched(images: Path, masks: Path) -> matching.Matched:
    """Return name -> URI of the pictures in a folder or zip, and of the masks in another by their images' names.

    Raises:
        InputError: as `medfl.datasets.readers.matching.match`.
    """
    return matching.match(picture_paths(images), picture_paths(masks))


def pair_folders(folder: Path) -> list[Path]:
    """Return images/ and masks/ (or their zips) of a folder that has both, else nothing."""
    paths = [path for name in ("images", "masks") if (path := first(folder, name, f"{name}.zip"))]
    return paths if len(paths) == 2 else []


def read_pair_folders(folder: Path, centre: Callable[[str], str] = lambda _: "unknown") -> Table:
    """Return the records of the pictures in images/ that have a mask in masks/, as `paired` does."""
    return paired(*matched(*pair_folders(folder)), centre)


def paired(
    images: Mapping[str, str],
    masks: Mapping[str, str],
    centre: Callable[[str], str] = lambda _: "unknown",
    sections: Mapping[str, str] | None = None,
) -> Table:
    """Return the records of the images that have a mask, each its own group.

    Images and masks are by the name of the image. Images without a mask are left out, which a note says; a mask without
    its image is a problem. `centre` says where an image was taken, `sections` are split -> section of all of them.
    """
    table = Table()
    respelled = []
    for key in sorted(images.keys() & masks.keys()):
        table.records.append(
            Record(images[key], 0, key, centre(key), key, sections or {}, mask=masks[key])
        )
        name = key.rpartition("/")[2]
        mask = masks[key].rpartition("/")[2]
        if alike(name) in alike(mask) and name not in composed(mask):
            respelled.append((name, mask))

    if respelled:
        table.notes.append(
            f"{len(respelled)} names of masks differ from their images' in characters that are invisible or look "
            f"alike: {' and '.join(map(ascii, respelled[0]))}"
        )
    for key in sorted(masks.keys() - images.keys()):
        table.problems.append(f"mask {masks[key]} has no image")

    if lone := sorted(images.keys() - masks.keys()):
        table.unlabelled = {key: images[key] for key in lone}
        table.notes.append(
            f"{len(lone)} of {len(images)} images have no mask and are left out, first {lone[0]}"
        )

    return table


def read_case_table(
    path: Path,
    columns: tuple[str, str, str],
    centres: Iterable[str],
    image_roots: Iterable[Path],
    mask_roots: Iterable[Path],
) -> Table:
    """Return the records of a table of images with masks, each by its file's name without ending.

    Args:
        path: of the table; where it has columns width and height, they are the image's.
        columns: of the file (with or without its ending), the centre, and the patient or lesion.
        centres: those of the data set.
        image_roots: folders and archives of the images.
        mask_roots: folders and archives of the masks.

    Raises:
        InputError: a column is missing, or two masks of one name.
    """
    images = image_index(image_roots)
    masks = mask_index(mask_roots)
    table = Table()
    for row in read_csv(path, columns):
        file, centre, group = (row[column] for column in columns)
        key = Path(file).stem
        if not check_row(table, f"{file} in {path}", key, centre, centres, images, masks):
            continue

        width = row.get("width") or ""
        height = row.get("height") or ""
        sides_are_known = width.isdecimal() and height.isdecimal()
        size = int(width) * int(height) if sides_are_known else None
        table.records.append(Record(images[key], 0, key, centre, group, mask=masks[key], size=size))

    return table


def read_pair(
    image_uri: str,
    mask_uri: str,
    *,
    channels: int | None = None,
    classes: Classes = 2,
    size: Shape | None = None,
    convert: bool = False,
    colours: Sequence[Sequence[int]] = (),
) -> tuple[Pixels, Mask, Shape]:
    """Read an image (H, W, C) of its own type, its mask (H, W) of class indices, and the file's (height, width).

    Args:
        image_uri: where the image lies, see `medfl.datasets.readers.reading`.
        mask_uri: where its mask lies; joined by ` | ` where in several files.
        channels: number of channels that the image must have.
        classes: of the mask, the background among them.
        size: (H, W) to which both are resized, the image antialiased bilinear; the mask's classes likewise, a
            pixel has the one with the largest share.
        convert: convert the image between grey and RGB instead of refusing another number of channels.
        colours: of the classes in masks with a palette, as `check_palettes` returns them.

    Raises:
        InputError: unreadable file, an image of one value or with NaN, a mask of another shape than its image, or with
            other values or channels; names both files.
    """
    pixels, shape = read_image(image_uri, channels, size, convert)
    if colours:
        check_palettes([mask_uri], colours)

    parts = [_read_mask(uri, image_uri, shape, classes) for uri in mask_uri.split(JOINED)]
    mask = np.maximum.reduce(parts)
    return pixels, mask if size in (None, shape) else _resized(mask, size or shape), shape


def _resized(mask: Mask, size: Shape) -> Mask:
    """Resize each class as the image is, antialiased bilinear, and give a pixel the largest, the lower one of equals.

    Nearest-neighbour resizing by an even factor would move masks by half a pixel of the file.
    """
    shares = []
    for index in range(int(mask.max()) + 1):
        plane = Image.fromarray((mask == index).astype(np.float32))
        shares.append(np.asarray(plane.resize(size[::-1], Image.Resampling.BILINEAR)))

    largest: Mask = np.argmax(shares, axis=0).astype(np.uint8)
    return largest


def read_image(
    uri: str, channels: int | None, size: Shape | None, convert: bool
) -> tuple[Pixels, Shape]:
    """Read an image (H, W, C), resized to `size`, and the file's (height, width); InputError where nothing shows."""
    # Decoded whole: a JPEG scaled inside the decoder is off by a part of a pixel, which a mask would show.
    pixels = read_pixels(uri, None, channels, convert)
    if (pixels == pixels[0, 0]).all():
        value = ", ".join(f"{number:g}" for number in pixels[0, 0].tolist())
        raise InputError(
            f"image {uri} has the value {value} in all its pixels",
            "an image shows something",
            "copy the file again, or remove the case",
        )

    shape = (pixels.shape[0], pixels.shape[1])
    return (pixels if size in (None, shape) else resize(pixels, size or shape)), shape


def mask_plane(uri: str, image: str) -> Pixels:
    """Return the values (H, W) of one mask file as stored, of its palette the indices.

    Raises:
        InputError: it cannot be read, or has channels that differ, or transparency that does; `image` is named.
    """
    pixels = read_pixels(uri, is_mask=True)
    if pixels.shape[-1] in (2, 4) and np.ptp(pixels[..., -1]) == 0:
        pixels = pixels[..., :-1]  # as transparent everywhere

    plane = pixels[..., 0]
    if pixels.shape[-1] not in (1, 3) or (pixels[..., 1:] != plane[..., None]).any():
        raise InputError(
            f"mask {uri} of image {image} has {pixels.shape[-1]} channels that differ or transparency",
            "one channel, or three equal ones",
            "save it as a grey picture of class indices",
        )

    return plane


def check_palettes(
    masks: Iterable[str], colours: Sequence[Sequence[int]] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return (index, red, green, blue) of the indices, which are the classes, in masks with palettes of colours.

    Raises:
        InputError: an index stands for two colours, or a colour has two, in these masks and in `colours`.
    """
    colour_of = {index: ("the bundle", tuple(colour)) for index, *colour in colours}
    for uri in (part for mask in masks for part in mask.split(JOINED)):
        indices, palette = palette_of(uri)
        for index in indices:
            for first_index, (first_uri, colour) in colour_of.items():
                # the second half: a palette may have a colour twice
                if (index == first_index) != (palette[index] == colour) and palette[
                    first_index : first_index + 1
                ] != [colour]:
                    raise InputError(
                        f"index {first_index} is the colour {colour} in {first_uri}, index {index} is "
                        f"{palette[index]} in {uri}",
                        "an index, which is the class, has one colour in all masks",
                        "save the masks as grey pictures of class indices",
                    )

            colour_of.setdefault(index, (f"mask {uri}", palette[index]))

    return tuple((index, *colour) for index, (_, colour) in sorted(colour_of.items()))


def _read_mask(uri: str, image: str, shape: Shape, classes: Classes) -> Mask:
    """Read one mask file as class indices (H, W)."""
    plane = mask_plane(uri, image)
    if plane.shape != shape:
        raise InputError(
            f"mask {uri} has {plane.shape[0]} x {plane.shape[1]} pixels (height x width), "
            f"its image {image} {shape[0]} x {shape[1]}",
            "an image and its mask have the same shape",
            "copy the file again that was changed",
        )

    return class_indices(f"{uri} of image {image}", plane, classes)
