"""Whether a run's folder is as the run left it: looked at before it goes on, so that damage costs no round.

What a run goes on with are its record, its rounds, and the States of its last round; what it ends with besides are the
weights and the server's State of its best round.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medfl.core.errors import InputError
from medfl.core.run import Run
from medfl.core.run_folder import MANIFEST, RunFolder, read_run
from medfl.core.storage import file_sha256, state_round

_SETTLED = 10**9  # ns since a file's last change, after which its time tells a later one
_ANEW = "restore it, or start the run anew in another folder"


def read_verified_run(path: Path) -> tuple[Run, dict[str, Any]]:
    """Read a run's record: the run, and all that the file says.

    Raises:
        InputError: it is not there, damaged, or another run than the one that its hash was taken of.
    """
    run, document = read_run(path)
    told = document.get("run_hash", run.run_hash)
    if told != run.run_hash:
        raise InputError(
            f"{path}, whose settings give the run hash {run.run_hash[:12]} and not its own, {str(told)[:12]}",
            "a recorded run as medfl wrote it: its settings are not edited",
            "restore the file, or start a run with these settings",
        )
    return run, document


def verified_manifest(folder: RunFolder, sums: bool = True) -> dict[str, Any] | None:
    """Return the manifest of a run's last committed round, None where the run was stopped before its first.

    Args:
        folder: of the run.
        sums: compare the SHA-256 of the States' files; older folders have none. A file is read once in a process as
            long as it stays the same by its time and size: a run is looked at when it is planned and when it begins.

    Raises:
        InputError: something is missing or damaged that the run goes on with; names the file. Nothing was changed.
        RunError: the manifest is damaged.
    """
    manifest = folder.manifest()
    if manifest is None:
        _refuse_lost(folder)
        return None
    done, entries = manifest["round"], folder.rounds()
    if [entry["round"] for entry in entries[:done]] != [*range(1, done + 1)]:
        whole = next((i for i, entry in enumerate(entries[:done]) if entry["round"] != i + 1), len(entries))
        raise InputError(
            f"{folder.path / 'rounds.jsonl'}, whose line {whole + 1} is not that of round {whole + 1}",
            f"{done} rounds are done, and the file has a line of each",
            _ANEW,
        )
    for path, digest in _needed(folder, manifest):
        if not path.is_file():
            raise InputError(f"{path} is missing", f"the run goes on from it after round {done}", _ANEW)
        if sums and digest is not None and _sum(path) != digest:
            raise InputError(f"{path} is not as the run wrote it", f"its SHA-256 was {digest[:12]}…", _ANEW)
    return manifest


def _sum(path: Path) -> str:
    """Return the SHA-256 of a file, read again only where it may have changed."""
    stat = path.stat()
    if time.time_ns() - stat.st_mtime_ns < _SETTLED:  # another write could have the same time
        return file_sha256(path)
    return _known_sum(path.absolute(), stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size)


@functools.lru_cache(maxsize=1 << 16)
def _known_sum(path: Path, *version: int) -> str:
    return file_sha256(path)


def _refuse_lost(folder: RunFolder) -> None:
    """Raise an InputError if rounds were committed: before the first, there is at most its line and its files."""
    rounds, state = folder.path / "rounds.jsonl", folder.state
    lines = rounds.read_bytes().count(b"\n") if rounds.is_file() else 0
    later = any(state_round(path) > 1 for path in state.glob("*.safetensors"))
    if later or lines > (1 if state.is_dir() else 0) or (folder.path / "summary.json").is_file():
        raise InputError(
            f"{folder.state / MANIFEST} is missing, though rounds are done",
            "a run goes on from the round that it names",
            _ANEW.replace("it", "the folder state", 1),
        )


def _needed(folder: RunFolder, manifest: dict[str, Any]) -> Iterator[tuple[Path, str | None]]:
    """Give the files that a run goes on with, and their SHA-256 where it is known.

    Of the sites' States only those with one are in this folder for sure: a site of FLARE keeps its own.
    """
    known = manifest.get("sha256") or {}
    yield folder.state / manifest["server"], known.get(manifest["server"])
    yield from ((folder.state / name, known[name]) for name in manifest["sites"].values() if name in known)
    if manifest["record"].get("best") is not None:
        best = folder.best_path()
        yield best, known.get(best.name)
        yield folder.path / "best.safetensors", None
