"""Sweeps over all methods: a few of them in the default tests, the others in the slow ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

FEW = ("ditto", "fedavg", "fedbm", "fedhelp", "scaffold")
"""A personal model, plain weights, a generator at the server, networks of two sizes, control variates."""


def mostly_slow(names: Iterable[str], few: Iterable[str] = FEW) -> list[Any]:
    """Return names for `parametrize`, all but a few of them marked as slow."""
    return [
        name if name in tuple(few) else pytest.param(name, marks=pytest.mark.slow) for name in names
    ]
