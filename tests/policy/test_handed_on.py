# ruff: noqa: E501
"""Components as values: whoever calls them, their arguments are checked; found by an attack on the widened lists."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medfl.bundle.configuration import Configuration
from medfl.core.errors import InputError
from medfl.policy.policy import Policy
from tests.policy.test_evaluate import configuration

LOAD = "monai.transforms.LoadImage"
TOUCH = "'touch MARK'"
FOLDER = "os.sep + 'tmp'"

REFUSED: dict[str, dict[str, Any]] = {
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
IMPORTS = [
    "$import copy", "$import functools", "$import json", "$import os", "$import pandas", "$from medfl.datasets.own import paired",
]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_it_happens(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = json.dumps({"imports": IMPORTS, **REFUSED[name]}).replace("MARK", str(mark))
    made: Configuration = configuration(tmp_path / "bundle", json.loads(text))
    with pytest.raises(
        InputError,
        match=r"is not on the list|which is not|can only|cannot be|names what|neither below|a URL|URL|"
        r"how a file is opened|become an attribute|an array of objects|memory that others|more arguments|handed on|attribute \.append",
    ):
        made.evaluated("y" if "y" in REFUSED[name] else "x")
    assert not mark.exists()


ACCEPTED = {
    "a_component_that_is_handed_on": ("$list(map(monai.transforms.Flip, [0, 1]))", 2),
    "a_partial_of_one": ("$[functools.partial(monai.transforms.Flip, spatial_axis=0)()]", 1),
    "layers_by_their_type": (
        "$[isinstance(m, torch.nn.Linear) for m in [torch.nn.Linear(1, 1)]]",
        1,
    ),
    "types_of_numbers": (
        "$[np.array([1], dtype=np.float32), torch.zeros(1, dtype=torch.uint8)]",
        2,
    ),
    "an_unused_name_with_an_underscore": ("$[0 for _k in range(2)]", 2),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_harmless_is_made(name: str, tmp_path: Path) -> None:
    text, count = ACCEPTED[name]
    made = configuration(tmp_path / "bundle", {"imports": IMPORTS, "x": text})
    assert len(made.evaluated("x")) == count


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
