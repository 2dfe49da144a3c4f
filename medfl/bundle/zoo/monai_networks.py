"""A network of MONAI in the place of a bundle's own: `--config network=monai:DenseNet121`, `network_args={...}`.

The bundle's `network_def` becomes a component of this class. How many channels go in and come out, and the number of
spatial dimensions, stay those of the network that it had. What may be made, and with which arguments, says the
inspection of bundles (`medfl.policy.components`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import monai.networks.nets
from torch import nn

from medfl.core.documents import Config, Document
from medfl.core.errors import InputError, did_you_mean
from medfl.core.untrusted import Refused
from medfl.policy.components import check_arguments, component

PREFIX = "monai:"
ARGUMENTS = "network_args"
_IDS = ("network_def", "network")
"""Ids under which bundles define their network."""
_SAME = (("in_channels", "n_input_channels"), ("num_classes", "out_channels"), ("spatial_dims",))
"""Names of one argument in different classes."""
_ADAPTERS = ("NetAdapter", "TorchVisionFCModel")
"""What puts a head on another network: their `in_channels` are those of the head."""


def replaced(values: Config, content: Config) -> Document:
    """Return overrides in which a network of MONAI is a component: ids that exist -> value.

    Raises:
        InputError: there is no such network, it may not be made, or lacks arguments.
    """
    network = values.get("network", values.get("network_name"))
    if not (isinstance(network, str) and network.startswith(PREFIX)):
        if ARGUMENTS in values and ARGUMENTS not in content:
            problem = f"--config {ARGUMENTS}={values[ARGUMENTS]}"
            raise InputError(
                problem, "arguments of a network of MONAI", f"add --config network={PREFIX}NAME"
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

    return {**changed, _IDS[0]: network}  # the bundle has no such id, which its error says


def names() -> tuple[str, ...]:
    """Return the networks of MONAI that may be named, without MONAI's other spellings of the same."""
    candidates = ((name, _network_class(name)) for name in sorted(vars(monai.networks.nets)))
    return tuple(
        name for name, factory in candidates if factory is not None and factory.__name__ == name
    )


def _network_class(name: str) -> Callable[..., Any] | None:
    """Return what MONAI calls so if it makes a network and inspection lists it."""
    try:
        factory = component(f"monai.networks.nets.{name}")
    except Refused:
        return None

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
    if odd := [key for key in arguments if key not in parameters]:
        advice = did_you_mean(odd[0], parameters, "leave it out")
        raise InputError(
            f"{odd[0]!r} in {ARGUMENTS}", f"{name} takes {', '.join(parameters)}", advice
        )

    values = {**_carried_over(former, parameters), **arguments}
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
    """Return the channels and dimensions of the network that was there, under the names of the new one."""
    # medfl's own networks of pictures do not say their dimensions

    if str(former["_target_"]).startswith("medfl."):
        default = {"spatial_dims": 2}
    else:
        default = {}

    before = {**default, **former}
    carried: Document = {}
    for spellings in _SAME:
        value = next((before[key] for key in spellings if key in before), None)
        key = next((key for key in spellings if key in parameters), None)
        if value is not None and key is not None:
            carried[key] = value

    return carried


def _parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return what a network takes, also where it hands arguments on to the class that it is made of."""
    if inspect.isclass(factory):
        makers: tuple[Any, ...] = inspect.getmro(factory)
    else:
        makers = (factory, monai.networks.nets.ResNet)

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
