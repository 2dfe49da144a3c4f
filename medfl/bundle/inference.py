"""A MONAI bundle with weights, as in its inference configuration: network, pre-processing, inferer, classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from monai.inferers import SimpleInferer
from torch import nn

from medfl.bundle.configuration import Configuration
from medfl.bundle.files import config_file, read_metadata
from medfl.core import Config, InputError
from medfl.policy import admission
from medfl.policy.inspection import INFERENCE
from medfl.policy.policy import Policy
from medfl.problem import channel_names, mask_names, tensor_described
from medfl.storage import hashed, load_pickled


@dataclass(frozen=True, eq=False)
class Inference:
    """A MONAI bundle with weights, as in its inference configuration.

    Attributes:
        file: that configuration, and config its content.
        described: the content of metadata.json, {} if there is none.
        weights: the file that was read.
        sha256: of its content.
        network: on its device, in evaluation mode.
    """

    root: Path
    file: Path
    config: Configuration
    described: Config
    weights: Path
    sha256: str
    network: nn.Module

    @property
    def inferer(self) -> Callable[..., Any]:
        """Maps inputs and a network to outputs of whole images."""
        inferer = SimpleInferer()
        if "inferer" in self.config:
            inferer = self.config.evaluated("inferer")

        return inferer

    @property
    def task(self) -> str:
        """Kind of task, by what metadata.json says of the output, and by a sigmoid of several classes."""
        output = tensor_described(self.described, "outputs", "pred")
        form = output.get("format")
        if form in ("regression", "numbers") or output.get("type") == "value":
            return "regression"

        # model zoo bundles have the shape [1, classes]
        shape = output.get("spatial_shape")
        is_row = form == "classes" or str(shape).startswith("[1,")
        if form == "segmentation" or (shape and not is_row):
            return "segmentation"

        is_several = len(channel_names(self.described)) > 1
        return "multilabel" if self.sigmoid and is_several else "classification"

    @property
    def sigmoid(self) -> str:
        """Where the postprocessing takes the sigmoid of its outputs, "" if nowhere."""
        for name in ("Activationsd", "Activations"):
            for key, node in self.config.nodes(name):
                if node.get("sigmoid"):
                    return key or "its postprocessing"

        return ""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the output's classes, background first; () if metadata.json has none."""
        return mask_names(self.described)


def open_inference(
    where: str | Path, policy: Policy, device: torch.device, kinds: Sequence[str], name: str
) -> Inference:
    """Open a MONAI bundle with weights: models/model.<kind> of the first existing kind.

    They are those of its `network_def`, or TorchScript (kind "ts").

    Args:
        where: its folder.
        policy: what it may do.
        device: of the network.
        kinds: of "safetensors", "pt" and "ts".
        name: description of the bundle for the user, such as "teacher 'x'".

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
        raise InputError(
            f"bundle {root} has no {missing}",
            "a bundle that predicts has an inference configuration and weights",
            "add it, or name the folder of a complete bundle",
        )

    admission.admit(root, policy, INFERENCE)
    if weights.suffix == ".ts" and not (policy.trusted or "pickle" in policy.allow):
        raise InputError(
            f"{name} with TorchScript, which can write files",
            "weights are models/model.pt",
            "if its author may run code here, give --trust",
        )

    described = read_metadata(root)
    config = Configuration(root, [file], {}, described, device, policy)
    network, sha256 = _network(config, weights, device)
    return Inference(root, file, config, described, weights, sha256, network)


def _network(config: Configuration, weights: Path, device: torch.device) -> tuple[nn.Module, str]:
    """Return the network with the weights of a file, and the SHA-256 of that."""
    try:
        content, sha256 = hashed(weights)
        if weights.suffix == ".ts":
            network: nn.Module = torch.jit.load(content, map_location=device)  # type: ignore[no-untyped-call]
        else:
            network = config.evaluated("network_def")
            state: Any
            if weights.suffix == ".safetensors":
                state = safetensors.torch.load(content.getvalue())
            else:
                state = load_pickled(content)

            # MONAI's CheckpointSaver writes {"model": the state dict, ...}
            if isinstance(state.get("model"), Mapping):
                state = state["model"]

            network.load_state_dict(state)

        return network.to(device).eval(), sha256
    except InputError:
        raise
    except Exception as error:
        # torch raises several types for damaged files and for other networks
        raise InputError(
            f"{weights} is not read as the weights of its bundle ({' '.join(str(error).split())[:200]})",
            "weights of network_def, or TorchScript",
            "restore the file",
        ) from error
