"""nnU-Net's own plan of a folder beside the plan of medfl, from the same training cases.

The cases are those that `medfl plan` looks at: training and validation, not test. They are laid out as nnU-Net wants
them in a temporary folder, and its two programs plan there; nothing is trained. nnunetv2 need not be installed beside
medfl: `--bin` names the folder of its programs. Where there are none, the benchmark says so and ends.

    pip install nnunetv2
    python benchmarks/plan_nnunet.py --images DIR --masks DIR --classes A,B [--memory 8] [--bin DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from medfl.cli.site import of_folder
from medfl.core.tables import markdown_table
from medfl.problem.fingerprint import gather
from medfl.starter.plan import Plan, plan

DATASET = "Dataset001_Planned"
EXTRACT = "nnUNetv2_extract_fingerprint"
PLAN = "nnUNetv2_plan_experiment"
Row = dict[str, object]


def lay_out(
    cases: Sequence[tuple[str, str]], classes: Mapping[int, str], channel: str, folder: Path
) -> None:
    """Write a folder of nnU-Net with cases of one channel, volumes linked and pictures as grey PNG files."""
    images = folder / "imagesTr"
    masks = folder / "labelsTr"
    images.mkdir(parents=True)
    masks.mkdir()
    pictures = not cases[0][0].endswith((".nii", ".nii.gz"))
    ending = ".png" if pictures else ".nii.gz"
    values = sorted(classes)
    for number, (image, mask) in enumerate(cases):
        name = f"case_{number:04d}"
        if pictures:
            with Image.open(image) as opened:
                opened.convert("L").save(images / f"{name}_0000.png")
            with Image.open(mask) as opened:
                stored = np.asarray(opened).astype(int)
            indices = np.zeros(stored.shape, np.uint8)
            for index, value in enumerate(values, 1):
                indices[stored == value] = index
            Image.fromarray(indices).save(masks / f"{name}.png")
        else:
            (images / f"{name}_0000.nii.gz").symlink_to(Path(image).resolve())
            (masks / f"{name}.nii.gz").symlink_to(Path(mask).resolve())

    labels = {"background": 0}
    for index, value in enumerate(values, 1):
        labels[classes[value]] = index
    about = {
        "channel_names": {"0": channel},
        "labels": labels,
        "numTraining": len(cases),
        "file_ending": ending,
    }
    (folder / "dataset.json").write_text(json.dumps(about))


def nnunet_plan(root: Path, programs: Path, memory: float) -> dict[str, Any]:
    """Let nnU-Net plan the folder in `root / "raw"`, and return its plan for full resolution."""
    places = {"nnUNet_raw": "raw", "nnUNet_preprocessed": "preprocessed", "nnUNet_results": "out"}
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)  # of another Python than its own
    for name, place in places.items():
        environment[name] = str(root / place)

    limits = ["-gpu_memory_target", str(memory)]
    for words in ([EXTRACT, "-d", "1", "-np", "1"], [PLAN, "-d", "1", *limits]):
        command = [str(programs / words[0]), *words[1:]]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"{words[0]} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")

    (path,) = (root / "preprocessed" / DATASET).glob("*Plans*.json")
    planned = json.loads(path.read_text())
    configurations = planned["configurations"]
    found: dict[str, Any] = configurations.get("3d_fullres") or configurations["2d"]
    dims = len(found["patch_size"])
    backward = planned["transpose_backward"] if dims == 3 else [0, 1]
    return {**found, "order": backward[::-1]}  # its axes are those of the file from the last


def row_of_nnunet(found: Mapping[str, Any]) -> Row:
    """Return what nnU-Net planned, along the axes of the file."""
    network = found["architecture"]["arch_kwargs"]
    order = found["order"]
    strides = [[stride[axis] for axis in order] for stride in network["strides"]]
    return {
        "spacing": [found["spacing"][axis] for axis in order],
        "median image": [found["median_image_size_in_voxels"][axis] for axis in order],
        "patch": [found["patch_size"][axis] for axis in order],
        "levels": len(strides),
        "halved along each axis": np.log2(np.prod(strides, axis=0)).round().astype(int).tolist(),
        "features": list(network["features_per_stage"]),
        "batch": found["batch_size"],
        "intensities": ", ".join(found["normalization_schemes"]),
    }


def row_of_medfl(ours: Plan) -> Row:
    """Return what medfl planned, along the axes right, anterior and superior."""
    spacing = ours.spacing or (1.0,) * len(ours.patch)
    median = []
    for tally, step in zip(ours.pooled.extents, spacing, strict=True):
        median.append(round(float(tally.length()) / step, 1))

    network = ours.network
    return {
        "spacing": list(spacing),
        "median image": median,
        "patch": list(ours.patch),
        "levels": len(network.strides),
        "halved along each axis": np.log2(network.factors).round().astype(int).tolist(),
        "features": list(network.filters),
        "batch": ours.batch_size,
        "intensities": "clipped, pooled" if ours.clip else "each image",
    }


def written(value: object) -> str:
    """Return a cell of the table."""
    if not isinstance(value, list):
        return str(value)
    sign = ", " if value and max(value) > 31 and value == sorted(value) else " × "
    return sign.join(f"{each:g}" for each in value)


def compared(options: argparse.Namespace, programs: Path) -> list[Row]:
    """Return the two plans of the folder."""
    empty, cases = of_folder(options, progress=sys.stderr.isatty())
    if empty.channels != 1:
        raise RuntimeError(f"{empty.channels} channels: this benchmark lays out images of one")
    pooled = gather(empty, cases, 0)
    names = (options.channel,) if options.channel else ()
    ours = plan({"all": pooled}, options.memory, names)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        channel = options.channel or "MRI"
        lay_out(cases, empty.classes, channel, root / "raw" / DATASET)
        found = nnunet_plan(root, programs, options.memory)

    shared = {"cases": len(cases), "memory_gb": options.memory}
    return [
        {"plan": "nnU-Net", **shared, **row_of_nnunet(found)},
        {"plan": "medfl", **shared, **row_of_medfl(ours)},
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--masks", type=Path, required=True)
    parser.add_argument("--classes", default="", help="names of the mask values 1, 2, ...")
    parser.add_argument("--channel", default="", help="CT: Hounsfield units")
    parser.add_argument("--memory", type=float, default=8.0, help="GB of a training step")
    parser.add_argument("--bin", type=Path, help="folder of nnU-Net's programs; default: found")
    parser.add_argument("--json", action="store_true", help="print a JSON list of both plans")
    options = parser.parse_args(arguments)
    found = shutil.which(PLAN, path=str(options.bin) if options.bin else None)
    if found is None:
        print(f"skipped: there is no {PLAN}; pip install nnunetv2, or name its folder with --bin")
        return 0

    rows = compared(options, Path(found).parent)
    if options.json:
        print(json.dumps(rows))
        return 0

    lines = [[key, *(written(row[key]) for row in rows)] for key in rows[0] if key != "plan"]
    print(markdown_table(["", *(str(row["plan"]) for row in rows)], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
