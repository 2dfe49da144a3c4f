"""Counts that may be told: none below a least count, none that follows from the others, or with noise.

Suppression (cell suppression with secondary cells; Willenborg and de Waal, Elements of Statistical Disclosure Control,
2001): a cell below K is not told. As its table's total is known, further cells, the smallest first, are not told
either, until nothing follows from the total but that the first ones are below K.

Noise (the geometric mechanism; Ghosh, Roughgarden and Sundararajan, 2012): to each cell an independent whole number n
is added with P(n) proportional to exp(-epsilon |n|). It covers one image that is there or not: an image is in one cell
of a table. It does not cover a patient with several images, and several tables of the same images add up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np

Entropy = Callable[[int], bytes]
"""Number of bytes -> so many random ones."""


def told_counts(counts: Mapping[str, int], least: int) -> tuple[dict[str, int | None], int | None]:
    """Return a table's cells as they may be told, None for those that are not, and its total.

    Args:
        counts: cell -> how many images; each image is in one cell.
        least: K; cells below it are not told, nor is a total below it.
    """
    total = sum(counts.values())
    if total < least:
        return dict.fromkeys(counts), None
    primary = [name for name, count in counts.items() if count < least]
    secondary: list[str] = []
    rest = sorted((name for name in counts if name not in primary), key=lambda name: (counts[name], name))
    while primary and rest and not _protected([counts[n] for n in primary], [counts[n] for n in secondary], least):
        secondary.append(rest.pop(0))
    hidden = {*primary, *secondary}
    return {name: None if name in hidden else count for name, count in counts.items()}, total


def _protected(primary: list[int], secondary: list[int], least: int) -> bool:
    """Tell whether the sum of hidden cells leaves each primary one anything in 0 to K - 1.

    As seen by somebody who knows which cells are below K, and that the others are not.
    """
    loose = sum(primary) + sum(secondary) - least * len(secondary)  # what is left once the others take their least
    if secondary:
        return loose >= least - 1
    return least - 1 <= loose <= (len(primary) - 1) * (least - 1)


def noised(counts: Mapping[str, float], epsilon: float, entropy: Entropy = os.urandom) -> dict[str, float]:
    """Return a table's cells with noise; they may be below 0.

    Args:
        counts: cell -> how many.
        epsilon: above 0.
        entropy: of the noise; by default the operating system's, so that nobody can compute it.
    """
    noise = geometric(len(counts), epsilon, entropy)
    return {name: count + n for (name, count), n in zip(counts.items(), noise, strict=True)}


def geometric(count: int, epsilon: float, entropy: Entropy = os.urandom) -> list[int]:
    """Return so many whole numbers n with P(n) proportional to exp(-epsilon |n|).

    Each is the difference of two geometric numbers floor(ln u / -epsilon), u of 52 random bits.
    """
    bits = np.frombuffer(entropy(16 * count), np.uint64).reshape(2, count) >> np.uint64(12)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52
    first, second = np.floor(np.log(uniform) / -epsilon)
    return [int(n) for n in first - second]
