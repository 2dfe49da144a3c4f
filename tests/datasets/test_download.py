"""Fetching against a server on this machine: whole, truncated, corrupt, missing, changed and resumed files."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from medfl import datasets
from medfl.core.errors import InputError, RunError
from medfl.datasets import DataSet, Download
from medfl.datasets.readers import download as downloading
from medfl.datasets.readers.download import fetch

CONTENT = bytes(i * i % 251 for i in range(700_000))
SHA256 = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()


class Server:
    """One file under every path, and how its transfer misbehaves."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.etag: str | None = '"1"'
        self.knows_ranges = True
        self.cuts: list[int] = []  # bytes after which the next transfers break off
        self.statuses: list[int] = []  # error codes of the next answers
        self.missing = False
        self.shift = 0  # bytes by which the next partial answer starts elsewhere
        self.asked: list[str | None] = []  # the Range header of each request
        self.sent = 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/scans.zip"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range")
        self.asked.append(asked)
        if self.missing or self.statuses:
            request.send_error(404 if self.missing else self.statuses.pop(0))
            return
        start = int(re.findall(r"\d+", asked)[0]) if asked and self.knows_ranges else 0
        if request.headers.get("If-Range", self.etag) != self.etag:
            start = 0
        if start >= len(self.content):
            request.send_error(416)
            return
        if start:
            start, self.shift = start + self.shift, 0
        body = self.content[start:]
        request.send_response(206 if start else 200)
        if start:
            request.send_header(
                "Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}"
            )
        if self.etag:
            request.send_header("ETag", self.etag)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        body = body[: self.cuts.pop(0)] if self.cuts else body
        self.sent += len(body)
        request.wfile.write(body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(
        target=server.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


def data(
    url: str, digest: str | None = SHA256, size: int | None = None, **changes: object
) -> DataSet:
    download = Download(url, "scans.zip", digest, size)
    return dataclasses.replace(datasets.get("pneumonia"), downloads=(download,), **changes)


def quiet(dataset: DataSet, folder: Path) -> list[str]:
    """Fetch without a bar or waiting and return the lines shown."""
    lines: list[str] = []
    assert fetch(dataset, folder, progress=False, show=lines.append, pause=0) == (
        folder / "scans.zip",
    )
    return lines


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("digest", [SHA256, MD5, SHA256.upper().replace("SHA256", "sha256"), None])
@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_whole_file(server: Server, tmp_path: Path, digest: str | None, size: int | None) -> None:
    lines = quiet(data(server.url, digest, size), tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "scans.zip").read_bytes() == CONTENT
    assert left(tmp_path / "a" / "b") == {"scans.zip"}
    told = [line for line in lines if SHA256.partition(":")[2] in line]
    assert bool(told) == (digest is None)
    assert all("no published checksum" in line for line in told)


def test_licence_and_source_are_shown_before_anything_is_asked(
    server: Server, tmp_path: Path
) -> None:
    shown: list[tuple[str, int]] = []
    fetch(
        data(server.url),
        tmp_path,
        progress=False,
        show=lambda line: shown.append((line, len(server.asked))),
    )
    text = "\n".join(line for line, requests in shown if requests == 0)
    pneumonia = datasets.get("pneumonia")
    assert pneumonia.licence in text
    assert pneumonia.source in text
    assert pneumonia.citation in text


def test_progress_bar_is_on_stderr(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(data(server.url), tmp_path)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "scans.zip" in captured.err
    assert "licence: CC BY 4.0" in captured.err


def test_intact_file_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    quiet(data(server.url), tmp_path)
    assert any("already there" in line for line in quiet(data(server.url), tmp_path))
    assert len(server.asked) == 1


def test_another_file_of_that_name_is_not_overwritten(server: Server, tmp_path: Path) -> None:
    (tmp_path / "scans.zip").write_bytes(b"mine")
    with pytest.raises(InputError, match="scans.zip is already there"):
        quiet(data(server.url), tmp_path)
    assert (tmp_path / "scans.zip").read_bytes() == b"mine"
    assert server.asked == []


def test_truncated_transfer_goes_on_by_itself(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 250_000]
    quiet(data(server.url), tmp_path)
    assert (tmp_path / "scans.zip").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-", "bytes=350000-"]
    assert server.sent == len(CONTENT)


def test_transfer_that_keeps_breaking_is_resumed_by_the_next_call(
    server: Server, tmp_path: Path
) -> None:
    server.cuts = [50_000] * downloading.ATTEMPTS
    with pytest.raises(RunError, match="run the same command again") as caught:
        quiet(data(server.url), tmp_path)
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == {"scans.zip.part", "scans.zip.part.tag"}
    quiet(data(server.url), tmp_path)
    assert (tmp_path / "scans.zip").read_bytes() == CONTENT
    assert server.asked[-1] == f"bytes={50_000 * downloading.ATTEMPTS}-"
    assert left(tmp_path) == {"scans.zip"}


def test_server_that_ignores_ranges_is_read_from_the_start(server: Server, tmp_path: Path) -> None:
    server.knows_ranges, server.cuts = False, [300_000]
    quiet(data(server.url), tmp_path)
    assert (tmp_path / "scans.zip").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-"]


@pytest.mark.parametrize("shift", [-10, 10])
def test_answer_that_starts_elsewhere_is_not_appended(
    server: Server, tmp_path: Path, shift: int
) -> None:
    server.cuts, server.shift = [300_000], shift
    quiet(data(server.url), tmp_path)
    assert (tmp_path / "scans.zip").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-", None]


@pytest.mark.parametrize("etag", ['"2"', None])
def test_two_versions_of_a_file_are_never_joined(
    server: Server, tmp_path: Path, etag: str | None
) -> None:
    """No checksum is published: only the server's version mark tells that the file changed between two calls."""
    server.etag = etag and '"1"'
    server.cuts = [50_000] * downloading.ATTEMPTS
    with pytest.raises(RunError):
        quiet(data(server.url, None), tmp_path)
    server.content, server.etag = CONTENT[::-1], etag
    quiet(data(server.url, None), tmp_path)
    assert (tmp_path / "scans.zip").read_bytes() == CONTENT[::-1]


def test_part_longer_than_the_file_is_fetched_anew(server: Server, tmp_path: Path) -> None:
    (tmp_path / "scans.zip.part").write_bytes(CONTENT + b"more")
    quiet(data(server.url), tmp_path)
    assert (tmp_path / "scans.zip").read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(CONTENT) + 4}-", None]


@pytest.mark.parametrize(
    ("digest", "size"), [(SHA256, None), (MD5, None), (None, len(CONTENT) + 1)]
)
def test_corrupt_file_is_put_aside(
    server: Server, tmp_path: Path, digest: str | None, size: int | None
) -> None:
    server.content = CONTENT[:-1] + b"?"
    with pytest.raises(RunError) as caught:
        quiet(data(server.url, digest, size), tmp_path)
    assert "\n" not in str(caught.value)
    assert all(
        word in str(caught.value) for word in (server.url, "scans.zip.part.bad", "is not used")
    )
    assert left(tmp_path) <= {"scans.zip.part.bad"} | ({"scans.zip.part"} if size else set())
    assert not (tmp_path / "scans.zip").exists()
    server.content = CONTENT + b"!" * (size is not None)
    quiet(data(server.url, digest, size), tmp_path)
    assert (tmp_path / "scans.zip").read_bytes() == server.content


def test_missing_file(server: Server, tmp_path: Path) -> None:
    server.missing = True
    with pytest.raises(RunError) as caught:
        quiet(data(server.url), tmp_path)
    assert "\n" not in str(caught.value)
    assert all(
        word in str(caught.value)
        for word in (server.url, "no such file", "404", f"put it into {tmp_path}")
    )
    assert len(server.asked) == 1
    assert left(tmp_path) == set()


def test_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.statuses = [503, 429]
    quiet(data(server.url), tmp_path)
    assert (tmp_path / "scans.zip").read_bytes() == CONTENT


def test_forbidden_file_is_not_asked_for_again(server: Server, tmp_path: Path) -> None:
    server.statuses = [403]
    with pytest.raises(RunError, match="HTTP 403"):
        quiet(data(server.url), tmp_path)
    assert len(server.asked) == 1


def test_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RunError) as caught:
        quiet(data(f"http://127.0.0.1:{port}/scans.zip"), tmp_path)
    assert "no connection to host 127.0.0.1" in str(caught.value)
    assert f"put it into {tmp_path} as scans.zip" in str(caught.value)


def test_full_disk_is_noticed_before(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(downloading.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RunError, match="free some space"):
        quiet(data(server.url), tmp_path)
    assert left(tmp_path) == set()


def test_data_set_without_direct_download(tmp_path: Path) -> None:
    ham = datasets.get("ham10000")
    with pytest.raises(InputError) as caught:
        fetch("ham10000", tmp_path / "new")
    assert ham.download_note in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_folder_that_cannot_be_made(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        fetch(data(server.url), tmp_path / "file", progress=False, show=lambda _: None)


@pytest.mark.parametrize("name", datasets.names())
def test_shipped_downloads_are_well_formed(name: str) -> None:
    dataset = datasets.get(name)
    assert dataset.downloads or dataset.download_note
    for item in dataset.downloads:
        assert item.url.startswith("https://")
        assert "/" not in item.file
        assert item.digest is None or re.fullmatch(
            r"md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", item.digest
        )
