"""Fetch a data set: show its licence first, resume broken transfers, and verify each file before it gets its name.

A file under way is `<name>.part`, with the server's version mark in `<name>.part.tag`; one that fails its checksum is
kept as `<name>.part.bad` and never read. Archives are left packed, but for .tar files, which nothing here reads.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

from medfl.core import InputError, RunError, refusing, terminal
from medfl.datasets.base import DataSet, Download, get

ATTEMPTS = 4  # each after a longer pause
TIMEOUT = 30.0  # seconds without a byte
_CHUNK = 1 << 18  # bytes
_SPARE = 64 << 20  # bytes left free on the disk
_NOT_WORTH_RETRYING = range(400, 429)  # 429 asks for patience, and a server recovers from 500 on


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


def fetch(
    dataset: str | DataSet,
    folder: str | Path,
    *,
    progress: bool = True,
    show: Callable[[str], None] = _to_stderr,
    pause: float = 1.0,
) -> tuple[Path, ...]:
    """Download the files of a data set into `folder` and return their paths; files already there and intact are kept.

    Args:
        dataset: a name, or the data set itself.
        folder: made if missing.
        progress: draw a bar on stderr.
        show: takes the lines for the user: licence and source before, digests without a published checksum after.
        pause: seconds before the second attempt of a broken transfer; each further attempt waits that much longer.

    Raises:
        InputError: the licence or the host allows no direct download (the line says what to do by hand), or a file that
            is already there is not the published one.
        RunError: no connection, no such file, too little space, a transfer that keeps breaking, a wrong checksum.
    """
    data = get(dataset) if isinstance(dataset, str) else dataset
    folder = Path(folder)
    if not data.downloads:
        raise InputError(
            f"{data.name} cannot be fetched from here",
            data.download_note or f"it is at {data.source}",
            f"put it into {folder}",
        )

    about = (f"licence: {data.licence}", f"source: {data.source}", f"cite: {data.citation}")
    for line in filter(None, (data.title, *about, data.download_note)):
        show(line)

    with refusing(
        f"folder {folder} cannot be made", "a folder you may write to", "give a writable folder"
    ):
        folder.mkdir(parents=True, exist_ok=True)

    paths = tuple(_Transfer(item, folder, progress, show, pause).run() for item in data.downloads)
    for archive in (path for path in paths if path.suffix == ".tar"):
        unpack(archive, folder)

    return paths


def unpack(path: Path, folder: Path) -> None:
    """Unpack the files of a .tar file; RunError if it is damaged, names one elsewhere, or there is no space."""
    try:
        with tarfile.open(path) as archive:
            # Not by extractall, whose check of names came with Python 3.10.12 and 3.11.4.
            for member in archive:
                target = (folder / member.name).resolve()
                if not target.is_relative_to(folder.resolve()):
                    raise tarfile.TarError(f"{member.name!r} lies elsewhere")
                if (member.isfile() or member.islnk()) and (content := archive.extractfile(member)):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("wb") as file:
                        shutil.copyfileobj(content, file)
    except (OSError, KeyError, tarfile.TarError) as error:
        raise RunError(
            f"{path} cannot be unpacked ({error}); free some space, or unpack it by hand"
        ) from error


def digest(path: Path, algorithm: str) -> str:
    """Return the hexadecimal digest of a file; `algorithm` as in `hashlib`."""
    value = hashlib.new(algorithm)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value.update(chunk)
    return value.hexdigest()


class _Broken(Exception):
    """A transfer stopped before the end; another attempt may go on from there."""


@dataclass(frozen=True)
class _Transfer:
    """One file on its way into `folder`."""

    item: Download
    folder: Path
    progress: bool
    show: Callable[[str], None]
    pause: float

    @property
    def target(self) -> Path:
        return self.folder / self.item.file

    @property
    def part(self) -> Path:
        return self.folder / f"{self.item.file}.part"

    @property
    def tag(self) -> Path:
        return self.folder / f"{self.item.file}.part.tag"

    def run(self) -> Path:
        """Fetch, verify, and only then give the file its name."""
        if self.target.exists():
            self.accept_existing()
            return self.target

        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.receive()
                break
            except (_Broken, TimeoutError, ConnectionError, HTTPException) as error:
                if attempt == ATTEMPTS:
                    raise RunError(
                        f"{self.item.url}: the transfer broke {ATTEMPTS} times ({str(error) or type(error).__name__}); "
                        f"{self.received} bytes are kept in {self.part}; run the same command again to go on from there"
                    ) from error

                time.sleep(self.pause * attempt)
            except OSError as error:
                raise RunError(
                    f"{self.part} cannot be written ({error.strerror}); free some space, or give another --out"
                ) from error

        # Until its checksum is verified a file keeps the name of a part.
        self.verify()
        self.part.replace(self.target)
        self.tag.unlink(missing_ok=True)
        return self.target

    @property
    def received(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def accept_existing(self) -> None:
        """Keep a file that is there if it is the published one (or nothing is published to compare it with)."""
        if wrong := self.difference(self.target):
            raise InputError(
                f"{self.target} is already there, {wrong}",
                "the published file",
                "move it away and fetch again",
            )
        self.show(f"{self.target} is already there")

    def difference(self, path: Path) -> str:
        """Return in words how a file differs from the published one, "" if it does not."""
        size = path.stat().st_size
        if self.item.bytes is not None and size != self.item.bytes:
            return f"with {size} bytes instead of {self.item.bytes}"

        if self.item.digest is not None:
            algorithm, _, expected = self.item.digest.partition(":")
            if (actual := digest(path, algorithm)) != expected.lower():
                return f"with {algorithm} {actual} instead of {expected}"

        return ""

    def verify(self) -> None:
        """Put a part file aside that is not the published file, and raise a RunError."""
        if wrong := self.difference(self.part):
            bad = self.part.replace(self.folder / f"{self.item.file}.part.bad")
            self.tag.unlink(missing_ok=True)
            raise RunError(
                f"{self.item.url} arrived damaged or is another file: {self.item.file} came {wrong}; it was put aside "
                f"as {bad} and is not used; fetch again, or compare with the publisher's page"
            )

        if self.item.digest is None:
            self.show(
                f"no published checksum for {self.item.file}: sha256 of what arrived is {digest(self.part, 'sha256')}"
            )

    def receive(self) -> None:
        """Receive what is missing into the part file; return when it is complete.

        Raises:
            _Broken: the connection ended early.
            RunError: another attempt would not help.
        """
        with self.open(self.resumable()) as response:
            start = self.start_of(response)
            length = response.headers.get("Content-Length")
            # Content-Length counts the bytes that are still to come.
            total = start + int(length) if length is not None else self.item.bytes
            self.check_space((total or 0) - start)
            self.remember_version(response)

            with (
                self.part.open("ab" if start else "wb") as file,
                terminal.bar(
                    total=total,
                    initial=start,
                    desc=self.item.file,
                    unit="B",
                    unit_scale=True,
                    shown=self.progress,
                ) as bar,
            ):
                while chunk := response.read(_CHUNK):
                    file.write(chunk)
                    bar.update(len(chunk))

        if total is not None and self.received < total:
            raise _Broken(f"{self.received} of {total} bytes arrived")

    def resumable(self) -> int:
        """Return the byte from which to resume; 0 if nothing tells whether the server's file is still the same."""
        if self.tag.exists() or self.item.digest is not None:
            return self.received

        return 0

    def open(self, start: int) -> HTTPResponse:
        """Ask for the file from byte `start` on."""
        request = urllib.request.Request(
            self.item.url, headers={"User-Agent": "medfl", "Accept-Encoding": "identity"}
        )
        if start:
            request.add_header("Range", f"bytes={start}-")
            if self.tag.exists():
                request.add_header("If-Range", self.tag.read_text())

        by_hand = f"download it elsewhere and put it into {self.folder} as {self.item.file}"
        try:
            response: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            error.close()
            # What is there is not the beginning of the server's file.
            if error.code == 416 and start:
                self.part.unlink(missing_ok=True)
                return self.open(0)

            if error.code in _NOT_WORTH_RETRYING:
                word = error.reason
                if error.code in (404, 410):
                    word = "there is no such file"

                raise RunError(f"{self.item.url}: {word} (HTTP {error.code}); {by_hand}") from error

            raise _Broken(f"HTTP {error.code} {error.reason}") from error
        except urllib.error.URLError as error:
            host = urlsplit(self.item.url).hostname
            raise RunError(f"no connection to host {host} ({error.reason}); {by_hand}") from error

        return response

    def start_of(self, response: HTTPResponse) -> int:
        """Return the first byte that the server sends: the requested one, or 0 if it sends the whole file."""
        if response.status != 206:
            return 0

        unit, _, span = response.headers.get("Content-Range", "").partition(" ")
        first = span.partition("-")[0]
        if unit != "bytes" or not first.isdigit() or int(first) != self.received:
            self.part.unlink(missing_ok=True)
            raise _Broken(f"the server sent bytes {span or '?'}")

        return int(first)

    def remember_version(self, response: HTTPResponse) -> None:
        """Keep the server's strong version mark, so that a resumed transfer never joins two versions of a file."""
        mark = response.headers.get("ETag", "")
        if not mark or mark.startswith("W/"):
            mark = response.headers.get("Last-Modified", "")
        if mark:
            self.tag.write_text(mark)
        else:
            self.tag.unlink(missing_ok=True)

    def check_space(self, needed: int) -> None:
        if needed + _SPARE > (free := shutil.disk_usage(self.folder).free):
            raise RunError(
                f"{self.item.file} needs {needed / 1e6:.0f} MB more and {self.folder} has {free / 1e6:.0f} MB free; "
                "free some space, or give another folder with --out"
            )
