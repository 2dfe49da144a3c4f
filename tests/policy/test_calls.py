"""What is made and called where a configuration is evaluated: the filter refuses what its text says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medfl.core.errors import InputError
from medfl.policy.policy import Policy
from tests.hostile.objects import COMMON, HANDED_ON, OBJECTS
from tests.policy.test_evaluate import configuration

NEVER_MADE = [name for name in OBJECTS if "loader" in name or "saver" in name or "handler" in name]
BY_NAME = (
    "a_function_of_torch_by_its_module",
    "a_sparse_tensor",
    *(name for name, ids in HANDED_ON.items() if "LoadImage" in json.dumps(ids) or "LoadImage" in name),
    "processes",
)  # fmt: skip


def refused(folder: Path, ids: dict[str, Any]) -> None:
    mark = folder.parent / "mark"
    text = json.dumps({**COMMON, **ids}).replace("MARK", str(mark))
    folder.mkdir()
    (folder / "state.csv").write_text("state,optimizer\n1,2\n")
    torch.save({"s": {"data": torch._tensor._rebuild_from_type_v2}}, folder / "a.pt")
    made = configuration(folder, json.loads(text))
    with pytest.raises(InputError, match=r"never made|a name of what|only readers and writers"):
        made.evaluated("y" if "y" in ids else "x")
    assert not mark.exists()


@pytest.mark.parametrize("name", NEVER_MADE)
def test_handlers_loaders_and_savers_are_never_made(name: str, tmp_path: Path) -> None:
    refused(tmp_path / "bundle", {"x": OBJECTS[name]})


@pytest.mark.parametrize("name", BY_NAME)
def test_what_acts_by_its_name_is_refused_before_it_is_called(name: str, tmp_path: Path) -> None:
    refused(tmp_path / "bundle", HANDED_ON.get(name) or {"x": OBJECTS[name]})


def test_most_of_what_the_walls_hold_is_let_through() -> None:
    """The tables are not of what the filter knows alone: the walls are tried with the rest."""
    assert len(NEVER_MADE) >= 8
    assert len(BY_NAME) >= 15
    assert len(OBJECTS) + len(HANDED_ON) - len(NEVER_MADE) - len(BY_NAME) >= 40


ACCEPTED: dict[str, Any] = {
    "own_lambdas": "$list(map(lambda x: x + 1, [1]))",
    "lambdas_of_another_id": "$[@g(1)]",
    "listed_functions": "$list(map(os.path.basename, ['a/b']))",
    "built_in_ones": "$sorted(['b'], key=len)",
    "partials": "$[functools.partial(max, 1)(2)]",
    "the_network_s_place": "$[@n.to('cpu')]",
    "its_parameters": {"_target_": "torch.optim.SGD", "params": "$@n.parameters()", "lr": 1.0},
    "transforms_in_order": {"_target_": "Compose", "transforms": ["@f", "$lambda x: x"]},
    "a_data_set_s_transform": {"_target_": "Dataset", "data": [1], "transform": "@f"},
    "a_transform_that_is_called": "$[@f(1)]",
    "a_network_that_is_called": "$[@n(torch.ones(1, 1))]",
    "a_method_handed_on": "$list(map('a'.count, ['a']))",
    "what_an_engine_s_output_becomes": {
        "_target_": "MeanDice",
        "output_transform": "$monai.handlers.from_engine(['a', 'b'])",
    },
    "rows_by_a_lambda": "$[pandas.read_csv(@bundle_root + '/state.csv').loc[lambda rows: rows.state > 0, :]]",
    "numbers_as_a_tensor": "$[torch.FloatTensor([1.0, 2.0]), torch.Tensor(np.ones(2)), torch.LongTensor((1, 2))]",
    "parts_of_a_tensor": "$[torch.ones(2, 3, 4)[..., 0:2, 1]]",
    "a_copy_of_a_network": "$[copy.deepcopy(@n)]",
    "layers_by_their_type": "$[isinstance(@n, torch.nn.Linear)]",
    "losses_of_losses": {"_target_": "DeepSupervisionLoss", "loss": {"_target_": "DiceLoss"}},
    "a_component_that_is_handed_on": "$list(map(monai.transforms.Flip, [0, 1]))",
    "a_partial_of_one": "$[functools.partial(monai.transforms.Flip, spatial_axis=0)()]",
    "types_of_numbers": "$[np.array([1], dtype=np.float32), torch.zeros(1, dtype=torch.uint8)]",
    "an_unused_name_with_an_underscore": "$[0 for _k in range(2)]",
    "a_module_below_another": "$[scipy.ndimage.binary_dilation(np.ones((2, 2)))]",
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_bundles_need_is_made_and_called(name: str, tmp_path: Path) -> None:
    root = tmp_path / "bundle"
    root.mkdir()
    (root / "state.csv").write_text("state,optimizer\n1,2\n")
    config = configuration(root, {**COMMON, "g": "$lambda x: x + 1", "x": ACCEPTED[name]})
    assert config.evaluated("x") is not None


READERS: dict[str, dict[str, Any]] = {
    "by_a_reference": {"r": "os.mkdir", "x": {"_target_": "LoadImage", "reader": "@r"}},
    "computed": {"x": {"_target_": "LoadImage", "reader": "$'os.' + 'mkdir'"}},
    "by_an_override": {"x": {"_target_": "LoadImage"}, "x#reader": "os.mkdir"},
    "by_an_override_of_an_item": {
        "x": {"_target_": "LoadImage", "reader": ["ITKReader"]},
        "x#reader#0": "os.mkdir",
    },
    "weights_by_a_reference": {
        "yes": True,
        "x": {"_target_": "DenseNet121", "spatial_dims": 2, "pretrained": "@yes"},
    },
    "weights_computed": {
        "x": {"_target_": "DenseNet121", "spatial_dims": 2, "pretrained": "$1 == 1"}
    },
    "weights_of_another_class": {
        "x": {"_target_": "DenseNet121"},
        "x#_target_": "EfficientNetBN",
        "x#model_name": "efficientnet-b0",
    },
}


@pytest.mark.parametrize("name", READERS)
def test_what_an_argument_says_is_judged_by_its_value(name: str, tmp_path: Path) -> None:
    """Inspection reads the text, where a value is computed; here it is known."""
    with pytest.raises(InputError, match=r"only readers and writers|is fetched|would fetch"):
        configuration(tmp_path / "bundle", READERS[name]).evaluated("x")


def test_loaders_of_a_bundle_start_no_processes(tmp_path: Path) -> None:
    loader = {
        "_target_": "DataLoader",
        "dataset": [1, 2],
        "num_workers": 2,
        "multiprocessing_context": "spawn",
    }
    made = configuration(tmp_path / "bundle", {"x": loader}).evaluated("x")
    assert made.num_workers == 0
    assert sorted(int(batch[0]) for batch in made) == [1, 2]


def test_engines_of_a_bundle_start_no_compiler(tmp_path: Path) -> None:
    network = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}
    engine = {
        "_target_": "SupervisedEvaluator",
        "device": "cpu",
        "val_data_loader": [1],
        "network": network,
    }
    made = configuration(
        tmp_path / "bundle",
        {"x": {**engine, "compile": True, "compile_kwargs": {"backend": "eager"}}},
    )
    assert not made.engines("x")[0].compile


def test_an_array_of_objects_is_never_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'mark'}",)

    root = tmp_path / "bundle"
    (root / "models").mkdir(parents=True)
    np.save(root / "models" / "w.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    content = {
        "load": {"_target_": "LoadImage", "reader": "NumpyReader"},
        "x": "$@load(@bundle_root + '/models/w.npy')",
    }
    with pytest.raises((InputError, ValueError, RuntimeError)):
        configuration(root, {"bundle_root": ".", **content}, Policy()).evaluated("x")
    assert not (tmp_path / "mark").exists()
