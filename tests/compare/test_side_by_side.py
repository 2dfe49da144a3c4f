"""Several runs on one page, from synthetic run folders."""

from __future__ import annotations

import csv
import json
import re
from functools import partial
from pathlib import Path

import pytest

from medfl.compare.labels import unique_labels
from medfl.compare.side_by_side import write_page
from medfl.core.errors import InputError
from medfl.report import RunFiles
from tests.support.figures import leave_blank
from tests.support.run_folders import Make, Page, build


@pytest.fixture(autouse=True)
def blank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the charts blank but of the two tests that look at them."""
    if request.node.name not in ("test_runs_stand_side_by_side", "test_same_folders_same_bytes"):
        leave_blank(monkeypatch)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return partial(build, tmp_path)


def page_of(tmp_path: Path, *folders: Path) -> tuple[str, Page]:
    path = write_page(folders, tmp_path / "new" / "page.html")
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert not any((folder / "report.html").exists() for folder in folders)
    return text, page


def test_runs_stand_side_by_side(make: Make, tmp_path: Path) -> None:
    a, b = make("a", rounds=3), make("b", rounds=4, method="fedavg", options={}, seed=5)
    text, page = page_of(tmp_path, a, b)
    said = " ".join(page.text.split())
    assert "2 runs on pneumonia" in said
    assert "script" not in page.tags
    assert all(target.startswith(("#", "data:image/png")) for target in page.loads)
    for folder in (a, b):
        summary = json.loads((folder / "summary.json").read_text())
        assert f"{summary['last']['balanced_accuracy']:.3f}" in said
        assert summary["weights_sha256"] in said
    differing = said.split("What differs")[1].split("Learning")[0].replace(" ", "")
    assert "rounds34" in differing
    assert "seed05" in differing
    assert "mu(option)0.1–" in differing
    assert "batch_size" not in differing
    assert len(re.findall(r"<svg ", text)) == 3
    assert said.count("120 images") == 2
    assert "Local only" in said
    anchors = re.findall(r'href="#([^"]+)">', text)
    assert all(f'id="{anchor}"' in text for anchor in anchors)
    assert len(anchors) == 8


def test_a_run_is_called_better_where_its_cases_are_clearly_so(make: Make, tmp_path: Path) -> None:
    """The same 120 cases: b has those of a, c is right in all of them."""
    folders = [
        make(name, rounds=1, method=method)
        for name, method in zip("abc", ("x1", "x2", "x3"), strict=True)
    ]
    lines = (folders[2] / "predictions.csv").read_text().splitlines()
    right = [
        ",".join([*cells[:3], cells[2], *cells[4:]])
        for cells in (line.split(",") for line in lines[1:])
    ]
    (folders[2] / "predictions.csv").write_text("\n".join([lines[0], *right]) + "\n")
    text, page = page_of(tmp_path, *folders)
    said = " ".join(page.text.split()).split("Against x1 ")[1].split("Differences of")[0]
    assert re.fullmatch(
        r".*x2 ?\+0\.000\+0\.000 to \+0\.000no clear difference120 x3 ?\+0\.\d+\+0\.\d+ to \+0\.\d+better120 ",
        said,
    ), said
    assert text.count("<b>better</b>") == 1


def bars_of_first_site(text: str) -> list[tuple[str, float]]:
    """Return the colour and the value of each bar of the first site."""
    first = text.split('<div class="name">')[1]
    return [
        (tone, float(value))
        for tone, value in re.findall(r"--c:var\(--([\w-]+)\).*?<b>([\d.]+)</b>", first)
    ]


def change_local(folder: Path, by: float | None) -> None:
    """Add to the Local reference of every site of a run; None removes it."""
    with (folder / "sites.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for name in [name for name in row if name.startswith("local_")]:
            row[name] = "" if by is None else str(float(row[name]) + by)
    with (folder / "sites.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_each_run_stands_beside_its_own_local(make: Make, tmp_path: Path) -> None:
    a, b, c = make("a", rounds=2), make("b", rounds=2, seed=1), make("c", rounds=2, seed=2)
    shared = bars_of_first_site(page_of(tmp_path, a, b)[0])
    assert [tone for tone, _ in shared] == ["tone-0", "tone-1", "local"], (
        "one that they share is drawn once"
    )
    change_local(b, 0.05)
    change_local(c, None)
    text, page = page_of(tmp_path, a, b, c)
    bars = bars_of_first_site(text)
    assert [tone for tone, _ in bars] == ["tone-0", "local", "tone-1", "local", "tone-2"]
    assert bars[1] == shared[2]
    assert bars[3][1] == pytest.approx(bars[1][1] + 0.05, abs=0.002)
    assert "Local only" in page.text


def test_a_local_run_on_the_page_is_its_own_bar(make: Make, tmp_path: Path) -> None:
    """Of two references, the one whose run is on the page is there already."""
    a, b, local = (
        make("a", rounds=2),
        make("b", rounds=2, seed=1),
        make("c", rounds=2, method="local", options={}),
    )
    change_local(b, 0.05)
    with (a / "sites.csv").open(newline="") as file:
        known = {row["site"]: row for row in csv.DictReader(file)}
    with (local / "sites.csv").open(newline="") as file:
        rows = [row | {"received_balanced_accuracy": known[row["site"]]["local_balanced_accuracy"]}
                for row in csv.DictReader(file)]  # fmt: skip
    with (local / "sites.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    change_local(local, None)
    bars = bars_of_first_site(page_of(tmp_path, a, b, local)[0])
    assert [tone for tone, _ in bars] == ["tone-0", "tone-1", "local", "tone-2"]


def test_defaults_of_options_that_one_method_has_are_not_told(make: Make, tmp_path: Path) -> None:
    options = {"classifier": "text_distribution", "tau": 9.0, "g_iterations": 2}
    _, page = page_of(
        tmp_path, make("a", method="fedbm", options=options), make("b", method="fedavg", options={})
    )
    differing = page.text.split("What differs")[1].split("Learning")[0].replace(" ", "")
    assert "classifier" not in differing
    assert "tau(option)9.0–" in differing
    assert "g_iterations(option)2–" in differing
    unknown = make("c", method="somebodys.method", options={"tau": 12.5})
    _, page = page_of(tmp_path, unknown, make("d", method="fedavg", options={}))
    assert "tau(option)12.5–" in page.text.replace(" ", "")


def test_same_folders_same_bytes(make: Make, tmp_path: Path) -> None:
    folders = make("a", rounds=2), make("b", rounds=2, seed=1)
    assert page_of(tmp_path, *folders)[0] == page_of(tmp_path, *folders)[0]


def test_one_run_is_its_own_report(make: Make, tmp_path: Path) -> None:
    _, page = page_of(tmp_path, make("a", rounds=1))
    assert "fedprox on pneumonia" in page.text
    assert "What was run" in page.text


def test_an_unfinished_run_and_one_without_predictions_show_what_they_have(
    make: Make, tmp_path: Path
) -> None:
    whole, cut, bare = (
        make("whole", rounds=3),
        make("cut", rounds=9, done=2, seed=1),
        make("bare", rounds=3, seed=2),
    )
    (bare / "predictions.csv").unlink()
    _, page = page_of(tmp_path, whole, cut, bare)
    said = " ".join(page.text.split())
    assert "fedprox, seed 1 is not finished: 2 of 9 rounds are here" in said
    assert "No predictions: fedprox, seed 1, fedprox, seed 2 left no predictions.csv" in said
    assert said.count("120 images") == 1


def test_runs_without_any_round(make: Make, tmp_path: Path) -> None:
    _, page = page_of(tmp_path, make("a", done=0), make("b", done=0, seed=1))
    assert "svg" not in page.tags
    assert "have not been tested" in page.text


def test_other_sites_are_not_compared(make: Make, tmp_path: Path) -> None:
    _, page = page_of(tmp_path, make("a", rounds=1), make("b", rounds=1, sites=4))
    assert "The runs divide the images among different sites" in page.text
    _, page = page_of(
        tmp_path, make("c", rounds=1), make("d", rounds=1, data={"source": "real", "checksum": "x"})
    )
    assert "images are not the same: their checksums differ" in page.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"bundle": "ham10000"},
            "runs of different bundles: ham10000 and pneumonia; one page compares like with like",
        ),
        ({"source": "phantom"}, "runs of different kinds of images: phantom and real"),
        (
            {"key_metric": "accuracy"},
            "runs of different key metrics: accuracy and balanced_accuracy",
        ),
        ({"classes": ["normal", "other"]}, "runs of different classes"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(
    make: Make, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    folders = [make("a", rounds=1), make("b", rounds=1, **changes)]
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        write_page(folders, tmp_path / "page.html")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "page.html").exists()


def test_bad_requests(make: Make, tmp_path: Path) -> None:
    a = make("a", rounds=1)
    with pytest.raises(InputError, match="the page is an HTML file"):
        write_page([a], tmp_path / "page.pdf")
    with pytest.raises(InputError, match="has no run.json"):
        write_page([a, tmp_path], tmp_path / "page.html")
    with pytest.raises(InputError, match="11 runs; one page tells 10 apart"):
        write_page([a] * 11, tmp_path / "page.html")


def test_names_say_what_sets_runs_apart(make: Make) -> None:
    runs = [
        make("a", done=0),
        make("b", done=0, options={"mu": 1.0}),
        make("c", done=0, options={"mu": 1.0}, seed=1),
        make("d", done=0, method="fedavg", options={}),
        make("e", done=0, method="fedavg", options={}),
    ]
    read = [RunFiles(run) for run in runs]
    assert unique_labels(read) == [
        "fedprox mu=0.1",
        "fedprox mu=1.0, seed 0",
        "fedprox mu=1.0, seed 1",
        "fedavg, d",
        "fedavg, e",
    ]
    assert unique_labels([read[0], read[0]]) == ["fedprox (1)", "fedprox (2)"]
