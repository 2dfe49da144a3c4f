"""Configuration files of a bundle with some ids changed; the others stay as their author wrote them, comments too."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from medfl.bundle.configuration import read
from medfl.export.network import TARGET

_TOP = re.compile(r"^([A-Za-z_+][\w#:+.-]*)[ \t]*:(?=\s|$)", re.MULTILINE)
_SIMPLE = re.compile(r"^[^:]+:[ \t]*\S[^#\n]*?([ \t]+#[^\n]*)?\n?(\s*\n)*$")
_TRAINED = ("network", "method", "options", "task", "classes", "embeddings")


class Rewritten:
    """One configuration file, to be changed id by id.

    Args:
        path: a JSON or YAML file.

    Raises:
        InputError: it is not valid.
    """

    def __init__(self, path: Path) -> None:
        """Read it."""
        self.path = path
        self.content = read(path)
        self._text = path.read_text(encoding="utf-8")
        self._before = deepcopy(self.content)

    def __contains__(self, key: str) -> bool:
        """Tell whether an id stands in this file."""
        return self._place(key) is not None

    def get(self, key: str) -> Any:
        """Return what a top-level id holds, None if it is not there."""
        return self.content.get(key)

    def set(self, key: str, value: Any) -> None:
        """Change an id that stands in this file; others are left alone."""
        place = self._place(key)
        if place is not None:
            holder, last = place
            holder[last] = value

    def insert(self, key: str, value: Any, before: str) -> None:
        """Put a new top-level id before another one."""
        content: dict[str, Any] = {}
        for name, held in self.content.items():
            content |= {key: value} if name == before else {}
            content[name] = held
        self.content = {key: value, **content} if key not in content else content

    def text(self) -> str:
        """Return the file's new content."""
        if self.path.suffix == ".json":
            return json.dumps(self.content, indent=4) + "\n"
        made = self._patched()
        if yaml.safe_load(made) != self.content:  # a style in which blocks cannot be told apart
            made = _dumped(self.content)
        return made

    def _place(self, key: str) -> tuple[Any, Any] | None:
        names = [name for name in self.content if name.lstrip("+").replace("::", "#") == key.replace("::", "#")]
        if names:
            return self.content, names[0]
        node: Any = self.content
        *above, last = re.split("#|::", key)
        for part in above:
            node = _child(node, part)
        if isinstance(node, dict) and last in node:
            return node, last
        inside = isinstance(node, list) and last.isdecimal() and int(last) < len(node)
        return (node, int(last)) if inside else None

    def _patched(self) -> str:
        starts = [(match.start(), match[1]) for match in _TOP.finditer(self._text)]
        ends = [*[start for start, _ in starts], len(self._text)][1:]
        blocks = {name: self._text[start:end] for (start, name), end in zip(starts, ends, strict=True)}
        made = self._text[: starts[0][0]] if starts else ""
        for name, value in self.content.items():
            old = blocks.get(name)
            if old is not None and self._before.get(name, ...) == value:
                made += old
            else:
                made += _block(name, value, old)
        return made


def _block(name: str, value: Any, old: str | None) -> str:
    """Return a top-level id as text, with the comments beside and after the one that it replaces."""
    made = _dumped({name: value})
    found = _SIMPLE.match(old) if old else None
    if found and made.count("\n") == 1:
        made = made.rstrip("\n") + (found[1] or "") + "\n"
    after = re.search(r"\n((?:[ \t]*\n|#[^\n]*\n)*)$", old) if old else None  # what belongs to the next block
    return made + (after[1] if after else "\n" if old is None and made.count("\n") > 1 else "")


def _dumped(content: Mapping[str, Any]) -> str:
    return yaml.dump(dict(content), Dumper=_Plain, sort_keys=False, width=110, allow_unicode=True)


class _Plain(yaml.SafeDumper):
    """YAML with indented lists, short ones in one line, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out."""
        return True


def _list(dumper: _Plain, data: Any) -> yaml.Node:
    flat = all(value is None or isinstance(value, int | float | str) for value in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat and len(str(data)) < 90)


_Plain.add_representer(list, _list)
_Plain.add_representer(tuple, _list)


def _child(node: Any, part: str) -> Any:
    if isinstance(node, Mapping):
        return node.get(part)
    inside = isinstance(node, list) and part.isdecimal() and int(part) < len(node)
    return node[int(part)] if inside else None


# The network of an export


def adapted(node: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `network_def` as a method adapts it."""
    return {"_target_": TARGET, "network": without_start(node), **arguments}


def starting(node: Any, sha256: str) -> dict[str, Any]:
    """Return a `network_def` that starts from the weights in the id `initial_weights`."""
    inner = without_start(node)
    own = isinstance(inner, Mapping) and inner.get("_target_") == TARGET
    made = dict(inner) if own else {"_target_": TARGET, "network": inner}
    return {**made, "weights": "@initial_weights", "sha256": sha256}


def without_start(node: Any) -> Any:
    """Return a `network_def` as it is without weights to start from: that of an export that is exported again."""
    if not isinstance(node, Mapping) or node.get("_target_") != TARGET:
        return node
    kept = {key: value for key, value in node.items() if key in ("_target_", *_TRAINED)}
    kept["network"] = without_start(kept["network"])
    return kept if kept.get("method") else kept["network"]
