"""What the configuration of an exported bundle names: a network as a method made it, and the weights it starts from.

`{_target_: medfl.exported.network, network: {...}, method: fedbm, ...}`. Nothing here unpickles, fetches, or imports by
a name that the configuration gives: methods are medfl's own, weights are safetensors of a stated hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medfl import methods
from medfl.core.errors import InputError, RunError
from medfl.core.storage import load_weights
from medfl.core.task import Task

TARGET = "medfl.exported.network"


def network(
    network: nn.Module,
    method: str = "",
    options: Mapping[str, Any] | None = None,
    task: str = "classification",
    classes: Sequence[str] = (),
    embeddings: Sequence[int] = (),
    weights: str | None = None,
    sha256: str = "",
) -> nn.Module:
    """Return a network as a method of medfl adapts it, with the weights of an export.

    All that it computes with is in its state dict, also what is no weight of the method (a text classifier's means and
    variances, a fixed simplex): with the exported weights nothing depends on a language model or on a draw.

    Args:
        network: the bundle's own; changed in place.
        method: name of one of medfl's methods; "" leaves the network as it is.
        options: of the method, where they are not its defaults.
        task: classification, segmentation or other.
        classes: names in label order.
        embeddings: shape (K, M, D) of the prompt embeddings that the method builds a classifier from; their values
            are in the weights.
        weights: file of safetensors; None leaves the weights as they are drawn.
        sha256: of that file.

    Raises:
        InputError: no such method, or weights that are not there, are others, or are of another network.
    """
    if method:
        if method not in methods.names():
            raise InputError(
                f"method {method!r} in a configuration", "an exported network names one of medfl's", "export it anew"
            )
        held = Task(task, tuple(classes), lambda plm: _placeholders(embeddings))
        network = complete(methods.load(method, options or {}).adapt(network, held))
    if weights is not None:
        _start(network, Path(weights), sha256)
    return network


def complete(network: nn.Module) -> nn.Module:
    """Take every buffer of a network into its state dict, in place; return the network."""
    for module in network.modules():
        module._non_persistent_buffers_set.clear()
    return network


def _placeholders(shape: Sequence[int]) -> Tensor:
    """Return distinct unit vectors in the place of prompt embeddings."""
    draws = torch.Generator().manual_seed(0)
    return nn.functional.normalize(torch.randn(*shape, generator=draws), dim=-1)


def _start(network: nn.Module, path: Path, sha256: str) -> None:
    advice = "restore the file, or set initial_weights=null to start from new ones"
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if sha256 and found != sha256:
            raise InputError(f"weights {path} with sha256 {found[:12]}", f"the recorded one is {sha256[:12]}", advice)
        network.load_state_dict(load_weights(path))
    except OSError as error:
        raise InputError(f"weights {path} cannot be read ({error.strerror})", "those of the export", advice) from error
    except (RunError, RuntimeError) as error:  # torch names every tensor: the first line will do
        said = str(error).strip().splitlines()[0]
        raise InputError(f"weights {path} do not fit ({said})", "those of the exported network", advice) from error
