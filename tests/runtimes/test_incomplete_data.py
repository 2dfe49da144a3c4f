"""Sites whose files lack labels (--unlabelled) or channels (--site-channels): as if the files were there and hidden."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from monai.fl.utils.exchange_object import ExchangeObject
from PIL import Image

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.bundle.open import open_problem, with_data
from medfl.bundle.sections import _without_marks
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.core.task import SECTIONS
from medfl.data.source import LACKS, NO_LABEL
from medfl.datasets import read_pixels
from medfl.partner.preflight import PreflightOptions, check
from medfl.partner.statistics import StatisticsOptions, bins_of, gather
from medfl.runs.launch import federate, site_algo
from medfl.starter import starter
from tests.support.toy import bits
from tests.zoo.build import ZOO
from tests.zoo.record import ZooBundle

SITES = ("north", "south", "west")


def table(path: Path, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


def section(number: int) -> str:
    """West has training images alone."""
    turn = number // 3 % 4
    return "train" if number % 3 == 2 or turn < 2 else ("validate", "test")[turn - 2]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`full` with labels in a table, `bare` without those of west; the bundle for both."""
    root, draws = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    (root / "full" / "images").mkdir(parents=True)
    rows = []
    for number in range(24):
        label = "ab"[number % 2]
        pixels = (draws.random((16, 16)) * 80 + 100 * (label == "a")).astype(np.uint8)
        Image.fromarray(pixels).save(root / "full" / "images" / f"{number:02d}.png")
        rows.append([f"{number:02d}.png", label, SITES[number % 3], section(number)])
    head = ("file", "label", "centre", "section")
    table(root / "full" / "labels.csv", head, rows)
    shutil.copytree(root / "full", root / "bare")
    table(
        root / "bare" / "labels.csv",
        head,
        [[f, "" if s == "west" else k, s, part] for f, k, s, part in rows],
    )
    seen = starter.survey(root / "full" / "images", labels=root / "full" / "labels.csv")
    starter.write(root / "bundle", seen, size=16)
    return root


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Volumes of two channels, a file each; in `bare` west has neither masks nor channel 0."""
    root, draws = tmp_path_factory.mktemp("volumes"), np.random.default_rng(0)
    (root / "full" / "imagesTr").mkdir(parents=True)
    (root / "full" / "labelsTr").mkdir()
    for number in range(12):
        mask = np.zeros((18, 16, 16), np.uint8)
        mask[4 : 9 + number % 4, 5:11, 4:10] = 1
        nib.save(
            nib.Nifti1Image(mask, np.eye(4)), root / "full" / "labelsTr" / f"s_{number:02d}.nii.gz"
        )
        for channel in (0, 1):
            voxels = (draws.normal(0, 1, mask.shape) + (2 - channel) * mask).astype(
                np.float32
            ) * 10**channel
            place = root / "full" / "imagesTr" / f"s_{number:02d}_{channel:04d}.nii.gz"
            nib.save(nib.Nifti1Image(voxels, np.eye(4)), place)
    rows = [[f"s_{n:02d}", f"p{n}", SITES[n % 3], section(n)] for n in range(12)]
    table(root / "full" / "cases.csv", ("file", "patient", "centre", "section"), rows)
    shutil.copytree(root / "full", root / "bare")
    for number in range(2, 12, 3):
        (root / "bare" / "labelsTr" / f"s_{number:02d}.nii.gz").unlink()
        (root / "bare" / "imagesTr" / f"s_{number:02d}_0000.nii.gz").unlink()
    starter.write(root / "bundle", starter.survey(root / "full"))
    return root


ASKED: dict[str, Any] = {
    "method": "fedsemi", "partition": "centre", "unlabelled": "west", "rounds": 1, "local_epochs": 1, "batch_size": 4,
    "lr": 0.01,
}  # fmt: skip
OPTIONS = {"threshold": 0.5, "warmup": 0}


def run(root: Path, data: str, out: Path, **changes: Any) -> str:
    """Return the hash of the weights."""
    called = {"jobs": 1, "runtime": changes.pop("runtime", "simulator")}
    requested = {**ASKED, "data": str(root / data), **changes}
    options = OPTIONS if requested["method"] == "fedsemi" else {}
    return str(
        federate(str(root / "bundle"), options=options, requested=requested, out=out, **called)[
            "weights_sha256"
        ]
    )


def test_law1_images_without_labels_give_the_bits_of_hidden_labels(
    pictures: Path, tmp_path: Path
) -> None:
    hidden = run(pictures, "full", tmp_path / "hidden")
    assert run(pictures, "bare", tmp_path / "bare") == hidden
    assert run(pictures, "bare", tmp_path / "monai", runtime="monai-fl") == hidden
    assert run(pictures, "full", tmp_path / "known", unlabelled="", method="fedavg") != hidden
    federate(out=tmp_path / "bare", resume=True, requested={"rounds": 2}, jobs=1)
    rows = csv.DictReader((tmp_path / "bare" / "sites.csv").read_text().splitlines())
    assert [(row["train"], row["validate"]) for row in rows] == [("4", "2"), ("4", "2"), ("8", "0")]


@pytest.mark.slow
def test_law1_volumes_without_masks_and_channels_give_the_bits_of_hidden_ones(
    volumes: Path, tmp_path: Path
) -> None:
    both = {"site_channels": "west=1"}
    hidden = run(volumes, "full", tmp_path / "hidden", **both)
    assert run(volumes, "bare", tmp_path / "bare", **both) == hidden
    assert run(volumes, "bare", tmp_path / "monai", runtime="monai-fl", **both) == hidden
    assert run(volumes, "full", tmp_path / "other") != hidden


@pytest.mark.parametrize(
    ("root", "flags", "told"),
    [
        (
            "pictures",
            ["--unlabelled", "south"],
            "image '02.png' of site 'west' has no label (8 such); images without labels are of sites that --unlabelled",
        ),
        (
            "volumes",
            ["--unlabelled", "west"],
            "train image 's_02' of site 'west' has no file of channel 0; a file of each channel, or of those that "
            "--site-channels says of its site; ",
        ),
        (
            "volumes",
            ["--unlabelled", "west", "--site-channels", "west=0"],
            "train image 's_02' of site 'west' has no file of channel 0; ",
        ),
    ],
)
def test_what_is_lacking_elsewhere_is_refused_in_a_line(
    root: str,
    flags: list[str],
    told: str,
    tmp_path: Path,
    request: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place, out = request.getfixturevalue(root), tmp_path / "run"
    command = [
        "run",
        str(place / "bundle"),
        "--data",
        str(place / "bare"),
        "--method",
        "fedsemi",
        "--out",
        str(out),
    ]
    assert cli.main([*command, "--partition", "centre", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told}")
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_setting_of_the_bundle_is_tried_where_there_are_labels(
    pictures: Path, tmp_path: Path
) -> None:
    """The first site has none: a step of training there has no loss."""
    command = [
        "run",
        str(pictures / "bundle"),
        "--data",
        str(pictures / "full"),
        "--method",
        "fedsemi",
        "--rounds",
        "1",
    ]
    sites = [
        "--partition",
        "centre",
        "--unlabelled",
        "north",
        "--config",
        "learning_rate=0.01",
        "--jobs",
        "1",
        "--quiet",
    ]
    assert cli.main([*command, *sites, "--set", "warmup=0", "--out", str(tmp_path / "run")]) == 0


def test_a_list_cannot_say_itself_what_is_lacking(tmp_path: Path) -> None:
    """Else a bundle could hide its labels, or end a run in a traceback."""
    bundle = ZOO["cls2d_glob_yaml"](tmp_path)
    opened = Bundle(bundle.path, bundle.overrides)
    entry = opened.section("train").source.entries[0]
    for mark in ({NO_LABEL: True}, {LACKS: 5}):
        assert _without_marks({**entry, **mark}) == entry
    assert _without_marks(entry) is entry


def test_without_being_named_they_are_left_out_as_before(pictures: Path, tmp_path: Path) -> None:
    bundle = str(pictures / "bundle")
    assert (
        len(with_data(open_problem(bundle), str(pictures / "bare"), {}).bundle.items("train")) == 8
    )
    assert (
        len(
            with_data(
                open_problem(bundle), str(pictures / "bare"), {}, unlabelled=True
            ).bundle.items("train")
        )
        == 16
    )


# Sites with images of their own


def trained(bundle: Path, data: Path, **changes: Any) -> Any:
    """Return the reply of one round of MONAI FL at west, bit for bit."""
    asked = {**ASKED, "data": str(data), "partition": "iid", **changes}
    algo = site_algo(str(bundle), "west", options=OPTIONS, requested=asked)
    algo.initialize()
    assert algo._view is not None
    weights = {f"weights/{name}": tensor for name, tensor in algo._view.networks.initial.items()}
    algo.train(ExchangeObject(weights=weights))
    return bits(algo.get_weights().weights)


@pytest.mark.parametrize("root", ["pictures", "volumes"])
def test_a_site_of_monai_fl_has_images_alone(root: str, tmp_path: Path, request: Any) -> None:
    """As with labels that it hides, and with other sections; and what a site may be asked before a run copes."""
    place: Path = request.getfixturevalue(root)
    images = {"pictures": "images", "volumes": "imagesTr"}[root]
    alone, labelled = tmp_path / "alone", tmp_path / "labelled"
    shutil.copytree(place / "full", labelled)
    shutil.copytree(place / "full" / images, alone / images)
    for path in (alone / images).iterdir():
        if section(int(path.name.removeprefix("s_")[:2])) != "train":
            path.unlink()
    channels = {"site_channels": "west=1"} if root == "volumes" else {}
    for path in alone.rglob("*_0000.nii.gz"):
        path.unlink()
    assert trained(place / "bundle", alone, **channels) == trained(
        place / "bundle", labelled, **channels
    )
    with pytest.raises(InputError, match="--unlabelled"):
        site_algo(
            str(place / "bundle"),
            "west",
            requested={**ASKED, "data": str(alone), "unlabelled": "south"},
        )
    found = check(PreflightOptions(str(place / "bundle"), str(alone), unlabelled=True))
    assert found.ok, found.text(200)
    assert any(
        "have no label" in line.text and "--unlabelled" in line.advice for line in found.lines
    )
    opened = with_data(open_problem(str(place / "bundle"), {}), str(alone), {}, unlabelled=True)
    told = gather(
        opened.bundle, str(alone), StatisticsOptions(bins_of(opened.bundle, 4, "-3,3"), 0)
    )
    assert list(told["sections"]) == ["train"]
    assert told["sections"]["train"]["images"] == len(opened.bundle.items("train"))
    json.dumps(told)


def test_a_flare_site_of_a_shipped_bundle_has_images_alone(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    from medfl.flare import wire
    from medfl.flare.offer import offer
    from medfl.flare.site import FlareSite
    from medfl.flare.site_config import SiteConfig, open_site
    from medfl.flare.wire import Payload
    from medfl.runtimes.monai_fl.client import MedflClientAlgo

    phantom = datasets.write_phantom("pneumonia", tmp_path / "phantom", per_class=15, size=28)
    config = {"network": "small_cnn", "image_size": 28}
    asked = {
        name: value for name, value in ASKED.items() if name not in ("partition", "unlabelled")
    }
    made = offer(
        "pneumonia",
        SITES,
        options=OPTIONS,
        config=config,
        requested={**asked, "unlabelled": "west"},
        rehearsal=True,
    )
    items = with_data(open_problem("pneumonia", config), str(phantom), config).bundle.data("train")
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copyfile(phantom / "PHANTOM.json", alone / "PHANTOM.json")
    for number, item in enumerate(items):
        Image.fromarray(read_pixels(item["image"])[..., 0]).save(alone / f"{number:03d}.png")
    replies = []
    for place in (phantom, alone):
        site = SiteConfig("pneumonia", "unused", str(place), permits=tuple(config))
        federation = open_site(made, "west", site)
        assert len(federation.shard("west", "train")) == len(items)
        weights = {
            f"message/weights/{name}": tensor
            for name, tensor in federation.networks.initial.items()
        }
        question = Payload(
            {**weights, **wire.state_rounds({"west": 0})}, wire.question_numbers(1, ["validate"])
        )
        answer = FlareSite(MedflClientAlgo(federation, "west"), "west").answer(wire.TRAIN, question)
        assert not answer.failure_reason, answer.failure_reason
        replies.append(bits(answer.tensors))
        assert ("validate/cases" in answer.metrics) == (place == phantom)
    assert replies[0] == replies[1]
    with pytest.raises(InputError, match="holds no pneumonia data"):
        open_site(
            made, "north", SiteConfig("pneumonia", "unused", str(alone), permits=tuple(config))
        )


# Bundles of others


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Num foregrounds 0")
def test_entries_of_a_zoo_bundle_lack_labels_or_files_of_channels(tmp_path: Path) -> None:
    """Also where crops go by the mask, and where an image is a list of files."""

    def runs(bundle: ZooBundle, flags: dict[str, Any], change: Callable[[], None]) -> list[str]:
        opened = with_data(
            open_problem(str(bundle.path), bundle.overrides), None, bundle.overrides
        ).bundle
        sites = [
            (item["id"], "ab"[number > 1]) for number, item in enumerate(opened.items("train"))
        ]
        table(
            tmp_path / "sites.csv",
            ("id", "site"),
            [*sites, *((i["id"], "a") for i in opened.items("validate"))],
        )
        asked = {
            **ASKED,
            "partition": f"file:{tmp_path / 'sites.csv'}",
            "batch_size": 2,
            "unlabelled": "",
            **flags,
        }
        options = OPTIONS if asked["method"] == "fedsemi" else {}

        def made(name: str, **changes: Any) -> str:
            own = {} if changes else options
            called = {
                "options": own,
                "config": bundle.overrides,
                "requested": {**asked, **changes},
                "jobs": 1,
            }
            return str(federate(str(bundle.path), out=tmp_path / name, **called)["weights_sha256"])

        hidden = made(f"{bundle.path.name}-hidden")
        change()
        with pytest.raises(InputError, match="--unlabelled|--site-channels"):
            made("refused", method="fedavg", unlabelled="", site_channels="")
        return [hidden, made(f"{bundle.path.name}-bare")]

    ball, brain = (
        ZOO["seg3d_decathlon_json"](tmp_path / "ball"),
        ZOO["seg3d_multilabel_json"](tmp_path / "brain"),
    )

    def without_labels() -> None:
        file = ball.path / "data" / "Task99_Ball" / "dataset.json"
        content = json.loads(file.read_text())
        for entry in content["training"][2:4]:
            del entry["label"]
        file.write_text(json.dumps(content))

    def without_channels() -> None:
        for number, kind in ((2, "t1ce"), (2, "t2"), (3, "t2")):
            (
                Path(brain.overrides["dataset_dir"])
                / f"case_{number}"
                / f"case_{number}_{kind}.nii.gz"
            ).unlink()

    one, other = runs(ball, {"unlabelled": "b"}, without_labels)
    assert one == other
    one, other = runs(brain, {"site_channels": "b=0,3", "method": "fedavg"}, without_channels)
    assert one == other


@pytest.mark.parametrize("kind", ["labelled", "pictures"])
def test_images_without_labels_are_found_in_folders(kind: str, tmp_path: Path) -> None:
    """Beside the classes' folders and without a mask; not those of held-out patients."""
    draws, data = np.random.default_rng(0), tmp_path / "data"

    def picture(path: Path, mask: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = (
            np.zeros((16, 16), np.uint8)
            if mask
            else draws.integers(0, 255, (16, 16)).astype(np.uint8)
        )
        pixels[3:9, 3:9] = 1 if mask else pixels[3:9, 3:9]
        Image.fromarray(pixels).save(path)

    for number in range(20):
        folder = ("no", "yes")[number % 2] if kind == "labelled" else "images"
        picture(data / folder / f"{number:02d}.png")
        if kind == "pictures":
            picture(data / "masks" / f"{number:02d}.png", mask=True)
    bare = "unlabelled" if kind == "labelled" else "images"
    seen = (
        starter.survey(data)
        if kind == "labelled"
        else starter.survey(data / "images", data / "masks")
    )
    bundle = str(starter.write(tmp_path / "bundle", seen, size=16))
    before = {
        section: [
            i["id"] for i in with_data(open_problem(bundle), str(data), {}).bundle.items(section)
        ]
        for section in SECTIONS
    }
    for name in ("x", "y"):
        picture(data / bare / f"{name}.png")
    after = with_data(open_problem(bundle), str(data), {}).bundle
    assert {
        section: [item["id"] for item in after.items(section)] for section in SECTIONS
    } == before
    opened = with_data(open_problem(bundle), str(data), {}, unlabelled=True).bundle
    more = {"labelled": ["unlabelled/x.png", "unlabelled/y.png"], "pictures": ["x", "y"]}[kind]
    found = {section: [item["id"] for item in opened.items(section)] for section in SECTIONS}
    assert found == {**before, "train": sorted([*before["train"], *more])}
    survey = (
        starter.survey(data)
        if kind == "labelled"
        else starter.survey(data / "images", data / "masks")
    )
    assert (survey.classes, survey.counts) == (seen.classes, seen.counts)
    held_out = Path(before["test"][0]).stem
    paths = [
        path.relative_to(data).as_posix()
        for path in data.rglob("*.png")
        if "masks" not in path.parts
    ]
    patients = {
        path: "p" if Path(path).stem in (held_out, "x") else Path(path).stem for path in paths
    }
    sections = {i: section for section in SECTIONS for i in before[section]}
    rows = [
        [
            p,
            patients[p],
            next((s for i, s in sections.items() if Path(i).stem == Path(p).stem), "train"),
        ]
        for p in paths
    ]
    table(data / "cases.csv", ("file", "patient", "section"), rows)
    opened = with_data(open_problem(bundle), str(data), {}, unlabelled=True).bundle
    assert [item["id"] for item in opened.items("train") if NO_LABEL in item] == more[1:]
