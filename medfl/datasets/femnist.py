"""FEMNIST: handwritten digits and letters by writer, in the JSON files that LEAF makes of NIST Special Database 19."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path
from typing import Any

from medfl.core.errors import InputError
from medfl.core.untrusted import open_plain
from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import Stack, draw_stacks
from medfl.datasets.readers.splitting import Record, WholeCentres, by_group
from medfl.datasets.readers.tables import Layout, Table

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
KINDS = ("digit",) * 10 + ("uppercase letter",) * 26 + ("lowercase letter",) * 26
WRITERS = 60
# A string, or a list without lists and texts in it.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|\[[^][{}"]*\]')
_SPLIT = re.compile(r"all_data_\d+(_[a-z]+_\d+)*(_(train|test)_\d+)?\.json")


def _files(folder: Path) -> list[Path]:
    for root in (folder, folder / "all_data", folder / "data" / "all_data"):
        if files := _numbered(root):
            return files

    for root in (folder, folder / "data"):
        if files := [*_numbered(root / "train"), *_numbered(root / "test")]:
            return files

    return []


def _numbered(folder: Path) -> list[Path]:
    """Return the files `all_data_<number>….json`, 2 before 10."""
    files = [path for path in folder.glob("all_data_*.json") if _SPLIT.fullmatch(path.name)]
    return sorted(files, key=lambda path: list(map(int, re.findall(r"\d+", path.name))))


def skim(text: bytes) -> Any:
    """Read JSON, but return its innermost lists as slices of the text.

    A LEAF file has millions of numbers, which are skipped without being parsed.

    Raises:
        ValueError: the text is truncated or is not JSON.
    """
    spans = []  # of the lists, in the place of which JSON's reader is given NaN

    def stand_in(token: re.Match[bytes]) -> bytes:
        if token[0][:1] == b'"':
            return token[0]

        spans.append(slice(*token.span()))
        return b"NaN"

    outline = _TOKEN.sub(stand_in, text)
    in_order = iter(spans)
    return json.loads(outline, parse_constant=lambda _: next(in_order))


def _read(folder: Path) -> Table:
    table = Table()
    rows = dict[str, int]()
    for path in _files(folder):
        try:
            with open_plain(path) as file:
                text = file.read()

            _add(table, rows, path, text, skim(text))
        except (OSError, ValueError, KeyError, TypeError, StopIteration, AttributeError) as error:
            if isinstance(error, KeyError):
                reason = f"no key {error}"
            else:
                reason = str(error) or "it is cut off"

            raise InputError(
                f"{path} cannot be read ({reason})",
                "LEAF's JSON: users, num_samples, user_data -> {writer: {x: lists of pixels, y: labels}}",
                "make it anew with LEAF's preprocess.sh, or copy it again",
            ) from error

    return table


def _add(table: Table, rows: dict[str, int], path: Path, text: bytes, content: Any) -> None:
    """Add the images of one file; a writer who already has some continues from there."""
    users = content["users"]
    data = content["user_data"]
    sizes = json.loads(text[content["num_samples"]])
    if not len(users) == len(sizes) == len(data):
        counts = (
            f"{len(users)} users, {len(sizes)} num_samples and {len(data)} entries in user_data"
        )
        table.problems.append(f"{path} has {counts}")

    for writer, size in zip(users, sizes, strict=False):
        images = data[writer]["x"]
        labels = json.loads(text[data[writer]["y"]])
        images = [] if isinstance(images, slice) else images  # an empty list is an innermost one
        if not len(images) == len(labels) == size:
            counts = f"{len(images)} images, {len(labels)} labels, num_samples {size}"
            table.problems.append(f"{path}: {writer} has {counts}")

        for span, label in zip(images, labels, strict=False):
            row = rows[writer] = rows.get(writer, -1) + 1
            if type(label) is not int or not 0 <= label < len(CLASSES):
                table.problems.append(
                    f"{path}: {writer} has label {label!r}, the labels are 0 to {len(CLASSES) - 1}"
                )
                continue

            key = f"{writer}/{row:04d}"
            table.records.append(
                Record(f"{path}!{span.start}:{span.stop}", label, key, writer, key)
            )


def _write(folder: Path, stacks: dict[str, Stack]) -> None:
    """Write a phantom's images, dark on white, writer by writer."""
    data = {}
    for writer, (images, labels) in stacks.items():
        pixels = 1 - images.reshape(len(images), -1) / 255
        data[writer] = {"x": pixels.tolist(), "y": labels.tolist()}

    content = {
        "users": list(data),
        "num_samples": [len(entry["y"]) for entry in data.values()],
        "user_data": data,
    }
    target = folder / "data" / "all_data"
    target.mkdir(parents=True)
    (target / "all_data_0.json").write_text(json.dumps(content), encoding="utf-8")


DATASET = DataSet(
    **sheet("femnist"),
    classes=CLASSES,
    concepts=tuple(f"{kind} {text}" for kind, text in zip(KINDS, CLASSES, strict=True)),
    layouts=(
        Layout(
            "LEAF's JSON files all_data_<number>.json (users, num_samples, user_data), in the folder, its all_data/ or "
            "data/all_data/; or both of [data/]train/ and [data/]test/",
            ("writers", "seeded"),
            _files,
            _read,
        ),
    ),
    rules={
        "writers": WholeCentres((35, 5, 10), 150, "femnist"),
        "seeded": by_group("femnist", at_centres=False),
    },
    draw=draw_stacks(
        len(CLASSES), 1, _write, part=lambda case: f"f{case.centre:04d}_90", centres=WRITERS
    ),
)
