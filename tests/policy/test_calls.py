# ruff: noqa: E501
"""Calls are told by identity: no object of a bundle, no handler and no method handed on is called; nothing is rebuilt.

Each bundle here ran something, or read memory that was not its own, in version 0.7.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from medfl.bundle.configuration import Configuration
from medfl.core.errors import InputError
from tests.policy.test_evaluate import configuration

LAMBDA = {"_target_": "Lambda", "func": "$lambda x: x"}
NETWORK = {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}
OPTIMIZER = {"_target_": "torch.optim.SGD", "params": "$@n.parameters()", "lr": 0.1}
SCHEDULER = {"_target_": "torch.optim.lr_scheduler.StepLR", "optimizer": "@o", "step_size": 1}
LOADER = {
    "_target_": "CheckpointLoader",
    "load_path": "$@bundle_root + '/a.pt'",
    "load_dict": {"s": "@s"},
}
TABLE = "$pandas.read_csv(@bundle_root + '/state.csv')"
PARTS = {"n": NETWORK, "o": OPTIMIZER, "s": SCHEDULER, "l": LOADER, "f": LAMBDA, "engine": TABLE}

REFUSED: dict[str, Any] = {
    "a_loader_of_checkpoints": "@l",
    "a_loader_that_an_expression_calls": "$@l(@engine)",
    "a_loader_as_a_data_set_s_transform": {"_target_": "Dataset", "data": ["@engine"], "transform": "@l"},
    "a_loader_as_a_lambda": {"_target_": "Lambda", "func": "@l"},
    "a_loader_through_map": "$list(map(@l, [@engine]))",
    "a_loader_as_a_key": "$sorted([@engine], key=@l)",
    "a_saver": {"_target_": "CheckpointSaver", "save_dir": ".", "save_dict": {"n": "@n"}},
    "any_handler": {"_target_": "StatsHandler"},
    "a_handler_of_ignite": {"_target_": "ignite.handlers.TerminateOnNan"},
    "a_transform_that_an_expression_calls": "$@f(1)",
    "a_network_that_an_expression_calls": "$@n(torch.ones(1))",
    "a_transform_through_map": "$list(map(@f, [1]))",
    "a_transform_through_filter": "$list(filter(@f, [1]))",
    "a_transform_as_a_key": "$sorted([1], key=@f)",
    "a_transform_as_the_key_of_max": "$max([1, 2], key=@f)",
    "a_transform_through_a_partial": "$functools.partial(@f)(1)",
    "a_transform_through_a_map_of_maps": "$[list(each) for each in map(map, [@f], [[1]])]",
    "a_transform_that_is_a_lambda_s_function": {"_target_": "Lambda", "func": "@f"},
    "a_transform_through_a_sort": "$[2, 1].sort(key=@f)",
    "a_transform_through_a_network": "$@n.apply(@f)",
    "a_transform_as_a_hook_of_json": "$json.loads('[1]', parse_int=@f)",
    "a_method_handed_on": "$list(map('a'.count, ['a']))",
    "a_method_of_an_object_handed_on": {"_target_": "Lambda", "func": "$@n.load_state_dict"},
    "a_method_that_sets_a_state": "$@s.load_state_dict({'step_size': 2})",
    "what_an_object_holds": "$@s.data(1)",
    "a_transform_as_a_table_s_key": "$pandas.read_csv(@bundle_root + '/state.csv')[@f]",
    "a_transform_as_a_place_in_a_table": "$pandas.read_csv(@bundle_root + '/state.csv').loc[@f, :]",
    "what_a_function_found": "$[monai.utils.first(v for v in [@o.state_dict])(1)]",
    "a_function_of_torch_by_its_module": "$torch._tensor._rebuild_from_type_v2(len, set, (), {})",
    "a_sparse_tensor": "$torch._utils._rebuild_sparse_tensor(torch.sparse_coo, 1)",
    "a_component_in_a_generator": {"_target_": "Compose", "transforms": "$[t for t in [@n.load_state_dict]]"},
    "targets_beyond_memory": {"_target_": "torch.nn.CTCLoss"},
    "offsets_beyond_memory": {"_target_": "torch.nn.EmbeddingBag", "num_embeddings": 2, "embedding_dim": 2},
    "paddings_beyond_memory": {"_target_": "torch.nn.CircularPad1d", "padding": [-16, 1]},
    "grids_beyond_memory": "$torch.nn.functional.grid_sample(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 2) / 0)",
    "layers_that_are_not_filled": {"_target_": "torch.nn.LazyLinear", "out_features": 2},
    "writing_beyond_memory": {**OPTIMIZER, "fused": True},
    "repeated_beyond_memory": "$np.ones(8).repeat(2)",
    "footprints_beyond_memory": "$scipy.ndimage.binary_erosion(np.ones((4, 4)), origin=-1)",
    "edges_that_are_not_filled": "$np.pad(np.ones(2), 2, 'emp' + 'ty')",
    "borders_that_are_not_filled": {"_target_": "BorderPad", "spatial_border": 2, "mode": "empty"},
    "paddings_of_a_function": "$torch.nn.functional.pad(torch.ones(1, 1, 4), (4, -4), mode='circular')",
    "gaps_in_a_type": "$np.ones(2, dtype={'names': ['a'], 'formats': ['f8'], 'offsets': [56], 'itemsize': 64})",
    "padding_of_numbers": "$np.ones(8).astype('G')",
    "padding_of_numbers_of_a_function": "$np.add(np.ones(8), 1, dtype='g')",
    "a_size_by_name": "$torch.FloatTensor(size=[4])",
    "a_size_as_an_array": "$torch.FloatTensor(np.array(5))",
    "a_size_of_numpy": "$torch.Tensor(np.int64(4))",
    "sizes_as_tensors": "$torch.FloatTensor(torch.tensor(4), torch.tensor(4))",
    "a_device_before_a_type": "$torch.ones(2).to('me' + 'ta', torch.float32)",
    "a_device_with_a_number": "$torch.device('me' + 'ta', 0)",
    "tensors_without_memory": "$torch.mm(torch.ones(2, 2), torch.ones(2, 2, device='me' + 'ta'))",
    "a_device_without_memory": "$torch.ones(2, device=torch.device('meta'))",
    "a_network_without_memory": "$@n.to('meta')",
    "a_tensor_that_is_sent_there": "$torch.ones(2).to('meta')",
    "a_layer_without_memory": {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1, "device": "meta"},
    "memory_that_is_not_filled": "$np.add(np.ones(3), 1, where=False)",
    "memory_that_is_not_filled_by_a_clip": "$np.clip(np.ones(3), 0, 1, where=False)",
}  # fmt: skip
IMPORTS = ["$import functools", "$import json", "$import pandas", "$import scipy.ndimage"]


def made(root: Path, content: Any) -> Configuration:
    root.mkdir()
    (root / "state.csv").write_text("state,optimizer\n1,2\n")
    torch.save({"s": {"data": torch._tensor._rebuild_from_type_v2}}, root / "a.pt")
    return configuration(root, {"imports": IMPORTS, "bundle_root": ".", **PARTS, "x": content})


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_it_is_called(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"is not on the list|never made|handed on|memory|no method of|the attribute|can only",
    ):
        made(tmp_path / "bundle", REFUSED[name]).evaluated("x")


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
    "what_an_engine_s_output_becomes": {"_target_": "MeanDice", "output_transform": "$monai.handlers.from_engine(['a', 'b'])"},
    "rows_by_a_lambda": "$[pandas.read_csv(@bundle_root + '/state.csv').loc[lambda rows: rows.state > 0, :]]",
    "numbers_as_a_tensor": "$[torch.FloatTensor([1.0, 2.0]), torch.Tensor(np.ones(2)), torch.LongTensor((1, 2))]",
    "parts_of_a_tensor": "$[torch.ones(2, 3, 4)[..., 0:2, 1]]",
    "a_copy_of_a_network": "$[copy.deepcopy(@n)]",
    "layers_by_their_type": "$[isinstance(@n, torch.nn.Linear)]",
    "losses_of_losses": {"_target_": "DeepSupervisionLoss", "loss": {"_target_": "DiceLoss"}},
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_bundles_need_is_called(name: str, tmp_path: Path) -> None:
    root = tmp_path / "bundle"
    root.mkdir()
    (root / "state.csv").write_text("state,optimizer\n1,2\n")
    content = {"bundle_root": ".", **PARTS, "g": "$lambda x: x + 1", "x": ACCEPTED[name]}
    config = configuration(root, {"imports": [*IMPORTS, "$import os", "$import copy"], **content})
    assert config.evaluated("x") is not None
