"""What a bundle's metadata.json may say of inputs and outputs, which size what is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medfl.bundle.files import read_metadata
from medfl.core.errors import InputError
from medfl.problem.described import channel_names


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ({"num_channels": 10**9}, "1000000000 channels"),
        ({"num_channels": "many"}, "num_channels"),
        ({"channel_def": {"../a": "x"}}, "the channel '../a'"),
    ],
)
def test_channels_beyond_reason_are_refused(
    image: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "configs").mkdir()
    document = {"network_data_format": {"inputs": {"image": image}}}
    (tmp_path / "configs" / "metadata.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=said):
        read_metadata(tmp_path)


@pytest.mark.parametrize(
    ("prediction", "names"),
    [
        ({"channel_def": {"1": "liver", "0": "background"}}, ("background", "liver")),
        ({"label_def": {"0": "background", "1": "liver"}}, ("background", "liver")),
        ({"channel_def": {"0": "a"}, "label_def": {"0": "b"}}, ("a",)),
        ({"label_def": {"background": 0}}, ()),
        ({"label_def": {"none": "background"}}, ()),
        ({"label_def": ["background"]}, ()),
        ({}, ()),
    ],
)
def test_structures_are_called_as_the_metadata_s_channels_or_labels(
    prediction: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert channel_names({"network_data_format": {"outputs": {"pred": prediction}}}) == names


def test_a_network_s_only_output_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    outputs = {"segmentation": {"channel_def": {"0": "background", "1": "cup"}}}
    document = {"network_data_format": {"outputs": outputs}}
    (tmp_path / "configs" / "metadata.json").write_text(json.dumps(document))
    assert channel_names(read_metadata(tmp_path)) == ("background", "cup")
