"""Predicted masks as files on the grid of their image file: NIfTI for volumes, PNG for pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from scipy import ndimage
from torch import Tensor

from medfl.core import Bytes
from medfl.data import Geometry
from medfl.datasets.readers import dicom
from medfl.datasets.readers.mask_values import picture_values, stored
from medfl.datasets.readers.reading import IMAGE_SUFFIXES
from medfl.datasets.readers.volumes import as_nifti, is_volume
from medfl.storage import write_atomic


def to_original(labels: Tensor, geometry: Geometry) -> Bytes:
    """Return a mask of class indices (H, W[, D]) on the grid of the image file instead of the network's.

    Each pixel of the file takes the class of the nearest pixel of the mask, and is background outside the mask. If the
    grids differ only by flips, axis order, cropping and padding, nothing is lost.
    """
    # pixel of the file -> millimetres -> pixel of the mask
    from_file = np.linalg.inv(geometry.affine) @ geometry.original_affine
    axes = len(geometry.original_shape)
    mask: Bytes = ndimage.affine_transform(
        labels.cpu().numpy().astype(np.uint8),
        from_file[:axes, :axes],
        from_file[:axes, -1],
        geometry.original_shape,
        order=0,
        mode="grid-constant",  # unlike "constant", extends a corner pixel up to its edge
    )

    return mask


def save(
    labels: Tensor, classes: int, geometry: Geometry, path: Path, values: Sequence[int] = ()
) -> Path:
    """Resample a mask (H, W[, D]) of class indices to the grid of its image file, and `write` it there."""
    return write(to_original(labels, geometry), classes, geometry, path, values)


def write(
    mask: Bytes,
    classes: int,
    geometry: Geometry,
    path: Path,
    values: Sequence[int] = (),
) -> Path:
    """Write a mask on the grid of its image file, as returned by `to_original`, and return the path.

    A volume becomes `<path>.nii.gz` in the space of its image file (`as_nifti`), a DICOM picture a volume of one slice
    there; other pictures become `<path>.png`. Without values, a picture of two classes has 0 and 255, others class
    indices.

    Args:
        mask: class indices.
        classes: number of classes, including background.
        geometry: of the prepared image.
        path: without its suffix.
        values: of the classes.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    affine = geometry.original_affine
    file = io.BytesIO()
    is_named_picture = geometry.file.lower().endswith(IMAGE_SUFFIXES)
    if in_dicom := (
        mask.ndim == 2 and not is_named_picture and dicom.is_named_or_begins_so(geometry.file)
    ):
        if np.array_equal(affine, np.eye(4)):  # rows come first
            mask = mask.T
            affine = dicom.picture_affine(geometry.file)

        mask = mask[..., None]

    if is_picture(geometry) and not in_dicom:
        picture = stored(mask, values or picture_values(classes), classes)
        Image.fromarray(picture).save(file, format="PNG")
        path = path.with_name(f"{path.name}.png")
    else:
        file.write(as_nifti(stored(mask, values, classes), affine, geometry.file))
        path = path.with_name(f"{path.name}.nii.gz")

    write_atomic(path, file.getvalue())
    return path


def is_picture(geometry: Geometry) -> bool:
    """Tell whether an image is a picture (rows first) rather than a volume or a slice of one."""
    return len(geometry.original_shape) == 2 and not is_volume(geometry.file)
