"""Programs that are forked of a warm process (`tests/support/lean`) are as programs that start by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from medfl import datasets
from tests.support.programs import python_path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("data") / "mednist", per_class=10, size=16
    )
    small = "--config network=small_cnn --config image_size=16 --sites 2 --batch-size 8 --jobs 1 --quiet"
    return ["run", "mednist", "--data", str(data), *small.split()]


def started(words: list[str], place: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "medfl", *words],
        cwd=place,
        env=environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def has_imported(program: subprocess.Popen[str]) -> bool:
    return "numpy" in Path(f"/proc/{program.pid}/maps").read_text()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def end(program: subprocess.Popen[str], number: int) -> None:
    """Send a signal until all that write to a program's streams are gone.

    Python drops a KeyboardInterrupt that falls into a destructor, so that one is not always enough.
    """
    for _ in range(3):
        program.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            program.communicate(timeout=30)
            return


def test_a_forked_program_writes_says_and_ends_as_one_that_starts_by_itself(
    run: list[str], tmp_path: Path
) -> None:
    ends = []
    for place, variables in (("forked", {}), ("started", {"MEDFL_TESTS_WARM": "/nowhere"})):
        (tmp_path / place).mkdir()
        program = started([*run, "--rounds", "1", "--out", "out"], tmp_path / place, **variables)
        out, error = program.communicate(timeout=300)
        weights = (tmp_path / place / "out" / "weights.safetensors").read_bytes()
        said = [line for line in out.splitlines() if "time" not in line]
        ends.append((program.returncode, said, error, weights))
        refused = started(["run", "mednist", "--rounds", "0"], tmp_path / place, **variables)
        out, error = refused.communicate(timeout=60)
        ends.append((refused.returncode, out, error))
    assert ends[:2] == ends[2:]
    assert (ends[0][0], ends[1][0]) == (0, 2)


def test_a_signal_reaches_the_child_and_it_dies_with_its_program(
    run: list[str], tmp_path: Path
) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        before = signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # programs in the background ignore it
        program = started([*run, "--rounds", "100000", "--out", number.name], tmp_path)
        signal.signal(signal.SIGINT, before)
        try:
            until((tmp_path / number.name / "state" / "manifest.json").is_file)
            assert not has_imported(program)
            end(program, number)
            assert program.returncode == code
        finally:
            program.kill()
            program.communicate()


@pytest.mark.parametrize("variables", [{"PYTHONHASHSEED": "7"}, {"OMP_NUM_THREADS": "2"}])
def test_a_program_with_another_environment_starts_by_itself(
    run: list[str], tmp_path: Path, variables: dict[str, str]
) -> None:
    program = started([*run, "--rounds", "100000", "--out", "out"], tmp_path, **variables)
    try:
        until(lambda: has_imported(program))
    finally:
        program.kill()
        program.communicate()
