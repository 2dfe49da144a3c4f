"""What a stranger meets in the code, counted: entries, layers, places to edit, lines to read.

    python tools/house.py [--json]

Each figure has the goal of the floor plan and a bound, which is what it is today: tests/test_house.py fails where one
gets worse, and whoever makes one better lowers its bound here.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "medfl"
SETTING = "channels_last"
"""The run setting whose places are counted."""
READ = ("medfl.methods", "medfl.training", "medfl.core.message")
"""Of what a method imports, the modules that have to be read to understand it; storage, errors and networks are not."""
# name -> (goal, bound)
FIGURES: dict[str, tuple[int | None, int]] = {
    "entries directly in medfl/": (24, 22),
    "modules directly in medfl/": (4, 4),
    "layers of the import contract": (10, 10),
    "rooms in no layer": (0, 0),
    "files that spell a run setting": (2, 2),
    "lines that spell a run setting": (None, 2),
    "files that name a runtime": (1, 2),
    "lines of setup.cfg that name a data set": (0, 0),
    "files opened to understand FedProx": (4, 5),
    "code lines opened to understand FedProx": (450, 427),
    "files opened to understand SCAFFOLD": (4, 5),
    "code lines opened to understand SCAFFOLD": (550, 474),
    "hooks of Method": (14, 14),
    "facts of Method": (None, 6),
    "method files over 120 lines": (8, 8),
    "lines of the longest method file": (300, 285),
    "lines of the longest module": (400, 398),
    "words of the README": (1200, 1200),
    "lines of the product": (None, 61582),
}


def modules(folder: Path = PACKAGE) -> list[Path]:
    """Return the Python files below a folder."""
    return sorted(folder.rglob("*.py"))


def lines(path: Path) -> int:
    """Return the lines of a file."""
    return len(path.read_text().splitlines())


def code_lines(path: Path) -> int:
    """Return the lines of a file that are neither blank nor part of a comment or docstring."""
    tree, text = ast.parse(path.read_text()), path.read_text().splitlines()
    documented = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else []:
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                documented |= set(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in enumerate(text, 1)
        if number not in documented
    )


def imported(path: Path) -> Iterator[Path]:
    """Yield the modules to be read that a module imports: names that a room hands out lie where it has them from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(READ):
            file = ROOT / (node.module.replace(".", "/") + ".py")
            if file.is_file():
                yield file
                continue
            names = {alias.name for alias in node.names}
            for inner in ast.parse((file.with_suffix("") / "__init__.py").read_text()).body:
                if isinstance(inner, ast.ImportFrom) and inner.module and names & {one.name for one in inner.names}:
                    yield ROOT / (inner.module.replace(".", "/") + ".py")


def opened(method: str) -> list[Path]:
    """Return the files that one reads to understand a method: its own, `base.py`, and what these two import."""
    own, base = (PACKAGE / "methods" / f"{name}.py" for name in (method, "base"))
    return sorted({own, base, *imported(own), *imported(base)})


def spelling(word: str, folder: Path = PACKAGE) -> dict[Path, int]:
    """Return file -> lines in which a word stands, PyTorch's own of that name apart."""
    found = {path: len(re.findall(rf"(?<!torch\.)\b{word}\b.*", path.read_text())) for path in modules(folder)}
    return {path: count for path, count in found.items() if count}


def hooks() -> tuple[int, int]:
    """Return how many methods and how many class facts `Method` has."""
    tree = ast.parse((PACKAGE / "methods" / "base.py").read_text())
    (method,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Method"]
    functions = [node for node in method.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return len(functions), sum(isinstance(node, ast.AnnAssign) for node in method.body)


def layers() -> tuple[int, int]:
    """Return how many layers the contract has, and how many rooms are in none."""
    (text,) = re.findall(r"^layers = (\[.*?^\])", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    contract = ast.literal_eval(text)
    named = {room.strip() for layer in contract for room in layer.split("|")}
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    return len(contract), len(rooms - named - {"__init__"})


def figures() -> dict[str, int]:
    """Count everything."""
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    methods = [path for path in (PACKAGE / "methods").glob("*.py") if path.stem not in ("__init__", "base")]
    setting = spelling(SETTING)
    named, unplaced = layers()
    functions, facts = hooks()
    counted = {
        "entries directly in medfl/": len(entries),
        "modules directly in medfl/": sum(path.suffix == ".py" for path in entries),
        "layers of the import contract": named,
        "rooms in no layer": unplaced,
        "files that spell a run setting": len(setting),
        "lines that spell a run setting": sum(setting.values()),
        "files that name a runtime": sum('"monai-fl' in path.read_text() for path in modules()),
        "lines of setup.cfg that name a data set": (ROOT / "setup.cfg").read_text().count("/mednist/") // 2,
        "hooks of Method": functions,
        "facts of Method": facts,
        "method files over 120 lines": sum(lines(path) > 120 for path in methods),
        "lines of the longest method file": max(map(lines, methods)),
        "lines of the longest module": max(map(lines, modules())),
        "words of the README": len((ROOT / "README.md").read_text().split()),
        "lines of the product": sum(map(lines, modules())),
    }
    for name, method in (("FedProx", "fedprox"), ("SCAFFOLD", "scaffold")):
        counted[f"files opened to understand {name}"] = len(opened(method))
        counted[f"code lines opened to understand {name}"] = sum(map(code_lines, opened(method)))
    return {name: counted[name] for name in FIGURES}


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    found = figures()
    rows = [
        {"name": name, "today": found[name], "goal": goal, "bound": bound} for name, (goal, bound) in FIGURES.items()
    ]
    if parser.parse_args().json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        goal = "" if row["goal"] is None else f"goal {row['goal']}"
        print(f"{row['name']:<44} {row['today']:>7,}   {goal:<12} bound {row['bound']:,}")
    for method in ("fedprox", "scaffold"):
        print(f"{method}: " + ", ".join(f"{path.relative_to(ROOT)} ({code_lines(path)})" for path in opened(method)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
