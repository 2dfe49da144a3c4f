"""Write volumes or pictures with masks at a coarser resolution, so that a CPU can train on them.

    python docs/results/smaller.py IMAGES MASKS FACTOR OUT

Each block of FACTOR voxels along each axis becomes one: its mean in the image, its most frequent value in the mask (the
lowest of equal ones). What is left over at the end of an axis is dropped. OUT gets `images` and `masks`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from PIL import Image

Array = np.ndarray[Any, Any]


def blocks(voxels: Array, factor: int) -> Array:
    """Return the blocks, the voxels of each along the last axis."""
    whole = [side // factor for side in voxels.shape]
    cut = voxels[tuple(slice(side * factor) for side in whole)]
    pairs = [length for side in whole for length in (side, factor)]
    dims = len(whole)
    order = [*range(0, 2 * dims, 2), *range(1, 2 * dims, 2)]
    return cut.reshape(pairs).transpose(order).reshape(*whole, -1)


def smaller(voxels: Array, factor: int, *, is_mask: bool) -> Array:
    """Return an image or a mask with the mean, or the most frequent value, of each block."""
    found = blocks(voxels, factor)
    if not is_mask:
        return found.mean(-1).astype(np.float32)

    values = np.unique(voxels)
    counts = np.stack([(found == value).sum(-1) for value in values])
    return values[counts.argmax(0)].astype(np.uint8)


def write(path: Path, target: Path, factor: int, *, is_mask: bool) -> None:
    """Write the smaller form of one file."""
    if path.suffix == ".png":
        with Image.open(path) as opened:
            pixels = np.asarray(opened).astype(int)
        made = smaller(pixels, factor, is_mask=is_mask)
        Image.fromarray(made.round().astype(np.uint8)).save(target)
        return

    volume: Any = nib.load(path)
    made = smaller(np.asarray(volume.dataobj), factor, is_mask=is_mask)
    middle = (factor - 1) / 2
    scale = np.diag([factor, factor, factor, 1.0])
    scale[:3, 3] = middle
    nib.save(nib.Nifti1Image(made, volume.affine @ scale), target)


def main(images: str, masks: str, factor: str, out: str) -> None:
    """Write all files of both folders."""
    for folder, name in ((images, "images"), (masks, "masks")):
        target = Path(out) / name
        target.mkdir(parents=True)
        for path in sorted(Path(folder).iterdir()):
            write(path, target / path.name, int(factor), is_mask=name == "masks")


if __name__ == "__main__":
    main(*sys.argv[1:])
