"""Pictures of whole runs: which there are, when, and that they change nothing."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import RunError
from medfl.data.prepared import Shard, Stacked
from medfl.methods import load
from medfl.methods.base import Method
from medfl.methods.fedbm import FedBM
from medfl.report.picture import Picture
from medfl.runtimes.federation import Federation
from medfl.runtimes.launch import Launch
from medfl.runtimes.output import pictures
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.storage.files import load_weights
from medfl.storage.run_folder import RunFolder
from tests.support.toy import SECTIONS, ToyBundle, bits, run_record

QUICK = {
    "g_every": 2,
    "g_start": 1,
    "g_iterations": 1,
    "g_batch": 6,
    "synthetic_batch": 3,
    "normalise": "half",
}
FEATURES = ["features-pca", "features-tsne", "spectrum"]
WORST = [f"worst-{rank:02d}" for rank in range(1, 13)]
STEPS = ("begin", "after", "finish", "draw_cases")  # what the simulator calls


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


class Images(ToyBundle):
    """Grey squares of 16 x 16 whose brightness is their class; the test section has 48, of which sites own 12."""

    def __init__(
        self, build: Callable[[], nn.Module] = network, task: str = "classification"
    ) -> None:
        classes = ("p", "q", "r") if task == "classification" else ()
        super().__init__(network=build, task=task, classes=classes)

    def prepared(self, section: str, *, jobs: int = 1, progress: bool = False) -> Stacked:
        y = torch.arange(48 if section == "test" else 12) % 3
        noise = 0.3 * torch.randn(
            len(y), 1, 16, 16, generator=torch.Generator().manual_seed(SECTIONS.index(section))
        )
        return Stacked(
            [{"id": f"{section}{i}", "label": int(c)} for i, c in enumerate(y)],
            (noise + y[:, None, None, None] - 1).clamp(-1, 1),
            y,
        )


def simulate(
    out: Path, method: Method | None = None, bundle: ToyBundle | None = None, **changes: Any
) -> list[str]:
    """Run, or continue, and return the names of the pictures."""
    resume = (out / "run.json").is_file()
    method = method or load("fedbm", QUICK)
    record = run_record(**changes)
    folder = RunFolder.existing(out) if resume else RunFolder.create(out)
    folder.write_run(record, {})
    Simulator(
        Execution(Federation(bundle or Images(), method, record), folder, Launch(resume=resume))
    ).execute()
    return sorted(path.stem for path in (out / "pictures").glob("*"))


def pngs(out: Path) -> dict[str, bytes]:
    """All pictures but the maps of features."""
    paths = sorted((out / "pictures").iterdir())
    return {path.name: path.read_bytes() for path in paths if path.stem not in FEATURES[:2]}


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes longest."""
    monkeypatch.setattr(pictures.model_plots, "feature_scatters", lambda *_: [])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FedBM over three rounds, the generator trained after the first and the third."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    simulate(out)
    return out


def test_fedbm_leaves_all_pictures_and_a_grid_only_where_the_images_changed(whole: Path) -> None:
    names = sorted(path.stem for path in (whole / "pictures").iterdir())
    assert names == [
        *FEATURES[:2],
        "generated-0001",
        "generated-0003",
        "spectrum",
        "text-embeddings",
        *WORST,
    ]
    captions = {name: Picture.read(whole / "pictures" / f"{name}.png").caption for name in names}
    assert "48 test items (dots) and 99 generated images" in captions["features-tsne"]


def test_tensorboard_has_them_too(whole: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole / "events")).Reload()
    steps = {tag: [image.step for image in events.Images(tag)] for tag in events.Tags()["images"]}
    expected = {f"pictures/{name}": [3] for name in (*FEATURES, *WORST)}
    assert steps == {**expected, "pictures/generated": [1, 3], "pictures/text-embeddings": [0]}
    assert (
        events.Images("pictures/spectrum")[0].width,
        events.Images("pictures/spectrum")[0].height,
    ) == (960, 960)


def test_nothing_of_a_run_changes_with_them(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in STEPS:
        monkeypatch.setattr(pictures.Pictures, name, lambda *_: None)
    assert simulate(tmp_path / "bare") == []
    for name in ("weights", "best"):
        ours, bare = (
            load_weights(out / f"{name}.safetensors") for out in (whole, tmp_path / "bare")
        )
        assert bits(ours) == bits(bare)
    assert (whole / "predictions.csv").read_text() == (
        tmp_path / "bare" / "predictions.csv"
    ).read_text()
    assert not (tmp_path / "bare" / "pictures").exists()
    files = (
        {path.name for path in (out / "state").iterdir()} for out in (whole, tmp_path / "bare")
    )
    assert next(files) == next(files)


@pytest.mark.usefixtures("unmapped")
def test_nothing_global_is_drawn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a network that draws in evaluation."""
    kept: list[bool] = []

    class Noisy(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, training=True)

    for name in STEPS:
        original = getattr(pictures.Pictures, name)

        def watched(self: pictures.Pictures, *arguments: Any, original: Any = original) -> None:
            before = torch.get_rng_state()
            original(self, *arguments)
            kept.append(torch.equal(before, torch.get_rng_state()))

        monkeypatch.setattr(pictures.Pictures, name, watched)
    noisy = Images(lambda: nn.Sequential(*list(network())[:-1], Noisy(), nn.Linear(4, 3)))
    assert len(simulate(tmp_path / "out", bundle=noisy, rounds=1)) == 3 + len(WORST)
    assert kept == [True] * 4


@pytest.mark.usefixtures("unmapped")
@pytest.mark.parametrize("at", [2, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 3))])
def test_a_resumed_run_draws_the_pictures_of_its_rounds(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Cut between the picture of a round and its commit; round 2 has none, before the cut or after."""
    commit = RunFolder.commit

    def cut(self: RunFolder, round_: int, *rest: Any) -> None:
        if round_ == at:
            raise KeyboardInterrupt
        commit(self, round_, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "commit", cut)
        with pytest.raises(KeyboardInterrupt):
            simulate(tmp_path / "out")
    simulate(tmp_path / "out")
    assert pngs(tmp_path / "out") == pngs(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("unmapped")
def test_more_rounds_later_show_no_unchanged_images_again(whole: Path, tmp_path: Path) -> None:
    simulate(tmp_path / "out", rounds=1)
    names = simulate(tmp_path / "out", rounds=2)
    assert [name for name in names if name.startswith("generated")] == ["generated-0001"]
    (tmp_path / "out" / "pictures" / "generated-0001.png").write_bytes(b"")
    simulate(tmp_path / "out", rounds=3)
    grid = "generated-0003.png"
    assert pngs(tmp_path / "out")[grid] == pngs(whole)[grid]


@pytest.mark.usefixtures("unmapped")
def test_rounds_without_evaluation_make_no_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    original = FedBM.synthetic

    def watched(self: FedBM, host: Any, server: Any, labels: Tensor, draws: torch.Generator) -> Any:
        asked.append((host.round, len(labels)))
        return original(self, host, server, labels, draws)

    monkeypatch.setattr(FedBM, "synthetic", watched)
    names = simulate(tmp_path / "out", eval_every=0)
    assert [name for name in names if name.startswith("generated")] == ["generated-0003"]
    assert asked == [(3, 24), (3, 99)]


def test_a_method_without_generator_has_features_only(tmp_path: Path) -> None:
    assert simulate(tmp_path / "out", load("fedavg"), rounds=1) == [*FEATURES, *WORST]
    assert (
        "generated" not in Picture.read(tmp_path / "out" / "pictures" / "features-pca.png").caption
    )


@pytest.mark.usefixtures("unmapped")
def test_prototypes_leave_curves_of_their_distances(tmp_path: Path) -> None:
    for name in ("fedmr", "fedproto"):
        assert "prototypes" in simulate(tmp_path / name, load(name), rounds=2)
        observed = [entry["observed"] for entry in RunFolder.existing(tmp_path / name).rounds()]
        assert [set(one) >= {"own class"} for one in observed] == [True, True]


@pytest.mark.usefixtures("unmapped")
def test_a_text_head_has_its_geometry(tmp_path: Path) -> None:
    assert simulate(tmp_path / "out", load("fedcb"), rounds=1) == [
        "spectrum",
        "text-embeddings",
        *WORST,
    ]


class Spare(nn.Module):
    """A network whose last linear layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = network(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def tokens() -> nn.Module:
    """A linear head over places, averaged afterwards."""
    return nn.Sequential(nn.Flatten(2), nn.Linear(256, 3), nn.Flatten(1))


@pytest.mark.parametrize(
    ("method", "bundle"),
    [
        ("fedavg", Images(task="other")),
        ("fedavg", Images(convolution)),
        ("fedavg", Images(Spare)),
        ("fedavg", Images(tokens)),
        ("fedavg", ToyBundle()),
        ("local", Images()),
    ],
    ids=[
        "no classes",
        "a convolution for head",
        "head not called",
        "no vectors",
        "few items",
        "no global network",
    ],
)
def test_without_classes_vectors_or_a_global_network_there_are_no_features(
    tmp_path: Path, method: str, bundle: ToyBundle
) -> None:
    names = simulate(tmp_path / "out", load(method), bundle, rounds=1)
    assert [name for name in names if name not in WORST] == []


def test_the_images_with_the_highest_loss_are_kept_with_their_words(whole: Path) -> None:
    """Grey squares, brighter the higher their class; the losses are those of predictions.csv, which has 48 cases."""
    with (whole / "predictions.csv").open(newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file) if row["site"]}
    found = [Picture.read(whole / "pictures" / f"{name}.png") for name in WORST]
    losses = [float(re.search(r"loss ([\d.]+);", picture.caption)[1]) for picture in found]  # type: ignore[index]
    assert losses == sorted(losses, reverse=True)
    for picture, loss in zip(found, losses, strict=True):
        ident, site = re.search(r"; (\S+), (\S+)$", picture.caption).groups()  # type: ignore[union-attr]
        row = rows.pop(ident)
        assert (row["site"], "pqr"[int(row["label"])]) == (site, picture.title[0])
        assert -math.log(float(row[f"p_{picture.title[0]}"])) == pytest.approx(loss, abs=0.006)
        taken = "pqr"[int(row["predicted"])]
        wrong = row["label"] != row["predicted"]
        assert picture.title[1:] == (f", taken for {taken}" if wrong else ", rightly")
        assert picture.pixels.shape == (16, 16, 3)


def test_items_that_are_no_images_leave_none(tmp_path: Path) -> None:
    assert simulate(tmp_path / "out", load("fedavg"), ToyBundle(), rounds=1) == []
    assert not (tmp_path / "out" / "pictures").exists()


def test_a_folder_that_cannot_take_pictures_is_our_own_error(tmp_path: Path) -> None:
    """The run stops, nothing of its state is lost."""
    folder = RunFolder.create(tmp_path / "out")
    (folder.path / "pictures").touch()
    with pytest.raises(RunError, match="cannot write .*pictures.*--resume"):
        folder.write_picture("spectrum", b"")


# Which items, which images


def test_the_first_items_drawn_have_all_classes_alike() -> None:
    y = torch.tensor([0] * 40 + [1] * 6 + [2] * 2)
    pooled = Shard.of(
        Stacked([{"label": int(c)} for c in y], torch.zeros(48, 1, 4, 4), y), range(48)
    )
    drawn = pictures._sample_items(pooled, 3, torch.Generator().manual_seed(0))
    labels = torch.tensor(drawn.labels)
    assert sorted(drawn.indices.tolist()) == list(range(48))
    assert labels[:6].bincount().tolist() == [2, 2, 2]
    assert labels[:14].bincount().tolist() == [6, 6, 2]
    assert drawn.indices.tolist() != sorted(drawn.indices.tolist())


def test_fewer_large_images_are_drawn() -> None:
    """1,000 items of 64 x 64 pixels, as many pixels of larger ones, at least 25 a class."""
    for side, expected in ((32, 1000), (64, 1000), (128, 250), (512, 50)):
        x = torch.zeros(1).expand(1200, 1, side, side)
        pooled = Shard.of(
            Stacked([{}] * 1200, x, torch.zeros(1200, dtype=torch.int64)), range(1200)
        )
        assert len(pictures._sample_items(pooled, 2, torch.Generator())) == expected


@pytest.mark.parametrize("condition", ["concept", "noise", "noise+onehot"])
def test_fedbm_makes_the_same_images_for_the_same_draws(condition: str) -> None:
    method = load("fedbm", {**QUICK, "condition": condition})
    federation = Federation(Images(), method, run_record())
    labels = torch.tensor([0, 1, 2, 2])
    with federation.networks.scope():
        host = federation.host(1)
        names = federation.names
        introductions = {name: method.introduce(federation.site(name, 0)) for name in names}
        server = method.init_server(host, federation.networks.initial, introductions)

        def make(seed: int) -> Any:
            return method.synthetic(host, server, labels, torch.Generator().manual_seed(seed))

        assert make(0) is None
        server = method._with_generator(host, server, 1)
        made, again, other = make(0), make(0), make(1)
    assert made.images.shape == (4, 1, 16, 16)
    assert 0 <= made.images.min() < made.images.max() <= 1
    assert torch.equal(made.inputs, (made.images - 0.5) / 0.5)
    assert torch.equal(made.images, again.images)
    assert not torch.equal(made.images, other.images)
