"""Contents of a folder of images, and the metadata.json of the bundle that `medfl new` writes for it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from medfl.bundle.files import RESEARCH_ONLY, SCHEMA
from medfl.core import DISTRIBUTION, InputError, version_of
from medfl.datasets.readers.reading import Pixels
from medfl.datasets.readers.splitting import Record
from medfl.problem.described import Document

if TYPE_CHECKING:
    from medfl.starter.plan import Plan


@dataclass(frozen=True)
class Survey:
    """Contents of a folder of images.

    Attributes:
        kind: "labelled" pictures or volumes, or "pictures" or "volumes" with masks.
        folder: the value of --data.
        classes: names in label order, of findings or of numbers; for masks with the background first.
        counts: images with each class, finding or number; for masks, images in which it occurs.
        channels: of an image.
        brightest: largest possible value of a picture, of types other than 8 and 16 bits; 1 with `own_depth`.
        sides: smallest and largest side of the images, in pixels or voxels.
        patch: for volumes, a training patch; of labelled ones, the size of all.
        images, masks: names of the folders in `folder`, "" for labelled pictures.
        phantom: the phantom cohort that some of them belong to, "" if all may be real.
        notes: for the user, e.g. about excluded files.
        own_depth: largest value of the 16-bit pictures, 255 if all have 8 bits: each picture is divided by the largest
            value of its own type. 0 if some have neither type.
        labels: table of the classes in `folder`, "" if it has a folder for each.
        group_by: expression that finds the patients in file names, None if it was not given.
        patients: their number, 0 if unknown.
        offer: suggested --group-by expression with the number of patients it finds; None if there is none.
        said: their layout and how a table was read.
        tested: images in the test section.
        sites: default number of sites of a run: three, or fewer with few patients.
        centres: that are its sites instead, () unless each image has one and each of them has training images.
        mask_values: values of the classes in masks, if they are not 0, 1, 2, ...
        mask_colours: (index, red, green, blue) of classes in masks with a palette of colours.
        channel_titles: names of the channels if a file gives them.
        normalised: normalisation of volumes by these names; other than nonorm and rescale_to_0_1 by mean and sd.
        task: classification, multilabel or regression of labelled pictures.
        label_column: of the table, with all findings, or with the classes if the user named it.
        uncertain, blank, columns: how the table is read (`medfl.datasets.readers.label_columns.Wanted`; its roles).
        mean, sd: of the training images' numbers.
        units: of the numbers, "" if the columns' names give none.
        plan: used to write the bundle (`medfl plan`), None for the small one of `medfl new`; writer: its verb.
        folds: suggested for a cross-validation; 0 if the test section is large enough, or there are too few patients.
    """

    kind: str
    folder: str
    classes: tuple[str, ...]
    counts: tuple[int, ...]
    channels: int
    brightest: int
    sides: tuple[int, int]
    patch: tuple[int, ...] = ()
    images: str = ""
    masks: str = ""
    phantom: str = ""
    notes: tuple[str, ...] = ()
    own_depth: int = 0
    labels: str = ""
    group_by: str | None = None
    patients: int = 0
    offer: tuple[str, int] | None = None
    said: tuple[str, ...] = ()
    tested: int = 0
    sites: int = 3
    centres: tuple[str, ...] = ()
    folds: int = 0
    mask_values: tuple[int, ...] = ()
    mask_colours: tuple[tuple[int, ...], ...] = ()
    channel_titles: tuple[str, ...] = ()
    normalised: str = "zscore"
    task: str = "classification"
    label_column: str = ""
    uncertain: str = "ignore"
    blank: str = "ignore"
    columns: Mapping[str, str] = field(default_factory=dict)
    mean: tuple[float, ...] = ()
    sd: tuple[float, ...] = ()
    units: tuple[str, ...] = ()
    plan: Plan | None = None
    writer: str = "medfl new"

    @classmethod
    def of_plan(cls, plan: Plan, sites: int) -> Survey:
        """Return what the sites' fingerprints say about their folders."""
        pooled = plan.pooled
        return cls(
            pooled.kind,
            "",
            ("background", *pooled.classes.values()),
            (),
            pooled.channels,
            1,
            (0, 0),
            plan.patch,
            images=pooled.images,
            masks=pooled.masks,
            own_depth=pooled.depth,
            sites=sites,
            mask_values=pooled.mask_values,
            channel_titles=pooled.channel_names,
            plan=plan,
            writer="medfl plan",
        )

    @property
    def has_volumes(self) -> bool:
        """Whether the images are volumes."""
        return len(self.patch) > 2

    @property
    def items_call(self) -> str:
        """The call of `medfl.datasets.own` that lists the items, up to the section."""
        if self.kind != "labelled":
            return "paired(@dataset_dir, @images, @masks"
        if self.labels:
            return "listed(@dataset_dir, @images, @labels, @classes"

        return "labelled(@dataset_dir, @classes"

    @property
    def items_end(self) -> str:
        """The end of that call, after the section."""
        end = "@group_by, @split"
        if self.task == "classification" and self.label_column:
            end += ", 'classification', @label_column"
        elif self.task == "multilabel":
            end += ", @labels_are, @label_column, @uncertain, @blank"
        elif self.task == "regression":
            end += ", @labels_are"

        if self.columns:
            end += ", columns=@columns"

        return f"{end})"


def _numbered(names: Sequence[str]) -> dict[str, str]:
    return {str(index): name for index, name in enumerate(names)}


def metadata_of(name: str, survey: Survey, side: int, kind: str) -> Document:
    """Return the content of metadata.json."""
    segments = survey.kind != "labelled"
    is_volumes = survey.has_volumes
    shape = [*survey.patch] if is_volumes else [side, side]
    colours = [f"channel {index}" for index in range(survey.channels)]
    if len(survey.channel_titles) == survey.channels:
        colours = [*survey.channel_titles]
    elif survey.channels == 1:
        colours = ["grey value"]
    elif survey.channels == 3 and not is_volumes:
        colours = ["red", "green", "blue"]

    image = {
        "type": "image",
        "format": "magnitude",
        "modality": "n/a",
        "num_channels": survey.channels,
        "spatial_shape": shape,
        "dtype": "float32",
        "value_range": [-10, 10],
        "is_patch_data": is_volumes and segments,
        "channel_def": _numbered(colours),
    }
    pred = {
        "type": "probabilities",
        "format": "classes",
        "modality": "n/a",
        "num_channels": len(survey.classes),
        "spatial_shape": [],
        "dtype": "float32",
        "value_range": [0, 1],
        "is_patch_data": is_volumes and segments,
        "channel_def": _numbered(survey.classes),
    }
    task = "Classification"
    if survey.task == "multilabel":
        task = "Multi-label classification"
    elif survey.task == "regression":
        task = "Regression"
        pred |= {"type": "tuples", "format": "numbers", "value_range": []}
        pred |= {"mean": [*survey.mean], "sd": [*survey.sd], "unit": [*survey.units]}

    if segments:
        task = "Segmentation"
        pred |= {"type": "image", "format": "segmentation", "spatial_shape": shape}
        if survey.mask_values:
            pred["mask_values"] = [*survey.mask_values]

    versions = {package: version_of(package) for package in ("medfl", "monai", "torch", "numpy")}

    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": f"written by {survey.writer}"},
        "monai_version": versions["monai"],
        "pytorch_version": versions["torch"].partition("+")[0],
        "numpy_version": versions["numpy"],
        "required_packages_version": {DISTRIBUTION: versions["medfl"]},
        "supported_apps": {},
        "name": name,
        "task": f"{task}: {', '.join(survey.classes)}",
        "description": f"{kind.capitalize()} of one's own, at each site a folder of the same form.",
        "authors": "to be filled in",
        "copyright": "to be filled in",
        "data_source": "to be filled in",
        "data_type": "NIfTI" if is_volumes else "pictures",
        "intended_use": RESEARCH_ONLY,
        "references": [],
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": pred}},
    }


# What `medfl new` keeps of each picture or volume that it read: shape, type and largest value


class PictureFacts(NamedTuple):
    """Shape, type and largest value of a picture or volume, a hash of its pixels, and changes made by reading.

    Of its mask `values` are the values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    largest: float
    digest: bytes = b""
    changes: str = ""
    values: Set[int] = frozenset()

    @classmethod
    def of(cls, pixels: Pixels) -> PictureFacts:
        """Return the facts of some pixels."""
        digest = hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=16).digest()
        return cls(pixels.shape, pixels.dtype, float(pixels.max()), digest)

    @property
    def is_volume(self) -> bool:
        """Whether it is a volume (C, D1, D2, D3)."""
        return len(self.shape) > 3

    @property
    def brightest(self) -> int:
        """Largest possible value of such pictures; floats in 0 to 1 have 1, and 16 bits are often 12."""
        if self.dtype == np.uint8:
            return 255
        usual = {"f": (1, 255, 65535), "u": DEPTHS}.get(self.dtype.kind, (255, 65535))
        return next((value for value in usual if self.largest <= value), math.ceil(self.largest))


_PATCH = 64  # voxels a side of a patch at most
_STEP = 8  # sides are multiples of this: a U-Net halves them three times
DEPTHS = (255, 1023, 4095, 16383, 65535)
"""Largest values of 8, 10, 12, 14 and 16 bits."""


def common_facts(facts: Sequence[PictureFacts]) -> Document:
    """Return what a survey has of the shapes and values of pictures (H, W, C), or of volumes (C, D1, D2, D3).

    Raises:
        InputError: volumes with different numbers of channels, or as `own_depth`.
    """
    if facts[0].is_volume:
        several = sorted({volume.shape[0] for volume in facts})
        if several[1:]:
            raise InputError(
                f"volumes of {' and '.join(map(str, several))} channels",
                "as many of each image",
                "move the others away",
            )

        shapes = [volume.shape[1:] for volume in facts]
        # fits in most volumes
        patch = np.clip(np.median(shapes, axis=0) // _STEP * _STEP, 16, _PATCH)
        return {
            "channels": several[0],
            "brightest": 0,
            "sides": _sides(shapes),
            "patch": tuple(map(int, patch)),
        }

    # one picture in colour has all read so: a network has as many inputs for each
    channels = 3 if any(picture.shape[-1] > 1 for picture in facts) else 1
    brightest = 1  # each picture is divided by the largest value of its own depth
    depth = own_depth(facts)
    if not depth:
        brightest = max(picture.brightest for picture in facts)

    return {
        "channels": channels,
        "brightest": brightest,
        "sides": _sides([picture.shape[:2] for picture in facts]),
        "own_depth": depth,
    }


def own_depth(facts: Sequence[PictureFacts]) -> int:
    """Return the largest value of 16-bit pictures, 255 if all have 8 bits; 0 if some have neither.

    Raises:
        InputError: some have neither 8 nor 16 bits, and pictures have different depths.
    """
    if {picture.dtype.name for picture in facts} <= {"uint8", "uint16"}:
        return max(_sixteen_bit_depths(facts), default=255)

    if len({picture.brightest for picture in facts}) > 1:
        raise InputError(
            f"pictures of several depths: {_depths(facts)}",
            "one depth, or 8 and 16 bits beside each other",
            "save them as pictures of 8 or 16 bits",
        )

    return 0


def depth_notes(facts: Sequence[PictureFacts]) -> tuple[str, ...]:
    """Return notes if pictures have different depths, or use only a part of their 16 bits."""
    if facts[0].is_volume:
        return ()

    depth = own_depth(facts)
    notes = []
    if depth and len({picture.dtype for picture in facts}) > 1:
        notes.append(f"pictures of several depths, each divided by its own: {_depths(facts)}")

    sixteen = [picture.largest for picture in facts if picture.dtype == np.uint16]
    if sixteen and depth in DEPTHS[:-1]:
        notes.append(
            f"pictures of 16 bits with values up to {max(sixteen):g}: read as 0 to {depth}; brighter ones are refused"
        )

    return tuple(notes)


def _sixteen_bit_depths(facts: Sequence[PictureFacts]) -> list[int]:
    return [picture.brightest for picture in facts if picture.dtype == np.uint16]


def _depths(facts: Sequence[PictureFacts]) -> str:
    most = max(_sixteen_bit_depths(facts), default=0)
    # the 16-bit pictures of a folder come from one device: its brightest pixel shows how many bits it uses
    counts = Counter(most if picture.dtype == np.uint16 else picture.brightest for picture in facts)
    return ", ".join(f"{count} of at most {value}" for value, count in sorted(counts.items()))


def _sides(shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    """Return the smallest and the largest side."""
    return min(map(min, shapes)), max(map(max, shapes))


def duplicate_notes(facts: Sequence[PictureFacts], records: Sequence[Record]) -> tuple[str, ...]:
    """Return a note if several files contain identical images: they may be in different sections."""
    first: dict[tuple[bytes, tuple[int, ...]], Record] = {}
    copies = []
    for picture, record in zip(facts, records, strict=True):
        # with the shape: the same bytes may be 2 x 8 pixels or 4 x 4
        original = first.setdefault((picture.digest, picture.shape), record)
        if original is not record:
            copies.append((original, record))

    if not copies:
        return ()

    contradictions = sum(original.label != copy.label for original, copy in copies)
    classes = f", {contradictions} of another class" if contradictions else ""
    example = f"{copies[0][0].id} and {copies[0][1].id}"
    return (
        f"images that are the same as another: {len(copies)}{classes}; first {example}: keep one, or name one patient",
    )
