"""Five small portable runs in one process: `python -m tests.support.portable_runs FOLDER` prints SHA-256 of weights.

The folder is new. `MEDFL_RUNS=small_cnn,unet2d` takes some of them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from medfl.core import portable

SIZES: dict[str, dict[str, int]] = {
    "mednist": {"per_class": 10, "size": 28}, "lung_cxr": {"per_class": 12, "size": 32},
    "hippocampus": {"per_class": 10, "size": 24},
}  # fmt: skip
RUNS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "small_cnn": ("mednist", "fedavg", {"network": "small_cnn", "image_size": 28}, {}),
    "resnet18": ("mednist", "fedavg", {"network": "resnet18", "image_size": 32}, {}),
    "unet2d": ("lung_cxr", "fedavg", {"network": "unet16", "image_size": 32}, {}),
    "unet3d": ("hippocampus", "fedavg", {"network": "unet8", "patch_size": [16, 16, 16]}, {}),
    "fedmr": ("mednist", "fedmr", {"network": "small_cnn", "image_size": 28}, {}),
}
"""Name -> bundle, method, configuration, options of the method."""


def main(folder: Path) -> dict[str, str]:
    portable.enable()
    from medfl import datasets
    from medfl.runs.launch import federate
    from medfl.storage.files import load_weights, weights_sha256

    found = {}
    for name in (os.environ.get("MEDFL_RUNS") or ",".join(RUNS)).split(","):
        bundle, method, config, options = RUNS[name]
        data = folder / bundle
        if not data.exists():
            datasets.write_phantom(bundle, data, **SIZES[bundle])
        requested = {
            "method": method, "data": str(data), "sites": 2, "partition": "iid", "rounds": 2, "local_epochs": 1,
            "batch_size": 4, "eval_every": 0, "portable": True,
        }  # fmt: skip
        federate(
            bundle, options=options, config=config, requested=requested, out=folder / name, jobs=1
        )
        found[name] = weights_sha256(load_weights(folder / name / "weights.safetensors"))
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))) + "\n")
