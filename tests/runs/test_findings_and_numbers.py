"""What is looked at after a run of several findings an image, or of numbers: pages, tables, predictions, subgroups."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, mean_absolute_error, roc_auc_score
from torch import Tensor, nn

import medfl
from medfl.cli.predict import _lines
from medfl.compare import comparison, tables
from medfl.compare.side_by_side import write_page
from medfl.core.errors import InputError
from medfl.evaluation.metrics import fewer_classes, spread
from medfl.export.bundle_writer import export
from medfl.report import RunFiles, folds, result_table, write_report
from medfl.report.differences import BETTER, between_models, from_other_sites
from medfl.report.prediction_analysis import analyse_predictions
from medfl.runs.launch import federate
from medfl.runs.predict import predict
from medfl.runs.result import Result, load_run
from medfl.storage.run_documents import read_rows
from tests.problem.test_task_kinds import parts_of, pictures
from tests.support.run_folders import Page, build

NAMES = ("Effusion", "Mass")
OUTPUTS = {
    "classification": ("none", "one", "two"), "multilabel": NAMES, "regression": ("grey",), "other": ("grey",),
}  # fmt: skip
LOSSES: dict[str, Any] = {
    "classification": {"_target_": "torch.nn.CrossEntropyLoss"},
    "multilabel": {"_target_": "torch.nn.BCEWithLogitsLoss"},
    "regression": {"_target_": "torch.nn.L1Loss"},
    "other": "$lambda output, target: torch.nn.functional.mse_loss(output, target[:, :1])",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    paths = {}
    for task in ("multilabel", "regression"):
        for method, rounds in (("fedavg", 4), ("ditto", 1)):
            paths[f"{task} {method}"] = root / f"{task}-{method}"
            parts = parts_of(task)
            medfl.run(parts, method, rounds=rounds, out=paths[f"{task} {method}"])

    return paths


def table(path: Path) -> list[dict[str, str]]:
    return [dict(row) for _, row in read_rows(path, ())]


def page_of(path: Path) -> str:
    page = Page(write_report(path).read_text())
    assert page.open == []
    return " ".join(page.text.split())


def test_findings_are_read_back_with_their_intervals(runs: dict[str, Path]) -> None:
    run = RunFiles(runs["multilabel fedavg"])
    analysis = analyse_predictions(run)
    assert analysis is not None
    rows = table(run.path / "predictions.csv")
    known = [row for row in rows if row["label_Mass"] != ""]
    truth = [int(row["label_Mass"]) for row in known]
    score = [float(row["p_Mass"]) for row in known]
    found = run.structures["Mass"]
    assert (found["cases"], found["positives"]) == (len(known), sum(truth))
    assert len(known) < len(rows)
    low, high = analysis.intervals["auroc of Mass"]
    assert low < roc_auc_score(truth, score) < high
    low, high = analysis.intervals["average_precision of Mass"]
    assert low < average_precision_score(truth, score) < high
    assert found["auroc"] == pytest.approx(roc_auc_score(truth, score))
    called = [float(row["p_Mass"]) >= found["threshold"] for row in rows]
    assert called == [row["predicted_Mass"] == "1" for row in rows]
    for metric in ("auroc", "average_precision", "f1", "sensitivity", "specificity"):
        low, high = analysis.intervals[metric]
        assert low < (run.summary or {})["last"][metric] < high


def test_the_page_of_findings(runs: dict[str, Path]) -> None:
    text = page_of(runs["multilabel fedavg"])
    assert "trained for multi-label classification of 2 findings" in text
    counts = json.loads((runs["multilabel fedavg"] / "run.json").read_text())["site_class_counts"]
    sites = table(runs["multilabel fedavg"] / "sites.csv")
    for row in sites:
        assert counts[row["site"]] == [int(row[f"train_{name}"]) for name in NAMES]

    for words in (
        "Training images of each site by finding", "best round by AUROC on the validation set (higher is better)",
        "Each finding", "ROC curves of the findings", "Reliability of the findings' probabilities",
        "whose probability is farthest from what is true", "Threshold", "AUROC of each finding at each site",
    ):  # fmt: skip
        assert words in text
    assert "Confusion" not in text
    assert "left out of the mean" not in text


def test_a_finding_that_few_have_is_said_to_be_left_out(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    parts = parts_of("multilabel", classes=("Effusion", "Hernia"))
    for sections in parts.data.values():
        for item in sections["test"]:
            item["label"] = item["label"].clone()
            item["label"][1] = 0.0
        sections["test"][0]["label"][1] = 1.0

    result = medfl.run(parts, "fedavg", rounds=1, out=tmp_path / "run")
    assert result.summary["last"]["classes"]["Hernia"]["positives"] == 2
    assert result.summary["last"]["auroc"] == pytest.approx(
        result.summary["last"]["classes"]["Effusion"]["auroc"]
    )
    text = page_of(tmp_path / "run")
    assert "fewer than 10 test cases have it, or lack it: Hernia." in text
    assert "* left out of the means" in result_table(tmp_path / "run")
    assert result.summary["sites"]["left_out"] == ["Hernia"]
    said = (
        "AUROC of single sites is not over Hernia, which too few of their test images have or lack"
    )
    assert said in text
    assert said in " ".join(result_table(tmp_path / "run").split())


def test_a_finding_is_scored_at_one_site_alone(tmp_path: Path) -> None:
    """North has Effusion in all test images, south Mass: no finding is common, and no site is ranked."""
    parts = parts_of("multilabel")
    for place, sections in enumerate(parts.data.values()):
        for item in sections["test"]:
            item["label"] = item["label"].clone()
            item["label"][place] = 1.0

    result = medfl.run(parts, "fedavg", rounds=1, out=tmp_path / "run")
    sites = result.summary["sites"]
    assert sites["classes_at"] == {"north": 1, "south": 1}
    assert "worst" not in sites
    assert "1 of 2 findings" in page_of(tmp_path / "run")
    assert from_other_sites(RunFiles(tmp_path / "run"), "north") is None


def cross_validated(run: Path, root: Path, rewritten: Any = lambda number, row: row) -> folds.Folds:
    """Return two folds made of one run, each with the test cases of a site."""
    rows = table(run / "predictions.csv")
    for number, site in enumerate(("north", "south"), 1):
        fold = Path(shutil.copytree(run, root / f"fold-{number}"))
        own = [rewritten(number, row) for row in rows if row["site"] == site]
        with (fold / "predictions.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(own)

        summary = json.loads((fold / "summary.json").read_text())
        summary["table_rows"]["predictions.csv"] = len(own)
        (fold / "summary.json").write_text(json.dumps(summary))

    record = {"folds": 2, "bundle": "parts", "images": ["a", "b"], "command": None}
    empty: dict[str, Any] = dict.fromkeys(("options", "config", "requested", "settings"), {})
    (root / "folds.json").write_text(json.dumps(record | empty))
    return folds.write(root)


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_folds(task: str, runs: dict[str, Path], tmp_path: Path) -> None:
    """Pooled they are the run that they are made of."""
    run = runs[f"{task} fedavg"]
    found = cross_validated(run, tmp_path)
    last = (RunFiles(run).summary or {})["last"]
    for name in found.names[:4]:
        assert found.pooled[name] == pytest.approx(last[name])

    if task == "multilabel":
        assert found.structures["Mass"]["auroc"] == pytest.approx(last["classes"]["Mass"]["auroc"])
        assert "finding, pooled" in found.text()

    assert found.rows[1] != found.rows[2]
    assert "pooled means are also over" not in found.text()


def test_findings_that_means_of_folds_leave_out_are_said(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """Nobody in fold 2 has a mass: the means of both folds are over effusions alone."""

    def without_mass(number: int, row: dict[str, str]) -> dict[str, str]:
        return row | {"label_Mass": "0"} if number == 2 else row

    found = cross_validated(runs["multilabel fedavg"], tmp_path, without_mass)
    for number, row in found.rows.items():
        own = [line for line in table(tmp_path / "predictions.csv") if line["fold"] == str(number)]
        truth, score = (
            [float(line[f"{kind}_Effusion"]) for line in own] for kind in ("label", "p")
        )
        assert row["auroc"] == pytest.approx(roc_auc_score(truth, score))

    said = "pooled means are also over Mass, which too few test images of a fold have or lack"
    assert said in " ".join(found.text().split())
    assert said[1:] in " ".join((tmp_path / "report.html").read_text().split())
    assert said in json.loads((tmp_path / "summary.json").read_text())["notes"]


def test_the_page_of_numbers(runs: dict[str, Path]) -> None:
    run = RunFiles(runs["regression fedavg"])
    rows = table(run.path / "predictions.csv")
    truth = np.array([float(row["target_age"]) for row in rows])
    error = np.array([float(row["predicted_age"]) for row in rows]) - truth
    text = page_of(run.path).replace("−", "-")
    bias, sd = error.mean(), error.std(ddof=1)
    assert f"the mean of the errors, {bias:+.3f}" in text
    assert f"limits of agreement, {bias - 1.96 * sd:+.3f} to {bias + 1.96 * sd:+.3f}" in text
    assert "The test images with the largest errors." in text
    worst = rows[int(np.abs(error).argmax())]
    assert text.split("PredictedError")[1].split()[0].startswith(worst["id"])
    assert "Lower is better." in text
    analysis = analyse_predictions(run)
    assert analysis is not None
    low, high = analysis.intervals["mae"]
    assert low < np.abs(error).mean() < high


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([60.0, 50, 40, 30, 20, 12], (30, 12)),
        ([12.0, 20, 30, 40, 50, 60], None),
        ([60.0, 50, 40, 30, 29.9, 29.9], None),
    ],
)
def test_an_error_that_still_falls_is_told(
    scores: list[float], said: tuple[float, float] | None, tmp_path: Path
) -> None:
    folder = build(tmp_path, rounds=6, key_metric="mae")
    entries = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for entry, score in zip(entries, scores, strict=True):
        entry["val"]["mae"] = score

    (folder / "rounds.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert RunFiles(folder).rise == said
    assert ("still falling at the end, from 30.000 to 12.000" in page_of(folder)) == bool(said)


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_two_models_and_two_sites_are_compared(
    task: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    long, short = RunFiles(runs[f"{task} fedavg"]), RunFiles(runs[f"{task} ditto"])
    found = between_models(long, short)
    assert found is not None
    assert found.word == BETTER
    assert (found.value < 0) == (task == "regression")
    sites = from_other_sites(long, "north")
    assert sites is not None
    assert sites.ends is not None
    page = Page(write_page([long.path, short.path], tmp_path / "two.html").read_text())
    assert BETTER in page.text or "worse" in page.text
    assert "Confusion matrices" not in page.text


def test_tables_of_numbers_are_in_their_unit(runs: dict[str, Path]) -> None:
    both = comparison.read([runs["regression fedavg"], runs["regression ditto"]])
    (row,) = [
        line for line in tables.result_table(both, both.partitions[0], "md").splitlines() if "| fedavg" in line
    ]  # fmt: skip
    mae = both.rows[0].first.summary["last"]["mae"]  # type: ignore[index]
    assert f"{mae:.3f}" in row
    titles = [title for title, _ in tables.all_tables(both, "ditto", "ditto", "md")]
    assert any(title.startswith("Paired over the test cases") for title in titles)
    cases = dict(tables.all_tables(both, "ditto", "ditto", "md"))[titles[-2]]
    assert "better" in cases
    assert both.ranks()["fedavg"] == 1


@pytest.mark.parametrize("task", ["multilabel", "regression"])
@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_own_items_are_predicted_as_recorded(task: str, method: str, runs: dict[str, Path]) -> None:
    rows = table(runs[f"{task} {method}"] / "predictions.csv")
    site = table(runs[f"{task} {method}"] / "sites.csv")[0]
    assert any(name.endswith("auroc_mass") for name in site) == (task == "multilabel")
    result = load_run(runs[f"{task} {method}"])
    recorded = result.predictions
    assert list(recorded[0]) == list(rows[0])
    if task == "multilabel":
        assert {row["label_Mass"] for row in recorded} == {0, 1, None}


@pytest.mark.parametrize(
    ("task", "metrics"),
    [
        ("multilabel", {"auroc", "average_precision", "f1", "sensitivity", "specificity"}),
        ("regression", {"mae", "rmse", "r2", "pearson"}),
    ],
)
def test_subgroups(task: str, metrics: set[str], runs: dict[str, Path]) -> None:
    result = load_run(runs[f"{task} fedavg"])
    found = result.subgroups("site")
    assert [group.count for group in found.groups] == [60, 60]
    for group in (*found.groups, found.total):
        assert group.metrics.keys() == metrics
    assert found.total.metrics[result._key].value == pytest.approx(
        result.summary["last"][result._key]
    )
    if task == "multilabel":
        assert found.groups[0].areas.keys() == set(NAMES)
        hidden = result.subgroups("site", min_count=30)
        assert any(group.small_classes for group in hidden.groups)
        assert "means are over findings" in " ".join(hidden.notes())


def test_the_worst_site_has_all_classes() -> None:
    values = {"a": 0.9, "b": 0.5, "c": 0.8}
    fewer = fewer_classes({"a": (0, 1, 2), "b": (0, 1), "c": (0, 1, 2)})
    assert fewer == {"of_classes": 3, "classes_at": {"a": 3, "b": 2, "c": 3}}
    assert spread(values, ranked=["a", "c"])["worst_site"] == "c"
    assert spread(values)["worst_site"] == "b"
    assert "worst" not in spread(values, ranked=[])
    assert fewer_classes({"a": (0, 1), "b": (0, 1)}) == {}


def three_classes(image: Tensor) -> Tensor:
    return torch.tensor(int((image.mean() > 0.1).item()) + int((image.mean() > -0.1).item()))


@pytest.mark.parametrize("lacking", [1, 2])
def test_a_site_without_a_class_is_no_worst_site(lacking: int, tmp_path: Path) -> None:
    """North has class 2 in none of its test images; with two such sites of three, or of two, none has all."""
    data: dict[str, dict[str, list[dict[str, Tensor]]]] = {}
    for index, site in enumerate(("north", "south")):
        data[site] = {
            section: pictures(40, 10 * index + place, three_classes)
            for place, section in enumerate(("train", "validate", "test"))
        }
        if index < lacking:
            absent = 2 - index
            data[site]["test"] = [item for item in data[site]["test"] if item["label"] != absent]

    parts = parts_of(
        "classification", data=data, classes=("low", "middle", "high"), loss=nn.CrossEntropyLoss(),
        network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
    )  # fmt: skip
    result = medfl.run(parts, "fedavg", rounds=1, out=tmp_path / "run")
    sites = result.summary["sites"]
    assert sites["of_classes"] == 3
    assert sites["classes_at"] == {"north": 2, "south": 3 if lacking == 1 else 2}
    assert sites.get("worst_site") == ("south" if lacking == 1 else None)
    assert {row["site"] for row in result.sites} == {"north", "south"}
    text = page_of(tmp_path / "run")
    assert "2 of 3 classes" in text
    said = "no site has all, so none is called the worst"
    assert (said in text) == (lacking == 2)
    assert "north 2 of 3 classes" in " ".join(result_table(tmp_path / "run").split())
    assert from_other_sites(RunFiles(tmp_path / "run"), "north") is None


# New images


def bundle(root: Path, task: str) -> Path:
    """A bundle of tiny pictures, whose findings are told by halves and whose number by the mean grey value."""
    draw = np.random.default_rng(0)
    folder = root / task
    (folder / "configs").mkdir(parents=True)
    (folder / "images").mkdir()
    lines = []
    items = []
    for index in range(80):
        left, right = draw.integers(0, 2, 2)
        pixels = draw.integers(0, 60, (8, 8)) + 120 * np.array([left] * 4 + [right] * 4)
        path = folder / "images" / f"i{index:02d}.png"
        Image.fromarray(pixels.astype(np.uint8)).save(path)
        label = [float(left), float(right)]
        if task == "regression":
            label = [float(pixels.mean() / 100)]
        if task == "other":
            label = [float(pixels.mean() / 100), 7.0]
        image = f"$@bundle_root + '/images/{path.name}'"
        one_class = int(left + right)
        items.append(
            {
                "image": image,
                "label": one_class if task == "classification" else label,
                "id": path.name,
            }
        )
        lines.append([path.name, *label])

    names = OUTPUTS[task]
    with (folder / "truth.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["file", *names], *lines])

    read = {
        "_target_": "Compose",
        "transforms": [
            {"_target_": "LoadImaged", "keys": "image", "ensure_channel_first": True},
            {"_target_": "ScaleIntensityRanged", "keys": "image", "a_min": 0, "a_max": 255, "b_min": 0, "b_max": 1},
            {"_target_": "EnsureTyped", "keys": ["image", "label"], "allow_missing_keys": True},
        ],
    }  # fmt: skip
    config = {
        "bundle_root": ".", "device": "$torch.device('cuda')",
        "network_def": f"$torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, {len(names)}))",
        "network": "$@network_def.to(@device)",
        "loss": LOSSES[task],
        "optimizer": {"_target_": "torch.optim.Adam", "params": "$@network.parameters()", "lr": 0.02},
        "train": {
            "preprocessing": read,
            "dataset": {"_target_": "Dataset", "data": items[:40], "transform": "@train#preprocessing"},
            "dataloader": {"_target_": "DataLoader", "dataset": "@train#dataset", "batch_size": 8, "shuffle": True},
            "trainer": {
                "_target_": "SupervisedTrainer", "train_data_loader": "@train#dataloader", "network": "@network",
                "loss_function": "@loss", "optimizer": "@optimizer",
            },
        },
        "validate": {
            "preprocessing": "%train#preprocessing",
            "dataset": {"_target_": "Dataset", "data": items[40:], "transform": "@validate#preprocessing"},
            "dataloader": {"_target_": "DataLoader", "dataset": "@validate#dataset", "batch_size": 8},
            "evaluator": {"_target_": "SupervisedEvaluator", "val_data_loader": "@validate#dataloader"},
        },
    }  # fmt: skip
    (folder / "configs" / "train.json").write_text(json.dumps(config))
    channels = {str(index): name for index, name in enumerate(names)}
    metadata = {"network_data_format": {"outputs": {"pred": {"channel_def": channels}}}}
    (folder / "configs" / "metadata.json").write_text(json.dumps(metadata))
    return folder


@pytest.mark.parametrize(
    ("task", "wrong"), [("multilabel", "[99.0, 0.0]"), ("regression", "[float('inf')]")]
)
def test_targets_that_only_transforms_know_are_checked_at_the_first_batch(
    task: str, wrong: str, tmp_path: Path
) -> None:
    folder = bundle(tmp_path, task)
    path = folder / "configs" / "train.json"
    config = json.loads(path.read_text())
    for section in ("train", "validate"):
        for item in config[section]["dataset"]["data"]:
            item["answer"] = item.pop("label")

    config["train"]["dataset"]["data"][3]["answer"] = f"${wrong}"
    transforms = config["train"]["preprocessing"]["transforms"]
    transforms.insert(0, {"_target_": "CopyItemsd", "keys": "answer", "names": "label"})
    path.write_text(json.dumps(config))
    requested = {"method": "fedavg", "sites": 2, "rounds": 1, "partition": "iid"}
    with pytest.raises(InputError, match=r"item '.*i03.png': target (99|inf); .*; correct it"):
        federate(str(folder), requested=requested, out=tmp_path / "run", jobs=1)


@pytest.fixture(scope="module", params=["multilabel", "regression"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("bundle")
    folder = bundle(root, request.param)
    requested = {"method": "fedavg", "sites": 2, "rounds": 3, "partition": "iid"}
    federate(str(folder), requested=requested, out=root / "run", jobs=1)
    return request.param, folder, root / "run"


def test_new_images_are_predicted_and_scored(trained: Any, tmp_path: Path) -> None:
    task, folder, run = trained
    document = predict(run, folder / "images", tmp_path / "out", reference=folder / "truth.csv")
    assert document["task"] == task
    assert not document["failed"]
    rows = document["predictions"]
    truth = table(folder / "truth.csv")
    recorded = {row["id"]: row for row in table(run / "predictions.csv")}
    own = [row for row in rows if row["id"] in recorded]
    assert own
    for row in own:
        for name in row.keys() - {"id"}:
            assert float(recorded[row["id"]][name]) == pytest.approx(row[name], abs=1e-5)

    if task == "regression":
        grey = [float(row["grey"]) for row in truth]
        expected = mean_absolute_error(grey, [row["predicted_grey"] for row in rows])
        assert document["scores"]["mae"] == pytest.approx(expected, rel=1e-5)
        assert list(rows[0]) == ["id", "predicted_grey"]
        assert "loss" not in document["scores"]
    else:
        areas = [
            roc_auc_score([float(row[name]) for row in truth], [row[f"p_{name}"] for row in rows])
            for name in NAMES
        ]
        assert document["scores"]["auroc"] == pytest.approx(np.mean(areas))
        assert document["structures"]["Mass"]["auroc"] == pytest.approx(areas[1])
        chosen = RunFiles(run).structures
        for row in rows:
            assert row["predicted_Mass"] == (row["p_Mass"] >= chosen["Mass"]["threshold"])

    lines = " ".join(" ".join(_lines(document)).split())
    assert ("present mean probability" in lines) == (task == "multilabel")
    assert ("number mean range" in lines) == (task == "regression")
    assert {"multilabel": "Average precision", "regression": "Pearson r"}[task] in lines


def test_an_exported_network_predicts_as_the_run_did(trained: Any, tmp_path: Path) -> None:
    _, _, run = trained
    (document,) = export(run, tmp_path / "exported", formats=("torchscript",))["bundles"]
    compared = document["predictions"]
    assert compared["items"] > 0
    assert compared["largest_difference"] < 1e-5


def test_a_result_predicts_its_own_items_as_recorded_and_new_ones(trained: Any) -> None:
    task, folder, run = trained
    result = Result(run)
    recorded = {row["id"]: row for row in result.predictions}
    again = result.predict()
    assert {row["id"] for row in again} == recorded.keys()
    for row in again:
        assert row == pytest.approx(recorded[row["id"]], abs=1e-6)

    (new,) = result.predict([folder / "images/i00.png"])
    own = list(recorded.values())[0].keys() - {"site"}
    assert new.keys() == {name for name in own if not name.startswith(("label_", "target_"))}


@pytest.mark.parametrize(
    ("head", "cell", "said"),
    [
        ("{name}", "much", "'much' in column"),
        ("other {name}", "1", "has no column '"),
    ],
)
def test_a_reference_that_is_none(
    head: str, cell: str, said: str, trained: Any, tmp_path: Path
) -> None:
    task, folder, run = trained
    names = NAMES if task == "multilabel" else ("grey",)
    heads = [head.format(name=name) for name in names]
    text = f"file,{','.join(heads)}\ni00.png,{','.join([cell] * len(names))}\n"
    (tmp_path / "truth.csv").write_text(text)
    with pytest.raises(InputError, match=said):
        predict(run, folder / "images", tmp_path / "out", reference=tmp_path / "truth.csv")


def test_a_reference_calls_its_columns_as_it_likes(trained: Any, tmp_path: Path) -> None:
    """By names that are given, and of findings also one column with | between them."""
    task, folder, run = trained
    truth = table(folder / "truth.csv")
    if task == "multilabel":
        lines = ["Image ID,What is seen"]
        for row in truth:
            found = [name for name in NAMES if float(row[name] or 0) == 1]
            lines.append(f"{row['file']},{'|'.join(found) or 'No Finding'}")

        scored = {"file": "image id", "label": "what is seen"}
    else:
        lines = ["Image ID,Mean of it", *(f"{row['file']},{row['grey']}" for row in truth)]
        scored = {"file": "Image ID", "label": "Mean of it"}

    (tmp_path / "other.csv").write_text("\n".join(lines) + "\n")
    usual = predict(run, folder / "images", tmp_path / "a", reference=folder / "truth.csv")
    other = predict(
        run, folder / "images", tmp_path / "b", reference=tmp_path / "other.csv", columns=scored
    )
    assert other["scored"] == len(truth)
    if task == "regression":
        assert other["scores"] == usual["scores"]
    else:
        names = [NAMES[k] for k in range(2)]
        for name in names:
            areas = roc_auc_score(
                [float(row[name] or 0) for row in truth],
                [row[f"p_{name}"] for row in other["predictions"]],
            )
            assert other["structures"][name]["auroc"] == pytest.approx(areas)

    with pytest.raises(InputError, match="no column 'seen'; it has .* --file-column"):
        predict(
            run, folder / "images", tmp_path / "c",
            reference=tmp_path / "other.csv", columns={"file": "seen"},
        )  # fmt: skip


def test_a_long_unit_is_not_cut_off_above_the_sites(tmp_path: Path) -> None:
    """ "MAE (mont" stood above the errors of the one model."""
    folder = build(tmp_path, rounds=1, key_metric="mae")
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps(summary | {"units": {"mae": "months"}}))
    (title,) = [
        line for line in result_table(folder).splitlines() if line.strip().startswith("MAE")
    ]
    assert title.strip().startswith("MAE (months)")


def test_older_tables_lack_nothing(tmp_path: Path) -> None:
    """A run of classes that some sites lack, from before that was recorded, ranks as it did."""
    run = RunFiles(build(tmp_path, rounds=1))
    assert run.unequal_classes == ""
    values = run.site_values("received", run.key)
    assert run.spread("received", run.key) == spread(values)
