"""Cross-validation: one run per fold, each case tested in one of them, in one folder that can be resumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from medfl.bundle.bundle import Bundle, shipped
from medfl.core import Config, Document, InputError, fields_of, refuse_untrusted_module, type_errors
from medfl.datasets.readers.splitting import check_folds
from medfl.report import folds as report
from medfl.report.run_files import RunFiles
from medfl.runs.launch import federate
from medfl.runs.plan import Plan, Request, make_plan
from medfl.runtimes import Launch
from medfl.storage import CROSS_SITE, FOLDS, PHANTOM, default_run_folder, require_unused, write_json
from medfl.storage.run_documents import require_plain

_SETTINGS: Config = {
    "with_local": bool,
    "cross_site": bool,
    "contribution": bool,
    "save_predictions": bool,
    "runtime": str,
    "min_replies": int | None,
    "deadline": float | None,
}
"""Fields of a `Launch` in the record; a cross-validation is resumed with them."""
_ARGUMENTS = {"bundle", "options", "config"}
"""Fields of a `Request` that the record has beside `requested`, not in it."""
_CHANGES = {"rounds", "data"}
"""Settings that may change when a cross-validation is resumed."""


def cross_validate(
    bundle: str,
    folds: int,
    *,
    options: Config | None = None,
    config: Config | None = None,
    requested: Config | None = None,
    launch: Launch | None = None,
    **settings: Any,
) -> Document:
    """Run the folds of a bundle and return the content of summary.json, with the folder under "folder".

    Each fold is a run of its own, with `split=fold:NUMBER/COUNT` in its configuration. The images of a patient are in
    one fold if patients are known. An eighth of a fold's non-test images are used for validation. `launch` says how
    each fold is run; `settings` are fields of it by name, as in `medfl.federate`.

    Raises:
        InputError: bad input; nothing was written.
        RunError: a fold failed; `resume` continues.
    """
    check_folds(folds)
    launch = (launch or Launch(command="medfl.runs.folds.cross_validate(...)")).having(**settings)
    # folders as absolute paths: the record is read from other working directories too
    if bundle not in shipped():
        bundle = str(Path(bundle).expanduser().resolve())

    record = {
        "folds": folds,
        "bundle": bundle,
        "options": dict(options or {}),
        "config": dict(config or {}),
        "requested": _wherever(requested or {}),
        "settings": {name: getattr(launch, name) for name in _SETTINGS},
        "command": launch.command,
    }

    if launch.out is not None:
        require_unused(launch.out)

    # all of them before anything is written: an impossible fold is refused now instead of after days
    plans = list(_plans(record, range(1, folds + 1)))
    _require_disjoint(plans)
    run = plans[0].run
    folder = launch.out or Path(
        f"{default_run_folder(plans[0].bundle.name, run.method, run.seed)}-folds"
    )
    require_unused(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # a resumed fold must use the same split, or a case might be tested twice
    record["images"] = [plan.run.data.checksum for plan in plans]
    write_json(folder / FOLDS, record)

    return _run(folder, record, {}, launch)


def resume(
    folder: str | Path,
    requested: Config | None = None,
    *,
    launch: Launch | None = None,
    **settings: Any,
) -> Document:
    """Resume the cross-validation in a folder, perhaps with more rounds; returns the same as `cross_validate`.

    Only fields of `launch` that the folder does not record count: jobs, track, progress, say.

    Raises:
        InputError: there is no cross-validation, its images have changed, or settings were changed that may not be.
    """
    launch = (launch or Launch()).having(**settings)
    root = Path(folder)
    changes = dict(requested or {})
    record = report.read_record(root)
    require_plain(root)
    allowed = {
        "settings": {*_SETTINGS},
        "requested": fields_of(Request).keys() - _ARGUMENTS,
    }
    odd = []
    for name, keys in allowed.items():
        odd += [f"{key!r} under {name}" for key in sorted(record[name].keys() - keys)]

    odd += type_errors(record["settings"], _SETTINGS, "settings.")

    if odd:
        raise InputError(
            f"{root / FOLDS}: {odd[0]}",
            "a cross-validation as medfl run --folds writes it",
            "restore it",
        )

    # a record may come from somebody else: it must not import code of its own
    for name, section in (("method", "requested"), ("runtime", "settings")):
        refuse_untrusted_module(str(record[section].get(name, "")), name, root / FOLDS)

    fixed = sorted(changes.keys() - _CHANGES)
    if fixed:
        raise InputError(
            f"--resume of a cross-validation with {', '.join(fixed)}",
            "it is resumed with its own settings; only --rounds may grow",
            "leave them out, or start in another folder",
        )

    # a fold that was begun has its own record, which is checked when it is resumed
    new = []
    for number in range(1, record["folds"] + 1):
        if not _begun(root, number):
            new.append(number)

    plans = _plans({**record, "requested": {**record["requested"], **changes}}, new)
    for number, plan in zip(new, plans, strict=True):
        if plan.run.data.checksum != record["images"][number - 1]:
            raise InputError(
                f"other images in {plan.run.data.folder} than when {root} was begun",
                "folds divide the same images",
                "restore them, or start in another folder",
            )

    recorded = {name: record["settings"].get(name, getattr(Launch(), name)) for name in _SETTINGS}
    for name in ("cross_site", "contribution"):  # may also be requested later
        recorded[name] = recorded[name] or getattr(launch, name)

    launch = launch.having(**recorded, command=record["command"], resume=False)
    return _run(root, record, changes, launch)


def _wherever(requested: Config) -> Document:
    """Return settings that mean the same in another working directory."""
    data = requested.get("data")
    if data in (None, PHANTOM):
        return dict(requested)

    return {**requested, "data": str(Path(str(data)).expanduser().resolve())}


def _plans(record: Config, numbers: Iterable[int]) -> Iterator[Plan]:
    """Return the plan of each fold."""
    for number in numbers:
        try:
            request = Request(
                record["bundle"],
                options=record["options"],
                config=_config(record, number),
                **record["requested"],
            )
            yield make_plan(request)
        except InputError as error:
            if "split" in Bundle(record["bundle"]):
                raise
            raise InputError(
                f"--folds with bundle {record['bundle']}",
                "a shipped bundle, or one that medfl new wrote: its configuration has the id 'split'",
                "write one for these images with medfl new",
            ) from error


def _config(record: Config, number: int) -> Document:
    return {**record["config"], "split": f"fold:{number}/{record['folds']}"}


def _require_disjoint(plans: list[Plan]) -> None:
    tested = []
    for plan in plans:
        tested += [str(item["id"]) for item in plan.bundle.items("test")]

    if len(tested) != len(set(tested)):
        raise InputError(
            f"--folds with bundle {plans[0].bundle.name!r}, whose id 'split' does not make folds",
            "a shipped bundle, or one that medfl new wrote",
            "write one for these images with medfl new",
        )


def _run(folder: Path, record: Config, changes: Config, launch: Launch) -> Document:
    """Run folds that are missing or have too few rounds, and write the overall summary."""
    missing = []
    for number in range(1, record["folds"] + 1):
        fold = report.fold_folder(folder, number)
        lacks_matrix = launch.cross_site and not (fold / CROSS_SITE).is_file()
        if lacks_matrix or not _is_done(fold, changes):
            missing.append(number)

    for done, number in enumerate(missing, 1):
        launch.say(f"fold {number} of {record['folds']}")
        of_fold = replace(
            launch,
            out=report.fold_folder(folder, number),
            command=f"{launch.command} (fold {number})",
            followed_by=len(missing) - done,
        )
        if _begun(folder, number):
            # the fold's own record says whether it has a Local reference
            federate(requested=changes, launch=replace(of_fold, resume=True, with_local=False))
        else:
            federate(
                record["bundle"],
                options=record["options"],
                config=_config(record, number),
                requested={**record["requested"], **changes},
                launch=of_fold,
            )

    return {**report.write(folder).summary(), "folder": str(folder)}


def _begun(folder: Path, number: int) -> bool:
    return (report.fold_folder(folder, number) / "run.json").is_file()


def _is_done(folder: Path, changes: Config) -> bool:
    """Tell whether a fold has its summary after the rounds of its record, or after their changed number."""
    if not (folder / "summary.json").is_file():
        return False
    run = RunFiles(folder)
    rounds = int(run.record["rounds"])
    return run.finished and rounds >= changes.get("rounds", rounds)
