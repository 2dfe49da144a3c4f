"""A run folder as an object: what it reads, what its networks say, and what it refuses."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import medfl
from medfl import datasets
from medfl.core.errors import InputError
from medfl.problem.tasks import KINDS
from medfl.report import activation_maps
from medfl.runs.result import Result, load_run

CONFIG = {"network": "small_cnn", "image_size": 24}


def train(out: Path, data: Path, method: str = "fedavg", **settings: Any) -> Result:
    requested = {
        "data": data,
        "sites": 2,
        "rounds": 2,
        "local_epochs": 1,
        "batch_size": 8,
        "lr": 0.005,
        **settings,
    }
    return medfl.run(
        "ham10000",
        method,
        out=out,
        config=CONFIG,
        jobs=1,
        say=str,
        cohort=1.0,
        partition="iid",
        **requested,
    )


@pytest.fixture(scope="module")
def lesions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "ham10000", tmp_path_factory.mktemp("lesions") / "data", per_class=20, size=24
    )


@pytest.fixture(scope="module")
def run(lesions: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("run") / "fedavg", lesions)


@pytest.fixture(scope="module")
def personal(lesions: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("personal") / "fedper", lesions, "fedper")


def apart(
    made: list[dict[str, Any]], recorded: list[dict[str, Any]], classes: tuple[str, ...]
) -> float:
    by_id = {row["id"]: row for row in made}
    assert by_id.keys() == {row["id"] for row in recorded}
    return max(
        abs(by_id[row["id"]][f"p_{name}"] - row[f"p_{name}"])
        for row in recorded
        for name in classes
    )


# What the run wrote


def test_a_run_says_in_one_line_what_it_was(run: Result) -> None:
    assert repr(run).startswith(
        "<fedavg on ham10000, PHANTOM data, 2 sites, 2 of 2 rounds, balanced accuracy 0."
    )


def test_records_are_tables_with_numbers(run: Result) -> None:
    rounds, sites, predictions = (
        pd.DataFrame(rows) for rows in (run.rounds, run.sites, run.predictions)
    )
    assert rounds["round"].tolist() == [1, 2]
    assert {"train_loss", "bytes_up", "val_balanced_accuracy"} <= set(rounds)
    assert sites["site"].tolist() == ["site-1", "site-2"]
    assert pd.api.types.is_numeric_dtype(sites["received_accuracy"])
    assert predictions.shape == (run.run.data.counts["test"], 4 + 7)
    assert {row["site"] for row in run.site_rounds} == {"site-1", "site-2"}


def test_names_of_sites_that_look_like_numbers_stay_text(run: Result, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    for name in ("sites.csv", "predictions.csv"):
        text = (run.path / name).read_text()
        (tmp_path / "run" / name).write_text(text.replace("site-1", "007").replace("site-2", "1e3"))
    opened = load_run(tmp_path / "run")
    assert [row["site"] for row in opened.sites] == ["007", "1e3"]
    assert {row["site"] for row in opened.predictions} == {"007", "1e3"}
    assert opened.sites[0]["train"] == run.sites[0]["train"]


def test_labels_and_probabilities_are_those_of_the_predictions(run: Result) -> None:
    assert run.labels.tolist() == [row["label"] for row in run.predictions]
    assert run.probabilities.argmax(1).tolist() == [row["predicted"] for row in run.predictions]
    accuracy = float((run.probabilities.argmax(1) == run.labels).mean())
    assert accuracy == pytest.approx(run.summary["last"]["accuracy"])


def test_an_unfinished_run_opens_and_says_what_it_lacks(run: Result, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(run.path, cut)
    for name in ("summary.json", "predictions.csv", "sites.csv"):
        (cut / name).unlink()
    lines = (cut / "rounds.jsonl").read_text().splitlines()
    (cut / "rounds.jsonl").write_text(lines[0] + "\n")
    opened = load_run(cut)
    assert not opened.finished
    assert len(opened.rounds) == 1
    for ask in (lambda: opened.summary, lambda: opened.predictions):
        with pytest.raises(InputError, match=r"1 of 2 rounds are done.*--resume"):
            ask()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no run\.json"):
        load_run(tmp_path)


# Networks


@pytest.mark.parametrize("which", ["last", "best"])
def test_networks_come_with_their_weights_and_do_not_train(run: Result, which: str) -> None:
    network = run.network(which)
    assert not network.training
    saved = medfl.load_run(run.path).network(which).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in network.state_dict().items())


def test_a_global_model_predicts_what_the_run_recorded(run: Result) -> None:
    assert apart(run.predict(), run.predictions, run.classes) < 1e-6
    own = run.predict(site="site-1")
    assert {row["site"] for row in own} == {"site-1"}
    assert len(own) == len(run.run.partition.sites["site-1"]["test"])


def test_each_site_s_own_model_predicts_what_the_run_recorded(personal: Result) -> None:
    assert apart(personal.predict(), personal.predictions, personal.classes) < 1e-6
    one, other = (personal.network(site=name).state_dict() for name in ("site-1", "site-2"))
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_a_site_is_named_where_each_has_a_model_and_nowhere_else(
    run: Result, personal: Result
) -> None:
    with pytest.raises(InputError, match="one model, the same for all"):
        run.network(site="site-1")
    with pytest.raises(InputError, match="site-1, site-2"):
        personal.network()
    with pytest.raises(InputError, match="site-1, site-2"):
        personal.network(site="elsewhere")
    with pytest.raises(InputError, match="'last' or of the 'best'"):
        run.network("first")


def test_new_images_are_read_as_the_run_s_own(run: Result, tmp_path: Path) -> None:
    entry = run.plan.bundle.data("test")[0]
    recorded = next(row for row in run.predictions if row["id"] == entry["id"])
    shutil.copy(entry["image"], tmp_path / "one.jpg")
    pixels = np.asarray(Image.open(entry["image"]))
    for given in (entry["image"], tmp_path, [tmp_path / "one.jpg"], [pixels]):
        (answer,) = run.predict(given)
        assert [answer[f"p_{name}"] for name in run.classes] == pytest.approx(
            [recorded[f"p_{name}"] for name in run.classes], abs=1e-6
        )
        assert "label" not in answer


def test_a_site_s_own_model_writes_its_predictions(personal: Result, tmp_path: Path) -> None:
    entry = personal.plan.bundle.data("test")[0]
    answers = {}
    for site in ("site-1", "site-2"):
        (answers[site],) = personal.predict(entry["image"], site=site, out=tmp_path / site)
        (spoken,) = personal.predict(entry["image"], site=site)
        assert [answers[site][name] for name in personal.classes] == pytest.approx(
            [spoken[f"p_{name}"] for name in personal.classes], abs=1e-6
        )
        assert (tmp_path / site / "predictions.csv").is_file()
    assert answers["site-1"] != answers["site-2"]
    with pytest.raises(InputError, match="a model for each site and none for all"):
        personal.predict(entry["image"], out=tmp_path / "none")


def test_images_of_the_same_name_are_all_answered(run: Result, tmp_path: Path) -> None:
    for folder, names in {"a": ("1.png", "2.png"), "b": ("1.png",)}.items():
        (tmp_path / folder).mkdir()
        for name in names:
            Image.new("RGB", (24, 24), (60 if folder == "a" else 200,) * 3).save(
                tmp_path / folder / name
            )
    both = tmp_path / "a", tmp_path / "b"
    answers = {row["id"]: row["p_nv"] for row in run.predict(both)}
    assert list(answers) == ["a/1.png", "2.png", "b/1.png"]
    one, _, other = answers.values()
    assert one != other
    again = both[1] / "1.png"
    assert [row["id"] for row in run.predict([again, again])] == [str(again), f"{again}#1"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("nowhere.png", "no file and no folder"),
        ([], "no images"),
        ([np.zeros((4, 4), dtype=np.float32)], r"shape \(4, 4\) and type float32"),
    ],
)
def test_what_is_no_image_is_refused(run: Result, given: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        run.predict(given)


# With the data


def test_cases_have_their_centre_and_subgroups_count_them(run: Result) -> None:
    cases = pd.DataFrame(run.cases())
    counts = cases["centre"].value_counts().to_dict()
    found = run.subgroups("centre", min_count=2)
    assert {group.name: group.count for group in found.groups if group.count} == {
        name: count for name, count in counts.items() if count >= 2
    }
    with pytest.raises(InputError, match="known: site, centre"):
        run.subgroups("age")


def test_data_that_are_not_those_of_the_run_are_refused(run: Result, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run.path, moved)
    document = json.loads((moved / "run.json").read_text())
    document["data"]["checksum"] = "0" * 64
    (moved / "run.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="checksum 000000000000"):
        load_run(moved).cases()


def test_maps_are_of_the_item_and_lie_in_0_to_1(run: Result, personal: Result) -> None:
    ids = [row["id"] for row in run.predictions[:2]]
    first, second = run.maps(ids)
    assert (first.id, second.id) == tuple(ids)
    assert first.map.shape == first.image.shape[1:] == (24, 24)
    assert first.map.min() >= 0
    assert first.map.max() == pytest.approx(1)
    assert first.target == first.predicted == run.classes[run.predictions[0]["predicted"]]
    (other,) = run.maps(ids[:1], target="mel", method="gradcam")
    assert other.target == "mel"
    assert len(activation_maps.draw([first, second, other]).axes) == 6
    own = personal.run.partition.sites["site-2"]["test"][0]
    assert personal.maps([own], site="site-2")[0].id == own
    with pytest.raises(InputError, match="akiec, bcc"):
        run.maps(ids, target="flower")


# The names of the package


def test_every_public_name_is_there() -> None:
    assert [name for name in medfl.__all__ if getattr(medfl, name) is None] == []
    assert "ham10000" in medfl.bundles()
    assert "fedavg" in medfl.methods.names()


def test_compare_stays_the_function_when_its_module_is_imported() -> None:
    importlib.import_module("medfl.compare")
    from medfl.compare.grid import Grid

    assert callable(medfl.compare)
    assert Grid.__module__ == "medfl.compare.grid"


def test_settings_that_no_run_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="setting 'epochs'; settings are .*data, sites"):
        medfl.run("ham10000", epochs=3, out=tmp_path / "run")
    with pytest.raises(InputError, match="setting 'seed'"):
        medfl.compare("ham10000", ["fedavg"], seed=3, out=tmp_path / "grid")
    assert not list(tmp_path.iterdir())


def test_a_grid_is_run_and_compared(lesions: Path, tmp_path: Path) -> None:
    found = medfl.compare(
        "ham10000", ["fedavg", "fedprox mu=0.1"], seeds=(0,), partitions=["iid"], data=lesions, sites=2, rounds=1,
        batch_size=16, lr=0.005, cohort=1.0, config=CONFIG, jobs=1, out=tmp_path / "grid", say=str,
    )  # fmt: skip
    assert [row.method for row in found.rows] == ["fedavg", "fedprox"]
    assert (tmp_path / "grid" / "tables.md").is_file()


def test_a_sites_state_is_found_where_a_site_of_flare_keeps_it(
    personal: Result, tmp_path: Path
) -> None:
    shutil.copytree(personal.path, tmp_path / "apart")
    digest = json.loads((personal.path / "run.json").read_text())["run_hash"][:16]
    for name in personal.run.partition.sites:
        (kept,) = (tmp_path / "apart" / "state").glob(f"*-site-{name}.safetensors")
        place = tmp_path / "apart" / "sites" / digest / name / "000002.safetensors"
        place.parent.mkdir(parents=True)
        kept.rename(place)
    moved = load_run(tmp_path / "apart")
    for name in personal.run.partition.sites:
        own = personal.network(site=name).state_dict()
        assert all(
            torch.equal(own[key], value)
            for key, value in moved.network(site=name).state_dict().items()
        )


def test_a_site_s_model_of_a_run_on_flare_and_a_gpu_is_found_where_the_site_keeps_it(
    personal: Result, tmp_path: Path
) -> None:
    """Under the hash of the run as it was made, whose device is part of it."""
    moved = tmp_path / "run"
    shutil.copytree(personal.path, moved)
    made = dataclasses.replace(personal.run, device="cuda")
    document = {
        **json.loads((moved / "run.json").read_text()),
        **made.to_dict(),
        "run_hash": made.run_hash,
    }
    (moved / "run.json").write_text(json.dumps(document))
    (state,) = (moved / "state").glob("*-site-site-1*.safetensors")
    kept = moved / "sites" / made.run_hash[:16] / "site-1" / "000002.safetensors"
    kept.parent.mkdir(parents=True)
    state.rename(kept)
    expected = {
        name: tensor.tolist()
        for name, tensor in personal.network(site="site-1").state_dict().items()
    }
    assert {
        n: tensor.tolist()
        for n, tensor in load_run(moved).network(site="site-1").state_dict().items()
    } == expected


def edited(run: Result, folder: Path, file: str, **changes: Any) -> Path:
    """A copy of a run whose JSON file has other entries."""
    shutil.copytree(run.path, folder)
    document = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps(document))
    return folder


def test_a_record_without_classes_numbers_them_as_its_predictions_do(
    run: Result, tmp_path: Path
) -> None:
    bare = load_run(edited(run, tmp_path / "a", "run.json", classes=None))
    assert bare.classes == run.classes
    assert np.array_equal(bare.labels, run.labels)
    assert np.array_equal(bare.probabilities, run.probabilities)
    assert bare.report().is_file()


@pytest.mark.parametrize(
    ("file", "changes", "text"),
    [
        ("run.json", {"classes": ["a"] * 7}, "predictions.csv has no number in column p_a"),
        ("run.json", {"protocol": 10**30}, "run.json has 1000.* under protocol, where text"),
    ],
)
def test_an_edited_file_is_named(
    run: Result, tmp_path: Path, file: str, changes: dict[str, Any], text: str
) -> None:
    folder = edited(run, tmp_path / "a", file, **changes)
    with pytest.raises(InputError, match=text):
        _ = load_run(folder).probabilities


def columns(run: Result, folder: Path, change: Callable[[list[str]], list[str]]) -> Result:
    """A copy of a run whose predictions have other columns."""
    shutil.copytree(run.path, folder)
    file = folder / "predictions.csv"
    rows = [change(row) for row in csv.reader(file.read_text().splitlines())]
    with file.open("w", newline="") as changed:
        csv.writer(changed).writerows(rows)
    return load_run(folder)


def test_probabilities_are_of_the_class_that_their_column_names(
    run: Result, tmp_path: Path
) -> None:
    """Whoever sorts the columns of a table changes no curve, interval or group."""
    other = columns(run, tmp_path / "a", lambda row: row[:4] + row[:3:-1])
    assert list(other.predictions[0]) != list(run.predictions[0])
    assert np.array_equal(other.probabilities, run.probabilities)
    assert str(other.subgroups("site")) == str(run.subgroups("site"))
    table, before = other._prediction_table, run._prediction_table
    cases = KINDS["classification"].read(table, run.classes).values["probabilities"]
    assert cases.equal(KINDS["classification"].read(before, run.classes).values["probabilities"])


@pytest.mark.parametrize(
    "change",
    [
        lambda row: [cell.replace("p_", "x_", 1) for cell in row],
        lambda row: row[:-1],
        lambda row: row[:4],
    ],
    ids=["renamed", "one lost", "all lost"],
)
def test_a_table_without_a_class_s_probabilities_is_refused(
    run: Result, tmp_path: Path, change: Callable[[list[str]], list[str]]
) -> None:
    other = columns(run, tmp_path / "a", change)
    for ask in (lambda: other.predictions, lambda: other.subgroups("site")):
        with pytest.raises(InputError, match=r"predictions\.csv has no number in column p_"):
            ask()


@pytest.mark.parametrize(
    ("lacking", "text"),
    [
        (["label"], "line 2 has no class numbers"),
        (["predicted"], "line 2 has no class numbers"),
        (["label", "predicted"], "has no classes under label and predicted"),
    ],
    ids=["label", "predicted", "both"],
)
def test_a_table_without_classes_is_refused(
    run: Result, tmp_path: Path, lacking: list[str], text: str
) -> None:
    def renamed(row: list[str]) -> list[str]:
        return [f"x{cell}" if cell in lacking else cell for cell in row]

    other = columns(run, tmp_path / "a", renamed)
    for ask in (lambda: other.labels, lambda: other.predictions, lambda: other.subgroups("site")):
        with pytest.raises(InputError, match=text):
            ask()


def test_a_record_that_gives_a_site_an_image_of_another_section_is_told(
    run: Result, tmp_path: Path
) -> None:
    sites = json.loads((run.path / "run.json").read_text())["partition"]
    sites["sites"]["site-1"]["test"][0] = sites["sites"]["site-1"]["train"][0]
    other = load_run(edited(run, tmp_path / "a", "run.json", partition=sites))
    with pytest.raises(InputError, match=r"image '[^']+' of the run; its data have none"):
        other.predict(section="test", site="site-1")
