"""What a foreign bundle optimises by its own key metric: MONAI's figure, its name in tables, its best round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.bundle import ConfigParser

from medfl.bundle.bundle import Bundle
from medfl.report import RunFiles
from medfl.report.table import result_table
from medfl.runs.launch import federate
from medfl.runs.predict import predict
from medfl.runs.result import Result
from medfl.storage.files import load_weights
from tests.runs.test_findings_and_numbers import bundle, page_of, table

FROM_ENGINE = "$monai.handlers.from_engine(['pred', 'label'])"
METRICS: dict[str, tuple[str, str, bool, list[Any]]] = {
    "classification": (
        "val_acc", "ignite.metrics.Accuracy", True,
        [{"_target_": "AsDiscreted", "keys": ["pred", "label"], "argmax": [True, False], "to_onehot": 3}],
    ),
    "multilabel": (
        "val_auc", "ROCAUC", True, [{"_target_": "Activationsd", "keys": "pred", "sigmoid": True}],
    ),
    "regression": ("mse", "MeanSquaredError", False, []),
    "other": (
        "val_mse", "MeanSquaredError", False,
        [{"_target_": "Lambdad", "keys": "label", "func": "$lambda x: x[:1]"}],
    ),
}  # fmt: skip
"""Task -> name, metric, whether more is better, postprocessing."""


def foreign(root: Path, task: str, name: str = "") -> Path:
    """Return a bundle whose evaluator has a key metric, under its own name or this one."""
    folder = bundle(root, task)
    usual, target, _, postprocessing = METRICS[task]
    path = folder / "configs" / "train.json"
    config = json.loads(path.read_text())
    evaluator = config["validate"]["evaluator"]
    evaluator |= {"network": "@network", "device": "@device"}
    evaluator["postprocessing"] = {"_target_": "Compose", "transforms": postprocessing}
    metric = {"_target_": target, "output_transform": FROM_ENGINE}
    evaluator["key_val_metric"] = {name or usual: metric}
    path.write_text(json.dumps(config))
    return folder


def by_monai(folder: Path, weights: dict[str, torch.Tensor]) -> float:
    """Return the key metric of the bundle's own evaluator."""
    parser = ConfigParser()
    parser.read_config(folder / "configs" / "train.json")
    parser["bundle_root"] = str(folder)
    parser["device"] = torch.device("cpu")
    evaluator = parser.get_parsed_content("validate#evaluator")
    evaluator.network.load_state_dict(weights)
    evaluator.run()
    return float(evaluator.state.metrics[evaluator.state.key_metric_name])


@pytest.mark.parametrize("task", METRICS)
def test_it_is_monai_s_in_every_table_and_chooses_the_best_round(task: str, tmp_path: Path) -> None:
    folder = foreign(tmp_path, task)
    name, _, more_is_better, _ = METRICS[task]
    assert Bundle(str(folder)).task == task
    requested = {"method": "fedavg", "sites": 2, "rounds": 3, "partition": "iid"}
    out = tmp_path / "run"
    summary = federate(str(folder), requested=requested, out=out, jobs=1)
    run = RunFiles(out)
    assert run.key == name
    weights = load_weights(out / "weights.safetensors")
    assert summary["last"][name] == pytest.approx(by_monai(folder, weights), rel=1e-5)

    chosen = [line["val"][name] for line in run.rounds]
    best = max(chosen) if more_is_better else min(chosen)
    assert summary["best"]["round"] == 1 + chosen.index(best)
    assert summary["sites"]["metric"] == name
    assert all(row[f"received_{name}"] for row in table(out / "sites.csv"))
    title = name.replace("_", " ")
    assert title in " ".join(result_table(out).split())
    assert title in page_of(out)
    if task in ("multilabel", "regression"):
        new = [folder / "images" / f"i{number}.png" for number in range(40, 80)]
        notes = Result(out).subgroups("site", 2).notes()
        assert f"{name}, the bundle's own metric, is of all cases alone" in notes
        found = predict(out, new, tmp_path / "new", reference=folder / "truth.csv")
        assert found["scores"][name] == pytest.approx(summary["last"][name], rel=1e-5)


@pytest.mark.parametrize(("task", "name"), [("classification", "accuracy"), ("regression", "mae")])
def test_it_takes_no_name_of_medfl_s(task: str, name: str, tmp_path: Path) -> None:
    assert Bundle(str(foreign(tmp_path, task, name))).key_metric == f"own_{name}"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({"_target_": "MeanAbsoluteError"}, "size_error"),
        (
            {"_target_": "IgniteMetricHandler", "metric_fn": {"_target_": "RMSEMetric"}},
            "size_error",
        ),
        ({"_target_": "ignite.metrics.MeanSquaredError"}, "size_error"),
        ({"_target_": "PeakSignalToNoiseRatio", "max_val": 1.0}, "size"),
        ({"_target_": "ignite.metrics.regression.R2Score"}, "size"),
    ],
)
def test_an_error_under_another_name_is_called_one(
    target: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """Of a metric named "size" the highest was best, as in MONAI, though it is a mean absolute error."""
    folder = foreign(tmp_path, "regression")
    path = folder / "configs" / "train.json"
    config = json.loads(path.read_text())
    evaluator = config["validate"]["evaluator"]
    evaluator["key_val_metric"] = {"size": {**target, "output_transform": FROM_ENGINE}}
    path.write_text(json.dumps(config))
    assert Bundle(str(folder)).key_metric == expected

    evaluator["metric_cmp_fn"] = "$lambda a, b: a > b"
    path.write_text(json.dumps(config))
    assert Bundle(str(folder)).key_metric == "size", "the bundle itself says what is better"
