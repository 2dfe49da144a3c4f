"""The files that a bundle's expressions ask for: noted while they are evaluated, then described and written."""

from __future__ import annotations

import csv
import functools
import glob
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from medfl.core.errors import InputError
from tools.synthetic_data import shapes
from tools.synthetic_data.shapes import Need

CASE = re.compile(r"case_(\d+)")
_EVENTS = {
    "glob.glob",
    "pathlib.Path.glob",
    "pathlib.Path.rglob",
    "os.listdir",
    "os.scandir",
    "open",
}

LookUps = list[tuple[str, str]]
"""What was looked for: ("pattern" | "folder" | "file", absolute path), in its order."""
_noting: LookUps | None = None


@functools.cache
def _add_audit_hook() -> None:
    """Add the process's audit hook; it cannot be taken away, and is silent outside `noting_lookups`.

    Python tells it of every look, whether an expression, a component or the bundle's own Python looks.
    """

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if _noting is None or event not in _EVENTS or not isinstance(given[0], str | Path):
            return
        if event.startswith("pathlib"):
            pattern = Path(given[0]) / ("**" if event.endswith("rglob") else "") / given[1]
            _noting.append(("pattern", os.path.abspath(pattern)))
        else:
            kind = {"glob.glob": "pattern", "open": "file"}.get(event, "folder")
            _noting.append((kind, os.path.abspath(given[0])))

    sys.addaudithook(hook)


@contextmanager
def noting_lookups() -> Iterator[LookUps]:
    """Note in the block what is looked for."""
    global _noting
    _add_audit_hook()
    lookups: LookUps = []
    _noting = lookups
    try:
        yield lookups
    finally:
        _noting = None


def unmatched(lookups: LookUps) -> list[str]:
    """Return the patterns that find nothing, but for Python files: these the loader looks for."""
    patterns = dict.fromkeys(
        path for kind, path in lookups if kind == "pattern" and not path.endswith(".py")
    )
    return [pattern for pattern in patterns if not glob.glob(pattern, recursive=True)]


@dataclass
class Table:
    """A data list in a JSON or CSV file.

    Attributes:
        fields: of a row; None: a file, else the values that the cases take in turn.
        sections: JSON: keys under each of which a list is looked for; None: the file is a list.
        facts: JSON: keys beside them.
    """

    fields: dict[Any, Sequence[Any] | None]
    sections: list[str] | None = None
    facts: list[str] = field(default_factory=list)


@dataclass
class DrawnLayout:
    """What is to lie in a folder.

    Attributes:
        classes: their names, for folders.
        end: ending of images whose path a list gives.
        cases: in each list, array, and for each pattern.
        per_image: files in a JSON list that are one image, a channel each.
        absolute: lists give whole paths.
        tables: data lists, by path.
        arrays: npz files, by path: array -> the key that it is in an item.
        patterns: that find a file of each case.
        listed: folders whose content is listed, with a folder of each class.
    """

    folder: Path
    classes: Sequence[str]
    end: str
    cases: int
    per_image: int = 1
    absolute: bool = False
    tables: dict[Path, Table] = field(default_factory=dict)
    arrays: dict[Path, dict[str, str]] = field(default_factory=dict)
    patterns: list[str] = field(default_factory=list)
    listed: list[Path] = field(default_factory=list)

    def write(self, need: Need, seed: int) -> None:
        """Empty the folder and write lists and arrays, and an empty file for each that a pattern finds."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        pattern_paths = [
            self._matching(pattern, case) for pattern in self.patterns for case in range(self.cases)
        ]
        classes = [
            folder / _as_folder(name) / "-" for folder in self.listed for name in self.classes
        ]
        for path in (*pattern_paths, *self.tables, *self.arrays, *classes):
            if not Path(os.path.abspath(path)).is_relative_to(self.folder):
                raise InputError(
                    f"the bundle looks for {path}",
                    f"its data are below {self.folder}",
                    "change the path",
                )
            path.parent.mkdir(parents=True, exist_ok=True)
        for path in pattern_paths:
            path.touch()
        for path, table in self.tables.items():
            (self._write_json if path.suffix == ".json" else self._write_csv)(path, table)
        for path, names in self.arrays.items():
            cases = range(self.cases)
            each = {
                name: [shapes.draw(need, key, seed, case) for case in cases]
                for name, key in names.items()
            }
            drawn: dict[str, Any] = {name: np.stack(arrays) for name, arrays in each.items()}
            np.savez_compressed(path, **drawn)

    def _matching(self, pattern: str, case: int) -> Path:
        """Return the path of a case that a pattern finds; folders of any name are those of classes."""
        *folders, last = Path(pattern).parts
        class_folder = _as_folder(self.classes[case % len(self.classes)])
        parts = [_filled(part, class_folder, case) for part in folders if part != "**"]
        name = _filled(last, f"case_{case:03d}", case)
        return Path(*parts, name + ("" if Path(name).suffix else self.end))

    def _row(self, table: Table, case: int) -> dict[Any, Any]:
        fields = table.fields.items()
        return {
            name: self._files(name, case) if cells is None else cells[case % len(cells)]
            for name, cells in fields
        }

    def _files(self, name: Any, case: int) -> Any:
        several = self.per_image > 1 and not shapes.is_mask(name)
        folders = [f"{name}_{channel}" for channel in range(self.per_image)] if several else [name]
        root = f"{self.folder}/" if self.absolute else ""
        files = [f"{root}{folder}/case_{case:03d}{self.end}" for folder in folders]
        return files if several else files[0]

    def _write_json(self, path: Path, table: Table) -> None:
        content: dict[str, Any] = dict.fromkeys(table.facts, "drawn")
        for at, section in enumerate(table.sections or [""]):
            content[section] = [
                self._row(table, at * self.cases + case) for case in range(self.cases)
            ]
        text = json.dumps(content[""] if table.sections is None else content, indent=1)
        path.write_text(text + "\n", encoding="utf-8")

    def _write_csv(self, path: Path, table: Table) -> None:
        by_position = all(isinstance(name, int) for name in table.fields)
        columns = list(range(1 + max(table.fields))) if by_position else list(table.fields)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval=0)
            if not by_position:
                writer.writeheader()
            writer.writerows(self._row(table, case) for case in range(self.cases))


def _as_folder(name: str) -> str:
    """Return the name of a class as that of a folder, which leads nowhere else."""
    return re.sub(r"[/\\\0*?\[\]]|^\.+$", "-", name)[:100]


def _filled(pattern: str, name: str, case: int) -> str:
    """Return a name that a pattern of one matches."""
    text = re.sub(
        r"\[!([^\]]+)\]",
        lambda m: next((c for c in "0123456789xyz" if c not in m[1]), "-"),
        pattern,
    )
    text = re.sub(r"\[([^\]]).*?\]", r"\1", text).replace("?", str(case % 10))
    return re.sub(r"\*+", lambda _: name, text)
