"""Open a bundle on its images: the folder given, one below $MEDFL_DATA, or the phantom cohort, and what they are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from medfl import datasets
from medfl.bundle import parts, unlabelled_images
from medfl.bundle.bundle import Bundle, read_protocol, shipped
from medfl.bundle.files import find, sha256_of, shipped_folders, shipped_root
from medfl.bundle.parts import PartsBundle, open_bundle
from medfl.core.errors import InputError
from medfl.core.run import DataRecord, Run
from medfl.core.seeding import stream
from medfl.core.task import SECTIONS
from medfl.core.terminal import Print
from medfl.data.prepared import Prepared
from medfl.data.source import NO_LABEL
from medfl.datasets import own
from medfl.datasets.phantoms.phantom import PHANTOM_VERSION
from medfl.datasets.readers.reading import JOINED
from medfl.policy.policy import Policy
from medfl.storage.places import PHANTOM, cache_folder

OWN_SPLIT = "bundle"
"""The split of a bundle that is not ours: its own."""

_INSTEAD = {
    "dataset_dir": "--data", "batch_size": "--batch-size", "learning_rate": "--lr", "device": "--device",
    "max_epochs": "--rounds and --local-epochs",
}  # fmt: skip
"""Ids of the shipped bundles that a federated run sets itself, and what a user gives for each."""


def phantom_folder(name: str) -> Path:
    """Return the phantom cohort of a data set, drawn once per user into the cache folder ($XDG_CACHE_HOME/medfl)."""
    folder = cache_folder("phantom") / f"{name}-{PHANTOM_VERSION}"
    if not datasets.is_phantom(folder):
        datasets.write_phantom(name, folder)
    return folder


def without_data(name: str, config: Mapping[str, Any], device: str, policy: Policy | None = None) -> Bundle:
    """Open a bundle without its data; build a shipped one's network once, so that a bad setting of it is told early."""
    for key, instead in _INSTEAD.items():
        if key in config and name in shipped():
            raise InputError(f"--config {key}={config[key]}", f"a federated run sets this id by {instead}", "use that")
    bundle = open_bundle(name, config, device, policy)
    if bundle.is_shipped:  # another's network may need the data folder, which is not known yet
        with stream(0, "trial network"):
            bundle.network()
    return bundle


def protocol_of(name: str) -> Mapping[str, Any]:
    """Return the protocol of a bundle, or of parts in Python."""
    return parts.protocol_of_parts(name) if parts.is_parts(name) else read_protocol(name)


def bundle_of(run: Run) -> str:
    """Return what a recorded run's bundle is opened by: the name of a shipped one, the folder of another."""
    return run.bundle if run.bundle in shipped() and run.data.split != OWN_SPLIT else run.bundle_path


def is_recorded(name_or_path: str, run: Run) -> bool:
    """Tell whether the bundle of a name or folder is the recorded one, by its hash; InputError where none is there."""
    if parts.is_parts(name_or_path):
        return name_or_path == run.bundle_path
    return sha256_of(find(name_or_path), read_protocol(name_or_path)) == run.bundle_sha256


def reopened(
    run: Run,
    config: Mapping[str, Any],
    device: torch.device | str,
    policy: Policy | None = None,
    *,
    given: str | None = None,
    folder: Path | None = None,
    allow_changed: bool = False,
) -> Bundle:
    """Open a recorded run's bundle without its data: today's where it is the recorded one, else the recorded folder.

    `given` is a folder to take instead; `allow_changed` takes today's of a shipped bundle that has changed since.

    Raises:
        InputError: no bundle is there, or it has changed since the run.
    """
    name = bundle_of(run)
    is_ours, there, current = name in shipped(), Path(run.bundle_path), given or name
    if not is_recorded(current, run):
        if is_ours and not given and (there / "configs").is_dir() and is_recorded(run.bundle_path, run):
            current = run.bundle_path
        elif not (is_ours and allow_changed and not given):
            raise _changed_error(run, current, folder)
    bundle = open_bundle(current, config, device, policy)
    if is_ours:  # a former version's is, too
        bundle.name, bundle.is_shipped = name, True
    return bundle


def _changed_error(run: Run, current: str, folder: Path | None) -> InputError:
    """Return the error of a run whose bundle is not the recorded one; it says how that is given."""
    where, out = (f" in {folder}", str(folder)) if folder else ("", "DIR")
    given = f"bundle {run.bundle!r} has changed since the run{where}: that of {current} has another configuration hash"
    what = "the folder of the recorded one"
    if (root := shipped_root()) and bundle_of(run) in shipped():
        path = shipped_folders()[run.bundle].relative_to(root)
        what = f"bundles/{path} of medfl {run.versions.get('medfl')}, unpacked to FOLDER"
    advice = f"name {what}: medfl run FOLDER --resume --out {out}, or medfl run FOLDER --from {out}/run.json"
    return InputError(given, f"the recorded one is {run.bundle_sha256[:12]}", advice)


@dataclass(frozen=True)
class BundleWithData:
    """A bundle open on its data: their folder ("" where the bundle says it), their split, and remarks for the user."""

    bundle: Bundle
    folder: str
    split: str
    notes: tuple[str, ...]

    def record(self) -> DataRecord:
        """Describe the images; hashes them, so this comes after what is quick to refuse."""
        bundle, counts = self.bundle, {section: len(self.bundle.data(section)) for section in SECTIONS}
        if not bundle.is_shipped or bundle.sections.images_only:
            drawn, notes = _is_drawn(bundle, self.folder), self.notes
            parts_sections = bundle.parts.sections if isinstance(bundle, PartsBundle) else None
            checksum = parts_sections.checksum if parts_sections else _foreign_checksum(bundle)
        else:
            drawn, notes = datasets.is_phantom(self.folder), tuple(datasets.notes(bundle.name, self.folder))
            checksum = datasets.checksum(bundle.name, self.folder, self.split)
            if any(NO_LABEL in item for item in bundle.items("train")):
                checksum = hashlib.sha256(f"{checksum} {_foreign_checksum(bundle)}".encode()).hexdigest()
        return DataRecord(PHANTOM if drawn else "real", self.folder, checksum, self.split, counts, notes)


def with_data(
    name: str,
    data: str | None,
    config: Mapping[str, Any],
    device: str,
    *,
    say: Print = str,
    seed: int = 0,
    preferred: str | None = None,
    bundle: Bundle | None = None,
    policy: Policy | None = None,
    unlabelled: bool = False,
) -> BundleWithData:
    """Open a bundle on its images.

    `data` is a folder, "phantom", or None for a folder below $MEDFL_DATA and else the phantom, which is said.
    `preferred` is the split to take where the folder offers it, `seed` that of splits that are drawn. `bundle` has this
    configuration and was opened before; its data must not have been asked for. With `unlabelled` images without a label
    are training images too.

    Raises:
        InputError: no such images, or another bundle's phantom is asked for.
    """
    if name not in shipped():
        return _foreign(bundle or open_bundle(name, config, device, policy), data, config, unlabelled)
    if unlabelled and data is not None and _is_unknown(name, data):
        bundle, images = bundle or open_bundle(name, config, device, policy), Path(data).absolute()
        bundle.override({"dataset_dir": str(images)})
        return BundleWithData(bundle, str(images), "", _take_unlabelled(bundle, images))
    folder = _folder(name, data, say).absolute()  # a bundle looks below folders that are named in full
    split = datasets.trial(name, str(config.get("split") or _split(name, folder, preferred)), seed)
    bundle = bundle or open_bundle(name, config, device, policy)
    bundle.override({"dataset_dir": str(folder), "split": split})
    notes = (*datasets.notes(name, folder), *(_take_unlabelled(bundle, folder) if unlabelled else ()))
    return BundleWithData(bundle, str(folder), split, (f"split: {split}", *notes))


def _is_unknown(name: str, data: str) -> bool:
    """Tell whether a folder has no layout of a shipped bundle's data set."""
    try:
        datasets.locate(name, data)
    except InputError:
        return Path(data).is_dir()
    return False


def _take_unlabelled(bundle: Bundle, folder: Path) -> tuple[str, ...]:
    """Have a folder's images without labels among the training items; return a note on them."""
    bundle.sections.find_unlabelled = partial(unlabelled_images.find, bundle, folder)
    count = sum(NO_LABEL in item for item in bundle.items("train"))
    return (f"{count} training images have no label",) if count else ()


def _folder(name: str, data: str | None, say: Print) -> Path:
    """Return the folder of a shipped bundle's images: the one given, one below $MEDFL_DATA, or the phantom cohort."""
    if data == PHANTOM:
        return phantom_folder(name)
    if data is not None or os.environ.get("MEDFL_DATA"):
        try:
            return datasets.locate(name, data)
        except InputError:
            if data is not None:
                raise
    say(f"NO REAL DATA for {name}: neither --data nor $MEDFL_DATA holds it; using a PHANTOM cohort of drawn images")
    return phantom_folder(name)


def _split(name: str, folder: Path, preferred: str | None) -> str:
    """Return the protocol's split where this folder offers it, else the folder's own default."""
    offered = datasets.splits(name, folder)
    return str(preferred) if preferred in offered else offered[0]


def _foreign(bundle: Bundle, data: str | None, config: Mapping[str, Any], unlabelled: bool) -> BundleWithData:
    if data == PHANTOM:
        advice = "give this bundle's data folder, or omit --data"
        raise InputError("--data phantom", "phantoms exist for the shipped bundles", advice)
    folder = str(config.get("dataset_dir", ""))
    if data is not None:
        folder = str(Path(data).expanduser().resolve())
        bundle.override({"dataset_dir": folder})
    unlabelled = unlabelled and not isinstance(bundle, PartsBundle) and "dataset_dir" in bundle
    bare = _take_unlabelled(bundle, Path(str(bundle.get("dataset_dir")))) if unlabelled else ()
    notes = bundle.notes + bare  # which open the training data, after it is known that images without labels count
    if _is_drawn(bundle, folder):
        notes += ("the images are of a PHANTOM cohort: drawn, not real ones",)
    if not bundle.has_test:
        error = bundle.test_error
        why = f"its test data cannot be read ({error})" if error else "this bundle names no test data"
        notes += (f"{why}: the validation items serve as test items, so 'best' is optimistic",)
    return BundleWithData(bundle, folder, OWN_SPLIT, notes)


def _foreign_checksum(bundle: Bundle) -> str:
    """Hash the items of a bundle's own data lists and the sizes of the files they name."""
    digest = hashlib.sha256()
    for section in SECTIONS:
        data = bundle.data(section)
        for record, index in zip(bundle.items(section), range(len(data)), strict=True):
            digest.update(json.dumps([section, record], sort_keys=True).encode())
            for path in _paths(data[index] if isinstance(data, list | tuple) else None):
                if path.is_file():
                    digest.update(str(path.stat().st_size).encode())
    return digest.hexdigest()


def _is_drawn(bundle: Bundle, folder: str) -> bool:
    """Tell whether the images of a bundle that is not ours are drawn ones."""
    if isinstance(bundle, PartsBundle) and bundle.parts.drawn:
        return True
    lists = [data for section in SECTIONS if isinstance(data := bundle.data(section), list | tuple)]
    paths = [path for data in lists for entry in data for path in _paths(entry)]
    return own.cohort_of([*([folder] if folder else []), *paths]) is not None


def _paths(entry: object) -> Iterator[Path]:
    """Give all texts and paths in an entry of a bundle's own data list."""
    for value in entry.values() if isinstance(entry, Mapping) else ():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, str | os.PathLike):
                yield from map(Path, str(part).split(JOINED))


def prepared_sections(bundle: Bundle, *, jobs: int = 1, progress: bool = False) -> dict[str, Prepared]:
    """Run the deterministic transforms of all sections once; without test data the validation items serve as such."""
    names = [section for section in SECTIONS if section != "test" or bundle.has_test]
    sections = {section: bundle.prepared(section, jobs=jobs, progress=progress) for section in names}
    return {**sections, "test": sections.get("test", sections["validate"])}
