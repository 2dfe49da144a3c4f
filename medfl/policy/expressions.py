"""The grammar of `$` expressions that a site accepts: Python's own parser reads them, nothing evaluates them.

An expression is read as MONAI would read it (`#` is `::`, then references are replaced), and every node of its tree has
to be one that is known here: literals, references, listed names and members of listed modules, listed methods of
values, calls of these, comprehensions, lambdas and conditions. Everything else is refused.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from medfl.core.untrusted import Refused, printable
from medfl.policy.allowed import (
    BUILTINS,
    MEMBERS,
    METHODS,
    MODULES,
    STATEMENT_METHODS,
    WORDED,
    WORDED_MODULES,
    argument_refused,
)

DEFAULT_NAMES = {"monai": "monai", "torch": "torch", "np": "numpy", "numpy": "numpy"}
"""The modules that MONAI offers every expression without an import."""

_REFERENCE = re.compile(r"@(?:\w*)(?:::\w*)*")  # as MONAI finds them
_PLACEHOLDER = "_reference_"
_LOCAL = "__local_refs"  # what MONAI puts in the place of references
_SYSTEM = re.compile(r"/+(etc|proc|sys|dev|root|boot|home|var)(/|$)")
_PARENT = re.compile(r"(^|[/\\])\.\.([/\\]|$)")
_LARGEST = 10**9
_CONTAINERS = (ast.List, ast.Tuple, ast.Set)
_OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.And, ast.Or, ast.Not, ast.USub, ast.UAdd, ast.Eq,
    ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Is, ast.IsNot, ast.In, ast.NotIn, ast.BitAnd, ast.BitOr,
    ast.Invert,
)  # fmt: skip


@dataclass
class Found:
    """What an expression uses: kinds with counts, and the words of the policy that it needs."""

    uses: Counter[str] = field(default_factory=Counter)
    words: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(word, what needs it)"""


def check_path(text: str, *, absolute: bool = False) -> None:
    """Check a text that may be used as a path.

    Args:
        text: any text of a configuration.
        absolute: it may begin with a slash: it is a continuation, or the place where the zoo keeps its data.

    Raises:
        Refused: it is a URL, leads upwards, to a home or to a system folder, or is absolute.
    """
    if "://" in text:
        raise Refused("a URL: nothing is fetched")
    if _PARENT.search(text):
        raise Refused("a path that leads upwards ('..')")
    if text.startswith("~") or text.startswith("\\\\") or re.match(r"[A-Za-z]:[\\/]", text):
        raise Refused("a path outside of bundle and data folder")
    if _SYSTEM.match(text):
        raise Refused("a path into a folder of the system")
    if text.startswith("/") and not absolute:
        raise Refused("an absolute path")


def check_id(text: str) -> None:
    """Check the id that a reference or macro names.

    Raises:
        Refused: it is the whole configuration, or an import.
    """
    parts = [part for part in text.replace("#", "::").split("::") if part]
    if not parts:
        raise Refused("a reference to the whole configuration")
    if "imports" in parts:
        raise Refused("a reference to an import")


def imported(text: str, words: Collection[str], own: Collection[str], found: Found) -> dict[str, str]:
    """Return the name that an import statement binds, and the path that it stands for.

    Args:
        text: the statement without its `$`.
        words: of the policy.
        own: top-level modules of the bundle's own Python.
        found: takes what is used.

    Raises:
        Refused: it is no plain import of one listed module or member.
    """
    node = _only_statement(text)
    if not isinstance(node, ast.Import | ast.ImportFrom):
        raise Refused("something else than an import")
    if len(node.names) != 1:
        raise Refused("several imports in one statement")
    name, alias = node.names[0].name, node.names[0].asname
    if "__" in text or "__" in (alias or ""):
        raise Refused("a name with two underscores")
    if isinstance(node, ast.ImportFrom):
        if node.level or not node.module or name == "*":
            raise Refused("a relative import or one of everything")
        path, bound = f"{node.module}.{name}", alias or name
        module = path if path in MODULES or path in WORDED_MODULES else node.module
        if module == node.module and path not in MEMBERS and path not in WORDED and module.split(".")[0] not in own:
            raise Refused(f"an import of {printable(path)}, which is not on the list")
    else:
        path = module = name
        bound = alias or name.split(".")[0]
        path = path if alias else bound
    for word in {_word_of_module(module, own), WORDED.get(path, "")} - {""}:
        _need(word, f"import {module}", words, found)
    if bound in BUILTINS or bound in ("open", "setattr") or (DEFAULT_NAMES.get(bound, path) != path):
        raise Refused(f"an import that takes the name {printable(bound)}")
    found.uses[f"import {module}"] += 1
    return {bound: path}


def _word_of_module(module: str, own: Collection[str]) -> str:
    if module.split(".")[0] in own:
        return "scripts"
    if module in MODULES:
        return ""
    if module in WORDED_MODULES:
        return WORDED_MODULES[module]
    raise Refused(f"an import of {printable(module)}, which is not on the list")


def _need(word: str, what: str, words: Collection[str], found: Found) -> None:
    if word not in words:
        raise Refused(f"{what}, for which the policy has to allow {word!r}")
    found.words[word, what] += 1


def _only_statement(text: str) -> ast.stmt:
    if not text.isascii():
        raise Refused("characters outside of ASCII in an expression")
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Refused("an expression that is not valid Python") from error
    if len(statements) != 1:
        raise Refused("not exactly one expression")
    return statements[0]


def check_expression(
    text: str,
    names: Mapping[str, str],
    words: Collection[str],
    own: Collection[str],
    found: Found,
    *,
    statement: bool = False,
    length: int = 1000,
) -> None:
    """Check an expression.

    Args:
        text: the expression without its `$`.
        names: what imports bind, and the paths that they stand for.
        words: of the policy.
        own: top-level modules of the bundle's own Python.
        found: takes what is used.
        statement: it stands in a list that medfl never evaluates.
        length: at most so many characters.

    Raises:
        Refused: something in it is not known here.
    """
    if len(text) > length:
        raise Refused(f"an expression of more than {length} characters")
    if "__" in text:
        raise Refused("a name with two underscores")
    text = text.replace("#", "::")
    if "%::" in text or _PLACEHOLDER in text:
        raise Refused("a macro inside an expression")
    for reference in _REFERENCE.findall(text):
        check_id(reference[1:])
    node = _only_statement(_REFERENCE.sub(f"{_PLACEHOLDER}0", text))
    if not isinstance(node, ast.Expr):
        raise Refused("a statement where an expression is expected")
    shape = ast.dump(node)
    _Checker(names, words, own, found, statement).value(node.value, frozenset())
    evaluated = _only_statement(_REFERENCE.sub(lambda match: f"{_LOCAL}['{match[0][1:]}']", text))
    if ast.dump(_References().visit(evaluated)) != shape:
        raise Refused("a reference inside a text, which MONAI would read as something else")


class _References(ast.NodeTransformer):
    """Put the placeholder where MONAI's own replacement of references stands."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        reference = isinstance(node.value, ast.Name) and node.value.id == _LOCAL
        return ast.Name(f"{_PLACEHOLDER}0", node.ctx) if reference else node


class _Checker:
    def __init__(
        self, names: Mapping[str, str], words: Collection[str], own: Collection[str], found: Found, statement: bool
    ) -> None:
        self.names, self.words, self.own, self.found = names, words, own, found
        self.methods = METHODS | STATEMENT_METHODS if statement else METHODS
        self.statement = statement
        self.calls: ast.AST | None = None

    def value(self, node: ast.AST | None, local: frozenset[str], *, continues: bool = False) -> None:
        """Check one node and all below it; `local` are the names that lambdas and comprehensions around it bind."""
        if node is None:
            return
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise Refused(f"{type(node).__name__}, which no expression here may use")
        if isinstance(node, ast.Constant):
            self._constant(node, local, continues)
        else:
            method(node, local)

    def all(self, nodes: Collection[ast.AST | None], local: frozenset[str]) -> None:
        for node in nodes:
            self.value(node, local)

    # Leaves

    def _constant(self, node: ast.Constant, local: frozenset[str], continues: bool = False) -> None:
        if isinstance(node.value, str):
            if _PLACEHOLDER in node.value:
                raise Refused("a reference inside a text")
            check_path(node.value, absolute=continues)
        elif isinstance(node.value, int | float) and abs(node.value) > _LARGEST:
            raise Refused("a number beyond a thousand million")
        elif not isinstance(node.value, int | float | None):
            raise Refused(f"a literal of type {type(node.value).__name__}")

    def _name(self, node: ast.Name, local: frozenset[str]) -> None:
        if not isinstance(node.ctx, ast.Load):
            raise Refused("an assignment")
        if node.id.startswith(_PLACEHOLDER):
            if node.id != f"{_PLACEHOLDER}0":
                raise Refused("text that runs into a reference")
            self.found.uses["reference"] += 1
        elif node.id in self.names and node.id not in local:
            self._member(self.names[node.id])
        elif node.id not in local and node.id not in BUILTINS:
            raise Refused(f"the name {printable(node.id)}")

    def _member(self, path: str) -> None:
        """Check what a module's name and attributes lead to."""
        if path.split(".")[0] in self.own:
            _need("scripts", path, self.words, self.found)
        elif path in WORDED:
            _need(WORDED[path], path, self.words, self.found)
        elif path not in MEMBERS:
            raise Refused(f"{printable(path)}, which is not on the list")
        self.found.uses[path] += 1

    def _attribute(self, node: ast.Attribute, local: frozenset[str]) -> None:
        path = self._path(node, local)
        if path:
            self._member(path)
            return
        if node.attr not in self.methods:
            raise Refused(f"the attribute .{printable(node.attr)}, which is not on the list")
        if node.attr == "replace" and self.calls is not node:
            raise Refused("a replace() that is handed on")  # a path's would move a file
        self.value(node.value, local)
        self.found.uses[f".{node.attr}"] += 1

    def _path(self, node: ast.AST, local: frozenset[str]) -> str:
        """Return the path that a chain of attributes of a module spells, "" for one of a value."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in local or node.id not in self.names:
            return ""
        base = self.names[node.id]
        if base in MEMBERS and ".".join([base, *reversed(attributes)]) not in MEMBERS:
            return ""  # a function or class that was imported by name: its attributes are those of a value
        return ".".join([base, *reversed(attributes)])

    # Calls

    def _call(self, node: ast.Call, local: frozenset[str]) -> None:
        called = node.func
        if isinstance(called, ast.Name) and called.id in ("open", "setattr") and called.id not in local:
            (self._open if called.id == "open" else self._setattr)(node)
        elif isinstance(called, ast.Name):
            self._name(called, local)
            if called.id in BUILTINS and called.id not in local:
                self.found.uses[called.id] += 1
        elif isinstance(called, ast.Attribute | ast.Call):
            self.calls = called
            self.value(called, local)
            if isinstance(called, ast.Attribute) and called.attr == "replace" and len(node.args) < 2:
                raise Refused("a replace() with one argument, which would move a file")
        else:
            raise Refused(f"a call of a {type(called).__name__}")
        for argument in node.args:
            if isinstance(argument, ast.Starred) and not (isinstance(called, ast.Name) and called.id in BUILTINS):
                raise Refused("arguments handed on with a star")
            self.value(argument.value if isinstance(argument, ast.Starred) else argument, local)
        for keyword in node.keywords:
            if keyword.arg is None:
                raise Refused("arguments handed on with two stars")
            if keyword.arg.startswith(_PLACEHOLDER):
                raise Refused("a reference as the name of an argument")
            why = argument_refused(keyword.arg, _literal(keyword.value))
            if why:
                raise Refused(why)
            self.value(keyword.value, local)

    def _open(self, node: ast.Call) -> None:
        given = {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
        mode = _literal(node.args[1]) if len(node.args) > 1 else given.get("mode", "r")
        plain = len(node.args) <= 2 and set(given) <= {"mode", "encoding", "newline"}
        if not (plain and mode in ("r", "rb", "rt")):
            _need("open", "open() for writing", self.words, self.found)
        self.found.uses["open, to read" if mode in ("r", "rb", "rt") else "open"] += 1

    def _setattr(self, node: ast.Call) -> None:
        target = self._path(node.args[0], frozenset()) if node.args else ""
        rest = [_literal(argument) for argument in node.args[1:]]
        switches = ("benchmark", "deterministic")
        harmless = target == "torch.backends.cudnn" and len(rest) == 2 and rest[0] in switches and type(rest[1]) is bool
        if not (harmless and self.statement):
            _need("setattr", "setattr()", self.words, self.found)
        if harmless:
            node.args = node.args[1:]  # the module itself is no value that may be handed on
        self.found.uses["setattr"] += 1

    # What is made of them

    def _binop(self, node: ast.BinOp, local: frozenset[str]) -> None:
        self._operator(node.op)
        self.value(node.left, local)
        after = isinstance(node.op, ast.Add) and not isinstance(node.left, ast.Constant)
        self.value(node.right, local, continues=after)

    def _boolop(self, node: ast.BoolOp, local: frozenset[str]) -> None:
        self._operator(node.op)
        self.all(node.values, local)

    def _unaryop(self, node: ast.UnaryOp, local: frozenset[str]) -> None:
        self._operator(node.op)
        self.value(node.operand, local)

    def _compare(self, node: ast.Compare, local: frozenset[str]) -> None:
        for operator in node.ops:
            self._operator(operator)
        self.all([node.left, *node.comparators], local)

    def _operator(self, operator: ast.AST) -> None:
        if not isinstance(operator, _OPERATORS):
            raise Refused(f"the operator {type(operator).__name__}")

    def _ifexp(self, node: ast.IfExp, local: frozenset[str]) -> None:
        self.found.uses["if ... else"] += 1
        self.all([node.test, node.body, node.orelse], local)

    def _subscript(self, node: ast.Subscript, local: frozenset[str]) -> None:
        self.all([node.value, node.slice], local)

    def _slice(self, node: ast.Slice, local: frozenset[str]) -> None:
        self.all([node.lower, node.upper, node.step], local)

    def _list(self, node: ast.List | ast.Tuple | ast.Set, local: frozenset[str]) -> None:
        self.all([item.value if isinstance(item, ast.Starred) else item for item in node.elts], local)

    _tuple = _set = _list

    def _dict(self, node: ast.Dict, local: frozenset[str]) -> None:
        self.all([*node.keys, *node.values], local)

    def _joinedstr(self, node: ast.JoinedStr, local: frozenset[str]) -> None:
        for index, part in enumerate(node.values):
            if isinstance(part, ast.FormattedValue):
                if part.format_spec is not None or part.conversion != -1:
                    raise Refused("a text with a format of its own")
                self.value(part.value, local)
            else:
                self.value(part, local, continues=index > 0)
        self.found.uses["text with values"] += 1

    def _lambda(self, node: ast.Lambda, local: frozenset[str]) -> None:
        given = node.args
        if given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs or given.defaults:
            raise Refused("a lambda with more than plain arguments")
        self.found.uses["lambda"] += 1
        self.value(node.body, local | self._bound(argument.arg for argument in given.args))

    def _listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, local: frozenset[str]) -> None:
        self.value(node.elt, self._generators(node.generators, local))

    _setcomp = _generatorexp = _listcomp

    def _dictcomp(self, node: ast.DictComp, local: frozenset[str]) -> None:
        self.all([node.key, node.value], self._generators(node.generators, local))

    def _generators(self, generators: list[ast.comprehension], local: frozenset[str]) -> frozenset[str]:
        for generator in generators:
            if generator.is_async:
                raise Refused("an asynchronous comprehension")
            self.value(generator.iter, local)
            targets = generator.target.elts if isinstance(generator.target, _CONTAINERS) else [generator.target]
            if not all(isinstance(target, ast.Name) for target in targets):
                raise Refused("a comprehension that assigns to more than names")
            local |= self._bound(target.id for target in targets if isinstance(target, ast.Name))
            self.all(generator.ifs, local)
        self.found.uses["comprehension"] += 1
        return local

    def _bound(self, names: Iterable[str]) -> frozenset[str]:
        bound = frozenset(names)
        for name in bound:
            if name in self.names or name in ("open", "setattr") or name.startswith(_PLACEHOLDER):
                raise Refused(f"an argument that takes the name {printable(name)}")
        return bound


def _literal(node: ast.AST) -> object:
    """Return what a node says, `...` where it is computed."""
    try:
        return ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return ...
