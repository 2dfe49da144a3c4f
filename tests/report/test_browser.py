"""The pages in a real browser: offline, on a wide screen, on a phone and on paper."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfl.compare.side_by_side import write_grid_page, write_page
from medfl.report import write_report
from medfl.report.model_plots import generated_grid
from medfl.report.picture import image_picture
from tests.compare.test_grid_page import grid
from tests.report.test_structures import segmented
from tests.support.browser import Browser, browser, executable
from tests.support.run_folders import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(executable() is None, reason="no /usr/bin/chromium; CHROMIUM names another"),
]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def finished(place: Path, name: str = "run", **changes: object) -> Path:
    """A run folder with pictures of every kind."""
    folder = build(place, name, **changes)
    (folder / "pictures").mkdir()
    made = [
        image_picture(
            f"worst-{i:02d}", np.full((24, 30), 0.4), "a, taken for b", "confidence 0.9; id, site"
        )
        for i in range(1, 7)
    ]
    made += [generated_grid(np.zeros((6, 1, 16, 16)), ("a", "b", "c"), 1)]
    for picture in made:
        (folder / "pictures" / f"{picture.name}.png").write_bytes(picture.png)
    return folder


def pages(place: Path) -> dict[str, Path]:
    """The pages to be looked at."""
    long = [f"a rather long name of tissue class number {i}" for i in range(9)]
    hospitals = [f"university hospital of somewhere far away {i}" for i in range(5)]
    plain = finished(place, source="phantom")
    structures = {
        name: {"dice": 0.8, "hd95": 3.0, "cases": 10}
        for name in ("liver", "a structure of a long name")
    }
    return {
        "plain": write_report(plain),
        "long": write_report(finished(place, "long", sites=hospitals, classes=long, rounds=3)),
        "many": write_report(finished(place, "many", sites=100, rounds=2)),
        "cut": write_report(build(place, "cut", done=2)),
        "structures": write_report(
            segmented(partial(build, place), "organs", [0.1, 0.4], structures)
        ),
        "grid": write_grid_page(grid(place)),
        "several": write_page(
            [plain, build(place, "b", source="phantom", method="fedavg")], place / "several.html"
        ),
    }


def test_pages_are_whole_offline_and_fit_any_width(chromium: Browser, tmp_path: Path) -> None:
    for name, page in pages(tmp_path).items():
        for width in (1200, 390):
            seen = chromium.open(page, width, phone=width < 500)
            assert [url for url in seen.requests if not url.startswith("data:")] == [
                page.as_uri()
            ], name
            assert seen.complaints == [], name
            assert seen.width <= width, (name, width, seen.beyond[:5])
            assert seen.beyond == [], (name, width)
            assert all(seen.pictures), name
            with Image.open(io.BytesIO(seen.png)) as image:
                assert image.width == width
                assert len(image.convert("L").getcolors() or []) > 20  # something is drawn
    assert len(seen.pictures) == 1


def test_a_page_that_reaches_out_would_be_noticed(chromium: Browser, tmp_path: Path) -> None:
    """The checks above can fail: a page that is too wide, lacks a picture, logs and asks for another file."""
    page = tmp_path / "bad.html"
    page.write_text(
        '<div style="width:900px">x</div><img src="missing.png"><script>console.log("x")</script>'
    )
    seen = chromium.open(page, 390)
    assert seen.width == 908
    assert seen.beyond
    assert seen.pictures == [0]
    assert any(url.endswith("missing.png") for url in seen.requests)
    assert seen.complaints


def test_a_report_can_be_printed(chromium: Browser, tmp_path: Path) -> None:
    page = write_report(finished(tmp_path, rounds=3))
    chromium.ask("Emulation.setEmulatedMedia", media="print")
    seen = chromium.open(page, 700)
    shown = chromium.value("getComputedStyle(document.querySelector('nav')).display")
    chromium.ask("Emulation.setEmulatedMedia", media="")
    assert shown == "none"
    assert seen.beyond == []
    with Image.open(io.BytesIO(seen.png)) as image:
        assert image.convert("RGB").getpixel((2, 2)) == (255, 255, 255)
    assert chromium.pdf().startswith(b"%PDF")


def test_names_of_hospitals_are_whole_on_a_phone(chromium: Browser, tmp_path: Path) -> None:
    page = write_report(finished(tmp_path))
    page.write_text(page.read_text().replace("site-1", "vidir_molemax"))
    chromium.open(page, 390)
    lines = """(() => {
        const range = document.createRange();
        range.selectNode(document.querySelector('.sites .name').firstChild);
        return range.getClientRects().length;
    })()"""
    assert chromium.value(lines) == 1
