"""A bundle's protocol: the values of its federated.yaml, with the presets that a user picks laid over them.

It holds a value for any setting of a run that a user leaves out (`rounds`, `lr`, ...), options by method (`methods`),
ids of the bundle's configuration (`config`), and `presets`: name -> such values again, with `about`, what it is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from medfl.core.errors import InputError, did_you_mean

_DEFAULTS: Mapping[str, Any] = {
    "sites": 4, "partition": "iid", "cohort": 1.0, "rounds": 10, "local_epochs": 1, "batch_size": None, "lr": None,
    "lr_decay": 1.0, "decay_per": "round", "site_weights": "samples", "keep_optimizer": False, "patience": 0,
    "split": None, "methods": {}, "config": {},
}  # fmt: skip


def resolved(bundle: str, values: Mapping[str, Any], presets: Iterable[str] = ()) -> dict[str, Any]:
    """Return a protocol's values, complete, with the presets laid over them in their order.

    Args:
        bundle: its name, for errors.
        values: the content of its federated.yaml.
        presets: names of presets in it.

    Raises:
        InputError: no such preset, or one that sets what no run has.
    """
    settled, offered = {**_DEFAULTS, **values}, values.get("presets") or {}
    for name in presets:
        if name not in offered:
            raise InputError(
                f"preset {name!r} of bundle {bundle!r}",
                f"its presets are: {', '.join(offered) or 'none'}",
                did_you_mean(name, offered, f"see medfl bundles {bundle}") if offered else "leave --preset out",
            )
        preset: Mapping[str, Any] = {key: value for key, value in offered[name].items() if key != "about"}
        if unknown := sorted(preset.keys() - _DEFAULTS.keys()):
            raise InputError(
                f"{unknown[0]!r} in preset {name!r} of bundle {bundle!r}",
                f"a preset sets {', '.join(sorted(_DEFAULTS))}",
                f"take {unknown[0]!r} out of the bundle's federated.yaml",
            )
        before, given = dict(settled), preset.get("methods") or {}
        options = {method: {**(settled["methods"].get(method) or {}), **given[method]} for method in given}
        settled |= preset
        settled["methods"] = {**before["methods"], **options}
        settled["config"] = {**before["config"], **(preset.get("config") or {})}
    return settled


def options_for(protocol: Mapping[str, Any], method: str) -> Mapping[str, Any]:
    """Return the options that a protocol gives a method."""
    options: Mapping[str, Any] = protocol["methods"].get(method) or {}
    return options
