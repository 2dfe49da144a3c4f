"""Which segmented cases a run shows, and what their pictures are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from medfl.core.documents import Metrics
from medfl.data.prepared import Geometry, Shard
from medfl.evaluation.evaluators import Masks
from medfl.evaluation.metrics import Cases
from medfl.evaluation.slices import true_colours
from medfl.report import overlays
from medfl.report.dice_strip import dice_strips
from medfl.report.overlays import Example
from medfl.report.picture import Picture
from medfl.runtimes.federation import Federation
from medfl.storage.run_folder import safe_file_name

SITES = 60
"""Sites that are drawn: of more, these many at equal distances in the order of their median Dice."""


def chosen(cases: Mapping[str, Cases]) -> dict[str, dict[str, str]]:
    """Return the ids of each drawn site's cases to be shown, and why; none where the cases have no Dice."""
    return {site: overlays.ranked(dice) for site, dice in _drawn_sites(_dice(cases)).items()}


def case_pictures(
    federation: Federation, cases: Mapping[str, Cases], masks: Mapping[str, Mapping[str, Masks]]
) -> Iterator[Picture]:
    """Draw the Dice of each site's test cases, and of each site the best, the median and the worst of them.

    Of more than `SITES` sites these many are drawn, the best and the worst among them.
    """
    dice = _drawn_sites(_dice(cases))
    if dice:
        yield from dice_strips({site: list(values.values()) for site, values in dice.items()})
    for site, ranks in chosen(cases).items():
        shown = {ident: masks[site][ident] for ident in ranks if ident in masks.get(site, {})}
        if not shown:
            continue

        examples = []
        for ident, masks_of_case in shown.items():
            examples.append(
                _example(federation, site, ident, ranks[ident], cases[site], masks_of_case)
            )

        median = float(np.nanmedian(list(dice[site].values())))
        classes = max(masks_of_case.classes for masks_of_case in shown.values())
        structures = _structures(federation, classes)
        yield overlays.mask_overlays(
            f"masks-{safe_file_name(site)}", site, examples, structures, median
        )


def _dice(cases: Mapping[str, Cases]) -> dict[str, Metrics]:
    """Return site -> id -> Dice of the sites that have any."""
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
    # as they rank, so that the best and the worst are among them
    by_median = sorted(dice, key=lambda site: float(np.nanmedian(list(dice[site].values()))))
    drawn_sites = {by_median[i] for i in np.linspace(0, len(dice) - 1, SITES).round().astype(int)}
    return {site: values for site, values in dice.items() if site in drawn_sites}


def _example(
    federation: Federation, site: str, ident: str, rank: str, cases: Cases, masks: Masks
) -> Example:
    image, geometry = test_item(federation, site, ident)
    row = cases.select([ident]).values
    return Example(
        rank,
        ident,
        {name: float(value) for name, value in row.items()},
        true_colours(
            image[0].float().numpy(force=True), federation.bundle.section("test").source.transforms
        ),
        masks.reference.numpy(),
        masks.prediction.numpy(),
        geometry,
    )


def test_item(federation: Federation, site: str, ident: str) -> tuple[Any, Geometry | None]:
    """Return a test item (1, C, H, W[, D]) as networks are given it, and where it lies in its file if that is known."""
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
