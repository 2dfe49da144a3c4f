"""Estimates of each site's contribution to a round: its Shapley value, and the loss without it.

v(S) is the key metric, on everybody's validation images, of the model aggregated from the replies of the sites S only;
for the empty set it is the model before the round. The contribution of site i is

    left out    v(all) - v(all but i)
    Shapley     the mean of v(S and i) - v(S) over the orders in which sites may come, with S those before i

Shapley values add up to v(all) - v(none). With up to five sites they are computed over all orders, exactly for the
round. With more, n orders are used, each starting with a different site, and an order ends when v(S) is within 1 % of
the round's gain of v(all): guided sampling and truncation as in GTG-Shapley (Liu et al., ACM TIST 2022), which also
skips rounds with little gain. The values measure what replies were worth to these rounds on these images, not what a
site's data would be worth to another run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import permutations
from math import isnan
from statistics import fmean

import numpy as np

from medfl import methods
from medfl.core import MEAN, Document, InputError, Metrics
from medfl.evaluation import t_interval
from medfl.runtimes.federation import Federation

EXACT = 5
"""Maximum number of sites in a round for scoring every subset."""
MOST = 20
"""Maximum number of sites in a round for which contributions are estimated."""
SHAPLEY = "shapley"
LEFT_OUT = "left_out"
_TRUNCATED = 0.01  # of a round's gain
Value = Callable[[frozenset[str]], float]
"""Sites -> value of the model from their replies; NaN if undefined."""


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
    """Describe how many models are scored per round."""
    count = len(federation.cohort(1))
    if count <= EXACT:
        models = f"{2**count}"
    else:
        models = f"up to {count * (count - 1) + 2}"

    return (
        f"contribution: {models} models of {count} sites scored on all {len(federation.pooled('validate'))} validation "
        "images in each evaluated round (--eval-every N for fewer)"
    )


def contributions(names: Sequence[str], value: Value, seed: int) -> dict[str, Metrics]:
    """Return "shapley" and "left_out" -> site -> what it contributes; {} where a model's value is undefined."""
    # a subset comes up in many orders, and each value is a model scored
    value = cache(value)
    everybody = frozenset(names)
    last = value(everybody)
    left_out = {name: last - value(everybody - {name}) for name in names}
    first = value(frozenset())
    if len(names) > EXACT:
        least = _TRUNCATED * abs(last - first)
    else:
        least = -1.0  # no order is cut short

    gains = dict.fromkeys(names, 0.0)
    orders = _orders(names, seed)

    for order in orders:
        group = frozenset[str]()
        before = first
        for name in order:
            if abs(last - before) <= least:
                break

            group |= {name}
            after = value(group)
            gains[name] += (after - before) / len(orders)
            before = after

    if any(map(isnan, [*left_out.values(), *gains.values()])):
        return {}

    return {SHAPLEY: gains, LEFT_OUT: left_out}


def _orders(names: Sequence[str], seed: int) -> list[tuple[str, ...]]:
    """Return all orders of few sites; of many, one order starting with each site."""
    if len(names) <= EXACT:
        return list(permutations(names))

    draws = np.random.default_rng(seed)
    orders = []
    for name in names:
        after = [site for site in names if site != name]
        orders.append((name, *draws.permutation(after).tolist()))

    return orders


def rows(rounds: Sequence[Mapping[str, Document]]) -> list[Document]:
    """Return the rows of contribution.csv: each site's means over its rounds, with 95 % intervals by Student's t."""
    by_site: dict[str, list[tuple[float, float]]] = {}
    for entry in rounds:
        values = entry.get("contribution") or {}
        for name, share in values.get(SHAPLEY, {}).items():
            by_site.setdefault(name, []).append((share, values[LEFT_OUT][name]))

    table = []
    for name in sorted(by_site):
        shares, left_out = zip(*by_site[name], strict=True)
        row: Document = {"site": name, "rounds": len(shares), "shapley_sum": sum(shares)}
        for title, gains in ((SHAPLEY, shares), (LEFT_OUT, left_out)):
            row[title] = fmean(gains)
            # of equal gains, too
            low, high = t_interval(gains, -1) or ("", "")
            row |= {f"{title}_low": low, f"{title}_high": high}

        table.append(row)

    return table
