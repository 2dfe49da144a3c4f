"""What a terminal shows while something runs: bars on one that does not know its width, lines that stay beside them."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import sys
import termios
import time

import pytest

from medfl.core.terminal import Terminated, sigterm_as_ctrl_c

PROGRAM = """
import sys
from medfl.cli.parser import log
from medfl.core import terminal
for number in terminal.bar(range(3), desc="reading", unit="image", mininterval=0, shown=True):
    log(f"round {number}")
"""


@pytest.mark.parametrize("columns", [0, 70])
def test_bars_and_lines_on_a_terminal(columns: int) -> None:
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM])
    told = b""
    try:
        while part := os.read(terminal, 4096):
            told += part
    except OSError:  # the program has ended
        pass
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    shown = [line.rstrip() for line in told.decode().replace("\r", "\n").splitlines()]
    assert [line for line in shown if line.startswith("round")] == ["round 0", "round 1", "round 2"]
    assert any(line.startswith("reading: ") and "1/3" in line for line in shown)


class Ended:
    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_whose_exception_python_drops_comes_again(number: signal.Signals) -> None:
    """As in what is called around a fork, when a run of a grid starts: there Python prints and forgets exceptions."""

    def command() -> None:
        with sigterm_as_ctrl_c():
            Ended(number)
            time.sleep(10)

    with pytest.raises(KeyboardInterrupt) as raised:
        command()

    assert isinstance(raised.value, Terminated) == (number == signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
