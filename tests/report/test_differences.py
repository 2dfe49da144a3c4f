"""Differences with their intervals, by hand: what may be called better, and what is said where nothing may be."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from medfl.evaluation.metrics import Cases
from medfl.problem.tasks import KINDS
from medfl.report import RunFiles, result_table
from medfl.report.differences import (
    BETTER,
    FEW,
    UNCLEAR,
    WORSE,
    Differences,
    between_models,
    counted,
    from_other_sites,
)
from medfl.report.run_files import Predictions
from tests.support.run_folders import Make, build, render


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return partial(build, tmp_path)


def run_of(
    cases: Cases, key: str, task: str = "other", sites: Sequence[str] | None = None
) -> RunFiles:
    """A run with these test cases."""
    predictions = Predictions(cases, sites or ["a"] * len(cases), KINDS[task])
    record = {"key_metric": key, "seed": 0, "classes": ["x", "y"], "task": task}
    return RunFiles.from_record(record, predictions=predictions)


def scored(
    values: Sequence[float], key: str = "dice", sites: Sequence[str] | None = None
) -> RunFiles:
    """A run whose test cases have these values."""
    ids = tuple(f"case {i}" for i in range(len(values)))
    return run_of(Cases(ids, {key: torch.tensor(values, dtype=torch.float64)}), key, sites=sites)


def classified(
    label: Sequence[int],
    predicted: Sequence[int],
    key: str = "accuracy",
    sites: Sequence[str] | None = None,
) -> RunFiles:
    ids = tuple(map(str, range(len(label))))
    cases = Cases(ids, {"label": torch.tensor(label), "predicted": torch.tensor(predicted)})
    return run_of(cases, key, "classification", sites)


def by_quarters(ahead: int, of: int) -> list[float]:
    """Values of which some are a quarter above a half, the others a quarter below it."""
    return [0.75] * ahead + [0.25] * (of - ahead)


@pytest.mark.parametrize(
    ("ahead", "of", "said"),
    [(9, 10, BETTER), (8, 10, UNCLEAR), (3, 10, UNCLEAR), (1, 10, WORSE), (9, 9, FEW)],
)
def test_a_paired_difference_by_hand(ahead: int, of: int, said: str) -> None:
    """Of ten cases k are 1/4 ahead: a draw's mean is (2B - 10) / 40 with B of the binomial distribution (10, k/10).

    Its 2.5 % quantile is 7 for k = 9 (P(B <= 6) = 1.3 %, P(B <= 7) = 7.0 %), so the interval begins at 0.1; for k = 8
    it is 5 (0.6 %, 3.3 %), so it begins at 0, which is included. Nine cases have none, though all of them are ahead.
    """
    found = between_models(scored(by_quarters(ahead, of)), scored([0.5] * of))
    assert found is not None
    assert (found.word, found.cases) == (said, of)
    assert found.value == pytest.approx((2 * ahead - of) / (4 * of))
    if (ahead, of) == (9, 10):
        assert found.ends == pytest.approx((0.1, 0.25))
    if (ahead, of) == (8, 10):
        assert found.ends == pytest.approx((0.0, 0.25), abs=1e-12)
    if of == 9:
        assert found.ends is None


def test_less_is_better_for_a_distance() -> None:
    found = between_models(scored([3.0, 3.5] * 6, "hd95"), scored([2.0] * 12, "hd95"))
    assert found is not None
    assert (found.value, found.word) == (1.25, WORSE)


def test_an_interval_of_no_width_says_nothing() -> None:
    found = between_models(scored([0.75] * 12), scored([0.5] * 12))
    assert found is not None
    assert (found.value, found.ends, found.word) == (0.25, None, FEW)
    same = between_models(scored([0.75] * 12), scored([0.75] * 12))
    assert same is not None
    assert (same.ends, same.word) == ((0.0, 0.0), UNCLEAR), "models that do not differ"


@pytest.mark.parametrize(("rare", "said"), [(1, FEW), (2, FEW), (4, FEW), (5, BETTER)])
@pytest.mark.parametrize("key", ["accuracy", "balanced_accuracy", "f1_macro"])
def test_a_class_of_few_cases_decides_nothing(key: str, rare: int, said: str) -> None:
    """Of the rare class all cases are right in one model and none is in the other; of the other class, some."""
    label = [0] * 20 + [1] * rare
    ours = classified(label, label, key)
    found = between_models(ours, classified(label, [0] * 10 + [1] * 10 + [0] * rare, key))
    assert found is not None
    assert found.word == (BETTER if key == "accuracy" else said), "accuracy is no mean over classes"
    assert (found.ends is None) == (found.word == FEW)


def test_a_site_with_a_class_of_few_cases_is_not_told_from_the_others() -> None:
    label, right = (
        [0] * 10 + [1] * 10 + [0] * 10 + [1] * 3,
        [0] * 10 + [1] * 10 + [1, 0] * 5 + [0] * 3,
    )
    run = classified(label, right, "balanced_accuracy", ["a"] * 20 + ["b"] * 13)
    found = from_other_sites(run, "a")
    assert found is not None
    assert (found.cases, found.ends, found.word) == (13, None, FEW)


def test_only_common_cases_with_both_values_are_paired() -> None:
    ours, theirs = scored([0.9] * 12), scored([0.5] * 11 + [float("nan")])
    found = between_models(ours, theirs)
    assert found is not None
    assert found.cases == 11
    assert between_models(ours, scored([])) is None
    assert between_models(ours, RunFiles.from_record(ours.record)) is None
    few = between_models(scored([1.0] * 20, sites=["a"] * 9 + ["b"] * 11), scored([0.5] * 20), "a")
    assert few is not None
    assert (few.cases, few.word) == (9, FEW)


def test_classes_are_compared_on_the_same_cases() -> None:
    label = [0, 1] * 20
    right, wrong = classified(label, label), classified(label, [0] * 30 + [0, 1] * 5)
    for key, expected in (("accuracy", 0.375), ("balanced_accuracy", 0.375)):
        found = between_models(classified(label, label, key), wrong)
        assert found is not None
        assert (found.value, found.word) == (pytest.approx(expected), BETTER)
    assert between_models(right, classified([1, 0] * 20, label)) is None, (
        "other labels: other cases"
    )
    assert between_models(classified(label, label, "loss"), wrong) is None, (
        "no file has each case's loss"
    )


def test_a_site_against_the_others() -> None:
    """Site a has 10 cases of 0.5 to 0.6, site b 10 cases of 0.8 to 0.9: their intervals cannot meet."""
    sites = ["a"] * 10 + ["b"] * 10 + ["c"] * 9
    values = [0.5 + 0.01 * i for i in range(10)] + [0.8 + 0.01 * i for i in range(10)] + [0.7] * 9
    run = scored(values, sites=sites)
    words = {site: found.word for site in "abc" if (found := from_other_sites(run, site))}
    assert words == {"a": WORSE, "b": BETTER, "c": FEW}


def test_how_often_is_counted() -> None:
    assert counted([BETTER, UNCLEAR, UNCLEAR, WORSE], "site") == (
        "better at 1 of 4 sites, worse at 1, no clear difference at 2"
    )
    assert counted([FEW], "site") == "better at 0 of 1 site, too few cases at 1"


def segmented(make: Make) -> Path:
    """Site a is ahead of its Local model in 12 of 12 cases, b in 6 of 12, c has 9 cases, all of them ahead.

    The Local models have 0.50 and 0.52 in turn, so that what site a is ahead by is not the same in each case.
    """
    sizes = {"a": 12, "b": 12, "c": 9}
    folder = make(rounds=1, sites=[*sizes], task="segmentation", key_metric="dice")
    for name in ("summary.json", "rounds.jsonl", "sites.csv"):
        text = (folder / name).read_text()
        (folder / name).write_text(
            text.replace("balanced_accuracy", "dice").replace("auroc", "hd95")
        )
    document = json.loads((folder / "run.json").read_text()) | {
        "classes": [],
        "site_class_counts": {},
    }
    (folder / "run.json").write_text(json.dumps(document))
    shutil.copytree(folder, folder / "local")
    for place, ahead, varied in ((folder, 0.25, 0.0), (folder / "local", 0.0, 0.02)):
        rows = [
            [
                f"{site}{i}",
                site,
                0.5 + varied * (i % 2) + (ahead if site != "b" or i % 2 else -ahead),
            ]
            for site, count in sizes.items()
            for i in range(count)
        ]
        with (place / "predictions.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["id", "site", "dice"], *rows])
    return folder


def test_better_is_said_only_where_it_is_clear(make: Make) -> None:
    folder = segmented(make)
    sentence = "better at 1 of 3 sites, no clear difference at 1, too few cases at 1; "
    together = "on these 33 test cases together: better (+0.149)"
    answer = Differences(RunFiles(folder)).answers()["At your own hospital"]
    assert answer.endswith(f"each on its own test cases: {sentence}{together}")
    _, page = render(folder)
    words = " ".join(page.text.split())
    assert f"At your own hospital: {answer}." in words
    assert "a12 test cases+0.240+0.235 to +0.245better" in words
    assert "c9 test cases+0.241too few cases" in words
    assert sentence in " ".join(result_table(folder).split())


def test_few_cases_are_listed_in_place_of_an_interval(make: Make) -> None:
    folder = segmented(make)
    lines = (folder / "predictions.csv").read_text().splitlines()
    for count, listed in ((10, False), (9, True)):
        (folder / "predictions.csv").write_text("\n".join(lines[: count + 1]) + "\n")
        _, page = render(folder)
        assert ("Each test case" in page.text) == listed
        assert ("95 % interval –" in page.text) != listed
        assert ("each: 0.750 · 0.750" in page.text) == listed
