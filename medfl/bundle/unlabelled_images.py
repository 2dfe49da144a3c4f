"""Images of a data folder that have no label: training images of sites that are named with `--unlabelled`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.bundle.check_own import ids_of
from medfl.bundle.new_images import channels_of, is_volumes
from medfl.bundle.sections import UnlabelledEntries
from medfl.core.documents import Config
from medfl.core.task import SECTIONS
from medfl.data.prepared import Item
from medfl.datasets import own
from medfl.datasets.base import item_of, read_table
from medfl.datasets.readers import cases, grouping, matching, pairs, tables
from medfl.datasets.readers.reading import JOINED
from medfl.datasets.readers.splitting import Record
from medfl.datasets.readers.unlabelled import joined, named


def find(bundle: Bundle, folder: Path) -> UnlabelledEntries:
    """Return the images of a folder that have no label; all, where it has no label at all.

    For a bundle of `medfl new` they are those without a mask, those that the table does not name or gives no class, or
    those of a folder `unlabelled` beside the classes'. For others they lie in such a folder, in one for each centre if
    that is known, or have no mask where a shipped data set has masks.
    """
    ids = ids_of(bundle)
    channels = channels_of(bundle.metadata)
    if not bundle.dataset and isinstance(ids["classes"], list) and "split" in ids:
        return _of_own(folder, ids, channels)

    if bundle.dataset:
        alone = not datasets.get(bundle.dataset).layout(folder)
    else:
        alone = not bundle.sections.has_training_items

    images = folder if alone else folder / own.UNLABELLED
    entries = []
    if images.is_dir():
        files = joined(named([images], is_volumes(bundle.metadata)), channels)
        prefix = "" if alone else f"{own.UNLABELLED}/"
        for name, uri in files.items():
            entries.append(_entry(bundle, prefix + name, uri))

    if bundle.dataset and not alone:
        for name, uri in read_table(bundle.dataset, folder).unlabelled.items():
            entries.append(_entry(bundle, name, uri))

    return UnlabelledEntries(entries, alone)


def _entry(bundle: Bundle, ident: str, uri: str) -> Item:
    files = uri.split(JOINED)
    (first, *below) = ident.split("/")
    centre = below[0] if first == own.UNLABELLED and len(below) > 1 else "unknown"
    image = uri if bundle.dataset or len(files) == 1 else files
    return {"image": image, "id": ident, "centre": centre, "group": ident}


def _of_own(root: Path, ids: Config, channels: int) -> UnlabelledEntries:
    """Return the images of a folder as `medfl new` knows it.

    Those that a table puts into another section, or whose patient has images there, are left out.
    """
    images = own.path_below(root, str(ids.get("images") or "."))
    images = images if images.is_dir() else root
    group_by = ids.get("group_by")
    held_out = set[str]()

    if unlabelled := _alone(root, images, ids, channels):
        dataset = own.OwnImages([], [], cases.read(root, (), unlabelled), unlabelled=unlabelled)
    else:
        dataset = own.found_by(root, ids, lacking=True)
        divided = own.sections_of(root, dataset, group_by, ids.get("split"))
        held_out = {record.group for record, section in divided if section != SECTIONS[0]}

    records = cases.described(root, _grouped(dataset.unlabelled, images, group_by), dataset.rows)
    train = SECTIONS[0]
    entries = []
    for record in records:
        if record.sections.get(cases.SPLIT, train) == train and record.group not in held_out:
            entry = {**item_of(record)}
            entry.pop("label", None)
            entries.append(entry)

    return UnlabelledEntries(entries, bool(unlabelled))


def _alone(root: Path, images: Path, ids: Config, channels: int) -> tuple[Record, ...]:
    """Return the images of a folder in which none has a label; none where some have."""
    if ids.get("masks"):
        masks = own.path_below(root, str(ids["masks"]))
        table = pairs.paired(*matching.match(*own.paths(images, masks, channels > 1)))
        if table.records or table.problems:
            return ()

        return own.unlabelled(table.unlabelled.items())

    if ids.get("labels"):
        if own.path_below(root, str(ids["labels"])).is_file():
            return ()

        return own.unlabelled(tables.image_files(images))

    has_class = any(name in ids["classes"] for name in own.image_folders(root))
    if has_class:
        return ()

    return own.unlabelled(tables.image_files(root))


def _grouped(records: Sequence[Record], images: Path, group_by: str | None) -> Sequence[Record]:
    if not group_by or not records:
        return records
    patients = grouping.by_names(group_by, [own.path_in(images, record) for record in records])
    grouped = []
    for record, patient in zip(records, patients, strict=True):
        grouped.append(replace(record, group=patient or record.group))

    return grouped
