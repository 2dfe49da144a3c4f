"""How dense Python code is: tokens, layout and shape, but no lines: layout is free.

Tokens are those of `tokenize` without comments, docstrings and layout. The mean of several lines, functions or files
says what a reader meets, wherever it stands.
"""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
_PRONOUNS = (
    "one", "ones", "other", "others", "each", "all", "what", "whole", "own", "given", "named", "told", "seen", "said",
    "known", "kept", "wanted", "asked", "found", "made", "such", "same", "these", "those",
)  # fmt: skip
"""Names of locals that do not say what they hold."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.comprehension,
    ast.match_case,
)
_DIRECTIVES = ("noqa", "type:", "fmt:")


@dataclass(frozen=True)
class Source:
    """A file of Python.

    Attributes:
        lines: its text.
        tree: what it says.
        tokens: number of a code line -> its tokens.
        comments: how many it has, directives for tools apart.
    """

    lines: Sequence[str]
    tree: ast.Module
    tokens: Counter[int]
    comments: int

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read a file."""
        text = path.read_text()
        tree = ast.parse(text)
        documented = set(docstring_lines(tree))
        tokens: Counter[int] = Counter()
        comments = 0
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and not any(
                word in token.string for word in _DIRECTIVES
            ):
                comments += 1
            if token.type not in _LAYOUT and token.start[0] not in documented:
                tokens[token.start[0]] += 1
        return cls(text.splitlines(), tree, tokens, comments)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Yield the functions, those inside others too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the numbers of the lines of docstrings, and of texts that stand as statements."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield from _span(statement)


def _span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def density(paths: Sequence[Path]) -> dict[str, float]:
    """Return the figures of some files together."""
    shapes: Counter[str] = Counter()
    line_tokens: list[int] = []
    function_tokens: list[int] = []
    branches: list[int] = []
    for path in paths:
        source = Source.read(path)
        line_tokens += source.tokens.values()
        shapes["comments"] += source.comments
        for node in ast.walk(source.tree):
            shapes.update(_shapes(node))
        for function in source.functions():
            span = _span(function)
            function_tokens.append(sum(source.tokens[number] for number in span))
            branches.append(sum(isinstance(node, _BRANCHES) for node in ast.walk(function)))
            shapes["lines in functions"] += len(span)
            shapes["blank lines"] += sum(not source.lines[number - 1].strip() for number in span)

    def rate(name: str, of: float, per: int) -> float:
        return round(per * shapes[name] / max(1, of), 1)

    code_lines = len(line_tokens)
    return {
        "tokens of the product": sum(line_tokens),
        "tokens of a code line": round(statistics.mean(line_tokens), 2),
        "tokens of the median function": statistics.median(function_tokens),
        "branches of a function": round(statistics.mean(branches), 2),
        "tuple assignments, in 1,000 code lines": rate("tuple assignments", code_lines, 1000),
        "conditional expressions, in 1,000 code lines": rate(
            "conditional expressions", code_lines, 1000
        ),
        "comprehensions, in 1,000 code lines": rate("comprehensions", code_lines, 1000),
        "comments, in 100 code lines": rate("comments", code_lines, 100),
        "blank lines within functions, %": rate("blank lines", shapes["lines in functions"], 100),
        "locals like `one` or `given`, in 1,000 bindings": rate(
            "pronouns", shapes["bindings"], 1000
        ),
        "bare Any": shapes["Any"],
    }


def _shapes(node: ast.AST) -> Iterator[str]:
    """Yield what a node of the tree counts as."""
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    ):
        yield "tuple assignments"
    if isinstance(node, ast.IfExp):
        yield "conditional expressions"
    if isinstance(node, _COMPREHENSIONS):
        yield "comprehensions"
    if not isinstance(node, ast.Name):
        return
    if node.id == "Any":
        yield "Any"
    if isinstance(node.ctx, ast.Store):
        yield "bindings"
        if node.id in _PRONOUNS:
            yield "pronouns"
