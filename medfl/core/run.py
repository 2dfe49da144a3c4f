"""Run: the frozen record of everything that a federated run depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from medfl.core.documents import Config, Document
from medfl.core.errors import InputError
from medfl.core.mappings import fields_of, pick_known
from medfl.core.settings import (
    ADDED_LATER,
    POLY,
    SETTINGS,
    WITHDRAWN,
    GeneralSettings,
    ProtocolSettings,
)
from medfl.core.type_checks import Count, read_record

_OPTIONAL = ("public", "text", "adapted")
_PLACES = ("bundle_path", "partition.notes", "data.folder", "data.counts", "data.notes")
_NOT_HASHED = (*_PLACES, "metrics", "score_trained")
"""Paths, notes, and scoring beyond Dice cannot change a weight."""


@dataclass(frozen=True)
class DataRecord:
    """Which images a run uses.

    Attributes:
        source: "real" or "phantom".
        folder: its path on this machine.
        checksum: SHA-256 over ids, labels, sections and file contents.
        split: name of the train/validate/test split.
        counts: section -> number of items.
        notes: what a reader of the results must know about these data.
    """

    source: str
    folder: str
    checksum: str
    split: str
    counts: Mapping[str, Count]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartitionRecord:
    """Which items each site has: site -> section -> item ids."""

    spec: str
    seed: Count
    notes: tuple[str, ...]
    sites: Mapping[str, Mapping[str, list[str]]]

    def owners(self, section: str) -> dict[str, str]:
        """Return id -> site for the items of a section that belong to a site."""
        owners: dict[str, str] = {}
        for site, ids in self.sites.items():
            owners |= dict.fromkeys(ids.get(section, ()), site)

        return owners


@dataclass(frozen=True)
class PublicRecord:
    """Which public data a run uses, and which teachers labelled them.

    Attributes:
        bundle: name of the bundle that provides them.
        bundle_sha256: hash of its configuration files.
        config: overridden ids of its configuration.
        data: its images.
        section: the section used.
        items: number of its items used.
        ids_sha256: hash over their ids, in order.
        teachers: name and weight hash of each.
    """

    bundle: str
    bundle_sha256: str
    config: Config
    data: DataRecord
    section: str
    items: Count
    ids_sha256: str
    teachers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TextRecord:
    """Which text embeddings a run uses.

    Attributes:
        plm: name of the language model that made them.
        sha256: hash of their shape and values.
        shape: (K, M, D): classes, prompts, dimensions.
    """

    plm: str
    sha256: str
    shape: tuple[Count, ...]


@dataclass(frozen=True)
class Run(GeneralSettings, ProtocolSettings):
    """Every setting of a run. The same `Run` gives the same weights, bit for bit on CPU.

    Attributes:
        bundle: name of the bundle.
        bundle_path: its folder.
        bundle_sha256: hash of its configuration files.
        method: method name or dotted path.
        options: every option of the method, including defaults.
        config: overridden ids of the bundle's configuration.
        data: its images.
        partition: which site has which.
        versions: versions of medfl, torch, monai and numpy.
        public: the public data, None if the method uses none.
        text: the text embeddings, None if the method uses none, and in records without this entry.
        adapted: adaptations of a bundle written for older MONAI or NumPy, by name
            (`medfl.bundle.zoo.compatibility`).
    """

    bundle: str
    bundle_path: str
    bundle_sha256: str
    method: str
    options: Config
    config: Config
    data: DataRecord
    partition: PartitionRecord
    versions: Mapping[str, str]
    public: PublicRecord | None = None
    text: TextRecord | None = None
    adapted: tuple[str, ...] = ()

    def to_dict(self) -> Document:
        """Return the record as plain JSON values, without empty optional parts and later settings at their defaults."""
        document: Document = json.loads(json.dumps(dataclasses.asdict(self)))
        for name in _OPTIONAL:
            if not document[name]:
                document.pop(name)

        # A setting added later is omitted at its default, so that hashes of older runs stay.
        for name, default in ADDED_LATER.items():
            if document[name] == default:
                document.pop(name)

        return document

    @classmethod
    def from_dict(cls, document: Config) -> Run:
        """Invert `to_dict`, ignoring other keys.

        Raises:
            InputError: a setting is missing or of the wrong type.
        """
        optional = {*_OPTIONAL, *ADDED_LATER}
        names = fields_of(cls)
        try:
            for name in names:
                if name not in optional and name not in document:
                    raise ValueError(f"without {name!r}")

            run = read_record(cls, pick_known(document, names))
            for name, entry in SETTINGS.items():
                if not entry.within_limits(getattr(run, name)):
                    raise ValueError(f"{name} is {getattr(run, name)}, not {entry.allowed}")
        except (TypeError, ValueError) as error:  # TypeError: it is not a mapping
            problem = str(error)
            if not problem.startswith("without"):
                problem = f"that is damaged ({error})"

            raise InputError(
                f"run.json {problem}", "it is a run.json that medfl wrote", "give that file"
            ) from error

        return run

    @property
    def run_hash(self) -> str:
        """SHA-256 over everything that can change a weight, as 64 hexadecimal digits."""
        return _hash_of(self.to_dict())

    def difference(self, other: Run) -> list[str]:
        """Name the settings in which two runs differ, except the number of rounds and paths."""
        left = {**ADDED_LATER, **self.to_dict()}
        right = {**ADDED_LATER, **other.to_dict()}
        may_differ = [*_PLACES]
        if self.decay_per != POLY:
            may_differ.append("rounds")
        # A record without an entry for text is compared without it.
        if self.text is None or other.text is None:
            may_differ.append("text")

        for document in (left, right):
            _forget(document, may_differ)

        lines = []
        for name in {**left, **right}:
            now = left.get(name)
            was = right.get(name)
            if now == was:
                continue

            # If both have a part, only its differing entries are named.
            if isinstance(now, Mapping) and isinstance(was, Mapping):
                for key in {**now, **was}:
                    if now.get(key) != was.get(key):
                        lines.append(_change(f"{name}.{key}", now.get(key), was.get(key)))
            else:
                lines.append(_change(name, now, was))

        return lines


def withdrawn_settings(document: Config) -> Document:
    """Return the settings in a record that nothing reads any more, but for those at their defaults."""
    withdrawn = {}
    for name, default in WITHDRAWN.items():
        if document.get(name, default) != default:
            withdrawn[name] = document[name]
    return withdrawn


def hash_as_recorded(document: Config) -> str:
    """Return the run hash of a record as its writer computed it; raises as `Run.from_dict`."""
    return _hash_of({**Run.from_dict(document).to_dict(), **withdrawn_settings(document)})


def _hash_of(document: Document) -> str:
    _forget(document, _NOT_HASHED)
    # The path of a table has no effect: its contents are in the ids of the partition.
    if document["partition"]["spec"].startswith("file:"):
        document["partition"]["spec"] = "file"
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def examines(run: Run) -> bool:
    """Tell whether a run trains nothing and only evaluates its initial weights."""
    return run.rounds == 0


def without_round_limit(run: Run) -> Run:
    """Return a run with 0 rounds: runs that differ only in their number of rounds continue each other.

    A run with a schedule over all its rounds is returned unchanged.
    """
    return run if run.decay_per == POLY else replace(run, rounds=0)


def _forget(document: Document, paths: Iterable[str]) -> None:
    """Drop these entries from a record, named by their keys from the top joined by dots, and all locations.

    Locations are the GPU used, and the paths of public data, teachers and text, which are identified by hashes.
    """
    for path in paths:
        *parents, leaf = path.split(".")
        node = document
        for parent in parents:
            node = node[parent]

        node.pop(leaf, None)

    document["device"] = document["device"].partition(":")[0]
    if "text" in document:
        document["text"].pop("plm")
        document["options"].pop("plm", None)

    if "public" in document:
        for name in ("folder", "counts", "notes"):
            document["public"]["data"].pop(name)
        document["public"]["teachers"] = [digest for _, digest in document["public"]["teachers"]]
        for name in ("public", "teachers"):
            document["options"].pop(name, None)


def _change(name: str, now: object, was: object) -> str:
    return f"{name}: {_short(now)} was {_short(was)}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:40] + "…"
