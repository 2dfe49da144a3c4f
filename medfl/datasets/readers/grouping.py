"""Patients from file names: a regular expression extracts the patient from a name; a suitable one is suggested.

The expression may come with somebody else's bundle, so it is restricted to forms that take little time on any name: no
repeated groups, no backreferences, no lookaround, and at most three repeats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from medfl.core import InputError, refusing

_LONGEST = 255  # characters: a file's name has no more
_REPEATS = 3  # with which a search takes 2 s at most
_ATOMS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_OFFERED = (r"^([^/]+)/", r"^([^_/]+)_", r"^([^-/]+)-", r"^([^_/]+_[^_/]+)_", r"^([^-/]+-[^-/]+)-")
_EXAMPLE = r"an expression with the patient in parentheses, as '^([^_]+)_' for p01_3.png"


def by_names(pattern: str, names: Sequence[str]) -> list[str | None]:
    """Return the patient of each image: the first group of an expression, None where it does not match.

    Args:
        pattern: searched in the file's name, or in its whole path where the expression has a slash.
        names: paths of the images below the folder of all images.

    Raises:
        InputError: no expression, one that may take long, has no group, matches none of several images, or puts all
            into one patient.
    """
    expression = _compiled(pattern)
    # without a slash in it the expression is of the file, wherever it lies
    texts = [name if "/" in pattern else name.rpartition("/")[2] for name in names]
    if long := next((text for text in texts if len(text) > _LONGEST), None):
        raise InputError(
            f"path {long}",
            f"at most {_LONGEST} characters for group-by",
            "shorten its folders' names",
        )

    matches = list(map(expression.search, texts))
    patients = [match[1] or None if match else None for match in matches]
    if not any(patients):
        problem = f"{pattern!r} matches none of {len(names)} names, as {names[0]}"
    elif len(names) > 1 and set(patients) == {patients[0]}:
        problem = f"{pattern!r} makes one patient, {patients[0]}, of all {len(names)} images"
    else:
        return patients

    raise InputError(
        f"group-by {problem}", _EXAMPLE, "write another, or name patients in cases.csv"
    )


def offered(names_of: Mapping[str, Sequence[str]]) -> tuple[str, int] | None:
    """Suggest an expression that takes a common prefix of names as the patient; return it and the number of patients.

    It matches every name and gives at least three patients, two for each class with several images, and at most four
    fifths as many patients as images. None if no such expression is known.

    Args:
        names_of: class -> paths of its images, as of `by_names`.
    """
    count = sum(map(len, names_of.values()))
    for pattern in _OFFERED:
        patients: set[str | None] = set()
        try:
            for names in names_of.values():
                # A single name says nothing about an expression.
                patients.update(by_names(pattern, names) if len(names) > 1 else ())
        except InputError:
            continue

        if None not in patients and 3 <= len(patients) <= 0.8 * count:
            return pattern, len(patients)

    return None


def _compiled(pattern: str) -> re.Pattern[str]:
    with refusing(f"group-by {pattern!r} is no regular expression", _EXAMPLE, "write another"):
        expression = re.compile(pattern if len(pattern) <= _LONGEST else "()")

    if not expression.groups:
        raise InputError(
            f"group-by {pattern!r} has no group in parentheses",
            _EXAMPLE,
            "put the patient in parentheses",
        )

    plain = _ATOMS.sub("x", pattern)
    # Groups other than (?:...) and (?P<name>...), and references back to one.
    special = re.search(r"\(\?(?!:|P<)", plain) or re.search(r"\\[1-9]|\(\?P=", pattern)
    repeats = re.findall(r"(?:[*+]|(?<!\()\?|\{[^}]*\})\??", plain)
    if (
        len(pattern) > _LONGEST
        or special
        or re.search(r"\)[*+?{]", plain)
        or len(repeats) > _REPEATS
    ):
        raise InputError(
            f"group-by {pattern[:_LONGEST]!r} may take long, or does more than it needs",
            f"at most {_REPEATS} of * + ? {{n}}, none after a parenthesis, no references and no (?=...)",
            "write a simpler one",
        )

    return expression
