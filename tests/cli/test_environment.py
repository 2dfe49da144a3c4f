"""The command line where streams are closed, a locale is old, a disk is full, or a user has neither name nor home."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medfl import datasets
from medfl.cli import verbs
from tests.support.programs import ROOT, python_path

NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME", "XDG_CACHE_HOME")


def shell(place: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell's command, in which $MEDFL is the command line, without the variables that name a user."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in (*NAMES, "PYTHONUNBUFFERED")
    }
    environment = {
        **kept,
        "PYTHONPATH": str(ROOT),
        "MEDFL": f"{sys.executable} -m medfl",
        **variables,
    }
    return subprocess.run(
        ["bash", "-c", command], cwd=place, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("$MEDFL bundles mnist >&-", 0),
        ("$MEDFL --help >&- 2>&- <&-", 0),
        ("$MEDFL bundles nothing 2>&-", 2),
        ("$MEDFL bundles nothing <&- >&- 2>/dev/full", 2),
        ("$MEDFL bundles | head -c 10; exit ${PIPESTATUS[0]}", 0),
        ("$MEDFL bundles mnist > /dev/full", 1),
    ],
)
def test_a_stream_may_be_closed_or_full(tmp_path: Path, command: str, code: int) -> None:
    done = shell(tmp_path, command)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == int("> /dev/full" in command)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "code"), [("return 3", 3), ("return 0", 0), ("raise KeyError", 1)]
)
def test_a_command_ends_without_freeing_what_it_has_imported(
    tmp_path: Path, ends: str, code: int
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, threading, time\n"
        "from medfl.cli import verbs\n"
        "class Held:\n"
        "    def __del__(self): print('freed')\n"
        "held = Held()\n"
        "def main(own_process):\n"
        "    atexit.register(print, 'asked to be called')\n"
        "    threading.Thread(target=lambda: (time.sleep(0.2), print('waited for'))).start()\n"
        f"    {ends}\n"
        "verbs.main = main\n"
        "verbs.command()\n"
    )
    done = shell(tmp_path, f"{sys.executable} program.py")
    assert (done.returncode, done.stdout) == (code, "waited for\nasked to be called\n"), done.stderr
    assert ("KeyError" in done.stderr) == ("KeyError" in ends)


def test_what_is_written_into_a_file_is_not_mixed_with_a_closed_stream(tmp_path: Path) -> None:
    program = "import os; from medfl.core import terminal; terminal.mend_streams(); print(os.open('a', 65) > 2)"
    assert shell(tmp_path, f'{sys.executable} -c "{program}" 2>&- <&-').stdout == "True\n"


def test_lines_that_nobody_reads_any_more_do_not_end_a_run(tmp_path: Path) -> None:
    lines = (
        "from medfl.cli.parser import warn; [warn('line ' * 9) for _ in range(9999)]; print('done')"
    )
    done = shell(
        tmp_path,
        f'{{ {sys.executable} -c "{lines}" 2>&1 >&3 | head -1 >&2; exit ${{PIPESTATUS[0]}}; }} 3>&1',
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_any_text_can_be_printed_in_an_old_locale(tmp_path: Path) -> None:
    program = "from medfl.core import terminal; terminal.mend_streams(); print('─ü\\udce4.png')"
    assert (
        shell(tmp_path, f'{sys.executable} -c "{program}"', PYTHONIOENCODING="ascii").stdout
        == "???.png\n"
    )


def test_a_user_without_a_name_is_given_one(tmp_path: Path) -> None:
    nobody = (
        "import pwd; pwd.getpwuid = {}.__getitem__; import medfl, getpass; print(getpass.getuser())"
    )
    done = shell(tmp_path, f'{sys.executable} -c "{nobody}"')
    assert done.stdout == "nameless\n", done.stderr


def test_a_user_without_a_home_is_told(tmp_path: Path) -> None:
    nobody = "import pwd; pwd.getpwuid = {}.__getitem__; from medfl.storage import places; places.cache_folder('a')"
    done = shell(tmp_path, f'{sys.executable} -c "{nobody}"')
    said = "InputError: a user without a home; HOME or XDG_CACHE_HOME is set, for the cache; set one of them"
    assert done.stderr.splitlines()[-1].endswith(said)


def test_a_home_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of a service, or of a container's user of any number."""
    home = tmp_path / "home"
    home.write_text("")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert verbs.main(["run", "mnist", "--data", "phantom", "--out", str(tmp_path / "a")]) == 2
    said = (
        f"error: cache {home}/.cache/medfl/phantom, which cannot be made (Not a directory); "
        "HOME or XDG_CACHE_HOME is a folder of your own; set one of them"
    )
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_what_the_system_refuses_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files", "a.png")

    monkeypatch.setattr("medfl.cli.report._report", fail)
    assert verbs.main(["report", "."]) == 1
    said = "error: a.png: Too many open files; check that it is there, and its rights\n"
    assert capsys.readouterr().err == said


def test_a_full_disk_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("medfl.cli.report._report", fail)
    assert verbs.main(["report", "."]) == 1
    said = "error: no space left on the disk; free some; what was saved is intact\n"
    assert capsys.readouterr().err == said


def test_a_folder_whose_name_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    done = shell(tmp_path, "$MEDFL run mnist --data phantom --out $'o\\xfc'")
    assert (done.returncode, done.stderr.splitlines()) == (
        2, ["error: --out o\ufffd; a path in UTF-8; give another name, or run with PYTHONUTF8=1"],
    )  # fmt: skip


@pytest.mark.slow
def test_a_comparison_is_shown_where_the_locale_is_not_utf_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables have ± and –: it ended with a traceback after all runs, which are there already here."""
    monkeypatch.chdir(tmp_path)
    datasets.write_phantom("mednist", tmp_path / "data", per_class=10, size=16)
    compare = (
        "compare mednist --data data --methods fedavg --seeds 0,1 --sites 2 --rounds 1 --out c"
    )
    compare += " --config network=small_cnn --config image_size=16 --jobs 1"
    assert verbs.main(compare.split()) == 0
    (tmp_path / "c" / "tables.md").unlink()
    done = shell(
        tmp_path,
        f"$MEDFL {compare}",
        LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONPATH=python_path(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "written: c/tables.md" in done.stdout
