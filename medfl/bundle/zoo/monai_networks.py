"""A MONAI network in place of a bundle's own: `--config network=monai:DenseNet121`, `network_args={...}`.

The bundle's `network_def` becomes a component of this class. Input and output channels, and the number of spatial
dimensions, are those of the original network. The inspection of bundles (`medfl.policy.components`) decides which
networks and arguments are permitted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import monai.networks.nets
from torch import nn

from medfl.core import Config, Document, InputError, Refused, did_you_mean, not_among
from medfl.policy.components import check_arguments, component

PREFIX = "monai:"
ARGUMENTS = "network_args"
_IDS = ("network_def", "network")
"""Ids under which bundles define their network."""
_SAME = (("in_channels", "n_input_channels"), ("num_classes", "out_channels"), ("spatial_dims",))
"""Names of the same argument in different classes."""
_ADAPTERS = ("NetAdapter", "TorchVisionFCModel")
"""Wrappers that put a head on another network: their `in_channels` are those of the head."""


def replaced(values: Config, content: Config) -> Document:
    """Return overrides in which a MONAI network is a component: existing ids -> value.

    Raises:
        InputError: there is no such network, it is not permitted, or lacks arguments.
    """
    network = values.get("network", values.get("network_name"))
    if not (isinstance(network, str) and network.startswith(PREFIX)):
        if ARGUMENTS in values and ARGUMENTS not in content:
            raise InputError(
                f"--config {ARGUMENTS}={values[ARGUMENTS]}",
                "arguments of a network of MONAI",
                f"add --config network={PREFIX}NAME",
            )

        return dict(values)

    changed = dict(values)
    arguments = changed.pop(ARGUMENTS, None) or {}
    for key in ("network", "network_name"):
        changed.pop(key, None)

    for key in _IDS:
        node = content.get(key)
        if isinstance(node, Mapping) and "_target_" in node:
            if "network_name" in content:
                changed["network_name"] = network

            return {**changed, key: _node(network, arguments, node)}

    return {**changed, _IDS[0]: network}  # the bundle has no such id, and its error says so


def names() -> tuple[str, ...]:
    """Return the permitted MONAI networks by name, without MONAI's aliases."""
    candidates = ((name, _network_class(name)) for name in sorted(vars(monai.networks.nets)))
    return tuple(
        name for name, factory in candidates if factory is not None and factory.__name__ == name
    )


def _network_class(name: str) -> Callable[..., Any] | None:
    """Return the MONAI class of this name if it is a network permitted by inspection."""
    try:
        factory = component(f"monai.networks.nets.{name}")
    except Refused:
        return None

    # MONAI makes its ResNets by functions
    is_network = inspect.isclass(factory) and issubclass(factory, nn.Module)
    if (is_network or name.startswith("resnet")) and name not in _ADAPTERS:
        return factory

    return None


def _node(network: str, arguments: object, former: Config) -> Document:
    name = network.removeprefix(PREFIX)
    factory = _network_class(name)
    if factory is None:
        network_names = names()
        advice = did_you_mean(name, network_names, "choose one of these")
        raise InputError(
            f"--config network={network}",
            f"the networks of MONAI are {', '.join(network_names)}",
            advice,
        )

    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise InputError(
            f"--config {ARGUMENTS}={arguments}",
            "arguments by name",
            f"give {ARGUMENTS}={{name: value}}",
        )

    parameters = _parameters(factory)
    if odd := not_among(arguments, parameters):
        advice = did_you_mean(odd[0], parameters, "leave it out")
        raise InputError(
            f"{odd[0]!r} in {ARGUMENTS}", f"{name} takes {', '.join(parameters)}", advice
        )

    values = {**_carried_over(former, parameters), **arguments}
    # else it would be downloaded
    if "pretrained" in parameters:
        values.setdefault("pretrained", False)

    missing = []
    for key, parameter in inspect.signature(factory).parameters.items():
        is_needed = key in parameters and parameter.default is parameter.empty
        if is_needed and key not in values:
            missing.append(key)

    if missing:
        raise InputError(
            f"--config network={network} without {', '.join(missing)}",
            f"{name} needs them",
            f"add --config {ARGUMENTS}={{{', '.join(f'{key}: ...' for key in missing)}}}",
        )

    try:
        check_arguments(factory, values)
    except Refused as refused:
        raise InputError(
            f"--config network={network}: {refused}", "what inspection lists", "leave it out"
        ) from refused

    return {"_target_": f"monai.networks.nets.{name}", **values}


def _carried_over(former: Config, parameters: Mapping[str, object]) -> Document:
    """Return the channels and dimensions of the previous network, under the names of the new one."""
    # medfl's own 2D networks do not state their dimensions

    default = {}
    if str(former["_target_"]).startswith("medfl."):
        default = {"spatial_dims": 2}

    before = {**default, **former}
    carried = {}
    for spellings in _SAME:
        value = next((before[key] for key in spellings if key in before), None)
        key = next((key for key in spellings if key in parameters), None)
        if value is not None and key is not None:
            carried[key] = value

    return carried


def _parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a network, including those that it passes on to its class."""
    if inspect.isclass(factory):
        makers: tuple[Any, ...] = inspect.getmro(factory)
    else:
        makers = (
            factory,
            monai.networks.nets.ResNet,
        )  # to which resnet50 and so on hand their arguments

    parameters: dict[str, inspect.Parameter] = {}
    for maker in makers:
        of_maker = inspect.signature(maker).parameters
        parameters = {**of_maker, **parameters}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in of_maker.values()):
            break

    return {
        key: parameter
        for key, parameter in parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
