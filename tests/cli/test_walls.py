"""Walls around a verb: the same weights as without, foreign bundles held unasked, what a hostile one cannot do."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace

import pytest

from medfl import datasets
from medfl.bundle import files
from medfl.bundle.bundle import Bundle, shipped_root
from medfl.cli import site, verbs as cli, walls
from medfl.core.errors import InputError, RunError
from medfl.policy import admission
from medfl.safety import sandbox
from tests.support import forked
from tests.support.programs import python_path
from tests.support.toy import run_record

landlock = pytest.mark.skipif(
    sandbox.abi() < 4, reason="the kernel's Landlock is missing, or older than ABI 4"
)
SMALL = ["--config=network=small_cnn", "--config=image_size=16", "--sites=2", "--batch-size=8"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("data") / "mednist", per_class=10, size=16
    )


THREADS = {"OPENBLAS_NUM_THREADS": "2"}
"""NumPy's own, which it starts where it is imported; a program with them starts by itself, others are forked."""


def started(place: Path, arguments: Sequence[str], **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "medfl", *arguments], cwd=place, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def medfl(place: Path, *arguments: str) -> tuple[int, list[str]]:
    """Run medfl in a forked process, which a sandbox holds as well; return its exit code and the lines that it said."""

    def program() -> int:
        os.chdir(place)
        return cli.main(arguments, own_process=True)

    process = forked.start(program, output=place / "said.txt")
    process.join(300)
    assert process.exitcode is not None
    return process.exitcode, (place / "said.txt").read_text().splitlines()


@pytest.mark.slow
@landlock
def test_the_weights_are_those_without_it_also_after_a_kill(data: Path, tmp_path: Path) -> None:
    run = ["run", "mednist", "--data", str(data), *SMALL]
    inside, name = [*run, "--jobs", "2", "--sandbox"], "runs/mednist-fedavg-0"
    process = started(tmp_path, [*inside, "--rounds", "100000"], **THREADS)
    manifest, deadline = tmp_path / name / "state" / "manifest.json", time.monotonic() + 180
    while not manifest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    rounds = json.loads(manifest.read_text())["round"] + 2
    code, said = medfl(tmp_path, *inside, "--out", name, "--resume", "--rounds", str(rounds))
    assert code == 0, said
    assert (
        said[0]
        == f"sandbox: Landlock ABI {sandbox.abi()}: writes below {name} only, no network, no programs"
    )
    assert "ermission" not in "".join(said)
    assert "Warning" not in "".join(said)
    private = Path(os.environ["XDG_CACHE_HOME"]) / "medfl" / "sandbox"
    assert [path for path in private.iterdir() if (path / "tmp").is_dir()]
    assert (
        cli.main([*run, "--jobs", "1", "--rounds", str(rounds), "--out", str(tmp_path / "without")])
        == 0
    )
    for file in ("weights.safetensors", "best.safetensors", "predictions.csv"):
        assert (tmp_path / name / file).read_bytes() == (tmp_path / "without" / file).read_bytes()
    records = [
        json.loads((tmp_path / folder / "run.json").read_text()) for folder in (name, "without")
    ]
    assert records[0]["run_hash"] == records[1]["run_hash"]
    assert (tmp_path / name / "report.html").is_file()


@landlock
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs a C++ compiler")
def test_a_compiled_run_may_execute_the_compiler_and_says_so(data: Path, tmp_path: Path) -> None:
    run = [
        "run",
        "mednist",
        "--data",
        str(data),
        *SMALL,
        "--jobs=1",
        "--rounds=1",
        "--compile",
        "--sandbox",
    ]
    process = started(tmp_path, [*run, "--out=compiled"], **THREADS)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert ", no network, programs /bin, " in stderr.splitlines()[0]
    assert "ermission" not in stderr


ATTACKS = """
import json, socket, subprocess
from pathlib import Path

canary, victim, moved, program = (Path(PLACE, name) for name in ("canary", "victim", "moved", "program"))
TRIES = {
    "touch": canary.touch,
    "move": lambda: victim.replace(moved),
    "program": lambda: subprocess.run(["touch", str(program)], check=True),
    "socket": lambda: socket.create_connection(("127.0.0.1", PORT)).close(),
}


def network_name():
    told = {}
    for name, attack in TRIES.items():
        try:
            attack()
            told[name] = "done"
        except PermissionError:
            told[name] = "refused"
    print("told", json.dumps(told), flush=True)
    raise PermissionError("no name for a network")
"""


@landlock
def test_a_hostile_bundle_that_was_let_in_does_no_harm(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gate is off (--trust); each attack succeeds without the sandbox, so that it is the sandbox that stops it."""
    root = shipped_root()
    assert root is not None
    bundle, place = tmp_path / "bundle", tmp_path / "place"
    shutil.copytree(root / "mednist", bundle, ignore=shutil.ignore_patterns("models"))
    place.mkdir()
    (place / "victim").write_text("precious")
    file = bundle / "configs" / "train.yaml"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        code = f"PLACE, PORT = {str(place)!r}, {server.getsockname()[1]}\n{ATTACKS}"
        (bundle / "scripts").mkdir()
        (bundle / "scripts" / "__init__.py").touch()
        (bundle / "scripts" / "attacks.py").write_text(code)
        assert "  name: '@network_name'" in file.read_text()
        called = "  name: $__import__('scripts.attacks').attacks.network_name()"
        file.write_text(file.read_text().replace("  name: '@network_name'", called))
        run = [
            "run",
            str(bundle),
            "--data",
            str(data),
            "--config=image_size=16",
            "--sites=2",
            "--jobs=1",
            "--rounds=1",
        ]
        run.append("--trust")
        code, said = medfl(tmp_path, *run, "--sandbox", "--out", "inside")
        assert code == 2, said
        assert "PermissionError" in "".join(said)
        assert attempted(said) == dict.fromkeys(("touch", "move", "program", "socket"), "refused")
        assert {path.name: path.read_text() for path in place.iterdir()} == {"victim": "precious"}
        with pytest.raises(BlockingIOError):
            server.accept()
        cli.main([*run, "--out", str(tmp_path / "without")])
        assert attempted(capsys.readouterr().out.splitlines()) == dict.fromkeys(
            ("touch", "move", "program", "socket"), "done"
        )
        server.accept()[0].close()
        assert sorted(path.name for path in place.iterdir()) == ["canary", "moved", "program"]


def attempted(said: Sequence[str]) -> dict[str, str]:
    told: dict[str, str] = json.loads(next(line for line in said if line.startswith("told "))[5:])
    return told


@landlock
def test_a_run_that_is_refused_leaves_no_folder_and_one_line(tmp_path: Path) -> None:
    wrong = ["--data=phantom", "--sandbox", "--out=a", "--config=odd=1", "--quiet"]
    code, said = medfl(tmp_path, "run", "mednist", *wrong)
    assert code == 2
    assert len(said) == 1
    assert said[0].startswith("error: ")
    assert "odd" in said[0]
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("flag", ["--runtime=flare", "--track=mlflow:http://localhost:5000"])
def test_what_needs_connections_is_refused(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "mednist", "--sandbox", flag]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: --sandbox with {flag.replace('=', ' ', 1)}; "
    )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    bundle = tmp_path / "foreign"
    root = shipped_root()
    assert root is not None
    shutil.copytree(root / "mednist", bundle, ignore=shutil.ignore_patterns("models"))
    return bundle


def test_without_landlock_nothing_is_run(
    foreign: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A shipped bundle with --sandbox, and a foreign one without --trust."""
    monkeypatch.setattr(sandbox, "abi", lambda: 0)
    monkeypatch.chdir(tmp_path)
    needs = (
        "on this machine; a Linux kernel of at least 5.13 with Landlock switched on; run it there"
    )
    assert cli.main(["run", "mednist", "--data=phantom", "--sandbox"]) == 2
    assert capsys.readouterr().err == f"error: --sandbox {needs}\n"
    run = ["run", str(foreign), "--data=phantom"]
    assert cli.main(run, own_process=True) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"error: bundle {foreign}, which is not shipped, or changed since, {needs}, "
    )
    assert said.endswith("or add --trust: it then runs with your rights\n")
    assert cli.main([*run, "--trust", "--config=odd=1"], own_process=True) == 2
    assert capsys.readouterr().err.startswith(
        "note: --trust: no walls around this bundle, as they need a Linux"
    )


@pytest.mark.parametrize(
    ("config", "held"),
    [
        ({"learning_rate": "$0.1 + 0"}, True),
        ({"optimizer": {"_target_": "torch.optim.SGD", "params": ["$@x"]}}, True),
        ({"optimizer": {"_target_": "torch.optim.Rprop"}}, True),
        ({"optimizer": {"params": "$@network_def.parameters()"}}, False),
        ({"image_size": 16, "network": "monai:DenseNet121"}, False),
    ],
)
def test_a_record_with_expressions_of_its_own_is_held_like_a_foreign_bundle(
    config: dict[str, object], held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wrote it: what its bundle's protocol says itself is the bundle's."""
    root = shipped_root()
    assert root is not None
    run = run_record(bundle="ham10000", bundle_path=str(root / "ham10000"), config=config)
    (tmp_path / "run.json").write_text(json.dumps(run.to_dict()))
    divided: list[object] = []
    monkeypatch.setattr(walls, "_divide", lambda *arguments: divided.append(arguments))
    monkeypatch.setattr(sandbox, "lacking", lambda: "")
    args = SimpleNamespace(own_process=True, given=[])
    copy_context().run(walls.hold, args, walls.Use(runs=[tmp_path / "run.json"]))
    assert len(divided) == held


@pytest.mark.parametrize("given", ["mednist", "installed/mednist"])
def test_a_shipped_bundle_that_was_changed_is_held_and_inspected(
    given: str, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed" / "mednist"
    shutil.copytree(foreign, installed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "shipped_root", lambda: tmp_path / "installed")
    monkeypatch.setattr(sandbox, "lacking", lambda: "")
    divided: list[object] = []
    inspected: list[Path] = []
    monkeypatch.setattr(walls, "_divide", lambda *arguments: divided.append(arguments))
    monkeypatch.setattr(admission, "admit", lambda folder, *_: inspected.append(folder))
    args = SimpleNamespace(own_process=True, given=[])
    copy_context().run(walls.hold, args, walls.Use(bundles=[given]))
    bundle = Bundle(given)
    assert not divided
    assert not inspected

    file = installed / "configs" / "train.yaml"
    file.write_text(file.read_text() + "# changed")
    walls.hold(args, walls.Use(bundles=[given]))
    assert len(divided) == 1
    assert Bundle(given).dataset == bundle.dataset == "mednist"
    assert inspected == [installed]


@landlock
@pytest.mark.slow
def test_a_foreign_bundle_is_held_by_every_verb_unasked(
    foreign: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("x")
    small = [f"--data={data}", "--config=image_size=16"]
    run = [str(foreign), *small, "--sites=2", "--rounds=1"]
    commands = [
        ["run", *run, "--jobs=2", "--out=run"],
        ["predict", "run", str(data), "--out=predictions"],
        ["export", "run", "--out=exported", "--formats=none"],
        ["predict", "exported", str(data), "--out=again"],
        ["subgroups", "run"],
        ["calibrate", "run", "--coverage=0.5"],
        ["site", "inspect", str(foreign), "--write-policy=policy.yaml"],
        ["site", "stats", str(foreign), *small, "--out=statistics.json"],
        ["site", "check", str(foreign), *small],
        ["compare", *run, "--methods=fedavg,local", "--seeds=0", "--out=grid"],
    ]
    for command in commands:
        process = started(tmp_path, command, **(THREADS if command[0] == "run" else {}))
        stdout, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, (command, stderr)
        assert "sandbox: Landlock ABI" in stderr.splitlines()[0], command
        assert "/tmp/medfl-" not in stdout, command

    made = {path.name for path in tmp_path.iterdir()}
    assert {
        "run",
        "predictions",
        "exported",
        "again",
        "policy.yaml",
        "statistics.json",
        "grid",
    } <= made
    process = started(tmp_path, ["run", *run, "--runtime=flare"])
    assert "with --runtime flare; work without connections" in process.communicate(timeout=60)[1]
    process = started(tmp_path, ["run", *run, "--no-sandbox", "--out=free"])
    assert process.communicate(timeout=300)[1].startswith("note: --no-sandbox: ")
    for file in ("weights.safetensors", "predictions.csv"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "free" / file).read_bytes()


def _fails(source: Path, place: Path) -> None:
    place.write_text("half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@landlock
def test_the_keeper_takes_all_or_nothing_and_no_link_from_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("x")
    written = tmp_path / "written"
    (written / "deep").mkdir(parents=True)
    (written / "deep" / "file").write_text("y")
    walls._take_over(written, tmp_path / "new" / "taken")
    assert (tmp_path / "new" / "taken" / "deep" / "file").read_text() == "y"
    with monkeypatch.context() as patch:  # a disk that is full after the first file
        patch.setattr(shutil, "copyfile", _fails)
        with pytest.raises(RunError, match="half: no space left on the disk"):
            walls._take_over(written, tmp_path / "half")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "secret", "written"]
    (written / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(RunError, match="link, which is no plain file: nothing is taken"):
        walls._take_over(written, tmp_path / "refused")


@pytest.mark.parametrize("kind", ["pipe", "socket", "depth"])
def test_the_keeper_neither_waits_for_nor_takes_what_is_no_plain_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    written = scratch / "written"
    monkeypatch.chdir(scratch)
    if kind == "pipe":
        os.mkfifo(written)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as end:
            end.bind("written")
    else:
        (written / "/".join("d" * 110)).mkdir(parents=True)

    (tmp_path / "mine").write_text("as it was")
    with pytest.raises(RunError, match="which is no plain file: nothing is taken"):
        walls._take_over(written, tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "as it was"


@pytest.mark.parametrize(
    ("within", "free"),
    [("letter.txt", False), ("run.json", False), ("compare.json", True), ("local/run.json", True)],
)
def test_a_worker_s_folder_has_nothing_of_others(
    within: str, free: bool, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a home nor an earlier run is written to, but the run that is gone on with."""
    divided: list[object] = []
    monkeypatch.setattr(walls, "_divide", lambda *arguments: divided.append(arguments))
    monkeypatch.setattr(sandbox, "lacking", lambda: "")
    args = SimpleNamespace(own_process=True, given=[])
    out = tmp_path / "out"
    (out / within).parent.mkdir(parents=True)
    (out / within).write_text("{}")
    if free:
        walls.hold(args, walls.Use(bundles=[foreign], folder=out))
    else:
        with pytest.raises(InputError, match="out exists and is not empty"):
            walls.hold(args, walls.Use(bundles=[foreign], folder=out))

    walls.hold(args, walls.Use(bundles=[foreign], runs=[out], folder=out))
    assert len(divided) == 1 + free


@pytest.mark.parametrize("action", ["check", "fingerprint"])
def test_a_site_s_folder_is_its_keeper_s_alone(
    action: str, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that may write there could change the account, or in one's own folder any file of it."""
    uses: list[walls.Use] = []

    def held(_: object, use: walls.Use) -> None:
        uses.append(use)
        raise InputError("stopped", "here", "for the test")

    monkeypatch.setattr(site, "hold", held)
    (tmp_path / "state").mkdir()
    arguments = ["site", action, str(foreign), f"--data={tmp_path}", f"--folder={tmp_path}/state"]
    if action == "fingerprint":
        arguments += ["--epsilon=2", f"--out={tmp_path}/out.json"]

    assert cli.main(arguments) == 2
    assert [use.folder for use in uses] == [None]
    if action == "fingerprint":
        (account,) = (tmp_path / "state").glob("*.json")
        assert json.loads(account.read_text())["case_epsilon"] == 2


def test_only_what_is_named_is_readable_not_what_lies_above_a_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of /home/me/.cache/x the part before the dot is a home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEDFL_DATA", "")
    for name in ("home/.cache/data", "data.v2"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("mine.py", "data"):
        (tmp_path / name).touch()
    given = [f"{tmp_path}/home/.cache/data", f"--data={tmp_path}/data.v2", "mine.methods:Mine", "."]
    readable = {*walls._named(SimpleNamespace(given=given), [])}
    assert readable == {
        tmp_path / "home/.cache/data",
        tmp_path / "data.v2",
        Path("mine.py"),
        Path("."),
    }


def test_what_a_worker_has_started_ends_with_it(tmp_path: Path) -> None:
    """Otherwise it could change what the keeper takes over."""

    def program() -> int:
        end, begin = os.pipe()
        worker = os.fork()
        if not worker:
            os.setpgid(0, 0)
            child = os.fork()
            if not child:
                time.sleep(60)
            os.write(begin, str(child).encode())
            os._exit(3)

        assert walls._kept(worker, (), "") == 3
        child = os.read(end, 20).decode()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            stat = Path(f"/proc/{child}/stat")
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return 0
            time.sleep(0.01)
        return 1

    process = forked.start(program, output=tmp_path / "said.txt")
    process.join(60)
    assert process.exitcode == 0, (tmp_path / "said.txt").read_text()


SIDE_DOORS = """
import os
from pathlib import Path

told = {}
for handle in (HANDLE, 1):
    try:
        os.ftruncate(handle, 0)
        told[handle] = "shortened"
    except OSError:
        told[handle] = "refused"
environment = b"".join(Path("/proc/self/environ").read_bytes().split())
told["environment"] = "TOKEN" in str(dict(os.environ)) + environment.decode(errors="replace")
try:
    told["others"] = bool(os.listdir(OTHERS))
except PermissionError:
    told["others"] = False
print("told", told)
print("\\x1b]52;c;cm0=\\x07 steered")
"""


@landlock
def test_a_worker_gets_no_file_variable_terminal_or_cache_of_its_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it could write, read or steer without opening anything."""
    log = tmp_path / "log.txt"
    log.write_text("an earlier line\n")
    others = tmp_path / "medfl" / "prepared"
    (others / "images").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SOME_TOKEN", "TOKEN")

    def program() -> int:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(handle, stream)

        args = SimpleNamespace(own_process=True, sandbox=True, given=[])
        walls.hold(args, walls.Use(folder=tmp_path / "out"))
        exec(SIDE_DOORS.replace("HANDLE", str(handle)).replace("OTHERS", repr(str(others))))
        return 0

    process = forked.start(program, output=tmp_path / "said.txt")
    process.join(60)
    assert process.exitcode == 0
    lines = log.read_text().splitlines()
    assert lines[0] == "an earlier line"
    told = next(line for line in lines if line.startswith("told "))
    assert "shortened" not in told
    assert "True" not in told
    assert lines[-1] == "?]52;c;cm0=? steered"


@pytest.mark.parametrize("named", [True, False])
def test_a_foreign_bundle_beside_a_shipped_one_is_not_opened_without_walls(
    named: bool, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As public data or a teacher of it, by a record, or swapped after the command was read."""
    divided: list[object] = []
    monkeypatch.setattr(walls, "_divide", lambda *arguments: divided.append(arguments))
    monkeypatch.setattr(sandbox, "lacking", lambda: "")
    given = ["--set", f"public={foreign}:DIR"] if named else []
    args = SimpleNamespace(own_process=True, given=given)

    def opened() -> None:
        walls.hold(args, walls.Use(bundles=["mednist"]))
        if not named:
            with pytest.raises(InputError, match="without walls; .*; add --sandbox"):
                Bundle(str(foreign))

    copy_context().run(opened)
    assert len(divided) == named
