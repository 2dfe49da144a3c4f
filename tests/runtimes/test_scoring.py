"""The table of test predictions holds what was scored."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.nn import functional

from medfl.core.message import Message
from medfl.evaluation.metrics import Cases, summarise
from medfl.methods import load
from medfl.problem.tasks import KINDS
from medfl.report.run_files import RunFiles as Read
from medfl.runtimes.federation import Federation
from medfl.runtimes.step import score_newcomer
from tests.support.run_folders import build
from tests.support.toy import ToyBundle, run_record


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


@pytest.mark.parametrize("norm", [True, False])
def test_batch_statistics_stand_for_those_that_stay_at_sites(norm: bool) -> None:
    """FedBN at a site that trained nothing, by hand: each batch by itself; the pool's network is as it was."""
    made = Federation(ToyBundle(norm), load("fedbn"), run_record(method="fedbn"))
    drawn = made.networks.initial
    sent = {name: tensor + 0.5 for name, tensor in drawn.items() if not name.startswith("1.")}
    cases = score_newcomer(made, 3, "z", Message({"weights": sent}), ("test",))["test"]
    shard = made.shard("z", "test")
    ((x, _),) = shard.batches(10)
    hidden = functional.linear(x, sent["0.weight"], sent["0.bias"])
    if norm:
        hidden = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
    logits = functional.linear(hidden.relu(), sent["4.weight"], sent["4.bias"])
    torch.testing.assert_close(cases.values["probabilities"], logits.softmax(1))
    with made.networks.scope():
        assert made.networks.lease(drawn).state_dict().keys() == drawn.keys()
