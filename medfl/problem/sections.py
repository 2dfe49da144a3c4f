"""The sections of a problem's data: training, validation and test items, with what reads and transforms them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from monai.data import list_data_collate

from medfl.core.errors import InputError
from medfl.core.task import SECTIONS
from medfl.data.prepared import Item
from medfl.data.sampled import Collate
from medfl.data.samples import drop_label, fill_missing
from medfl.data.source import LACKS, NO_LABEL, Source


@dataclass(frozen=True)
class Section:
    """The data of one section as its engine (trainer or evaluator) takes them.

    Records say what an item lacks (`medfl.data.source.LACKS`, and `NO_LABEL` where such items were asked for).
    """

    source: Source
    items: list[Item]
    loader: Any
    prepare_batch: Callable[..., Any]

    @property
    def first(self) -> tuple[Item, Source, bool]:
        """The first item, of those with a label if there are such, the data set from it on, and whether it has one."""
        at = next((i for i, item in enumerate(self.items) if NO_LABEL not in item), 0)
        source = self.source
        if at:
            source = replace(source, entries=source.entries[at:])

        return self.items[at], source, NO_LABEL not in self.items[at]

    @property
    def collate(self) -> Collate:
        """How the data loader makes a batch of samples."""
        collate: Collate = getattr(self.loader, "collate_fn", list_data_collate)
        return collate

    @property
    def batch_size(self) -> int:
        """Items per batch of the data loader, 1 where it does not say."""
        return int(getattr(self.loader, "batch_size", None) or 1)

    def hiding(
        self, hidden: Collection[str], absent: Mapping[str, Sequence[int]], channels: int
    ) -> Section:
        """Return this section, whose data are a list, with some labels hidden and absent channels as zeros.

        Args:
            hidden: ids of the items with such labels.
            absent: id -> positions of such channels.
            channels: of an image, 0 where none is absent.
        """
        entries = []
        items = []
        for item, entry in zip(self.items, self.source.entries, strict=True):
            ident = str(item["id"])
            if ident in hidden:
                item = {**item, NO_LABEL: True}
                entry = drop_label(entry)

            items.append(item)
            entries.append({**entry, LACKS: tuple(absent.get(ident, ()))})

        source = fill_missing(replace(self.source, entries=entries), channels)

        return replace(self, items=items, source=source)


class Sections(Protocol):
    """The sections of a problem, by name; without test data of its own, "test" gives the validation items."""

    @property
    def has_test(self) -> bool:
        """Whether there are test data."""

    @property
    def test_error(self) -> str:
        """Why the test data cannot be read, "" where they can or there are none."""

    def __getitem__(self, section: str) -> Section:
        """Return a section, opened once."""


@dataclass(frozen=True)
class ReplacedSections:
    """Sections of which some are replaced."""

    base: Sections
    replaced: Mapping[str, Section]

    @property
    def has_test(self) -> bool:
        """Whether there are test data."""
        return self.base.has_test

    @property
    def test_error(self) -> str:
        """Why the test data cannot be read."""
        return self.base.test_error

    def __getitem__(self, section: str) -> Section:
        """Return a section."""
        section = "validate" if section == "test" and not self.has_test else section
        return self.replaced.get(section) or self.base[section]


def check_labels(items_of: Callable[[str], Sequence[Item]], count: int, bundle: str) -> None:
    """Raise InputError, which names the item, if a label in a section is none of a bundle's classes."""
    for section in SECTIONS:
        for item in items_of(section):
            if not 0 <= item.get("label", 0) < count:
                problem = f"item {item['id']!r} of section {section!r} has label {item['label']}"
                allowed = f"{bundle} has {count} classes, labels 0 to {count - 1}"
                raise InputError(problem, allowed, "change this item's label in the data list")
