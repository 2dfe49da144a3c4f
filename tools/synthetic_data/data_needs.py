"""What a bundle's data are to be like, read from its metadata and from the components that its data pass."""

from __future__ import annotations

import ast
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from medfl.bundle.configuration import Configuration, components, target_name
from medfl.bundle.engines import find_evaluator
from medfl.core.errors import InputError
from tools.synthetic_data import shapes
from tools.synthetic_data.missing import missing_names
from tools.synthetic_data.requested_files import CASE, DrawnLayout, Table
from tools.synthetic_data.shapes import Need

_LOADER = r"\w*(Load|Read)\w*(d|D|Dict)"
_CROPS = r"\w*(Crop|Patch|GridSplit)\w*"
_POSITION = r"loc|pos|coord|cent(er|re|roid)|point"
_SIZES = ("spatial_size", "roi_size", "patch_size", "region_size", "size")
_LARGEST, _MOST_VOXELS, _MOST_VALUES = 1024, 2**25, 254
_BOXES = [[[8.0, 8.0, 8.0, 8.0, 8.0, 8.0]]]
Component = tuple[str, Mapping[str, Any]]


class DataNeeds:
    """What can be known of a bundle's data before there are any.

    Attributes:
        config: what is asked; another configuration of the bundle may take its place.
        loaded: keys of an item that stand for files.
        channels: of the network's input, 0 where metadata do not say.
        labels: what a class label may be.
        classes: their names in metadata, or numbered ones.
        names: other lists of texts in the configuration that may name classes.
    """

    def __init__(self, config: Configuration, trainer: str, metadata: Mapping[str, Any]) -> None:
        """Read the components that the data sets need; nothing that needs data is evaluated."""
        self.config, self._trainer, self._contents = config, trainer, dict[str, Any]()
        for section in ("train", "validate"):
            self._contents |= config.dependencies_of(self.dataset(section))
        self._parts = list(components(self._contents))
        formats: Mapping[str, Any] = metadata.get("network_data_format") or {}
        inputs: Mapping[str, Any] = formats.get("inputs") or {}
        outputs: Mapping[str, Any] = formats.get("outputs") or {}
        self._image = dict[str, Any](inputs.get("image") or next(iter(inputs.values()), {}))
        self._pred = dict[str, Any](outputs.get("pred") or next(iter(outputs.values()), {}))
        self.channels = int(self._image.get("num_channels") or 0)
        classes = [str(name) for name in self._pred.get("channel_def", {}).values()]
        outputs_told = max(int(self._pred.get("num_channels") or 0), len(classes))
        self._outputs = min(outputs_told or self._of_network("num_classes") or 2, _MOST_VALUES)
        count, loss = max(2, self._outputs), config.raw(f"{trainer}#loss_function")[1]
        self.loaded = {key for part in self._of(_LOADER) for key in self._keys(part)}
        rows = [
            [float(at == index) for at in range(self._outputs)] for index in range(self._outputs)
        ]
        one_hot = isinstance(loss, Mapping) and "BCE" in target_name(loss)
        self.labels: Sequence[Any] = (
            (rows if len(rows) > 1 else [[0.0], [1.0]]) if one_hot else range(count)
        )
        self.classes = (
            classes if len(classes) == count else [f"class_{index}" for index in range(count)]
        )
        keys = {"image", *self.loaded}
        lists = [names for names in self._written() if len(names) > 1 and keys.isdisjoint(names)]
        self.names = [names for names in lists if not any(map(shapes.is_mask, names))]

    def dataset(self, section: str) -> str:
        """Return the id of a section's data set, or of the loader that holds it."""
        engine = self._trainer if section == "train" else find_evaluator(self.config)
        loader = self.config.raw(
            f"{engine}#{'train' if section == 'train' else 'val'}_data_loader"
        )[0]
        return self.config.within(loader, "dataset")

    def _of_network(self, name: str, kind: type = int) -> Any:
        """Return a network's argument of this type that is written as it is, an empty one if there is none."""
        parts = components(self.config.dependencies_of(f"{self._trainer}#network"))
        return next(
            (value for _, node in parts if isinstance(value := node.get(name), kind)), kind()
        )

    def _of(self, name: str) -> list[Component]:
        return [(id_, node) for id_, node in self._parts if re.fullmatch(name, target_name(node))]

    def _argument(self, part: Component, name: str) -> Any:
        """Return an argument of a component, evaluated; None where it has none or that needs data."""
        try:
            return self.config.evaluated(f"{part[0]}#{name}") if name in part[1] else None
        except InputError:
            return None

    def _keys(self, part: Component) -> list[str]:
        keys = self._argument(part, "keys") or []
        return [str(key) for key in (keys if isinstance(keys, list | tuple) else [keys])]

    # Images

    def image_forms(self, size: int | None) -> list[tuple[Need, int]]:
        """Return what images may be like and in how many files each is, the likeliest first; `size` is their side."""
        ends = [end.get("spatial_shape") or [] for end in (self._image, self._pred)]
        extents = [
            [int(n) if str(n).isdecimal() else n for n in shape]
            for shape in ends
            if len(shape) in (2, 3)
        ]
        dims = len(extents[0]) if extents else self._of_network("spatial_dims") or 3
        sides = self._of_network("in_shape", list)[1:] or (
            extents[0] if extents and dims == 2 else []
        )
        is_fixed = len(sides) == dims and all(
            isinstance(side, int) and 0 < side <= _LARGEST for side in sides
        )
        small = [size] * dims if size else sides if is_fixed else [64 if dims == 2 else 32] * dims
        firsts = self._of(r"EnsureChannelFirst(d|D|Dict)")
        last = bool(firsts) and all(node.get("channel_dim") == -1 for _, node in firsts)
        need = Need((), first=not firsts, last=last, **self._looks(dims))
        colours, channels = 3 if dims == 2 and self.channels >= 3 else 1, max(1, self.channels)
        files = [(colours, 1), *([(1, channels)] if need.first else []), (channels, 1)]
        self._shape = small
        large = [
            max(sides)
            for sides in zip(small, [0] * dims if size else self._crops(dims), strict=True)
        ]
        values = [need.values, *([(0,)] if self._points else [])]
        if need.values == (0, 1) and dims == 2:  # in many pictures the one value is the whitest
            values.append((0, 255))
            scaling = self._of(r"ScaleIntensity(Range)?(d|D|Dict)")
            scaled = any(shapes.is_mask(key) for part in scaling for key in self._keys(part))
            values.sort(reverse=scaled)
        forms = dict.fromkeys(
            (replace(need, shape=tuple(shape), channels=of_file, values=marks), number)
            for marks, shape, (of_file, number) in product(values, [small, large], files)
            if math.prod(shape) * of_file * number <= _MOST_VOXELS
        )
        if not forms:
            raise ValueError(f"images of {small} with {self.channels} channels are not tiny")
        return list(forms)

    @property
    def _points(self) -> int:
        """How many points the network tells, 0 if it tells none."""
        return (
            int(self._pred["spatial_shape"][-1]) if "points" in str(self._pred.get("format")) else 0
        )

    def _looks(self, dims: int) -> dict[str, Any]:
        output_format = f"{self._pred.get('type', '')} {self._pred.get('format', '')}".lower()
        is_class = "class" in output_format or "probabilit" in output_format
        values: Sequence[int] = range(max(2, self._outputs) + is_class)
        if self._of(r"ConvertToMultiChannelBasedOnBratsClasses(d|D|Dict)"):
            values = (0, 1, 2, 4)
        elif self._points:
            values = range(self._points + 1)
        spacings = [self._argument(part, "pixdim") for part in self._of(r"Spacing(d|D|Dict)")]
        pixdim = next(
            (p for p in spacings if isinstance(p, list) and len(p) == dims and min(p) > 0), [1] * 3
        )
        scalings = self._of(r"ScaleIntensityRange(d|D|Dict)")
        ranges = [
            (self._argument(part, "a_min"), self._argument(part, "a_max")) for part in scalings
        ]
        ordered = (
            (float(low), float(high))
            for low, high in ranges
            if None not in (low, high) and low < high
        )
        limits = next(ordered, (0.0, 255.0))
        return {
            "values": tuple(values),
            "one_value": is_class,
            "pixdim": tuple(map(float, pixdim)),
            "limits": limits,
        }

    def _crops(self, dims: int) -> list[int]:
        """Return the largest size, side by side, that a transform cuts out of an image."""
        sides = [1] * dims
        for value in (self._argument(part, name) for part in self._of(_CROPS) for name in _SIZES):
            size = [value] * dims if isinstance(value, int) else value
            if (
                isinstance(size, list | tuple)
                and len(size) == dims
                and all(isinstance(side, int) for side in size)
            ):
                sides = [min(max(pair), _LARGEST) for pair in zip(sides, size, strict=True)]
        return sides

    # Lists

    def table(self, path: Path) -> Table:
        """Return a data list as it is first tried."""
        fields: dict[Any, Any] = {}
        for part in self._of("CSVDataset"):
            if Path(str(self._argument(part, "src"))) == path:
                groups = part[1].get("col_groups") or {
                    name: [name] for name in part[1].get("col_names") or []
                }
                for key, columns in groups.items():
                    values = (
                        [max(self._crops(2)) // 2] if re.search(_POSITION, str(key)) else range(2)
                    )
                    cells = None if key in {"image", *self.loaded} else values
                    fields |= dict.fromkeys(
                        columns if isinstance(columns, list) else [columns], cells
                    )
        folds = ["fold"] if any("datafold_read" in text for text in self._expressions()) else []
        names = (
            ["case"]
            if path.suffix != ".json"
            else [*dict.fromkeys([*sorted(self.loaded), "label", *folds])]
        )
        return Table(fields or {name: self.values(name) for name in names})

    def values(self, name: str, of_item: bool = False) -> Sequence[Any] | None:
        """Return the values of a field, None where it is a file; one that transforms ask an item for is a number."""
        if name == "fold":
            return range(2)
        if "box" in name.lower():
            return _BOXES
        if of_item and name not in {"label", *self.loaded}:
            return [[side // 2 for side in self._shape]] if re.search(_POSITION, name) else [1]
        compared = sorted(
            {str(value) for text in self._expressions() for value in _compared(text, name)}
        )
        if compared:
            return compared if len(compared) > 1 else [*compared * 3, "other"]
        return self.labels if name == "label" and name not in self.loaded else None

    def arrays(self, path: Path) -> dict[str, str]:
        """Return the arrays that components take from an npz file, and the keys that they are in an item."""
        parts = [
            p
            for p in self._of("NPZDictItemDataset")
            if Path(str(self._argument(p, "npzfile"))) == path
        ]
        return {str(name): str(key) for _, node in parts for name, key in node["keys"].items()}

    def paths(self, section: str) -> Iterator[tuple[str, Path]]:
        """Yield the ids that a section's data need and that stand for a path or another text, and it as a path."""
        for key, node in self.config.dependencies_of(self.dataset(section)).items():
            if isinstance(node, str) and key != "bundle_root":
                try:
                    value = self.config.evaluated(key.replace("::", "#"))
                except InputError:
                    continue
                if isinstance(value, str | Path) and str(value):
                    yield key.replace("::", "#"), Path(os.path.abspath(value))

    def correct(self, layout: DrawnLayout, cause: BaseException, table: Table | None) -> None:
        """Give data lists the sections and fields that an error misses, or other values where theirs do not serve."""
        text = str(cause)
        if wrong := re.search(r"([^/\s'\"]+)/case_\d+", text):
            for fields in (
                each.fields for each in layout.tables.values() if wrong[1] in each.fields
            ):
                by_name = (isinstance(cause, KeyError) or "is not in list" in text) and self.names
                fields[wrong[1]] = self.names.pop(0) if by_name else self.labels
        elif CASE.search(text) or any(f"'{name}'" in text for name in layout.classes):
            layout.classes = self.names.pop(0) if self.names else layout.classes
        elif isinstance(cause, TypeError | AttributeError) and "list" in text and table is not None:
            table.sections = table.sections or []
        else:
            for name in missing_names(cause):
                self._add_name(layout, name, text, of_item=table is None)

    def _add_name(self, layout: DrawnLayout, name: str, text: str, of_item: bool) -> None:
        for names in layout.arrays.values():
            names.setdefault(name, name)
        for table in layout.tables.values():
            if "property" in text:
                table.facts = [*dict.fromkeys([*table.facts, name])]
            elif "Data list" in text or (table.sections is not None and name not in table.sections):
                table.sections = [*dict.fromkeys([*(table.sections or []), name])]
            elif name not in table.fields:
                table.fields[name] = self.values(name, of_item)
                if "box" in name and "label" in table.fields:
                    table.fields["label"] = [[0]]  # one for each box

    # What is written in expressions

    def _expressions(self) -> Iterator[str]:
        todo: list[Any] = list(self._contents.values())
        while todo:
            node = todo.pop()
            if isinstance(node, str) and node.startswith("$"):
                yield re.sub(r"@[\w:#]+", "_reference", node[1:])
            elif isinstance(node, Mapping | list):
                todo += node.values() if isinstance(node, Mapping) else node

    def _written(self) -> Iterator[list[str]]:
        """Yield lists of texts that may name classes."""
        for node in (node for text in self._expressions() for node in _nodes(text)):
            parts = (
                node.keys
                if isinstance(node, ast.Dict)
                else node.elts
                if isinstance(node, ast.List)
                else []
            )
            yield [
                part.value
                for part in parts
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
        for content in self._contents.values():
            yield (
                [part for part in content if isinstance(part, str)]
                if isinstance(content, list | Mapping)
                else []
            )


def _nodes(text: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except SyntaxError:  # a reference where only a name may stand
        return []


def _compared(text: str, name: str) -> Iterator[Any]:
    """Yield the constants with which an expression compares a field of this name."""
    for node in _nodes(text):
        if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith(
            (f"[{name!r}]", f".{name}")
        ):
            for other in node.comparators:
                parts = other.elts if isinstance(other, ast.List | ast.Tuple | ast.Set) else [other]
                yield from (part.value for part in parts if isinstance(part, ast.Constant))
