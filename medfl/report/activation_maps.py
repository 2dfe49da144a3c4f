"""Class-activation maps: where in an image a convolutional classifier found a class; and pictures of them.

Grad-CAM and Grad-CAM++ as in MONAI (R. Selvaraju et al., ICCV 2017; A. Chattopadhay et al., WACV 2018), on the
last convolution of the network whose output still has at least 4 pixels per side. A map shows what influenced this
network's output, not what is wrong with the patient.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from monai.visualize import GradCAM, GradCAMpp
from numpy.typing import NDArray
from torch import Tensor, nn

from medfl.core import InputError
from medfl.data import Shard
from medfl.data.partition.table import shorten
from medfl.report.style import INK, SOFT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METHODS = {"gradcam": GradCAM, "gradcam++": GradCAMpp}
_MIN_SIDE = 4  # pixels of the smallest feature map that still localises
# Inches.
_PANEL = 1.9
_TITLE = 0.55
_MAX_COLUMNS = 6


@dataclass(frozen=True, eq=False)
class ActivationMap:
    """One image and its map.

    Attributes:
        id: of the item, or the image's file.
        image: (C, H, W[, D]), as network input.
        map: (H, W[, D]), 0 to 1, 0 where nothing indicates the class.
        target: the class that the map is for.
        predicted: the most probable class.
        probability: of the target.
        layer: name of the convolution.
    """

    id: str
    image: NDArray[np.float32]
    map: NDArray[np.float32]
    target: str
    predicted: str
    probability: float
    layer: str


def compute(
    network: nn.Module,
    shard: Shard,
    classes: Sequence[str],
    device: torch.device,
    *,
    target: int | str | None = None,
    method: str = "gradcam++",
) -> list[ActivationMap]:
    """Return the map of each image.

    Args:
        network: a classifier in evaluation mode; a single output is the logit of class 1.
        shard: the images.
        classes: names in label order.
        device: of the network.
        target: the class, by name or index; None uses each image's predicted one.
        method: "gradcam++" or "gradcam".

    Raises:
        InputError: no such class or method, or the network has no suitable convolution.
    """
    if method not in _METHODS:
        raise InputError(
            f"method {method!r}", f"methods are {', '.join(_METHODS)}", "choose one of them"
        )

    fixed_index = _class_index(target, classes)
    logits = _Logits(network).eval()
    layer = ""
    maps = []

    for ident, (x, _) in zip(shard.ids, shard.batches(1), strict=True):
        x = x.to(device).float()
        layer = layer or last_convolution(logits, x)
        with torch.no_grad():
            probabilities = logits(x)[0].softmax(0)

        best = int(probabilities.argmax())
        index = best if fixed_index is None else fixed_index
        maps.append(
            ActivationMap(
                id=ident,
                image=x[0].cpu().numpy(),
                map=_map(logits, layer, x, index, method),
                target=classes[index],
                predicted=classes[best],
                probability=float(probabilities[index]),
                layer=layer.removeprefix("network."),
            )
        )

    return maps


def last_convolution(network: nn.Module, x: Tensor) -> str:
    """Return the name of the last convolution run on x (B, C, H, W[, D]) with at least 4 output pixels per axis.

    Raises:
        InputError: there is none.
    """
    # in the order of execution, which may differ from that of the modules
    outputs: list[tuple[str, Tensor]] = []
    hooks = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            hooks.append(
                module.register_forward_hook(lambda m, i, y, name=name: outputs.append((name, y)))
            )

    try:
        with torch.no_grad():
            network(x)
    finally:
        for hook in hooks:
            hook.remove()

    large = [name for name, y in outputs if min(y.shape[2:]) >= _MIN_SIDE]
    if not large:
        raise InputError(
            f"a network with {len(hooks)} convolutions on images of {' x '.join(map(str, x.shape[2:]))}",
            f"a class-activation map needs a convolution whose output has at least {_MIN_SIDE} pixels a side",
            "give larger images (--config image_size=N, where the bundle has it), or a network with fewer strides",
        )

    return large[-1]


def draw(maps: Sequence[ActivationMap], columns: int = 3) -> Figure:
    """Return a figure of each image, plain and overlaid with its map; volumes in the slice where the map is largest."""
    from matplotlib.figure import Figure

    columns = min(columns, len(maps), _MAX_COLUMNS)
    rows = -(-len(maps) // columns)
    figure = Figure(
        figsize=(2 * _PANEL * columns, rows * (_PANEL + _TITLE)), dpi=110, layout="constrained"
    )
    axes = figure.subplots(rows, 2 * columns, squeeze=False)

    for axis in axes.flat:
        axis.set_axis_off()

    for number, entry in enumerate(maps):
        row, column = divmod(number, columns)
        plain, overlay = axes[row, 2 * column : 2 * column + 2]
        image, heat = _slice(entry)
        plain.imshow(image, cmap="gray", vmin=0, vmax=1)
        plain.set_title(
            shorten(entry.id.rpartition("/")[2], 24), size=8, color=SOFT, parse_math=False
        )
        overlay.imshow(image, cmap="gray", vmin=0, vmax=1)
        overlay.imshow(heat, cmap="inferno", alpha=0.15 + 0.6 * heat, vmin=0, vmax=1)
        title = f"{entry.target} {entry.probability:.2f}"
        if entry.target != entry.predicted:
            title += f"\npredicted {entry.predicted}"

        overlay.set_title(title, size=8, color=INK, parse_math=False)

    return figure


def _map(network: nn.Module, layer: str, x: Tensor, index: int, method: str) -> NDArray[np.float32]:
    """Return the map (H, W[, D]) of a class, in 0 to 1."""
    # MONAI's own postprocessing scales from the minimum; here 0 must stay 0
    cam = _METHODS[method](
        nn_module=network, target_layers=layer, postprocessing=lambda values: values
    )
    raw = torch.as_tensor(cam(x=x.detach().requires_grad_(), class_idx=index)).detach()[0, 0]
    raw = raw.float().nan_to_num()
    largest = raw.max()
    if largest > 0:
        raw = raw / largest
    else:
        raw = torch.zeros_like(raw)

    return raw.cpu().numpy()


class _Logits(nn.Module):
    """A copy of a classifier with one output per class, even if the network itself has a single output.

    Its modules do not work in place: that would overwrite what the hooks of a map keep.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = deepcopy(network)
        # in place a later layer would overwrite the outputs whose gradients are taken
        for module in self.network.modules():
            if getattr(module, "inplace", False):
                module.inplace = False  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x).flatten(1)
        if logits.shape[1] == 1:
            return torch.cat([torch.zeros_like(logits), logits], 1)

        return logits


def _class_index(target: int | str | None, classes: Sequence[str]) -> int | None:
    if target is None or (isinstance(target, int) and 0 <= target < len(classes)):
        return target
    if target in classes:
        return list(classes).index(str(target))
    raise InputError(f"class {target!r}", f"classes are {', '.join(classes)}", "choose one of them")


def _slice(entry: ActivationMap) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the image (H, W[, 3]) in 0 to 1 and its map (H, W)."""
    image = entry.image
    heat = entry.map
    # a volume is cut where its map is largest, and turned to radiological convention
    if heat.ndim == 3:
        cut = int(heat.sum((0, 1)).argmax())
        image = np.rot90(image[..., cut], axes=(1, 2))
        heat = np.rot90(heat[..., cut])

    low, high = np.percentile(image, [0.5, 99.5])  # a few bright pixels must not darken the rest
    scaled = np.clip((image - low) / max(high - low, 1e-6), 0, 1)
    if len(scaled) == 3:
        return np.moveaxis(scaled, 0, -1), heat

    return scaled[0], heat
