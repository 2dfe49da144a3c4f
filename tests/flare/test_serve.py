"""What `medfl site serve` does with the process that it starts."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("psutil")  # comes with FLARE

import psutil

from medfl.core import terminal
from medfl.flare import serve
from tests.support import forked


@pytest.mark.skipif(
    sys.platform != "linux", reason="Linux tells a process that its parent has ended"
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_flare_s_process_ends_with_medfl(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "sub_start.sh").write_text(
        f"echo $$ > {tmp_path}/process\nexec sleep 600\n"
    )

    def run() -> int:
        with terminal.sigterm_as_ctrl_c():
            return serve.start(tmp_path)

    medfl, file, end = (
        forked.start(run, output=tmp_path / "printed"),
        tmp_path / "process",
        time.monotonic() + 60,
    )
    while not (file.exists() and file.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(medfl.pid or 0, number)
    medfl.join(60)
    assert medfl.exitcode
    while alive(int(file.read_text())) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(int(file.read_text()))


def alive(number: int) -> bool:
    """Tell whether a process runs; one that has ended may still be in the table."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
