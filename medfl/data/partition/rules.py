"""Partitions: which site holds which image.

Rules: `iid`, `dirichlet:BETA` (per class, as in FedBM and FedCB), `classes:C` (C classes per site, FedMR's PρCς),
`shots:N,K,STD` (n-way k-shot, pFedPM), `centre` (the real hospitals), `centre:NAME=TRAIN/TEST,...` (some of them
reduced to these counts; TRAIN 0: a test-only site; TEST all), `counts:TRAIN/TEST,...` (one per site, FedHelp), `size`
(quantiles of the image size: another anatomy or field of view at each site), `file:PATH.csv`, and those of
`medfl.data.partition.targets`. Validation and test images follow the rule used for the training images, so
a site is judged on its own mixture of classes.

Departures from the papers: images of one group (patient or lesion) stay at one site, also across sections, so cuts move
to the nearest group boundary (with one image per group the papers' cuts are kept exactly). FedMR's released code
assigns every image twice, this does not. pFedPM's blocks of fixed length become consecutive blocks, STD 0 means exactly
K images per class, and a site has equally many validation and test images in each of its classes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medfl.core import (
    SECTIONS,
    InputError,
    Refused,
    alike,
    composed,
    did_you_mean,
    listed,
    read_table,
    respelled,
)
from medfl.data.partition import targets
from medfl.data.partition.draw import (
    Homes,
    Item,
    Rule,
    Sections,
    Values,
    by_counts,
    by_size,
    canonical,
    draw,
    group_of,
    homeless,
    limit_centres,
    read_count,
    read_limits,
)

FORMS = (
    "iid | dirichlet:BETA | classes:C | shots:N,K,STD | centre[:NAME=TRAIN/TEST,...] | counts:TRAIN/TEST,... | size | "
    "stratified | quantile | range | file:PATH.csv"
)
_BY_CLASS = ("dirichlet", "classes", "shots")
_BY_NUMBER = ("quantile", "range")
_KINDS = ("iid", *_BY_CLASS, "centre", "counts", "size", "stratified", *_BY_NUMBER, "file")
OWN_SITES = ("centre", "counts", "file")
"""Kinds whose text or data determine the number of sites."""


@dataclass(frozen=True)
class Partition:
    """Which items each site holds.

    `sites` maps a site's name to the ascending indices of its items in each of the three sections; names are in
    natural order, with reduced centres last.
    `notes` are remarks for the user (re-draws, unused images). Use `assign` to make one.
    """

    spec: str
    seed: int
    sites: Mapping[str, Mapping[str, tuple[int, ...]]]
    notes: tuple[str, ...] = ()

    def counts(
        self, sections: Sections, num_classes: int, section: str = "train"
    ) -> dict[str, list[int]]:
        """Return site -> number of items of each class, or known to have each finding, in one section."""
        result = {}
        for site, held in self.sites.items():
            counter: Counter[int | None] = Counter()
            for i in held[section]:
                counter.update(targets.classes_of(sections[section][i]))

            result[site] = [counter[c] for c in range(num_classes)]

        return result

    def to_ids(self, sections: Sections) -> dict[str, dict[str, list[str]]]:
        """Return the item ids per site and section, ready for JSON."""
        ids: dict[str, dict[str, list[str]]] = {}
        for site, held in self.sites.items():
            ids[site] = {}
            for name, positions in held.items():
                ids[site][name] = [str(sections[name][i]["id"]) for i in positions]

        return ids

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
        """Invert `to_ids`.

        Raises:
            InputError: an id is no longer in its section.
        """
        where = _positions(sections)
        sites: dict[str, dict[str, tuple[int, ...]]] = {}
        for site in sorted(ids, key=_place(spec)):
            gone = []
            sites[site] = {}
            for name in SECTIONS:
                stored = [composed(str(ident)) for ident in ids[site].get(name, ())]
                position_of = where.get(name, {})
                gone += [f"{ident!r} ({name})" for ident in stored if ident not in position_of]
                # 0 is for those that are gone, of whom the error tells
                sites[site][name] = tuple(sorted(position_of.get(ident, 0) for ident in stored))

            if gone:
                raise InputError(
                    f"{len(gone)} image(s) that the stored partition gives to site {site!r} are gone, first {gone[0]}",
                    "every stored id must be in the same section of the data",
                    "give the data folder and split of the stored run, or start a new run",
                )

        return cls(spec, seed, sites, tuple(notes))


def _positions(sections: Sections) -> dict[str, dict[str, int]]:
    """Return section -> id, in composed characters and as it is compared -> index."""
    where: dict[str, dict[str, int]] = {}
    for name, section in sections.items():
        where[name] = {}
        for form in (alike, composed):  # the exact one last, which no other replaces
            where[name] |= {form(str(item["id"])): i for i, item in enumerate(section)}

    return where


def _all_items(data: Sections) -> list[Item]:
    return list(itertools.chain.from_iterable(data.values()))


def assign(
    spec: str, sections: Sections, *, sites: int | None, classes: Sequence[str] | None, seed: int
) -> Partition:
    """Assign the items of the sections `train`, `validate` and `test` (missing ones count as empty) to sites.

    Args:
        spec: one of `FORMS`.
        sections: data list entries with `id` and, if known, `label` (from 0), `centre` and `group`.
        sites: number of sites; may be None for the kinds of `OWN_SITES`, and must otherwise agree with them.
        classes: class names in label order; None uses the labels as they are.
        seed: every draw has its own stream under this seed; the order of the items does not matter.

    Raises:
        InputError: the rule is unknown or cannot be applied to these items.
    """
    kind, values = parse(spec)
    data = {name: list(sections.get(name, ())) for name in SECTIONS}
    _check_ids(data)
    if kind in _BY_NUMBER:
        _check_numbers(spec, data)

    names: tuple[str, ...] = ()
    if kind in _BY_CLASS and targets.has_targets(data):
        findings = tuple(classes or ()) if targets.are_findings(data) else ()
        data, names = targets.with_strata(data, findings)

    names = _check_labels(data, names or classes, spec, required=kind in _BY_CLASS)

    notes: list[str] = []
    if kind in ("centre", "file"):
        homes, notes = _by_centre(data) if kind == "centre" else _by_file(values[0], data)
        places = itertools.chain.from_iterable(homes.values())
        order = sorted(set(filter(None, places)), key=_place(spec))
        if kind == "centre":
            homes, limit_notes = limit_centres(values, data, homes)
            notes += limit_notes
    else:
        count = _check_sites(spec, len(values) if kind == "counts" else sites, data["train"])
        order = [f"site-{i + 1}" for i in range(count)]
        if kind == "size":
            _check_sizes(data)
            homes = by_size(count, data)
        elif kind in _BY_NUMBER:
            homes = targets.by_number(count, data, kind == "range")
        else:
            by_rule = {"counts": by_counts, "stratified": targets.stratified}.get(kind, draw)
            homes, notes = by_rule(Rule(kind, values, count, names, seed), data)

    if kind in OWN_SITES and sites is not None and sites != len(order):
        raise InputError(
            f"{sites} sites with partition {spec!r}",
            f"it has {len(order)}: {listed(order)}",
            "leave the number of sites out, or choose another partition, as --partition iid",
        )

    _check_trained(spec, set(order) - _untrained(kind, values), homes["train"])
    held: dict[str, dict[str, tuple[int, ...]]] = {site: {} for site in order}
    for name, section in homes.items():
        positions = defaultdict[str | None, list[int]](list)
        for i, home in enumerate(section):
            positions[home].append(i)
        for site in order:
            held[site][name] = tuple(positions[site])

    return Partition(canonical(kind, values), seed, held, tuple(notes))


def parse(spec: str) -> tuple[str, Values]:
    """Split a partition's text into its kind and its values, e.g. `shots:3,100,2` into ("shots", (3, 100, 2)).

    Raises:
        InputError: unknown kind, or values of the wrong number, type or range.
    """
    kind, colon, text = spec.strip().partition(":")
    fields = text.split(",")
    try:
        if kind in ("iid", "centre", "size", "stratified", *_BY_NUMBER) and not colon:
            return kind, ()
        if kind == "centre":
            return kind, read_limits(fields)
        if kind == "counts":
            return kind, tuple(map(read_count, fields))
        if kind == "file" and text.strip():
            return kind, (text.strip(),)
        if kind == "dirichlet" and len(fields) == 1 and 0 < (beta := float(text)) < math.inf:
            return kind, (beta,)
        if kind == "classes" and len(fields) == 1 and (size := int(text)) >= 1:
            return kind, (size,)

        if kind == "shots" and len(fields) == 3:
            ways, shots, spread = map(int, fields)
            if ways >= 1 and shots >= 1 and spread >= 0:
                return kind, (ways, shots, spread)
    except ValueError:
        pass  # a field is not a number, or a centre is duplicated: the same error as for a number out of range

    advice = "give BETA as a number above 0, C, N and K as whole numbers from 1, STD, TRAIN, TEST from 0, or TEST all"
    raise InputError(
        f"partition {spec!r}",
        f"allowed: {FORMS}",
        advice if kind in _KINDS else did_you_mean(kind, _KINDS, advice),
    )


def natural_key(name: str) -> tuple[object, ...]:
    """Return a sort key that puts site-2 before site-10."""
    return tuple(
        # Numbers after strings, so that only values of the same type are compared.
        (1, int(part), part) if part.isdecimal() else (0, part)
        for part in re.split(r"(\d+)", name)
        if part
    )


def _place(spec: str) -> Callable[[str], tuple[object, ...]]:
    """Return the sort key of sites: names in natural order, reduced centres after the others."""
    kind, values = parse(spec)
    limited = {limit.centre for limit in values} if kind == "centre" else set()
    return lambda name: (name in limited, natural_key(name))


# Checks


def _check_ids(data: Sections) -> None:
    for name, items in data.items():
        if repeated := [
            ident for ident, n in Counter(str(item["id"]) for item in items).items() if n > 1
        ]:
            raise InputError(
                f"id {repeated[0]!r} stands for several images of section {name!r}",
                "every image needs its own id",
                "make the ids of the data list unique",
            )


def _check_labels(
    data: Sections, classes: Sequence[str] | None, spec: str, *, required: bool
) -> tuple[str, ...]:
    """Check every label and return the class names; () if no item has a label."""
    items = _all_items(data)
    labelled = [item for item in items if item.get("label") is not None]
    gaps = [item["id"] for item in items if item.get("label") is None]
    if required and gaps:
        raise InputError(
            f"partition {spec!r}, but {len(gaps)} of {len(items)} images have no class label, first {gaps[0]!r}",
            "this rule divides by class",
            "use iid, centre or file:PATH.csv, or label the images",
        )

    for item in labelled:
        label = item["label"]
        limit = math.inf if classes is None else len(classes)
        # True is an int, too
        if (
            not isinstance(label, int | np.integer)
            or isinstance(label, bool)
            or not 0 <= label < limit
        ):
            raise InputError(
                f"image {item['id']!r} has label {label!r}",
                "labels are whole numbers from 0" + ("" if classes is None else f" to {limit - 1}"),
                "change the label in the data list, or add the class to the bundle",
            )

    if not labelled:
        return ()

    if classes is None:
        classes = [f"class {c}" for c in range(max(int(item["label"]) for item in labelled) + 1)]

    trained = set()
    for item in data["train"]:
        if item.get("label") is not None:
            trained.add(int(item["label"]))

    if absent := [f"{name!r} (label {c})" for c, name in enumerate(classes) if c not in trained]:
        raise InputError(
            f"no training image of class {listed(absent)}",
            "every class needs at least one training image",
            "check the data folder and the split, or remove the class from the bundle",
        )

    return tuple(classes)


def _check_sites(spec: str, sites: int | None, train: Sequence[Item]) -> int:
    groups = len(set(map(group_of, train)))
    if sites is None or sites < 1:
        number = "without a number of sites" if sites is None else f"over {sites} sites"
        raise InputError(
            f"partition {spec!r} {number}",
            "at least 1 site",
            "give the number of sites with --sites",
        )

    if sites > groups:
        in_groups = ""
        if groups < len(train):
            in_groups = f" in {groups} groups (patients or lesions) that stay together"

        raise InputError(
            f"{sites} sites for {len(train)} training images{in_groups}",
            f"at most {groups} sites",
            "lower --sites or give more data",
        )

    return sites


def _check_sizes(data: Sections) -> None:
    items = _all_items(data)
    if gaps := [item["id"] for item in items if item.get("size") is None]:
        raise InputError(
            f"partition 'size', but the sizes of {len(gaps)} of {len(items)} images are not known, first {gaps[0]!r}",
            "this rule divides by the number of pixels or voxels that the data list gives",
            "use iid, centre or file:PATH.csv",
        )


def _check_numbers(spec: str, data: Sections) -> None:
    if not targets.has_targets(data) or targets.are_findings(data):
        raise InputError(
            f"partition {spec!r}, but the images have no numbers",
            "this rule divides by the number of each image, which a regression predicts",
            "use iid, stratified, dirichlet:BETA, centre or file:PATH.csv",
        )


def _untrained(kind: str, values: Values) -> set[str]:
    """Return the sites that should have no training images: those with TRAIN 0."""
    if kind == "centre":
        return {limit.centre for limit in values if not limit.count.train}
    if kind == "counts":
        return {f"site-{i + 1}" for i, count in enumerate(values) if not count.train}

    return set()


def _check_trained(spec: str, trained: set[str], train: Sequence[str | None]) -> None:
    idle = sorted(trained.difference(train), key=natural_key)
    if idle or not trained:
        raise InputError(
            f"partition {spec!r} leaves {listed(idle) or 'everybody'} without training images",
            "every site needs at least one",
            "give the site training images or leave it out",
        )


# Rules that depend on the ground truth


def _by_centre(data: Sections) -> tuple[Homes, list[str]]:
    items = _all_items(data)
    unnamed = [item for item in items if not item.get("centre")]
    if unnamed or not items:
        first = f", first {unnamed[0]['id']!r}" if unnamed else ""
        raise InputError(
            f"partition 'centre', but {len(unnamed)} of {len(items)} images name no centre{first}",
            "every image must carry the centre it was taken at",
            "use iid, dirichlet:BETA, classes:C, shots:N,K,STD, counts:TRAIN/TEST,... or file:PATH.csv",
        )

    if {str(item["centre"]) for item in items} == {"unknown"}:  # as data sets mark it
        raise InputError(
            f"partition 'centre', but the centres of all {len(items)} images are unknown",
            "images of centres that are known, one or several",
            "use --partition iid with --sites N or file:PATH.csv, or say them in column 'centre' of the data's table",
        )

    training = {str(item["centre"]) for item in data["train"]}
    homes = {}
    for name, section in data.items():
        centres = [str(item["centre"]) for item in section]
        homes[name] = [centre if centre in training else None for centre in centres]

    idle = sorted({str(item["centre"]) for item in items} - training, key=natural_key)
    note = f"no sites, as they have no training images: {listed(idle)} ({homeless(homes)})"

    return homes, [note] if idle else []


def _by_file(path: str, data: Sections) -> tuple[Homes, list[str]]:
    advice = "write such an id into the line (a spreadsheet takes zeros from before a number), or remove it"
    where = _positions(data)
    homes: Homes = {name: [None] * len(section) for name, section in data.items()}
    for line, row in _rows(path):
        key = (row.get("id") or "").strip()
        if not any(key in places for places in where.values()):
            key = alike(key).strip()
        site = (row.get("site") or "").strip()
        section = (row.get("section") or "").strip()
        if not site or not site.isprintable() or set(site) & set("/\\"):
            raise InputError(
                f"{path}, line {line}: site {site!r}",
                "a name without slashes",
                "name this image's site",
            )

        if section and section not in SECTIONS:
            raise InputError(
                f"{path}, line {line}: section {section!r}",
                f"allowed: {', '.join(SECTIONS)} or nothing",
                "write one of these into the line",
            )

        holding = [name for name in ([section] if section else SECTIONS) if key in where[name]]
        if not holding:
            raise InputError(
                f"{path}, line {line}: id {key!r} is unknown"
                + (f" in section {section!r}" if section else ""),
                "ids of the data set's images",
                respelled([key]) or advice,
            )

        # an id that several sections have gets the site in each
        for name in holding:
            if homes[name][where[name][key]] not in (None, site):
                raise InputError(
                    f"{path}, line {line}: id {key!r} has a second site",
                    "one site an image",
                    "remove one of the lines",
                )

            homes[name][where[name][key]] = site

    left_out = homeless(homes)
    return homes, [f"not in the file and left out: {left_out}"] if left_out else []


def _rows(path: str) -> list[tuple[int, dict[str, str]]]:
    """Read the partition file as (line number, row)."""
    advice = "write a CSV file with the columns id,site and, if wanted, section"
    try:
        names, rows = read_table(Path(path).expanduser(), is_composed=True)
    except (Refused, RuntimeError) as error:  # RuntimeError: ~nobody
        raise InputError(
            f"partition file {path!r}: {error}", "a readable CSV file", advice
        ) from error

    if missing := [column for column in ("id", "site") if column not in names]:
        raise InputError(
            f"partition file {path!r} has no column {' or '.join(missing)}",
            f"it has {', '.join(names) or 'none'}",
            advice,
        )

    return rows
