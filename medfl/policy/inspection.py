"""Inspection: what a bundle would run, read as text; nothing of it is imported, evaluated or instantiated.

A filter and a report for people. Every file is hashed. Every configuration file (JSON and YAML in `configs/` and in the
bundle's folder) is read as plain values and walked: each `_target_` is to be a component (`components`), each `$`
expression is read for names that act (`expressions`), each text that could be a path has to stay inside bundle or data
folder. Words of the site's policy widen this, one by one. What a bundle may do is bounded by the walls
(`medfl.safety`); without them (`--trust`, `--no-sandbox`, Python) this is all there is.

One place is read with more patience: top-level lists of expressions, `initialize`, `run` and whatever they are called,
that nothing refers to and medfl does not ask for hold statements, which it never evaluates. metadata.json describes: no
expression is accepted there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from medfl.core.errors import InputError
from medfl.core.untrusted import Plain, Refused, check_visible, printable
from medfl.policy.bundle_files import BundleFiles
from medfl.policy.components import check_arguments, component, name_set, replace_removed
from medfl.policy.expressions import DEFAULT_NAMES, ExpressionFilter, Uses, imported
from medfl.policy.findings import UNREADABLE
from medfl.policy.findings import Inspection as Inspection
from medfl.policy.paths import check_path
from medfl.policy.policy import Policy

_MACRO = re.compile(r"%\w+((#|::)\w+)*", re.ASCII)
_ENTRIES = ("initialize", "run", "finalize", "training", "evaluating", "testing", "inferring")
"""Statements that the zoo's bundles give to `monai.bundle run`, alone or in lists."""
_ASKED = name_set(
    "train validate val trainer evaluator validator val_dataset network network_def network_name inferer preprocessing "
    "dataset_dir bundle_root device in_channels image_size patch_size surface_tolerance images masks labels classes "
    "group_by split batch_size"
)
"""Ids that medfl itself asks for, whether or not anything refers to them; a list under one is no list of statements."""
_UPWARDS = re.compile(r"^(\.\./)+(?=\w)", re.ASCII)
"""Begins a placeholder beside the bundle, which is opened only where the user names it."""
_BUNDLES = ("public", "teachers", "plm", "bundle")
"""Settings that name other bundles, models and runs."""
_REFUSALS = 1000
"""After so many nothing more of a configuration is looked at."""
_NAMES = re.compile(r"(\w[\w.-]*(,\w[\w.-]*)*)?", re.ASCII)

_Keys = tuple[str, ...]


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
    if policy.bundle and policy.bundle != root.name:
        inspection.refuse(".", "", f"the policy is for the bundle {printable(policy.bundle)!r}")

    files = BundleFiles(inspection, policy)
    if not files.contents:
        inspection.refuse("configs", "", "no configuration could be read")

    uses = Uses(inspection.uses, inspection.allowed)
    names = dict(DEFAULT_NAMES)
    referred: set[str] = set()
    for file, content in files.contents.items():
        names |= _imports(inspection, file, content, uses)
        for _, node in _walk(content, policy.limits.depth):
            if isinstance(node, str) and node[:1] in ("$", "@", "%"):
                # relative references begin with any of their parts
                referred |= set(re.findall(r"\w+", " ".join(re.findall(r"[@%][\w#:]+", node))))

    filter_ = ExpressionFilter(names, policy.allow, files.own_modules, policy.limits.expression)
    for file, content in files.contents.items():
        if isinstance(content, dict):
            _Configuration(inspection, policy, file, content, filter_, uses, referred).inspect()
        else:
            inspection.refuse(file, "", f"a {type(content).__name__}, {UNREADABLE}")

    return inspection


def _imports(inspection: Inspection, file: str, content: Plain, uses: Uses) -> dict[str, str]:
    """Return the names that a configuration's imports bind, and the paths that they stand for."""
    names: dict[str, str] = {}
    for key in ("imports", "+imports"):
        statements = content.get(key, []) if isinstance(content, dict) else []
        if not isinstance(statements, list):
            inspection.refuse(file, key, "not a list of import statements")
            continue

        for index, text in enumerate(statements):
            try:
                if isinstance(text, str) and text.startswith("$"):
                    names |= imported(text[1:], uses)
                elif text is not None:
                    raise Refused("not an import statement")
            except Refused as error:
                inspection.refuse(file, f"{key}#{index}", error)

    return names


@dataclass
class _Configuration:
    """A configuration file: `content` as plain values; `referred`: words that any file's references have."""

    inspection: Inspection
    policy: Policy
    file: str
    content: dict[Any, Plain]
    filter: ExpressionFilter
    uses: Uses
    referred: set[str]

    @cached_property
    def stem(self) -> str:
        """Its name without ending."""
        return PurePosixPath(self.file).stem

    @cached_property
    def statements(self) -> set[str]:
        """The top-level ids that medfl never evaluates: statements, or lists of them, that nothing asks for."""
        ids = set()
        for key, entry in self.content.items():
            name = str(key).removeprefix("+")
            if name in self.referred or name in _ASKED:
                continue

            is_list = isinstance(entry, list) and all(
                isinstance(text, str) and text.startswith("$") for text in entry
            )
            is_named = name in _ENTRIES and isinstance(entry, str | list)
            if is_named or (is_list and self.stem != "federated" and not name.startswith("_")):
                ids.add(name)

        return ids

    def inspect(self) -> None:
        """Walk through it, and note what it uses and what is refused."""
        if self.stem in ("train", "inference", "evaluate") and "dataset_dir" in self.content:
            self.inspection.data[self.file] = printable(self.content["dataset_dir"])

        for keys, node in _walk(self.content, self.policy.limits.depth):
            if len(self.inspection.refusals) > _REFUSALS:
                self.inspection.refuse(self.file, _id(keys), "there is more that is refused")
                return

            try:
                if isinstance(node, dict):
                    self._check_keys(node)
                if self.stem == "metadata":
                    self._describe(node)
                # Imports were read before.
                elif keys[:1] != ("imports",):
                    self._node(keys, node)
            except Refused as error:
                self.inspection.refuse(self.file, _id(keys), error)

    def _check_keys(self, node: dict[Any, Plain]) -> None:
        for key in node:
            if not isinstance(key, str | int):
                raise Refused(f"a key of type {type(key).__name__}")
            check_visible(str(key))
            if self.stem == "metadata" and str(key).endswith("_target_"):
                raise Refused("a component in a description")

    def _describe(self, node: Plain) -> None:
        if isinstance(node, str):
            check_visible(node)
            if node[:1] in ("$", "@", "%"):
                raise Refused(
                    f"the text {printable(node, 40)!r} in a description, which would be evaluated"
                )

    def _node(self, keys: _Keys, node: Plain) -> None:
        name = keys[-1] if keys else ""
        if len(keys) > self.policy.limits.depth:
            raise Refused(f"an id of more than {self.policy.limits.depth} parts")
        if name == "_mode_" and node != "default":
            raise Refused(f"_mode_ {printable(node, 40)!r}, where only 'default' is")
        if self.stem == "federated":
            self._setting(keys, node)

        if name == "_target_":
            self._target(node)
        elif isinstance(node, dict):
            self._component(node)
        elif isinstance(node, str):
            check_visible(node)
            self._text(keys, node)
        elif not isinstance(node, list | bool | int | float | date | None):
            raise Refused(f"a value of type {type(node).__name__}")

    def _setting(self, keys: _Keys, node: Plain) -> None:
        """Check a setting of federated.yaml, which names bundles and tables, and is merged as if a user gave it."""
        if not isinstance(node, str):
            return
        if {*_BUNDLES} & {*keys} and not _NAMES.fullmatch(node):
            raise Refused(
                f"{printable(node, 40)!r}, where a bundle names others by their names only"
            )
        if keys[-1] == "partition" and node.startswith("file:"):
            raise Refused(f"{printable(node, 40)!r}, a table that only a user names")

    def _target(self, node: Plain) -> None:
        if not isinstance(node, str):
            raise Refused(f"a _target_ of type {type(node).__name__}")
        if node.partition(".")[0] in self.filter.own_modules:
            self.uses.permit("scripts", printable(node), self.policy.allow)
        else:
            component(replace_removed({"_target_": node})["_target_"])
        self.inspection.targets[node] += 1

    def _component(self, node: dict[Any, Any]) -> None:
        """Check what a component is made with."""
        arguments = dict(replace_removed(node))
        # An inference has its own weights: what would fetch some is turned off when it is read.
        if self.stem == "inference" and arguments.get("pretrained") is True:
            arguments["pretrained"] = False
        try:
            factory = component(str(arguments.pop("_target_", "")))
        except Refused:
            return  # which is told where the target stands
        check_arguments(factory, arguments)

    def _text(self, keys: _Keys, text: str) -> None:
        if text.startswith("$"):
            self._expression(keys, text)
        elif text.startswith("%") and not _MACRO.fullmatch(text):
            raise Refused(
                f"the macro {printable(text, 40)!r}, which is not one of an id of this configuration"
            )
        elif text[:1] not in ("@", "%") and keys[-1:] != ("_desc_",):
            self._path(keys, text)

    def _path(self, keys: _Keys, text: str) -> None:
        is_data = keys == ("dataset_dir",)
        try:
            below = _UPWARDS.sub("", text, 1) if is_data else text
            check_path(below, absolute=is_data or keys == ("bundle_root",))
            # In federated.yaml it would count as named by the user.
            if self.stem == "federated" and text.startswith("/"):
                raise Refused("an absolute path")
        except Refused as error:
            problem = f"{error} ({printable(text, 40)})"
            if "absolute" not in str(error):
                raise Refused(problem) from error
            self.uses.permit("paths", problem, self.policy.allow)

    def _expression(self, keys: _Keys, text: str) -> None:
        if keys[0] in self.statements and len(keys) <= 2:
            self.inspection.statements.append(f"{self.file}: {_id(keys)}: {printable(text)}")
            return

        self.inspection.expressions += 1
        # A handler is never made: it may print.
        prints = any(part.endswith("handlers") for part in keys)
        try:
            self.filter.check(text[1:], self.uses, prints=prints)
        except Refused as error:
            raise Refused(f"{error}, in {printable(text)}") from error


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
