"""Bundles in the styles of the public zoo, federated as they are; broken ones refused in one line."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from medfl.bundle.bundle import Bundle
from medfl.cli import main
from medfl.core.errors import InputError
from medfl.evaluation.metrics import higher_is_better
from medfl.policy import admission
from medfl.policy.policy import Policy
from medfl.runs.launch import federate
from medfl.storage.files import load_weights
from tests.support.sweeps import mostly_slow
from tests.zoo.broken import BROKEN
from tests.zoo.build import ZOO
from tests.zoo.record import BrokenBundle, ZooBundle

SCRIPTS = Policy(allow=frozenset({"scripts"}))
METHODS = ("fedprox", "scaffold", "fedbn", "ditto", "local", "central")


@pytest.fixture(autouse=True)
def no_open_files() -> Iterator[None]:
    """A file that a bundle opens and we forget would be told by the garbage collector, here and not in another test."""
    yield
    gc.collect()


def run(bundle: ZooBundle, out: Path, method: str = "fedavg", **settings: Any) -> dict[str, Any]:
    jobs = settings.pop("jobs", 1)
    requested = {"method": method, "sites": 2, "rounds": 2, "partition": "iid", **settings}
    with admission.trusting("own_scripts" in bundle.path.name):
        return federate(
            str(bundle.path), config=bundle.overrides, requested=requested, out=out, jobs=jobs
        )


def fingerprint(folder: Path) -> dict[str, str]:
    """What a folder holds, down to empty folders."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }


FEW = ("seg3d_decathlon_json", "cls2d_glob_yaml", "seg2d_own_scripts_yaml")


@pytest.mark.parametrize("name", mostly_slow(ZOO, FEW))
def test_federates_unmodified(name: str, tmp_path: Path) -> None:
    """Two rounds train; nothing that `initialize`, `run`, handlers or caches would write is there afterwards.

    Of all but the quick ones, which `test_deterministic` has: two worker processes give the same bits.
    """
    bundle = ZOO[name](tmp_path)
    before = fingerprint(tmp_path)
    summary = run(bundle, tmp_path / "out")
    after = {
        path: content
        for path, content in fingerprint(tmp_path).items()
        if path.split("/")[0] != "out"
    }
    assert after == before
    assert not any(path.exists() for path in bundle.side_effects)
    key = Bundle(str(bundle.path), bundle.overrides, policy=SCRIPTS).key_metric
    assert 0 <= summary["last"][key] <= 1
    weights = load_weights(tmp_path / "out" / "weights.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values() if tensor.is_floating_point())
    if name not in FEW:
        again = run(bundle, tmp_path / "again", jobs=2)
        assert again["weights_sha256"] == summary["weights_sha256"]


@pytest.mark.parametrize("name", ZOO)
def test_reads_what_is_true(name: str, tmp_path: Path) -> None:
    """Task, counts, batches, loss, optimiser and metric are those of the bundle's record."""
    record = ZOO[name](tmp_path)
    bundle = Bundle(str(record.path), record.overrides, policy=SCRIPTS)
    assert bundle.task == record.task
    assert [len(bundle.items(section)) for section in ("train", "validate")] == [
        record.train,
        record.validate,
    ]
    assert len(bundle.items("test")) == (record.test or record.validate)
    assert bundle.has_test == bool(record.test)
    assert type(bundle.loss_function).__name__ == record.loss
    assert type(bundle.optimizer(bundle.network())).__name__ == record.optimizer
    assert len(bundle.classes) == (record.outputs if record.task == "classification" else 0)
    assert higher_is_better(bundle.key_metric) == record.higher_is_better
    assert bundle.sections["train"].source.is_list or not record.items
    x, y = next(bundle.prepared("train").batches(torch.arange(2), 2, None))
    assert x.shape[1] == record.in_channels
    assert x.ndim == record.dims + 2
    assert y.ndim == (1 if record.task == "classification" else record.dims + 2)


@pytest.mark.parametrize("name", mostly_slow(["seg2d_csv_flat", *FEW], ["seg2d_csv_flat"]))
def test_deterministic(name: str, tmp_path: Path) -> None:
    """The same run twice, the second time in two worker processes, has the same bits; another seed gives others."""
    bundle = ZOO[name](tmp_path)
    hashes = {run(bundle, tmp_path / f"out{jobs}", jobs=jobs)["weights_sha256"] for jobs in (1, 2)}
    assert len(hashes) == 1
    if name == "seg2d_csv_flat":
        assert run(bundle, tmp_path / "other", seed=1)["weights_sha256"] not in hashes


@pytest.mark.parametrize("method", ["scaffold", "ditto"])
def test_methods_of_both_kinds_on_a_target_of_its_own(method: str, tmp_path: Path) -> None:
    bundle = ZOO["seg2d_own_scripts_yaml"](tmp_path)
    assert run(bundle, tmp_path / "out", method, rounds=1)["last"]["val_mse"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_all_methods_in_3d(method: str, tmp_path: Path) -> None:
    """BatchNorm, several samples an item, sliding windows."""
    bundle = ZOO["seg3d_decathlon_json"](tmp_path)
    assert 0 <= run(bundle, tmp_path / "out", method, rounds=1)["last"]["dice"] <= 1


def test_command_line_with_data_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--data takes the place of a placeholder; a partition by class works on globbed labels."""
    bundle = ZOO["cls2d_glob_yaml"](tmp_path)
    arguments = [
        "run",
        str(bundle.path),
        "--method",
        "fedavg",
        "--sites",
        "2",
        "--rounds",
        "1",
        "--partition",
        "classes:2",
    ]
    assert (
        main(
            [*arguments, "--data", bundle.overrides["dataset_dir"], "--out", str(tmp_path / "out")]
        )
        == 0
    )
    assert main([*arguments, "--out", str(tmp_path / "without")]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "which is neither below the bundle nor" in said
    assert "/workspace/data/MiniNIST" in said
    assert "--data" in said
    assert not (tmp_path / "without").exists()


@pytest.mark.parametrize("name", BROKEN)
def test_broken_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the id and the file, exit code 2, nothing written."""
    bundle: BrokenBundle = BROKEN[name](tmp_path)
    before = fingerprint(tmp_path)
    assert (
        main(
            [
                "run",
                str(bundle.path),
                "--sites",
                "2",
                "--partition",
                "iid",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("error: ")
    assert all(word in said for word in bundle.names), said
    assert said.count(";") >= 2
    assert fingerprint(tmp_path) == before


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def coloured(path: Path) -> None:
    Image.new("RGB", (32, 32)).save(path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "item 'Hand/000003.jpeg' cannot be prepared"),
        (coloured, "image 'Hand/000003.jpeg' has 3 channels, 'Abdomen/000001.jpeg' has 1"),
    ],
)
def test_bad_image_is_named(spoil: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    bundle = ZOO["cls2d_glob_yaml"](tmp_path)
    spoil(Path(bundle.overrides["dataset_dir"]) / "Hand" / "000003.jpeg")
    with pytest.raises(InputError, match=said):
        run(bundle, tmp_path / "out")
    assert not (tmp_path / "out").exists()


Maker = Callable[[Path], ZooBundle]


def test_two_bundles_with_scripts(tmp_path: Path) -> None:
    """Each bundle gets its own `scripts`, whichever was read last, and no `__pycache__` is left."""
    make: Maker = ZOO["seg2d_own_scripts_yaml"]
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    code = second.path / "scripts" / "net.py"
    code.write_text(
        code.read_text().replace("nn.Conv2d(width, 1, 1)", "nn.Conv2d(width, 1, 3, padding=1)")
    )
    bundles = [Bundle(str(record.path), policy=SCRIPTS) for record in (first, second, first)]
    sizes = [bundle.network().head.kernel_size for bundle in bundles]
    assert sizes == [(1, 1), (3, 3), (1, 1)]
    assert not list(tmp_path.rglob("__pycache__"))
    assert "its own Python (scripts) is run" in bundles[0].notes[0]
    assert bundles[0].sha256 == bundles[2].sha256 != bundles[1].sha256


def test_scripts_of_a_bundle_that_is_gone_are_forgotten(tmp_path: Path) -> None:
    """As those of an export, which is checked in a folder that is then moved."""
    make: Maker = ZOO["seg2d_own_scripts_yaml"]
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    code = second.path / "scripts" / "net.py"
    code.write_text(
        code.read_text().replace("nn.Conv2d(width, 1, 1)", "nn.Conv2d(width, 1, 3, padding=1)")
    )
    Bundle(str(first.path), policy=SCRIPTS).network()
    first.path.rename(tmp_path / "moved")
    assert Bundle(str(second.path), policy=SCRIPTS).network().head.kernel_size == (3, 3)
