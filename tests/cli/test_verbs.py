"""The command line: every bad input is one line and exit code 2; good input leaves what the contract lists."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from medfl import datasets
from medfl.cli import catalogue, run, verbs as cli
from medfl.datasets.readers import download
from medfl.methods.fedavg import FedAvg
from medfl.problem import problem
from medfl.training.site import fit
from tests.cli.test_walls import landlock
from tests.support import forked

SMALL = (
    "--sites",
    "2",
    "--partition",
    "iid",
    "--rounds",
    "1",
    "--local-epochs",
    "1",
    "--batch-size",
    "8",
    "--jobs",
    "1",
)
CNN = ("--config", "network=small_cnn", "--config", "image_size=28")
LAYOUTS = "known layouts: chest_xray/{train,val,test}/{NORMAL,PNEUMONIA}/*.jpeg"

Refused = Callable[..., str]
Answer = Callable[..., dict[str, object]]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, without real data."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.delenv("MEDFL_DATA", raising=False)


@pytest.fixture(scope="module")
def chest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "pneumonia", tmp_path_factory.mktemp("chest") / "data", per_class=20, size=28
    )


@pytest.fixture(scope="module")
def endoscopy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "kvasir_v2", tmp_path_factory.mktemp("endoscopy") / "data", per_class=10, size=28
    )


@pytest.fixture(scope="module")
def finished(chest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds, with the Local reference and scores after one more local training."""
    out = tmp_path_factory.mktemp("finished") / "run"
    run = [
        "run",
        "pneumonia",
        "--data",
        str(chest),
        *SMALL,
        *CNN,
        "--rounds",
        "2",
        "--with-local",
        "--quiet",
    ]
    assert cli.main([*run, "--score-trained", "--out", str(out)]) == 0
    return out


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """Run a command that is bad input: exit code 2, one line with three parts, no traceback, nothing written."""

    def run(*arguments: object, out: Path | None = None) -> str:
        capsys.readouterr()
        before = sorted(tmp_path.rglob("*"))
        where = (
            ["--out", str(out or tmp_path / "out")]
            if arguments[:1] == ("run",) and "--out" not in arguments
            else []
        )
        assert cli.main([*map(str, arguments), *where]) == 2
        stdout, stderr = capsys.readouterr()
        errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert errors[0] == stderr.splitlines()[-1]
        assert errors[0].count("; ") >= 2
        assert "Traceback" not in stderr
        assert stdout == ""
        assert sorted(tmp_path.rglob("*")) == before
        return errors[0].removeprefix("error: ")

    return run


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    """Run a command with --json and return the one document that it prints."""

    def run(*arguments: object, code: int = 0) -> dict[str, object]:
        capsys.readouterr()
        assert cli.main([*map(str, arguments), "--json"]) == code
        document: dict[str, object] = json.loads(capsys.readouterr().out, parse_constant=_not_json)
        return document

    return run


def _not_json(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def _sees(line: str, *texts: str) -> None:
    for text in texts:
        assert text in line, line


# Bad input that can be told without the data


@pytest.mark.parametrize(
    ("extra", "texts"),
    [
        (("--method", "fedfoo"), ("method 'fedfoo'", "methods are asymfedavg, ccvr, central", "dotted path")),
        (("--method", "no.such.module"), ("method 'no.such.module'", "importable module")),
        (("--method", "medfl.core.errors"), ("module 'medfl.core.errors'", "METHOD = ")),
        (("--method", "fedprox", "--set", "nu=1"), ("option 'nu' of method 'fedprox'", "lite, margin, mu, mu2")),
        (("--method", "fedavg", "--set", "mu=1"), ("option 'mu' of method 'fedavg'", "its options are: none")),
        (("--method", "fedprox", "--set", "mu=-1"), ("mu=-1", "float >= 0")),
        (("--method", "fedprox", "--set", "mu=much"), ("mu=much", "float")),
        (("--method", "scaffold", "--set", "control=x"), ("control=x", "auto, difference or gradient")),
        (("--set", "mu"), ("--set mu", "NAME=VALUE")),
        (("--set", "=1"), ("--set =1", "NAME=VALUE")),
        (("--config", "network"), ("--config network", "NAME=VALUE")),
        (("--config", "imagesize=28"), ("'imagesize'", "image_size", "network", "learning_rate")),
        (("--config", "network=resnet19"), ("network 'resnet19'", "resnet18, resnet18s, resnet20", "small_cnn")),
        (("--config", "num_classes=0"), ("num_classes=0", ">= 1")),
        (("--config", "dataset_dir=/x"), ("--config dataset_dir=/x", "--data")),
        (("--config", "learning_rate=1"), ("--config learning_rate=1", "--lr")),
        (("--partition", "thirds"), ("partition 'thirds'", "iid | dirichlet:BETA | classes:C")),
        (("--partition", "dirichlet:0"), ("'dirichlet:0'", "BETA as a number above 0")),
        (("--partition", "dirichlet:nan"), ("'dirichlet:nan'",)),
        (("--partition", "classes:two"), ("'classes:two'", "whole numbers")),
        (("--partition", "shots:3,4"), ("'shots:3,4'", "shots:N,K,STD")),
        (("--partition", "file:"), ("'file:'", "file:PATH.csv")),
        (("--rounds", "0"), ("--rounds 0", "at least 1")),
        (("--rounds", "many"), ("--rounds many", "a whole number")),
        (("--rounds", "1.5"), ("--rounds 1.5", "a whole number")),
        (("--local-epochs", "0"), ("--local-epochs 0", "at least 1")),
        (("--batch-size", "-4"), ("--batch-size -4", "at least 1")),
        (("--sites", "0"), ("--sites 0", "at least 1")),
        (("--cohort", "1.5"), ("--cohort 1.5", "above 0 and at most 1")),
        (("--cohort", "0"), ("--cohort 0", "above 0 and at most 1")),
        (("--cohort", "nan"), ("--cohort nan", "above 0 and at most 1")),
        (("--lr", "-1"), ("--lr -1", "above 0")),
        (("--lr", "nan"), ("--lr nan", "above 0")),
        (("--lr", "inf"), ("--lr inf", "above 0")),
        (("--lr", "fast"), ("--lr fast", "a number")),
        (("--lr-decay", "0"), ("--lr-decay 0", "above 0 and at most 1")),
        (("--lr-decay", "1.1"), ("--lr-decay 1.1", "above 0 and at most 1")),
        (("--seed", "-1"), ("--seed -1", "at least 0")),
        (("--eval-every", "-1"), ("--eval-every -1", "at least 0")),
        (("--jobs", "x"), ("--jobs x", "auto or a whole number")),
        (("--jobs", "0"), ("--jobs 0", "auto or a whole number")),
        (("--jobs", "²"), ("--jobs ²", "auto or a whole number")),
        (("--threads", "0"), ("--threads 0", "at least 1")),
        (("--device", "tpu"), ("--device tpu", "auto, cpu, cuda or cuda:INDEX")),
        (("--device", "cuda:x"), ("--device cuda:x", "cuda:INDEX")),
        (("--device", "cpu:1"), ("--device cpu:1", "cuda:INDEX")),
        (("--device", "cuda:99"), ("--device cuda:99", "CUDA devices")),
        (("--runtime", "spark"), ("--runtime spark", "simulator")),
        (("--round", "3"), ("unknown --round 3", "did you mean --rounds?")),
        (("--clip", "3"), ("unknown --clip 3", "options; see medfl run --help")),  # not: did you mean --help?
        (("--seed", "3", "4"), ("no option takes 4", "options; see medfl run --help")),
        (("--data", "/no/such/folder"), ("/no/such/folder is not a folder", LAYOUTS)),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_the_images_are_read(
    refused: Refused,
    chest: Path,
    monkeypatch: pytest.MonkeyPatch,
    extra: tuple[str, ...],
    texts: tuple[str, ...],
) -> None:
    def read(*arguments: object, **named: object) -> None:
        raise AssertionError("images were read or hashed")

    monkeypatch.setattr(datasets, "checksum", read)
    monkeypatch.setattr(problem, "prepare", read)
    _sees(refused("run", "pneumonia", "--data", chest, *SMALL, *CNN, *extra), *texts)


def test_a_verb_or_choice_that_is_not_there_is_named_with_the_nearest(refused: Refused) -> None:
    _sees(refused("evalute", "runs/a"), "VERB 'evalute'", "did you mean evaluate?")
    _sees(refused("site", "chekc"), "ACTION 'chekc'", "did you mean check?")


def test_cuda_without_a_cuda_device(
    refused: Refused, chest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    line = refused("run", "pneumonia", "--data", chest, *SMALL, "--device", "cuda")
    _sees(line, "--device cuda", "0 CUDA devices", "cpu or auto")


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (
            ("run", "pneumonie"),
            ("bundle 'pneumonie'", "ham10000, hippocampus, isic19", "medfl bundles"),
        ),
        (("run",), ("no bundle", "medfl bundles")),
        (("run", "--resume"), ("holds no run", "start without --resume")),
        (
            ("run", "--from", "gone.json"),
            ("gone.json: it cannot be read: No such file", "as medfl wrote it"),
        ),
        (("bundles", "x"), ("bundle 'x'", "ham10000, hippocampus, isic19")),
        (("methods", "x"), ("method 'x'", "methods are asymfedavg")),
        (("report", "gone"), ("gone is not there", "check the path")),
        (("report", "."), ("has no run.json", "medfl run")),
        (("data", "make", "x", "--out", "new"), ("data set 'x'", "ham10000")),
        (("data", "make", "mednist", "--out", "new", "--size", "3"), ("of 3 pixels", "from 16")),
        (
            ("data", "make", "mednist", "--out", "new", "--per-class", "one"),
            ("--per-class one", "whole number"),
        ),
        (("data", "make", "mednist"), ("required: --out", "--out DIR")),
        (
            ("data", "check", "mednist", "--data", "gone"),
            ("gone is not a folder", "known layouts", "mednist_64.npz"),
        ),
        (("data", "check", "mednist"), ("MEDFL_DATA is not set", "known layouts")),
        (
            ("data", "fetch", "ham10000", "--out", "new"),
            ("ham10000 cannot be fetched", "Dataverse", "put it into new"),
        ),
        (("data",), ("ACTION", "medfl data --help")),
        (("dance",), ("'dance'", "run, methods")),
        ((), ("VERB", "medfl --help")),
    ],
)
def test_bad_verbs_names_and_folders(
    refused: Refused, arguments: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    _sees(refused(*arguments), *texts)


def test_a_folder_that_is_no_bundle(refused: Refused, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    (folder / "configs").mkdir(parents=True)
    _sees(refused("run", folder), str(folder), "configs/train.json")
    (folder / "configs" / "train.json").write_text("{")
    _sees(refused("run", folder), str(folder / "configs" / "train.json"))
    (folder / "configs" / "train.json").write_text('{"network_def": 1}')
    _sees(refused("run", folder), str(folder / "configs" / "train.json"), "train#trainer")


def test_the_folder_of_another_data_set(refused: Refused, endoscopy: Path) -> None:
    _sees(
        refused("run", "pneumonia", "--data", endoscopy),
        f"{endoscopy} holds no pneumonia data",
        LAYOUTS,
    )


# The run folder


def test_out_that_is_in_use(
    refused: Refused, chest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "checksum", lambda *_: pytest.fail("images were hashed"))
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("dear")
    _sees(
        refused("run", "pneumonia", "--data", chest, *SMALL, out=out),
        f"--out {out}",
        "not empty",
        "--resume",
    )
    file = out / "thesis.txt"
    _sees(
        refused("run", "pneumonia", "--data", chest, *SMALL, out=file),
        f"--out {file}",
        "empty folder",
    )
    assert file.read_text() == "dear"


def test_out_that_cannot_be_made(
    refused: Refused, chest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "checksum", lambda *_: pytest.fail("images were hashed"))
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "run"
    _sees(
        refused("run", "pneumonia", "--data", chest, *SMALL, *CNN, out=out),
        f"--out {out}",
        "give a writable place",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_out_that_is_read_only(refused: Refused, chest: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    out = tmp_path / "locked" / "run"
    _sees(
        refused("run", "pneumonia", "--data", chest, *SMALL, *CNN, out=out),
        f"--out {out}",
        "give a writable place",
    )


def test_resume_with_other_settings(refused: Refused, finished: Path) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    line = refused("run", "--resume", "--batch-size", "4", out=finished)
    _sees(
        line,
        "--resume with other settings: batch_size: 4 was 8",
        "only --rounds may grow",
        "another folder",
    )
    _sees(
        refused("run", "--resume", "--method", "scaffold", out=finished),
        "method",
        "scaffold",
        "fedavg",
    )
    _sees(
        refused("run", "--resume", "--rounds", "1", out=finished), "--rounds 1", "2 rounds are done"
    )
    _sees(refused("run", "--resume", "--rounds", "0", out=finished), "--rounds 0")
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}


def test_resume_without_out(refused: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--resume"]) == 2
    _sees(capsys.readouterr().err, "--resume without --out", "add --out DIR")


@pytest.mark.parametrize("text", ["", '{"method": "fedavg"', "[]", '{"method": "fedavg"}', "null"])
def test_from_a_damaged_record(refused: Refused, tmp_path: Path, text: str) -> None:
    record = tmp_path / "run.json"
    record.write_text(text)
    _sees(refused("run", "--from", record), "run.json", "medfl wrote")


def test_from_takes_no_other_settings(refused: Refused, finished: Path) -> None:
    _sees(
        refused("run", "--from", finished / "run.json", "--rounds", "9"), "--from", "leave them out"
    )


def test_from_with_other_data(refused: Refused, finished: Path, tmp_path: Path) -> None:
    other = datasets.write_phantom("pneumonia", tmp_path / "other", per_class=20, size=28, seed=1)
    line = refused("run", "--from", finished / "run.json", "--data", other)
    _sees(line, str(other), "phantom data with checksum", "--data")


# Bad data


def test_more_sites_than_samples(refused: Refused, chest: Path) -> None:
    line = refused("run", "pneumonia", "--data", chest, *SMALL, *CNN, "--sites", "29")
    _sees(line, "29 sites for 28 training images", "at most 28 sites", "lower --sites")


def test_a_partition_that_the_data_cannot_carry(refused: Refused, chest: Path) -> None:
    run = ("run", "pneumonia", "--data", chest, *SMALL, *CNN)
    _sees(refused(*run, "--partition", "classes:3"), "'classes:3' of 2 classes", "C at most 2")
    _sees(
        refused(*run, "--partition", "centre"),
        "2 sites with partition 'centre'",
        "it has 1: guangzhou",
    )


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        (
            "loss=3",
            ("loss=3: a step of training fails with TypeError: 'int' object is not callable",),
        ),
        (
            "loss=$torch.nn.MSELoss()",
            ("loss=$torch.nn.MSELoss()", "network, loss and images of the bundle go together"),
        ),
        ("image_size=4", ("image_size=4", "Output size is too small")),
        ("num_classes=7", ("7 outputs", "bundle 'pneumonia' has 2 classes: normal, pneumonia")),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_overrides_with_which_no_step_can_be_made(
    refused: Refused, chest: Path, config: str, texts: tuple[str, ...]
) -> None:
    run = ("run", "pneumonia", "--data", chest, *SMALL, *CNN, "--config", config)
    _sees(
        refused(*run),
        f"--config network=small_cnn, image_size={'4' if 'size' in config else '28'}",
        *texts,
    )
    _sees(refused(*run, "--with-local"), *texts)


def test_an_unknown_split(refused: Refused, chest: Path) -> None:
    line = refused("run", "pneumonia", "--data", chest, *SMALL, *CNN, "--config", "split=thirds")
    _sees(line, "split 'thirds'", "splits there: official")


@pytest.mark.parametrize(
    ("rows", "texts"),
    [
        (
            ["train_000000,a", "val_000000,b"],
            ("leaves b without training images", "every site needs at least one"),
        ),
        (["train_000000,a", "nobody,a"], ("line 3: id 'nobody' is unknown",)),
        (["train_000000,a", "train_000000,b"], ("'train_000000' has a second site",)),
        (["train_000000,"], ("line 2: site ''",)),
        ([], ("leaves everybody without training images",)),
        (None, ("No such file", "id,site")),
    ],
)
def test_a_partition_file_that_is_wrong(
    refused: Refused, chest: Path, tmp_path: Path, rows: list[str] | None, texts: tuple[str, ...]
) -> None:
    table = tmp_path / "sites.csv"
    if rows is not None:
        table.write_text("\n".join(["id,site", *rows]) + "\n")
    run = (
        "run",
        "pneumonia",
        "--data",
        chest,
        "--rounds",
        "1",
        *CNN,
        "--partition",
        f"file:{table}",
    )
    _sees(refused(*run), str(table), *texts)


def _packed(folder: Path, target: Path) -> Path:
    """Pack a plain data set into the zip archive that the layout knows."""
    target.mkdir()
    with zipfile.ZipFile(target / "kvasir-dataset-v2.zip", "w") as packed:
        for path in sorted(folder.rglob("*.jpg")):
            packed.write(path, path.relative_to(folder))
    return target


def _first_image(folder: Path) -> Path:
    return sorted(folder.rglob("*.jpg"))[0]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "grey"])
def test_a_damaged_or_odd_image_is_named(
    refused: Refused,
    capsys: pytest.CaptureFixture[str],
    endoscopy: Path,
    tmp_path: Path,
    damage: str,
    zipped: bool,
) -> None:
    folder = Path(shutil.copytree(endoscopy, tmp_path / "plain"))
    image = _first_image(folder)
    if damage == "grey":
        Image.open(image).convert("L").save(image)
    else:
        whole = image.read_bytes()
        image.write_bytes(
            {"truncated": whole[: len(whole) // 2], "text": b"not an image", "empty": b""}[damage]
        )
    data = _packed(folder, tmp_path / "zipped") if zipped else folder
    reason = "has 1 channels; the data set has 3" if damage == "grey" else "cannot be read"
    line = refused("run", "kvasir_v2", "--data", data, *SMALL, *CNN)
    _sees(line, image.name, reason)
    assert f"{image.parent.name}/{image.name}" in line
    assert cli.main(["data", "check", "kvasir_v2", "--data", str(data)]) == 2
    stdout, stderr = capsys.readouterr()
    assert image.name in stdout
    assert "the data cannot be used as they are" in stdout
    assert stderr.count("error: ") == 1
    assert image.name in stderr


def test_a_damaged_zip_archive_is_named(refused: Refused, endoscopy: Path, tmp_path: Path) -> None:
    archive = _packed(endoscopy, tmp_path / "zipped") / "kvasir-dataset-v2.zip"
    archive.write_bytes(archive.read_bytes()[:-200])
    _sees(refused("run", "kvasir_v2", "--data", archive.parent, *SMALL), str(archive))


def test_a_class_that_is_absent_everywhere(
    refused: Refused, endoscopy: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(endoscopy, tmp_path / "plain"))
    gone = _first_image(folder).parent
    shutil.rmtree(gone)
    line = refused("run", "kvasir_v2", "--data", folder, *SMALL, *CNN)
    _sees(
        line,
        f"no training image of class '{gone.name}' (label 0)",
        "every class needs at least one",
    )


def test_a_label_outside_the_classes(refused: Refused, chest: Path, tmp_path: Path) -> None:
    arrays = dict(np.load(chest / "pneumoniamnist.npz"))
    arrays["train_labels"][3] = 2
    np.savez(tmp_path / "pneumoniamnist.npz", **arrays)
    line = refused("run", "pneumonia", "--data", tmp_path, *SMALL, *CNN)
    _sees(line, "train_labels[3] is 2", "the labels are 0 to 1", "medfl data check pneumonia")


# Failing while running


def test_nan_loss_keeps_the_last_round_and_can_be_resumed(
    chest: Path,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(self, model, site, state, down):  # noqa: ANN001, ANN202
        return fit(
            model,
            site,
            objective=lambda net, x, y: site.loss(net(x), y) * (1 if site.round < 2 else np.nan),
        )

    run = [
        "run",
        "pneumonia",
        "--data",
        str(chest),
        *SMALL,
        *CNN,
        "--rounds",
        "2",
        "--out",
        str(tmp_path / "run"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "train", train)
        assert cli.main(run) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    _sees(
        errors[0],
        "site 'site-1', round 2: the training loss is nan at step 1",
        "the last good round is kept",
    )
    assert json.loads((tmp_path / "run" / "state" / "manifest.json").read_text())["round"] == 1
    assert cli.main([*run, "--resume"]) == 0
    assert _summary(tmp_path / "run")["weights_sha256"] == _summary(finished)["weights_sha256"]


@pytest.mark.parametrize(
    ("number", "code", "said", "flags"),
    [
        (signal.SIGINT, 130, "interrupted: ", []),
        (signal.SIGTERM, 143, "ended by SIGTERM: ", []),
        pytest.param(signal.SIGTERM, 143, "ended by SIGTERM: ", ["--sandbox"], marks=landlock),
    ],
)
def test_ctrl_c_and_sigterm_end_in_a_line_and_the_run_can_be_resumed(
    chest: Path,
    tmp_path: Path,
    number: signal.Signals,
    code: int,
    said: str,
    flags: list[str],
) -> None:
    """Inside walls the keeper is sent the signal, and the worker ends by it."""
    out = tmp_path / "run"
    run = ["run", "pneumonia", "--data", str(chest), *SMALL, *CNN, "--out", str(out)]
    words = [*run, *flags, "--rounds", "100000"]
    process = forked.start(
        lambda: cli.main(words, own_process=bool(flags)), output=tmp_path / "printed"
    )
    deadline = time.monotonic() + 60
    while (
        not (out / "state" / "manifest.json").exists()
        and process.is_alive()
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.join(60)
    printed = (tmp_path / "printed").read_text()
    assert process.exitcode == code, printed
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].startswith(said)
    assert "--resume" in printed.splitlines()[-1]
    if number == signal.SIGTERM:
        return  # what is left on the disk is what is left of the other

    rounds = json.loads((out / "state" / "manifest.json").read_text())["round"] + 1
    assert cli.main([*run, "--rounds", str(rounds), "--resume", "--quiet"]) == 0
    assert cli.main([*run[:-1], str(tmp_path / "whole"), "--rounds", str(rounds), "--quiet"]) == 0
    assert _summary(out)["weights_sha256"] == _summary(tmp_path / "whole")["weights_sha256"]


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["--debug", "methods", "x"], ["methods", "x", "--debug"]):
        assert cli.main(command) == 2
        stderr = capsys.readouterr().err
        assert "Traceback (most recent call last)" in stderr
        assert stderr.splitlines()[-1].startswith("error: method 'x'")


def test_a_fault_of_our_own_is_not_dressed_as_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_methods", lambda options: {}["gone"])
    with pytest.raises(KeyError):
        cli.main(["methods"])


# What a run leaves


SUMMARY = (
    "method", "bundle", "seed", "rounds", "status", "data_source", "last", "best", "sites", "bytes_up", "bytes_down",
    "seconds", "seconds_per_round", "peak_memory_bytes", "weights_sha256", "run_hash",
)  # fmt: skip
METRICS = {"accuracy", "balanced_accuracy", "f1_macro", "auroc"}
ROUND = {
    "round", "cohort", "seconds", "seconds_train", "seconds_server", "seconds_eval", "bytes_up", "bytes_down",
    "train_loss", "val", "sites",
}  # fmt: skip
RUN = {
    "medfl", "bundle", "bundle_path", "task", "classes", "key_metric", "method", "options", "config", "data",
    "partition", "site_class_counts", "cohort", "rounds", "local_epochs", "batch_size", "lr", "lr_decay", "seed",
    "device", "amp", "threads", "versions", "command", "run_hash",
}  # fmt: skip


def _summary(out: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads((out / "summary.json").read_text())
    return document


@pytest.fixture
def run_files(finished: Path) -> Path:
    """The run folder with every file of the contract in it."""
    for name in (
        "weights.safetensors",
        "best.safetensors",
        "report.html",
        "state/manifest.json",
        "local/summary.json",
    ):
        assert (finished / name).stat().st_size > 0
    assert [*(finished / "events").glob("events.out.tfevents.*")]
    return finished


def test_the_run_folder_is_as_the_contract_says(run_files: Path) -> None:
    run, summary = json.loads((run_files / "run.json").read_text()), _summary(run_files)
    assert run.keys() >= RUN
    assert run["data"].keys() >= {"source", "folder", "checksum", "split", "counts"}
    assert run["data"]["source"] == summary["data_source"] == "phantom"
    assert run["command"].startswith("medfl run pneumonia --data ")
    assert summary.keys() >= set(SUMMARY)
    assert summary["run_hash"] == run["run_hash"]
    assert summary["status"] == "finished"
    for when in ("last", "best"):
        assert summary[when].keys() >= METRICS | {"round"}
    assert summary["sites"].keys() >= {"mean", "sd", "worst"}
    held = run["partition"]["sites"]
    assert [*held] == ["site-1", "site-2"]
    assert {section: sum(len(site[section]) for site in held.values()) for section in held["site-1"]} == {
        "train": 28, "validate": 4, "test": 8,
    }  # fmt: skip


def test_rounds_and_tables_are_as_the_contract_says(run_files: Path) -> None:
    rounds = [
        json.loads(line, parse_constant=_not_json)
        for line in (run_files / "rounds.jsonl").read_text().splitlines()
    ]
    assert [entry["round"] for entry in rounds] == [1, 2]
    for entry in rounds:
        assert entry.keys() >= ROUND
        assert entry["val"].keys() >= METRICS
        assert entry["sites"].keys() == {"site-1", "site-2"}
        parts = ("seconds_train", "seconds_server", "seconds_eval")
        assert sum(entry[part] for part in parts) == pytest.approx(entry["seconds"])
    with (run_files / "sites.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]][:6] == [
        "site",
        "train",
        "validate",
        "test",
        "train_normal",
        "train_pneumonia",
    ]
    for kind in ("received", "personal", "local"):
        assert {f"{kind}_{metric}" for metric in METRICS} <= rows[0].keys()
    assert sum(int(row["train"]) for row in rows) == 28
    with (run_files / "predictions.csv").open() as file:
        predictions = list(csv.DictReader(file))
    assert [*predictions[0]] == ["id", "site", "label", "predicted", "p_normal", "p_pneumonia"]
    assert len(predictions) == 8
    for row in predictions:
        assert float(row["p_normal"]) + float(row["p_pneumonia"]) == pytest.approx(1, abs=1e-5)


def test_run_prints_one_document_and_logs_beside_it(
    chest: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert (
        cli.main(
            ["run", "pneumonia", "--data", str(chest), *SMALL, *CNN, "--json", "--out", str(out)]
        )
        == 0
    )
    stdout, stderr = capsys.readouterr()
    document = json.loads(stdout, parse_constant=_not_json)
    assert document == {**_summary(out), "folder": str(out)}
    _sees(stderr, "8 tensors leave each site, 0 stay", "round 1/1: loss ", "site-1")


def test_run_prints_a_table_and_where_it_lies(
    chest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert (
        cli.main(
            ["run", "pneumonia", "--data", str(chest), *SMALL, *CNN, "--out", str(out), "--quiet"]
        )
        == 0
    )
    stdout, stderr = capsys.readouterr()
    assert stderr == ""
    lines = stdout.splitlines()
    assert lines[-1].startswith("PHANTOM data")
    assert f"report: {out / 'report.html'}" in lines
    assert f"run folder: {out}" in lines


def test_without_out_the_folder_is_named_after_the_run(chest: Path) -> None:
    run = [
        "run",
        "pneumonia",
        "--data",
        str(chest),
        *SMALL,
        *CNN,
        "--quiet",
        "--method",
        "fedprox",
        "--set",
        "mu=1e-3",
    ]
    assert cli.main([*run, "--seed", "4"]) == 0
    record = json.loads(Path("runs/pneumonia-fedprox-4/run.json").read_text())
    assert record["options"] == {"mu": 0.001}


def test_a_recorded_run_is_repeated(finished: Path, tmp_path: Path, answer: Answer) -> None:
    record = tmp_path / "record.json"
    shutil.copy(finished / "run.json", record)
    (tmp_path / "run.json").write_text("another file, which is not asked for")
    again = answer("run", "--from", record, "--out", tmp_path / "again", "--jobs", "1")
    assert again["weights_sha256"] == _summary(finished)["weights_sha256"]
    assert again["run_hash"] == _summary(finished)["run_hash"]


def test_mixed_precision_on_cpu(chest: Path, tmp_path: Path, answer: Answer) -> None:
    summary = answer(
        "run", "pneumonia", "--data", chest, *SMALL, *CNN, "--amp", "--out", tmp_path / "run"
    )
    assert np.isfinite(summary["last"]["loss"])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["amp"] is True


def test_without_data_a_phantom_is_used_and_said_loudly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, chest: Path
) -> None:
    from medfl.bundle import open as opening

    monkeypatch.setattr(opening, "phantom_folder", lambda name: chest)
    assert cli.main(["run", "pneumonia", *SMALL, *CNN, "--out", str(tmp_path / "run")]) == 0
    stdout, stderr = capsys.readouterr()
    _sees(stderr, "NO REAL DATA for pneumonia", "PHANTOM")
    assert stdout.splitlines()[-1].startswith("PHANTOM data")


# The other verbs


def test_data_make_and_check(
    tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    made = answer(
        "data",
        "make",
        "mednist",
        "--out",
        folder,
        "--per-class",
        "10",
        "--size",
        "16",
        "--seed",
        "3",
    )
    assert made == {"name": "mednist", "folder": str(folder), "source": "phantom"}
    report = answer("data", "check", "mednist", "--data", folder)
    assert (report["ok"], report["images"], report["source"]) == (True, 60, "phantom")
    assert cli.main(["data", "check", "mednist", "--data", str(folder)]) == 0
    text = capsys.readouterr().out
    _sees(text, "PHANTOM: drawn images", "HeadCT", "the data can be used")
    assert max(map(len, text.splitlines())) <= 100
    assert cli.main(["data", "make", "mednist", "--out", str(folder)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_data_fetch_without_a_connection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*arguments: object, **named: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(download.urllib.request, "urlopen", offline)
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    assert cli.main(["data", "fetch", "pneumonia", "--out", str(tmp_path / "new")]) == 1
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    _sees(stderr, "licence: CC BY 4.0")
    assert stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in stderr
    assert not [*(tmp_path / "new").iterdir()]


def test_report_is_written_again(finished: Path, answer: Answer) -> None:
    before = (finished / "report.html").read_bytes()
    (finished / "report.html").unlink()
    assert answer("report", finished, finished / "local")["reports"] == [
        str(finished / "report.html"), str(finished / "local" / "report.html"),
    ]  # fmt: skip
    assert (finished / "report.html").read_bytes() == before
    (finished / "local" / "report.html").unlink()


def test_methods_and_bundles(answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    assert {"fedavg", "scaffold"} <= {entry["name"] for entry in answer("methods")["methods"]}
    assert [option["name"] for option in answer("methods", "fedprox")["options"]] == ["mu"]
    assert {"pneumonia", "ham10000"} <= {entry["name"] for entry in answer("bundles")["bundles"]}
    assert answer("bundles", "pneumonia")["class_names"] == ["normal", "pneumonia"]
    for command in (["methods"], ["methods", "ditto"], ["bundles"], ["bundles", "isic19"]):
        assert cli.main(command) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 100


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("medfl 0.")
    for verb in (
        [],
        ["run"],
        ["methods"],
        ["bundles"],
        ["data"],
        ["data", "make"],
        ["data", "fetch"],
        ["report"],
    ):
        assert cli.main([*verb, "--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith("usage: medfl")
        assert max(map(len, text.splitlines())) <= 100


def test_the_examples_in_the_help_are_commands() -> None:
    examples = [
        line.split()
        for line in (cli.EXAMPLES + run.EXAMPLES).splitlines()
        if line.startswith("  medfl ")
    ]
    assert len(examples) >= 5
    for words in examples:
        cli.parser().parse_args(words[1:])
