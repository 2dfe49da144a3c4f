"""What a stranger meets in the code, counted: entries, layers, places to edit, files to read, and how dense it is.

    python tools/house.py [--json | --check]

Each figure has the goal of the floor plan and a bound, which is what it is today: tests/test_house.py fails where one
gets worse, and whoever makes one better moves its bound here. No figure counts lines: layout is free.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import networkx

sys.path.insert(0, str(Path(__file__).parent))
from density import density  # noqa: E402 (it lies beside this program)

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "medfl"
SETTING = "channels_last"
"""The run setting whose places are counted."""
READ = ("medfl.methods", "medfl.training", "medfl.core.message")
"""Of what a method imports, the modules that have to be read to understand it; storage, errors and networks are not."""


@dataclass(frozen=True)
class Figure:
    """A figure's goal, its bound, and whether it is to be at least that."""

    goal: float | None
    bound: float
    at_least: bool = False

    def is_worse(self, today: float) -> bool:
        """Tell whether it is beyond its bound."""
        return today < self.bound if self.at_least else today > self.bound


FIGURES = {
    "entries directly in medfl/": Figure(26, 26),
    "modules directly in medfl/": Figure(4, 4),
    "layers of the import contract": Figure(12, 12),
    "rooms in no layer": Figure(0, 0),
    "files that spell a run setting": Figure(2, 2),
    "lines that spell a run setting": Figure(None, 2),
    "files that name a runtime": Figure(1, 2),
    "lines of setup.cfg that name a data set": Figure(0, 0),
    "files opened to understand FedProx": Figure(4, 4),
    "files opened to understand SCAFFOLD": Figure(4, 4),
    "hooks of Method": Figure(14, 14),
    "facts of Method": Figure(None, 6),
    "circles of files": Figure(0, 0),
    "modules with one importer, in their own folder": Figure(None, 36),
    "tokens of the product": Figure(390_000, 491_343),
    "tokens of a code line": Figure(8.5, 8.55),
    "tokens of the median function": Figure(None, 68.0),
    "branches of a function": Figure(None, 2.23),
    "tuple assignments, in 1,000 code lines": Figure(4, 0.2),
    "conditional expressions, in 1,000 code lines": Figure(18, 16.9),
    "comprehensions, in 1,000 code lines": Figure(32, 31.7),
    "comments, in 100 code lines": Figure(4, 4.0, at_least=True),
    "blank lines within functions, %": Figure(7, 10.6, at_least=True),
    "locals like `one` or `given`, in 1,000 bindings": Figure(4, 0.4),
    "bare Any": Figure(500, 494),
}


def modules(folder: Path = PACKAGE) -> list[Path]:
    """Return the Python files below a folder."""
    return sorted(folder.rglob("*.py"))


def imported(path: Path) -> Iterator[Path]:
    """Yield the modules to be read that a module imports: names that a room hands out lie where it has them from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and (node.module == "medfl.core" or node.module.startswith(READ))
        ):
            file = ROOT / (node.module.replace(".", "/") + ".py")
            if file.is_file():
                yield file
                continue
            names = {alias.name for alias in node.names}
            room = ast.parse((file.with_suffix("") / "__init__.py").read_text())
            for inner in ast.walk(room):
                if (
                    isinstance(inner, ast.ImportFrom)
                    and inner.module
                    and inner.module.startswith(READ)
                    and names & {one.name for one in inner.names}
                ):
                    yield ROOT / (inner.module.replace(".", "/") + ".py")


def opened(method: str) -> list[Path]:
    """Return the files that one reads to understand a method: its own, `base.py`, and what these two import."""
    own, base = (PACKAGE / "methods" / f"{name}.py" for name in (method, "base"))
    return sorted({own, base, *imported(own), *imported(base)})


def spelling(word: str, folder: Path = PACKAGE) -> dict[Path, int]:
    """Return file -> lines in which a word stands, PyTorch's own of that name apart."""
    found = {
        path: len(re.findall(rf"(?<!torch\.)\b{word}\b.*", path.read_text()))
        for path in modules(folder)
    }
    return {path: count for path, count in found.items() if count}


def hooks() -> tuple[int, int]:
    """Return how many methods and how many class facts `Method` has."""
    tree = ast.parse((PACKAGE / "methods" / "base.py").read_text())
    (method,) = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Method"
    ]
    functions = [
        node
        for node in method.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    return len(functions), sum(isinstance(node, ast.AnnAssign) for node in method.body)


def layers() -> tuple[int, int]:
    """Return how many layers the contract has, and how many rooms are in none."""
    (text,) = re.findall(
        r"^layers = (\[.*?^\])", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL
    )
    contract = ast.literal_eval(text)
    named = {room.strip() for layer in contract for room in layer.split("|")}
    rooms = {
        path.stem
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    return len(contract), len(rooms - named - {"__init__"})


def imports() -> networkx.DiGraph:
    """Return the modules with an arrow to each that they import, within functions and for types too."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules()}
    names = {name.removesuffix(".__init__"): name for name in files}
    graph = networkx.DiGraph()
    graph.add_nodes_from(files)
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [target if target in names else node.module for target in inner]
            else:
                continue
            graph.add_edges_from((name, names[target]) for target in targets if target in names)
    return graph


def circles(graph: networkx.DiGraph) -> list[set[str]]:
    """Return the sets of modules that import each other."""
    return [part for part in networkx.strongly_connected_components(graph) if len(part) > 1]


def overflow(graph: networkx.DiGraph) -> list[str]:
    """Return the modules that only one other imports, which lies in the same folder."""
    found = []
    for name in graph:
        importers = [other for other in graph.predecessors(name) if other != name]
        folder = name.rpartition(".")[0]
        if (
            len(importers) == 1
            and importers[0].rpartition(".")[0] == folder
            and not name.endswith("__init__")
        ):
            found.append(name)
    return sorted(found)


def figures() -> dict[str, float]:
    """Count everything."""
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    setting = spelling(SETTING)
    named, unplaced = layers()
    functions, facts = hooks()
    graph = imports()
    counted: dict[str, float] = {
        "entries directly in medfl/": len(entries),
        "modules directly in medfl/": sum(path.suffix == ".py" for path in entries),
        "layers of the import contract": named,
        "rooms in no layer": unplaced,
        "files that spell a run setting": len(setting),
        "lines that spell a run setting": sum(setting.values()),
        "files that name a runtime": sum('"monai-fl' in path.read_text() for path in modules()),
        "lines of setup.cfg that name a data set": (ROOT / "pyproject.toml")
        .read_text()
        .count("/mednist/"),
        "hooks of Method": functions,
        "facts of Method": facts,
        "circles of files": len(circles(graph)),
        "modules with one importer, in their own folder": len(overflow(graph)),
        **density(modules()),
    }
    for name, method in (("FedProx", "fedprox"), ("SCAFFOLD", "scaffold")):
        counted[f"files opened to understand {name}"] = len(opened(method))
    return {name: counted[name] for name in FIGURES}


def main() -> int:
    """Print the figures; with --check only those beyond their bounds, which fail it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument(
        "--check", action="store_true", help="fail where a figure is beyond its bound"
    )
    options = parser.parse_args()
    today = figures()
    if options.check:
        worse = [name for name, value in today.items() if FIGURES[name].is_worse(value)]
        for name in worse:
            print(f"{name}: {today[name]:,}; the bound is {FIGURES[name].bound:,}")
        return 1 if worse else 0
    if options.json:
        rows = [
            {"name": name, "today": today[name], **asdict(figure)}
            for name, figure in FIGURES.items()
        ]
        print(json.dumps(rows, indent=1))
        return 0
    for name, figure in FIGURES.items():
        goal = "" if figure.goal is None else f"goal {figure.goal:,}"
        print(f"{name:<48} {today[name]:>10,}   {goal:<14} bound {figure.bound:,}")
    for method in ("fedprox", "scaffold"):
        print(f"{method}: " + ", ".join(str(path.relative_to(ROOT)) for path in opened(method)))
    graph = imports()
    for circle in circles(graph):
        print("circle: " + ", ".join(sorted(circle)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
