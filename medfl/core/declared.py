"""Values with limits, declared once: the options of methods and the settings of runs.

`declared` makes a field of a dataclass. `Declared.of` reads that field back and checks values against it.
"""

from __future__ import annotations

import builtins
import dataclasses
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar

from medfl.core.documents import Config, Document
from medfl.core.errors import InputError, did_you_mean, either
from medfl.core.mappings import fields_of, within
from medfl.core.type_checks import matches_type
from medfl.core.untrusted import Refused, typed_value

D = TypeVar("D", bound="Declared")
_KINDS = {"float": float, "int": int, "bool": bool, "str": str, "None": NoneType}


def declared(default: Any, help: str, **form: Any) -> Any:
    """Declare a field of a dataclass; `form` has other attributes of `Declared`, or of the subclass that reads it."""
    return dataclasses.field(default=default, metadata={"help": help, **form})


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A declared value.

    Attributes:
        name: of the field.
        type: as written in Python, such as "float | None".
        default: None also if there is none.
        help: for users.
        choices: the allowed values; None: any.
        minimum: smallest allowed number.
        above: exclusive lower bound.
        maximum: largest allowed number.
    """

    name: str
    type: str
    default: Any = None
    help: str = ""
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None

    @classmethod
    def of(cls: builtins.type[D], field: dataclasses.Field[Any]) -> D:
        """Read a dataclass field made by `declared`."""
        if isinstance(field.type, type):
            type_text = field.type.__name__
        else:
            type_text = str(field.type)

        default = None if field.default is dataclasses.MISSING else field.default
        attributes = fields_of(cls)
        # A method of a user's own may have fields with metadata of its own.
        form = within(field.metadata, attributes)

        return cls(name=field.name, type=type_text, default=default, **form)

    @property
    def document(self) -> Document:
        """The declaration, as JSON."""
        names = ("name", "type", "choices", "minimum", "maximum", "default", "help")
        return {name: getattr(self, name) for name in names}

    @property
    def kinds(self) -> tuple[builtins.type, ...]:
        """The types of its values; types that cannot be read from text are left out."""
        parts = list(map(str.strip, self.type.split("|")))
        return tuple(_KINDS[part] for part in parts if part in _KINDS)

    @property
    def form(self) -> str:
        """Its choices, or its type and limits, in brief."""
        if self.choices:
            return f"one of {either(self.choices)}"
        return f"{self.type}{self.bounds('>=', '<=')}"

    def bounds(self, least: str, most: str) -> str:
        """Return its limits with these signs, such as " >= 0 and <= 1"; "" without any."""
        limits = {least: self.minimum, ">": self.above, most: self.maximum}
        texts = [f"{sign} {limit:g}" for sign, limit in limits.items() if limit is not None]
        return f" {' and '.join(texts)}" if texts else ""

    def typed(self, value: Any) -> Any:
        """Return a value, possibly text typed by a user, converted to one of its types if possible."""
        kinds = self.kinds
        if value == "None" and NoneType in kinds:
            return None

        if isinstance(value, str) and (str not in kinds or float in kinds):
            with suppress(Refused):  # not YAML: it stays text, which is refused
                value = typed_value(value)
            if isinstance(value, str) and float in kinds:
                with suppress(ValueError):  # YAML reads 1e-3 as text
                    value = float(value)

        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            return float(value)

        return value

    def allows(self, value: Any) -> bool:
        """Return whether a value is of one of its types and within its limits."""
        return any(matches_type(value, kind) for kind in self.kinds) and self.within_limits(value)

    def within_limits(self, value: Any) -> bool:
        """Return whether a value of one of its types is among the choices and within the limits; None always is."""
        if value is None:
            return True
        if self.choices is not None and value not in self.choices:
            return False
        if isinstance(value, str | bool):
            return True

        # isfinite fails on integers beyond float's range.
        if not isinstance(value, int) and not math.isfinite(value):
            return False
        if self.minimum is not None and value < self.minimum:
            return False
        if self.above is not None and value <= self.above:
            return False

        return self.maximum is None or value <= self.maximum


def read_options(method: str, options: Mapping[str, Declared], values: Config) -> Document:
    """Return the values of a method's options, given as text or values, in the options' types.

    Raises:
        InputError: the method has no option of this name, or the option does not allow the value; lists the allowed
            ones.
    """
    read = {}
    for name, value in values.items():
        if name not in options:
            raise InputError(
                f"option {name!r} of method {method!r}",
                f"its options are: {', '.join(sorted(options)) or 'none'}",
                did_you_mean(str(name), options, f"see medfl methods {method}"),
            )

        option = options[name]
        read[name] = option.typed(value)
        if not option.allows(read[name]):
            infinite = isinstance(read[name], float) and not math.isfinite(read[name])
            raise InputError(
                f"{name}={value} for method {method!r}",
                f"{name} is {option.form}{', finite' if infinite else ''}",
                f"see medfl methods {method}",
            )

    return read
