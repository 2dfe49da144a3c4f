"""The weights that a run begins with where it does not draw them: `--init`.

They are read from a file, from a run's folder or from a MONAI bundle, as tensors and never as code. The run's record
has their hash, its folder a copy: nothing else has to be there when it is resumed, repeated, or trained elsewhere.
"""

from __future__ import annotations

import base64
import json
import os
import re
import warnings
from collections.abc import Collection, Mapping, Set
from pathlib import Path

import safetensors.torch
from torch import Tensor

from medfl.core.errors import InputError
from medfl.core.message import Tensors, Weights
from medfl.core.names import listed
from medfl.core.run import Run
from medfl.core.seeding import stream
from medfl.core.terminal import Print
from medfl.core.untrusted import json_values
from medfl.problem.problem import Problem
from medfl.storage.checkpoints import ScriptModule
from medfl.storage.files import load_pickled, save_weights, weights_sha256
from medfl.storage.places import BACKBONES, weights_file

FILE = "init.safetensors"
"""Of a run's folder."""
JOB_FILE = "init.json"
"""Of a job's configuration, where sites take nothing but JSON: the content of FILE in base64."""
KNOWN = "sha256:"
"""What a record says begins so."""
_MAX_BYTES = 1 << 30


def begin_with(bundle: Problem, text: str, say: Print = str, seed: int = 0) -> tuple[Problem, str]:
    """Return a problem whose networks begin as `--init` says, and what the record says of it.

    Without a text weights are drawn; what a record said is left as it is. The weights are compared with the network
    when the federation is made; where a checkpoint has them under other names, `say` gets a line about it. What the
    weights of a backbone lack, as the head, is drawn by the run's seed.

    Raises:
        InputError: no weights are there, or those of a backbone fit less than half of the network.
    """
    if not text or text.startswith(KNOWN):
        return bundle, text

    with stream(seed, "network"):
        drawn = bundle.network().state_dict()

    weights = _in_types_of(drawn, read(text, drawn.keys(), say), say)
    if text.partition(":")[0] in BACKBONES:
        weights = _as_backbone(text, drawn, weights, say)

    return bundle.replaced(start=weights), KNOWN + weights_sha256(weights)


def read(text: str, names: Set[str] = frozenset(), say: Print = str) -> Tensors:
    """Return the weights that `--init` names, on the CPU, as a state dict; InputError if there are none.

    They are those of a checkpoint that are called most like `names`, without what it has before each name.
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
        for place, part in parts.items():
            for prefix in _prefixes(part, names):
                ranks[place, prefix] = _shared(part, prefix, names)

        place, prefix = max(ranks, key=lambda key: ranks[key])
        shared = ranks.pop((place, prefix))[0]
        rivals = [repr("".join(key)) for key, rank in ranks.items() if rank[0] == shared > 0]
        if rivals:
            say(f"--init: {path.name} has such names after {' and '.join(rivals)} too, left out")

        weights = {}
        for name, tensor in parts[place].items():
            if name.startswith(prefix):
                weights[name.removeprefix(prefix)] = tensor.detach()

        # TorchScript has constants and buffers among them that no state dict has
        if is_script and names & weights.keys():
            weights = {name: tensor for name, tensor in weights.items() if name in names}

        # what a method added to a network of medfl is of this network too
        if path.suffix == ".safetensors" and len(weights) < len(parts[place]):
            return parts[place]

        # of a network in a wrapper, whose names all begin alike
        alike = os.path.commonprefix([*names])
        wrapper = alike[: alike.rfind(".") + 1]
        if (
            names
            and not names & weights.keys()
            and any(wrapper + name in names for name in weights)
        ):
            weights = {wrapper + name: tensor for name, tensor in weights.items()}
            say(f"--init: the weights lack {wrapper!r} before their names, which is put there")

        if left_out := len(parts[place]) - len(weights):
            say(
                f"--init: {left_out} tensors are left out, whose names do not begin with {prefix!r}"
            )
        if prefix or place:
            say(
                f"--init: the weights are those after {place + prefix!r} in the names of {path.name}"
            )

        return _finite(weights)
    except Exception as error:  # torch and safetensors raise several types for damaged files
        raise InputError(
            f"--init {text}: {path.name} is not read as weights ({error})",
            "names and tensors, as safetensors or torch.save(network.state_dict(), FILE) write them",
            "save the state dict with one of the two",
        ) from error


def _as_backbone(text: str, drawn: Weights, weights: Weights, say: Print) -> Tensors:
    """Return a network's tensors, those of a backbone by name and shape, and the others as drawn."""
    fitting = {}
    for name, tensor in weights.items():
        if name in drawn and drawn[name].shape == tensor.shape:
            fitting[name] = tensor

    remaining = [name for name in drawn if name not in fitting]
    if len(remaining) > len(fitting):
        raise InputError(
            f"--init {text}: {len(fitting)} of its {len(weights)} tensors are of this network",
            f"at least half of the network's {len(drawn)}, by name and shape, as {listed([*drawn])}",
            "choose the backbone's network with --config network=NAME",
        )

    say(f"--init {text}: {len(fitting)} tensors; drawn are {listed(remaining) or 'none'}")
    return {name: fitting.get(name, tensor) for name, tensor in drawn.items()}


def _in_types_of(drawn: Weights, weights: Weights, say: Print) -> Tensors:
    """Return weights in the number types of a network, where both are floating point: a file may have halves."""
    changed = {}
    for name, tensor in weights.items():
        dtype = drawn.get(name, tensor).dtype
        if tensor.dtype != dtype and dtype.is_floating_point and tensor.is_floating_point():
            changed[name] = tensor.to(dtype)

    if changed:
        types = sorted({str(weights[name].dtype).removeprefix("torch.") for name in changed})
        say(f"--init: {len(changed)} tensors are {' and '.join(types)}, read as the network's type")

    return {**weights, **changed}


def tensors(path: Path) -> Tensors:
    """Return the tensors of a safetensors file by name; any error means that it holds none."""
    return _finite(safetensors.torch.load_file(path))


def _loaded(path: Path) -> Mapping[object, object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = load_pickled(path)

    if not isinstance(loaded, Mapping):
        raise ValueError("it holds no tensors by name")

    return loaded


def _parts(loaded: Mapping[object, object]) -> dict[str, Tensors]:
    """Return the named tensors of each dict in a checkpoint by where it is, as `net.`; other values are left out."""
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


def _prefixes(weights: Collection[str], names: Collection[str]) -> list[str]:
    """Return what may stand before the network's names in those of weights, as `module.`, in their order."""
    prefixes = [""]
    for name in weights:
        for match in re.finditer(r"\.", name):
            if name[match.end() :] in names and name[: match.end()] not in prefixes:
                prefixes.append(name[: match.end()])

    return prefixes


def _shared(weights: Collection[str], prefix: str, names: Collection[str]) -> tuple[int, int, int]:
    """Rank a prefix: how many names the weights then have, and how few others; of no names the most tensors."""
    shared = sum(f"{prefix}{name}" in weights for name in names)
    return shared, -len(prefix), len(weights)


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
    """Write a run's initial weights as a job carries them; return the files written."""
    if not run.init or bundle.start is None:
        return []
    weights = {name: tensor.contiguous() for name, tensor in bundle.start.items()}
    data = safetensors.torch.save(weights)
    (folder / JOB_FILE).write_text(json.dumps({"safetensors": base64.b64encode(data).decode()}))
    return [folder / JOB_FILE]


def restored(bundle: Problem, run: Run, folder: Path | None) -> Problem:
    """Return a recorded run's problem with the initial weights in the run's folder, or in that of a job.

    Raises:
        InputError: they are damaged, or others.
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
