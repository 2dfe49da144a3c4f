"""Inspection: everything malicious is refused before anything runs; ours and bundles of the zoo's kind are accepted."""

from __future__ import annotations

import builtins
import importlib
import inspect as introspection
import json
import os
import pydoc
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import monai.handlers
import monai.transforms
import pytest
from monai.bundle import ConfigParser
from monai.data import PILReader

from medfl.bundle.engines import _EVALUATORS, _TRAINERS
from medfl.bundle.files import config_file, shipped_root
from medfl.bundle.sections import _VALIDATION_SETS
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.core.untrusted import Refused
from medfl.policy import components, expressions
from medfl.policy.components import check_argument, check_arguments, component
from medfl.policy.expressions import DEFAULT_NAMES, ExpressionFilter, Uses
from medfl.policy.inspection import Inspection, inspect
from medfl.policy.policy import PERMISSIONS, Policy
from tests.hostile.base import write
from tests.hostile.friendly import FRIENDLY
from tests.hostile.table import HOSTILE
from tests.support.deep import deep_folder
from tests.support.toy import run_record
from tests.zoo.build import ZOO

EVERYTHING = Policy(allow=frozenset(PERMISSIONS))
BUNDLES = sorted(path.parent for path in (shipped_root() or Path()).glob("**/configs"))


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test where anything that evaluates, imports by name or starts a program is called."""
    component("Compose")  # the list itself is gathered once a process, from MONAI's own modules

    def alarm(*arguments: Any, **named: Any) -> None:
        raise AssertionError(f"called with {arguments} {named}")

    for owner, name in (
        (builtins, "eval"), (builtins, "exec"), (importlib, "import_module"), (pydoc, "locate"), (os, "system"),
        (subprocess, "Popen"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, alarm)


def reasons(found: Inspection) -> str:
    return "\n".join(map(str, found.refusals))


def test_the_harmless_bundle_that_the_hostile_ones_change_is_accepted(tmp_path: Path) -> None:
    found = inspect(write(tmp_path / "good"))
    assert found.accepted, reasons(found)
    assert found.statements == ["configs/train.json: run#0: $@train#trainer.run()"]


def test_a_protocol_names_no_folder(tmp_path: Path) -> None:
    """Its values would count as the user's own, whose folders a bundle may read."""
    text = "config: {where: /workspace/other}\n"
    root = write(tmp_path / "b", files={"configs/federated.yaml": text})
    assert "an absolute path (/workspace/other)" in reasons(inspect(root))
    assert inspect(root, Policy(allow=frozenset({"paths"}))).accepted


@pytest.mark.usefixtures("nothing_runs")
def test_every_hostile_bundle_that_the_filter_knows_is_refused_for_its_own_reason(
    tmp_path: Path,
) -> None:
    """The walls hold the others, and these too (tests/safety/test_walls.py)."""
    modules = set(sys.modules)
    for number, (name, case) in enumerate(HOSTILE.items()):
        found = inspect(write(tmp_path / str(number), case.train, case.files))
        assert case.says in reasons(found), name
        assert set(sys.modules) == modules, name
        assert found.accepted == (not case.says), name
        if found.accepted:
            continue
        with pytest.raises(InputError, match="is refused|cannot be read"):
            found.require()


def test_no_word_of_a_policy_allows_what_is_hostile(tmp_path: Path) -> None:
    for number, (name, case) in enumerate(HOSTILE.items()):
        if case.says and not case.word:
            found = inspect(write(tmp_path / str(number), case.train, case.files), EVERYTHING)
            assert not found.accepted, name


def test_what_a_word_allows_is_shown_under_that_word(tmp_path: Path) -> None:
    """Only the word that the refusal names helps."""
    for number, (name, case) in enumerate(HOSTILE.items()):
        if case.word:
            root = write(tmp_path / str(number), case.train, case.files)
            others = frozenset(PERMISSIONS) - {case.word}
            assert not inspect(root, Policy(allow=others)).accepted, name
            found = inspect(root, Policy(allow=frozenset({case.word})))
            assert found.accepted, (name, reasons(found))
            assert case.word in {word for word, _ in found.allowed}, name


def test_lists_under_ids_that_medfl_asks_for_are_never_statements(tmp_path: Path) -> None:
    """Every id that its source asks a bundle or a configuration for by name is one of them."""
    asked = re.compile(
        r"(?:bundle|config)\.(?:get|content|raw|within)\(\"(\w+)|self\.get\(\"(\w+)|\"(\w+)\" in self\._config"
    )
    sources = [path.read_text() for path in (Path(cli.__file__).parents[1]).glob("**/*.py")]
    names = {
        name for text in sources for found in asked.findall(text) for name in found if name
    } - {"_mode_"}
    names |= {place.partition("#")[0] for place in (*_TRAINERS, *_EVALUATORS, *_VALIDATION_SETS)}
    assert len(names) > 12
    for number, name in enumerate(sorted(names)):
        train = {name: ["$monai.bundle.run()"]}
        assert "monai.bundle.run, of no module" in reasons(
            inspect(write(tmp_path / str(number), train))
        ), name


def test_the_table_of_hostile_bundles_grows() -> None:
    assert len(HOSTILE) >= 150
    assert sum(bool(case.says) for case in HOSTILE.values()) >= 150


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("root", BUNDLES, ids=lambda path: path.name)
def test_every_shipped_bundle_is_accepted_without_a_policy(root: Path) -> None:
    found = inspect(root)
    assert found.accepted, reasons(found)
    assert found.targets
    assert not found.allowed


@pytest.mark.parametrize("name", ZOO)
def test_bundles_of_the_zoo_s_kind_are_accepted(name: str, tmp_path: Path) -> None:
    """With their data inside or beside them; the one with Python of its own needs the word `scripts`."""
    root = ZOO[name](tmp_path).path
    found = inspect(root)
    if name == "seg2d_own_scripts_yaml":
        assert "'scripts'" in reasons(found)
        found = inspect(root, Policy(allow=frozenset({"scripts"})))
        assert {word for word, _ in found.allowed} == {"scripts"}
    assert found.accepted, reasons(found)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", FRIENDLY)
def test_further_styles_of_the_zoo_are_accepted_with_the_words_that_they_need(
    name: str, tmp_path: Path
) -> None:
    words, train = FRIENDLY[name]
    root = write(tmp_path / "good", train)
    found = inspect(root, Policy(allow=frozenset(words)))
    assert found.accepted, reasons(found)
    assert inspect(root).accepted == (not words)


def test_the_bundle_that_the_documentation_writes_is_accepted(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
    (block,) = re.findall(r"```yaml\n# mybundle/configs/train.yaml\n(.*?)```", text, re.DOTALL)
    root = write(tmp_path / "mybundle", files={"configs/train.yaml": block})
    (root / "configs" / "train.json").unlink()
    found = inspect(root)
    assert found.accepted, reasons(found)


def test_a_link_out_of_the_bundle_is_refused_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "train.json").write_text('{"x": "$exec(1)"}')
    root = write(tmp_path / "bad")
    (root / "configs" / "evaluate.json").symlink_to(tmp_path / "secret" / "train.json")
    (root / "more").symlink_to(tmp_path / "secret")
    lines = reasons(inspect(root, EVERYTHING)).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["configs/evaluate.json", "more"]
    assert all("a link" in line for line in lines)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    root = write(tmp_path / "bad")
    os.mkfifo(root / "configs" / "evaluate.json")
    assert "neither a file nor a folder" in reasons(inspect(root, EVERYTHING))


def test_a_folder_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the folder of a MONAI bundle"):
        inspect(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no configuration" in reasons(inspect(tmp_path / "empty"))


def test_refusals_show_nothing_that_could_steer_a_terminal(tmp_path: Path) -> None:
    hostile = "\x1b]0;pwned\x07\u202e"
    root = write(
        tmp_path / "bad",
        {"x": {"_target_": hostile}, hostile: 1, "y": f"${hostile}"},
        {f"a{hostile}.md": "x"},
    )
    text = reasons(inspect(root))
    assert "pwned" in text
    assert text.replace("\n", "").isascii()
    assert text.replace("\n", "").isprintable()


def test_own_python_is_named_file_by_file(tmp_path: Path) -> None:
    files = {"scripts/__init__.py": "", "scripts/net.py": "class Net: ..."}
    root = write(
        tmp_path / "own", {"n": {"_target_": "scripts.net.Net"}, "m": "$scripts.net.Net"}, files
    )
    found = inspect(root)
    assert {r.id for r in found.refusals} == {"n#_target_", "m"}
    assert all("scripts" in str(refusal) for refusal in found.refusals)
    kinds = {file.path: file.kind for file in found.files}
    assert kinds["scripts/net.py"] == "Python of the bundle, never run"
    train = {
        "imports": [
            "$import glob",
            "$import os",
            "$import scripts.net",
            "$from scripts.net import Net",
        ]
    }
    used = {**train, "n": {"_target_": "scripts.net.Net"}, "m": "$Net()"}
    assert inspect(write(root, used), Policy(allow=frozenset({"scripts"}))).accepted


def test_files_that_no_run_opens_are_listed_and_pinned(tmp_path: Path) -> None:
    """Neither a word nor a kind is asked for: what is not read cannot run."""
    names = (
        "configs/logging.conf", "configs/train.ini", "configs/multi_gpu_train.json", "data/model.pt", "data/x.desktop",
        "docs/run.sh", "scripts/__init__.py", "scripts/model.ts",
    )  # fmt: skip
    root = write(tmp_path / "good", files={name: "$exec('1')" for name in names})
    found = inspect(root)
    assert found.accepted, reasons(found)
    assert {file.path for file in found.files} > set(names)
    (root / names[0]).write_text("another")
    pinned = Policy(files={file.path: file.sha256 for file in found.files})
    assert [r.file for r in inspect(root, pinned).refusals] == [names[0]]


def test_large_files_are_listed_and_never_fetched(tmp_path: Path) -> None:
    root = write(
        tmp_path / "good",
        files={"large_files.yml": "large_files:\n- url: https://example.org/model.pt\n"},
    )
    kinds = {file.path: file.kind for file in inspect(root).files}
    assert kinds["large_files.yml"] == "configuration, never read"


# The attacks are real: MONAI carries them out


def test_monai_calls_whatever_a_reader_names(tmp_path: Path) -> None:
    """Why `reader` may only name MONAI's readers: os.mkdir(path=...) is called."""
    canary = tmp_path / "canary"
    parser = ConfigParser(
        {"x": {"_target_": "LoadImage", "reader": "os.mkdir", "path": str(canary)}}
    )
    with pytest.warns(UserWarning, match="should inherit ImageReader"):
        parser.get_parsed_content("x")
    assert canary.is_dir()


def test_a_reader_may_be_a_class_of_monai_s_and_no_other() -> None:
    for reader in ("PILReader", "$monai.data.PILReader", ["NibabelReader", None], PILReader()):
        check_argument("reader", reader)
    for other in (
        "monai.data.Dataset",
        "own.PILReader",
        subprocess.Popen,
        5,
        True,
        [[1]],
        {"a": 1},
    ):
        with pytest.raises(Refused, match="only readers and writers of MONAI"):
            check_argument("reader", other)


def test_monai_puts_keys_into_expressions_with_relative_references(tmp_path: Path) -> None:
    """Why an expression is read where it is evaluated: `$@#b` becomes `$@` + the key above + `::b`, which is Python."""
    canary = tmp_path / "canary"
    key = f"z or torch.os.mkdir({str(canary)!r}) or @c"
    parser = ConfigParser({"z": 0, "c": {"b": 1}, key: {"b": 2, "x": "$@#b"}})
    assert parser.get_parsed_content(f"{key}::x") == 1
    assert canary.is_dir()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("@a + @b::c[0]", 3),
        ("[@a, @ab, @b::c]", [1, 5, [2]]),
        ("(@b#c)[@a:]", []),
        ('f"{@a}"', "1"),
        ("-@a", -1),
    ],
)
def test_references_are_replaced_as_monai_replaces_them(text: str, value: Any) -> None:
    """Accepted here, and by MONAI read as the same expression: it has the value that its references give."""
    ExpressionFilter(DEFAULT_NAMES).check(text, Uses())
    assert (
        ConfigParser({"a": 1, "ab": 5, "b": {"c": [2]}, "x": f"${text}"}).get_parsed_content("x")
        == value
    )


@pytest.mark.parametrize(
    "text", ["'@a'", '"""@a"""', "f'{{@a}}'", "'@f'", "l['@f']", "x@a", "@a@b", "1@a", "@a'b'"]
)
def test_references_where_monai_s_replacement_changes_the_text_are_refused(text: str) -> None:
    """MONAI replaces inside of texts too, quotes and all: `'@f'` becomes `'...[' f']'`."""
    with pytest.raises(Refused):
        ExpressionFilter({**DEFAULT_NAMES, "l": "math.pi"}).check(text, Uses())


# The lists


def test_a_short_name_is_what_monai_takes_it_for() -> None:
    """MONAI takes the first of several modules."""
    locator = ConfigParser({}).locator
    names = [name for name in components._components() if re.fullmatch(r"[A-Za-z]\w*", name)]
    assert len(names) > 1000
    for name in names:
        homes = locator.get_component_module_name(name)
        found = pydoc.locate(f"{homes if isinstance(homes, str) else homes[0]}.{name}")
        assert component(name) is found or name == "Affine", name


def test_networks_that_fetch_weights_unless_told_otherwise_have_to_be_told() -> None:
    fetching = []
    for name, found in components._components().items():
        if not found.__module__.startswith("monai.networks."):
            continue
        arguments = introspection.signature(found).parameters
        if "pretrained" in arguments and arguments["pretrained"].default is not False:
            fetching.append(name)
            with pytest.raises(Refused, match="pretrained: false"):
                check_arguments(found, {})
            check_arguments(found, {"pretrained": False})
    assert {"EfficientNetBN", "EfficientNetBNFeatures", "MILModel", "ResNetFeatures"} <= {*fetching}


@pytest.mark.parametrize(
    "target",
    [
        "ADN", "MedNeXtL", "ImageFilterd", "monai.networks.blocks.MLPBlock", "monai.networks.layers.GaussianFilter",
        "torch.nn.CTCLoss", "torch.optim.Rprop", "torchvision.models.vgg11", "ignite.metrics.SSIM",
        "monai.metrics.MetricsReloadedBinary",
    ],
)  # fmt: skip
def test_a_component_is_told_by_where_it_is_defined_and_not_by_a_list(target: str) -> None:
    if target.startswith("torchvision."):
        pytest.importorskip("torchvision")
    assert callable(component(target))


@pytest.mark.parametrize(
    "target",
    [
        "PerceptualLoss", "MLFlowHandler", "monai.networks.trt_compiler.TrtCompiler", "TciaDataset", "Transchex",
        "monai.bundle.ConfigParser", "monai.apps.nnunet.nnUNetV2Runner", "monai.apps.auto3dseg.AutoRunner",
        "monai.utils.module.load_submodules", "torch.utils.data.dataset.Generator", "torch.jit.ScriptModule",
    ],
)  # fmt: skip
def test_what_runs_programs_or_fetches_is_no_component(target: str) -> None:
    with pytest.raises(Refused, match="no component"):
        component(target)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ("Unet", "UNet"),
        ("Densenet121", "DenseNet121"),
        ("FlexUNet", "FlexibleUNet"),
        ("dice_ce", "DiceCELoss"),
    ],
)
def test_monai_s_other_names_of_a_component_are_listed_too(other: str, name: str) -> None:
    assert component(other) is component(name)


@pytest.mark.parametrize(
    "target",
    [
        "monai.transforms.LoadImaged", "monai.transforms.io.dictionary.LoadImaged", "torch.optim.AdamW",
        "torch.nn.modules.loss.NLLLoss", "torch.nn.CrossEntropyLoss", "torch.optim.lr_scheduler.StepLR",
        "ignite.metrics.Accuracy", "monai.handlers.MeanDice", "medfl.datasets.ReadPixelsd",
        "torch.utils.data.DataLoader",
    ],
)  # fmt: skip
def test_a_component_is_the_object_that_its_name_leads_to(target: str) -> None:
    assert component(target) is pydoc.locate(target)


LIBRARIES = ("monai", "torch", "ignite", "medfl")


@pytest.mark.filterwarnings("ignore")
def test_no_path_through_a_module_leaves_its_package() -> None:
    """Every module that a listed package's modules reach by an attribute, tried with every listed name."""
    paths = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES:
            reached = [key for key, value in vars(module).items() if isinstance(value, ModuleType)]
            paths |= {f"{name}.{key}" for key in reached}
    names = [
        "Lambda",
        "ResNet",
        "resnet18",
        "Dataset",
        "Compose",
        "Dice",
        "Generator",
        "Identity",
        "Subset",
    ]
    assert len(paths) > 2000
    for path in sorted(paths):
        for name in names:
            try:
                found: Any = component(f"{path}.{name}")
            except Refused:
                continue
            assert found.__module__.partition(".")[0] in LIBRARIES, (path, name)


def test_every_member_and_module_on_the_lists_exists() -> None:
    listed = sorted(expressions._MEMBERS | expressions._PERMISSIONS.keys() | expressions._MODULES)
    installed = [path for path in listed if importlib.util.find_spec(path.partition(".")[0])]
    assert len(installed) > 50
    gone = [path for path in installed if pydoc.locate(path) is None]
    assert gone == ["medfl.datasets.unlabelled"]  # named by exports of 0.7.0, never called


@pytest.mark.parametrize("old", sorted(components._REMOVED))
def test_what_a_removed_component_is_made_as_is_listed_and_takes_what_it_is_told(old: str) -> None:
    assert not hasattr(monai.transforms, old)
    assert not hasattr(monai.handlers, old)
    target = f"monai.transforms.{old}"
    if old.startswith("medfl."):
        target = f"{old}d"  # medfl's are for dictionaries

    new = dict(components.replace_removed({"_target_": target}))
    made = component(new.pop("_target_"))
    assert new.keys() <= introspection.signature(made).parameters.keys()


def test_a_removed_component_is_accepted_and_its_arguments_are_checked(tmp_path: Path) -> None:
    node = {
        "_target_": "SplitChanneld",
        "keys": "pred",
        "channel_dim": 1,
        "output_postfixes": ["a", "b"],
    }
    renewed = {"_target_": "SplitDimd", "keys": "pred", "dim": 1, "output_postfixes": ["a", "b"]}
    assert components.replace_removed(node) == renewed
    assert not inspect(write(tmp_path / "old", {"train": {"first": node}})).refusals
    fetching = {**node, "keys": "https://example.org/keys"}
    assert "a URL: nothing is fetched" in reasons(
        inspect(write(tmp_path / "bad", {"train": {"first": fetching}}))
    )


# The command


def test_inspect_shows_everything_and_exits_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path / "good")
    assert cli.main(["site", "inspect", str(root)]) == 0
    text = capsys.readouterr().out
    for part in (
        inspect(root).files[0].sha256[:16], "UNet 1", "glob.glob 1", "import os 1", "run#0: $@train#trainer.run()",
        "dataset_dir is /workspace/data/none", "What would leave", "ACCEPTED",
    ):  # fmt: skip
        assert part in text


def test_inspect_exits_with_2_and_names_file_and_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path / "bad", {"x": {"_target_": "os.system", "command": "id"}})
    assert cli.main(["site", "inspect", str(root)]) == 2
    told = capsys.readouterr()
    line = "configs/train.json: x#_target_: _target_ 'os.system', which is no component of MONAI"
    assert line in told.out
    assert told.err.startswith("error: bundle 'bad' is refused: " + line)
    assert told.err.count("\n") == 1


def test_inspect_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path / "bad", {"x": "$open('a', 'w')"})
    assert cli.main(["site", "inspect", str(root), "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["accepted"] is False
    assert [refusal["id"] for refusal in document["refused"]] == ["x"]
    assert document["targets"] == {"Dataset": 1, "UNet": 1}
    assert {file["path"] for file in document["files"]} == {
        "LICENSE",
        "configs/metadata.json",
        "configs/train.json",
    }


def test_what_differs_from_an_accepted_version_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write(
        tmp_path / "old" / "b", files={"scripts/net.py": "a = 1\nb = 2\n", "docs/x.md": "same\n"}
    )
    new = write(
        tmp_path / "new" / "b",
        files={"scripts/net.py": "a = 1\nb = '\x1b[2J'\n", "docs/x.md": "same\n"},
    )
    (new / "models").mkdir()
    (new / "models" / "model.pt").write_bytes(b"weights")
    assert cli.main(["site", "inspect", str(new), "--against", str(old), "--json"]) == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert changes == [
        "added: models/model.pt", "changed: scripts/net.py", "  @@ -1,2 +1,2 @@", "   a = 1", "  -b = 2",
        "  +b = '\\x1b[2J'",
    ]  # fmt: skip
    assert cli.main(["site", "inspect", str(new), "--against", str(new)]) == 0
    assert "--against\nnothing" in capsys.readouterr().out


def test_a_policy_is_written_for_what_is_accepted_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, policy = write(tmp_path / "b"), tmp_path / "policy.yaml"
    bad = write(tmp_path / "bad", {"x": "$exec('1')"})
    assert cli.main(["site", "inspect", str(bad), "--write-policy", str(policy)]) == 2
    assert not policy.exists()
    assert cli.main(["site", "inspect", str(root), "--write-policy", str(policy)]) == 0
    assert cli.main(["site", "inspect", str(root), "--policy", str(policy)]) == 0
    assert (
        cli.main(["site", "inspect", str(root), "--write-policy", str(policy)]) == 2
    )  # never overwritten
    assert cli.main(["site", "inspect", str(root), "--write-policy", str(root / "p.yaml")]) == 2
    assert (
        cli.main(["site", "inspect", str(root), "--write-policy", str(tmp_path / "no" / "p.yaml")])
        == 2
    )
    (root / "LICENSE").write_text("another\n")
    capsys.readouterr()
    assert cli.main(["site", "inspect", str(root), "--policy", str(policy)]) == 2
    said = capsys.readouterr().err
    assert "LICENSE: its sha256 is" in said
    assert f"medfl site inspect {root} --policy FILE --write-policy NEWFILE" in said
    assert "--trust" not in said


def test_a_policy_is_pinned_anew_with_its_words_and_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, policy, new = write(tmp_path / "b"), tmp_path / "policy.yaml", tmp_path / "new.yaml"
    words = tmp_path / "words.yaml"
    words.write_text(
        "allow: [scripts]\nlimits: {depth: 30}\nmethods: [fedavg]\nsettings: {rounds: 7}\n"
    )
    given = ["site", "inspect", str(root), "--policy"]
    assert cli.main([*given, str(words), "--write-policy", str(policy)]) == 0
    (root / "LICENSE").write_text("another\n")
    capsys.readouterr()
    assert cli.main([*given, str(policy), "--write-policy", str(new)]) == 0
    said = capsys.readouterr().out
    assert "What is not as --policy pinned it\n  LICENSE: its sha256 is" in said
    assert "ACCEPTED" in said
    assert cli.main([*given, str(new)]) == 0
    before, after = Policy.read(policy), Policy.read(new)
    assert before.files is not None
    assert after.files is not None
    assert {name for name in after.files if after.files[name] != before.files[name]} == {"LICENSE"}
    assert replace(after, files=None) == replace(before, files=None)
    (root / "configs" / "train.json").write_text('{"x": "$exec(1)"}')
    assert cli.main([*given, str(new), "--write-policy", str(tmp_path / "third.yaml")]) == 2
    assert "--trust" in capsys.readouterr().err
    assert not (tmp_path / "third.yaml").exists()


def test_a_policy_that_is_written_agrees_to_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, job, policy = (
        write(tmp_path / "b"),
        tmp_path / "job" / "app" / "config",
        tmp_path / "policy.yaml",
    )
    job.mkdir(parents=True)
    given = [
        "site",
        "inspect",
        str(root),
        "--write-policy",
        str(policy),
        "--job",
        str(tmp_path / "job"),
    ]
    assert cli.main(given) == 2
    assert "the folder of a job with its run.json" in capsys.readouterr().err
    (job / "run.json").write_text(
        json.dumps(run_record(method="ditto", rounds=7, batch_size=4).to_dict())
    )
    assert cli.main(given) == 0
    written = Policy.read(policy)
    assert written.methods == ("ditto",)
    assert written.settings == {"rounds": 7, "batch_size": 4, "local_epochs": 1}
    assert written.files is not None
    capsys.readouterr()
    assert cli.main(["site", "inspect", str(root), "--policy", str(policy)]) == 0
    said = (
        "Jobs that would be taken policy: train; methods ditto; at most 7 rounds; "
        "at most 4 batch_size; at most 1 local_epochs"
    )
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_policy_for_a_folder_without_a_name_is_not_written(tmp_path: Path) -> None:
    root, policy = write(tmp_path / "a b"), tmp_path / "policy.yaml"
    assert cli.main(["site", "inspect", str(root), "--write-policy", str(policy)]) == 2
    assert not policy.exists()


@pytest.mark.parametrize(
    "name", ["configs/evaluate.json", "scripts/net.py", "embeddings/a.safetensors"]
)
def test_a_folder_with_the_name_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    root = write(tmp_path / "bad")
    (root / name).mkdir(parents=True)
    assert f"{name}: a folder with the name" in "\n".join(
        map(str, inspect(root, EVERYTHING).refusals)
    )


def test_a_file_of_holes_is_not_read(tmp_path: Path) -> None:
    root = write(tmp_path / "bad", files={"models/model.pt": b"", "models/small.pt": b""})
    os.truncate(root / "models" / "model.pt", 1 << 43)
    os.truncate(root / "models" / "small.pt", 1 << 20)
    (refusal,) = inspect(root, EVERYTHING).refusals
    assert "that are not there" in refusal.why


def numbered(name: str, value: object, count: int = 9_000) -> dict[str, Any]:
    return {f"{name}{number}": value for number in range(count)}


@pytest.mark.parametrize(
    "train",
    [
        numbered("a", "%b"),
        {"big": numbered("k", 1), **numbered("r", "@big")},
        {"big": "x" * 500_000, **numbered("r", "@big")},
        {"said": ["$1"] * 9_000},
        {"#".join("a" * 100_000): numbered("k", 1)},
        {"n": {"_target_": "a." * 200_000 + "b"}},
        numbered("n", {"_target_": "b", "x": "@big"}, 4_000) | {"big": numbered("k", "y", 2_000)},
    ],
    ids=["macros", "references", "text", "statements", "parts", "target", "refusals"],
)
def test_an_inspection_ends_soon_whatever_the_bundle_says(
    train: dict[str, Any], tmp_path: Path
) -> None:
    root = write(tmp_path / "long", train)
    begun = time.perf_counter()
    assert len(inspect(root).refusals) < 1_010
    assert time.perf_counter() - begun < 8


def test_one_text_under_many_aliases_is_refused(tmp_path: Path) -> None:
    text = f"a: &a '{'x' * 400_000}'\n" + "".join(f"b{number}: *a\n" for number in range(1_000))
    assert "too much text" in reasons(
        inspect(write(tmp_path / "long", files={"configs/evaluate.yaml": text}))
    )


def test_folders_within_each_other_without_end_are_walked(tmp_path: Path) -> None:
    root = write(tmp_path / "deep")
    with deep_folder(root):
        assert inspect(root).accepted


@pytest.mark.parametrize(
    ("place", "hostile", "refused"),
    [
        ("medfl/train.json", "configs/train.json", False),  # medfl reads the other
        ("medfl/train.json", "configs/medfl/train.json", True),
        ("medfl/train.txt", "configs/train.json", True),  # no configuration takes its place
        ("other/train.json", "configs/train.json", True),
        ("medfl/metadata.json", "configs/metadata.json", True),  # these have no second form
        ("medfl/federated.json", "configs/federated.json", True),
    ],
)
def test_what_is_inspected_is_what_is_read(
    place: str, hostile: str, refused: bool, tmp_path: Path
) -> None:
    """Of a configuration in configs/ and in configs/medfl/ the latter alone is read."""
    root = write(tmp_path / "bundle")
    second = root / "configs" / place
    second.parent.mkdir()
    first = root / "configs" / second.name
    source = first if first.is_file() else root / "configs" / "train.json"
    second.write_text(source.read_text())
    line = {"seed": "$__import__('os').system('true')"}
    (root / hostile).write_text(json.dumps({**json.loads(source.read_text()), **line}))
    found = inspect(root)
    assert bool(found.refusals) is refused
    assert config_file(root, "train") == (
        second if place == "medfl/train.json" else root / "configs/train.json"
    )


def test_what_exports_of_0_7_0_name_is_read_still(tmp_path: Path) -> None:
    root = write(tmp_path / "bundle")
    writer = {"_target_": "medfl.datasets.WriteClassesd", "keys": "pred", "classes": ["a", "b"]}
    data = "$medfl.datasets.unlabelled('data', False, 3)"
    content = {"imports": ["$import medfl.datasets", "$import medfl"], "data": data}
    (root / "configs/inference.json").write_text(json.dumps({**content, "postprocessing": writer}))
    assert inspect(root).accepted
