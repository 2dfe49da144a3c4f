"""What a report makes of the test predictions, and what it says where they are missing."""

from __future__ import annotations

import csv
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from medfl.core.errors import InputError
from medfl.report import RunFiles, write_report
from medfl.report.picture import image_picture
from medfl.report.prediction_analysis import PredictionAnalysis, analyse_predictions
from tests.support.run_folders import CLASSES, HEADER, Make, Page, build, render


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return partial(build, tmp_path)


def words(page: Page) -> str:
    return " ".join(page.text.split())


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def found(folder: Path) -> PredictionAnalysis:
    made = analyse_predictions(RunFiles(folder))
    assert made is not None
    return made


def test_metrics_of_the_last_round_have_intervals_and_say_how(make: Make) -> None:
    folder = make(rounds=2)
    _, page = render(folder)
    low, high = found(folder).intervals["balanced_accuracy"]
    assert words(page).count(f"95 % interval {low:.3f} to {high:.3f}") >= 1
    assert (
        "1000 draws, the 120 test cases drawn again with replacement within each reference class"
        in words(page)
    )
    read = RunFiles(folder).predictions
    assert read is not None
    point = balanced_accuracy_score(read.cases.values["label"], read.cases.values["predicted"])
    assert low < point < high


def test_the_best_round_has_an_interval_only_where_it_is_the_last(make: Make) -> None:
    folder = make(rounds=2)
    ends = "{:.3f} to {:.3f}".format(*found(folder).intervals["accuracy"])
    summary = json.loads((folder / "summary.json").read_text())
    for last, times in ((2, 2), (1, 1)):
        summary["best"]["round"] = summary["global"]["best"]["round"] = last
        change(folder / "summary.json", **summary)
        assert words(render(folder)[1]).count(ends) == times


def test_draws_are_those_of_the_runs_seed(make: Make) -> None:
    folder = make(rounds=1)
    first = found(folder).intervals
    assert found(folder).intervals == first
    change(folder / "run.json", seed=1)
    assert found(folder).intervals != first


def test_roc_and_calibration_are_those_of_scikit_learn(make: Make, drawn: None) -> None:
    folder = make(rounds=1)
    made = found(folder)
    label = made.predictions.cases.values["label"].numpy()
    probabilities = made.predictions.cases.values["probabilities"].numpy()
    roc = made.roc()
    assert roc is not None
    for row, c in zip(roc["rows"], range(3), strict=True):
        area = roc_auc_score(label == c, probabilities[:, c])
        assert row["area"] == pytest.approx(area, abs=1e-9)
        assert row["ends"][0] < area < row["ends"][1]
        assert (row["name"], row["positives"]) == (CLASSES[c], (label == c).sum())
    assert roc["mean"]["area"] == pytest.approx(np.mean([row["area"] for row in roc["rows"]]))
    calibration = made.calibration()
    assert calibration is not None
    assert (calibration["bins"], calibration["cases"]) == (15, 120)
    assert calibration["ends"][0] < calibration["ece"] < calibration["ends"][1]
    text, page = render(folder)
    assert "macro mean" in page.text
    assert f"{calibration['ece']:.3f}15 bins of equal width" in page.text
    assert 'aria-label="Reliability of the predicted class"' in text


def test_each_site_has_its_confusion_matrix(make: Make) -> None:
    folder = make(sites=2, rounds=1)
    pooled, by_site = found(folder).confusion(), dict(found(folder).confusions())
    assert pooled is not None
    assert np.array_equal(sum(np.array(one["rows"]) for one in by_site.values()), pooled["rows"])
    assert list(by_site) == ["site-1", "site-2"]
    assert "site-2 20 images" in words(render(folder)[1])
    many = make("many", sites=13, rounds=1)
    assert found(many).confusions() == []


def test_more_classes_than_colours_are_grey(make: Make, drawn: None) -> None:
    folder = make(rounds=1, classes=[f"c{i}" for i in range(12)])
    roc = found(folder).roc()
    assert roc is not None
    assert {row["tone"] for row in roc["rows"]} == {"local"}
    render(folder)


def test_worst_cases_are_listed_where_their_pictures_are_missing(make: Make) -> None:
    folder = make(rounds=1, sites=2)
    lines = [
        HEADER,
        "right,site-1,0,0,0.9,0.1,0",
        "wrong,site-2,2,1,0.0,0.99,0.01",
    ]
    (folder / "predictions.csv").write_text("\n".join(lines) + "\n")
    worst = found(folder).worst()
    assert worst is not None
    assert [row[0] for row in worst["rows"]] == ["wrong", "right"]
    _, page = render(folder)
    assert "This run folder holds no pictures of them" in page.text
    row = "".join(page.text.split()).split("Inthereference")[1]
    assert row.startswith("wrongsite-2viralpneumoniabacterialpneumonia0.9900.010right")


def test_worst_cases_are_shown_with_their_words(make: Make) -> None:
    folder = make(rounds=1)
    (folder / "pictures").mkdir()
    for rank in (2, 1):
        made = image_picture(
            f"worst-{rank:02d}", np.full((8, 6), 0.5), f"class {rank} <b>", "confidence 0.9; 医院"
        )
        (folder / "pictures" / f"{made.name}.png").write_bytes(made.png)
    text, page = render(folder)
    assert "holds no pictures" not in page.text
    assert re.findall(r'alt="Test image: (class \d)', text) == ["class 1", "class 2"]
    assert "class 1 <b>" in page.text
    assert "confidence 0.9; 医院" in page.text
    assert "pass it on only to those who may see them" in page.text


@pytest.mark.parametrize("left", [None, "", "id,site,label,predicted\n"])
def test_missing_predictions_are_said(make: Make, left: str | None) -> None:
    folder = make(rounds=1)
    (folder / "predictions.csv").unlink() if left is None else (
        folder / "predictions.csv"
    ).write_text(left)
    _, page = render(folder)
    assert "No predictions: the run folder has no predictions.csv, or an empty one" in words(page)
    assert "Confusion matrix" not in page.text
    assert "ROC curves, one" not in page.text


def test_an_interval_without_width_is_a_dash(make: Make, drawn: None) -> None:
    """A model that is always right: every draw says so."""
    folder = make(rounds=1)
    lines = [
        f"x{i},site-1,{i % 3},{i % 3},{int(i % 3 == 0)},{int(i % 3 == 1)},{int(i % 3 == 2)}"
        for i in range(12)
    ]
    (folder / "predictions.csv").write_text("\n".join([HEADER, *lines]) + "\n")
    assert found(folder).intervals["accuracy"] == (1.0, 1.0)
    _, page = render(folder)
    assert "1.000 to 1.000" not in page.text
    assert "95 % interval –" in words(page)
    assert "A dash: all draws give the same, which is no interval." in words(page)


def test_predictions_without_probabilities_have_a_matrix_alone(make: Make) -> None:
    folder = make(rounds=1)
    lines = [f"x{i},site-1,{int(i < 3)},0" for i in range(12)]
    (folder / "predictions.csv").write_text("\n".join(["id,site,label,predicted", *lines]) + "\n")
    _, page = render(folder)
    assert "Confusion matrix" in page.text
    assert "No probabilities" in page.text
    assert found(folder).worst() is None
    assert "Too narrow, for want of cases, as regards normal, bacterial pneumonia." in words(page)


def test_two_classes_of_which_one_has_no_case(make: Make, drawn: None) -> None:
    folder = make(rounds=1, classes=["no", "yes"])
    (folder / "predictions.csv").write_text(
        "id,site,label,predicted,p_no,p_yes\nx,site-1,0,0,0.7,0.3\n"
    )
    _, page = render(folder)
    assert "ROC curve of" not in page.text
    assert "Calibration" in page.text


@pytest.mark.parametrize("cell", ["1.5", "-0.1", "", "much"])
def test_a_probability_that_is_none_is_named(make: Make, cell: str) -> None:
    folder = make(rounds=1)
    (folder / "predictions.csv").write_text(f"{HEADER}\nx,s,0,0,0.5,0.5,{cell}\n")
    with pytest.raises(
        InputError, match=r"predictions.csv has (a probability|no number in column p_viral)"
    ):
        write_report(folder)


def test_segmentation_has_intervals_over_its_cases(make: Make) -> None:
    folder = make(rounds=1)
    change(
        folder / "run.json",
        task="segmentation",
        key_metric="dice",
        classes=[],
        site_class_counts={},
    )
    for name in ("summary.json", "rounds.jsonl", "sites.csv"):
        text = (folder / name).read_text()
        (folder / name).write_text(
            text.replace("balanced_accuracy", "dice").replace("auroc", "hd95")
        )
    with (folder / "predictions.csv").open("w", newline="") as file:
        table = csv.writer(file)
        rows = [[f"c{i}", "site-1", 0.5 + 0.4 * (i % 2), 2 if i % 2 else ""] for i in range(10)]
        table.writerows([["id", "site", "dice", "hd95"], *rows])
    analysis = found(folder)
    assert analysis.intervals["dice"] == pytest.approx(
        (0.58, 0.82)
    )  # 2 to 8 of ten, as a binomial has it
    assert set(analysis.intervals) == {"dice"}, "five cases have an HD95"
    assert analysis.each == {"hd95": [2.0] * 5}
    _, page = render(folder)
    assert "the 10 test cases drawn again with replacement." in words(page)
    assert "each: 2.000 · 2.000 · 2.000 · 2.000 · 2.000" in words(page)
    assert "Each test case" not in page.text
    assert "ROC curves" not in page.text
    assert "Confusion" not in page.text


# What left, who was missing


def test_traffic_is_a_mean_over_replies(make: Make) -> None:
    """Rounds of 2 replies of 30 bytes and 1 of 60: 40 a reply; 10 bytes came before the first round."""
    folder = make(sites=2, rounds=2, leaves="12 tensors leave each site, 3 stay", messages="int8")
    entries = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for entry in entries:
        entry |= {"bytes_up": 60, "bytes_down": 600}
    entries[1]["left_out"] = {"site-2": "no answer"}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    change(
        folder / "summary.json",
        bytes_up=130,
        left_out={"site-2": 1},
        absent={"site-9": "no answer"},
    )
    _, page = render(folder)
    section = words(page).split("What left each site")[1]
    assert "12 tensors leave each site, 3 stay. Messages are tensors and numbers" in section
    assert "40 B on average over 3 replies" in section.replace("round40", "round 40").replace(
        "Bon", "B on"
    )
    assert "400 B" in section
    assert "int8" in section
    assert "10 B" in section
    assert "Sites missing: site-9 did not introduce themselves" in words(page)
    assert "Sites missing: site-2 were left out of some rounds" in words(page)


def test_old_folders_and_runs_that_send_nothing_say_so(make: Make) -> None:
    folder = make(rounds=1)
    assert "is not recorded in this folder" in words(render(folder)[1])
    entries = [
        json.loads(line) | {"bytes_up": 0, "bytes_down": 0}
        for line in (folder / "rounds.jsonl").read_text().splitlines()
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    change(folder / "summary.json", bytes_up=0, bytes_down=0)
    assert "Nothing: no message was sent." in words(render(folder)[1])
    change(folder / "run.json", method="central")
    assert "Central pools the images of all sites in one place" in words(render(folder)[1])


def test_links_of_the_contents_lead_somewhere(make: Make) -> None:
    text, page = render(make(rounds=1))
    anchors = [
        target for target in page.loads if target.startswith("#") and f'href="{target}">' in text
    ]
    assert len(anchors) == 12
    assert all(f'id="{anchor[1:]}"' in text for anchor in anchors)


def test_gain_over_local_stands_beside_each_site(make: Make) -> None:
    folder = make(sites=2, rounds=1)
    rows = list(csv.DictReader((folder / "sites.csv").read_text().splitlines()))
    gains = [
        float(row["received_balanced_accuracy"]) - float(row["local_balanced_accuracy"])
        for row in rows
    ]
    _, page = render(folder)
    for gain in gains:
        assert f"{gain:+.3f} against Local".replace("-", "−") in page.text
