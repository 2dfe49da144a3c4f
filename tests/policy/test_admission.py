"""Every bundle that is opened passes the gate, whoever names it, unless the user trusts it for this command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from medfl.bundle.bundle import Bundle
from medfl.cli import main
from medfl.core.errors import InputError
from medfl.policy import admission
from medfl.policy.inspection import Inspection, inspect
from medfl.policy.policy import Policy
from tests.zoo.build import ZOO


@pytest.fixture
def marked(tmp_path: Path) -> tuple[Path, Path]:
    """A bundle that trains, with an expression that leaves a mark where it is evaluated; and the mark."""
    return hostile(built(tmp_path), tmp_path), tmp_path / "mark"


def built(place: Path) -> Path:
    """A bundle that trains, in a folder "zoo" with its data beside it."""
    return ZOO["cls2d_glob_yaml"](place / "zoo").path


def hostile(root: Path, place: Path) -> Path:
    (file,) = (root / "configs").glob("train.*")
    content = yaml.safe_load(file.read_text())
    marks = f"__import__('pathlib').Path('{place / 'mark'}').touch()"
    content["learning_rate"] = f"${marks} or {content['learning_rate']}"
    file.write_text(json.dumps(content) if file.suffix == ".json" else yaml.safe_dump(content))
    return root


def command(*arguments: str | Path) -> int:
    return main(
        ["run", *map(str, arguments), "--sites", "2", "--rounds", "1", "--jobs", "1", "--quiet"]
    )


def data(root: Path) -> tuple[str, str]:
    return "--data", str(root.parent / "MiniNIST")


def test_a_refused_bundle_runs_only_when_it_is_trusted(
    marked: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, mark = marked
    assert command(root, *data(root), "--out", tmp_path / "a") == 2
    said = capsys.readouterr().err
    assert "two underscores" in said
    assert "--trust" in said
    assert not (tmp_path / "a").exists()
    assert not mark.exists()
    assert command(root, *data(root), "--out", tmp_path / "b", "--trust") == 0
    lines = capsys.readouterr().err.splitlines()
    assert mark.exists()
    assert [
        line for line in lines if "runs code with your rights" in line and "learning_rate" in line
    ] == [line for line in lines if line.startswith("--trust")]
    assert len([line for line in lines if line.startswith("--trust")]) == 1
    assert not admission.in_force().trusted
    with pytest.raises(InputError, match="--trust"):
        Bundle(str(root))


def test_a_line_that_a_command_does_not_read_does_not_refuse_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = built(tmp_path)
    (root / "configs" / "inference.json").write_text(json.dumps({"inferer": "$__import__('os')"}))
    assert command(root, *data(root), "--out", tmp_path / "a") == 0
    capsys.readouterr()
    (root / "models").mkdir()
    (root / "models" / "model.pt").touch()
    assert main(["predict", str(root), str(tmp_path), "--out", str(tmp_path / "p")]) == 2
    assert "configs/inference.json: inferer: a name with two underscores" in capsys.readouterr().err
    assert main(["site", "inspect", str(root)]) == 2  # which reads them all
    assert "what medfl predict and teachers read, and medfl run does not" in capsys.readouterr().err
    with admission.trusting(True):
        Bundle(str(root))
    assert "--trust" not in capsys.readouterr().err
    (root / "configs" / "evaluate.json").write_text(json.dumps({"x": "$__import__('os')"}))
    assert command(root, *data(root), "--out", tmp_path / "b") == 2
    assert inspect(root, Policy(files={"configs/inference.json": "0" * 64})).refused(()) != []


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_configuration_that_is_swapped_after_its_inspection_is_not_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pinned: bool
) -> None:
    """It was inspected, or compared with its pin, and then read again by its path."""
    root = built(tmp_path)
    policy = inspect(root).policy(Policy()) if is_pinned else Policy()

    def swapping(folder: Path, policy: Policy) -> Inspection:
        found = inspect(folder, policy)
        hostile(root, tmp_path)
        return found

    monkeypatch.setattr(admission, "inspect", swapping)
    with pytest.raises(
        InputError, match=r"train\.\w+ cannot be read \(it changed after its inspect"
    ):
        Bundle(str(root), policy=policy)
    assert not (tmp_path / "mark").exists()

    monkeypatch.setattr(admission, "inspect", inspect)
    with pytest.raises(InputError, match="two underscores"):
        Bundle(str(root))


def test_what_is_trusted_behind_the_walls_has_not_the_users_rights(
    marked: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEDFL_PRIVATE_CACHE", str(marked[1].parent))
    with admission.trusting(True):
        admission.admit(marked[0], admission.in_force(), ["train"])

    said = capsys.readouterr().err
    assert " runs code behind the walls; inspection refuses " in said
    assert "your rights" not in said


def test_python_that_does_not_run_is_not_said_to(tmp_path: Path) -> None:
    root = built(tmp_path)
    (root / "scripts").mkdir()
    (root / "scripts" / "net.py").write_text("x = 1\n")
    said = "its own Python (scripts) is run"
    folder = {"dataset_dir": str(root.parent / "MiniNIST")}
    assert said not in str(Bundle(str(root), folder).notes)
    assert said in str(Bundle(str(root), folder, policy=Policy(allow=frozenset({"scripts"}))).notes)


def test_trust_says_nothing_of_a_bundle_that_needs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = built(tmp_path)
    assert command(root, *data(root), "--out", tmp_path / "a", "--trust") == 0
    assert "--trust" not in capsys.readouterr().err


def test_no_policy_file_can_trust(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("trusted: true\n")
    with pytest.raises(InputError, match="trusted"):
        Policy.read(tmp_path / "policy.yaml")


@pytest.mark.parametrize("option", ["public", "teachers"])
@pytest.mark.parametrize(
    "value", ["data/inner", "run:inner", "bundle:inner", "mednist:inner", "../inner", "."]
)
def test_a_bundle_names_no_other_by_a_path(option: str, value: str, tmp_path: Path) -> None:
    """Version 0.6.0 opened it unread, and ran what it said."""
    root = built(tmp_path)
    methods = {"methods": {"fedmd": {option: value}}}
    for settings in (methods, {"presets": {"p": methods}}):
        (root / "configs" / "federated.yaml").write_text(yaml.safe_dump(settings))
        assert [found.why for found in inspect(root).refusals if "by their names only" in found.why]
    (root / "configs" / "federated.yaml").write_text(
        yaml.safe_dump({"methods": {"fedmd": {option: "mednist"}}})
    )
    assert inspect(root).accepted


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("fedmd", "public={}"),
        ("fedhelp", "public={}"),
        ("fedhelp", "public=mednist;teachers=bundle:{}"),
    ],
)
def test_a_bundle_that_a_method_s_option_names_is_inspected(
    method: str,
    option: str,
    marked: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, mark = marked
    (root / "configs" / "inference.json").write_text(
        json.dumps({"x": "$__import__('os').getcwd()"})
    )
    (root / "models").mkdir()
    (root / "models" / "model.pt").touch()
    option += ";large=site-1" * (method == "fedhelp")
    options = [part for each in option.format(root).split(";") for part in ("--set", each)]
    assert (
        command(
            "mednist",
            "--data",
            "phantom",
            "--partition",
            "iid",
            "--method",
            method,
            *options,
            "--out",
            tmp_path / "a",
        )
        == 2
    )
    assert f"bundle {root.name!r} is refused" in capsys.readouterr().err
    assert not mark.exists()


def test_a_teacher_s_torchscript_needs_trust(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = built(tmp_path)
    (root / "configs" / "inference.json").write_text("{}")
    (root / "models").mkdir(exist_ok=True)
    (root / "models" / "model.ts").touch()
    options: tuple[Any, ...] = (
        "--set",
        "large=site-1",
        "--set",
        "public=mednist",
        "--set",
        f"teachers=bundle:{root}",
    )
    assert (
        command(
            "mednist",
            "--data",
            "phantom",
            "--partition",
            "iid",
            "--method",
            "fedhelp",
            *options,
            "--out",
            tmp_path / "a",
        )
        == 2
    )
    assert "TorchScript" in capsys.readouterr().err
