"""New images for a trained network: files, folders and arrays through a bundle's own validation transforms."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from monai.transforms import Transform
from PIL import Image
from torch import Tensor, nn

from medfl.core import OF_TARGETS, Array, InputError
from medfl.data import Item, Prepared, Shard, Source, allow_missing_labels
from medfl.data.prepare import prepare
from medfl.datasets.readers.reading import files_of
from medfl.datasets.readers.unlabelled import joined, named
from medfl.evaluation import CaseEvaluator, MaskEvaluator
from medfl.evaluation.save_masks import to_original
from medfl.problem import Problem, tensor_described
from medfl.problem.described import Config, Document

Reference = int | str | tuple[float, ...]
Images = str | Path | Sequence[str | Path | Array]


def prepared(bundle: Problem, images: Images) -> Prepared:
    """Return new images ready to be batched; their labels are zeros.

    Args:
        bundle: its validation transforms are applied.
        images: a folder (with all images below it), a file, or a list of files or of arrays: pictures (H, W) or
            (H, W, 3) uint8, (H, W) uint16, volumes (D1, D2, D3).

    Raises:
        InputError: no such file, no image in the folder, or one that the transforms refuse; names it.
    """
    with as_files(images, bundle.metadata) as files:
        bundle.open_places(files_of(files.values()))
        return of_files(transforms_of(bundle), bundle.task, files, outputs=len(bundle.classes))


def of_files(
    transforms: Transform,
    task: str,
    files: Mapping[str, str],
    labels: Mapping[str, Reference] | None = None,
    outputs: int = 0,
) -> Prepared:
    """Return images ready to be batched.

    Args:
        transforms: data list entry -> {"image": (C, H, W[, D]), ...}, as `transforms_of` gives them.
        task: its kind.
        files: id -> URI.
        labels: id -> class index, URI of a mask, or the target outputs, if known; others
            are zeros, or NaN for findings and numbers.
        outputs: of the network; only for findings and numbers.

    Raises:
        InputError: an image that the transforms refuse, or masks that they do not read.
    """
    labels = labels or {}
    entries: list[Document] = []
    for ident, uri in files.items():
        entries.append({"image": uri})
        if ident in labels:
            # findings and numbers; a class has to pass the bundle's own transforms
            key = "reference" if task in OF_TARGETS else "label"
            entries[-1][key] = labels[ident]

    items = [{"id": ident} for ident in files]
    source = Source(entries, (transforms, _Labelled(task, outputs)))
    return prepare(items, source, label="reading images")


def masks(
    bundle: Problem, network: nn.Module, shard: Shard, device: torch.device
) -> list[Document]:
    """Return id and mask (class indices, uint8) of each image, on its file's grid if that is known.

    A mask is None if the bundle's channels overlap; InputError if the bundle does not segment.
    """
    evaluator = bundle.evaluator
    if not isinstance(evaluator, MaskEvaluator | CaseEvaluator):
        raise InputError(
            f"masks of bundle {bundle.name!r}, a {bundle.task} task",
            "a segmentation",
            "give such a run",
        )

    geometry = shard.prepared.geometry

    def on_file(index: int, mask: Tensor) -> Array:
        """Return the mask of an image on the grid of the image's file, where its place is known."""
        has_geometry = bool(geometry) and len(geometry[index].original_shape) == mask.ndim
        if has_geometry:
            return to_original(mask, geometry[index])

        return mask.numpy()

    outputs = evaluator.masks(network, shard, device)
    results = []
    for index, ident, case in zip(shard.indices.tolist(), shard.ids, outputs, strict=True):
        mask = None if case is None else on_file(index, case.prediction.cpu())
        results.append({"id": ident, "mask": mask})

    return results


class _Labelled(Transform):
    """Give an image without a label an empty one of the task's form, for batches and evaluators that expect one."""

    def __init__(self, task: str, outputs: int) -> None:
        self.task = task
        self.outputs = outputs

    def __call__(self, data: Item) -> Document:
        image = data["image"]
        if self.task in OF_TARGETS:  # transforms of a target do not apply to an output
            reference = data.get("reference", [math.nan] * self.outputs)
            return {**data, "label": torch.tensor(reference, dtype=torch.float32)}

        label = data.get("label")
        if isinstance(label, str):
            raise InputError(
                f"reference mask {label}",
                "the bundle's preprocessing reads masks too, under the key 'label'",
                "predict without --reference, and score what is written",
            )

        if label is None:
            label = 0
            if self.task == "segmentation":
                label = torch.zeros((1, *image.shape[1:]), dtype=torch.uint8)

        return {**data, "label": label}


def transforms_of(bundle: Problem) -> Transform:
    """Return the bundle's validation transforms; those for a label accept an image without one."""
    try:
        return allow_missing_labels((bundle.get("validate#preprocessing"),))
    except InputError:  # another style of bundle: as in its validation data set
        return allow_missing_labels(bundle.section("validate").source.transforms)


@contextmanager
def as_files(images: Images, metadata: Config) -> Iterator[dict[str, str]]:
    """Yield id -> URI of each image, with ids as made by `unlabelled.named`.

    Arrays become files in a temporary folder, since bundles read files.

    Args:
        images: as for `prepared`.
        metadata: of the bundle. If it does not say, images are single-channel volumes: a folder of DICOM files is one.
    """
    volumes = is_volumes(metadata)
    channels = channels_of(metadata)
    listed = [images] if isinstance(images, str | Path) else list(images)
    with tempfile.TemporaryDirectory(prefix="medfl-") as folder:
        paths = []
        for number, image in enumerate(listed):
            if isinstance(image, str | Path):
                paths.append(Path(image).expanduser())
            else:
                paths.append(_written(np.asarray(image), Path(folder) / f"image-{number}"))

        if not paths:
            raise InputError("no images", "a folder, files or arrays", "give at least one")

        yield joined(named(paths, volumes), channels)


def is_volumes(metadata: Config) -> bool:
    """Tell whether images are volumes, by a bundle's metadata; by default they are."""
    return len(tensor_described(metadata, "inputs", "image").get("spatial_shape") or ()) != 2


def channels_of(metadata: Config) -> int:
    """Return the number of channels of an image, by a bundle's metadata."""
    return int(tensor_described(metadata, "inputs", "image").get("num_channels") or 1)


def _written(pixels: Array, path: Path) -> Path:
    """Write an array losslessly: a picture as PNG, a volume as NIfTI with 1 mm spacing."""
    grey = pixels.ndim == 2
    colour = pixels.ndim == 3 and pixels.shape[2] == 3
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
