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
    spec.loader.exec_module(module)
    return module


def test_no_figure_gets_worse(house: Any) -> None:
    worse = {name: count for name, count in house.figures().items() if count > house.FIGURES[name][1]}
    assert not worse, {name: house.FIGURES[name] for name in worse}


def test_the_figures_are_printed_as_json(
    house: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["house.py", "--json"])
    assert house.main() == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(house.FIGURES)


def test_code_lines_leave_out_comments_and_docstrings(house: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        '''"""What it is,\nand why."""\n\nimport os  # used\n\n# a comment\ndef f():\n    """Do."""\n    return os\n'''
    )
    assert (house.code_lines(path), house.lines(path)) == (3, 9)


def test_a_room_of_no_layer_is_seen(house: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert house.layers()[1] == 0
    package = tmp_path / "medfl"
    (package / "attic").mkdir(parents=True)
    (package / "attic" / "__init__.py").write_text("")
    (package / "core").mkdir()
    (package / "core" / "__init__.py").write_text("")
    monkeypatch.setattr(house, "PACKAGE", package)
    assert house.layers()[1] == 1
