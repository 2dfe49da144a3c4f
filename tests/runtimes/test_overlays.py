"""Of thousands of sites only some are drawn."""

from __future__ import annotations

import torch

from medfl.evaluation.metrics import Cases
from medfl.runtimes.output.overlays import SITES, chosen


def sites(count: int) -> dict[str, Cases]:
    """Sites with one case each, whose Dice falls from the first to the last."""
    return {
        f"s{i}": Cases((f"c{i}",), {"dice": torch.tensor([1 - i / count])}) for i in range(count)
    }


def test_few_sites_are_all_drawn() -> None:
    assert list(chosen(sites(SITES))) == [f"s{i}" for i in range(SITES)]


def test_of_more_the_best_the_worst_and_those_at_equal_distances_between_them_are_drawn() -> None:
    found = list(chosen(sites(10 * SITES)))
    assert len(found) == SITES
    assert {found[0], found[-1]} == {"s0", f"s{10 * SITES - 1}"}
    assert {int(b[1:]) - int(a[1:]) for a, b in zip(found, found[1:], strict=False)} <= {10, 11}
