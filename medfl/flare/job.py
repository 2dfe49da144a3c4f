"""Runs as NVIDIA FLARE jobs: a recipe for any FLARE environment, and a run in FLARE's simulator."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medfl.core import Document, InputError, Print, Run, RunError, pip_install, read_json
from medfl.flare.files import allow_classes, participants, raise_error
from medfl.flare.server import DONE_FILE, ERROR_FILE, FLARE_FOLDER, LINES_FILE
from medfl.flare.wire import wire_names
from medfl.runtimes import Execution, Runtime
from medfl.storage import read_summary

MOST_SITES = 32
"""Maximum number of sites on one machine: FLARE uses a process for each."""
REQUEST_INTERVAL = 0.1
"""Seconds between a site's requests for work; FLARE's default of 2 would dominate a short round."""


def require_flare() -> None:
    """Raise an InputError if NVIDIA FLARE is not installed."""
    try:
        import nvflare  # noqa: F401
    except ImportError as error:
        raise InputError(
            "the runtime flare", "it needs NVIDIA FLARE", pip_install("flare")
        ) from error


def recipe(run: Run, carried: Sequence[Path], controller: Any, executor: Any, least: int) -> Any:
    """Return the recipe of a run, for `SimEnv`, `PocEnv`, `ProdEnv` or `export`.

    The job includes the `carried` files; without `least` sites FLARE neither starts nor continues it.
    """
    from nvflare.job_config.api import FedJob
    from nvflare.recipe.spec import Recipe

    job = FedJob(name=f"medfl-{run.run_hash[:16]}", min_clients=least)
    job.set_app_packages(["medfl"])  # installed at every site, never sent
    job.to_server(controller)
    job.to_server({"server": {"task_request_interval": REQUEST_INTERVAL}})
    job.to_clients(executor, tasks=["*"])

    for path in carried:
        job.to_server(_ConfigFile(path))
        job.to_clients(_ConfigFile(path))

    return Recipe(job)


@dataclass
class _ConfigFile:
    """A file for the configuration folder of a job."""

    path: Path

    def add_to_fed_job(self, job: Any, ctx: Any, **_: Any) -> None:
        """Add the file to the job."""
        job.add_file_source(str(self.path), None, "config", ctx)


def local_recipe(
    run: Run, folder: Path, *, min_replies: int = 0, **settings: Any
) -> tuple[Any, list[str]]:
    """Return the recipe of a run on one machine, whose processes share data and run folder, and its sites' FLARE names.

    Raises:
        InputError: it has more sites than the maximum number of processes.
    """
    from medfl.flare.parts import MedflController, MedflExecutor

    clients = list(wire_names(participants(run)).values())
    if len(clients) > MOST_SITES:
        raise InputError(
            f"{len(clients)} sites with --runtime flare",
            f"at most {MOST_SITES}: each is a process with all libraries loaded",
            "take fewer sites, or --runtime simulator",
        )

    path = str(folder.resolve())
    start = os.getcwd()  # the job's processes start elsewhere
    controller = MedflController(path, start, min_replies=min_replies, **settings)
    executor = MedflExecutor(path, start)
    least = min_replies or len(clients)
    return recipe(run, [folder / "run.json"], controller, executor, least), clients


RunJob = Callable[[Path, str, list[str], Print], Path]
"""Runs a job to its end, from (folder, job's name, sites' FLARE names, printer); returns the path of the output."""
EACH_SITE_IS_A_PROCESS = "each of its sites is a process"


def execute_with(run_job: RunJob) -> Callable[[Execution], Document]:
    """Return a function that executes a run as a FLARE job on this machine, and returns the summary.

    The processes' output goes to `flare/` in the run folder, which is removed unless the run fails. Errors are those of
    `Simulator.execute`.
    """

    def execute(execution: Execution) -> Document:
        launch = execution.launch
        settings = {"save_predictions": launch.save_predictions}
        for name in ("min_replies", "deadline", "track"):
            if getattr(launch, name) is not None:
                settings[name] = getattr(launch, name)

        folder = execution.folder.path
        flare_folder = folder.resolve() / FLARE_FOLDER
        _remove(flare_folder)
        flare_folder.mkdir()
        job, clients = local_recipe(execution.federation.run, folder, **settings)
        write_job(job, flare_folder)
        output = run_job(flare_folder, job.name, clients, launch.say)

        return _result(folder, output)

    return execute


def write_job(recipe: Any, folder: Path) -> None:
    """Write a recipe's job into a subfolder that is called like it."""
    with contextlib.redirect_stdout(io.StringIO()):
        recipe.export(str(folder))


def _on_simulator(flare_folder: Path, job: str, clients: list[str], say: Print) -> Path:
    """Run a job as `SimEnv` does, except for output and end; return the output file."""
    from medfl.flare.parts import SIMULATED

    workspace = flare_folder / "workspace"
    log = flare_folder / "output.txt"
    allow_classes(workspace / "local" / "resources.json", SIMULATED)
    module = "nvflare.private.fed.app.simulator.simulator"
    command = [sys.executable, "-m", module, str(flare_folder / job)]
    command += ["-w", str(workspace), "-c", ",".join(clients), "-t", str(len(clients))]

    with log.open("wb") as output:
        # a session of its own: Ctrl-C reaches this process alone, which then ends the others
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )

    try:
        follow(lambda: child.poll() is not None, flare_folder, say)
    finally:
        kill_tree(child)

    return log


def _result(folder: Path, output: Path) -> Document:
    """Return the server's summary and remove FLARE's files, or raise the error that ended the run."""
    flare_folder = folder / FLARE_FOLDER
    failure = flare_folder / ERROR_FILE
    if failure.is_file():
        raise_error(read_json(failure, "an error that medfl wrote", f"look into {output}"))

    if not (flare_folder / DONE_FILE).is_file():
        raise RunError(
            f"NVIDIA FLARE ended without a result; its output is in {output}; continue with --resume"
        )

    _remove(flare_folder)
    return read_summary(folder / "summary.json")


def _remove(flare_folder: Path) -> None:
    """Remove FLARE's files; processes of a killed run may still write there for some seconds."""
    for _ in range(50):
        shutil.rmtree(flare_folder, ignore_errors=True)
        if not flare_folder.exists():
            return
        time.sleep(0.2)


def follow(ended: Callable[[], bool], flare_folder: Path, say: Print) -> None:
    """Pass on the server's lines until the run has ended; FLARE itself would take seconds longer."""
    file = flare_folder / LINES_FILE
    passed_on = 0
    over = False
    while not over:
        # checked before the lines are read, so that the last ones are read too
        over = (flare_folder / DONE_FILE).is_file() or ended()
        lines = file.read_text("utf-8").splitlines() if file.is_file() else []
        for line in lines[passed_on:]:
            say(json.loads(line))

        passed_on = len(lines)
        if not over:
            time.sleep(0.1)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants, and wait at most ten seconds until none writes any more."""
    import psutil  # type: ignore[import-untyped]  # comes with FLARE and has no types

    descendants = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        descendants = psutil.Process(process.pid).children(recursive=True)

    process.kill()
    process.wait()
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its parent
            descendant.kill()

    end = time.monotonic() + 10
    while any(map(_is_alive, descendants)) and time.monotonic() < end:
        time.sleep(0.05)


def _is_alive(process: Any) -> bool:
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


RUNTIME = Runtime(
    execute_with(_on_simulator), EACH_SITE_IS_A_PROCESS, remote=True, require=require_flare
)
