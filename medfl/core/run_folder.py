"""RunFolder: what a run leaves in `--out`, written so that a kill at any moment loses at most the round in progress.

With several workers it may lose the round before it too, while that is still being evaluated.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from medfl.core.errors import InputError, RunError
from medfl.core.message import Weights
from medfl.core.run import Run
from medfl.core.storage import State, file_sha256, load_state, save_state, save_weights, write_atomic

SITES = "sites"
"""Where in the run folder the sites of a FLARE federation on one machine keep their States."""
MANIFEST = "manifest.json"
_BEST = "best-server.safetensors"
"""The server's State of the best round in folders whose manifest does not name its file."""
_FORM = {"round": int, "server": str, "sites": dict, "record": dict}


class RunFolder:
    """The output folder of one run; file names and contents as in the contract.

    The manifest in `state/` is the commit point: it names the state files of the last complete round, and is replaced
    by a rename. Files that it does not name are left over from a kill and are removed at the first commit after it.

    Sites' States are written by whoever trains there, to `state_path`; only their names pass through here.
    """

    def __init__(self, path: Path) -> None:
        """Point at a folder; nothing is read or made yet."""
        self.path = path
        self.state = path / "state"
        self._files: dict[str, str] | None = None  # site -> file of its newest State
        self._stale: list[str] | None = None  # what the next commit makes superfluous; None: look what is there
        self._best: str | None = None  # file of the server's State of the best round
        self._sums: dict[str, str] | None = None  # file -> SHA-256

    @staticmethod
    def require_unused(path: Path, beside: Sequence[str] = ()) -> None:
        """Raise an InputError if a folder cannot be made or is not empty, but for what `beside` names."""
        above = next(folder for folder in [path, *path.absolute().parents] if folder.exists())
        if above != path and not (above.is_dir() and os.access(above, os.W_OK)):
            reason = "may not be written to" if above.is_dir() else "is not a folder"
            raise InputError(f"--out {path} cannot be made: {above} {reason}", "a new folder", "give a writable place")
        if path.exists() and (
            not path.is_dir() or any(not _leftover(p) and p.name not in beside for p in path.iterdir())
        ):
            raise InputError(
                f"--out {path} exists and is not empty", "a new or empty folder", "give a new folder, or add --resume"
            )

    @classmethod
    def create(cls, path: Path, beside: Sequence[str] = ()) -> RunFolder:
        """Make a new folder; `beside` names what may be in it already.

        Raises:
            InputError: it exists and is not empty, or cannot be made.
        """
        cls.require_unused(path, beside)
        folder = cls(path)
        try:
            folder.state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--out {path} cannot be made: {error.strerror}", "a folder that can be written", "give a writable one"
            ) from error
        return folder

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """Open the folder of an earlier run.

        Raises:
            InputError: there is no run in it.
        """
        if not (path / "run.json").is_file():
            raise InputError(
                f"--out {path} holds no run (no run.json)", "the folder of an earlier run", "start without --resume"
            )
        return cls(path)

    def remove_unstarted(self, beside: Sequence[str] = ()) -> None:
        """Remove what a run that was refused before its first round has written; `beside` names what stays."""
        for found in self.path.iterdir():
            if found.name not in beside:
                shutil.rmtree(found) if found.is_dir() else found.unlink()
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def write_run(self, run: Run, extra: Mapping[str, Any]) -> None:
        """Write run.json: the run, its hash, and what helps a reader (`extra`)."""
        self._json("run.json", {**extra, **run.to_dict(), "run_hash": run.run_hash})

    def add_to_run(self, told: Mapping[str, Any]) -> None:
        """Write more into run.json that helps a reader; the run itself stays what it is."""
        self._json("run.json", {**self.read_run()[1], **told})

    def read_run(self) -> tuple[Run, dict[str, Any]]:
        """Read run.json: the run, and all that the file says; InputError if it is damaged."""
        return read_run(self.path / "run.json")

    # State

    def state_path(self, round_: int, name: str) -> Path:
        """Return the file that a site's State of a round is to be saved to, before the round is committed."""
        return self.state / f"{round_:06d}-site-{safe_file_name(name)}.safetensors"

    def newest_state(self, name: str) -> Path | None:
        """Return the file of a site's newest State, None if it has none."""
        file = self._known().get(name)
        return None if file is None else self.state / file

    def readable_state(self, name: str, run_hash: str) -> Path | None:
        """Return the file of a site's newest State as it can be read: here, or where a site of FLARE keeps it."""
        kept = self.newest_state(name)
        if kept is None or kept.is_file():
            return kept
        apart = self.path / SITES / run_hash[:16] / safe_file_name(name) / f"{kept.name.partition('-')[0]}.safetensors"
        return apart if apart.is_file() else kept

    def accept_states(self, round_: int, names: Collection[str]) -> None:
        """Take the States that these sites saved in a round, not committed yet, as their newest."""
        files = self._known()
        replaced = [files[name] for name in names if name in files]
        files.update({name: self.state_path(round_, name).name for name in names})
        if self._stale is not None:
            self._stale += replaced

    def drop_states(self, round_: int, names: Collection[str]) -> None:
        """Have the next commit remove the States that these sites may have saved in a round: the older ones stay."""
        if self._stale is not None:
            self._stale += [self.state_path(round_, name).name for name in names]

    def commit(self, round_: int, server: State, record: Mapping[str, Any]) -> None:
        """Save a complete round: the server's State, which files are the sites' newest States, and a JSON record.

        Raises:
            RunError: the disk is full; the last committed round is intact.
        """
        server_file, sites, best = f"{round_:06d}-server.safetensors", self._known(), self._best_file()
        save_state(self.state / server_file, server)
        self._sums = {name: self._sum(name) for name in (server_file, best, *sites.values()) if self._is_here(name)}
        document = {"round": round_, "server": server_file, "sites": sites, "best": best, "sha256": self._sums}
        write_atomic(self.state / MANIFEST, json.dumps({**document, "record": record}).encode())
        kept = {server_file, *sites.values(), MANIFEST, best}
        for name in set(os.listdir(self.state) if self._stale is None else self._stale) - kept:
            (self.state / name).unlink(missing_ok=True)
        self._stale = [server_file]

    def manifest(self) -> dict[str, Any] | None:
        """Return the last committed round's manifest, None before the first commit.

        It names the files of the States and, but in older folders, their SHA-256: `sha256`, file -> digest.

        Raises:
            RunError: it is damaged.
        """
        path = self.state / MANIFEST
        if not path.is_file():
            return None
        try:
            manifest: dict[str, Any] = json.loads(path.read_text())
            wrong = [name for name, kind in _FORM.items() if not isinstance(manifest[name], kind)]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is damaged ({error}); start the run anew in another folder") from error
        if wrong:
            raise RunError(f"{path} is damaged ({wrong[0]!r}); start the run anew in another folder")
        return manifest

    def server_state(self, manifest: Mapping[str, Any]) -> State:
        """Load the server's State of a manifest."""
        return load_state(self.state / manifest["server"])

    def _known(self) -> dict[str, str]:
        if self._files is None:
            self._files = dict((self.manifest() or {"sites": {}})["sites"])
        return self._files

    def _is_here(self, name: str) -> bool:
        """Tell whether a State's file is in this folder: a site of FLARE keeps its own elsewhere."""
        return name in (self._sums or ()) or (self.state / name).is_file()

    def _sum(self, name: str) -> str:
        """Return the SHA-256 of a State's file, which is never written twice but by a round that is repeated."""
        if self._sums is None:
            self._sums = dict((self.manifest() or {}).get("sha256") or {})
        return self._sums.get(name) or file_sha256(self.state / name)

    def save_best(self, round_: int, server: State) -> None:
        """Keep the server's State of the best round so far; until this round is committed, the one before it too."""
        if self._stale is not None:
            self._stale.append(self._best_file())
        self._best = f"{round_:06d}-best.safetensors"
        save_state(self.state / self._best, server)

    def best_state(self) -> State:
        """Return the server's State of the best round."""
        return load_state(self.best_path())

    def best_path(self) -> Path:
        """Return the file of the server's State of the best round."""
        return self.state / self._best_file()

    def _best_file(self) -> str:
        if self._best is None:
            self._best = str((self.manifest() or {}).get("best") or _BEST)
        return self._best

    # Rounds

    def append_round(self, entry: Mapping[str, Any]) -> None:
        """Append one line to rounds.jsonl."""
        try:
            with (self.path / "rounds.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise RunError(
                f"cannot write {self.path / 'rounds.jsonl'}: {error.strerror}; continue with --resume"
            ) from error

    def rounds(self, up_to: int | None = None) -> list[dict[str, Any]]:
        """Read rounds.jsonl up to the first line that is no round, as a kill leaves one.

        With `up_to` drop what is later, and so not committed, from the file too; `medfl.core.run_integrity` has looked
        for damage.
        """
        path = self.path / "rounds.jsonl"
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        entries: list[dict[str, Any]] = []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                break  # the kill came inside this line
            if not isinstance(entry, dict) or "round" not in entry:
                break
            entries.append(entry)
        if up_to is not None:
            entries = [entry for entry in entries if entry["round"] <= up_to]
            write_atomic(path, "".join(json.dumps(entry) + "\n" for entry in entries).encode())
        return entries

    # Results

    def write_weights(self, name: str, weights: Weights) -> None:
        """Write `<name>.safetensors`; what is no dict is written one tensor at a time.

        Raises:
            RunError: the disk is full; the old file is untouched.
        """
        path = self.path / f"{name}.safetensors"
        if isinstance(weights, dict):
            save_weights(path, weights)
        else:
            _save_streamed(path, weights)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        self._json("summary.json", summary)

    def write_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a CSV file with the columns of all rows in order of appearance."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(self.path / name, text.getvalue().encode())

    def write_picture(self, name: str, png: bytes) -> None:
        """Write `pictures/<name>.png`."""
        path = self.path / "pictures" / f"{name}.png"
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {path.parent}: {error.strerror}; continue with --resume") from error
        write_atomic(path, png)

    def predictions_folder(self, site: str) -> Path:
        """Return the folder of a site's predicted masks, making it."""
        path = self.path / "predictions" / safe_file_name(site)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {path}: {error.strerror}; continue with --resume") from error
        return path

    def _json(self, name: str, document: Mapping[str, Any]) -> None:
        write_atomic(self.path / name, (json.dumps(document, indent=1, default=list) + "\n").encode())


def read_run(path: Path) -> tuple[Run, dict[str, Any]]:
    """Read a run's record: the run, and all that the file says.

    Raises:
        InputError: it is not there or damaged.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path} cannot be read: {reason}", "a run.json of medfl", "give such a file") from error
    return Run.from_dict(document), document


def _save_streamed(path: Path, weights: Weights) -> None:
    """Write a safetensors file without holding more than one of its tensors; each is read twice, for form and value."""
    forms = {name: (tensor.dtype, tuple(tensor.shape), tensor.nbytes) for name, tensor in weights.items()}
    names = sorted(forms, key=lambda name: (-forms[name][0].itemsize, name))  # so that every value is aligned
    header, offset = {}, 0
    for name in names:
        dtype, shape, size = forms[name]
        header[name] = {"dtype": _dtype_name(dtype), "shape": shape, "data_offsets": (offset, offset + size)}
        offset += size
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(len(told).to_bytes(8, "little") + told)
            for name in names:
                file.write(weights[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(
            f"cannot write {path} ({offset} bytes): {error.strerror}; what was saved before is intact; "
            "free some space and continue with --resume"
        ) from error


@lru_cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Return what safetensors calls a type: its own header of an empty tensor says it."""
    data = safetensors.torch.save({"": torch.empty(0, dtype=dtype)})
    name: str = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[""]["dtype"]
    return name


def _leftover(path: Path) -> bool:
    """Tell whether this is what a kill left before run.json was there: nothing of it is of use."""
    return path.name == ".run.json.tmp" or (path.name == "state" and path.is_dir() and not any(path.iterdir()))


def safe_file_name(name: str) -> str:
    """Make a name (of a site, of a case) a file name; different names stay different."""
    plain = urllib.parse.quote(name, safe="").replace(".", "%2E")
    return plain if len(plain) <= 100 else f"{plain[:80]}%{hashlib.sha256(name.encode()).hexdigest()[:12]}"
