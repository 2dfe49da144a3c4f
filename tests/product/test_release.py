"""What a stranger gets: the distribution's name, what is in the packages, and medfl used where only they are."""

from __future__ import annotations

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
import yaml

import medfl
from medfl.core import release
from medfl.core.untrusted import Refused
from medfl.partner import preflight
from medfl.policy import components
from tests.support.packaged import distribution, packaged_files
from tests.support.programs import LEAN, ROOT

OLD = re.compile(r"pip3? install[^\n`]*?[ '\"]medfl(?![-/\w])|['\"`]medfl\\?\[[a-z]")
"""An installation of the distribution `medfl`, which is another project's."""
TEXTS = {
    ".py",
    ".md",
    ".json",
    ".cfg",
    ".toml",
    ".yaml",
    ".yml",
    ".txt",
    ".j2",
    ".ipynb",
    ".cff",
    ".sh",
    "",
}


def tracked_texts() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [
        path
        for name in listed.splitlines()
        if (path := ROOT / name).suffix in TEXTS and path.is_file()
    ]


@pytest.mark.parametrize(
    "line",
    [
        "pip install medfl",
        'pip install "medfl[flare]"',
        "python -m pip install -q medfl==1",
        "or `'medfl[mlflow]'`",
    ],
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


def test_name_and_version_stand_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ROOT / "pyproject.toml").read_text().count(release.VERSION) == 0
    described = distribution(monkeypatch).metadata
    assert (described.name, described.version) == (release.DISTRIBUTION, release.VERSION)
    assert medfl.__version__ == release.VERSION
    assert (
        release.pip_install("flare", "privacy")
        == f"pip install '{release.DISTRIBUTION}[flare,privacy]'"
    )
    assert release.pip_install() == f"pip install '{release.DISTRIBUTION}'"


def test_the_package_is_described_in_one_file() -> None:
    """`setup.cfg` is kept for the layout; setuptools would read a second description from it."""
    lines = (ROOT / "setup.cfg").read_text().splitlines()
    assert lines
    assert all(line.startswith("#") for line in lines)


def test_the_version_of_the_other_project_is_not_taken_for_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "99")
    assert (
        release.version_of("medfl") == release.version_of(release.DISTRIBUTION) == release.VERSION
    )
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
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "torchvision" else found(name)
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(components, "_components", components._components.__wrapped__)
    assert components.component("monai.networks.nets.UNet").__name__ == "UNet"
    with pytest.raises(
        Refused, match="'torchvision.models.resnet18' of torchvision, which is not installed"
    ):
        components.component("torchvision.models.resnet18")
    with pytest.raises(Refused, match="no component"):
        components.component("os.system")


# The project's papers


def test_workflows_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"dist", "sbom", "lock", "compat", "gpu-kit"} <= targets
    called = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        steps = [
            step
            for job in yaml.safe_load(path.read_text())["jobs"].values()
            for step in job["steps"]
        ]
        for command in [step["run"] for step in steps if "run" in step]:
            program, *words = command.split()
            assert program == "make", command
            called |= {word for word in words if "=" not in word}
    assert called == {
        "test",
        "test-slow",
        "test-wheel",
        "lint",
        "lint-files",
        "dist",
        "sbom",
        "compat",
        "site",
    }
    assert called <= targets


def test_the_workflow_of_the_night_runs_what_each_push_leaves_out() -> None:
    (marks,) = re.findall(r"addopts = .*-m '(.*)'", (ROOT / "pyproject.toml").read_text())
    assert marks == "not slow and not gpu and not flare"
    assert (
        '-m "(flare or slow) and not gpu"'
        in (ROOT / "Makefile").read_text().partition("\ntest-slow:")[2]
    )
    night = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    assert "schedule" in night[True]  # YAML 1.1 reads the key `on` so


def test_the_hooks_have_the_linters_versions_of_their_own() -> None:
    """They run in a checkout without an environment."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    for hook in (hook for source in config["repos"] for hook in source["hooks"]):
        assert hook["language"] in ("python", "pygrep"), hook["id"]
        assert all("==" in package for package in hook.get("additional_dependencies", [])), hook[
            "id"
        ]
        assert ".venv" not in hook["entry"], hook["id"]


@pytest.mark.parametrize(
    ("message", "refusing"),
    [
        ("Short subject\n\nWhy it is so.\n", []),
        ("x" * 72 + "\n\nWhy.\n", []),
        ("x" * 73 + "\n\nWhy.\n", ["subject"]),
        ("Short subject\n", ["body"]),
        ("Short subject\n\n# Please enter the message\n#\n", ["body"]),
        ("Merge branch 'a'\n", []),
    ],
)
def test_a_commit_needs_a_short_subject_and_a_body(message: str, refusing: list[str]) -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [
        hook
        for source in config["repos"]
        for hook in source["hooks"]
        if hook.get("stages") == ["commit-msg"]
    ]
    assert [
        hook["id"] for hook in hooks if re.search(hook["entry"], message, re.MULTILINE | re.DOTALL)
    ] == refusing


def test_citation_and_changelog_are_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", release.VERSION)
    versions = re.findall(
        r"^## (\S+)(?: \((\d{4}-\d\d-\d\d)\))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    released = [version for version in versions if version != ("Unreleased", "")]
    assert [name for name, _ in released] == [
        f"0.{minor}.0" for minor in range(len(released), 0, -1)
    ]
    assert (release.VERSION, str(citation["date-released"])) == released[0]


def test_what_the_docs_name_is_there() -> None:
    """Links of files that no page of the site has: GitHub's, and the changelog's."""
    pages = [*ROOT.glob(".github/*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for page in pages:
        for link in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), (page, link)


def test_locks_are_exact_and_name_no_host() -> None:
    docker = ROOT / "docker"
    lines = (docker / "requirements-cpu.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith((" ", "#"))]
    assert len(pinned) > 80
    assert all(re.match(r"[a-z0-9._-]+==\S+", line) and line.endswith("\\") for line in pinned)
    text = "\n".join([*lines, (docker / "torch.txt").read_text()])
    assert not re.search(r"://|--(extra-)?index-url|nvidia-", text)
    assert {"nvflare", "monai", "dp-accounting", "tenseal"} <= {
        line.partition("==")[0] for line in pinned
    }


def test_a_container_runs_without_rights() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    assert len(services) == 3
    for one in services.values():
        assert one["read_only"]
        assert one["cap_drop"] == ["ALL"]
        assert one["command"][:2] == ["site", "serve"]
    last = (ROOT / "docker" / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert re.search(r"^USER 10001", last, re.MULTILINE)
    assert "HEALTHCHECK" in last


def test_keys_and_images_beside_the_compose_file_stay_there() -> None:
    """Neither git nor the build's context takes what is mounted; the context has what the Dockerfile copies."""
    docker = ROOT / "docker"
    services = yaml.safe_load((docker / "compose.yaml").read_text())["services"].values()
    mounted = {
        one.partition(":")[0]
        for service in services
        for one in service["volumes"]
        if one.startswith("./")
    }
    assert "./kits/server" in mounted
    for place in mounted:
        name = f"docker/{place.removeprefix('./')}/key.pem"
        assert subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT).returncode == 0, place
    ignored, *kept = (docker / "Dockerfile.dockerignore").read_text().split()
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (docker / "Dockerfile").read_text(), re.MULTILINE)
    assert ignored == "*"
    assert {line.removeprefix("!") for line in kept} == {
        name for names in copied for name in names.split()
    }


def test_the_health_of_a_container_is_that_flare_runs(tmp_path: Path) -> None:
    """`docker/healthy.sh` finds FLARE's process by its module, and not itself."""
    script = (ROOT / "docker" / "healthy.sh").read_text().replace("/proc", str(tmp_path))
    (tmp_path / "17").mkdir()
    command = tmp_path / "17" / "cmdline"
    command.write_bytes(b"grep\0-qs\0[n]vflare\\.private\0")
    assert subprocess.run(["sh", "-c", script]).returncode == 1
    command.write_bytes(b"python3\0-u\0-m\0nvflare.private.fed.app.client.client_train\0-m\0/kit\0")
    assert subprocess.run(["sh", "-c", script]).returncode == 0


def test_the_hooks_are_installed_by_the_environment_that_has_them() -> None:
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    assert not re.search(r"(?<!/)pre-commit install", text)
    makefile = (ROOT / "Makefile").read_text()
    assert "\n\t$(TOOLS)/bin/pre-commit install\n" in makefile
    assert re.search(r"\$\(call PIP,\$\(TOOLS\)\).*\bpre-commit\b", makefile)


def test_a_distribution_is_of_this_version_only_and_without_tests() -> None:
    assert "rm -rf build/source dist\n" in (ROOT / "Makefile").read_text()
    assert "prune tests" in (ROOT / "MANIFEST.in").read_text().splitlines()


def test_each_step_of_a_strangers_walk_is_named() -> None:
    page = (ROOT / "docs" / "project.md").read_text()
    for step in (
        "CITATION.cff",
        "git clone",
        "git switch -c",
        "make test",
        "Pull request",
        "SECURITY.md",
        "privately",
    ):
        assert step in page
    assert "project.md" in (ROOT / "docs" / "site" / "mkdocs.yml").read_text()
    for name in ("README.md", "docs/deploy.md", "docs/compatibility.md"):
        text = " ".join((ROOT / name).read_text().split())
        assert re.search(r"Until it is published.{0,160}\[flare", text), name
    assert f"medfl_monai-{release.VERSION}-py3-none-any.whl" in page


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
    (wheel,) = (folder / "wheels").glob(
        f"{release.DISTRIBUTION.replace('-', '_')}-{release.VERSION}-*.whl"
    )
    venv.create(folder / "env", symlinks=True)
    (site_packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    into = [
        *pip,
        "--python",
        str(folder / "env" / "bin" / "python"),
        "install",
        *offline,
        str(wheel),
    ]
    alone = {
        name: text for name, text in os.environ.items() if name != "PYTHONPATH"
    }  # a checkout may look installed
    subprocess.run(into, cwd=folder, env=alone, check=True, capture_output=True)
    (site_packages / "rest.pth").write_text(
        sysconfig.get_path("purelib")
    )  # path files in there are not read
    return folder / "env" / "bin" / "medfl"


@pytest.mark.slow
def test_the_wheel_works_away_from_the_checkout(tmp_path: Path) -> None:
    """The demo's command for a round, the listing, an export and its inspection, with files of the wheel only."""
    program = without_checkout(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(LEAN), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("MEDFL_DATA", None)

    def say(*words: str) -> str:
        done = subprocess.run(
            [program, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert say("--version") == f"medfl {release.VERSION}\n"
    assert "ham10000" in say("bundles")
    demo = "run ham10000 --data phantom --method fedbm --preset demo"
    few = "--config network=small_cnn --config image_size=32 --set g_iterations=2 --set g_batch=4"
    few += " --set synthetic_batch=2 --rounds 1 --out run"
    commands = f"{demo} {few}", "export run --out bundle --formats none", "site inspect bundle"
    program = str(Path(program).with_name("python"))  # one import of torch for all
    assert "ACCEPTED" in say(
        "-c", f"from medfl.cli import main; assert not any(main(x.split()) for x in {commands})"
    )
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert Path(record["bundle_path"]).is_relative_to((tmp_path / "env").resolve())
