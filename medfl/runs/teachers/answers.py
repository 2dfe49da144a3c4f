"""The outputs of frozen teachers for public data: computed once, stored on disk, then mapped into memory.

A teacher's outputs are one array in the user's cache with a manifest beside it, which says what they belong to and how
far the pass over the public items has got; an interrupted pass continues where it stopped. The file is named by a hash
of everything that the outputs depend on: the teacher's weights and facts, the data's checksum, the items, the grid.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from medfl.core import (
    Array,
    Config,
    InputError,
    MedflError,
    Print,
    Refused,
    RunError,
    Shape,
    json_values,
    split_commas,
    stream,
    terminal,
)
from medfl.problem import Problem
from medfl.runs.teachers import medsam, open_clip, trained
from medfl.runs.teachers.questions import Questions as Questions, Teacher as Teacher, public_classes
from medfl.storage import cache_folder, write_json, writing

CLIP = 1e-4
"""Probabilities of masks are clipped to CLIP .. 1 - CLIP, so that their logits are finite in half precision."""
_SUM = 1e-3  # by which a distribution's sum may differ from 1
_OPENERS: Mapping[str, Callable[[str, str, Problem, torch.device], Teacher]] = {
    **dict.fromkeys(open_clip.MODELS, open_clip.open_clip_teacher),
    "medsam": medsam.open_medsam,
    "run": trained.open_run,
    "bundle": trained.open_bundle,
}


@runtime_checkable
class Noted(Protocol):
    """A teacher with notes for readers of results that were trained with it."""

    def notes(self, questions: Questions) -> Sequence[str]:
        """Return lines for the user."""


# Teachers by name


def split_names(text: str) -> tuple[str, ...]:
    """Return the teachers in a list such as `run:DIR,medsam`, () of an empty one; InputError for an empty name."""
    if not text.strip():
        return ()

    names = tuple(split_commas(text))
    if "" in names:
        raise InputError(
            f"teachers={text}", "teachers is NAME,NAME,...", "drop the comma that is too much"
        )
    return names


def open_teacher(name: str, bundle: Problem, device: torch.device) -> Teacher:
    """Return a teacher by name, ready to be run.

    Args:
        name: clip-vit-l14, clip-rn50x16, biomedclip or medsam, with `:FILE` from local weights; run:DIR of a trained
            run; bundle:DIR of a MONAI bundle with weights.
        bundle: the public data to be labelled.
        device: where it runs.

    Raises:
        InputError: no such teacher, one that is not available, or one for another task or other classes.
    """
    kind, _, path = name.partition(":")
    if kind not in _OPENERS or (kind in ("run", "bundle") and not path):
        raise InputError(
            f"teacher {name!r}",
            f"teachers are {', '.join((*open_clip.MODELS, 'medsam'))}, each also as NAME:FILE, run:DIR and bundle:DIR",
            "choose one of them",
        )
    if bundle.task not in ("classification", "segmentation"):
        raise InputError(
            f"teachers for bundle {bundle.name!r}, neither classification nor segmentation",
            "teachers answer with classes or masks",
            "name a classification or segmentation bundle with --set public=BUNDLE",
        )
    if bundle.task == "segmentation" and len(bundle.structures) > 2:
        raise InputError(
            f"teachers for bundle {bundle.name!r} with {', '.join(bundle.structures)}",
            "teachers tell a foreground from the background",
            "use a bundle with one structure as public data",
        )

    # a layer missing from a checkpoint is drawn, and must be the same in every run
    with stream(0, "teacher"):
        return _OPENERS[kind](name, path, bundle, device)


# Answers


def obtain(
    teacher: Teacher, questions: Questions, *, progress: bool = False, say: Print = str
) -> Tensor:
    """Return a teacher's outputs for all public items, running it only for items that are not cached.

    Returns:
        distributions (P, C) float32 or foreground logits (P, H, W[, D]) float16, mapped from the cache's file. Writing
            to the tensor does not change the file.

    Raises:
        InputError: the outputs do not fit these data; names teacher and item.
        RunError: the teacher fails, or the cache cannot be written; earlier outputs are kept.
    """
    cached = _Cached.of(teacher, questions)
    for note in cached.notes:
        say(f"note: {note}")

    with writing(cached.path, "free some space, or set XDG_CACHE_HOME to a larger disk"):
        cached.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone(cached.path, say):
            state, problem = cached.state()
            if problem:
                say(
                    f"the cached answers of {teacher.name} in {cached.path} are made anew: {problem}"
                )

            if state.done < len(questions):
                items = f"{len(questions)} public items"
                if state.done:
                    items += f", {state.done} of them answered already"

                say(f"asking {teacher.name} about {items}; kept in {cached.path}")
                _ask(teacher, questions, cached, state, progress)

    # copy on write: a process's changes stay its own
    return torch.from_numpy(np.lib.format.open_memmap(cached.path, mode="c"))


@dataclass(frozen=True)
class _State:
    """Progress of a pass: items completed, calls of the teacher, CRC-32 of the outputs."""

    done: int = 0
    queries: int = 0
    crc32: int = 0


@dataclass(frozen=True)
class _Cached:
    """One array of outputs in the cache, what they depend on, and the teacher's notes."""

    path: Path
    about: Config
    name: str
    notes: tuple[str, ...]

    @classmethod
    def of(cls, teacher: Teacher, questions: Questions) -> _Cached:
        about = {
            "teacher": teacher.sha256,
            "facts": teacher.facts,
            "bundle": questions.bundle.name,
            "section": questions.section,
            "data": questions.checksum,
            "ids": questions.ids,
            "shape": (len(questions), *_shape(questions)),
            # masks of volumes would take twice the disk space, and lose nothing within CLIP
            "dtype": "float32" if _classifies(questions) else "float16",
        }
        text = json.dumps(about, sort_keys=True)
        path = cache_folder("answers") / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.npy"
        notes = tuple(teacher.notes(questions)) if isinstance(teacher, Noted) else ()

        return cls(path, json.loads(text), teacher.name, notes)

    @property
    def manifest(self) -> Path:
        return self.path.with_suffix(".json")

    def state(self) -> tuple[_State, str]:
        """Return the progress of the pass on disk, and why its files are unusable ("" if usable or missing)."""
        if not self.manifest.is_file():
            return _State(), "they have no manifest" if self.path.exists() else ""

        try:
            document = json_values(self.manifest)
            progress = document["pass"]
            state = _State(int(progress["done"]), int(progress["queries"]), int(progress["crc32"]))
            unlike = [name for name, value in self.about.items() if document.get(name) != value]
        except (Refused, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            return _State(), f"their manifest is damaged ({error or type(error).__name__})"

        if unlike:
            return _State(), f"they were given about something else ({', '.join(unlike)})"

        try:
            rows = np.lib.format.open_memmap(self.path, mode="r")
        except (OSError, ValueError) as error:
            return _State(), f"the file is damaged ({error})"

        has_form = (list(rows.shape), rows.dtype.name) == (self.about["shape"], self.about["dtype"])
        # an array in Fortran order does not store its first rows contiguously
        if not has_form or not rows.flags.c_contiguous:
            return _State(), "the file is damaged"
        if zlib.crc32(rows[: state.done].data) != state.crc32:
            return _State(), "the file is damaged"

        return state, ""

    def rows(self, fresh: bool) -> Array:
        """Return the array for writing: the one on disk, or a new one with all its space allocated."""
        if not fresh:
            return np.lib.format.open_memmap(self.path, mode="r+")

        # removed, not overwritten: another process may have mapped the old file
        self.manifest.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

        shape = tuple(self.about["shape"])
        rows = np.lib.format.open_memmap(self.path, "w+", np.dtype(self.about["dtype"]), shape)
        # a full disk is an error here; on a write into the map it would be a bus error
        if hasattr(os, "posix_fallocate"):
            try:
                with self.path.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, self.path.stat().st_size)
            except OSError:
                # a file without its space would be mistaken for an interrupted pass
                self.path.unlink()
                raise

        return rows

    def write(self, state: _State, created: str) -> None:
        """Record the progress of the pass."""
        document = {
            **self.about,
            "name": self.name,
            "notes": self.notes,
            "created": created,
            "ids_sha256": hashlib.sha256(json.dumps(self.about["ids"]).encode()).hexdigest(),
            "pass": {"done": state.done, "queries": state.queries, "crc32": state.crc32},
        }
        write_json(self.manifest, document)


def _ask(
    teacher: Teacher, questions: Questions, cached: _Cached, state: _State, progress: bool
) -> None:
    """Process the remaining items; after each batch the outputs are on disk and the manifest counts them."""
    rows = cached.rows(fresh=not state.done)
    created = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    total = len(questions)
    bar = terminal.bar(
        total=total,
        initial=state.done,
        desc=f"asking {teacher.name}",
        unit="image",
        shown=progress,
    )

    with bar:
        while state.done < total:
            positions = range(state.done, min(state.done + teacher.batch_size, total))
            answer = _answer(teacher, questions, positions)
            rows_of_batch = _checked(teacher, questions, positions, answer)
            rows[positions.start : positions.stop] = rows_of_batch
            # the outputs are on disk before the manifest counts them
            rows.flush()  # type: ignore[attr-defined]
            crc32 = zlib.crc32(rows_of_batch.tobytes(), state.crc32)
            state = _State(positions.stop, state.queries + 1, crc32)
            cached.write(state, created)
            bar.update(len(positions))


@torch.no_grad()
def _answer(teacher: Teacher, questions: Questions, positions: Sequence[int]) -> Tensor:
    try:
        return teacher.answer(questions, positions)
    except MedflError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise RunError(
            f"teacher {teacher.name!r} fails from public item {questions.ids[positions[0]]!r} on: "
            f"{type(error).__name__}: {text}; what it answered before is kept"
        ) from error


def _checked(
    teacher: Teacher, questions: Questions, positions: Sequence[int], answer: Tensor
) -> Array:
    """Return a batch of outputs in stored form; InputError for another shape, invalid distributions, or NaN."""
    values = answer.detach().float().cpu()
    shape = _shape(questions)
    if tuple(values.shape) != (len(positions), *shape):
        if _classifies(questions):
            expected = f"{shape[0]} classes"
        else:
            expected = f"a grid of {' x '.join(map(str, shape))}"

        raise InputError(
            f"teacher {teacher.name!r} answers with {' x '.join(map(str, values.shape))} values about "
            f"{len(positions)} items",
            f"the public data {questions.bundle.name!r} have {expected}",
            "name a teacher that answers so, or public data that fit it",
        )

    flat = values.flatten(1)
    if _classifies(questions):
        # NaN compares as false, and so is invalid as well
        wrong = ~((flat >= 0).all(1) & ((flat.sum(1) - 1).abs() < _SUM))
        problem = "values that are no probabilities that sum to 1"
        expected = "probabilities of the public classes"
    else:
        wrong = flat.isnan().any(1)
        problem = "NaN"
        expected = "logits of the foreground"

    if wrong.any():
        item = positions[int(wrong.nonzero()[0])]
        raise InputError(
            f"teacher {teacher.name!r} answers about public item {questions.ids[item]!r} with {problem}",
            expected,
            "restore its weights file, or take it out of --set teachers",
        )

    if _classifies(questions):
        return values.contiguous().numpy()

    # in float64: float32 gives different last bits on other processors
    bound = float(torch.logit(torch.tensor(CLIP, dtype=torch.float64)))
    return values.clamp(bound, -bound).half().contiguous().numpy()


def _classifies(questions: Questions) -> bool:
    return questions.bundle.task == "classification"


def _shape(questions: Questions) -> Shape:
    """Return the shape of the output for one item."""
    if _classifies(questions):
        return (len(public_classes(questions.bundle)),)

    return questions.grid


@contextmanager
def _alone(path: Path, say: Print) -> Iterator[None]:
    """Let one process at a time run the teacher; the others then find its outputs in the cache."""
    with path.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(
                f"another process is asking about the same; waiting for {path.with_suffix('.lock')}"
            )
            fcntl.flock(file, fcntl.LOCK_EX)

        yield
