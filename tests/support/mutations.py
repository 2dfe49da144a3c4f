"""Recorded files, changed: JSON values and safetensors headers by their structure, and any file by its bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

RAW = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-1", "0", "-0.0", "1.5", "1e9", "1e308", "9" * 19, "9" * 64,
    "9" * 65, "9" * 5000, "-" + "9" * 40, "true", "false", "null", '""', '"x"', '"3"', '"NaN"', r'"\ud800"',
    r'"\u0000"', r'"\u202e"', '"../x"', '"/etc/passwd"', '"' + "a" * 300 + '"', "[]", "{}", "[null]",
    "[[]]", '["x", 3]', "[1e999]",
    '{"": {}}', '{"x": [{}]}', '{"round": -1}', "[" * 40 + "]" * 40, "[" * 3000 + "]" * 3000,
    '{"a":' * 40 + "1" + "}" * 40,
    "[" + "0," * 9999 + "0]", "1, 2", "}", '"a": 1', "01", "0x10", "'a'", "\x00",
)  # fmt: skip
"""JSON texts that are put in the place of values, and some that are no JSON."""
_MARK = "@@RAW@@"
_BYTES = (
    b"",
    b"\x00",
    b"\xff",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b"\n",
    b"\x80\x81",
    b"9" * 70,
    b"[" * 2000,
    b"NaN",
)


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value below a JSON value."""
    entries = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, child in entries:
        yield (*at, key)
        yield from places(child, (*at, key))


def changed(draw: st.DrawFn, document: Any, most: int = 3) -> str:
    """Change, move, double or take away values of a JSON document; return its text."""
    document, raws = json.loads(json.dumps(document)), []
    for _ in range(draw(st.integers(1, most))):
        found = list(places(document))
        if not found:
            break
        *above, key = found[draw(st.integers(0, len(found) - 1))]
        node = document
        for step in above:
            node = node[step]
        kind = draw(st.integers(0, 9))
        if kind < 6:
            raws.append(draw(st.sampled_from(RAW)))
            node[key] = f"{_MARK}{len(raws) - 1}"
        elif kind == 6:
            del node[key]
        elif kind == 7 and isinstance(node, dict):
            node[draw(st.sampled_from(("", "x", "round", "a/b", "0")))] = node.pop(key)
        else:
            *other, last = found[draw(st.integers(0, len(found) - 1))]
            value = document
            for step in (*other, last):
                value = (
                    value[step] if isinstance(value, dict | list) and _has(value, step) else value
                )
            node[key] = json.loads(json.dumps(value))
    text = json.dumps(document)
    for index, raw in enumerate(raws):
        text = text.replace(f'"{_MARK}{index}"', raw)
    return text


def _has(value: Any, step: Any) -> bool:
    return step in value if isinstance(value, dict) else isinstance(step, int) and step < len(value)


def broken(draw: st.DrawFn, data: bytes, most: int = 4) -> bytes:
    """Flip, cut, put in, double or cut off bytes."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, len(out)))
        kind = draw(st.integers(0, 4))
        if kind == 0 and at < len(out):
            out[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 1:
            del out[at : at + draw(st.integers(1, 64))]
        elif kind == 2:
            out[at:at] = draw(st.sampled_from(_BYTES))
        elif kind == 3:
            del out[at:]
        else:
            out[at:at] = out[at : at + draw(st.integers(1, 64))]
    return bytes(out)


@st.composite
def json_files(draw: st.DrawFn, document: Any) -> bytes:
    """A JSON document whose values or whose bytes were changed."""
    if draw(st.integers(0, 3)):
        return changed(draw, document).encode("utf-8", "surrogatepass")
    return broken(draw, json.dumps(document).encode())


@st.composite
def line_files(draw: st.DrawFn, documents: list[Any]) -> bytes:
    """Lines of JSON of which one was changed, or all by their bytes."""
    lines = [json.dumps(one) for one in documents]
    if draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = changed(draw, documents[at])
        return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    return broken(draw, ("\n".join(lines) + "\n").encode())


@st.composite
def text_files(draw: st.DrawFn, text: bytes, words: tuple[bytes, ...]) -> bytes:
    """A text in which words were put or changed, besides what happens to its bytes."""
    if draw(st.booleans()):
        return broken(draw, text)
    at, word = draw(st.integers(0, len(text))), draw(st.sampled_from(words))
    end = at + draw(st.integers(0, 12))
    return text[:at] + word + text[end:]


_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "C64", "X", "")
_SHAPES = (
    [],
    [0],
    [1],
    [2],
    [10**9],
    [2**40, 0],
    [2**62, 4],
    [-1],
    [1] * 9,
    [1] * 3000,
    [1.5],
    "2",
    None,
    [2**64],
)


def opened(data: bytes) -> bytes:
    """Return a safetensors file without the length of its header, which nobody guesses who changes bytes."""
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length].replace(b"\n", b" ") + b"\n" + data[8 + length :]


def closed(data: bytes) -> bytes:
    """Undo `opened`."""
    header, _, body = data.partition(b"\n")
    return len(header).to_bytes(8, "little") + header + body


@st.composite
def tensor_files(draw: st.DrawFn, data: bytes) -> bytes:
    """A safetensors file whose header lies, or says what is wrong; or that lacks bytes, or has others."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return broken(draw, data)
    if kind == 1:
        return (
            draw(st.sampled_from((0, 1, 7, 2**31, 2**63, 2**64 - 1, length + 1))).to_bytes(
                8, "little"
            )
            + data[8:]
        )
    if kind < 5 and "__metadata__" in header:
        told = header["__metadata__"]
        name = draw(st.sampled_from(sorted(told)))
        try:
            told[name] = changed(draw, json.loads(told[name]))
        except ValueError:  # a text
            told[name] = draw(st.sampled_from(RAW))
        text = json.dumps(header)
    elif kind < 8:
        name = draw(st.sampled_from([name for name in header if name != "__metadata__"]))
        field = draw(st.integers(0, 4))
        if field == 0:
            header[name]["dtype"] = draw(st.sampled_from(_DTYPES))
        elif field == 1:
            header[name]["shape"] = draw(st.sampled_from(_SHAPES))
        elif field == 2:
            pair = [draw(st.sampled_from((0, 4, -1, 2**63, len(body), 10**10))) for _ in range(2)]
            header[name]["data_offsets"] = pair
        elif field == 3:
            header[
                draw(
                    st.sampled_from(
                        ("", "0", "x", "a/b", "scalars/x", "scalars/", "/", "é", "_" * 600)
                    )
                )
            ] = header.pop(name)
        else:
            header[name] = {"dtype": "U8", "shape": [len(body)], "data_offsets": [0, len(body)]}
        text = json.dumps(header)
    else:
        text = changed(draw, header)
    told_bytes = text.encode("utf-8", "surrogatepass")
    return len(told_bytes).to_bytes(8, "little") + told_bytes + body
