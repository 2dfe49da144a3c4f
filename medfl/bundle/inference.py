"""A MONAI bundle with weights, as its inference configuration has it: network, pre-processing, inferer, classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from monai.inferers import SimpleInferer
from torch import nn

from medfl.bundle.configuration import Configuration
from medfl.bundle.files import config_file, read_metadata
from medfl.core.documents import Config
from medfl.core.errors import InputError
from medfl.policy import admission
from medfl.policy.inspection import INFERENCE
from medfl.policy.policy import Policy
from medfl.problem.described import mask_names, tensor_described
from medfl.storage.files import load_pickled, load_weights


@dataclass(frozen=True, eq=False)
class Inference:
    """A MONAI bundle with weights, as its inference configuration has it.

    Attributes:
        file: that configuration, and config what it says.
        described: the content of metadata.json, {} where there is none.
        weights: the file that was read.
        network: on its device, in evaluation mode.
    """

    root: Path
    file: Path
    config: Configuration
    described: Config
    weights: Path
    network: nn.Module

    @property
    def inferer(self) -> Callable[..., Any]:
        """What takes inputs and a network to outputs of whole images."""
        inferer: Callable[..., Any] = SimpleInferer()
        if "inferer" in self.config:
            inferer = self.config.evaluated("inferer")

        return inferer

    @property
    def task(self) -> str:
        """Classification or segmentation, as metadata.json describes the output."""
        output = tensor_described(self.described, "outputs", "pred")
        segments = output.get("format") == "segmentation" or bool(output.get("spatial_shape"))
        return "segmentation" if segments else "classification"

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the output's classes, the background's first; () where metadata.json has none."""
        return mask_names(self.described)


def open_inference(
    where: str | Path, policy: Policy, device: torch.device, kinds: Sequence[str], name: str
) -> Inference:
    """Open a MONAI bundle with weights: models/model.<kind> of the first kind that is there.

    They are those of its `network_def`, or TorchScript (kind "ts").

    Args:
        where: its folder.
        policy: what it may do.
        device: of the network.
        kinds: of "safetensors", "pt" and "ts".
        name: what the bundle is for the user, as "teacher 'x'".

    Raises:
        InputError: no such bundle or no weights in it, or something in it is refused.
    """
    root = Path(where).expanduser().resolve()
    file = config_file(root, "inference")
    paths = [root / "models" / f"model.{kind}" for kind in kinds]
    weights = next((path for path in paths if path.is_file()), None)
    if file is None or weights is None:
        files = " or ".join(f"models/model.{kind}" for kind in kinds)
        missing = "configs/inference.json or .yaml" if file is None else files
        allowed = "a bundle that predicts has an inference configuration and weights"
        raise InputError(
            f"bundle {root} has no {missing}",
            allowed,
            "add it, or name the folder of a complete bundle",
        )

    admission.admit(root, policy, INFERENCE)
    if weights.suffix == ".ts" and not (policy.trusted or "pickle" in policy.allow):
        problem = f"{name} with TorchScript, which can write files"
        raise InputError(
            problem, "weights are models/model.pt", "if its author may run code here, give --trust"
        )

    described = read_metadata(root)
    config = Configuration(root, [file], {}, described, device, policy)
    return Inference(root, file, config, described, weights, _network(config, weights, device))


def _network(config: Configuration, weights: Path, device: torch.device) -> nn.Module:
    try:
        if weights.suffix == ".ts":
            network: nn.Module = torch.jit.load(str(weights), map_location=device)  # type: ignore[no-untyped-call]
        else:
            network = config.evaluated("network_def")
            load = load_weights if weights.suffix == ".safetensors" else load_pickled
            state: Any = load(weights)
            # MONAI's CheckpointSaver writes {"model": the state dict, ...}
            if isinstance(state.get("model"), Mapping):
                state = state["model"]

            network.load_state_dict(state)

        return network.to(device).eval()
    except InputError:
        raise
    except Exception as error:
        # torch raises several types for damaged files and for other networks
        problem = f"{weights} is not read as the weights of its bundle ({' '.join(str(error).split())[:200]})"
        raise InputError(
            problem, "weights of network_def, or TorchScript", "restore the file"
        ) from error
