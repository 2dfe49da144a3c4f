"""Type checks at run time: of records read from JSON, and of a caller's arguments."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from medfl.core.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    types.NoneType: "None",
    Path: "a path",
}
_HINTS = lru_cache(get_type_hints)


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to raise an InputError for an argument that is not of its declared type."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value, allowed in type_mismatches(function, signature.bind(*args, **kwargs).arguments):
            raise InputError(f"{name}={value!r:.60}", f"{name} takes {allowed}", "change this argument")
        return function(*args, **kwargs)

    return call


def type_mismatches(declared: type | Callable[..., Any], values: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, allowed type in words) for each value that is not of its field's or argument's type.

    An int passes for a float and a list for a tuple; True and False are not numbers.

    Args:
        declared: a dataclass, or a function.
        values: field or argument -> value, of some or all of its fields.
    """
    hints = _HINTS(declared)
    for name, value in values.items():
        if name in hints and not matches_type(value, hints[name]):
            yield name, value, describe_type(hints[name])


def matches_type(value: Any, kind: Any) -> bool:
    """Return whether a value is of a type, by the rules of `type_mismatches`."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (types.UnionType, Union):
        return any(matches_type(value, each) for each in inner)
    if origin in (Mapping, dict):
        return isinstance(value, Mapping) and all(
            matches_type(k, inner[0]) and matches_type(v, inner[1]) for k, v in value.items()
        )
    if origin is Callable:
        return callable(value)
    if origin in (list, tuple, Sequence):
        if not isinstance(value, Sequence if origin is Sequence else list | tuple) or isinstance(value, str | bytes):
            return False
        if origin is tuple and inner[-1] is not ...:
            return len(value) == len(inner) and all(map(matches_type, value, inner))
        return all(matches_type(member, inner[0]) for member in value)
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, kind)  # a record too


def describe_type(kind: Any) -> str:
    """Return a type in words."""
    inner = get_args(kind)
    if get_origin(kind) in (types.UnionType, Union):
        return " or ".join(describe_type(each) for each in inner)
    if get_origin(kind) in (Mapping, dict):
        return "a dict"
    if get_origin(kind) is Callable:
        return "a function"
    if get_origin(kind) in (list, tuple, Sequence):
        return f"a list, each {describe_type(inner[0])}"
    return _WORDS.get(kind, "of another kind")
