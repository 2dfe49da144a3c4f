"""What the files of a site need not have, or are not read for: labels of sites without any, channels that it lacks."""

from __future__ import annotations

from medfl.core.errors import InputError
from medfl.core.run import Run
from medfl.core.setting_values import site_names
from medfl.core.task import SECTIONS
from medfl.data.source import LACKS
from medfl.problem.problem import Problem
from medfl.problem.sections import ReplacedSections
from medfl.runtimes import site_channels


def without_absent(bundle: Problem, run: Run) -> Problem:
    """Return a problem that reads no training label of sites without any, and channels that a site lacks as zero.

    A crop might go by such a label, and a mean by such a channel.

    Raises:
        InputError: a file of a channel is not there, and its item's site has the channel.
    """
    sites = run.partition.sites
    if run.site_channels:
        channels = site_channels.names(bundle)
    else:
        channels = ()

    site_positions = site_channels.read(run.site_channels, channels, sites)
    site_lacks = {}
    for site, present in site_positions.items():
        site_lacks[site] = sorted({*range(len(channels))} - {*present})

    unlabelled_ids: set[str] = set()
    for site in site_names(run.unlabelled):
        unlabelled_ids.update(sites.get(site, {}).get("train", ()))

    replaced = {}

    for section in SECTIONS[: 2 + bundle.has_test]:
        site_of: dict[str, str] = {}
        for site, ids in sites.items():
            site_of |= dict.fromkeys(ids.get(section, ()), site)

        absent = {ident: site_lacks.get(site, []) for ident, site in site_of.items()}
        if section == "train":
            hidden = unlabelled_ids
        else:
            hidden = set()

        for item in bundle.items(section):
            ident = str(item["id"])
            # channels whose file is not there, but which the site is said to have
            missing = {*item.get(LACKS, ())} - {*absent.get(ident, ())}
            if missing:
                site = site_of.get(ident, "")
                raise InputError(
                    f"{section} image {ident!r} of site {site!r} has no file of channel {min(missing)}",
                    "a file of each channel, or of those that --site-channels says of its site",
                    f"restore it, or say which channels the site has: --site-channels {site or 'SITE'}=...",
                )

        if bundle.section(section).source.is_list and (hidden or any(absent.values())):
            replaced[section] = bundle.section(section).hiding(hidden, absent, len(channels))

    if not replaced:
        return bundle

    return bundle.replaced(sections=ReplacedSections(bundle.sections, replaced))
