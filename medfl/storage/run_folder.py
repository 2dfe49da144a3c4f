"""RunFolder: the files in `--out`, written so that a kill at any moment loses at most the round in progress.

With several workers it may also lose the previous round, if that is still being evaluated.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import urllib.parse
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path

import safetensors.torch
import torch

from medfl.core import Config, Document, InputError, Run, Weights, csv_text, readable_file_name
from medfl.storage.atomic import atomic_replace, write_atomic, writing
from medfl.storage.files import (
    State,
    file_sha256,
    load_state,
    save_state,
    save_weights,
    state_round,
    write_json,
)
from medfl.storage.places import BEFORE_RECORD, TRIAL, require_run, require_unused
from medfl.storage.run_documents import MANIFEST, read_manifest, read_round, read_run, round_lines

SITES = "sites"
"""Subfolder in which the sites of a FLARE federation on one machine keep their States."""
_BEST = "best-server.safetensors"
"""The server's State of the best round in folders whose manifest does not name its file."""


@dataclass(frozen=True)
class StateFile:
    """A site's saved State: its round and its file. On FLARE the file is at the site."""

    round: int
    path: Path


class RunFolder:
    """The output folder of one run.

    The manifest in `state/` is the commit point: it names the State files of the last complete round, and is replaced
    by a rename. Files that it does not name are left over from a kill; the next commit removes them.

    Sites write their own States to `state_path`; this class handles only file names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = path / "state"
        # Files that the next commit removes; None: list the folder.
        self._stale: list[str] | None = None
        self._rows: dict[str, int] = {}

    @classmethod
    def create(cls, path: Path, beside: Sequence[str] = ()) -> RunFolder:
        """Create a new folder, in which only what `beside` names may already exist; InputError if it cannot be."""
        require_unused(path, beside)
        folder = cls(path)
        with writing(path):
            folder.state.mkdir(parents=True, exist_ok=True)
            for name in BEFORE_RECORD:
                (path / name).unlink(missing_ok=True)

        return folder

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """Open the folder of an earlier run; InputError if it contains none."""
        require_run(path)
        return cls(path)

    def remove_unstarted(self, beside: Sequence[str]) -> None:
        """Remove the files of a run that was refused before its first round, except what `beside` names."""
        for path in self.path.iterdir():
            if path.name not in beside:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        if not any(self.path.iterdir()):
            with suppress(PermissionError):  # in a sandbox the folder itself stays
                self.path.rmdir()

    def write_run(self, run: Run, extra: Config) -> None:
        """Write run.json: the run, its hash, and `extra` entries for the reader."""
        write_json(self.path / "run.json", {**extra, **run.to_dict(), "run_hash": run.run_hash})

    def add_to_run(self, extra: Config) -> None:
        """Add entries for the reader to run.json; the run itself does not change."""
        write_json(self.path / "run.json", {**self.read_run()[1], **extra})

    def read_run(self) -> tuple[Run, Document]:
        """Return the run in run.json and the whole document; InputError if it is damaged."""
        return read_run(self.path / "run.json")

    # State

    def state_path(self, round_: int, name: str) -> Path:
        """Return the file to which a site saves its State of a round, before the round is committed."""
        return self.state / f"{round_:06d}-site-{safe_file_name(name)}.safetensors"

    def newest_state(self, name: str) -> StateFile | None:
        """Return a site's newest State, None if it has none."""
        return self._files.get(name)

    def readable_state(self, name: str, run_hash: str) -> Path | None:
        """Return a readable file of a site's newest State: here, or where a FLARE site keeps it."""
        newest = self.newest_state(name)
        if newest is None or newest.path.is_file():
            return None if newest is None else newest.path

        folder = self.path / SITES / run_hash[:16] / safe_file_name(name)
        at_site = folder / f"{newest.round:06d}.safetensors"
        return at_site if at_site.is_file() else newest.path

    def accept_states(self, round_: int, names: Collection[str]) -> None:
        """Make the States that these sites saved in an uncommitted round their newest."""
        replaced = [self._files[name].path.name for name in names if name in self._files]
        for name in names:
            self._files[name] = StateFile(round_, self.state_path(round_, name))

        if self._stale is not None:
            self._stale += replaced

    def drop_states(self, round_: int, names: Collection[str]) -> None:
        """Let the next commit remove the States that these sites may have saved in a round; older ones stay."""
        if self._stale is not None:
            self._stale += [self.state_path(round_, name).name for name in names]

    def commit(self, round_: int, server: State, record: Config) -> None:
        """Save a complete round: the server's State, the names of the sites' newest States, and a JSON record.

        Raises:
            RunError: the disk is full; the last committed round is intact.
        """
        server_file = f"{round_:06d}-server.safetensors"
        best = self._best
        sites = {name: state.path.name for name, state in self._files.items()}
        rounds = {name: state.round for name, state in self._files.items()}
        save_state(self.state / server_file, server, round_)

        sums = {}
        for name in (server_file, best, *sites.values()):
            if name in self._sums:
                sums[name] = self._sums[name]
            elif (self.state / name).is_file():  # a FLARE site keeps its own elsewhere
                sums[name] = file_sha256(self.state / name)

        self._sums = sums
        document = {
            "round": round_,
            "server": server_file,
            "sites": sites,
            "rounds": rounds,
            "best": best,
            "sha256": sums,
            "record": record,
        }
        write_atomic(self.state / MANIFEST, json.dumps(document).encode())

        # Only now: the previous round's files are needed until the manifest is replaced.
        needed = {server_file, *sites.values(), MANIFEST, best}
        if self._stale is None:
            stale = os.listdir(self.state)
        else:
            stale = self._stale

        for name in set(stale) - needed:
            (self.state / name).unlink(missing_ok=True)

        self._stale = [server_file]

    def manifest(self) -> Document | None:
        """Return the last committed round's manifest, None before the first commit.

        It names the files of the States and, except in older folders, their rounds (`rounds`, site -> round) and their
        SHA-256 (`sha256`, file -> digest).

        Raises:
            InputError: it is damaged, or names something other than a State's file.
        """
        if os.path.lexists(self.state / MANIFEST):
            return read_manifest(self.path)

        return None

    def server_state(self, manifest: Config) -> State:
        """Load the server's State named by a manifest."""
        return load_state(self.state / manifest["server"])

    @cached_property
    def _files(self) -> dict[str, StateFile]:
        """Site -> its newest State."""
        manifest = self.manifest() or {"sites": {}}
        rounds = manifest.get("rounds") or {}
        files = {}
        for name, file in manifest["sites"].items():
            path = self.state / file
            # Release 0.6.0 wrote no rounds.
            files[name] = StateFile(rounds[name] if rounds else state_round(path), path)

        return files

    @cached_property
    def _sums(self) -> dict[str, str]:
        """SHA-256 of the States' files, kept between commits: only a repeated round writes a file again."""
        return dict((self.manifest() or {}).get("sha256") or {})

    @cached_property
    def _best(self) -> str:
        """File of the server's State of the best round."""
        return str((self.manifest() or {}).get("best") or _BEST)

    def save_best(self, round_: int, server: State) -> None:
        """Save the server's State of the best round so far; the previous one stays until this round is committed."""
        if self._stale is not None:
            self._stale.append(self._best)
        self._best = f"{round_:06d}-best.safetensors"
        save_state(self.state / self._best, server, round_)

    def best_state(self) -> State:
        """Return the server's State of the best round."""
        return load_state(self.best_path())

    def best_path(self) -> Path:
        """Return the file of the server's State of the best round."""
        return self.state / self._best

    # Rounds

    def append_round(self, entry: Config) -> None:
        """Append one line to rounds.jsonl."""
        path = self.path / "rounds.jsonl"
        with writing(path), path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def rounds(self) -> list[Document]:
        """Read rounds.jsonl up to the first incomplete line, as left by a kill (`run_integrity` checks damage)."""
        path = self.path / "rounds.jsonl"
        lines = round_lines(path)
        entries = []
        with suppress(InputError):  # the kill came inside this line
            for number, line in enumerate(lines, 1):
                entries.append(read_round(path, line, number))

        return entries

    def truncate_rounds(self, last: int) -> list[Document]:
        """Drop the uncommitted rounds after `last` from rounds.jsonl; return the others."""
        entries = [entry for entry in self.rounds() if entry["round"] <= last]
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        write_atomic(self.path / "rounds.jsonl", text.encode())
        return entries

    # Results

    def write_weights(self, name: str, weights: Weights) -> None:
        """Write `<name>.safetensors`; a mapping other than a dict is written one tensor at a time.

        Raises:
            RunError: the disk is full; the old file is untouched.
        """
        path = self.path / f"{name}.safetensors"
        if isinstance(weights, dict):
            save_weights(path, weights)
        else:
            _save_streamed(path, weights)

    def write_summary(self, summary: Document) -> None:
        """Write summary.json, to which the number of rows of each table that was written is added."""
        summary["table_rows"] = summary.get("table_rows", {}) | self._rows
        write_json(self.path / "summary.json", summary)

    def write_trial(self, trial: Config) -> None:
        """Write trial.json, for a run that is not tested."""
        write_json(self.path / TRIAL, trial)

    def write_table(self, name: str, rows: Sequence[Config]) -> None:
        """Write a CSV file with the columns of all rows in order of appearance; no cell is a formula (`as_cell`)."""
        self._rows[name] = len(rows)
        columns = dict.fromkeys(chain.from_iterable(rows))
        text = csv_text(columns, ([row.get(name, "") for name in columns] for row in rows))
        write_atomic(self.path / name, text.encode())

    def write_picture(self, name: str, png: bytes) -> None:
        """Write `pictures/<name>.png`."""
        write_atomic(self._subfolder("pictures") / f"{name}.png", png)

    def predictions_folder(self, site: str) -> Path:
        """Return the folder of a site's predicted masks, creating it."""
        return self._subfolder("predictions", readable_file_name(site))

    def _subfolder(self, *names: str) -> Path:
        path = self.path.joinpath(*names)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        return path


def _save_streamed(path: Path, weights: Weights) -> None:
    """Write a safetensors file holding one tensor at a time; each is read twice, for its shape and its values."""
    forms = {name: (t.dtype, tuple(t.shape), t.nbytes) for name, t in weights.items()}
    # Wide types first, so that every value is aligned.
    names = sorted(forms, key=lambda name: (-forms[name][0].itemsize, name))
    header = {}
    offset = 0

    for name in names:
        dtype, shape, size = forms[name]
        header[name] = {
            "dtype": _dtype_name(dtype),
            "shape": shape,
            "data_offsets": (offset, offset + size),
        }
        offset += size

    # Padded, so that the tensors begin at a multiple of 8.
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with atomic_replace(path, offset) as temporary, temporary.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            numbers = weights[name].detach().cpu().contiguous().reshape(-1)
            file.write(numbers.view(torch.uint8).numpy().data)


@lru_cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype, read from its own header of an empty tensor."""
    data = safetensors.torch.save({"": torch.empty(0, dtype=dtype)})
    name: str = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[""]["dtype"]
    return name


def safe_file_name(name: str) -> str:
    """Return a file name for the name of a site or case; different names stay different."""
    # Dots too: a site may be called "..", and its file must not get another extension.
    plain = urllib.parse.quote(name, safe="").replace(".", "%2E")
    if len(plain) <= 100:
        return plain

    return f"{plain[:80]}%{hashlib.sha256(name.encode()).hexdigest()[:12]}"
