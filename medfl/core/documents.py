"""Plain values by name: what JSON and YAML files hold, and what a caller hands over as options and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Config = Mapping[str, Any]
"""Content of a JSON or YAML file, or a part of it: any plain values, by name."""
Document = dict[str, Any]
"""Such content while it is made."""
Texts = Mapping[str, str]
"""Texts by name."""
Numbers = Mapping[str, float]
"""Numbers by name: metrics, counts, shares."""
Metrics = dict[str, float]
"""Metrics while they are computed."""
Names = Sequence[str]
"""Names, ids or lines in an order that counts."""
Words = tuple[str, ...]
"""Names that stay as they are."""
Cells = dict[str, str]
"""Such texts while they are collected."""
Values = Mapping[str, object]
"""Values of any type by name, which are passed on."""
