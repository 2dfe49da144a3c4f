"""A site's fingerprint (`medfl.data.fingerprint`) as far as it may leave, from its training cases.

Counts of cases below a least one are not told, by the rule of `partner.statistics`; nor are bins of intensities to
which fewer cases add, nor anything of fewer cases than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from nibabel import orientations

from medfl.core import terminal
from medfl.core.arrays import Array, Floats
from medfl.core.documents import Document
from medfl.core.errors import InputError
from medfl.core.untrusted import printable
from medfl.data.fingerprint import Fingerprint, Tally
from medfl.datasets.readers import pairs, volumes
from medfl.datasets.readers.mask_values import Classes
from medfl.policy.suppression import hidden_bins, suppress_counts
from medfl.problem.problem import Problem

_SECTIONS = ("train", "validate")  # never the test images: they judge what is planned
Cases = Sequence[tuple[str, str]]
"""Paths of images and of their masks."""


def of_bundle(bundle: Problem) -> tuple[Fingerprint, Cases]:
    """Return an empty fingerprint for a bundle's segmentation, and its cases; InputError where these have no files."""
    cases = []
    for section in _SECTIONS:
        for entry in bundle.data(section):
            match entry:
                case {"image": str(image), "label": str(mask)}:
                    cases.append((image, mask))
                case _:
                    raise InputError(
                        f"bundle {bundle.name!r}: an item of {section} without the paths of an image and a mask",
                        "a segmentation whose data list names both",
                        "give --images DIR --masks DIR",
                    )

    ids: Document = {
        "images": "images",
        "masks": "masks",
        "mask_values": range(len(bundle.structures)),
    }
    for name in ids:
        if name in bundle:
            ids[name] = bundle.get(name)

    classes = dict(zip(ids["mask_values"], bundle.structures, strict=True))
    del classes[0]
    kind = "pictures"
    if volumes.is_volume(cases[0][0]):
        kind = "volumes"

    return Fingerprint(kind, bundle.channels, ids["images"], ids["masks"], classes), cases


def gather(empty: Fingerprint, cases: Cases, least: int, *, progress: bool = False) -> Fingerprint:
    """Return the fingerprint of cases, without what fewer than `least` of them would tell.

    Raises:
        InputError: a case cannot be read, or there are fewer than `least`.
    """
    if len(cases) < max(1, least):
        raise InputError(
            f"fewer than {max(1, least)} training cases",
            "as many as --min-count and the policy ask for: of fewer nothing leaves",
            "add cases, or leave this site out of the planning",
        )

    classes = empty.mask_values or len(empty.classes) + 1
    pooled = empty
    bins = [Counter[int]() for _ in range(empty.channels)]
    has_foreground = 0
    for image, mask in terminal.bar(cases, desc="reading cases", unit="case", shown=progress):
        single = _of_case(empty, image, mask, classes)
        pooled += single
        has_foreground += single.foreground[0].count > 0
        for counter, tally in zip(bins, single.foreground, strict=True):
            counter.update(tally.cells.keys())

    if has_foreground < least:
        pooled = replace(pooled, foreground=(Tally(),) * empty.channels)

    return _released(pooled, bins, least)


def _of_case(empty: Fingerprint, image: str, mask: str, classes: Classes) -> Fingerprint:
    pixels: Array
    orders = {}
    if empty.kind == "volumes":
        voxels, labels = volumes.read_pair(image, mask, classes, empty.channels)
        affine = np.asarray(voxels.affine, np.float64)
        placed = orientations.io_orientation(affine)  # type: ignore[no-untyped-call]
        codes: Sequence[str] = orientations.ornt2axcodes(placed)  # type: ignore[no-untyped-call]
        orders = {"".join(codes): 1}
        # axes of the file in the order R, A, S: planned is what Orientationd makes of it
        axes = np.argsort(placed[:, 0])
        spacing = np.linalg.norm(affine[:3, :3], axis=0)[axes]
        pixels = voxels.numpy().transpose(0, *(axes + 1))
        target = labels.numpy()[0].transpose(axes)
    else:
        picture, target, _ = pairs.read_pair(
            image, mask, channels=empty.channels, classes=classes, convert=True
        )
        pixels = np.moveaxis(picture, -1, 0)
        spacing = np.ones(2)

    places = np.argwhere((pixels != 0).any(0))
    sizes = np.ptp(places, axis=0) + 1
    foreground = pixels[:, target > 0].astype(np.float64)
    counts = np.bincount(target.ravel().astype(int), minlength=len(empty.classes) + 1)
    class_volumes = _lengths(counts[1:] * spacing.prod())
    return replace(
        empty,
        cases=1,
        orders=orders,
        sizes=_lengths(sizes),
        spacings=_lengths(spacing),
        extents=_lengths(sizes * spacing),
        foreground=tuple(map(Tally.of_intensities, foreground)),
        volumes=dict(zip(empty.classes, class_volumes, strict=True)),
    )


def _lengths(values: Floats) -> tuple[Tally, ...]:
    return tuple(map(Tally.of_lengths, values[:, None]))


def _released(pooled: Fingerprint, bins: Sequence[Mapping[int, int]], least: int) -> Fingerprint:
    foreground = []
    for tally, images in zip(pooled.foreground, bins, strict=True):
        is_hidden = hidden_bins([images[cell] for cell in tally.cells], least)
        pairs_shown = zip(tally.cells.items(), is_hidden, strict=True)
        foreground.append(
            replace(tally, cells=dict(pair for pair, hide in pairs_shown if not hide))
        )

    present: dict[int, Tally | None] = {}
    for value, volume in pooled.volumes.items():
        present[value] = None
        # a table of two cells, with and without it: both are told or none
        if volume and min(volume.count, pooled.cases - volume.count) >= least:
            present[value] = _shown(volume, least)

    return replace(
        pooled,
        orders=_told(pooled.orders, least),
        sizes=tuple(_shown(tally, least) for tally in pooled.sizes),
        spacings=tuple(_shown(tally, least) for tally in pooled.spacings),
        extents=tuple(_shown(tally, least) for tally in pooled.extents),
        foreground=tuple(foreground),
        volumes=present,
    )


def _shown(tally: Tally, least: int) -> Tally:
    cells = _told({str(cell): count for cell, count in tally.cells.items()}, least)
    return replace(tally, cells={int(cell): count for cell, count in cells.items()})


def _told(counts: Mapping[str, int], least: int) -> dict[str, int]:
    """Return the cells that may be told; the names of others would tell of a case."""
    cells = suppress_counts(counts, least)[0]
    return {name: count for name, count in cells.items() if count is not None}


def text(fingerprint: Fingerprint, least: int, width: int) -> list[str]:
    """Return what leaves as lines of text."""
    rows = {"cases": f"{fingerprint.cases}, {fingerprint.channels} channels"}
    rows["axis orders"] = ", ".join(f"{name} {n}" for name, n in fingerprint.orders.items())
    for name in ("sizes", "spacings", "extents"):
        tallies: Sequence[Tally] = getattr(fingerprint, name)
        rows[f"median {name}"] = ", ".join(f"{tally.length():.4g}" for tally in tallies)

    for index, tally in enumerate(fingerprint.foreground):
        if tally.count:
            rows[f"foreground, channel {index}"] = f"mean {tally.mean:.4g}, sd {tally.sd:.4g}"

    for value, volume in fingerprint.volumes.items():
        count = str(volume.count) if volume else "not told how many"
        rows[f"class {printable(fingerprint.classes[value])}"] = f"{count} cases"

    return [
        "fingerprint, in short; --json shows each number that would leave, and nothing else leaves",
        *terminal.definitions({f"  {name}": row for name, row in rows.items() if row}, width),
        f"Counts of cases below {least} are hidden. No noise: somebody who knows all cases but one may learn about it.",
    ]
