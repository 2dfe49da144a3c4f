"""Partitions by findings or numbers: strata for rules that divide by class, `stratified`, `quantile` and `range`.

A stratum of findings is the rarest finding of an image (by training images), or none; a stratum of numbers is the
decile of the training numbers. `dirichlet:BETA`, `classes:C` and `shots:N,K,STD` divide by these.

`stratified` gives every site the same shares of each class, finding or stratum of numbers, by iterative stratification:
K. Sechidis, G. Tsoumakas, I. Vlahavas: On the stratification of multi-label data (2011), for groups instead of
images. `quantile` and `range` cut the numbers into one part per site, with equally many training images or of equal
width: site-1 has the smallest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from medfl.core import SECTIONS, Floats, InputError, Integers
from medfl.data.partition.draw import (
    Group,
    Homes,
    Item,
    Rule,
    Sections,
    gathered,
    named,
    nowhere,
    settle,
)

_TENTHS = 10  # strata of the training numbers
NO_FINDING = "no finding"


def rows_of(items: Sequence[Item]) -> Floats:
    """Return the targets (N, D) of a section, NaN if unknown."""
    return np.array([item["target"] for item in items], dtype=np.float64).reshape(len(items), -1)


def classes_of(item: Item) -> list[int | None]:
    """Return the numbers of the findings that an item is known to have, or of its class; [None] for no label."""
    if item.get("target"):
        return [number for number, value in enumerate(item["target"]) if value == 1]

    return [item.get("label")]


def has_targets(data: Sections) -> bool:
    """Tell whether all items have findings or numbers."""
    items = [item for section in data.values() for item in section]
    return bool(items) and all("target" in item for item in items)


def are_findings(data: Sections) -> bool:
    """Tell whether all known targets are present (1) or absent (0)."""
    values = {value for section in data.values() for item in section for value in item["target"]}
    return values <= {0.0, 1.0, None}


def with_strata(
    data: Sections, findings: Sequence[str]
) -> tuple[dict[str, list[Item]], tuple[str, ...]]:
    """Return the items with a stratum's number as label, and the strata's names; `findings` is () for numbers."""
    if findings:
        numbers, names = _finding_strata(data, findings)
    else:
        numbers, names = _number_strata(data)

    used = sorted({int(number) for section in numbers.values() for number in section})
    place = {number: index for index, number in enumerate(used)}
    labelled: dict[str, list[Item]] = {}
    for name, section in data.items():
        rows = zip(section, numbers[name], strict=True)
        labelled[name] = [{**item, "label": place[int(number)]} for item, number in rows]

    return labelled, tuple(names[number] for number in used)


def _finding_strata(
    data: Sections, findings: Sequence[str]
) -> tuple[dict[str, Integers], list[str]]:
    order = np.argsort((rows_of(data["train"]) == 1).sum(0), kind="stable")
    strata = {}
    for name, section in data.items():
        has = np.zeros((len(section), len(findings)), bool)
        if section:
            has = rows_of(section) == 1

        # the rarest finding that an image has, as `argmax` takes the first
        strata[name] = np.where(has.any(1), order[has[:, order].argmax(1)], len(findings))

    return strata, [*findings, NO_FINDING]


def _number_strata(data: Sections) -> tuple[dict[str, Integers], list[str]]:
    edges = np.unique(np.quantile(_known(data["train"]), np.arange(1, _TENTHS) / _TENTHS))
    strata = {}
    for name, section in data.items():
        values = _known(section) if section else np.zeros(0)
        strata[name] = np.searchsorted(edges, values, "right").astype(np.int64)

    return strata, [f"numbers, part {index + 1}" for index in range(len(edges) + 1)]


def _known(items: Sequence[Item]) -> Floats:
    """Return the first number of each item; InputError if it is unknown."""
    values = rows_of(items)[:, 0]
    if (unknown := np.isnan(values)).any():
        first = items[int(unknown.argmax())]["id"]
        raise InputError(
            f"the numbers of {int(unknown.sum())} of {len(items)} images are unknown, first {first!r}",
            "this rule divides by the number of each image",
            "use iid, centre or file:PATH.csv",
        )

    return values


def by_number(count: int, data: Sections, equal_width: bool) -> Homes:
    """Return the site of every item by its number: parts of equal width, or of equally many training images.

    The number of a group is that of its first image; it stays where its training images are.
    """
    train = np.sort(_known(data["train"]))
    if equal_width:
        edges = np.linspace(train[0], train[-1], count + 1)[1:-1]
    else:
        # the numbers with which the further parts begin
        edges = train[(np.arange(1, count) * len(train) // count)]

    homes = nowhere(data)
    placed: dict[str, int] = {}
    for name in SECTIONS:
        if not data.get(name):
            continue

        values = _known(data[name])
        groups = gathered(data[name], by_label=False)
        for group in groups:
            part = int(np.searchsorted(edges, values[group.members[0]], "right"))
            placed.setdefault(group.key, part)

        settle(groups, placed, homes[name])

    return named(homes)


def stratified(rule: Rule, data: Sections) -> tuple[Homes, list[str]]:
    """Return the site of every item so that each has the same share of every class, finding or stratum of numbers."""
    homes = nowhere(data)
    placed: dict[str, int] = {}
    for name in SECTIONS:
        groups = gathered(data.get(name, ()), by_label=False)
        if groups:
            counts = _counts(data[name], groups)
            _stratify(groups, counts, rule.sites, rule.stream(0, name), placed)
            settle(groups, placed, homes[name])

    return named(homes), []


def _counts(items: Sequence[Item], groups: Sequence[Group]) -> Floats:
    """Return how many images of each group (G, K + 1) have each label or finding, and their total."""
    if all("label" in item for item in items):
        labels = np.array([int(item["label"]) for item in items])
        flags = np.eye(labels.max() + 1)[labels]
    elif has_targets({"": items}):
        flags = np.nan_to_num(rows_of(items))
    else:
        flags = np.zeros((len(items), 0))

    sums = [flags[list(group.members)].sum(0) for group in groups]
    sizes = [[len(group.members)] for group in groups]
    return np.concatenate([np.array(sums), np.array(sizes)], 1)


def _stratify(
    groups: Sequence[Group],
    counts: Floats,
    sites: int,
    rng: np.random.Generator,
    placed: dict[str, int],
) -> None:
    """Place the remaining groups: those with the rarest remaining label first, each where it is needed most."""
    demand = np.tile(counts.sum(0) / sites, (sites, 1))
    free = []
    for index in rng.permutation(len(groups)):
        if groups[index].key in placed:
            demand[placed[groups[index].key]] -= counts[index]
        else:
            free.append(int(index))

    while free:
        left = counts[free].sum(0)
        labels = np.flatnonzero(left[:-1])
        # the last column, the number of images, covers the remaining groups: those without any label
        label = int(labels[left[labels].argmin()]) if len(labels) else len(left) - 1
        having = [index for index in free if counts[index, label]]
        free = [index for index in free if not counts[index, label]]
        for index in having:
            # whoever lacks most images of the label, then most images, then by lot
            need = [(demand[site, label], demand[site, -1], rng.random()) for site in range(sites)]

            site = max(range(sites), key=need.__getitem__)
            placed[groups[index].key] = site
            demand[site] -= counts[index]
