"""Layers of a network chosen by a text: names, ends of names, patterns with * and ?, or kinds, with commas between."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from torch import nn

from medfl.core.errors import InputError
from medfl.core.message import Tensors
from medfl.networks.heads import head_name
from medfl.training import NORMS

_CONV = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_MATRICES: tuple[type[nn.Module], ...] = (nn.Linear, *_CONV, nn.MultiheadAttention)
_KINDS: Mapping[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear,),
    "conv": _CONV,
    "norm": NORMS,
}
_WEIGHTS = ("weight", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
NONE = "none"


def whole_tensor_names(network: nn.Module, text: str) -> frozenset[str]:
    """Return the state-dict names of the chosen layers, under all names that a shared tensor has.

    Args:
        network: whose.
        text: which layers; the kinds are `head` and `norm`, "" and `none` are no layer.

    Raises:
        InputError: no such layer.
    """
    layers = {name: layer for name, layer in network.named_modules() if name and layer.state_dict()}
    candidates: dict[str, nn.Module | None] = dict(layers)
    if "head" in text.split(","):
        candidates.setdefault("head", None)  # a layer of this name comes before the kind

    names = set(_chosen(candidates, text.strip() or NONE, "full"))
    if "head" in names and "head" not in layers:
        names.remove("head")
        names.add(head_name(network))

    tensors = network.state_dict(keep_vars=True)
    prefixes = tuple(f"{layer}." for layer in names)
    # By identity: a shared tensor has several names, and all of them count.
    tensor_ids = {id(tensor) for name, tensor in tensors.items() if name.startswith(prefixes)}

    return frozenset(name for name, tensor in tensors.items() if id(tensor) in tensor_ids)


def matrices(network: nn.Module, text: str, but: Collection[str] = ()) -> Tensors:
    """Return the weights of the chosen layers as matrices (first dimension, all others), by their names.

    Args:
        network: whose.
        text: which layers; the kinds are `linear` and `conv`, "" is all that fit, `none` is no layer.
        but: names of weights that are left out. So is a tensor of several layers: a change of one changes the others.

    Raises:
        InputError: no such layer; names those that fit.
    """
    ids = [id(parameter) for _, parameter in network.named_parameters(remove_duplicate=False)]
    fitting: dict[str, Tensors] = {}
    layers = {
        name: layer for name, layer in network.named_modules() if isinstance(layer, _MATRICES)
    }
    for name, layer in layers.items():
        weights: Tensors = {}
        for key in _WEIGHTS:
            weight = layer._parameters.get(key)
            full_name = f"{name}.{key}".lstrip(".")
            if weight is not None and ids.count(id(weight)) == 1 and full_name not in but:
                weights[full_name] = weight.detach().flatten(1)

        if weights:
            fitting[name] = weights

    chosen_matrices: Tensors = {}
    for name in _chosen({name: layers[name] for name in fitting}, text, "layers"):
        chosen_matrices.update(fitting[name])

    return chosen_matrices


def _chosen(layers: Mapping[str, nn.Module | None], text: str, option: str) -> list[str]:
    """Return the layers that a text chooses, in the network's order; all where it is empty."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    for part in parts:
        if part != NONE and not any(_is(part, name, layer) for name, layer in layers.items()):
            names = [name for name in layers if name]
            kinds = "linear, conv" if option == "layers" else "head, norm"
            raise InputError(
                f"{option}={part}: no layer of the network that fits",
                f"layers that fit are {', '.join(names)[:400] or 'none'}",
                f"name some, all of a kind ({kinds}), or {NONE}",
            )

    if not parts:
        return list(layers)

    return [name for name, layer in layers.items() if any(_is(part, name, layer) for part in parts)]


def _is(part: str, name: str, layer: nn.Module | None) -> bool:
    by_kind = part in _KINDS and isinstance(layer, _KINDS[part])
    return by_kind or name == part or name.endswith(f".{part}") or fnmatchcase(name, part)
