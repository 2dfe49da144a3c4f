"""Expressions: what the filter lets through gives what Python gives; what its text says that it does is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.bundle import ConfigParser

from medfl.bundle.bundle import Bundle
from medfl.bundle.configuration import Configuration
from medfl.bundle.guarded import guarded_parser
from medfl.core.errors import InputError
from medfl.core.untrusted import Refused
from medfl.policy.policy import Policy

IMPORTS = [
    "$import os", "$import glob", "$import json", "$import pathlib", "$from pathlib import Path",
    "$from functools import partial", "$import math", "$import logging", "$import operator", "$import datetime",
]  # fmt: skip


def evaluated(text: str, /, **references: Any) -> Any:
    """Evaluate an expression as a bundle's configuration does, with values under the names of ids."""
    content = {"imports": IMPORTS, **references, "x": f"${text}"}
    parser = guarded_parser(content, Policy(), frozenset(), ())
    parser.parse()
    return parser.get_parsed_content("x")


HARMLESS: dict[str, Any] = {
    "1 + 2 * 3": 7,
    "[x ** 2 for x in range(3)]": [0, 1, 4],
    "sum(x for x in @numbers if x > 1)": 5,
    "{k: v for k, v in zip('ab', @numbers)}": {"a": 1, "b": 2},
    'f"{@first:03d}-{math.pi:.2f}"': "001-3.14",
    'f"{@first!r:>4}"': "   1",
    "'{}/{name}'.format(1, name='x')": "1/x",
    "'%03d' % 7": "007",
    "map(lambda x, y=2: x * y, @numbers)": [2, 4, 6],
    "partial(max, 3)(4)": 4,
    "@tensor[..., 0].tolist()": [0.0, 2.0],
    "@tensor.reshape(-1).numpy().astype(np.int64).tolist()": [0, 1, 2, 3],
    "torch.where(@tensor > 1, 1, 0).sum().item()": 2,
    "@text.replace('a', 'b').upper()": "BBC",
    "'x'.join(sorted(@text))": "axaxc",
    "@network.weight.shape[0]": 3,
    "len(list(@network.parameters()))": 2,
    "@network(torch.zeros(1, 2)).shape[1]": 3,
    "torch.optim.SGD(@network.parameters(), lr=0.1).param_groups[0]['lr']": 0.1,
    "1 if @numbers else 2": 1,
    "[{**entry, 'id': n} for n, entry in enumerate([{'a': 1}])]": [{"a": 1, "id": 0}],
    "Path('a').joinpath('b').with_suffix('.txt').name": "b.txt",
    "os.path.splitext(os.path.basename('a/b.nii.gz'))[0]": "b.nii",
    "map(lambda n: n % 2, @numbers)": [1, 0, 1],
    "isinstance(@text, str) and not isinstance(@text, list)": True,
    "datetime.datetime(2026, 11, 27).strftime('%Y')": "2026",
    "[y := 2, y + 1]": [2, 3],
    "dict(**{'a': 1}, b=max(*@numbers))": {"a": 1, "b": 3},
    "operator.itemgetter(1)(@numbers)": 2,
}


@pytest.mark.parametrize("text", HARMLESS)
def test_what_bundles_do_gives_what_python_gives(text: str) -> None:
    values = {
        "numbers": [1, 2, 3],
        "first": 1,
        "text": "aac",
        "tensor": torch.arange(4.0).reshape(2, 2),
        "network": torch.nn.Linear(2, 3),
    }
    found = evaluated(text, **values)
    assert (list(found) if isinstance(found, map) else found) == HARMLESS[text]


MOVES = (
    "[p.replace(q) for p, q in [(@victim, @target)]]",
    "[p.replace(q, q) for p, q in [(@victim, @target)]]",
    "[pathlib.Path.replace(p, q) for p, q in [(@victim, @target)]]",
    "[Path.replace(p, q) for p, q in [(@victim, @target)]]",
    "@victim.replace(@target, '')",
    "(lambda p: p.replace('a', 'b'))(@victim)",
    "list(map(lambda p: p.rename(@target), [@victim]))",
    "list(map(@victim.replace, [@target]))",
    "@victim.write_text('x')", "@victim.unlink()", "@victim.touch()", "@victim.chmod(0)", "@victim.open('w')",
    "@victim.symlink_to(@target)", "@victim.parent.rmdir()", "@victim.parent.mkdir()",
    "open(@victim, 'w')", "open(@victim, 'a')", "open(@text, mode=@mode)",
    "partial(open, @victim)('w')", "[o(@victim, 'w') for o in [open]]",
)  # fmt: skip


@pytest.mark.parametrize("text", MOVES)
def test_no_file_is_moved_written_or_removed(text: str, tmp_path: Path) -> None:
    """By a variable, by an import of the class, by reference, handed on: version 0.6.0 let some through."""
    folder = tmp_path / "folder"
    folder.mkdir()
    victim = folder / "note.txt"
    victim.write_text("a")
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    values = {"victim": victim, "target": folder / "moved.txt", "text": str(victim), "mode": "w"}
    with pytest.raises((Refused, RuntimeError)):  # a path's replace() takes one argument
        evaluated(text, **values)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


ACT = (
    "@network.register_buffer('a', @tensor)", "@tensor.numpy().tofile('x')", "@tensor.numpy().dump('x')",
    "@engine.save('x')", "(x for x in [1]).gi_frame", "torch.save(@tensor, 'x')", "np.load('x.npy')",
    "np.save('x', @tensor)", "np.memmap('x')", "np.fromfile('x')", "@module.system('true')", "print(@text)",
    "type(@text)", "getattr(@text, 'x')", "torch.hub.load('a', 'b')", "monai.bundle.run()", "os.system('true')",
    "__import__('os')", "@tensor.__class__", "np.lib.npyio.os.remove('x')", "torch.os.system('true')",
    "[torch.nn][0].modules.module.os.system('true')", "monai.utils.module.locate('os.system')('true')",
    "monai.utils.run_cmd(['true'])", "monai.apps.download_url('x')", "operator.attrgetter('a')(@text)",
    "operator.methodcaller('unlink')(@text)", "pathlib.Path.unlink(@text)", "torch.jit.load('x')",
    "[exec('1'), (lambda exec: 1)]", "eval('1')", "vars(os)", "open",
    "[list(map(open, ['x'], ['w'])), (lambda open: 1)]",
    "[list(map(setattr, [@engine])), (lambda setattr: 1)]", "@text._private", "torch._C",
    "monai.transforms.LoadImage('os.system')",
    "logging.config.dictConfig(@text)", "np.testing.measure('1')", "[np.testing][0].measure('1')",
    "torch.utils.benchmark.Timer('1')", "monai.apps.auto3dseg.BundleAlgo(@text)", "[monai.utils.misc][0].x",
    "torch.distributed.TCPStore('a', 1)", "subprocess.run(['true'])",
)  # fmt: skip
"""Reaches files, programs, the network, pickles or the interpreter by a name that says so."""


@pytest.mark.parametrize("text", ACT)
def test_what_acts_by_its_name_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"network": torch.nn.Linear(2, 3), "tensor": torch.ones(2), "text": "abc"}
    with pytest.raises((Refused, RuntimeError)) as caught:
        evaluated(text, **values, engine=object(), module=os)
    if "exec" not in text:  # which the check takes for the lambda's, and which is not there
        assert isinstance(caught.value, Refused)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["@a'b'", "'@a'", "x@a", "@a@a"])
def test_a_reference_becomes_no_text_to_run(text: str) -> None:
    with pytest.raises(Refused):
        evaluated(text, a=1)


def test_expressions_find_the_built_in_functions_that_are_listed_and_no_others() -> None:
    """Python would add its own to the names of an expression that has none."""
    assert evaluated("(lambda x: len(x))('ab')") == 2
    with pytest.raises(RuntimeError) as caught:
        evaluated("[input, (lambda input: 1)]")
    assert "'input' is not defined" in str(caught.value.__cause__)


# Through a bundle's configuration


def configuration(
    folder: Path, content: dict[str, Any], policy: Policy | None = None
) -> Configuration:
    """Read a configuration that no inspection has seen."""
    (folder / "configs").mkdir(parents=True, exist_ok=True)
    file = folder / "configs" / "train.json"
    file.write_text(json.dumps(content))
    return Configuration(folder, [file], {}, {}, torch.device("cpu"), policy or Policy())


def test_a_configuration_is_parsed_once_and_a_macro_may_hold_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of ids of a zoo's bundle would be parsed again for what is evaluated first."""
    parsed, parse = [], ConfigParser.parse

    def counted(parser: ConfigParser, reset: bool = True) -> None:
        parsed.append(parser)
        parse(parser, reset)

    monkeypatch.setattr(ConfigParser, "parse", counted)
    config = configuration(tmp_path / "bundle", {"x": "%y", "y": "%z", "z": "$1 + @one", "one": 1})
    assert [config.evaluated(key) for key in "xyz"] == [2, 2, 2]
    assert config.build_new("x", "z") == [2, 2]
    assert len(parsed) == len(set(map(id, parsed))) == 2


CODE = "__import__('pathlib').Path('MARK').touch()"

RUNS: dict[str, dict[str, Any]] = {
    "a path through a module of a module": {
        "_target_": "monai.transforms.transform.torch._higher_order_ops.triton_kernel_wrap.sympy.Lambda",
        "signature": "x", "expr": CODE,
    },
    "another package's class by a listed name": {"_target_": "monai.losses.perceptual.torchvision.os.system"},
    "a module's function": {"_target_": "os.mkdir", "path": "MARK"},
    "a reference as a target": {"_target_": "@name"},
    "a function as a target": {"_target_": "$@name"},
    "a reader by reference": {"_target_": "LoadImage", "reader": "@name"},
    "weights by default": {"_target_": "EfficientNetBN", "model_name": "efficientnet-b0"},
    "weights by reference": {"_target_": "DenseNet121", "spatial_dims": 2, "pretrained": "@yes"},
    "another mode": {"_target_": "Dataset", "data": [], "_mode_": "debug"},
    "a writer": {"_target_": "CheckpointSaver", "save_dir": "MARK", "save_dict": {}},
    "a writer that is required first": {
        "_target_": "Dataset", "data": [],
        "_requires_": [{"_target_": "TensorBoardStatsHandler", "log_dir": "MARK"}],
    },
    "an expression that is required first": {"_target_": "Dataset", "data": [], "_requires_": ["$" + CODE]},
    "an expression that disables": {"_target_": "Dataset", "data": [], "_disabled_": "$" + CODE},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_made_that_the_filter_refuses_even_without_an_inspection(
    name: str, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    node = json.loads(json.dumps(RUNS[name]).replace("MARK", str(mark)))
    config = configuration(tmp_path / "bundle", {"x": node, "name": "os.mkdir", "yes": True})
    with pytest.raises(InputError, match="id 'x") as caught:
        config.evaluated("x")
    assert "a bundle names components" in str(caught.value)
    assert not mark.exists()


def test_an_id_that_becomes_part_of_an_expression_is_read_there(tmp_path: Path) -> None:
    """MONAI replaces a relative reference by the keys above it, whatever these say."""
    key = f"z or torch.os.mkdir({str(tmp_path / 'mark')!r}) or @c"
    config = configuration(tmp_path / "bundle", {"z": 0, "c": {"b": 1}, key: {"b": 2, "x": "$@#b"}})
    with pytest.raises(InputError, match="torch.os.mkdir"):
        config.evaluated(f"{key}#x")
    assert not (tmp_path / "mark").exists()


def test_an_import_that_no_expression_uses_is_never_made(tmp_path: Path) -> None:
    content = {"imports": ["$import antigravity", "$from no_such_package import x"], "y": "$1 + 1"}
    assert configuration(tmp_path / "bundle", content).evaluated("y") == 2


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """A bundle's folder, and one outside of it."""
    for name in ("bundle", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "note.txt").write_text(name)
    return {"inside": tmp_path / "bundle", "outside": tmp_path / "outside"}


def test_the_data_folder_may_be_looked_into_wherever_it_lies(places: dict[str, Path]) -> None:
    content = {
        "imports": ["$import os"],
        "dataset_dir": "none",
        "x": "$sorted(os.listdir(@dataset_dir))",
    }
    config = configuration(places["inside"], content)
    with pytest.raises(InputError, match="neither below the bundle nor .* with --data"):
        config.evaluated("x")
    config.override({"dataset_dir": str(places["outside"])})
    assert config.evaluated("x") == ["note.txt"]


@pytest.mark.parametrize("folder", ["/", "/usr", "outside", "../outside"])
def test_a_bundle_opens_no_folder_by_calling_it_its_data(
    folder: str, places: dict[str, Path]
) -> None:
    named = str(places["outside"]) if folder == "outside" else folder
    content = {
        "imports": ["$import os", "$import glob"],
        "dataset_dir": named,
        "x": "$os.listdir(@dataset_dir)",
        "y": "$glob.glob('*', root_dir=@dataset_dir)",
    }
    config = configuration(places["inside"], content)
    for key in ("x", "y", "dataset_dir"):
        with pytest.raises(InputError, match="neither below the bundle nor"):
            config.evaluated(key)
    inside = {**content, "dataset_dir": str(places["inside"])}
    assert set(configuration(places["inside"], inside).evaluated("y")) == {"configs", "note.txt"}


def test_the_word_pickle_lets_a_bundle_load_a_whole_pickle(tmp_path: Path) -> None:
    root = tmp_path / "bundle"
    root.mkdir()
    torch.save({"a": Path("b")}, root / "a.pt")
    content = {"bundle_root": ".", "x": "$torch.load(@bundle_root + '/a.pt', weights_only=False)"}
    with pytest.raises(InputError, match="'pickle'|unpickled"):
        configuration(root, content).evaluated("x")
    config = configuration(root, content, Policy(allow=frozenset({"pickle"})))
    assert config.evaluated("x") == {"a": Path("b")}


def test_numpy_s_former_names_are_python_s(tmp_path: Path) -> None:
    config = configuration(
        tmp_path / "bundle", {"x": "$[np.float('1.5'), np.int(2.5), np.bool(0)]"}
    )
    assert config.evaluated("x") == [1.5, 2, False]
    assert config.adapted >= {"numpy.float", "numpy.int"}


def test_a_trusted_bundle_is_monai_s_own_affair(tmp_path: Path) -> None:
    content = {"x": "$" + CODE.replace("MARK", str(tmp_path / "mark"))}
    config = configuration(tmp_path / "bundle", content, Policy(trusted=True))
    config.evaluated("x")
    assert (tmp_path / "mark").exists()


def test_the_word_scripts_lets_a_bundle_s_own_python_run(tmp_path: Path) -> None:
    root = tmp_path / "bundle"
    (root / "things_of_this_test").mkdir(parents=True)
    (root / "things_of_this_test" / "__init__.py").write_text(
        "class Thing:\n    def __init__(self, a=1):\n        self.a = a\n"
    )
    content = {
        "imports": ["$import things_of_this_test"],
        "x": {"_target_": "things_of_this_test.Thing", "a": 2},
        "y": "$@x.a + things_of_this_test.Thing().a",
    }
    assert configuration(root, content, Policy(allow=frozenset({"scripts"}))).evaluated("y") == 3
    for key in ("x", "y"):
        with pytest.raises(InputError, match=r"things_of_this_test\.Thing, for which .* 'scripts'"):
            configuration(root, content).evaluated(key)


@pytest.mark.parametrize("value", ["%{}::x", {"a": ["%{}"]}, "%./{}::x"])
def test_no_setting_takes_a_part_of_another_file(value: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "other.json")
    text = json.dumps(value).replace("{}", str(tmp_path / "other.json"))
    with pytest.raises(InputError, match="a part of another file"):
        Bundle("mednist", {"image_size": json.loads(text)})
