"""What the two minor versions before wrote is read: a run's folder, a site's policy, a FLARE job and a startup kit.

tests/upgrade/VERSION was written by that version's own commands: SCAFFOLD over two sites, two rounds, a network of
1,400 numbers, drawn pictures. In its files the folder is called @HERE@. 0.6.0/mednist has a run of the shipped bundle
of that name on its phantom, and the bundle as it was then, but for its embeddings, which are those of today.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from medfl import cli, datasets, load_run
from medfl.bundle.files import shipped_folders
from medfl.core.release import pip_install
from medfl.storage.files import load_weights
from tests.support.phantoms import PER_CLASS

KEPT = Path(__file__).resolve().parents[1] / "upgrade"
VERSIONS = ("0.5.0", "0.6.0")


@pytest.fixture(params=VERSIONS)
def old(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what a version wrote, with its pictures, as the current folder."""
    shutil.copytree(KEPT / request.param, tmp_path, dirs_exist_ok=True)
    shutil.copytree(KEPT / "pictures", tmp_path / "pictures")
    for name in ("run/run.json", "kit/local/medfl.yaml"):
        path = tmp_path / name
        path.write_text(path.read_text().replace("@HERE@", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def old_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run of the shipped bundle, beside the bundle's folder of that version, as the current folder."""
    shutil.copytree(KEPT / "0.6.0" / "mednist", tmp_path, dirs_exist_ok=True)
    shutil.copytree(shipped_folders()["mednist"] / "embeddings", tmp_path / "bundle" / "embeddings")
    path = tmp_path / "run" / "run.json"
    path.write_text(path.read_text().replace("@HERE@", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def picture(folder: Path) -> str:
    """Draw a picture and return its path."""
    folder.mkdir()
    Image.fromarray(np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)).save(folder / "a.png")
    return str(folder / "a.png")


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_weights(path)


def close(a: Path, b: Path) -> bool:
    """Whether weights agree as far as two kinds of processor do."""
    ours, theirs = weights(a), weights(b)
    return ours.keys() == theirs.keys() and all(
        np.allclose(ours[name].numpy(), theirs[name].numpy(), atol=1e-4) for name in ours
    )


def test_a_run_is_read_repeated_and_continued(old: Path) -> None:
    before = load_run("run")
    assert before.summary["rounds"] == 2
    assert before.run.run_hash == json.loads((old / "run" / "run.json").read_text())["run_hash"]
    assert cli.main(["report", "run"]) == 0
    assert (
        cli.main(
            ["predict", "run", str(next((old / "pictures").rglob("*.png"))), "--out", "predicted"]
        )
        == 0
    )
    assert cli.main(["run", "--from", "run/run.json", "--out", "again"]) == 0
    assert close(old / "again" / "weights.safetensors", old / "run" / "weights.safetensors")
    assert cli.main(["run", "--resume", "--out", "run", "--rounds", "3"]) == 0
    after = load_run("run")
    assert (after.summary["rounds"], len(after.rounds)) == (3, 3)
    assert after.rounds[0]["train_loss"] == before.rounds[0]["train_loss"]


def test_a_bundle_that_trains_one_network_and_infers_with_another_is_not_exported(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", "run", "--formats", "torchscript", "--out", "exported"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(
        "error: bundle 'bundle', where configs/inference.yaml builds another network than training"
    )
    assert not (old / "exported").exists()


def test_a_run_of_a_shipped_bundle_that_has_changed_is_reported_and_predicts_with_todays(
    old_shipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", "run"]) == 0
    assert cli.main(["predict", "run", picture(old_shipped / "new"), "--out", "predicted"]) == 0
    assert "bundle 'mednist' is not that of medfl 0.6.0" in capsys.readouterr().err
    assert (old_shipped / "predicted" / "predictions.csv").is_file()


@pytest.mark.parametrize("recorded", [False, True])
def test_a_run_of_a_shipped_bundle_that_has_changed_is_exported(
    old_shipped: Path, capsys: pytest.CaptureFixture[str], recorded: bool
) -> None:
    """With today's bundle, or with its own where that still lies in the folder that the record names."""
    if recorded:
        path = old_shipped / "run" / "run.json"
        path.write_text(path.read_text().replace("bundles/mednist", "bundle"))
    assert cli.main(["export", "run", "--formats", "torchscript", "--out", "exported"]) == 0
    assert ("is not that of medfl 0.6.0" in capsys.readouterr().err) != recorded
    text = (old_shipped / "exported" / "configs" / "medfl" / "train.yaml").read_text()
    assert ("network: two_conv_18" in text) == recorded
    assert ("network_name: two_conv_18" in text) != recorded
    assert f"`{pip_install()}`" in (old_shipped / "exported" / "docs" / "README.md").read_text()


@pytest.mark.slow
def test_a_run_of_a_shipped_bundle_that_has_changed_goes_on_with_its_folder(
    old_shipped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its phantom is drawn otherwise today, which is told; after that it is taken for the recorded one."""
    monkeypatch.delitem(PER_CLASS, "mednist")  # as many images as the recorded one had
    monkeypatch.setenv("XDG_CACHE_HOME", str(old_shipped / "cache"))
    for command in (
        ["run", "--resume", "--out", "run", "--rounds", "3"],
        ["run", "--from", "run/run.json"],
    ):
        assert cli.main(command) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert "bundle 'mednist' has changed since the run in run" in said
        assert (
            "name bundles/mednist of medfl 0.6.0, unpacked to FOLDER: medfl run FOLDER --resume --out run"
            in said
        )
    recorded = load_run("run").run.data.checksum
    assert cli.main(["run", "bundle", "--from", "run/run.json", "--out", "again"]) == 2
    assert (
        f"the run used phantom data with checksum {recorded[:12]}; give the same data"
        in capsys.readouterr().err
    )
    monkeypatch.setattr(datasets, "checksum", lambda *_: recorded)
    assert cli.main(["run", "bundle", "--from", "run/run.json", "--out", "again"]) == 0
    assert cli.main(["run", "bundle", "--resume", "--out", "run", "--rounds", "3"]) == 0
    after = load_run("run")
    assert (after.summary["rounds"], after.run.bundle_path) == (3, str(old_shipped / "bundle"))
    assert cli.main(["run", "--resume", "--out", "run", "--rounds", "4"]) == 0
    assert cli.main(["run", "pneumonia", "--from", "again"]) == 2
    assert "that of pneumonia has another configuration hash" in capsys.readouterr().err


def test_a_record_of_a_newer_version_is_refused_and_says_which(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting that this version does not know is part of the hash of the one that wrote it."""
    path = old / "run" / "run.json"
    document = {**json.loads(path.read_text()), "medfl": "0.9.0", "run_hash": "f" * 64}
    path.write_text(json.dumps(document))
    assert cli.main(["run", "--resume", "--out", "run", "--rounds", "3"]) == 2
    assert "read it with the medfl that wrote it, 0.9.0" in capsys.readouterr().err
    assert not (old / "run" / "state" / "000003-server.safetensors").exists()


def test_a_policy_still_accepts_what_it_pinned(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["site", "inspect", "bundle", "--policy", "policy.yaml"]) == 0
    assert "ACCEPTED" in capsys.readouterr().out
    (old / "bundle" / "docs" / "README.md").write_text("another")
    assert cli.main(["site", "inspect", "bundle", "--policy", "policy.yaml"]) == 2


def test_a_job_is_accepted_by_a_site_and_its_kit_starts(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nvflare")
    from medfl.flare.files import read_run
    from medfl.flare.parts import ALLOWED
    from medfl.flare.site_config import SiteConfig, accepted_run

    assert cli.main(["site", "serve", "--kit", "kit", "--check"]) == 0
    assert "as: site" in capsys.readouterr().out
    config = SiteConfig.read(old / "kit" / "local" / "medfl.yaml")
    (app,) = old.glob("job/*/app")
    run = accepted_run(read_run(app), "north", config)
    assert (run.method, run.rounds, sorted(run.partition.sites)) == (
        "scaffold",
        2,
        ["north", "south"],
    )
    assert app.parent.name == f"medfl-{run.run_hash[:16]}"
    named = [
        (app / "config" / f"config_fed_{who}.json").read_text() for who in ("server", "client")
    ]
    assert all(any(path in text for path in ALLOWED) for text in named)
