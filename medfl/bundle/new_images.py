"""New images for a trained network: files, folders and arrays through a bundle's own validation transforms."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.transforms import Compose, MapTransform, Transform
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from medfl.bundle.bundle import Bundle
from medfl.core.errors import InputError
from medfl.data.prepare import prepare
from medfl.data.prepared import Prepared, Shard
from medfl.data.source import Source
from medfl.datasets.readers.tables import IMAGE_SUFFIXES
from medfl.datasets.readers.volumes import SUFFIXES as VOLUME_SUFFIXES
from medfl.evaluation.evaluators import CaseEvaluator, MaskEvaluator
from medfl.evaluation.save_masks import to_original

Images = str | Path | Sequence[str | Path | NDArray[Any]]
_ENDINGS = (*IMAGE_SUFFIXES, *VOLUME_SUFFIXES)


def prepared(bundle: Bundle, images: Images) -> Prepared:
    """Return new images ready to be batched; their labels are zeros.

    Args:
        bundle: whose validation transforms they go through.
        images: a folder (with all images below it), a file, or a list of files or of arrays: pictures (H, W) or
            (H, W, 3) uint8, (H, W) uint16, volumes (D1, D2, D3).

    Raises:
        InputError: no such file, no image in the folder, or one that the transforms refuse; names it.
    """
    with _as_files(images) as files:
        items = [{"id": ident} for ident in files]
        entries = [{"image": str(path)} for path in files.values()]
        return prepare(items, Source(entries, (*_transforms(bundle), _Unlabelled(bundle.task))), label="reading images")


def masks(bundle: Bundle, network: nn.Module, shard: Shard, device: torch.device) -> list[dict[str, Any]]:
    """Return id and mask (class indices, uint8) of each image, on its file's grid where that is known.

    A mask is None where the bundle's channels overlap.

    Raises:
        InputError: the bundle segments nothing.
    """
    evaluator = bundle.evaluator
    predicted: list[dict[str, Any]] = []
    if not isinstance(evaluator, MaskEvaluator | CaseEvaluator):
        raise InputError(f"masks of bundle {bundle.name!r}, a {bundle.task} task", "a segmentation", "give such a run")
    geometry = shard.prepared.geometry
    evaluated = zip(shard.indices.tolist(), shard.ids, evaluator.masks(network, shard, device), strict=True)
    for index, ident, mask in evaluated:
        drawn = None if mask is None else mask.prediction.cpu()
        on_file = drawn is not None and bool(geometry) and len(geometry[index].original_shape) == drawn.ndim
        if drawn is None:
            predicted.append({"id": ident, "mask": None})
        else:
            predicted.append({"id": ident, "mask": to_original(drawn, geometry[index]) if on_file else drawn.numpy()})
    return predicted


class _Unlabelled(Transform):
    """Give an image an empty label of the task's form, for batches and evaluators that expect one."""

    def __init__(self, task: str) -> None:
        self.task = task

    def __call__(self, data: Mapping[str, Any]) -> dict[str, Any]:
        image = data["image"]
        segments = self.task == "segmentation"
        return {**data, "label": torch.zeros((1, *image.shape[1:]), dtype=torch.uint8) if segments else 0}


def _transforms(bundle: Bundle) -> tuple[Any, ...]:
    """Return the bundle's validation transforms; those for a label let an image without one pass."""
    try:
        chain: tuple[Any, ...] = (bundle.get("validate#preprocessing"),)
    except InputError:  # another style of bundle: as its validation data set has them
        chain = bundle.section("validate").source.transforms
    transforms = deepcopy(Compose(chain).flatten())  # type: ignore[no-untyped-call]
    for transform in transforms.transforms:
        if isinstance(transform, MapTransform):
            transform.allow_missing_keys = True
    return (transforms,)


@contextmanager
def _as_files(images: Images) -> Iterator[dict[str, Path]]:
    """Give id -> file, an id for each that is given; arrays become files of a temporary folder, for bundles read files.

    A file below a folder is named by its path there, or by its whole path where several have the same there.
    """
    listed = [images] if isinstance(images, str | Path) else list(images)
    with tempfile.TemporaryDirectory(prefix="medfl-") as folder:
        named: list[tuple[str, Path]] = []
        for number, given in enumerate(listed):
            if isinstance(given, str | Path):
                named += _files_in(Path(given).expanduser())
            else:
                name = f"image-{number}"
                named.append((name, _written(np.asarray(given), Path(folder) / name)))
        if not named:
            raise InputError("no images", "a folder, files or arrays", "give at least one")
        times, files = Counter(name for name, _ in named), dict[str, Path]()
        for name, path in named:
            ident = name if times[name] == 1 else str(path)
            files[f"{ident}#{len(files)}" if ident in files else ident] = path  # as `preparing.records` tells them
        yield files


def _files_in(path: Path) -> list[tuple[str, Path]]:
    if path.is_file() or (path.is_dir() and any(path.glob("*.dcm"))):
        return [(str(path), path)]
    if not path.is_dir():
        raise InputError(f"{path} is no file and no folder", "images that are there", "check the path")
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.lower().endswith(_ENDINGS))
    if not files:
        raise InputError(f"folder {path} holds no image", f"files that end in {', '.join(_ENDINGS)}", "check the path")
    return [(file.relative_to(path).as_posix(), file) for file in files]


def _written(pixels: NDArray[Any], path: Path) -> Path:
    """Write an array without loss: a picture as PNG, a volume as NIfTI of 1 mm."""
    grey, colour = pixels.ndim == 2, pixels.ndim == 3 and pixels.shape[2] == 3
    if (pixels.dtype == np.uint8 and (grey or colour)) or (pixels.dtype == np.uint16 and grey):
        file = path.with_name(f"{path.name}.png")
        Image.fromarray(pixels).save(file)
        return file
    if pixels.ndim == 3 and pixels.dtype.kind in "uif":
        file = path.with_name(f"{path.name}.nii.gz")
        nib.save(nib.Nifti1Image(pixels.astype(np.float32), np.eye(4)), file)  # type: ignore[no-untyped-call]
        return file
    raise InputError(
        f"an array of shape {pixels.shape} and type {pixels.dtype}",
        "pictures (H, W) or (H, W, 3) of type uint8 or (H, W) of type uint16, or volumes (D1, D2, D3)",
        "convert it, or give the file",
    )
