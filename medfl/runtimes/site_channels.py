"""Which channels of the images each site has, as the run says; the others are zero there."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from medfl.core.errors import InputError
from medfl.core.run import Run
from medfl.core.setting_values import by_site
from medfl.data.prepared import Channels, Prepared
from medfl.problem.described import tensor_described
from medfl.problem.problem import Problem
from medfl.runtimes.site_settings import positions, require_sites

_FLAG = "--site-channels"


def names(bundle: Problem) -> tuple[str, ...]:
    """Return the names of the channels of a bundle's images, their numbers from 0 where it names none."""
    image = tensor_described(bundle.metadata, "inputs", "image")
    definition = image.get("channel_def") or {}
    count = int(image.get("num_channels") or 0) or bundle.channels
    return tuple(str(definition.get(str(i), i)) for i in range(count))


def read(
    text: str, channels: Collection[str], sites: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return site -> ascending positions of the channels that it has, of the sites that a run says it of.

    Raises:
        InputError: a name is no channel, or no site of the run.
    """
    numbers = {str(index): index for index in range(len(channels))}
    # a channel that is called by a number is meant by its name
    numbers |= {name.lower(): index for index, name in enumerate(channels)}
    allowed = f"the channels of the bundle's images are {', '.join(channels) or 'not known'}"
    advice = "choose among them, by name or number from 0"
    site_channels = by_site(_FLAG)(text)
    require_sites(_FLAG, site_channels, sites, "=...")

    has = {}
    for site, names_of_site in site_channels.items():
        lower = {name: name.lower() for name in names_of_site}
        has[site] = positions("channel", site, lower, numbers, allowed, advice)

    return has


def check(text: str, drop: float, bundle: Problem, sites: Collection[str]) -> None:
    """Raise an InputError where what a run says of channels does not fit its bundle or sites."""
    if not text and not drop:
        return

    if text:
        flag = _FLAG
    else:
        flag = "--channel-drop"

    # such a trainer has batches of its own, which nothing here could fill in
    if bundle.custom_trainer:
        raise InputError(
            f"{flag} with a bundle whose trainer takes its steps by itself",
            "images in batches",
            "leave it out",
        )

    channels = names(bundle)
    read(text, channels, sites)
    if len(channels) < 2:
        raise InputError(
            f"{flag} with images of {len(channels) or 'no'} channel", "two or more", "leave it out"
        )


def filled(sections: Mapping[str, Prepared], bundle: Problem, run: Run) -> dict[str, Prepared]:
    """Return the sections with zeros in the channels that an item's site lacks, and channels dropped in training.

    Raises:
        InputError: as for `check`.
    """
    # sections of another federation may have been filled in already
    bare = dict(sections)
    for name, prepared in sections.items():
        if isinstance(prepared, Channels):
            bare[name] = prepared.prepared

    if not run.site_channels and not run.channel_drop:
        return bare

    sites = run.partition.sites
    check(run.site_channels, run.channel_drop, bundle, sites)
    channels = names(bundle)
    count = len(channels)
    has = read(run.site_channels, channels, sites)
    filled_sections: dict[str, Prepared] = {}

    for section, prepared in bare.items():
        present = torch.ones(len(prepared), count, dtype=torch.bool)
        site_of: dict[str, str] = {}
        for site in has:
            site_of |= dict.fromkeys(sites[site].get(section, ()), site)

        for index, ident in enumerate(prepared.ids(range(len(prepared)))):
            if ident in site_of:
                present[index] = False
                present[index, list(has[site_of[ident]])] = True

        if section == "train":
            drop = run.channel_drop
        else:
            drop = 0.0

        filled_sections[section] = Channels(prepared, present, drop)

    return filled_sections


def notes(bundle: Problem, run: Run) -> tuple[str, ...]:
    """Return a note on each site that lacks channels, for the user and the report."""
    if not run.site_channels:
        return ()

    channels = names(bundle)
    lines = []
    for site, has in read(run.site_channels, channels, run.partition.sites).items():
        lacking = [name for i, name in enumerate(channels) if i not in has]
        if lacking:
            lines.append(f"site {site!r} lacks channel {', '.join(lacking)}: zero in its images")

    return tuple(lines)
