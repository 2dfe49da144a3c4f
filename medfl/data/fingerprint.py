"""Input for planning a segmentation: counts and sums over cases on agreed grids, which merge exactly.

All numbers are integers: sums are in units of 2^-32, each case's rounded once, so that the fingerprints of sites add up
to that of all cases, bit for bit and in any order. Lengths are counted by log2 in bins of 1/8 (a quantile is known to
4.4 %), intensities v by asinh(v / 0.01) in bins of 1/64 (0.8 % of the value, 0.0001 near 0).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
from jsonschema import Draft4Validator, Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import extend
from scipy.special import ndtri

from medfl.core import (
    Config,
    Document,
    Floats,
    InputError,
    Refused,
    decode_text,
    printable,
    read_bytes,
    read_plain,
)

FORM = "medfl fingerprint 1"
OCTAVE = 8
FOLD = 64
LINEAR = 0.01
GRID = {"cells_of_a_doubling": OCTAVE, "cells_of_an_e_fold": FOLD, "linear_below": LINEAR}
UNIT = 2**32
AXES = {"pictures": 2, "volumes": 3}
_MOST_BYTES = 20_000_000
_SCHEMA = json.loads(Path(__file__).with_name("fingerprint.schema.json").read_bytes())
# of draft 4, in which 3.0 is not an integer
_VALIDATOR = extend(Draft202012Validator, type_checker=Draft4Validator.TYPE_CHECKER)(_SCHEMA)


@dataclass(frozen=True)
class Tally:
    """Numbers by their count, sum and sum of squares (in 2^-32), and the released counts per bin."""

    count: int = 0
    total: int = 0
    squares: int = 0
    cells: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Floats, cells: Floats) -> Tally:
        """Return the tally of one case's values, given the bin of each."""
        indices, counts = np.unique(np.rint(cells).astype(int), return_counts=True)
        return cls(
            len(values),
            round(float(values.sum()) * UNIT),
            round(float((values**2).sum()) * UNIT),
            dict(zip(indices.tolist(), counts.tolist(), strict=True)),
        )

    @classmethod
    def of_lengths(cls, lengths: Floats) -> Tally:
        """Return the tally of one case's lengths, or volumes; zero is ignored."""
        log = np.log2(lengths[lengths > 0])
        return cls.of(log, log * OCTAVE)

    @classmethod
    def of_intensities(cls, values: Floats) -> Tally:
        """Return the tally of one case's intensities."""
        return cls.of(values, np.arcsinh(values / LINEAR) * FOLD)

    def __add__(self, other: Tally) -> Tally:
        cells = Counter(self.cells)
        cells.update(other.cells)
        return Tally(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            dict(sorted(cells.items())),
        )

    @property
    def mean(self) -> float:
        """The exact mean; for lengths the mean of their log2."""
        return self.total / (UNIT * self.count)

    @property
    def sd(self) -> float:
        """The standard deviation, likewise."""
        # whole numbers of any size, of which none rounds
        variance = self.squares * UNIT * self.count - self.total**2
        return math.sqrt(max(0, variance)) / (UNIT * self.count)

    @property
    def hidden(self) -> float:
        """The share of numbers whose bins are not released."""
        return 1 - sum(self.cells.values()) / self.count

    def length(self, share: float = 0.5) -> float:
        """Return a quantile of lengths; of a lognormal distribution where most cells are hidden."""
        # equal lengths lie in one cell, whose middle is less exact than their mean
        if self.sd < 1e-4:
            return float(2**self.mean)
        if self.hidden > 0.5:
            return float(2 ** (self.mean + self.sd * ndtri(share)))

        return float(2 ** (self._cell(share) / OCTAVE))

    def intensity(self, share: float) -> float:
        """Return a quantile of intensities; of a normal distribution if most bins are hidden."""
        if self.hidden > 0.5:
            return float(self.mean + self.sd * ndtri(share))

        return LINEAR * math.sinh(self._cell(share) / FOLD)

    def _cell(self, share: float) -> int:
        indices = sorted(self.cells)
        reached = np.cumsum([self.cells[index] for index in indices])
        return indices[int(np.searchsorted(reached, share * reached[-1]))]


Volume = Tally | bool | None
"""Released about a class: its volumes, or whether many cases have it, or nothing."""


def is_present(volume: Volume) -> bool:
    """Tell whether it is known that cases have a class."""
    return volume is True or (isinstance(volume, Tally) and volume.count > 0)


def _of_both(volume: Volume, addend: Volume) -> Volume:
    if isinstance(volume, Tally) and isinstance(addend, Tally):
        return volume + addend
    if is_present(volume) or is_present(addend):
        return True

    return None if volume is None or addend is None else False


@dataclass(frozen=True)
class Fingerprint:
    """The releasable summary of a site's cases.

    Attributes:
        kind: "pictures" or "volumes".
        cases: their number.
        channels: of an image; `channel_names` if each has a file.
        images, masks: folders of both, within the folder given by --data.
        depth: largest value of 16-bit pictures, 255 for 8-bit ones, else 0.
        classes: value in masks -> name, without the background.
        orders: axis codes of the files, such as RAS -> cases, if released.
        sizes: voxels after cropping to non-zero values, along R, A and S; for pictures along H and W.
        spacings: mm, likewise; 1 for pictures.
        extents: mm, the product of both.
        foreground: intensities of all voxels with a class, per channel.
        volumes: value in masks -> mm^3 in the cases that have it. If their number is not released: True if it is large,
            False if it is small, None if that is not released either.
        noise: standard deviation of the noise in each number, in cases (`problem.noised_fingerprint`); 0: none.
    """

    kind: str
    channels: int
    images: str
    masks: str
    classes: Mapping[int, str]
    channel_names: tuple[str, ...] = ()
    depth: int = 0
    cases: int = 0
    orders: Mapping[str, int] = field(default_factory=dict)
    sizes: tuple[Tally, ...] = ()
    spacings: tuple[Tally, ...] = ()
    extents: tuple[Tally, ...] = ()
    foreground: tuple[Tally, ...] = ()
    volumes: Mapping[int, Volume] = field(default_factory=dict)
    noise: float = 0.0

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """Return the fingerprint of both; InputError if their tasks differ."""
        for name in ("kind", "channels", "images", "masks", "channel_names"):
            pair = [str(getattr(site, name)) for site in (self, other)]
            if pair[0] != pair[1]:
                raise InputError(
                    f"fingerprints with {name} {printable(' and '.join(pair))}",
                    "images of one kind, in folders of the same names at each site",
                    "prepare the folders alike, and take the fingerprint again",
                )

        if bool(self.noise) != bool(other.noise):
            raise InputError(
                "fingerprints with and without noise",
                "noise at each site or at none: their figures are of other numbers",
                "ask for --epsilon at each site",
            )

        for value in self.classes.keys() & other.classes.keys():
            if self.classes[value] != other.classes[value]:
                raise InputError(
                    f"class {value} is {printable(self.classes[value])} and {printable(other.classes[value])}",
                    "one name for each value of the masks",
                    "give the same --classes at each site",
                )

        volumes = {}
        for value in sorted(self.classes.keys() | other.classes.keys()):
            volumes[value] = _of_both(
                self.volumes.get(value, Tally()), other.volumes.get(value, Tally())
            )

        return replace(
            self,
            cases=self.cases + other.cases,
            classes=dict(sorted({**self.classes, **other.classes}.items())),
            depth=self.depth and other.depth and max(self.depth, other.depth),
            orders=dict(sorted((Counter(self.orders) + Counter(other.orders)).items())),
            sizes=_added(self.sizes, other.sizes),
            spacings=_added(self.spacings, other.spacings),
            extents=_added(self.extents, other.extents),
            foreground=_added(self.foreground, other.foreground),
            volumes=volumes,
            noise=math.hypot(self.noise, other.noise),  # independent noise adds up by its variance
        )

    @property
    def mask_values(self) -> tuple[int, ...]:
        """Values in masks, background first; () if they are 0, 1, 2, ..."""
        values = (0, *self.classes)
        if values == tuple(range(len(values))):
            return ()

        return values

    def document(self) -> Document:
        """Return it as plain JSON values."""
        document: Document = json.loads(self.encoded())
        return document

    def encoded(self) -> bytes:
        """Return it as it is sent."""
        fields = asdict(self)
        if not self.noise:
            del fields["noise"]

        return json.dumps({"form": FORM, "grid": GRID, **fields}).encode()


def _added(first: Sequence[Tally], second: Sequence[Tally]) -> tuple[Tally, ...]:
    return tuple(a + b for a, b in zip_longest(first, second, fillvalue=Tally()))


def read(source: Path | bytes, sender: str = "") -> Fingerprint:
    """Read a fingerprint written or sent by a site; one-line InputError if no site can have written it."""
    try:
        content = source if isinstance(source, bytes) else read_bytes(source, _MOST_BYTES)
        if len(content) > _MOST_BYTES:
            raise Refused(f"more than {_MOST_BYTES} bytes")

        document = read_plain(decode_text(content), is_json=True, nodes=1_000_000, depth=8)
        # the deepest error: that the whole fits no alternative says less
        error = best_match(_VALIDATOR.iter_errors(document))
        if error is not None:
            raise Refused(f"{error.json_path} is {printable(error.instance, 60)}: {error.message}")

        return _checked(document)
    except Refused as error:
        raise InputError(
            f"{printable(sender or source)}: {printable(error, 300)}",
            "a file of medfl site fingerprint",
            "ask the site for it again",
        ) from error


def _checked(document: Config) -> Fingerprint:
    """Convert a document of the schema to a fingerprint; Refused if its numbers contradict each other."""
    fields = dict(document)
    del fields["form"], fields["grid"]
    axes = AXES[fields["kind"]]
    numbers = {"sizes": axes, "spacings": axes, "extents": axes, "foreground": fields["channels"]}
    for name, number in numbers.items():
        is_length = name != "foreground"
        fields[name] = tuple(_tally(part, name, is_length) for part in fields[name])
        if len(fields[name]) != number:
            raise Refused(f"{len(fields[name])} {name}, not {number}")

        if is_length and any(tally.count != fields["cases"] for tally in fields[name]):
            raise Refused(f"{name} of other than {fields['cases']} cases")

    if fields["volumes"].keys() != fields["classes"].keys():
        raise Refused("volumes of other classes")

    volumes = {}
    for value, part in fields["volumes"].items():
        volumes[int(value)] = part
        if isinstance(part, dict):
            volumes[int(value)] = _tally(part, f"volumes of class {value}", True)

    fields["volumes"] = volumes
    fields["classes"] = {int(value): name for value, name in fields["classes"].items()}
    fields["channel_names"] = tuple(fields["channel_names"])
    return Fingerprint(**fields)


def _tally(part: Config, name: str, is_length: bool) -> Tally:
    tally = Tally(**{**part, "cells": {int(cell): n for cell, n in part["cells"].items()}})
    if sum(tally.cells.values()) > tally.count:
        raise Refused(f"cells of {name} hold more than the count {tally.count}")

    # for n numbers the sum of squares is at least the squared sum / n, up to rounding
    if (
        tally.total**2 - 2 * abs(tally.total) * tally.count
        > (tally.squares + tally.count) * UNIT * tally.count
    ):
        raise Refused(f"total and squares of {name} are of no numbers")

    if is_length and tally.squares > 2500 * UNIT * tally.count:  # 50 squared, of log2
        raise Refused(f"squares of {name}: a length of 0 or without end")

    return tally
