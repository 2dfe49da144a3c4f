"""The bundles of the public model zoo as published: each supervised one trains unmodified for a round on drawn data.

Those that need no word of a policy train in a process of their own, which changes nothing outside of the run's folder
and imports nothing that is not listed, as an audit hook sees it (its control is in product/test_outside.py).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from medfl.bundle.bundle import Bundle
from medfl.bundle.zoo import compatibility
from medfl.core.errors import InputError, RunError
from medfl.export.bundle_writer import export
from medfl.policy import admission
from medfl.policy.inspection import inspect
from medfl.runs.launch import federate
from medfl.storage.run_documents import read_run
from tests.support.audit import unlisted
from tests.support.watched import watched
from tests.support.zoo_data import DRAW, ROOT
from tests.zoo.table import page_rows

pytestmark = pytest.mark.skipif(not ROOT.is_dir(), reason=f"no bundles in {ROOT}")
OWN_CODE = ("pancreas_ct_dints_segmentation", "pathology_nuclei_classification", "valve_landmarks")
"""Bundles with Python or a pickle of their own, which need a word of the user; the others need none."""
NEEDS = {"pathology_nuclei_classification": "skimage", "pathology_tumor_detection": "tifffile"}
ACCEPTED = [
    name for name in DRAW if name not in OWN_CODE and (name not in NEEDS or find_spec(NEEDS[name]))
]
SHORT = ["--rounds", "1", "--jobs", "1", "--device", "cpu", "--sites", "2", "--partition", "iid"]
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Train and export each bundle that needs no word; return the folder and what `watched` saw."""
    place = tmp_path_factory.mktemp("published")
    commands = []
    for name in ACCEPTED:
        config, given = _drawn(name, place), ["--out", f"{place}/out/{name}"]
        for key, value in config.items():
            given += ["--config", f"{key}={value}"]
        train = ["run", str(ROOT / name), "--data", f"{place}/data/{name}", *given, *SHORT]
        commands += [
            train,
            ["export", given[1], "--out", f"{given[1]}-exported", "--formats", "none"],
        ]
    return place, watched(place, *commands, blank=True)


def _drawn(name: str, place: Path) -> dict[str, str]:
    (data := place / "data" / name).mkdir(parents=True)
    return DRAW[name](data)


def test_only_bundles_with_code_of_their_own_need_a_word() -> None:
    assert {name for name in DRAW if not inspect(ROOT / name).accepted} == set(OWN_CODE)


@pytest.mark.slow
@pytest.mark.xdist_group("published")
def test_no_accepted_bundle_changes_anything_outside_or_imports_what_is_not_listed(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    _, found = trained
    assert found["seen"] == []
    assert not unlisted(found["imported"])


@pytest.mark.slow
@pytest.mark.xdist_group("published")
@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_bundle_trains_unmodified(
    name: str, trained: tuple[Path, dict[str, Any]]
) -> None:
    """A round of FedAvg at two sites, exported."""
    place, found = trained
    train, export_ = found["codes"][2 * ACCEPTED.index(name) :][:2]
    assert train == 0, found["told"][-2000:]
    exported = place / "out" / f"{name}-exported" / "models" / "model.pt"
    assert (export_ == 0) == exported.is_file() == (name not in NOT_EXPORTED), found["told"][-2000:]
    assert re.search(NOT_EXPORTED.get(name, ""), found["told"])
    _as_the_page_says(name, place / "out" / name, _drawn(name, place / "again"), found["told"])


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("name", OWN_CODE)
def test_a_trusted_bundle_trains_unmodified(name: str, tmp_path: Path) -> None:
    """Likewise."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    config, said = _drawn(name, tmp_path), list[str]()
    requested = {"data": str(tmp_path / "data" / name), "sites": 2, "rounds": 1, "partition": "iid"}
    with admission.trusting(True):
        federate(
            str(ROOT / name),
            config=config,
            requested=requested,
            out=tmp_path / "out",
            jobs=1,
            say=said.append,
        )
        refused = (
            pytest.raises(RunError, match=NOT_EXPORTED[name])
            if name in NOT_EXPORTED
            else nullcontext()
        )
        with refused:
            export(tmp_path / "out", tmp_path / "exported", formats=())
    assert (tmp_path / "exported" / "models" / "model.pt").is_file() == (name not in NOT_EXPORTED)
    _as_the_page_says(name, tmp_path / "out", config, "\n".join(said))


def _as_the_page_says(name: str, folder: Path, config: Mapping[str, str], told: str) -> None:
    """What was put right for this MONAI is in the record and said, and all of it is in docs/zoo.md."""
    run, _ = read_run(folder / "run.json")
    assert list(run.adapted) == ADAPTED.get(name, [])
    last = json.loads((folder / "summary.json").read_text())["global"]["last"]
    assert last
    assert all(value == value for value in last.values())
    _, _, _, trains, overridden, put_right = page_rows()[name]
    assert trains.startswith("trains")
    assert overridden == ", ".join(f"`{key}`" for key in config)
    assert put_right == ", ".join(f"`{one}`" for one in run.adapted)
    assert all(
        f"note: bundle {name}: {compatibility.said(adapted)}" in told for adapted in run.adapted
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["classification_template", "segmentation_template", "ventricular_short_axis_3label"]
)
def test_trains_with_other_methods(name: str, tmp_path: Path) -> None:
    """A classification, a segmentation and items that only the bundle's data set can read, in two rounds."""
    data = tmp_path / "data"
    data.mkdir()
    requested = {"data": str(data), "sites": 2, "rounds": 2, "local_epochs": 2, "partition": "iid"}
    config, hashes = DRAW[name](data), set()
    for method in ("fedavg", "fedprox", "scaffold"):
        asked = {**requested, "method": method}
        summary = federate(
            str(ROOT / name), config=config, requested=asked, out=tmp_path / method, jobs=1
        )
        hashes.add(summary["weights_sha256"])
    assert len(hashes) == 3


def test_a_reader_that_is_not_installed_is_named_with_its_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "training.csv").write_text("slide" + ",1" * 11 + "\n")
    bundle = Bundle(
        str(ROOT / "pathology_tumor_detection"),
        {"dataset_dir": str(tmp_path), "wsi_reader": "cuCIM"},
    )
    monkeypatch.setitem(sys.modules, "cucim", None)
    with pytest.raises(
        InputError,
        match="package 'cucim', which is not installed; .* with --config wsi_reader=NAME",
    ):
        bundle.items("train")


def test_missing_files_are_named_with_what_helps() -> None:
    """A side file that is downloaded, and a data list."""
    with admission.trusting(True):
        bundle = Bundle(str(ROOT / "pancreas_ct_dints_segmentation"))
        with pytest.raises(
            InputError,
            match=r"dataset_0.json, which is not there.*--config data_list_file_path=FILE",
        ):
            bundle.items("train")
        with pytest.raises(InputError, match=r"large_files.yml says.*--config arch_ckpt_path=FILE"):
            bundle.network()
