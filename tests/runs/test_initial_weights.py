"""`--init`: a run begins with given weights, which are part of what it is, in every runtime and when it is resumed."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from medfl import datasets, networks
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.runs import initial_weights
from medfl.storage.files import load_weights, save_weights, weights_sha256

SMALL = (
    "--config", "image_size=32", "--sites", "2", "--partition", "iid", "--cohort", "1", "--local-epochs", "1",
    "--batch-size", "16", "--quiet",
)  # fmt: skip


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=32
    )


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Return the weights of a small CNN that no seed of a run draws."""
    torch.manual_seed(4242)
    return {
        name: tensor.clone()
        for name, tensor in networks.build("small_cnn", 1, 6).state_dict().items()
    }


def run(scans: Path, out: Path, *more: object, code: int = 0) -> dict[str, Any]:
    words = ["run", "mednist", "--data", scans, *SMALL, "--out", out, *more]
    assert cli.main([*map(str, words)]) == code
    return json.loads((out / "summary.json").read_text()) if code == 0 else {}


def test_a_run_begins_with_the_weights_of_a_file_wherever_it_runs(
    scans: Path, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    """Two workers, MONAI FL, and an interrupted run whose file is gone give the same bits; a drawn start others."""
    file = tmp_path / "start.safetensors"
    save_weights(file, weights)
    whole = run(scans, tmp_path / "whole", "--init", file, "--rounds", "2", "--jobs", "1")
    assert (
        json.loads((tmp_path / "whole/run.json").read_text())["init"]
        == f"sha256:{weights_sha256(weights)}"
    )
    workers = run(scans, tmp_path / "workers", "--init", file, "--rounds", "2", "--jobs", "2")
    monai = run(scans, tmp_path / "monai", "--init", file, "--rounds", "2", "--runtime", "monai-fl")
    run(scans, tmp_path / "part", "--init", file, "--rounds", "1", "--jobs", "1")
    file.unlink()
    assert (
        cli.main(["run", "--resume", "--out", str(tmp_path / "part"), "--rounds", "2", "--quiet"])
        == 0
    )
    part = json.loads((tmp_path / "part/summary.json").read_text())
    drawn = run(scans, tmp_path / "drawn", "--rounds", "2", "--jobs", "1")
    assert {one["weights_sha256"] for one in (workers, monai, part)} == {whole["weights_sha256"]}
    assert drawn["weights_sha256"] != whole["weights_sha256"]
    assert drawn["run_hash"] != whole["run_hash"] == workers["run_hash"]


def test_sites_begin_with_the_weights_and_keep_what_is_theirs(
    scans: Path, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    """At a step size of nearly 0 every method ends where it began, the personal layers of FedBN and FedPer too."""
    torch.save({"model": weights, "epoch": 3}, tmp_path / "model.pt")
    (tmp_path / "bundle/models").mkdir(parents=True)
    (tmp_path / "model.pt").rename(tmp_path / "bundle/models/model.pt")
    for method in ("fedavg", "fedper"):
        out = tmp_path / method
        run(
            scans,
            out,
            "--init",
            f"bundle:{tmp_path}/bundle",
            "--method",
            method,
            "--rounds",
            "1",
            "--lr",
            "1e-12",
        )
        ended = load_weights(out / "weights.safetensors")
        prefix = next((name.partition("/")[0] + "/" for name in ended if "/" in name), "")
        for name, tensor in weights.items():
            if "running" not in name and "num_batches" not in name:
                torch.testing.assert_close(ended[prefix + name], tensor, atol=1e-6, rtol=0)


def test_a_finished_run_is_a_beginning(scans: Path, tmp_path: Path) -> None:
    run(scans, tmp_path / "first", "--rounds", "1", "--jobs", "1")
    run(
        scans,
        tmp_path / "second",
        "--rounds",
        "1",
        "--jobs",
        "1",
        "--init",
        f"run:{tmp_path}/first",
    )
    first, began = (
        load_weights(tmp_path / name)
        for name in ("first/weights.safetensors", "second/init.safetensors")
    )
    assert weights_sha256(first) == weights_sha256(began)


def test_weights_of_another_network_are_refused_before_anything_is_written(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_weights(tmp_path / "other.safetensors", networks.build("small_cnn", 1, 4).state_dict())
    run(scans, tmp_path / "out", "--init", tmp_path / "other.safetensors", code=2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert "is (4, " in line
    assert "the network's (6, " in line
    save_weights(tmp_path / "unet.safetensors", networks.build("unet8", 1, 2).state_dict())
    run(scans, tmp_path / "out", "--init", tmp_path / "unet.safetensors", code=2)
    assert "8 tensors are missing: 'body.0.weight'" in capsys.readouterr().err
    run(scans, tmp_path / "out", "--init", tmp_path / "none.safetensors", code=2)
    assert not (tmp_path / "out").exists()


class _Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_file_with_code_in_it_is_read_as_no_weights(tmp_path: Path) -> None:
    file, done = tmp_path / "model.pt", tmp_path / "done"
    harmful = _Harmful(done)
    for save in (
        lambda: torch.save({"w": harmful}, file),
        lambda: file.write_bytes(pickle.dumps(harmful)),
    ):
        save()
        with pytest.raises(InputError, match="is not read as weights"):
            initial_weights.read(str(file))
    torch.save({"w": torch.tensor([float("nan")])}, file)
    with pytest.raises(InputError, match="'w' is not finite"):
        initial_weights.read(str(file))
    assert not done.exists()


def test_a_run_whose_beginning_was_exchanged_is_not_resumed(
    scans: Path,
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, out = tmp_path / "start.safetensors", tmp_path / "out"
    save_weights(file, weights)
    run(scans, out, "--init", file, "--rounds", "1", "--jobs", "1")
    save_weights(out / "init.safetensors", {name: tensor + 1 for name, tensor in weights.items()})
    assert cli.main(["run", "--resume", "--out", str(out), "--rounds", "2", "--quiet"]) == 2
    assert "other weights than the run began with" in capsys.readouterr().err
    (out / "init.safetensors").unlink()
    assert cli.main(["run", "--resume", "--out", str(out), "--rounds", "2", "--quiet"]) == 2
    assert "not at hand" in capsys.readouterr().err


@pytest.mark.flare
@pytest.mark.slow
def test_a_flare_job_begins_with_the_weights(
    scans: Path, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    pytest.importorskip("nvflare")
    save_weights(tmp_path / "start.safetensors", weights)
    more = ("--init", tmp_path / "start.safetensors", "--rounds", "1")
    flare = run(scans, tmp_path / "flare", *more, "--runtime", "flare")
    assert (
        flare["weights_sha256"]
        == run(scans, tmp_path / "here", *more, "--jobs", "1")["weights_sha256"]
    )


def test_a_small_file_cannot_ask_for_much_memory(tmp_path: Path) -> None:
    file = tmp_path / "wide.pt"
    torch.save({"fc.weight": torch.zeros(1).expand(10**12)}, file)
    assert file.stat().st_size < 10_000
    with pytest.raises(InputError, match="more numbers than the file"):
        initial_weights.read(str(file))
