"""Sites without labels: which they are, what they train on, and which runs can have some."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from medfl import methods
from medfl.core.errors import InputError, did_you_mean
from medfl.core.forms import site_names
from medfl.core.run import Run
from medfl.data.prepared import Shard
from medfl.data.unlabelled import unlabelled
from medfl.methods.base import Method
from medfl.training.site import Site


def hidden(run: Run, name: str, sections: Sequence[Shard]) -> list[Shard]:
    """Return a site's sections, the first, which it trains on, without labels where the run says that it has none."""
    train, *held_out = sections
    return [unlabelled(train) if name in site_names(run.unlabelled) else train, *held_out]


def check_unlabelled(text: str, name: str, method: Method, sites: Collection[str]) -> None:
    """See that the sites without labels are sites of a run, and not all of them, and that its method is made for them.

    Args:
        text: as `--unlabelled` has it.
        name: of the method.
        method: of the run.
        sites: of the run.

    Raises:
        InputError: they are not, or it is not.
    """
    without, told = site_names(text), f"the sites of the run are {', '.join([*sites][:10])}"
    told += ", …" if len(sites) > 10 else ""
    if unknown := [site for site in without if site not in sites]:
        raise InputError(f"--unlabelled {unknown[0]}", told, did_you_mean(unknown[0], [*sites], "name one of these"))
    if len(without) == len(sites):
        raise InputError(f"--unlabelled {text}: no site has labels", told, "leave one that has some out")
    if without:
        _check_method(method, name, without[0])


def unlabelled_notes(run: Run) -> tuple[str, ...]:
    """Return a note on the sites without labels, for the user and the report."""
    without = ", ".join(site_names(run.unlabelled))
    return (f"without labels in training: {without}",) if without else ()


def check_sites(method: Method, sites: Iterable[Site]) -> None:
    """Raise InputError for a site that a method cannot train; called before anything is written or trained."""
    for site in sites:
        if not site.train.labelled:
            _check_method(method, site.method, site.name)
        method.check(site)


def _check_method(method: Method, name: str, site: str) -> None:
    if methods.extra(method, methods.WithoutLabels) is None:
        made = [one for one in methods.names() if issubclass(methods.method_class(one), methods.WithoutLabels)]
        raise InputError(
            f"method {name!r} with site {site!r}, which is without labels",
            f"methods that learn without: {', '.join(made)}",
            "take one, or leave the site out of the run",
        )
