"""The table of test predictions holds what was scored."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from sklearn.metrics import roc_auc_score

from medfl.evaluation.metrics import Cases, summarise
from medfl.problem.tasks import KINDS
from medfl.report.run_files import RunFiles as Read
from tests.support.run_folders import build


def test_auroc_can_be_made_again_from_the_predictions(tmp_path: Path) -> None:
    """Confident networks: most probabilities differ only after the sixth decimal."""
    classes, count = ("a", "b", "c"), 300
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(3, (count,), generator=generator)
    logits = torch.randn(count, 3, generator=generator) + torch.tensor([18.0, 0, 0])
    logits[:, 1:] += torch.nn.functional.one_hot(label, 3)[:, 1:]
    cases = Cases(
        tuple(map(str, range(count))), {"probabilities": logits.softmax(1), "label": label}
    )
    folder = build(tmp_path, classes=list(classes))
    kind = KINDS["classification"]
    rows = []
    for index, ident in enumerate(cases.ids):
        rows.append({"id": ident, "site": "", **kind.row(cases, index, classes, "auroc")})

    with (folder / "predictions.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found = Read(folder).predictions
    assert found is not None
    values = found.cases.values
    assert torch.equal(values["probabilities"].float(), cases.values["probabilities"])
    again = [
        roc_auc_score(values["label"] == index, values["probabilities"][:, index])
        for index in range(3)
    ]
    assert sum(again) / 3 == pytest.approx(summarise(cases)["auroc"], abs=1e-9)
