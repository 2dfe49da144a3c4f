# ruff: noqa: E501
"""Configurations that once ran something, or read memory or files that were not theirs: by objects and their methods.

Versions up to 0.7.0 let each through; later ones told every object by its identity. Now the walls hold them
(tests/safety/test_walls.py), and the filter refuses those whose text says what they do.
"""

from __future__ import annotations

from typing import Any

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
IMPORTS = [
    "$import copy", "$import functools", "$import json", "$import os", "$import pandas", "$import scipy.ndimage",
    "$from medfl.datasets.own import paired",
]  # fmt: skip
COMMON = {"imports": IMPORTS, "bundle_root": ".", **PARTS}
LOAD = "monai.transforms.LoadImage"
TOUCH = "'touch MARK'"
FOLDER = "os.sep + 'tmp'"

OBJECTS: dict[str, Any] = {
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
"""Name -> what `x` is, beside `COMMON`; MARK stands for a file outside of the bundle."""

HANDED_ON: dict[str, dict[str, Any]] = {
    "map": {"x": f"$list(map({LOAD}, ['os.system'], [False], [torch.float32], [False], [False], [None], ['.'], [False], [{TOUCH}]))"},
    "partial": {"x": f"$functools.partial({LOAD}, 'os.system', False, torch.float32, False, False, None, '.', False, {TOUCH})", "y": "$@x()"},
    "no_argument": {"x": f"$list(map({LOAD}, ['os.getpid']))"},
    "sort_key": {"x": f"$sorted(['this.s'], key={LOAD})"},
    "compose": {"x": f"$monai.transforms.Compose([lambda d: 'this.s', {LOAD}])", "y": "$@x(1)"},
    "apply": {"n": {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}, "x": f"$@n.apply({LOAD})"},
    "json_hook": {"x": f"$json.loads('[1]', parse_int={LOAD})"},
    "weights_by_position": {"x": "$list(map(monai.networks.nets.FlexibleUNet, [3], [2], ['efficientnet-b0'], [True]))"},
    "pickled_array": {"x": f"${LOAD}('numpyreader', True, torch.float32, False, False, None, '.', False, None, None, True)"},
    "reader_that_unrolls": {"r": {"_target_": "IterableDataset", "data": ["os.system"]}, "x": {"_target_": "LoadImage", "reader": "@r", "command": "touch MARK"}},
    "reader_by_a_lambda": {"r": {"_target_": "IterableDataset", "data": ["os.system"]}, "f": "$lambda c, r: c(r, command='touch MARK')", "x": f"$@f({LOAD}, @r)"},
    "reader_by_a_split_key": {"rd": {"v": "NumpyReader"}, "rd#v": {"_target_": "IterableDataset", "data": ["os.system"]}, "x": {"_target_": "LoadImage", "reader": "@rd#v", "command": "touch MARK"}},
    "url_in_a_tuple": {"x": {"_target_": "CSVDataset", "src": "$('http:' + os.sep + os.sep + '127.0.0.1:9/x.csv',)"}},
    "table_elsewhere": {"x": {"_target_": "CSVDataset", "src": "$os.sep + 'etc/passwd'", "kwargs_read_csv": {"header": None, "sep": ":"}}},
    "table_by_a_scheme": {"x": "$pandas.read_csv('file:/etc/passwd', sep=':', header=None)"},
    "picture_elsewhere": {"x": f"${LOAD}()(os.sep + 'tmp/secret.npy')"},
    "archive_elsewhere": {"x": {"_target_": "NPZDictItemDataset", "npzfile": "$os.sep + 'tmp/a.npz'", "keys": {"a": "a"}}},
    "listing_elsewhere": {"x": f"$paired({FOLDER}, 'a', 'b', 'train')"},
    "picture_elsewhere_by_its_name": {"x": f"${LOAD}()(filename=os.sep + 'tmp/secret.npy')"},
    "opened_to_be_changed": {"x": f"$list(map(functools.partial({LOAD}, 'NumpyReader', mmap_mode='r+'), ['secret.npy']))"},
    "copied_as_an_attribute_says": {"x": "$copy.deepcopy(torch.nn.ModuleDict({'_' + '_deepcopy_' + '_': torch.nn.Identity()}))"},
    "attributes_by_keys": {"x": "$list(map(torch.nn.ParameterDict, [{'forward': 1}]))"},
    "processes": {"x": "$monai.data.DataLoader([1], num_workers=1)"},
    "guard_by_its_name": {"f": f"$lambda _call: {LOAD}('this.s')", "x": "$@f(lambda *a: a)"},
    "list_that_grows": {"x": "$[b for a in [[1]] for b in a if a.append(1)]"},
    "objects": {"x": "$np.multiply(np.array(['x'], dtype='object'), 300000000)"},
    "memory_of_others": {"x": "$torch.Tensor(5).tolist()"},
    "memory_of_others_in_a_shape": {"x": "$torch.FloatTensor(torch.zeros(2, 3).size()).tolist()"},
    "memory_of_others_by_another": {"x": "$list(map(torch.LongTensor, [5]))"},
    "objects_by_position": {"x": "$np.array(['x'], 'O')"},
}  # fmt: skip
"""Name -> further ids beside `COMMON`."""
