"""What `medfl site serve` does with the process that it starts."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from medfl.core import terminal
from medfl.flare import serve
from tests.support import forked


def test_sigterm_ends_flare_s_process_too(tmp_path: Path) -> None:
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "sub_start.sh").write_text(f"echo $$ > {tmp_path}/number\nexec sleep 600\n")

    def run() -> int:
        with terminal.sigterm_as_ctrl_c():
            return serve.start(tmp_path)

    process, number, deadline = (
        forked.start(run, output=tmp_path / "printed"),
        tmp_path / "number",
        time.monotonic() + 60,
    )
    while not (number.exists() and number.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)
    assert process.exitcode
    assert not Path(f"/proc/{number.read_text().strip()}").exists()
