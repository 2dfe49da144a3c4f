"""Options of methods as they are typed or stored: brought to their type and held to their limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from medfl.core.errors import InputError, did_you_mean
from medfl.core.untrusted import Refused, typed_value

_KINDS = {"float": float, "int": int, "bool": bool, "str": str, "None": type(None)}


@dataclass(frozen=True)
class OptionForm:
    """What an option takes: its type as written in Python, its choices (None: any), its limits, both included."""

    name: str
    type: str
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None

    @classmethod
    def of(cls, field: dataclasses.Field[Any]) -> OptionForm:
        """Read the field of a dataclass that `medfl.methods.option` declared."""
        kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)  # text where it is postponed
        return cls(field.name, kind, **{name: field.metadata.get(name) for name in ("choices", "minimum", "maximum")})

    def read(self, method: str, given: Any) -> Any:
        """Return a value, which may be text, as the option has it; InputError, with the method, if not allowed."""
        kinds = [part.strip() for part in self.type.split("|")]
        value = _typed(given, kinds)
        allowed = tuple(_KINDS[part] for part in kinds if part in _KINDS)
        right = isinstance(value, allowed) and not (isinstance(value, bool) and bool not in allowed)
        if right and self.choices is not None:
            right = value in self.choices
        if right and self.minimum is not None and value is not None:
            right = self.minimum <= value <= (math.inf if self.maximum is None else self.maximum)
        if right and isinstance(value, float):
            right = math.isfinite(value)
        if not right:
            raise InputError(
                f"{self.name}={given} for method {method!r}",
                f"{self.name} is {self._limits(value)}",
                f"see medfl methods {method}",
            )
        return value

    def _limits(self, value: Any) -> str:
        limits = f"one of {', '.join(map(str, self.choices))}" if self.choices else self.type
        limits += f" >= {self.minimum:g}" if self.minimum is not None else ""
        limits += f" and <= {self.maximum:g}" if self.maximum is not None else ""
        return limits + (", finite" if isinstance(value, float) and not math.isfinite(value) else "")


def read_options(method: str, forms: Mapping[str, OptionForm], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as the method has them; InputError, with the valid ones, for another option or value."""
    for name in options:
        if name not in forms:
            raise InputError(
                f"option {name!r} of method {method!r}",
                f"its options are: {', '.join(sorted(forms)) or 'none'}",
                did_you_mean(str(name), forms, f"see medfl methods {method}"),
            )
    return {name: forms[name].read(method, value) for name, value in options.items()}


def _typed(value: Any, kinds: list[str]) -> Any:
    if value == "None" and "None" in kinds:
        return None
    if isinstance(value, str) and "str" not in kinds:
        with suppress(Refused):  # not YAML: it stays text, which is refused
            value = typed_value(value)
        if isinstance(value, str) and "float" in kinds:
            with suppress(ValueError):  # YAML reads 1e-3 as text
                value = float(value)
    if "float" in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value
