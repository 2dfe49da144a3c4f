"""Check that a run folder is as the run left it, before the run continues.

A run continues from its record, its rounds and the States of its last round, and ends with the weights and the
server's State of its best round.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path

from medfl.core import VERSION, Document, InputError, Run, hash_as_recorded, printable
from medfl.storage.files import file_sha256, state_round
from medfl.storage.run_documents import MANIFEST, read_run, require_plain, round_lines
from medfl.storage.run_folder import RunFolder

_SETTLED = 10**9  # ns since a file's last change, after which another change has a different time
_ANEW = "restore it, or start the run anew in another folder"


def read_verified_run(path: Path) -> tuple[Run, Document]:
    """Read a run.json as `read_run` does; InputError also if its settings do not match its hash."""
    run, document = read_run(path)
    # From the document, not from `run`: an earlier version computed the hash with its own names.
    written = hash_as_recorded(document)
    recorded = document.get("run_hash", written)
    if recorded != written:
        writer = str(document.get("medfl", VERSION))
        advice = "restore the file"
        if writer != VERSION:
            advice += f", or read it with the medfl that wrote it, {printable(writer, 20)}"

        raise InputError(
            f"{path}, whose settings give the run hash {written[:12]} and not its own, {str(recorded)[:12]}",
            "a recorded run as medfl wrote it: its settings are not edited",
            f"{advice}, or start a run with these settings",
        )

    return run, document


def verified_manifest(folder: RunFolder, sums: bool = True) -> Document | None:
    """Return the manifest of a run's last committed round, None if the run stopped before its first.

    With `sums` the SHA-256 of the State files are compared; older folders have none. A process reads a file again only
    if its time or size changed: a run is checked when it is planned and again when it starts.

    Raises:
        InputError: a file that the run needs is missing, damaged or not a plain file; names the file. Nothing was
            changed.
    """
    # First: the next lines would follow a link to a file elsewhere.
    require_plain(folder.path)
    manifest = folder.manifest()
    if manifest is None:
        _refuse_missing_manifest(folder)
        return None

    done = manifest["round"]
    entries = folder.rounds()
    for number in range(1, done + 1):
        if number > len(entries) or entries[number - 1]["round"] != number:
            raise InputError(
                f"{folder.path / 'rounds.jsonl'}, whose line {number} is not that of round {number}",
                f"{done} rounds are done, and the file has a line of each",
                _ANEW,
            )

    for path, digest in _needed(folder, manifest):
        if not path.is_file():
            raise InputError(
                f"{path} is missing", f"the run goes on from it after round {done}", _ANEW
            )
        if sums and digest is not None and _sum(path) != digest:
            raise InputError(
                f"{path} is not as the run wrote it", f"its SHA-256 was {digest[:12]}…", _ANEW
            )

    return manifest


def _sum(path: Path) -> str:
    """Return the SHA-256 of a file, read again only if it may have changed."""
    stat = path.stat()
    # Another write immediately afterwards could have the same time.
    if time.time_ns() - stat.st_mtime_ns < _SETTLED:
        return file_sha256(path)
    version = (stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)
    return _known_sum(path.absolute(), *version)


@functools.lru_cache(maxsize=1 << 16)
def _known_sum(path: Path, *version: int) -> str:
    return file_sha256(path)


def _refuse_missing_manifest(folder: RunFolder) -> None:
    """Raise an InputError if the folder shows committed rounds: before the first there are only its line and files."""
    rounds = folder.path / "rounds.jsonl"
    state = folder.state
    lines = len(round_lines(rounds)) - 1
    later = any(state_round(path) > 1 for path in state.glob("*.safetensors"))

    # an evaluation commits no round
    ended = (folder.path / "summary.json").is_file() and folder.read_run()[0].rounds > 0

    if later or lines > (1 if state.is_dir() else 0) or ended:
        raise InputError(
            f"{folder.state / MANIFEST} is missing, though rounds are done",
            "a run goes on from the round that it names",
            _ANEW.replace("it", "the folder state", 1),
        )


def _needed(folder: RunFolder, manifest: Document) -> Iterator[tuple[Path, str | None]]:
    """Yield the files that a run continues from, each with its SHA-256 if known.

    Only site States with a SHA-256 must be in this folder: a FLARE site keeps its own.
    """
    digests = manifest.get("sha256") or {}
    yield folder.state / manifest["server"], digests.get(manifest["server"])
    for name in manifest["sites"].values():
        if name in digests:
            yield folder.state / name, digests[name]

    if manifest["record"].get("best") is not None:
        best = folder.best_path()
        yield best, digests.get(best.name)
        yield folder.path / "best.safetensors", None
