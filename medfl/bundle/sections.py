"""The data of a bundle's sections, found through its trainer and evaluators as MONAI would run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from monai.engines.utils import default_prepare_batch
from torch.utils.data import DataLoader

from medfl.bundle.configuration import Configuration
from medfl.bundle.engines import find_evaluator
from medfl.core import Document, InputError, without
from medfl.data import LACKS, NO_LABEL, Item, Source, drop_label, fill_missing, records, take_apart
from medfl.data.samples import is_unlabelled, with_all_channels
from medfl.problem import Section, tensor_described

_VALIDATION_SETS = ("validate#dataset", "val_dataset", "val#dataset")


def _as_loaded(batch: Any, *_: object) -> tuple[Any, None]:
    return batch, None


@dataclass(frozen=True)
class UnlabelledEntries:
    """Images without labels: entries for a data list, and whether the data contain no others (`alone`)."""

    entries: Sequence[Item] = ()
    alone: bool = False


class BundleSections:
    """Sections by name; `evaluation` reads the training configuration with evaluate.* merged in.

    A custom trainer (`has_own_trainer`) unpacks batches itself, and may not need validation data.
    """

    def __init__(
        self,
        root: Path,
        trainer: str,
        config: Configuration,
        evaluation: Callable[[], Configuration],
        has_own_trainer: bool = False,
        find_unlabelled: Callable[[], UnlabelledEntries] | None = None,
    ) -> None:
        """Store the configurations; nothing in them is evaluated yet."""
        self.root = root
        self._trainer = trainer
        self._config = config
        self._read = evaluation
        self._opened: dict[str, Section] = {}
        self.test_error = ""
        self._has_own_trainer = has_own_trainer
        has_validation = find_evaluator(config) is not None or any(
            key in config for key in _VALIDATION_SETS
        )
        self._unscored = has_own_trainer and not has_validation
        self._find_unlabelled = find_unlabelled

    @cached_property
    def _unlabelled(self) -> UnlabelledEntries | None:
        """The images without labels, None if they are not requested."""
        if self._find_unlabelled is None:
            return None

        return self._find_unlabelled()

    @property
    def images_only(self) -> bool:
        """Tell whether the data have no labels at all: then there are only training items."""
        return self._unlabelled is not None and self._unlabelled.alone

    @property
    def has_training_items(self) -> bool:
        """Tell whether the bundle's training data list has items."""
        dataset_id = self._loader_ids(self._config, "train")[1]
        try:
            return len(take_apart(self._config.evaluated(dataset_id)).entries) > 0
        except (InputError, TypeError):
            return False

    @cached_property
    def _evaluation(self) -> Configuration:
        return self._read()

    @cached_property
    def has_test(self) -> bool:
        """Tell whether evaluate.* names data of its own that exist here; otherwise the validation items are used."""
        if self._unscored or self.images_only:
            return True  # no items replace others

        if self._validation_data(self._config) == self._validation_data(self._evaluation):
            return False

        try:
            self._opened["test"] = self._open("test")
        except InputError as error:
            # test data of many bundles are laid out differently from their training data
            self.test_error = str(error)

        return not self.test_error

    def _validation_data(self, config: Configuration) -> Document:
        """Return the unevaluated content of the validation data list, and of what it refers to."""
        dataset_id = self._loader_ids(config, "validate")[1]
        return config.dependencies_of(config.within(dataset_id, "data"))

    def _loader_ids(self, config: Configuration, section: str) -> tuple[str, str]:
        """Return the ids of a section's data loader ("" if there is none) and data set."""
        if section == "train":
            loader, _ = config.raw(f"{self._trainer}#train_data_loader")
        elif evaluator := find_evaluator(config):
            loader, _ = config.raw(f"{evaluator}#val_data_loader")
        elif dataset_id := next((key for key in _VALIDATION_SETS if key in config), ""):
            return "", dataset_id
        else:
            raise InputError(
                f"{config.file} has no id 'validate#evaluator' (nor 'validate#dataset')",
                "a bundle to be federated has validation data",
                "add a validate section",
            )

        return loader, config.within(loader, "dataset")

    def validation_batch_size(self) -> int:
        """Return the items per batch of the validation loader; its data are opened only if necessary."""
        key = f"{self._loader_ids(self._config, 'validate')[0]}#batch_size"
        if key in self._config:
            return int(self._config.evaluated(key))

        return self["validate"].batch_size

    def __getitem__(self, section: str) -> Section:
        """Return a section, opened once; InputError, naming the id, if its data cannot be divided or are missing."""
        if section != "train" and (self._unscored or self.images_only):
            return Section(Source([]), [], None, _as_loaded)

        if section == "test" and not self.has_test:
            section = "validate"

        if section not in self._opened:
            self._opened[section] = self._open(section)

        return self._opened[section]

    def _open(self, section: str) -> Section:
        config = self._evaluation if section == "test" else self._config
        loader_id, dataset_id = self._loader_ids(config, section)
        data_id = config.within(dataset_id, "data")
        if self.images_only:
            config.override({data_id: [{}]})  # the bundle would look for labels

        dataset = config.evaluated(dataset_id)
        try:
            source = take_apart(dataset.dataset if isinstance(dataset, DataLoader) else dataset)
        except TypeError as error:
            raise InputError(
                f"{config.file}: id {dataset_id!r}: {error}",
                "a data set to be divided can be indexed",
                "give it a data set with __len__ and __getitem__",
            ) from error

        if source.is_list:
            source = replace(source, entries=list(map(_without_marks, source.entries)))

        if section == "train" and self._unlabelled is not None:
            source = _with(source, self._unlabelled)

        if len(source.entries) == 0:
            raise InputError(
                f"{config.file}: the data list {data_id!r} of section {section!r} is empty",
                "each section has at least one item",
                "check dataset_dir: give the data folder with --data",
            )

        engine = self._trainer if section == "train" else find_evaluator(config)
        prepare_batch: Callable[..., Any] = default_prepare_batch
        if self._has_own_trainer:
            prepare_batch = _as_loaded
        elif engine and config.raw(f"{engine}#prepare_batch")[1] is not None:
            prepare_batch = config.evaluated(f"{engine}#prepare_batch")

        folder = self.root
        if "dataset_dir" in config:
            folder = config.evaluated("dataset_dir")

        items = records(source, section, [Path(str(folder)).resolve(), self.root])
        items, source = self._with_channels(items, source)
        return Section(
            source, items, config.evaluated(loader_id) if loader_id else None, prepare_batch
        )

    def _with_channels(self, items: list[Item], source: Source) -> tuple[list[Item], Source]:
        """Return a data list in which images with a file per channel have one for each channel."""
        channels = int(
            tensor_described(self._config.metadata, "inputs", "image").get("num_channels") or 0
        )
        if channels < 2 or not source.is_list:
            return items, source

        numbered = "masks" in self._config and "split" in self._config  # medfl new wrote it
        entries = [with_all_channels(entry, channels, numbered) for entry in source.entries]
        marked = []
        for item, entry in zip(items, entries, strict=True):
            if isinstance(entry, Mapping) and entry.get(LACKS):
                item = {**item, LACKS: entry[LACKS]}

            marked.append(item)

        if not any(LACKS in item for item in marked):
            return items, source

        return marked, fill_missing(replace(source, entries=entries), channels)


def _without_marks(entry: Any) -> Any:
    """Return an entry as the bundle gives it; missing parts are detected here and never taken from it."""
    if isinstance(entry, Mapping) and (NO_LABEL in entry or LACKS in entry):
        return without(entry, (NO_LABEL, LACKS))

    return entry


def _with(source: Source, more: UnlabelledEntries) -> Source:
    """Return a data list with unlabelled images, sorted in by id."""
    entries = []
    if source.is_list and not more.alone:
        entries += source.entries

    entries += more.entries
    for place, entry in enumerate(entries):
        if is_unlabelled(entry):
            entries[place] = drop_label(entry)

    if more.entries and all(isinstance(entry, Mapping) and "id" in entry for entry in entries):
        entries.sort(key=lambda entry: str(entry["id"]))

    bare = any(isinstance(entry, Mapping) and NO_LABEL in entry for entry in entries)
    if bare:
        return fill_missing(replace(source, entries=entries))

    return source
