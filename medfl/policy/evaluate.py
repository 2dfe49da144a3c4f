"""Evaluate a configuration's `$` expressions under guard: what a value may be asked for depends on what the value is.

An expression is checked as text first (`expressions`). Then each look-up of an attribute, each call, each operation
that can grow without bound and each text with values becomes a call of a guard here; the rest is Python's own. A tensor
may be reshaped, a text replaced, a path only looked at, and only below the folders that the bundle may read. Names of
modules stand for the listed objects themselves. Nothing else is in reach: no builtins, no modules, no frames.
"""

from __future__ import annotations

import ast
import builtins
import datetime
import functools
import importlib
import inspect
import io
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import nn

from medfl.core.untrusted import Refused, printable
from medfl.policy.allowed import PLACES, TABLE_ARGUMENTS, name_set
from medfl.policy.allowed_in_expressions import BUILTINS, MEMBERS, METHODS_OF, PERMISSION_OF
from medfl.policy.components import check_arguments, for_expressions, is_listed
from medfl.policy.expressions import REFERENCE, check_expression, module_path
from medfl.policy.growing import GROWING, bounded_range, format_text, formatted, operate
from medfl.policy.imports import Uses, only_statement

_KINDS: Mapping[Any, str] = {
    str: "text", list: "list", tuple: "tuple", dict: "dict", set | frozenset: "set", bool | int | float: "number",
    PurePath: "path", io.IOBase: "file", datetime.date | datetime.time: "time",
    torch.Tensor | np.ndarray | np.generic: "tensor", nn.Module: "network",
    np.random.RandomState | np.random.Generator: "random", torch.device: "device", Image: "picture",
}  # fmt: skip
_CALL_WHAT_THEY_TAKE = ("filter", "map", "max", "min", "sorted")
_KEEP_WHAT_THEY_TAKE = name_set(
    "copy.copy copy.deepcopy monai.networks.copy_model_state monai.networks.utils.copy_model_state"
)
_MAKE_FUNCTIONS = name_set(
    "monai.handlers.from_engine monai.apps.pathology.handlers.utils.from_engine_hovernet"
)
_TAKE_COMPONENTS = frozenset(name for name in METHODS_OF["network"] if name.startswith("set_"))
"""Methods by which MONAI's detectors are handed losses, matchers and inferers."""
_READS_PATH = {"exists", "glob", "is_dir", "is_file", "iterdir", "read_text", "rglob"}
_PATTERN = re.compile(r"[*?\[]")
_SCHEME = re.compile(r"\s*[a-zA-Z][\w+.-]+:")
_READ_OTHERWISE = re.compile(r"^[\s~]|[\x00-\x1f\x7f]")
"""Of a text that is no plain path to those who expand `~`, or strip what they read as a URL."""
_PATH_FUNCTIONS = {
    "glob.glob": ("recursive", "include_hidden"), "os.listdir": (), "os.path.exists": (), "os.path.isdir": (),
    "os.path.isfile": (), "monai.data.load_decathlon_datalist": ("is_segmentation", "data_list_key", "base_dir"),
    "monai.auto3dseg.utils.datafold_read": ("basedir", "fold", "key"),
    "pandas.read_csv": TABLE_ARGUMENTS, "medfl.datasets.datalist": ("name", "section", "split"),
    "medfl.datasets.locate": ("name",), "medfl.datasets.own.labelled": ("classes", "section", "group_by", "split"),
    "medfl.datasets.own.listed": ("images", "labels", "classes", "section", "group_by", "split"),
    "medfl.datasets.own.paired": ("images", "masks", "section", "group_by", "split"),
    "medfl.datasets.unlabelled": ("series", "channels"),
}  # fmt: skip
"""Members of which `folder`, or else the first argument, is a place that they look at, and what else may be given."""
_PLACES_OF = {"medfl.runs.teachers.medsam.load": ("source",)}
"""Arguments that name a place where this function takes them, and something else elsewhere."""
_MEMBER = "<member>"
_ATTRIBUTE = "<attribute>"
_CALL = "<call>"
_METHOD = "<method>"
_KEY = "<key>"
_OPERATE = "<operate>"
_FORMATTED = "<formatted>"
"""Names of the guards, which no argument in an expression can have."""


class ElsewhereRefused(Refused):
    """A look at a place that neither the bundle nor the user opens."""


@dataclass
class ExpressionEvaluator:
    """Evaluates the expressions of one bundle.

    Args:
        names: what its imports bind, and the paths that they stand for.
        permissions: of the policy.
        own_modules: top-level modules of its own Python.
        roots: the folders that it may look into.
    """

    names: Mapping[str, str]
    permissions: Collection[str] = ()
    own_modules: Collection[str] = ()
    roots: Collection[Path] = ()
    _values: dict[str, object] = field(default_factory=dict)
    _targets: dict[object, object] = field(default_factory=dict)
    """checked call -> the listed function or class that it calls; a function that one of them made -> itself"""

    def evaluate(self, text: str, references: Mapping[str, object]) -> object:
        """Return what an expression, given without its `$`, stands for.

        `references` are what ids stand for, their parts joined by `::`.

        Raises:
            Refused: it does something that is not listed.
        """
        check_expression(text, self.names, self.permissions, self.own_modules, Uses())
        ids: list[str] = []

        def placeholder(match: re.Match[str]) -> str:
            ids.append(match[0][1:])
            return f"_reference_{len(ids) - 1}"

        # References are replaced by names, and their values handed in: no value becomes text to run.
        node = only_statement(REFERENCE.sub(placeholder, text.replace("#", "::")))
        assert isinstance(node, ast.Expr)
        guarded = ast.fix_missing_locations(ast.Expression(_Guards(self.names).visit(node.value)))
        values = {f"_reference_{index}": references[key] for index, key in enumerate(ids)}

        return eval(compile(guarded, "<expression>", "eval"), {**self._builtins, **values})

    @functools.cached_property
    def _builtins(self) -> dict[str, object]:
        return {
            **{name: getattr(builtins, name) for name in BUILTINS},
            **{name: self._checked(name, getattr(builtins, name)) for name in _CALL_WHAT_THEY_TAKE},
            "range": bounded_range,
            "open": self._open,
            "setattr": setattr,  # the check of the text wants a permission for it
            "__builtins__": {},  # else Python would add its own
            "__name__": __name__,
            _MEMBER: self._value_of,
            _ATTRIBUTE: self._attribute,
            _CALL: self._call,
            _METHOD: self._method,
            _KEY: self._key,
            _OPERATE: operate,
            _FORMATTED: formatted,
        }

    def member(self, path: str) -> Any:
        """Return the listed object, or the one of the bundle's own Python, that a path of names stands for."""
        is_own = path.partition(".")[0] in self.own_modules
        permitted = PERMISSION_OF.get(path) in self.permissions or (
            is_own and "scripts" in self.permissions
        )
        if path in MEMBERS or permitted:
            target = _located(path)
        else:
            target = for_expressions(path)

        if target is None:
            raise Refused(f"{printable(path)}, which is not on the list")

        return target

    # Guards

    def _value_of(self, path: str) -> object:
        """Return what a path of names stands for: of a function or class its checked call, whoever is handed it."""
        if path not in self._values:
            target = self.member(path)
            plain = not callable(target) or self._is_own(target) or _is_number_type(target)
            self._values[path] = target if plain else self._checked(path, target)
        return self._values[path]

    def _checked(self, path: str, target: Callable[..., object]) -> Callable[..., object]:
        """Return a function that checks what a listed function or class is called with, and calls it."""

        def checked(*arguments: object, **named: object) -> object:
            return self._call_listed(path, target, arguments, named)

        self._targets[checked] = target
        return checked

    def _call_listed(
        self,
        path: str,
        target: Callable[..., object],
        arguments: tuple[object, ...],
        named: Mapping[str, object],
    ) -> object:
        keeps = path in _KEEP_WHAT_THEY_TAKE or (inspect.isclass(target) and is_listed(target))
        self.check_handed((*arguments, *named.values()), objects=keeps)
        by_name = check_arguments(target, arguments, named, unpickles=path == "torch.load")
        if path in _PATH_FUNCTIONS:
            self._check_place_of(path, target, by_name)

        self.check_paths(by_name, target)
        result = target(*arguments, **named)
        if path in _MAKE_FUNCTIONS:
            self._targets[result] = result

        return result

    def _call(self, function: Any, /, *arguments: object, **named: object) -> object:
        """Call a function, which has to be a listed one, or a lambda of these expressions."""
        if not self._may_be_called(function):
            raise Refused(f"a call of a {type(function).__name__}, which is not on the list")
        # A class stands here as its checked call, which isinstance does not take.
        if function is isinstance:
            arguments = tuple(self._plain_type(value) for value in arguments)
        return function(*arguments, **named)

    def _method(self, value: Any, name: str, /, *arguments: object, **named: object) -> object:
        """Call a method that values of this kind may be asked for; an object that a value holds is never called."""
        self._check_attribute(value, name)
        # A format reaches into its values: `{0.__class__}`.
        if isinstance(value, str) and name == "format":
            return format_text(value, *arguments, **named)
        if self._is_own(value):
            return getattr(value, name)(*arguments, **named)

        # Its class's own, whatever was set on the object.
        method = getattr(type(value), name, None)
        if not inspect.isroutine(method):
            raise Refused(
                f"a call of .{printable(name)}, which is no method of a {type(value).__name__}"
            )

        self.check_handed((*arguments, *named.values()), objects=name in _TAKE_COMPONENTS)
        check_arguments(method, (value, *arguments), named)
        # The pattern may lead upwards: it is checked as a part of the path.
        if isinstance(value, Path) and name in ("glob", "rglob"):
            self.check_path(value / str([*arguments, *named.values(), ""][0]))

        return method(value, *arguments, **named)

    def _key(self, key: object) -> object:
        """Return what a value is asked for in brackets: a table calls what can be called."""
        self.check_handed([key], objects=False)
        return key

    def _attribute(self, value: Any, name: str) -> object:
        """Return what a value holds by a name; a method is called where it is named, and never handed on."""
        self._check_attribute(value, name)
        # Pandas has methods that read and write files, and columns may have their names.
        if _kind(value) == "table" and name not in METHODS_OF["table"]:
            return value[name]  # never a method of the table that has the name of a column

        attribute = getattr(value, name)
        if inspect.isroutine(attribute) and not self._is_own(attribute):
            raise Refused(f"the method .{printable(name)} handed on")

        return attribute

    def _check_attribute(self, value: object, name: str) -> None:
        if not self._allows(value, name):
            kind = _kind(value) or f"a {type(value).__name__}"
            raise Refused(f"the attribute .{printable(name)} of {kind}, which is not on the list")
        if isinstance(value, Path) and name in _READS_PATH:
            self.check_path(value)

    def _allows(self, value: object, name: str) -> bool:
        kind = _kind(value)
        if kind == "table":
            return name in METHODS_OF[kind] or name in getattr(value, "columns", ())
        if kind:
            return name in METHODS_OF[kind]
        if self._is_own(value):
            return not name.startswith("_")

        return name in METHODS_OF["component"] and is_listed(type(value))

    def _is_own(self, value: object) -> bool:
        """Tell whether this is of the bundle's own Python, or made of it, and that may run."""
        if "scripts" not in self.permissions:
            return False

        # Of an object its class's module, of a class or function its own.
        modules = (getattr(part, "__module__", "") for part in (value, type(value)))
        return any(str(module).partition(".")[0] in self.own_modules for module in modules)

    # What may be called

    def _may_be_called(self, function: object) -> bool:
        """Tell by its identity whether a function is a listed one, or a lambda or partial made of them here."""
        # It holds a checked call, which looks at its arguments when it is called.
        if isinstance(function, functools.partial):
            return self._may_be_called(function.func)
        # Lambdas of these expressions have the guards among their globals, no other function has.
        if inspect.isfunction(function) and (
            function in self._targets or _CALL in function.__globals__
        ):
            return True
        if self._is_own(function) or _is_number_type(function):
            return True

        # By identity: an object could say that it equals anything.
        return any(function is built_in for built_in in self._builtins.values())

    def check_handed(self, values: Iterable[object], *, objects: bool) -> None:
        """Refuse functions, classes and objects that whoever gets them could call, but those that may be called.

        `objects` says whether listed components are handed on too: networks, transforms, losses.

        Raises:
            Refused: one may not be called.
        """
        for value in values_inside([*values]):
            if not callable(value) or self._may_be_called(value):
                continue
            if not (objects and (isinstance(value, nn.Module) or is_listed(type(value)))):
                name = getattr(value, "__name__", type(value).__name__)
                raise Refused(f"{printable(name)} handed on, which is not on the list")

    def _plain_type(self, value: Any) -> Any:
        """Return the class that a value stands for, for `isinstance`."""
        if isinstance(value, tuple):
            return tuple(map(self._plain_type, value))
        if inspect.isfunction(value):
            return self._targets.get(value, value)

        return value

    # Paths

    def check_paths(self, arguments: Mapping[str, object], function: object = None) -> None:
        """Refuse arguments, of a function or class if it is given, that name a file or folder elsewhere."""
        path = f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}"
        further = _PLACES_OF.get(path, ())
        for name in PLACES.union(further) & arguments.keys():
            for value in values_inside(arguments[name]):
                if isinstance(value, str | PurePath):
                    self.check_path(value)
                # To look at its paths would use them up, and a second look could give others.
                elif isinstance(value, Iterator):
                    raise Refused(f"{name}, whose paths are computed when they are opened")

    def _check_place_of(
        self, path: str, function: Callable[..., object], arguments: Mapping[str, object]
    ) -> None:
        """Check the place that a function looks at: its argument `folder`, or else its first."""
        parameters = inspect.signature(function).parameters
        where = "folder" if "folder" in parameters else next(iter(parameters))
        if further := arguments.keys() - {where, *_PATH_FUNCTIONS[path]}:
            raise Refused(
                f"the argument {min(further)} of {function.__name__}, which is not on the list"
            )

        # Without a first argument these look at the working folder, without `folder` at none.
        place = arguments.get(where, "." if where != "folder" else None)
        if place is not None:
            self.check_path(place)

    def _open(self, path: Any, mode: str = "r", **named: Any) -> Any:
        if "open" in self.permissions:
            return open(path, mode, **named)
        if mode not in ("r", "rb", "rt") or set(named) - {"encoding", "newline"}:
            raise Refused("open() for writing, for which the policy has to allow 'open'")

        self.check_path(path)
        # Read at once: nobody would close the file.
        content = Path(path).read_bytes()
        if mode == "rb":
            return io.BytesIO(content)

        return io.StringIO(content.decode(named.get("encoding") or "utf-8"))

    def check_path(self, path: object) -> None:
        """Refuse to look at a path that is not below the bundle's folder, its data, or what the user named."""
        if "paths" in self.permissions:
            return
        if not isinstance(path, str | PurePath):
            raise Refused(f"a {type(path).__name__} as a path")

        text = str(path)
        shown = printable(path)
        absolute = Path(os.path.abspath(path))
        if _SCHEME.match(text):
            raise Refused(f"{shown}, a URL: nothing is fetched")
        if _READ_OTHERWISE.search(text):
            raise Refused(
                f"the path {shown}, which others read as something else: it begins with ~ or a "
                "space, or has a control character"
            )
        if not any(place in self.roots for place in (absolute, *absolute.parents)):
            raise ElsewhereRefused(
                f"the path {shown}, which is neither below the bundle nor below its data"
            )

        # abspath removes `link/..` as text, the system follows the link first; a pattern may match one.
        if ".." in PurePath(path).parts and (
            _PATTERN.search(text) or os.path.realpath(path) != os.path.realpath(absolute)
        ):
            raise Refused(f"the path {shown}, which leads upwards ('..') behind a link")
        if absolute.exists() and not (absolute.is_file() or absolute.is_dir()):
            raise Refused(f"the path {shown}, a pipe or a device, which would be waited for")


def values_inside(value: object) -> Iterator[object]:
    """Yield a value, or what a container holds, keys too."""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUS":
        value = value.tolist()
    if isinstance(value, list | tuple | set | frozenset):
        for member in value:
            yield from values_inside(member)
    else:
        yield value


class _Guards(ast.NodeTransformer):
    """Puts guards where an expression looks up attributes, calls, multiplies and writes values into text."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self._names:
            return node
        return _guard(_MEMBER, ast.Constant(self._names[node.id]))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        path = module_path(node, self._names)
        if path:
            return _guard(_MEMBER, ast.Constant(path))
        return _guard(_ATTRIBUTE, self.visit(node.value), ast.Constant(node.attr))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = node.func
        guard = _CALL
        values = [called, *node.args]
        if isinstance(called, ast.Attribute) and not module_path(called, self._names):
            guard = _METHOD
            values = [called.value, ast.Constant(called.attr), *node.args]

        arguments = list(map(self.visit, values))
        keywords = list(map(self.visit, node.keywords))
        return ast.Call(ast.Name(guard, ast.Load()), arguments, keywords)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.slice, ast.Tuple):
            node.slice = ast.Tuple(list(map(_guarded_key, node.slice.elts)), ast.Load())
        else:
            node.slice = _guarded_key(node.slice)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op).__name__ not in GROWING:
            return node
        return _guard(_OPERATE, ast.Constant(type(node.op).__name__), node.left, node.right)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        self.generic_visit(node)
        # The conversion (`!r`) is refused before this.
        spec = node.format_spec or ast.Constant("")
        return ast.FormattedValue(_guard(_FORMATTED, node.value, spec), -1, None)


def _guarded_key(key: ast.expr) -> ast.expr:
    if isinstance(key, ast.Slice | ast.Starred):
        return key
    return _guard(_KEY, key)


def _guard(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _is_number_type(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, np.generic)


def _kind(value: object) -> str:
    if type(value).__module__.partition(".")[0] == "pandas":
        return "table"
    return next((kind for types, kind in _KINDS.items() if isinstance(value, types)), "")


def _located(path: str) -> Any:
    # The longest module first: what follows it are attributes.
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            target = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue

        for name in parts[end:]:
            target = getattr(target, name)
        return target

    raise Refused(f"{printable(path)}, which is not installed")
