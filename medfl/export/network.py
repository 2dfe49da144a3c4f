"""The network of an exported bundle's configuration: as a method adapts it, and with its initial weights.

`{_target_: medfl.exported.network, network: {...}, method: fedbm, ...}`. Nothing here unpickles, downloads, or imports
by a name in the configuration: methods are medfl's own, weights are safetensors with a given hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from medfl import methods
from medfl.core import InputError, RunError, Task
from medfl.storage import read_weights

TARGET = "medfl.exported.network"


def network(
    network: nn.Module,
    method: str = "",
    options: Mapping[str, object] | None = None,
    task: str = "classification",
    classes: Sequence[str] = (),
    embeddings: Sequence[int] = (),
    weights: str | None = None,
    sha256: str = "",
) -> nn.Module:
    """Return a network as a method of medfl adapts it, with the weights of an export.

    Its state dict holds everything that it computes with, including constants of the method (a text classifier's means
    and variances, a fixed simplex), so that the exported weights need no language model and no random draw.

    Args:
        network: the bundle's own; changed in place.
        method: name of one of medfl's methods; "" leaves the network unchanged.
        options: of the method, if they are not its defaults.
        task: classification, segmentation or other.
        classes: names in label order.
        embeddings: shape (K, M, D) of the prompt embeddings that the method builds a classifier from; their values
            are in the weights.
        weights: safetensors file; None keeps the random initial weights.
        sha256: of that file.

    Raises:
        InputError: no such method, or weights that are missing, of another hash or of another network.
    """
    if method:
        if method not in methods.names():
            raise InputError(
                f"method {method!r} in a configuration",
                "an exported network names one of medfl's",
                "export the run again with medfl export",
            )

        described = Task(task, tuple(classes), lambda plm: _placeholders(embeddings))
        network = complete(methods.load(method, options or {}).adapt(network, described))

    if weights is not None:
        _start(network, Path(weights), sha256)
    return network


def complete(network: nn.Module) -> nn.Module:
    """Make every buffer of a network part of its state dict, in place; return the network."""
    for module in network.modules():
        module._non_persistent_buffers_set.clear()
    return network


def _placeholders(shape: Sequence[int]) -> Tensor:
    """Return distinct unit vectors instead of prompt embeddings."""
    draws = torch.Generator().manual_seed(0)
    return nn.functional.normalize(torch.randn(*shape, generator=draws), dim=-1)


def _start(network: nn.Module, path: Path, sha256: str) -> None:
    advice = "restore the file, or set initial_weights=null to start from new ones"
    try:
        weights, digest = read_weights(path)
        if sha256 and digest != sha256:
            raise InputError(
                f"weights {path} with sha256 {digest[:12]}",
                f"the recorded one is {sha256[:12]}",
                advice,
            )
        network.load_state_dict(weights)
    except (RunError, RuntimeError) as error:  # torch names every tensor: keep the first line
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"weights {path} do not fit ({reason})", "those of the exported network", advice
        ) from error
