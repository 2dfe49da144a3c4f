"""Plain values by name: the contents of JSON and YAML files, and options and settings passed by callers."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
"""Content of a JSON or YAML file, or a part of it: any plain values, by name."""
Document = dict[str, Any]
"""Such content under construction."""
Metrics = dict[str, float]
"""Metrics by name under construction."""
