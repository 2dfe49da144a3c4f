"""The bundles of the public model zoo as published: each supervised one trains unmodified for a round on drawn data.

Those that need no word of a policy change nothing outside of the run's folder meanwhile, as an audit hook sees it.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from medfl.bundle import older
from medfl.bundle.bundle import Bundle
from medfl.core.errors import InputError, RunError
from medfl.core.run_documents import read_run
from medfl.export.bundle_writer import export
from medfl.policy import admission
from medfl.policy.inspection import inspect
from medfl.runs.launch import federate
from tests.support.audit import MAY, Watch, unlisted
from tests.support.zoo_data import DRAW, ROOT
from tests.zoo.table import page_rows

pytestmark = pytest.mark.skipif(not ROOT.is_dir(), reason=f"no bundles in {ROOT}")
OWN_CODE = ("pancreas_ct_dints_segmentation", "pathology_nuclei_classification", "valve_landmarks")
"""Bundles with Python or a pickle of their own, which need a word of the user; the others need none."""
NEEDS = {"pathology_nuclei_classification": "skimage", "pathology_tumor_detection": "tifffile"}
NOT_EXPORTED = {
    "pathology_tumor_detection": "verify_metadata: '' should be non-empty",
    "pancreas_ct_dints_segmentation": r"configs/train\.yaml names a path of the local machine: .*/",
}
"""What MONAI's own checks find in a published bundle (its inference also asks for weights from the network), and a side
file that the user names outside of the bundle."""
ADAPTED = {
    "brats_mri_segmentation": ["labels:float"],
    "prostate_mri_anatomy": ["RandZoomd.max", "RandZoomd.min"],
    "valve_landmarks": ["numpy.product"],
}


@pytest.fixture
def open_slides() -> Iterator[None]:
    """MONAI's reader of slides leaves them open; let that be told here, and not in another test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def watch() -> Watch:
    """One of this process, for the hook stays."""
    return Watch(may=MAY)


def test_only_bundles_with_code_of_their_own_need_a_word() -> None:
    assert {name for name in DRAW if not inspect(ROOT / name).accepted} == set(OWN_CODE)


@pytest.mark.slow
def test_the_watch_of_this_process_sees_what_is_changed_beside_a_run(watch: Watch, tmp_path: Path) -> None:
    """The control."""
    (tmp_path / "out").mkdir()
    with watch.on(tmp_path / "out"):
        (tmp_path / "out" / "weights").write_text("inside")
        (tmp_path / "beside").write_text("outside")
    assert watch.seen.pop() == f"open {tmp_path / 'beside'}"
    assert watch.seen == []


@pytest.mark.slow
@pytest.mark.usefixtures("open_slides")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", DRAW)
def test_trains_unmodified(
    name: str, tmp_path: Path, watch: Watch, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of FedAvg at two sites, exported; what was put right for this MONAI is in the record and said."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    data, said = tmp_path / "data", list[str]()
    data.mkdir()
    requested = {"data": str(data), "sites": 2, "rounds": 1, "partition": "iid"}
    config, modules = DRAW[name](data), set(sys.modules)
    places = [tmp_path / "out", tmp_path / "tmp", cache, Path("/dev/shm")]  # noqa: S108
    places[1].mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places[1]))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with admission.trusting(name in OWN_CODE):
        with nullcontext() if name in OWN_CODE else watch.on(*places):
            summary = federate(
                str(ROOT / name),
                config=config,
                requested=requested,
                out=tmp_path / "out",
                jobs=1,
                say=said.append,
            )
        assert watch.seen == []
        assert name in OWN_CODE or not unlisted(set(sys.modules) - modules)
        refused = pytest.raises(RunError, match=NOT_EXPORTED[name]) if name in NOT_EXPORTED else nullcontext()
        with refused:
            export(tmp_path / "out", tmp_path / "exported", formats=())
    assert (tmp_path / "exported" / "models" / "model.pt").is_file() == (name not in NOT_EXPORTED)
    run, _ = read_run(tmp_path / "out" / "run.json")
    assert list(run.adapted) == ADAPTED.get(name, [])
    assert all(value == value for value in summary["last"].values())
    _, _, _, trains, overridden, put_right = page_rows()[name]
    assert trains.startswith("trains")
    assert overridden == ", ".join(f"`{key}`" for key in config)
    assert put_right == ", ".join(f"`{one}`" for one in run.adapted)
    assert {f"note: bundle {name}: {older.said(adapted)}" for adapted in run.adapted} <= set(said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classification_template", "segmentation_template", "ventricular_short_axis_3label"])
def test_trains_with_other_methods(name: str, tmp_path: Path) -> None:
    """A classification, a segmentation and items that only the bundle's data set can read, in two rounds."""
    data = tmp_path / "data"
    data.mkdir()
    requested = {"data": str(data), "sites": 2, "rounds": 2, "local_epochs": 2, "partition": "iid"}
    config, hashes = DRAW[name](data), set()
    for method in ("fedavg", "fedprox", "scaffold"):
        asked = {**requested, "method": method}
        summary = federate(str(ROOT / name), config=config, requested=asked, out=tmp_path / method, jobs=1)
        hashes.add(summary["weights_sha256"])
    assert len(hashes) == 3


def test_a_reader_that_is_not_installed_is_named_with_its_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "training.csv").write_text("slide" + ",1" * 11 + "\n")
    bundle = Bundle(str(ROOT / "pathology_tumor_detection"), {"dataset_dir": str(tmp_path), "wsi_reader": "cuCIM"})
    monkeypatch.setitem(sys.modules, "cucim", None)
    with pytest.raises(InputError, match="package 'cucim', which is not installed; .* with --config wsi_reader=NAME"):
        bundle.items("train")


def test_missing_files_are_named_with_what_helps() -> None:
    """A side file that is downloaded, and a data list."""
    with admission.trusting(True):
        bundle = Bundle(str(ROOT / "pancreas_ct_dints_segmentation"))
        with pytest.raises(InputError, match=r"dataset_0.json, which is not there.*--config data_list_file_path=FILE"):
            bundle.items("train")
        with pytest.raises(InputError, match=r"large_files.yml says.*--config arch_ckpt_path=FILE"):
            bundle.network()
