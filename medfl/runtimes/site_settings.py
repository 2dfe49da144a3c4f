"""What a run says of single sites: which structures each annotates, which channels it has, whether it has labels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from medfl.bundle.open import protocol_of
from medfl.bundle.protocol import resolved
from medfl.core.errors import InputError, did_you_mean
from medfl.core.run import Run
from medfl.core.setting_values import by_site, site_names
from medfl.core.terminal import Print

EMPTY: Mapping[str, Any] = {"site_labels": "", "site_channels": "", "unlabelled": ""}
"""The settings of single sites, at the values that set nothing."""


def of_request(bundle: str, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return these settings of a request, else of the bundle's protocol."""
    values = resolved(bundle, protocol_of(bundle), requested.get("presets", ()))
    asked = {setting: requested.get(setting) for setting in EMPTY}
    return {
        name: str(values.get(name, "") if text is None else text) for name, text in asked.items()
    }


def of_request_for(site: str, bundle: str, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Return these settings reduced to one site, "" where they say nothing of it."""
    settings = of_request(bundle, requested)
    without = site in site_names(settings.pop("unlabelled"))
    each = {name: _read(name, text) for name, text in settings.items()}
    of_site = {
        name: {site: by_name[site]} if site in by_name else {} for name, by_name in each.items()
    }
    return {**as_texts(of_site), "unlabelled": site if without else ""}


def with_declared(run: Run, site: str, declared: Mapping[str, Sequence[str]], say: Print) -> Run:
    """Return a run with what a site declares of itself in the place of the run's word; `say` a difference."""
    each = {name: _read(name, getattr(run, name)) for name, names in declared.items() if names}
    for name, site_values in each.items():
        if site in site_values and {*site_values[site]} != {*declared[name]}:
            job, mine = (",".join(names) for names in (site_values[site], declared[name]))
            say(
                f"note: the job says {_flag(name)} {site}={job}; the site itself says {mine}, which counts"
            )
    return replace(
        run,
        **as_texts(
            {name: {**site_values, site: declared[name]} for name, site_values in each.items()}
        ),
    )


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _read(setting: str, text: str) -> Mapping[str, Sequence[str]]:
    return by_site(_flag(setting))(text)


def as_texts(settings: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, Any]:
    """Return setting -> its text, of setting -> site -> names."""
    return {
        name: ";".join(f"{site}={','.join(n)}" for site, n in each.items())
        for name, each in settings.items()
    }


def require_sites(flag: str, named: Iterable[str], sites: Collection[str], value: str = "") -> None:
    """Raise an InputError for the first of some names that is no site of the run; a value may follow it in the flag."""
    for name in named:
        if name not in sites:
            advice = did_you_mean(name, [*sites], "name one of these")
            raise InputError(f"{flag} {name}{value}", allowed_sites(sites), advice)


def allowed_sites(sites: Collection[str]) -> str:
    """Say which sites a run has, in an error's words."""
    return f"the sites of the run are {', '.join([*sites][:10])}{', …' if len(sites) > 10 else ''}"


def positions(
    what: str,
    site: str,
    names: Mapping[str, str],
    known: Mapping[str, int],
    allowed: str,
    advice: str,
) -> tuple[int, ...]:
    """Return the ascending positions of the labels or channels that a site has.

    `names` has them as they are given -> as they stand in `known`, name -> position of all that there are.
    """
    for name, plain in names.items():
        if plain not in known:
            near = did_you_mean(plain, (one for one in known if not one.isdecimal()), advice)
            raise InputError(f"{what} {name!r:.80} of site {site!r}", allowed, near)
    return tuple(sorted({known[plain] for plain in names.values()}))
