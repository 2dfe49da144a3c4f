"""Partitions of images with several findings, or with numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from medfl.core.errors import InputError
from medfl.data.partition.rules import assign

FINDINGS = ("Effusion", "Mass", "Hernia")


def with_findings(count: int, prefix: str, seed: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(seed)
    rows = generator.random((count, 3)) < [0.5, 0.2, 0.05]
    items = []
    for index, row in enumerate(rows.astype(float).tolist()):
        target = tuple(None if generator.random() < 0.1 else value for value in row)
        items.append({"id": f"{prefix}{index}", "target": target, "group": f"{prefix}{index // 2}"})

    return items


def sections_of(make: Any) -> dict[str, list[dict[str, Any]]]:
    return {"train": make(600, "a", 1), "validate": make(100, "b", 2), "test": make(300, "c", 3)}


def with_numbers(count: int, prefix: str, seed: int) -> list[dict[str, Any]]:
    values = np.random.default_rng(seed).normal(50, 10, count).round(1)
    return [{"id": f"{prefix}{i}", "target": (value,)} for i, value in enumerate(values.tolist())]


def held(spec: str, data: Any, sites: int, seed: int = 0, names: Any = FINDINGS) -> Any:
    return assign(spec, data, sites=sites, classes=names, seed=seed).sites


def shares(positions: Any, items: Any) -> Any:
    rows = np.array([items[i]["target"] for i in positions], dtype=float)
    return np.nanmean(rows, axis=0)


def test_stratified_sites_have_the_same_share_of_every_finding() -> None:
    data = sections_of(with_findings)
    everywhere = shares(range(600), data["train"])
    for site in held("stratified", data, 4).values():
        assert len(site["train"]) == pytest.approx(150, abs=3)
        assert shares(site["train"], data["train"]) == pytest.approx(everywhere, abs=0.02)
        assert len(site["test"]) == pytest.approx(75, abs=3)


def test_stratified_classes_and_numbers() -> None:
    items = [{"id": f"i{i}", "label": int(i % 10 == 0)} for i in range(200)]
    data = {"train": items, "validate": [], "test": []}
    for site in held("stratified", data, 5, names=("no", "yes")).values():
        assert sum(items[i]["label"] for i in site["train"]) == 4


@pytest.mark.parametrize("spec", ["stratified", "dirichlet:0.3", "classes:2"])
def test_patients_stay_together_and_nothing_depends_on_the_order(spec: str) -> None:
    data = sections_of(with_findings)
    reversed_data = {name: items[::-1] for name, items in data.items()}

    def homes(sections: Any, seed: int = 0) -> dict[str, str]:
        result = {}
        for name, site in held(spec, sections, 3, seed).items():
            for section, positions in site.items():
                result |= {sections[section][i]["id"]: name for i in positions}
        return result

    found = homes(data)
    assert len(found) == 1000
    by_group: dict[str, set[str]] = {}
    for items in data.values():
        for item in items:
            by_group.setdefault(item["group"], set()).add(found[item["id"]])
    assert all(len(sites) == 1 for sites in by_group.values())
    assert found == homes(reversed_data)
    assert found != homes(data, seed=1)


def test_dirichlet_divides_by_the_rarest_finding_of_an_image() -> None:
    data = sections_of(with_findings)
    sites = held("dirichlet:0.1", data, 3)
    spread = [shares(site["train"], data["train"])[1] for site in sites.values()]
    alike = [shares(site["train"], data["train"])[1] for site in held("iid", data, 3).values()]
    assert max(spread) - min(spread) > 2 * (max(alike) - min(alike))


@pytest.mark.parametrize("spec", ["quantile", "range"])
def test_numbers_in_ascending_parts(spec: str) -> None:
    data = sections_of(with_numbers)
    sites = held(spec, data, 3, names=("age",))
    numbers = {
        name: [data["train"][i]["target"][0] for i in site["train"]] for name, site in sites.items()
    }
    assert max(numbers["site-1"]) <= min(numbers["site-2"])
    assert max(numbers["site-2"]) <= min(numbers["site-3"])
    sizes = [len(values) for values in numbers.values()]
    everything = sum(numbers.values(), [])
    if spec == "quantile":
        assert sizes == pytest.approx([200] * 3, abs=6)
    else:
        width = (max(everything) - min(everything)) / 3
        assert max(numbers["site-1"]) - min(everything) == pytest.approx(width, abs=1)
        assert sizes[1] > 2 * sizes[0]

    tested = [data["test"][i]["target"][0] for i in sites["site-3"]["test"]]
    assert min(tested) >= min(numbers["site-3"]) - 1


def test_dirichlet_of_numbers_draws_by_tenths() -> None:
    """Each tenth of the numbers is mostly at one site, where the draw is as uneven as this."""
    data = sections_of(with_numbers)
    numbers = np.array([item["target"][0] for item in data["train"]])
    tenth = np.searchsorted(np.quantile(numbers, np.arange(1, 10) / 10), numbers, "right")
    most = Counter[int]()
    for site in held("dirichlet:0.05", data, 3, names=("age",)).values():
        for part, count in Counter(tenth[list(site["train"])].tolist()).items():
            most[part] = max(most[part], count)

    assert len(most) == 10
    assert np.mean(list(most.values())) > 50


@pytest.mark.parametrize(
    ("spec", "make", "told"),
    [
        ("quantile", with_findings, "the images have no numbers"),
        ("range", lambda n, p, s: [{"id": f"{p}{i}", "label": 0} for i in range(n)], "no numbers"),
        ("quantile", lambda n, p, s: [{"id": f"{p}{i}", "target": (None,)} for i in range(n)], "no numbers"),
        ("range", lambda n, p, s: [{"id": f"{p}{i}", "target": (float(i) if i else None,)} for i in range(n + 9)],
         "the numbers of 1 of"),
    ],
)  # fmt: skip
def test_rules_that_need_numbers(spec: str, make: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        held(spec, sections_of(make), 3, names=None)
