"""A run's folder: created, or reopened to resume the run in it if that run is undamaged and has the same settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from medfl.bundle.open import bundle_of, ids_of, is_recorded
from medfl.core.documents import Config
from medfl.core.errors import InputError
from medfl.core.run import Run, withdrawn_settings
from medfl.core.task import SECTIONS
from medfl.core.terminal import Print
from medfl.datasets import own
from medfl.report import partition_plot
from medfl.runs import text_record
from medfl.runs.plan import Plan, make_plan, repeat, request_of, versions
from medfl.runs.request_checks import require_same_settings
from medfl.runtimes.federation import Federation
from medfl.storage.places import LOCAL_REFERENCE, record_of
from medfl.storage.run_documents import read_summary
from medfl.storage.run_folder import RunFolder
from medfl.storage.run_integrity import read_verified_run, verified_manifest

LISTED = 200
"""The most sites for which the partition's table and picture are made; with more they cannot be read."""


def recorded_plan(source: Path, data: str | None, say: Print, bundle: str | None = None) -> Plan:
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

    It keeps the versions that it began with, and so its hash; run.json lists the versions of each resumption.

    Raises:
        InputError: the folder has no run, the run is damaged, or settings other than its own are asked for.
    """
    folder = RunFolder.existing(path)
    run, document = read_verified_run(path / "run.json")
    rounds = requested.get("rounds", run.rounds)
    _refuse_fewer(rounds, (verified_manifest(folder) or {"round": 0})["round"], path)

    moved_bundle = None
    other_bundle = None
    if bundle and bundle != bundle_of(run):
        if is_recorded(bundle, run):
            moved_bundle = bundle
        else:
            other_bundle = bundle

    if other_bundle or options or config or set(requested) - {"rounds", "data"}:
        planned = make_plan(request_of(run, other_bundle, options, config, **requested), say).run
        planned = replace(planned, versions=run.versions)
        # If the same bundle has changed, `repeat` below says so, and what to do
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
    """Return a plan whose notes say which of the user's own images were left out, and whether patients are unknown.

    Only bundles that name their folders as `medfl new` does have them: dataset_dir, images, masks, labels, classes.
    """
    if plan.bundle.dataset:
        return plan

    ids = ids_of(plan.bundle)
    lists = [plan.bundle.data(section) for section in SECTIONS]
    is_medfl_new = isinstance(ids.get("dataset_dir"), str) and isinstance(ids["classes"], list)
    if not is_medfl_new:
        return plan

    items = []
    for data in lists:
        if not isinstance(data, list):
            return plan
        items += [item for item in data if isinstance(item, Mapping)]

    notes = own.notes(ids["dataset_dir"], items, ids)
    record = replace(plan.run.data, notes=(*plan.run.data.notes, *notes))
    return replace(plan, run=replace(plan.run, data=record), notes=(*plan.notes, *notes))


def has_local(path: Path) -> bool:
    """Tell whether a run was begun with a Local reference."""
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
        rounds: int = read_summary(path / "summary.json")["rounds"]
        return rounds if (path / "sites.csv").is_file() else None
    return None


def rounds_done(run: Run, path: Path, sums: bool = True) -> int | None:
    """Return how many rounds of a run are in a folder, None without one; InputError if that is another or damaged."""
    if not (path / "run.json").is_file():
        return None
    require_same_settings(run, read_verified_run(path / "run.json")[0])
    done = int((verified_manifest(RunFolder(path), sums) or {"round": 0})["round"])
    _refuse_fewer(run.rounds, done, path)
    return done


def open_folder(
    plan: Plan, federation: Federation, path: Path, command: str, extra: Config
) -> tuple[RunFolder, bool]:
    """Make the folder of a run, or open it (`federate` has refused others), and write its record.

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
    if len(plan.run.partition.sites) <= LISTED:
        partition_plot.plot(
            plan.partition, plan.sections, plan.counted or None, path / "partition.png"
        )

    return folder, done is not None


@contextmanager
def discarding(folder: RunFolder, resume: bool) -> Iterator[None]:
    """Remove what was written of a new run that is refused before its first round."""
    try:
        yield
    except InputError:
        if not resume and folder.manifest() is None:
            folder.remove_unstarted(LOCAL_REFERENCE)
        raise


def _tell_withdrawn(document: Config, say: Print) -> None:
    """Say which settings of a recorded run are ignored here."""
    names = " and ".join(f"--{name}" for name in withdrawn_settings(document))
    if names:
        say(f"note: {names} of the recorded run has no effect any more; --compile is what is left")


def _tell_versions(run: Run, how: str, say: Print) -> None:
    """Say which versions have changed since a run was recorded: its weights may differ in the last bits."""
    current = versions()
    changes = []
    for name, recorded in run.versions.items():
        if current.get(name, recorded) != recorded:
            changes.append(f"{name} {recorded} (here {current[name]})")

    if changes:
        say(
            f"note: the run {how} with {', '.join(changes)}: its weights may differ in the last bits from here on"
        )


def _refuse_fewer(rounds: int, done: int, path: Path) -> None:
    """Raise an InputError if fewer rounds are asked for than there are."""
    if rounds < max(1, done):
        where = " of the Local reference" if path.name == "local" else ""
        if done:
            allowed = f"{done} rounds{where} are done already"
        else:
            allowed = "a whole number of at least 1"

        raise InputError(f"--rounds {rounds}", allowed, f"ask for at least {max(1, done)}")
