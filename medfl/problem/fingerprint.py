"""The releasable part of a site's fingerprint (`medfl.data.fingerprint`), computed from its training cases.

Counts below a minimum are suppressed by the rule of `partner.statistics`, as are intensity bins with fewer cases.
Nothing is released from fewer cases than the minimum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np
from nibabel import orientations

from medfl.core import Array, Document, Floats, InputError, present, printable, tables, terminal
from medfl.data import Fingerprint, Tally
from medfl.data.fingerprint import OCTAVE, UNIT, Volume
from medfl.datasets.readers import pairs, volumes
from medfl.datasets.readers.mask_values import Classes
from medfl.policy.suppression import hidden_bins, suppress_counts
from medfl.problem.noised_fingerprint import numbers, with_noise
from medfl.problem.problem import Problem

_SECTIONS = ("train", "validate")  # never the test images: they evaluate what is planned
_TOLD = {True: "at least {} cases", False: "fewer than {} cases", None: "not told how many cases"}
Cases = Sequence[tuple[str, str]]
"""Paths of images and their masks."""


def of_bundle(bundle: Problem) -> tuple[Fingerprint, Cases]:
    """Return an empty fingerprint for a bundle's segmentation, and its cases; InputError if the cases have no files."""
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
    del classes[0]  # the background
    kind = "pictures"
    if volumes.is_volume(cases[0][0]):
        kind = "volumes"

    return Fingerprint(kind, bundle.channels, ids["images"], ids["masks"], classes), cases


def gather(
    empty: Fingerprint, cases: Cases, least: int, epsilon: float = 0.0, *, progress: bool = False
) -> Fingerprint:
    """Return the fingerprint of cases, with counts below `least` suppressed, or with noise for an epsilon.

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
    singles = []
    for image, mask in terminal.bar(cases, desc="reading cases", unit="case", shown=progress):
        single = _of_case(empty, image, mask, classes)
        if epsilon:
            singles.append(numbers(single))
            continue

        pooled += single
        has_foreground += single.foreground[0].count > 0
        for counter, tally in zip(bins, single.foreground, strict=True):
            counter.update(tally.cells.keys())

    if epsilon:
        return with_noise(empty, singles, epsilon)

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
        codes = orientations.ornt2axcodes(placed)  # type: ignore[no-untyped-call]
        orders = {"".join(codes): 1}
        # axes of the file in the order R, A, S: the plan is made for the output of Orientationd
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

    # as nnU-Net measures an image: without the zeros around it
    sizes = np.ptp(np.argwhere((pixels != 0).any(0)), axis=0) + 1
    counts = np.bincount(target.ravel().astype(int), minlength=len(empty.classes) + 1)
    return replace(
        empty,
        cases=1,
        orders=orders,
        sizes=_lengths(sizes),
        spacings=_lengths(spacing),
        extents=_lengths(sizes * spacing),
        foreground=tuple(map(Tally.of_intensities, pixels[:, target > 0].astype(np.float64))),
        volumes=dict(zip(empty.classes, _lengths(counts[1:] * spacing.prod()), strict=True)),
    )


def _lengths(values: Floats) -> tuple[Tally, ...]:
    return tuple(map(Tally.of_lengths, values[:, None]))


def _released(pooled: Fingerprint, bins: Sequence[Mapping[int, int]], least: int) -> Fingerprint:
    foreground = []
    for tally, images in zip(pooled.foreground, bins, strict=True):
        hidden = hidden_bins([images[cell] for cell in tally.cells], least)
        cells = dict(compress(tally.cells.items(), np.logical_not(hidden)))
        foreground.append(replace(tally, cells=cells))

    present: dict[int, Volume] = {}
    for value, volume in pooled.volumes.items():
        assert isinstance(volume, Tally)
        # a table of two cells, with and without it: release both or neither
        if min(volume.count, pooled.cases - volume.count) >= least:
            present[value] = _shown(volume, least)
        elif pooled.cases >= 2 * least - 1:
            # one of the two is below `least`: not saying which leaves it any number from 0 to `least` - 1
            present[value] = volume.count >= least
        else:
            present[value] = None

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
    """Return what may be released of lengths: beside hidden cells mean and sd to 1/8, as exact sums would tell them."""
    cells = _told({str(cell): count for cell, count in tally.cells.items()}, least)
    if sum(cells.values()) == tally.count:
        return tally

    mean = round(tally.mean * OCTAVE)
    step = UNIT // OCTAVE**2 * tally.count
    squares = (mean**2 + round(tally.sd * OCTAVE) ** 2) * step
    return Tally(
        tally.count, mean * OCTAVE * step, squares, {int(cell): n for cell, n in cells.items()}
    )


def _told(counts: Mapping[str, int], least: int) -> dict[str, int]:
    """Return the cells that may be released; names of other cells would reveal a case."""
    return present(suppress_counts(counts, least)[0])


def text(fingerprint: Fingerprint, least: int, epsilon: float) -> list[str]:
    """Return the released values as lines of text."""
    privacy = (
        f"Counts of cases below {least} are hidden. "
        "No noise: somebody who knows all cases but one may learn about it."
    )
    if epsilon:
        privacy = (
            f"Noise of epsilon {epsilon:g} for one case, of a standard deviation of {fingerprint.noise:.3g} cases in "
            f"each number; that there are at least {least} cases is told without. Each further one adds its epsilon."
        )

    rows = {"cases": f"{fingerprint.cases}; channels: {fingerprint.channels}"}
    rows["axis orders"] = ", ".join(f"{name} {n}" for name, n in fingerprint.orders.items())
    for name in ("sizes", "spacings", "extents"):
        rows[f"median {name}"] = ", ".join(
            f"{tally.length():.4g}" for tally in getattr(fingerprint, name)
        )

    for index, tally in enumerate(fingerprint.foreground):
        if tally.count:
            rows[f"foreground, channel {index}"] = f"mean {tally.mean:.4g}, sd {tally.sd:.4g}"

    for value, volume in fingerprint.volumes.items():
        if isinstance(volume, Tally):
            count = f"{volume.count} cases"
        else:
            count = _TOLD[volume].format(least)

        rows[f"class {printable(fingerprint.classes[value])}"] = count

    return [
        "fingerprint, in short; --json shows each number that would leave: nothing else does",
        *terminal.definitions({f"  {name}": row for name, row in rows.items() if row}),
        *tables.wrap(privacy),
    ]
