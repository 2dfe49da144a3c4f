"""`medfl new` for pictures with findings, and with numbers: the bundle, runs, predictions, and plain MONAI."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import monai.bundle
import numpy as np
import pytest
import torch
from PIL import Image

import medfl
from medfl.bundle.bundle import Bundle
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.data.intensities import constants
from medfl.datasets.readers.label_columns import Wanted
from medfl.policy.inspection import inspect
from medfl.starter import starter

SCHEMA = Path(medfl.__file__).parent / "export" / "schemas" / "bundle_metadata.json"
COUNT = 60


def drawn(folder: Path) -> Path:
    """Draw noisy pictures: a bar above and a spot on the left are findings, the radius of a disc is a number."""
    draws = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    y, x = np.mgrid[:24, :24]
    rows = []
    for number in range(COUNT):
        radius = 3 + 0.1 * number
        bar = number % 2
        spot = int(number % 3 == 0)
        pixels = 60 + 60 * ((y - 12) ** 2 + (x - 12) ** 2 < radius**2) + draws.normal(0, 5, x.shape)
        pixels[:2] += 90 * bar
        pixels[10:14, :3] += 90 * spot
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(
            folder / "images" / f"{number:02d}.png"
        )
        rows.append({"file": f"{number:02d}", "patient": f"p{number // 2}", "centre": "ab"[number % 2],
                     "bar": bar, "spot": "" if number % 10 == 7 else spot, "radius_mm": f"{radius:.1f}"})  # fmt: skip

    write(folder / "findings.csv", rows, ("file", "patient", "centre", "bar", "spot"))
    write(folder / "sizes.csv", rows, ("file", "patient", "centre", "radius_mm"))
    return folder


def write(path: Path, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn(tmp_path_factory.mktemp("drawn") / "data")


@pytest.fixture(scope="module")
def bundles(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    written = {}
    for task, table in (("multilabel", "findings.csv"), ("regression", "sizes.csv")):
        seen = starter.survey(data / "images", labels=data / table)
        assert seen.task == task
        written[task] = starter.write(folder / task, seen, size=24)

    return written


pytestmark = pytest.mark.filterwarnings("ignore:.*no allow list.*:UserWarning")
KINDS = ("multilabel", "regression")


@pytest.mark.parametrize("task", KINDS)
def test_the_bundle_says_what_it_is(task: str, bundles: dict[str, Path], data: Path) -> None:
    metadata = json.loads((bundles[task] / "configs" / "metadata.json").read_text())
    jsonschema.validate(metadata, json.loads(SCHEMA.read_text()))
    assert not inspect(bundles[task]).refusals
    bundle = Bundle(str(bundles[task]), {"dataset_dir": str(data)})
    assert bundle.task == task
    assert bundle.channels == 1
    assert bundle.key_metric == {"multilabel": "auroc", "regression": "mae"}[task]
    assert bundle.classes == {"multilabel": ("bar", "spot"), "regression": ("radius_mm",)}[task]
    assert constants(bundle.section("train").source.transforms) == ((0.5,), (0.25,))
    text = "".join(path.read_text() for path in bundles[task].rglob("*.*") if path.is_file())
    assert str(data) not in text


def test_targets_are_those_of_the_table(bundles: dict[str, Path], data: Path) -> None:
    findings = Bundle(str(bundles["multilabel"]), {"dataset_dir": str(data)})
    numbers = Bundle(str(bundles["regression"]), {"dataset_dir": str(data)})
    seen = 0
    for section in ("train", "validate", "test"):
        for item in findings.items(section):
            number = int(item["id"][:2])
            spot = None if number % 10 == 7 else float(number % 3 == 0)
            assert item["target"] == (number % 2, spot)
            assert item["centre"] == "ab"[number % 2]
            seen += 1

        for item in numbers.items(section):
            assert item["target"] == pytest.approx((3 + 0.1 * int(item["id"][:2]),))

    assert seen == COUNT
    scale = json.loads((bundles["regression"] / "configs" / "metadata.json").read_text())
    pred = scale["network_data_format"]["outputs"]["pred"]
    known = [item["target"][0] for item in numbers.items("train")]
    assert pred["mean"] == pytest.approx([np.mean(known)], rel=1e-5)
    assert pred["sd"] == pytest.approx([np.std(known)], rel=1e-5)
    assert pred["unit"] == ["mm"]


@pytest.mark.parametrize("task", KINDS)
def test_a_run_learns_and_predicts(
    task: str, bundles: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    result = medfl.run(
        bundles[task], "fedavg", data=data, out=tmp_path / "run", jobs=1, sites=2, rounds=6, lr=0.01,
        local_epochs=2, say=str,
    )  # fmt: skip
    last = result.summary["last"]
    rows = result.predictions
    assert len(rows) == len({row["id"] for row in rows}) > 5
    if task == "multilabel":
        assert set(rows[0]) >= {"label_bar", "label_spot", "p_bar", "p_spot"}
        assert {row["label_spot"] for row in rows if int(row["id"][:2]) % 10 == 7} <= {None}
        assert last["loss"] < math.log(2)
    else:
        assert [row["target_radius_mm"] for row in rows] == pytest.approx(
            [3 + 0.1 * int(row["id"][:2]) for row in rows], rel=1e-5
        )
        assert last["mae"] < 1.5  # that of the mean is


@pytest.mark.parametrize("task", KINDS)
def test_plain_monai_trains_evaluates_and_predicts(
    task: str, bundles: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    configs = bundles[task] / "configs"
    ids: dict[str, Any] = {
        "bundle_root": str(bundles[task]), "dataset_dir": str(data), "ckpt_dir": str(tmp_path / "models"),
        "output_dir": str(tmp_path / "output"), "device": "$torch.device('cpu')",
    }  # fmt: skip
    if task == "multilabel":
        ids["blank"] = "zeros"

    train = str(configs / "train.yaml")
    monai.bundle.run(config_file=train, max_epochs=2, **ids)
    monai.bundle.run(config_file=[train, str(configs / "evaluate.yaml")], **ids)
    monai.bundle.run(config_file=str(configs / "inference.yaml"), **ids)
    with (tmp_path / "output" / "predictions.csv").open() as file:
        rows = list(csv.reader(file))
    values = np.array([[float(cell) for cell in row[1:]] for row in rows])
    assert values.shape[1] == {"multilabel": 2, "regression": 1}[task]
    if task == "multilabel":
        assert ((values > 0) & (values < 1)).all()
    else:
        assert ((values > 0) & (values < 15)).all()  # mm, not standard deviations


def test_plain_monai_stops_at_an_unknown_finding(
    bundles: dict[str, Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monai.bundle.run(
        config_file=str(bundles["multilabel"] / "configs" / "train.yaml"), bundle_root=str(bundles["multilabel"]),
        dataset_dir=str(data), ckpt_dir=str(tmp_path), output_dir=str(tmp_path), max_epochs=1,
        device="$torch.device('cpu')",
    )  # fmt: skip
    assert "contains NaN or Inf. Stop training" in capsys.readouterr().err


def test_a_column_with_bars_becomes_a_bundle(data: Path, tmp_path: Path) -> None:
    lines = ["Image Index,Finding Labels,Patient ID"]
    for number in range(COUNT):
        names = ["Mass"] * (number % 2) + ["Pleural Effusion"] * (number % 3 == 0)
        lines.append(f"{number:02d}.png,{'|'.join(names) or 'No Finding'},{number // 2}")

    table = data / "entry.csv"
    table.write_text("\n".join(lines) + "\n")
    bundle = starter.write(tmp_path / "nih", starter.survey(data / "images", labels=table))
    opened = Bundle(str(bundle), {"dataset_dir": str(data)})
    assert opened.classes == ("Mass", "Pleural Effusion")
    for item in opened.items("test"):
        number = int(item["id"][:2])
        assert item["target"] == (number % 2, number % 3 == 0)

    table.write_text(table.read_text().replace("Mass", "Nodule", 1))
    changed = Bundle(str(bundle), {"dataset_dir": str(data)})
    with pytest.raises(InputError, match="'Nodule' in column 'Finding Labels', row 3"):
        changed.items("test")


def test_a_named_column_of_classes_is_remembered(data: Path, tmp_path: Path) -> None:
    lines = ["file,view,label,grade"]
    lines += [f"{n:02d},PA,x,{'low' if n % 2 else 'high'}" for n in range(COUNT)]
    (data / "grades.csv").write_text("\n".join(lines) + "\n")
    seen = starter.survey(
        data / "images", labels=data / "grades.csv", wanted=Wanted(columns=("grade",))
    )
    assert (seen.task, seen.classes) == ("classification", ("high", "low"))
    opened = Bundle(str(starter.write(tmp_path / "grades", seen)), {"dataset_dir": str(data)})
    assert all(item["label"] == int(item["id"][:2]) % 2 for item in opened.items("train"))


def rows_of(head: str, cells: str) -> str:
    return "\n".join([head, *(f"{n:02d},{cells}" for n in range(COUNT))]) + "\n"


REGRESSION = ["--task", "regression", "--label-column"]


@pytest.mark.parametrize(
    ("table", "options", "told"),
    [
        (rows_of("file,hc_mm", "7.5"), [*REGRESSION, "hc_mm"],
         "number 'hc_mm' of the training images: all 40 have 7.5"),
        (rows_of("file,hc_mm", ""), [*REGRESSION, "hc_mm"],
         "nothing is known of any image"),
        (rows_of("file,a,b", ",-1"), ["--label-column", "a,b", "--task", "multilabel"],
         "nothing is known of any image"),
        (rows_of("file,a$,b", "1,1"), [], "finding 'a$'"),
        ("file,a,b\n00,1,1\n00,1,0\n01,1,1\n", [], "two rows for 00.png"),
    ],
)  # fmt: skip
def test_bad_tables_are_one_line(
    table: str,
    options: list[str],
    told: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (data / "bad.csv").write_text(table)
    command = [
        "new",
        str(tmp_path / "b"),
        "--images",
        str(data / "images"),
        "--labels",
        str(data / "bad.csv"),
    ]
    assert cli.main([*command, *options]) == 2
    said = capsys.readouterr().err.strip()
    assert told in said
    assert "\n" not in said
    assert not (tmp_path / "b").exists()


def test_the_verb_says_what_it_understood(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["new", str(tmp_path / "b"), "--images", str(data / "images"), "--labels"]
    assert cli.main([*command, str(data / "findings.csv")]) == 0
    said = capsys.readouterr().out
    assert (
        "multilabel: images by column 'file', 2 findings by the columns bar, spot, patients by 'patient'"
        in said
    )
    assert "note: 6 cells are blank: unknown" in said
    command[1] = str(tmp_path / "c")
    assert cli.main([*command, str(data / "sizes.csv"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["task"], document["classes"]) == ("regression", {"radius_mm": COUNT})
    assert (
        cli.main(
            ["new", str(tmp_path / "d"), "--images", str(data / "images"), "--task", "regression"]
        )
        == 2
    )
    assert "without --labels" in capsys.readouterr().err


def test_a_repeated_column_is_one_more_finding(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["new", str(tmp_path / "b"), "--images", str(data / "images"), "--labels"]
    columns = ["--label-column", "spot", "--label-column", "bar"]
    assert cli.main([*command, str(data / "findings.csv"), *columns]) == 0
    assert "2 findings by the columns" in capsys.readouterr().out


def test_one_output_is_a_network(bundles: dict[str, Path], data: Path) -> None:
    network = Bundle(str(bundles["regression"]), {"dataset_dir": str(data)}).network()
    assert network(torch.zeros(2, 1, 24, 24)).shape == (2, 1)
