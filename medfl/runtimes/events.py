"""A run's numbers as TensorBoard events."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Events:
    """TensorBoard event files of a run of which `done` rounds are done, continued after a resume."""

    def __init__(self, path: Path, done: int) -> None:
        """Point at the folder of the files."""
        self.path, self.done = path, done

    def __enter__(self) -> Any:
        """Open the files."""
        from torch.utils.tensorboard import SummaryWriter  # imports for a second

        self.writer: Any = SummaryWriter(str(self.path), purge_step=self.done + 1 if self.done else None)  # type: ignore[no-untyped-call]
        return self.writer

    def __exit__(self, *_: object) -> None:
        """Close them."""
        self.writer.close()


def log(events: Any, entry: Mapping[str, Any]) -> None:
    """Write a round's numbers as TensorBoard scalars."""
    step = entry["round"]
    events.add_scalar("train/loss", entry["train_loss"], step)
    for group in ("val_global", "val_personal"):
        for metric, value in (entry[group] or {}).items():
            events.add_scalar(f"{group}/{metric}", value, step)
    for name, value in entry.get("observed", {}).items():
        events.add_scalar(f"observed/{name}", value, step)
    for name in ("bytes_up", "bytes_down", "seconds"):
        events.add_scalar(f"cost/{name}", entry[name], step)
