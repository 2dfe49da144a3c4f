"""The federation's picture: distances by hand, what is not told is marked, and other people's files are checked."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.spatial.distance import jensenshannon

from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.partner.heterogeneity import draw, read
from medfl.partner.statistics import DOCUMENT_FORM


def told(
    path: Path, classes: dict[str, int | None], images: int | None, shares: Any = ((0.5, 0.5),)
) -> Path:
    channels = [{"mean": 0.1, "sd": 1.0, "shares": list(row)} for row in shares]
    part = {
        "images": images,
        "tables": {"class": classes},
        "intensity": {"low": 0, "high": 1, "channels": channels},
    }
    nothing = {"images": None, "tables": {}, "intensity": None}
    document = {
        "form": DOCUMENT_FORM, "bundle": "moles", "bundle_sha256": "0", "task": "classification", "min_count": 10,
        "epsilon": None, "sections": {"train": part, "test": nothing},
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [
        told(tmp_path / "north.json", {"a": 60, "b": 40}, 100, [[0.2, 0.8]]),
        told(tmp_path / "south.json", {"a": 30, "b": 70}, 100, [[0.6, 0.4]]),
        told(tmp_path / "west.json", {"a": None, "b": None}, 40, [[None, None]]),
    ]


def test_distances_are_jensen_shannon_s_from_all_together(files: list[Path]) -> None:
    found = read(files[:2])
    together = np.array([90, 110]) / 200
    for row, distance in zip(([0.6, 0.4], [0.3, 0.7]), found.class_distances(), strict=True):
        middle = (np.array(row) + together) / 2
        by_hand = sum(
            0.5 * p * math.log2(p / m) + 0.5 * q * math.log2(q / m)
            for p, q, m in zip(row, together, middle, strict=True)
        )
        assert distance == pytest.approx(math.sqrt(by_hand))
    expected = [jensenshannon(row, [0.4, 0.6], base=2) for row in ([0.2, 0.8], [0.6, 0.4])]
    assert found.intensity_distances() == pytest.approx(expected)


def test_names_of_files_and_classes_are_no_formulas_of_tex(tmp_path: Path) -> None:
    paths = [told(tmp_path / f"$\\{n}$.json", {"$\\a$": 60, "$b": 40}, 100) for n in "xy"]
    draw(read(paths), tmp_path / "all.svg")
    drawn = (tmp_path / "all.svg").read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in drawn for name in ("$\\a$", "$b", "$\\x$"))


def test_equal_sites_have_no_distance(tmp_path: Path) -> None:
    """The last bits of the divergence of equal rows may be below zero."""
    paths = [
        told(tmp_path / f"{n}.json", {"a": 60, "b": 40}, n, [[0.2, 0.8], [0.5, 0.5]])
        for n in (1, 50, 7)
    ]
    assert read(paths).class_distances() == pytest.approx([0, 0, 0], abs=1e-7)
    assert read(paths).intensity_distances() == pytest.approx([0, 0, 0], abs=1e-7)


def test_a_file_without_its_bundle_or_with_shares_above_one_is_refused(tmp_path: Path) -> None:
    path = told(tmp_path / "x.json", {"a": 60}, 60)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in document.items() if key != "bundle"}))
    with pytest.raises(InputError, match="it is no 'medfl site statistics 1' of a bundle"):
        read([path])
    with pytest.raises(InputError, match="has another form .shares."):
        read([told(tmp_path / "x.json", {"a": 60}, 60, [[1e308, 1e308]])])


def test_what_is_not_told_is_taken_as_an_equal_share_of_the_rest(tmp_path: Path) -> None:
    (site,) = read([told(tmp_path / "x.json", {"a": 50, "b": None, "c": None}, 64)]).sites
    assert site.estimated.tolist() == [50, 7, 7]
    (unknown,) = read([told(tmp_path / "y.json", {"a": None, "b": None}, None)]).sites
    assert np.isnan(unknown.estimated).all()


def test_sites_that_tell_too_little_have_no_distance(files: list[Path]) -> None:
    found = read(files)
    west = found.as_dict()["sites"][2]
    assert west["intensity_distance"] is None
    assert west["class_distance"] is not None  # 40 images in two classes that are not told: 20 each
    assert "?" in found.table()[2]
    silent = read([files[0], told(files[0].parent / "z.json", {"a": None, "b": None}, None)])
    assert silent.as_dict()["sites"][1]["class_distance"] is None


def test_the_picture_shows_every_site_and_marks_what_is_not_told(
    files: list[Path], tmp_path: Path
) -> None:
    found = read(files)
    draw(found, tmp_path / "all.svg")
    drawn = (tmp_path / "all.svg").read_text()
    assert drawn.startswith("<?xml")
    draw(found, tmp_path / "all.png")
    with Image.open(tmp_path / "all.png") as image:
        assert min(image.size) > 400
    many = [told(tmp_path / f"s{i}.json", {"a": 10 + i, "b": 30}, 40 + i) for i in range(40)]
    draw(read(many), tmp_path / "many.png")
    with pytest.raises(InputError, match=r"as FILE\.png"):
        draw(found, tmp_path / "all.nothing")


def test_without_classes_and_histograms_there_are_sizes(tmp_path: Path) -> None:
    paths = [told(tmp_path / f"{name}.json", {}, 20) for name in "xy"]
    for path in paths:
        document = json.loads(path.read_text())
        document["sections"]["train"]["intensity"] = None
        path.write_text(json.dumps(document))
    found = read(paths)
    assert [site["class_distance"] for site in found.as_dict()["sites"]] == [None, None]
    draw(found, tmp_path / "sizes.png")


CHANGES: dict[str, Any] = {
    "another bundle": lambda d: {**d, "bundle": "lungs"},
    "other classes": lambda d: _with(d, tables={"class": {"a": 1, "c": 2}}),
    "another range": lambda d: _with(
        d, intensity={**d["sections"]["train"]["intensity"], "high": 2}
    ),
    "other bins": lambda d: _with(
        d, intensity={"low": 0, "high": 1, "channels": [{"shares": [1.0]}]}
    ),
    "another form": lambda d: {**d, "form": "x"},
    "no sections": lambda d: {key: value for key, value in d.items() if key != "sections"},
    "no training": lambda d: {**d, "sections": {"test": d["sections"]["test"]}},
    "counts as text": lambda d: _with(d, tables={"class": {"a": "many", "b": 2}}),
    "a list of counts": lambda d: _with(d, tables={"class": [1, 2]}),
    "shares below 0": lambda d: _with(
        d, intensity={"low": 0, "high": 1, "channels": [{"shares": [-1.0, 2.0]}]}
    ),
    "ragged shares": lambda d: _with(
        d, intensity={"low": 0, "high": 1, "channels": [{"shares": [1]}, {"shares": []}]}
    ),
    "a list": lambda d: [d],
}


def _with(document: Any, **changes: Any) -> Any:
    return {
        **document,
        "sections": {**document["sections"], "train": {**document["sections"]["train"], **changes}},
    }


@pytest.mark.parametrize("what", CHANGES)
def test_a_file_that_does_not_fit_is_refused_by_name(what: str, files: list[Path]) -> None:
    document = json.loads(files[1].read_text())
    files[1].write_text(json.dumps(CHANGES[what](document)))
    with pytest.raises(InputError, match=r"south\.json") as caught:
        read(files)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b'{"form": NaN}', b'{"form": ' + b"9" * 4000 + b"}", b'{"a": 1, "a": 2}'],
)
def test_a_file_that_is_no_json_is_refused_by_name(content: bytes, files: list[Path]) -> None:
    files[1].write_bytes(content)
    with pytest.raises(InputError, match=r"south\.json"):
        read(files)


def test_the_command_prints_the_table_and_draws(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "federation.png"
    assert cli.main(["site", "stats", "--collect", *map(str, files), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[2:5]] == ["north", "south", "west"]
    assert out.is_file()
    assert cli.main(["site", "stats", "--collect", *map(str, files), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["sites"]) == 3
    assert cli.main(["site", "stats", "--collect", str(tmp_path / "none.json")]) == 2
    assert cli.main(["site", "stats", "moles", "--collect", *map(str, files)]) == 2
    assert cli.main(["site", "stats"]) == 2
