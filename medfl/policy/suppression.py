"""Counts that may be released: none below a minimum, none that can be computed from the others; or with noise.

Suppression (cell suppression with secondary cells; Willenborg and de Waal, Elements of Statistical Disclosure Control,
2001): a cell below K is suppressed. Since its table's total is known, further cells are suppressed too. Which ones
depends only on the cells' names and on sums that are known anyway, so for somebody who knows all released values and
this rule, every cell below K can still have any value below K: from 0, or from 1 if cells are known not to be empty.
With m cells below K, of sum s:

    K - 1 + m - 1 <= s <= (m - 1) (K - 1): no others; else by name, until the hidden ones have m (K - 1) + 1 more than
    K for each of the others, so that the others can compensate for any values of the small ones; else all cells.  (1)

Noise (the geometric mechanism; Ghosh, Roughgarden and Sundararajan, 2012): to each cell an independent integer n is
added with P(n) proportional to exp(-epsilon |n|). It protects the presence of one image: an image is in one cell of a
table. It does not protect a patient with several images, and the epsilons of several tables of the same images add up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from medfl.core import Floats

LEAST = 10
"""Counts below it are suppressed, unless a person at the site decides otherwise."""
Entropy = Callable[[int], bytes]
"""Number of bytes -> that many random bytes."""


def suppress_counts(
    counts: Mapping[str, int], least: int
) -> tuple[dict[str, int | None], int | None]:
    """Return a table's releasable cells, None for suppressed ones, and its total.

    Args:
        counts: cell -> number of images; each image is in one cell, so the total is the number of images.
        least: K; cells below it are suppressed, as is a total so small that not all cells could be K - 1.
    """
    total = sum(counts.values())
    if least > 0 and total < least + max(0, len(counts) - 1):
        return dict.fromkeys(counts), None
    hidden = _hidden(counts, least)
    return {name: None if name in hidden else count for name, count in counts.items()}, total


def _hidden(counts: Mapping[str, int], least: int) -> set[str]:
    """Return the suppressed cells (1)."""
    small = {name for name, count in counts.items() if count < least}
    alone = len(small) * (least - 1)
    slack = sum(counts[name] for name in small)
    hidden = set(small)

    if not small or least - 1 + len(small) - 1 <= slack <= alone - (least - 1):
        return hidden

    for name in sorted(counts.keys() - small):  # not by size: that would reveal the sizes
        hidden.add(name)
        slack += counts[name] - least
        if slack > alone:
            break

    return hidden


def hidden_bins(images: Sequence[int], least: int) -> list[bool]:
    """Tell which bins of a histogram are suppressed: those with too few images, and the next one with enough.

    Args:
        images: number of images that contribute to each bin; one may contribute to several.
        least: bins with fewer images are suppressed, as is their sum, which can be computed from the others.
    """
    hidden = [count < least for count in images]
    # The sum of the hidden bins follows from the total: hiding a bin with enough images protects it.
    if any(hidden) and not all(hidden):
        first = hidden.index(True)
        shown = [i for i, is_hidden in enumerate(hidden) if not is_hidden]
        hidden[min(shown, key=lambda i: (abs(i - first), i))] = True
    return hidden


def add_noise(
    counts: Mapping[str, float], epsilon: float, entropy: Entropy = os.urandom
) -> dict[str, float]:
    """Return a table's cells with noise of an epsilon above 0; they may be negative.

    The entropy is by default the operating system's, so that nobody can compute the noise.
    """
    noise = geometric(len(counts), epsilon, entropy)
    noised = {}
    for (name, count), n in zip(counts.items(), noise, strict=True):
        noised[name] = count + n

    return noised


def geometric(count: int, epsilon: float, entropy: Entropy = os.urandom) -> list[int]:
    """Return `count` integers n with P(n) proportional to exp(-epsilon |n|).

    Each is the difference of two geometric variables floor(ln u / -epsilon), u of 52 random bits.
    """
    first, second = np.floor(np.log(uniform(2 * count, entropy).reshape(2, count)) / -epsilon)
    return list(map(int, first - second))


def uniform(count: int, entropy: Entropy) -> Floats:
    """Return `count` numbers between 0 and 1, of 52 random bits each."""
    # The middle of each of 2^52 steps: never 0 or 1, whose logarithm or quantile is infinite.
    bits = np.frombuffer(entropy(8 * count), np.uint64) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52
