"""A headless Chromium that opens a page as a reader would, driven over a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE = 60.0  # seconds for an answer


def executable() -> str | None:
    """The browser, None without one; CHROMIUM names another."""
    return shutil.which(os.environ.get("CHROMIUM", "/usr/bin/chromium"))


@dataclass(frozen=True)
class Seen:
    """What a page was in a window of some width."""

    requests: list[str]
    complaints: list[str]
    pictures: list[int]
    width: int
    beyond: list[str]
    png: bytes


class Browser:
    """One page of a running browser."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._rest = commands, answers, b""
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = {
            "sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
        }
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer; what happens meanwhile is kept in `events`."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    def wait(self, event: str) -> None:
        """Wait until something happens."""
        while not any(one.get("method") == event for one in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript in the page."""
        answer = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, page: Path, width: int, *, phone: bool = False) -> Seen:
        """Open a file in a window of this width and look at it."""
        self.events.clear()
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": phone}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.wait("Page.loadEventFired")
        found = self.value(
            """(async () => {
              await document.fonts.ready;
              const inside = (e) => e.closest('.scroll') || e.closest('svg');
              const far = [...document.body.querySelectorAll('*')].filter(
                (e) => !inside(e) && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1);
              return {width: document.documentElement.scrollWidth,
                      pictures: [...document.images].map((i) => i.complete ? i.naturalWidth : 0),
                      beyond: far.map((e) => e.tagName + '.' + (e.getAttribute('class') || ''))};
            })()"""
        )
        height = self.ask("Page.getLayoutMetrics")["cssContentSize"]["height"]
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.ask(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )["data"]
        happened = [(one.get("method"), one.get("params", {})) for one in self.events]
        return Seen(
            [p["request"]["url"] for name, p in happened if name == "Network.requestWillBeSent"],
            [json.dumps(p) for name, p in happened if name in _COMPLAINTS],
            found["pictures"],
            found["width"],
            found["beyond"],
            base64.b64decode(shot),
        )

    def pdf(self) -> bytes:
        """Print the page that is open."""
        return base64.b64decode(
            self.ask("Page.printToPDF", printBackground=False, preferCSSPageSize=True)["data"]
        )

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser is gone"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


_COMPLAINTS = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


@contextmanager
def browser(profile: Path, more: Sequence[str] = ()) -> Iterator[Browser]:
    """Run a browser with a profile folder of its own, and end it."""
    found = executable()
    assert found is not None
    theirs, ours = _pipe()
    answers, speak = _pipe()

    def connect() -> None:  # the browser reads commands from descriptor 3 and answers on 4
        os.dup2(theirs, 3)
        os.dup2(speak, 4)

    process = subprocess.Popen(
        [found, *_QUIET, *more, f"--user-data-dir={profile}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=connect, pass_fds=(3, 4), start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    os.close(speak)
    try:
        page = Browser(ours, answers)
        yield page
        page._session = {}
        page.ask("Browser.close")
        process.wait(20)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(20)
        os.close(ours)
        os.close(answers)


def _pipe() -> tuple[int, int]:
    """Return a pipe whose ends are out of the way of descriptors 3 and 4."""
    read, write = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (read, write)]
    os.close(read)
    os.close(write)
    return high[0], high[1]
