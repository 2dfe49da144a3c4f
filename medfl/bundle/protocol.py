"""A bundle's protocol: the values of its federated.yaml, overlaid with the presets chosen by the user.

It contains a value for any setting of a run that a user omits (`rounds`, `lr`, ...), options by method (`methods`),
ids of the bundle's configuration (`config`), and `presets`: name -> more such values, with their purpose in `about`.
`sites` is their number, or describes each: `{north: {labels: [liver, spleen]}, south: {channels: [T1]}}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields

from medfl.core import Config, Document, InputError, ProtocolSettings, did_you_mean, map_values

_DEFAULTS: Config = {
    "sites": 4,
    "partition": "iid",
    "cohort": 1.0,
    "rounds": 10,
    "local_epochs": 1,
    "batch_size": None,
    "lr": None,
    "lr_decay": 1.0,
    "split": None,
    "methods": {},
    "config": {},
    **{
        setting.name: setting.default
        for setting in fields(ProtocolSettings)
        if setting.default is not MISSING
    },
}
_OF_SITES: Mapping[str, str] = {
    "labels": "site_labels",
    "channels": "site_channels",
    "spacing": "site_spacing",
}
"""Possible entries of a site in `sites` -> the corresponding setting of the run."""


def resolved(bundle: str, values: Config, presets: Iterable[str] = ()) -> Document:
    """Return a protocol's complete values, overlaid with the presets in their order.

    Raises:
        InputError: no such preset, one with an unknown setting, or an invalid table.
    """
    _check_tables(bundle, values)
    settled = {**_DEFAULTS, **_said_of_sites(bundle, values)}
    offered = values.get("presets") or {}
    for name in presets:
        if name not in offered:
            advice = "leave --preset out"
            if offered:
                advice = did_you_mean(name, offered, f"see medfl bundles {bundle}")

            raise InputError(
                f"preset {name!r} of bundle {bundle!r}",
                f"its presets are: {', '.join(offered) or 'none'}",
                advice,
            )

        preset = dict(offered[name] or {})
        preset.pop("about", None)
        if unknown := sorted(preset.keys() - _DEFAULTS.keys()):
            raise InputError(
                f"{unknown[0]!r} in preset {name!r} of bundle {bundle!r}",
                f"a preset sets {', '.join(sorted(_DEFAULTS))}",
                f"take {unknown[0]!r} out of the bundle's federated.yaml",
            )

        methods = dict(settled["methods"])
        config = {**settled["config"], **(preset.get("config") or {})}
        for method, options in (preset.get("methods") or {}).items():
            methods[method] = {**(methods.get(method) or {}), **(options or {})}

        settled |= {**_said_of_sites(bundle, preset), "methods": methods, "config": config}

    return settled


def _check_tables(bundle: str, values: Config, within: str = "") -> None:
    """Raise InputError if `methods`, `config`, `presets`, a method or a preset is given but is not a table."""
    tables = {key: values.get(key) for key in ("methods", "config")}
    if not within:  # a preset has no presets
        tables["presets"] = values.get("presets")

    for key in ("methods", "presets"):
        if isinstance(inner := tables.get(key), Mapping):
            tables |= {f"{key}: {name}": value for name, value in inner.items()}

    for key, value in tables.items():
        if value is not None and not isinstance(value, Mapping):
            raise InputError(
                f"{within}{key} {str(value)!r:.60} in the federated.yaml of bundle {bundle!r}",
                "a table: NAME: value",
                "write it as one, or take it out",
            )

        if key.startswith("presets: "):
            _check_tables(bundle, value or {}, f"{key}: ")


def _said_of_sites(bundle: str, values: Config) -> Document:
    """Convert what `sites` says of each site to settings, and `sites` to a number; InputError for unknown entries."""
    sites = values.get("sites")
    if not isinstance(sites, Mapping):
        return dict(values)

    texts: dict[str, list[str]] = {}
    for site, facts in sites.items():
        if facts and not isinstance(facts, Mapping):
            facts = {str(facts): None}  # refused below

        for fact, names in (facts or {}).items():
            listed = [names] if isinstance(names, str) else names
            if fact not in _OF_SITES or not isinstance(listed, list) or not listed:
                raise InputError(
                    f"{str(fact)!r:.60} of site {str(site)!r:.60} in the federated.yaml of bundle {bundle!r}",
                    f"of a site it says {', '.join(_OF_SITES)}, each a list of names",
                    f"as {next(iter(_OF_SITES))}: [NAME, NAME]",
                )

            texts.setdefault(_OF_SITES[fact], []).append(f"{site}={','.join(map(str, listed))}")

    return {**values, "sites": len(sites), **map_values(";".join, texts)}


def options_for(protocol: Config, method: str) -> Config:
    """Return the options that a protocol gives a method."""
    return protocol["methods"].get(method) or {}
