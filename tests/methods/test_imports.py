"""A method imports of the room only `base`, `_parts` and itself, so that it can be read, copied or deleted alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from medfl import methods

ROOM = Path(methods.__file__).parent
FILES = sorted(path for path in ROOM.rglob("*.py") if path != ROOM / "__init__.py")


def siblings(text: str, package: str = "") -> set[str]:
    """Return the methods that a file imports, by name, but for the package that the file belongs to."""
    others = set(methods.names()) - {package}
    return {name for name in imported(ast.parse(text)) if name.partition(".")[0] in others}


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of `medfl.methods` that a file imports, relative to it."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["medfl.methods" if node.level else "", node.module]))
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        yield from (
            name.removeprefix("medfl.methods.")
            for name in names
            if name.startswith("medfl.methods.")
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOM)))
def test_no_file_of_the_room_imports_a_method(path: Path) -> None:
    assert not siblings(path.read_text(), path.parent.name), (
        "move what two methods share to medfl/methods/_parts"
    )


@pytest.mark.parametrize(
    "line",
    [
        "from medfl.methods.fedproto import nearest",
        "from medfl.methods import base, fedproto",
        "import medfl.methods.fedproto as other",
        "from .fedproto import nearest",
        "from . import fedproto",
        "def f():\n    from medfl.methods import fedproto",
    ],
)
def test_an_import_of_a_method_is_seen(line: str) -> None:
    assert "fedproto" in siblings(line)


def test_a_package_may_import_its_own_modules_and_no_other_s() -> None:
    line = "from medfl.methods.fedhelp.lesson import Lesson"
    assert not siblings(line, "fedhelp")
    assert siblings(line, "fedlora") == {"fedhelp.lesson", "fedhelp.lesson.Lesson"}


def test_base_and_parts_are_allowed() -> None:
    assert not siblings(
        "from medfl.methods.base import Method\nfrom medfl.methods._parts.public import SCORES"
    )
