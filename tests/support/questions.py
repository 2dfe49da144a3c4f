"""Questions to teachers over the phantom of a shipped bundle."""

from __future__ import annotations

from pathlib import Path

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.core.task import Task
from medfl.data.prepared import Shard
from medfl.data.public import Public
from medfl.runs.teachers.questions import Questions, public_classes


def opened(
    name: str, folder: Path, per_class: int = 10, size: int = 24, **config: object
) -> Bundle:
    """Draw a phantom into a folder and open its bundle with images of a size, without augmentation."""
    if not folder.is_dir():
        datasets.write_phantom(name, folder, per_class=per_class, size=size)
    return Bundle(name, {"dataset_dir": str(folder), "train#random_transforms": [], **config})


def asked(bundle: Bundle, section: str = "test", count: int | None = None) -> Questions:
    """Ask about the last `count` items of a section, in reverse order."""
    indices = tuple(reversed(range(len(bundle.items(section)))))[:count]
    shard = Shard.of(bundle.prepared(section), indices)
    public = Public(bundle.name, shard, Task(bundle.task, public_classes(bundle)))
    return Questions(bundle, section, indices, tuple(shard.ids), "5" * 64, public)
