"""Restrict a startup kit: what a job, and the server's operators, may do at a site.

A job may name only listed classes, brings no code and gets no shell, and FLARE sends no logs. Two files in the kit's
`local/` configure that: `resources.json`, written anew each time, and `authorization.json`, which is written where
there is none; one that grants more is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from medfl.core.documents import Document
from medfl.core.errors import InputError
from medfl.flare.files import read_kit_file, read_resources
from medfl.storage.files import write_atomic

RESOURCES = "resources.json"
AUTHORIZATION = "authorization.json"
_SENTRY = "medfl.flare.sentry.Sentry"
_ROLES = ("project_admin", "org_admin", "lead", "member")
_CODE = ("byoc", "server-predeployed-flwr")
_SHELL = ("shell_commands", "pwd", "ls", "cat", "head", "tail", "grep")
_NEVER = {"site": (*_CODE, *_SHELL), "server": _CODE}
"""Rights that nobody has, by the kind of the kit."""
_JOBS = ("submit_job", "clone_job", "manage_job", "download_job", "view")
_OPERATION = ("operate", "shell_commands")
_WITHHELD = (*_OPERATION, "show_errors", "configure_job_log", "configure_site_log", "call", *_CODE)


def secure(kit: Path, kind: str, classes: Sequence[str]) -> None:
    """Write and check the permissions of a kit of a "site" or "server", whose jobs may name these classes.

    Raises:
        InputError: the kit's own authorization grants code or commands, or the kit accepts unsigned jobs.
    """
    startup = kit / "startup" / "fed_client.json"
    if kind == "site" and read_kit_file(startup).get("require_signed_jobs") is False:
        raise InputError(
            f"{startup}: require_signed_jobs is false",
            "jobs that somebody signed",
            "set it to true",
        )

    _authorize(kit / "local" / AUTHORIZATION, kind)
    _resources(kit / "local" / RESOURCES, kind, classes)


def _authorize(path: Path, kind: str) -> None:
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(_permissions(path, kind), indent=4).encode())

    for role, right in _granted(read_kit_file(path), _NEVER[kind]):
        raise InputError(
            f"{path} grants {right} to {role}",
            f"none of {', '.join(_NEVER[kind])}: a job brings no code",
            "set it to none, or remove the file for medfl to write one",
        )


def _permissions(path: Path, kind: str) -> Document:
    """Return a site's policy, or a server kit's own without the rights that nobody has."""
    if kind == "site":
        rights = {**dict.fromkeys(_JOBS, "any"), **dict.fromkeys(_WITHHELD, "none")}
        return {"format_version": "1.0", "permissions": {role: rights for role in _ROLES}}

    default = path.with_name(f"{path.name}.default")
    if default.is_file():
        permissions = read_kit_file(default).get("permissions", {})
    else:
        permissions = {"project_admin": "any"}

    never = dict.fromkeys(_CODE, "none")
    roles = {}
    for role, rights in permissions.items():
        if not isinstance(rights, dict):  # one condition for all that a role may do
            rights = dict.fromkeys((*_JOBS, *_OPERATION), rights)

        roles[role] = {**rights, **never}

    return {"format_version": "1.0", "permissions": roles}


def _granted(document: Document, never: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the (role, right) pairs of `never` that a policy grants, as FLARE reads it."""
    from nvflare.fuel.sec.authz import parse_policy_config
    from nvflare.security.security import COMMAND_CATEGORIES

    policy, error = parse_policy_config(document, COMMAND_CATEGORIES)
    if error:
        raise InputError(
            f"an authorization policy ({error})",
            "one that FLARE can read",
            "repair it, or remove it",
        )

    for role in policy.roles:
        for right in never:
            granted = policy.role_right_map
            conditions = granted.get(f"{role}:*") or granted.get(f"{role}:{right}")
            if conditions is not None and not _nobody(conditions.exp):
                yield role, right


def _nobody(expression: Any) -> bool:
    """Return whether a condition of FLARE's applies to nobody."""
    # a role has the right if any of the terms holds and none that begins with "not" forbids it
    terms = [expression] if isinstance(expression, str) else expression
    words = [str(term).lower().split() for term in terms]
    if any(word in (["not", "any"], ["not", "all"]) for word in words):
        return True
    allowed = [word for word in words if word[:1] != ["not"]]
    return bool(allowed) and all(word in (["none"], ["no"]) for word in allowed)


def _resources(path: Path, kind: str, classes: Sequence[str]) -> None:
    document = read_resources(path)
    document["class_list_enforcement_mode"] = "enforce"
    document["class_allow_list"] = list(classes)
    document["allow_log_streaming"] = False
    components = document.get("components", [])
    document["components"] = [part for part in components if "LogStreamer" not in str(part)]
    if kind == "site":
        document["app_validator"] = {"path": _SENTRY, "args": {"classes": list(classes)}}

    write_atomic(path, json.dumps(document, indent=4).encode())
