"""Configuration files of a bundle with some ids changed; the other text stays as it is, with its comments."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from medfl.bundle.files import read
from medfl.core.documents import Config, Document
from medfl.export.network import TARGET

_TOP_LEVEL_ID = re.compile(r"^([A-Za-z_+][\w#:+.-]*)[ \t]*:(?=\s|$)", re.MULTILINE)
_SINGLE_LINE = re.compile(r"^[^:]+:[ \t]*\S[^#\n]*?([ \t]+#[^\n]*)?\n?(\s*\n)*$")
_OF_METHOD = ("network", "method", "options", "task", "classes", "embeddings")


class EditedConfig:
    """A configuration file that is changed id by id; InputError if it is not valid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.comment = ""
        self.content = read(path)
        self._text = path.read_text(encoding="utf-8")
        self._before = deepcopy(self.content)

    def __contains__(self, key: str) -> bool:
        """Tell whether the file has an id."""
        return self._holder_of(key) is not None

    def head(self, text: str) -> None:
        """Give a YAML file another comment above its first id."""
        self.comment = "".join(f"# {line}\n" for line in textwrap.wrap(text, 110))

    def get(self, key: str) -> Any:
        """Return the value of a top-level id, None if there is none."""
        return self.content.get(key)

    def set(self, key: str, value: object) -> None:
        """Change an id if the file has it."""
        if place := self._holder_of(key):
            parent, name = place
            parent[name] = value

    def insert(self, key: str, value: object, before: str) -> None:
        """Insert a new top-level id before another one."""
        ids = list(self.content)
        ids.insert(ids.index(before) if before in ids else 0, key)
        self.content = {name: self.content.get(name, value) for name in ids}

    def text(self) -> str:
        """Return the new text of the file."""
        if self.path.suffix == ".json":
            return json.dumps(self.content, indent=4) + "\n"

        text = self._patched()
        if yaml.safe_load(text) == self.content:
            return text

        return _dumped(
            self.content
        )  # blocks were not found, as in YAML that is written on one line

    def _holder_of(self, key: str) -> tuple[Any, Any] | None:
        """Return the dict or list that holds an id, and its name or index there."""
        for name in self.content:
            # MONAI merges an id that begins with + instead of replacing it
            if name.lstrip("+").replace("::", "#") == key.replace("::", "#"):
                return self.content, name

        node: Any = self.content
        *parents, last = re.split("#|::", key)
        for parent in parents:
            position = _position(node, parent)
            if position is None:
                return None

            node = node[position]

        position = _position(node, last)
        return None if position is None else (node, position)

    def _patched(self) -> str:
        """Return the text with only the blocks of changed ids replaced."""
        blocks: dict[str, str] = {}
        end = len(self._text)
        for match in reversed([*_TOP_LEVEL_ID.finditer(self._text)]):
            blocks.setdefault(match[1], self._text[match.start() : end])
            end = match.start()

        text = self.comment or (self._text[:end] if blocks else "")

        for name, value in self.content.items():
            old = blocks.get(name)
            if old is not None and self._before.get(name, ...) == value:
                text += old
            else:
                text += _block(name, value, old)

        return text


def _block(name: str, value: object, old: str | None) -> str:
    """Return a top-level id as text, with the comments beside and after the block that it replaces."""
    text = _dumped({name: value})
    line = _SINGLE_LINE.match(old) if old else None
    if line and text.count("\n") == 1:
        text = text.rstrip("\n") + (line[1] or "") + "\n"

    if old is None:
        return text + "\n" if text.count("\n") > 1 else text

    # comments and empty lines below a block belong to the next one
    below = re.search(r"\n((?:[ \t]*\n|#[^\n]*\n)*)$", old)
    return text + below[1] if below else text


def _dumped(content: Config) -> str:
    return yaml.dump(dict(content), Dumper=_Plain, sort_keys=False, width=110, allow_unicode=True)


class _Plain(yaml.SafeDumper):
    """YAML with short lists on one line, and no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        """Use no aliases."""
        return True


def _list(dumper: _Plain, data: Any) -> yaml.Node:
    flat = all(value is None or isinstance(value, int | float | str) for value in data)
    return dumper.represent_sequence(
        "tag:yaml.org,2002:seq", data, flow_style=flat and len(str(data)) < 90
    )


_Plain.add_representer(list, _list)
_Plain.add_representer(tuple, _list)


def _position(node: object, part: str) -> str | int | None:
    """Return the key or index under which a dict or list holds a part of an id, None where it does not."""
    if isinstance(node, list):
        if part.isdecimal() and int(part) < len(node):
            return int(part)

        return None

    if isinstance(node, dict) and part in node:
        return part

    return None


# The images of an export


def predict_any_folder(file: EditedConfig, classes: Sequence[str], shape: Sequence[int]) -> bool:
    """Let an inference configuration predict every image below `dataset_dir`, whatever it is called, and say so.

    Return whether it did: it lists images by medfl; another bundle's own list stays as it is. `shape` is (C, H, W[,
    D]).
    """
    dataset = file.get("dataset")
    if not isinstance(dataset, Mapping) or not str(dataset.get("data")).startswith(
        "$medfl.datasets."
    ):
        return False

    file.set(
        "dataset#data", f"$medfl.datasets.unlabelled(@dataset_dir, {len(shape) == 4}, {shape[0]})"
    )
    steps: Any = file.get("postprocessing")
    steps = steps.get("transforms", [steps])
    if classes:
        writer = {"keys": "pred", "output_dir": "@output_dir", "classes": [*classes]}
        steps = [*steps, {"_target_": "medfl.datasets.WriteClassesd", **writer}]
        handlers = []
        for handler in file.get("handlers") or []:
            if handler.get("_target_") != "ClassificationSaver":  # WriteClassesd takes its place
                handlers.append(handler)

        file.set("handlers", handlers)
        file.head(
            "What models/model.pt says of every image below dataset_dir: output/predictions.csv "
            "has id, prediction and the probability of each class."
        )
    else:
        steps = list(map(_at_source, steps))
        file.head(
            "Masks by models/model.pt of every image below dataset_dir, on the grid of its file, in output/."
        )

    file.set("postprocessing", {"_target_": "Compose", "transforms": steps})
    return True


_WRITER = "medfl.datasets.WriteMaskd"


def _at_source(step: Config) -> Config:
    """Return a step that writes masks so that they keep their images' paths below the data folder, and their place."""
    if step["_target_"] == "SaveImaged":
        step = {"_target_": _WRITER, "keys": step["keys"], "output_dir": step["output_dir"]}

    if step["_target_"] == _WRITER:
        return {**step, "root": "@dataset_dir"}

    return step


# The network of an export


def network_of_method(node: Any, arguments: Config) -> Document:
    """Return a `network_def` of the network as a method adapts it."""
    return {"_target_": TARGET, "network": network_without_weights(node), **arguments}


def network_with_weights(node: Any, sha256: str) -> Document:
    """Return a `network_def` that starts from the weights of the id `initial_weights`."""
    inner = network_without_weights(node)
    exported = isinstance(inner, Mapping) and inner.get("_target_") == TARGET

    if exported:
        definition = dict(inner)
    else:
        definition = {"_target_": TARGET, "network": inner}

    return {**definition, "weights": "@initial_weights", "sha256": sha256}


def network_without_weights(node: Any) -> Any:
    """Return a `network_def` without the weights that an earlier export added."""
    if not isinstance(node, Mapping) or node.get("_target_") != TARGET:
        return node
    bare = {key: value for key, value in node.items() if key in ("_target_", *_OF_METHOD)}
    bare["network"] = network_without_weights(bare["network"])
    return bare if bare.get("method") else bare["network"]
