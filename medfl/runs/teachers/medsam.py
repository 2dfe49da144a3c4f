"""MedSAM as a teacher for segmentation: SAM's ViT-B, fine-tuned by Ma et al. (Nature Communications 2024).

It is read with `transformers`, from the original checkpoint (`medsam_vit_b.pth`, whose keys `renamed` translates) or
from a folder or the hub's cache. Images are prepared as for MedSAM, not as for SAM: resized to 1024 x 1024 regardless
of their shape, converted to 8-bit, scaled from minimum and maximum to 0..1; without ImageNet's mean or deviation.
The prompt is one box in pixels of the file, tight around the reference mask or else the whole image. Outputs are
probabilities of the foreground: the sigmoid precedes the resizing.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from monai.transforms.transform import MapTransform
from torch import Tensor, nn

from medfl.bundle.text_embeddings import at_hand, from_files
from medfl.core import LOADER, Array, Config, InputError, Tensors, Weights, versions_of
from medfl.datasets.readers.pairs import read_pair
from medfl.problem import Problem
from medfl.runs.teachers.questions import Picture, Questions, as_picture, need_task, read_picture
from medfl.storage import load_pickled, weights_sha256

HUB = "wanglab/medsam-vit-base"
_WHERE = "medsam_vit_b.pth, see https://github.com/bowang-lab/MedSAM"
_RULES = yaml.load(Path(__file__).with_suffix(".yaml").read_text("utf-8"), LOADER)
"""From names of the package segment_anything to those of transformers, in this order."""
_POSITIONS = "prompt_encoder.shared_embedding.positional_embedding"
_IMAGE_POSITIONS = "shared_image_embedding.positional_embedding"


# The network


class MedSAM(nn.Module):
    """MedSAM on whole images: pixels and boxes in, probabilities out."""

    def __init__(self, sam: Any) -> None:
        super().__init__()
        self.sam = sam

    def forward(self, image: Tensor, boxes: Tensor, size: Sequence[int] | None = None) -> Tensor:
        """Return probabilities of background and foreground (B, 2, H, W).

        Args:
            image: (B, 3, H, W), 0..255.
            boxes: (B, 4): x0, y0, x1, y1 in its pixels.
            size: (H, W) of the output, the image's if None.
        """
        side = self.sam.config.vision_config.image_size
        height, width = image.shape[-2:]
        # x and y of two corners
        scale = torch.tensor([side / width, side / height] * 2, device=image.device)
        output = self.sam(
            pixel_values=prepared(image, side),
            input_boxes=boxes.float()[:, None] * scale,
            multimask_output=False,
        )
        low = output.pred_masks[:, 0].float().sigmoid()  # (B, 1, h, w)
        mask = nn.functional.interpolate(
            low, size=tuple(size or (height, width)), mode="bilinear", align_corners=False
        )

        return torch.cat([1 - mask, mask], 1)


def prepared(image: Tensor, side: int) -> Tensor:
    """Convert images (B, 3, H, W) in 0..255 to MedSAM's input: (B, 3, side, side) in 0..1."""
    resized = nn.functional.interpolate(
        image.float(), size=(side, side), mode="bicubic", align_corners=False, antialias=True
    )
    # like a cast to uint8, but round-off must not cost a full step
    pixels = (resized + 1e-3).clamp(0, 255).floor()
    low = pixels.amin((1, 2, 3), keepdim=True)
    high = pixels.amax((1, 2, 3), keepdim=True)

    return (pixels - low) / (high - low).clamp(min=1e-8)


def box_of(mask: Array) -> tuple[int, int, int, int]:
    """Return x0, y0, x1, y1 of the tight box around a mask (H, W), including its last pixels; of all without a mask."""
    rows = np.flatnonzero(mask.any(1))
    columns = np.flatnonzero(mask.any(0))
    if not len(rows):
        return 0, 0, mask.shape[1], mask.shape[0]
    return int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1])


class BoxOfMaskd(MapTransform):
    """Add the prompt for MedSAM: the box around an item's mask (1, H, W), as (4,) float32 under `box`.

    An item without a mask gets the box of its whole image.

    Args:
        keys: the mask.
        image: (C, H, W).
        box: key for the box.
    """

    def __init__(self, keys: str = "label", image: str = "image", box: str = "box") -> None:
        super().__init__(keys, allow_missing_keys=True)
        self.image = image
        self.box = box

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return a copy of `data` with the box."""
        item = dict(data)
        mask = np.zeros(item[self.image].shape[-2:], dtype=bool)
        for key in self.key_iterator(item):
            mask = np.asarray(item[key])[0] > 0
        item[self.box] = torch.tensor(box_of(mask), dtype=torch.float32)
        return item


# Its weights


def renamed(original: Weights) -> Tensors:
    """Convert names of weights from the package segment_anything to `transformers.SamModel`."""
    weights = {}
    for name, tensor in original.items():
        # SAM's normalisation, which MedSAM does not use
        if name in ("pixel_mean", "pixel_std"):
            continue

        for pattern, new in _RULES.items():
            name = re.sub(pattern, new, name)
        weights[name] = tensor

    if _POSITIONS in weights:
        weights[_IMAGE_POSITIONS] = weights[_POSITIONS]

    return weights


def load(source: str | Path = "", config: Any = None, *, name: str = "medsam") -> MedSAM:
    """Read MedSAM, in evaluation mode.

    Args:
        source: a checkpoint in segment_anything's layout; a folder of transformers; "" is the hub's cache.
        config: a `transformers.SamConfig` of the checkpoint's sizes; default: ViT-B's.
        name: of the teacher, for error messages.

    Raises:
        InputError: it is not available, or has other tensors.
    """
    path = Path(source).expanduser() if source else None
    ways = (
        f"fetch {HUB} into the hub's cache where there is a network, or give the original checkpoint as "
        f"medsam:FILE ({_WHERE}), or let a run stand in: run:DIR"
    )
    if path:
        ways = f"see that {path} is {_WHERE}, or a folder of transformers"

    with at_hand(
        f"teacher {name!r}", "transformers", ways, "let a run stand in as a teacher: run:DIR"
    ):
        if path is not None and not path.exists():
            raise FileNotFoundError(f"no such file or folder: {path}")
        if path is not None and path.is_file():
            sam = _from_original(path, config)
        else:
            sam = _from_folder(str(path or HUB))

    return MedSAM(sam).eval()


def _from_folder(source: str) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = Path(source)
    kind = transformers.SamModel
    sam: Any

    if folder.is_dir():
        config = transformers.SamConfig.from_pretrained(folder / "config.json")
        sam, loading_info = from_files(kind, config, folder)
    else:
        sam, loading_info = kind.from_pretrained(source, output_loading_info=True)

    # missing tensors would keep their random values, with only a warning
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise ValueError(f"it lacks {missing[0]} and {len(missing) - 1} more")

    return sam


def _from_original(path: Path, config: Any) -> Any:
    import transformers

    sam = transformers.SamModel(config or transformers.SamConfig())
    # strict: a missing tensor would keep its random values
    sam.load_state_dict(renamed(load_pickled(path)))
    return sam


# The teacher


@dataclass(frozen=True, eq=False)
class MaskTeacher:
    """MedSAM, prompted with the boxes of the public masks."""

    name: str
    sha256: str
    facts: Config
    network: MedSAM
    device: torch.device
    batch_size: int = 1

    def answer(self, questions: Questions, positions: Sequence[int]) -> Tensor:
        """Return logits of the foreground on the public grid (B, H, W), infinite if a probability is 0 or 1."""
        if len(questions.grid) != 2:
            raise InputError(
                f"teacher {self.name!r} for the volumes of {questions.bundle.name!r}",
                "it answers about images",
                "take it out of --set teachers, or name public data of 2-D images",
            )

        logits = []
        # one by one: the files' images are of different sizes
        for position in positions:
            picture, mask = _with_mask(questions.entry(position))
            channels_first = np.ascontiguousarray(np.moveaxis(picture, -1, 0))
            image = torch.from_numpy(channels_first)[None].to(self.device)
            box = torch.tensor([box_of(mask)], device=self.device)
            logits.append(self.network(image, box, questions.grid)[:, 1].logit())

        return torch.cat(logits)


def _with_mask(entry: Config) -> tuple[Picture, Array]:
    """Read an image at its file's size, with its mask (H, W); the mask is empty if there is none."""
    if not isinstance(entry.get("label"), str | Path):
        picture = read_picture(str(entry["image"]))
        return picture, np.zeros(picture.shape[:2], dtype=bool)
    pixels, mask, _ = read_pair(str(entry["image"]), str(entry["label"]), channels=3, convert=True)
    return as_picture(pixels), mask


def open_medsam(name: str, where: str, bundle: Problem, device: torch.device) -> MaskTeacher:
    """Open MedSAM from the hub's cache, the original checkpoint or a folder of transformers.

    Raises:
        InputError: it is not available, or the public data are not for segmentation.
    """
    need_task(name, bundle, "segmentation")
    network = load(where, name=name)
    side = network.sam.config.vision_config.image_size
    facts = {
        "kind": "medsam",
        "classes": list(bundle.structures),
        "preprocessing": f"bicubic to {side} x {side}, 8-bit, smallest to largest value to 0..1",
        "prompt": "the tight box of the public mask, or the whole image",
        "output": "sigmoid, then bilinear to the public grid",
        "versions": versions_of("torch", "transformers"),
    }

    return MaskTeacher(
        name, weights_sha256(network.state_dict()), facts, network.to(device), device
    )
