"""Configuration files of a bundle with some ids changed, and an inference for MONAI alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

from medfl import networks
from medfl.bundle.configuration import target_name
from medfl.bundle.files import read
from medfl.core import Config, Document, within
from medfl.core.seeding import stream
from medfl.export.network import TARGET

_OF_METHOD = ("network", "method", "options", "task", "classes", "embeddings")


class EditedConfig:
    """A configuration file edited id by id; InputError if it is invalid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = read(path)

    def __contains__(self, key: str) -> bool:
        """Tell whether the file has an id."""
        return self._holder_of(key) is not None

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
        """Return the new text of the file, without its comments."""
        if self.path.suffix == ".json":
            return json.dumps(self.content, indent=4) + "\n"

        return _dumped(self.content)

    def _holder_of(self, key: str) -> tuple[Any, Any] | None:
        """Return the dict or list that holds an id, and its name or index there."""
        for name in self.content:
            # MONAI merges an id that begins with + instead of replacing it
            if name.lstrip("+").replace("::", "#") == key.replace("::", "#"):
                return self.content, name

        node = self.content
        holder = node
        position = key
        try:
            for part in re.split("#|::", key):
                holder = node
                position = int(part) if isinstance(node, list) else part
                node = node[position]
        except (LookupError, TypeError, ValueError):
            return None

        return holder, position


def _dumped(content: Any) -> str:
    return yaml.dump(content, Dumper=_Plain, sort_keys=False, width=110, allow_unicode=True)


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


# An inference by MONAI alone


_IN_TEMPLATE = ("bundle_root", "dataset", "dataset_dir", "output_dir", "ckpt_dir", "device")
_READERS = ("ReadPixelsd", "ReadPaird", "ReadVolumed")
TORCHSCRIPT = "$torch.jit.load(@bundle_root + '/models/model.ts', map_location='cpu')"


def templates(finalize: Callable[[Any], Any] | None = None) -> jinja2.Environment:
    """Return the environment of the templates; `finalize` is called with each value that they show."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("medfl.export"), undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=finalize,
    )  # fmt: skip
    environment.filters["yaml"] = _dumped
    return environment


def component_of(node: Any, get: Callable[[str], Any]) -> Any:
    """Replace medfl's `network_def` by MONAI's own, or by `TORCHSCRIPT` if there is none; return others unchanged.

    `get` returns the object of an id of the configuration.
    """
    node = network_without_weights(node)
    if not isinstance(node, Mapping) or node.get("_target_") != "medfl.networks.build":
        return TORCHSCRIPT if is_of_medfl(node) else node

    arguments = _values(node, get)
    del arguments["_target_"]
    with stream(0, "export"):  # other networks are built, which draws random numbers
        return networks.component(**arguments) or TORCHSCRIPT


def is_of_medfl(node: Any) -> bool:
    """Tell whether part of a configuration names medfl."""
    return "medfl." in str(node)


def inference_by_monai(
    content: Config, inferer: Any, network: Any, facts: Config, get: Callable[[str], Any]
) -> str | None:
    """Return a configuration that predicts any folder of images with MONAI alone, None if it would need medfl.

    Args:
        content: of the inference configuration, whose images medfl lists and reads.
        inferer: of the run's validation.
        network: `network_def`.
        facts: about images and outputs, for the template.
        get: returns the object of an id of the configuration.
    """
    chain = content.get("preprocessing")
    steps = chain.get("transforms") if isinstance(chain, Mapping) else None
    if not isinstance(steps, list) or not steps:
        return None

    reader = steps[0]
    kind = target_name(reader)
    steps = [step for step in steps[1:] if target_name(step) != "CheckPatchd"]
    parts = {"inferer": inferer, "dataloader": content.get("dataloader")}
    if kind not in _READERS or is_of_medfl([steps, parts]):
        return None

    settings: Document = {}
    text = str([steps, parts, network])
    while named_ids := {
        key: value
        for key, value in content.items()
        if key not in (*settings, *_IN_TEMPLATE) and re.search(rf"@{key}\b", text)
    }:
        settings |= named_ids
        text = str(named_ids)

    arguments = _values(reader, get)
    size = arguments.get("size")
    sides = (size, size) if isinstance(size, int) else size
    reading = {
        "volumes": kind == "ReadVolumed",
        "size": sides and tuple(sides),
        "draft": bool(sides) and kind == "ReadPixelsd",
        "own_depth": 65535 if arguments.get("own_depth") is True else arguments.get("own_depth", 0),
    }
    template = templates().get_template("inference.yaml.j2")
    return template.render(
        **reading, **facts, **parts, settings=settings, steps=steps, network=network
    )


def _values(node: Config, get: Callable[[str], Any]) -> Document:
    """Return a component's arguments with references replaced by the values of their ids."""
    values = {}
    for name, value in node.items():
        is_reference = isinstance(value, str) and value.startswith("@")
        values[name] = get(value[1:]) if is_reference else value

    return values


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
    bare = within(node, ("_target_", *_OF_METHOD))
    bare["network"] = network_without_weights(bare["network"])
    return bare if bare.get("method") else bare["network"]
