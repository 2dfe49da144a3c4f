"""The readers as MONAI transforms, by the names that bundles use.

They have a module of their own, so that code that only looks at folders and tables imports neither PyTorch nor MONAI.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.config.type_definitions import KeysCollection
from monai.data import MetaTensor
from monai.transforms import SpatialResample
from monai.transforms.transform import MapTransform
from monai.utils import ensure_tuple_rep
from PIL import Image

from medfl.core import Floats, InputError
from medfl.datasets.readers import volumes
from medfl.datasets.readers.mask_values import Classes, check_classes, picture_values, stored
from medfl.datasets.readers.pairs import Shape, read_image, read_pair
from medfl.datasets.readers.reading import Pixels, files_of, read_pixels, split_uri
from medfl.datasets.readers.volumes import read_volume

Entry = Mapping[Hashable, Any]
NewEntry = dict[Hashable, Any]
"""An entry of a data list, and the copy of it that a transform changed."""


def as_tensor(pixels: Pixels) -> torch.Tensor:
    """Return pixels (H, W, C) as a tensor (C, H, W) of their type, but signed where that is unsigned of over 8 bits.

    PyTorch stores uint16 to uint64, but computes nothing with them.
    """
    wide = {"uint16": np.int32, "uint32": np.int64, "uint64": np.float64}.get(
        pixels.dtype.name, pixels.dtype
    )
    return torch.from_numpy(
        np.ascontiguousarray(np.moveaxis(pixels, -1, 0).astype(wide, copy=False))
    )


def of_own_depth(pixels: Pixels, uri: str, depth: int) -> Pixels:
    """Return pixels of 8 or 16 bits as float32 from 0 to 1.

    Args:
        pixels: as read.
        uri: of the picture.
        depth: largest value of pictures of 16 bits, which may be stored ones of 12; those of 8 have 255. 0 returns
            the pixels as they are.

    Raises:
        InputError: they have another type, or larger values.
    """
    if not depth:
        return pixels
    if pixels.dtype not in (np.uint8, np.uint16):
        raise InputError(
            f"{uri} holds {pixels.dtype} values",
            "pictures of 8 or 16 bits",
            "save it as one of these",
        )
    largest = depth
    if pixels.dtype == np.uint8:
        largest = 255

    if (most := int(pixels.max())) > largest:
        raise InputError(
            f"{uri} holds values up to {most}",
            f"pictures of 16 bits with values up to {depth}, as those that the bundle was made for, or of 8 bits",
            f"save it with values from 0 to {depth}, or make a bundle of pictures like it",
        )

    return pixels.astype(np.float32) / np.float32(largest)


class FileReader(MapTransform):
    """Base of transforms that replace URIs by their files' content; `check_path` is called with each path first."""

    check_path: Callable[[str], object] = staticmethod(str)

    def uri(self, item: Entry, key: Hashable) -> str:
        """Return the URI of an item's file, whose paths are checked."""
        uri = str(item[key])
        for path in files_of([uri]):
            self.check_path(path)
        return uri


class ReadPixelsd(FileReader):
    """Replace image URIs by their pixels: plain torch tensors (C, H, W), uint8 or float as stored, int32 of 16 bits.

    An item without an `id` gets its first image's URI, so that messages about new images name them.

    Args:
        keys: items to read.
        channels: number of channels that every image must have; None takes what the file has.
        convert: convert between grey and RGB (and drop alpha) instead of refusing another number of channels.
        size: (H, W), or one number for both: antialiased bilinear resize while decoding; None keeps the size.
        own_depth: give float32 from 0 to 1, each picture divided by the largest value of its own depth: 255 of 8 bits,
            this number (True: 65535) of 16; 0 leaves values as they are.

    Raises:
        InputError: unreadable or truncated image, or another number of channels; the image is named.
    """

    def __init__(
        self,
        keys: KeysCollection,
        channels: int | None = None,
        convert: bool = False,
        size: int | tuple[int, int] | None = None,
        own_depth: bool | int = False,
    ) -> None:
        super().__init__(keys)
        if convert and channels not in (1, 3):
            raise InputError(
                f"convert=True with channels={channels}",
                "channels 1 or 3",
                "give channels=1 or channels=3",
            )

        sides = None
        if size is not None:
            height, width = ensure_tuple_rep(size, 2)
            sides = (int(height), int(width))
            if min(sides) < 1:
                raise InputError(
                    f"image size {size}",
                    "a whole number from 1, or (height, width)",
                    "give such a size",
                )

        self.channels = channels
        self.convert = convert
        self.size = sides
        self.own_depth = 65535 if own_depth is True else int(own_depth)

    def __call__(self, data: Entry) -> NewEntry:
        """Return a copy of `data` with a tensor at each key."""
        item = dict(data)
        for key in self.key_iterator(item):
            uri = self.uri(item, key)
            pixels = read_pixels(uri, self.size, self.channels, self.convert)
            item.setdefault("id", uri)
            item[key] = as_tensor(of_own_depth(pixels, uri, self.own_depth))

        return item


def _affine(shape: Shape, size: Shape) -> Floats:
    """Return (4, 4) from index in an image resized to `size` to index in the file's; pixel centres aligned."""
    # a pixel centre is half a pixel from the edge: i -> scale (i + 1/2) - 1/2
    scale = np.array(shape) / np.array(size)
    affine = np.eye(4)
    affine[(0, 1), (0, 1)] = scale
    affine[:2, 3] = (scale - 1) / 2
    return affine


class ReadPaird(ReadPixelsd):
    """Replace the URIs of an image and its mask by their pixels; an item without a mask gets its image alone.

    The image becomes a MetaTensor (C, H, W), uint8 or float as stored, int32 of 16 bits. Its `affine` leads from its
    indices to those of the file (row, column), which `original_affine` (identity), `spatial_shape` (height, width) and
    `filename_or_obj` describe. The mask becomes a tensor (1, H, W) of class indices, uint8.

    Args:
        keys: the image, then the mask.
        channels: number of channels that every image must have; None takes what the file has.
        classes: number of classes, the background among them, or the values that they have in masks, ascending.
        convert: convert images between grey and RGB (and drop alpha) instead of refusing another number of channels.
        size: (H, W), or one number for both, to which both are resized; None keeps the file's.
        own_depth: as of ReadPixelsd.
        colours: [index, red, green, blue] of classes; masks with a palette that has others are refused.

    Raises:
        InputError: what `read_pair` finds wrong.
    """

    def __init__(
        self,
        keys: KeysCollection = ("image", "label"),
        channels: int | None = None,
        classes: Classes = 2,
        convert: bool = False,
        size: int | Shape | None = None,
        own_depth: bool | int = False,
        colours: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__(keys, channels, convert, size, own_depth)
        check_classes(classes, 255)
        if len(self.keys) != 2:
            raise InputError(
                f"keys {', '.join(map(str, self.keys))}", "two: image and mask", "give both keys"
            )

        self.classes = classes
        self.colours = colours

    def __call__(self, data: Entry) -> NewEntry:
        """Return a copy of `data` with a tensor at each key."""
        item = dict(data)
        image, mask = self.keys
        uri = self.uri(item, image)
        if mask in item:
            of_mask = self.uri(item, mask)
            pixels, indices, shape = read_pair(
                uri,
                of_mask,
                channels=self.channels,
                classes=self.classes,
                size=self.size,
                convert=self.convert,
                colours=self.colours,
            )
            item[mask] = torch.from_numpy(indices[None])
        else:
            pixels, shape = read_image(uri, self.channels, self.size, self.convert)

        pixels = of_own_depth(pixels, uri, self.own_depth)
        meta = {
            "original_affine": np.eye(4),
            "spatial_shape": np.array(shape),
            "filename_or_obj": uri,
        }
        item[image] = MetaTensor(
            as_tensor(pixels), affine=torch.from_numpy(_affine(shape, pixels.shape[:2])), meta=meta
        )

        return item


class WriteMaskd(MapTransform):
    """Write predicted masks in the place of the image's own file: pictures as PNG, volumes as NIfTI.

    Class scores (K, H, W[, D]) are brought to the file's grid by the affine of the image that they were made from,
    interpolated, and the best class of each pixel is written into `<output_dir>/<image file's name>.png`, in the
    subfolder that the file has below `root`: the given values, else 0 and 255 for two classes, and class indices. A
    volume's become `<name>_seg.nii.gz`, with what `volumes.as_nifti` keeps of the source.

    Args:
        keys: predictions: probabilities or logits; or a mask (1, H, W, D) that is on the file's grid.
        image: item with the MetaTensor that the predictions were made from.
        output_dir: is made if missing.
        root: a folder above the images, as `medfl.datasets.own.above` gives it; "" for no subfolders.
        values: of the classes.

    Raises:
        InputError: the image's place is not known, or two images have the same file name.
    """

    def __init__(
        self,
        keys: KeysCollection = "pred",
        image: str = "image",
        output_dir: str | Path = "output",
        root: str | Path = "",
        values: Sequence[int] = (),
    ) -> None:
        super().__init__(keys)
        self.image = image
        self.output_dir = Path(output_dir)
        self.root = root and Path(root).absolute()
        self.values = values
        self._resample = SpatialResample(mode="bilinear", padding_mode="border")
        self._written: dict[Path, str] = {}

    def __call__(self, data: Entry) -> NewEntry:
        """Write the predictions of one image; the data stay as they are."""
        image = data[self.image]
        meta = getattr(image, "meta", {})
        if missing := {"original_affine", "spatial_shape", "filename_or_obj"} - meta.keys():
            raise InputError(
                f"item {self.image!r} does not say where its pixels lie in the file (no {', '.join(sorted(missing))})",
                "an image as ReadPaird reads it",
                "keep its metadata through the transforms (track_meta: true)",
            )

        file = str(meta["filename_or_obj"])
        shape = list(map(int, np.asarray(meta["spatial_shape"]).ravel()))
        for key in self.key_iterator(data):
            scores = torch.as_tensor(data[key]).detach().cpu()
            affine = np.asarray(meta["original_affine"])
            if len(scores) == 1:
                mask = np.asarray(scores[0])
                indices = mask.astype(np.uint16 if mask.max() > 255 else np.uint8)
            else:
                tracked = MetaTensor(scores, affine=image.affine, meta={})
                on_file = self._resample(tracked, torch.as_tensor(affine), shape)
                indices = np.asarray(on_file).argmax(0).astype(np.uint8)

            if indices.ndim == 3:
                mask = stored(indices, self.values, max(len(scores), len(self.values)))
                content = volumes.as_nifti(mask, affine, file)
                self._path_for(file, "_seg.nii.gz").write_bytes(content)
            else:
                values = self.values or picture_values(len(scores))
                picture = Image.fromarray(stored(indices, values, len(scores)))
                picture.save(self._path_for(file, ".png"))

        return dict(data)

    def _path_for(self, file: str, ending: str) -> Path:
        path, part = split_uri(file)
        parent = Path(path).absolute().parent
        below = Path()
        if self.root and not part and parent.is_relative_to(self.root):
            below = parent.relative_to(self.root)

        # What lies in an archive has no folder, only its own name.
        name = Path(part or path).name
        bare = volumes.bare(name) if ending.endswith("gz") else Path(name).stem
        target = self.output_dir / below / f"{bare}{ending}"
        if self._written.setdefault(target, file) != file:
            raise InputError(
                f"predictions of {self._written[target]} and {file} would both be written to {target}",
                "one image of each name",
                "write their predictions into two folders with output_dir",
            )
        if target.resolve() == Path(path).resolve():
            raise InputError(
                f"the prediction of {file} would replace it",
                "a folder of its own",
                "give output_dir another folder",
            )

        target.parent.mkdir(parents=True, exist_ok=True)
        return target


class ReadVolumed(FileReader):
    """Replace the URIs of an image and of its mask by their voxels.

    They become MetaTensors, the image (C, D1, D2, D3) float32, the mask (1, D1, D2, D3) uint8.

    Args:
        keys: the image's, and after it the mask's; an item without a mask gives the image alone.
        classes: as of ReadPaird.

    Raises:
        InputError: as `read_pair`, when an item is read; more than two keys, or a mask's key without `classes`.
    """

    def __init__(
        self, keys: KeysCollection = ("image", "label"), classes: Classes | None = None
    ) -> None:
        super().__init__(keys)
        if len(self.keys) > 2:
            raise InputError(
                f"ReadVolumed with keys {', '.join(map(str, self.keys))}",
                "the image's and the mask's",
                "change its keys in the configuration",
            )
        if len(self.keys) == 2:
            check_classes(classes, 256)

        self.classes = classes

    def __call__(self, data: Entry) -> NewEntry:
        """Return a copy of `data` with the volumes."""
        item = dict(data)
        image, *masks = self.keys
        if masks and masks[0] in item:
            assert self.classes is not None
            uris = self.uri(item, image), self.uri(item, masks[0])
            item[image], item[masks[0]] = volumes.read_pair(*uris, self.classes)
        else:
            item[image] = read_volume(self.uri(item, image))

        return item


class CheckPatchd(MapTransform):
    """Refuse a volume (C, D1, D2, D3) that is smaller than the patch along an axis; accept all without a patch size.

    Args:
        keys: the volumes.
        patch_size: one number for all axes, or one for each.

    Raises:
        InputError: such a volume; names its file, both sizes, and the largest patch that fits.
    """

    def __init__(self, keys: KeysCollection, patch_size: int | Sequence[int] | None) -> None:
        super().__init__(keys)
        self.patch_size = patch_size

    def __call__(self, data: Entry) -> NewEntry:
        """Return `data`."""
        item = dict(data)
        for key in self.key_iterator(item):
            shape = tuple(item[key].shape[1:])
            size: int | Sequence[int] = shape
            if self.patch_size is not None:
                size = self.patch_size

            patch = (size,) * len(shape) if isinstance(size, int) else tuple(size)
            if len(patch) != len(shape):
                raise InputError(
                    f"patch_size {volumes.times(patch)} for volumes of {len(shape)} axes",
                    "one number an axis",
                    "give as many",
                )

            if any(side < least for side, least in zip(shape, patch, strict=True)):
                file = getattr(item[key], "meta", {}).get("filename_or_obj", key)
                fits = ",".join(str(min(sides)) for sides in zip(shape, patch, strict=True))
                raise InputError(
                    f"volume {file} is {volumes.times(shape)} voxels, smaller than the patch of {volumes.times(patch)}",
                    "every volume holds the patch",
                    f"lower it with --config patch_size=[{fits}]",
                )

        return item
