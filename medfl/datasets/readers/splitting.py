"""Rules that divide images into train, validate and test and keep groups (patients, lesions) together.

Images that a rule leaves out are in section `LEFT_OUT`.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from medfl.core import SECTIONS, Floats, InputError, not_among

LEFT_OUT = ""
USUAL = (0.7, 0.1, 0.2)  # of the images, for train, validate and test
_OF_FOLD = (0.875, 0.125)  # of what a fold does not test, for train and validate
_MOST_FOLDS = 100  # each is a run


@dataclass(frozen=True)
class Record:
    """One image of a data set; `sections` holds the section that the source's own tables name, by split name.

    Of a segmentation case `mask` is where its reference mask lies, `label` is 0, and `size` its number of pixels or
    voxels where that is known without reading the image. Of an image with findings (1, 0) or numbers these are
    `target`, NaN where unknown, and `label` is 0. `about` is what the source says of the patient, as sex and age.
    """

    image: str
    label: int
    id: str
    centre: str
    group: str
    sections: Mapping[str, str] = field(default_factory=dict)
    mask: str = ""
    size: int | None = None
    target: tuple[float, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)


Rule = Callable[[Sequence[Record]], list[str]]


def by_group(salt: str, shares: Sequence[float] = USUAL, *, at_centres: bool = True) -> Rule:
    """Return the rule that cuts the groups of each class and centre by `shares` of their images.

    Groups are ordered by a hash of `salt` and their name, so the result depends on the records alone. Where a class has
    few groups at a centre, a section may get none of them; `at_centres=False` cuts each class as a whole.
    """

    def rule(records: Sequence[Record]) -> list[str]:
        sizes = Counter(record.group for record in records)
        strata = defaultdict(list)
        # Reversed, so that a group's first record says its class and centre.
        for group, record in {record.group: record for record in reversed(records)}.items():
            strata[record.label, record.centre if at_centres else ""].append(group)

        # where the sections begin, as shares of a stratum's images
        bounds = list(itertools.accumulate(shares[:-1]))
        section = {}
        for groups in strata.values():
            total = sum(sizes[group] for group in groups)
            done = 0
            for group in sorted(groups, key=lambda group: hash_order(salt, group)):
                # A group goes where its middle falls, so that large ones are in no section's favour.
                middle = (done + sizes[group] / 2) / total
                section[group] = SECTIONS[bisect.bisect(bounds, middle)]
                done += sizes[group]

        return [section[record.group] for record in records]

    return rule


def by_findings(salt: str, shares: Sequence[float] = USUAL) -> Rule:
    """Return the rule that gives each section its share of the images with each finding, and keeps groups together."""

    def rule(records: Sequence[Record]) -> list[str]:
        places = _by_findings(records, salt, shares)
        return [SECTIONS[places[record.group]] for record in records]

    return rule


def _by_findings(records: Sequence[Record], salt: str, shares: Sequence[float]) -> dict[str, int]:
    """Return for each group the place of the share that it goes to.

    The findings are taken in turn, the rarest of the groups that are left first; each of its groups, in the order of a
    hash of `salt` and their name, goes where most of its images are still wanted (Sechidis, Tsoumakas, Vlahavas: On
    the stratification of multi-label data, 2011).
    """
    counts: dict[str, Floats] = defaultdict(lambda: np.zeros(1 + len(records[0].target)))
    for record in records:
        counts[record.group] += [*(value == 1 for value in record.target), 1]

    # the last column, how many images there are, is of all groups: those without any finding
    demand = np.outer(shares, sum(counts.values()))
    places: dict[str, int] = {}
    left = sorted(counts, key=lambda group: hash_order(salt, group))
    while left:
        groups_with = np.sum([counts[group] > 0 for group in left], 0)
        present = np.flatnonzero(groups_with[:-1])
        rarest = int(present[groups_with[present].argmin()]) if len(present) else -1
        for group in left:
            if counts[group][rarest]:
                need = [*zip(demand[:, rarest], demand[:, -1], strict=True)]
                places[group] = need.index(max(need))
                demand[places[group]] -= counts[group]

        left = not_among(left, places)

    return places


def are_findings(records: Sequence[Record]) -> bool:
    """Tell whether records have targets, each of which is 1, 0 or unknown."""
    values = [value for record in records for value in record.target]
    return bool(values) and all(value in (0, 1) or value != value for value in values)


def stratified(records: Sequence[Record]) -> Sequence[Record]:
    """Return records of numbers with a fifth of the numbers (the first of several) as label, others as they are.

    All of a group are in one. Of fewer than 25 groups there is one stratum.
    """
    if are_findings(records) or not any(record.target for record in records):
        return records

    numbers = defaultdict(list)
    for record in records:
        numbers[record.group].append(record.target[0])

    fifths = 5 if len(numbers) >= 25 else 1
    ordered = sorted(numbers, key=lambda group: (np.nan_to_num(np.mean(numbers[group])), group))
    stratum = {group: fifths * place // len(ordered) for place, group in enumerate(ordered)}
    return [replace(record, label=stratum[record.group]) for record in records]


def hash_order(salt: str, group: str) -> bytes:
    """Return a sort key that gives groups a random but fixed order."""
    return hashlib.sha256(f"{salt}/{group}".encode()).digest()


def filled(rule: Rule, needed: Sequence[str] = ("test", "validate")) -> Rule:
    """Return a rule that moves a training group into each section that would be empty.

    The group has the fewest images of the class with the most training groups, which keeps at least one.
    """

    def with_each(records: Sequence[Record]) -> list[str]:
        sections = rule(records)
        for empty in needed:
            group = None if empty in sections else _spare(records, sections)
            for position, record in enumerate(records):
                if record.group == group:
                    sections[position] = empty

        return sections

    return with_each


def _spare(records: Sequence[Record], sections: Sequence[str]) -> str | None:
    sizes = Counter(record.group for record in records)
    groups = defaultdict(set)
    for record, section in zip(records, sections, strict=True):
        if section == "train":
            groups[record.label].add(record.group)

    candidates = max((groups[label] for label in sorted(groups)), key=len, default=())
    if len(candidates) < 2:
        return None

    return min(candidates, key=lambda group: (sizes[group], hash_order("own", group)))


def check_folds(count: int) -> None:
    """Raise an InputError if a cross-validation cannot have so many folds."""
    if not 2 <= count <= _MOST_FOLDS:
        raise InputError(
            f"--folds {count}", f"a whole number from 2 to {_MOST_FOLDS}", "5 is usual"
        )


def fold_of(split: str, salt: str) -> Rule | None:
    """Return the rule of a split `fold:NUMBER/COUNT`, None of another.

    Raises:
        InputError: the numbers are none of a fold.
    """
    if not split.startswith("fold:"):
        return None
    match = re.fullmatch(r"fold:([1-9]\d{0,3})/([1-9]\d{0,3})", split)
    if match is None or int(match[1]) > int(match[2]) or int(match[2]) < 2:
        raise InputError(
            f"split {split!r}",
            "fold:NUMBER/COUNT, as fold:2/5",
            "write it like that, or leave it out",
        )
    return fold(int(match[1]), int(match[2]), salt)


def fold(number: int, count: int, salt: str) -> Rule:
    """Return the rule of one fold of a cross-validation: each group is tested in one of `count` folds.

    Groups are dealt out to the folds in turn, class by class (of numbers fifth by fifth) and centre by centre, in the
    order of a hash; those with findings so that each fold has its share of each. Of what a fold does not test, an
    eighth validates.

    Raises:
        InputError: fewer groups than folds, or a class with one.
    """

    def rule(records: Sequence[Record]) -> list[str]:
        records = stratified(records)
        first = {record.group: record for record in reversed(records)}
        order = sorted(
            first,
            key=lambda group: (first[group].label, first[group].centre, hash_order(salt, group)),
        )
        labels_of_groups = {(record.group, record.label) for record in records}
        per_class = Counter(label for _, label in labels_of_groups)
        fewest = min(per_class.values(), default=0)
        if len(order) < count or fewest < 2:
            few = f", one class has {fewest}" * (len(order) >= count)
            raise InputError(
                f"{count} folds of {len(order)} patients or images of unknown ones{few}",
                "as many of them as folds, and at least two of each class",
                "lower --folds, or add images",
            )

        # Every COUNT-th group, so that each fold has its part of each class and centre.
        tested = set(order[number - 1 :: count])
        salt_of_fold = f"{salt}-{number}/{count}"
        divide = by_group(salt_of_fold, _OF_FOLD, at_centres=False)
        if are_findings(records):
            places = _by_findings(records, salt, [1 / count] * count)
            tested = {group for group, place in places.items() if place == number - 1}
            divide = by_findings(salt_of_fold, _OF_FOLD)

        training = [record for record in records if record.group not in tested]
        sections = iter(filled(divide, ("validate",))(training))
        return ["test" if record.group in tested else next(sections) for record in records]

    return rule


def published(split: str) -> Rule:
    """Return the rule that takes the sections as the source published them."""

    def rule(records: Sequence[Record]) -> list[str]:
        unknown = next((record for record in records if split not in record.sections), None)
        if unknown is not None:
            raise InputError(
                f"split {split!r}: the folder's tables give no section for {unknown.id}",
                f"split {split!r} needs a table that names every image",
                "add the table to the folder, or give another split with --config split=NAME",
            )

        return [record.sections[split] for record in records]

    return rule


def validation_from_train(split: str, share: float = 0.1) -> Rule:
    """Return the rule that takes the source's train and test and cuts `share` of train for validation, by group."""
    rule = by_group(f"{split}-validate", (1 - share, share))
    return cut_part(split, "train", rule, ("train", "validate"))


def validation_from_test(split: str) -> Rule:
    """Return the rule that leaves the source's train whole and validates on half of its test, by group."""
    return cut_part(split, "test", by_group(f"{split}-spared", (0.5, 0.5)), ("validate", "test"))


def cut_part(split: str, part: str, rule: Rule, names: Sequence[str] = SECTIONS) -> Rule:
    """Return the rule that takes the published sections, but cuts one of them by a rule, which sees it alone.

    `names` are those of the sections that `rule` gives, in the order of `SECTIONS`.
    """

    def cut(records: Sequence[Record]) -> list[str]:
        sections = published(split)(records)
        indices = [index for index, section in enumerate(sections) if section == part]
        pieces = rule([records[index] for index in indices])
        for index, piece in zip(indices, pieces, strict=True):
            sections[index] = names[SECTIONS.index(piece)]

        return sections

    return cut


@dataclass(frozen=True)
class WholeCentres:
    """The rule that draws whole centres for each section, so that nobody is tested on a centre that trained.

    The order is that of a hash of the trial and the centre. Centres that are not drawn are left out.

    Attributes:
        numbers: centres for train, validate and test.
        below: only centres with fewer images take part.
        salt: keeps the draws of data sets apart.
        trial: each number is another draw.
    """

    numbers: tuple[int, int, int]
    below: int
    salt: str
    trial: int = 0

    def __call__(self, records: Sequence[Record]) -> list[str]:
        """Return the section of each record.

        Raises:
            InputError: too few centres are small enough.
        """
        sizes = Counter(record.centre for record in records)
        small = [centre for centre, size in sizes.items() if size < self.below]
        if len(small) < sum(self.numbers):
            raise InputError(
                f"{len(small)} of {len(sizes)} writers or centres have fewer than {self.below} images",
                f"this split draws {sum(self.numbers)} of them",
                "give the folder of the full data, or another split with --config split=NAME",
            )

        small.sort(key=lambda centre: hash_order(f"{self.salt}/{self.trial}", centre))
        sections = np.repeat(SECTIONS, self.numbers).tolist()
        drawn = dict(zip(small, sections, strict=False))
        return [drawn.get(record.centre, LEFT_OUT) for record in records]
