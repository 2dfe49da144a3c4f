"""Randomly drawn partitions (`iid`, `dirichlet:BETA`, `classes:C`, `shots:N,K,STD`), and the deterministic `size`.

Each decision has its own random stream, so neither the order of the items nor another decision can change it. All
images of a patient or lesion (a group) are placed together.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfl.core import SECTIONS, Config, InputError, listed, map_values, not_among
from medfl.core.seeding import derive

Item = Config
Values = tuple[Any, ...]
"""Of a rule, by its kind: numbers, counts, limits of centres or a path."""
Sections = Mapping[str, Sequence[Item]]
"""Section -> its items."""
Homes = dict[str, list[str | None]]
"""Section -> the site of each item, None for no site."""

MAX_DRAWS = 100  # a rule that fails this often fails because of its numbers, not by chance


@dataclass(frozen=True)
class Rule:
    """A random rule: its kind and values, the number of sites, the class names and the seed."""

    kind: str
    values: Values
    sites: int
    names: tuple[str, ...]
    seed: int

    def stream(self, attempt: int, *path: str | int) -> np.random.Generator:
        """Return the random stream of one decision in one attempt."""
        return np.random.default_rng(derive(self.seed, "partition", self.kind, attempt, *path))


@dataclass(frozen=True)
class Group:
    """One patient or lesion in one section: its indices there by ascending id, and the label of the first."""

    key: str
    members: tuple[int, ...]
    label: int


@dataclass(frozen=True)
class Share:
    """How one class is divided: its owners, and the share of each (None: equal shares)."""

    owners: tuple[int, ...]
    parts: NDArray[np.float64] | None = None

    def sizes(self, count: int) -> NDArray[np.int64]:
        """Cut `count` items at the rounded cumulative shares; the last owner takes the rest."""
        if self.parts is None:
            number = len(self.owners)
            # the first owners take one more where it does not come out even
            return count // number + (np.arange(number) < count % number)
        cuts = np.rint(np.cumsum(self.parts)[:-1] * count).astype(np.int64)
        return np.diff(cuts, prepend=0, append=count)


Numbers = dict[str, list[int | None]]
"""The same with site numbers from 0."""
Drawn = tuple[Homes, list[str]]
"""The items' sites, and notes for the user."""


def draw(rule: Rule, data: Sections) -> Drawn:
    """Return the site of every item (None: no site) in each section, and notes for the user.

    Draws until no site is without training images, at most MAX_DRAWS times.

    Raises:
        InputError: the rule cannot be applied to these items.
    """
    groups = {}
    for name, section in data.items():
        groups[name] = gathered(section, by_label=rule.kind != "iid")

    for attempt in range(MAX_DRAWS):
        homes, notes = _draw_once(rule, attempt, data, groups)
        empty = sorted(set(range(rule.sites)) - set(homes["train"]))
        if not empty:
            if attempt:
                notes.insert(0, f"re-drawn {attempt} time{'s' * (attempt > 1)}: a site was empty")
            return named(homes), notes

    raise InputError(
        f"partition {canonical(rule.kind, rule.values)!r} over {rule.sites} sites left "
        f"{listed([f'site-{i + 1}' for i in empty])} without training images, like all of {MAX_DRAWS} draws",
        "every site needs at least one",
        "take fewer sites"
        + (", a larger BETA" if rule.kind == "dirichlet" else "")
        + " or another seed",
    )


def nowhere(data: Sections) -> Numbers:
    """Return items without a site."""
    return {name: [None] * len(section) for name, section in data.items()}


def settle(groups: Sequence[Group], placed: Mapping[str, int], homes: list[int | None]) -> None:
    """Assign the items of each group to the site of their group."""
    for group in groups:
        for i in group.members:
            homes[i] = placed[group.key]


def named(homes: Numbers) -> Homes:
    """Replace site numbers by names."""
    sites = {}
    for name, section in homes.items():
        sites[name] = [None if home is None else f"site-{home + 1}" for home in section]

    return sites


def by_size(count: int, data: Sections) -> Homes:
    """Return the site of every item: site-1 has the smallest images, each site equally many training images.

    Training groups are sorted by the size of their first image (then by key) and cut where the parts are most nearly
    equal. Other groups go where a training group of that size is; a group stays where its training images are.
    """
    order = sorted(
        gathered(data["train"], by_label=False), key=lambda g: (_pixels(data["train"], g), g.key)
    )
    counts = np.array([len(group.members) for group in order])
    ends = np.cumsum(counts)
    # A group belongs to the part that contains its middle image.
    middle = ends - counts / 2
    parts = np.minimum((middle * count / ends[-1]).astype(int), count - 1)
    placed = {group.key: int(part) for group, part in zip(order, parts, strict=True)}
    sizes = [_pixels(data["train"], group) for group in order]
    homes = nowhere(data)

    for name in SECTIONS:
        groups = gathered(data[name], by_label=False)
        for group in groups:
            # a group without training images goes to the site of images of its size
            near = min(bisect.bisect_left(sizes, _pixels(data[name], group)), len(sizes) - 1)
            placed.setdefault(group.key, int(parts[near]))

        settle(groups, placed, homes[name])

    return named(homes)


def _pixels(items: Sequence[Item], group: Group) -> int:
    return int(items[group.members[0]]["size"])


def _draw_once(
    rule: Rule,
    attempt: int,
    data: Sections,
    groups: Mapping[str, Sequence[Group]],
) -> tuple[Numbers, list[str]]:
    """Draw the shares and divide every section by them; a group placed in one section keeps its site in the next."""
    homes = nowhere(data)
    shares, shots = _shares(rule, attempt)
    placed: dict[str, int] = {}
    notes: list[str] = []

    for name in SECTIONS:
        tied = sum(len(group.members) for group in groups[name] if group.key in placed)
        by_class: dict[int, list[Group]] = {}
        for group in groups[name]:
            by_class.setdefault(group.label, []).append(group)

        for c in sorted(by_class.keys() & shares.keys()):
            rng = rule.stream(attempt, name, c)
            if not shots:
                divide(by_class[c], shares[c], rng, placed)
            elif name == "train":
                _take_shots(rule.names[c], by_class[c], shares[c], shots, rng, placed, homes[name])
            else:
                # What the scarcest class has for each owner: all classes of a site have as many.
                per_owner = []
                for k, share in shares.items():
                    per_owner.append(images_in(by_class.get(k, ())) // len(share.owners))

                limit = max(1, min(per_owner))
                divided = divide(by_class[c], shares[c], rng, placed)
                for owner, part in zip(shares[c].owners, divided, strict=True):
                    members = itertools.chain.from_iterable(group.members for group in part)
                    for i in itertools.islice(members, limit):
                        homes[name][i] = owner

        if not shots:
            settle(groups[name], placed, homes[name])
            if tied:
                notes.append(
                    f"{tied} {name} images follow their patient or lesion to the site of its other images"
                )
        elif left := homes[name].count(None):
            notes.append(f"{left} of {len(homes[name])} {name} images belong to no site")

    return homes, notes + _class_notes(rule, shares, data["train"], homes["train"])


def _shares(rule: Rule, attempt: int) -> tuple[dict[int, Share], tuple[int, ...]]:
    """Draw who owns which share of each class and, for `shots`, the images per class of each site (otherwise ())."""
    everybody = tuple(range(rule.sites))
    num_classes = len(rule.names)
    if rule.kind == "iid":
        return {0: Share(everybody)}, ()

    if rule.kind == "dirichlet":
        concentration = [rule.values[0]] * rule.sites
        streams = (rule.stream(attempt, "parts", c) for c in range(num_classes))
        parts = [rng.dirichlet(concentration) for rng in streams]
        # NaN, or parts that do not sum to 1, where BETA is too near to 0 or endless
        if not np.allclose(np.sum(parts, axis=1), 1):
            raise InputError(
                f"partition {canonical(rule.kind, rule.values)!r}",
                "a BETA that a Dirichlet distribution can be drawn with",
                "take BETA between 1e-3 and 1e6",
            )

        return {c: Share(everybody, part) for c, part in enumerate(parts)}, ()

    draw_classes = _classes_of_sites if rule.kind == "classes" else _ways_of_sites
    chosen, shots = draw_classes(rule, attempt)
    owners = {c: tuple(i for i in everybody if c in chosen[i]) for c in range(num_classes)}
    return {c: Share(sites) for c, sites in owners.items() if sites}, shots


def _classes_of_sites(rule: Rule, attempt: int) -> tuple[list[set[int]], tuple[int, ...]]:
    """FedMR: loop over sites and slots, deal each class once in order, then draw from those the site lacks."""
    size = rule.values[0]
    num_classes = len(rule.names)
    if size > num_classes:
        raise InputError(
            f"partition 'classes:{size}' of {num_classes} classes",
            f"C at most {num_classes}",
            "lower C",
        )
    if rule.sites * size < num_classes:
        raise InputError(
            f"partition 'classes:{size}' over {rule.sites} sites covers {rule.sites * size} classes",
            f"sites x C must reach all {num_classes} classes",
            f"take C of at least {math.ceil(num_classes / rule.sites)} or {math.ceil(num_classes / size)} sites",
        )

    rng = rule.stream(attempt, "owners")
    chosen = [set[int]() for _ in range(rule.sites)]
    dealt = 0
    for classes in chosen:
        for _ in range(size):
            if dealt < num_classes:
                classes.add(dealt)
                dealt += 1
            else:
                classes.add(int(rng.choice(not_among(range(num_classes), classes))))

    return chosen, ()


def _ways_of_sites(rule: Rule, attempt: int) -> tuple[list[set[int]], tuple[int, ...]]:
    """pFedPM: n_i from max(2, N-STD) to min(classes-1, N+STD) classes, k_i from K-STD+1 to K+STD images of each."""
    ways, shots, spread = rule.values
    num_classes = len(rule.names)
    low = max(2, ways - spread)
    high = min(num_classes - 1, ways + spread)
    if low > high:
        raise InputError(
            f"partition 'shots:{ways},{shots},{spread}' of {num_classes} classes",
            "a site holds at least 2 classes and lacks at least 1",
            "take N from 2 to the number of classes - 1, or another rule",
        )

    chosen = []
    quota = []
    for i in range(rule.sites):
        rng = rule.stream(attempt, "site", i)
        size = int(rng.integers(low, high, endpoint=True))
        # Nothing is drawn without a spread, so that the classes below use the same random numbers.
        if spread:
            least = max(1, shots - spread + 1)
            quota.append(int(rng.integers(least, shots + spread, endpoint=True)))
        else:
            quota.append(shots)

        chosen.append(set(map(int, rng.choice(num_classes, size, replace=False))))

    return chosen, tuple(quota)


def gathered(items: Sequence[Item], *, by_label: bool) -> list[Group]:
    """Collect the items of each group, groups and items in ascending order of id; labels are 0 unless `by_label`."""
    members: dict[str, list[int]] = {}
    for i in sorted(range(len(items)), key=lambda i: str(items[i]["id"])):
        members.setdefault(group_of(items[i]), []).append(i)

    groups = []
    for key, positions in members.items():
        label = int(items[positions[0]]["label"]) if by_label else 0
        groups.append(Group(key, tuple(positions), label))

    return groups


def divide(
    groups: Sequence[Group], share: Share, rng: np.random.Generator, owner_of: dict[str, int]
) -> list[list[Group]]:
    """Shuffle the groups of one class, cut them at the boundaries nearest to the shares, enter them in `owner_of`.

    Groups that have an owner keep it and count towards their site's share. Returns the groups of each owner.
    """
    before: dict[int, list[Group]] = {owner: [] for owner in share.owners}
    for group in groups:
        if owner_of.get(group.key) in before:
            before[owner_of[group.key]].append(group)

    result = [before[owner] for owner in share.owners]
    free = [group for group in groups if group.key not in owner_of]
    sizes = share.sizes(images_in(groups))
    if len(free) < len(groups) and free:
        # Owners that have images already are given so many fewer.
        missing = np.maximum(sizes - list(map(images_in, result)), 0)
        sizes = Share(share.owners, missing / missing.sum()).sizes(images_in(free))

    if not free:
        return result

    free = [free[i] for i in rng.permutation(len(free))]
    ends = np.cumsum([0, *(len(group.members) for group in free)])
    bounds = np.cumsum(sizes)[:-1]
    # A group is not divided: the part ends at the group boundary nearest to the requested one.
    above = np.searchsorted(ends, bounds).clip(1, len(ends) - 1)
    below = above - 1
    cuts = np.where(bounds - ends[below] <= ends[above] - bounds, below, above).tolist()

    for part, owner, start, stop in zip(
        result, share.owners, [0, *cuts], [*cuts, len(free)], strict=True
    ):
        part.extend(free[start:stop])
        owner_of.update((group.key, owner) for group in free[start:stop])

    return result


def _take_shots(
    name: str,
    groups: Sequence[Group],
    share: Share,
    shots: Sequence[int],
    rng: np.random.Generator,
    owner_of: dict[str, int],
    homes: list[int | None],
) -> None:
    """Give each owner the next block of its number of images; a group that a block ends in is not used further."""
    # reversed, because `pop` takes the last
    queue = [groups[i] for i in rng.permutation(len(groups))][::-1]
    for owner in share.owners:
        open_places = shots[owner]
        while open_places and queue:
            group = queue.pop()
            owner_of[group.key] = owner
            for i in group.members[:open_places]:
                homes[i] = owner

            open_places -= min(open_places, len(group.members))

        if open_places:
            raise InputError(
                f"the sites that drew class {name!r} need {sum(shots[i] for i in share.owners)} training images of it",
                f"there are {images_in(groups)}",
                "lower K, N or the number of sites",
            )


def _class_notes(
    rule: Rule, shares: Mapping[int, Share], train: Sequence[Item], homes: Sequence[int | None]
) -> list[str]:
    """Note classes that nobody drew, and sites that own a class but got none of its images because it is too small."""
    if rule.kind not in ("classes", "shots"):
        return []

    notes = []
    trained = set()
    for home, item in zip(homes, train, strict=True):
        trained.add((home, int(item["label"])))

    if unused := [rule.names[c] for c in range(len(rule.names)) if c not in shares]:
        notes.append(f"drawn by no site: {listed(unused)}")

    for c, share in shares.items():
        if sites := [f"site-{i + 1}" for i in share.owners if (i, c) not in trained]:
            notes.append(f"too few images of {rule.names[c]!r} for {listed(sites)}")

    return notes


def group_of(item: Item) -> str:
    """Return the patient or lesion of an item, or its id if unknown."""
    return str(item.get("group") or item["id"])


def images_in(groups: Sequence[Group]) -> int:
    """Return the number of images in groups."""
    return sum(len(group.members) for group in groups)


def homeless(homes: Mapping[str, Sequence[str | None]]) -> str:
    """Describe how many images of each section have no site, "" if all have one."""
    return listed([f"{homes[name].count(None)} {name}" for name in SECTIONS if None in homes[name]])


def canonical(kind: str, values: Values) -> str:
    """Write a rule so that equal rules read equal (`dirichlet:.10` as `dirichlet:0.1`)."""
    texts = []
    for v in values:
        texts.append(repr(v).removesuffix(".0") if isinstance(v, float) else str(v))
    return kind + (":" if texts else "") + ",".join(texts)


# Partitions with given counts: `counts:TRAIN/TEST,...`, and centres reduced to such counts
#
# TRAIN is the number of a site's training and validation images together, which every site has in the proportion of
# the data; TEST is the number of its test images. Each section is divided separately, with the same class proportions
# at every site. An image never leaves its section: counts that require other sections than the data set's need
# another split.

_Stream = Callable[[str, int], np.random.Generator]
ALL = "all"
_KINDS = {"train": "training and validation", "test": "test"}


@dataclass(frozen=True)
class Count:
    """Number of images of a site: for training and validation (0: test only), and for testing (None: all)."""

    train: int
    test: int | None

    def __str__(self) -> str:
        return f"{self.train}/{ALL if self.test is None else self.test}"


@dataclass(frozen=True)
class Limit:
    """Number of images kept from a centre."""

    centre: str
    count: Count

    def __str__(self) -> str:
        return f"{self.centre}={self.count}"


def read_count(text: str) -> Count:
    """Parse TRAIN/TEST, or TRAIN/all; anything else is a ValueError."""
    train, test = text.split("/")
    count = Count(int(train), None if test.strip() == ALL else int(test))
    if min(count.train, count.test or 0) < 0 or not (count.train or count.test != 0):
        raise ValueError(text)

    return count


def read_limits(texts: Sequence[str]) -> tuple[Limit, ...]:
    """Parse NAME=TRAIN/TEST of several centres; anything else, or a duplicate centre, is a ValueError."""
    limits = []
    for text in texts:
        centre, _, count = text.rpartition("=")
        limits.append(Limit(centre.strip(), read_count(count)))

    centres = {limit.centre for limit in limits}
    if "" in centres or len(centres) < len(limits):
        raise ValueError(texts)

    return tuple(limits)


def by_counts(rule: Rule, data: Sections) -> Drawn:
    """Return the site of every item (None: no site) in each section, and notes for the user.

    If there are too few images, site-1 gets fewer, by at most a tenth of its own; beyond that all sites are
    scaled equally.
    """
    sites = [f"site-{i + 1}" for i in range(len(rule.values))]
    homes, notes = _divide(data, sites, rule.values, partial(rule.stream, 0))
    if left_out := homeless(homes):
        notes.append(f"images that belong to no site: {left_out}")
    return homes, notes


def check_centre(limit: Limit, centres: Iterable[str]) -> None:
    """Raise an InputError if a limit's centre has no training images."""
    names = sorted({*centres})
    if limit.centre not in names:
        raise InputError(
            f"{str(limit)!r} in partition 'centre', but no training image is of centre {limit.centre!r}",
            f"the centres are {listed(names, len(names))}",
            "name one of these",
        )


def limit_centres(limits: Sequence[Limit], data: Sections, homes: Homes) -> Drawn:
    """Return the sites by centre with limited centres reduced to their counts, and notes for the user.

    The kept images depend only on the centre and the count, not on the seed of a run, as for other centres.

    Raises:
        InputError: a centre has no training images.
    """
    result = map_values(list, homes)
    notes = []
    for limit in limits:
        positions = {}
        for name, section in homes.items():
            positions[name] = [i for i, home in enumerate(section) if home == limit.centre]

        check_centre(limit, filter(None, homes["train"]))
        stream = _fixed(limit)
        images = {}
        for name, indices in positions.items():
            images[name] = [data[name][i] for i in indices]

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
) -> Drawn:
    """Divide every section by the counts; a group placed in one section keeps its site in the next."""
    available = {"train": len(data["train"]) + len(data["validate"]), "test": len(data["test"])}
    fitted = {}
    notes = []
    for kind, number in available.items():
        requested = []
        for count in counts:
            requested.append(
                number if count.test is None and kind == "test" else getattr(count, kind)
            )

        fitted[kind], more_notes = _feasible(requested, number, sites, kind)
        notes += more_notes

    # Validation images are part of TRAIN, in the proportion of the data.
    validate = [0] * len(sites)
    if sum(fitted["train"]):
        validated = round(sum(fitted["train"]) * len(data["validate"]) / available["train"])
        most = np.maximum(np.array(fitted["train"]) - 1, 0)  # one stays for training
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
            # Groups without a site are numbered after the last site.
            for i in group.members if site < len(sites) else ():
                homes[name][i] = sites[site]
            # A site that only tests may take them, also if test images are those to validate.
            if site == len(sites) and 0 in fitted["train"]:
                del site_of_group[group.key]

    return homes, notes + _count_notes(homes, sites, fitted)


def _feasible(
    requested: Sequence[int], available: int, sites: Sequence[str], kind: str
) -> tuple[list[int], list[str]]:
    """Return counts that the images suffice for, and notes on how they were changed."""
    short = sum(requested) - available
    if short <= 0:
        return list(requested), []

    # up to a tenth less is the first site's alone, so that the others are as asked for
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
    sizes = map_values(Counter, homes)
    lines = []
    for site, train, test in zip(sites, fitted["train"], fitted["test"], strict=True):
        actual = Count(sizes["train"][site] + sizes["validate"][site], sizes["test"][site])
        if actual != Count(train, test):
            lines.append(f"{site} has {actual} instead of {Count(train, test)}")

    if lines:
        return [f"patients or lesions stay together, so {listed(lines, len(lines))}"]

    return []


def apportion(weights: Sequence[int], total: int, *, least: int = 0) -> list[int]:
    """Divide `total` in proportion to integer weights: rounded down, the rest to the largest remainders.

    The share of a positive weight is raised to `least`, at the cost of the largest.
    """
    weight_sum = max(1, sum(weights))
    parts = [weight * total // weight_sum for weight in weights]
    # The largest remainder first, then the first site.
    order = sorted(range(len(weights)), key=lambda i: (-(weights[i] * total % weight_sum), i))
    for i in order[: total - sum(parts)]:
        parts[i] += 1

    # nobody has fewer than the least while somebody has more
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
    """Enter the owner of every group in `owners`: an index into `wanted`, or its length for no owner.

    Class by class, shuffled and largest groups first, each group goes to the owner furthest below its share of the
    images dealt so far. With one image per group every owner has exactly what it wants and nearly its share of each
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
            # The owner furthest below its share of all images dealt so far.
            owner = max(range(len(shares)), key=lambda i: shares[i] * done - dealt[i] * size)
            dealt[owner] += len(group.members)
            owners[group.key] = owner
