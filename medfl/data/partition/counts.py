"""Partitions with given counts: `counts:TRAIN/TEST,...`, and centres that are cut to such counts.

TRAIN counts a site's training and validation images together, which every site has in the shares of the data; TEST
counts its test images. Each section is divided on its own and its classes are in the same shares at every site. An
image never leaves its section: counts that need other sections than the data set's split has need another split.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from medfl.core.errors import InputError
from medfl.core.names import listed
from medfl.core.seeding import derive
from medfl.core.task import SECTIONS
from medfl.data.partition.draw import Group, Homes, Rule, Sections, gathered, homeless, images_in

_Stream = Callable[[str, int], np.random.Generator]
ALL = "all"
_KINDS = {"train": "training and validation", "test": "test"}


@dataclass(frozen=True)
class Count:
    """How many images a site has: for training and validation, 0 of one that only tests, and to test, None for all."""

    train: int
    test: int | None

    def __str__(self) -> str:
        return f"{self.train}/{ALL if self.test is None else self.test}"


@dataclass(frozen=True)
class Limit:
    """How many images of a centre are kept."""

    centre: str
    count: Count

    def __str__(self) -> str:
        return f"{self.centre}={self.count}"


def read_count(text: str) -> Count:
    """Read TRAIN/TEST, or TRAIN/all; anything else is a ValueError."""
    train, test = text.split("/")
    count = Count(int(train), None if test.strip() == ALL else int(test))
    if min(count.train, count.test or 0) < 0 or not (count.train or count.test != 0):
        raise ValueError(text)

    return count


def read_limits(texts: Sequence[str]) -> tuple[Limit, ...]:
    """Read NAME=TRAIN/TEST of several centres; anything else, or a centre twice, is a ValueError."""
    limits = []
    for text in texts:
        centre, _, count = text.rpartition("=")
        limits.append(Limit(centre.strip(), read_count(count)))

    centres = {limit.centre for limit in limits}
    if "" in centres or len(centres) < len(limits):
        raise ValueError(texts)

    return tuple(limits)


def by_counts(rule: Rule, data: Sections) -> tuple[Homes, list[str]]:
    """Return the site of every item (None: no site) in each section, and notes for the user.

    Where there are too few images, site-1 goes short if a tenth of its own at most is missing; else all sites are
    scaled alike.
    """
    sites = [f"site-{i + 1}" for i in range(len(rule.values))]
    homes, notes = _divide(data, sites, rule.values, partial(rule.stream, 0))
    if left_out := homeless(homes):
        notes.append(f"images that belong to no site: {left_out}")
    return homes, notes


def limit_centres(limits: Sequence[Limit], data: Sections, homes: Homes) -> tuple[Homes, list[str]]:
    """Return the homes by centre with only so many images of the limited centres, and notes for the user.

    Which images are kept depends on the centre and the count alone, not on the seed of a run, as other centres do not.

    Raises:
        InputError: a centre has no training images.
    """
    result = {name: list(section) for name, section in homes.items()}
    notes = []
    for limit in limits:
        positions = {}
        for name, section in homes.items():
            positions[name] = [i for i, home in enumerate(section) if home == limit.centre]

        if not positions["train"]:
            centres = sorted({home for home in homes["train"] if home})
            raise InputError(
                f"{str(limit)!r} in partition 'centre', but no training image is of centre {limit.centre!r}",
                f"the centres are {listed(centres, len(centres))}",
                "name one of these",
            )

        stream = _fixed(limit)
        images = {name: [data[name][i] for i in indices] for name, indices in positions.items()}
        limited, more_notes = _divide(images, [limit.centre], [limit.count], stream)
        notes += more_notes

        for name, indices in positions.items():
            for i, home in zip(indices, limited[name], strict=True):
                result[name][i] = home

        left_out = []
        for name, part in limited.items():
            if None in part:
                left_out.append(f"{part.count(None)} of {len(part)} {name}")

        if left_out:
            notes.append(f"images of {limit.centre} that are left out: {listed(left_out)}")

    return result, notes


def _fixed(limit: Limit) -> _Stream:
    return lambda section, label: np.random.default_rng(
        derive(0, "partition", str(limit), section, label)
    )


def _divide(
    data: Sections, sites: Sequence[str], counts: Sequence[Count], stream: _Stream
) -> tuple[Homes, list[str]]:
    """Divide every section by the counts; a group placed in one section keeps its site in the next."""
    available = {"train": len(data["train"]) + len(data["validate"]), "test": len(data["test"])}
    fitted = {}
    notes = []
    for kind, number in available.items():
        requested = [
            number if count.test is None and kind == "test" else getattr(count, kind)
            for count in counts
        ]
        fitted[kind], more_notes = _feasible(requested, number, sites, kind)
        notes += more_notes

    # Validation images come out of TRAIN, in the share that the data have of them.
    validate = [0] * len(sites)
    if sum(fitted["train"]):
        validated = round(sum(fitted["train"]) * len(data["validate"]) / available["train"])
        most = np.maximum(np.array(fitted["train"]) - 1, 0)
        validate = np.minimum(apportion(fitted["train"], validated), most).tolist()

    train = np.subtract(fitted["train"], validate).tolist()
    sizes = {"train": train, "validate": validate, "test": fitted["test"]}

    items = itertools.chain.from_iterable(data.values())
    labelled = all(item.get("label") is not None for item in items)
    homes: Homes = {}
    site_of_group: dict[str, int] = {}

    for name in SECTIONS:
        groups = gathered(data[name], by_label=labelled)
        deal(groups, sizes[name], partial(stream, name), site_of_group)
        homes[name] = [None] * len(data[name])
        for group in groups:
            site = site_of_group[group.key]
            # Nobody's groups are numbered after the last site.
            for i in group.members if site < len(sites) else ():
                homes[name][i] = sites[site]

    return homes, notes + _count_notes(homes, sites, fitted)


def _feasible(
    requested: Sequence[int], available: int, sites: Sequence[str], kind: str
) -> tuple[list[int], list[str]]:
    """Return counts that the images suffice for, and what was done to make them so."""
    short = sum(requested) - available
    if short <= 0:
        return list(requested), []

    if 10 * short <= requested[0] or len(requested) == 1:
        counts = [requested[0] - short, *requested[1:]]
        change = f"{sites[0]} has {requested[0] - short} instead of {requested[0]}"
    else:
        counts = apportion(requested, available, least=kind == "train")
        change = f"all sites have {available / sum(requested):.3g} of what was asked"

    return counts, [
        f"{sum(requested)} {_KINDS[kind]} images were asked for and there are {available}: {change}"
    ]


def _count_notes(
    homes: Homes, sites: Sequence[str], fitted: Mapping[str, Sequence[int]]
) -> list[str]:
    """Note the sites whose counts were not reached, as groups are not divided."""
    sizes = {name: Counter(section) for name, section in homes.items()}
    lines = []
    for site, train, test in zip(sites, fitted["train"], fitted["test"], strict=True):
        actual = Count(sizes["train"][site] + sizes["validate"][site], sizes["test"][site])
        if actual != Count(train, test):
            lines.append(f"{site} has {actual} instead of {Count(train, test)}")

    if lines:
        return [f"patients or lesions stay together, so {listed(lines, len(lines))}"]

    return []


def apportion(weights: Sequence[int], total: int, *, least: int = 0) -> list[int]:
    """Divide `total` in proportion to whole weights: the rounded-down parts, the rest to the largest remainders.

    A part of a weight above 0 is raised to `least`, at the cost of the largest.
    """
    weight_sum = max(1, sum(weights))
    parts = [weight * total // weight_sum for weight in weights]
    # The largest remainder first, of equal ones the first site.
    order = sorted(range(len(weights)), key=lambda i: (-(weights[i] * total % weight_sum), i))
    for i in order[: total - sum(parts)]:
        parts[i] += 1

    for i, weight in enumerate(weights):
        while parts[i] < min(least, weight) and max(parts) > least:
            parts[parts.index(max(parts))] -= 1
            parts[i] += 1

    return parts


def deal(
    groups: Sequence[Group],
    wanted: Sequence[int],
    stream: Callable[[int], np.random.Generator],
    owners: dict[str, int],
) -> None:
    """Enter the owner of every group in `owners`: a position in `wanted`, or its length for nobody.

    Class after class, shuffled and the largest groups first, each group goes where most is missing of the owner's part
    of the images dealt so far. With one image a group every owner has exactly what it wants and nearly its part of each
    class. Groups that have an owner keep it, and count.
    """
    shares = [*wanted, max(0, images_in(groups) - sum(wanted))]
    for group in groups:
        if group.key in owners:
            shares[owners[group.key]] -= len(group.members)

    free = [group for group in groups if group.key not in owners]
    size = images_in(free)
    done = 0
    dealt = [0] * len(shares)
    shares = apportion([max(0, share) for share in shares], size)

    for label in sorted({group.label for group in free}):
        same_class = [group for group in free if group.label == label]
        order = stream(label).permutation(len(same_class))
        for group in sorted((same_class[i] for i in order), key=lambda group: -len(group.members)):
            done += len(group.members)
            # To whom most is missing of the part of all images dealt so far.
            owner = max(range(len(shares)), key=lambda i: shares[i] * done - dealt[i] * size)
            dealt[owner] += len(group.members)
            owners[group.key] = owner
