"""The import statements of a bundle: one module or member each, read for their names and never executed."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from medfl.core.untrusted import Refused, printable
from medfl.policy.allowed_in_expressions import BUILTINS

DEFAULT_NAMES = {"monai": "monai", "torch": "torch", "np": "numpy", "numpy": "numpy"}
"""The modules that MONAI offers every expression without an import."""


@dataclass
class Uses:
    """What expressions and imports use, with counts, and the policy's permissions that this needs."""

    counts: Counter[str] = field(default_factory=Counter)
    permissions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(permission, what needs it)"""


def imported(text: str, uses: Uses) -> dict[str, str]:
    """Return the name that an import statement (without its `$`) binds, and the path that it stands for.

    Nothing is imported. Whether what the path leads to is listed is checked where an expression uses the name.

    Raises:
        Refused: it is no plain import of one module or member, or takes the name of another.
    """
    node = only_statement(text)
    if not isinstance(node, ast.Import | ast.ImportFrom):
        raise Refused("something else than an import")
    if len(node.names) != 1:
        raise Refused("several imports in one statement")

    name = node.names[0].name
    alias = node.names[0].asname
    if "__" in text:
        raise Refused("a name with two underscores")

    if isinstance(node, ast.ImportFrom):
        if node.level or not node.module or name == "*":
            raise Refused("a relative import or one of everything")
        path = f"{node.module}.{name}"
        bound = alias or name
    else:
        bound = alias or name.split(".")[0]
        path = name if alias else bound

    # A name that means something already gets no other meaning.
    if bound in BUILTINS or bound in ("open", "setattr") or DEFAULT_NAMES.get(bound, path) != path:
        raise Refused(f"an import that takes the name {printable(bound)}")

    uses.counts[f"import {path}"] += 1
    return {bound: path}


def need_permission(
    name: str, what: str, granted: Collection[str], allowed: Counter[tuple[str, str]]
) -> None:
    """Count that a permission of the policy allows something.

    Raises:
        Refused: the policy does not grant it.
    """
    if name not in granted:
        raise Refused(f"{what}, for which the policy has to allow {name!r}")
    allowed[name, what] += 1


def only_statement(text: str) -> ast.stmt:
    """Return the one statement of a text.

    Raises:
        Refused: it is not valid Python, not ASCII, or not one statement.
    """
    if not text.isascii():
        raise Refused("characters outside of ASCII in an expression")

    try:
        # MemoryError is the parser's for what is nested too deeply.
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Refused("an expression that is not valid Python") from error

    if len(statements) != 1:
        raise Refused("not exactly one expression")

    return statements[0]
