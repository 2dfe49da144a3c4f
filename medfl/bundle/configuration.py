"""Configuration: a MONAI bundle's training configuration, read without its side effects.

Ids are looked up one by one: the lists `run` and `initialize` never are, and trainers and evaluators are created only
by `engines`, without their handlers, which write files. Before parsing, transforms that save or invert are disabled
everywhere, and caching data sets, in memory or in files, become the plain `Dataset` over the same list.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from monai.bundle import ConfigParser, ReferenceResolver
from monai.bundle.utils import merge_kv

from medfl.bundle.files import read
from medfl.bundle.guarded import guarded_parser
from medfl.bundle.zoo import compatibility, conventions, monai_networks
from medfl.bundle.zoo.failures import explained
from medfl.core import (
    Config,
    Document,
    InputError,
    as_text,
    did_you_mean,
    pick_known,
    printable,
    stream,
)
from medfl.networks.initialisation import INIT_WEIGHTS
from medfl.policy.components import replace_removed
from medfl.policy.policy import Policy

_ENGINE = re.compile(r"\w*(Trainer|Evaluator)")
_UNSCORED = re.compile(r"(SaveImage|SaveClassification|WriteFileMapping|Invert)(d|D|Dict)?")
"""Postprocessing that writes files or needs the original grid: scoring does not need it."""
_CACHES = (
    "CacheDataset",
    "SmartCacheDataset",
    "CacheNTransDataset",
    "PersistentDataset",
    "LMDBDataset",
    "GDSDataset",
)
_ASIDE = ("train_handlers", "val_handlers", "key_train_metric", "additional_metrics", "amp")
"""Arguments of engines that write files, or that nothing else uses."""
_LOADED = ("DecathlonDataset", "MedNISTDataset", "TciaDataset")
"""Data sets that find their own files, and would cache them all at once."""


class Configuration:
    """The merged content of configuration files, with overrides.

    Args:
        root: the bundle's folder, which replaces any value of `bundle_root` in the files.
        files: JSON or YAML files; later ones override earlier ones as MONAI merges them.
        overrides: id -> value, for existing ids.
        metadata: the target of `_meta_`.
        device: replaces the id `device`.
        policy: what the bundle may do beyond the default.

    Raises:
        InputError: a file cannot be read, or an override names no id.
    """

    def __init__(
        self,
        root: Path,
        files: Sequence[Path],
        overrides: Config,
        metadata: Config,
        device: torch.device,
        policy: Policy,
    ) -> None:
        """Read the files; nothing in them is evaluated yet."""
        self._policy = policy
        self._places = {root} | _places(overrides.values())
        self._device = device
        self.root = root
        self.file = files[-1]
        self._first_file = files[0].name
        self.metadata = dict(metadata)
        self.dropped: set[str] = set()
        self.recounted = False  # whether a Dice metric ignores structures that a reference lacks
        self._folder = ""
        self._merged = parser = ConfigParser({})

        for file in files:
            for key, value in read(file).items():
                with _report(
                    f"{file}: {key!r} cannot be merged",
                    "its parent ids exist in the training configuration",
                ):
                    merge_kv(parser, key, value)

        self.adapted = compatibility.give_numpy_names(
            [*compatibility.python_texts(root), str(parser.get())]
        )
        fixed = {"bundle_root": str(root), "device": f"$torch.device('{device}')"}
        self.override({**{k: v for k, v in fixed.items() if k in parser}, **overrides})

    def override(self, values: Config) -> None:
        """Set ids to other values, unevaluated, and forget evaluated objects; InputError for a missing id."""
        ids = list(self._merged.get())
        for key, value in by_existing_ids(values, self._merged.get()).items():
            # its references may be in a file that is not read with it
            referred = re.search(rf"@{re.escape(key)}\b", str(self._merged.get()))
            if key not in self._merged and not referred:
                raise InputError(
                    f"configuration id {key!r} of bundle {self.root.name!r}",
                    f"{self._first_file} has {', '.join(ids)}",
                    did_you_mean(key, ids, "override one of these ids"),
                )

            if key == "dataset_dir":
                value = self._folder = conventions.folder_like(self._merged[key], value)
            self._merged[key] = value

        self._places |= _places(values.values())
        content = self._merged.get()
        if self.file.stem == "inference":
            content = conventions.without_fetching(content)

        self.lists: dict[str, str] = {}
        if self._folder:
            self.lists = conventions.data_lists(content, self.root, self._folder)

        self._content = self._harmless({**content, **self.lists, "_meta_": self.metadata})
        self._parser = self._parse()

    def open_places(self, paths: Iterable[Path | str]) -> None:
        """Allow this bundle to read files and folders that a user named, or that another bundle may read."""
        self._places |= _places(map(os.path.abspath, paths))

    def _parse(self, without: Iterable[str] = ()) -> ConfigParser:
        with _report(
            f"{self.file}: its references (%) cannot be followed",
            "they name ids and files that exist",
        ):
            parser = guarded_parser(
                deepcopy(self._content), self._policy, own_modules(self.root), self._places
            )
            for key in without:
                parser[key] = None

            # twice, as MONAI does: a macro may hold another
            parser.resolve_macro_and_relative_ids()  # type: ignore[no-untyped-call]
            parser.parse()

        return parser

    def _harmless(self, node: Any, key: str = "") -> Any:
        if isinstance(node, list):
            return list(map(self._harmless, node))

        if isinstance(node, str):
            if (
                node.startswith("%")
                and ConfigParser.split_path_id(node[1:])[0]
                and not self._policy.trusted
            ):
                raise InputError(
                    f"{printable(node)!r}, a part of another file",
                    "ids of this configuration",
                    "write it out",
                )

            return conventions.rewritten(key, node, self._device)

        if not isinstance(node, Mapping):
            return node

        old = target_name(node)
        node = replace_removed(node)
        safe = {key: self._harmless(value, key) for key, value in node.items()}
        target = target_name(node)
        if target != old:
            self.adapted.add(f"{old}:{target}")

        counted = conventions.with_missing(safe)
        self.recounted |= counted != safe
        safe = dict(counted)
        for name in compatibility.idle_arguments(target, safe):
            del safe[name]
            self.adapted.add(f"{target}.{name}")

        # prepared images are cached by medfl, whatever a bundle would do
        if target in _CACHES:
            arguments = pick_known(safe, ("_disabled_", "_requires_", "data", "transform"))
            return {"_target_": "monai.data.Dataset", **arguments}

        if target in _LOADED:
            return {**safe, "cache_num": 0}

        if _UNSCORED.fullmatch(target):
            self.dropped.add(target)
            return {"_target_": node["_target_"], "_disabled_": True}

        return safe

    # Looking without evaluating

    def __contains__(self, key: str) -> bool:
        return key in self._parser

    @property
    def ids(self) -> list[str]:
        """The top-level ids."""
        return [key for key in self._content if key != "_meta_"]

    def raw(self, key: str) -> tuple[str, Any]:
        """Follow plain references (`@other#id`) from an id; return the last id and what it holds (None if absent)."""
        # of references that go round in a circle
        visited = set()
        while key in self._parser and key not in visited:
            visited.add(key)
            node = self._parser.get(key)
            if not (isinstance(node, str) and node.startswith("@")):
                return key, node

            key = node[1:].replace("::", "#")

        return key, None

    def within(self, key: str, part: str) -> str:
        """Return the id where a component's argument is written, or the component's id if it has none."""
        written_at, node = self.raw(f"{key}#{part}")
        return key if node is None else written_at

    def nodes(self, target: str) -> Iterator[tuple[str, Config]]:
        """Yield id and content of every component whose class has this name, anywhere."""
        return (part for part in components(self._parser.get()) if target_name(part[1]) == target)

    def dependencies_of(self, key: str, parser: ConfigParser | None = None) -> Document:
        """Return the unevaluated content of an id and of everything that it refers to."""
        contents = {}
        parser = parser or self._parser
        todo = [key.replace("#", "::")]
        while todo:
            key = todo.pop()
            if key not in contents and key in parser:
                contents[key] = parser.get(key)
                todo += ReferenceResolver.find_refs_in_config(contents[key], key)

        return contents

    # Evaluating

    def evaluated(self, key: str) -> Any:
        """Return the object of an id, the same one each time; InputError names an id that fails, and the cause."""
        # a stream for lists that the bundle shuffles without its own seed
        with stream(0, "configuration"):
            return self._evaluate(self._parser, key)

    def build_new(self, *keys: str) -> list[Any]:
        """Return new objects of ids that belong together; random values are drawn from the caller's stream."""
        parser = self._parse()
        return [self._evaluate(parser, key) for key in keys]

    def engines(self, trainer: str, *evaluators: str) -> list[Any]:
        """Return a new trainer and its evaluators, without their handlers."""
        keys = (trainer, *evaluators)
        aside = [*(f"{key}#{part}" for key in keys for part in _ASIDE), f"{trainer}#postprocessing"]
        parser = self._parse([key for key in aside if key in self._parser])
        return [self._evaluate(parser, key, keys) for key in keys]

    def _evaluate(self, parser: ConfigParser, key: str, engines: Sequence[str] = ()) -> Any:
        if key not in parser:
            raise InputError(
                f"{self.file} has no id {key!r}", "the bundle's trainer needs it", "add it"
            )
        for dependency, node in self.dependencies_of(key, parser).items():
            if (
                isinstance(node, Mapping)
                and _ENGINE.fullmatch(target_name(node))
                and dependency.replace("::", "#") not in engines
            ):
                raise InputError(
                    f"{self.file}: id {key!r} needs {dependency.replace('::', '#')!r}, a {target_name(node)}",
                    "trainers and evaluators are not made here: their handlers write files",
                    "take the reference to it out of this id",
                )

        with (
            own_python(self.root) if self._policy.runs_scripts else nullcontext(),
            compatibility.arrays_in_pickles(),
            warnings.catch_warnings(),
        ):
            # `json.load(open(…))` is common in bundles
            warnings.simplefilter("ignore", ResourceWarning)
            # about worker processes, which are never started
            warnings.filterwarnings("ignore", "This DataLoader will create")
            try:
                return parser.get_parsed_content(key)
            except Exception as error:
                raise explained(
                    error, key, self.file, self._content, parser.ref_resolver.resolved_content
                ) from error
            finally:
                resolved = parser.ref_resolver.resolved_content
                for name, value in list(resolved.items()):
                    if isinstance(value, io.IOBase):  # opened again if another id reads it
                        value.close()
                        del resolved[name]


def by_existing_ids(values: Config, content: Config) -> Document:
    """Map overrides to existing ids: `network=NAME` to `network_name`, in a bundle that has this id.

    A MONAI network becomes a component of its class (`medfl.bundle.zoo.monai_networks`); `init_weights` is read by
    `Bundle.network`.
    """
    values = monai_networks.replaced(values, content)
    values = {key: value for key, value in values.items() if key != INIT_WEIGHTS or key in content}
    name = values.get("network")
    if "network_name" in content and isinstance(name, str) and name[:1] not in "$@%":
        renamed = {"network": "network_name"}
        return {renamed.get(key, key): value for key, value in values.items()}

    return values


def _places(values: Iterable[object]) -> set[Path]:
    """Return the absolute paths in a user's values; paths named by the bundle itself open no folder."""
    paths = (Path(value) for value in values if isinstance(value, str | Path))
    return {Path(os.path.abspath(path)) for path in paths if path.is_absolute()}


def target_name(node: Config) -> str:
    """Return the class name of a component without its module, "" for anything else."""
    target = node.get("_target_", "")
    if isinstance(target, str):
        return target.rpartition(".")[2]

    return ""


def components(content: Config) -> Iterator[tuple[str, Config]]:
    """Yield id and content of every component in contents by id."""
    todo = [("", content)]
    while todo:
        key, node = todo.pop()
        if isinstance(node, Mapping) and "_target_" in node:
            yield key, node
        if isinstance(node, Mapping | list):
            todo += [(sub, value) for _, sub, value in ReferenceResolver.iter_subconfigs(key, node)]


@contextmanager
def _report(problem: str, allowed: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise InputError(
            f"{problem} ({as_text(error)})", allowed, "repair the file where it says"
        ) from error


def own_modules(root: Path) -> frozenset[str]:
    """Return the names of a bundle's own Python packages and modules (`scripts`)."""
    return frozenset(
        [p.parent.name for p in root.glob("*/*.py")] + [p.stem for p in root.glob("*.py")]
    )


@contextmanager
def own_python(root: Path) -> Iterator[None]:
    """Allow a block to import the bundle's own modules; without any it has no effect.

    Modules of the same name from another bundle are unloaded, and no `__pycache__` is written.
    """
    if not (modules := own_modules(root)):
        yield
        return

    for package in modules & sys.modules.keys():
        module = sys.modules[package]
        paths = [*getattr(module, "__path__", []), getattr(module, "__file__", None) or "/"]
        home = Path(paths[0]).resolve().parent
        # another bundle's module of the same name; an export is moved when it is done
        if home != root and ((home / "configs").is_dir() or not home.exists()):
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                del sys.modules[name]

    before = sys.dont_write_bytecode
    # nothing is written into a bundle's folder
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()

    try:
        yield
    finally:
        sys.path.remove(str(root))
        sys.dont_write_bytecode = before
