"""CLIP and BiomedCLIP as teachers, on tiny models of open_clip with random weights."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from medfl.bundle.bundle import Bundle
from medfl.bundle.text_embeddings import at_hand
from medfl.core.errors import InputError
from medfl.datasets import read_pixels
from medfl.problem.prompts import Text
from medfl.runs.teachers import open_clip as foundation
from medfl.runs.teachers.answers import obtain, open_teacher
from medfl.runs.teachers.open_clip import MODELS, PHOTO_PROMPTS, prompts_for, zero_shot_head
from medfl.runs.teachers.questions import as_picture
from tests.support.questions import asked, opened

CPU = torch.device("cpu")
TINY = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    "quick_gelu": True,
}


def tiny(seed: int) -> Any:
    open_clip = pytest.importorskip("open_clip")
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        return open_clip.model.CLIP(**TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CLIP as open_clip saves one."""
    model, path = tiny(0), tmp_path_factory.mktemp("clip")
    from safetensors.torch import save_file

    settings = {
        "size": [32, 32],
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.25, 0.3],
        "interpolation": "bicubic",
    }
    document = {"model_cfg": TINY, "preprocess_cfg": settings}
    (path / "open_clip_config.json").write_text(json.dumps(document))
    save_file(model.state_dict(), path / "open_clip_model.safetensors")
    return path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return opened("mednist", tmp_path_factory.mktemp("data") / "mednist", size=24, image_size=16)


# The answer


@pytest.mark.parametrize("kind", ["clip-vit-l14", "biomedclip"])
def test_the_answer_is_the_softmax_over_scaled_cosines(
    kind: str, folder: Path, bundle: Bundle
) -> None:
    """Image 1 read from its file, resized, normalised and encoded here; against each class's mean of 24 prompts."""
    open_clip = pytest.importorskip("open_clip")
    questions = asked(bundle, count=3)
    teacher = open_teacher(f"{kind}:{folder}", bundle, CPU)
    with torch.no_grad():
        given = teacher.answer(questions, [0, 1, 2])
    assert given.dtype == torch.float32
    assert tuple(given.shape) == (3, 6)
    torch.testing.assert_close(given.sum(1), torch.ones(3))

    model, tokenize = tiny(0).eval(), open_clip.get_tokenizer("ViT-B-32")
    picture = Image.fromarray(
        read_pixels(str(questions.entry(1)["image"]), channels=3, convert=True)
    )
    resized = picture.resize((32, 32), Image.Resampling.BICUBIC)
    x = torch.from_numpy(np.array(resized)).permute(2, 0, 1)[None] / 255
    x = (x - torch.tensor([0.5, 0.4, 0.3])[:, None, None]) / torch.tensor([0.2, 0.25, 0.3])[
        :, None, None
    ]
    with torch.no_grad():
        image = nn.functional.normalize(model.encode_image(x), dim=1)
        logits = []
        for prompts in bundle.text.filled():
            one = nn.functional.normalize(model.encode_text(tokenize(prompts)), dim=1).mean(0)
            logits.append(model.logit_scale.exp() * image @ nn.functional.normalize(one, dim=0))
    torch.testing.assert_close(given[1:2], torch.stack(logits, 1).softmax(1), rtol=1e-3, atol=1e-5)


def test_the_answers_are_cached_with_their_prompts(
    folder: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    questions = asked(bundle)
    teacher = open_teacher(f"clip-rn50x16:{folder}", bundle, CPU)
    found = obtain(teacher, questions)
    assert tuple(found.shape) == (len(questions), 6)
    manifest = json.loads(next((tmp_path / "medfl" / "answers").glob("*.json")).read_text())
    assert manifest["facts"]["classes"] == list(bundle.classes)
    assert manifest["facts"]["prompts"] == list(bundle.text.prompts)
    assert manifest["facts"]["preprocessing"]["mean"] == [0.5, 0.4, 0.3]
    assert manifest["facts"]["versions"]["open_clip_torch"]
    assert manifest["pass"]["queries"] == -(-len(questions) // teacher.batch_size)
    again = open_teacher(f"clip-rn50x16:{folder}", bundle, CPU)
    monkeypatch.setattr(type(again), "answer", None)
    assert torch.equal(obtain(again, questions), found), "not asked again"


def test_a_file_of_weights_goes_into_the_known_architecture(
    tmp_path: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files with other weights are two teachers; the architecture is the one of the name."""
    open_clip = pytest.importorskip("open_clip")
    (tmp_path / "tiny-toy.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(tmp_path / "tiny-toy.json")
    monkeypatch.setitem(MODELS, "clip-vit-l14", ("tiny-toy", "openai"))
    questions, found = asked(bundle, count=2), []
    for seed in (0, 1):
        torch.save(tiny(seed).state_dict(), tmp_path / f"{seed}.pt")
        found.append(open_teacher(f"clip-vit-l14:{tmp_path / f'{seed}.pt'}", bundle, CPU))
    assert found[0].sha256 != found[1].sha256
    assert found[0].facts == found[1].facts
    with torch.no_grad():
        assert not torch.equal(found[0].answer(questions, [0]), found[1].answer(questions, [0]))
    torch.save({"nonsense": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(
        InputError,
        match=r"is not at hand \(RuntimeError: .*; see that .*other.pt holds weights of tiny",
    ):
        open_teacher(f"clip-vit-l14:{tmp_path / 'other.pt'}", bundle, CPU)


def test_the_head_is_the_direction_of_the_mean_of_unit_embeddings() -> None:
    """Prompts (3, 0) and (0, 4) of class a: units (1, 0), (0, 1), mean (.5, .5), so (.7071, .7071); b: (0, -1)."""

    class Model:
        def encode_text(self, tokens: Tensor) -> Tensor:
            return tokens

    known = {"one a": [3.0, 0.0], "two a": [0.0, 4.0], "one b": [0.0, -2.0], "two b": [0.0, -5.0]}
    head = zero_shot_head(
        Model(),
        lambda texts: torch.tensor([known[text] for text in texts]),
        Text(("a", "b"), ("one {concept}", "two {concept}")),
        CPU,
    )
    torch.testing.assert_close(head, torch.tensor([[0.5**0.5, 0.5**0.5], [0.0, -1.0]]))


# Prompts and names


def test_photographs_take_the_published_templates() -> None:
    assert len(set(PHOTO_PROMPTS)) == 18
    assert PHOTO_PROMPTS[0] == "a photo of a {concept}."
    assert PHOTO_PROMPTS[-1] == "a photo of the big {concept}."
    cifar100 = prompts_for(Bundle("cifar100"))
    assert cifar100.prompts == PHOTO_PROMPTS
    assert cifar100.concepts[1] == "aquarium fish", "underscores are spaces"
    assert prompts_for(Bundle("kvasir_v2")) == Bundle("kvasir_v2").text


def test_a_bundle_without_text_takes_its_class_names() -> None:
    class Bare:
        name, protocol, classes = "bare", {}, ("sea_lion", "oak")

    assert prompts_for(Bare()).filled()[0][9] == "a photo of the sea lion."  # type: ignore[arg-type]


def test_the_names_that_open_clip_knows() -> None:
    """OpenAI's weights go with the quick GELU: the plain names would give other logits."""
    open_clip = pytest.importorskip("open_clip")
    for kind, size, width in (("clip-vit-l14", 224, 768), ("clip-rn50x16", 384, 768)):
        assert MODELS[kind] in open_clip.list_pretrained()
        config = open_clip.get_model_config(MODELS[kind][0])
        assert (config["quick_gelu"], config["embed_dim"]) == (True, width)
        assert config["vision_cfg"]["image_size"] == size


def test_deep_pixels_become_8_bit_ones() -> None:
    """From 100 .. 300 to 0 .. 255: 220 is 0.6 of the way, 153; 8-bit pixels stay as they are."""
    deep = np.array([100, 220, 300], dtype=np.uint16).reshape(1, 3, 1).repeat(3, 2)
    assert as_picture(deep)[0, :, 0].tolist() == [0, 153, 255]
    plain = np.array([[[7, 8, 9]]], dtype=np.uint8)
    assert as_picture(plain) is plain


# Bad input


@pytest.mark.parametrize("kind", list(MODELS))
def test_a_missing_model_gives_the_ways_out(
    kind: str, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("open_clip")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    text = f"teacher '{kind}' is not at hand .*; fetch it once .* open_clip.create_model.*{kind}:FILE.*run:DIR$"
    with pytest.raises(InputError, match=text) as told:
        open_teacher(kind, bundle, CPU)
    assert "\n" not in str(told.value)
    with pytest.raises(
        InputError, match=f"teacher '{kind}:/no/such'; /no/such is not there; give the path"
    ):
        open_teacher(f"{kind}:/no/such", bundle, CPU)


def test_masks_are_not_for_clip(tmp_path: Path) -> None:
    lesions = opened("skin_lesion", tmp_path / "skin_lesion")
    text = "teacher 'clip-vit-l14' for 'skin_lesion', a segmentation task; it is a teacher for classification; "
    with pytest.raises(InputError, match=text):
        open_teacher("clip-vit-l14", lesions, CPU)


def test_a_missing_package_is_told(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setitem(sys.modules, "open_clip", None)
    text = r"teacher 'biomedclip' needs open_clip; .*; pip install 'medfl-monai\[teachers\]', or let a run stand in"
    with pytest.raises(InputError, match=text):
        foundation.open_clip_teacher("biomedclip", "", bundle, CPU)


def test_a_missing_model_is_one_line_whatever_its_reader_logs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("huggingface_hub")

    def failing() -> None:
        logging.error("cannot download")  # noqa: LOG015 (as open_clip does)
        raise RuntimeError("no network")

    with (
        pytest.raises(InputError, match="is not at hand"),
        at_hand("model x", "open_clip", "fetch it", "leave it"),
    ):
        failing()
    assert not caplog.records
    logging.error("something else")  # noqa: LOG015
    assert [record.message for record in caplog.records] == ["something else"]
