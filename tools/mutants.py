"""One-line mutants of the methods' files, and which of each method's own tests kills them.

    python tools/mutants.py NAME... [--sample N] [--seed S] [--out FILE]

A mutant changes one operator, comparison, constant, condition or statement of medfl/methods/NAME.py. It is killed where
a test of tests/methods/test_NAME*.py that is not slow fails or takes too long. NAME may be a file of a package, as
fedhelp/lesson, or a part, as _parts/drift: its tests are those in tests/methods that import it, and those of the
methods that do, themselves or through other parts. Each mutant runs in a fork of a process that has imported torch and
MONAI. FILE gets a line of JSON a mutant; those that it has are not tried again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import re
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
METHODS = ROOT / "medfl" / "methods"
SWAPS: dict[type, str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Pow: "*", ast.Mod: "*", ast.FloorDiv: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.MatMult: "-", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
    ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip


def replacements(node: ast.AST, text: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield what stands in the place of a node: (node, new text)."""

    def told(one: ast.AST) -> str:
        return f"({ast.get_source_segment(text, one)})"

    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield node, f"{told(node.left)} {SWAPS[type(node.op)]} {told(node.right)}"
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS and len(node.ops) == 1:
        yield node, f"{told(node.left)} {SWAPS[type(node.ops[0])]} {told(node.comparators[0])}"
    elif isinstance(node, ast.BoolOp):
        yield (
            node,
            (" or " if isinstance(node.op, ast.And) else " and ").join(map(told, node.values)),
        )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node, told(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, repr(node.value + 1 if isinstance(node.value, int) else node.value * 2.5 or 0.5)
    elif isinstance(node, ast.IfExp):
        yield node, f"({told(node.orelse)} if {told(node.test)} else {told(node.body)})"
    elif isinstance(node, ast.Expr | ast.AugAssign) and not isinstance(
        getattr(node, "value", None), ast.Constant
    ):
        yield node, "pass"


def mutants(path: Path) -> list[dict[str, Any]]:
    """Return the mutants of a file: line, the line as it becomes, and the changed source; help texts are left out."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]
    nodes, found = list(ast.walk(ast.parse(text))), []
    types_of = [
        getattr(node, "annotation", None) or getattr(node, "returns", None) for node in nodes
    ]
    skipped = {part for one in types_of if one is not None for part in ast.walk(one)}
    for node in nodes:
        if getattr(node, "lineno", 0) != getattr(node, "end_lineno", 1) or node in skipped:
            continue
        for place, new in replacements(node, text):
            first, last = (
                starts[place.lineno - 1] + at for at in (place.col_offset, place.end_col_offset)
            )
            changed = text[:first] + new + text[last:]
            line = changed.splitlines()[place.lineno - 1].strip()
            with contextlib.suppress(SyntaxError):
                compile(changed, str(path), "exec")
                found.append({"line": place.lineno, "mutant": line, "source": changed})
    return sorted(found, key=lambda one: (one["line"], one["mutant"]))


class _Mutant(importlib.abc.SourceLoader, importlib.abc.MetaPathFinder):
    """Finds a changed source in the place of a module's file."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source
        self.name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != self.name:
            return None
        folders = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            name, self.path, loader=self, submodule_search_locations=folders
        )

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_data(self, path: str | bytes) -> bytes:
        return self.source.encode()


def file_of(name: str) -> Path:
    """Return the file of a method, of a module of its package, or of a part."""
    path = METHODS / f"{name}.py"
    return path if path.is_file() else METHODS / name / "__init__.py"


def owner(path: Path) -> str:
    """Return the method that a file belongs to, or "_parts"."""
    return path.relative_to(METHODS).parts[0].removesuffix(".py")


def tests_of(path: Path) -> list[str]:
    """Return the test files of a method; of a part those that import it and those of the methods that do."""
    tests = ROOT / "tests" / "methods"
    if owner(path) != "_parts":
        return sorted(map(str, tests.glob(f"test_{owner(path)}*.py")))
    texts = {one: one.read_text() for one in METHODS.rglob("*.py")}
    users, more = set[Path](), {path}
    while more:
        words = "|".join(re.escape(one.stem) for one in more)
        importing = re.compile(rf"(from|import) medfl\.methods\._parts\.({words})\b")
        users |= more
        more = {one for one, text in texts.items() if importing.search(text)} - users
    named = {file for one in users for file in tests.glob(f"test_{owner(one)}*.py")}
    direct = re.compile(rf"medfl\.methods\._parts\.{path.stem}\b")
    return sorted(
        map(
            str,
            named | {file for file in tests.rglob("test_*.py") if direct.search(file.read_text())},
        )
    )


def outcome(path: Path, source: str, seconds: float) -> str:
    """Run a file's tests on a source in a fork; return the test that fails, "too long", or "" if all pass."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        signal.alarm(int(seconds))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.write(write, _run(path, source).encode()[:2000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        failed, (_, status) = pipe.read(), os.waitpid(child, 0)
    return failed if status == 0 else "too long" if status == signal.SIGALRM else f"status {status}"


def _run(path: Path, source: str) -> str:
    failed: list[str] = []
    first = types.ModuleType("first")
    first.pytest_runtest_logreport = lambda report: (
        failed.append(report.nodeid) if report.failed else None
    )
    for name in [name for name in sys.modules if name.partition(".")[0] in ("medfl", "tests")]:
        del sys.modules[name]
    mutant = _Mutant(path, source)
    sys.meta_path.insert(0, mutant)
    try:
        importlib.import_module(mutant.name)
    except Exception as error:  # whatever a mutant raises
        return f"import: {type(error).__name__}"
    how = ("-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--assert=plain")
    code = pytest.main([*tests_of(path), *how], plugins=[first])
    return failed[0].rpartition("/")[2] if failed else "" if code == 0 else f"pytest {int(code)}"


def main() -> None:
    """Try the mutants that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+")
    for flag, kind, default in (
        ("--sample", int, None),
        ("--seed", int, 0),
        ("--out", Path, Path("mutants.jsonl")),
    ):
        parser.add_argument(flag, type=kind, default=default)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    for needed in ("monai", "medfl.networks", "medfl.runtimes.simulator", "tests.support.toy"):
        importlib.import_module(needed)
    from medfl.core.seeding import stream

    options.out.touch()
    done = [
        {**json.loads(line), "killed_by": None} for line in options.out.read_text().splitlines()
    ]
    for name in options.names:
        path = file_of(name)
        made, started = mutants(path), time.monotonic()
        if why := outcome(path, path.read_text(), 600):
            raise SystemExit(f"{name}: its tests fail without a mutant: {why}")
        limit = 10 + 4 * (time.monotonic() - started)
        with stream(options.seed, name) as generator:
            order = torch.randperm(len(made), generator=generator).tolist()
        chosen = [made[i] for i in sorted(order[: options.sample])]
        print(
            f"{name}: {len(chosen)} of {len(made)} mutants, at most {limit:.0f} s each", flush=True
        )
        for one in chosen:
            row = {
                "file": f"{name}.py",
                "line": one["line"],
                "mutant": one["mutant"],
                "killed_by": None,
            }
            if row not in done:
                row["killed_by"] = outcome(path, one["source"], limit)
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    "  SURVIVES" if not row["killed_by"] else "  killed",
                    one["line"],
                    one["mutant"],
                    flush=True,
                )


if __name__ == "__main__":
    main()
