"""Small files of a FLARE job: its run, the error that ended it, and the list of allowed classes in a startup kit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medfl.core import (
    Document,
    InputError,
    MedflError,
    Run,
    RunError,
    matches_type,
    not_among,
    read_json,
    type_errors,
)
from medfl.storage import run_documents

RUN_FILE = "run.json"
"""The run's record, in the configuration folder of a job."""
_KIT = {
    "require_signed_jobs": bool | None,
    "permissions": Document,
    "components": list[Any],
    "class_allow_list": list[str] | None,
}
"""Types of the entries that are read from a startup kit's files."""
OWN_IMAGES = "own"
"""The partition of a run whose sites have their own images."""


def participants(run: Run) -> list[str]:
    """Return the participants of a run, like `Federation.participants`."""
    from medfl import methods
    from medfl.runtimes import federation

    return federation.participants(run, methods.load(run.method, run.options).pools_data)


def read_run(app: str) -> Run:
    """Return the run of a job; InputError if it is invalid."""
    return Run.from_dict(run_documents.read_run_document(Path(app) / "config" / RUN_FILE))


def error_document(error: Exception) -> Document:
    """Return an error as plain values."""
    if isinstance(error, InputError):
        return {"parts": list(error._parts)}
    if isinstance(error, MedflError):
        return {"text": str(error)}

    return {"text": f"{type(error).__name__}: {error}"}


def raise_error(document: object) -> None:
    """Raise the error that `error_document` recorded."""
    failure = document if isinstance(document, dict) else {}
    parts: Any = failure.get("parts")
    if matches_type(parts, list[str]) and len(parts) == 3:
        raise InputError(*parts)

    raise RunError(str(failure.get("text")))


def read_kit_file(path: Path) -> Document:
    """Return a JSON file of a startup kit; InputError if it is invalid."""
    document = read_json(path, "a JSON file of the startup kit", "unpack it anew")
    if not isinstance(document, dict):
        raise InputError(
            f"{path} is a {type(document).__name__}", "a JSON object", "unpack the kit anew"
        )
    for error in type_errors(document, _KIT):
        raise InputError(f"{path} {error}", "a JSON file of the startup kit", "unpack it anew")
    return document


def read_resources(path: Path) -> Document:
    """Return the content of a startup kit's `local/resources.json`, or of the default beside it."""
    for source in (path, path.with_name(f"{path.name}.default")):
        if source.is_file():
            return read_kit_file(source)

    return {"format_version": 2}


def allow_classes(resources: Path, classes: Sequence[str]) -> None:
    """Change the list of classes that FLARE may instantiate at a site, keeping the file's other entries."""
    from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

    from medfl.storage import write_json

    document = read_resources(resources)
    # a list in the file replaces FLARE's default, so it must contain the default
    listed = list(document.get("class_allow_list") or DEFAULT_CLASS_ALLOW_LIST)
    document["class_allow_list"] = listed + not_among(classes, listed)
    resources.parent.mkdir(parents=True, exist_ok=True)
    write_json(resources, document)
