"""Any network of MONAI by its name: what it takes of the bundle's own, and what is refused before a run is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import monai.networks.nets
import pytest
import torch

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.bundle.zoo import monai_networks
from medfl.cli import main
from medfl.core.errors import InputError

SMALL = {"init_features": 8, "growth_rate": 4, "block_config": [1, 1]}
THREE_D = {
    "_target_": "UNet",
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 2,
    "channels": [4, 8],
    "strides": [2],
}


def bundle(name: str, arguments: Any = None, of: str = "mednist") -> Bundle:
    return Bundle(of, {"network": f"monai:{name}", "network_args": arguments or {}})


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=32
    )


def run(scans: Path, out: Path, *words: str) -> int:
    small = (
        "--rounds",
        "1",
        "--sites",
        "2",
        "--partition",
        "iid",
        "--jobs",
        "1",
        "--quiet",
        "--out",
        str(out),
    )
    config = [part for word in (*words, "image_size=32") for part in ("--config", word)]
    return main(["run", "mednist", "--data", str(scans), *small, *config])


def test_a_network_has_the_channels_and_dimensions_of_the_one_in_its_place() -> None:
    network = bundle("DenseNet", SMALL).network()
    assert type(network) is monai.networks.nets.DenseNet
    assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 6)
    volumes = bundle("BasicUNet", {"features": [4, 4, 8, 8, 8, 4]}, "hippocampus").network()
    assert volumes(torch.zeros(1, 1, 32, 32, 32)).shape == (1, 3, 32, 32, 32)
    found = monai_networks.replaced(
        {"network": "monai:SegResNet"}, {"network_def": THREE_D, "network": "$@network_def"}
    )
    assert found == {
        "network_def": {
            "_target_": "monai.networks.nets.SegResNet", "spatial_dims": 3, "in_channels": 1, "out_channels": 2
        }
    }  # fmt: skip


@pytest.mark.parametrize("name", ["DenseNet121", "SEResNet50", "resnet18", "DenseNet169"])
def test_networks_that_hand_arguments_on_take_the_channels_too(name: str) -> None:
    """Their own signature says only **kwargs."""
    node = bundle(name).get("network_def")
    with torch.no_grad():
        assert node.eval()(torch.zeros(1, 1, 32, 32)).shape == (1, 6)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("Densnet121", {}, "did you mean DenseNet121"),
        ("UNet", {}, "without channels, strides"),
        ("DenseNet121", {"dropout": 0.1}, "did you mean dropout_prob"),
        ("DenseNet121", {"pretrained": True}, "argument 'pretrained', by which"),
        ("EfficientNetBN", {"model_name": "efficientnet-b0", "pretrained": True}, "pretrained"),
        (
            "HoVerNet",
            {"pretrained_url": "https://x.invalid/w"},
            "argument 'pretrained_url', by which",
        ),
        ("Transchex", {}, "the networks of MONAI are"),
        ("torch.nn.Linear", {}, "the networks of MONAI are"),
        ("os.system", {}, "the networks of MONAI are"),
        ("DenseNet121", [1], "arguments by name"),
    ],
)
def test_what_is_no_network_or_not_listed_is_refused(name: str, arguments: Any, told: str) -> None:
    with pytest.raises(InputError) as caught:
        bundle(name, arguments or {})
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arguments_without_a_network_of_monai_are_refused() -> None:
    with pytest.raises(InputError, match="add --config network=monai:NAME"):
        Bundle("mednist", {"network": "two_conv", "network_args": {"a": 1}})


def test_every_name_that_is_offered_is_a_listed_class_of_monai() -> None:
    assert {"DenseNet121", "BasicUNet", "UNet", "SwinUNETR", "resnet18"} <= set(
        monai_networks.names()
    )
    for name in monai_networks.names():
        assert getattr(monai.networks.nets, name).__module__.startswith("monai.networks.nets.")


def test_a_network_that_does_not_fit_is_told_before_anything_is_written(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Masks for images of classes, and another number of outputs than there are classes."""
    for words, told in (
        (
            ("network=monai:BasicUNet", "network_args={features: [4, 4, 4, 4, 4, 4]}"),
            "a step of training fails",
        ),
        (
            ("network=monai:DenseNet", "network_args={block_config: [1], out_channels: 4}"),
            "fails with|4 outputs",
        ),
        (
            ("network=monai:DenseNet", "network_args={block_config: [1], out_channels: 9}"),
            "has 9 outputs",
        ),
        (
            ("network=monai:DenseNet", "network_args={block_config: [1], spatial_dims: 3}"),
            "fails with",
        ),
    ):
        assert run(scans, tmp_path / "out", *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert any(part in line for part in told.split("|"))
        assert not (tmp_path / "out").exists()


def test_a_run_with_a_network_of_monai_is_resumed_and_exported(scans: Path, tmp_path: Path) -> None:
    words = ("network=monai:DenseNet", f"network_args={SMALL}")
    assert run(scans, tmp_path / "run", *words) == 0
    assert (
        main(["run", "--resume", "--out", str(tmp_path / "run"), "--rounds", "2", "--quiet"]) == 0
    )
    assert (
        main(
            [
                "export",
                str(tmp_path / "run"),
                "--out",
                str(tmp_path / "exported"),
                "--formats",
                "none",
            ]
        )
        == 0
    )
    exported = (tmp_path / "exported/configs/inference.yaml").read_text()
    assert "monai.networks.nets.DenseNet" in exported
    weights = torch.load(tmp_path / "exported/models/model.pt", weights_only=True)
    Bundle(str(tmp_path / "exported")).network().load_state_dict(weights)
