"""A site's statistics: what they say of the data, and that they say no more than they may."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.bundle.open import open_problem, with_data
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.datasets.readers import tables
from medfl.partner.scanning import scan
from medfl.partner.statistics import (
    DOCUMENT_FORM,
    OTHERS,
    UNRECORDED,
    StatisticsOptions,
    _Counts,
    bins_of,
    encoded,
    gather,
    text,
)
from medfl.runtimes.monai_fl.data_stats import Bins
from tests.policy.test_gate import repeated
from tests.zoo.build import ZOO

SMALL = {"network": "small_cnn", "image_size": 16}
BINS = Bins(8, -2.2, 2.7)


@pytest.fixture(scope="module")
def moles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "ham10000", tmp_path_factory.mktemp("moles") / "data", per_class=20, size=16
    )


@pytest.fixture(scope="module")
def bundle(moles: Path) -> Bundle:
    return with_data(open_problem("ham10000", SMALL), str(moles), SMALL).bundle


@pytest.fixture(scope="module")
def everything(bundle: Bundle, moles: Path) -> dict[str, Any]:
    return gather(bundle, str(moles), StatisticsOptions(BINS, min_count=0))


def test_counts_and_intensities_are_those_of_the_images(
    bundle: Bundle, everything: dict[str, Any]
) -> None:
    assert everything["form"] == DOCUMENT_FORM
    for section in ("train", "validate", "test"):
        part, items = everything["sections"][section], bundle.items(section)
        assert part["images"] == len(items)
        labels = [item["label"] for item in items]
        assert part["tables"]["class"] == {
            name: labels.count(i) for i, name in enumerate(bundle.classes)
        }
        centres = [item["centre"] for item in items]
        assert part["tables"]["centre"] == {
            name: centres.count(name) for name in sorted(set(centres))
        }
        images = [
            seen.image.double().numpy() for seen in scan(bundle, section) if seen.image is not None
        ]
        for channel, about in enumerate(part["intensity"]["channels"]):
            rows = np.stack([image[channel].ravel() for image in images])
            assert about["mean"] == pytest.approx(rows.mean(), rel=1e-3)
            assert about["sd"] == pytest.approx(rows.std(), rel=1e-3)
            shares = np.mean(
                [np.histogram(row, 8, (-2.2, 2.7))[0] / len(row) for row in rows], axis=0
            )
            assert about["shares"] == pytest.approx(
                shares.tolist(), abs=1.1e-3
            )  # thousandths, rounded down


def test_age_and_sex_are_counted_where_the_tables_have_them(
    bundle: Bundle, moles: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    with (folder / "patients.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image_id", "age", "sex"])
        rows.writerows(
            [[item["id"], 30 + 40 * (i % 2), "F"] for i, item in enumerate(bundle.items("train"))]
        )
    part = gather(bundle, str(folder), StatisticsOptions(BINS, min_count=5))["sections"]["train"][
        "tables"
    ]
    count = len(bundle.items("train"))
    assert part["age"] == {"20–39": (count + 1) // 2, "60–79": count // 2}
    assert part["sex"] == {"f": count}


def test_ages_that_are_not_read_are_said_on_the_site_s_own_screen_alone(
    bundle: Bundle, moles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "moles"
    shutil.copytree(moles, folder)
    ids = [
        item["id"] for section in ("train", "validate", "test") for item in bundle.items(section)
    ]
    for table in folder.glob("*.csv"):
        rows = tables.read_csv(table, ())
        for row in rows:
            row.pop("age", None)
            row.pop("age_approx", None)
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
    ages = ["about 50" if number < 12 else "45Y" for number in range(len(ids))]
    pairs = zip(ids, ages, strict=True)
    (folder / "ages.csv").write_text("\n".join(["image_id,age", *map(",".join, pairs)]) + "\n")
    config = [f"--config={key}={value}" for key, value in SMALL.items()]
    assert cli.main(["site", "stats", "ham10000", "--data", str(folder), *config, "--json"]) == 0
    said = capsys.readouterr()
    assert "about 50" not in said.out
    assert (
        "note, for you alone: 12 ages are not read, or fit several bands, and count as not stated: 'about 50'"
        in said.err
    )


def test_small_counts_are_hidden_and_rare_names_are_not_told(
    bundle: Bundle, moles: Path, everything: dict[str, Any]
) -> None:
    found = gather(bundle, str(moles), StatisticsOptions(BINS, min_count=15))
    hidden = 0
    for section, part in found["sections"].items():
        whole = everything["sections"][section]
        if whole["images"] < 15:
            assert part == {"images": None, "tables": {}, "intensity": None}
            continue
        for name, cells in part["tables"].items():
            assert all(
                count is None or 15 <= count == whole["tables"][name][cell]
                for cell, count in cells.items()
            )
            hidden += list(cells.values()).count(None)
            if name != "class":
                assert all(count is not None for cell, count in cells.items() if cell != OTHERS)
    assert hidden


def test_bins_of_few_images_are_hidden_and_never_one_alone(bundle: Bundle, moles: Path) -> None:
    found = gather(bundle, str(moles), StatisticsOptions(Bins(40, -2.2, 2.7), min_count=15))
    images = [
        seen.image.double().numpy() for seen in scan(bundle, "train") if seen.image is not None
    ]
    for channel, about in enumerate(found["sections"]["train"]["intensity"]["channels"]):
        present = np.array(
            [np.histogram(image[channel], 40, (-2.2, 2.7))[0] > 0 for image in images]
        ).sum(0)
        hidden = [share is None for share in about["shares"]]
        assert all(hide for hide, count in zip(hidden, present, strict=True) if count < 15)
        assert sum(hidden) != 1


def test_noise_is_in_every_number_and_repeats_with_the_same_entropy_alone(
    bundle: Bundle, moles: Path, everything: dict[str, Any]
) -> None:
    def noisy(seed: int, epsilon: float = 0.5) -> dict[str, Any]:
        return gather(
            bundle,
            str(moles),
            StatisticsOptions(BINS, min_count=5, epsilon=epsilon, entropy=repeated(seed)),
        )

    one = noisy(1)
    assert one == noisy(1) != noisy(2)
    train, true = one["sections"]["train"], everything["sections"]["train"]
    assert train["images"] != true["images"]
    assert train["tables"]["class"] != true["tables"]["class"]
    assert train["intensity"]["channels"][0]["mean"] != true["intensity"]["channels"][0]["mean"]
    close = noisy(1, 99.0)["sections"]["train"]
    assert close["images"] == true["images"]
    assert close["intensity"]["channels"][0]["mean"] == pytest.approx(
        true["intensity"]["channels"][0]["mean"], abs=0.1
    )
    # images, five tables, and a histogram for each of three channels
    assert set(train["tables"]) == {"class", "age", "sex", "longest side", "widest spacing"}
    assert one["epsilon_of_one_image"] == 0.5 * (1 + len(train["tables"]) + 3)


def test_with_noise_cells_are_known_beforehand_and_empty_ones_have_noise_too(
    bundle: Bundle, moles: Path, tmp_path: Path
) -> None:
    """Another patient, of another age and an odd sex, changes no name of a table or a cell."""
    documents = []
    for sexes in ("F", "X"):
        folder = tmp_path / sexes
        folder.mkdir()
        with (folder / "patients.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["image_id", "age", "sex"])
            rows.writerows([[item["id"], 30, sexes] for item in bundle.items("train")])
        asked = StatisticsOptions(BINS, min_count=0, epsilon=0.5, entropy=repeated(3))
        documents.append(gather(bundle, str(folder), asked)["sections"]["train"]["tables"])
    one, other = documents
    assert {name: list(cells) for name, cells in one.items()} == {
        name: list(cells) for name, cells in other.items()
    }
    assert list(one["sex"]) == ["female", "male", "other", UNRECORDED]
    assert "centre" not in one
    empty = [count for cell, count in one["age"].items() if cell != "20–39"]
    assert len(empty) == 5
    assert any(empty)
    exact = gather(bundle, str(tmp_path / "F"), StatisticsOptions(BINS, min_count=0, epsilon=99.0))[
        "sections"
    ]["train"]["tables"]
    count = len(bundle.items("train"))
    assert exact["sex"] == {"female": count, "male": 0, "other": 0, UNRECORDED: 0}
    assert exact["widest spacing"][UNRECORDED] == count
    assert all(sum(cells.values()) == count for cells in exact.values())


def test_how_many_are_not_recorded_is_a_cell_as_any_other(bundle: Bundle, moles: Path) -> None:
    """Were it left out, it would follow from the number of images."""
    made = _Counts(bundle, BINS)
    made._images = 50
    made._named_by_data = {"centre": Counter({"a": 26, "b": 20})}
    told = made.released(StatisticsOptions(BINS, min_count=10))["tables"]["centre"]
    assert told == {"b": 20, OTHERS: None}
    assert made.released(StatisticsOptions(BINS, min_count=0))["tables"]["centre"] == {
        "a": 26,
        "b": 20,
        UNRECORDED: 4,
    }


def test_structures_are_counted_as_present_or_absent(tmp_path: Path) -> None:
    bundle = ZOO["seg3d_decathlon_json"](tmp_path)
    opened = with_data(open_problem(str(bundle.path), bundle.overrides), None, bundle.overrides)
    found = gather(opened.bundle, opened.folder, StatisticsOptions(Bins(4, 0, 1), min_count=0))[
        "sections"
    ]["train"]
    structures = {
        name: cells for name, cells in found["tables"].items() if name.startswith("structure ")
    }
    assert structures
    assert all(sum(cells.values()) == found["images"] for cells in structures.values())
    assert "widest spacing" in found["tables"]


def test_bins_come_from_the_metadata_or_are_asked_for(bundle: Bundle, tmp_path: Path) -> None:
    assert bins_of(bundle, 16, None) == Bins(16, -2.2, 2.7)
    assert bins_of(bundle, 16, "0,1") == Bins(16, 0, 1)
    for number, given in ((0, None), (2000, None), (4, "1,0"), (4, "a,b"), (4, "1")):
        with pytest.raises(InputError):
            bins_of(bundle, number, given)


def test_an_unreadable_image_stops_it_by_name(moles: Path, tmp_path: Path) -> None:
    data = datasets.write_phantom("ham10000", tmp_path / "data", per_class=10, size=16)
    opened = with_data(open_problem("ham10000", SMALL), str(data), SMALL).bundle
    victim = Path(opened.data("validate")[0]["image"])
    victim.write_bytes(b"")
    with pytest.raises(InputError, match=victim.stem):
        gather(opened, str(data), StatisticsOptions(BINS))


def test_what_is_shown_is_what_is_written(
    bundle: Bundle, moles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = [f"--config={key}={value}" for key, value in SMALL.items()]
    command = ["site", "stats", "ham10000", "--data", str(moles), *config, "--bins", "8"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "Nothing was written; --out FILE writes exactly this."
    assert "Counts below 10 are hidden" in shown
    out = tmp_path / "clinic.json"
    assert cli.main([*command, "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == document
    assert out.read_bytes() == encoded(document)
    assert document == gather(bundle, str(moles), StatisticsOptions(BINS, min_count=10))
    assert "\n".join(text(document)) in shown
    for wrong in (["--out", str(out)], ["--noise", "0"], ["--min-count", "-1"], ["--range", "2,1"]):
        assert cli.main([*command, *wrong]) == 2
    policy = tmp_path / "policy.yaml"
    policy.write_text("outbound: {min_count: 30}\n")
    assert cli.main([*command, "--policy", str(policy), "--min-count", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["min_count"] == 30
