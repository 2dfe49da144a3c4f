"""docs/results/planned.py: rounds follow from the seconds of one, and each set is divided as it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "docs" / "results" / "planned.py"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("planned", FILE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "planned", made)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(("seconds", "rounds"), [(10, 24), (70, 3), (1000, 1)])
def test_rounds_fill_the_time(module: Any, seconds: float, rounds: int) -> None:
    assert module.fitting(seconds) == rounds


def test_a_site_is_a_centre_or_drawn(module: Any) -> None:
    assert module.SETS["lungs"].flags == ["--partition", "centre"]
    assert module.SETS["oasis"].flags == ["--sites", "3", "--partition", "iid"]
