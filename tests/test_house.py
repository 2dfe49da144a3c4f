"""The figures of tools/house.py get no worse, and are counted as they say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def house() -> Any:
    spec = importlib.util.spec_from_file_location("house", ROOT / "tools" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_no_figure_gets_worse(
    house: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the program itself prints them: counting takes long enough to be done once."""
    monkeypatch.setattr(sys, "argv", ["house.py", "--json"])
    assert house.main() == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(house.FIGURES)
    worse = [row for row in rows if house.FIGURES[row["name"]].is_worse(row["today"])]
    assert worse == []


def test_tokens_are_those_of_code_and_layout_is_free(house: Any, tmp_path: Path) -> None:
    dense, loose = tmp_path / "dense.py", tmp_path / "loose.py"
    dense.write_text(
        '"What it is."\n\ndef f(one):\n    "Do."\n    a, b = 1, 2\n    return a if one else b\n'
    )
    loose.write_text(
        '"""What it is,\nand why."""\n\n# a comment\ndef f(one):\n    """Do."""\n\n    a, b = (\n        1,\n'
        "        2,\n    )\n\n    return a if one else b  # noqa: F401\n"
    )
    figures = [house.density([path]) for path in (dense, loose)]
    assert [row["tokens of the product"] for row in figures] == [19, 22], (
        "three more: brackets and a comma"
    )
    assert [row["comments, in 100 code lines"] for row in figures] == [0.0, round(100 / 6, 1)]
    assert [row["blank lines within functions, %"] for row in figures] == [0.0, round(200 / 9, 1)]
    assert figures[0]["tuple assignments, in 1,000 code lines"] == round(1000 / 3, 1)
    assert figures[0]["conditional expressions, in 1,000 code lines"] == round(1000 / 3, 1)
    assert figures[0]["branches of a function"] == 1


def test_a_figure_that_is_to_grow_is_worse_below_its_bound(house: Any) -> None:
    assert house.Figure(7, 3.2, at_least=True).is_worse(3.1)
    assert not house.Figure(7, 3.2, at_least=True).is_worse(3.3)
    assert house.Figure(0, 5).is_worse(6)


def test_a_circle_and_a_module_of_one_importer_are_seen(
    house: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = tmp_path / "medfl" / "room"
    room.mkdir(parents=True)
    (room / "a.py").write_text("from medfl.room.b import x\n")
    (room / "b.py").write_text("def f():\n    from medfl.room import a\n")
    (room / "c.py").write_text("if TYPE_CHECKING:\n    from medfl.room.d import x\n")
    (room / "d.py").write_text("from medfl.room import c\n")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "PACKAGE", tmp_path / "medfl")
    monkeypatch.setattr(house.modules, "__defaults__", (tmp_path / "medfl",))
    graph = house.imports()
    assert sorted(map(sorted, house.circles(graph))) == [
        ["medfl.room.a", "medfl.room.b"],
        ["medfl.room.c", "medfl.room.d"],
    ]
    (room / "e.py").write_text("from medfl.room import a\n")
    assert house.overflow(house.imports()) == ["medfl.room.b", "medfl.room.c", "medfl.room.d"]


def test_a_room_of_no_layer_is_seen(
    house: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert house.layers()[1] == 0
    package = tmp_path / "medfl"
    (package / "attic").mkdir(parents=True)
    (package / "attic" / "__init__.py").write_text("")
    (package / "core").mkdir()
    (package / "core" / "__init__.py").write_text("")
    monkeypatch.setattr(house, "PACKAGE", package)
    assert house.layers()[1] == 1
