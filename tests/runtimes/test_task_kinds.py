"""Several findings an image, and numbers, under every method that fits: the same bits on two runtimes and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.data.prepared import Stacked
from medfl.methods import load, method_class, names
from medfl.problem.tasks.multilabel import FindingEvaluator
from medfl.problem.tasks.regression import NumberEvaluator
from medfl.runtimes.federation import Federation
from medfl.runtimes.launch import Launch
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.monai_fl.exchange import Exchange
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.storage.run_folder import RunFolder
from medfl.training.site import mean_loss
from tests.runtimes.test_monai_fl import left
from tests.support.toy import SECTIONS, ToyBundle, run_record

KINDS = ("multilabel", "regression")
FITTING = [name for name in names() if "multilabel" in method_class(name).tasks]
"""Those that average, change a gradient or keep a part of the network."""


def target_of(x: Tensor, kind: str) -> Tensor:
    if kind == "regression":
        return (10 * x[:, :2]).round()

    target = (x[:, :3] > 0).float()
    target[x[:, 3] > 1, 0] = float("nan")
    return target


class Vectors(ToyBundle):
    """A problem of one of the two kinds, forty items a section."""

    def __init__(self, kind: str) -> None:
        outputs = 2 if kind == "regression" else 3
        loss = mean_loss(nn.L1Loss() if kind == "regression" else nn.BCEWithLogitsLoss())
        evaluator: Any = FindingEvaluator()
        if kind == "regression":
            evaluator = NumberEvaluator(loss, {})

        super().__init__(
            network=lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, outputs)),
            loss=loss, loss_function=loss, evaluator=evaluator, task=kind,
            classes=("age", "weight") if kind == "regression" else ("Mass", "Edema", "Hernia"),
            key_metric="mae" if kind == "regression" else "auroc",
        )  # fmt: skip

    def prepared(self, section: str, *, jobs: int = 1, progress: bool = False) -> Stacked:
        generator = torch.Generator().manual_seed(SECTIONS.index(section))
        x = torch.randn(12, 8, generator=generator)
        y = target_of(x, self.task)
        items = []
        for index, row in enumerate(y.tolist()):
            target = tuple(None if value != value else value for value in row)
            items.append({"id": f"{section}{index}", "target": target})

        return Stacked(items, x, y)


def federation(method: str, kind: str, **changes: Any) -> Federation:
    options = {"fesem": {"clusters": 2}}.get(method, {})
    return Federation(
        Vectors(kind), load(method, options), run_record(method=method, options=options, **changes)
    )


def simulated(out: Path, made: Federation, workers: Any = Workers, resume: bool = False) -> Any:
    folder = RunFolder.create(out) if not resume else RunFolder(out)
    if not resume:
        folder.write_run(made.run, {})

    Simulator(Execution(made, folder, Launch(resume=resume)), workers).execute()
    return left(out)


@pytest.mark.parametrize(
    ("method", "kind"),
    sorted(
        {(method, KINDS[at % 2]) for at, method in enumerate(FITTING)}
        | {("ditto", kind) for kind in KINDS}
    ),
)
def test_every_fitting_method_leaves_the_same_on_two_runtimes(
    tmp_path: Path, method: str, kind: str
) -> None:
    settings: dict[str, Any] = {"rounds": 2, "cohort": 0.67, "eval_every": 2}
    first = simulated(tmp_path / "simulator", federation(method, kind, **settings))
    assert simulated(tmp_path / "monai-fl", federation(method, kind, **settings), Exchange) == first
    metric = "mae" if kind == "regression" else "loss"
    assert first["summary"]["last"][metric] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_leaves_the_same(tmp_path: Path, kind: str) -> None:
    whole = simulated(tmp_path / "whole", federation("scaffold", kind, rounds=3))
    simulated(tmp_path / "parts", federation("scaffold", kind, rounds=1))
    parts = simulated(tmp_path / "parts", federation("scaffold", kind, rounds=3), resume=True)
    assert parts["weights"] == whole["weights"]
    assert parts["tables"] == whole["tables"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_say_why_not(kind: str) -> None:
    for name in set(names()) - set(FITTING):
        bundle = Vectors(kind)
        with pytest.raises(InputError, match=f"a {kind} task"):
            Federation(
                bundle,
                load(name, {"large": "x"} if name == "fedhelp" else {}),
                run_record(method=name),
            )


def test_all_that_only_average_or_change_the_gradient_fit() -> None:
    assert {
        "fedavg", "fedprox", "scaffold", "feddyn", "fednova", "fedopt", "feddc", "fedbn", "ditto", "fedrep", "fedper",
        "fedbabu", "pfedme", "perfedavg", "l2gd", "local", "central", "moon", "fedlora",
    } <= set(FITTING)  # fmt: skip


def test_findings_that_a_site_does_not_annotate_have_no_part_in_its_loss_and_scores(
    tmp_path: Path,
) -> None:
    """Site x annotates one finding of three: the labels that it has of the others could be anything."""
    labels = "x=mass"

    class Scrambled(Vectors):
        def prepared(self, section: str, *, jobs: int = 1, progress: bool = False) -> Stacked:
            stacked = super().prepared(section)
            targets = stacked.targets.clone()
            targets[:3, 1:] = 1 - targets[:3, 1:]  # those of site x
            return Stacked(stacked.items, stacked.inputs, targets)

    left_by = {}
    for name, bundle in {
        "true": Vectors("multilabel"),
        "scrambled": Scrambled("multilabel"),
    }.items():
        made = Federation(bundle, load("fedavg"), run_record(rounds=2, site_labels=labels))
        left_by[name] = simulated(tmp_path / name, made)

    assert left_by["true"]["weights"] == left_by["scrambled"]["weights"]
    assert left_by["true"]["summary"] == left_by["scrambled"]["summary"]
    assert left_by["true"]["summary"]["labels"] == {"x": ["Mass"]}
    rows = left_by["true"]["tables"]["predictions.csv"].splitlines()
    assert rows[0].split(",")[2:5] == ["label_Mass", "label_Edema", "label_Hernia"]
    assert all(row.split(",")[3:5] == ["", ""] for row in rows[1:] if row.split(",")[1] == "x")

    whole = simulated(tmp_path / "whole", federation("fedavg", "multilabel", rounds=2))
    assert whole["weights"] != left_by["true"]["weights"]


def test_numbers_cannot_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--site-labels with a regression task"):
        Federation(Vectors("regression"), load("fedavg"), run_record(site_labels="x=age"))
