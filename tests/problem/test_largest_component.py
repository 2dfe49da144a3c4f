"""The largest component of a structure is kept where this raises the validation Dice, and nowhere else."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import label
from torch import Tensor, nn

from medfl.bundle.bundle import Bundle
from medfl.bundle.files import shipped_folders
from medfl.cli import verbs as cli
from medfl.core import InputError
from medfl.data.prepared import Shard, Stacked
from medfl.evaluation.evaluators import MaskEvaluator
from medfl.evaluation.metrics import Cases, summarise
from medfl.problem.tasks.segmentation import Segmentation

NAMES = ("background", "left", "right")


def drawn(*, islands: bool, parts: int, absent: bool = False) -> tuple[Tensor, Tensor]:
    """Prediction and reference (16, 16): a block of class 1 with a false island, and `parts` true blocks of class 2."""
    reference = torch.zeros(16, 16, dtype=torch.uint8)
    if not absent:
        reference[1:5, 1:5] = 1

    for part in range(parts):
        reference[8:11, 1 + 5 * part : 4 + 5 * part] = 2

    prediction = reference.clone()
    if islands:
        prediction[13:15, 13:15] = 1

    return prediction, reference


def evaluated(masks: list[tuple[Tensor, Tensor]], names: tuple[str, ...], **options: Any) -> Cases:
    """Score predictions as a network's, which returns its input."""
    one_hot = [nn.functional.one_hot(p.long(), len(names)).movedim(-1, 0).float() for p, _ in masks]
    items = [{"id": f"c{index}"} for index in range(len(masks))]
    prepared = Stacked(items, torch.stack(one_hot), torch.stack([r[None] for _, r in masks]))
    evaluator = MaskEvaluator(
        lambda p, y: torch.tensor(0.0), names, lambda x, network: network(x), **options
    )
    shard = Shard.of(prepared, range(len(masks)))
    return evaluator(
        nn.Identity(), shard, torch.device("cpu"), surface_metrics=("hd95", "surface_dice")
    )


def decided(validation: list[Any], test: list[Any], names: tuple[str, ...] = NAMES) -> Cases:
    return Segmentation().decided(
        evaluated(test, names, compares=True), evaluated(validation, names, compares=True)
    )


def kept(cases: Cases, names: tuple[str, ...] = NAMES) -> tuple[str, ...]:
    structures = Segmentation().by_name(summarise(cases), cases, names)
    return tuple(name for name in structures if structures[name].get("largest_component"))


@pytest.mark.parametrize(
    ("validation", "classes"),
    [
        ([drawn(islands=True, parts=1)], ("left",)),  # a false island is removed
        ([drawn(islands=False, parts=2)], ()),  # the second part is real
        ([drawn(islands=False, parts=1)], ()),  # nothing changes
        ([drawn(islands=True, parts=1, absent=True)], ()),  # no validation case has it
        ([], ()),
    ],
)
def test_only_what_raises_the_validation_dice_is_kept(validation: Any, classes: Any) -> None:
    """Scores of the decided test cases are those of a network whose masks are post-processed."""
    test = [drawn(islands=True, parts=2), drawn(islands=True, parts=1, absent=True)]
    cases = (
        decided(validation, test)
        if validation
        else Segmentation().decided(evaluated(test, NAMES, compares=True), None)
    )
    assert kept(cases) == classes

    expected = evaluated(test, NAMES, largest=classes)
    assert expected.values.keys() == {n for n in cases.values if not n.startswith("kept_")}
    for name, values in expected.values.items():
        torch.testing.assert_close(cases.values[name], values, equal_nan=True)


def test_a_binary_structure_is_reported_with_both_dice() -> None:
    names = ("background", "left")
    prediction, reference = drawn(islands=True, parts=0)
    cases = decided([(prediction, reference)], [(prediction, reference)], names)
    left = Segmentation().by_name(summarise(cases), cases, names)["left"]
    assert left["largest_component"] == 1
    assert left["validation_dice"] == pytest.approx(2 * 16 / (16 + 20))
    assert left["validation_dice_largest"] == left["dice"] == 1


def test_cases_of_a_bundle_that_does_not_declare_it_stay_as_they_are() -> None:
    cases = evaluated([drawn(islands=True, parts=1)], NAMES)
    assert Segmentation().decided(cases, cases) is cases
    assert not any(name.startswith("largest") for name in cases.values)


@pytest.mark.parametrize("entry", ["yes", 5, ["liver"], {"left": 1}])
def test_an_entry_that_names_no_structure_is_refused(entry: Any, tmp_path: Path) -> None:
    folder = tmp_path / "lungs"
    shutil.copytree(shipped_folders()["lung_cxr"], folder)
    protocol = folder / "configs/federated.yaml"
    protocol.write_text(f"{protocol.read_text()}\nlargest_component: {json.dumps(entry)}\n")
    with pytest.raises(InputError, match="largest_component .* true, or structures"):
        assert Bundle(folder).evaluator


def discs(folder: Path) -> None:
    """Draw 24 pictures of 32 x 32 pixels: a disc, which is the structure, and a smaller one as bright as it."""
    rows, columns = np.mgrid[:32, :32]
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)

    for number in range(24):
        y, x = 10 + number % 5, 9 + number % 7
        mask = (rows - y) ** 2 + (columns - x) ** 2 < 49
        spot = (rows - 26) ** 2 + (columns - 25 + number % 4) ** 2 < 9
        for part, image in (
            ("images", 60 + 90 * (mask | spot) + 7 * columns % 13),
            ("masks", 255 * mask),
        ):
            Image.fromarray(image.astype(np.uint8)).save(folder / part / f"p{number}.png")


def test_a_sites_own_model_is_judged_alike_at_all_sites(tmp_path: Path) -> None:
    """Its own validation items decide, also on everybody's test items: these were scored with all components."""
    data, folder, out = (tmp_path / name for name in ("data", "bundle", "run"))
    discs(data)
    where = ["--images", str(data / "images"), "--masks", str(data / "masks"), "--size", "32"]
    assert cli.main(["new", str(folder), *where]) == 0
    with (folder / "configs/federated.yaml").open("a") as protocol:
        protocol.write("largest_component: true\n")

    training = ["--sites", "2", "--rounds", "1", "--local-epochs", "3", "--batch-size", "2"]
    command = ["run", str(folder), "--method", "local", "--data", str(data), *training]
    assert cli.main([*command, "--cross-site", "--jobs", "1", "--out", str(out)]) == 0

    with (out / "sites.csv").open() as table:
        sites = {row["site"]: row for row in csv.DictReader(table)}

    with (out / "cross_site.csv").open() as table:
        rows = [row for row in csv.DictReader(table) if row["model"] == "personal"]

    assert any(float(row["personal_largest_component_structure"]) for row in sites.values())
    for row in rows:
        if row["of"] == row["at"]:
            assert float(row["dice"]) == float(sites[row["at"]]["personal_dice"])

    summary = json.loads((out / "summary.json").read_text())
    means = []
    for site in sites:
        of_site = [row for row in rows if row["of"] == site]
        count = sum(int(row["cases"]) for row in of_site)
        means.append(sum(int(row["cases"]) * float(row["dice"]) for row in of_site) / count)

    assert summary["site_models"]["mean"]["dice"] == pytest.approx(sum(means) / len(means))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FedBN, which is judged by personal models, of a planned bundle."""
    root = tmp_path_factory.mktemp("shared")
    discs(root / "data")
    where = ["--images", str(root / "data/images"), "--masks", str(root / "data/masks")]
    planned = ["plan", *where, "--sites", "2", "--memory", "0.5", "--out", str(root / "bundle")]
    assert cli.main(planned) == 0
    training = ["--rounds", "2", "--local-epochs", "2", "--batch-size", "2", "--jobs", "1"]
    command = ["run", str(root / "bundle"), "--method", "fedbn", "--data", str(root / "data")]
    assert cli.main([*command, *training, "--out", str(root / "run")]) == 0
    return root


@pytest.mark.slow
def test_the_global_model_of_a_personal_method_keeps_what_its_scores_keep(
    shared: Path,
) -> None:
    summary = json.loads((shared / "run/summary.json").read_text())
    scores = summary["global"]["last"]
    assert scores["classes"]["structure"]["largest_component"]
    out = shared / "evaluated"
    assert (
        cli.main(
            ["evaluate", str(shared / "run"), "--data", str(shared / "data"), "--out", str(out)]
        )
        == 0
    )
    assert json.loads((out / "summary.json").read_text())["last"]["dice"] == scores["dice"]
    images = str(shared / "data/images")
    command = ["predict", str(shared / "run"), images, "--reference", str(shared / "data/masks")]
    assert cli.main([*command, "--out", str(shared / "predicted")]) == 0
    assert cli.main(["export", str(shared / "run"), "--out", str(shared / "exported")]) == 0
    metadata = json.loads((shared / "exported/configs/metadata.json").read_text())
    assert metadata["medfl"]["largest_components"] == ["structure"]
    for path in (shared / "predicted").rglob("*.png"):
        _, parts = label(np.asarray(Image.open(path)) > 0, np.ones((3, 3)))
        assert parts <= 1
