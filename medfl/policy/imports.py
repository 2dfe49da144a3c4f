"""The import statements that a site accepts: one listed module or member each, read and never executed."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from medfl.core.untrusted import Refused, printable
from medfl.policy.allowed import BUILTINS, MEMBERS, MODULES, WORDED, WORDED_MODULES

DEFAULT_NAMES = {"monai": "monai", "torch": "torch", "np": "numpy", "numpy": "numpy"}
"""The modules that MONAI offers every expression without an import."""


@dataclass
class Uses:
    """What expressions and imports use, with counts, and the words of the policy that they need."""

    uses: Counter[str] = field(default_factory=Counter)
    words: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(word, what needs it)"""


def imported(text: str, words: Collection[str], own_modules: Collection[str], uses: Uses) -> dict[str, str]:
    """Return the name that an import statement binds, and the path that it stands for.

    Args:
        text: the statement without its `$`.
        words: of the policy.
        own_modules: top-level modules of the bundle's own Python.
        uses: takes what is used.

    Raises:
        Refused: it is no plain import of one listed module or member.
    """
    node = only_statement(text)
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
        listed = path in MEMBERS or path in WORDED or module.split(".")[0] in own_modules
        if module == node.module and not listed:
            raise Refused(f"an import of {printable(path)}, which is not on the list")
    else:
        path = module = name
        bound = alias or name.split(".")[0]
        path = path if alias else bound
    for word in {_word_of_module(module, own_modules), WORDED.get(path, "")} - {""}:
        need_word(word, f"import {module}", words, uses)
    if bound in BUILTINS or bound in ("open", "setattr") or (DEFAULT_NAMES.get(bound, path) != path):
        raise Refused(f"an import that takes the name {printable(bound)}")
    uses.uses[f"import {module}"] += 1
    return {bound: path}


def _word_of_module(module: str, own_modules: Collection[str]) -> str:
    if module.split(".")[0] in own_modules:
        return "scripts"
    if module in MODULES:
        return ""
    if module in WORDED_MODULES:
        return WORDED_MODULES[module]
    raise Refused(f"an import of {printable(module)}, which is not on the list")


def need_word(word: str, what: str, words: Collection[str], uses: Uses) -> None:
    """Note that something needs a word of the policy.

    Raises:
        Refused: the policy lacks it.
    """
    if word not in words:
        raise Refused(f"{what}, for which the policy has to allow {word!r}")
    uses.words[word, what] += 1


def only_statement(text: str) -> ast.stmt:
    """Return the one statement of a text.

    Raises:
        Refused: it is not valid Python, not ASCII, or not one statement.
    """
    if not text.isascii():
        raise Refused("characters outside of ASCII in an expression")
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Refused("an expression that is not valid Python") from error
    if len(statements) != 1:
        raise Refused("not exactly one expression")
    return statements[0]
