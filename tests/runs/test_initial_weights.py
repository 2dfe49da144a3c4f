"""`--init`: a run begins with given weights, which are part of what it is, in every runtime and when it is resumed."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medfl import datasets, networks
from medfl.bundle.bundle import Bundle
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.core.seeding import stream
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


@pytest.mark.slow
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


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.safetensors"])
@pytest.mark.parametrize(
    "text", ["version https://git-lfs.github.com/spec/v1\n", "<html>", "name,x\n"]
)
def test_a_text_in_the_place_of_weights_is_shown(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=re.escape(f"it begins {text[:40].strip()!r}")):
        initial_weights.read(str(tmp_path / name))


def test_another_archive_is_no_checkpoint(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("weights.txt", "1")

    with pytest.raises(InputError, match="it is another archive"):
        initial_weights.read(str(tmp_path / "a.pt"))


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


def _before(prefix: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in weights.items()}


def _trained() -> dict[str, Any]:
    """Return the state of an optimiser that has stepped: tensors by the numbers of parameters."""
    layer = torch.nn.Linear(2, 1)
    adam = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    adam.step()
    return adam.state_dict()


CHECKPOINTS = {
    "DistributedDataParallel": lambda w: _before("module.", w),
    "torch.compile": lambda w: _before("_orig_mod.", w),
    "compiled within": lambda w: {
        f"net.{name.replace('.', '._orig_mod.', 1)}": tensor for name, tensor in w.items()
    },
    "parallel within": lambda w: {
        f"module.{name.replace('.', '.module.', number % 2)}": tensor
        for number, (name, tensor) in enumerate(w.items())
    },
    "stacked": lambda w: _before("module._orig_mod.net.model.", w),
    "net": lambda w: {
        "net": _before("module.", w),
        "acc": 0.9,
        "epoch": 3,
        "optimizer": _trained(),
    },
    "Lightning": lambda w: {
        "epoch": 1,
        "state_dict": {**_before("model.", w), "loss.weight": torch.ones(6)},
        "optimizer_states": [_trained()],
    },
    "averaged too": lambda w: {"model": w, "ema": {name: tensor + 1 for name, tensor in w.items()}},
    "numbers beside": lambda w: {**w, "epoch": 3, "best": None},
    "deep": lambda w: {"checkpoint": {"state": {"network": _before("_orig_mod.", w)}}},
    "two of one name": lambda w: {
        **_before("m1.", w),
        **_before("m2.", {n: t + 1 for n, t in w.items()}),
    },
    "two networks": lambda w: {"a": networks.build("unet8", 1, 2).state_dict(), "b": w},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_are_found_in_a_checkpoint_by_their_names(
    name: str, tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    torch.save(CHECKPOINTS[name](weights), tmp_path / "c.pt")
    said = list[str]()
    found = initial_weights.read(str(tmp_path / "c.pt"), weights.keys(), said.append)
    assert weights_sha256(found) == weights_sha256(weights)
    assert (name == "numbers beside") == (said == [])


def test_weights_of_another_precision_are_read_as_the_network_s(
    scans: Path,
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    kinds = itertools.cycle([torch.bfloat16, torch.float16, torch.float64])
    stored = {
        name: tensor.to(kind) for (name, tensor), kind in zip(weights.items(), kinds, strict=False)
    }
    torch.save(stored, tmp_path / "c.pt")
    words = [
        "run",
        "mednist",
        "--data",
        scans,
        *SMALL[:-1],
        "--out",
        tmp_path / "out",
        "--rounds",
        "1",
    ]
    assert cli.main([*map(str, words), "--init", str(tmp_path / "c.pt")]) == 0
    assert (
        f"{len(weights)} tensors are bfloat16 and float16 and float64, read as the network's type"
        in capsys.readouterr().err
    )
    begun = load_weights(tmp_path / "out" / initial_weights.FILE)
    for name, tensor in begun.items():
        assert np.array_equal(tensor.numpy(), stored[name].double().numpy().astype(np.float32))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_sets_of_weights_in_a_checkpoint_the_first_is_taken_and_the_other_said(
    tmp_path: Path, weights: dict[str, torch.Tensor], order: tuple[int, int]
) -> None:
    """The one after the shorter prefix was, wherever it stood, or the one with more tensors beside the network's."""
    averaged = {"decay": torch.ones(1), **{name: tensor + 1 for name, tensor in weights.items()}}
    sets = [("state_dict.module.", weights), ("ema.", averaged)]
    first, second = (sets[number] for number in order)
    checkpoint = {"ema": averaged, "state_dict": _before("module.", weights)}
    place = first[0].partition(".")[0]
    checkpoint = {place: checkpoint.pop(place), **checkpoint}
    torch.save(checkpoint, tmp_path / "c.pt")
    said = list[str]()
    found = initial_weights.read(str(tmp_path / "c.pt"), weights.keys(), said.append)
    assert weights_sha256(found) == weights_sha256(first[1])
    assert said == [
        f"weights: c.pt has such names after {second[0]!r} too, left out",
        f"weights: those after {first[0]!r} in the names of c.pt",
    ]


def test_prefixes_of_safetensors_and_of_wrapped_networks(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    """A file that medfl wrote of a network that a method added to stays whole."""
    file = tmp_path / "w.safetensors"
    save_weights(file, _before("model.", weights))
    assert initial_weights.read(str(file), weights.keys()).keys() == weights.keys()
    added = {**_before("network.", weights), "head2.weight": torch.ones(3)}
    save_weights(file, added)
    assert initial_weights.read(str(file), weights.keys()).keys() == added.keys()
    save_weights(file, weights)
    wrapped = _before("net.", weights)
    assert initial_weights.read(str(file), wrapped.keys()).keys() == wrapped.keys()


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, {"state_dict": {}}, torch.ones(2)])
def test_a_checkpoint_without_weights_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(InputError, match=r"c\.pt is not read as weights \(it holds no tensors"):
        initial_weights.read(str(tmp_path / "c.pt"), {"fc.weight"})


def test_names_and_shapes_that_differ_are_named_and_counted(
    scans: Path,
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = list(weights)
    other = {**weights, "extra.weight": torch.ones(2)}
    del other[names[0]]
    other[names[1]] = torch.ones(3, 3)
    torch.save({"net": _before("module.", other)}, tmp_path / "c.pt")
    run(scans, tmp_path / "out", "--init", tmp_path / "c.pt", code=2)
    line = capsys.readouterr().err
    shape = tuple(weights[names[1]].shape)
    assert (
        f"1 tensors have another shape: {names[1]!r} is (3, 3), the network's ({shape[0]})" in line
    )
    assert f"1 tensors are missing: {names[0]!r}" in line
    assert "1 tensors are not of the network: 'extra.weight'" in line


def test_a_pretrained_backbone_is_found_where_its_library_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the head, which the run's seed draws as without it; a missing file says where it belongs."""
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    bundle = Bundle("ham10000")
    with pytest.raises(InputError, match=r"one file hub/checkpoints/resnet18-\*.pth in .*are 0; "):
        initial_weights.begin_with(bundle, "torchvision:resnet18")

    torch.manual_seed(1)
    pretrained = torchvision.models.resnet18().state_dict()
    place = tmp_path / "hub/checkpoints"
    place.mkdir(parents=True)
    torch.save(pretrained, place / "resnet18-01234567.pth")
    lines: list[str] = []
    begun, known = initial_weights.begin_with(bundle, "torchvision:resnet18", lines.append, 7)
    with stream(7, "network"):
        drawn = bundle.network().state_dict()

    assert begun.start is not None
    heads = [name for name in drawn if begun.start[name].equal(drawn[name])]
    assert {name.partition(".")[0] for name in heads if "num_batches" not in name} >= {"fc"}
    for name in pretrained.keys() & drawn.keys():
        if not name.startswith("fc."):
            assert begun.start[name].equal(pretrained[name]), name

    assert lines == [
        f"--init torchvision:resnet18: {len(drawn) - 2} tensors; drawn are fc.weight, fc.bias"
    ]
    assert known == f"sha256:{weights_sha256(begun.start)}"
    file = place / "resnet18-01234567.pth"
    again, _ = initial_weights.begin_with(bundle, f"backbone:{file}", str, 7)
    assert again.start is not None
    assert weights_sha256(again.start) == known.removeprefix("sha256:")
    with pytest.raises(InputError, match="another|of its"):
        initial_weights.begin_with(
            Bundle("ham10000", {"network": "small_cnn"}), "torchvision:resnet18"
        )

    with pytest.raises(InputError, match="one file"):
        initial_weights.begin_with(bundle, "torchvision:../resnet18")


def test_medicalnet_is_found_where_monai_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is published: one channel, in a checkpoint of a parallel training, without a head."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    bundle = Bundle("brain_age", {"network": "resnet18"})
    with pytest.raises(
        InputError, match=r"one file .*-Resnet18/snapshots/\*/resnet_\*.pth in .*are 0; "
    ):
        initial_weights.begin_with(bundle, "monai:Resnet18")

    pretrained = bundle.network().state_dict()
    place = tmp_path / "hub/models--TencentMedicalNet--MedicalNet-Resnet18/snapshots/1"
    place.mkdir(parents=True)
    body = {name: pretrained[name] for name in pretrained if not name.startswith("fc.")}
    published = {"state_dict": {f"module.{name}": value for name, value in body.items()}}
    torch.save(published, place / "resnet_18_23dataset.pth")
    begun, _ = initial_weights.begin_with(bundle, "monai:Resnet18")
    assert begun.start is not None
    assert all(begun.start[name].equal(body[name]) for name in body)


def test_a_job_carries_the_head_that_its_record_says(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    """What a backbone lacks is drawn by the run's seed, in the offered job as in its record."""
    pytest.importorskip("nvflare")
    backbone = {name: tensor for name, tensor in weights.items() if tensor.shape[:1] != (6,)}
    assert 0 < len(backbone) < len(weights)
    save_weights(tmp_path / "b.safetensors", backbone)
    words = ["flare", "export", "mednist", "--sites", "a,b", "--seed", "3", "--rounds", "1"]
    words += ["--config", "network=small_cnn", "--config", "image_size=32"]
    words += ["--init", f"backbone:{tmp_path / 'b.safetensors'}", "--out", str(tmp_path / "jobs")]
    assert cli.main(words) == 0
    (job,) = (tmp_path / "jobs").rglob(initial_weights.JOB_FILE)
    known = f"sha256:{weights_sha256(initial_weights._from_job(job))}"
    assert any(known in path.read_text() for path in job.parent.glob("*.json") if path != job)
