"""The trials of a search over a method's settings, and the chosen settings; needs no PyTorch."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from medfl.core import (
    SETTINGS,
    Config,
    InputError,
    ProtocolSettings,
    Refused,
    check_limits,
    check_method_name,
    fields_of,
    json_values,
    refuse_untrusted_module,
    split_commas,
    type_errors,
)

BEST = "best.json"
"""The result of a search."""
_RUN = tuple(fields_of(ProtocolSettings))
_FORM: Config = {
    "method": str,
    "trials": int,
    "settings": {"options": dict[str, str], "requested": dict[str, float]},
}


def parse_grid(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the values of each name in `NAME=A,B,C`.

    Raises:
        InputError: a malformed text, a repeated name, or a repeated value.
    """
    candidates = {}
    for text in texts:
        name, _, listed = text.partition("=")
        values = tuple(split_commas(listed))
        if not name or not all(values) or name in candidates or len(set(values)) < len(values):
            raise InputError(
                f"--grid {text}", "OPTION=A,B,C, each option and value once", "give as lr=0.01,0.1"
            )

        candidates[name] = values

    if not candidates:
        raise InputError(
            "no --grid",
            "--grid OPTION=A,B,C, an option of the method or lr, rounds, ...",
            "add one",
        )

    return candidates


def trials(
    method: str, values: Mapping[str, Sequence[str]], count: int | None, seed: int
) -> tuple[Entry, ...]:
    """Return the trials: all combinations of the values, or a number of them, drawn by the seed.

    Raises:
        InputError: no such method, an invalid run setting, or a count below 1 or above the number of combinations.
    """
    points = [
        dict(zip(values, combination, strict=True))
        for combination in itertools.product(*values.values())
    ]
    if count is not None and not 1 <= count <= len(points):
        raise InputError(
            f"--trials {count}",
            f"1 to {len(points)}, the combinations of the values",
            "change it, or leave it out to try all",
        )

    # the order of the hashes is random by the seed, and the same in every version of Python
    if count is not None:
        points.sort(key=lambda point: sha256(f"{seed} {point}".encode()).digest())
        points = points[:count]

    return tuple(entry(method, point) for point in points)


def entry(method: str, point: Config) -> Entry:
    """Return a method with its own options and run settings.

    Raises:
        InputError: no such method, or an invalid run setting.
    """
    check_method_name(method)
    label = method
    settings = {}
    options = {}
    for name, value in point.items():
        label += f" {name}={value}"
        if name in _RUN:
            settings[name] = _number(name, value)
        else:
            options[name] = str(value)

    check_limits(settings)
    return Entry(label, method, options, settings)


def _number(name: str, value: object) -> int | float:
    try:
        number: int | float = SETTINGS[name].kind(value)
    except ValueError as error:
        raise InputError(
            f"{name}={value}", f"{name} is {SETTINGS[name].allowed}", "write it in digits"
        ) from error
    return number


def tuned_entries(folder: Path) -> dict[str, Entry]:
    """Return method -> the settings chosen by a search, from the folder of one or of several searches.

    Raises:
        InputError: there is none, one is damaged, or two are for the same method.
    """
    if (folder / BEST).is_file():
        files = [folder / BEST]
    else:
        files = sorted(folder.glob(f"*/{BEST}"))

    entries = {}
    for file in files:
        chosen = _read(file)
        if chosen.method in entries:
            raise InputError(
                f"--tuned {folder} with two searches of {chosen.method}",
                "one a method",
                "move one away",
            )
        entries[chosen.method] = chosen

    if not entries:
        raise InputError(
            f"--tuned {folder} has no {BEST}",
            "the folder of medfl tune, or of several",
            "name the one that it wrote",
        )

    return entries


def _read(file: Path) -> Entry:
    allowed = "what medfl tune writes"
    try:
        document = json_values(file)
    except Refused as error:
        raise InputError(f"{file}: {error}", allowed, "tune anew") from error

    if problem := _wrong(document):
        raise InputError(f"{file} {problem}", allowed, "tune anew")

    # the file may come from somebody else, and a dotted method is imported
    refuse_untrusted_module(document["method"], "method", file)
    point = {**document["settings"]["options"], **document["settings"]["requested"]}
    return replace(entry(document["method"], point), trials=document["trials"])


def _wrong(document: object) -> str:
    """Describe what is wrong with the content of best.json, "" if nothing is."""
    if not isinstance(document, dict):
        return "is no object"

    settings = document.get("settings", {})
    if wrong := next(type_errors(document, _FORM), ""):
        return wrong
    if not (_FORM.keys() <= document.keys() and {"options", "requested"} <= settings.keys()):
        return "lacks entries"

    odd = sorted(settings["requested"].keys() - {*_RUN})
    if odd:
        return f"has {odd[0]!r} under settings.requested, where {', '.join(_RUN)} belong"

    return ""


# A method of a grid, as typed


@dataclass(frozen=True)
class Entry:
    """A method of the grid, labelled `label`; `trials` are those of the search that chose its options."""

    label: str
    method: str
    options: Mapping[str, str]
    settings: Config = field(default_factory=dict)
    trials: int | None = None

    @classmethod
    def read(cls, text: str) -> Entry:
        """Read `fedcb classifier=random_frozen`.

        Raises:
            InputError: no such method, or a word that is not OPTION=VALUE.
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
