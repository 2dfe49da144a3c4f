"""What MONAI tests its own federated clients on (`MonaiAlgo`, `MonaiAlgoStats`), on shipped bundles as they are.

Workflows are handed over, or their files named, with the images below `MEDFL_DATA`. Tracking is by SQLite: newer MLflow
refuses to keep files.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser, ConfigWorkflow
from monai.bundle.utils import DEFAULT_HANDLERS_ID
from monai.fl.client import MonaiAlgo, MonaiAlgoStats
from monai.fl.utils.constants import ExtraItems, FlStatistics
from monai.fl.utils.exchange_object import ExchangeObject
from monai.transforms import LoadImage
from monai.utils import set_determinism
from PIL import Image

from medfl import datasets
from medfl.bundle.bundle import Bundle, read_protocol, shipped
from medfl.core.seeding import stream
from medfl.core.task import OF_VECTORS
from medfl.datasets.readers.reading import ClassIndex
from tests.support.sweeps import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs: only MONAI runs here

NAMES = ("mednist", "pneumonia", "skin_lesion")
"""Arrays of pictures with one channel, of two classes, and files with masks."""
TRAIN, EVALUATE = "configs/train.yaml", "configs/evaluate.yaml"
NAMED = {ExtraItems.CLIENT_NAME: "north"}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder of its own, without what bundles seed when they are initialized."""
    monkeypatch.chdir(tmp_path)
    with stream(0, "monai"):
        yield tmp_path
        set_determinism(None)


def root_of(name: str) -> str:
    return str(Bundle(name).root)


def settings(name: str, folder: Path) -> dict[str, Any]:
    """Overrides of the configuration: small images of the folder, and no file in the bundle."""
    data = folder / "data" / name
    if not data.is_dir():
        datasets.write_phantom(name, data, per_class=10, size=16)
    small = {"image_size": 16, "batch_size": 8, "max_epochs": 1, "device": "$torch.device('cpu')"}
    network = "unet8" if datasets.get(name).task == "segmentation" else "small_cnn"
    written = {"output_dir": str(folder), "ckpt_dir": str(folder)}
    return {"dataset_dir": str(data), "network_name": network, **small, **written}


def workflow(name: str, folder: Path, *files: str, **more: Any) -> ConfigWorkflow:
    return ConfigWorkflow(
        config_file=[str(Path(root_of(name)) / file) for file in files], workflow_type="train", meta_file=None,
        logging_file=False, **settings(name, folder), **more,
    )  # fmt: skip


def filters(folder: Path) -> str:
    """A file with MONAI's filter that prints a summary, before and after everything."""
    path = folder / "filters.json"
    kinds = (
        "pre_filters",
        "post_weight_filters",
        "post_evaluate_filters",
        "post_statistics_filters",
    )
    path.write_text(
        json.dumps({kind: [{"_target_": "monai.fl.utils.filters.SummaryFilter"}] for kind in kinds})
    )
    return str(path)


def own_network(algo_workflow: Any) -> torch.nn.Module:
    """Return the network as MONAI's tests find it: a second one, of the id `network`."""
    parser = ConfigParser(config=copy.deepcopy(algo_workflow.parser.get()))
    parser.parse()
    network = parser.get_parsed_content("network")
    assert isinstance(network, torch.nn.Module)
    return network


def by_files(name: str, folder: Path, **more: Any) -> MonaiAlgo:
    """Return the client that reads the files itself."""
    given = settings(name, folder)
    return MonaiAlgo(
        bundle_root=root_of(name), config_train_filename=TRAIN, config_evaluate_filename=[TRAIN, EVALUATE],
        train_kwargs=dict(given), eval_kwargs=dict(given), **more,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["workflow", "files"])
def test_it_trains_and_is_scored(name: str, form: str, places: Path) -> None:
    if form == "files":
        algo = by_files(name, places)
    else:
        algo = MonaiAlgo(
            root_of(name), train_workflow=workflow(name, places, TRAIN), config_filters_filename=filters(places),
            eval_workflow=workflow(name, places, TRAIN, EVALUATE),
        )  # fmt: skip
    algo.initialize(NAMED)
    algo.abort()
    sent = own_network(algo.train_workflow).state_dict()
    algo.train(
        data=ExchangeObject(weights={key: tensor.clone() for key, tensor in sent.items()}), extra={}
    )
    moved = algo.get_weights({}).weights
    assert moved.keys() == sent.keys()
    assert any(tensor.abs().max() > 0 for tensor in moved.values())
    metrics = algo.evaluate(
        data=ExchangeObject(weights=own_network(algo.eval_workflow).state_dict()), extra={}
    ).metrics
    assert np.isfinite(metrics[Bundle(name).key_metric])
    algo.finalize()


@pytest.mark.parametrize("differences", [False, True])
def test_weights_are_asked_for_before_any_training(differences: bool, places: Path) -> None:
    """Of differences there are none then."""
    algo = by_files("mednist", places, send_weight_diff=differences)
    algo.initialize(NAMED)
    if differences:
        with pytest.raises(ValueError, match="global_weights"):
            algo.get_weights({})
    else:
        assert (
            algo.get_weights({}).weights.keys()
            == own_network(algo.train_workflow).state_dict().keys()
        )


@pytest.mark.slow
def test_it_is_tracked_by_mlflow(places: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy", reason="MLflow keeps its runs in SQLite by it")
    store, executed = f"sqlite:///{places / 'runs.db'}", places / "executed.json"
    handler = {
        "_target_": "MLFlowHandler", "tracking_uri": store, "close_on_complete": True,
        "output_transform": "$monai.handlers.from_engine(['loss'], first=True)",
    }  # fmt: skip
    tracking = {
        "handlers_id": DEFAULT_HANDLERS_ID,
        "configs": {"save_execute_config": str(executed), "trainer": handler},
    }
    algo = MonaiAlgo(
        root_of("mednist"), train_workflow=workflow("mednist", places, TRAIN, tracking=tracking),
        config_evaluate_filename=None,
    )  # fmt: skip
    algo.initialize(NAMED)
    algo.train(data=ExchangeObject(weights=own_network(algo.train_workflow).state_dict()), extra={})
    algo.finalize()
    (run,) = mlflow.MlflowClient(store).search_runs(["1"])
    assert run.data.metrics
    assert executed.is_file()


# Statistics

ASKED = {FlStatistics.HIST_BINS: 10, FlStatistics.HIST_RANGE: [0, 255]}


USUAL = (*NAMES, "hippocampus")
WHOLE = "pneumonia"
"""Whose lists are gone through as they are."""


def some_items(whole: Callable[..., list[Any]], *given: str) -> list[Any]:
    """About a dozen of the items of a list, from all over it."""
    items = whole(*given)
    return items[:: max(1, len(items) // 12)]


READ = [name for name in sorted(shipped()) if read_protocol(name)["task"] not in OF_VECTORS[1:]]
"""Without those of findings and numbers: MONAI's statistics read every label but a class as an image."""


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(READ, USUAL))
def test_statistics_count_every_image(
    name: str, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are named, and the images lie below `MEDFL_DATA`; of long lists some of their images do."""
    settings(name, places)
    monkeypatch.setenv("MEDFL_DATA", str(places / "data"))
    if name != WHOLE:
        monkeypatch.setattr(datasets, "datalist", partial(some_items, datasets.datalist))
    algo = MonaiAlgoStats(
        root_of(name), config_train_filename=TRAIN, config_filters_filename=filters(places)
    )
    algo.initialize(NAMED)
    algo.app_root = str(places)
    told = algo.get_data_stats(extra=ASKED).statistics
    data = places / "data" / name
    lists = {part: datasets.datalist(name, data, section) for part, section in PARTS.items()}
    assert {part: told[part]["data_count"] for part in lists} == {
        part: len(items) for part, items in lists.items()
    }
    assert all(told[part]["fail_count"] == 0 for part in lists)
    if datasets.get(name).task == "classification":
        labels = told["train"]["data_stats"]["label_stats"]["labels"]
        assert sorted(labels) == sorted({item["label"] for item in lists["train"]})


PARTS = {"train": "train", "eval": "validate"}


def test_statistics_of_a_workflow(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shades of what is no background are those of the images of the other classes."""
    monkeypatch.setattr(datasets, "datalist", partial(some_items, datasets.datalist))
    algo = MonaiAlgoStats(root_of("mednist"), workflow=workflow("mednist", places, TRAIN))
    algo.initialize({**NAMED, ExtraItems.APP_ROOT: str(places)})
    found = algo.get_data_stats(extra=ASKED).statistics["train"]["data_stats"]
    items = datasets.datalist("mednist", places / "data" / "mednist", "train")
    shaded = [
        datasets.read_pixels(item["image"]) for item in items if item["label"] > 0
    ]  # class 0 is its background
    intensity = found["image_foreground_stats"]["intensity"]
    assert intensity["max"] == max(image.max() for image in shaded)
    assert intensity["mean"] == pytest.approx(
        sum(image.mean() for image in shaded) / len(items)
    )  # the others count as 0


# A class as a label image


def test_a_class_is_an_image_of_its_index_for_monai_s_reader(tmp_path: Path) -> None:
    """Turned as MONAI turns a picture, whatever the camera's own turn."""
    Image.new("RGB", (5, 3)).save(tmp_path / "a.png")
    np.savez(tmp_path / "b.npz", images=np.arange(30, dtype=np.uint8).reshape(2, 3, 5))
    load = LoadImage(ensure_channel_first=True)
    for uri in (str(tmp_path / "a.png"), f"{tmp_path / 'b.npz'}!images#1"):
        image, label = load(uri), load(ClassIndex(4, uri))
        assert image.shape[1:] == label.shape[1:] == (5, 3)
        assert (label == 4).all()
        assert label.shape[0] == 1
    assert image[0].T.tolist() == np.arange(15, 30).reshape(3, 5).tolist()


def test_a_class_with_its_image_is_a_number_like_any_other() -> None:
    index = ClassIndex(3, "x.png")
    assert index == 3
    assert (str(index), repr(index), f"{index}", json.dumps({"label": index})) == (
        "3",
        "3",
        "3",
        '{"label": 3}',
    )
    assert copy.deepcopy(index) == 3
    assert os.fspath(copy.deepcopy(index)) == "x.png?class=3"
    assert torch.as_tensor([index]).dtype == torch.int64
    assert np.asarray([index]).dtype == np.int64
