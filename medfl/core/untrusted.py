"""Read untrusted JSON and YAML as plain values: no tags, duplicate keys, invisible characters or alias bombs."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import stat
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path, PurePath
from typing import IO, Any

import yaml

from medfl.core.errors import InputError, beginning, reason

Plain = Any
"""None, bool, int, float, str, date, and lists and dicts of them."""
TABLE_BYTES = 2**29
TABLE_ROWS = 5_000_000
TABLE_COLUMNS = 100_000
JSON_BYTES = 2**26
JSON_VALUES = 2_000_000
JSON_LEVELS = 32
"""Bounds of a JSON file, which has 262,144 names besides: a run's record lists the ids of all its images."""
MOST_BYTES = sys.maxsize
if hasattr(os, "sysconf"):
    MOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
"""Of a file of weights or of a State."""
_LEVELS = 100
"""Maximum folder depth: functions that copy or remove folders recurse for each level."""
_NUMBER = 64  # characters: no number in a configuration needs more, and YAML takes minutes to read 1:1:1:...
_TEXT = 10_000_000  # characters that all texts of a YAML document have together, one under an alias counted each time
# Half of a surrogate pair: an escape may write it, and no terminal takes it.
_HALF = re.compile("[\ud800-\udfff]")
STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Control characters, those that break, reverse or hide lines, and half characters; joiners are allowed, as some
languages need them.
"""
_INVISIBLE = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")
"""Unicode categories."""
_YAML = "tag:yaml.org,2002:"
# The C version, if available: several times as fast.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Refused(Exception):
    """The text is refused; the message briefly says why."""


_LEFTWARDS = ("R", "AL", "AN")


def printable(text: object, length: int = 100) -> str:
    """Return untrusted text for a line of output, with limited length; of a path the last part.

    Characters that control a terminal, break or reverse a line, or are invisible, are escaped, as are right-to-left
    letters, which would move their neighbours.
    """
    try:
        shown = repr(str(text))[1:-1]
        plain = "".join(
            ascii(c)[1:-1] if unicodedata.bidirectional(c) in _LEFTWARDS else c for c in shown
        )
    except ValueError:  # with more digits than Python prints
        plain = "a number of thousands of digits"

    if len(plain) <= length:
        return plain

    if isinstance(text, PurePath):
        return "..." + plain[3 - length :]

    return plain[: length - 3] + "..."


def visible(text: str) -> str:
    """Escape what could control a terminal or a page: other people's files name images, classes and sites."""
    return STEERING.sub("?", text)


def check_visible(text: str) -> None:
    """Refuse control, format (zero width, right-to-left), line-separating, private and unassigned characters."""
    for character in sorted(set(text)):
        if character not in "\t\n\r" and unicodedata.category(character) in _INVISIBLE:
            raise Refused(f"the invisible character U+{ord(character):04X}")


def decode_text(data: bytes) -> str:
    """Return bytes as text without a byte-order mark; Refused if not UTF-8, or with invisible characters."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused("bytes that are not UTF-8 text") from error
    check_visible(text)
    return text


def open_plain(path: Path, most: int = sys.maxsize) -> IO[bytes]:
    """Open a plain file of at most `most` bytes for reading, without blocking on a pipe or device.

    Raises:
        OSError: it cannot be opened, is anything else, or has more bytes: one with holes takes no room on a disk.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_size <= most:
        return os.fdopen(handle, "rb")

    os.close(handle)
    raise OSError(f"it is no plain file of at most {most} bytes")


def read_bytes(path: Path, most: int) -> bytes:
    """Return the contents of a plain file.

    Raises:
        Refused: it is a folder, a device or a pipe, cannot be read, or has more than `most` bytes; nothing is read
            then.
    """
    try:
        with open_plain(path, most) as file:
            return file.read(os.fstat(file.fileno()).st_size)
    except (OSError, ValueError) as error:  # also a name with a null character
        raise Refused(f"it cannot be read: {reason(error)}") from error


def folders_below(
    root: str | Path, unreadable: Callable[[OSError], object] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each folder below `root`, itself first, with its folders and files, like `os.walk`, at any depth."""
    # os.walk recurses in Python and fails at a thousand levels, so it is called one level at a time.
    todo = [os.fspath(root)]
    while todo:
        for entry in islice(os.walk(todo.pop(), onerror=unreadable), 1):
            yield entry
            paths = [os.path.join(entry[0], name) for name in reversed(entry[1])]
            todo += [path for path in paths if not os.path.islink(path)]


def not_plain(root: str | Path) -> Iterator[Path]:
    """Yield everything in a folder that is neither a plain file nor a folder, and folders nested over 100 deep."""
    for folder, folders, files in folders_below(root):
        for path in map(Path(folder).joinpath, (*folders, *files)):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                yield path

        if folder.count(os.sep) > os.fspath(root).count(os.sep) + _LEVELS:
            yield Path(folder)


def read_json(path: Path, allowed: str, advice: str, most: int = JSON_BYTES) -> Plain:
    """Return the values of a JSON file of at most `most` bytes that somebody else may have written; follow links.

    Raises:
        InputError: it cannot be read, is not JSON, or exceeds a limit.
    """
    try:
        return json_values(path, most)
    except Refused as error:
        raise InputError(f"{path}: {error}", allowed, advice) from error


def json_values(path: Path, most: int = JSON_BYTES) -> Plain:
    """Return the values of a JSON file, like `read_json`; Refused with the bare reason."""
    return read_json_bytes(read_bytes(path, most))


def read_json_bytes(data: bytes) -> Plain:
    """Return the values of a JSON document as written by Python: numbers may be NaN or infinite.

    Raises:
        Refused: it is not JSON, or exceeds a bound.
    """
    # before parsing, which takes many times its memory
    if len(data) > JSON_BYTES:
        raise Refused(f"more than {JSON_BYTES} bytes")

    return read_plain(
        decode_text(data), is_json=True, nodes=JSON_VALUES, depth=JSON_LEVELS, constants=True
    )


_CODECS = dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "utf-16")
"""By a text's mark of its order of bytes."""
_NO_TABLE = re.compile(r"\s*[<{\[]")
_ABOVE = re.compile(r"\A(?:[\s,;]*\n)?(?:\"?sep=.\"?\r?\n)?(?:#[^,;\t\n]*\n)*")


def read_table(
    path: Path, is_composed: bool = False
) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Return the columns and rows, each with its line number, of a table with a header line.

    The header decides whether cells are separated by tabs, semicolons (as in many countries' spreadsheets) or commas.

    A missing cell of a row is None; empty cells beyond the header are a list under None. `is_composed`: in composed
    characters, like file names.

    Raises:
        Refused: it is not such a file in UTF-8, or in UTF-16 with its mark; it has cells beyond the header, more than
            `TABLE_BYTES`, or rows so short that they would take far more memory.
    """
    rows = []
    line = 0
    try:
        data = read_bytes(path, TABLE_BYTES)
        start = beginning(io.BytesIO(data))
        if max(map(len, io.BytesIO(data)), default=0) > 16_777_216:
            raise Refused(f"a line of more than 16 MiB; {start}")
        text = data.decode(_CODECS.get(data[:2], "utf-8-sig"))
        if "\0" in text:
            raise Refused(f"it has bytes of 0, as of UTF-16 without its mark; {start}")
        if _NO_TABLE.match(text):  # a page, or a document of JSON or RTF
            raise Refused(f"it is no table; {start}")
        if is_composed:
            text = unicodedata.normalize("NFC", text)

        # longer ones are no measurements, and Python converts none
        if digits := re.search(rf"\d{{{_NUMBER + 1},}}", text):
            raise Refused(f"a number of {len(digits[0])} digits; at most {_NUMBER}")

        # empty rows, and a spreadsheet's line about itself
        lines = text.count("\n")
        text = _ABOVE.sub("", text)
        lines -= text.count("\n")
        head = text.partition("\n")[0]
        delimiter = "\t" if "\t" in head else max(",;", key=head.count)
        if head.count(delimiter) >= TABLE_COLUMNS:
            raise Refused(f"more than {TABLE_COLUMNS} columns")

        # strict: of a quotation mark without its other csv makes one cell of many rows
        reader = csv.DictReader(io.StringIO(text, ""), delimiter=delimiter, strict=True)
        names = list(reader.fieldnames or ())
        line = lines + reader.line_num
        for row in reader:
            line = lines + reader.line_num
            # of a decimal comma, or of names of rows, which move all columns
            if more := "".join(row.get(None, ())):
                raise Refused(
                    f"line {line} has more cells than the header: {printable(more, 40)!r}"
                )
            rows.append((line, row))
            if len(rows) > TABLE_ROWS:
                raise Refused(f"more than {TABLE_ROWS} rows")
            # Each missing cell takes memory, although it has no byte in the file.
            if len(rows) * len(names) > 2 * len(text) + 1000:
                raise Refused(f"rows without most of its {len(names)} columns")

        repeated = Counter(filter(None, names)) - Counter(set(names))
        if repeated:
            raise Refused(f"it has two columns {printable(min(repeated))!r}")
    except csv.Error as error:
        raise Refused(
            f"perhaps a quotation mark in line {line + 1} without its other ({error})"
        ) from error
    except UnicodeDecodeError as error:
        raise Refused(f"it is no table in UTF-8 text: {error}; {start}") from error

    return names, rows


def read_plain(
    text: str, *, is_json: bool, nodes: int, depth: int, constants: bool = False
) -> Plain:
    """Return the values of a JSON or YAML text.

    Args:
        text: one document.
        is_json: otherwise YAML, safely loaded.
        nodes: maximum number of values, an alias counting as all the values it stands for.
        depth: maximum number of levels.
        constants: JSON may contain NaN, Infinity and -Infinity.

    Raises:
        Refused: it is invalid, or uses something that a plain configuration does not need.
    """
    try:
        if is_json:
            if sum(map(text.count, ",[{")) > 4 * nodes:  # before anything is built
                raise Refused(f"more than {nodes} values or {depth} levels")
            value = json.loads(
                text, object_pairs_hook=unique(262_144),
                parse_constant=float if constants else _no_constant,
                parse_int=lambda number: int(_short(number)), parse_float=lambda number: float(_short(number)),
            )  # fmt: skip
        else:
            value = _read_yaml(text, nodes, depth)
    except RecursionError as error:
        raise Refused(f"more than {depth} levels") from error
    except (ValueError, TypeError, OverflowError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())
        language = "JSON" if is_json else "YAML"
        raise Refused(f"not valid {language} ({printable(line, 160)})") from error

    _measure(value, nodes, depth)
    return value


def typed_value(text: str) -> Plain:
    """Return the YAML value of a typed option or id; Refused if it is invalid, or suitable only for whole files."""
    return read_plain(text, is_json=False, nodes=10_000, depth=16)


def override_value(value: Any) -> Any:
    """Parse text as YAML, as MONAI does for overrides; expressions and references stay text."""
    if not isinstance(value, str) or value[:1] in "$@%":
        return value
    try:
        return typed_value(value)
    except Refused:
        return value


def unique(most: int) -> Callable[[list[tuple[str, Plain]]], dict[str, Plain]]:
    """Return what makes JSON's mappings, and refuses a key that comes twice, or more than `most` in a document."""
    left = iter(range(most))

    def mapping(pairs: list[tuple[str, Plain]]) -> dict[str, Plain]:
        entries = {}
        for key, value in pairs:
            if key in entries:
                raise Refused(f"key {printable(key)!r} twice")
            if next(left, None) is None:
                raise Refused("too many names")
            entries[key] = value
        return entries

    return mapping


def _no_constant(name: str) -> float:
    raise Refused(f"{name}, which is not JSON")


def _short(text: str) -> str:
    if len(text) > _NUMBER:
        raise Refused(f"a number of {len(text)} characters; at most {_NUMBER}")
    return text


def _read_yaml(text: str, nodes: int, depth: int) -> Plain:
    level = 0
    for count, event in enumerate(yaml.parse(text, LOADER)):  # before anything is built
        if isinstance(event, yaml.CollectionStartEvent):
            level += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            level -= 1

        if level > depth:
            raise Refused(f"more than {depth} levels")
        if count > 4 * nodes:
            raise Refused(f"more than {nodes} values")
        if isinstance(event, yaml.DocumentStartEvent) and (event.tags or event.version):
            raise Refused("a YAML directive")
        if (
            isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
            and event.tag is not None
        ):
            raise Refused(f"the YAML tag {printable(event.tag)!r}")

    loader = LOADER(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None

        _check_node(root, [nodes, max(_TEXT, len(text))], depth)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _check_node(node: yaml.Node, left: list[int], depth: int) -> None:
    """Check a node and all below it; `left` is the remaining number of nodes and characters."""
    left[0] -= 1
    if isinstance(node, yaml.ScalarNode):
        left[1] -= len(node.value)
    if min(left) < 0:
        raise Refused("aliases that stand for too many values, or too much text")
    if depth < 0:
        raise Refused("too many levels, or an alias of itself")

    _check_number(node)
    if isinstance(node, yaml.MappingNode):
        keys = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise Refused("a key that is no text")
            if key.tag == f"{_YAML}merge":
                raise Refused("the YAML merge key '<<'")

            _check_number(key)
            # Compared as Python values: 1, 0x1 and true are the same key.
            typed_key = yaml.constructor.SafeConstructor().construct_object(key)  # type: ignore[no-untyped-call]
            if typed_key in keys:
                raise Refused(f"key {printable(key.value)!r} twice")

            keys.add(typed_key)
            _check_node(value, left, depth - 1)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_node(value, left, depth - 1)


def _check_number(node: yaml.Node) -> None:
    if isinstance(node, yaml.ScalarNode) and node.tag in (f"{_YAML}int", f"{_YAML}float"):
        _short(node.value)


def _measure(value: Plain, nodes: int, depth: int) -> None:
    count = 0
    todo = [(value, 0)]
    while todo:
        node, level = todo.pop()
        for text in node if isinstance(node, dict) else (node,):
            if isinstance(text, str) and not text.isascii() and (half := _HALF.search(text)):
                raise Refused(f"half a character, U+{ord(half[0]):04X}")

        count += 1
        if count > nodes:
            raise Refused(f"more than {nodes} values")
        if level > depth:
            raise Refused(f"more than {depth} levels")

        if isinstance(node, dict):
            children: Iterable[Plain] = node.values()
        elif isinstance(node, list):
            children = node
        else:
            children = ()

        todo += [(child, level + 1) for child in children]
