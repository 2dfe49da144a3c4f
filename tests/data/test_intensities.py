"""The constants by which a bundle's transforms scale pictures are read, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
import yaml

from medfl import datasets
from medfl.bundle.bundle import Bundle, shipped
from medfl.bundle.open import protocol_of
from medfl.core.errors import InputError
from medfl.data.intensities import constants

SCALE = mt.ScaleIntensityRanged("image", 0, 255, 0, 1)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def normal(subtrahend: Any, divisor: Any, **more: Any) -> mt.NormalizeIntensityd:
    return mt.NormalizeIntensityd(
        "image", subtrahend, divisor, channel_wise=isinstance(subtrahend, list), **more
    )


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([SCALE], ((0.0,), (1.0,))),
        ([SCALE, normal(0.5, 0.25)], ((0.5,), (0.25,))),
        ([mt.Compose([SCALE]), normal([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])], IMAGENET),
        ([mt.ScaleIntensityRanged("image", 0, 4095, -1, 1)], ((0.5,), (0.5,))),
        ([mt.ScaleIntensityd("image", -1, 3), normal(1.0, 2.0)], ((0.5,), (0.5,))),
        ([mt.ScaleIntensityRange(0, 255, 0, 1), mt.NormalizeIntensity(0.25, 0.5)], ((0.25,), (0.5,))),
        ([mt.LoadImaged("image"), mt.Resized("image", 16), SCALE, mt.RandAdjustContrastd("image")], ((0.0,), (1.0,))),
        ([SCALE, mt.ScaleIntensityd("label"), mt.ThresholdIntensityd("label", 1)], ((0.0,), (1.0,))),
    ],
)  # fmt: skip
def test_what_transforms_do_to_black_and_white(steps: list[Any], expected: Any) -> None:
    mean, sd = constants(steps)
    assert (mean, sd) == expected
    grey = {"image": torch.tensor([0.0, 255.0]).expand(3, 1, 2), "label": torch.zeros(1, 2)}
    if steps[0] is SCALE:
        black, white = (
            np.asarray(v, float) for v in ((0 - np.array(mean)) / sd, (1 - np.array(mean)) / sd)
        )
        own = [
            s for s in steps if not isinstance(s, mt.RandomizableTransform) and "image" in s.keys
        ]
        made = mt.Compose(own)(grey)["image"].numpy().reshape(3, 2)
        assert np.allclose(made[:, 0], black, atol=1e-6)
        assert np.allclose(made[:, 1], white, atol=1e-6)


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ([], "transforms without one that scales to a range"),
        ([mt.LoadImaged("image")], "transforms without one that scales"),
        ([normal(0.5, 0.25)], "transform NormalizeIntensityd"),
        ([SCALE, normal(None, None)], "transform NormalizeIntensityd"),
        ([SCALE, normal(0.5, 0.25, nonzero=True)], "transform NormalizeIntensityd"),
        ([SCALE, mt.Lambdad("image", lambda x: 2 * x)], "transform Lambdad"),
        ([SCALE, mt.AdjustContrastd("image", 2.0)], "transform AdjustContrastd"),
        ([mt.ScaleIntensityRangePercentilesd("image", 1, 99, 0, 1)], "transform ScaleIntensityRangePercentilesd"),
        ([mt.ScaleIntensityd("image", channel_wise=True)], "transform ScaleIntensityd"),
        ([SCALE, normal(0.5, float("nan"))], "a mean of .0.5. and a standard deviation of .nan."),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(steps: list[Any], named: str) -> None:
    with pytest.raises(
        InputError, match=f"^{named}.*; .*; say which they are with --set normalise=MEAN/SD"
    ):
        constants(steps)


def test_every_shipped_bundle_of_pictures_is_read(tmp_path: Path) -> None:
    """Those that scale each image by itself are refused; none is misread."""
    for name in shipped():
        if protocol_of(name)["task"] != "classification":
            continue
        bundle = Bundle(
            name,
            {"dataset_dir": datasets.write_phantom(name, tmp_path / name, per_class=10, size=16)},
        )
        mean, sd = constants(bundle.section("train").source.transforms)
        train = yaml.safe_load((bundle.root / "configs" / "train.yaml").read_text())["train"]
        kept = {"_target_": "NormalizeIntensityd", "subtrahend": [0.0], "divisor": [1]}
        steps = [*train["deterministic_transforms"], kept]
        said = next(step for step in steps if step["_target_"] == kept["_target_"])
        assert (list(mean), list(sd)) == (said["subtrahend"], said["divisor"]), name
