"""`medfl new` for volumes with a table of classes, findings or numbers, from the survey to the scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from monai.transforms import Compose
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    mean_absolute_error,
    mean_squared_error,
    r2_score,
)

import medfl
from medfl.bundle.bundle import Bundle
from medfl.bundle.open import check_folder
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.partner.preflight import PreflightOptions, check
from medfl.runs.predict import predict
from medfl.starter import starter

COUNT = 30
DRAWS = np.random.default_rng(0)
pytestmark = pytest.mark.filterwarnings("ignore:.*no allow list.*:UserWarning")


def save(path: Path, shape: tuple[int, ...] = (20, 18, 16), radius: float = 5) -> None:
    """A noisy volume with a ball."""
    path.parent.mkdir(parents=True, exist_ok=True)
    away = np.indices(shape[:3]) - np.array(shape[:3]).reshape(3, 1, 1, 1) / 2
    ball = np.square(away).sum(0) < radius**2
    voxels = DRAWS.normal(0, 0.2, shape) + ball.reshape(*shape[:3], *[1] * len(shape[3:]))
    nib.save(nib.Nifti1Image(voxels.astype(np.float32), np.diag([-2, 1, 3, 1])), path)


def table(path: Path, head: str, cells: Any, ending: str = "") -> Path:
    lines = [f"file,{head}", *(f"p{n:02d}{ending},{cells(n)}" for n in range(COUNT))]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    for number in range(COUNT):
        save(folder / "scans" / f"p{number:02d}.nii.gz", radius=2 + number / 6)

    table(folder / "sizes.csv", "radius_mm", lambda n: 2 + n / 6)
    table(folder / "kinds.csv", "label", lambda n: ("large", "small")[n < COUNT // 2], ".nii.gz")
    table(folder / "findings.csv", "a,b", lambda n: f"{n % 2},{int(n % 3 == 0)}")
    return folder


def written(data: Path, name: str, place: Path) -> Path:
    return starter.write(place / name, starter.survey(data / "scans", labels=data / f"{name}.csv"))


def first(bundle: Bundle) -> Any:
    """The first image of the validation section, as the network gets it."""
    source = bundle.section("validate").source
    return Compose(source.transforms)(source.entries[0])["image"]


@pytest.mark.parametrize(
    ("name", "task"),
    [("sizes", "regression"), ("kinds", "classification"), ("findings", "multilabel")],
)
def test_the_bundle_has_the_table_and_resized_volumes(
    name: str, task: str, data: Path, tmp_path: Path
) -> None:
    folder = written(data, name, tmp_path)
    bundle = Bundle(str(folder), {"dataset_dir": str(data)})
    assert bundle.task == task
    image = bundle.metadata["network_data_format"]["inputs"]["image"]
    assert (image["spatial_shape"], image["is_patch_data"]) == ([16, 16, 16], False)
    assert bundle.metadata["data_type"] == "NIfTI"

    seen = 0
    for section in ("train", "validate", "test"):
        for item in bundle.items(section):
            number = int(item["id"][1:])
            if name == "sizes":
                assert item["target"] == pytest.approx((2 + number / 6,))
            elif name == "kinds":
                assert item["label"] == (number < COUNT // 2)
            else:
                assert item["target"] == (number % 2, number % 3 == 0)
            seen += 1

    assert seen == COUNT
    assert tuple(first(bundle).shape) == (1, 16, 16, 16)
    text = (folder / "docs" / "README.md").read_text()
    assert "<folder>/scans/<volume>" in text
    assert "picture" not in text


@pytest.mark.slow
def test_scores_are_those_of_scikit_learn(data: Path, tmp_path: Path) -> None:
    """Of the test images of a run, and of the same images by `medfl predict --reference`."""
    settings: dict[str, Any] = {"data": data, "jobs": 1, "sites": 2, "rounds": 6, "local_epochs": 3}
    run = tmp_path / "numbers"
    result = medfl.run(
        written(data, "sizes", tmp_path), "fedavg", out=run, say=str, lr=0.003, **settings
    )
    last = result.summary["last"]
    rows = result.predictions
    truth = [2 + int(row["id"][1:]) / 6 for row in rows]
    told = [row["predicted_radius_mm"] for row in rows]
    assert [row["target_radius_mm"] for row in rows] == pytest.approx(truth, rel=1e-5)
    assert last["mae"] == pytest.approx(mean_absolute_error(truth, told), rel=1e-4)
    assert last["rmse"] == pytest.approx(mean_squared_error(truth, told) ** 0.5, rel=1e-4)
    assert last["r2"] > 0.2
    assert last["r2"] == pytest.approx(r2_score(truth, told), abs=1e-4)

    new = predict(run, data / "scans", tmp_path / "new", reference=data / "sizes.csv")
    assert not new["failed"]
    told = [row["predicted_radius_mm"] for row in new["predictions"]]
    truth = [2 + int(row["id"][1:3]) / 6 for row in new["predictions"]]
    assert len(told) == COUNT
    assert new["scores"]["mae"] == pytest.approx(mean_absolute_error(truth, told), rel=1e-4)

    result = medfl.run(
        written(data, "kinds", tmp_path), "fedavg", out=tmp_path / "k", say=str, **settings
    )
    last = result.summary["last"]
    rows = result.predictions
    kinds = [int(int(row["id"][1:]) < COUNT // 2) for row in rows]
    called = [row["predicted"] for row in rows]
    assert [row["label"] for row in rows] == kinds
    assert last["accuracy"] == pytest.approx(accuracy_score(kinds, called))
    assert last["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(kinds, called))


def test_the_folder_of_a_site_is_checked_as_volumes(data: Path, tmp_path: Path) -> None:
    bundle = written(data, "sizes", tmp_path)
    report = check_folder(bundle, data)
    assert report.ok, report.problems
    assert report.layout.startswith("scans/<volume> + sizes.csv")
    assert check(PreflightOptions(str(bundle), str(data), None, None, None, "cpu")).as_dict()["ok"]

    site = tmp_path / "site"
    for number in range(COUNT):
        shape = (20, 18, 16, 2) if number == 3 else (20, 18, 16)
        save(site / "scans" / f"p{number:02d}.nii.gz", shape)

    (site / "sizes.csv").write_bytes((data / "sizes.csv").read_bytes())
    (site / "scans/p05.nii.gz").write_bytes(b"cut off")
    report = check_folder(bundle, site)
    assert len(report.problems) == 2
    assert "p03.nii.gz has 2 channels" in report.problems[0]
    assert "p05.nii.gz" in report.problems[1]
    with pytest.raises(InputError, match="p05"):
        starter.survey(site / "scans", labels=site / "sizes.csv")

    save(site / "scans/p05.nii.gz")
    with pytest.raises(InputError, match="volumes of 1 and 2 channels"):
        starter.survey(site / "scans", labels=site / "sizes.csv")


def test_files_of_channels_are_one_image(tmp_path: Path) -> None:
    lines = ["file,length"]
    for number in range(10):
        lines.append(f"p{number},{number + 0.5}")
        for channel in range(2):
            save(tmp_path / f"i/p{number}_{channel:04d}.nii.gz")

    (tmp_path / "i/t.csv").write_text("\n".join(lines) + "\n")
    seen = starter.survey(tmp_path / "i", labels=tmp_path / "i/t.csv")
    assert seen.counts == (10,)
    assert seen.channels == 2
    bundle = Bundle(str(starter.write(tmp_path / "b", seen)), {"dataset_dir": str(tmp_path / "i")})
    assert len(first(bundle)) == 2


def test_patients_of_one_volume_each_are_known(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A patient's name is that of the file without its ending: it was said that patients are not known."""
    rows = table(tmp_path / "t.csv", "patient,length", lambda n: f"p{n:02d},{n}.5").read_text()
    (data / "own.csv").write_text(rows)
    words = ["new", str(tmp_path / "b"), "--images", str(data / "scans")]
    assert cli.main([*words, "--labels", str(data / "own.csv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["patients"] == COUNT
    notes = check_folder(tmp_path / "b", data).notes
    assert f"{COUNT} patients, each in one section" in notes
    assert not any("not known" in note for note in notes)


def test_a_size_is_one_of_pictures(data: Path, tmp_path: Path) -> None:
    seen = starter.survey(data / "scans", labels=data / "sizes.csv")
    with pytest.raises(InputError, match="--size 32 for volumes; a size of pictures"):
        starter.write(tmp_path / "b", seen, size=32)
