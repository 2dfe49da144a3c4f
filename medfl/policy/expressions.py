"""The grammar of `$` expressions that a site accepts: Python's own parser reads them, nothing evaluates them.

An expression is read as MONAI would read it (`#` is `::`, then references are replaced), and every node of its tree has
to be one that is known here: literals, references, listed names and members of listed modules, listed methods of
values, calls of these, comprehensions, lambdas and conditions. Everything else is refused.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from medfl.core.untrusted import Refused, printable
from medfl.policy.allowed_in_expressions import BUILTINS, MEMBERS, METHODS, PERMISSION_OF
from medfl.policy.components import check_arguments, for_expressions
from medfl.policy.imports import Uses, need_permission, only_statement
from medfl.policy.paths import check_id, check_path

REFERENCE = re.compile(r"@(?:\w*)(?:::\w*)*")  # as MONAI finds them
_PLACEHOLDER = "_reference_"
_LARGEST = 10**9
_LONGEST_RANGE = 10**7
_DEEPEST = 50  # levels: Python's parser and this check recurse
_CONTAINERS = (ast.List, ast.Tuple, ast.Set)
_Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
_OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.And, ast.Or, ast.Not, ast.USub, ast.UAdd,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Is, ast.IsNot, ast.In, ast.NotIn, ast.BitAnd, ast.BitOr,
    ast.Invert,
)  # fmt: skip


def check_expression(
    text: str,
    names: Mapping[str, str],
    permissions: Collection[str],
    own_modules: Collection[str],
    uses: Uses,
    *,
    prints: bool = False,
    length: int = 1000,
) -> None:
    """Check an expression.

    Args:
        text: the expression without its `$`.
        names: what imports bind, and the paths that they stand for.
        permissions: of the policy.
        own_modules: top-level modules of the bundle's own Python.
        uses: takes what is used.
        prints: it belongs to a handler, which medfl never makes: it may print.
        length: at most so many characters.

    Raises:
        Refused: something in it is not known here.
    """
    if len(text) > length:
        raise Refused(f"an expression of more than {length} characters")
    # `lambda batch, *_, **__:` takes what it does not use.
    if "__" in re.sub(r"(?<=\*\*)__(?=\s*:)", "_", text):
        raise Refused("a name with two underscores")

    text = text.replace("#", "::")
    if "%::" in text or _PLACEHOLDER in text:
        raise Refused("a macro inside an expression")

    for reference in REFERENCE.findall(text):
        check_id(reference[1:])

    node = only_statement(REFERENCE.sub(f"{_PLACEHOLDER}0", text))
    if not isinstance(node, ast.Expr):
        raise Refused("a statement where an expression is expected")
    if _levels(node) > _DEEPEST:
        raise Refused(f"an expression of more than {_DEEPEST} levels")

    _Checker(names, permissions, own_modules, uses, prints).value(node.value, frozenset())


def module_path(node: ast.AST, names: Mapping[str, str]) -> str:
    """Return the path that a name, or a chain of attributes of one, spells if an import binds it, else ""."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value

    if not isinstance(node, ast.Name) or node.id not in names:
        return ""

    return ".".join([names[node.id], *reversed(attributes)])


def check_format(text: str) -> None:
    """Check that the fields of a text for `format` name values without reaching into them, and are narrow.

    Raises:
        Refused: they are not.
    """
    try:
        fields = [part[1:] for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise Refused("a text whose format cannot be read") from error

    # `{0.name}`, `{0[key]}` and `{0!r}` reach into a value or call it.
    for name, spec, conversion in fields:
        if not re.fullmatch(r"\w*", name or "", re.ASCII) or conversion:
            raise Refused("a text whose format reaches into its values")
        check_width(spec or "")


def check_width(spec: str) -> None:
    """Check the format of one value, as in `03d`.

    Raises:
        Refused: it is computed, or more than 999 places wide.
    """
    # A width of a thousand million would be a text of as many bytes.
    if re.search(r"\d{4}|[{}]", spec):
        raise Refused("a text with a format that is computed or wide, or a conversion")


def _levels(node: ast.AST) -> int:
    deepest = 0
    todo = [(node, 0)]
    while todo:
        node, level = todo.pop()
        deepest = max(deepest, level)
        todo += [(child, level + 1) for child in ast.iter_child_nodes(node)]

    return deepest


@dataclass
class _Checker:
    names: Mapping[str, str]
    permissions: Collection[str]
    own_modules: Collection[str]
    uses: Uses
    prints: bool
    calls: ast.AST | None = None

    def value(
        self, node: ast.AST | None, local: frozenset[str], *, continues: bool = False
    ) -> None:
        """Check one node and all below it; `local` are the names that lambdas and comprehensions around it bind."""
        if node is None:
            return

        if isinstance(node, ast.Constant):
            self._constant(node, continues)
            return

        # What has no method here, such as a walrus or an await, is refused.
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise Refused(f"{type(node).__name__}, which no expression here may use")

        method(node, local)

    def all(self, nodes: Collection[ast.AST | None], local: frozenset[str]) -> None:
        for node in nodes:
            self.value(node, local)

    # Leaves

    def _constant(self, node: ast.Constant, continues: bool) -> None:
        if isinstance(node.value, str):
            if _PLACEHOLDER in node.value:
                raise Refused("a reference inside a text")
            check_path(node.value, absolute=continues)
        elif isinstance(node.value, int | float) and abs(node.value) > _LARGEST:
            raise Refused("a number beyond a thousand million")
        elif not isinstance(node.value, int | float | None) and node.value is not ...:
            raise Refused(f"a literal of type {type(node.value).__name__}")

    def _name(self, node: ast.Name, local: frozenset[str]) -> None:
        if not isinstance(node.ctx, ast.Load):
            raise Refused("an assignment")

        prints = self.prints and node.id == "print"
        if node.id.startswith(_PLACEHOLDER):
            if node.id != f"{_PLACEHOLDER}0":
                raise Refused("text that runs into a reference")
            self.uses.counts["reference"] += 1
        elif node.id in self.names:
            self._member(self.names[node.id])
        elif not prints and node.id not in local and node.id not in BUILTINS:
            raise Refused(f"the name {printable(node.id)}")

    def _member(self, path: str) -> None:
        """Check what a module's name and attributes lead to."""
        if path.split(".")[0] in self.own_modules:
            need_permission("scripts", path, self.permissions, self.uses.permissions)
        elif path in PERMISSION_OF:
            need_permission(PERMISSION_OF[path], path, self.permissions, self.uses.permissions)
        elif path not in MEMBERS and for_expressions(path) is None:
            raise Refused(f"{printable(path)}, which is not on the list")

        self.uses.counts[path] += 1

    def _attribute(self, node: ast.Attribute, local: frozenset[str]) -> None:
        path = module_path(node, self.names)
        if path:
            self._member(path)
            return

        # Objects of the bundle's own Python have attributes of any name, a table its columns.
        of_scripts = bool(self.own_modules) and "scripts" in self.permissions
        column = (
            isinstance(node.value, ast.Call)
            and module_path(node.value.func, self.names) == "pandas.read_csv"
        )
        any_name = (of_scripts or column) and not node.attr.startswith("_")
        if not any_name and node.attr not in METHODS:
            raise Refused(f"the attribute .{printable(node.attr)}, which is not on the list")

        if node.attr == "format":
            if not isinstance(node.value, ast.Constant) or not isinstance(node.value.value, str):
                raise Refused("the format of a text that is computed")
            check_format(node.value.value)

        # A text's has two arguments at least, which only a call here shows; a path's moves a file.
        if node.attr == "replace" and self.calls is not node:
            raise Refused("a replace() that is handed on")

        self.value(node.value, local)
        self.uses.counts[f".{node.attr}"] += 1

    # Calls

    def _call(self, node: ast.Call, local: frozenset[str]) -> None:
        called = node.func
        if isinstance(called, ast.Name) and called.id == "open" and called.id not in local:
            self._open(node)
        elif isinstance(called, ast.Name) and called.id == "setattr" and called.id not in local:
            need_permission("setattr", "setattr()", self.permissions, self.uses.permissions)
            self.uses.counts["setattr"] += 1
        elif isinstance(called, ast.Name):
            self._name(called, local)
            for bound in map(_literal, node.args):
                if called.id == "range" and type(bound) is int and bound > _LONGEST_RANGE:
                    raise Refused(f"a range beyond {_LONGEST_RANGE}")
            if called.id in BUILTINS and called.id not in local:
                self.uses.counts[called.id] += 1
        elif isinstance(called, ast.Attribute | ast.Call):
            self.calls = called  # a method is called here, and not handed on
            self.value(called, local)
            replaces = isinstance(called, ast.Attribute) and called.attr == "replace"
            if replaces and len(node.args) < 2:
                raise Refused("a replace() with one argument, which would move a file")
        else:
            raise Refused(f"a call of a {type(called).__name__}")

        for argument in node.args:
            # How many there are, and in which place, is not known: only builtins take any.
            if isinstance(argument, ast.Starred):
                if not isinstance(called, ast.Name) or called.id not in BUILTINS:
                    raise Refused("arguments handed on with a star")
                self.value(argument.value, local)
            else:
                self.value(argument, local)

        keywords: dict[str, object] = {}
        for keyword in node.keywords:
            # Their names are not known, so they could be any of the arguments that are checked.
            if keyword.arg is None:
                raise Refused("arguments handed on with two stars")
            if keyword.arg.startswith(_PLACEHOLDER):
                raise Refused("a reference as the name of an argument")

            keywords[keyword.arg] = _literal(keyword.value)
            self.value(keyword.value, local)

        path = module_path(called, self.names)
        check_arguments(
            for_expressions(path),
            list(map(_literal, node.args)),
            keywords,
            unpickles=path == "torch.load",
        )

    def _open(self, node: ast.Call) -> None:
        keywords = {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
        if len(node.args) > 1:
            mode = _literal(node.args[1])
        else:
            mode = keywords.get("mode", "r")

        reads = mode in ("r", "rb", "rt")
        plain = len(node.args) <= 2 and set(keywords) <= {"mode", "encoding", "newline"}
        if not (plain and reads):
            need_permission("open", "open() for writing", self.permissions, self.uses.permissions)

        self.uses.counts["open, to read" if reads else "open"] += 1

    # What is made of them

    def _binop(self, node: ast.BinOp, local: frozenset[str]) -> None:
        self._operator(node.op)
        if isinstance(node.op, ast.Pow):
            exponent = _literal(node.right)
            nested = any(isinstance(part, ast.Pow) for part in ast.walk(node.right))
            if nested or (isinstance(exponent, int | float) and exponent > 100):
                raise Refused("a power that grows without bound")

        self.value(node.left, local)
        # A text that is added to a computed one may begin with a slash: `folder + "/images"`.
        continues = isinstance(node.op, ast.Add) and not isinstance(node.left, ast.Constant)
        self.value(node.right, local, continues=continues)

    def _boolop(self, node: ast.BoolOp | ast.UnaryOp, local: frozenset[str]) -> None:
        self._operator(node.op)
        self.all(node.values if isinstance(node, ast.BoolOp) else [node.operand], local)

    _unaryop = _boolop

    def _compare(self, node: ast.Compare, local: frozenset[str]) -> None:
        for operator in node.ops:
            self._operator(operator)
        self.all([node.left, *node.comparators], local)

    def _operator(self, operator: ast.AST) -> None:
        if not isinstance(operator, _OPERATORS):
            raise Refused(f"the operator {type(operator).__name__}")

    def _ifexp(self, node: ast.IfExp, local: frozenset[str]) -> None:
        self.uses.counts["if ... else"] += 1
        self.all([node.test, node.body, node.orelse], local)

    def _parts(self, node: ast.Subscript | ast.Slice | ast.Dict, local: frozenset[str]) -> None:
        for part in ast.iter_child_nodes(node):
            if not isinstance(part, ast.expr_context):
                self.value(part, local)

    _subscript = _slice = _dict = _parts

    def _list(self, node: ast.List | ast.Tuple | ast.Set, local: frozenset[str]) -> None:
        for item in node.elts:
            self.value(item.value if isinstance(item, ast.Starred) else item, local)

    _tuple = _set = _list

    def _joinedstr(self, node: ast.JoinedStr, local: frozenset[str]) -> None:
        for index, part in enumerate(node.values):
            if isinstance(part, ast.FormattedValue):
                check_width("{}" if part.conversion != -1 else _spec(part))
                self.value(part.value, local)
            else:
                self.value(part, local, continues=index > 0)

        self.uses.counts["text with values"] += 1

    def _lambda(self, node: ast.Lambda, local: frozenset[str]) -> None:
        taken = node.args
        self.all([*taken.defaults, *taken.kw_defaults], local)
        self.uses.counts["lambda"] += 1
        arguments = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg]
        names = [argument.arg for argument in arguments if argument]
        self.value(node.body, local | self._bound(names))

    def _listcomp(self, node: _Comprehension, local: frozenset[str]) -> None:
        if isinstance(node, ast.DictComp):
            elements = [node.key, node.value]
        else:
            elements = [node.elt]
        self.all(elements, self._generators(node.generators, local))

    _setcomp = _generatorexp = _dictcomp = _listcomp

    def _generators(
        self, generators: list[ast.comprehension], local: frozenset[str]
    ) -> frozenset[str]:
        for generator in generators:
            if generator.is_async:
                raise Refused("an asynchronous comprehension")

            self.value(generator.iter, local)
            if isinstance(generator.target, _CONTAINERS):
                targets = generator.target.elts
            else:
                targets = [generator.target]

            if not all(isinstance(target, ast.Name) for target in targets):
                raise Refused("a comprehension that assigns to more than names")

            local |= self._bound(target.id for target in targets if isinstance(target, ast.Name))
            self.all(generator.ifs, local)

        self.uses.counts["comprehension"] += 1
        return local

    def _bound(self, names: Iterable[str]) -> frozenset[str]:
        # A local of an import's name would be looked up as the module.
        bound = frozenset(names)
        for name in bound:
            if name in self.names or name in ("open", "setattr") or name.startswith(_PLACEHOLDER):
                raise Refused(f"an argument that takes the name {printable(name)}")
        return bound


def _spec(part: ast.FormattedValue) -> str:
    """Return the literal format of a value in a text; "{" stands for one that is computed."""
    spec = ""
    if isinstance(part.format_spec, ast.JoinedStr):
        for piece in part.format_spec.values:
            spec += str(piece.value) if isinstance(piece, ast.Constant) else "{"
    return spec


def _literal(node: ast.AST) -> object:
    """Return what a node says, `...` where it is computed."""
    try:
        return ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return ...
