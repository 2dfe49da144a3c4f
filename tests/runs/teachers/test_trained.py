"""Trained networks as teachers: a run's global model and any bundle with weights, read in their own way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medfl import datasets, methods
from medfl.bundle.bundle import Bundle
from medfl.core.errors import InputError
from medfl.core.run import PartitionRecord
from medfl.core.seeding import stream
from medfl.core.task import Task
from medfl.policy.policy import Policy
from medfl.runs.teachers.answers import obtain, open_teacher
from medfl.runs.teachers.questions import Questions
from medfl.runs.teachers.trained import foreground
from medfl.storage.files import save_weights
from medfl.storage.run_folder import RunFolder
from medfl.training.network_pool import Networks
from tests.support.questions import asked, opened
from tests.support.toy import run_record

CPU = torch.device("cpu")
IMAGES = {"network": "small_cnn", "image_size": 20}
MASKS = {"network": "unet8", "image_size": 32}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("mednist", "skin_lesion"):
        datasets.write_phantom(name, folder / name, per_class=10, size=24)
    return folder


@pytest.fixture(scope="module")
def images(data: Path) -> Bundle:
    return opened("mednist", data / "mednist", image_size=16)


@pytest.fixture(scope="module")
def masks(data: Path) -> Bundle:
    return opened("skin_lesion", data / "skin_lesion", image_size=24)


def network(name: str, config: dict[str, Any], seed: int) -> nn.Module:
    with stream(seed, "network"):
        return Bundle(name, config).network()


def run_folder(
    folder: Path,
    name: str,
    config: dict[str, Any],
    items: dict[str, list[str]] | None = None,
    **changes: Any,
) -> Path:
    """Write what a run leaves: its record, and two models with other weights as its last and its best."""
    bundle = Bundle(name, config)
    record = {
        "bundle": name, "bundle_path": str(bundle.root), "bundle_sha256": bundle.sha256, "config": config,
        "method": "fedavg", "partition": PartitionRecord("iid", 0, (), {"a": items or {}, "b": {}}),
    }  # fmt: skip
    run = run_record(**{**record, **changes})
    made = RunFolder.create(folder)
    kind = datasets.get(name)
    classes = [] if kind.task == "segmentation" else list(kind.classes)
    made.write_run(run, {"task": kind.task, "classes": classes})
    made.write_weights("weights", network(name, config, 1).state_dict())
    made.write_weights("best", network(name, config, 2).state_dict())
    return folder


def answered(teacher: Any, questions: Questions) -> Tensor:
    with torch.no_grad():
        return teacher.answer(questions, range(len(questions)))


# A run


@pytest.mark.parametrize("section", ["train", "test"])
def test_a_run_reads_the_public_files_in_its_own_way(
    section: str, images: Bundle, tmp_path: Path
) -> None:
    """Its best model on images of 20 pixels, without augmentation, where the public data have 16."""
    run = run_folder(tmp_path / "run", "mednist", IMAGES)
    questions = asked(images, section, count=5)
    teacher = open_teacher(f"run:{run}", images, CPU)
    given = answered(teacher, questions)
    own = Bundle(
        "mednist",
        {**IMAGES, "dataset_dir": images.get("dataset_dir"), "train#random_transforms": []},
    )
    x, _ = next(own.prepared(section).batches(torch.tensor(questions.indices), 5, None))
    assert x.shape[-1] == 20
    with torch.no_grad():
        wanted = network("mednist", IMAGES, 2).eval()(x).softmax(1)
    torch.testing.assert_close(given, wanted)
    assert given.std() > 1e-3
    assert torch.equal(answered(teacher, questions), given), "nothing is drawn"
    facts = teacher.facts
    assert (facts["weights"], facts["method"], facts["trained_on"]) == ("best", "fedavg", "phantom")
    (run / "best.safetensors").unlink()
    last = open_teacher(f"run:{run}", images, CPU)
    assert last.facts["weights"] == "weights"
    assert last.sha256 != teacher.sha256


def test_the_foreground_of_a_run_comes_on_the_public_grid(
    masks: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference of its two logits, 32 x 32, resized to 24 x 24."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = run_folder(tmp_path / "run", "skin_lesion", MASKS)
    questions = asked(masks, count=3)
    found = obtain(open_teacher(f"run:{run}", masks, CPU), questions)
    own = Bundle("skin_lesion", {**MASKS, "dataset_dir": masks.get("dataset_dir")})
    x, _ = next(own.prepared("test").batches(torch.tensor(questions.indices), 3, None))
    with torch.no_grad():
        logits = network("skin_lesion", MASKS, 2).eval()(x)
    wanted = nn.functional.interpolate(
        (logits[:, 1] - logits[:, 0])[:, None], size=(24, 24), mode="bilinear"
    )[:, 0]
    assert tuple(found.shape) == (3, 24, 24)
    torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=2e-3)


def test_it_is_said_how_many_public_items_a_run_was_trained_on(
    images: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the six public items two are the run's own, and one chose its best round."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    questions = asked(images, "test", count=6)
    items = {
        "train": [questions.ids[0], questions.ids[3], "other"],
        "validate": [questions.ids[5]],
        "test": [],
    }
    run = run_folder(tmp_path / "run", "mednist", IMAGES, items)
    teacher, said = open_teacher(f"run:{run}", images, CPU), []
    obtain(teacher, questions, say=said.append)
    assert teacher.facts["trained_on_public"] == {"train": 0, "validate": 0, "test": 2}
    assert (
        f"note: teacher run:{run} was trained on 2 of the 6 public items: what it says of them is optimistic"
        in said
    )
    assert (
        f"note: teacher run:{run} was chosen by its scores on 1 of the 6 public items: "
        in "".join(said)
    )
    assert f"note: teacher run:{run} was trained on drawn images, not on real ones" in said
    (run / "best.safetensors").unlink()
    assert not any(
        "chosen" in note for note in open_teacher(f"run:{run}", images, CPU).notes(questions)
    )


def test_a_moved_run_is_the_same_teacher(
    images: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run, questions = run_folder(tmp_path / "run", "mednist", IMAGES), asked(images, count=4)
    found = obtain(open_teacher(f"run:{run}", images, CPU), questions)
    moved = open_teacher(f"run:{run.rename(tmp_path / 'moved')}", images, CPU)
    monkeypatch.setattr(type(moved), "answer", None)
    assert torch.equal(obtain(moved, questions), found)


@pytest.mark.parametrize("method", ["fedetf", "fedbm"])
def test_the_network_is_the_one_that_the_method_made(
    method: str, images: Bundle, tmp_path: Path
) -> None:
    """FedETF's simplex is drawn on the run's stream and no weight; FedBM's classifier is built of text."""
    run = run_folder(tmp_path / "run", "mednist", IMAGES, method=method, seed=5)
    task = Task("classification", images.classes, images.embeddings)
    pool = Networks(
        lambda: methods.load(method).adapt(Bundle("mednist", IMAGES).network(), task), 5, CPU
    )
    weights = {
        name: tensor + 0.01 if tensor.is_floating_point() else tensor
        for name, tensor in pool.initial.items()
    }
    save_weights(run / "best.safetensors", weights)
    questions = asked(images, count=2)
    own = Bundle("mednist", {**IMAGES, "dataset_dir": images.get("dataset_dir")})
    x, _ = next(own.prepared("test").batches(torch.tensor(questions.indices), 2, None))
    with torch.no_grad():
        wanted = pool.lease(weights).eval()(x).softmax(1)
    torch.testing.assert_close(answered(open_teacher(f"run:{run}", images, CPU), questions), wanted)
    assert wanted.std() > 1e-4


def test_three_logits_give_the_foreground_of_all_structures() -> None:
    """Its sigmoid is the sum of the structures' softmax; of two classes softmax([0, l])[1] = sigmoid(l) (check 12)."""
    logits = torch.randn(
        2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    torch.testing.assert_close(foreground(logits).sigmoid(), logits.softmax(1)[:, 1:].sum(1))
    one = logits[:, :1]
    torch.testing.assert_close(foreground(torch.cat([torch.zeros_like(one), one], 1)), one[:, 0])
    assert torch.equal(foreground(one), one[:, 0])


# Runs that do not fit


def test_other_classes_are_refused_by_name(images: Bundle, masks: Bundle, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "pneumonia", "pneumonia", IMAGES)
    text = (
        r"teacher 'run:.*' has other classes: .* \(2 of 2\); "
        r"the public data 'mednist' have 'AbdomenCT', .*\(6 of 6\); "
    )
    with pytest.raises(InputError, match=text):
        open_teacher(f"run:{run}", images, CPU)
    with pytest.raises(
        InputError, match="a classification model, for 'skin_lesion', a segmentation task; "
    ):
        open_teacher(f"run:{run}", masks, CPU)
    lungs = run_folder(tmp_path / "lungs", "lung_cxr", MASKS)
    with pytest.raises(
        InputError, match=r"has other classes: 'lung' \(1 of 2\); .* have 'lesion' \(1 of 2\)"
    ):
        open_teacher(f"run:{lungs}", masks, CPU)
    document = json.loads(
        (run_folder(tmp_path / "turned", "mednist", IMAGES) / "run.json").read_text()
    )
    document["classes"].reverse()
    (tmp_path / "turned" / "run.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"\(6 of 6\); .*; name a teacher with the same classes"):
        open_teacher(f"run:{tmp_path / 'turned'}", images, CPU)


def test_a_run_without_a_global_model_is_refused(images: Bundle, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", "mednist", IMAGES, method="local")
    weights = network("mednist", IMAGES, 1).state_dict()
    save_weights(
        run / "best.safetensors",
        {f"{site}/{key}": w.clone() for site in "ab" for key, w in weights.items()},
    )
    text = r"the run in .* has a model for each site \(method local\) and none for all; a teacher is one global model; "
    with pytest.raises(InputError, match=text):
        open_teacher(f"run:{run}", images, CPU)


def test_unfinished_damaged_or_changed_runs_are_told(images: Bundle, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"none.run.json: it cannot be read: No such file or directory"
    ):
        open_teacher(f"run:{tmp_path / 'none'}", images, CPU)
    run = run_folder(tmp_path / "run", "mednist", IMAGES)
    save_weights(run / "best.safetensors", {"odd": torch.zeros(1)})
    with pytest.raises(
        InputError,
        match="the weights in .* are no single network of method fedavg on bundle 'mednist'",
    ) as told:
        open_teacher(f"run:{run}", images, CPU)
    assert "\n" not in str(told.value)
    (run / "best.safetensors").write_bytes(b"noise")
    with pytest.raises(
        InputError, match="cannot read the weights .*; weights that medfl wrote; restore the file"
    ):
        open_teacher(f"run:{run}", images, CPU)
    for stem in ("best", "weights"):
        (run / f"{stem}.safetensors").unlink()
    with pytest.raises(
        InputError,
        match="has no weights yet; a teacher has best.safetensors or weights.safetensors; ",
    ):
        open_teacher(f"run:{run}", images, CPU)
    other = run_folder(tmp_path / "other", "mednist", IMAGES, bundle_sha256="0" * 64)
    with pytest.raises(
        InputError,
        match="bundle 'mednist' has changed since the run in .*; the recorded one is 0000",
    ):
        open_teacher(f"run:{other}", images, CPU)


# Any bundle


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A bundle for inference only: no training configuration, weights in models/model.pt."""
    root = tmp_path / "mine"
    shutil.copytree(Bundle("mednist").root, root)
    for stem in ("train", "evaluate", "federated"):
        (root / "configs" / f"{stem}.yaml").unlink()
    (root / "models").mkdir()
    torch.save(network("mednist", {}, 4).state_dict(), root / "models" / "model.pt")
    return root


def wanted_of(images: Bundle, questions: Questions) -> Tensor:
    own = Bundle("mednist", {"dataset_dir": images.get("dataset_dir")})
    x, _ = next(own.prepared("test").batches(torch.tensor(questions.indices), len(questions), None))
    with torch.no_grad():
        return network("mednist", {}, 4).eval()(x).softmax(1)


def test_any_bundle_with_weights_is_a_teacher(foreign: Path, images: Bundle) -> None:
    questions = asked(images, count=2)
    teacher = open_teacher(f"bundle:{foreign}", images, CPU)
    torch.testing.assert_close(answered(teacher, questions), wanted_of(images, questions))
    assert (teacher.facts["bundle"], teacher.facts["weights"]) == ("mine", "model.pt")
    state = torch.load(foreign / "models" / "model.pt", weights_only=True)
    torch.save({"model": state}, foreign / "models" / "model.pt")
    nested = open_teacher(f"bundle:{foreign}", images, CPU)
    torch.testing.assert_close(answered(nested, questions), wanted_of(images, questions))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_torchscript_is_taken_where_there_is_no_other(
    foreign: Path, images: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = torch.jit.trace(network("mednist", {}, 4).eval(), torch.zeros(1, 1, 64, 64))
    traced.save(str(foreign / "models" / "model.ts"))
    (foreign / "models" / "model.pt").unlink()
    questions = asked(images, count=2)
    with pytest.raises(InputError, match="TorchScript, which can write files; .* --trust"):
        open_teacher(f"bundle:{foreign}", images, CPU)
    monkeypatch.setitem(vars(images), "policy", Policy(allow=frozenset({"pickle"})))
    teacher = open_teacher(f"bundle:{foreign}", images, CPU)
    torch.testing.assert_close(answered(teacher, questions), wanted_of(images, questions))
    assert teacher.facts["weights"] == "model.ts"


def test_bundles_that_do_not_fit_are_told(foreign: Path, images: Bundle, masks: Bundle) -> None:
    with pytest.raises(
        InputError, match="a classification model, for 'skin_lesion', a segmentation task; "
    ):
        open_teacher(f"bundle:{foreign}", masks, CPU)
    (foreign / "models" / "model.pt").write_bytes(b"noise")
    with pytest.raises(
        InputError, match="model.pt is not read as the weights of its bundle .*; restore the file"
    ) as told:
        open_teacher(f"bundle:{foreign}", images, CPU)
    assert "\n" not in str(told.value)
    (foreign / "models" / "model.pt").unlink()
    with pytest.raises(
        InputError,
        match="has no models/model.pt or models/model.ts; a bundle that predicts has an inference config",
    ):
        open_teacher(f"bundle:{foreign}", images, CPU)
    (foreign / "configs" / "inference.yaml").unlink()
    with pytest.raises(InputError, match=r"has no configs/inference.json or .yaml; "):
        open_teacher(f"bundle:{foreign}", images, CPU)


def test_a_bundle_with_other_classes_is_told(foreign: Path, images: Bundle) -> None:
    path = foreign / "configs" / "metadata.json"
    document = json.loads(path.read_text())
    document["network_data_format"]["outputs"]["pred"]["channel_def"]["4"] = "Foot"
    path.write_text(json.dumps(document))
    with pytest.raises(
        InputError, match=r"has other classes: 'Foot' \(1 of 6\); .* have 'Hand' \(1 of 6\); "
    ):
        open_teacher(f"bundle:{foreign}", images, CPU)


def test_preprocessing_that_leaves_no_image_is_told(foreign: Path, images: Bundle) -> None:
    file = foreign / "configs" / "inference.yaml"
    text = file.read_text()
    start = text.index("preprocessing:")
    end = text.index("\ndataset:")
    file.write_text(
        text[:start] + "preprocessing:\n  _target_: Identityd\n  keys: image\n" + text[end:]
    )
    with pytest.raises(
        InputError,
        match="its pre-processing makes no image of public item .*; let its pre-processing",
    ):
        answered(open_teacher(f"bundle:{foreign}", images, CPU), asked(images, count=1))
