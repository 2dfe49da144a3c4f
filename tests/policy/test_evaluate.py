"""Expressions under guard: what a value may be asked for depends on what it is, and nothing else is in reach."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medfl.bundle.bundle import Bundle
from medfl.bundle.configuration import Configuration
from medfl.core.errors import InputError
from medfl.core.untrusted import Refused
from medfl.policy.allowed_in_expressions import TORCH_FUNCTIONS
from medfl.policy.components import component, for_expressions
from medfl.policy.evaluate import ExpressionEvaluator
from medfl.policy.imports import DEFAULT_NAMES
from medfl.policy.policy import Policy

NAMES = {
    **DEFAULT_NAMES,
    "os": "os",
    "glob": "glob",
    "json": "json",
    "pathlib": "pathlib",
    "Path": "pathlib.Path",
}
NAMES |= {"partial": "functools.partial", "math": "math", "medfl": "medfl"}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """A bundle's folder with a file, and a secret and a victim outside of it."""
    inside, outside = tmp_path / "bundle", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "note.txt").write_text(folder.name)
        (folder / "a.png").touch()
    return {"inside": inside, "outside": outside}


def evaluated(
    text: str, places: dict[str, Path], words: frozenset[str] = frozenset(), /, **references: Any
) -> Any:
    return ExpressionEvaluator(NAMES, words, (), (places["inside"],)).evaluate(text, references)


HARMLESS: dict[str, Any] = {
    "1 + 2 * 3": 7,
    "[x ** 2 for x in range(3)]": [0, 1, 4],
    "sum(x for x in @numbers if x > 1)": 5,
    "{k: v for k, v in zip('ab', @numbers)}": {"a": 1, "b": 2},
    'f"{@first:03d}-{math.pi:.2f}"': "001-3.14",
    "'{}/{name}'.format(1, name='x')": "1/x",
    "'%03d' % 7": "007",
    "map(lambda x, y=2: x * y, @numbers)": [2, 4, 6],
    "partial(max, 3)(4)": 4,
    "@tensor[..., 0].tolist()": [0.0, 2.0],
    "@tensor.reshape(-1).numpy().astype(np.int64).tolist()": [0, 1, 2, 3],
    "torch.where(@tensor > 1, 1, 0).sum().item()": 2,
    "@text.replace('a', 'b').upper()": "BBC",
    "'x'.join(sorted(@text))": "axbxc",
    "@network.weight.shape[0]": 3,
    "len(list(@network.parameters()))": 2,
    "torch.optim.SGD(@network.parameters(), lr=0.1).param_groups[0]['lr']": 0.1,
    "1 if @numbers else 2": 1,
    "[{**entry, 'id': n} for n, entry in enumerate([{'a': 1}])]": [{"a": 1, "id": 0}],
    "Path('a').joinpath('b').with_suffix('.txt').name": "b.txt",
    "os.path.splitext(os.path.basename('a/b.nii.gz'))[0]": "b.nii",
    "map(lambda n: n % 2, @numbers)": [1, 0, 1],
    "isinstance(@text, str) and not isinstance(@text, list)": True,
}


@pytest.mark.parametrize("text", HARMLESS)
def test_what_bundles_do_gives_what_python_gives(text: str, places: dict[str, Path]) -> None:
    values: dict[str, Any] = {
        "numbers": [1, 2, 3],
        "first": 1,
        "text": "aac" if "replace" in text else "abc",
    }
    values |= {"tensor": torch.arange(4.0).reshape(2, 2), "network": torch.nn.Linear(2, 3)}
    found = evaluated(text, places, **values)
    assert (list(found) if isinstance(found, map) else found) == HARMLESS[text]


MOVES = (
    "[p.replace(q) for p, q in [(@victim, @target)]]",
    "[p.replace(q, q) for p, q in [(@victim, @target)]]",
    "[pathlib.Path.replace(p, q) for p, q in [(@victim, @target)]]",
    "[Path.replace(p, q) for p, q in [(@victim, @target)]]",
    "@victim.replace(@target, '')",
    "(lambda p: p.replace('a', 'b'))(@victim)",
    "list(map(lambda p: p.rename(@target), [@victim]))",
    "@victim.write_text('x')", "@victim.unlink()", "@victim.touch()", "@victim.chmod(0)", "@victim.open('w')",
    "@victim.symlink_to(@target)", "@victim.parent.rmdir()", "@victim.parent.mkdir()",
    "open(@victim, 'w')", "open(@victim, 'a')", "open(@text, mode=@mode)",
    "partial(open, @victim)('w')", "[o(@victim, 'w') for o in [open]]",
)  # fmt: skip


@pytest.mark.parametrize("text", MOVES)
def test_no_file_is_moved_written_or_removed(text: str, places: dict[str, Path]) -> None:
    """By a variable, by an import of the class, by reference, handed on: version 0.6.0 let some through."""
    victim, target = places["inside"] / "note.txt", places["inside"] / "moved.txt"
    before = sorted((path, path.stat().st_mtime_ns) for path in places["inside"].parent.rglob("*"))
    with pytest.raises((Refused, TypeError)):
        evaluated(text, places, victim=victim, target=target, text=str(victim), mode="w")
    assert (
        sorted((path, path.stat().st_mtime_ns) for path in places["inside"].parent.rglob("*"))
        == before
    )


LOOKS = (
    "@place.exists()", "list(@place.glob('*'))", "list(@place.iterdir())", "(@place / 'note.txt').read_text()",
    "os.listdir(@text)", "glob.glob(@text + '/*')", "os.path.exists(@text)", "open(@text + '/note.txt').read()",
    "json.load(open(@text + '/note.txt'))", "monai.data.load_decathlon_datalist(@text + '/note.txt')",
    "Path(@text, 'note.txt').read_text()", "list(map(os.listdir, [@text]))", "[f(@text) for f in [os.listdir]]",
    "list(map(glob.glob, [@text]))", "partial(os.listdir)(@text)", "list(@inside.glob('*' + @up + '/outside/*'))",
    "medfl.datasets.unlabelled(@text)",
)  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        " file:OTHER",
        "\tfile:OTHER",
        "\u2003file:OTHER",
        "fi\nle:OTHER",
        "f\rile:OTHER",
        "s3-a:OTHER",
        "~/note.txt",
        "~",
    ],
)
def test_what_others_read_otherwise_is_no_path(
    text: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From inside of the bundle each is a path below it, and pandas or `expanduser` would leave it."""
    monkeypatch.chdir(places["inside"])
    monkeypatch.setenv("HOME", str(places["outside"]))
    names = {**NAMES, "pandas": "pandas"}
    for expression in (
        "pandas.read_csv(@text)",
        "os.path.exists(@text)",
        "open(@text).read()",
        "Path(@text).read_text()",
    ):
        evaluator = ExpressionEvaluator(names, frozenset(), (), (places["inside"],))
        with pytest.raises(Refused, match="a URL|read as something else"):
            evaluator.evaluate(
                expression, {"text": text.replace("OTHER", str(places["outside"] / "note.txt"))}
            )


@pytest.mark.parametrize("text", LOOKS)
def test_only_the_bundle_and_its_data_are_looked_into(text: str, places: dict[str, Path]) -> None:
    for place in (places["outside"], places["inside"] / ".." / "outside"):
        with pytest.raises(Refused, match="neither below the bundle nor"):
            evaluated(
                text, places, place=place, text=str(place), inside=places["inside"], up="/../.."
            )
    inside = {"place": places["inside"], "text": str(places["inside"])}
    if "@inside" in text:
        return
    if "json" in text or "decathlon" in text:
        with pytest.raises((json.JSONDecodeError, ValueError)):
            evaluated(text, places, **inside)
    else:
        assert evaluated(text, places, **inside)
    assert evaluated("os.path.exists(@text)", places, frozenset({"paths"}), text="/")


def test_a_link_and_two_dots_lead_no_further_than_they_say(places: dict[str, Path]) -> None:
    """`link/..` is the folder above the link's target, not the link's own."""
    (places["outside"] / "below").mkdir()
    (places["inside"] / "link").symlink_to(places["outside"] / "below")
    for text in (
        "open(@text + '/note.txt')",
        "glob.glob(@text + '/*')",
        "Path(@text, 'note.txt').read_text()",
    ):
        with pytest.raises(Refused, match="upwards"):
            evaluated(text, places, text=str(places["inside"] / "link" / ".."))
        with pytest.raises(Refused, match="upwards"):
            evaluated(text, places, text=str(places["inside"] / "li*" / ".."))


MEMORY = (
    "torch.frombuffer(@array, dtype=torch.int64)", "torch.asarray(@array)", "torch.as_strided(@tensor, (9,), (1,))",
    "torch.fill_(@tensor, 1)", "torch.sparse_coo_tensor(@tensor, @tensor, (2,))", "torch.from_file('x')",
    "torch.add(@tensor, torch.sparse_csr_tensor([0, 9], [9], [1.0], (1, 1)))", "torch.empty_strided((2,), (9,))",
    "np.array([None], dtype='O,O')", "np.array([None], dtype='O')", "np.array([None], [('a', 'O')])",
    "np.array([None], list)", "@array.astype('O,i4')", "list(map(partial(np.array, dtype='O'), [[1]]))",
    "list(map(@function, ['x'], ['w']))", "partial(map, @function)(['x'], ['w'])",
    "list(map(partial(@function), ['x'], ['w']))",
)  # fmt: skip


@pytest.mark.parametrize("text", MEMORY)
def test_memory_is_no_number_and_no_object_is_made_of_numbers(
    text: str, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0.7.0 before its release read a pointer from an array of objects, and called what it made of another."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused):
        evaluated(
            text, places, tensor=torch.ones(2), array=np.ones(2, np.int64), function=io.FileIO
        )
    assert not (tmp_path / "x").exists()


def test_functions_of_tensors_make_tensors_of_their_own() -> None:
    for name in TORCH_FUNCTIONS:
        assert for_expressions(f"torch.{name}") is getattr(torch, name)
        assert not name.endswith("_")


def test_a_teacher_s_weights_are_of_the_bundle(places: dict[str, Path]) -> None:
    evaluator = ExpressionEvaluator(NAMES, (), (), (places["inside"],))
    evaluator.check_paths(
        {"source": str(places["inside"] / "a.pth")}, component("medfl.medsam.load")
    )
    with pytest.raises(Refused, match="neither below the bundle nor"):
        evaluator.check_paths(
            {"source": str(places["outside"] / "a.pth")}, component("medfl.medsam.load")
        )


NOT_IN_REACH = (
    "@network.forward.func_globals", "@network.register_buffer('a', @tensor)", "@tensor.storage()",
    "@tensor.numpy().ctypes", "@tensor.numpy().tofile('x')", "@tensor.numpy().dump('x')",
    "@engine.save('x')", "@text.encode()", "@function.func",
    "(lambda: 1).func_code", "(x for x in [1]).gi_frame", "@numbers.sort.self", "torch.save(@tensor, 'x')",
    "np.load('x.npy')", "np.save('x', @tensor)", "@tensor.apply_(print)", "@module.system('true')", "@function('true')",
    "[f('true') for f in [@function]]", "print(@text)", "@network.apply(@function)", "type(@text)",
    "getattr(@text, 'x')", "@place.absolute().chmod(0)",
    "torch.hub.load('a', 'b')", "monai.bundle.run()", "os.system('true')", "__import__('os')", "@numbers.clear()",
)  # fmt: skip


@pytest.mark.parametrize("text", NOT_IN_REACH)
def test_what_is_not_listed_is_out_of_reach(
    text: str, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "network": torch.nn.Linear(2, 3),
        "tensor": torch.ones(2),
        "text": "abc",
        "numbers": [1],
    }
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused):
        evaluated(
            text, places, **values, place=tmp_path, engine=object(), module=os, function=os.system
        )


GROWS = (
    "'a' * 10 ** 9", "[0] * (10 ** 5) * (10 ** 5)", "2 ** 2 ** 20", "@large ** @large", "range(10 ** 12)",
    "list(range(99999999999))", "f'{1:99999}'", "f'{1:{@large}}'", "'%99999d' % 1", "'%*d' % (10 ** 9, 1)",
    "'{:99999}'.format(1)", "'{:{}}'.format(1, @large)", "'{0.real}'.format(1)", "'{0[a]}'.format({})",
    "[f.format(1) for f in ['{:99999}']]", "1 << 99999", "--" * 5 + "1" if False else "-" * 900 + "1",
    "[" * 60 + "]" * 60, "(" * 60 + "1" + ")" * 60 + "".join(f"[{n}]" for n in range(60)),
)  # fmt: skip


@pytest.mark.parametrize("text", GROWS)
def test_what_grows_without_bound_is_refused(text: str, places: dict[str, Path]) -> None:
    with pytest.raises(Refused):
        evaluated(text, places, large=10**6)


def test_a_lambda_is_guarded_when_it_is_called(places: dict[str, Path]) -> None:
    move = evaluated("lambda p: p.replace('a', 'b')", places)
    assert move("cat") == "cbt"
    with pytest.raises(Refused, match=r"\.replace of path"):
        move(places["inside"] / "note.txt")
    transform = evaluated("lambda x: np.where(x == 4, 3, x).astype(np.uint8)", places)
    assert transform(np.array([4, 1])).tolist() == [3, 1]


def test_arguments_are_checked_by_what_they_are(places: dict[str, Path]) -> None:
    for text in (
        "np.array(@x, allow_pickle=@yes)",
        "torch.tensor(1, weights_only=@no)",
        "dict(reader=@name)",
    ):
        with pytest.raises(Refused, match="argument"):
            evaluated(text, places, x=[1], yes=True, no=False, name="os.mkdir")


# Through MONAI's parser


def configuration(
    folder: Path, content: dict[str, Any], policy: Policy | None = None
) -> Configuration:
    """Read a configuration that no inspection has seen."""
    (folder / "configs").mkdir(parents=True, exist_ok=True)
    file = folder / "configs" / "train.json"
    file.write_text(json.dumps(content))
    return Configuration(folder, [file], {}, {}, torch.device("cpu"), policy or Policy())


CODE = "__import__('pathlib').Path('MARK').touch()"

RUNS: dict[str, dict[str, Any]] = {
    "a path through a module of a module": {
        "_target_": "monai.transforms.transform.torch._higher_order_ops.triton_kernel_wrap.sympy.Lambda",
        "signature": "x", "expr": CODE,
    },
    "another package's class by a listed name": {"_target_": "monai.losses.perceptual.torchvision.models.resnet18"},
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
def test_nothing_is_made_that_is_not_listed_even_without_an_inspection(
    name: str, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    node = json.loads(json.dumps(RUNS[name]).replace("MARK", str(mark)))
    config = configuration(tmp_path / "bundle", {"x": node, "name": "os.mkdir", "yes": True})
    with pytest.raises(InputError, match="id 'x") as caught:
        config.evaluated("x")
    assert "not listed" in str(caught.value)
    assert not mark.exists()


def test_the_data_folder_may_be_looked_into_wherever_it_lies(places: dict[str, Path]) -> None:
    content = {
        "imports": ["$import os"],
        "dataset_dir": "none",
        "x": "$sorted(os.listdir(@dataset_dir))",
    }
    config = configuration(places["inside"], content)
    with pytest.raises(InputError, match="neither below the bundle nor"):
        config.evaluated("x")
    config.override({"dataset_dir": str(places["outside"])})
    assert sorted(config.evaluated("x")) == ["a.png", "note.txt"]


@pytest.mark.parametrize("folder", ["/", "/usr", "outside", "../outside"])
def test_a_bundle_opens_no_folder_by_calling_it_its_data(
    folder: str, places: dict[str, Path]
) -> None:
    named = str(places["outside"]) if folder == "outside" else folder
    content = {
        "imports": ["$import os", "$import glob"],
        "dataset_dir": named,
        "x": "$os.listdir(@dataset_dir)",
    }
    content |= {"y": "$glob.glob('*', root_dir=@dataset_dir)"}
    config = configuration(places["inside"], content)
    with pytest.raises(InputError, match="neither below the bundle nor"):
        config.evaluated("x")
    with pytest.raises(InputError, match="root_dir|neither below"):
        config.evaluated("y")


def test_the_word_pickle_lets_a_bundle_load_a_whole_pickle(tmp_path: Path) -> None:
    root = tmp_path / "bundle"
    root.mkdir()
    torch.save({"a": Path("b")}, root / "a.pt")
    content = {"bundle_root": ".", "x": "$torch.load(@bundle_root + '/a.pt', weights_only=False)"}
    with pytest.raises(InputError, match="not listed|'pickle'"):
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
    with pytest.raises(InputError, match=r"things_of_this_test\.Thing, which is not on the list"):
        configuration(root, content).evaluated("y")


@pytest.mark.parametrize(
    "text", ["open(@file)", "json.load(open(@file))", "Path(@file).read_text()"]
)
def test_a_pipe_is_not_waited_for(text: str, places: dict[str, Path]) -> None:
    os.mkfifo(places["inside"] / "dataset.json")
    with pytest.raises(Refused, match="a pipe or a device"):
        evaluated(text, places, file=str(places["inside"] / "dataset.json"))


@pytest.mark.parametrize("value", ["%{}::x", {"a": ["%{}"]}, "%./{}::x"])
def test_no_setting_takes_a_part_of_another_file(value: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "other.json")
    text = json.dumps(value).replace("{}", str(tmp_path / "other.json"))
    with pytest.raises(InputError, match="a part of another file"):
        Bundle("mednist", {"image_size": json.loads(text)})
