"""Type checks at run time, of records read from JSON and of a caller's arguments.

`Annotated[int, range(...)]` is an integer within limits.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from medfl.core.documents import Config
from medfl.core.errors import InputError, either
from medfl.core.mappings import fields_of

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
_HINTS = lru_cache(partial(get_type_hints, include_extras=True))
Count = Annotated[int, range(2**63)]
"""A non-negative integer."""


def read_record(kind: type[R], document: object, where: str = "") -> R:
    """Return the dataclass described by a JSON object: lists become tuples, and nested objects become records too.

    Raises:
        ValueError: an entry is missing, has the wrong type, or belongs to no field; names it.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"{where or 'it'} is {document!r:.40}, not keys and values")

    at = f"{where}." if where else ""
    hints = _HINTS(kind)  # type: ignore[arg-type]
    fields = fields_of(kind)
    for name in document.keys() - fields:
        raise ValueError(f"{at}{name!s:.60} is not one of {either(fields)}")

    for name, field in fields.items():
        if name not in document and field.default is dataclasses.MISSING:
            raise ValueError(f"without {at + name!r}")

    return kind(
        **{name: _built(hints[name], value, f"{at}{name}") for name, value in document.items()}
    )


def _built(kind: Any, value: Any, where: str) -> Any:
    """Convert a JSON value to the type of a record's field."""
    # A field may be a record or, as `Record | None`, have one among its types.
    record = next(filter(dataclasses.is_dataclass, (kind, *get_args(kind))), None)
    if record is not None and not (value is None and types.NoneType in get_args(kind)):
        return read_record(record, value, where)  # type: ignore[arg-type]

    if get_origin(kind) is tuple and isinstance(value, list):
        part = get_args(kind)[0]  # the members of a tuple have a single type here
        value = tuple(_built(part, member, where) for member in value)

    if not matches_type(value, kind):
        raise ValueError(f"{where} is {value!r:.40}, not {describe_type(kind)}")

    return value


def type_errors(document: Config, form: Config, within: str = "") -> Iterator[str]:
    """Yield the entries of a wrong type, as "has 'x' under rounds, where a whole number belongs".

    Entries that the form (name -> type, or an object's form) does not name are ignored, missing ones are no error.
    """
    for name, expected in form.items():
        if name not in document:
            continue

        value = document[name]
        where = f"{within}{name}"
        if isinstance(expected, Mapping):
            if not isinstance(value, Mapping):
                yield f"has {value!r:.60} under {where}, where a dict belongs"
            else:
                yield from type_errors(value, expected, f"{where}.")
        elif not matches_type(value, expected) or (expected is float and not math.isfinite(value)):
            yield f"has {value!r:.60} under {where}, where {describe_type(expected)} belongs"


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to raise an InputError for an argument that does not have its declared type."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = signature.bind(*args, **kwargs).arguments
        for name, value, allowed in type_mismatches(function, arguments):
            raise InputError(
                f"{name}={value!r:.60}", f"{name} takes {allowed}", "change this argument"
            )
        return function(*args, **kwargs)

    return call


def type_mismatches(
    declared: type | Callable[..., Any], values: Config
) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, allowed type in words) for each value that does not have its field's or argument's type.

    An int passes for a float and a list for a tuple; True and False are not numbers.
    """
    hints = _HINTS(declared)
    for name, value in values.items():
        if name in hints and not matches_type(value, hints[name]):
            yield name, value, describe_type(hints[name])


def matches_type(value: object, kind: Any) -> bool:
    """Return whether a value has a type, by the rules of `type_mismatches`."""
    origin = get_origin(kind)
    inner = get_args(kind)
    if kind is Any:
        return True
    if is_typeddict(kind):
        return isinstance(value, Mapping) and not any(type_mismatches(kind, value))
    if origin is Annotated:
        return matches_type(value, inner[0]) and value in inner[1]
    if origin in (types.UnionType, Union):
        return any(matches_type(value, member) for member in inner)
    if origin in (Mapping, dict):
        key_kind, value_kind = inner
        return isinstance(value, Mapping) and all(
            matches_type(k, key_kind) and matches_type(v, value_kind) for k, v in value.items()
        )
    if origin is Callable:
        return callable(value)

    if origin in (list, tuple, Sequence):
        # JSON has only lists, so a list is accepted for a tuple; a string is a Sequence, but never intended.
        sequence = Sequence if origin is Sequence else list | tuple
        if not isinstance(value, sequence) or isinstance(value, str | bytes):
            return False
        if origin is tuple and inner[-1] is not ...:
            return len(value) == len(inner) and all(map(matches_type, value, inner))
        return all(matches_type(member, inner[0]) for member in value)

    if kind is float:
        kind = int | float
    if isinstance(value, bool) and kind in (int, int | float):
        return False  # Python counts True as 1

    return isinstance(value, kind)  # a record too


def describe_type(kind: Any) -> str:
    """Return a type in words."""
    origin = get_origin(kind)
    inner = get_args(kind)
    if is_typeddict(kind) or origin in (Mapping, dict):
        return "a dict"
    if origin is Annotated:
        return f"{describe_type(inner[0])} from {inner[1].start} to {inner[1].stop - 1}"
    if origin in (types.UnionType, Union):
        return " or ".join(map(describe_type, inner))
    if origin is Callable:
        return "a function"
    if origin in (list, tuple, Sequence):
        return f"a list, each {describe_type(inner[0])}"

    return _WORDS.get(kind, "of another kind")
