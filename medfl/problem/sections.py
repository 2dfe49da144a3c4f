"""The sections of a problem's data: training, validation and test items, and how they are read and transformed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from monai.data import list_data_collate

from medfl.core import SECTIONS, InputError
from medfl.data import LACKS, NO_LABEL, Item, Source, drop_label, fill_missing
from medfl.data.samples import Collate, resample_each
from medfl.data.source import SPACING


@dataclass(frozen=True)
class Section:
    """The data of one section in the form that its engine (trainer or evaluator) takes.

    Records state what an item lacks (`medfl.data.source.LACKS`, and `NO_LABEL` if such items were requested).
    """

    source: Source
    items: list[Item]
    loader: Any
    prepare_batch: Callable[..., Any]

    @property
    def first(self) -> tuple[Item, Source, bool]:
        """The first item (labelled, if there is one), the data set from it on, and whether it has a label."""
        at = next((i for i, item in enumerate(self.items) if NO_LABEL not in item), 0)
        source = self.source
        if at:
            source = replace(source, entries=source.entries[at:])

        return self.items[at], source, NO_LABEL not in self.items[at]

    @property
    def collate(self) -> Collate:
        """How the data loader makes a batch of samples."""
        return getattr(self.loader, "collate_fn", list_data_collate)

    @property
    def batch_size(self) -> int:
        """Items per batch of the data loader, 1 if it does not say."""
        return int(getattr(self.loader, "batch_size", None) or 1)

    def hiding(
        self,
        hidden: Collection[str],
        absent: Mapping[str, Sequence[int]],
        channels: int,
        spacings: Mapping[str, Sequence[float]],
    ) -> Section:
        """Return this section, whose data are a list, with some labels hidden and absent channels set to zero.

        Args:
            hidden: ids of the items whose labels are hidden.
            absent: id -> positions of the absent channels.
            channels: of an image, 0 if none is absent.
            spacings: id -> mm to which the item is resampled, if not to the bundle's spacing.
        """
        entries = []
        items = []
        for item, entry in zip(self.items, self.source.entries, strict=True):
            ident = str(item["id"])
            if ident in hidden:
                item = {**item, NO_LABEL: True}
                entry = drop_label(entry)

            items.append(item)
            entry = {**entry, LACKS: tuple(absent.get(ident, ()))}
            if ident in spacings:
                entry[SPACING] = spacings[ident]

            entries.append(entry)

        source = fill_missing(replace(self.source, entries=entries), channels)
        if spacings:
            source = resample_each(source)

        return replace(self, items=items, source=source)


class Sections(Protocol):
    """The sections of a problem, by name; without test data, "test" returns the validation items."""

    @property
    def has_test(self) -> bool:
        """Whether there are test data."""

    @property
    def test_error(self) -> str:
        """Why the test data cannot be read, "" if they can or there are none."""

    def __getitem__(self, section: str) -> Section:
        """Return a section, opened once."""


@dataclass(frozen=True)
class ReplacedSections:
    """Sections with some of them replaced."""

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
    """Raise InputError, which names the item, if a section has a label that is not one of a bundle's classes."""
    for section in SECTIONS:
        for item in items_of(section):
            if not 0 <= item.get("label", 0) < count:
                raise InputError(
                    f"item {item['id']!r} of section {section!r} has label {item['label']}",
                    f"{bundle} has {count} classes, labels 0 to {count - 1}",
                    "change this item's label in the data list",
                )
