"""A run's numbers as pandas tables and as curves."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import medfl


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> medfl.Result:
    draws = torch.Generator().manual_seed(0)
    items = [
        {"image": torch.randn(1, 4, 4, generator=draws) + i % 2, "label": i % 2} for i in range(40)
    ]
    data = {"a": items[:20], "b": items[20:]}
    parts = medfl.Parts(
        linear, data, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1), classes=("p", "q")
    )
    return medfl.run(parts, rounds=3, out=tmp_path_factory.mktemp("run") / "run", jobs=1, say=str)


def test_each_list_of_records_is_a_table(run: medfl.Result) -> None:
    rounds = run.to_frame()
    assert rounds.index.tolist() == [1, 2, 3]
    assert rounds["val_accuracy"].tolist() == [row["val_accuracy"] for row in run.rounds]
    assert (
        run.to_frame("site_rounds").loc[(2, "b"), "train_loss"] == run.site_rounds[3]["train_loss"]
    )
    assert run.to_frame("sites").loc["a", "train"] == 14
    assert run.to_frame("predictions").shape == (8, len(run.predictions[0]) - 1)
    with pytest.raises(medfl.InputError, match="did you mean rounds"):
        run.to_frame("round")


def test_curves_have_the_values_of_the_rounds(run: medfl.Result) -> None:
    axes = run.plot_curves(axes=Figure().add_subplot())
    (line,) = axes.get_lines()
    assert line.get_xydata().tolist() == [
        [row["round"], row["val_balanced_accuracy"]] for row in run.rounds
    ]
    assert axes.get_legend().get_texts()[0].get_text() == "Balanced accuracy (validation)"
    axes = run.plot_curves("loss", "train_loss", by_site=True, axes=Figure().add_subplot())
    lines = axes.get_lines()
    assert len(lines) == 2 + 2 * 2
    by_round = [row["val_loss"] for row in run.rounds]
    assert lines[0].get_ydata().tolist() == by_round
    received = [row["received_loss"] for row in run.site_rounds if row["site"] == "a"]
    assert lines[1].get_ydata().tolist() == received
    with pytest.raises(medfl.InputError, match="did you mean accuracy"):
        run.plot_curves("acuracy")


def test_a_run_without_rounds_has_no_curves(run: medfl.Result, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes((run.path / "run.json").read_bytes())
    with pytest.raises(medfl.InputError, match="one round or more"):
        medfl.load_run(tmp_path).plot_curves()
