"""CLIP and BiomedCLIP as teachers: zero-shot classifiers of the public classes, read with open_clip.

An image's distribution over the classes is softmax(s <f, w_c>), with its embedding f, the mean w_c of the embeddings
of class c's prompts, both of unit norm, and the model's learned scale s. The prompts are OpenAI's for CIFAR-10 and
CIFAR-100; for other data those of the bundle, or OpenAI's if it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from medfl.bundle.text_embeddings import at_hand, refuse_other_folders, unit
from medfl.core import Config, InputError, versions_of
from medfl.problem import Problem, Text
from medfl.runs.teachers.questions import Questions, need_task, read_picture
from medfl.storage import weights_sha256

MODELS = {
    "clip-vit-l14": ("ViT-L-14-quickgelu", "openai"),
    "clip-rn50x16": ("RN50x16-quickgelu", "openai"),
    "biomedclip": ("hf-hub:microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224", None),
}
"""Teacher -> open_clip's names of model and weights. OpenAI's were trained with the quick GELU."""
_FRAMES = (
    "a photo of {a} {concept}.",
    "a blurry photo of {a} {concept}.",
    "a black and white photo of {a} {concept}.",
    "a low contrast photo of {a} {concept}.",
    "a high contrast photo of {a} {concept}.",
    "a bad photo of {a} {concept}.",
    "a good photo of {a} {concept}.",
    "a photo of {a} small {concept}.",
    "a photo of {a} big {concept}.",
)
PHOTO_PROMPTS = tuple(
    frame.replace("{a}", article) for article, frame in product(("a", "the"), _FRAMES)
)
"""The 18 templates that CLIP's authors published for CIFAR-10 and CIFAR-100."""
_PHOTOGRAPHS = ("cifar10", "cifar100")
_BATCH = 32


@dataclass(frozen=True, eq=False)
class ZeroShot:
    """A model of open_clip with a head made from prompts.

    Attributes:
        model: on its device, in evaluation mode.
        preprocess: PIL image -> (3, S, S).
        head: w (C, D), unit norm.
        scale: s.
    """

    name: str
    sha256: str
    facts: Config
    model: Any
    preprocess: Callable[[Any], Tensor]
    head: Tensor
    scale: float
    device: torch.device
    batch_size: int = _BATCH

    def answer(self, questions: Questions, positions: Sequence[int]) -> Tensor:
        """Return distributions over the classes (B, C)."""
        pictures = [read_picture(str(questions.entry(position)["image"])) for position in positions]
        x = torch.stack([self.preprocess(Image.fromarray(picture)) for picture in pictures])
        features = unit(self.model.encode_image(x.to(self.device)))
        return (self.scale * features @ self.head.T).softmax(1)


def open_clip_teacher(name: str, where: str, bundle: Problem, device: torch.device) -> ZeroShot:
    """Open a model of `MODELS` from the hub's cache, or from local weights: a file, or a folder that open_clip saved.

    Raises:
        InputError: it is not available, or the public data are not for classification.
    """
    need_task(name, bundle, "classification")
    kind = name.partition(":")[0]
    architecture, pretrained = MODELS[kind]
    path = Path(where).expanduser() if where else None

    if path is not None and not path.exists():
        raise InputError(
            f"teacher {name!r}", f"{path} is not there", "give the path of a file that exists"
        )

    if path:
        advice = f"see that {path} holds weights of {architecture}, or is a model's folder with open_clip_config.json"
    else:
        if pretrained:
            arguments = f"{architecture!r}, pretrained={pretrained!r}"
        else:
            arguments = repr(architecture)

        loader = f"open_clip.create_model({arguments})"
        advice = (
            f"fetch it once where there is a network, in Python with {loader}, or give local weights as {kind}:FILE, "
            "or let a run stand in: run:DIR"
        )

    with at_hand(
        f"teacher {name!r}", "open_clip", advice, "let a run stand in as a teacher: run:DIR"
    ):
        import open_clip

        if path is not None and path.is_dir():
            refuse_other_folders(path)
            architecture = f"local-dir:{path.resolve()}"
            pretrained = None  # the folder brings its own
        elif path is not None:
            pretrained = str(path.resolve())

        model, preprocess = open_clip.create_model_from_pretrained(architecture, pretrained)
        tokenizer = open_clip.get_tokenizer(architecture)

    model = model.to(device).eval()
    text = prompts_for(bundle)
    facts = {
        "kind": "open_clip",
        "model": MODELS[kind][0],
        "weights": "local" if path else MODELS[kind][1] or "hub",
        "classes": list(bundle.classes),
        "concepts": list(text.concepts),
        "prompts": list(text.prompts),
        "preprocessing": open_clip.get_model_preprocess_cfg(model),
        "versions": versions_of("torch", "open_clip_torch"),
    }
    head = zero_shot_head(model, tokenizer, text, device)
    scale = float(model.logit_scale.detach().exp())

    return ZeroShot(
        name, weights_sha256(model.state_dict()), facts, model, preprocess, head, scale, device
    )


def prompts_for(bundle: Problem) -> Text:
    """Return the classes in words and the prompts for a zero-shot head."""
    if "text" not in bundle.protocol:
        return Text(tuple(name.replace("_", " ") for name in bundle.classes), PHOTO_PROMPTS)
    if bundle.name in _PHOTOGRAPHS:
        return Text(bundle.text.concepts, PHOTO_PROMPTS)

    return bundle.text


@torch.no_grad()
def zero_shot_head(
    model: Any, tokenizer: Callable[..., Tensor], text: Text, device: torch.device
) -> Tensor:
    """Return w (C, D): the mean of each class's prompt embeddings, all of unit norm."""
    means = []
    for prompts in text.filled():
        means.append(unit(model.encode_text(tokenizer(prompts).to(device))).mean(0))

    return unit(torch.stack(means))
