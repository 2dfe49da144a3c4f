"""TensorBoard's files on a full disk: one line, in the place of its thread's traceback and of a later error."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest
from tensorboard.summary.writer.record_writer import RecordWriter

from medfl.core.errors import RunError
from medfl.runtimes.output.events import Events


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Events:
    """Events whose files are on a full disk."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", fail)
    return Events(tmp_path / "events", 0)


def test_a_full_disk_is_a_line(events: Events, capsys: pytest.CaptureFixture[str]) -> None:
    hook = threading.excepthook
    with pytest.raises(RunError, match=r"cannot write .*events: No space left on device; .* --resume"), events:
        events.add_image("a", np.zeros((2, 2)), 0, "HW")
    assert threading.excepthook == hook
    assert capsys.readouterr().err == ""


def test_it_hides_no_error_before_it(events: Events) -> None:
    events.__enter__().add_image("a", np.zeros((2, 2)), 0, "HW")
    events.__exit__(RunError)
