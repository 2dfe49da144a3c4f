"""A run's settings for single sites: which structures each annotates, which channels it has, whether it has labels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from medfl.bundle.open import protocol_of
from medfl.bundle.protocol import resolved
from medfl.core.documents import Config, Document
from medfl.core.errors import InputError, did_you_mean
from medfl.core.run import Run
from medfl.core.setting_values import by_site, site_names
from medfl.core.terminal import Print

EMPTY: Mapping[str, str] = dict.fromkeys(
    ("site_labels", "site_channels", "site_spacing", "unlabelled"), ""
)
"""The settings of single sites, at values that have no effect."""


def of_request(bundle: str, requested: Config) -> Document:
    """Return these settings from a request, else from the bundle's protocol."""
    values = resolved(bundle, protocol_of(bundle), requested.get("presets", ()))
    settings = {}
    for name in EMPTY:
        text = requested.get(name)
        settings[name] = str(values.get(name, "") if text is None else text)

    return settings


def of_request_for(site: str, bundle: str, requested: Config) -> Document:
    """Return these settings reduced to one site, "" if they do not mention it."""
    settings = of_request(bundle, requested)
    # a list of sites; the others map a site to names
    without = site in site_names(settings.pop("unlabelled"))
    of_site = {}
    for name, text in settings.items():
        of_site[name] = {key: names for key, names in _read(name, text).items() if key == site}

    return {**as_texts(of_site), "unlabelled": site if without else ""}


def with_declared(run: Run, site: str, declared: Mapping[str, Sequence[str]], say: Print) -> Run:
    """Return a run with a site's own declarations in place of the run's; `say` reports a difference."""
    settings = {}
    for setting, names in declared.items():
        if not names:
            continue

        by_name = _read(setting, getattr(run, setting))
        if site in by_name and {*by_name[site]} != {*names}:
            say(
                f"note: the job says {_flag(setting)} {site}={','.join(by_name[site])}; the site itself says "
                f"{','.join(names)}, which counts"
            )

        settings[setting] = {**by_name, site: names}

    return replace(run, **as_texts(settings))


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _read(setting: str, text: str) -> Mapping[str, Sequence[str]]:
    return by_site(_flag(setting))(text)


def as_texts(settings: Mapping[str, Mapping[str, Sequence[str]]]) -> Document:
    """Convert setting -> site -> names to setting -> its text."""
    texts = {}
    for setting, by_name in settings.items():
        texts[setting] = ";".join(f"{site}={','.join(names)}" for site, names in by_name.items())

    return texts


def require_sites(flag: str, names: Iterable[str], sites: Collection[str], value: str = "") -> None:
    """Raise an InputError for the first name that is not a site of the run; a value may follow it in the flag."""
    for name in names:
        if name not in sites:
            advice = did_you_mean(name, [*sites], "name one of these")
            raise InputError(f"{flag} {name}{value}", allowed_sites(sites), advice)


def allowed_sites(sites: Collection[str]) -> str:
    """List the sites of a run, for an error message."""
    listed = [*sites]
    if len(listed) > 10:
        listed[10:] = ["…"]

    return f"the sites of the run are {', '.join(listed)}"


def positions(
    kind: str,
    site: str,
    names: Mapping[str, str],
    position: Mapping[str, int],
    allowed: str,
    advice: str,
) -> tuple[int, ...]:
    """Return the ascending indices of the labels or channels that a site has.

    `names` maps given names to keys of `position`, which has all labels or channels of this `kind`.
    """
    for name, plain in names.items():
        if plain not in position:
            words = [word for word in position if not word.isdecimal()]
            near = did_you_mean(plain, words, advice)
            raise InputError(f"{kind} {name!r:.80} of site {site!r}", allowed, near)
    return tuple(sorted({position[plain] for plain in names.values()}))
