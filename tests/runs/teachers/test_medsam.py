"""MedSAM: the key map, the way an image is prepared, the box, and its answers; on tiny networks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import monai.bundle
import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser
from PIL import Image
from torch import Tensor, nn

from medfl.bundle.bundle import Bundle
from medfl.core.errors import InputError
from medfl.core.seeding import stream
from medfl.datasets import read_pair
from medfl.runs.teachers import medsam
from medfl.runs.teachers.answers import obtain, open_teacher
from medfl.runs.teachers.medsam import BoxOfMaskd, box_of, load, prepared, renamed
from tests.support.questions import asked, opened

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3] / "bundles" / "medsam_teacher"
SCHEMA = Path(__file__).parents[3] / "medfl" / "export" / "schemas" / "bundle_metadata.json"


def tiny_config() -> Any:
    """SAM with two encoder layers of 32 channels for images of 64 x 64."""
    transformers = pytest.importorskip("transformers")
    return transformers.SamConfig(
        vision_config={
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 16,
            "window_size": 3, "global_attn_indexes": [1], "output_channels": 16, "mlp_dim": 128, "num_pos_feats": 8,
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 16},
        mask_decoder_config={"hidden_size": 16, "mlp_dim": 24, "num_attention_heads": 2, "iou_head_hidden_dim": 20},
    )  # fmt: skip


def original_names(layers: int) -> list[str]:
    """The tensors of a checkpoint of segment_anything, as its modules name them."""

    def both(*names: str) -> list[str]:
        return [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]

    def attention(name: str) -> list[str]:
        return both(*(f"{name}.{part}_proj" for part in "qkv"), f"{name}.out_proj")

    names = ["image_encoder.pos_embed", *both("image_encoder.patch_embed.proj")]
    for i in range(layers):
        block = f"image_encoder.blocks.{i}"
        names += [f"{block}.attn.rel_pos_h", f"{block}.attn.rel_pos_w"]
        names += both(
            *(
                f"{block}.{part}"
                for part in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.lin1", "mlp.lin2")
            )
        )
    names += ["image_encoder.neck.0.weight", "image_encoder.neck.2.weight"]
    names += both("image_encoder.neck.1", "image_encoder.neck.3")
    names += [
        "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix",
        "prompt_encoder.no_mask_embed.weight",
    ]
    names += [f"prompt_encoder.point_embeddings.{i}.weight" for i in range(4)]
    names += ["prompt_encoder.not_a_point_embed.weight"]
    names += both(*(f"prompt_encoder.mask_downscaling.{i}" for i in (0, 1, 3, 4, 6)))
    two_way = "mask_decoder.transformer"
    for i in range(2):
        layer = f"{two_way}.layers.{i}"
        for part in ("self_attn", "cross_attn_token_to_image", "cross_attn_image_to_token"):
            names += attention(f"{layer}.{part}")
        names += both(
            *(
                f"{layer}.{part}"
                for part in ("norm1", "norm2", "norm3", "norm4", "mlp.lin1", "mlp.lin2")
            )
        )
    names += [
        *attention(f"{two_way}.final_attn_token_to_image"),
        *both(f"{two_way}.norm_final_attn"),
    ]
    names += ["mask_decoder.iou_token.weight", "mask_decoder.mask_tokens.weight"]
    names += both(*(f"mask_decoder.output_upscaling.{i}" for i in (0, 1, 3)))
    heads = [f"mask_decoder.output_hypernetworks_mlps.{i}" for i in range(4)] + [
        "mask_decoder.iou_prediction_head"
    ]
    return names + both(*(f"{head}.layers.{i}" for head in heads for i in range(3)))


def original_checkpoint() -> dict[str, Tensor]:
    """Tensors of the tiny size: 0.4 sin((1.7 + 0.013 i) n + i), i the place of the name, n that of the number."""
    transformers = pytest.importorskip("transformers")
    shapes = {
        name: tensor.shape
        for name, tensor in transformers.SamModel(tiny_config()).state_dict().items()
    }
    made = {}
    for i, name in enumerate(sorted(original_names(2))):
        shape = shapes[next(iter(renamed({name: torch.zeros(())})))]
        numbers = torch.arange(shape.numel(), dtype=torch.float64)
        made[name] = (0.4 * torch.sin(numbers * (1.7 + 0.013 * i) + i)).float().reshape(shape)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny SAM as transformers saves one, its logits wide enough for masks of both values."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("sam")
    with stream(3, "sam"):
        sam = transformers.SamModel(tiny_config())
        with torch.no_grad():
            for parameter in sam.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        sam.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return opened(
        "skin_lesion", tmp_path_factory.mktemp("data") / "skin_lesion", size=32, image_size=24
    )


# The key map


def test_every_key_of_the_original_has_its_place_in_vit_b() -> None:
    """314 keys become the 315 of transformers, one tensor under two names; 93,735,472 numbers beside the two tables.

    The original counts 93,735,472 parameters and keeps the table of positions, 2 x 128, as a buffer.
    """
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        wanted = transformers.SamModel(transformers.SamConfig()).state_dict()
    names = original_names(12)
    assert len(set(names)) == 314
    made = renamed({name: torch.zeros(()) for name in (*names, "pixel_mean", "pixel_std")})
    assert set(made) == set(wanted)
    assert len(made) == 315
    assert sum(tensor.numel() for tensor in wanted.values()) - 2 * 2 * 128 == 93_735_472


def test_an_original_checkpoint_gives_the_logits_of_the_original_code(tmp_path: Path) -> None:
    """The numbers are those of the package segment_anything with the same weights, image and box (3, 5, 40, 50)."""
    torch.save(original_checkpoint(), tmp_path / "tiny.pth")
    network = load(tmp_path / "tiny.pth", tiny_config())
    x = (
        torch.sin(torch.arange(3 * 64 * 64, dtype=torch.float64) * 0.37)
        .reshape(1, 3, 64, 64)
        .abs()
        .float()
    )
    with torch.no_grad():
        boxes = torch.tensor([[[3.0, 5.0, 40.0, 50.0]]])
        low = network.sam(pixel_values=x, input_boxes=boxes, multimask_output=False).pred_masks[
            0, 0, 0
        ]
    assert tuple(low.shape) == (16, 16)
    torch.testing.assert_close(low[0, :4], torch.tensor(ROW_0), rtol=0, atol=2e-5)
    torch.testing.assert_close(low[9, 5:9], torch.tensor(ROW_9), rtol=0, atol=2e-5)


ROW_0 = [0.1015819, 0.0662011, 0.1020242, 0.0658846]
ROW_9 = [0.0929881, 0.0829136, 0.0940594, 0.0835305]


def test_a_checkpoint_of_another_network_is_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    checkpoint = original_checkpoint()
    del checkpoint["image_encoder.neck.0.weight"]
    torch.save(checkpoint, tmp_path / "tiny.pth")
    text = r"teacher 'medsam' is not at hand \(RuntimeError: .*; see that .*tiny.pth is medsam_vit_b.pth, see https"
    with pytest.raises(InputError, match=text) as told:
        load(tmp_path / "tiny.pth", tiny_config())
    assert "\n" not in str(told.value)
    (tmp_path / "noise.pth").write_bytes(b"noise")
    with pytest.raises(
        InputError, match="'medsam:x' is not at hand .*; see that .*noise.pth is medsam_vit_b.pth"
    ):
        load(tmp_path / "noise.pth", name="medsam:x")


def test_a_folder_that_lacks_tensors_is_not_filled_with_random_ones(
    folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "sam")
    weights = load_file(folder / "model.safetensors")
    del weights["mask_decoder.iou_token.weight"]
    save_file(weights, tmp_path / "sam" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="it lacks mask_decoder.iou_token.weight and 0 more"):
        load(tmp_path / "sam")


# Image and box


def test_an_image_is_scaled_from_its_own_smallest_to_largest_value() -> None:
    """Values 50, 100.7 and 150 at their own size: 100.7 is cut to 100, then (v - 50) / 100."""
    image = torch.full((1, 3, 4, 4), 50.0)
    image[0, 0, 0, 0], image[0, 1, 2, 3] = 100.7, 150.0
    made = prepared(image, 4)
    wanted = torch.zeros(1, 3, 4, 4)
    wanted[0, 0, 0, 0], wanted[0, 1, 2, 3] = 0.5, 1.0
    torch.testing.assert_close(made, wanted)
    assert prepared(torch.full((1, 3, 5, 7), 9.0), 4).eq(0).all(), "one value: no division by zero"


def test_an_image_is_stretched_to_a_square_without_padding() -> None:
    """The left half of 8 x 32 pixels is dark: so is that of 16 x 16, and each row is the same."""
    image = torch.zeros(1, 3, 8, 32)
    image[..., 16:] = 200
    made = prepared(image, 16)
    assert tuple(made.shape) == (1, 3, 16, 16)
    assert made[..., :7].max() < 0.1
    assert made[..., 9:].min() > 0.9
    assert torch.equal(made[0, 0, 0], made[0, 2, 15])


def test_the_box_is_tight_and_the_whole_image_without_a_mask() -> None:
    mask = np.zeros((6, 9), dtype=np.uint8)
    assert box_of(mask) == (0, 0, 9, 6)
    mask[2, 3] = mask[4, 7] = 1
    assert box_of(mask) == (3, 2, 7, 4)
    item = {"image": torch.zeros(3, 6, 9), "label": torch.from_numpy(mask[None])}
    assert BoxOfMaskd()(item)["box"].tolist() == [3, 2, 7, 4]
    assert BoxOfMaskd()({"image": item["image"]})["box"].tolist() == [0, 0, 9, 6]


class _Fixed(nn.Module):
    """In the place of a SAM for 8 x 8: remembers what it was given, answers with fixed logits."""

    def __init__(self, low: Tensor) -> None:
        super().__init__()
        self.low = low

        class Vision:
            image_size = 8

        class Config:
            vision_config = Vision

        self.config = Config

    def forward(self, pixel_values: Tensor, input_boxes: Tensor, multimask_output: bool) -> Any:
        self.given = pixel_values, input_boxes, multimask_output

        class Made:
            pred_masks = self.low

        return Made


def test_the_sigmoid_comes_before_the_resizing() -> None:
    """Logits (-4, 4) side by side, to four columns, bilinear: p, (3p + q) / 4, (p + 3q) / 4, q of their sigmoids.

    Resized logits would give sigmoid(-2) = 0.119 in the second column, not (3 * 0.01799 + 0.98201) / 4 = 0.259. The
    box (2, 1, 6, 3) of 16 x 4 pixels (width x height) becomes (1, 2, 3, 6) of 8 x 8.
    """
    sam = _Fixed(torch.tensor([-4.0, 4.0]).reshape(1, 1, 1, 1, 2))
    network = medsam.MedSAM(sam)
    made = network(torch.rand(1, 3, 4, 16) * 255, torch.tensor([[2, 1, 6, 3]]), (1, 4))
    p, q = torch.tensor([-4.0, 4.0]).sigmoid().tolist()
    torch.testing.assert_close(
        made[0, 1, 0], torch.tensor([p, (3 * p + q) / 4, (p + 3 * q) / 4, q])
    )
    torch.testing.assert_close(made.sum(1), torch.ones(1, 1, 4))
    pixels, boxes, several = sam.given
    assert tuple(pixels.shape) == (1, 3, 8, 8)
    assert boxes.tolist() == [[[1.0, 2.0, 3.0, 6.0]]]
    assert several is False
    assert tuple(network(torch.rand(1, 3, 5, 7), torch.tensor([[0, 0, 7, 5]])).shape) == (
        1,
        2,
        5,
        7,
    )


# The teacher


def test_it_answers_on_the_public_grid_about_the_file_itself(
    folder: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of 24 x 32 pixels, a public grid of 24 x 24: the logit of the probability there, kept within 1e-4."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    questions = asked(bundle, count=3)
    teacher = open_teacher(f"medsam:{folder}", bundle, CPU)
    found = obtain(teacher, questions)
    assert (tuple(found.shape), found.dtype) == ((3, 24, 24), torch.float16)
    assert found.std() > 0.05
    entry, network = questions.entry(1), load(folder)
    pixels, mask, shape = read_pair(str(entry["image"]), str(entry["label"]))
    assert shape == (24, 32)
    with torch.no_grad():
        box = torch.tensor([box_of(mask)])
        low = network.sam(
            pixel_values=prepared(torch.from_numpy(pixels).permute(2, 0, 1)[None], 64),
            input_boxes=box[:, None] * torch.tensor([2, 64 / 24, 2, 64 / 24]),
            multimask_output=False,
        ).pred_masks[:, 0]
    wanted = nn.functional.interpolate(low.sigmoid(), size=(24, 24), mode="bilinear").logit(1e-4)[
        0, 0
    ]
    torch.testing.assert_close(found[1].float(), wanted, rtol=0, atol=6e-3)
    manifest = json.loads(next((tmp_path / "medfl" / "answers").glob("*.json")).read_text())
    assert manifest["facts"]["prompt"] == "the tight box of the public mask, or the whole image"
    assert manifest["pass"]["queries"] == 3


def test_the_box_of_the_mask_matters(
    folder: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions, teacher = asked(bundle, count=1), open_teacher(f"medsam:{folder}", bundle, CPU)
    with torch.no_grad():
        boxed = teacher.answer(questions, [0])
        monkeypatch.setattr(medsam, "box_of", lambda mask: (0, 0, mask.shape[1], mask.shape[0]))
        assert (teacher.answer(questions, [0]) - boxed).abs().max() > 1e-3


def test_volumes_are_not_for_medsam(folder: Path, bundle: Bundle) -> None:
    volumes: Any = SimpleNamespace(grid=(8, 8, 4), bundle=SimpleNamespace(name="brains"))
    with pytest.raises(
        InputError,
        match="teacher 'medsam:.*' for the volumes of 'brains'; it answers about images; ",
    ):
        open_teacher(f"medsam:{folder}", bundle, CPU).answer(volumes, [0])


def test_an_item_without_a_mask_file_is_taken_whole(bundle: Bundle) -> None:
    picture, mask = medsam._with_mask({"image": bundle.data("test")[0]["image"], "label": 3})
    assert picture.shape == (24, 32, 3)
    assert box_of(mask) == (0, 0, 32, 24)


def test_a_missing_medsam_gives_the_ways_out(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    text = (
        "teacher 'medsam' is not at hand .*; fetch wanglab/medsam-vit-base .*medsam:FILE .*run:DIR$"
    )
    with pytest.raises(InputError, match=text) as told:
        open_teacher("medsam", bundle, CPU)
    assert "\n" not in str(told.value)
    with pytest.raises(
        InputError,
        match=r"'medsam:/no/such' is not at hand \(FileNotFoundError: no such file or folder",
    ):
        open_teacher("medsam:/no/such", bundle, CPU)


def test_classes_are_not_for_medsam(tmp_path: Path) -> None:
    images = opened("mednist", tmp_path / "mednist", image_size=16)
    text = (
        "teacher 'medsam' for 'mednist', a classification task; it is a teacher for segmentation; "
    )
    with pytest.raises(InputError, match=text):
        open_teacher("medsam", images, CPU)


# The bundle


@pytest.mark.filterwarnings("ignore:No hash value provided:UserWarning")
def test_the_bundles_metadata_passes_monais_schema() -> None:
    monai.bundle.verify_metadata(
        meta_file=str(ROOT / "configs" / "metadata.json"), filepath=str(SCHEMA)
    )


def test_the_bundle_is_configuration_only() -> None:
    files = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()}
    assert files == {"LICENSE", "configs/inference.yaml", "configs/metadata.json", "docs/README.md"}


def test_the_bundle_writes_masks_in_the_size_of_the_files(
    folder: Path, bundle: Bundle, tmp_path: Path
) -> None:
    """MONAI runs inference.yaml; a picture is 255 where the network's probability on the file's grid is above 0.5."""
    parser = ConfigParser()
    parser.read_config(str(ROOT / "configs" / "inference.yaml"))
    parser["bundle_root"], parser["output_dir"] = str(ROOT), str(tmp_path)
    parser["dataset_dir"], parser["checkpoint"], parser["device"] = (
        bundle.get("dataset_dir"),
        str(folder),
        "cpu",
    )
    (_,) = parser.get_parsed_content("run")
    entries, network = bundle.data("test"), load(folder)
    assert len(list(tmp_path.glob("*.png"))) == len(entries)
    pixels, mask, _ = read_pair(str(entries[0]["image"]), str(entries[0]["label"]))
    with torch.no_grad():
        image, box = torch.from_numpy(pixels).permute(2, 0, 1)[None], torch.tensor([box_of(mask)])
        wanted = network(image, box)[0, 1] > 0.5
    with Image.open(tmp_path / f"{Path(str(entries[0]['image'])).stem}.png") as picture:
        assert picture.size == (32, 24)
        assert np.array_equal(np.array(picture) == 255, wanted.numpy())
    assert 0 < wanted.float().mean() < 1
