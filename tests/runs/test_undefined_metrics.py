"""An undefined validation metric, as a user meets it: run, early stopping, comparison, search, folds and pages."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import medfl
from medfl.compare.comparison import read
from medfl.compare.grid import Cell, Grid, compare
from medfl.compare.search import entry, trials
from medfl.compare.side_by_side import write_grid_page
from medfl.compare.tables import write_tables
from medfl.compare.tune import tune
from medfl.report import result_table, write_report
from medfl.runtimes.launch import Launch
from tests.runs.test_callbacks import ended

ONE_CLASS = "all of them are of one class"


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 2))


def items(labels: Sequence[int], seed: int) -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(seed)
    return [
        {"image": torch.randn(1, 6, 6, generator=draws), "label": label, "id": f"{seed}-{i}"}
        for i, label in enumerate(labels)
    ]


def parts(validate: Sequence[int], test: Sequence[int] = (0, 1) * 6, **more: Any) -> medfl.Parts:
    """Noise of two classes at two sites, of which the second has test images of one class alone."""
    data = {
        "a": {
            "train": items((0, 1) * 6, 1),
            "validate": items(validate, 2),
            "test": items(test, 3),
        },
        "b": {"train": items((0, 1) * 6, 4), "validate": [], "test": items((0,) * 4, 5)},
    }
    return medfl.Parts(
        linear, data, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1), classes=("p", "q"),
        **{"key_metric": "auroc", **more},
    )  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[medfl.Result, list[str]]:
    """A run of three rounds with `--patience 1` whose validation images are of one class."""
    said: list[str] = []
    out = tmp_path_factory.mktemp("one") / "run"
    run = medfl.run(parts((0, 0, 0)), rounds=3, patience=1, out=out, jobs=1, say=said.append)
    return run, said


def test_a_run_without_a_best_round_ends_and_says_why(told: Any) -> None:
    run, said = told
    assert (run.summary["status"], run.summary["rounds"], run.summary["best"]) == (
        "finished",
        3,
        None,
    )
    lines = [line for line in said if "undefined" in line]
    assert (
        lines
        == run.summary["undefined"]
        == [
            f"auroc is undefined on the validation images in 3 of 3 rounds: {ONE_CLASS}; there is no best round",
            f"auroc is undefined on the test images of b ({ONE_CLASS}); the mean is over 1 of 2 sites",
        ]
    )
    assert sum("auroc –" in line for line in said) == 3
    assert not (run.path / "best.safetensors").exists()


def test_the_table_and_the_page_have_a_dash_and_the_reason(told: Any) -> None:
    run, _ = told
    rows = {
        line.split()[0]: line.split()
        for line in result_table(run.path).splitlines()
        if line.split()
    }
    assert rows["b"][3] == "–"
    assert rows["mean"][1] == rows["a"][3] == f"{run.sites[0]['received_auroc']:.3f}"
    assert rows["sites"][:4] == ["sites", "with", "it", "1"]
    page = write_report(run.path).read_text()
    assert all(line in page for line in run.summary["undefined"])


def test_the_best_model_of_such_a_run_is_refused_with_the_reason(told: Any) -> None:
    with pytest.raises(
        medfl.InputError, match="one is kept where the validation metric is defined in a round"
    ):
        told[0].network("best")


def test_a_run_whose_test_images_have_no_metric_has_a_dash(tmp_path: Path) -> None:
    run = medfl.run(
        parts((0, 1, 0), test=(0, 0, 0)), rounds=1, out=tmp_path / "run", jobs=1, say=str
    )
    assert run.summary["undefined"] == [f"auroc is undefined on the test images: {ONE_CLASS}"]
    text = result_table(run.path)
    assert [line.split()[-2:-1] for line in text.splitlines() if line.startswith(("a ", "b "))] == [
        ["–"]
    ] * 2
    assert any(line.split()[:2] == ["sites", "with"] for line in text.splitlines())


class _Late:
    """A metric that has no value in the first two rounds of the two sites' shared model."""

    def __init__(self) -> None:
        self.cases = 0

    def __call__(self, output: Any, target: Any) -> float:
        self.cases += 1
        return math.nan if self.cases <= 2 * 3 else float(self.cases)


def test_a_metric_that_is_defined_first_in_round_3_chooses_from_there_on(tmp_path: Path) -> None:
    late = parts((0, 1, 0), metrics={"late": _Late()}, key_metric="late")
    run = medfl.run(
        late, rounds=4, patience=1, out=tmp_path / "run", jobs=1, score_trained=False, say=str
    )
    lines = [json.loads(line) for line in (run.path / "rounds.jsonl").read_text().splitlines()]
    defined = [line["round"] for line in lines if "late" in line["val"]]
    undefined = [line["round"] for line in lines if line.get("undefined")]
    assert undefined
    assert undefined + defined == [1, 2, 3, 4]
    numbers = ", ".join(map(str, undefined))
    assert run.summary["undefined"][0] == (
        f"late is undefined on the validation images in {len(undefined)} of 4 rounds ({numbers}): "
        "none of them has it; the best round is one of the others"
    )
    assert run.summary["best"]["round"] == 4


def test_patience_counts_only_rounds_whose_metric_is_defined() -> None:
    stop = medfl.EarlyStopping(2)
    rows: list[tuple[int, dict[str, float]]] = [(1, {"loss": 1}), (2, {"loss": 1})]
    assert stop(ended(rows)) is None
    assert medfl.EarlyStopping(1)(ended(rows)) is None
    assert ended(rows).best() is None
    rows += [(3, {"dice": 0.5}), (4, {"loss": 1}), (5, {"loss": 1}), (6, {"dice": 0.4})]
    assert stop(ended(rows)) is None
    assert ended(rows).best() == (3, 0.5)
    rows.append((7, {"loss": 1}))
    assert stop(ended(rows)) is None
    rows.append((8, {"dice": 0.5}))
    assert stop(ended(rows)) == "dice has not become better than 0.5 of round 3 for 2 rounds"
    sparse = [(5, {"dice": 0.5}), (10, {"loss": 1}), (15, {"dice": 0.4})]
    assert "for 5 rounds" in (medfl.EarlyStopping(5)(ended(sparse)) or "")
    assert medfl.EarlyStopping(6)(ended(sparse)) is None
    with pytest.raises(medfl.InputError, match="metric 'dise'"):
        medfl.EarlyStopping(1, "dise")(ended(sparse))


# Several runs


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """FedAvg and FedProx with two seeds, none of which has a best round."""
    out = tmp_path_factory.mktemp("grid") / "out"
    entries = (entry("fedavg", {}), entry("fedprox", {}))
    asked = {"rounds": 1, "method": "fedavg"}
    grid = Grid(parts((0, 0)).bundle_name, entries, seeds=(0, 1), requested=asked)
    comparison, failed = compare(grid, Launch(out=out, jobs=2, say=str))
    assert not failed
    return out, comparison


def test_a_comparison_without_best_rounds_has_its_tables(grid: Any, tmp_path: Path) -> None:
    out, comparison = grid
    written = write_tables(comparison, tmp_path)
    text = written["md"].read_text()
    assert "## To reach AUROC – on the validation set" in text
    assert (
        text.count(f"auroc is undefined on the validation images in 1 of 1 rounds: {ONE_CLASS}")
        == 1
    )
    assert "seed 0; " in text
    aurocs = [run.summary["global"]["last"]["auroc"] for run in comparison.runs()][:2]
    mean, sd = 100 * np.mean(aurocs), 100 * np.std(aurocs)
    assert f"{mean:.1f} ± {sd:.1f}" in text
    assert written["tex"].is_file()
    page = write_grid_page(out).read_text()
    assert "auroc is undefined on the validation images" in page


def test_one_seed_without_the_metric_leaves_the_mean_of_the_others(
    grid: Any, tmp_path: Path
) -> None:
    out = shutil.copytree(grid[0], tmp_path / "grid")
    summaries = sorted(out.rglob("summary.json"))
    document = json.loads(summaries[0].read_text())
    for scores in (document["last"], document["global"]["last"]):
        del scores["auroc"]
    summaries[0].write_text(json.dumps(document))
    comparison = read([path.parent for path in summaries])
    text = write_tables(comparison, tmp_path)["md"].read_text()
    other = json.loads(summaries[1].read_text())["global"]["last"]["auroc"]
    assert f"{100 * other:.1f} (1 of 2)" in text


def test_a_search_without_a_figure_chooses_nothing_and_says_why(tmp_path: Path) -> None:
    entries = trials("fedprox", {"mu": ("0.1", "1")}, None, 0)
    asked = {"rounds": 1, "method": "fedprox"}
    search = Grid(
        parts((0, 0)).bundle_name, entries, seeds=(0,), requested=asked, search="mu=0.1,1"
    )
    document, comparison, failed = tune(search, Launch(out=tmp_path / "out", jobs=2, say=str))
    assert (comparison, failed) == (None, {})
    assert [(trial["validation"], trial["validated"]) for trial in document["tried"]] == [
        (None, 0)
    ] * 2
    assert ONE_CLASS in document["undefined"][0]
    assert not (tmp_path / "out" / "best.json").exists()


def test_a_trial_counts_by_the_seeds_that_have_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mu=0.1 is undefined with seed 1, mu=1 with both: the first wins by the mean of one."""
    entries = trials("fedprox", {"mu": ("0.1", "1")}, None, 0)
    asked = {"rounds": 1, "method": "fedprox"}
    search = Grid(
        parts((0, 1)).bundle_name, entries, seeds=(0, 1), requested=asked, search="mu=0.1,1"
    )

    def validated(cell: Cell, key: str) -> float | None:
        return 0.25 if cell.seed == 0 and cell.entry == entries[0] else None

    monkeypatch.setattr(Cell, "validated", validated)
    document, comparison, _ = tune(search, Launch(out=tmp_path / "out", jobs=2, say=str))
    assert comparison is not None
    assert document["validation"] == 0.25
    assert [trial["validated"] for trial in document["tried"]] == [1, 0]
    assert document["settings"]["options"]["mu"] == "0.1"
