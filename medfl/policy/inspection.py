"""Inspection: what a bundle would run, read as text; nothing of it is imported, evaluated or instantiated.

Every file is hashed. Every configuration file (JSON and YAML in `configs/` and in the bundle's folder) is read as plain
values and walked: each `_target_` and each `$` expression has to be on the lists of `allowed`, each reference and
macro has to stay inside the configuration, each text that could be a path inside bundle or data folder. What is unknown
is refused. Words of the site's policy widen this, one by one.

One place is read with more patience: top-level lists of expressions, `initialize`, `run` and whatever they are called,
that nothing refers to and medfl does not ask for hold statements, which it never evaluates. metadata.json describes: no
expression is accepted there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from medfl.core.errors import InputError
from medfl.core.untrusted import Plain, Refused, check_visible, printable
from medfl.policy.allowed import (
    LOADS_WEIGHTS,
    SPECIAL_KEYS,
    name_set,
    replace_removed,
    why_argument_refused,
    why_component_refused,
)
from medfl.policy.bundle_files import BundleFiles
from medfl.policy.components import component
from medfl.policy.expressions import check_expression
from medfl.policy.findings import UNREADABLE
from medfl.policy.findings import Inspection as Inspection
from medfl.policy.imports import DEFAULT_NAMES, Uses, imported, need_permission
from medfl.policy.paths import check_id, check_path
from medfl.policy.policy import Policy

_KEY = re.compile(r"\+?\w+((#|::)\w+)*", re.ASCII)
_LABEL = re.compile(r"\w[\w /.-]*", re.ASCII)
"""Names of metrics, as `val/mean dice`; not beside relative references, which MONAI replaces by the keys above."""
_REFERENCE = re.compile(r"@((#|::)*\w+)((#|::)\w+)*", re.ASCII)
_RELATIVE = re.compile(r"[@%](#|::)")
_MACRO = re.compile(r"%\w+((#|::)\w+)*", re.ASCII)
_ENTRIES = ("initialize", "run", "finalize", "training", "evaluating", "testing", "inferring")
"""Statements that the zoo's bundles give to `monai.bundle run`, alone or in lists."""
_ASKED = name_set(
    """
    train validate val trainer evaluator validator val_dataset network network_def network_name inferer preprocessing
    dataset_dir bundle_root device in_channels image_size patch_size surface_tolerance images masks labels classes
    group_by split batch_size
    """
)
"""Ids that medfl itself asks for, whether or not anything refers to them; a list under one is no list of statements."""
_UPWARDS = re.compile(r"^(\.\./)+(?=\w)", re.ASCII)
"""Begins a placeholder beside the bundle, which is opened only where the user names it."""
_BUNDLES = ("public", "teachers", "plm", "bundle")
"""Settings that name other bundles, models and runs."""
_LITERALS: dict[str, Plain] = {"$None": None, "$False": False, "$True": True}
_REFUSALS = 1000
"""After so many nothing more of a configuration is looked at."""
_MACROS = 1000
_LINKS = 20
"""References of references that are followed."""
_NAMES = re.compile(r"(\w[\w.-]*(,\w[\w.-]*)*)?", re.ASCII)

_Keys = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Configuration:
    """A configuration file: its content, its values with the keys that lead there; `stem`: its name without ending."""

    file: str
    stem: str
    content: Plain
    nodes: list[tuple[_Keys, Plain]]


def inspect(folder: Path, policy: Policy | None = None) -> Inspection:
    """Inspect the bundle in a folder.

    Args:
        folder: the bundle's; links in its own path are followed, links inside it are refused.
        policy: of the site; None: the default, which allows nothing extra and pins nothing.

    Raises:
        InputError: there is no such folder.
    """
    policy = policy or Policy()
    root = folder.expanduser().resolve()
    if not root.is_dir():
        raise InputError(
            f"bundle {printable(folder)}", "the folder of a MONAI bundle", "check the path"
        )

    inspection = Inspection(root.name, root, policy.files is not None)
    _Inspector(inspection, policy).run()
    return inspection


class _Inspector:
    def __init__(self, inspection: Inspection, policy: Policy) -> None:
        self.inspection = inspection
        self.policy = policy
        self.names: dict[str, str] = dict(DEFAULT_NAMES)
        self.own_modules: frozenset[str] = frozenset()
        self.referred: set[str] = set()
        self.key_pattern = _KEY
        self.definitions: dict[_Keys, list[Plain]] = {}
        # Asked once of each path of keys, or of a value, however many references lead there.
        self.urls: dict[int, bool] = {}
        self.are_statements: dict[int, bool] = {}
        self.distinct = cache(
            lambda keys: list({repr(v): v for v in self.definitions.get(keys, ())}.values())
        )
        self.is_branch = cache(
            lambda keys: all(isinstance(v, dict) for v in self.definitions.get(keys, ()))
        )

    def run(self) -> None:
        refuse = self.inspection.refuse
        if self.policy.bundle and self.policy.bundle != self.inspection.bundle:
            refuse(".", "", f"the policy is for the bundle {printable(self.policy.bundle)!r}")

        files = BundleFiles(self.inspection, self.policy)
        self.own_modules = files.own_modules
        if not any(name.startswith("configs/") for name in files.contents):
            refuse("configs", "", "no configuration could be read")

        for file, content in files.contents.items():
            self._imports(file, content)

        depth = self.policy.limits.depth
        configurations = []
        for file, content in files.contents.items():
            nodes = list(_walk(content, depth))
            stem = PurePosixPath(file).stem
            configurations.append(_Configuration(file, stem, content, nodes))

        # All files first: a reference of one may lead to what another defines.
        texts: list[str] = []
        for configuration in configurations:
            if any(len(keys) > depth for keys, _ in configuration.nodes):
                refuse(configuration.file, "", f"an id of more than {depth} parts")

            for keys, node in configuration.nodes:
                self.definitions.setdefault(keys, []).append(node)
                if "config" in keys:  # a preset of federated.yaml is laid over the rest
                    self.definitions.setdefault(keys[keys.index("config") + 1 :], []).append(node)
                if isinstance(node, str):
                    texts.append(node)

        self.key_pattern = _KEY if any(map(_RELATIVE.search, texts)) else _LABEL
        for text in texts:
            if text[:1] in ("$", "@", "%"):  # relative references begin with any of their parts
                self.referred |= set(re.findall(r"\w+", " ".join(re.findall(r"[@%][\w#:]+", text))))

        self._macros(configurations)
        for configuration in configurations:
            self._configuration(configuration)

    # What every place of every file has to know

    def _imports(self, file: str, content: Plain) -> None:
        if not isinstance(content, dict):
            return
        for key in ("imports", "+imports"):
            statements = content.get(key, [])
            if not isinstance(statements, list):
                self.inspection.refuse(file, key, "not a list of import statements")
                continue

            for index, text in enumerate(statements):
                if text is None:
                    continue

                uses = Uses()
                try:
                    if not isinstance(text, str) or not text.startswith("$"):
                        raise Refused("not an import statement")

                    bound = imported(text[1:], uses)
                    for name, path in bound.items():
                        if self.names.get(name, path) != path:
                            raise Refused(
                                f"an import that takes the name {printable(name)} of another"
                            )

                    self.names |= bound
                except Refused as error:
                    self.inspection.refuse(file, f"{key}#{index}", error)

                self._note(uses)

    def _note(self, uses: Uses) -> None:
        self.inspection.uses += uses.counts
        self.inspection.allowed += uses.permissions

    def _macros(self, configurations: Sequence[_Configuration]) -> None:
        """Refuse macros of macros: they could grow without end."""
        macros: list[tuple[str, _Keys, _Keys]] = []
        for configuration in configurations:
            for keys, node in configuration.nodes:
                if isinstance(node, str) and _MACRO.fullmatch(node):
                    target = tuple(re.split("#|::", node[1:]))
                    macros.append((configuration.file, keys, target))

        # Each is compared with each below.
        if len(macros) > _MACROS:
            self.inspection.refuse(macros[0][0], "", f"more than {_MACROS} macros")
            return

        for file, keys, target in macros:
            # A macro lies at the target, in it or around it: map stops at the shorter path.
            if any(all(map(str.__eq__, place, target)) for _, place, _ in macros):
                self.inspection.refuse(file, _id(keys), "a macro of a macro")

    # One file

    def _configuration(self, where: _Configuration) -> None:
        if not isinstance(where.content, dict):
            self.inspection.refuse(
                where.file, "", f"a {type(where.content).__name__}, {UNREADABLE}"
            )
            return

        if where.stem in ("train", "inference", "evaluate") and "dataset_dir" in where.content:
            self.inspection.data[where.file] = printable(where.content["dataset_dir"])
        for keys, node in where.nodes:
            if len(self.inspection.refusals) > _REFUSALS:
                self.inspection.refuse(where.file, _id(keys), "there is more that is refused")
                return

            try:
                if isinstance(node, dict):
                    for key in node:
                        self._key(key, keys, where.stem)

                if where.stem == "metadata":
                    self._description(node)
                # Imports were read before, or are refused by their key.
                elif keys[:1] != ("imports",):
                    self._node(where, keys, node)
            except Refused as error:
                self.inspection.refuse(where.file, _id(keys), error)

    def _key(self, key: object, keys: _Keys, stem: str) -> None:
        if isinstance(key, int) and not isinstance(key, bool):
            return
        if not isinstance(key, str):
            raise Refused(f"a key of type {type(key).__name__}")

        check_visible(key)
        last = re.split("#|::", key)[-1]
        if last.startswith("_") and last.endswith("_") and last not in SPECIAL_KEYS:
            raise Refused(f"the key {printable(key)!r}")
        path = key.lstrip("+")
        if not keys and path != "imports" and re.split("#|::", path)[0] == "imports":
            raise Refused("an import outside of the list of imports")
        if last in SPECIAL_KEYS and stem == "metadata":
            raise Refused(f"the key {printable(key)!r} in a description")
        plain = _KEY.fullmatch(key) or self.key_pattern.fullmatch(key)
        if not plain and not _is_free(keys, stem):
            raise Refused(f"the key {printable(key)!r}, which is no plain name")

    def _description(self, node: Plain) -> None:
        if isinstance(node, str):
            check_visible(node)
            if node[:1] in ("$", "@", "%"):
                raise Refused(
                    f"the text {printable(node, 40)!r} in a description, which would be evaluated"
                )

    def _node(self, where: _Configuration, keys: _Keys, node: Plain) -> None:
        name = keys[-1] if keys else ""
        stem = where.stem
        if name == "_target_":
            self._target(node)
        elif name == "_mode_" and node != "default":
            raise Refused(f"_mode_ {printable(node, 40)!r}, where only 'default' is")

        names_bundles = stem == "federated" and isinstance(node, str) and {*_BUNDLES} & {*keys}
        if names_bundles and not _NAMES.fullmatch(str(node)):
            raise Refused(
                f"{printable(node, 40)!r}, where a bundle names others by their names only"
            )
        if stem == "federated" and name == "partition" and str(node).startswith("file:"):
            raise Refused(f"{printable(node, 40)!r}, a table that only a user names")

        value = self._resolved(node)
        is_free = _is_free(keys, stem) or self._is_statement(where, keys)
        # Every part of the keys: `x#reader#0` is a value of the argument `reader`.
        for part in () if is_free else keys:
            # An inference has its own weights: what would fetch some is turned off when it is read.
            if part == "pretrained" and node is True and stem == "inference":
                continue
            if why := why_argument_refused(part, value, self._has_url(value)):
                raise Refused(why)

        if isinstance(node, dict):
            self._component(node, stem)
        elif isinstance(node, str):
            check_visible(node)
            self._text(where, keys, node)
        elif not isinstance(node, list | bool | int | float | date | None):
            raise Refused(f"a value of type {type(node).__name__}")

    def _target(self, node: Plain) -> None:
        if not isinstance(node, str):
            raise Refused(f"a _target_ of type {type(node).__name__}")
        plain = re.fullmatch(r"\w+(\.\w+)+", node, re.ASCII) and "__" not in node
        if plain and node.split(".")[0] in self.own_modules:
            need_permission("scripts", node, self.policy.allow, self.inspection.allowed)
        else:
            component(replace_removed({"_target_": node})["_target_"])

        self.inspection.targets[node] += 1

    def _component(self, node: dict[Any, Any], stem: str) -> None:
        today = replace_removed(node)
        if isinstance(target := today.get("_target_"), str):
            arguments = {key: self._resolved(value) for key, value in today.items()}
            if stem == "inference" and node.get("pretrained") is True:
                arguments["pretrained"] = False
            if why := why_component_refused(target.rpartition(".")[2], arguments):
                raise Refused(why)

        # A key `network#_target_` is merged with arguments that stand elsewhere.
        for key, value in node.items():
            if key == "_target_" or not isinstance(key, str) or not isinstance(value, str):
                continue

            apart = re.split("#|::", key)[-1] == "_target_"
            if apart and value.rpartition(".")[2] in LOADS_WEIGHTS:
                raise Refused(
                    f"{printable(value)} apart from its 'pretrained: false', which would fetch weights"
                )

    def _has_url(self, value: Plain) -> bool:
        """Tell whether one of a value's texts is a URL; of what the configurations hold, each part is asked once."""
        key = id(value)
        if key not in self.urls:
            if isinstance(value, dict):
                parts = [*value, *value.values()]
            else:
                parts = value if isinstance(value, list) else []

            has_url = isinstance(value, str) and "://" in value
            self.urls[key] = has_url or any(map(self._has_url, parts))

        return self.urls[key]

    def _resolved(self, node: Plain) -> Plain:
        """Return the literal that a reference leads to, or that an expression says; else what is given.

        An id that has two values, in two files or written in two ways, leads nowhere: which of them counts is decided
        when the configurations are merged.
        """
        for _ in range(_LINKS):
            if not (isinstance(node, str) and _REFERENCE.fullmatch(node)):
                break

            keys = tuple(re.split("#|::", node[1:]))
            if len(keys) > self.policy.limits.depth:
                break

            values = self.distinct(keys)
            branches = (keys[:end] for end in range(1, len(keys)))
            if len(values) != 1 or not all(map(self.is_branch, branches)):
                break

            node = values[0]

        if isinstance(node, str):
            return _LITERALS.get(node, node)

        return node

    def _text(self, where: _Configuration, keys: _Keys, text: str) -> None:
        if text.startswith("$"):
            self._expression(where, keys, text)
        elif text.startswith("@"):
            if not _REFERENCE.fullmatch(text):
                raise Refused(f"{printable(text, 40)!r}, which begins as a reference and is none")
            _not_relative(text, where.stem)
            check_id(text[1:])
        elif text.startswith("%"):
            if not _MACRO.fullmatch(text) or where.stem == "federated":
                raise Refused(
                    f"the macro {printable(text, 40)!r}, which is not one of an id of this configuration"
                )
            check_id(text[1:])
        elif keys[-1:] != ("_desc_",):
            self._path(where, keys, text)

    def _path(self, where: _Configuration, keys: _Keys, text: str) -> None:
        below = _UPWARDS.sub("", text, 1) if keys == ("dataset_dir",) else text
        try:
            check_path(below, absolute=keys in (("dataset_dir",), ("bundle_root",)))
            # In federated.yaml it would count as named by the user.
            if where.stem == "federated" and text.startswith("/"):
                raise Refused("an absolute path")
        except Refused as error:
            problem = f"{error} ({printable(text, 40)})"
            if "absolute" not in str(error):
                raise Refused(problem) from error
            if "paths" not in self.policy.allow:
                raise Refused(f"{problem}, for which the policy has to allow 'paths'") from error

            self.inspection.allowed["paths", printable(text)] += 1

    def _expression(self, where: _Configuration, keys: _Keys, text: str) -> None:
        _not_relative(text, where.stem)
        if self._is_statement(where, keys):
            self.inspection.statements.append(f"{where.file}: {_id(keys)}: {printable(text)}")
            return

        uses = Uses()
        self.inspection.expressions += 1
        try:
            check_expression(
                text[1:],
                self.names,
                self.policy.allow,
                self.own_modules,
                uses,
                prints=any(part.endswith("handlers") for part in keys),
                length=self.policy.limits.expression,
            )
        except Refused as error:
            raise Refused(f"{error}, in {printable(text)}") from error

        self._note(uses)

    def _is_statement(self, where: _Configuration, keys: _Keys) -> bool:
        """Tell whether medfl never evaluates this: a list of statements that nothing asks for, or one of them."""
        if not 1 <= len(keys) <= 2 or keys[0] in self.referred or keys[0] in _ASKED:
            return False

        entry = where.content.get(keys[0], where.content.get(f"+{keys[0]}"))
        if keys[0] in _ENTRIES:
            return len(keys) == 1 or isinstance(entry, list)
        if where.stem == "federated" or keys[0].startswith("_"):
            return False

        if id(entry) not in self.are_statements:
            self.are_statements[id(entry)] = isinstance(entry, list) and all(
                isinstance(text, str) and text.startswith("$") for text in entry
            )
        return self.are_statements[id(entry)]


def _walk(content: Plain, depth: int) -> Iterator[tuple[_Keys, Plain]]:
    """Yield every value with the keys to it; top-level keys such as `+train#dataset` are taken apart as MONAI does.

    Nothing is yielded of what lies deeper than `depth` keys.
    """
    todo: list[tuple[_Keys, Plain]] = [((), content)]
    while todo:
        keys, node = todo.pop()
        yield keys, node
        if len(keys) > depth:
            continue

        if isinstance(node, dict):
            for key, value in reversed(node.items()):
                name = str(key) if keys else str(key).removeprefix("+")
                todo.append(((*keys, *re.split("#|::", name)), value))
        elif isinstance(node, list):
            todo += [((*keys, str(index)), node[index]) for index in range(len(node) - 1, -1, -1)]


def _id(keys: _Keys) -> str:
    return printable("#".join(keys))


def _is_free(keys: _Keys, stem: str) -> bool:
    """Tell whether a value never becomes part of the configuration: a preset's `config` of federated.yaml does."""
    return stem == "metadata" or (stem == "federated" and "config" not in keys)


def _not_relative(text: str, stem: str) -> None:
    if stem == "federated" and re.search("@(#|::)", text):
        raise Refused("a relative reference in settings that are merged elsewhere")
