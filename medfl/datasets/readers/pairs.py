"""Pictures with their reference masks: paired by file name, read and checked together, predicted masks written.

A mask file has one channel (or equal colour channels) with the class index of each pixel; of two classes the second may
also be 255, as in an 8-bit or 1-bit picture of the mask. A mask in several files (left and right lung) is their URIs
joined by ` | `: a pixel has the highest class that a file gives it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.config.type_definitions import KeysCollection
from monai.data import MetaTensor
from monai.transforms import SpatialResample
from monai.transforms.transform import MapTransform
from numpy.typing import NDArray
from PIL import Image

from medfl.core.errors import InputError
from medfl.datasets.readers import matching
from medfl.datasets.readers.reading import JOINED, Pixels, ReadPixelsd, as_tensor, read_pixels, resize, split_uri
from medfl.datasets.readers.splitting import Record
from medfl.datasets.readers.tables import Table, first, image_files, image_index

Mask = NDArray[np.uint8]
Shape = tuple[int, int]
_SHOWN = 5  # wrong values that an error names


def mask_index(roots: Iterable[Path]) -> dict[str, str]:
    """Return the URI of each mask by its image's file name without suffix: `<name>[_mask|_segmentation].png`.

    Raises:
        InputError: two masks of one name; names both.
    """
    index: dict[str, str] = {}
    for stem, uri in image_index(roots).items():
        name = matching.ENDING.sub("", stem)
        if name in index:
            raise InputError(
                f"masks {index[name]} and {uri} are both of image {name}", "one for each image", "remove one of them"
            )
        index[name] = uri
    return index


def picture_paths(root: Path) -> list[tuple[str, str]]:
    """Return (path without suffix, URI) of all pictures below a folder or in a zip archive.

    The folder that an archive has around all of it, by its own name, is no part of the paths.
    """
    files = image_files(root)
    around = f"{root.stem}/" if root.is_file() and all(name.startswith(f"{root.stem}/") for name, _ in files) else ""
    return [(name.removeprefix(around).rpartition(".")[0], uri) for name, uri in files]


def matched(images: Path, masks: Path) -> tuple[Mapping[str, str], Mapping[str, str]]:
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

    Images without a mask are left out, which a note says; a mask without its image is a problem.

    Args:
        images: name -> URI.
        masks: name of the image -> URI.
        centre: name -> where the image was taken.
        sections: split name -> section of all of them.
    """
    table = Table()
    for key in sorted(images.keys() & masks.keys()):
        table.records.append(Record(images[key], 0, key, centre(key), key, sections or {}, mask=masks[key]))
    table.problems += [f"mask {masks[key]} has no image" for key in sorted(masks.keys() - images.keys())]
    if maskless := sorted(images.keys() - masks.keys()):
        table.notes.append(
            f"{len(maskless)} of {len(images)} images have no mask and are left out, first {maskless[0]}"
        )
    return table


def read_pair(
    image_uri: str,
    mask_uri: str,
    *,
    channels: int | None = None,
    classes: int = 2,
    size: Shape | None = None,
    convert: bool = False,
) -> tuple[Pixels, Mask, Shape]:
    """Read an image (H, W, C) of its own type, its mask (H, W) of class indices, and the file's (height, width).

    Args:
        image_uri: where the image lies, see `medfl.datasets.readers.reading`.
        mask_uri: where its mask lies; joined by ` | ` where in several files.
        channels: number of channels that the image must have.
        classes: number of classes, the background among them.
        size: (H, W) to which both are resized, the image antialiased bilinear; the mask's classes likewise, a
            pixel has the one with the largest share.
        convert: convert the image between grey and RGB instead of refusing another number of channels.

    Raises:
        InputError: unreadable file, an image of one value or with NaN, a mask of another shape than its image, or with
            other values or channels; names both files.
    """
    pixels, shape = _read_image(image_uri, channels, size, convert)
    parts = [_read_mask(uri, image_uri, shape, classes) for uri in mask_uri.split(JOINED)]
    mask = functools.reduce(np.maximum, parts)
    return pixels, mask if size in (None, shape) else _resized(mask, size or shape, classes), shape


def _resized(mask: Mask, size: Shape, classes: int) -> Mask:
    """Resize each class as the image is, antialiased bilinear, and give a pixel the largest, the lower one of equals.

    Nearest-neighbour resizing by an even factor would move masks by half a pixel of the file.
    """
    shares = [
        np.asarray(Image.fromarray((mask == index).astype(np.float32)).resize(size[::-1], Image.Resampling.BILINEAR))
        for index in range(classes)
    ]
    largest: Mask = np.argmax(shares, axis=0).astype(np.uint8)
    return largest


def _read_image(uri: str, channels: int | None, size: Shape | None, convert: bool) -> tuple[Pixels, Shape]:
    # Decoded whole: a JPEG scaled inside the decoder is off by a part of a pixel, which a mask would show.
    pixels = read_pixels(uri, None, channels, convert)
    if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
        raise InputError(
            f"image {uri} has values that are no numbers (NaN or infinite)",
            "pixels are finite",
            "copy the file again, or remove the case",
        )
    if (pixels == pixels[0, 0]).all():
        value = ", ".join(f"{number:g}" for number in pixels[0, 0].tolist())
        raise InputError(
            f"image {uri} has the value {value} in all its pixels",
            "an image shows something",
            "copy the file again, or remove the case",
        )
    shape = (pixels.shape[0], pixels.shape[1])
    return (pixels if size in (None, shape) else resize(pixels, size or shape)), shape


def _read_mask(uri: str, image: str, shape: Shape, classes: int) -> Mask:
    """Read one mask file as class indices (H, W)."""
    pixels = read_pixels(uri)
    if pixels.shape[:2] != shape:
        raise InputError(
            f"mask {uri} has {pixels.shape[0]} x {pixels.shape[1]} pixels (height x width), "
            f"its image {image} {shape[0]} x {shape[1]}",
            "an image and its mask have the same shape",
            "copy the file again that was changed",
        )
    plane = pixels[..., 0]
    if pixels.shape[-1] not in (1, 3) or any((pixels[..., c] != plane).any() for c in range(1, pixels.shape[-1])):
        raise InputError(
            f"mask {uri} of image {image} has {pixels.shape[-1]} channels that differ or transparency",
            "one channel, or three equal ones",
            "save it as a grey picture of class indices",
        )
    values = np.flatnonzero(np.bincount(plane.ravel())) if plane.dtype == np.uint8 else np.unique(plane)
    if classes == 2 and set(values.tolist()) <= {0, 255}:
        return (plane > 0).astype(np.uint8)
    wrong = [value for value in values.tolist() if value not in range(classes)]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise InputError(
            f"mask {uri} of image {image} has the values {', '.join(f'{v:g}' for v in wrong[:_SHOWN])}{more}",
            "0 and 1, or 0 and 255" if classes == 2 else f"whole numbers from 0 to {classes - 1}",
            "copy the file again, or save class indices",
        )
    return plane.astype(np.uint8)


def _affine(shape: Shape, size: Shape) -> NDArray[np.float64]:
    """Return (4, 4) from index in an image resized to `size` to index in the file's; pixel centres aligned."""
    scale = np.array(shape) / np.array(size)
    affine = np.eye(4)
    affine[(0, 1), (0, 1)], affine[:2, 3] = scale, (scale - 1) / 2
    return affine


class ReadPaird(ReadPixelsd):
    """Replace the URIs of an image and its mask by their pixels; an item without a mask gets its image alone.

    The image becomes a MetaTensor (C, H, W), uint8 or float as stored, int32 of 16 bits. Its `affine` leads from its
    indices to those of the file (row, column), which `original_affine` (identity), `spatial_shape` (height, width) and
    `filename_or_obj` describe. The mask becomes a tensor (1, H, W) of class indices, uint8.

    Args:
        keys: the image, then the mask.
        channels: number of channels that every image must have; None takes what the file has.
        classes: number of classes, the background among them.
        convert: convert images between grey and RGB (and drop alpha) instead of refusing another number of channels.
        size: (H, W), or one number for both, to which both are resized; None keeps the file's.

    Raises:
        InputError: what `read_pair` finds wrong.
    """

    def __init__(
        self,
        keys: KeysCollection = ("image", "label"),
        channels: int | None = None,
        classes: int = 2,
        convert: bool = False,
        size: int | Shape | None = None,
    ) -> None:
        """Check the arguments; files are opened when called, so the transform can be sent to workers."""
        super().__init__(keys, channels, convert, size)
        if not 2 <= classes <= 255:
            raise InputError(
                f"classes={classes}", "2 to 255, the background among them", "give the number of values that masks have"
            )
        if len(self.keys) != 2:
            raise InputError(f"keys {', '.join(map(str, self.keys))}", "two: image and mask", "give both keys")
        self.classes = classes

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return a copy of `data` with a tensor at each key."""
        item, (image, mask) = dict(data), self.keys
        uri = str(item[image])
        if mask in item:
            pixels, indices, shape = read_pair(
                uri, str(item[mask]), channels=self.channels, classes=self.classes, size=self.size, convert=self.convert
            )
            item[mask] = torch.from_numpy(indices[None])
        else:
            pixels, shape = _read_image(uri, self.channels, self.size, self.convert)
        meta = {"original_affine": np.eye(4), "spatial_shape": np.array(shape), "filename_or_obj": uri}
        item[image] = MetaTensor(
            as_tensor(pixels), affine=torch.from_numpy(_affine(shape, pixels.shape[:2])), meta=meta
        )
        return item


class WriteMaskd(MapTransform):
    """Write predicted masks as PNG files in the size of the image's own file.

    Class scores (K, H, W) are brought to the file's grid by the affine of the image that they were made from,
    interpolated, and the best class of each pixel is written into `<output_dir>/<image file's name>.png`, in the
    subfolder that the file has below `root`: 0 and 255 for two classes, else class indices.

    Args:
        keys: predictions: probabilities or logits.
        image: item with the MetaTensor that the predictions were made from.
        output_dir: is made if missing.
        root: a folder above the images, as `medfl.datasets.own.above` gives it; "" for no subfolders.

    Raises:
        InputError: the image's place is not known, or two images have the same file name.
    """

    def __init__(
        self,
        keys: KeysCollection = "pred",
        image: str = "image",
        output_dir: str | Path = "output",
        root: str | Path = "",
    ) -> None:
        super().__init__(keys)
        self.image, self.output_dir, self.root = image, Path(output_dir), root and Path(root).absolute()
        self._resample = SpatialResample(mode="bilinear", padding_mode="border")
        self._written: dict[Path, str] = {}

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Write the predictions of one image; the data stay as they are."""
        image = data[self.image]
        meta = image.meta if isinstance(image, MetaTensor) else {}
        missing = {"original_affine", "spatial_shape", "filename_or_obj"} - meta.keys()
        if missing:
            raise InputError(
                f"item {self.image!r} does not say where its pixels lie in the file (no {', '.join(sorted(missing))})",
                "an image as ReadPaird reads it",
                "keep its metadata through the transforms (track_meta: true)",
            )
        file, shape = str(meta["filename_or_obj"]), [int(side) for side in np.asarray(meta["spatial_shape"]).ravel()]
        for key in self.key_iterator(data):
            scores = MetaTensor(torch.as_tensor(data[key]).detach().cpu(), affine=image.affine, meta={})
            on_file = self._resample(scores, torch.as_tensor(np.asarray(meta["original_affine"])), shape)
            indices = np.asarray(on_file).argmax(0).astype(np.uint8)
            Image.fromarray(indices * 255 if len(scores) == 2 else indices).save(self._place(file))
        return dict(data)

    def _place(self, file: str) -> Path:
        path, part = split_uri(file)
        parent = Path(path).absolute().parent
        below = parent.relative_to(self.root) if self.root and not part and parent.is_relative_to(self.root) else ""
        place = self.output_dir / below / f"{Path(part or path).stem}.png"
        if self._written.setdefault(place, file) != file:
            raise InputError(
                f"predictions of {self._written[place]} and {file} would both be written to {place}",
                "one image of each name",
                "write their predictions into two folders with output_dir",
            )
        if place.resolve() == Path(path).resolve():
            raise InputError(
                f"the prediction of {file} would replace it", "a folder of its own", "give output_dir another folder"
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        return place
