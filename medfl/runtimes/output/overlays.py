"""Which segmented cases a run shows, and the data of their pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from torch import Tensor

from medfl.core import Array, Metrics, map_values, within
from medfl.data import Geometry, Shard
from medfl.evaluation import Cases, Foreign, Masks
from medfl.evaluation.slices import true_colours
from medfl.report import overlays
from medfl.report.overlays import Example, dice_strips
from medfl.report.picture import Picture
from medfl.runtimes.federation import Federation
from medfl.storage import safe_file_name

SITES = 60
"""Maximum number of sites drawn: of more, this many equally spaced in the order of their median Dice."""


def chosen(cases: Mapping[str, Cases]) -> dict[str, dict[str, str]]:
    """Return the ids of each drawn site's cases to be shown, and why; none where the cases have no Dice."""
    return map_values(overlays.ranked, _drawn_sites(_dice(cases)))


def case_pictures(
    federation: Federation, cases: Mapping[str, Cases], masks: Mapping[str, Mapping[str, Masks]]
) -> Iterator[Picture]:
    """Draw the Dice of each site's test cases, and the best, median and worst case of each site.

    Of more than `SITES` sites this many are drawn, including the best and the worst.
    """
    dice = _drawn_sites(_dice(cases))
    if dice:
        yield from dice_strips({site: list(values.values()) for site, values in dice.items()})
    for site, ranks in chosen(cases).items():
        examples = []
        classes = 0
        for ident, rank in ranks.items():
            # no mask: overlapping channels
            masks_of_case = masks.get(site, {}).get(ident)
            if masks_of_case is not None:
                case = _example(federation, site, ident, rank, cases[site], masks_of_case)
                examples.append(case)
                classes = max(classes, masks_of_case.classes)

        if not examples:
            continue

        median = float(np.nanmedian(list(dice[site].values())))
        structures = _structures(federation, classes)
        yield overlays.mask_overlays(
            f"masks-{safe_file_name(site)}", site, examples, structures, median
        )


def _dice(cases: Mapping[str, Cases]) -> dict[str, Metrics]:
    """Return site -> id -> Dice, for sites that have any."""
    by_site = {}
    for site, outcomes in cases.items():
        # NaN: a structure that is neither in the reference nor predicted
        if "dice" in outcomes.values and not outcomes.values["dice"].isnan().all():
            dice = outcomes.values["dice"].tolist()
            by_site[site] = dict(zip(outcomes.ids, dice, strict=True))

    return by_site


def _drawn_sites(dice: Mapping[str, Metrics]) -> dict[str, Metrics]:
    if len(dice) <= SITES:
        return dict(dice)
    # in rank order, so that the best and the worst are included
    by_median = sorted(dice, key=lambda site: float(np.nanmedian(list(dice[site].values()))))
    drawn_sites = set()
    for i in np.linspace(0, len(dice) - 1, SITES).round().astype(int):
        drawn_sites.add(by_median[i])

    return within(dice, drawn_sites)


def _example(
    federation: Federation, site: str, ident: str, rank: str, cases: Cases, masks: Masks
) -> Example:
    image, geometry = test_item(federation, site, ident)
    row = {
        name: float(value)
        for name, value in cases.select([ident]).values.items()
        if value.ndim == 1
    }
    return Example(
        rank,
        ident,
        row,
        in_true_colours(federation, image),
        masks.reference.numpy(),
        masks.prediction.numpy(),
        geometry,
    )


def in_true_colours(federation: Federation, image: Tensor) -> Array:
    """Return a test item (1, C, H, W[, D]) as in its file, without the bundle's normalisation."""
    steps = federation.bundle.section("test").source.transforms
    return true_colours(image[0].float().numpy(force=True), steps)


def test_item(federation: Federation, site: str, ident: str) -> tuple[Foreign, Geometry | None]:
    """Return a test item (1, C, H, W[, D]) as network input, and its position in its file if known."""
    shard = federation.shard(site, "test")
    index = int(shard.indices[shard.ids.index(ident)])
    image, _ = next(Shard.of(shard.prepared, [index]).batches(1))
    return image, shard.prepared.geometry[index] if shard.prepared.geometry else None


def _structures(federation: Federation, classes: int) -> list[str]:
    """Return the names of the foreground classes."""
    structures = federation.bundle.structures
    if len(structures) == classes:
        return list(structures[1:])

    return [f"structure {index}" for index in range(1, classes)]
