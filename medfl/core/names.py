"""Names that come from outside, as a job, a policy, a startup kit: they become parts of paths, logs and reports.

Names of one's own machine may be any text, as centres are called in a table: `run_folder.safe_file_name` makes files'
names of them, and `readable_file_name` those of files that people look for.
"""

from __future__ import annotations

import hashlib
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from medfl.core.errors import InputError, did_you_mean
from medfl.core.untrusted import printable

PRIVATE_CACHE = "MEDFL_PRIVATE_CACHE"
"""Variable of a process in a sandbox: its folder for what is pickled, as other processes would run what it writes."""
NO_WALLS = "MEDFL_NO_WALLS"
"""Variable of a site's process that was started without a sandbox: no worker of its own opens the bundle."""

_UNFIT = re.compile(r'[%/\\:*?"<>|\x00-\x1f\x7f]|^\.|[. ]$')
"""What cannot stand in a file name on some system, a name's first or last dot, and what marks that it was replaced."""
_LONGEST = 180  # bytes of a file name, endings not counted
_FORMULA = re.compile(r"\s*(?:[=@]|[+-].*[(|])", re.DOTALL)
_AS_TEXT = "'"  # before what a spreadsheet would compute
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_NUMBER = re.compile(r"0*([0-9]+)(?:\.0+)?")
_ANY = "*"
_trusted: ContextVar[frozenset[str]] = ContextVar("trusted", default=frozenset())
"""Modules of one's own that the user has named; `_ANY` while every one is trusted."""


def is_name(text: object) -> bool:
    """Tell whether a value is a name: letters, digits, `_.-`, from a letter or digit on, at most 64, without `..`."""
    return isinstance(text, str) and bool(_NAME.fullmatch(text)) and ".." not in text


def check_name(text: object, what: str) -> str:
    """Return a name from outside; InputError if it is none."""
    if not is_name(text):
        allowed = (
            "letters, digits, '_', '-' and '.' after a letter or digit, at most 64, without '..'"
        )
        raise InputError(f"{what} {printable(text, 60)!r}", allowed, "give it such a name")
    return str(text)


def slug(name: str) -> str:
    """Return a class's name as part of a metric's name: lower case, words joined by underscores."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def is_plain_text(text: str) -> bool:
    """Tell whether a class's name can stand in a table's cell: in one line, and no formula of a spreadsheet."""
    return text.isprintable() and len(text) <= _LONGEST and not is_formula(text)


def is_formula(text: str) -> bool:
    """Tell whether a spreadsheet would compute a text instead of showing it."""
    return bool(_FORMULA.match(text))


def composed(text: str) -> str:
    """Return a text with composed characters (NFC): a macOS writes them decomposed, and they look the same."""
    return unicodedata.normalize("NFC", text)


def as_number(text: str) -> str:
    """Return a whole number as a spreadsheet leaves it, `7` for `007` and `7.0`; "" for any other text."""
    match = _NUMBER.fullmatch(text)
    return match[1] if match else ""


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Join names, at most `limit` of them."""
    text = ", ".join(names[:limit])
    if len(names) > limit:
        text += f" and {len(names) - limit} more"
    return text


def as_cell(value: Any) -> Any:
    """Return a value as a cell of a table: a formula, perhaps the name of somebody's file or centre, as text."""
    # Also of a text that begins with the sign already, so that `from_cell` gives it back.
    is_code = isinstance(value, str) and is_formula(value.lstrip(_AS_TEXT))
    return f"{_AS_TEXT}{value}" if is_code else value


def from_cell(text: str) -> str:
    """Invert `as_cell`."""
    if text[:1] == _AS_TEXT and is_formula(text.lstrip(_AS_TEXT)):
        return text[1:]

    return text


def readable_file_name(name: str) -> str:
    """Return a file name for a case or a site; different names stay different, blanks and umlauts as they are.

    What cannot stand in a file name is replaced by its percent code, and the end of a very long name by a hash.
    """
    plain = _UNFIT.sub(lambda match: f"%{ord(match[0]):02X}", name) or "%"
    encoded = plain.encode(errors="surrogateescape")
    if len(encoded) <= _LONGEST:
        return plain
    # Cut in bytes, which file systems count, and not inside a character.
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:12]
    return f"{encoded[: _LONGEST - 13].decode(errors='ignore')}%{digest}"


def method_names() -> tuple[str, ...]:
    """Return the names of the shipped methods: modules and packages of `medfl.methods`; none is imported."""
    folder = Path(__file__).parents[1] / "methods"
    modules = {file.stem for file in folder.glob("[!_]*.py")} - {"base"}
    packages = {file.parent.name for file in folder.glob("[!_]*/__init__.py")}
    return tuple(sorted(modules | packages))


def check_method_name(name: object) -> None:
    """Raise an InputError if this is neither a shipped method's name nor the dotted path of a module."""
    shipped = method_names()
    if name not in shipped and (
        not isinstance(name, str) or "." not in name or name.startswith(".")
    ):
        raise InputError(
            f"method {name!r}",
            f"methods are {', '.join(shipped)}",
            did_you_mean(
                str(name), shipped, "pick one, or give the dotted path of your own module"
            ),
        )


def trust_module(path: str | None) -> None:
    """Remember that the user, not a file, has named a method or runtime: files may then name it as well."""
    if path:
        _trusted.set(_trusted.get() | {path.partition(":")[0]})


@contextmanager
def trusting_any_module(trust: bool) -> Iterator[None]:
    """Let files name any module inside the block, if the user has said so."""
    added = {_ANY} - _trusted.get() if trust else set[str]()
    _trusted.set(_trusted.get() | added)
    try:
        yield
    finally:
        # Modules that were named inside the block stay trusted.
        _trusted.set(_trusted.get() - added)


def refuse_untrusted_module(path: str, what: str, file: Path) -> None:
    """Refuse a module that a file names by a dotted path, unless the user has named it too or it is imported already.

    Raises:
        InputError: to import it would run what the file's author has chosen.
    """
    module, colon, _ = path.partition(":")
    trusted = {module, _ANY} & _trusted.get() or module in sys.modules
    if ("." in module or colon) and not trusted:
        raise InputError(
            f"{file} names the {what} {printable(path)!r}, which is code",
            "a file brings no code: of its own it may name only what ships with medfl",
            f"if you trust whoever wrote it, give --trust (to go on with one run: repeat --{what})",
        )
