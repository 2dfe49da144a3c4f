"""Which image channels each site has, as the run says (others are zero), which files may be missing, own spacings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from medfl.core import SECTIONS, InputError, Run, by_site, site_names, spacings
from medfl.data import LACKS, Prepared
from medfl.data.prepared import Channels
from medfl.problem import Problem, tensor_described
from medfl.problem.sections import ReplacedSections
from medfl.runtimes.site_settings import positions, require_sites

_FLAG = "--site-channels"


def names(bundle: Problem) -> tuple[str, ...]:
    """Return the channel names of a bundle's images, or their numbers from 0 if it names none."""
    image = tensor_described(bundle.metadata, "inputs", "image")
    definition = image.get("channel_def") or {}
    count = int(image.get("num_channels") or 0) or bundle.channels
    return tuple(str(definition.get(str(i), i)) for i in range(count))


def read(
    text: str, channels: Collection[str], sites: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return site -> ascending indices of its channels, for the sites for which a run gives them.

    Raises:
        InputError: a name is not a channel, or not a site of the run.
    """
    numbers = {str(index): index for index in range(len(channels))}
    # a channel whose name is a number is meant by its name
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


def own_spacings(run: Run) -> dict[str, tuple[float, ...]]:
    """Return site -> mm to which its volumes are resampled; InputError for a site that the run does not have."""
    of_sites = spacings(run.site_spacing)
    require_sites("--site-spacing", of_sites, run.partition.sites, "=...")
    return of_sites


def check(text: str, drop: float, bundle: Problem, sites: Collection[str]) -> None:
    """Raise an InputError if a run's channel settings do not fit its bundle or sites."""
    if not text and not drop:
        return

    flag = "--channel-drop"
    if text:
        flag = _FLAG

    # such a trainer makes its own batches, in which nothing could be filled in here
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
    own_spacings(run)
    # sections of another federation may already be filled in
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
        site_of = run.partition.owners(section)
        for index, ident in enumerate(prepared.ids(range(len(prepared)))):
            channels_of_site = has.get(site_of.get(ident, ""))
            if channels_of_site is not None:
                present[index] = False
                present[index, list(channels_of_site)] = True

        drop = run.channel_drop * (section == "train")
        filled_sections[section] = Channels(prepared, present, drop)

    return filled_sections


def notes(bundle: Problem, run: Run) -> tuple[str, ...]:
    """Return notes on sites that lack channels or have a spacing of their own, for the user and the report."""
    lines = []
    if run.site_spacing:
        lines.append(
            f"sites resample to mm of their own: {run.site_spacing}; other sites and new images to the bundle's spacing"
        )

    channels = names(bundle) if run.site_channels else ()
    for site, has in read(run.site_channels, channels, run.partition.sites).items():
        lacking = [name for i, name in enumerate(channels) if i not in has]
        if lacking:
            lines.append(f"site {site!r} lacks channel {', '.join(lacking)}: zero in its images")

    return tuple(lines)


# What a site's files may lack, or need not be read for: labels of unlabelled sites, missing channels.


def without_absent(bundle: Problem, run: Run) -> Problem:
    """Return a problem that reads no training label of unlabelled sites, and a missing channel of a site as zero.

    Images of a site with a spacing of its own are resampled to that.

    Otherwise a crop might depend on such a label, or a mean on such a channel.

    Raises:
        InputError: a channel's file is missing, but its item's site has the channel.
    """
    sites = run.partition.sites
    channels: Sequence[str] = ()
    if run.site_channels:
        channels = names(bundle)

    site_lacks = {}
    for site, present in read(run.site_channels, channels, sites).items():
        site_lacks[site] = sorted({*range(len(channels))} - {*present})

    site_spacing = own_spacings(run)
    unlabelled_ids: set[str] = set()
    for site in site_names(run.unlabelled):
        unlabelled_ids.update(sites.get(site, {}).get("train", ()))

    replaced = {}

    for section in SECTIONS[: 2 + bundle.has_test]:
        site_of = run.partition.owners(section)
        absent = {ident: site_lacks.get(site, []) for ident, site in site_of.items()}
        hidden = set()
        if section == "train":
            hidden = unlabelled_ids

        for item in bundle.items(section):
            ident = str(item["id"])
            # channels without a file that the site is said to have
            missing = {*item.get(LACKS, ())} - {*absent.get(ident, ())}
            if missing:
                site = site_of.get(ident, "")
                raise InputError(
                    f"{section} image {ident!r} of site {site!r} has no file of channel {min(missing)}",
                    "a file of each channel, or of those that --site-channels says of its site",
                    f"restore it, or say which channels the site has: --site-channels {site or 'SITE'}=...",
                )

        spacing_of = {
            ident: site_spacing[site] for ident, site in site_of.items() if site in site_spacing
        }
        if bundle.section(section).source.is_list and (
            hidden or any(absent.values()) or spacing_of
        ):
            replaced[section] = bundle.section(section).hiding(
                hidden, absent, len(channels), spacing_of
            )

    if not replaced:
        return bundle

    return bundle.replaced(sections=ReplacedSections(bundle.sections, replaced))
