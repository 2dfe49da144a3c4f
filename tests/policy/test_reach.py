"""Whatever expressions and components can reach is tried; none changes a file, starts a program or connects."""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from medfl.core.untrusted import Refused
from medfl.policy.allowed_in_expressions import BUILTINS, MEMBERS, METHODS
from medfl.policy.evaluate import ExpressionEvaluator
from medfl.policy.expressions import check_expression
from medfl.policy.imports import DEFAULT_NAMES, Uses


@pytest.mark.slow
def test_no_object_in_reach_has_a_way_out(tmp_path: Path) -> None:
    """Walks from the listed names, so that what a new MONAI brings is tried as well; the controls have to be seen."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.policy.reach", str(tmp_path)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=600, cwd=root, env=environment
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["found"] == []
    assert found["files"] == {"note.txt": "note"}
    tries = {
        "members": (10_000, 1_000),
        "attributes": (50_000, 1_000),
        "made": (700, 500),
        "poisoned": (5_000, 100),
    }
    for part, least in tries.items():
        tried, succeeded = found["counts"][part]
        assert tried >= least[0], part
        assert succeeded >= least[1], part
    assert len(found["controls"]) >= 12


NAMES = {
    **DEFAULT_NAMES,
    "os": "os",
    "Path": "pathlib.Path",
    "glob": "glob",
    "json": "json",
    "math": "math",
}
LEAVES = st.one_of(
    st.sampled_from(
        [
            "@number",
            "@text",
            "@path",
            "@tensor",
            "@array",
            "@network",
            "@list",
            "@dict",
            "x",
            "...",
            "None",
        ]
    ),
    st.sampled_from(sorted(MEMBERS)),
    st.sampled_from(sorted(BUILTINS)),
    st.sampled_from(
        [
            "os.system",
            "__import__('os')",
            "open",
            "setattr",
            "print",
            "exec",
            "@nowhere",
            "@",
            "torch.save",
        ]
    ),
    st.integers(-(10**12), 10**12).map(str),
    st.floats(allow_nan=False).map(repr),
    st.text(string.printable, max_size=12).map(repr),
)


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Grow an expression around others, in all the ways that Python has."""
    name = st.sampled_from(
        [
            *sorted(METHODS),
            "replace",
            "format",
            "write_text",
            "chmod",
            "f_back",
            "gi_frame",
            "__class__",
        ]
    )
    operator = st.sampled_from(
        ["+", "-", "*", "/", "//", "%", "**", "@", "<<", "&", "|", "and", "or", "in", "is not", "<"]
    )
    return st.one_of(
        st.tuples(inner, name).map(lambda p: f"{p[0]}.{p[1]}"),
        st.tuples(inner, name, inner).map(lambda p: f"{p[0]}.{p[1]}({p[2]})"),
        st.tuples(inner, inner).map(lambda p: f"{p[0]}({p[1]})"),
        st.tuples(inner, inner, inner).map(lambda p: f"{p[0]}({p[1]}, mode={p[2]})"),
        st.tuples(inner, inner).map(lambda p: f"{p[0]}(*{p[1]})"),
        st.tuples(inner, operator, inner).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(inner, inner).map(lambda p: f"{p[0]}[{p[1]}]"),
        st.tuples(inner, inner, inner).map(lambda p: f"[{p[0]} for x in {p[1]} if {p[2]}]"),
        st.tuples(inner, inner).map(lambda p: f"{{{p[0]}: {p[1]}}}"),
        st.tuples(inner, inner).map(lambda p: f"(lambda x={p[1]}: {p[0]})"),
        st.tuples(inner, inner).map(lambda p: f"list(map({p[0]}, [{p[1]}]))"),
        st.tuples(inner, inner, inner).map(lambda p: f"({p[0]} if {p[1]} else {p[2]})"),
        inner.map(lambda p: f'f"{{{p}:03d}}"'),
        inner.map(lambda p: f"-{p}"),
        inner.map(lambda p: f"[{p}, *{p}]"),
    )


EXPRESSIONS = st.recursive(LEAVES, combined, max_leaves=8)


def attempt(text: str, folder: Path) -> None:
    """Check and evaluate as a bundle would; the check may only refuse, values may only raise Python's own errors."""
    values: dict[str, Any] = {
        "number": 2,
        "text": "a",
        "path": folder / "note.txt",
        "list": [1],
        "dict": {"a": 1},
    }
    values |= {"tensor": torch.ones(2), "array": np.ones(2), "network": torch.nn.Linear(1, 1)}
    try:
        check_expression(text, NAMES, (), (), Uses())
    except Refused:
        return
    try:
        ExpressionEvaluator(NAMES, (), (), (folder,)).evaluate(text, values)
    except (RecursionError, MemoryError):
        raise
    except Exception:  # noqa: S110 (of the values: they are not of these types)
        pass


def fuzz(count: int, folder: Path) -> None:
    (folder / "note.txt").write_text("note")
    torch.manual_seed(0)
    random.seed(0)

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(EXPRESSIONS)
    def each(text: str) -> None:
        attempt(text, folder)

    each()
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"note.txt": "note"}


@pytest.mark.filterwarnings("ignore")
def test_expressions_end_in_a_value_or_a_declared_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fuzz(500, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_many_expressions_end_in_a_value_or_a_declared_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fuzz(5_000, tmp_path)
