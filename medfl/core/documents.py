"""Plain values by name: what JSON and YAML files hold, and what a caller hands over as options and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
"""Content of a JSON or YAML file, or a part of it: any plain values, by name."""
Document = dict[str, Any]
"""Such content while it is made."""
Metrics = dict[str, float]
"""Metrics by name while they are computed."""
