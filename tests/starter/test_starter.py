"""`medfl new`: bundles for pictures, pairs and volumes of one's own, which are then federated as they are."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from monai.bundle import ConfigParser
from monai.data import MetaTensor
from PIL import Image

import medfl
from medfl import datasets
from medfl.bundle import files
from medfl.bundle.bundle import Bundle
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.data.intensities import constants
from medfl.datasets import own
from medfl.export.bundle_writer import export
from medfl.policy.inspection import inspect
from medfl.runs.launch import federate
from medfl.runs.plan import Request, make_plan
from medfl.starter import starter

SCHEMA = Path(medfl.__file__).parent / "export" / "schemas" / "bundle_metadata.json"


def disc(side: int, radius: float, draws: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A noisy picture with a bright disc, and where it is."""
    y, x = np.mgrid[:side, :side]
    inside = (y - side / 2) ** 2 + (x - side / 2) ** 2 < radius**2
    return np.clip(80 + 80 * inside + draws.normal(0, 9, inside.shape), 0, 255).astype(
        np.uint8
    ), inside


def save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        Image.fromarray(pixels).save(path)
    else:
        nib.save(nib.Nifti1Image(pixels, np.diag([2.0, 1.0, 1.0, 1.0])), path)


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    draws = np.random.default_rng(0)
    for name, radius in (("no", 4), ("yes, it is", 11)):
        for number in range(20):
            save(disc(32, radius, draws)[0], tmp_path / "data" / name / f"{number:02d}.png")
    return tmp_path / "data"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    draws = np.random.default_rng(0)
    for number in range(20):
        pixels, inside = disc(32, 8, draws)
        save(np.stack([pixels] * 3, 2), tmp_path / "data" / "images" / f"c{number:02d}.png")
        save(
            (255 * inside).astype(np.uint8), tmp_path / "data" / "masks" / f"c{number:02d}_mask.png"
        )
    return tmp_path / "data"


@pytest.fixture
def solid(tmp_path: Path) -> Path:
    draws = np.random.default_rng(0)
    for number in range(12):
        voxels = draws.normal(0, 1, (18, 20, 22)).astype(np.float32)
        classes = np.zeros(voxels.shape, np.uint8)
        classes[5:9, 5:12, 5:15], classes[9:13, 5:12, 5:15] = 1, 2
        save(voxels + 4 * classes, tmp_path / "data" / "images" / f"c{number:02d}.nii.gz")
        save(classes, tmp_path / "data" / "labels" / f"c{number:02d}.nii.gz")
    return tmp_path / "data"


def in_folders(data: Path, names: tuple[str, str]) -> None:
    """Give each case a folder of its own, in which its files are called alike."""
    for folder in names:
        for path in list((data / folder).iterdir()):
            case, dot, ending = path.name.removesuffix("_mask.png").partition(".")
            place = data / folder / case
            place.mkdir()
            path.rename(place / f"{'image' if folder == 'images' else 'mask'}.{ending or 'png'}")


def train(bundle: Path, data: Path, out: Path, **settings: Any) -> medfl.Result:
    requested = {"sites": 2, "rounds": 1, "lr": 0.01, "say": str, **settings}
    return medfl.run(bundle, data=data, out=out, jobs=1, **requested)


def predicted_without_its_images(
    run: medfl.Result, data: Path, image: Path
) -> list[dict[str, Any]]:
    """What `medfl predict` says of an image where none of those that the run was trained on are at hand."""
    apart = Path(shutil.copy(image, run.path.parent))
    data.rename(data.with_name("away"))
    rows = medfl.load_run(run.path).predict(apart, out=run.path.parent / "predicted")
    data.with_name("away").rename(data)
    return rows


def checked(bundle: Path) -> None:
    """What every bundle that was written must have: metadata by MONAI's schema, and no place of this machine."""
    document = json.loads((bundle / "configs" / "metadata.json").read_text())
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    told = "".join(path.read_text() for path in bundle.rglob("*.*") if path.is_file())
    assert str(bundle.parent) not in told


def test_labelled_pictures_become_a_bundle_that_runs(labelled: Path, tmp_path: Path) -> None:
    seen = starter.survey(labelled)
    assert (seen.kind, seen.classes, seen.counts) == ("labelled", ("no", "yes, it is"), (20, 20))
    bundle = starter.write(tmp_path / "mine", seen, size=32)
    checked(bundle)
    run = train(bundle, labelled, tmp_path / "run")
    assert (run.task, run.classes) == ("classification", seen.classes)
    assert run.summary["data_source"] == "real"
    (answer,) = run.predict([disc(32, 4, np.random.default_rng(1))[0]])
    assert set(answer) == {"id", "predicted", "p_no", "p_yes, it is"}
    (row,) = predicted_without_its_images(run, labelled, labelled / "no" / "03.png")
    assert set(row) == {"id", "prediction", "no", "yes, it is"}


def test_fedbms_generator_knows_the_constants_that_were_written(
    labelled: Path, tmp_path: Path
) -> None:
    """(x - 0.5) / 0.25 makes -2 to 2 of pictures; a bundle whose transforms do something else is refused before."""
    bundle = starter.write(tmp_path / "mine", starter.survey(labelled), size=32)
    config = {"network": "small_cnn", "image_size": 16}
    read = constants(
        Bundle(str(bundle), {**config, "dataset_dir": str(labelled)})
        .section("train")
        .source.transforms
    )
    assert read == ((0.5,), (0.25,))
    file = bundle / "configs" / "train.yaml"
    changed = file.read_text().replace("_target_: NormalizeIntensityd", "_target_: AdjustContrastd")
    file.write_text(changed.replace("    subtrahend: 0.5\n    divisor: 0.25\n", "    gamma: 2.0\n"))
    other = (
        Bundle(str(bundle), {**config, "dataset_dir": str(labelled)})
        .section("train")
        .source.transforms
    )
    with pytest.raises(
        InputError, match="^transform AdjustContrastd; .*; say which they are with --set normalise="
    ):
        constants(other)


def test_pictures_with_masks_become_a_bundle_that_runs(pairs: Path, tmp_path: Path) -> None:
    seen = starter.survey(pairs / "images", pairs / "masks")
    assert (seen.kind, seen.channels, seen.classes) == ("pictures", 3, ("background", "structure"))
    bundle = starter.write(tmp_path / "mine", seen, size=32, network="unet8")
    checked(bundle)
    run = train(bundle, pairs, tmp_path / "run")
    assert run.task == "segmentation"
    (answer,) = run.predict(pairs / "images" / "c03.png")
    assert answer["mask"].shape == (32, 32)
    (row,) = predicted_without_its_images(run, pairs, pairs / "images" / "c03.png")
    assert row["structure_share"] == pytest.approx((answer["mask"] == 1).mean(), rel=1e-5)


@pytest.mark.slow
def test_structures_have_the_names_that_are_given(pairs: Path, tmp_path: Path) -> None:
    """A name more than there are values is a structure that no mask has."""
    data, bundle = pairs / "images", tmp_path / "named"
    with pytest.raises(
        InputError, match="names Left lung, tumour, and masks have the values 255; "
    ):
        starter.survey(data, pairs / "masks", names=["Left lung", "tumour"])
    for mask in (pairs / "masks").iterdir():
        save(np.array(Image.open(mask)) // 255, mask)
    command = [
        "new",
        str(bundle),
        "--images",
        str(data),
        "--masks",
        str(pairs / "masks"),
        "--classes",
    ]
    assert cli.main([*command, "Left lung, tumour"]) == 0
    channels = json.loads((bundle / "configs" / "metadata.json").read_text())[
        "network_data_format"
    ]["outputs"]["pred"]
    assert channels["channel_def"] == {"0": "background", "1": "Left lung", "2": "tumour"}
    checked(bundle)
    seen = starter.survey(data, pairs / "masks", names=["Left lung", "tumour"])
    assert seen.counts[1] == 20
    assert seen.counts[2] == 0
    assert "no mask has the values 2" in seen.notes
    run = train(bundle, pairs, tmp_path / "run", config={"image_size": 32, "network": "unet8"})
    with (run.path / "sites.csv").open() as file:
        sites = list(csv.DictReader(file))
    cases = run.predictions
    found = run.summary["last"]["classes"]
    assert found["tumour"] == {"dice": None, "hd95": None, "surface_dice": None, "cases": 0}
    assert (
        found["Left lung"]["cases"]
        == len(cases)
        == sum(int(row["received_cases_left_lung"]) for row in sites)
    )
    for kind in ("dice", "hd95", "surface_dice"):
        assert found["Left lung"][kind] == pytest.approx(
            np.mean([row[f"{kind}_left_lung"] for row in cases])
        )
        own = [row[f"{kind}_left_lung"] for row in cases if row["site"] == sites[0]["site"]]
        assert float(sites[0][f"received_{kind}_left_lung"]) == pytest.approx(np.mean(own))
    assert [row["received_cases_tumour"] for row in sites] == ["0", "0"]
    assert all(row["dice_tumour"] is None for row in cases)
    assert "no test case has it" in (run.path / "report.html").read_text()
    made = export(run.path, tmp_path / "card", formats=())["bundles"][0]
    assert made["eval_metrics"]["structures"] == found
    card = (tmp_path / "card" / "docs" / "README.md").read_text()
    left = found["Left lung"]
    numbers = " | ".join(f"{left[kind]:.3f}" for kind in ("dice", "hd95", "surface_dice"))
    assert f"| Left lung | {left['cases']} | {numbers} |\n| tumour | 0 | – | – | – |\n" in card
    quick = train(
        bundle,
        pairs,
        tmp_path / "quick",
        metrics="dice",
        config={"image_size": 32, "network": "unet8"},
    ).summary["last"]
    assert quick["classes"] == {
        "Left lung": {"dice": left["dice"], "cases": left["cases"]}, "tumour": {"dice": None, "cases": 0}
    }  # fmt: skip
    assert not any(name.startswith(("hd95", "surface")) for name in quick)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("a b,a_b", "'a b'"),
        ("lung,Background", "'Background'"),
        ("lung,+", "'+'"),
        ("x#y,z", "'x#y'"),
    ],
)
def test_names_that_metrics_cannot_tell_apart_are_refused(
    names: str, told: str, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "new",
        str(tmp_path / "b"),
        "--images",
        str(pairs / "images"),
        "--masks",
        str(pairs / "masks"),
    ]
    assert cli.main([*command, "--classes", names]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_there_is_a_name_for_each_value(pairs: Path) -> None:
    mask = pairs / "masks" / "c03_mask.png"
    pixels = np.array(Image.open(mask))
    save(np.where(pixels > 0, 2, 0).astype(np.uint8), mask)
    with pytest.raises(
        InputError, match="the values 2, 255; a name for each value.*; give 2 names"
    ):
        starter.survey(pairs / "images", pairs / "masks", names=["lung"])
    with pytest.raises(InputError, match="without --masks"):
        starter.survey(pairs / "images", names=["lung"])


@pytest.mark.slow
def test_a_run_says_how_many_images_have_no_mask(pairs: Path, tmp_path: Path) -> None:
    """Also of images that came after the bundle was written, once a run, and again where it is resumed."""
    bundle = starter.write(
        tmp_path / "mine",
        starter.survey(pairs / "images", pairs / "masks"),
        size=32,
        network="unet8",
    )
    for number in range(3):
        save(disc(32, 8, np.random.default_rng(number))[0], pairs / "images" / f"new{number}.png")
    said = list[str]()
    train(bundle, pairs, tmp_path / "run", say=said.append, local_epochs=1)
    note = "3 of 23 images have no mask and are left out, first new0"
    assert said.count(f"note: {note}") == 1

    def recorded() -> list[str]:
        notes: list[str] = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["notes"]
        return notes

    assert recorded().count(note) == 1
    assert said.count(f"note: {own.UNKNOWN_PATIENTS}") == 1
    assert "Patients are not known: images of one" in (tmp_path / "run" / "report.html").read_text()
    said.clear()
    federate(requested={"rounds": 2}, out=tmp_path / "run", resume=True, jobs=1, say=said.append)
    assert said.count(f"note: {note}") == 1
    assert recorded().count(note) == 1


def test_no_images_are_said_to_lack_masks_where_none_do(pairs: Path) -> None:
    """Neither of whole pairs, nor of a folder whose pairs are not what the items are."""
    items = [
        item
        for section in ("train", "validate", "test")
        for item in own.paired(pairs, "images", "masks", section)
    ]
    named = [{**item, "group": "p1"} for item in items]
    ids = {"images": "images", "masks": "masks"}
    assert own.notes(pairs, named, ids) == ()
    assert own.notes(pairs, items, ids) == (own.UNKNOWN_PATIENTS,)
    (pairs / "masks" / "c00_mask.png").unlink()
    assert own.notes(pairs, items, ids) == ()
    assert own.notes(pairs, [item for item in named if item["id"] != "c00"], ids) == (
        "1 of 20 images have no mask and are left out, first c00",
    )
    assert own.notes(pairs, items, {**ids, "masks": "nowhere"}) == ()


@pytest.mark.slow
def test_volumes_with_masks_become_a_bundle_that_runs(solid: Path, tmp_path: Path) -> None:
    seen = starter.survey(solid / "images", solid / "labels")
    assert (seen.kind, seen.patch, seen.counts) == ("volumes", (16, 16, 16), (12, 12, 12))
    bundle = starter.write(tmp_path / "mine", seen)
    checked(bundle)
    run = train(bundle, solid, tmp_path / "run", local_epochs=1)
    row = run.predict()[0]
    assert row["mask"].shape == (18, 20, 22)
    recorded = next(other for other in run.predictions if other["id"] == row["id"])
    assert row["dice"] == pytest.approx(recorded["dice"], abs=1e-6)


@pytest.mark.parametrize("kind", ["pairs", "solid"])
def test_predicted_masks_of_files_of_one_name_stay_apart(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    data, names = (
        request.getfixturevalue(kind),
        ("images", "masks" if kind == "pairs" else "labels"),
    )
    in_folders(data, names)
    bundle = starter.write(tmp_path / "mine", starter.survey(data / names[0], data / names[1]))
    config = ConfigParser()
    config.read_config(bundle / "configs" / "inference.yaml")
    config.update({"dataset_dir": str(data), "output_dir": str(tmp_path / "out")})
    writer = config.get_parsed_content("postprocessing").transforms[-1]
    for item in config.get_parsed_content("dataset"):
        pred = torch.zeros(3, *item["image"].shape[1:])
        writer({**item, "pred": MetaTensor(pred, meta=item["image"].meta)})
    found = sorted(
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")
    )
    ids = sorted(item["id"] for item in own.paired(data, *names, "test"))
    assert len(found) == len(ids) > 1
    assert [name.partition("/")[0] for name in found] == [ident.partition("/")[0] for ident in ids]


@pytest.mark.parametrize("kind", ["labelled", "pairs", "solid"])
def test_a_site_accepts_what_was_written(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    data = request.getfixturevalue(kind)
    masks = {"labelled": None, "pairs": data / "masks", "solid": data / "labels"}[kind]
    seen = starter.survey(data if masks is None else data / "images", masks)
    found = inspect(starter.write(tmp_path / "mine", seen))
    assert [refusal.why for refusal in found.refusals] == []


def test_the_same_images_elsewhere_give_the_same_bundle(labelled: Path, tmp_path: Path) -> None:
    seen = starter.survey(labelled)
    one = starter.write(tmp_path / "one" / "mine", seen)
    (tmp_path / "two").mkdir()
    labelled.rename(tmp_path / "two" / "elsewhere")
    other = starter.write(
        tmp_path / "three" / "mine", starter.survey(tmp_path / "two" / "elsewhere")
    )
    assert medfl.Bundle(str(one)).sha256 == medfl.Bundle(str(other)).sha256


def test_wrong_images_are_refused_by_name(labelled: Path, pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no folder"):
        starter.survey(tmp_path / "nowhere")
    with pytest.raises(InputError, match="0 folders with pictures"):
        starter.survey(labelled / "no")
    with pytest.raises(InputError, match="beside each other"):
        starter.survey(pairs / "images", pairs)
    (labelled / "no").rename(labelled / "#1")
    with pytest.raises(InputError, match="class folder '#1'"):
        starter.survey(labelled)
    (labelled / "#1").rename(labelled / "no")
    (labelled / "no" / "03.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"no/03\.png cannot be read"):
        starter.survey(labelled)
    save(np.full((9, 9), 1, np.uint8), pairs / "masks" / "c04_mask.png")
    with pytest.raises(InputError, match=r"c04_mask\.png has 9 x 9 pixels"):
        starter.survey(pairs / "images", pairs / "masks")


def test_wrong_wishes_are_refused_and_nothing_is_written(labelled: Path, tmp_path: Path) -> None:
    seen = starter.survey(labelled)
    for settings, told in (
        ({"network": "unet8"}, "labelled pictures: efficientnet_b0"),
        ({"network": "resnet19"}, "--network resnet19"),
        ({"size": 8}, "at least 16 pixels"),
    ):
        with pytest.raises(InputError, match=told):
            starter.write(tmp_path / "mine", seen, **settings)
    with pytest.raises(InputError, match="bundle name"):
        starter.write(tmp_path / "my bundle", seen)
    assert not (tmp_path / "mine").exists()
    with pytest.raises(InputError, match="exists"):
        starter.write(labelled, seen)


def test_the_verb_says_what_it_saw_and_how_to_go_on(
    labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["new", str(tmp_path / "mine"), "--images", str(labelled)]
    assert cli.main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["classes"] == {"no": 20, "yes, it is": 20}
    assert (tmp_path / "mine" / "configs" / "train.yaml").is_file()
    shutil.rmtree(tmp_path / "mine")
    assert cli.main(command) == 0
    assert document["next"] in capsys.readouterr().out


def test_a_bundle_of_images_from_several_centres_has_them_as_sites(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def new(name: str, centres: str) -> Path:
        rows = [f"c{n:02d}.png,{centres[n % len(centres)].strip()}\n" for n in range(20)]
        (pairs / "cases.csv").write_text("file,centre\n" + "".join(rows))
        folders = ["--images", str(pairs / "images"), "--masks", str(pairs / "masks")]
        assert cli.main(["new", str(tmp_path / name), *folders]) == 0
        return tmp_path / name

    bundle = str(new("two", "ab"))
    assert "a site for each centre: a, b\n" in capsys.readouterr().out
    assert list(make_plan(Request(bundle=bundle, data=str(pairs))).run.partition.sites) == [
        "a",
        "b",
    ]
    with pytest.raises(InputError, match=r"it has 2: a, b; .* --partition iid"):
        make_plan(Request(bundle=bundle, data=str(pairs), sites=3))

    plan = make_plan(Request(bundle=bundle, data=str(pairs), sites=3, partition="iid"))
    assert len(plan.run.partition.sites) == 3
    for name, centres in (("one", "a"), ("some-unknown", "ab ")):
        federated = yaml.safe_load((new(name, centres) / "configs/federated.yaml").read_text())
        assert (federated["partition"], federated["sites"]) == ("iid", 3)


def own_groups(bundle: Path, data: Path) -> int:
    opened = medfl.Bundle(str(bundle), {"dataset_dir": str(data)})
    return len(
        {
            item["group"]
            for section in ("train", "validate", "test")
            for item in opened.items(section)
        }
    )


def test_the_verb_offers_patients_of_file_names_and_takes_none_unasked(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, ending in (("images", ""), ("masks", "_mask")):
        for number in range(20):
            path = pairs / folder / f"c{number:02d}{ending}.png"
            path.rename(path.with_name(f"pat {number // 4}_{number:02d}{ending}.png"))
    told = ["--images", str(pairs / "images"), "--masks", str(pairs / "masks")]
    assert cli.main(["new", str(tmp_path / "mine"), *told]) == 0
    said = capsys.readouterr().out
    assert "patients are not known" in said
    line = next(line for line in said.splitlines() if "5 patients then" in line)
    offered = shlex.split(line.partition("then): medfl ")[2])
    assert own_groups(tmp_path / "mine", pairs) == 20
    assert cli.main([*offered, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["patients"], document["group_by"]) == (5, "^([^_/]+)_")
    assert document["bundle"] == str(tmp_path / "mine-by-patient")
    assert own_groups(tmp_path / "mine-by-patient", pairs) == 5


def test_the_verb_names_empty_class_folders_and_classes_that_are_not_tested(
    labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (labelled / "none yet").mkdir()
    save(disc(32, 4, np.random.default_rng(0))[0], labelled / "rare" / "1.png")
    assert cli.main(["new", str(tmp_path / "mine"), "--images", str(labelled)]) == 0
    said = capsys.readouterr().out
    assert "note: no class, as there is no picture in it: folder 'none yet'" in said
    assert "note: no test image of rare (1): too few images or patients" in said


def test_pictures_with_a_table_of_labels_become_a_bundle_that_runs(
    pairs: Path, tmp_path: Path
) -> None:
    rows = [f"c{number:02d},{number % 2},{1 - number % 2},p{number // 2}" for number in range(20)]
    (pairs / "truth.csv").write_text("\n".join(["image,EVEN,ODD,patient", *rows]) + "\n")
    seen = starter.survey(pairs / "images", labels=pairs / "truth.csv")
    assert (seen.classes, seen.patients) == (("EVEN", "ODD"), 10)
    bundle = starter.write(tmp_path / "mine", seen, size=16)
    checked(bundle)
    assert not inspect(bundle).refusals
    said = list[str]()
    run = train(bundle, pairs, tmp_path / "run", say=said.append)
    assert not any("patients are not known" in line for line in said)
    held = [set(ids["test"]) for ids in run.run.partition.sites.values()]
    assert all(
        {f"c{int(i[1:3]) ^ 1:02d}.png" for i in ids} == ids for ids in held
    )  # both images of a patient


@pytest.mark.parametrize("count", [3, 4, 9])
def test_a_few_pairs_are_divided_among_as_many_sites_as_they_fill(
    count: int, pairs: Path, tmp_path: Path
) -> None:
    for number in range(count, 20):
        (pairs / "images" / f"c{number:02d}.png").unlink()
        (pairs / "masks" / f"c{number:02d}_mask.png").unlink()
    seen = starter.survey(pairs / "images", pairs / "masks")
    bundle = starter.write(tmp_path / "mine", seen, size=32)
    for split in (None, *(f"fold:{number}/{seen.folds}" for number in range(1, seen.folds + 1))):
        plan = make_plan(Request(str(bundle), data=str(pairs), config={"split": split}))
        assert len(plan.run.partition.sites) == min(3, count - 2)


def test_eight_pairs_are_enough(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(8, 20):
        (pairs / "images" / f"c{number:02d}.png").unlink()
        (pairs / "masks" / f"c{number:02d}_mask.png").unlink()
    told = ["--images", str(pairs / "images"), "--masks", str(pairs / "masks")]
    bundle = tmp_path / "mine"
    assert cli.main(["new", str(bundle), *told]) == 0
    said = capsys.readouterr().out
    assert (
        f"or, as 2 test images are few: medfl run {bundle} --data {pairs} --out runs/mine --folds 5"
        in said
    )
    opened = medfl.Bundle(str(bundle), {"dataset_dir": str(pairs)})
    assert [len(opened.items(section)) for section in ("train", "validate", "test")] == [5, 1, 2]


def test_a_bundle_beside_the_shipped_ones_is_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "configs").mkdir(parents=True)
    (tmp_path / "mine" / "configs" / "train.yaml").write_text("{}")
    shipped = files.shipped_folders()
    for name in ("mednist", "natural"):
        root = files.shipped_root()
        assert root is not None
        (tmp_path / name).symlink_to(root / name)
    monkeypatch.setattr(files, "shipped_root", lambda: tmp_path)
    assert {"mednist", "cifar10"} <= files.shipped_folders().keys() <= shipped.keys()


@pytest.mark.parametrize(
    ("name", "images", "masks"),
    [
        ("kvasir_v2", "kvasir-dataset-v2", None),
        pytest.param("lung_cxr", "images", "masks", marks=pytest.mark.slow),
    ],
)
def test_drawn_images_stay_drawn_in_a_bundle_of_ones_own(
    name: str, images: str, masks: str | None, tmp_path: Path
) -> None:
    cohort = datasets.write_phantom(name, tmp_path / "cohort", per_class=10, size=16)
    seen = starter.survey(cohort / images, masks and cohort / masks)
    assert seen.phantom == str(cohort)
    bundle = starter.write(tmp_path / "mine", seen, size=16)
    checked(bundle)
    said: list[str] = []
    run = train(
        bundle,
        Path(seen.folder),
        tmp_path / "run",
        partition="iid",
        config={"image_size": 16},
        say=said.append,
    )
    assert any("of a PHANTOM cohort" in line for line in said)
    assert run.summary["data_source"] == "phantom"
    assert ", PHANTOM data, " in repr(run)


def test_the_verb_says_that_images_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cohort = datasets.write_phantom("lung_cxr", tmp_path / "cohort", per_class=10, size=16)
    told = ["--images", str(cohort / "images"), "--masks", str(cohort / "masks")]
    assert cli.main(["new", str(tmp_path / "mine"), *told]) == 0
    assert f"PHANTOM: {cohort} holds drawn images" in capsys.readouterr().out
    assert cli.main(["new", str(tmp_path / "other"), *told, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data_source"] == "phantom"


@pytest.mark.slow
def test_predicted_masks_have_the_values_of_the_masks(tmp_path: Path) -> None:
    """By medfl, of a run and of its export, and by MONAI's run of the export."""
    values = np.array([0, 205, 420], np.int16)
    for number in range(6):
        voxels = np.random.default_rng(number).normal(0, 1, (16, 16, 16)).astype(np.float32)
        labels = np.zeros(voxels.shape, np.int16)
        labels[4:8] = 1
        labels[8:12] = 2
        for name, content in (("images", voxels + 3 * labels), ("masks", values[labels])):
            (tmp_path / "d" / name).mkdir(parents=True, exist_ok=True)
            file = tmp_path / "d" / name / f"c{number}.nii.gz"
            nib.save(nib.Nifti1Image(content, np.eye(4)), file)
    seen = starter.survey(tmp_path / "d" / "images", tmp_path / "d" / "masks")
    assert seen.classes == ("background", "structure_205", "structure_420")
    bundle = starter.write(tmp_path / "mine", seen)
    checked(bundle)
    words = [
        "run",
        str(bundle),
        "--data",
        f"{tmp_path}/d",
        "--out",
        f"{tmp_path}/run",
        "--sites",
        "1",
    ]
    assert cli.main([*words, "--rounds", "1", "--jobs", "1", "--save-predictions", "--quiet"]) == 0
    run = medfl.load_run(tmp_path / "run")
    run.predict(tmp_path / "d" / "images", out=tmp_path / "out", reference=tmp_path / "d" / "masks")
    export(run.path, tmp_path / "card", formats=())
    command = [
        "run",
        "--config_file",
        f"{tmp_path}/card/configs/inference.yaml",
        "--bundle_root",
        f"{tmp_path}/card",
    ]
    command += ["--dataset_dir", f"{tmp_path}/d/images", "--output_dir", f"{tmp_path}/monai"]
    subprocess.run(
        [sys.executable, "-m", "monai.bundle", *command], check=True, capture_output=True
    )
    found = np.asanyarray(nib.load(tmp_path / "out" / "c0.nii.gz").dataobj)
    assert found.dtype == np.uint16
    assert {0, 205} <= {*np.unique(found).tolist()} <= {*values.tolist()}
    (saved,) = (run.path / "predictions").rglob("c*.nii.gz")
    assert {*np.unique(np.asanyarray(nib.load(saved).dataobj)).tolist()} & {205, 420}
    by_monai = np.asanyarray(nib.load(tmp_path / "monai" / "c0_seg.nii.gz").dataobj)
    assert (by_monai == found).mean() > 0.999
