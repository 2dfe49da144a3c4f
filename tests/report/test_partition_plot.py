"""The table and the chart of a partition."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from medfl.data.partition.rules import Partition, assign
from medfl.data.partition.table import shorten, table
from medfl.report import charts
from medfl.report.site_chart import plot


def cohort(num_classes, per_class=30):
    return {
        name: [
            {"id": f"{name}-{i:05d}", "label": i % num_classes} for i in range(num_classes * count)
        ]
        for name, count in (("train", per_class), ("test", 4))
    }


def test_table_by_hand():
    sections = {
        "train": [
            {"id": f"a{i}", "label": i % 2, "centre": "north" if i < 3 else "south-west"}
            for i in range(12)
        ],
        "validate": [],
        "test": [{"id": "t", "label": 0, "centre": "north"}],
    }
    partition = assign("centre", sections, sites=None, classes=("mel", "nv"), seed=5)
    text = table(partition, sections, ("mel", "nv"))
    assert text.splitlines() == [
        "partition centre, seed 5: images per section, training images per class",
        "",
        "site        training  test  mel  nv",
        "----------  --------  ----  ---  --",
        "north              3     1    2   1",
        "south-west         9     -    4   5",
        "all sites         12     1    6   6",
    ]


@pytest.mark.parametrize(("num_classes", "length"), [(2, 200), (7, 8), (8, 40), (62, 18), (150, 3)])
def test_table_keeps_to_a_hundred_columns_and_loses_no_number(num_classes, length):
    names = [f"{c} {'x' * length}" for c in range(num_classes)]
    sections = cohort(num_classes)
    partition = assign("dirichlet:0.5", sections, sites=5, classes=names, seed=0)
    lines = table(partition, sections, names).splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line.split() for line in lines if line.startswith("site-2 ")]
    numbers = [0 if cell == "-" else int(cell) for row in rows for cell in row[1:]]
    held = partition.sites["site-2"]
    assert numbers == [
        len(held["train"]),
        len(held["test"]),
        *partition.counts(sections, num_classes)["site-2"],
    ]


def test_table_shortens_site_names():
    wards = ("hospital of the holy spirit, ward a", "hospital of the holy spirit, ward b")
    sections = {"train": [{"id": f"i{i}", "centre": wards[i % 2]} for i in range(6)]}
    partition = assign("centre", sections, sites=None, classes=None, seed=0)
    lines = table(partition, sections, None).splitlines()
    assert "hospital of …rit, ward a         3" in lines
    assert "hospital of …rit, ward b         3" in lines


def test_table_tells_the_notes():
    sections, names = cohort(3, per_class=40), ("a", "b", "c")
    partition = assign("shots:2,5,0", sections, sites=2, classes=names, seed=0)
    assert partition.notes
    assert all(f"note: {note}" in table(partition, sections, names) for note in partition.notes)


def test_shorten_keeps_both_ends():
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcde…hijk"
    assert [len(shorten("x" * 50, width)) for width in (9, 10)] == [9, 10]


@pytest.mark.parametrize(
    ("num_classes", "sites", "name"), [(3, 1, "a"), (7, 12, "class of long name"), (4, 60, "b")]
)
def test_plot_keeps_inside_its_edges(tmp_path, num_classes, sites, name):
    names = [f"{name} {c}" for c in range(num_classes)]
    sections = cohort(num_classes, per_class=90)
    plot(
        assign("dirichlet:1", sections, sites=sites, classes=names, seed=0),
        sections,
        names,
        tmp_path / "chart.png",
    )
    pixels = np.asarray(Image.open(tmp_path / "chart.png").convert("RGB"))
    assert (pixels < 255).any()
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (edge == 255).all()


def test_plot_writes_the_count_of_every_class_at_every_site(tmp_path):
    names, sections = ("mel", "nv", "bcc"), cohort(3)
    partition = assign("dirichlet:0.2", sections, sites=8, classes=names, seed=0)
    plot(partition, sections, names, tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    written = Counter(re.findall(r"<!-- ([\d,]+) -->", text))
    cells = Counter(f"{n:,}" for row in partition.counts(sections, 3).values() for n in row)
    # the ticks below the sizes are numbers too
    assert cells <= written
    assert sum(cells.values()) == 24


def test_names_of_centres_and_classes_are_no_formulas_of_tex(tmp_path):
    """A name with two dollar signs ended the run that drew it."""
    names = ("$\\input{mel}$", "$nv")
    sections = {
        "train": [
            {"id": f"{i}", "label": i % 2, "centre": f"${chr(92)}ward{i % 2}$"} for i in range(8)
        ]
    }
    partition = assign("centre", sections, sites=None, classes=names, seed=0)
    plot(partition, sections, names, tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    for name in ("$\\input{mel}$", "$nv", "$\\ward0$", "$\\ward1$"):
        assert f"<!-- {name} -->" in text
    charts.agreement("x", np.ones(3), np.ones(3), ("$\\x$", "$\\y$"), [])


def test_plot_without_labels(tmp_path):
    sections = {"train": [{"id": f"i{i}"} for i in range(9)]}
    plot(
        assign("iid", sections, sites=3, classes=None, seed=0),
        sections,
        None,
        tmp_path / "chart.svg",
    )
    text = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    assert "<!-- Images at each site -->" in text
    assert "<!-- partition iid, seed 0: 3 sites, 9 training images -->" in text


@pytest.mark.parametrize(
    ("names", "target_of", "title", "columns"),
    [
        (("Mass", "Edema"), lambda i: (float(i % 3 == 0), None), "with each finding", ["Mass", "Edema"]),
        (("age",), lambda i: (float(i) if i else None,), "by age", ["1 to 6.6", "23.4 to 29"]),
        (("Mass",), lambda i: (0.0,), "with each finding", ["Mass"]),
    ],
)  # fmt: skip
def test_findings_and_numbers_have_columns(
    names: tuple[str, ...], target_of: Any, title: str, columns: list[str], tmp_path: Path
) -> None:
    sections = {"train": [{"id": f"i{i}", "target": target_of(i)} for i in range(30)]}
    partition = assign("iid", sections, sites=3, classes=names, seed=0)
    plot(partition, sections, names, tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    assert f"<!-- Training images {title}" in text
    assert "30 training images" in text
    for column in columns:
        assert f"<!-- {column} -->" in text


def test_findings_are_counted_where_they_are_known(tmp_path: Path) -> None:
    """In the table on the terminal and in the record, from which the report draws them; a picture may have several."""
    targets = [(1.0, None), (1.0, 1.0), (0.0, None), (None, 1.0)]
    sections = {"train": [{"id": f"i{i}", "target": target} for i, target in enumerate(targets)]}
    ids = {"a": {"train": ["i0", "i1", "i2"]}, "b": {"train": ["i3"]}}
    partition = Partition.from_ids(ids, sections, spec="iid", seed=0)
    assert partition.counts(sections, 2) == {"a": [2, 1], "b": [0, 1]}
    text = table(partition, sections, ("Mass", "Edema"))
    assert "training images per finding" in text
    assert [line.split() for line in text.splitlines()[-3:]] == [
        ["a", "3", "2", "1"],
        ["b", "1", "-", "1"],
        ["all", "sites", "4", "2", "2"],
    ]


def test_drawing_leaves_the_global_figure_list_alone(tmp_path):
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    sections = cohort(2)
    plot(
        assign("iid", sections, sites=2, classes=("a", "b"), seed=0),
        sections,
        ("a", "b"),
        tmp_path / "chart.png",
    )
    assert pyplot.get_fignums() == before
