"""Files and folders that are written as a whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import safetensors

from medfl.core import RunError


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` via a sibling file and a rename.

    Raises:
        RunError: the disk is full or the folder cannot be written; the old file is untouched.
    """
    with atomic_replace(path, len(data)) as temporary:
        temporary.write_bytes(data)


@contextmanager
def atomic_replace(path: Path, size: int) -> Iterator[Path]:
    """Yield a sibling file to write, which replaces `path` at the end of the block."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with writing(f"{path} ({size} bytes)"):
            temporary.unlink(missing_ok=True)  # a link there would be written through
            yield temporary
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def writing(
    target: Path | str,
    advice: str = "free space or check its rights; repeat, with a new --out if it has files (a run: --resume)",
) -> Iterator[None]:
    """Raise a RunError if the block cannot write to `target`."""
    try:
        yield
    except (OSError, safetensors.SafetensorError, RuntimeError) as error:
        # On a full disk torch.save's error names its writer; other errors are not failures to write.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise RunError(
            f"cannot write {target}: {_reason(error)}; what was saved before is intact; {advice}"
        ) from error


@contextmanager
def made(folder: Path, parts: Sequence[str] = ()) -> Iterator[None]:
    """Make a folder for the block; if the block fails, what is new of its path is removed unless something is in it.

    `parts` are the names of the block's files, which are of no use without each other: new ones are removed too.
    """
    paths = [*map(folder.joinpath, parts), folder, *folder.absolute().parents]
    new = [path for path in paths if not path.exists()]
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:  # also an interrupt, which is raised on
        for path in new:
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        raise


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes the new or empty folder `out` at the end of the block: as a whole or never.

    Raises:
        RunError: it cannot be written.
    """
    out = out.absolute()
    partial = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with made(out.parent), writing(out, "free space or check its rights; repeat it"):
        try:
            partial.mkdir()
            yield partial
            if out.is_dir():
                out.rmdir()
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _reason(error: Exception) -> str:
    """Return why a file cannot be written; the Rust writer has the system's error number only in its text."""
    number = getattr(error, "errno", None)
    if number is None and (match := re.search(r"os error (\d+)", str(error))):
        number = int(match[1])

    if isinstance(error, RuntimeError) or number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "no space left on the disk"

    return os.strerror(number) if number else str(error)
