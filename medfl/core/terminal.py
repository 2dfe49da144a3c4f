"""Terminal output and signals of a command: closed streams, SIGTERM."""

from __future__ import annotations

import codecs
import io
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import IO, Any

from medfl.core.tables import screen_width, wrap
from medfl.core.untrusted import STEERING

Print = Callable[[str], object]
"""Prints a line for the user, like `print`."""
_BAR = re.compile(f"(\r|\x1b\\[A)|{STEERING.pattern}")
"""What steers a terminal; group 1 is what a progress bar moves by."""


def pass_on(source: int, stream: int) -> None:
    """Copy another process's output to a stream until it ends: escaped, with progress bars."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with suppress(OSError):  # the end of a terminal, or nobody reads any more
        while piece := os.read(source, 1 << 16):
            text = _BAR.sub(lambda match: match[1] or "?", decoder.decode(piece))
            left = text.encode()
            while left:
                left = left[os.write(stream, left) :]

    os.close(source)


_warned = set[str]()


def warn_plainly(message: object, *_: object) -> str:
    """Return a library's warning as a line without its place in the installation, and "" the next time."""
    text = f"warning: {' '.join(str(message).split())}\n"
    if text in _warned:
        return ""

    _warned.add(text)
    return text


def mend_streams() -> None:
    """Open streams that were closed before Python started (`>&-`), and let stdout accept any text in any locale."""
    # Otherwise the next opened file gets the number of stdout, and prints end up in it.
    while (handle := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(handle)
    sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")  # noqa: SIM115 (for good)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class Terminated(KeyboardInterrupt):
    """SIGTERM, with which batch systems, containers and service managers end a command."""


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Make SIGTERM raise `Terminated` in the block, so that everything the command has started ends with it."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    take_sigterm()
    hook = sys.unraisablehook
    sys.unraisablehook = _send_again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _send_again(dropped: sys.UnraisableHookArgs) -> None:
    """Send a signal again whose exception Python drops, as around a fork."""
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return

    number = signal.SIGTERM if dropped.exc_type is Terminated else signal.SIGINT
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()


def take_sigterm() -> None:
    """Let SIGTERM raise `Terminated` in this process; one that it forks ends at once, unless it calls this too."""
    owner = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() == owner:
            raise Terminated
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)


def flush(stream: IO[str]) -> None:
    """Flush a stream; if nobody reads it any more, or its disk is full, discard all further output to it."""
    try:
        stream.flush()
    except OSError:
        # Otherwise Python complains again when it closes the stream at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def bar(items: Any = None, total: int | None = None, *, shown: bool, **settings: Any) -> Any:
    """Return tqdm's progress bar on stderr, 80 columns wide if the terminal does not report its width.

    Without `items` its `update` counts, up to `total`.
    """
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread beside forked workers
    with suppress(OSError, ValueError):  # no terminal
        if os.get_terminal_size(sys.stderr.fileno()).columns == 0:
            settings |= {"ncols": 80, "nrows": 24, "dynamic_ncols": False}

    return tqdm(items, total=total, disable=not shown, **{"leave": False, **settings})


def beside_bars() -> AbstractContextManager[None]:
    """Return a context for printing lines on stderr: progress bars there are hidden, then shown again."""
    tqdm = sys.modules.get("tqdm")
    if tqdm:
        context: AbstractContextManager[None] = tqdm.tqdm.external_write_mode(file=sys.stderr)
        return context

    return nullcontext()


def definitions(named: Mapping[str, str]) -> list[str]:
    """Return names and their descriptions in two columns."""
    indent = max(map(len, named)) + 2
    lines = []
    for name, text in named.items():
        lines += hanging_indent(name.ljust(indent), text)
    return lines


def hanging_indent(label: str, text: str) -> list[str]:
    """Wrap a text after a label, with further lines indented by the label's length."""
    return wrap(text, label, " " * len(label))


def wrap_docstring(text: str) -> list[str]:
    """Return a docstring's lines; wide paragraphs are wrapped, aligned ones (equations) line by line."""
    lines = []
    for paragraph in textwrap.dedent(text).strip().split("\n\n"):
        originals = paragraph.split("\n")
        lines.append("")
        if max(map(len, originals)) <= screen_width():
            lines += originals
        elif "   " in paragraph:
            for line in originals:
                lines += wrap(line)
        else:
            lines += wrap(paragraph)

    return lines[1:]
