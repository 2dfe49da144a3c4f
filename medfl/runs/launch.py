"""federate: one call from a request to a finished run folder; used by `medfl run` and notebooks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfl import methods
from medfl.bundle.files import shipped_folders
from medfl.bundle.open import bundle_of, is_recorded, notes_on_images
from medfl.core import (
    LOSSLESS,
    MEAN,
    Config,
    Document,
    InputError,
    Print,
    Run,
    check_arguments,
    check_name,
    refuse_untrusted_module,
    withdrawn_settings,
)
from medfl.data import Prepared, free_gpu_memory
from medfl.data.partition.table import table as partition_table
from medfl.evaluation import higher_is_better
from medfl.policy.inspection import TRAINING, inspect
from medfl.policy.policy import Policy
from medfl.problem import is_parts, prepared_sections
from medfl.report import RunFiles, cross_site, site_chart, write_report
from medfl.runs import request_checks, text_record
from medfl.runs.pace import standstill, steps_note
from medfl.runs.plan import Plan, Request, check_kinds, make_plan, repeat, request_of, versions
from medfl.runs.request_checks import require_same_settings
from medfl.runtimes import (
    Execution,
    Federation,
    Launch,
    Runtime,
    Tolerance,
    registry,
    site_settings,
)
from medfl.runtimes.callbacks import EarlyStopping, callback_names
from medfl.runtimes.local.memory import jobs_that_fit
from medfl.runtimes.local.trial import try_training_step
from medfl.runtimes.output import tracking
from medfl.runtimes.server import contribution
from medfl.storage import (
    CROSS_SITE,
    LOCAL_REFERENCE,
    RunFolder,
    default_run_folder,
    read_rows,
    read_summary,
    record_of,
    require_unused,
    write_json,
)
from medfl.storage.places import folder_to_resume
from medfl.storage.run_documents import PLAN, plan_in
from medfl.storage.run_integrity import read_verified_run, verified_manifest
from medfl.training.accelerate.arithmetic import run_precision
from medfl.training.accelerate.precision import tf32, threads

_MOST_SITES = 100  # for scoring every model at every site

if TYPE_CHECKING:
    from medfl.runtimes.monai_fl.client import MedflClientAlgo


class Shared:
    """Prepared images shared by several runs: of a bundle with one configuration, on one folder and split."""

    def __init__(self) -> None:
        self._prepared: dict[str, dict[str, Prepared]] = {}

    def sections(self, plan: Plan) -> dict[str, Prepared]:
        """Return the sections of a plan's bundle, prepared once."""
        key = self.key(plan)
        if key not in self._prepared:
            self._prepared[key] = prepared_sections(plan.bundle)
        return self._prepared[key]

    @staticmethod
    def key(plan: Plan) -> str:
        """Return a text that is equal for plans whose prepared images are the same."""
        run = plan.run
        images = [plan.bundle.source, run.config, run.data.folder, run.data.split]
        # What differs from site to site makes the images depend on the partition
        if any(of_sites := [run.unlabelled, run.site_channels, run.site_spacing]):
            images += [of_sites, run.partition.sites]
        return json.dumps(images, sort_keys=True, default=str)


@check_arguments
def federate(
    bundle: str | None = None,
    *,
    options: Config | None = None,
    config: Config | None = None,
    requested: Config | None = None,
    source: str | Path | None = None,
    shared: Shared | None = None,
    launch: Launch | None = None,
    **settings: Any,
) -> Document:
    """Run a federation and return its summary with the run folder under "folder".

    Args:
        bundle: a shipped bundle's name or a folder; with `source` or `resume` only if the run's bundle has moved.
        options: options of the method.
        config: overrides of the bundle's configuration.
        requested: other settings by name (method, data, sites, partition, rounds, ...; see `runs.plan.Request`).
        source: run.json of a recorded run to repeat.
        shared: images that other runs have prepared, or will use.
        launch: how the run is executed; it does not change the weights.
        settings: fields of `launch` by name: out, resume, jobs, with_local, cross_site, contribution, save_predictions,
            profile, track, runtime, min_replies, deadline, callbacks, untested, progress, command, say; see
            `medfl.runtimes.launch.Launch`.

    Raises:
        InputError: bad input; nothing was written.
        RunError: failed while running; the last committed round is intact.
    """
    launch = (launch or Launch()).having(**settings)
    options = options or {}
    config = config or {}
    requested = dict(requested or {})
    if requested.get("eval_every") == 0:
        requested.setdefault("patience", 0)  # a bundle's own early stopping needs scores

    source = None if source is None else Path(source)
    say = launch.say

    # Checks before the data are accessed
    check_kinds(requested)
    request_checks.check_before_imports(
        # importing PyTorch takes seconds: a typing mistake should not
        bundle,
        requested,
        has_overrides=bool(options or config),
        source=source,
        launch=launch,
    )
    runtime = registry.load(launch.runtime)
    tolerance = _checked_tolerance(launch, runtime)

    # Teachers' outputs are cached for other runs too, which may not use TF32
    with tf32(False):
        if source is not None:
            plan = recorded_plan(source, requested.get("data"), say, bundle)
        elif launch.resume and launch.out is not None:
            plan = resumed_plan(launch.out, bundle, options, config, requested, say)
        else:
            plan = make_plan(Request(str(bundle), options=options, config=config, **requested), say)

        plan = with_notes(plan)

    run = plan.run
    _check_runs_in_one_process(plan, launch, runtime)
    _check_outputs(plan, launch)
    path = launch.out or default_run_folder(plan.bundle.name, run.method, run.seed)
    if launch.resume:
        _require_same_runtime(path, launch.runtime)
    else:
        require_unused(path, LOCAL_REFERENCE)

    _say_notes(plan, say)
    if launch.cross_site:
        say(_cost_of_cross_site(plan, launch.with_local))

    workers = launch.jobs
    if workers is None:
        workers = min(os.cpu_count() or 1, max(1, int(run.cohort * len(run.partition.sites))))

    with threads(run.threads), run_precision(run):
        public = None
        if plan.public:
            with tf32(False):
                public = plan.public.prepare(jobs=workers, progress=launch.progress, say=say)

        prepared = shared.sections(plan) if shared is not None else None
        federation = Federation(
            plan.bundle,
            plan.method,
            run,
            prepared=prepared,
            public=public,
            jobs=workers,
            progress=launch.progress,
        )
        tolerance.check(federation)
        if launch.contribution:
            contribution.check(federation, runtime.remote)
            say(contribution.cost(federation))

        # overrides may break a bundle; it has only been tried without them
        if config and not launch.resume:
            try_training_step(federation, config)

        if launch.save_predictions:
            _require_geometry(federation)

        if run.device != "cpu" and not runtime.remote:
            say(federation.hold(free_gpu_memory))

        if launch.jobs is None:
            workers = jobs_that_fit(federation, workers, say)

        launch = replace(launch, out=path, jobs=workers)
        summary = _execute(
            plan,
            federation,
            path,
            launch,
            runtime,
            {"runtime": launch.runtime, **tolerance.record()},
        )

    if not launch.untested:
        cross_site.write(path)
        write_report(path)
        _say_if_rising(path, run, say)

    return {**summary, "folder": str(path)}


def _checked_tolerance(launch: Launch, runtime: Runtime) -> Tolerance:
    """Return which missing replies a run tolerates; InputError if the launch's settings are contradictory."""
    runtime.check(launch)
    if launch.untested and (launch.with_local or runtime.remote):
        raise InputError(
            "untested with a Local reference or on FLARE",
            "a run in this process alone",
            "leave it out",
        )

    if launch.track is not None:
        tracking.parse(launch.track)
    return Tolerance(launch.min_replies, launch.deadline)


def _check_outputs(plan: Plan, launch: Launch) -> None:
    """Raise an InputError if a run cannot be profiled, or its predictions saved, as requested."""
    if launch.profile and plan.run.compile:
        raise InputError(
            "--profile with --compile",
            "it watches every step, and a compiled one cannot be watched",
            "leave one out",
        )

    sites = len(plan.run.partition.sites)
    if launch.cross_site and (sites > _MOST_SITES or registry.load(launch.runtime).remote):
        raise InputError(
            f"--cross-site with {sites} sites and --runtime {launch.runtime}",
            f"at most {_MOST_SITES} sites, whose test images are all here: the runtimes simulator and monai-fl",
            "leave it out",
        )

    bundle = plan.bundle
    if launch.save_predictions and bundle.task != "segmentation":
        raise InputError(
            f"--save-predictions with bundle {bundle.name!r}, a {bundle.task} task",
            "masks are predicted in segmentation",
            "leave it out; predictions.csv is written in any case",
        )


def _say_notes(plan: Plan, say: Print) -> None:
    """Tell the user what to know about a run before it starts, and how its images are divided."""
    run = plan.run
    for note in plan.notes:
        say(f"note: {note}")

    if run.tf32 and run.device == "cpu":
        say("note: --tf32: of no effect on a CPU")

    if run.compile:
        say("note: --compile: the first training steps wait for the compiler, seconds to minutes")

    say(_division(plan))
    say(steps_note(run))


def _cost_of_cross_site(plan: Plan, with_local: bool) -> str:
    """Describe how many evaluations --cross-site adds, and how long they take."""
    sites = len(plan.run.partition.sites)
    models = sites * (methods.has_site_models(plan.method) + with_local)
    if not models:
        return (
            f"note: --cross-site: {plan.run.method} has one model for all sites, which is scored at each in any case; "
            "add --with-local for what each site trains alone, or take a method with a model for each"
        )

    images = len(plan.run.partition.owners("test"))
    return (
        f"cross-site: {models} models at {sites} sites, {models * sites} examinations at the end; each model goes "
        f"through all {images} test images, about {models} times as long as scoring one model takes"
    )


def _execute(
    plan: Plan,
    federation: Federation,
    path: Path,
    launch: Launch,
    runtime: Runtime,
    record: Config,
) -> Document:
    """Execute a run in its folder, after its Local reference if it has one; return its summary.

    `record` has the additional entries of run.json.
    """
    with_local = plan.run.method != "local" and (
        launch.with_local or (launch.resume and has_local(path))
    )
    if not with_local:
        opened = open_folder(plan, federation, path, launch.command, record)
    else:
        # The folder of the reference is inside that of the run, which is therefore created first
        local = _local(plan)
        # on the already prepared images
        alone = Federation(local.bundle, local.method, local.run, prepared=federation.sections)
        local_matrix = path / "local" / CROSS_SITE
        is_local_due = is_due(local.run, path / "local") or (
            launch.cross_site and not local_matrix.is_file()
        )
        # The remaining options are for the run itself, not for its reference
        reference_launch = replace(
            launch,
            contribution=False,
            save_predictions=False,
            profile=False,
            track=None,
            callbacks=(),
            untested=False,
            followed_by=2 * launch.followed_by + 1,
        )
        # each subsequent run has its own reference: the remaining time includes both
        launch = replace(launch, followed_by=2 * launch.followed_by)
        opened = open_folder(plan, federation, path, launch.command, {**record, "with_local": True})

        if is_local_due:
            launch.say(f"first of two phases: {plan.run.rounds} rounds of Local, each site alone")
            with discarding(*opened):
                local_folder = open_folder(local, alone, path / "local", launch.command, record)
                _execute_in(*local_folder, alone, reference_launch, runtime)

            launch.say(f"second of two phases: {plan.run.rounds} rounds of {plan.run.method}")

    if launch.callbacks:
        # functions cannot be recorded, but their presence changes how a run may be repeated
        opened[0].add_to_run({"callbacks": callback_names(launch.callbacks)})

    summary = _execute_in(*opened, federation, launch, runtime)
    return _add_local(path) if with_local else summary


def _execute_in(
    folder: RunFolder,
    resumed: bool,
    federation: Federation,
    launch: Launch,
    runtime: Runtime,
) -> Document:
    """Run a federation in its folder, or continue the run that is there."""
    execution = Execution(federation, folder, replace(launch, resume=resumed))
    # The server may still refuse the sites' introductions, before any training
    with discarding(folder, resumed):
        return runtime.execute(execution)


def _say_if_rising(path: Path, run: Run, say: Print) -> None:
    """Say how to train on if the validation metric was still improving, and how to stop early if it stalled."""
    files = RunFiles(path)
    scores = {}
    for row in files.rounds:
        scores[row["round"]] = (row.get("val") or {}).get(files.key)

    higher = higher_is_better(files.key)
    still = standstill(scores, higher, EarlyStopping.patience)
    if still is not None and not run.patience:
        best, end = still
        say(
            f"note: validation was {scores[best]:.3f} in round {best} of {len(scores)}, and not better after it: "
            f"--patience {EarlyStopping.patience} would have ended the run with round {end}"
        )

    rise = files.rise
    if rise is None:
        return

    further = f"medfl run --resume --out {folder_to_resume(path)} --rounds {2 * run.rounds}"
    if is_parts(run.bundle_path):
        further = f"medfl.run(parts, ..., out={str(path)!r}, resume=True, rounds={2 * run.rounds})"

    way = "rising" if higher else "falling"
    say(
        f"note: validation was still {way} at the end, from {rise[0]:.3f} to {rise[1]:.3f}: go on with {further}"
    )


def site_algo(
    bundle: str,
    name: str,
    *,
    options: Config | None = None,
    config: Config | None = None,
    requested: Config | None = None,
    folder: str | Path | None = None,
    host: str = "medfl",
    policy: str | Path | None = None,
    audit: str | Path | None = None,
    say: Print = str,
) -> MedflClientAlgo:
    """Return one site, which owns all images of its data folder, to be driven by a MONAI FL host.

    The images are prepared when the host initializes it.

    Args:
        bundle: a shipped bundle's name or a folder.
        name: the site's name in the federation.
        options: options of the method.
        config: overrides of the bundle's configuration.
        requested: other settings by name, as for `federate`; all sites of a federation have the same.
        folder: where the site's State is stored; without one, in memory.
        host: "medfl", or "averaging" for a host that averages weights and knows no methods.
        policy: the site's policy file, with which bundle and outbound data must comply.
        audit: the site's audit log.
        say: prints lines for the user.

    Raises:
        InputError: bad input, or a bundle that the policy refuses; nothing of it was run.
    """
    from medfl.runtimes.monai_fl.client import MedflClientAlgo

    check_name(name, "site")
    site_policy = None if policy is None else Policy.read(Path(policy))
    if site_policy is not None:
        # before the bundle is opened, which evaluates its expressions
        inspect(shipped_folders().get(bundle, Path(bundle)), site_policy).require(TRAINING)

    site_request = site_settings.of_request_for(name, bundle, requested or {})
    values = {**(requested or {}), "sites": 1, "partition": "iid", **site_request}
    request = Request(bundle, options=options or {}, config=config or {}, **values)
    plan = make_plan(request, say, site_policy, name)

    # Called by the host when it initializes the site: preparing images takes long
    def make_federation() -> Federation:
        federation = plan.federation(say)
        if plan.run.device != "cpu":
            say(federation.hold(free_gpu_memory))

        return federation

    site_policy = site_policy or Policy()
    return MedflClientAlgo(
        make_federation,
        name,
        folder=folder,
        host=host,
        outbound=site_policy.outbound,
        audit=audit,
        jobs=site_policy.jobs,
        say=say,
    )


def _require_same_runtime(path: Path, runtime: str) -> None:
    """Raise an InputError if a run would be resumed by a runtime that cannot access its sites' States."""
    # runs of early versions do not say: there was only one runtime
    was = RunFolder.existing(path).read_run()[1].get("runtime") or runtime
    refuse_untrusted_module(was, "runtime", path / "run.json")
    if registry.load(was).remote != registry.load(runtime).remote:
        raise InputError(
            f"--resume with --runtime {runtime}",
            f"the sites of a run on FLARE keep their States themselves; this one ran on {was}",
            f"add --runtime {was}",
        )


def _check_runs_in_one_process(plan: Plan, launch: Launch, runtime: Runtime) -> None:
    """Raise an InputError if Python objects would have to leave this process, or early stopping has no scores."""
    objects = ""
    if launch.callbacks:
        objects = "callbacks"
    elif is_parts(plan.bundle.source):
        objects = "parts in Python"

    if objects and runtime.remote:
        raise InputError(
            f"{objects} with --runtime {launch.runtime}",
            "its server and sites are processes of their own",
            "use the runtime simulator or monai-fl",
        )

    stops_early = plan.run.patience or any(
        isinstance(callback, EarlyStopping) for callback in launch.callbacks
    )

    if plan.run.eval_every == 0 and stops_early:
        raise InputError(
            "EarlyStopping or --patience with eval_every 0",
            "rounds that are evaluated",
            "leave eval_every out",
        )


def _division(plan: Plan) -> str:
    """Return the table of the partition, or only the range of the sites' sizes if there are too many to list."""
    record = plan.run.partition
    if len(record.sites) <= LISTED:
        return partition_table(plan.partition, plan.sections, plan.counted or None)

    sizes = sorted(len(ids["train"]) for ids in record.sites.values())
    summary = f"{sizes[0]} to {sizes[-1]} training images each, median {sizes[len(sizes) // 2]}"
    text = f"partition {record.spec}, seed {record.seed}: {len(sizes)} sites, {summary}; all are in run.json"
    for note in record.notes:
        text += f"\nnote: {note}"

    return text


def _same_networks(plan: Plan) -> str:
    """Return the option `bodies` with which Local trains the same network at each site."""
    bodies = methods.extra(plan.method, methods.Bodies)
    if bodies is not None:
        return bodies.bodies

    configs = methods.site_networks(plan.method, list(plan.run.partition.sites)).values()
    network_name = plan.bundle.get("network_name") if any(configs) else ""
    if network_name:
        return ",".join(str(config.get("network") or network_name) for config in configs)

    return ""


def _require_geometry(federation: Federation) -> None:
    """Raise an InputError if masks could not be mapped back to the grids of the test images' files."""
    prepared = federation.sections["test"]
    if len(prepared.geometry) != len(prepared):
        raise InputError(
            f"--save-predictions with bundle {federation.bundle.name!r}, whose test images do not say where their "
            "pixels lie in the files",
            "its validation transforms keep the image's metadata (original_affine, spatial_shape) and draw nothing",
            "leave it out, or read the images with LoadImaged and keep track_meta",
        )


def _local(plan: Plan) -> Plan:
    """Return the plan of the Local reference: the same sites, networks and steps."""
    method = methods.load("local", {"bodies": _same_networks(plan)})
    # Nothing is sent, so message settings return to their defaults
    run = replace(
        plan.run,
        method="local",
        options=methods.values_of(method),
        public=None,
        text=None,
        max_share=None,
        messages=LOSSLESS,
        aggregation=MEAN,
    )
    return replace(plan, run=run, method=method, public=None)


def _add_local(path: Path) -> Document:
    """Fill the `local_` columns of sites.csv, and the summary's "local", from the Local reference beside it."""
    folder = RunFolder(path)
    summary = read_summary(path / "summary.json")
    summary["local"] = read_summary(path / "local" / "summary.json").get("site_models")
    local = {row["site"]: row for _, row in read_rows(path / "local" / "sites.csv")}
    rows = [row for _, row in read_rows(path / "sites.csv")]

    for row in rows:
        for column, value in local.get(row["site"], {}).items():
            if column.startswith("personal_"):
                row[f"local_{column.removeprefix('personal_')}"] = value

    folder.write_table("sites.csv", rows)
    if (path / CROSS_SITE).is_file() and (path / "local" / CROSS_SITE).is_file():
        ours = [row for _, row in read_rows(path / CROSS_SITE)]
        theirs = [{**row, "model": "local"} for _, row in read_rows(path / "local" / CROSS_SITE)]
        folder.write_table(CROSS_SITE, [*ours, *theirs])

    folder.write_summary(summary)
    return dict(summary)


# A run folder: created, or reopened to resume its run if that is undamaged and has the same settings.

LISTED = 200
"""Maximum number of sites for the partition's table and picture; with more they are unreadable."""


def recorded_plan(source: Path, data: str | None, say: Print, bundle: str | None) -> Plan:
    """Return the plan that repeats a recorded run with the installed versions; `source` is its run.json or folder.

    Raises:
        InputError: the record is damaged, or bundle or data are not the recorded ones.
    """
    file = record_of(source)
    run, document = read_verified_run(file)
    _tell_withdrawn(document, say)
    _tell_versions(run, "was recorded", say)
    plan = repeat(run, data, say, file.parent, bundle)
    return replace(plan, run=replace(plan.run, versions=versions()))


def resumed_plan(
    path: Path,
    bundle: str | None,
    options: Config,
    config: Config,
    requested: Config,
    say: Print,
) -> Plan:
    """Return the plan of the run in a folder, perhaps with more rounds.

    It keeps its original versions, and so its hash; run.json lists the versions of each resumption.

    Raises:
        InputError: the folder has no run, the run is damaged, or other settings than its own are requested.
    """
    folder = RunFolder.existing(path)
    run, document = read_verified_run(path / "run.json")
    rounds = requested.get("rounds", run.rounds)
    # before planning, which takes long
    request_checks.check_rounds(rounds, run.init)
    _committed(folder, rounds)

    moved_bundle = None
    other_bundle = None
    if bundle and bundle != bundle_of(run):
        if is_recorded(bundle, run):
            # the same content in another folder
            moved_bundle = bundle
        else:
            other_bundle = bundle

    if other_bundle or options or config or set(requested) - {"rounds", "data"}:
        planned = make_plan(request_of(run, other_bundle, options, config, **requested), say).run
        planned = replace(planned, versions=run.versions)
        # If the same bundle has changed, `repeat` below reports it and the remedy
        if not other_bundle:
            planned = replace(planned, bundle_sha256=run.bundle_sha256)
        require_same_settings(planned, run)

    _tell_withdrawn(document, say)
    _tell_versions(run, "began", say)
    if rounds > run.options.get("rounds", rounds):
        ends = run.options["rounds"]
        say(
            f"note: the schedule of {run.method} ends with round {ends}; it is not stretched over more"
        )

    plan = repeat(run, requested.get("data"), say, path, moved_bundle)
    return replace(plan, run=replace(plan.run, rounds=rounds))


def with_notes(plan: Plan) -> Plan:
    """Return a plan whose notes say which user images were excluded, and whether patients are unknown."""
    notes = notes_on_images(plan.bundle)
    record = replace(plan.run.data, notes=(*plan.run.data.notes, *notes))
    return replace(plan, run=replace(plan.run, data=record), notes=(*plan.notes, *notes))


def has_local(path: Path) -> bool:
    """Tell whether a run was started with a Local reference."""
    folder = RunFolder.existing(path)
    return bool(folder.read_run()[1].get("with_local")) or (path / "local" / "run.json").is_file()


def is_due(run: Run, path: Path) -> bool:
    """Tell whether a Local reference still has rounds to train; raises as `rounds_done`."""
    if _scored(path) == run.rounds:
        require_same_settings(run, read_verified_run(path / "run.json")[0])
        return False

    rounds_done(run, path)
    return True


def _scored(path: Path) -> int | None:
    """Return the round after which a run was finally scored, None if it was not."""
    with suppress(InputError):
        rounds = read_summary(path / "summary.json")["rounds"]
        return rounds if (path / "sites.csv").is_file() else None

    return None


def rounds_done(run: Run, path: Path, sums: bool = True) -> int | None:
    """Return how many rounds of a run are in a folder, None if empty; InputError if it is another or damaged."""
    if not (path / "run.json").is_file():
        return None
    require_same_settings(run, read_verified_run(path / "run.json")[0])
    return _committed(RunFolder(path), run.rounds, sums)


def open_folder(
    plan: Plan, federation: Federation, path: Path, command: str, extra: Config
) -> tuple[RunFolder, bool]:
    """Create the folder of a run, or open it (`federate` has refused others), and write its record.

    Returns:
        The folder, and whether the run is resumed.
    """
    done = rounds_done(plan.run, path, sums=False)
    if done is None:
        folder = RunFolder.create(path, LOCAL_REFERENCE)
    else:
        folder = RunFolder.existing(path)

    extra = {**extra, "leaves": federation.describe_exchange()}
    if done is not None:
        folder.state.mkdir(exist_ok=True)
        before = folder.read_run()[1]
        now = {"round": done, "versions": versions(), "command": command}
        extra["resumed"] = [*(before.get("resumed") or []), now]
        command = before.get("command") or command

    text_record.save(plan.bundle, plan.run, plan.method, path)
    folder.write_run(plan.run, {**plan.extra(command), **extra})
    if choices := plan_in(Path(plan.bundle.source or os.devnull, "docs")):
        write_json(path / PLAN, choices)

    if len(plan.run.partition.sites) <= LISTED:
        site_chart.plot(plan.partition, plan.sections, plan.bundle.classes, path / "partition.png")

    return folder, done is not None


@contextmanager
def discarding(folder: RunFolder, resume: bool) -> Iterator[None]:
    """Remove the files of a new run that is refused before its first round."""
    try:
        yield
    except InputError:
        if not resume and folder.manifest() is None:
            # otherwise the corrected command would be refused because its folder is in use
            folder.remove_unstarted(LOCAL_REFERENCE)

        raise


def _tell_withdrawn(document: Config, say: Print) -> None:
    """Report the settings of a recorded run that are ignored here."""
    names = " and ".join(f"--{name}" for name in withdrawn_settings(document))
    if names:
        say(f"note: {names} of the recorded run has no effect any more; --compile is what is left")


def _tell_versions(run: Run, how: str, say: Print) -> None:
    """Report versions that changed since a run was recorded: its weights may differ in the last bits."""
    current = versions()
    changes = []
    for name, recorded in run.versions.items():
        if current.get(name, recorded) != recorded:
            changes.append(f"{name} {recorded} (here {current[name]})")

    if changes:
        say(
            f"note: the run {how} with {', '.join(changes)}: its weights may differ in the last bits from here on"
        )


def _committed(folder: RunFolder, rounds: int, sums: bool = True) -> int:
    """Return how many rounds of a run are done; InputError if fewer are requested, or the folder is damaged."""
    done = int((verified_manifest(folder, sums) or {"round": 0})["round"])
    if rounds < done:
        where = " of the Local reference" if folder.path.name == "local" else ""
        raise InputError(
            f"--rounds {rounds}",
            f"{done} rounds{where} are done already",
            f"ask for at least {done}",
        )

    return done
