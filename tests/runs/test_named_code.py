"""A file of a run folder names what ships; a module of one's own is imported if the user names it too."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import medfl
from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.cli.verbs import main
from medfl.core import names
from medfl.core.errors import InputError
from medfl.runs.networks_of_run import RunNetworks
from medfl.runs.teachers.trained import open_run
from tests.runs.test_predict import trained

OWN = """
import pathlib
pathlib.Path({ran!r}).write_text("x")
from medfl.methods.fedavg import METHOD as FedAvg
METHOD = FedAvg
from medfl.runtimes.simulator import RUNTIME
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plain")
    return trained(
        place / "run",
        "mednist",
        datasets.write_phantom("mednist", place / "data", per_class=10, size=24),
    )


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that is there once `theirs.payload` was imported, from the folder where the user is."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "payload.py").write_text(OWN.format(ran=str(tmp_path / "ran")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield tmp_path / "ran"
    forget()


def forget() -> None:
    """Let this process be one in which nobody has named a module."""
    for name in ("theirs", "theirs.payload"):
        sys.modules.pop(name, None)
    names._trusted.set(frozenset())
    medfl.methods.method_class.cache_clear()


@pytest.fixture
def given(plain: Path, ran: Path, tmp_path: Path) -> Path:
    """A run folder whose record names a module."""
    folder = Path(shutil.copytree(plain, tmp_path / "given"))
    rewrite(folder / "run.json", method="theirs.payload")
    return folder


def rewrite(file: Path, **entries: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main([*map(str, arguments)])
    return code, capsys.readouterr().err


OPENERS: dict[str, Callable[[Path], object]] = {
    "Result": medfl.Result,
    "RunNetworks": RunNetworks,
    "repeat": lambda folder: medfl.federate(source=folder, out=folder.parent / "out"),
    "resume": lambda folder: medfl.federate(resume=True, out=folder, requested={"rounds": 2}),
    "teacher": lambda folder: open_run("t", str(folder), Bundle("mednist"), torch.device("cpu")),
}
VERBS = {
    "run --from": ("run", "--from", "given/run.json", "--out", "out"),
    "run --resume": ("run", "--resume", "--out", "given", "--rounds", "2"),
    "predict": ("predict", "given", "in", "--out", "out"),
    "export": ("export", "given", "--out", "out"),
    "calibrate": ("calibrate", "given"),
    "subgroups": ("subgroups", "given", "--by", "sex"),
    "flare export": ("flare", "export", "--from", "given", "--out", "out"),
}


@pytest.mark.parametrize("name", [*OPENERS])
def test_what_opens_a_run_folder_imports_no_module_that_its_record_names(
    name: str, given: Path, ran: Path
) -> None:
    with pytest.raises(InputError, match="names the method 'theirs.payload', which is code"):
        OPENERS[name](given)
    assert not ran.exists()


@pytest.mark.parametrize("name", [*VERBS])
def test_no_verb_imports_it(
    name: str, given: Path, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (given.parent / "in").mkdir()
    Image.fromarray(np.zeros((24, 24), np.uint8)).save(given.parent / "in" / "a.png")
    code, text = said(capsys, *VERBS[name])
    assert code == 2, text
    assert not ran.exists()


def test_a_report_reads_it_without_the_module(
    given: Path, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "report", given)[0] == 0
    assert not ran.exists()


@pytest.mark.parametrize("runtime", ["theirs.payload:RUNTIME", "theirs.payload"])
def test_a_recorded_runtime_is_imported_no_more_than_a_method(
    runtime: str, plain: Path, ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(plain, tmp_path / "given"))
    rewrite(folder / "run.json", runtime=runtime)
    code, text = said(capsys, "run", "--resume", "--out", folder, "--rounds", "2")
    assert (code, text.count("\n")) == (2, 1)
    assert "names the runtime 'theirs.payload" in text
    assert not ran.exists()
    assert (
        said(capsys, "run", "--resume", "--out", folder, "--rounds", "2", "--runtime", runtime)[0]
        == 0
    )
    assert ran.exists()


@pytest.mark.parametrize(
    "entry",
    [
        {"requested": {"method": "theirs.payload"}},
        {"settings": {"runtime": "theirs.payload:RUNTIME"}},
    ],
)
def test_nor_does_the_record_of_a_cross_validation(
    entry: dict[str, object], ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {
        "folds": 2,
        "bundle": "mednist",
        "options": {},
        "config": {},
        "requested": {},
        "settings": {},
    }
    (tmp_path / "folds").mkdir()
    (tmp_path / "folds" / "folds.json").write_text(
        json.dumps({**record, "command": "medfl", "images": ["a", "b"], **entry})
    )
    code, text = said(capsys, "run", "--resume", "--out", tmp_path / "folds")
    assert (code, text.count("\n")) == (2, 1)
    assert "which is code" in text
    assert not ran.exists()


def test_whoever_names_it_or_trusts_may_open_it(
    plain: Path, ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    data = plain.parent / "data"
    config = (
        "--config",
        "network=two_conv",
        "--config",
        "image_size=16",
        "--sites",
        "2",
        "--jobs",
        "1",
        "--quiet",
    )
    run = (
        "run",
        "mednist",
        "--data",
        data,
        "--rounds",
        "1",
        "--method",
        "theirs.payload",
        "--out",
        own,
    )
    assert said(capsys, *run, *config)[0] == 0

    forget()
    assert said(capsys, "export", own, "--out", tmp_path / "exported")[0] == 2
    resumed = ("run", "--resume", "--out", own, "--rounds", "2", "--jobs", "1", "--quiet")
    assert said(capsys, *resumed)[0] == 2
    assert said(capsys, *resumed, "--method", "theirs.payload")[0] == 0
    forget()
    assert (
        said(
            capsys,
            "run",
            "--from",
            own,
            "--out",
            tmp_path / "again",
            "--trust",
            "--jobs",
            "1",
            "--quiet",
        )[0]
        == 0
    )
