"""`medfl calibrate`: what is written, and that predict, export and the report take it up."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import medfl
from medfl import datasets
from medfl.cli.verbs import main
from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.setting_values import WAYS
from medfl.data.prepared import Shard
from medfl.evaluation.conformal import class_scores, half_width
from medfl.evaluation.metrics import Cases
from medfl.policy.policy import Policy
from medfl.problem.tasks import KINDS
from medfl.problem.tasks.kind import Examined
from medfl.runs.calibrate import Calibration, Options, SiteSums, calibrate
from medfl.runs.launch import federate
from medfl.runs.predict import predict
from medfl.runs.result import load_run
from medfl.runtimes.monai_fl.client import MedflClientAlgo, exchange_object
from medfl.storage.files import load_weights
from tests.problem.test_task_kinds import parts_of
from tests.support.run_folders import Page

SITES = 2


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def promise_in(said: list[str]) -> str:
    return [line for line in said if "is promised of" in line][-1]


def row_of(document: Any, name: str, way: str = "pooled") -> Any:
    (row,) = [row for row in document["rows"] if (row["name"], row["way"]) == (name, way)]
    return row


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scans") / "data"
    datasets.write_phantom("mednist", folder, per_class=40, size=24)
    return folder


def trained(out: Path, scans: Path, **settings: Any) -> Path:
    requested = {
        "data": str(scans), "method": "fedavg", "sites": SITES, "rounds": 2, "partition": "iid", **settings,
    }  # fmt: skip
    config = {"network": "small_cnn", "image_size": 24}
    federate("mednist", config=config, requested=requested, out=out, jobs=1)
    return out


@pytest.fixture(scope="module")
def finished(scans: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "fedavg", scans)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_classification_from_run_to_bundle(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(run), "--coverage", "0.8", "--by", "site", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((run / "calibration.json").read_text())
    names = [row["name"] for row in document["rows"]]
    assert names == ["site-1"] * 3 + ["site-2"] * 3 + ["all sites"] * 3
    sites = load_run(run).run.partition.sites
    for name, sections in sites.items():
        for way in WAYS:
            row = row_of(document, name, way)
            assert row["calibration"] == len(sections["validate"])
            assert row["test"] == len(sections["test"])
            assert row["low"] <= row["coverage"] <= row["high"]

    # what the run itself recorded of its test images says the same
    predictions = load_run(run).predictions
    scores = class_scores(load_run(run).probabilities, "lac")
    threshold = row_of(document, "all sites")["threshold"]
    label = load_run(run).labels
    covered = scores[np.arange(len(label)), label] <= threshold
    assert row_of(document, "all sites")["coverage"] == pytest.approx(covered.mean())
    assert row_of(document, "all sites")["size"] == pytest.approx(
        (scores <= threshold).sum(1).mean()
    )
    assert [group["name"] for group in document["groups"]] == [*sites]
    assert document["groups"][0]["coverage"] == row_of(document, "site-1")["coverage"]
    assert "pooled" in (run / "calibration.md").read_text()
    assert len(rows_of(run / "calibration.csv")) == 9 + 2

    page = Page((run / "report.html").read_text())
    assert page.open == []
    assert "Promised and reached coverage" in page.text

    images = [str(load_run(run).plan.run.data.folder)]
    written = predict(run, images, tmp_path / "predicted")
    for row in written["predictions"]:
        p = np.array([[row[name] for name in load_run(run).classes]])
        taken = class_scores(p, "lac")[0] <= threshold
        expected = [name for name, has in zip(load_run(run).classes, taken, strict=True) if has]
        assert row["set"] == "|".join(expected)
        assert row["abstain"] == int(len(expected) in (0, 6))

    plain = predict(run, images, tmp_path / "plain", calibrated=False)
    assert "set" not in plain["predictions"][0]

    bundle = tmp_path / "bundle"
    assert main(["export", str(run), "--out", str(bundle), "--formats", "none"]) == 0
    assert (bundle / "docs" / "calibration.json").is_file()
    assert "Coverage 0.8 is promised" in (bundle / "docs" / "README.md").read_text()
    from_bundle = predict(bundle, images, tmp_path / "from_bundle")
    assert [row["set"] for row in from_bundle["predictions"]] == [
        row["set"] for row in written["predictions"]
    ]
    assert len(predictions) == len(label)


def test_a_host_of_monai_fl_calibrates_by_what_its_sites_tell(run: Path) -> None:
    expected = calibrate(load_run(run), Options(0.8))["rows"]
    result = load_run(run)
    federation = result.plan.federation()
    weights = Message({"weights": load_weights(run / "weights.safetensors")})
    sums = {}
    for name in federation.names:
        site = MedflClientAlgo(federation, name)
        site.initialize()
        tables = site.calibrate(exchange_object(weights.flat(), {"round": 2}))
        sums[name] = SiteSums.told(tables, result.run.seed)
        site.finalize()

    assert Calibration(sums, Options(0.8)).rows() == expected


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("jobs: [train]", "a calibration, which is a job to evaluate; train, as the policy says"),
        ("outbound: {keys: [weights]}", "'metrics/validate/sets' is not among its keys"),
    ],
)
def test_a_policy_counts_on_one_machine(
    policy: str, told: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(policy)
    assert main(["calibrate", str(run), "--policy", str(file)]) != 0
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1
    assert not (run / "calibration.json").exists()


def test_a_policy_s_least_count_is_that_of_the_command(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("outbound: {min_count: 3}\njobs: [evaluate]\n")
    plain = calibrate(load_run(run), Options(0.5, min_count=3))
    assert calibrate(load_run(run), Options(0.5), policy=Policy.read(file)) == plain


def test_on_one_machine_a_policy_s_noise_is_said_not_to_apply(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("outbound: {clip: 1.0, noise: 1.0, epsilon: 3, delta: 1.0e-5}\n")
    document = calibrate(load_run(run), Options(0.5), policy=Policy.read(file))
    (note,) = [note for note in document["notes"] if "nothing leaves" in note]
    assert "a job (medfl flare export --evaluate --calibrate SCORES) charges it" in note


def test_counts_at_several_thresholds_do_not_tell_of_few_cases_between_them(run: Path) -> None:
    """What two thresholds lose differs by a bin's cases or not at all."""
    rows = calibrate(load_run(run), Options(0.5, min_count=5))["rows"]
    lost: dict[str, list[int]] = {}
    for row in rows[:-3]:
        if "test" in row:
            lost.setdefault(row["name"], []).append(round((1 - row["coverage"]) * row["test"]))

    for counts in lost.values():
        for first in counts:
            for second in counts:
                assert first == second or abs(first - second) >= 5


def test_the_threshold_of_a_site(run: Path, scans: Path, tmp_path: Path) -> None:
    document = calibrate(load_run(run), Options(0.8, scores="aps", share="alone"))
    said: list[str] = []
    predict(run, scans, tmp_path / "here", site="site-2", say=said.append)
    threshold = row_of(document, "site-2", "alone")["threshold"]
    assert f"(alone, threshold {threshold:.4g})" in promise_in(said)
    # a hospital that the run does not know has the pooled one
    predict(run, scans, tmp_path / "new", say=said.append)
    assert f"(pooled, threshold {row_of(document, 'all sites')['threshold']:.4g})" in promise_in(
        said
    )
    with pytest.raises(InputError, match="a site that calibration.json has a threshold of"):
        predict(run, scans, tmp_path / "other", site="site-9")


def test_other_weights_are_not_calibrated(run: Path, scans: Path, tmp_path: Path) -> None:
    calibrate(load_run(run), Options(0.8))
    said: list[str] = []
    document = predict(run, scans, tmp_path / "best", which="best", say=said.append)
    assert any("is of another model, and left out" in line for line in said)
    assert "set" not in document["predictions"][0]


def test_it_is_the_same_twice(run: Path) -> None:
    first = calibrate(load_run(run), Options(0.8))
    text = (run / "calibration.json").read_bytes()
    assert calibrate(load_run(run), Options(0.8)) == first
    assert (run / "calibration.json").read_bytes() == text


def test_small_cells_are_not_told(run: Path) -> None:
    document = calibrate(load_run(run), Options(0.5, min_count=3))
    exact = calibrate(load_run(run), Options(0.5))
    for name in ("site-1", "site-2"):
        assert row_of(document, name)["threshold"] >= row_of(exact, name)["threshold"]

    assert any("the promise holds, sets grow" in note for note in document["notes"])
    for row in calibrate(load_run(run), Options(0.5, min_count=5))["rows"]:
        if "test" in row:
            lost = round((1 - row["coverage"]) * row["test"])
            assert min(lost, row["test"] - lost) >= 5

    with pytest.raises(
        InputError, match=r"0 calibration cases, pooled, at all sites.*validation images$"
    ):
        calibrate(load_run(run), Options(0.5, min_count=100))


def test_half_of_the_test_images_where_none_validate(scans: Path, tmp_path: Path) -> None:
    out = trained(tmp_path / "run", scans, partition="counts:60/20,0/all", rounds=1)
    document = calibrate(load_run(out), Options(0.5))
    row = row_of(document, "site-2")
    assert row["source"] == "half of test, seed 0"
    assert row["calibration"] + row["test"] == len(
        load_run(out).run.partition.sites["site-2"]["test"]
    )
    assert row_of(document, "site-1")["source"] == "validation"


@pytest.mark.parametrize(("task", "method"), [("multilabel", "fedavg"), ("regression", "ditto")])
def test_findings_and_numbers(task: str, method: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    medfl.run(parts_of(task), method, rounds=2, out=out)
    result = load_run(out)
    document = calibrate(result, Options(0.8))
    assert document["model"] == result.plan.method.judged
    total = row_of(document, "all sites")
    rows = result.predictions
    losses = []
    sizes = []
    for row in rows:
        if task == "regression":
            half = half_width(total["threshold"])
            losses.append(abs(row["target_age"] - row["predicted_age"]) > half)
            sizes.append(2 * half)
            continue

        present = [name for name in ("Effusion", "Mass") if row[f"label_{name}"] == 1]
        if present:
            called = [n for n in ("Effusion", "Mass") if 1 - row[f"p_{n}"] <= total["threshold"]]
            losses.append(1 - len(set(present) & set(called)) / len(present))
            sizes.append(len(called))

    assert total["test"] == len(losses)
    assert total["coverage"] == pytest.approx(1 - np.mean(losses))
    assert total["size"] == pytest.approx(np.mean(sizes))


@pytest.fixture(scope="module")
def lungs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lungs")
    datasets.write_phantom("lung_cxr", root / "data", per_class=60, size=24)
    requested = {
        "data": str(root / "data"),
        "method": "fedavg",
        "sites": 2,
        "rounds": 2,
        "partition": "iid",
    }
    config = {"network": "unet8", "image_size": 24}
    federate("lung_cxr", config=config, requested=requested, out=root / "run", jobs=1)
    return root / "run"


def test_masks_miss_no_more_than_promised(lungs: Path, tmp_path: Path) -> None:
    document = calibrate(load_run(lungs), Options(0.8))
    total = row_of(document, "all sites")
    result = load_run(lungs)
    bundle = result.plan.bundle
    prepared = bundle.prepared("test")
    shard = Shard.of(prepared, range(len(prepared)))
    network = result.network()
    kept = []
    sizes = []
    for x, y in shard.batches(1):
        with torch.no_grad():
            background = network(x).double().softmax(1)[0, 0]
        true = y[0].argmax(0) > 0 if y.shape[1] > 1 else y[0, 0] > 0
        mask = background <= total["threshold"]
        kept.append(float((mask & true).sum() / true.sum()))
        sizes.append(float(mask.sum() / true.sum()))

    assert total["coverage"] == pytest.approx(np.mean(kept), abs=1e-6)
    assert total["size"] == pytest.approx(np.mean(sizes), abs=1e-6)

    folder = Path(result.plan.run.data.folder)
    wide = predict(lungs, folder, tmp_path / "wide")["predictions"]
    plain = predict(lungs, folder, tmp_path / "plain", calibrated=False)["predictions"]
    for row in wide:
        assert row["abstain"] in (0, 1)
        mask = np.asarray(Image.open(tmp_path / "wide" / row["mask"]))
        assert set(np.unique(mask)) <= {0, 255}

    # here the plain masks have less than was promised
    share = next(key for key in plain[0] if key.endswith("_share"))
    shares = [row[share] for row in wide], [row[share] for row in plain]
    direction = np.sign(total["threshold"] - 0.5)
    assert np.sign(np.mean(shares[0]) - np.mean(shares[1])) == direction


def test_masks_of_a_new_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    datasets.write_phantom("lung_cxr", tmp_path / "data", per_class=60, size=24)
    pairs = "--images data/images --masks data/masks --classes lungs --size 24"
    assert main(["new", "mine", *pairs.split()]) == 0
    where = "--data data --sites 2 --quiet"
    train = f"run mine {where} --rounds 1 --local-epochs 1 --out run"
    assert main(train.split()) == 0
    assert main(f"evaluate run {where} --out examined".split()) == 0
    assert main(["calibrate", "examined", "--coverage", "0.8"]) == 0
    rows = json.loads((tmp_path / "examined" / "calibration.json").read_text())["rows"]
    assert 0.5 < rows[-1]["coverage"] <= 1
    assert main(["export", "examined", "--out", "exported", "--formats", "none"]) == 0
    assert main(["predict", "exported", "data/images", "--out", "masks"]) == 0
    assert "abstain" in rows_of(tmp_path / "masks" / "predictions.csv")[0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--coverage", "1.0"], "--coverage 1; a share above 0 and below 1"),
        (["--coverage", "0"], "--coverage 0; a share above 0 and below 1"),
        (["--coverage", "0.999"], "coverage 0.999 takes at least 999"),
        (["--scores", "raps"], "scores raps of a classification task; lac or aps"),
        (["--share", "none"], "--share 'none'; one of alone, pooled or shrunken"),
        (["--which", "first"], "last or best"),
        (["--by", "height"], "subgroups by 'height'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], told: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "report.html").read_bytes()
    assert main(["calibrate", str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1
    assert not (run / "calibration.json").exists()
    assert (run / "report.html").read_bytes() == before


def test_five_cases_are_too_few(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = trained(tmp_path / "run", scans, partition="counts:30/10,30/10", rounds=1)
    sites = load_run(out).run.partition.sites
    cases = len(sites["site-1"]["validate"])
    assert cases <= 5
    capsys.readouterr()
    assert main(["calibrate", str(out), "--share", "alone"]) == 2
    assert (
        f"{cases} calibration cases, alone, at site-1; coverage 0.9 takes at least 9"
        in capsys.readouterr().err
    )


def test_an_interrupted_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").unlink()
    assert main(["calibrate", str(run)]) == 2
    assert "which is not finished; a finished model is calibrated" in capsys.readouterr().err


def edited_case(run: Path) -> None:
    head, first, *lines = (run / "predictions.csv").read_text().splitlines()
    first = f"gone,{first.partition(',')[2]}"
    (run / "predictions.csv").write_text("\n".join([head, first, *lines]))


def edited_partition(run: Path) -> None:
    document = json.loads((run / "run.json").read_text())
    site = document["partition"]["sites"]["site-1"]
    site["validate"] = site["train"]
    (run / "run.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (edited_case, "predictions.csv without case"),
        (edited_partition, "whose settings give the run hash"),
    ],
)
def test_an_edited_run_is_not_calibrated(
    edit: Callable[[Path], None], told: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run)
    assert main(["calibrate", str(run), "--by", "site"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1
    assert not (run / "calibration.json").exists()


def test_a_damaged_file_is_named(run: Path, scans: Path, tmp_path: Path) -> None:
    calibrate(load_run(run), Options(0.8))
    file = run / "calibration.json"
    document = json.loads(file.read_text())
    document["rows"][0]["threshold"] = "wide"
    file.write_text(json.dumps(document))
    with pytest.raises(InputError, match="calibration.json has .* under rows"):
        predict(run, scans, tmp_path / "out")


@pytest.mark.slow
def test_a_hospital_without_a_personal_model_has_no_promise(scans: Path, tmp_path: Path) -> None:
    out = trained(tmp_path / "run", scans, method="ditto", partition="counts:60/20,0/all", rounds=1)
    document = calibrate(load_run(out), Options(0.5))
    assert document["model"] == "personal"
    tested = load_run(out).run.partition.sites["site-1"]["test"]
    assert row_of(document, "site-1")["test"] == len(tested)
    assert "site-2" not in {row["name"] for row in document["rows"]}
    said: list[str] = []
    predict(out, scans, tmp_path / "own", site="site-1", say=said.append)
    assert "(pooled, threshold" in promise_in(said)
    # the global model is another one
    plain = predict(out, scans, tmp_path / "global", say=said.append)
    assert "set" not in plain["predictions"][0]


def test_an_examined_model_is_calibrated(run: Path, scans: Path, tmp_path: Path) -> None:
    out = tmp_path / "examined"
    arguments = ["evaluate", str(run), "--data", str(scans), "--sites", "3", "--partition", "iid"]
    assert main([*arguments, "--out", str(out), "--quiet"]) == 0
    document = calibrate(load_run(out), Options(0.5))
    assert [row["name"] for row in document["rows"]][-4:] == ["site-3", *["all sites"] * 3]


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression"])
def test_outputs_that_are_no_numbers(task: str) -> None:
    values = {
        "probabilities": torch.full((2, 2), torch.nan),
        "prediction": torch.full((2, 1), torch.inf),
        "label": torch.zeros(2, dtype=torch.int64),
    }
    shard: Any = None
    evaluator: Any = lambda *_: Cases(("a", "b"), values)  # noqa: E731
    examined = Examined(evaluator, {}, torch.nn.Identity(), shard, torch.device("cpu"))
    with pytest.raises(InputError, match="sets of a network without finite pr"):
        KINDS[task].scored(examined, KINDS[task].set_scores[0])


def test_masks_of_a_bundles_own_postprocessing_and_other_tasks() -> None:
    anything: Any = None
    examined = Examined(anything, {}, torch.nn.Identity(), anything, torch.device("cpu"))
    with pytest.raises(
        InputError, match="sets of masks by its own postprocessing, without `scores: medfl` in fed"
    ):
        KINDS["segmentation"].scored(examined, "risk")
    with pytest.raises(InputError, match="sets of the task 'other'"):
        KINDS["other"].scored(examined, "")
