"""A method of a grid, as it is typed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from medfl.core.documents import Config, Texts
from medfl.core.errors import InputError
from medfl.core.names import check_method_name


@dataclass(frozen=True)
class Entry:
    """A method of the grid, as `label` has it; `trials` are those of the search that has chosen its options."""

    label: str
    method: str
    options: Texts
    settings: Config = field(default_factory=dict)
    trials: int | None = None

    @classmethod
    def read(cls, text: str) -> Entry:
        """Read `fedcb classifier=random_frozen`.

        Raises:
            InputError: no such method, or a word that is no OPTION=VALUE.
        """
        try:
            name, *words = shlex.split(text)
        except ValueError as error:
            raise InputError(
                f"method {text!r} ({error})", "NAME OPTION=VALUE ...", "close the quotes"
            ) from error

        wrong = [word for word in words if "=" not in word]
        if wrong:
            raise InputError(
                f"{wrong[0]!r} in method {text!r}",
                "NAME OPTION=VALUE ...",
                f"write {wrong[0]}=VALUE",
            )

        check_method_name(name)
        return cls(" ".join([name, *words]), name, dict(word.split("=", 1) for word in words))
