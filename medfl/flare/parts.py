"""The components that NVIDIA FLARE runs in the processes of a job: a controller at the server, an executor at a site.

FLARE creates them by their class paths, which a site lists in the `class_allow_list` of its resources: `ALLOWED` if
sites have their own images, `SIMULATED` if one machine plays all sites. medfl is installed at every site: a job
carries the run's record (`config/run.json`), its text embeddings (`config/text.json`), its initial weights
(`config/init.json`) and no code.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.model_controller import ModelController
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs

from medfl.core import (
    NO_WALLS,
    InputError,
    MedflError,
    Print,
    Run,
    errors_safe_to_send,
    examines,
    without_round_limit,
)
from medfl.flare import wire
from medfl.flare.files import error_document, participants, read_run
from medfl.flare.remote import ReportedRunFolder, write_fingerprints
from medfl.flare.server import (
    DONE_FILE,
    ERROR_FILE,
    FLARE_FOLDER,
    LINES_FILE,
    Answer,
    Asking,
    FlareWorkers,
)
from medfl.flare.site_config import CONFIG_FILE, SiteConfig, accepted_run, open_server, open_site
from medfl.flare.wire import Payload, from_model, to_model
from medfl.policy.policy import JOBS, PLAN, job_of
from medfl.report import write_report
from medfl.runs import text_record
from medfl.runs.plan import repeat
from medfl.runtimes import Execution, Federation, Launch
from medfl.runtimes.monai_fl.guard import Activity, Guard, in_words
from medfl.runtimes.simulator import Simulator
from medfl.storage import RunFolder, write_json
from medfl.storage.run_folder import SITES

if TYPE_CHECKING:
    from medfl.flare.site import FlareSite
    from medfl.runtimes.monai_fl.held import HeldSite

_SHARE = 0.5
"""Maximum weight of one of three or more sites with their own images, unless the run sets it."""


class _Controller(ModelController):  # type: ignore[misc]
    """The server's half of any run as a FLARE workflow, and the link of `FlareWorkers`.

    Args:
        min_replies: sites of a cohort that have to reply; 0: all of them.
        deadline: time limit for the sites in a round, in seconds; 0 for no limit.
    """

    def __init__(self, min_replies: int = 0, deadline: float = 0.0) -> None:
        """Store the arguments as attributes, from which FLARE writes them into the job."""
        super().__init__(persistor_id="", task_check_period=0.1)
        self.min_replies = min_replies
        self.deadline = deadline
        self.sets = 0
        # question -> its task and the sites that have not answered
        self._questions: dict[int, tuple[Task, set[str]]] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._disconnected: dict[str, str] = {}
        self._flare_names: dict[str, str] = {}

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Register the transfer of tensors."""
        register_tensors()
        super().start_controller(fl_ctx)

    def run(self) -> None:
        """Execute the run; its lines, and the error that ends it, are written for the process that started the job."""
        folder = None

        def say(text: str) -> None:
            if folder is not None:
                with (folder / LINES_FILE).open("a") as file:
                    file.write(json.dumps(text) + "\n")

            self.info(text)

        try:
            path = self._open_run_folder()
            folder = path / FLARE_FOLDER
            folder.mkdir(exist_ok=True)
            for name in (LINES_FILE, ERROR_FILE, DONE_FILE):
                (folder / name).unlink(missing_ok=True)

            self._execute(path, say)
            (folder / DONE_FILE).touch()
        except Exception as error:  # reported to the process that started the job, and to FLARE
            if folder is not None:
                write_json(folder / ERROR_FILE, error_document(error))
            if not isinstance(error, MedflError):
                raise
            self.panic(str(error))

    @abstractmethod
    def _open_run_folder(self) -> Path:
        """Check the run of the job and create its folder, unless it exists; return the folder."""

    @abstractmethod
    def _execute(self, path: Path, say: Print) -> None:
        """Execute the run in its folder."""

    def _run_rounds(
        self,
        federation: Federation,
        folder: RunFolder,
        say: Print,
        roster: Mapping[str, int] | None,
        **settings: Any,
    ) -> None:
        """Run the rounds with the job's sites as workers; `roster` None: a simulation, whose sites show everything."""
        simulated = roster is None
        self._flare_names = wire.wire_names(federation.participants)

        def workers(whole: Federation, _: int) -> FlareWorkers:
            flare_workers = FlareWorkers(whole, self, simulated, roster, say, self.sets)
            if isinstance(folder, ReportedRunFolder):
                folder.follow(flare_workers)
            return flare_workers

        launch = Launch(
            resume=True,
            say=say,
            min_replies=self.min_replies or None,
            deadline=self.deadline or None,
            **settings,
        )
        Simulator(
            Execution(federation, folder, launch, None if simulated else _SHARE), workers
        ).execute()

    # Link

    def ask(
        self,
        task_name: str,
        sites: Sequence[str],
        payload: Payload,
        answers: queue.SimpleQueue[Answer],
    ) -> int:
        """Schedule one task for these sites; FLARE's threads put the answers into the queue."""
        # numbers are never reused: a late answer must not be mistaken for that to a newer question
        with self._lock:
            self._count += 1
            number = self._count

        inverse = {self._flare_names[site]: site for site in sites}
        waiting = set(sites)

        def arrived(client_task: ClientTask, fl_ctx: FLContext) -> None:
            site = inverse[client_task.client.name]
            result = client_task.result
            client_task.result = None  # otherwise FLARE would keep the tensors of all rounds
            waiting.discard(site)
            answers.put(Answer(number, site, _read(result, site)))

        task = Task(
            name=task_name,
            data=FLModelUtils.to_shareable(to_model(payload)),
            result_received_cb=arrived,
        )
        self._questions[number] = (task, waiting)
        # FLARE does not wait: `FlareWorkers` decides which answers a round needs
        self.broadcast(task=task, fl_ctx=self.fl_ctx, targets=list(inverse), min_responses=0)
        return number

    def drop(self, question: int) -> None:
        """Cancel an unfinished task; a site still working on it learns that when it answers."""
        task, waiting = self._questions.pop(question)
        if waiting and task.completion_status is None:
            self.cancel_task(task, fl_ctx=self.fl_ctx)

    def why_lost(self, site: str) -> str:
        return self._disconnected.get(self._flare_names[site], "")

    def is_aborted(self) -> bool:
        return bool(self.abort_signal.triggered)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Record the sites that disconnect."""
        if event_type == EventType.CLIENT_DISCONNECTED:
            name = str(fl_ctx.get_prop(FLContextKey.DISCONNECTED_CLIENT_NAME))
            self._disconnected[name] = "it has vanished"

    def process_result_of_unknown_task(
        self,
        client: Client,
        task_name: str,
        client_task_id: str,
        result: Shareable,
        fl_ctx: FLContext,
    ) -> None:
        """Drop a late answer, with a warning."""
        self.warning(
            f"site {client.name!r}: its answer to {task_name!r} came too late and is dropped"
        )


class MedflController(_Controller):
    """The server of a run on one machine, whose processes all have access to the data.

    Args:
        folder: the run folder, which contains the run.json.
        start: folder that relative paths of the run start from.
        save_predictions: write the masks predicted for the test items.
        track: tracker for the numbers, as in `--track`; "" for none.
        min_replies, deadline: as in every run.
    """

    def __init__(
        self,
        folder: str,
        start: str,
        save_predictions: bool = False,
        track: str = "",
        min_replies: int = 0,
        deadline: float = 0.0,
    ) -> None:
        super().__init__(min_replies, deadline)
        self.folder = folder
        self.start = start
        self.save_predictions = save_predictions
        self.track = track

    def _open_run_folder(self) -> Path:
        return Path(self.folder)

    def _execute(self, path: Path, say: Print) -> None:
        run = read_run(self.get_app_dir())
        os.chdir(self.start)
        torch.set_num_threads(run.threads)
        plan = repeat(run, say=say, folder=path)
        federation = replace(plan, run=replace(plan.run, rounds=run.rounds)).federation(say)
        folder = RunFolder.existing(path)
        settings = {"save_predictions": self.save_predictions, "track": self.track or None}
        self._run_rounds(federation, folder, say, None, **settings)


class RemoteController(_Controller):
    """The server of sites with their own images; its machine's settings are in `local/medfl.yaml`.

    Args:
        resume: continue the run if it exists.
        min_replies, deadline: as in every run.
        sets: as in `FlareWorkers`.
    """

    def __init__(
        self, resume: bool = False, min_replies: int = 0, deadline: float = 0.0, sets: int = 0
    ) -> None:
        super().__init__(min_replies, deadline)
        self.resume = resume
        self.sets = sets

    def _open_run_folder(self) -> Path:
        self._run = read_run(self.get_app_dir())
        self._carried = Path(self.get_app_dir()) / "config"
        settings = Path(self.engine.get_workspace().get_site_config_dir()) / CONFIG_FILE
        self._config = SiteConfig.read(settings)
        accepted_run(self._run, None, self._config)  # before its names become those of a folder
        run_hash = without_round_limit(self._run).run_hash
        work = job_of(self._run) if examines(self._run) else self._run.method
        path = Path(self._config.folder) / f"{self._run.bundle}-{work}-{run_hash[:16]}"
        if not (path / "run.json").is_file():
            RunFolder.create(path)
        elif not self.resume:
            raise InputError(
                f"the server has this run in {path}", "a new one", "export the job with --resume"
            )

        return path

    def _execute(self, path: Path, say: Print) -> None:
        if job_of(self._run) == PLAN:
            self._plan(path, say)
            return

        federation = open_server(self._run, self._config, self._carried)
        run = federation.run
        bundle = federation.bundle
        torch.set_num_threads(run.threads)
        folder = ReportedRunFolder(path)
        about = {
            "medfl": run.versions.get("medfl", ""),
            "task": bundle.task,
            "classes": list(bundle.classes),
            "key_metric": bundle.key_metric,
            "command": "a FLARE job",
            "runtime": "flare",
        }
        text_record.save(bundle, run, federation.method, path)
        folder.write_run(run, about)
        say(f"run folder: {path}")
        self._run_rounds(
            federation, folder, say, self._config.roster, track=self._config.track or None
        )
        say(f"report: {write_report(path)}")

    def _plan(self, path: Path, say: Print) -> None:
        """Ask the sites for their fingerprints; no bundle is opened, since the server may not have its images."""
        run = accepted_run(self._run, None, self._config)
        sites = participants(run)
        self._flare_names = wire.wire_names(sites)
        RunFolder(path).write_run(run, {"command": "a FLARE job", "runtime": "flare"})
        asking = Asking(self)
        asking.set_deadline(self.deadline or None)
        write_fingerprints(asking, sites, path / "fingerprints", self.min_replies, say)


class _Executor(Executor):  # type: ignore[misc]
    """A site's half."""

    def __init__(self) -> None:
        super().__init__()
        self._site: FlareSite | None = None
        self._carried: Path | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Register the transfer of tensors at the start, and free everything at the end."""
        if event_type == EventType.START_RUN:
            register_tensors()
        elif event_type == EventType.END_RUN and self._site is not None:
            self._site.algo.finalize()

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Answer one question, if necessary with a failure."""
        try:
            if self._site is None:
                name = str(fl_ctx.get_identity_name())
                workspace = fl_ctx.get_engine().get_workspace()
                # FLARE's simulator starts sites as threads, and may give one the workspace's name of the next
                workspace.site_name = name
                app = workspace.get_app_dir(fl_ctx.get_job_id())
                run = read_run(app)
                self._carried = Path(app) / "config"
                self._site = self._opened(run, name, workspace)
                torch.set_num_threads(run.threads)

            with errors_safe_to_send():
                question = from_model(FLModelUtils.from_shareable(shareable), "the server")
            answer = self._site.answer(task_name, question, lambda: bool(abort_signal.triggered))
        except Exception as error:  # FLARE would fail the whole job
            answer = self._failed(error, str(fl_ctx.get_identity_name()))

        return FLModelUtils.to_shareable(to_model(answer))

    @abstractmethod
    def _opened(self, run: Run, flare_name: str, workspace: Any) -> FlareSite:
        """Return the site with this name in FLARE."""

    def _failed(self, error: Exception, flare_name: str) -> Payload:
        """Return the failure that is sent to the server for an error outside the site's answers."""
        return wire.failure(in_words(error))


class MedflExecutor(_Executor):
    """A site of a run on one machine, whose processes all have access to the data."""

    def __init__(self, folder: str, start: str) -> None:
        super().__init__()
        self.folder = folder
        self.start = start

    def _opened(self, run: Run, flare_name: str, workspace: Any) -> FlareSite:
        # imported here: it imports all of MONAI FL, which the server does not need
        from medfl.flare.site import FlareSite
        from medfl.runtimes.monai_fl.client import MedflClientAlgo

        os.chdir(self.start)
        folder = Path(self.folder)
        plan = repeat(run, folder=folder)
        flare_names = wire.wire_names(participants(run))
        names = dict(zip(flare_names.values(), flare_names, strict=True))
        if flare_name not in names:
            raise InputError(
                f"site {flare_name!r}", f"sites are {', '.join(names)}", "use these names"
            )

        def federation() -> Federation:
            federation = plan.federation()
            federation.hold()
            return federation

        algo = MedflClientAlgo(federation, names[flare_name], folder=folder / SITES)
        return FlareSite(algo, names[flare_name], RunFolder(folder))


class RemoteExecutor(_Executor):
    """A site with its own images; its settings are in `local/medfl.yaml`."""

    def __init__(self) -> None:
        super().__init__()
        self._config: SiteConfig | None = None

    def _opened(self, run: Run, flare_name: str, workspace: Any) -> FlareSite:
        from medfl.flare.site import FlareSite
        from medfl.flare.site_sandbox import held_site
        from medfl.runtimes.monai_fl.client import MedflClientAlgo

        self._config = config = SiteConfig.read(Path(workspace.get_site_config_dir()) / CONFIG_FILE)
        policy = config.checked_policy()
        accepted = accepted_run(run, flare_name, config)

        def opened() -> Federation | HeldSite:
            if config.is_shipped or os.environ.get(NO_WALLS):
                return open_site(run, flare_name, config, self._carried, self._say)

            assert self._carried is not None
            return held_site(accepted, flare_name, config, self._carried, policy, self._say)

        algo = MedflClientAlgo(
            opened,
            flare_name,
            folder=config.folder,
            outbound=policy.outbound,
            audit=config.audit or None,
            say=self._say,
            jobs=JOBS,  # `accepted_run` has checked the policy, and `FlareSite` knows the job
        )

        return FlareSite(algo, flare_name, job=job_of(run), rounds=run.rounds)

    def _say(self, text: str) -> None:
        self.logger.info(text)  # FLARE's log at the site; `self.log_info` would make an event of it

    def _failed(self, error: Exception, flare_name: str) -> Payload:
        from medfl.flare.site import hidden_failure

        if self._config is not None and self._config.audit:
            with suppress(MedflError):  # it is in the log of the process anyway
                guard = Guard(None, self._config.audit, None, str, flare_name)
                guard.log_failure(Activity("open", 0), error)

        return hidden_failure(flare_name, error)


def _read(result: Shareable, site: str) -> Payload:
    """Return a client's answer, or a failure if there is none."""
    code = result.get_return_code()
    if code not in (None, ReturnCode.OK):
        return wire.failure(f"FLARE says {code}")
    try:
        return from_model(FLModelUtils.from_shareable(result), f"site {site!r}")
    except Exception as error:  # a client may send anything
        return wire.failure(error)


def _paths(*parts: type) -> list[str]:
    return [f"{part.__module__}.{part.__name__}" for part in parts]


ALLOWED = _paths(RemoteController, RemoteExecutor)
"""Class paths for the allow-list of a site or a server with its own images."""
SIMULATED = _paths(MedflController, MedflExecutor)
"""Class paths for one machine: they take folders from the job, and must not be on any other allow-list."""


# FLARE's own transfer of tensors, except that unreadable ones do not end the job.
#
# FLARE ends the server's job process, and so the whole job, if a site's tensors are not valid safetensors. Here they
# arrive as `Unreadable`, which `wire.from_model` refuses, naming tensor and site.


class Unreadable:
    """Replaces a tensor that could not be read."""


class _AllUnreadable(dict[str, Any]):
    """The result of an unreadable download: has an `Unreadable` under every name."""

    def __contains__(self, name: object) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Any:
        """Return an `Unreadable`."""
        return Unreadable()


class Tensors(TensorDecomposer):  # type: ignore[misc]
    """FLARE's decomposer with `Unreadable` in place of errors."""

    def download(self, *args: Any, **settings: Any) -> tuple[str, Any]:
        """Return ("", tensors by name)."""
        try:
            error, items = super().download(*args, **settings)
        except Exception as failed:  # of any type: the bytes are untrusted
            error = str(failed)
            items = None

        if error:
            self.logger.warning(f"tensors that cannot be read: {error}")
            return "", _AllUnreadable()

        return "", items

    def native_recompose(self, data: bytes, manager: Any = None) -> Any:
        """Return the tensor."""
        try:
            return super().native_recompose(data, manager)
        except Exception as failed:  # as above
            self.logger.warning(f"a tensor that cannot be read: {failed}")
            return Unreadable()


def register_tensors() -> None:
    """Make FLARE use `Tensors` in this process."""
    fobs.register(Tensors)
