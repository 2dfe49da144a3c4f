"""Metrics by subgroup: what is told, what is not, and that the numbers are those of the cases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import recall_score, roc_auc_score

from medfl.bundle.case_metadata import band
from medfl.cli.subgroups import text
from medfl.core import tables
from medfl.core.errors import InputError
from medfl.evaluation import delong
from medfl.runs.subgroups import of

CLASSES = ("a", "b", "c")


def rows(
    counts: dict[str, tuple[int, ...]], classes: tuple[str, ...] = CLASSES
) -> list[dict[str, Any]]:
    """Centre -> cases of each class, with probabilities that are right more often than not."""
    draws, made = np.random.default_rng(0), []
    for centre, numbers in counts.items():
        for label, number in enumerate(numbers):
            for _ in range(number):
                p = draws.dirichlet(np.ones(len(classes)) + 2 * np.eye(len(classes))[label])
                made.append(
                    {
                        "id": str(len(made)),
                        "site": "s",
                        "label": label,
                        "predicted": int(p.argmax()),
                        "centre": centre,
                    }
                    | {f"p_{name}": float(value) for name, value in zip(classes, p, strict=True)}
                )
    return made


def test_the_metrics_of_a_group_are_those_of_its_cases() -> None:
    made = rows({"north": (20, 15, 12), "south": (30, 30, 30)})
    found = of(made, "centre", CLASSES)
    own = [row for row in made if row["centre"] == "north"]
    label, predicted = [row["label"] for row in own], [row["predicted"] for row in own]
    probabilities = np.array([[row[f"p_{name}"] for name in CLASSES] for row in own])
    group = found.groups[0]
    assert (group.name, group.count, group.small_classes) == ("north", 47, ())
    assert group.metrics["accuracy"].value == pytest.approx(np.mean(np.equal(label, predicted)))
    assert group.metrics["balanced_accuracy"].value == pytest.approx(
        recall_score(label, predicted, average="macro")
    )
    assert group.metrics["auroc"].value == pytest.approx(
        roc_auc_score(label, probabilities, multi_class="ovr")
    )
    assert group.areas["b"] == delong.area(np.equal(label, 1), probabilities[:, 1])
    assert all(one.low < one.value < one.high for one in group.metrics.values())
    assert found.total.count == len(made)


def test_of_two_classes_the_area_has_delong_s_interval() -> None:
    made = rows({"north": (20, 15)}, ("no", "yes"))
    told = of(made, "centre", ("no", "yes")).groups[0]
    area = told.areas["yes"]
    assert (told.metrics["auroc"].value, told.metrics["auroc"].low) == (area.value, area.low)


def test_small_groups_are_not_told_and_do_not_enter_the_total() -> None:
    found = of(
        rows({"large": (12, 12, 12), "next": (10, 10, 10), "small": (3, 3, 3)}), "centre", CLASSES
    )
    next_, large, small = (
        next(one for one in found.groups if one.name == n) for n in ("next", "large", "small")
    )
    assert (next_.count, large.count, small.count) == (
        30,
        None,
        None,
    )  # small would be what is left of all cases
    assert not small.metrics
    assert found.total.count == 30
    record = next(row for row in found.records() if row["centre"] == "small")
    assert [record[name] for name in ("cases", "accuracy", "auroc_low")] == [None, None, None]
    why = "fewer than 10 cases, or its count would reveal such a group"
    assert found.notes()[0] == f"not told, {why}: large, small"


def test_where_a_class_has_few_cases_only_accuracy_and_the_other_areas_are_told() -> None:
    made = rows({"north": (20, 15, 4)})
    group = of(made, "centre", CLASSES).groups[0]
    assert group.small_classes == ("c",)
    assert set(group.areas) == {"a", "b"}
    assert set(group.metrics) == {"accuracy"}
    assert any("north: c" in note for note in of(made, "centre", CLASSES).notes())


def test_nothing_is_told_where_every_group_is_small() -> None:
    found = of(rows({"one": (2, 2, 2), "two": (3, 1, 1)}), "centre", CLASSES)
    assert [group.count for group in (*found.groups, found.total)] == [None, None, None]
    assert all(row["cases"] is None for row in found.records())


def test_ages_are_put_into_bands_from_young_to_old() -> None:
    made = rows({"north": (30, 30, 30)})
    ages = [5.0, 19.9, 20, 85, 101, None]
    for index, row in enumerate(made):
        row["age"] = ages[index % len(ages)]
    found = of(made, "age", CLASSES, min_count=1)
    assert [group.name for group in found.groups] == ["0–19", "20–39", "80+", "not stated"]
    assert sum(group.count or 0 for group in found.groups) == 90
    assert band(39.99) == "20–39"


def test_segmentation_gives_the_mean_of_each_metric() -> None:
    draws = np.random.default_rng(0)
    made = [
        {"id": str(i), "site": "ab"[i % 2], "dice": float(d), "loss": 1.0}
        for i, d in enumerate(draws.uniform(size=40))
    ]
    first = of(made, "site").groups[0]
    own = [row["dice"] for row in made if row["site"] == "a"]
    assert first.metrics["dice"].value == pytest.approx(np.mean(own))
    assert first.metrics["dice"].low < np.mean(own) < first.metrics["dice"].high
    assert "loss" not in first.metrics


def test_a_structure_s_mean_says_over_how_many_cases_and_is_not_told_of_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of site a every second case has a liver and all have a spleen; of site b only three have a liver."""
    made = []
    for number in range(60):
        site = "ab"[number % 2]
        has = number % 4 == 0 or number in (1, 3, 5)
        row = {"id": str(number), "site": site, "dice": 0.5 + number / 200}
        made.append({**row, "dice_liver": number / 100 if has else math.nan, "dice_spleen": 0.25})

    livers = [row["dice_liver"] for row in made if row["site"] == "a"]
    found = of(made, "site")
    first, second = found.groups
    assert first.metrics["dice_liver"].value == pytest.approx(np.nanmean(livers))
    assert first.metrics["dice_liver"].cases == np.isfinite(livers).sum() == 15
    assert first.metrics["dice_spleen"].cases == 0, "all cases have one"
    assert "dice_liver" not in second.metrics
    assert "dice_liver" not in found.total.metrics, "that of site b would follow from it"
    assert second.small_classes == ("dice_liver",)
    assert found.records()[0]["dice_liver_cases"] == 15

    monkeypatch.setattr(tables, "screen_width", lambda: 200)
    lines = text(found)
    assert "15 cases)" in lines[2]
    assert (
        "note: no means, nor that of all, where those with a structure have fewer than 10"
        in "\n".join(lines)
    )
    everyone = of(made, "site", min_count=3).total.metrics["dice_liver"]
    assert everyone.cases == 18
    assert everyone.value == pytest.approx(np.nanmean([row["dice_liver"] for row in made]))


def test_metrics_of_fewer_cases_than_an_interval_needs_are_told_without_one() -> None:
    """They were left out unsaid, although `min_count` allows them."""
    made = []
    for number in range(8):
        dice = {"dice": number / 10, "dice_liver": math.nan if number % 4 else 0.5}
        made.append({"id": str(number), "site": "ab"[number % 2], **dice})
    found = of(made, "site", min_count=1)
    first = found.groups[0].metrics
    assert first["dice"].value == pytest.approx(np.mean([0.0, 0.2, 0.4, 0.6]))
    assert (first["dice"].low, first["dice_liver"].cases) == (None, 2)
    assert "dice_liver" not in found.groups[1].metrics
    assert found.records()[0]["dice_low"] is None
    assert "0.300 (too few for an interval)" in "\n".join(text(found))


@pytest.mark.parametrize("by", ["age", "label", "p_a", "nothing"])
def test_a_column_that_is_none_is_refused_with_those_there_are(by: str) -> None:
    with pytest.raises(InputError, match="site, centre"):
        of(rows({"north": (12, 12, 12)}), by, CLASSES)


def test_ages_that_are_not_read_are_counted_and_named() -> None:
    made = rows({"north": (20, 15, 12)})
    for number, row in enumerate(made):
        row["age"] = ["adult", "55-65", None, 50.0][number % 4]
    found = of(made, "age", CLASSES)
    assert [group.name for group in found.groups] == ["40–59", "not stated"]
    (note,) = [note for note in found.notes() if "not read" in note]
    assert note.startswith(
        "24 ages are not read, or fit several bands, and count as not stated: '55-65', 'adult'"
    )
    assert not any("not read" in note for note in of(made, "centre", CLASSES).notes())
