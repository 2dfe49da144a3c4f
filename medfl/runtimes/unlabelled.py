"""Sites whose labels are hidden or missing: which they are, what they train on, and which runs allow them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from medfl import methods
from medfl.core import InputError, Run, site_names
from medfl.data import NO_LABEL, Item, Shard
from medfl.data.prepared import unlabelled
from medfl.methods.base import Method
from medfl.problem import Problem
from medfl.runtimes import site_labels
from medfl.runtimes.site_settings import allowed_sites, require_sites
from medfl.training.site import Site


def hide_labels(run: Run, name: str, sections: Sequence[Shard]) -> list[Shard]:
    """Return a site's sections, with the labels of the first (training) removed if the run marks it as unlabelled."""
    train, *held_out = sections
    return [unlabelled(train) if name in site_names(run.unlabelled) else train, *held_out]


def check_unlabelled(
    text: str,
    method_name: str,
    method: Method,
    sites: Mapping[str, Mapping[str, Collection[str]]],
    items: Sequence[Item] = (),
) -> None:
    """Check that some but not all sites of a run are unlabelled, and that its method supports this.

    Training items without a label must be at unlabelled sites.

    Raises:
        InputError: a name is not a site, no site has labels, or the method cannot train without.
    """
    without = site_names(text)
    require_sites("--unlabelled", without, sites)
    if len(without) == len(sites):
        raise InputError(
            f"--unlabelled {text}: no site has labels",
            allowed_sites(sites),
            "leave out one that has",
        )

    if without:
        _check_method(method, method_name, without[0])

    unlabelled_ids = set()
    for item in items:
        if NO_LABEL in item:
            unlabelled_ids.add(str(item["id"]))

    if unlabelled_ids and len(unlabelled_ids) == len(items):
        raise InputError(
            f"none of the {len(items)} training images has a label",
            "some have",
            "check the data folder",
        )

    # otherwise such an item would be trained on as if it had a label
    for site in sites.keys() - {*without}:
        here = sorted(unlabelled_ids & {*sites[site].get("train", ())})
        if here:
            raise InputError(
                f"image {here[0]!r} of site {site!r} has no label ({len(here)} such)",
                f"images without labels are of sites that --unlabelled names: {', '.join(without) or 'none'}",
                "name the site there too, or deal such images to these, with --partition centre or file:PATH.csv",
            )


def unlabelled_notes(run: Run) -> tuple[str, ...]:
    """Return a note on the unlabelled sites, for the user and the report."""
    without = ", ".join(site_names(run.unlabelled))
    if without:
        return (f"without labels in training: {without}",)

    return ()


def check_sites(method: Method, sites: Iterable[Site], bundle: Problem) -> None:
    """Raise InputError for a site that a method cannot train; called before anything is written or trained."""
    for site in sites:
        if not site.train.labelled:
            _check_method(method, site.method, site.name)
            # a structure and the background: one binary channel is the same as two classes
            is_binary = len(bundle.structures) == 2 and bundle.structures[0] == "background"
            if bundle.structures and not is_binary and not site_labels.exclusive(bundle):
                raise InputError(
                    f"site {site.name!r} without labels, whose network says yes or no in each of several channels",
                    "pseudo-labels are for a softmax over background and structures",
                    "leave the site out of the run",
                )

        method.check(site)


def _check_method(method: Method, name: str, site: str) -> None:
    if methods.extra(method, methods.WithoutLabels) is None:
        alternatives = []
        for candidate in methods.names():
            if issubclass(methods.method_class(candidate), methods.WithoutLabels):
                alternatives.append(candidate)

        raise InputError(
            f"method {name!r} with site {site!r}, which is without labels",
            f"methods that learn without: {', '.join(alternatives)}",
            "take one, or leave the site out of the run",
        )
