"""A run's numbers as curves: TensorBoard events in the run folder, and other requested places (`tracking`)."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from medfl.core.arrays import Bytes
from medfl.core.documents import Document
from medfl.runtimes.output.tracking import Tracking, scalars
from medfl.storage.writing import writing


class Events:
    """TensorBoard event files of a run with `done` completed rounds, continued after a resume."""

    def __init__(self, path: Path, done: int, *trackers: Tracking) -> None:
        self.path = path
        self.done = done
        self.trackers = trackers

    def __enter__(self) -> Events:
        # `purge_step`: rounds after the last committed one are written again
        from torch.utils.tensorboard import SummaryWriter  # imported here because it takes a second

        self._writer: Any = SummaryWriter(
            str(self.path), purge_step=self.done + 1 if self.done else None
        )  # type: ignore[no-untyped-call]
        hook = threading.excepthook
        self._hook = hook

        def skip_writer(failed: threading.ExceptHookArgs) -> None:
            # an error in the writer's thread is raised by its next call
            if "Async" not in type(failed.thread).__name__:
                hook(failed)

        threading.excepthook = skip_writer

        for tracker in self.trackers:
            tracker.open(self.done)

        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # a disk error must not hide an error of the run itself
            with suppress(OSError) if kind else writing(self.path):
                self._writer.close()
        finally:
            threading.excepthook = self._hook

        for tracker in self.trackers:
            tracker.close(kind is None)

    def add_image(self, name: str, pixels: Bytes, step: int, dataformats: str) -> None:
        """Write a picture."""
        with writing(self.path):
            self._writer.add_image(name, pixels, step, dataformats=dataformats)

    def log(self, entry: Document) -> None:
        """Write a round's numbers."""
        numbers = scalars(entry)
        with writing(self.path):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, entry["round"])
        for tracker in self.trackers:
            tracker.log(entry["round"], numbers)
