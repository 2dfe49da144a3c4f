"""The text embeddings of a run: its record has their checksum, and its folder a copy, which is used from then on.

So a run is resumed, repeated or exported without the language model or the user's file of embeddings. A FLARE job
carries them to its sites. A run's initial weights (`medfl.runs.initial_weights`) are stored in the same way.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from medfl import methods
from medfl.core import InputError, Run, TextRecord, json_values
from medfl.methods.base import Method
from medfl.problem import Problem
from medfl.runs import initial_weights
from medfl.storage import load_weights, write_atomic

FILE = "text.safetensors"
"""In a run folder: `embeddings` (K, M, D) float32, as used."""
JOB_FILE = "text.json"
"""In a job's configuration, where sites accept only JSON: `shape`, and the float32 values in base64."""
_MAX_BYTES = 1 << 28  # of a job's file, which may come from somebody else


def fingerprint(embeddings: Tensor) -> str:
    """Return the SHA-256 of the shape and the little-endian float32 values of embeddings."""
    values = embeddings.detach().cpu().float().contiguous()
    # including the shape: the same values could belong to other classes' prompts
    shape = ",".join(map(str, values.shape)).encode()
    return hashlib.sha256(shape + b"\0" + values.numpy().astype("<f4").tobytes()).hexdigest()


def language_model(method: Method) -> str:
    """Return the language model whose embeddings a method learns from, "" for none."""
    reader = methods.extra(method, methods.TextEmbeddings)
    return reader.language_model if reader is not None else ""


def make_record(bundle: Problem, method: Method) -> TextRecord | None:
    """Return the record of a method's embeddings, None if it uses none; InputError if they are missing or misfit."""
    plm = language_model(method)
    if not plm or bundle.task not in method.tasks:
        return None
    embeddings = bundle.embeddings(plm)
    return TextRecord(bundle.plm_of(plm), fingerprint(embeddings), tuple(embeddings.shape))


def save(bundle: Problem, run: Run, method: Method, folder: Path) -> None:
    """Write a run's embeddings and initial weights into its folder, if not there yet; RunError if the disk is full."""
    initial_weights.save(bundle, run, folder)
    path = folder / FILE
    if run.text is not None and not path.is_file():
        values = bundle.embeddings(language_model(method)).contiguous()
        write_atomic(path, safetensors.torch.save({"embeddings": values}))


def write_for_job(bundle: Problem, run: Run, method: Method, folder: Path) -> list[Path]:
    """Write a run's embeddings and initial weights in the form that a job carries; return the files written."""
    files = initial_weights.write_for_job(bundle, run, folder)
    if run.text is None:
        return files

    values = bundle.embeddings(language_model(method)).cpu().float().numpy().astype("<f4")
    text = {"shape": list(values.shape), "float32": base64.b64encode(values.tobytes()).decode()}
    (folder / JOB_FILE).write_text(json.dumps(text))
    return [*files, folder / JOB_FILE]


def restored(bundle: Problem, run: Run, method: Method, folder: Path | None) -> Problem:
    """Return a recorded run's problem with its original embeddings and initial weights.

    Both are read from `folder`, the run folder or a job's configuration. Missing embeddings are computed again, and
    must have the record's checksum; records without a checksum accept them as they are.

    Raises:
        InputError: there are none, or they differ from the record's.
    """
    bundle = initial_weights.restored(bundle, run, folder)
    if run.text is None:
        return bundle

    path = initial_weights.first_file(folder, FILE, JOB_FILE)
    if path is not None:
        embeddings = _read(path)
        source = str(path)
        bundle = bundle.with_embeddings(language_model(method), embeddings, run.text.plm)
    else:
        embeddings = bundle.embeddings(language_model(method))
        source = f"plm={run.options.get('plm', '')}"

    checksum = fingerprint(embeddings)
    if checksum != run.text.sha256:
        raise InputError(
            f"the text embeddings of {source} (checksum {checksum[:12]})",
            f"the run used those of {run.text.plm!r} with checksum {run.text.sha256[:12]}",
            "restore them, or start a new run",
        )

    return bundle


def _read(path: Path) -> Tensor:
    try:
        if path.name == JOB_FILE:
            embeddings = _from_job(path)
        else:
            embeddings = load_weights(path)["embeddings"]

        if embeddings.ndim != 3 or embeddings.dtype != torch.float32:
            raise ValueError(f"its tensor is {tuple(embeddings.shape)} {embeddings.dtype}")
        if not embeddings.isfinite().all():
            raise ValueError("its values are not finite")
    except Exception as error:  # the Rust reader raises its own type for each kind of damage
        raise InputError(
            f"{path} is damaged ({error})", "the text embeddings of the run", "restore it"
        ) from error

    return embeddings


def _from_job(path: Path) -> Tensor:
    document = json_values(path, _MAX_BYTES)
    values = np.frombuffer(base64.b64decode(document["float32"], validate=True), "<f4")
    # the file's numbers are little-endian on any machine
    return torch.from_numpy(values.astype(np.float32)).reshape(*map(int, document["shape"]))
