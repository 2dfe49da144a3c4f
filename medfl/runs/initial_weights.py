"""The initial weights of a run if they are not drawn: `--init`.

They are read from a file, from a run folder or from a MONAI bundle, as tensors and never as code. The run's record
has their hash, its folder a copy: nothing else is needed to resume, repeat or move the run.
"""

from __future__ import annotations

import base64
import json
import os
import re
import warnings
from collections.abc import Collection, Mapping, Set
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from medfl.bundle.files import read_metadata
from medfl.core import (
    InputError,
    Print,
    Run,
    Tensors,
    Weights,
    beginning,
    json_values,
    listed,
    stream,
    within,
    without,
)
from medfl.problem import Problem, described
from medfl.storage import (
    RunReader,
    hashed,
    load_pickled,
    save_weights,
    weights_file,
    weights_sha256,
)
from medfl.storage.checkpoints import ScriptModule
from medfl.storage.places import BACKBONES

FILE = "init.safetensors"
"""In a run folder."""
JOB_FILE = "init.json"
"""In a job's configuration, where sites accept only JSON: the content of FILE in base64."""
KNOWN = "sha256:"
"""Prefix of an entry in a record."""
_MAX_BYTES = 1 << 30  # of a job's file, which may come from somebody else


def begin_with(bundle: Problem, text: str, say: Print = str, seed: int = 0) -> tuple[Problem, str]:
    """Return a problem whose networks are initialised by `--init`, and the entry for the record.

    Without a text weights are drawn; an existing entry of a record is kept. The weights are compared with the network
    when the federation is made; if a checkpoint names them differently, `say` gets a line about it. Tensors missing
    from the weights of a backbone, such as the head, are drawn with the run's seed.

    Raises:
        InputError: there are no weights, or those of a backbone fit less than half of the network.
    """
    if not text or text.startswith(KNOWN):
        return bundle, text

    with stream(seed, "network"):
        # on the network's own stream, so that --init shifts no other draw
        drawn = bundle.network().state_dict()

    weights = _in_types_of(drawn, read(text, drawn.keys(), say), say)
    if text.partition(":")[0] in BACKBONES:
        weights = _as_backbone(text, drawn, weights, say)

    return bundle.replaced(start=weights), KNOWN + weights_sha256(weights)


def seen_notes(text: str, run: Run) -> tuple[str, ...]:
    """Return a note if a run's model is examined on images that it was trained on."""
    kind, _, folder = text.partition(":")
    if kind != "run" or run.rounds:
        return ()

    trained = RunReader(Path(folder).expanduser()).run
    tested = run.partition.owners("test").keys()
    learned = trained.partition.owners("train").keys() & tested
    # other folds of a folder have another checksum
    is_same = trained.data.checksum == run.data.checksum or trained.data.folder == run.data.folder
    if not learned or not is_same:
        return ()

    return (
        f"the model was trained on {len(learned)} of the {len(tested)} test images: their metrics are too good",
    )


def largest_components(text: str) -> list[str]:
    """Return the structures of which the model of `run:DIR` or `bundle:DIR` keeps only the largest component."""
    kind, _, folder = text.partition(":")
    path = Path(folder).expanduser()
    if kind == "run":
        return RunReader(path).largest_components

    if kind == "bundle":
        return described.largest_components(read_metadata(path))

    return []


def read(text: str, names: Set[str] = frozenset(), say: Print = str) -> Tensors:
    """Return the weights that `--init` names, on the CPU, as a state dict; InputError if there are none.

    Of a checkpoint, they are the tensors whose names match `names` best, without a common prefix.
    """
    path = weights_file(text)
    is_script = False
    try:
        if path.suffix == ".safetensors":
            parts = {"": tensors(path)}
        else:
            loaded = _loaded(path)
            parts = _parts(loaded)
            is_script = isinstance(loaded, ScriptModule)

        ranks = {}
        for place, wrapped in parts.items():
            part = parts[place] = _unwrapped(wrapped, names)
            if part.keys() != wrapped.keys():
                say(f"weights: names of {path.name} are read without the wrapped modules in them")

            for prefix in _prefixes(part, names):
                ranks[place, prefix] = _shared(part, prefix, names)

        place, prefix = max(ranks, key=lambda key: ranks[key])
        shared = ranks.pop((place, prefix))[0]
        rivals = []
        for key, rank in ranks.items():
            if rank[0] == shared > 0:
                rivals.append(repr("".join(key)))

        if rivals:
            say(f"weights: {path.name} has such names after {' and '.join(rivals)} too, left out")

        weights = {}
        for name, tensor in parts[place].items():
            if name.startswith(prefix):
                weights[name.removeprefix(prefix)] = tensor.detach()

        # TorchScript includes constants and buffers that no state dict has
        if is_script and names & weights.keys():
            weights = within(weights, names)

        # a method's additions to a medfl network belong to this network too
        if path.suffix == ".safetensors" and len(weights) < len(parts[place]):
            return parts[place]

        # from a network in a wrapper, which prefixes all names
        alike = os.path.commonprefix([*names])
        wrapper = alike[: alike.rfind(".") + 1]
        if (
            names
            and not names & weights.keys()
            and any(wrapper + name in names for name in weights)
        ):
            weights = {wrapper + name: tensor for name, tensor in weights.items()}
            say(f"weights: they lack {wrapper!r} before their names, which is put there")

        if left_out := len(parts[place]) - len(weights):
            say(
                f"weights: {left_out} tensors are left out, whose names do not begin with {prefix!r}"
            )
        if prefix or place:
            say(f"weights: those after {place + prefix!r} in the names of {path.name}")

        return _finite(weights)
    except Exception as error:  # torch and safetensors raise several types for damaged files
        raise InputError(
            f"weights {text}: {path.name} is not read as weights ({error})",
            "names and tensors, as safetensors or torch.save(network.state_dict(), FILE) write them",
            "save the state dict with one of the two",
        ) from error


def _as_backbone(text: str, drawn: Weights, weights: Weights, say: Print) -> Tensors:
    """Return a network's tensors: from a backbone if name and shape match, otherwise as drawn."""
    fitting = {}
    for name, tensor in weights.items():
        if name in drawn and drawn[name].shape == tensor.shape:
            fitting[name] = tensor

    remaining = list(without(drawn, fitting))
    if len(remaining) > len(fitting):
        raise InputError(
            f"--init {text}: {len(fitting)} of its {len(weights)} tensors are of this network",
            f"at least half of the network's {len(drawn)}, by name and shape, as {listed([*drawn])}",
            "choose the backbone's network with --config network=NAME",
        )

    say(f"--init {text}: {len(fitting)} tensors; drawn are {listed(remaining) or 'none'}")
    return {name: fitting.get(name, tensor) for name, tensor in drawn.items()}


def _in_types_of(drawn: Weights, weights: Weights, say: Print) -> Tensors:
    """Convert weights to a network's dtypes if both are floating point: a file may have half precision."""
    changed = {}
    for name, tensor in weights.items():
        dtype = drawn.get(name, tensor).dtype
        if tensor.dtype != dtype and dtype.is_floating_point and tensor.is_floating_point():
            changed[name] = tensor.to(dtype)

    if changed:
        types = sorted({str(weights[name].dtype).removeprefix("torch.") for name in changed})
        say(
            f"weights: {len(changed)} tensors are {' and '.join(types)}, read as the network's type"
        )

    return {**weights, **changed}


def tensors(path: Path) -> Tensors:
    """Return the tensors of a safetensors file by name; any error means that it contains none."""
    try:
        return _finite(safetensors.torch.load(hashed(path)[0].getvalue()))
    except safetensors.SafetensorError as error:
        with path.open("rb") as file:
            raise ValueError(f"{error}; {beginning(file)}") from error


def _loaded(path: Path) -> Mapping[object, object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = load_pickled(path)

    if not isinstance(loaded, Mapping):
        raise ValueError("it holds no tensors by name")

    return loaded


def _parts(loaded: Mapping[object, object]) -> dict[str, Tensors]:
    """Return the named tensors of each dict in a checkpoint by location, e.g. `net.`; other values are ignored."""
    # grows during the loop: a checkpoint may contain nested dicts
    todo = [("", loaded)]
    parts = {}
    for place, value in todo:
        tensors = {}
        for name, part in value.items():
            if isinstance(part, Tensor):
                tensors[str(name)] = part
            elif isinstance(part, Mapping):
                todo.append((f"{place}{name}.", part))

        if tensors:
            parts[place] = tensors

    if not parts:
        raise ValueError("it holds no tensors")

    return parts


def _unwrapped(weights: Tensors, names: Set[str]) -> Tensors:
    """Remove what module wrappers insert into names, such as `conv._orig_mod.weight` of torch.compile.

    Wrappers hold their module under a private name, as PyTorch's own do, or as `module`.
    """
    wrapper = re.compile(r"(?<![^.])(_\w+|module)\.")
    own_parts = {part for name in names for part in name.split(".")}
    renamed = {}
    is_within = False
    for name, tensor in weights.items():
        plain = wrapper.sub(lambda match: match[0] * (match[1] in own_parts), name)
        is_within |= _ends_in(plain, names) and not _ends_in(name, names)
        renamed[plain] = tensor

    return renamed if is_within and len(renamed) == len(weights) else weights


def _ends_in(name: str, names: Set[str]) -> bool:
    return name in names or any(name[dot.end() :] in names for dot in re.finditer(r"\.", name))


def _prefixes(weights: Collection[str], names: Collection[str]) -> list[str]:
    """Return the possible prefixes of the network's names among those of weights, such as `module.`, in order."""
    prefixes = [""]
    for name in weights:
        for match in re.finditer(r"\.", name):
            if name[match.end() :] in names and name[: match.end()] not in prefixes:
                prefixes.append(name[: match.end()])

    return prefixes


def _shared(weights: Collection[str], prefix: str, names: Collection[str]) -> tuple[int, int]:
    """Rank a prefix: number of matching names; without any the most tensors."""
    shared = sum(f"{prefix}{name}" in weights for name in names)
    return shared, len(weights) * (not shared)


def _finite(weights: Weights) -> Tensors:
    for name, tensor in weights.items():
        # an expanded tensor of a pickle: a small file could fill the memory
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"{name!r} has more numbers than the file")

    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name!r} is not finite")

    return dict(weights)


def save(bundle: Problem, run: Run, folder: Path) -> None:
    """Write a run's initial weights into its folder, unless they are there; RunError if the disk is full."""
    if run.init and bundle.start is not None and not (folder / FILE).is_file():
        save_weights(folder / FILE, bundle.start)


def write_for_job(bundle: Problem, run: Run, folder: Path) -> list[Path]:
    """Write a run's initial weights in the form that a job carries; return the files written."""
    if not run.init or bundle.start is None:
        return []
    weights = {name: tensor.contiguous() for name, tensor in bundle.start.items()}
    data = safetensors.torch.save(weights)
    (folder / JOB_FILE).write_text(json.dumps({"safetensors": base64.b64encode(data).decode()}))
    return [folder / JOB_FILE]


def restored(bundle: Problem, run: Run, folder: Path | None) -> Problem:
    """Return a recorded run's problem with the initial weights in the run's folder, or in that of a job.

    Raises:
        InputError: they are damaged, or different ones.
    """
    path = first_file(folder, FILE, JOB_FILE)
    if not run.init or path is None:
        return bundle

    try:
        if path.name == JOB_FILE:
            weights = _from_job(path)
        else:
            weights = tensors(path)
    except Exception as error:  # as in `read`
        raise InputError(
            f"{path} is damaged ({error})", "the run's initial weights", "restore it"
        ) from error

    if KNOWN + weights_sha256(weights) != run.init:
        raise InputError(
            f"{path} holds other weights than the run began with",
            f"those with {run.init[:19]}",
            "restore it",
        )

    return bundle.replaced(start=weights)


def first_file(folder: Path | None, *names: str) -> Path | None:
    """Return the first of these files that a folder has, None if it has none of them or there is no folder."""
    for name in names:
        if folder and (folder / name).is_file():
            return folder / name

    return None


def _from_job(path: Path) -> Tensors:
    document = json_values(path, _MAX_BYTES)
    return _finite(safetensors.torch.load(base64.b64decode(document["safetensors"], validate=True)))
