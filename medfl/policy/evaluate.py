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
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import BuiltinMethodType, MethodType
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import nn

from medfl.core.untrusted import Refused, printable
from medfl.policy.allowed import PLACES, TABLE_ARGUMENTS
from medfl.policy.allowed_in_expressions import BUILTINS, MEMBERS, METHODS_OF, PERMISSION_OF
from medfl.policy.components import UNFILLED, check_arguments, for_expressions
from medfl.policy.expressions import REFERENCE, check_expression, module_path
from medfl.policy.growing import GROWING, bounded_range, format_text, formatted, operate
from medfl.policy.imports import Uses, only_statement

_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (str, "text"), (list, "list"), (tuple, "tuple"), (dict, "dict"), ((set, frozenset), "set"),
    ((bool, int, float), "number"), (PurePath, "path"), (io.IOBase, "file"),
    ((datetime.date, datetime.time), "time"), ((torch.Tensor, np.ndarray, np.generic), "tensor"),
    (nn.Module, "network"), ((np.random.RandomState, np.random.Generator), "random"), (torch.device, "device"),
    (Image, "picture"),
)  # fmt: skip
_PACKAGES = ("monai", "torch", "numpy", "ignite", "medfl", "scipy", "skimage")
"""Whose classes and functions may be called, and whose objects are components."""
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
_CHECKED = ("monai.", "medfl.", "torchvision.", "torch.utils.")
"""Where classes and functions lie whose arguments are checked whoever calls them; PyTorch's layers need no check."""
_MEMBER, _ATTRIBUTE, _CALL, _OPERATE, _FORMATTED = "<member>", "<attribute>", "<call>", "<operate>", "<formatted>"
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
    _members: dict[str, Any] = field(default_factory=dict)
    _ids: set[int] = field(default_factory=set)  # of the members, which live as long

    def evaluate(self, text: str, references: Mapping[str, Any]) -> Any:
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

        node = only_statement(REFERENCE.sub(placeholder, text.replace("#", "::")))
        assert isinstance(node, ast.Expr)
        guarded = ast.fix_missing_locations(ast.Expression(_Guards(self.names).visit(node.value)))
        values = {f"_reference_{index}": references[key] for index, key in enumerate(ids)}
        return eval(compile(guarded, "<expression>", "eval"), {**self._builtins, **values})

    @functools.cached_property
    def _builtins(self) -> dict[str, Any]:
        return {
            **{name: getattr(builtins, name) for name in BUILTINS},
            "range": bounded_range,
            "open": self._open,
            "setattr": setattr,  # the check of the text wants a permission for it
            "__builtins__": {},
            "__name__": __name__,
            _MEMBER: self._value_of,
            _ATTRIBUTE: self._attribute,
            _CALL: self._call,
            _OPERATE: operate,
            _FORMATTED: formatted,
        }

    def member(self, path: str) -> Any:
        """Return the listed object, or the one of the bundle's own Python, that a path of names stands for."""
        if path not in self._members:
            is_own = path.partition(".")[0] in self.own_modules
            permitted = PERMISSION_OF.get(path) in self.permissions or (is_own and "scripts" in self.permissions)
            listed = path in MEMBERS or permitted
            target = _located(path) if listed else for_expressions(path)
            if target is None:
                raise Refused(f"{printable(path)}, which is not on the list")
            allowed = _PATH_FUNCTIONS.get(path)
            self._members[path] = target if allowed is None else self._looks_inside(target, allowed)
            self._ids.add(id(self._members[path]))
        return self._members[path]

    # Guards

    def _value_of(self, path: str) -> Any:
        """Return what a path of names stands for; of a component its checked call, whoever is handed it."""
        target = self.member(path)
        home = str(getattr(target, "__module__", None)).startswith(_CHECKED)
        is_factory = inspect.isclass(target) or (path not in MEMBERS and inspect.isfunction(target))
        return _CheckedCall(target, self) if is_factory and home else target

    def _attribute(self, value: Any, name: str) -> Any:
        if not self._allows(value, name):
            kind = _kind(value) or f"a {type(value).__name__}"
            raise Refused(f"the attribute .{printable(name)} of {kind}, which is not on the list")
        if isinstance(value, Path) and name in _READS_PATH:
            self._check_path(value)
        if isinstance(value, Path) and name in ("glob", "rglob"):
            return self._looks_inside(getattr(value, name), (), value)
        if isinstance(value, str) and name == "format":
            return functools.partial(format_text, value)
        if _kind(value) == "table" and name not in METHODS_OF["table"]:
            return value[name]  # never a method of the table that has the name of a column
        return getattr(value, name)

    def _allows(self, value: Any, name: str) -> bool:
        kind = _kind(value)
        if kind == "network" and not name.startswith("_"):
            return name in METHODS_OF[kind] or name in {*value._modules, *value._parameters, *value._buffers}
        if kind == "table":
            return name in METHODS_OF[kind] or name in getattr(value, "columns", ())
        if kind:
            return name in METHODS_OF[kind]
        if self._is_own(type(value)) or self._is_own(value):
            return not name.startswith("_")
        of_component = type(value).__module__.partition(".")[0] in _PACKAGES
        return of_component and not isinstance(value, type) and name in METHODS_OF["component"]

    def _is_own(self, value: object) -> bool:
        module = getattr(value, "__module__", None) or ""
        return "scripts" in self.permissions and str(module).partition(".")[0] in self.own_modules

    def _call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(function, _CheckedCall):
            function = function._function
        if isinstance(function, functools.partial):
            return self._call(function.func, *function.args, *arguments, **{**function.keywords, **named})
        if not self._callable(function):
            raise Refused(f"a call of a {type(function).__name__}, which is not on the list")
        for value in (*arguments, *named.values()):
            self._check_handed(value)
            if getattr(value, "__name__", "") in UNFILLED and function is not isinstance:
                raise Refused(f"{printable(value.__name__)} handed on, which takes a size too")
        self.check_paths(check_arguments(function, arguments, named), function)
        if type(function).__module__.startswith("monai."):  # a transform that was made: it may read the file
            self.check_paths({"path": [value for value in _inside([*arguments, *named.values()]) if _is_far(value)]})
        return function(*arguments, **named)

    def _check_handed(self, value: Any) -> None:
        """Refuse a function or class that may not be called, for whoever gets it may call it."""
        if isinstance(value, functools.partial):
            self._check_handed(value.func)
            check_arguments(value.func, value.args, value.keywords)
        elif (inspect.isroutine(value) or inspect.isclass(value)) and not self._callable(value):
            raise Refused(f"{printable(value.__name__)} handed on, which is not on the list")

    def check_paths(self, arguments: Mapping[str, Any], function: Any = None) -> None:
        """Refuse arguments, of a function or class if it is given, that name a file or folder elsewhere."""
        further = _PLACES_OF.get(f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '')}", ())
        for name in PLACES.union(further) & arguments.keys():
            for given in _inside(arguments[name]):
                if isinstance(given, str | PurePath):
                    self._check_path(given)

    def _callable(self, function: Any) -> bool:
        if id(function) in self._ids or self._is_own(function):
            return True
        if isinstance(function, BuiltinMethodType | MethodType) and function.__self__ is not builtins:
            owner = function.__self__
            return owner is self or self._allows(owner, function.__name__) or self._is_own(type(owner))
        if function in (bounded_range, setattr) or any(function is getattr(builtins, name) for name in BUILTINS):
            return True
        of = function if inspect.isclass(function) or inspect.isroutine(function) else type(function)
        return str(getattr(of, "__module__", None)).partition(".")[0] in _PACKAGES or self._is_own(of)

    def _looks_inside(
        self, function: Callable[..., Any], allowed: Collection[str], folder: Path | None = None
    ) -> Callable[..., Any]:
        """Return a function that looks at the place that its first argument names, below a folder if one is given."""
        signature = inspect.signature(function)
        where = "folder" if "folder" in signature.parameters else next(iter(signature.parameters))

        def look(*arguments: Any, **named: Any) -> Any:
            by_name = signature.bind(*arguments, **named).arguments
            if others := by_name.keys() - {where, *allowed}:
                raise Refused(f"the argument {min(others)} of {function.__name__}, which is not on the list")
            given = by_name.get(where, "." if where != "folder" else None)
            if given is not None:
                self._check_path(given if folder is None else folder / str(given))
            return function(*arguments, **named)

        return look

    def _open(self, path: Any, mode: str = "r", **named: Any) -> Any:
        if "open" in self.permissions:
            return open(path, mode, **named)
        if mode not in ("r", "rb", "rt") or set(named) - {"encoding", "newline"}:
            raise Refused("open() for writing, for which the policy has to allow 'open'")
        self._check_path(path)
        content = Path(path).read_bytes()  # nobody would close the file
        return io.BytesIO(content) if mode == "rb" else io.StringIO(content.decode(named.get("encoding") or "utf-8"))

    def _check_path(self, given: Any) -> None:
        """Refuse to look at a path that is not below the bundle's folder, its data, or what the user named."""
        if "paths" in self.permissions:
            return
        if not isinstance(given, str | PurePath):
            raise Refused(f"a {type(given).__name__} as a path")
        path = Path(os.path.abspath(given))
        if _SCHEME.match(str(given)):
            raise Refused(f"{printable(given)}, a URL: nothing is fetched")
        if _READ_OTHERWISE.search(str(given)):
            raise Refused(f"the path {printable(given)}, which others read as something else: it begins with ~ or a "
                          "space, or has a control character")  # fmt: skip
        if not any(path.is_relative_to(root) for root in self.roots):
            raise ElsewhereRefused(f"the path {printable(given)}, which is neither below the bundle nor below its data")
        upwards = ".." in PurePath(given).parts
        if upwards and (_PATTERN.search(str(given)) or os.path.realpath(given) != os.path.realpath(path)):
            raise Refused(f"the path {printable(given)}, which leads upwards ('..') behind a link")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise Refused(f"the path {printable(given)}, a pipe or a device, which would be waited for")


@dataclass(frozen=True, eq=False)
class _CheckedCall:
    """A component as a value, as `map` or a transform is handed it: its arguments are checked when it is called."""

    _function: Callable[..., Any]
    _evaluator: ExpressionEvaluator

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._evaluator._call(self._function, *arguments, **named)


def _inside(value: Any) -> Iterator[Any]:
    """Give a value, or what a container holds."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _inside(each)
    else:
        yield value


def _is_far(value: Any) -> bool:
    return isinstance(value, PurePath) or (isinstance(value, str) and os.sep in value)


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
        self.generic_visit(node)
        return ast.Call(ast.Name(_CALL, ast.Load()), [node.func, *node.args], node.keywords)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op).__name__ not in GROWING:
            return node
        return _guard(_OPERATE, ast.Constant(type(node.op).__name__), node.left, node.right)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        self.generic_visit(node)
        spec = node.format_spec or ast.Constant("")
        return ast.FormattedValue(_guard(_FORMATTED, node.value, spec), -1, None)


def _guard(name: str, *arguments: Any) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _kind(value: object) -> str:
    if type(value).__module__.partition(".")[0] == "pandas":
        return "table"
    return next((kind for types, kind in _KINDS if isinstance(value, types)), "")


def _located(path: str) -> Any:
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
