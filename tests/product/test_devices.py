"""Runs on a pretended device: no operation mixes devices, and every bit is that of the run on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from medfl import datasets, federate, load_run
from medfl.core.message import Message
from medfl.core.seeding import stream
from medfl.core.task import Task
from medfl.methods import load
from medfl.runs import launch
from medfl.runs.result import Result
from medfl.runs.teachers.answers import obtain, open_teacher
from medfl.runtimes.federation import Federation
from medfl.runtimes.launch import Launch
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.monai_fl.exchange import Exchange
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.storage.run_folder import RunFolder
from medfl.training.network_pool import Networks
from tests.methods.test_segmentation_contract import SEGMENTING, SETTINGS, federation, segmenting
from tests.runtimes.test_monai_fl import left
from tests.runtimes.test_smaller_messages import Wide
from tests.support import pretended_device as pretended
from tests.support.questions import asked, opened
from tests.support.sweeps import mostly_slow
from tests.support.toy import (
    CLASSIFYING,
    WITHOUT_IMAGES,
    Toy,
    ToyBundle,
    bits,
    judged,
    public_blobs,
    run_record,
    simulate,
)

pytestmark = pytest.mark.skipif(
    not pretended.available(), reason="this torch has no devices written in Python"
)

CPU = torch.device("cpu")
ROOMY = 10**12
QUICK = ("fedavg", "fedgh", "fedhelp", "fedmd", "perfedavg")
"""Methods of different kinds: means, features per pixel, public data with and without teachers, gradients of steps."""
SGD = {
    "_target_": "torch.optim.SGD",
    "params": "$@network_def.parameters()",
    "lr": "@learning_rate",
}
SMALL = {
    "g_start": 1,
    "g_every": 1,
    "g_iterations": 2,
    "g_batch": 8,
    "synthetic_batch": 4,
    "normalise": "half",
}
PUBLIC = {"public": "mednist", "public_items": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedbm": SMALL, "pfedbayes": {"optimizer": "run", "zeta": 0.1}, "fedmd": PUBLIC, "fccl": PUBLIC, "fedkemf": PUBLIC,
    "fedhelp": {"large": "site-1", "large_network": "resnet20", "teachers": "", **PUBLIC},
}  # fmt: skip


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    with pretended.in_use() as device:
        yield device


# The device itself


def there(*values: float) -> Tensor:
    return torch.tensor([float(value) for value in values]).to(pretended.DEVICE)


HERE = torch.ones(2)
MIXED: dict[str, Callable[[], Any]] = {
    "sum": lambda: there(1, 2) + HERE,
    "in place": lambda: there(1, 2).add_(HERE),
    "into the CPU's": lambda: torch.zeros(2).add_(there(1, 2)),
    "a number on the device into the CPU's": lambda: torch.zeros(()).add_(there(1, 2)[0]),
    "a number on the device beside the CPU's": lambda: HERE * there(1, 2)[0],
    "stack": lambda: torch.stack([there(1, 2), HERE]),
    "numbers stacked": lambda: torch.stack([there(1, 2)[0], HERE[0]]),
    "product": lambda: there(1, 2) @ HERE,
    "layer": lambda: nn.Linear(2, 1)(there(1, 2)),
    "loss": lambda: nn.functional.cross_entropy(there(1, 2)[None], torch.tensor([1])),
    "gather": lambda: there(1, 2).gather(0, torch.tensor([1])),
    "index_select": lambda: there(1, 2).index_select(0, torch.tensor([1])),
    "index on the device": lambda: HERE[there(1).long()],
    "values put in": lambda: there(1, 2).index_put((torch.tensor([0, 1]),), HERE),
    "equal": lambda: torch.equal(there(1, 2), HERE),
    "lists": lambda: torch._foreach_add([there(1, 2)], [HERE]),
    "CPU generator": lambda: torch.rand(2, generator=torch.Generator(), device=pretended.DEVICE),
    "CPU generator in place": lambda: there(1, 2).normal_(generator=torch.Generator()),
    "order of a CPU generator": lambda: torch.randperm(
        3, generator=torch.Generator(), device=pretended.DEVICE
    ),
    "array": lambda: there(1, 2).numpy(),
    "product of integers": lambda: there(1, 2).long()[None] @ there(1, 2).long()[:, None],
}


@pytest.mark.parametrize("what", MIXED)
def test_what_cuda_refuses_is_refused(what: str) -> None:
    text = "same device|indices should be either on cpu|type for generator|to numpy|not implemented for"
    with pytest.raises((RuntimeError, TypeError), match=text):
        MIXED[what]()


ALLOWED: dict[str, tuple[Callable[[], Tensor], list[float]]] = {
    "a number of the CPU": (lambda: there(1, 2) * torch.tensor(2.0), [2, 4]),
    "a number of the CPU, in place": (lambda: there(1, 2).add_(torch.tensor(2.0)), [3, 4]),
    "an index of the CPU": (lambda: there(1, 2)[torch.tensor([1, 0])], [2, 1]),
    "a mask of the CPU": (lambda: there(1, 2)[torch.tensor([False, True])], [2]),
    "a number put in": (
        lambda: there(1, 2).index_put((torch.tensor([0]),), torch.tensor(5.0)),
        [5, 2],
    ),
    "a copy": (lambda: there(1, 2).copy_(HERE), [1, 1]),
    "a copy back": (lambda: torch.zeros(2).copy_(there(1, 2)), [1, 2]),
    "numbers taken out": (
        lambda: torch.tensor([float(there(1, 2)[0]), there(1, 2).tolist()[1]]),
        [1, 2],
    ),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_what_cuda_allows_is_allowed(what: str) -> None:
    made, expected = ALLOWED[what][0](), ALLOWED[what][1]
    assert made.tolist() == expected


def test_a_view_shares_its_tensors_numbers() -> None:
    whole = there(1, 2)
    whole[1:] += 5
    assert whole.tolist() == [1, 7]


def test_copies_between_the_devices_are_seen() -> None:
    with pretended.crossings() as seen:
        value = torch.zeros(3, 2).to(pretended.DEVICE)
        (value + 1).to("cpu")
    assert [(tuple(one.shape), one.arrives) for one in seen] == [((3, 2), True), ((3, 2), False)]


# All methods


def on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: on_cpu(member) for key, member in value.items()}
    return [on_cpu(member) for member in value] if isinstance(value, list | tuple) else value


def run(
    out: Path,
    method: str,
    kind: str,
    workers: Any = Workers,
    rounds: int = 2,
    bundle: Any = None,
    **changes: Any,
) -> dict[str, Any]:
    """Run three toy sites, their data held where the networks are; return what the run leaves, but for its hash."""
    settings = run_record(method=method, device=kind, rounds=rounds, cohort=0.67, **changes)
    options = {**SETTINGS, **WITHOUT_IMAGES}.get(method, {})
    made = Federation(bundle or ToyBundle(), load(method, options), settings, public=public_blobs())
    made.hold(lambda device: ROOMY)
    assert {tensor.device.type for tensor in made.networks.initial.values()} == {kind}
    assert {made.sections[section].device.type for section in made.sections} == {kind}
    folder = RunFolder.existing(out) if out.exists() else RunFolder.create(out)
    folder.write_run(made.run, {})
    Simulator(
        Execution(made, folder, Launch(resume=folder.manifest() is not None)), workers
    ).execute()
    found = left(out)
    found["summary"].pop("run_hash")
    return found


@pytest.mark.parametrize("method", mostly_slow(sorted(set(CLASSIFYING) - {"fedhelp"})))
def test_every_method_gives_the_cpus_bits(method: str, tmp_path: Path) -> None:
    """FedHelp, whose sites have different networks, follows on images."""
    assert run(tmp_path / "there", method, pretended.NAME) == run(tmp_path / "here", method, "cpu")


def segmentation(name: str, device: torch.device) -> Any:
    """Run two sites with images and masks, and public images, all on a device."""
    method, toy = load(name, SETTINGS.get(name, {})), segmenting(federation(2))
    network, site = toy.network, toy.site

    def moved(shard: Any) -> Any:
        return replace(shard, prepared=shard.prepared.to(device, ROOMY))

    def held(name: str, round_: int = 1) -> Any:
        found = site(name, round_)
        return replace(
            found,
            **{
                section: moved(getattr(found, section)) for section in ("train", "validate", "test")
            },
        )

    toy.networks = Networks(lambda: method.adapt(network(), Task("segmentation", ())), 0, device)
    toy.site, toy.public = held, replace(toy.public, shard=moved(toy.public.shard))  # type: ignore[method-assign]
    found = simulate(method, toy)
    weights = [judged(method, toy, found, name) for name in found.replies]
    return bits(on_cpu([found.server, found.states, weights]))


@pytest.mark.slow
@pytest.mark.parametrize("method", mostly_slow(SEGMENTING, QUICK))
def test_every_method_segments_as_on_the_cpu(method: str, device: torch.device) -> None:
    assert segmentation(method, device) == segmentation(method, CPU)


def test_prototypes_of_sites_whose_lists_have_no_labels(classes: Toy, device: torch.device) -> None:
    """Class counts are then taken from the batches, which are on the device."""
    method = load("fedproto")

    def found(where: torch.device) -> Any:
        toy = classes.adapted(method)
        toy.networks, site = Networks(toy.network, 0, where), toy.site
        toy.site = lambda *args: replace(  # type: ignore[method-assign]
            site(*args),
            train=replace(site(*args).train, prepared=site(*args).train.prepared.to(where, ROOMY)),
        )
        made = simulate(method, toy, 2)
        return bits(on_cpu([made.server, made.states]))

    assert found(device) == found(CPU)


# What comes with a run


@pytest.mark.parametrize(
    "method",
    mostly_slow(["scaffold", "feddyn", "fedproto", "fedsm", "fedmr"], ("scaffold", "fedproto")),
)
def test_a_run_that_is_resumed_finds_its_states_on_the_device(method: str, tmp_path: Path) -> None:
    run(tmp_path / "there", method, pretended.NAME, rounds=1)
    assert run(tmp_path / "there", method, pretended.NAME, rounds=3) == run(
        tmp_path / "here", method, "cpu", rounds=3
    )


@pytest.mark.parametrize(
    ("method", "form"), [("scaffold", "topk:0.1"), ("scaffold", "float16"), ("fedmd", "int8")]
)
def test_smaller_messages(method: str, form: str, tmp_path: Path) -> None:
    there, here = (
        run(tmp_path / kind, method, kind, bundle=Wide(), messages=form)
        for kind in (pretended.NAME, "cpu")
    )
    assert there == here


@pytest.mark.parametrize("rule", ["median", "trimmed:0.4"])
def test_robust_aggregation(rule: str, tmp_path: Path) -> None:
    there, here = (
        run(tmp_path / kind, "fedprox", kind, aggregation=rule) for kind in (pretended.NAME, "cpu")
    )
    assert there == here


@pytest.mark.parametrize("method", ["scaffold", "fedbm", "fedproto", "fedmd"])
def test_the_runtime_of_monai_fl(method: str, tmp_path: Path) -> None:
    assert run(tmp_path / "there", method, pretended.NAME, Exchange) == run(
        tmp_path / "here", method, "cpu"
    )


# Images


@pytest.fixture(scope="module")
def chest(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        datasets.write_phantom(
            "pneumonia", tmp_path_factory.mktemp("chest") / "data", per_class=12, size=32
        )
    )


@pytest.fixture(scope="module")
def lungs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        datasets.write_phantom(
            "lung_cxr", tmp_path_factory.mktemp("lungs") / "data", per_class=10, size=32
        )
    )


@pytest.fixture
def images(chest: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run `federate` on drawn radiographs."""
    pretended.let_runs_name_it(monkeypatch)
    monkeypatch.setattr(launch, "free_gpu_memory", lambda device: ROOMY)

    def go(method: str, kind: str, out: Path, **settings: Any) -> dict[str, Any]:
        requested = {
            "method": method, "data": chest, "sites": 3, "partition": "iid", "rounds": 1, "local_epochs": 1,
            "batch_size": 4, "lr": 0.01, "device": kind,
        }  # fmt: skip
        network = "resnet20" if method == "fedtype" else "small_cnn"
        config = {"network": network, "image_size": 32, "optimizer": SGD}
        federate(
            "pneumonia", options=OPTIONS.get(method, {}), config=config, requested=requested, out=out, jobs=1,
            **settings,
        )  # fmt: skip
        found = left(out)
        found["summary"].pop("run_hash")
        return found

    return go


ON_IMAGES = sorted({*OPTIONS, "fedproto", "fedtype"})
"""Methods that do with images what they do not with the toys' numbers: generators, public images, other networks."""


@pytest.mark.parametrize("method", mostly_slow(ON_IMAGES, ("fedproto",)))
def test_a_method_gives_the_cpus_bits_on_images(method: str, images: Any, tmp_path: Path) -> None:
    """Every method did on numbers; FedHelp has only here sites of different networks."""
    there = images(method, pretended.NAME, tmp_path / "there")
    assert there == images(method, "cpu", tmp_path / "here")


def test_masks_and_their_pictures(images: Any, tmp_path: Path, lungs: str) -> None:
    """The pictures show test images, which are held on the device."""

    def segmented(kind: str) -> dict[str, Any]:
        requested = {
            "data": lungs, "sites": 2, "partition": "iid", "rounds": 1, "local_epochs": 1, "batch_size": 4,
            "device": kind,
        }  # fmt: skip
        config, out = {"network": "unet8", "image_size": 32}, tmp_path / kind
        federate(
            "lung_cxr", config=config, requested=requested, out=out, jobs=1, save_predictions=True
        )
        assert list(out.glob("predictions/*"))
        found = left(out)
        found["summary"].pop("run_hash")
        return found

    assert segmented(pretended.NAME) == segmented("cpu")


def test_a_finished_run_predicts_on_the_device(
    images: Any, tmp_path: Path, device: torch.device
) -> None:
    said: list[str] = []
    images("fedbn", pretended.NAME, tmp_path / "run", say=said.append)
    assert any(line.startswith("data held on pretended: train (") for line in said)
    there, here = Result(tmp_path / "run", str(device)), load_run(tmp_path / "run")
    assert there.predict() == here.predict()
    assert next(there.network(site="site-1").parameters()).device == device
    wanted = [record["id"] for record in here.predict(site="site-2")][:2]
    maps = [result.maps(wanted, site="site-2") for result in (there, here)]
    assert [(one.predicted, one.map.tobytes()) for one in maps[0]] == [
        (one.predicted, one.map.tobytes()) for one in maps[1]
    ]


# Teachers


def test_a_trained_run_answers_as_a_teacher(
    images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images("fedavg", "cpu", tmp_path / "run")
    bundle = opened("pneumonia", tmp_path / "public", size=32, image_size=32)
    questions = asked(bundle)
    teachers = [
        open_teacher(f"run:{tmp_path / 'run'}", bundle, where) for where in (pretended.DEVICE, CPU)
    ]
    with torch.no_grad():
        there, here = (teacher.answer(questions, range(len(questions))) for teacher in teachers)
    assert bits(there.cpu()) == bits(here)
    assert bits(obtain(teachers[0], questions)) == bits(here.float())


def test_clip_answers_on_the_device(tmp_path: Path, device: torch.device) -> None:
    """Attention takes another way there than on the CPU, so the last bits differ."""
    pytest.importorskip("open_clip")
    from tests.runs.teachers.test_open_clip import TINY, tiny

    bundle = opened("mednist", tmp_path / "mednist", size=24, image_size=16)
    (tmp_path / "clip").mkdir()
    settings = {"size": [32, 32], "mean": [0.5] * 3, "std": [0.2] * 3, "interpolation": "bicubic"}
    document = {"model_cfg": TINY, "preprocess_cfg": settings}
    (tmp_path / "clip" / "open_clip_config.json").write_text(json.dumps(document))
    save_file(tiny(0).state_dict(), tmp_path / "clip" / "open_clip_model.safetensors")
    there, here = (
        open_teacher(f"biomedclip:{tmp_path / 'clip'}", bundle, where) for where in (device, CPU)
    )
    assert there.sha256 == here.sha256
    with torch.no_grad():
        given = there.answer(asked(bundle, count=3), [0, 1, 2])
        torch.testing.assert_close(given.cpu(), here.answer(asked(bundle, count=3), [0, 1, 2]))


def test_medsam_answers_on_the_device(tmp_path: Path, device: torch.device) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.runs.teachers.test_medsam import tiny_config

    with stream(0, "sam"):
        transformers.SamModel(tiny_config()).save_pretrained(tmp_path / "sam")
    bundle = opened("lung_cxr", tmp_path / "lung", size=32, image_size=32)
    there, here = (
        open_teacher(f"medsam:{tmp_path / 'sam'}", bundle, where) for where in (device, CPU)
    )
    with torch.no_grad():
        given = there.answer(asked(bundle, count=2), [0, 1])
        torch.testing.assert_close(given.cpu(), here.answer(asked(bundle, count=2), [0, 1]))


def test_a_message_leaves_the_device_for_the_wire(device: torch.device) -> None:
    message = Message({"weights": {"a": torch.arange(3.0).to(device)}}, {"samples": 3})
    assert Message.decode(message.encode())["weights"]["a"].tolist() == [0, 1, 2]
