"""What each site contributes to a round, as an estimate: its Shapley value, and what is lost without it.

v(S) is the key metric, on everybody's validation images, of the model that is made of the replies of the sites S alone;
of none it is the model before the round. A site is worth

    left out    v(all) - v(all but i)
    Shapley     phi_i = sum over S without i of (v(S and i) - v(S)) / (n (n - 1 over |S|)),    their sum is v(all) - v()

exactly for the round with up to five sites. Of more, phi_i is the mean gain of i over n orders of the sites, each of
which begins one, and an order ends where v(S) is within 1 % of the round's whole gain: guided sampling and truncation
as in GTG-Shapley (Liu et al., ACM TIST 2022), which also leaves out rounds that gain little. It says what replies were
worth to these rounds by these images, not what a site's data would be worth to another run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations
from math import comb, isnan, sqrt
from statistics import fmean, stdev

import numpy as np
from scipy.stats import t as student

from medfl import methods
from medfl.core.documents import Document
from medfl.core.errors import InputError
from medfl.core.settings import MEAN
from medfl.runtimes.federation import Federation

EXACT = 5
"""Sites of a round up to which every subset is scored."""
MOST = 20
"""Sites of a round for which contributions are estimated at all."""
SHAPLEY = "shapley"
LEFT_OUT = "left_out"
_TRUNCATED = 0.01  # of a round's gain
Value = Callable[[frozenset[str]], float]
"""Sites -> how good the model of their replies is; NaN where that is undefined."""


def check(federation: Federation, is_remote: bool) -> None:
    """Raise an InputError if contributions to a run cannot be estimated."""
    run = federation.run
    cohort = len(federation.cohort(1))
    why = ""
    if is_remote:
        why = "the validation images of all sites are not here"
    elif not methods.has_fedavg_server(federation.method):
        why = "its server does more than to average the sites' weights"
    elif federation.message_rules(federation.names[0]).personal:
        why = "it has no model for all sites, as a part of each stays there"
    elif run.aggregation != MEAN:
        why = f"--aggregation {run.aggregation} is no mean of the sites' weights"
    elif cohort > MOST:
        why = f"{cohort} sites take part in a round, at most {MOST} can"
    elif not len(federation.pooled("validate")):
        why = "there are no validation images"

    if why:
        raise InputError(
            f"--contribution with method {run.method}: {why}",
            "a weighted mean of weights, on the runtimes simulator and monai-fl",
            "leave it out, or take fedavg",
        )


def cost(federation: Federation) -> str:
    """Say how many models a round is asked for."""
    count = len(federation.cohort(1))
    models = f"{2**count}" if count <= EXACT else f"up to {count * (count - 1) + 2}"
    return (
        f"contribution: {models} models of {count} sites scored on all {len(federation.pooled('validate'))} validation "
        "images in each evaluated round (--eval-every N for fewer)"
    )


def contributions(names: Sequence[str], value: Value, seed: int) -> dict[str, dict[str, float]]:
    """Return "shapley" and "left_out" -> site -> what it contributes; {} where a model's value is undefined."""
    value = cache(value)
    everybody = frozenset(names)
    whole = value(everybody)
    left_out = {name: whole - value(everybody - {name}) for name in names}
    if len(names) <= EXACT:
        shares = _exact(names, value)
    else:
        shares = _sampled(names, value, seed)

    if any(map(isnan, [*left_out.values(), *shares.values()])):
        return {}

    return {SHAPLEY: shares, LEFT_OUT: left_out}


def _exact(names: Sequence[str], value: Value) -> dict[str, float]:
    shares = {}
    for name in names:
        others = [other for other in names if other != name]
        total = 0.0
        for size in range(len(names)):
            for group in map(frozenset, combinations(others, size)):
                total += (value(group | {name}) - value(group)) / comb(len(others), size)

        shares[name] = total / len(names)

    return shares


def _sampled(names: Sequence[str], value: Value, seed: int) -> dict[str, float]:
    draws = np.random.default_rng(seed)
    whole = value(frozenset(names))
    nothing = value(frozenset())
    gains = dict.fromkeys(names, 0.0)
    for first in names:
        others = [name for name in names if name != first]
        group = frozenset[str]()
        before = nothing
        for name in (first, *draws.permutation(others).tolist()):
            if abs(whole - before) <= _TRUNCATED * abs(whole - nothing):
                break

            group |= {name}
            after = value(group)
            gains[name] += after - before
            before = after

    return {name: gain / len(names) for name, gain in gains.items()}


def rows(rounds: Sequence[Mapping[str, Document]]) -> list[Document]:
    """Return the rows of contribution.csv: each site's means over its rounds, with 95 % intervals by Student's t."""
    by_site: dict[str, list[tuple[float, float]]] = {}
    for entry in rounds:
        found = entry.get("contribution") or {}
        for name, share in found.get(SHAPLEY, {}).items():
            by_site.setdefault(name, []).append((share, found[LEFT_OUT][name]))

    table = []
    for name in sorted(by_site):
        shares, left_out = zip(*by_site[name], strict=True)
        row: Document = {"site": name, "rounds": len(shares), "shapley_sum": sum(shares)}
        for title, values in ((SHAPLEY, shares), (LEFT_OUT, left_out)):
            row[title] = fmean(values)
            row[f"{title}_low"] = row[f"{title}_high"] = ""
            if len(values) > 1:
                half = student.ppf(0.975, len(values) - 1) * stdev(values) / sqrt(len(values))
                row[f"{title}_low"] = row[title] - half
                row[f"{title}_high"] = row[title] + half

        table.append(row)

    return table
