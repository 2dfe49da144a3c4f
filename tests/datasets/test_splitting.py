from __future__ import annotations

from collections import Counter

import pytest

from medfl.datasets.splitting import Record, by_group, carved, given
from medfl.errors import InputError


def _records(n: int = 1000) -> list[Record]:
    return [
        Record(
            f"{i}.png", i // 2 % 2, f"i{i}", "ab"[i // 4 % 2], f"g{i // 2}", {"old": "test" if i % 5 == 0 else "train"}
        )
        for i in range(n)
    ]


def test_groups_stay_together_and_shares_hold_in_each_class_and_centre():
    records = _records()
    sections = by_group((0.7, 0.1, 0.2), "x")(records)
    assert len({(record.group, section) for record, section in zip(records, sections, strict=True)}) == 500
    for label in (0, 1):
        for centre in "ab":
            found = Counter(s for r, s in zip(records, sections, strict=True) if (r.label, r.centre) == (label, centre))
            total = sum(found.values())
            assert found["train"] / total == pytest.approx(0.7, abs=0.02)
            assert found["test"] / total == pytest.approx(0.2, abs=0.02)


def test_order_of_records_does_not_matter():
    records = _records()
    rule = by_group((0.7, 0.1, 0.2), "x")
    forward = dict(zip((r.id for r in records), rule(records), strict=True))
    backward = dict(zip((r.id for r in reversed(records)), rule(list(reversed(records))), strict=True))
    assert forward == backward
    assert forward != dict(zip((r.id for r in records), by_group((0.7, 0.1, 0.2), "y")(records), strict=True))


def test_carved_keeps_the_test_section_and_groups():
    """Groups are pairs, every fifth image is test: a group may be in train and test, never in train and validate."""
    records = _records()
    sections = carved("old")(records)
    assert [s == "test" for s in sections] == [r.given["old"] == "test" for r in records]
    for part in ("train", "validate"):
        other = {r.group for r, s in zip(records, sections, strict=True) if s == part}
        assert not other & {r.group for r, s in zip(records, sections, strict=True) if s not in (part, "test")}
    assert Counter(sections)["validate"] == pytest.approx(80, abs=4)


def test_given_names_the_image_without_a_section():
    with pytest.raises(InputError, match="no section for i0"):
        given("new")(_records(3))
