"""TensorBoard's files on a full disk: one line, in the place of its thread's traceback and of a later error."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tensorboard.summary.writer.record_writer import RecordWriter

from medfl.core.errors import RunError
from medfl.runtimes.output.events import Events

TOLD = r"cannot write .*events: no space left on the disk; .* --resume"


@pytest.fixture
def events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Events]:
    """Events, and nothing said or left."""
    hook = threading.excepthook
    yield Events(tmp_path / "events", 0)
    assert threading.excepthook == hook
    assert capsys.readouterr().err == ""


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", fail)


def test_a_full_disk_is_a_line(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    events.__enter__()
    fill(monkeypatch)
    events.add_image("a", np.zeros((2, 2)), 0, "HW")
    with pytest.raises(RunError, match=TOLD):
        events.__exit__(None)


def test_it_hides_no_error_before_it(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    events.__enter__()
    fill(monkeypatch)
    events.add_image("a", np.zeros((2, 2)), 0, "HW")
    events.__exit__(RunError)
