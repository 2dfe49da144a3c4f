"""Data drawn for the public zoo's bundles as published: each gets its images and lists, or the reason is named."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from medfl.bundle.bundle import Bundle
from medfl.bundle.configuration import own_python
from medfl.core.errors import InputError
from medfl.core.seeding import stream
from medfl.datasets import is_phantom
from tests.zoo.test_real_inspected import FOLDER, OWN, REAL
from tools.synthetic_data.draw_data import draw_data

WITHOUT_TRAINING = {"brats_mri_generative_diffusion"}
OTHER_TRAINERS = {"lung_nodule_ct_detection", "mednist_gan", "spleen_deepedit_annotation"}
NEEDED = {"pathology_tumor_detection": "cucim", "spleen_deepedit_annotation": "itk"}
"""Packages without which the first item of a bundle cannot be tried."""
TOLD = {
    "lung_nodule_ct_detection": "random transforms fail on some draws with ValueError: unsupported keyword",
    "prostate_mri_anatomy": "random transforms fail on some draws with ValueError: unsupported keyword",
    "mednist_gan": "nothing is drawn for its validate data: .* has no id 'validate#evaluator'",
    "valve_landmarks": "label images are empty: the values of its points are not in its configuration",
}
"""What the user may be told beside."""
TASKS = {
    "classification_template": "classification",
    "endoscopic_inbody_classification": "classification",
    "pathology_nuclei_classification": "classification",
    "valve_landmarks": "other",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*REAL} - WITHOUT_TRAINING))
def test_data_are_drawn_and_the_first_training_item_is_trained_on(
    name: str, tmp_path: Path
) -> None:
    drawn = draw_data(str(FOLDER / name), tmp_path / "drawn", policy=OWN)
    lacking = name in NEEDED and importlib.util.find_spec(NEEDED[name]) is None
    told = f"not tried: .*{NEEDED.get(name)}" if lacking else TOLD.get(name, "nothing is told")
    assert all(re.search(told, note) for note in drawn.notes), drawn.notes
    assert drawn.counts["train"] > 1
    assert is_phantom(drawn.folder)
    assert all(path.stat().st_size for path in drawn.folder.rglob("*") if path.is_file())
    if name in OTHER_TRAINERS or lacking:
        return
    assert drawn.counts["validate"] > 0
    values = dict(text.split("=", 1) for text in drawn.arguments if "=" in text)
    opened = Bundle(str(FOLDER / name), {**values, "dataset_dir": f"{drawn.folder}/"}, policy=OWN)
    source = opened.section("train").source
    with own_python(opened.root), stream(0, "first item"):
        sample = source.entries[0]
        for transform in source.transforms:
            sample = transform(sample)
    first = sample[0] if isinstance(sample, list) else sample
    assert (
        first["image"].shape[0]
        == opened.metadata["network_data_format"]["inputs"]["image"]["num_channels"]
    )
    assert "label" in first
    if name == "pancreas_ct_dints_segmentation":
        with pytest.raises(InputError, match="large_files.yml says where it is downloaded"):
            opened.network()
    else:
        assert opened.task == TASKS.get(name, "segmentation")  # network and loss take the item


@pytest.mark.parametrize("name", sorted({*REAL} & WITHOUT_TRAINING))
def test_without_a_training_configuration_that_is_the_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="has no configs/train.json or .yaml; it has inference.json"
    ):
        draw_data(str(FOLDER / name), tmp_path / "drawn", policy=OWN)
    assert not (tmp_path / "drawn").exists()
