"""Formats of settings given as text, such as `--messages topk:0.01`, checked before PyTorch is imported."""

from __future__ import annotations

import math
from collections.abc import Callable

from medfl.core.errors import InputError, did_you_mean
from medfl.core.names import split_commas

MESSAGES = ("lossless", "float16", "bfloat16", "int8", "topk")
AGGREGATIONS = ("mean", "clip", "median", "trimmed", "krum", "multikrum")
WAYS = ("alone", "pooled", "shrunken")
"""How sites share the tables of a calibration."""
SURFACE_METRICS = ("hd95", "surface_dice")
"""The surface metrics, computed for test items only: they may take as long as a forward pass."""
FROM_MASKS = "auto"
"""Value of `--site-labels` for the structures that a site's own training masks show."""
ALL = "all"
"""Value of `--metrics` for all of them."""


def messages(text: str) -> tuple[str, float]:
    """Return the kind of `--messages`, and for `topk` its fraction; InputError for anything else."""
    kind, colon, share = text.partition(":")
    # topk takes a fraction, the other kinds take nothing.
    if kind not in MESSAGES or (kind == "topk") != bool(colon):
        raise InputError(
            f"--messages {text}",
            f"{', '.join(MESSAGES[:-1])} or topk:FRACTION",
            "choose one, for example int8",
        )

    if kind != "topk":
        return kind, 0.0

    # A value of 4 bytes needs an index of 4 bytes: above one half nothing is saved.
    fraction = float_or_nan(share)
    if not 0 < fraction <= 0.5:
        raise InputError(
            f"--messages {text}",
            "a fraction above 0 and at most 0.5, since a number that leaves takes its position along",
            "for example topk:0.01",
        )

    return kind, fraction


def aggregation(text: str) -> tuple[str, float, int, float | None]:
    """Parse `--aggregation`: kind, fraction of `trimmed`, bad sites of Krum, bound of `clip` (None: auto).

    Raises:
        InputError: the value is invalid.
    """
    kind, colon, number = text.partition(":")
    # The mean and the median have no parameter, the others have one.
    if kind not in AGGREGATIONS or (kind in ("mean", "median")) == bool(colon):
        raise InputError(
            f"--aggregation {text}",
            "mean, clip:C, clip:auto, median, trimmed:FRACTION, krum:F or multikrum:F",
            "choose one, for example trimmed:0.2 or krum:1",
        )

    if not colon:
        return kind, 0.0, 0, None

    if kind == "clip":
        bound = None if number == "auto" else float_or_nan(number)
        if bound is not None and not 0 < bound < math.inf:
            raise InputError(
                f"--aggregation {text}",
                "the largest norm of a site's change, above 0, or auto: the round's middle one",
                "as clip:auto or clip:2.5",
            )

        return kind, 0.0, 0, bound

    if kind == "trimmed":
        fraction = float_or_nan(number)
        # The same number is cut at each end, so one half would leave nothing.
        if not 0 <= fraction < 0.5:
            raise InputError(
                f"--aggregation {text}",
                "a fraction from 0 and below 0.5 is dropped at each end",
                "as trimmed:0.2",
            )

        return kind, fraction, 0, None

    # isdecimal alone accepts digits of other scripts.
    if not (number.isascii() and number.isdecimal()):
        raise InputError(
            f"--aggregation {text}", "a whole number of bad sites", f"for example {kind}:1"
        )

    return kind, 0.0, int(number), None


def by_site(flag: str) -> Callable[[str], dict[str, tuple[str, ...]]]:
    """Return a parser for a flag with values per site, such as `north=liver,spleen;south=auto`.

    It returns site -> names, and raises an InputError for text of another form.
    """

    def read(text: str) -> dict[str, tuple[str, ...]]:
        sites = {}
        for part in text.split(";") if text.strip() else []:
            site, _, rest = (piece.strip() for piece in part.partition("="))
            names = tuple(split_commas(rest))
            unclear = not site or not all(names) or "=" in rest
            if unclear or site in sites or len({*names}) < len(names):
                raise InputError(
                    f"{flag} {text}"[:200],
                    "SITE=NAME,NAME;SITE=NAME, each site and each of its names once",
                    f"as {flag} 'north=liver,spleen;south=kidney'",
                )

            sites[site] = names

        return sites

    return read


def spacings(text: str) -> dict[str, tuple[float, ...]]:
    """Return site -> mm along each axis, of `--site-spacing`; InputError for text of another form."""
    sites: dict[str, tuple[float, ...]] = {}
    for site, sides in by_site("--site-spacing")(text).items():
        mm = tuple(map(float_or_nan, sides[0].split("x")))
        if len(sides) > 1 or len(mm) != 3 or not all(0 < side < math.inf for side in mm):
            raise InputError(
                f"--site-spacing {text}"[:200],
                "three lengths in mm above 0 for each site",
                "as 'north=1x1x2.5;south=1x1x5'",
            )

        sites[site] = mm

    return sites


def device(text: str) -> tuple[str, int]:
    """Return the kind of device, "auto", "cpu" or "cuda", and its index; InputError for anything else."""
    kind, colon, index = text.partition(":")
    right = text in ("auto", "cpu") or (
        kind == "cuda" and (not colon or (index.isascii() and index.isdecimal()))
    )
    if not right:
        raise InputError(f"--device {text}", "auto, cpu, cuda or cuda:INDEX", "give one of these")
    return kind, int(index or 0)


def metrics(text: str) -> list[str]:
    """Return the names in `--metrics`; whether the bundle has the structures is not known here.

    Raises:
        InputError: a name is not a metric and does not begin like one.
    """
    names = split_commas(text)
    kinds = (ALL, "dice", *SURFACE_METRICS)
    for name in names:
        if name not in kinds and not name.startswith(tuple(f"{kind}_" for kind in SURFACE_METRICS)):
            raise InputError(
                f"--metrics {name}",
                f"{', '.join(kinds)}, or either of the last two with _ and a structure's name",
                did_you_mean(name, kinds, "leave it out"),
            )

    return names


def site_names(text: str) -> list[str]:
    """Return the sites of `--unlabelled`, which the run may not have; InputError if a name is empty or there twice."""
    names = split_commas(text) if text else []
    if not all(names) or len({*names}) < len(names):
        raise InputError(f"--unlabelled {text}", "names of sites, each once", "as site-2,site-3")
    return names


def float_or_nan(text: str) -> float:
    """Return the number that a text gives, NaN if it gives none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def check_coverage(coverage: float) -> None:
    """Raise an InputError if this coverage cannot be guaranteed."""
    if not 0 < coverage < 1:
        raise InputError(
            f"--coverage {coverage:g}",
            "a share above 0 and below 1: all cases can only be covered by sets of everything",
            "give for example --coverage 0.9",
        )
