"""The JSON files of a run folder, read as files that somebody else may have written.

The forms give the types of the entries that medfl reads; a missing entry is an error only if it is required.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, TypedDict

from medfl.core import (
    MOST_BYTES,
    TASKS,
    Config,
    Count,
    Document,
    InputError,
    Plain,
    Refused,
    Run,
    from_cell,
    not_among,
    not_plain,
    outside_walls,
    printable,
    read_bytes,
    read_json,
    read_json_bytes,
    read_table,
    refuse_untrusted_module,
    type_errors,
)

MANIFEST = "manifest.json"
NEWCOMERS = "newcomers.csv"
"""For a method with a model per site: like predictions.csv, for the sites without training items."""
Round = Annotated[int, range(1_000_001)]
_METRICS = dict[str, float | None] | None
_BY_ROUND = dict[str, dict[str, float | None] | None] | None
_CLASSES = dict[str, dict[str, float | None]]
_OBJECT = Document | None
Form = Config
"""Entry -> its type, or the form of an object."""


class _Site(TypedDict):
    train_loss: float | None
    received: _METRICS
    personal: _METRICS


class CoverageRow(TypedDict, total=False):
    """A row of calibration.json for a site or a group, without unknown or unreleased values."""

    name: str
    way: str
    source: str
    calibration: Count
    threshold: float
    test: Count
    coverage: float
    low: float
    high: float
    size: float
    abstained: float


_OPTIONAL_TEXT = str | None
_OPTIONAL_TEXTS = list[str] | None
_OPTIONAL_TEXT_BY_NAME = dict[str, str] | None
RUN: Form = {
    "method": str,
    "bundle": str,
    "task": str,
    "key_metric": str,
    "rounds": Count,
    "classes": _OPTIONAL_TEXTS,
    "options": _OBJECT,
    "config": _OBJECT,
    "versions": _OPTIONAL_TEXT_BY_NAME,
    "command": _OPTIONAL_TEXT,
    "runtime": _OPTIONAL_TEXT,
    "run_hash": _OPTIONAL_TEXT,
    "protocol": _OPTIONAL_TEXT,
    "public": _OBJECT,
    "site_class_counts": dict[str, list[Count]] | None,
    "data": {
        "source": str,
        "folder": _OPTIONAL_TEXT,
        "checksum": _OPTIONAL_TEXT,
        "split": _OPTIONAL_TEXT,
        "counts": dict[str, Count] | None,
        "notes": _OPTIONAL_TEXTS,
    },
    "partition": {
        "spec": str,
        "seed": Count,
        "notes": _OPTIONAL_TEXTS,
        "sites": dict[str, dict[str, list[str]]] | None,
    },
    "resumed": list[Document] | None,
    "seed": Count | None,
}
RESUMED: Form = {"round": Round, "versions": dict[str, str], "command": _OPTIONAL_TEXT}
PUBLIC: Form = {"bundle": str, "section": str, "items": Count, "data": {"source": str}}
_COSTS = dict.fromkeys(
    ("seconds", "seconds_train", "seconds_server", "seconds_eval", "bytes_up", "bytes_down"), float
)
ROUND: Form = {
    "round": Round,
    **_COSTS,
    "cohort": _OPTIONAL_TEXTS,
    "train_loss": float | None,
    "judged": _OPTIONAL_TEXT,
    "val": _METRICS,
    "val_global": _METRICS,
    "val_personal": _METRICS,
    "sites": dict[str, _Site] | None,
    "observed": _METRICS,
    "contribution": dict[str, dict[str, float]] | None,
    "left_out": _OPTIONAL_TEXT_BY_NAME,
    "undefined": _OPTIONAL_TEXT,
}
SUMMARY: Form = {
    "rounds": Round,
    **_COSTS,
    "seconds_per_round": float,
    "peak_memory_bytes": float,
    "personal_model": _OPTIONAL_TEXT,
    "peak_device_bytes": Count | None,
    "judged": _OPTIONAL_TEXT,
    "last": _METRICS,
    "best": _METRICS,
    "global": _BY_ROUND,
    "personal": _BY_ROUND,
    "site_models": _BY_ROUND,
    "sites": {
        "metric": _OPTIONAL_TEXT,
        "mean": float | None,
        "sd": float | None,
        "worst": float | None,
        "of_classes": Count | None,
        "classes_at": dict[str, Count] | None,
        "left_out": _OPTIONAL_TEXTS,
    },
    "units": _OPTIONAL_TEXT_BY_NAME,
    "status": _OPTIONAL_TEXT,
    "weights_sha256": _OPTIONAL_TEXT,
    "best_sha256": _OPTIONAL_TEXT,
    "local": _BY_ROUND,
    "left_out": dict[str, Count] | None,
    "absent": _OPTIONAL_TEXT_BY_NAME,
    "labels": dict[str, list[str]] | None,
    "channels": dict[str, list[str]] | None,
    "undefined": _OPTIONAL_TEXTS,
    "table_rows": dict[str, Count] | None,
}
MANIFEST_FORM: Form = {
    "round": Round,
    "server": str,
    "sites": dict[str, str],
    "rounds": dict[str, Round] | None,
    "best": _OPTIONAL_TEXT,
    "sha256": _OPTIONAL_TEXT_BY_NAME,
    "record": {
        "best": _OBJECT,
        "best_test": _METRICS,
        "best_classes": _OBJECT,
        "best_sha256": _OPTIONAL_TEXT,
        "bytes_up": Count,
        "bytes_down": Count,
        "seconds": float,
        "seconds_rounds": float,
        "absent": dict[str, str],
        "left_out": dict[str, Count],
        "facts": dict[str, dict[str, list[str]]] | None,
    },
}
ALL_SITES = "all sites"
"""The name of the row of calibration.json whose threshold belongs to no single site."""
CALIBRATION: Form = {
    "weights_sha256": str,
    "which": str,
    "task": str,
    "data_source": str,
    "model": str,
    "site": str,
    "coverage": float,
    "scores": str,
    "share": str,
    "promise": str,
    "scale": list[float],
    "rows": list[CoverageRow],
    "by": str,
    "groups": list[CoverageRow],
    "notes": list[str],
}
BEST: Form = {"round": Round, "value": float}
PLAN = "plan.json"
PLANNED: Form = {"choices": list[Document], "sites_that_differ": list[str]}
_STATE = re.compile(
    r"([0-9]{6,7}-(server|best|site-[A-Za-z0-9_~%-]*)|best-server)\.safetensors", re.ASCII
)
_AS_WRITTEN = "a file of a run folder as medfl wrote it", "restore the file, or repeat the run"
_PROTOCOL = 2**20  # bytes of a bundle's federated.yaml
_CODES = 1000  # of a record, each of which is looked for there
_ROUNDS_FILE = 2**30  # bytes of all of it


def damaged(path: Path, what: str) -> InputError:
    """Return the error that names a file of a run folder and what is wrong with it."""
    return InputError(f"{path} {what}", *_AS_WRITTEN)


def checked(path: Path, document: Plain, form: Form, required: Iterable[str] = ()) -> Document:
    """Return a JSON document of a run folder after checking its entries.

    Raises:
        InputError: it is not an object, lacks a required entry, or has one of another type; names file and entry.
    """
    if not isinstance(document, dict):
        raise damaged(path, "holds no JSON object")
    require_entries(path, document, required)
    for error in type_errors(document, form):
        raise damaged(path, error)
    return document


def require_entries(path: Path, document: Config, required: Iterable[str]) -> None:
    """Raise an InputError if a document of a run folder lacks one of these entries."""
    if missing := not_among(required, document):
        raise damaged(path, f"lacks {', '.join(missing)}")


def _not_linked(path: Path) -> Path:
    """Return the path of a run's file; InputError if it is a link, through which a file elsewhere would be read."""
    if path.is_symlink():
        raise damaged(path, "is a link")
    return path


def read_document(path: Path, form: Form, required: Iterable[str] = ()) -> Document:
    """Read and check a JSON file of a run folder; InputError as in `untrusted.read_json` and `checked`."""
    return checked(path, read_json(_not_linked(path), *_AS_WRITTEN), form, required)


def read_run_document(path: Path) -> Document:
    """Return the entries of a run.json; InputError if it cannot be read, or one is missing or of another type."""
    document = read_document(path, RUN)
    if (task := document.get("task", TASKS[0])) not in TASKS:
        raise damaged(path, f"has the task {printable(task, 40)!r}, none of {', '.join(TASKS)}")

    for entry in document.get("resumed") or ():
        for error in type_errors({**dict.fromkeys(RESUMED), **entry}, RESUMED, "resumed."):
            raise damaged(path, error)

    if document.get("public"):
        form = {**PUBLIC, "teachers": list[tuple[str, str]] | None}
        checked(path, document["public"], form, PUBLIC)
        checked(path, document["public"]["data"], PUBLIC["data"], PUBLIC["data"])

    return document


def read_run(path: Path) -> tuple[Run, Document]:
    """Return the run in a run.json and the whole document.

    Raises:
        InputError: the file is missing or damaged, or names a module that the user has not allowed.
    """
    document = read_run_document(path)
    return run_of(path, document), document


def run_of(path: Path, document: Document) -> Run:
    """Return the run that a run.json records; InputError if it names a module that the user has not allowed."""
    run = upgraded(Run.from_dict(document))
    refuse_untrusted_module(run.method, "method", path)
    refuse_code(path, run.bundle_path, run.config)
    return run


def refuse_code(path: Path, bundle: str, config: object) -> None:
    """Refuse a record that contains code, outside a sandbox, unless the user has typed it.

    Raises:
        InputError: it contains code now, whatever the file said when the command was read.
    """
    typed = outside_walls.get()
    if typed is not None and brings_code(bundle, config, typed):
        raise InputError(
            f"{path}, which brings expressions or components, without walls",
            "a record that has only its bundle's",
            "add --sandbox, or --no-sandbox: it then runs with your rights",
        )


def brings_code(bundle: str, config: object, typed: Sequence[str] = ()) -> bool:
    """Tell whether a record has expressions or components that come neither from its bundle nor from the user."""
    texts = ["", *typed]
    with suppress(Refused):
        protocol = read_bytes(Path(bundle) / "configs" / "federated.yaml", _PROTOCOL)
        texts.append(protocol.decode(errors="replace"))

    codes = {*_code_in(config)}
    return len(codes) > _CODES or any(all(code not in text for text in texts) for code in codes)


def _code_in(value: object) -> Iterator[str]:
    """Yield what MONAI evaluates or instantiates in a configuration."""
    parts: Iterable[object] = ()
    if isinstance(value, str) and value.startswith("$"):
        yield value
    elif isinstance(value, Mapping):
        yield str(value.get("_target_", ""))
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value

    for part in parts:
        yield from _code_in(part)


def read_summary(path: Path) -> Document:
    """Return the entries of a summary.json; InputError if it cannot be read, or one is missing or of another type."""
    document = read_document(path, {}, ("rounds", "seconds"))
    flat, classes = _apart(document)
    checked(path, flat, SUMMARY)
    for class_scores in classes:
        checked(path, {"classes": class_scores}, {"classes": _CLASSES})
    return document


def read_calibration(path: Path) -> Document:
    """Return the entries of a calibration.json; InputError if it cannot be read, or one is of another type."""
    return read_document(path, CALIBRATION, CALIBRATION)


def plan_in(folder: Path) -> Document:
    """Return the plan.json in the docs of a planned bundle, or in its run's folder; {} if it has none of ours."""
    try:
        return read_document(folder / PLAN, PLANNED, PLANNED)
    except InputError:
        return {}


def _apart(value: Config) -> tuple[Document, list[object]]:
    """Return a summary without the scores of structures, and those scores: they are under "classes", beside numbers."""
    flat = {}
    classes = []
    for name, part in value.items():
        if name == "classes":
            classes.append(part)
        elif isinstance(part, Mapping):
            flat[name], inner_classes = _apart(part)
            classes += inner_classes
        else:
            flat[name] = part

    return flat, classes


def read_round(path: Path, line: bytes, number: int) -> Document:
    """Return the entries of a line of rounds.jsonl; InputError, with file and number, if it is invalid."""
    try:
        document = read_json_bytes(line)
    except Refused as error:
        raise damaged(path, f"line {number}: {error}") from None

    return checked(path.with_name(f"{path.name}: line {number}"), document, ROUND, ("round",))


def round_lines(path: Path) -> list[bytes]:
    """Return the lines of rounds.jsonl, the last being what follows the last line break; [] without a file.

    Raises:
        InputError: it cannot be read, or is too long.
    """
    if not os.path.lexists(path):
        return []
    try:
        return read_bytes(_not_linked(path), _ROUNDS_FILE).split(b"\n")
    except Refused as error:
        raise damaged(path, str(error)) from None


def read_rows(path: Path, columns: Sequence[str] = ()) -> list[tuple[int, dict[str, str]]]:
    """Return the rows of a run's table, sites.csv or predictions.csv, each with its line number; "" for missing cells.

    Raises:
        InputError: it is not a valid table; names the line.
    """
    try:
        names, rows = read_table(_not_linked(path))
    except Refused as error:
        raise damaged(path, str(error)) from None

    if rows and (lost := not_among(columns, names)):
        raise damaged(path, f"has no column {lost[0]}")

    cleaned = []
    for number, row in rows:
        # csv puts cells beyond the header under None.
        if None in row or (path.name == "sites.csv" and not row.get("site")):
            raise damaged(path, f"line {number} does not fit its header")
        cells = {from_cell(name): from_cell(cell or "") for name, cell in row.items()}
        cleaned.append((number, cells))

    return cleaned


def read_manifest(folder: Path) -> Document:
    """Return the entries of a run folder's manifest; each State file that it names is a plain file there, or missing.

    Raises:
        InputError: it cannot be read, an entry is missing or of another type, or a State file is not acceptable.
    """
    path = folder / "state" / MANIFEST
    manifest = read_document(path, MANIFEST_FORM, ("round", "server", "sites", "record"))
    if manifest["record"].get("best") is not None:
        checked(path, manifest["record"]["best"], BEST, BEST)

    lost = manifest["sites"].keys() - (manifest.get("rounds") or manifest["sites"])
    if lost:
        raise damaged(path, f"does not say of which round the State of {printable(min(lost))!r} is")

    best = manifest.get("best") or manifest["server"]
    for name in (manifest["server"], *manifest["sites"].values(), best):
        state_file(folder, name)

    return manifest


def state_file(folder: Path, name: str) -> Path:
    """Return the path of a State's file in a run folder, whether or not it exists.

    Raises:
        InputError: the name is not one that medfl gives to a State, or belongs to something other than a plain file.
    """
    state = folder / "state"
    if not _STATE.fullmatch(name):
        raise damaged(state / MANIFEST, f"names {printable(name)!r}, which is no file of a State")
    if state.is_symlink() or not _is_plain_or_missing(state / name):
        raise damaged(state / name, "is no plain file of this folder, or larger than memory")
    return state / name


def _is_plain_or_missing(path: Path) -> bool:
    try:
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and status.st_size <= MOST_BYTES
    except OSError as error:
        return isinstance(error, FileNotFoundError)


def require_plain(folder: Path) -> None:
    """Check that a run folder that will be written to has only plain files and folders, and no links.

    Raises:
        InputError: it contains something else, through which a file elsewhere would be read or overwritten.
    """
    for path in chain(not_plain(folder), filter(Path.is_dir, folder.glob("[!.]*.*"))):
        # FLARE's folder is removed before it is created
        if path.relative_to(folder).parts[:-1][:1] != ("flare",):
            raise damaged(
                path.with_name(printable(path.name)),
                "is neither a plain file nor a folder of a run's",
            )


_MOVED = {"weights": "site_weights", "decay_per": "decay_per", "keep_optimizer": "keep_optimizer"}
"""Options of these methods that became settings of every run after 0.6.0."""
_BEFORE = {"fedbm": tuple(_MOVED), "fedcb": tuple(_MOVED), "fedhelp": ("weights",)}
_ADDED = {"fedrod": {"personal_start": "zero"}}
"""Options added after 0.6.0 whose default differs from the earlier behaviour."""


def upgraded(run: Run) -> Run:
    """Return a run with today's names; a current one stays as it is.

    A kept optimiser is in States where this version does not look for it: such an option stays, and is refused.
    """
    options = {**_ADDED.get(run.method, {}), **run.options}
    settings = {}
    for name in _BEFORE.get(run.method, ()):
        if name in options and options[name] is not True:
            settings[_MOVED[name]] = options.pop(name)

    settings.pop("keep_optimizer", None)  # False: the default of every run

    return replace(run, options=options, **settings)
