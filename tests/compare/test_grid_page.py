"""The page of a comparison's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medfl.cli import main
from medfl.compare.side_by_side import write_grid_page
from medfl.core.errors import InputError
from tests.compare.test_comparison import SCORES, finished
from tests.support.run_folders import Page


def grid(root: Path, scores: dict[str, tuple[float, ...]] = SCORES, **more: Any) -> Path:
    """A folder as `medfl compare` leaves it."""
    out, made = root / "grid", root / "made"
    made.mkdir()
    for method, values in scores.items():
        for seed, value in enumerate(values):
            place = out / "iid" / f"m{len(method)}-{method[:3]}" / f"seed-{seed}"
            place.parent.mkdir(parents=True, exist_ok=True)
            finished(made, "x", seed, value, **more).rename(place)
            record = json.loads((place / "run.json").read_text()) | {"method": method}
            (place / "run.json").write_text(json.dumps(record))
    (out / "compare.json").write_text("{}")
    return out


def page_of(out: Path) -> tuple[str, Page]:
    text = write_grid_page(out).read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert all(target.startswith(("#", "data:image/png")) for target in page.loads)
    return text, page


def test_the_page_has_tables_curves_and_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = grid(tmp_path)
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'report.html'}\n"
    text, page = page_of(out)
    words = " ".join(page.text.split())
    assert "3 methods on toy" in words
    assert "PHANTOM DATA" in words
    assert "9 finished runs" in words
    assert "68.3 ± 8.5" in words, "fedprox"
    assert "+8.3 +1.2 to +15.5" in words, "the paired interval of test_comparison"
    assert "better" in words
    assert "no clear difference" in words
    assert "To reach Accuracy 30.0 on the validation set (fedavg)" in words
    assert text.count("<svg ") == 1
    assert len([target for target in page.loads if target.startswith("data:")]) == 1
    assert text == write_grid_page(out).read_text(encoding="utf-8"), "same folder, same bytes"


def test_names_in_the_folder_are_text(tmp_path: Path) -> None:
    text, page = page_of(grid(tmp_path, {"fedavg": (0.5, 0.6), "<script>": (0.4, 0.6)}))
    assert "script" not in page.tags
    assert "&lt;script&gt;" in text


def test_what_is_clear_is_bold_and_the_unfinished_is_said(tmp_path: Path) -> None:
    out = grid(tmp_path, {name: SCORES[name] for name in ("fedavg", "fedprox")})
    text, _ = page_of(out)
    assert "<b>68.3 ± 8.5</b>" in text
    (out / "iid" / "m7-fed" / "seed-2" / "summary.json").unlink()
    text, page = page_of(out)
    assert "Not finished: 1 run more began" in " ".join(page.text.split())
    assert "<b>62.5" not in text, "two seeds: 0.1 and 0.05, from -0.24 to 0.39"


def test_folders_that_are_no_comparison_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = grid(tmp_path, {"fedavg": (0.5,)})
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for more in (["--out", str(tmp_path / "x.html")], [str(out / "iid" / "m6-fed" / "seed-0")]):
        assert main(["report", str(out), *more]) == 2
        assert "a comparison has a page of its own" in capsys.readouterr().err
    (out / "iid" / "m6-fed" / "seed-0" / "summary.json").unlink()
    with pytest.raises(
        InputError, match="with 0 finished runs, none of them scored; .*; repeat its medfl compare"
    ):
        write_grid_page(out)
    assert not (out / "report.html").exists()
