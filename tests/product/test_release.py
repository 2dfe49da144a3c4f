"""What a stranger gets: the distribution's name, what is in the packages, and medfl used where only they are."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest

import medfl
from medfl.core import release
from medfl.core.untrusted import Refused
from medfl.partner import preflight
from medfl.policy import components
from tests.support.packaged import packaged_files
from tests.support.programs import ROOT

OLD = re.compile(r"pip3? install[^\n`]*?[ '\"]medfl(?![-/\w])|['\"`]medfl\\?\[[a-z]")
"""An installation of the distribution `medfl`, which is another project's."""
TEXTS = {".py", ".md", ".cfg", ".toml", ".yaml", ".yml", ".txt", ".j2", ".ipynb", ".cff", ".sh", ""}


def tracked_texts() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.splitlines() if (path := ROOT / name).suffix in TEXTS and path.is_file()]


@pytest.mark.parametrize(
    "line",
    ["pip install medfl", 'pip install "medfl[flare]"', "python -m pip install -q medfl==1", "or `'medfl[wandb]'`"],
)
def test_the_old_spelling_is_known(line: str) -> None:
    assert OLD.search(line)


def test_nothing_installs_the_other_project() -> None:
    """`medfl` on the registry is MEDfl."""
    assert not OLD.search("pip install 'medfl-monai[flare]'")
    assert not OLD.search("medfl/bin/pip install -e .")
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in tracked_texts()
        if path != Path(__file__)
        for match in OLD.finditer(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert not found


def test_name_and_version_stand_once() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    assert parser["metadata"]["name"] == release.DISTRIBUTION
    assert parser["metadata"]["version"] == "attr: medfl.core.release.VERSION"
    assert medfl.__version__ == release.VERSION
    assert release.pip_install("flare", "privacy") == f"pip install '{release.DISTRIBUTION}[flare,privacy]'"
    assert release.pip_install() == f"pip install '{release.DISTRIBUTION}'"


def test_the_version_of_the_other_project_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "99")
    assert release.version_of("medfl") == release.version_of(release.DISTRIBUTION) == release.VERSION
    assert release.version_of("torch") == "99"
    assert preflight.versions()["medfl"] == release.VERSION


def test_all_files_that_the_code_reads_are_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = packaged_files(monkeypatch)
    here = {
        path.relative_to(ROOT)
        for path in (ROOT / "medfl").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert here - packaged == set()
    assert len([path for path in packaged if path.parts[1] == "compare"]) > 20


def test_torchvision_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no requirement, but the list of what bundles may name has its networks: no run began without it."""
    found = components.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torchvision" else found(name))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(components, "_listed", components._listed.__wrapped__)
    assert components.component("monai.networks.nets.UNet").__name__ == "UNet"
    with pytest.raises(Refused, match="'torchvision.models.resnet18' of torchvision, which is not installed"):
        components.component("torchvision.models.resnet18")
    with pytest.raises(Refused, match="not on the list"):
        components.component("os.system")


# The packages


def without_checkout(folder: Path) -> Path:
    """Return `medfl` of an environment with the wheel and, by a path file, this one's packages but not the checkout."""
    source = folder / "source"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        if (
            name.startswith(("medfl/", "bundles/", "setup", "pyproject", "README", "LICENSE"))
            and (ROOT / name).exists()
        ):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    build = [*pip, "wheel", *offline, "--no-build-isolation", "-w", "wheels", "./source"]
    subprocess.run(build, cwd=folder, check=True, capture_output=True)
    (wheel,) = (folder / "wheels").glob(f"{release.DISTRIBUTION.replace('-', '_')}-{release.VERSION}-*.whl")
    venv.create(folder / "env", symlinks=True)
    (site_packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    into = [*pip, "--python", str(folder / "env" / "bin" / "python"), "install", *offline, str(wheel)]
    subprocess.run(into, check=True, capture_output=True)
    (site_packages / "rest.pth").write_text(sysconfig.get_path("purelib"))  # path files in there are not read
    return folder / "env" / "bin" / "medfl"


@pytest.mark.slow
def test_the_wheel_works_away_from_the_checkout(tmp_path: Path) -> None:
    """The demo's command for a round, the listing, an export and its inspection, with files of the wheel only."""
    program = without_checkout(tmp_path)
    unset = ("PYTHONPATH", "MEDFL_DATA")
    environment = {name: text for name, text in os.environ.items() if name not in unset}

    def say(*words: str) -> str:
        done = subprocess.run([program, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert say("--version") == f"medfl {release.VERSION}\n"
    assert "ham10000" in say("bundles")
    demo = ("run", "ham10000", "--data", "phantom", "--method", "fedbm", "--preset", "demo")
    say(*demo, "--rounds", "1", "--out", "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert Path(record["bundle_path"]).is_relative_to((tmp_path / "env").resolve())
    say("export", "run", "--out", "bundle", "--formats", "none")
    assert "ACCEPTED" in say("site", "inspect", "bundle")
