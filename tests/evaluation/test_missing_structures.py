"""One rule where a structure is missing, 1 where neither mask has it and 0 where one has, in every bundle's Dice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from monai.bundle import ConfigParser
from monai.handlers import MeanDice, from_engine
from monai.inferers import SimpleInferer
from monai.metrics import compute_dice
from numpy.typing import NDArray
from PIL import Image
from torch import nn

import medfl
from medfl.bundle.bundle import Bundle
from medfl.bundle.files import shipped_folders
from medfl.bundle.zoo.conventions import with_missing
from medfl.data.prepared import Shard, Stacked
from medfl.evaluation.evaluators import CaseEvaluator
from medfl.evaluation.mask_metrics import scores
from medfl.evaluation.metrics import IF_MISSING, METRICS, summarise
from medfl.runs.launch import federate
from medfl.starter import starter

CPU = torch.device("cpu")
PAIR = from_engine(["pred", "label"])
SEGMENTING = ("brain_tissue", "hippocampus", "ixi_brain", "lung_cxr", "skin_lesion")
STOCK = """\
      _target_: MeanDice
      include_background: false
"""
"""What medfl wrote before, and others write."""


def healthy_and_right() -> tuple[torch.Tensor, torch.Tensor]:
    """Four images without a lesion in which one is seen, and four whose lesion is segmented exactly: 0 and 1."""
    prediction, reference = torch.zeros(8, 1, 8, 8), torch.zeros(8, 1, 8, 8)
    prediction[:, :, 2:5, 2:5] = 1
    reference[4:, :, 2:5, 2:5] = 1
    return prediction, reference


def by_hand(prediction: NDArray[Any], reference: NDArray[Any]) -> float:
    if not prediction.any() and not reference.any():
        return 1.0
    return float(2 * (prediction & reference).sum() / (prediction.sum() + reference.sum()))


def shard(x: torch.Tensor, y: torch.Tensor) -> Shard:
    return Shard.of(Stacked([{"id": f"i{n}"} for n in range(len(x))], x, y), range(len(x)))


def new_bundle(root: Path) -> Path:
    """Write a bundle for grey pictures of discs, of which half of the validation and test images have none."""
    draws = np.random.default_rng(0)
    sections = ["train"] * 6 + ["validate"] * 4 + ["test"] * 4
    lines = ["file,section,patient"]
    for number, section in enumerate(sections):
        mask = np.zeros((32, 32), np.uint8)
        mask[8:20, 10:22] = 1
        pixels = draws.integers(0, 60, (32, 32)) + 150 * mask
        if section != "train" and number % 2:
            mask[:] = 0
        for folder, picture in (("images", pixels), ("masks", mask)):
            (root / "data" / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.astype(np.uint8)).save(
                root / "data" / folder / f"{number:02}.png"
            )
        lines.append(f"{number:02}.png,{section},p{number}")
    (root / "data" / "cases.csv").write_text("\n".join(lines) + "\n")
    survey = starter.survey(root / "data" / "images", root / "data" / "masks", names=("lesion",))
    return starter.write(root / "mine", survey, size=32)


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_bundle(tmp_path_factory.mktemp("mine"))


def test_false_alarms_in_healthy_images_count_in_a_bundle_with_monai_s_dice() -> None:
    cases = CaseEvaluator("dice", MeanDice(output_transform=PAIR), SimpleInferer(), None, 1.0)(
        nn.Identity(), shard(*healthy_and_right()), CPU
    )
    assert cases.values["dice"].tolist() == [0.0] * 4 + [1.0] * 4
    assert summarise(cases)["dice"] == 0.5
    assert "dice_cases" not in summarise(cases)


@pytest.mark.parametrize("name", [*SEGMENTING, "mine"])
def test_plain_monai_follows_the_rule_in_the_bundles_of_medfl(name: str, mine: Path) -> None:
    """Their key metric, made and run by MONAI alone, over one batch of channels."""
    root = mine if name == "mine" else shipped_folders()[name]
    config = yaml.safe_load((root / "configs" / "train.yaml").read_text())
    parser = ConfigParser(config["validate"]["key_metric"])
    metric = parser.get_parsed_content("dice").metric_fn
    prediction, reference = healthy_and_right()
    metric(
        y_pred=torch.cat([1 - prediction, prediction], 1),
        y=torch.cat([1 - reference, reference], 1),
    )
    assert float(metric.aggregate()) == 0.5


def test_cases_of_two_structures_are_as_by_hand_and_as_monai_counts_them() -> None:
    """Neither, one, the other, both: in prediction and reference, every pair of them."""
    shown = np.zeros((4, 6, 6), np.int64)
    shown[1, :2], shown[2, 4:] = 1, 2
    shown[3, :3], shown[3, 3:5] = 1, 2
    for predicted in shown:
        for true in shown:
            expected = np.mean([by_hand(predicted == c, true == c) for c in (1, 2)])
            ours = scores(
                torch.from_numpy(predicted), torch.from_numpy(true), ("", "a", "b"), (1, 1), 1.0
            )
            assert ours["dice"] == pytest.approx(expected)
            channels = [
                torch.from_numpy(np.stack([m == c for c in range(3)]))[None]
                for m in (predicted, true)
            ]
            theirs = compute_dice(*channels, include_background=False, ignore_empty=False)
            assert float(theirs.mean()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (
            {"_target_": "monai.handlers.MeanDice", "num_classes": 3, "output_transform": "$x"},
            {"_target_": "IgniteMetricHandler", "output_transform": "$x",
             "metric_fn": {"_target_": "DiceMetric", "ignore_empty": False, "num_classes": 3}},
        ),
        ({"_target_": "DiceMetric", "ignore_empty": True}, {"_target_": "DiceMetric", "ignore_empty": False}),
        ({"_target_": "MeanIoUHandler", "reduction": "sum"}, {"_target_": "MeanIoUHandler", "reduction": "sum"}),
        ({"_target_": "scripts.MeanDice", "cut": 1}, {"_target_": "scripts.MeanDice", "cut": 1}),  # its own
    ],
)  # fmt: skip
def test_a_dice_of_monai_s_is_read_as_one_that_counts_all(node: Any, expected: Any) -> None:
    assert with_missing(node) == expected


def edited(mine: Path, folder: Path, metric: str, text: str) -> Path:
    """Copy the bundle with another key metric."""
    config = (mine / "configs" / "train.yaml").read_text()
    start = config.index("    dice:\n")
    end = config.index("      output_transform", start)
    for file in (mine / "configs").iterdir():
        (folder / "configs").mkdir(parents=True, exist_ok=True)
        own = file.read_text().replace("scores: medfl", "")
        (folder / "configs" / file.name).write_text(own)
    (folder / "configs" / "train.yaml").write_text(
        f"{config[:start]}    {metric}:\n{text}{config[end:]}"
    )
    return folder


LEFT = f"leaves out structures that a reference lacks; dice here is {IF_MISSING}"


@pytest.mark.parametrize(
    ("metric", "text", "key", "note"),
    [
        ("val_dice", STOCK, "dice", f"its own Dice {LEFT}"),
        ("iou", "      _target_: MeanIoUHandler\n", "iou", f"its own iou {LEFT}"),
        ("dice", "      _target_: MeanIoUHandler\n", "own_dice", "its own Dice leaves out"),
        ("loss_of_mask", "      _target_: MeanSquaredError\n", "loss_of_mask", ""),
    ],
)  # fmt: skip
def test_what_a_foreign_metric_leaves_out_is_said(
    metric: str, text: str, key: str, note: str, mine: Path, tmp_path: Path
) -> None:
    bundle = Bundle(str(edited(mine, tmp_path / "theirs", metric, text))).variant(
        {"dataset_dir": str(mine.parent / "data")}
    )
    assert bundle.key_metric == key
    told = [line for line in bundle.notes if "leaves out" in line]
    assert len(told) == bool(note)
    assert not note or note in told[0]


def test_the_bundle_of_medfl_new_has_nothing_to_say(mine: Path) -> None:
    bundle = Bundle(str(mine)).variant({"dataset_dir": str(mine.parent / "data")})
    assert not [line for line in bundle.notes if "leaves out" in line]
    assert IF_MISSING in METRICS["dice"].definition
    assert IF_MISSING in METRICS["surface_dice"].definition


@pytest.mark.slow
@pytest.mark.parametrize("stock", [True, False])
def test_a_run_s_figures_are_those_of_its_masks(stock: bool, mine: Path, tmp_path: Path) -> None:
    """Pooled, per site and per case, from the written masks; the best round by the same figure of validation images."""
    root = edited(mine, tmp_path / "theirs", "dice", STOCK) if stock else mine
    data = mine.parent / "data"
    asked = {"data": str(data), "rounds": 1, "sites": 2, "metrics": "dice"}
    federate(str(root), requested=asked, out=tmp_path / "run", jobs=1, save_predictions=True)
    result = medfl.load_run(tmp_path / "run")
    by_site: dict[str, list[float]] = {}
    for row in result.predictions:
        predicted = np.asarray(
            Image.open(next((tmp_path / "run" / "predictions" / row["site"]).glob(f"{row['id']}*")))
        )
        true = np.asarray(Image.open(data / "masks" / f"{row['id']}.png"))
        expected = by_hand(predicted > 0, true > 0)
        assert row["dice"] == pytest.approx(expected)
        by_site.setdefault(row["site"], []).append(expected)
    everything = [value for values in by_site.values() for value in values]
    assert result.summary["last"]["dice"] == pytest.approx(np.mean(everything))
    for row in result.sites:
        assert row["received_dice"] == pytest.approx(np.mean(by_site[row["site"]]))
    assert "dice_cases" not in result.summary["last"]
