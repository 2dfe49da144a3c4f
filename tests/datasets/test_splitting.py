from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from medfl.core.errors import InputError
from medfl.datasets.readers.splitting import (
    LEFT_OUT,
    SECTIONS,
    Record,
    WholeCentres,
    by_group,
    filled,
    fold,
    published,
    validation_from_train,
)


def _records(n: int = 1000) -> list[Record]:
    return [
        Record(
            f"{i}.png",
            i // 2 % 2,
            f"i{i}",
            "ab"[i // 4 % 2],
            f"g{i // 2}",
            {"old": "test" if i % 5 == 0 else "train"},
        )
        for i in range(n)
    ]


def test_groups_stay_together_and_shares_hold_in_each_class_and_centre():
    records = _records()
    sections = by_group("x")(records)
    assert (
        len({(record.group, section) for record, section in zip(records, sections, strict=True)})
        == 500
    )
    for label in (0, 1):
        for centre in "ab":
            found = Counter(
                s
                for r, s in zip(records, sections, strict=True)
                if (r.label, r.centre) == (label, centre)
            )
            total = sum(found.values())
            assert found["train"] / total == pytest.approx(0.7, abs=0.02)
            assert found["test"] / total == pytest.approx(0.2, abs=0.02)


def test_order_of_records_does_not_matter():
    records = _records()
    rule = by_group("x")
    forward = dict(zip((r.id for r in records), rule(records), strict=True))
    backward = dict(
        zip((r.id for r in reversed(records)), rule(list(reversed(records))), strict=True)
    )
    assert forward == backward
    assert forward != dict(zip((r.id for r in records), by_group("y")(records), strict=True))


def test_carved_keeps_the_test_section_and_groups():
    """Groups are pairs, every fifth image is test: a group may be in train and test, never in train and validate."""
    records = _records()
    sections = validation_from_train("old")(records)
    assert [s == "test" for s in sections] == [r.sections["old"] == "test" for r in records]
    for part in ("train", "validate"):
        other = {r.group for r, s in zip(records, sections, strict=True) if s == part}
        assert not other & {
            r.group for r, s in zip(records, sections, strict=True) if s not in (part, "test")
        }
    assert Counter(sections)["validate"] == pytest.approx(80, abs=4)


def test_given_names_the_image_without_a_section():
    with pytest.raises(InputError, match="no section for i0"):
        published("new")(_records(3))


def test_whole_centres() -> None:
    """Centres of 1 to 12 images, those below 10 take part: 9, of which 3, 1 and 2 are drawn."""
    records = [
        Record("", 0, f"{size}/{i}", f"c{size}", "") for size in range(1, 13) for i in range(size)
    ]
    rule = WholeCentres((3, 1, 2), 10, "x")
    sections = rule(records)
    drawn = {record.centre: section for record, section in zip(records, sections, strict=True)}
    assert Counter(drawn.values()) == {"train": 3, "validate": 1, "test": 2, LEFT_OUT: 6}
    assert [drawn[f"c{size}"] for size in (10, 11, 12)] == [LEFT_OUT] * 3
    assert sections == [drawn[record.centre] for record in records]
    assert rule(records[::-1]) == sections[::-1]
    assert WholeCentres((3, 1, 2), 10, "x", trial=0)(records) == sections
    assert (
        len({tuple(WholeCentres((3, 1, 2), 10, "x", trial)(records)) for trial in range(10)}) == 10
    )
    with pytest.raises(
        InputError,
        match="9 of 12 writers or centres have fewer than 10 images; this split draws 10",
    ):
        WholeCentres((8, 1, 1), 10, "x")(records)


def test_a_class_can_be_cut_as_a_whole() -> None:
    """Ten images of one class at ten centres: cut at each centre all would be for training."""
    records = [Record("", 0, f"i{i}", f"c{i}", f"i{i}") for i in range(10)]
    assert set(by_group("x")(records)) == {"train"}
    assert Counter(by_group("x", at_centres=False)(records)) == {
        "train": 7,
        "validate": 1,
        "test": 2,
    }


def _few(groups: int, images: int = 2, labels: int = 1) -> list[Record]:
    return [
        Record(f"{g}-{i}.png", g % labels, f"{g}-{i}", "unknown", f"g{g}")
        for g in range(groups)
        for i in range(images)
    ]


@pytest.mark.parametrize("groups", range(3, 25))
def test_three_patients_are_enough_for_three_sections(groups: int) -> None:
    records = _few(groups)
    before = by_group("own", at_centres=False)(records)
    after = filled(by_group("own", at_centres=False))(records)
    assert set(after) == set(SECTIONS)
    assert len(set(zip((r.group for r in records), after, strict=True))) == groups
    moved = {r.group for r, was, now in zip(records, before, after, strict=True) if was != now}
    assert len(moved) == len(
        set(SECTIONS) - set(before)
    )  # where no section is empty, nothing moves


def test_a_class_keeps_its_last_patient_for_training() -> None:
    rule = filled(by_group("own", at_centres=False))
    assert set(rule(_few(1))) == {"train"}
    sections = rule(_few(4, 1, labels=2))
    assert {
        record.label
        for record, own in zip(_few(4, 1, labels=2), sections, strict=True)
        if own == "train"
    } == {
        0,
        1,
    }


@pytest.mark.parametrize(("groups", "count"), [(8, 4), (12, 5), (5, 5), (23, 10)])
def test_each_patient_is_tested_in_one_fold(groups: int, count: int) -> None:
    records = _few(groups, labels=2)
    found = [fold(number, count, "x")(records) for number in range(1, count + 1)]
    for own in found:
        assert set(own) == set(SECTIONS)
        assert len(set(zip((r.group for r in records), own, strict=True))) == groups
        assert {r.label for r, section in zip(records, own, strict=True) if section == "train"} == {
            0,
            1,
        }
    tested = [sum(own[index] == "test" for own in found) for index in range(len(records))]
    assert tested == [1] * len(records)
    sizes = [own.count("test") for own in found]
    assert max(sizes) - min(sizes) <= 2  # a patient of two images
    shuffled = list(reversed(records))
    assert list(reversed(fold(2, count, "x")(shuffled))) == found[1]


def test_each_fold_has_its_share_of_each_finding_and_of_each_part_of_a_number() -> None:
    """Also where the records have no class, as those of the shipped data sets of findings and numbers."""
    draws = np.random.default_rng(0)
    targets = {
        "findings": (draws.random((300, 3)) < [0.05, 0.2, 0.5]).astype(float),
        "numbers": draws.normal(0, 1, (300, 1)),
    }
    for kind, values in targets.items():
        records = []
        for i, row in enumerate(values):
            record = Record(
                f"{i}.png", 0, f"i{i}", "ab"[i % 3 % 2], f"g{i // 2}", target=tuple(row)
            )
            records.append(record)

        high = values > 0 if kind == "findings" else values > np.quantile(values, 0.8)
        tested = np.zeros(300, int)
        for number in range(1, 6):
            sections = np.array(fold(number, 5, "x")(records))
            assert (sections[::2] == sections[1::2]).all()
            tested += sections == "test"
            for name, share in {"test": 0.2, "validate": 0.1, "train": 0.7}.items():
                found = high[sections == name].sum(0)
                assert (np.abs(found - share * high.sum(0)) <= 5).all(), (kind, number, name)

        assert (tested == 1).all()


@pytest.mark.parametrize(
    ("records", "told"),
    [
        (_few(4), "5 folds of 4 patients"),
        (_few(9, labels=2)[:-2] + _few(40, labels=40)[-1:], "one class has 1"),
    ],
)
def test_folds_that_cannot_be_are_refused(records: list[Record], told: str) -> None:
    with pytest.raises(InputError, match=told):
        fold(1, 5, "x")(records)
