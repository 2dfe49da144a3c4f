"""What a whole run does outside of its run folder, seen by an audit hook: nothing, whatever bundle the gate accepts.

The bundles of the public zoo are watched likewise, in zoo/test_published.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from medfl import datasets
from medfl.bundle.files import read, shipped_folders
from tests.support.watched import check, watched
from tests.zoo.build import ZOO

ROOT = Path(__file__).parents[2]
REAL = Path(os.environ.get("MEDFL_DATA", ROOT.parent / "shared" / "data")) / "montgomery_jsrt_demo"
# One process: what others, forked for training, do is not told to the hook's owner.
SHORT = ["--rounds", "1", "--jobs", "1", "--device", "cpu", "--sites", "2", "--partition", "iid"]


def outside(place: Path, *runs: list[str], blank: bool = False) -> dict[str, Any]:
    """As `watched`, of `medfl run` with each of these."""
    commands = (
        ["run", *given, "--out", f"{place}/out/{n}", *SHORT] for n, given in enumerate(runs)
    )
    return watched(place, *commands, blank=blank)


def settings(config: Mapping[str, str]) -> list[str]:
    return [part for key, value in config.items() for part in ("--config", f"{key}={value}")]


def after(run: Path, *images: Path) -> list[list[str]]:
    """The verbs that follow a run; each writes where it was told."""
    out, given = run.parent, [*map(str, images)]
    return [
        ["report", str(run)],
        ["export", str(run), "--out", f"{out}/exported"],
        ["site", "inspect", f"{out}/exported"],
        ["predict", str(run), *given, "--out", f"{out}/predicted"],
        ["predict", f"{out}/exported", *given, "--out", f"{out}/predicted again"],
    ]


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=f"no chest X-rays in {REAL}")
def test_nothing_of_a_clinician_s_day_on_real_images_changes_anything_outside(
    tmp_path: Path,
) -> None:
    new, run = tmp_path / "out" / "lungs", tmp_path / "out" / "run"
    write = [
        "new",
        str(new),
        "--images",
        str(REAL / "images"),
        "--masks",
        str(REAL / "masks"),
        "--size",
        "32",
    ]
    train = [
        "run",
        str(new),
        "--data",
        str(REAL),
        "--config",
        "network=unet8",
        "--out",
        str(run),
        *SHORT,
    ]
    images = sorted((REAL / "images").iterdir())[:2]
    check(watched(tmp_path, write, ["site", "inspect", str(new)], train, *after(run, *images)))


@pytest.mark.slow
def test_no_accepted_bundle_changes_anything_outside_nor_do_report_export_inspection_and_prediction(
    tmp_path: Path,
) -> None:
    names = [name for name in ZOO if name not in ("seg2d_csv_flat", "seg2d_own_scripts_yaml")]
    bundles = {name: ZOO[name](tmp_path / name) for name in names}
    runs = [
        [
            "run",
            str(bundle.path),
            *settings(bundle.overrides),
            "--out",
            f"{tmp_path}/out/{name}",
            *SHORT,
        ]
        for name, bundle in bundles.items()
    ]
    images = sorted((tmp_path / "cls2d_glob_yaml").rglob("*.jpeg"))[:2]
    inspected = ["site", "inspect", str(bundles["cls2d_glob_yaml"].path)]
    check(
        watched(
            tmp_path, inspected, *runs, *after(tmp_path / "out" / "cls2d_glob_yaml", *images)[:4]
        )
    )


@pytest.mark.slow
def test_no_shipped_bundle_changes_anything_outside(tmp_path: Path) -> None:
    """Every one of them, with a small network and small pictures: what is watched is what a configuration does."""
    runs = []
    for name, root in shipped_folders().items():
        training = read(root / "configs" / "train.yaml")
        volumes, many = "patch_size" in training, len(datasets.get(name).classes) > 20
        small = {
            "network_name": "unet8" if training["network_name"].startswith("unet") else "small_cnn"
        }
        if volumes:
            small["patch_size"] = "[16, 16, 16]"
        elif isinstance(training["image_size"], list):
            small["image_size"] = "[16, 16, 16]"
        else:
            small["image_size"] = "32"

        size = 20 if volumes else 16 if many else 32
        drawn = datasets.write_phantom(name, tmp_path / "drawn" / name, per_class=10, size=size)
        runs.append([name, "--data", str(drawn), "--local-epochs", "1", *settings(small)])
    check(outside(tmp_path, *runs, blank=True))


@pytest.mark.slow
def test_an_accepted_bundle_changes_nothing_outside_and_the_watch_sees_what_a_trusted_one_does(
    tmp_path: Path,
) -> None:
    """The second run is the control: what no gate would let pass is seen, where it is read and where it trains."""
    accepted, trusted = (
        ZOO["seg2d_csv_flat"](tmp_path / "zoo"),
        ZOO["cls2d_glob_yaml"](tmp_path / "other"),
    )
    file, mark, other = (
        trusted.path / "configs" / "train.yaml",
        tmp_path / "mark",
        tmp_path / "other mark",
    )
    text = file.read_text()
    line = next(line for line in text.splitlines() if line.startswith("learning_rate:"))
    text = text.replace(
        line,
        f"learning_rate: \"$pathlib.Path('{mark}').touch() or {line.partition(':')[2].strip()}\"",
    )
    loss = "loss:\n  _target_: torch.nn.CrossEntropyLoss\n"
    assert loss in text
    marks = f"loss: \"$lambda p, y: (pathlib.Path('{other}').touch() or 1) * @ce(p, y)\"\n"
    file.write_text(text.replace(loss, "ce: {_target_: torch.nn.CrossEntropyLoss}\n" + marks))
    runs = [[str(bundle.path), *settings(bundle.overrides)] for bundle in (accepted, trusted)]
    found = outside(tmp_path, runs[0], [*runs[1], "--trust"])
    assert {f"open {mark}", f"open {other}"} <= {*found["seen"]}
    check({**found, "codes": found["codes"][:1], "seen": found["seen"][: found["until"][0]]})
