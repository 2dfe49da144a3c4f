"""Tiny drawn data for a bundle that is not ours, in the layout that its own configuration looks for.

Nothing is known of the bundle but its files. Its data lists are evaluated, under the same guard as in a run, on a
folder that is empty at first; what they looked for and did not find is put there, and they are evaluated again, until
each section has items and the first of each passes its transforms. What the images are like is read from the metadata
and the transforms (`data_needs`), and where these leave it open, tried.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfl.bundle.configuration import Configuration, own_python
from medfl.bundle.engines import find_trainer, own_trainer_class
from medfl.bundle.files import config_file, find, read
from medfl.bundle.sections import BundleSections
from medfl.core.errors import InputError, as_text
from medfl.core.seeding import stream
from medfl.core.task import SECTIONS
from medfl.core.untrusted import override_value
from medfl.datasets.phantoms import phantom
from medfl.policy import admission
from medfl.policy.components import ElsewhereRefused
from medfl.policy.inspection import TRAINING
from medfl.policy.policy import Policy
from medfl.problem.sections import Section
from medfl.storage.atomic import writing
from medfl.storage.places import require_unused
from tools.synthetic_data import shapes
from tools.synthetic_data.data_needs import DataNeeds
from tools.synthetic_data.missing import deepest, missing_path
from tools.synthetic_data.requested_files import (
    CASE,
    DrawnLayout,
    LookUps,
    noting_lookups,
    unmatched,
)

_CASES, _MOST_CASES, _SMALLEST, _LARGEST = 6, 96, 8, 320
_DRAWS = 4
"""How often the first item is tried with each kind of image: random transforms may fail whatever the images are."""


@dataclass(frozen=True)
class Drawn:
    """What was drawn.

    Attributes:
        folder: with the data.
        counts: items of each section.
        files: how many files.
        arguments: what `medfl run` takes of it: --data, where the bundle has an id `dataset_dir`, and --config.
        notes: what the user should know.
    """

    folder: Path
    counts: Mapping[str, int]
    files: int
    arguments: tuple[str, ...]
    notes: tuple[str, ...]


def draw_data(
    path: str,
    folder: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    cases: int = 0,
    size: int | None = None,
    policy: Policy | None = None,
) -> Drawn:
    """Write drawn data for a bundle into the folder `data` of a new or empty folder; all or nothing.

    Args:
        path: the bundle's folder.
        folder: is created with its parents, and marked as a phantom cohort.
        config: ids of the configuration to override.
        seed: the same seed gives the same images.
        cases: of each list; 0: 6, and more where its lists leave some out.
        size: side of the images; default: small, or what the transforms cut out of them.
        policy: what the bundle may do; None: what `medfl.policy.admission` has in force.

    Raises:
        InputError: inspection refuses the bundle, or something that its lists need could not be found out; names the
            file, the id and its error.
    """
    if not 0 <= cases <= _MOST_CASES or not (size is None or _SMALLEST <= size <= _LARGEST):
        given = f"{cases} cases of {size or 'the usual'} pixels a side"
        limits = f"up to {_MOST_CASES} cases, sides from {_SMALLEST} to {_LARGEST}"
        raise InputError(given, limits, "change --cases or --size")
    require_unused(Path(folder), advice="give a new one, or remove this")
    root, target = find(path), Path(folder).resolve()
    policy = admission.in_force() if policy is None else policy
    admission.admit(root, policy, TRAINING)
    existed = target.exists()
    data = target / "data"  # a bundle may list it, and would meet the marker there
    with writing(data, "give another folder"):
        data.mkdir(parents=True)
    try:
        drawn = _Drawing(root, data, config or {}, policy, seed, cases or _CASES, size).run()
        phantom.write_marker(target, root.name, drawn.files, seed)
    except BaseException:
        shutil.rmtree(target)
        if existed:
            target.mkdir()
        raise
    return drawn


class _Stopped(Exception):
    """What stopped an attempt: the error, and what was looked for, None where an item was tried."""


class _Elsewhere(Exception):
    """An item names a path that is not in the folder."""


class _Drawing:
    def __init__(
        self, root: Path, folder: Path, config: Mapping[str, Any], policy: Policy, seed: int, cases: int,
        size: int | None,
    ) -> None:  # fmt: skip
        meta = root / "configs" / "metadata.json"
        self.metadata = read(meta) if meta.is_file() else {}
        self.root, self.folder, self.policy, self.seed, self.overrides = (
            root,
            folder,
            policy,
            seed,
            dict(config),
        )
        self._configure()
        if "dataset_dir" in self.config:
            self.overrides["dataset_dir"] = str(folder)
            self._configure()
        try:
            self.needs = DataNeeds(self.config, self.trainer, self.metadata)
            self.image_forms, self.tries = self.needs.image_forms(size), 0
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            what = "of metadata.json of the form and size that MONAI's schema has"
            raise InputError(
                f"{meta}: network_data_format: {as_text(error)}", what, "repair it"
            ) from error
        end = ".png" if len(self.image_forms[0][0].shape) == 2 else ".nii.gz"
        self.layout = DrawnLayout(folder, self.needs.classes, end, cases)
        self.failed: dict[int, str] = {}
        self.untried = dict[str, str]()
        self.redirected: set[str] = set()

    def _configure(self) -> None:
        """Read the configuration with what is overridden now; nothing is evaluated yet."""

        def configuration(*stems: str) -> Configuration:
            files = [file for stem in stems if (file := config_file(self.root, stem))]
            return Configuration(
                self.root, files, self.overrides, self.metadata, torch.device("cpu"), self.policy
            )

        self.config = configuration("train")
        self.evaluation: Callable[[], Configuration] = lambda: configuration("train", "evaluate")
        self.trainer = find_trainer(self.config)
        self.supervised = not own_trainer_class(self.config, self.trainer)
        self.sections = BundleSections(self.root, self.trainer, self.config, self.evaluation)

    @property
    def need(self) -> shapes.Need:
        return self.image_forms[self.tries % len(self.image_forms)][0]

    def run(self) -> Drawn:
        """Find the layout, then draw all images."""
        counts, notes = list[int](), list[str]()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of loaders with more workers than cores, and of what MONAI changed
            for sections in (SECTIONS[:1], SECTIONS[:2], SECTIONS):
                section, before = (
                    sections[-1],
                    copy.deepcopy((self.layout, self.overrides, self.tries)),
                )
                try:
                    if section != "test" or self.sections.has_test or self.sections.test_error:
                        counts = self._find_layout(sections)
                except InputError as error:
                    if section == "train" or (section == "validate" and self.supervised):
                        raise
                    self.layout, self.overrides, self.tries = before
                    counts = self._find_layout(sections[: len(counts)])
                    notes.append(
                        f"nothing is drawn for its {section} data: {_first_part(error.__cause__ or error)}"
                    )
                    break
        if (form := self.tries % len(self.image_forms)) in self.failed:
            notes.append(f"its random transforms fail on some draws with {self.failed[form]}")
        if self.need.values == (0,):
            notes.append(
                "label images are empty: the values of its points are not in its configuration"
            )
        notes += [
            f"its {section} images are drawn but not tried: {reason}"
            for section, reason in self.untried.items()
        ]
        self._draw_all()
        for key in self.redirected:
            redirected_to = self.overrides.pop(key)
            self._configure()
            if (
                self.config.lists.get(key) != redirected_to
            ):  # a run finds it by itself if it has the folder
                self.overrides[key] = redirected_to
        has_folder = self.overrides.pop("dataset_dir", None) is not None
        arguments = ["--data", str(self.folder)] if has_folder else []
        for key, value in self.overrides.items():
            arguments += ["--config", f"{key}={_typed(value)}"]
        files = sum(path.is_file() for path in self.folder.rglob("*"))
        return Drawn(
            self.folder,
            dict(zip(SECTIONS, counts, strict=False)),
            files,
            tuple(arguments),
            tuple(notes),
        )

    def _find_layout(self, sections: Sequence[str]) -> list[int]:
        """Change the layout until the sections can be read; return their numbers of items."""
        while True:
            try:
                self.layout.per_image = self.image_forms[self.tries % len(self.image_forms)][1]
                self.layout.write(self.need, self.seed)
                self._configure()
                self.files: dict[Path, tuple[str, int | None]] = {}
                return [self._attempt(section) for section in sections]
            except _Stopped as stopped:
                error, lookups = stopped.args
                if not self._change_layout(error, lookups):
                    nothing = "".join(
                        f"; nothing is found by {pattern}"
                        for pattern in unmatched(lookups or [])[:1]
                    )
                    raise InputError(
                        f"{self.root.name}: what its data are to be could not be found out: {_first_part(error)}"
                        + nothing,
                        "what is found out: patterns of files, JSON and CSV lists, npz files, and what metadata.json "
                        "says of images and labels",
                        "write these data yourself, or give the id that it needs with --config ID=VALUE",
                    ) from error

    def _attempt(self, section: str) -> int:
        """Read a section, draw and try its first item; return how many it has."""
        self.section, self.needs.config = section, self.config
        if section == "test":  # what the same evaluator validates on, with evaluate.* merged in
            self.needs.config = config = self.evaluation()
            self.sections = BundleSections(self.root, self.trainer, config, lambda: config)
        with noting_lookups() as lookups:
            try:
                data, entries = self._read(section)
            except InputError as error:
                raise _Stopped(error, lookups) from error
        try:
            files = [dict(self._images(entry)) for entry in entries]
        except (_Elsewhere, ValueError) as error:
            raise _Stopped(error, None) from error
        for path, (name, label) in (files[0] if files else {}).items():
            self._write(path, name, label)
        try:
            if data is not None:
                with own_python(self.root), stream(self.seed, "trial", self.tries):
                    self._try(data)
        except Exception as error:
            if not isinstance(deepest(error), ImportError):
                raise _Stopped(error, None) from error
            self.untried[section] = str(deepest(error))
        self.files |= {path: image for each in files for path, image in each.items()}
        return len(data.source.entries if data else entries)

    def _read(self, section: str) -> tuple[Section | None, list[Any]]:
        """Return a section and the entries of its list; no section where its images need what is not installed."""
        try:
            data = self.sections["validate" if section == "test" else section]
            source = data.source
            entries = (
                source.entries if source.is_list else getattr(source.entries, "data", None) or []
            )
        except InputError as error:
            if not isinstance(deepest(error), ImportError):
                raise
            self.untried[section], config, data = str(deepest(error)), self.needs.config, None
            entries = config.evaluated(config.within(self.needs.dataset(section), "data"))
            if not len(entries):
                problem = f"the data list of section {section!r} is empty"
                raise InputError(
                    problem, "at least one item", "fill it, or give another list by --config"
                ) from None
        return data, [entries[index] for index in range(len(entries))]

    # Images

    def _images(self, entry: Any) -> Iterator[tuple[Path, tuple[str, int | None]]]:
        """Yield the images that an entry of a data list names, whether each is a label or an image, and its class."""
        values = entry if isinstance(entry, Mapping) else {"image": entry}
        label = values.get("label")
        for key, value in values.items():
            for part in value if isinstance(value, list | tuple) else [value]:
                is_file = key in self.needs.loaded or (isinstance(key, str) and shapes.ending(part))
                if not (is_file and isinstance(part, str | Path)):
                    continue
                path, mask = Path(os.path.abspath(part)), shapes.is_mask(key)
                if mask and self.needs.loaded and key not in self.needs.loaded:
                    raise ValueError(f"invalid {key}: {part}")
                if self.layout.end and re.search(
                    rf"case_\d+{re.escape(self.layout.end)}\.", path.name
                ):
                    self.layout.end = ""  # the bundle adds one
                    raise _Elsewhere(path)
                if not path.is_relative_to(self.folder):
                    raise _Elsewhere(part)
                yield (
                    path,
                    ("label" if mask else "image", label if isinstance(label, int) else None),
                )

    def _write(self, path: Path, name: str, label: int | None = None) -> None:
        case = int(case_numbers[-1]) if (case_numbers := CASE.findall(path.name)) else 0
        shapes.write(path, self.need, name, self.seed, case, label)

    def _draw_all(self) -> None:
        """Write the images of all lists, and fill the files that patterns find and no list names."""
        for path, (name, label) in self.files.items():
            self._write(path, name, label)
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not path.stat().st_size and shapes.ending(path):
                self._write(path, str(path.relative_to(self.folder)))

    def _try(self, data: Section) -> None:
        """Let the first item pass the transforms, and the supervised trainer's batch have the channels of metadata."""
        sample: Any = data.source.entries[0]
        for transform in data.source.transforms:
            sample = transform(sample)
        if not self.supervised:
            return
        x, y = data.prepare_batch(data.collate([sample]), torch.device("cpu"), False)
        described, of_batch = self.needs.channels, len(self.need.shape) + 2
        if isinstance(x, Tensor) and described and x.ndim in (of_batch - 1, of_batch):
            channels = x.shape[1] if x.ndim == of_batch else 0
            if channels != described:
                raise ValueError(
                    f"inputs have {channels or 'no'} channels where metadata.json says {described}"
                )
        if (
            isinstance(y, Tensor)
            and y.ndim == of_batch
            and len(self.need.values) > 1
            and not y.any()
        ):
            raise ValueError("no mask has a value but 0")

    # What stopped an attempt changes the layout; False: nothing is known that would help

    def _change_layout(self, error: Exception, lookups: LookUps | None) -> bool:
        cause = deepest(error)
        if isinstance(cause, ElsewhereRefused | _Elsewhere | FileNotFoundError) or missing_path(
            cause
        ):
            return self._add_missing(cause)
        if lookups is not None and self._add_matches(lookups):
            return True
        before = copy.deepcopy(self.layout)
        read_last = [Path(path) for kind, path in reversed(lookups or []) if kind == "file"]
        table = next(
            (self.layout.tables[path] for path in read_last if path in self.layout.tables), None
        )
        self.needs.correct(self.layout, cause, table)
        return self.layout != before or (
            self._try_next_form(cause) if lookups is None else self._add_cases(cause)
        )

    def _add_missing(self, cause: BaseException) -> bool:
        """Put there what was not found, or redirect the id that names it into the folder."""
        if isinstance(cause, _Elsewhere) and not os.path.isabs(cause.args[0]):
            changed, self.layout.absolute = not self.layout.absolute, True
            return changed
        name = (
            cause.args[0]
            if isinstance(cause, _Elsewhere)
            else getattr(cause, "filename", "") or missing_path(cause)
        )
        path, before = Path(os.path.abspath(str(name))), copy.deepcopy(self.layout)
        if not path.is_relative_to(self.folder):
            return self._redirect(path)
        if isinstance(cause, _Elsewhere):
            return True
        if path.suffix in (".json", ".csv", ".tsv"):
            self.layout.tables.setdefault(path, self.needs.table(path))
        elif path.suffix == ".npz":
            self.layout.arrays.setdefault(path, self.needs.arrays(path))
        elif not path.suffix and path not in self.layout.listed:
            self.layout.listed.append(path)
        return self.layout != before

    def _redirect(self, path: Path) -> bool:
        """Give the id whose value leads to a path elsewhere one in the folder."""
        leads = [
            (len(to.parts), key, to)
            for key, to in self.needs.paths(self.section)
            if path.is_relative_to(to)
        ]
        leads = [
            lead
            for lead in leads
            if not self.folder.is_relative_to(lead[2]) and lead[1] not in self.redirected
        ]
        if not leads:
            return False
        _, key, to = max(leads)
        self.redirected.add(key)
        self.overrides[key] = str(self.folder / to.name)
        return True

    def _add_matches(self, lookups: LookUps) -> bool:
        """Give each pattern that finds nothing a file of each case, a listed folder that is empty one of each class."""
        changed, folders = (
            False,
            {Path(path) for kind, path in lookups if kind == "folder" and os.path.isdir(path)},
        )
        for pattern in unmatched(lookups):
            if not Path(pattern).is_relative_to(self.folder):
                changed |= self._redirect(Path(pattern))
            elif pattern not in self.layout.patterns and (
                shapes.ending(pattern) or not Path(pattern).suffix
            ):
                self.layout.patterns.append(pattern)
                changed = True
        if changed or self.layout.patterns:
            return changed
        empty = [
            folder
            for folder in folders
            if folder.is_relative_to(self.folder) and not any(folder.iterdir())
        ]
        of_classes = [folder for folder in empty if folder.parent in self.layout.listed]
        self.layout.patterns += [f"{folder}/*" for folder in of_classes]
        self.layout.listed += [] if of_classes else empty
        return bool(empty)

    def _add_cases(self, cause: BaseException) -> bool:
        few = re.search(
            r"is empty|out of range|num_samples=0|must be non-empty|at least", str(cause)
        )
        self.layout.cases *= 2
        any_asked = self.layout.patterns or self.layout.tables or self.layout.arrays
        return bool(few and any_asked) and self.layout.cases <= _MOST_CASES

    def _try_next_form(self, cause: BaseException) -> bool:
        """Try images of the next kind, after the last those that failed once more, for what is random may pass."""
        self.failed[self.tries % len(self.image_forms)] = as_text(cause)
        self.tries += 1
        return self.tries < _DRAWS * len(self.image_forms)


def _typed(value: Any) -> str:
    """Return a value as a run reads it from its command line."""
    return value if isinstance(value, str) and override_value(value) == value else json.dumps(value)


def _first_part(error: BaseException) -> str:
    """Return what an error is about, without what is allowed and what to do."""
    if isinstance(error, _Elsewhere):
        return f"an item names {error}, and no id leads there"
    return (
        str(error).partition("; ")[0] if isinstance(error, InputError) else as_text(deepest(error))
    )
