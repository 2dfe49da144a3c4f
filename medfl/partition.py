"""Partitions: which site holds which image.

Rules: `iid`, `dirichlet:BETA` (per class, as FedBM and FedCB), `classes:C` (C classes a site, FedMR's PρCς),
`shots:N,K,STD` (n-way k-shot, pFedPM), `centre` (the real hospitals) and `file:PATH.csv`. Validation and test images
follow the rule that the training images were divided by, so a site is judged on its own mixture of classes.

Departures from the papers: images of one group (patient or lesion) stay at one site, also across sections, so cuts move
to the nearest group boundary (with one image a group the papers' cuts are kept exactly). FedMR's released code hands
every image out twice, this does not. pFedPM's blocks of fixed length become consecutive blocks, STD 0 means exactly K
images a class, and a site's validation and test images are equally many in each of its classes.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfl import partition_plot
from medfl.errors import InputError
from medfl.seeding import derive

Item = Mapping[str, Any]
Sections = Mapping[str, Sequence[Item]]

SECTIONS = ("train", "validate", "test")
FORMS = "iid | dirichlet:BETA | classes:C | shots:N,K,STD | centre | file:PATH.csv"
MAX_DRAWS = 100


@dataclass(frozen=True)
class Partition:
    """Which items each site holds.

    `sites` maps a site's name, in natural order, to the ascending positions of its items in each of the three sections.
    `notes` are remarks for the user (re-draws, images left out). Build one with `assign`.
    """

    spec: str
    seed: int
    sites: Mapping[str, Mapping[str, tuple[int, ...]]]
    notes: tuple[str, ...] = ()

    def counts(self, sections: Sections, num_classes: int, section: str = "train") -> dict[str, list[int]]:
        """Return the items of each class at each site in one section; items without a label are not counted."""
        result = {}
        for site, held in self.sites.items():
            labels = Counter(sections[section][i].get("label") for i in held[section]) if held[section] else Counter()
            result[site] = [labels[c] for c in range(num_classes)]
        return result

    def table(self, sections: Sections, classes: Sequence[str] | None) -> str:
        """Return a text table of at most 100 columns: training images per site and class, size of each section."""
        return partition_plot.table(self, sections, classes)

    def to_ids(self, sections: Sections) -> dict[str, dict[str, list[str]]]:
        """Return the item ids per site and section, ready for JSON."""
        return {
            site: {name: [str(sections[name][i]["id"]) for i in positions] for name, positions in held.items()}
            for site, held in self.sites.items()
        }

    @classmethod
    def from_ids(
        cls,
        ids: Mapping[str, Mapping[str, Sequence[str]]],
        sections: Sections,
        *,
        spec: str,
        seed: int,
        notes: Sequence[str] = (),
    ) -> Partition:
        """Undo `to_ids`.

        Raises:
            InputError: an id is not in its section any more.
        """
        where = {name: {str(item["id"]): i for i, item in enumerate(sections.get(name, ()))} for name in SECTIONS}
        sites = {}
        for site in sorted(ids, key=natural):
            gone = [
                f"{i!r} ({name})" for name in SECTIONS for i in ids[site].get(name, ()) if str(i) not in where[name]
            ]
            if gone:
                raise InputError(
                    f"{len(gone)} image(s) that the stored partition gives to site {site!r} are gone, first {gone[0]}",
                    "every stored id must be in the same section of the data",
                    "give the data folder and split of the stored run, or start a new run",
                )
            sites[site] = {n: tuple(sorted(where[n][str(i)] for i in ids[site].get(n, ()))) for n in SECTIONS}
        return cls(spec, seed, sites, tuple(notes))


def assign(spec: str, sections: Sections, *, sites: int | None, classes: Sequence[str] | None, seed: int) -> Partition:
    """Divide the items of the sections `train`, `validate` and `test` (missing ones count as empty) over sites.

    Args:
        spec: one of `FORMS`.
        sections: data list entries with `id` and, where known, `label` (from 0), `centre` and `group`.
        sites: number of sites; may be None for `centre` and `file:`, and must otherwise agree with them.
        classes: class names in label order; None takes the labels as they come.
        seed: every draw has its own stream under this seed; the order of the items does not matter.

    Raises:
        InputError: the rule is unknown or cannot be carried out on these items.
    """
    kind, values = parse(spec)
    data = {name: list(sections.get(name, ())) for name in SECTIONS}
    _check_ids(data)
    names = _check_labels(data, classes, spec, required=kind in ("dirichlet", "classes", "shots"))
    if kind in ("centre", "file"):
        homes, notes = _by_centre(data) if kind == "centre" else _by_file(values[0], data)
        order = sorted({home for section in homes.values() for home in section if home}, key=natural)
        if sites is not None and sites != len(order):
            raise InputError(
                f"{sites} sites with partition {spec!r}",
                f"it has {len(order)}: {_listed(order)}",
                "leave the number of sites out or make it agree",
            )
        _check_trained(spec, order, homes["train"])
    else:
        count = _check_sites(spec, sites, data["train"])
        homes, notes = _drawn(_Draw(kind, values, count, names, seed), data)
        order = [f"site-{i + 1}" for i in range(count)]
    held: dict[str, dict[str, list[int]]] = {site: {name: [] for name in SECTIONS} for site in order}
    for name, section in homes.items():
        for i, home in enumerate(section):
            if home:
                held[home][name].append(i)
    frozen = {site: {name: tuple(positions) for name, positions in parts.items()} for site, parts in held.items()}
    return Partition(_canonical(kind, values), seed, frozen, tuple(notes))


def parse(spec: str) -> tuple[str, tuple[Any, ...]]:
    """Split a partition's text into its kind and its values, e.g. `shots:3,100,2` into ("shots", (3, 100, 2)).

    Raises:
        InputError: unknown kind, or values of the wrong number, type or range.
    """
    kind, colon, text = spec.strip().partition(":")
    fields = text.split(",")
    try:
        if kind in ("iid", "centre") and not colon:
            return kind, ()
        if kind == "file" and text.strip():
            return kind, (text.strip(),)
        if kind == "dirichlet" and len(fields) == 1 and 0 < (beta := float(text)) < math.inf:
            return kind, (beta,)
        if kind == "classes" and len(fields) == 1 and (size := int(text)) >= 1:
            return kind, (size,)
        if kind == "shots" and len(fields) == 3:
            ways, shots, spread = (int(field) for field in fields)
            if ways >= 1 and shots >= 1 and spread >= 0:
                return kind, (ways, shots, spread)
    except ValueError:
        pass  # a field is not a number: told below, like a number out of range
    raise InputError(
        f"partition {spec!r}",
        f"allowed: {FORMS}",
        "give BETA as a number above 0, C, N and K as whole numbers from 1, STD as a whole number from 0",
    )


def natural(name: str) -> tuple[Any, ...]:
    """Return a sort key that puts site-2 before site-10."""
    return tuple((1, int(part), part) if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name) if part)


# Checks


def _check_ids(data: Mapping[str, Sequence[Item]]) -> None:
    for name, items in data.items():
        repeated = [i for i, n in Counter(str(item["id"]) for item in items).items() if n > 1]
        if repeated:
            raise InputError(
                f"id {repeated[0]!r} stands for several images of section {name!r}",
                "every image needs its own id",
                "make the ids of the data list unique",
            )


def _check_labels(
    data: Mapping[str, Sequence[Item]], classes: Sequence[str] | None, spec: str, *, required: bool
) -> tuple[str, ...]:
    """Check every label and return the class names; () when no item has a label."""
    items = [item for section in data.values() for item in section]
    labelled = [item for item in items if item.get("label") is not None]
    if required and len(labelled) < len(items):
        bare = [item["id"] for item in items if item.get("label") is None]
        raise InputError(
            f"partition {spec!r}, but {len(bare)} of {len(items)} images have no class label, first {bare[0]!r}",
            "this rule divides by class",
            "use iid, centre or file:PATH.csv, or label the images",
        )
    for item in labelled:
        label, limit = item["label"], math.inf if classes is None else len(classes)
        if not isinstance(label, int | np.integer) or isinstance(label, bool) or not 0 <= label < limit:
            raise InputError(
                f"image {item['id']!r} has label {label!r}",
                "labels are whole numbers from 0" + ("" if classes is None else f" to {limit - 1}"),
                "correct the label or add the class",
            )
    seen = {int(item["label"]) for item in data["train"] if item.get("label") is not None}
    if not labelled:
        return ()
    if classes is None:
        classes = [f"class {c}" for c in range(max(int(item["label"]) for item in labelled) + 1)]
    absent = [f"{name!r} (label {c})" for c, name in enumerate(classes) if c not in seen]
    if absent:
        raise InputError(
            f"no training image of class {_listed(absent)}",
            "every class needs at least one training image",
            "check the data folder and the split, or remove the class from the bundle",
        )
    return tuple(classes)


def _check_sites(spec: str, sites: int | None, train: Sequence[Item]) -> int:
    groups = len({_group(item) for item in train})
    if sites is None or sites < 1:
        given = "without a number of sites" if sites is None else f"over {sites} sites"
        raise InputError(f"partition {spec!r} {given}", "at least 1 site", "give the number of sites with --sites")
    if sites > groups:
        kept = "" if groups == len(train) else f" in {groups} groups (patients or lesions) that stay together"
        raise InputError(
            f"{sites} sites for {len(train)} training images{kept}",
            f"at most {groups} sites",
            "lower --sites or give more data",
        )
    return sites


def _check_trained(spec: str, order: Sequence[str], train: Sequence[str | None]) -> None:
    idle = sorted(set(order) - set(train), key=natural)
    if idle or not order:
        raise InputError(
            f"partition {spec!r} leaves {_listed(idle) or 'everybody'} without training images",
            "every site needs at least one",
            "give the site training images or leave it out",
        )


# Rules that read the answer


def _by_centre(data: Mapping[str, Sequence[Item]]) -> tuple[dict[str, list[str | None]], list[str]]:
    items = [item for section in data.values() for item in section]
    bare = [item for item in items if not item.get("centre")]
    if bare or not items:
        first = f", first {bare[0]['id']!r}" if bare else ""
        raise InputError(
            f"partition 'centre', but {len(bare)} of {len(items)} images name no centre{first}",
            "every image must carry the centre it was taken at",
            "use iid, dirichlet:BETA, classes:C, shots:N,K,STD or file:PATH.csv",
        )
    return {name: [str(item["centre"]) for item in section] for name, section in data.items()}, []


def _by_file(path: str, data: Mapping[str, Sequence[Item]]) -> tuple[dict[str, list[str | None]], list[str]]:
    where = {name: {str(item["id"]): i for i, item in enumerate(section)} for name, section in data.items()}
    homes: dict[str, list[str | None]] = {name: [None] * len(section) for name, section in data.items()}
    for line, row in _rows(path):
        key, site, section = ((row.get(column) or "").strip() for column in ("id", "site", "section"))
        if not site or not site.isprintable() or set(site) & set("/\\"):
            raise InputError(f"{path}, line {line}: site {site!r}", "a name without slashes", "name this image's site")
        if section and section not in SECTIONS:
            allowed = f"allowed: {', '.join(SECTIONS)} or nothing"
            raise InputError(f"{path}, line {line}: section {section!r}", allowed, "correct the line")
        found = [name for name in ([section] if section else SECTIONS) if key in where[name]]
        if not found:
            raise InputError(
                f"{path}, line {line}: id {key!r} is unknown" + (f" in section {section!r}" if section else ""),
                "ids of the data set's images",
                "correct or remove the line",
            )
        for name in found:
            if homes[name][where[name][key]] not in (None, site):
                given = f"{path}, line {line}: id {key!r} has a second site"
                raise InputError(given, "one site an image", "remove one of the lines")
            homes[name][where[name][key]] = site
    left = {name: homes[name].count(None) for name in SECTIONS if None in homes[name]}
    notes = [f"not in the file and left out: {_listed([f'{n} {name}' for name, n in left.items()])}"] if left else []
    return homes, notes


def _rows(path: str) -> list[tuple[int, dict[str, str | None]]]:
    """Read the partition file as (line number, row)."""
    advice = "write a CSV file with the columns id,site and, if wanted, section"
    try:
        with Path(path).expanduser().open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, ValueError, RuntimeError, csv.Error) as error:  # also bytes that are not text, and ~nobody
        reason = error.strerror if isinstance(error, OSError) else "no readable text"
        raise InputError(f"partition file {path!r}: {reason}", "a readable CSV file", advice) from error
    missing = [column for column in ("id", "site") if column not in (reader.fieldnames or ())]
    if missing:
        raise InputError(
            f"partition file {path!r} has no column {' or '.join(missing)}",
            f"it has {', '.join(reader.fieldnames or ()) or 'none'}",
            advice,
        )
    return rows


# Rules that draw


@dataclass(frozen=True)
class _Draw:
    """A rule that draws: its kind and values, the number of sites, the class names and the seed."""

    kind: str
    values: tuple[Any, ...]
    sites: int
    names: tuple[str, ...]
    seed: int

    def stream(self, attempt: int, *path: str | int) -> np.random.Generator:
        return np.random.default_rng(derive(self.seed, "partition", self.kind, attempt, *path))


@dataclass(frozen=True)
class _Group:
    """One patient or lesion in one section: its positions there by ascending id, and the label of the first."""

    key: str
    members: tuple[int, ...]
    label: int


@dataclass(frozen=True)
class _Share:
    """How one class is divided: its owners, and the part of each (None: equal parts)."""

    owners: tuple[int, ...]
    parts: NDArray[np.float64] | None = None

    def sizes(self, count: int) -> NDArray[np.int64]:
        """Cut `count` items at the rounded cumulative parts; the last owner takes the rest."""
        if self.parts is None:
            return np.array([len(part) for part in np.array_split(np.arange(count), len(self.owners))], dtype=np.int64)
        cuts = np.rint(np.cumsum(self.parts)[:-1] * count).astype(np.int64)
        return np.diff(cuts, prepend=0, append=count)


_Homes = dict[str, list[int | None]]


def _drawn(draw: _Draw, data: Mapping[str, Sequence[Item]]) -> tuple[dict[str, list[str | None]], list[str]]:
    """Draw until no site is without training images, at most MAX_DRAWS times."""
    groups = {name: _groups(section, by_label=draw.kind != "iid") for name, section in data.items()}
    for attempt in range(MAX_DRAWS):
        homes, notes = _once(draw, attempt, data, groups)
        empty = sorted(set(range(draw.sites)) - set(homes["train"]))
        if not empty:
            if attempt:
                notes.insert(0, f"re-drawn {attempt} time{'s' * (attempt > 1)}: a site was empty")
            return {name: [None if i is None else f"site-{i + 1}" for i in h] for name, h in homes.items()}, notes
    raise InputError(
        f"partition {_canonical(draw.kind, draw.values)!r} over {draw.sites} sites left "
        f"{_listed([f'site-{i + 1}' for i in empty])} without training images, like all of {MAX_DRAWS} draws",
        "every site needs at least one",
        "take fewer sites" + (", a larger BETA" if draw.kind == "dirichlet" else "") + " or another seed",
    )


def _once(
    draw: _Draw, attempt: int, data: Mapping[str, Sequence[Item]], groups: Mapping[str, Sequence[_Group]]
) -> tuple[_Homes, list[str]]:
    """Draw the shares and divide every section by them; a group placed in one section keeps its site in the next."""
    homes: _Homes = {name: [None] * len(section) for name, section in data.items()}
    shares, shots = _shares(draw, attempt)
    placed: dict[str, int] = {}
    notes: list[str] = []
    for name in SECTIONS:
        tied = sum(len(group.members) for group in groups[name] if group.key in placed)
        by_class: dict[int, list[_Group]] = {}
        for group in groups[name]:
            by_class.setdefault(group.label, []).append(group)
        for c in sorted(by_class.keys() & shares.keys()):
            rng = draw.stream(attempt, name, c)
            if not shots:
                _divide(by_class[c], shares[c], rng, placed)
            elif name == "train":
                _take_shots(draw.names[c], by_class[c], shares[c], shots, rng, placed, homes[name])
            else:
                limit = max(1, min(_size(by_class.get(k, ())) // len(shares[k].owners) for k in shares))
                for owner, part in zip(shares[c].owners, _divide(by_class[c], shares[c], rng, placed), strict=True):
                    for i in [i for group in part for i in group.members][:limit]:
                        homes[name][i] = owner
        if not shots:
            for group in groups[name]:
                for i in group.members:
                    homes[name][i] = placed[group.key]
            if tied:
                notes.append(f"{tied} {name} images follow their patient or lesion to the site of its other images")
        elif left := homes[name].count(None):
            notes.append(f"{left} of {len(homes[name])} {name} images belong to no site")
    return homes, notes + _lacking(draw, shares, data["train"], homes["train"])


def _shares(draw: _Draw, attempt: int) -> tuple[dict[int, _Share], tuple[int, ...]]:
    """Draw who owns which part of each class and, for `shots`, the images a class of each site (otherwise ())."""
    everybody, num_classes = tuple(range(draw.sites)), len(draw.names)
    if draw.kind == "iid":
        return {0: _Share(everybody)}, ()
    if draw.kind == "dirichlet":
        parts = [draw.stream(attempt, "parts", c).dirichlet([draw.values[0]] * draw.sites) for c in range(num_classes)]
        if not np.allclose(np.sum(parts, axis=1), 1):
            raise InputError(
                f"partition {_canonical(draw.kind, draw.values)!r}",
                "a BETA that a Dirichlet distribution can be drawn with",
                "take BETA between 1e-3 and 1e6",
            )
        return {c: _Share(everybody, part) for c, part in enumerate(parts)}, ()
    chosen, shots = _classes_of_sites(draw, attempt) if draw.kind == "classes" else _ways_of_sites(draw, attempt)
    owners = {c: tuple(i for i in everybody if c in chosen[i]) for c in range(num_classes)}
    return {c: _Share(sites) for c, sites in owners.items() if sites}, shots


def _classes_of_sites(draw: _Draw, attempt: int) -> tuple[list[set[int]], tuple[int, ...]]:
    """FedMR: walk over sites and slots, deal each class once in order, then draw from those the site lacks."""
    size, num_classes = draw.values[0], len(draw.names)
    if size > num_classes:
        raise InputError(f"partition 'classes:{size}' of {num_classes} classes", f"C at most {num_classes}", "lower C")
    if draw.sites * size < num_classes:
        raise InputError(
            f"partition 'classes:{size}' over {draw.sites} sites covers {draw.sites * size} classes",
            f"sites x C must reach all {num_classes} classes",
            f"take C of at least {math.ceil(num_classes / draw.sites)} or {math.ceil(num_classes / size)} sites",
        )
    rng, chosen, dealt = draw.stream(attempt, "owners"), [set[int]() for _ in range(draw.sites)], 0
    for own in chosen:
        for _ in range(size):
            if dealt < num_classes:
                own.add(dealt)
                dealt += 1
            else:
                own.add(int(rng.choice([c for c in range(num_classes) if c not in own])))
    return chosen, ()


def _ways_of_sites(draw: _Draw, attempt: int) -> tuple[list[set[int]], tuple[int, ...]]:
    """pFedPM: n_i from max(2, N-STD) to min(classes-1, N+STD) classes, k_i from K-STD+1 to K+STD images of each."""
    (ways, shots, spread), num_classes = draw.values, len(draw.names)
    low, high = max(2, ways - spread), min(num_classes - 1, ways + spread)
    if low > high:
        raise InputError(
            f"partition 'shots:{ways},{shots},{spread}' of {num_classes} classes",
            "a site holds at least 2 classes and lacks at least 1",
            "take N from 2 to the number of classes - 1, or another rule",
        )
    chosen, quota = [], []
    for i in range(draw.sites):
        rng = draw.stream(attempt, "site", i)
        size = int(rng.integers(low, high, endpoint=True))
        quota.append(int(rng.integers(max(1, shots - spread + 1), shots + spread, endpoint=True)) if spread else shots)
        chosen.append({int(c) for c in rng.choice(num_classes, size, replace=False)})
    return chosen, tuple(quota)


def _groups(items: Sequence[Item], *, by_label: bool) -> list[_Group]:
    """Gather the items of each group, groups and items in ascending order of id; all labels are 0 unless `by_label`."""
    gathered: dict[str, list[int]] = {}
    for i in sorted(range(len(items)), key=lambda i: str(items[i]["id"])):
        gathered.setdefault(_group(items[i]), []).append(i)
    return [_Group(key, tuple(m), int(items[m[0]]["label"]) if by_label else 0) for key, m in gathered.items()]


def _divide(
    groups: Sequence[_Group], share: _Share, rng: np.random.Generator, placed: dict[str, int]
) -> list[list[_Group]]:
    """Shuffle the groups of one class, cut them at the boundaries nearest to the share, enter them in `placed`.

    Groups placed before stay where they are and count towards their site's part. Returns the groups of each owner.
    """
    result = [[group for group in groups if placed.get(group.key) == owner] for owner in share.owners]
    free = [group for group in groups if group.key not in placed]
    wanted = share.sizes(_size(groups))
    if len(free) < len(groups) and free:
        missing = np.maximum(wanted - [_size(part) for part in result], 0)
        wanted = _Share(share.owners, missing / missing.sum()).sizes(_size(free))
    free = [free[i] for i in rng.permutation(len(free))]
    ends = np.cumsum([0, *(len(group.members) for group in free)])
    cuts = [int(np.abs(ends - cut).argmin()) for cut in np.cumsum(wanted)[:-1]]
    for part, owner, start, stop in zip(result, share.owners, [0, *cuts], [*cuts, len(free)], strict=True):
        part.extend(free[start:stop])
        placed.update((group.key, owner) for group in free[start:stop])
    return result


def _take_shots(
    name: str,
    groups: Sequence[_Group],
    share: _Share,
    shots: Sequence[int],
    rng: np.random.Generator,
    placed: dict[str, int],
    homes: list[int | None],
) -> None:
    """Give each owner the next block of its number of images; a group that a block ends in is not used further."""
    queue = [groups[i] for i in rng.permutation(len(groups))][::-1]
    for owner in share.owners:
        open_places = shots[owner]
        while open_places and queue:
            group = queue.pop()
            placed[group.key] = owner
            for i in group.members[:open_places]:
                homes[i] = owner
            open_places -= min(open_places, len(group.members))
        if open_places:
            raise InputError(
                f"the sites that drew class {name!r} need {sum(shots[i] for i in share.owners)} training images of it",
                f"there are {_size(groups)}",
                "lower K, N or the number of sites",
            )


def _lacking(
    draw: _Draw, shares: Mapping[int, _Share], train: Sequence[Item], homes: Sequence[int | None]
) -> list[str]:
    """Note classes that nobody drew, and sites that own a class but got none of its images because it is too small."""
    if draw.kind not in ("classes", "shots"):
        return []
    notes = []
    held = {(home, int(item["label"])) for home, item in zip(homes, train, strict=True) if home is not None}
    if unused := [draw.names[c] for c in range(len(draw.names)) if c not in shares]:
        notes.append(f"drawn by no site: {_listed(unused)}")
    for c, share in shares.items():
        if bare := [f"site-{i + 1}" for i in share.owners if (i, c) not in held]:
            notes.append(f"too few images of {draw.names[c]!r} for {_listed(bare)}")
    return notes


# Small helpers


def _group(item: Item) -> str:
    return str(item.get("group") or item["id"])


def _size(groups: Sequence[_Group]) -> int:
    return sum(len(group.members) for group in groups)


def _canonical(kind: str, values: Sequence[Any]) -> str:
    """Write a rule so that equal rules read equal (`dirichlet:.10` as `dirichlet:0.1`)."""
    texts = [repr(v).removesuffix(".0") if isinstance(v, float) else str(v) for v in values]
    return kind + (":" if texts else "") + ",".join(texts)


def _listed(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
