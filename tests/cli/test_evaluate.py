"""`medfl evaluate`: a finished model examined at sites, and hospitals that only test."""

from __future__ import annotations

import csv
import html
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from medfl import datasets, networks
from medfl.bundle.bundle import Bundle
from medfl.cli import walls
from medfl.cli.verbs import main
from medfl.core.seeding import stream
from medfl.report import result_table
from medfl.report.run_files import Predictions, RunFiles
from medfl.runs import initial_weights
from medfl.runtimes.monai_fl.client import MedflClientAlgo
from medfl.storage.files import load_weights, save_weights, weights_sha256
from tests.zoo.build import ZOO


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scans") / "data"
    datasets.write_phantom("mednist", folder, per_class=10, size=24)
    return folder


@pytest.fixture(scope="module")
def trained(scans: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "trained"
    arguments = ["run", "mednist", "--data", str(scans), "--sites", "2", "--partition", "iid"]
    assert main([*arguments, "--rounds", "1", "--out", str(out), "--quiet"]) == 0
    return out


def summary_of(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())


def evaluate(*arguments: object) -> int:
    return main(["evaluate", *map(str, arguments), "--quiet"])


def test_a_run_examined_where_it_trained_has_the_scores_of_its_end(
    trained: Path, scans: Path, tmp_path: Path
) -> None:
    out = tmp_path / "examined"
    sites = ("--sites", 2, "--partition", "iid")
    assert evaluate(trained, "--data", scans, *sites, "--out", out) == 0
    expected, examined = summary_of(trained), summary_of(out)
    assert examined["rounds"] == 0
    assert examined["bytes_up"] == examined["bytes_down"] == 0
    assert examined["weights_sha256"] == expected["weights_sha256"]
    assert {**examined["last"], "round": 1} == expected["last"]
    assert examined["sites"] == expected["sites"]
    assert (out / "predictions.csv").read_text() == (trained / "predictions.csv").read_text()
    page = (out / "report.html").read_text()
    assert "test images: their metrics are too good" not in page
    assert "Examination of a finished model" in page
    assert "trained for" not in page


@pytest.mark.parametrize(
    ("method", "bundle"),
    [
        ("fedavg", ("mednist",)),
        ("fedbm", ()),
        *(pytest.param(name, (), marks=pytest.mark.slow) for name in ("fednh", "fedlora", "moon")),
    ],
)
def test_a_run_is_examined_as_it_was_configured(
    method: str, bundle: tuple[str, ...], scans: Path, tmp_path: Path
) -> None:
    data = ["--data", str(scans), "--sites", "2", "--partition", "iid"]
    other = ["--config", "network=small_cnn", "--config", "image_size=16", "--method", method]
    trained, out = tmp_path / "trained", tmp_path / "examined"
    assert main(["run", "mednist", *data, *other, "--rounds", "1", "--out", str(trained)]) == 0
    assert evaluate(trained, *bundle, *data, "--out", out) == 0
    assert summary_of(out)["weights_sha256"] == summary_of(trained)["weights_sha256"]
    assert summary_of(out)["sites"] == summary_of(trained)["sites"]


def test_a_run_of_sites_own_models_says_how_one_is_examined(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(scans), "--sites", "2", "--partition", "iid"]
    out = tmp_path / "local"
    arguments = ["run", "mednist", *data, "--method", "local", "--rounds", "1", "--out", str(out)]
    assert main(arguments) == 0
    capsys.readouterr()
    assert evaluate(out, *data, "--out", tmp_path / "a") == 2
    told = capsys.readouterr().err
    assert "method 'local' has a model for each site and none for all; its sites are" in told
    assert f"medfl export {out} --site NAME --out DIR; medfl evaluate DIR" in told


def test_a_run_is_examined_on_its_own_images_where_no_others_are_named(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"run": "mednist", "--data": str(scans), "--sites": "2", "--out": str(tmp_path / "a")}
    pairs = [word for pair in record.items() for word in pair]
    assert main([*pairs, "--config=network=small_cnn", "--rounds=1", "--quiet"]) == 0
    monkeypatch.delenv("MEDFL_DATA", raising=False)
    assert evaluate(tmp_path / "a", "--sites", 2, "--out", tmp_path / "b") == 0
    expected, examined = summary_of(tmp_path / "a"), summary_of(tmp_path / "b")
    assert {**examined["last"], "round": 1} == expected["last"]


def test_folds_test_each_image_once_and_say_which_trained_the_model(
    trained: Path, scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "folds"
    command = (trained, "--data", scans, "--sites", 2, "--partition", "iid", "--folds", 3)
    assert main(["evaluate", *map(str, command), "--out", str(out)]) == 0
    learned = RunFiles(trained).run.partition.owners("train").keys()
    shown, told = capsys.readouterr()
    for text in (shown, (out / "report.html").read_text()):
        words = " ".join(text.split())
        assert "by one finished model" in words
        assert "trained without it" not in words
        assert "by the model of the fold" not in words

    tested: list[str] = []
    for number in range(1, 4):
        fold = RunFiles(out / f"fold-{number}")
        assert summary_of(fold.path)["weights_sha256"] == summary_of(trained)["weights_sha256"]
        in_fold = [*fold.run.partition.owners("test")]
        count = len(learned & {*in_fold})
        assert 0 < count < len(in_fold)
        note = f"the model was trained on {count} of the {len(in_fold)} test images"
        assert note in told
        assert note.removeprefix("the ") in (fold.path / "report.html").read_text()
        tested += in_fold

    images = 6 * 10
    assert len(tested) == len({*tested}) == images
    assert summary_of(out)["cases"] == images

    pooled = summary_of(out)["last"]
    (out / "report.html").unlink()
    (out / "fold-2" / "report.html").unlink()
    assert evaluate(*command, "--out", out) == 0, "an ended one goes on"
    assert summary_of(out)["last"] == pooled
    assert evaluate(*command, "--out", out) == 2, "a whole one is no new folder"


def test_an_ended_one_goes_on_behind_the_walls_too(
    trained: Path, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a third-party bundle the same command, as advised, was refused: the folder is not empty."""
    command = (
        trained,
        "--data",
        scans,
        "--sites",
        2,
        "--partition",
        "iid",
        "--out",
        tmp_path / "a",
    )
    assert evaluate(*command) == 0
    (tmp_path / "a" / "report.html").unlink()
    monkeypatch.setattr("medfl.cli.evaluate.hold", lambda _, use: walls._require_own_folder(use))
    assert evaluate(*command) == 0
    assert (tmp_path / "a" / "report.html").is_file()


def test_a_used_folder_is_refused_in_words_that_help(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(trained, "--out", trained) == 2
    assert "is not empty; a new or empty folder; give a new folder\n" in capsys.readouterr().err


def test_a_file_of_weights_needs_its_bundle(
    trained: Path, scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "model.safetensors"
    save_weights(weights, load_weights(trained / "weights.safetensors"))
    assert evaluate(weights, "--data", scans, "--out", tmp_path / "a") == 2
    assert "a bundle says which network they are of" in capsys.readouterr().err

    out = tmp_path / "b"
    assert evaluate(weights, "mednist", "--data", scans, "--sites", 1, "--out", out) == 0
    assert summary_of(out)["weights_sha256"] == summary_of(trained)["weights_sha256"]


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "bundle"
    assert main(["export", str(trained), "--out", str(out), "--formats", "torchscript"]) == 0
    return out


@pytest.mark.parametrize("kind", ["run", "bundle", "safetensors", "checkpoint", "torchscript"])
def test_a_model_of_any_kind_has_the_scores_of_its_run(
    kind: str, trained: Path, exported: Path, scans: Path, tmp_path: Path
) -> None:
    models = {
        "run": trained,
        "bundle": exported,
        "safetensors": trained / "weights.safetensors",
        "checkpoint": exported / "models" / "model.pt",
        "torchscript": exported / "models" / "model.ts",
    }
    out = tmp_path / "out"
    sites = ("--sites", 2, "--partition", "iid")
    assert evaluate(models[kind], "mednist", "--data", scans, *sites, "--out", out) == 0
    assert {**summary_of(out)["last"], "round": 1} == summary_of(trained)["last"]
    assert summary_of(out)["weights_sha256"] == summary_of(trained)["weights_sha256"]


def test_code_in_torchscript_is_not_run(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it loaded: the tensors are read by what the pickle says of them, buffers and constants left out."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("TorchScript is loaded")

    with stream(0, "network"):
        network = networks.build("small_cnn", 1, 6)
    network.register_buffer("mean", torch.zeros(3), persistent=False)
    file = tmp_path / "model.ts"
    torch.jit.script(network).save(file)
    monkeypatch.setattr(torch.jit, "load", never)
    names = network.state_dict()
    found = initial_weights.read(str(file), names.keys())
    assert found.keys() == names.keys()
    assert all(torch.equal(found[name], names[name]) for name in names)


def test_somebody_s_bundle_with_weights(tmp_path: Path) -> None:
    """In the style of the public zoo: its own network, data and metric."""
    bundle = ZOO["cls2d_glob_yaml"](tmp_path)
    opened = Bundle(str(bundle.path), bundle.overrides)
    with stream(3, "network"):
        weights = opened.network().state_dict()
    (bundle.path / "models").mkdir(exist_ok=True)
    torch.save({"model": weights}, bundle.path / "models" / "model.pt")
    config = []
    for name, value in bundle.overrides.items():
        config += ["--config", f"{name}={value}"]
    out = tmp_path / "out"
    sites = ("--sites", 2, "--partition", "iid")
    assert evaluate(bundle.path, *config, *sites, "--out", out) == 0
    assert summary_of(out)["weights_sha256"] == weights_sha256(weights)
    assert 0 <= summary_of(out)["last"]["balanced_accuracy"] <= 1


@pytest.mark.parametrize("runtime", ["monai-fl", pytest.param("flare", marks=pytest.mark.flare)])
def test_the_runtimes_find_the_same(
    runtime: str, trained: Path, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A centre without training images takes part, too; on MONAI FL it is the client's `evaluate` that scores."""
    asked = []

    def watched(site: MedflClientAlgo, data: Any, extra: Any = None) -> Any:
        asked.append((site.name, extra))
        return original(site, data, extra)

    original = MedflClientAlgo.evaluate
    monkeypatch.setattr(MedflClientAlgo, "evaluate", watched)
    data = ("--data", scans, "--partition", "counts:30/5,0/all")
    found = {}
    for name in ("simulator", runtime):
        out = tmp_path / name
        assert evaluate(trained, *data, "--runtime", name, "--out", out) == 0
        summary = summary_of(out)
        kept = {key: summary[key] for key in ("last", "sites", "weights_sha256", "run_hash")}
        tables = [(out / table).read_text() for table in ("sites.csv", "predictions.csv")]
        found[name] = (kept, tables)

    assert found["simulator"] == found[runtime]
    if runtime == "monai-fl":
        assert asked == [(name, {"section": "test"}) for name in ("site-1", "site-2")]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("TRAINED", "--partition", "centre:berlin=0/all"), "the centres of all"),
        (("nowhere",), "nowhere is not there"),
        (("TRAINED", "kvasir_v2"), "kvasir_v2 has the classes"),
    ],
)
def test_what_cannot_be_examined(
    arguments: tuple[str, ...], told: str, trained: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    named = [str(trained) if text == "TRAINED" else text for text in arguments]
    assert evaluate(*named, "--data", "phantom", "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out" / "run.json").exists()


def test_no_rounds_without_weights_are_refused(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["run", "mednist", "--data", str(scans), "--rounds", "0", "--out", str(out)]) == 2
    assert "--rounds 0; at least 1, or 0 to examine the weights" in capsys.readouterr().err


RECEIVED = (
    "what the server sends, with initial values of what each site keeps (of BatchNorm's mean and variance those of its "
    "own test images)"
)
GIVEN = {
    "fedavg": None,
    "ditto": "the global model, for want of one of its own",
    "fedper": RECEIVED,
    "fedbn": RECEIVED,
    "proxyfl": "nothing, for the server has something for each of its sites and nothing for others",
}
"""What is scored at a hospital that trained nothing."""


@pytest.mark.parametrize("method", GIVEN)
def test_a_hospital_that_only_tests(method: str, scans: Path, tmp_path: Path) -> None:
    """What it is given is scored there, and said; its images train nothing, and it has no model of its own."""
    out = tmp_path / "run"
    arguments = ["run", "mednist", "--data", str(scans), "--method", method, "--rounds", "1"]
    partition = ["--partition", "counts:10/5,10/5,0/all", "--config", "image_size=16"]
    if method == "fedbn":
        partition += ["--config", "network_name=resnet20"]
    assert main([*arguments, *partition, "--out", str(out), "--quiet"]) == 0
    rows = {
        row["site"]: row for row in csv.DictReader((out / "sites.csv").read_text().splitlines())
    }
    only_tests = rows["site-3"]
    assert only_tests["train"] == "0"
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert rounds[0]["cohort"] == ["site-1", "site-2"]
    given = GIVEN[method]
    assert summary_of(out).get("newcomers") == given
    for page in ((out / "report.html").read_text(), " ".join(result_table(out).split())):
        assert given is None or given in html.unescape(page)
    if method == "proxyfl":
        assert "received_accuracy" not in only_tests
        return

    assert 0 <= float(only_tests["received_accuracy"]) <= 1
    assert summary_of(out)["sites"]["count"] == 3, "what it receives counts, whatever the method"
    if method == "fedavg":
        assert not (out / "newcomers.csv").exists()
        return

    assert only_tests["personal_accuracy"] == ""
    run = RunFiles(out)
    assert run.newcomers is not None
    assert {*run.newcomers.sites} == {"site-3"}
    assert len(run.newcomers) == int(only_tests["test"])
    found = accuracy_of(run.newcomers)
    assert found == pytest.approx(float(only_tests["received_accuracy"]))


def accuracy_of(predictions: Predictions) -> float:
    values = predictions.cases.values
    return float((values["label"] == values["predicted"]).double().mean())
