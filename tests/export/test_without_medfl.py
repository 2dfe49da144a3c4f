"""Exports run by MONAI alone: in an environment that has no medfl they predict what `medfl predict` does of the run."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import monai
import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from medfl import datasets
from medfl.bundle.files import read, shipped, shipped_folders
from medfl.cli.verbs import main
from medfl.export import checks
from medfl.export.bundle_writer import export
from medfl.runs.launch import federate
from medfl.runs.predict import predict
from medfl.starter import starter
from tests.datasets.test_volumes import save_dicom
from tests.starter.test_dicom_pictures import radiograph
from tests.support.programs import LEAN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*no allow list.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]

SERVED = """
import json, os, sys, traceback
import ignite.engine, monai.bundle, monai.inferers, monai.networks.nets, monai.transforms, nibabel, torch

for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(asked.pop("cwd"))
        log = os.open(asked.pop("log"), os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 1
        try:
            getattr(monai.bundle, asked.pop("command"))(**asked)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    print(os.waitpid(child, 0)[1], flush=True)
"""
"""MONAI's commands on many bundles, each in a process of its own that need not import MONAI anew."""


class Alone:
    """Python of an environment with all packages of this one but medfl."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (places,) = folder.glob("lib/python*/site-packages")
        # paths in a .pth file; the .pth files in there, as that of an editable medfl, are not read
        (places / "monai.pth").write_text(f"{LEAN}\n{Path(monai.__file__).parents[1]}\n")
        left_out = ("PYTHON", "MEDFL_TESTS_WARM")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        assert "No module named 'medfl'" in self.run("-c", "import medfl").stderr
        self.server = subprocess.Popen(
            [*self.command, "-c", SERVED],
            env=self.environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    @property
    def command(self) -> list[str]:
        return [str(self.folder / "bin" / "python")]

    def run(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *arguments],
            cwd=cwd or self.folder, env=self.environment, capture_output=True, text=True,
        )  # fmt: skip

    def predict(self, bundle: Path, images: Path, out: Path, refused: str = "") -> None:
        """`python -m monai.bundle run` of a bundle's inference, which may be expected to fail with words."""
        asked = {"config_file": "configs/inference.yaml", "bundle_root": "."}
        asked |= {"dataset_dir": str(images), "output_dir": str(out)}
        self.ask("run", bundle, out.parent.name, refused, **asked)

    def ask(self, command: str, bundle: Path, name: str, refused: str = "", **asked: str) -> None:
        """`python -m monai.bundle COMMAND` in a bundle's folder; what it says goes to NAME.log."""
        log = self.folder / f"{name}.log"
        asked |= {"command": command, "cwd": str(bundle), "log": str(log)}
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(asked) + "\n")
        self.server.stdin.flush()
        ended = self.server.stdout.readline()
        assert (ended == "0\n") == (not refused), log.read_text()[-4000:]
        assert refused in log.read_text()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    alone = Alone(tmp_path_factory.mktemp("alone"))
    with alone.server:  # which ends with its standard input
        yield alone


def rows(file: Path) -> dict[str, list[str]]:
    with file.open(encoding="utf-8") as lines:
        return {name: cells for name, *cells in csv.reader(lines)}


def mask(file: Path) -> tuple[NDArray[Any], list[Any]]:
    """A mask, and what a volume's header says of its place."""
    if file.suffix == ".png":
        return np.asarray(Image.open(file)), []
    volume: Any = nibabel.load(file)
    forms = [volume.header.get_qform(), volume.header.get_best_affine(), *volume.header.get_zooms()]
    codes = [volume.header[name] for name in ("qform_code", "sform_code", "xyzt_units")]
    return np.asarray(volume.dataobj), [*forms, *codes]


def check(python: Alone, run: Path, images: Path, place: Path, varied: bool = True) -> None:
    """Export a run, and compare what MONAI and medfl say of images."""
    (document,) = export(run, place / "bundle", formats=())["bundles"]
    told = predict(run, images, place / "ours")
    assert told["failed"] == []
    again = predict(place / "bundle", images, place / "by medfl")
    assert again["task"] == told["task"]
    for row, other in zip(again["predictions"], told["predictions"], strict=True):
        assert row == pytest.approx(other, abs=1e-6)

    python.predict(place / "bundle", images, place / "theirs")
    if told["task"] != "segmentation":
        ours, theirs = (rows(place / of / "predictions.csv") for of in ("ours", "theirs"))
        assert ours.keys() == theirs.keys()
        assert ours.pop("id") == theirs.pop("id")
        for name, cells in ours.items():
            for cell, other in zip(cells, theirs[name], strict=True):
                assert cell == other or float(cell) == pytest.approx(
                    float(other), rel=1e-6, abs=1e-6
                )
        return

    seen = set()
    for row in told["predictions"]:
        name = re.sub(r"\.nii\.gz$", "_seg.nii.gz", row["mask"])
        expected, header = mask(place / "ours" / row["mask"])
        made, written = mask(place / "theirs" / name)
        assert np.array_equal(made, expected), name
        for value, other in zip(written, header, strict=True):
            assert np.allclose(value, other, atol=1e-4)
        seen |= {*np.unique(made)}

    assert not varied or len(seen) > 1


# Pictures and volumes that are drawn


def drawn(shape: tuple[int, ...], seed: int, bright: bool) -> NDArray[np.uint8]:
    """Noise of blocks, with a bright square where that is said."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 120, tuple(side // 8 + 1 for side in shape[:2]) + shape[2:])
    pixels = np.kron(blocks, np.ones((8, 8) + (1,) * (len(shape) - 2)))[: shape[0], : shape[1]]
    if bright:
        pixels[shape[0] // 4 : shape[0] // 2, shape[1] // 4 : shape[1] // 2] += 130
    return pixels.astype(np.uint8)


def new_pictures(folder: Path, deep: bool) -> Path:
    """Pictures of many kinds, to be predicted."""
    (folder / "below").mkdir(parents=True)
    Image.fromarray(drawn((50, 60, 3), 1, True)).save(folder / "a.png")
    Image.fromarray(drawn((52, 70, 3), 11, True)).save(folder / "A.jpg")  # beside a.png
    Image.fromarray(drawn((200, 300, 3), 2, False)).save(folder / "b.jpg")
    Image.fromarray(drawn((300, 200), 3, True)).save(folder / "below" / "grey, large.jpg")
    lying = Image.fromarray(drawn((90, 70, 3), 4, True))
    exif = lying.getexif()
    exif[274] = 6
    lying.save(folder / "below" / "lying.JPG", exif=exif)
    Image.fromarray(drawn((64, 64, 3), 5, True)).convert("P").save(folder / "palette.png")
    Image.fromarray(drawn((64, 64, 3), 6, True)).convert("RGBA").save(folder / "alpha.png")
    Image.fromarray(drawn((64, 64, 3), 7, True)).convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(drawn((41, 47), 8, True)).save(folder / "grey.tif")
    Image.fromarray(drawn((32, 33), 9, True) > 100).save(folder / "bits.png")
    if deep:
        Image.fromarray(drawn((40, 44), 10, True).astype(np.uint16) * 200).save(folder / "deep.png")
    return folder


def federated(bundle: Path, data: Path, run: Path, **requested: Any) -> Path:
    config = requested.pop("config", {})
    settings = {"sites": 2, "rounds": 1, "partition": "iid", "local_epochs": 2, **requested}
    settings |= {"method": "fedavg", "data": str(data)}
    federate(str(bundle), config=config, requested=settings, out=run, jobs=1)
    return run


def of_classes(root: Path, network: str, axes: int, deep: bool = False) -> Path:
    """A run of `medfl new` on class folders of pictures."""
    for number in range(24):
        kind = ("dark", "bright")[number % 2]
        (root / "data" / kind).mkdir(parents=True, exist_ok=True)
        pixels = drawn((40, 44, 3)[:axes], number, number % 2 == 1)
        pixels = pixels.astype(np.uint16) * 257 if deep else pixels
        Image.fromarray(pixels).save(root / f"data/{kind}/{number}.png")
    bundle = starter.write(root / "mine", starter.survey(root / "data"), size=32, network=network)
    return federated(bundle, root / "data", root / "run")


def of_table(root: Path, head: str, line: Callable[[int], str]) -> Path:
    """A run of `medfl new` on pictures with a table of findings or numbers."""
    (root / "data/images").mkdir(parents=True)
    lines = [f"file,{head}"]
    for number in range(40):
        picture = drawn((36, 40), number, number % 2 == 1)
        Image.fromarray(picture).save(root / f"data/images/{number}.png")
        lines.append(f"{number}.png,{line(number)}")

    (root / "data/table.csv").write_text("\n".join(lines) + "\n")
    survey = starter.survey(root / "data/images", labels=root / "data/table.csv")
    return federated(starter.write(root / "mine", survey, size=32), root / "data", root / "run")


def of_radiographs(root: Path) -> Path:
    """A run of `medfl new` on class folders of DICOM pictures."""
    for number in range(24):
        kind = ("dark", "bright")[number // 2 % 2]
        radiograph(root / f"data/{kind}/{number}.dcm", number, kind == "bright")
    bundle = starter.write(root / "mine", starter.survey(root / "data"), size=32)
    return federated(bundle, root / "data", root / "run")


def of_volumes(root: Path) -> Path:
    """A run of `medfl new` on volumes of two channels with a table of numbers."""
    (root / "data/images").mkdir(parents=True)
    lines = ["file,length"]
    for number in range(20):
        for channel in range(2):
            deep = np.repeat(drawn((30, 34), number + channel, number > 9)[..., None], 20, 2)
            image = nibabel.Nifti1Image(deep.astype(np.int16), np.diag([-1.5, 1, 2, 1]))
            nibabel.save(image, root / f"data/images/c{number}_{channel:04d}.nii.gz")

        lines.append(f"c{number},{number + 0.5}")

    (root / "data/table.csv").write_text("\n".join(lines) + "\n")
    survey = starter.survey(root / "data/images", labels=root / "data/table.csv")
    return federated(starter.write(root / "mine", survey), root / "data", root / "run")


def of_masks(
    root: Path,
    suffix: str,
    channels: int = 1,
    values: tuple[int, ...] = (0, 1),
    planned: bool = False,
) -> Path:
    """A run of `medfl new` on pictures or volumes with masks."""
    for folder in ("images", "masks"):
        (root / "data" / folder).mkdir(parents=True)
    for number in range(12):
        shape = (40, 44, 3)[: 2 + (channels == 3)]
        pixels = drawn(shape, number, True)
        truth = np.zeros((40, 44), np.uint8)
        truth[10:20, 11:22] = values[1]
        if len(values) > 2:
            truth[12:15, 13:18] = values[2]
            pixels[12:15, 13:18] = 255
        if suffix == ".png":
            Image.fromarray(pixels).save(root / f"data/images/c{number}.png")
            Image.fromarray(truth).save(root / f"data/masks/c{number}.png")
            continue

        affine = np.diag([-1.5, 1, 2, 1])
        affine[:3, 3] = (10, -20, 30)
        for channel in range(channels):
            part = f"_{channel:04d}" if channels > 1 else ""
            deep = np.repeat(np.rot90(pixels, 2 * channel)[..., None], 24, 2).astype(np.int16)
            nibabel.save(
                nibabel.Nifti1Image(deep, affine), root / f"data/images/c{number}{part}{suffix}"
            )
        deep = np.repeat(truth[..., None], 24, 2)
        nibabel.save(nibabel.Nifti1Image(deep, affine), root / f"data/masks/c{number}{suffix}")

    if planned:
        where = ("--images", f"{root}/data/images", "--masks", f"{root}/data/masks")
        assert main(["new", str(root / "mine"), *where]) == 0
        config = {"patch_size": [16, 16, 16], "network_def#filters": [8, 8, 16, 16]}
        return federated(root / "mine", root / "data", root / "run", config=config)

    survey = starter.survey(root / "data/images", root / "data/masks")
    size = 32 if suffix == ".png" else None
    bundle = starter.write(root / "mine", survey, size=size, network="unet8")
    return federated(bundle, root / "data", root / "run", lr=0.01, local_epochs=4, batch_size=2)


def findings(number: int) -> str:
    return f"{number % 2},{int(number % 3 == 0)}"


KINDS: dict[str, Callable[[Path], Path]] = {
    "colour classes": lambda root: of_classes(root, "resnet18", 3),
    "grey classes, TorchScript": lambda root: of_classes(root, "small_cnn", 2),
    "classes of 16 bits": lambda root: of_classes(root, "small_cnn", 2, deep=True),
    "findings": lambda root: of_table(root, "Mass,Edema", findings),
    "numbers": lambda root: of_table(
        root, "age,length", lambda n: f"{30 + n % 2 * 40},{n % 7 + 1.5}"
    ),
    "grey masks": lambda root: of_masks(root, ".png"),
    "colour masks": lambda root: of_masks(root, ".png", 3, (0, 100, 200)),
    "volumes": lambda root: of_masks(root, ".nii.gz", 1, (0, 3, 7)),
    "DICOM pictures": of_radiographs,
    "volumes, planned": lambda root: of_masks(root, ".nii.gz", 1, (0, 3, 7), planned=True),
    "volumes with numbers": of_volumes,
    "volumes of two channels": lambda root: of_masks(root, ".nii.gz", 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_medfl_new_makes_runs_by_monai_alone(kind: str, python: Alone, tmp_path: Path) -> None:
    run = KINDS[kind](tmp_path)
    if "volumes" in kind:
        some = shutil.ignore_patterns("c[4-9]*", "c1[0-9]*")
        images = shutil.copytree(tmp_path / "data" / "images", tmp_path / "new", ignore=some)
        for path in images.glob("c1[._]*"):  # a second file of the same name, but for its ending
            nibabel.save(nibabel.load(path), path.with_suffix(""))
    else:
        images = new_pictures(tmp_path / "new", "16 bits" in kind)

    check(python, run, images, tmp_path)


def training(name: str) -> dict[str, Any]:
    return read(shipped_folders()[name] / "configs" / "train.yaml")


FIRST = {
    (training(name)["network_name"], datasets.get(name).task): name
    for name in reversed(shipped())
    if len(datasets.get(name).classes) <= 20 and "image_size" in training(name)
}
"""The bundle of each network and task that is trained with it; pictures of the others, with a small one."""


@pytest.mark.parametrize("name", shipped())
def test_what_ships_runs_by_monai_alone(name: str, python: Alone, tmp_path: Path) -> None:
    data = datasets.write_phantom(name, tmp_path / "data", per_class=10, size=24)
    volumes = sorted(data.rglob("*.nii*"))
    config: dict[str, Any] = {"image_size": 32}
    if volumes and datasets.get(name).task == "segmentation":
        config |= {"patch_size": [16, 32, 16]}
    elif volumes:
        config = {"image_size": [24, 32, 24], "network": "small_cnn"}
    elif name not in FIRST.values() and datasets.get(name).task != "segmentation":
        config["network"] = "small_cnn"
    settings = {"sites": 2, "rounds": 1, "local_epochs": 1, "partition": "iid", "method": "fedavg"}
    settings["data"] = str(data)
    federate(name, config=config, requested=settings, out=tmp_path / "run", jobs=1)
    images = tmp_path / "new"
    images.mkdir()
    for path in volumes[:2]:
        (images / path.name).symlink_to(path)
    axes = 2 if training(name)["in_channels"] == 1 else 3
    for number in range(0 if volumes else 3):
        picture = drawn((70, 50, 3)[:axes], number, True)
        Image.fromarray(picture).save(images / f"{number}.{('png', 'jpg', 'bmp')[number]}")
    check(python, tmp_path / "run", images, tmp_path, varied=False)


def test_what_monai_does_not_read_ends_its_run(python: Alone, tmp_path: Path) -> None:
    """Rather than a table without these images, and exit code 0."""
    export(KINDS["DICOM pictures"](tmp_path), tmp_path / "bundle", formats=())
    for name, refused in (("of DICOM", "a DICOM picture"), ("empty", "no image with one of")):
        images = tmp_path / name
        (images / "below").mkdir(parents=True)
        (images / "below" / "letter.txt").touch()
        if name != "empty":
            Image.new("L", (32, 32)).save(images / "a.png")
            shutil.copyfile(tmp_path / "data/dark/0.dcm", images / "below" / "b.DCM")

        python.predict(tmp_path / "bundle", images, tmp_path / name / "out", refused=refused)
        assert not (tmp_path / name / "out").exists()


def test_a_dicom_series_gets_the_mask_that_medfl_gives_it(python: Alone, tmp_path: Path) -> None:
    run = KINDS["volumes"](tmp_path)
    (tmp_path / "new").mkdir()
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 900, (30, 40, 20)).astype(np.int16)
        save_dicom(tmp_path / f"new/series {number}", pixels)
    check(python, run, tmp_path / "new", tmp_path, varied=False)


def test_what_monai_checks_of_bundles_holds_without_medfl(python: Alone, tmp_path: Path) -> None:
    """One command as a program of its own, the others by their functions."""
    bundle = tmp_path / "bundle"
    export(KINDS["grey classes, TorchScript"](tmp_path), bundle, formats=())
    of = {"meta_file": "configs/metadata.json", "config_file": "configs/inference.yaml"}
    words = ("--config_file", of["config_file"], "--bundle_root", ".")
    words += ("--dataset_dir", str(tmp_path / "data"))
    said = python.run("-m", "monai.bundle", "run", *words, cwd=bundle)
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr[-4000:]

    schema = str(checks.SCHEMA)
    python.ask("verify_metadata", bundle, "schema", meta_file=of["meta_file"], filepath=schema)
    net = {"net_id": "network_def", **of, "bundle_root": "."}
    python.ask("verify_net_in_out", bundle, "network", **net)
    made = {"ckpt_file": "models/model.pt", "filepath": str(tmp_path / "again.ts")}
    python.ask("ckpt_export", bundle, "checkpoint", **net, **made)
    assert (tmp_path / "again.ts").stat().st_size > 1000
