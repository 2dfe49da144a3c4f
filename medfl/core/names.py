"""Names from outside, e.g. from a job, a policy or a startup kit, which become parts of paths, logs and reports.

Names on one's own machine may be any text, such as centres in a table: `run_folder.safe_file_name` and, for files that
people look for, `readable_file_name` turn them into file names.
"""

from __future__ import annotations

import hashlib
import re
import sys
import unicodedata
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from medfl.core.errors import InputError, did_you_mean
from medfl.core.untrusted import printable

T = TypeVar("T")

PRIVATE_CACHE = "MEDFL_PRIVATE_CACHE"
"""Variable of a sandboxed process: its folder for pickled files, since other processes would run their contents."""
NO_WALLS = "MEDFL_NO_WALLS"
"""Variable of a site's process started without a sandbox: no separate worker opens the bundle."""

_UNFIT = re.compile(r'[%/\\:*?"<>|\x00-\x1f\x7f]|^\.|[. ]$')
"""Characters invalid in a file name on some system, a name's first or last dot, and the replacement marker."""
_LONGEST = 180  # bytes of a file name, extensions not counted
_AS_TEXT = "'"  # before what a spreadsheet would compute
_BREAK = r";\t\r\n"
_BLANK = rf"(?:(?![{_BREAK}])['\s])*"
_SIGNS = "[=@＝＠]|[+＋－-]"
_FORMULA = re.compile(
    rf"^(?={_BLANK}(?:{_SIGNS}(?s:.*)[(|]))|(?<=[{_BREAK}])(?={_BLANK}(?:{_SIGNS}[^{_BREAK}]*[(|]))"
)
"""Precedes a formula: the start of a cell, or of a cell for a program that splits at other signs than commas."""
_COMPUTED = re.compile(_FORMULA.pattern.replace(_AS_TEXT, ""))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_NUMBER = re.compile(r"0*([0-9]+)(?:\.0+)?")
_MONTH = (
    r"(?:jan|feb|f\u00e9v|m[a\u00e4]r|mrz|a[pv]r|ma[iy]|ju[inl]|aug|ao[u\u00fb]|sep|o[ck]t|nov|d[e\u00e9][cz])"
    r"[^\W\d_]*\.?"
)
_RESPELLED = re.compile(
    rf"[0-9][0-9.,]*e\+?[0-9]+|[0-9]{{1,3}}(?:[.,'\s][0-9]{{3}})+"  # numbers
    rf"|[0-9]{{1,4}}[-./][0-9]{{1,2}}[-./][0-9]{{1,4}}(?: 00:00:00)?"  # dates
    rf"|[0-9]{{1,2}}[-./\s]+{_MONTH}|{_MONTH}[-\s][0-9]{{2,4}}",
    re.IGNORECASE,
)
_ANY = "*"
outside_walls: ContextVar[Sequence[str] | None] = ContextVar("outside_walls", default=None)
"""What the user has typed, in an unsandboxed process that opens nothing third-party; None in any other."""
_trusted: ContextVar[frozenset[str]] = ContextVar("trusted", default=frozenset())
"""The user's modules that were named; `_ANY` while all are trusted."""


def is_name(text: object) -> bool:
    """Tell whether a value is a name: letters, digits, `_.-`, first a letter or digit, at most 64, without `..`."""
    return isinstance(text, str) and bool(_NAME.fullmatch(text)) and ".." not in text


def check_name(text: object, what: str) -> str:
    """Return a name from outside; InputError if it is invalid."""
    if not is_name(text):
        raise InputError(
            f"{what} {printable(text, 60)!r}",
            "letters, digits, '_', '-' and '.' after a letter or digit, at most 64, without '..'",
            "give it such a name",
        )
    return str(text)


def not_among(items: Iterable[T], others: Container[T]) -> list[T]:
    """Return the items that are not among others, in their order."""
    return [item for item in items if item not in others]


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text, which is shorter to read than a list of them."""
    return tuple(text.split())


def slug(name: str) -> str:
    """Return a class's name for use in a metric's name: lower case, words joined by underscores."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def split_commas(text: str) -> list[str]:
    """Return what stands between the commas of a text, without blanks around it; [""] of an empty text."""
    return list(map(str.strip, text.split(",")))


def is_plain_text(text: str) -> bool:
    """Tell whether a class's name fits in a table cell: a single line, and not a spreadsheet formula."""
    return text.isprintable() and len(text) <= _LONGEST and not is_formula(text)


def is_formula(text: str) -> bool:
    """Tell whether a spreadsheet would evaluate a text instead of showing it."""
    return bool(_COMPUTED.search(text))


def composed(text: str) -> str:
    """Return a text with composed characters (NFC): macOS writes them decomposed, and they look the same."""
    return unicodedata.normalize("NFC", text)


def alike(text: str) -> str:
    """Return the form in which names are compared: full-width letters and the like as plain ones, none invisible."""
    if text.isascii():
        return text

    plain = unicodedata.normalize("NFKC", text)
    return "".join(c for c in plain if unicodedata.category(c) != "Cf")


def respelled(cells: Iterable[str]) -> str:
    """Return advice on the first cell that looks like what a spreadsheet makes of a name, "" if none does."""
    for cell in cells:
        if _RESPELLED.fullmatch(cell.strip()):
            return (
                f"a spreadsheet may have made {cell!r} of a name: restore it, in a column of text"
            )

    return ""


def as_number(text: str) -> str:
    """Return an integer as a spreadsheet leaves it, `7` for `007` and `7.0`; "" for any other text."""
    match = _NUMBER.fullmatch(text)
    return match[1] if match else ""


def listed(names: Sequence[str], limit: int = 5, between: str = ", ") -> str:
    """Join names, at most `limit` of them, and say how many more there are."""
    text = between.join(names[:limit])
    if len(names) > limit:
        text += f" and {len(names) - limit} more"
    return text


def as_cell(value: Any) -> Any:
    """Return a value as a table cell: a formula, perhaps the name of a file or centre, as text."""
    # Also a text that already begins with the sign, so that `from_cell` restores it.
    return _FORMULA.sub(_AS_TEXT, value) if isinstance(value, str) else value


def from_cell(text: str) -> str:
    """Invert `as_cell`."""
    # of a million cells hardly one has the sign
    if _AS_TEXT not in text:
        return text
    return re.sub(f"(?:{_FORMULA.pattern}){_AS_TEXT}", "", text)


def readable_file_name(name: str) -> str:
    """Return a file name for a case or a site; different names stay different, spaces and umlauts are kept.

    Invalid characters are replaced by their percent codes, and the end of a very long name by a hash.
    """
    plain = _UNFIT.sub(lambda match: f"%{ord(match[0]):02X}", name) or "%"
    encoded = plain.encode(errors="surrogateescape")
    if len(encoded) <= _LONGEST:
        return plain
    # Cut in bytes, which file systems count, but not inside a character.
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:12]
    return f"{encoded[: _LONGEST - 13].decode(errors='ignore')}%{digest}"


def method_names() -> tuple[str, ...]:
    """Return the names of the shipped methods, modules and packages of `medfl.methods`, without importing any."""
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
    """Record that the user, not a file, has named a method or runtime: files may then name it as well."""
    if path:
        _trusted.set(_trusted.get() | {path.partition(":")[0]})


@contextmanager
def trusting_any_module(trust: bool) -> Iterator[None]:
    """Let files name any module inside the block, if the user has allowed it."""
    added = {_ANY} - _trusted.get() if trust else set()
    _trusted.set(_trusted.get() | added)
    try:
        yield
    finally:
        # Modules that were named inside the block stay trusted.
        _trusted.set(_trusted.get() - added)


def refuse_untrusted_module(path: str, what: str, file: Path) -> None:
    """Refuse a module that a file names by a dotted path, unless the user has named it or it is already imported.

    Raises:
        InputError: importing it would run code chosen by the file's author.
    """
    module, colon, _ = path.partition(":")
    trusted = {module, _ANY} & _trusted.get() or module in sys.modules
    if ("." in module or colon) and not trusted:
        raise InputError(
            f"{file} names the {what} {printable(path)!r}, which is code",
            "a file brings no code: of its own it may name only what ships with medfl",
            f"if you trust whoever wrote it, give --trust (to go on with one run: repeat --{what})",
        )
