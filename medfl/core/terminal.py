"""What a command says to a terminal, and what it hears: closed streams, SIGTERM."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import IO, Any

from medfl.core.tables import screen_width, wrap

Print = Callable[[str], object]
"""Takes a line for the user, as `print` does."""
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Controls, and what breaks lines, turns or hides in them; joiners are not: words of some languages have them."""


def visible(text: str) -> str:
    """Return a text without what would steer a terminal or a page: files of others name images, classes and sites."""
    return _STEERING.sub("?", text)


def mend_streams() -> None:
    """Open what was closed before Python began (`>&-`), and let stdout take any text in any locale."""
    # Else the next file that is opened gets the number of stdout, and prints land in it.
    while (handle := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(handle)
    sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")  # noqa: SIM115 (for good)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which batch systems, containers and service managers end a command."""


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` in the block, so that what the command has started ends with it."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    owner = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() == owner:
            raise Terminated
        signal.signal(number, signal.SIG_DFL)  # a forked process ends at once
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def flush(stream: IO[str]) -> None:
    """Flush a stream; where nobody reads it any more, or its disk is full, all that is written there goes nowhere."""
    try:
        stream.flush()
    except OSError:
        # Else Python complains once more when it closes the stream at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def bar(items: Any = None, total: int | None = None, *, shown: bool, **settings: Any) -> Any:
    """Return tqdm's progress bar on stderr, 80 columns wide where the terminal does not know its own width.

    Without `items` its `update` counts, up to `total`.
    """
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread beside forked workers
    with suppress(OSError, ValueError):  # no terminal
        if os.get_terminal_size(sys.stderr.fileno()).columns == 0:
            settings |= {"ncols": 80, "nrows": 24, "dynamic_ncols": False}

    return tqdm(items, total=total, disable=not shown, **{"leave": False, **settings})


def beside_bars() -> AbstractContextManager[None]:
    """Return a context in which lines can be printed on stderr: progress bars there are taken away, and shown again."""
    tqdm = sys.modules.get("tqdm")
    if tqdm:
        context: AbstractContextManager[None] = tqdm.tqdm.external_write_mode(file=sys.stderr)
        return context

    return nullcontext()


def definitions(named: Mapping[str, str], columns: int | None = None) -> list[str]:
    """Return names and their descriptions in two columns."""
    indent = max(map(len, named)) + 2
    lines = []
    for name, text in named.items():
        lines += hanging_indent(name.ljust(indent), text, columns)
    return lines


def wrap_to_terminal(text: str) -> list[str]:
    """Wrap a line at the terminal's width, further lines indented."""
    return wrap(text, shutil.get_terminal_size().columns, "", "  ") or [""]


def hanging_indent(label: str, text: str, columns: int | None = None) -> list[str]:
    """Wrap a text after a label, further lines indented by the label's length."""
    return wrap(text, columns, label, " " * len(label))


def wrap_docstring(text: str, columns: int | None = None) -> list[str]:
    """Return a docstring's lines; wide paragraphs are wrapped, aligned ones (equations) line by line."""
    lines = []
    for paragraph in textwrap.dedent(text).strip().split("\n\n"):
        originals = paragraph.split("\n")
        lines.append("")
        if max(map(len, originals)) <= (columns or screen_width()):
            lines += originals
        elif "   " in paragraph:
            for line in originals:
                lines += hanging_indent("", line, columns)
        else:
            lines += wrap(paragraph, columns)

    return lines[1:]
