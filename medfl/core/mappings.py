"""Parts of mappings, each as a dict of its own in the order of what it is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")
W = TypeVar("W")


def pick(mapping: Mapping[K, V], keys: Iterable[K]) -> dict[K, V]:
    """Return the entries of these keys, in the order of the keys; KeyError if one is missing."""
    return {key: mapping[key] for key in keys}


def pick_known(mapping: Mapping[K, V], keys: Iterable[K]) -> dict[K, V]:
    """Return the entries of those of these keys that there are, in the order of the keys."""
    return {key: mapping[key] for key in keys if key in mapping}


def within(mapping: Mapping[K, V], keys: Container[K]) -> dict[K, V]:
    """Return the entries whose keys are among these."""
    return {key: value for key, value in mapping.items() if key in keys}


def without(mapping: Mapping[K, V], keys: Container[K]) -> dict[K, V]:
    """Return the entries whose keys are not among these."""
    return {key: value for key, value in mapping.items() if key not in keys}


def present(mapping: Mapping[K, V | None]) -> dict[K, V]:
    """Return the entries whose value is not None."""
    return {key: value for key, value in mapping.items() if value is not None}


def map_values(function: Callable[[V], W], mapping: Mapping[K, V]) -> dict[K, W]:
    """Return the same keys with what a function makes of their values."""
    return {key: function(value) for key, value in mapping.items()}


def fields_of(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a dataclass by their names."""
    return {field.name: field for field in dataclasses.fields(kind)}
