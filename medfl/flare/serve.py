"""`medfl site serve`: join a FLARE federation with the startup kit that its operator sent.

Before FLARE's client starts, the site's policy inspects the bundle, `secure` restricts the kit (a job may create only
medfl's two classes for sites with their own images, and brings no code), and the site's settings are written into the
kit (`local/medfl.yaml`, see `medfl.flare.site_config`). The server's operator uses it too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from medfl.core import NO_WALLS, Document, InputError, RunError, not_among, not_plain, printable
from medfl.flare.files import read_kit_file, read_resources
from medfl.safety.bounds import end_with_parent

if TYPE_CHECKING:
    from medfl.flare.site_sandbox import SiteSandbox

_EXAMPLES = """\
examples
  medfl site serve hippocampus --kit site-1 --data /data/hippocampus \\
    --folder /var/lib/medfl --policy policies/hippocampus.yaml --permit image_size
      the first time: what is said here is kept in site-1/local/medfl.yaml
  medfl site serve --kit site-1
      every time after; ends with Ctrl-C
  medfl site serve --kit site-1 --check
      only check whether it would start"""


def add(actions: Any, verb: Callable[..., Any], show: Callable[..., int]) -> None:
    """Add the action to `medfl site`."""
    about = "join a NVIDIA FLARE federation with the operator's startup kit"
    served = verb(actions, "serve", about, partial(_serve, show=show), _EXAMPLES)
    served.add_text("bundle", "BUNDLE", "name of a shipped bundle, or the folder of any", nargs="?")
    served.add_path("--kit", "DIR", "the startup kit, unpacked", required=True)
    served.add_path("--data", "DIR", "the site's images; not needed at a server")
    served.add_path("--folder", "DIR", "folder for the site's States, or at the server for runs")
    served.add_path("--policy", "FILE", "the site's policy; default: none")
    served.add_text("--device", "cpu|cuda[:i]", "device for training; default: cpu")
    served.add_path("--audit", "FILE", "log of what came in and left")
    served.add_text(
        "--permit",
        "ID",
        "id of the bundle's configuration that a run may set, to plain numbers and names; may be repeated",
        dest="permits",
        action="append",
    )
    served.add_switch(
        "--no-sandbox",
        "do not sandbox FLARE's process (with Landlock, on Linux): it runs with your rights",
    )
    served.add_switch("--check", "only see whether it would start")


def _serve(args: argparse.Namespace, show: Callable[..., int]) -> int:
    from medfl.flare.job import require_flare

    kit = args.kit.expanduser().resolve()
    kind = _kind(kit)
    # Before anything is written there, or copied for FLARE: a link could lead to one of the user's own files
    for folder in map(kit.joinpath, KIT_FOLDERS):
        for odd in (*[folder] * folder.is_symlink(), *not_plain(folder)):
            raise InputError(
                f"{printable(odd)} is neither a plain file nor a folder",
                "a startup kit as its operator made it",
                "remove it",
            )

    _write_settings(args, kit)
    require_flare()
    document = prepare(kit, kind)
    sandbox, document["sandbox"] = _sandbox(kit, kind, args)
    show(args, document, [f"{key}: {value}" for key, value in document.items()])

    return 0 if args.check else start(kit, sandbox)


def _sandbox(kit: Path, kind: str, args: argparse.Namespace) -> tuple[SiteSandbox | None, str]:
    """Return the sandbox of a site's FLARE, and the line about it; none if it is unwanted or unavailable."""
    from medfl.flare.site_config import CONFIG_FILE, SiteConfig
    from medfl.flare.site_sandbox import SiteSandbox
    from medfl.safety.sandbox import abi, lacking

    if kind != "site":
        return None, "none at a server, which runs the bundle of its own operator"

    reason = ""
    if args.no_sandbox:
        reason = "--no-sandbox"
    elif missing := lacking():
        reason = f"this machine lacks {missing}"

    config = SiteConfig.read(kit / "local" / CONFIG_FILE)
    if reason and not (args.no_sandbox or config.is_shipped):
        raise InputError(
            f"bundle {config.bundle}, which is not shipped, or changed since: {reason}",
            "a Linux kernel of at least 5.13 with Landlock",
            "serve there, or add --no-sandbox: it then runs with your rights",
        )

    if reason:
        return None, f"WARNING: NOT IN FORCE ({reason}): the bundle may do what this user may"

    if args.check:
        return None, f"Landlock ABI {abi()}"

    sandbox = SiteSandbox(kit, config)
    return sandbox, sandbox.line


def prepare(kit: Path, kind: str) -> Document:
    """Check the settings in a kit, and restrict its jobs to medfl's classes.

    Return a description of what would run; `kind` is "site" or "server".

    Raises:
        InputError: `local/medfl.yaml` is missing or wrong, the kit grants more than it may, or the bundle is
            refused.
    """
    from medfl.bundle.bundle import Bundle
    from medfl.flare.parts import ALLOWED, SIMULATED
    from medfl.flare.site_config import CONFIG_FILE, SiteConfig, check_declared_data

    config = SiteConfig.read(kit / "local" / CONFIG_FILE)
    policy = config.checked_policy()

    if kind == "site" and not (config.data and Path(config.data).is_dir()):
        raise InputError(
            f"data {config.data or 'not given'}",
            "the folder of the site's images",
            "give it with --data",
        )

    root, _, sha256 = config.files()
    if config.is_shipped:  # its worker checks any other: this process creates nothing from it
        check_declared_data(config, Bundle(config.bundle, policy=policy), kit.name)

    Path(config.folder).mkdir(parents=True, exist_ok=True)
    if config.audit:
        Path(config.audit).parent.mkdir(parents=True, exist_ok=True)

    # a simulation's classes take folders from the job, whatever a site's file lists
    classes = [*ALLOWED, *not_among(config.classes, (*ALLOWED, *SIMULATED))]
    secure(kit, kind, classes)
    return {
        "kit": str(kit),
        "as": kind,
        "bundle": root.name,
        "bundle_sha256": sha256,
        "data": config.data,
        "folder": config.folder,
        "policy": config.policy or "none: nothing extra, nothing pinned",
        "a run may set": ", ".join(config.permits) or "nothing of the bundle",
        "may be made": ", ".join(classes),
        "jobs may bring": "no code, and nobody gets a shell or logs"
        if kind == "site"
        else "no code",
    }


def start(kit: Path, sandbox: SiteSandbox | None = None) -> int:
    """Run FLARE's process of a kit until it ends, in a sandbox with a folder of its own or in the kit itself.

    Raises:
        RunError: it failed.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise RunError("there is no bash, which the startup kit needs")

    # the kit's scripts call python3, which must be this one
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path}
    folder = kit
    enter = None
    if sandbox is None:
        environment[NO_WALLS] = "1"
    else:
        folder = sandbox.workspace
        enter = sandbox.enter
        environment |= sandbox.variables

    command = [bash, str(folder / "startup" / "sub_start.sh"), "--once"]
    process = subprocess.Popen(command, env=environment, preexec_fn=partial(_begin, enter))

    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise

    if code:
        raise RunError(f"NVIDIA FLARE's process ended with code {code}; see {folder / 'log.txt'}")

    return 0


def _begin(enter: Callable[[], object] | None) -> None:
    """Make the process, in which FLARE's program is about to start, end with medfl, even if medfl is killed."""
    end_with_parent(signal.SIGTERM)
    if enter is not None:
        enter()


def _kind(kit: Path) -> str:
    for kind, name in (("site", "fed_client.json"), ("server", "fed_server.json")):
        if (kit / "startup" / name).is_file():
            return kind
    raise InputError(
        f"--kit {kit}",
        "the folder of a startup kit: startup/fed_client.json is in it",
        "unpack what the operator sent",
    )


def _write_settings(args: argparse.Namespace, kit: Path) -> None:
    """Write the given settings into the kit; existing settings are not changed.

    Raises:
        InputError: they are incomplete, or differ from those in the kit.
    """
    from medfl.bundle.files import shipped_folders
    from medfl.flare.site_config import CONFIG_FILE, SiteConfig
    from medfl.storage import write_atomic

    path = kit / "local" / CONFIG_FILE
    settings = {}
    for name in ("bundle", "data", "folder", "policy", "device", "audit", "permits"):
        value = getattr(args, name)
        if isinstance(value, Path):
            value = str(value.expanduser().resolve())
        if value is not None:
            settings[name] = value

    if not settings:
        if not path.is_file():
            raise InputError(
                f"--kit {kit} without local/{CONFIG_FILE}",
                "it is written the first time",
                "give BUNDLE and --folder",
            )

        return

    if not {"bundle", "folder"} <= settings.keys():
        raise InputError(
            "no BUNDLE, or no --folder", "both are needed the first time", "add what is missing"
        )

    if settings["bundle"] not in shipped_folders():
        settings["bundle"] = str(Path(settings["bundle"]).expanduser().resolve())

    text = yaml.safe_dump(settings, sort_keys=False, width=1000)
    if path.is_file():
        if yaml.safe_load(path.read_text()) != settings:
            raise InputError(
                f"{path} says something else",
                "what a site said is not overwritten",
                "edit or remove it",
            )
        return

    write_atomic(path, text.encode())
    try:
        SiteConfig.read(path)
    except InputError:
        path.unlink()
        raise


# Restrict a startup kit: what a job, and the server's operators, may do at a site.
#
# A job may name only listed classes, brings no code and gets no shell, and FLARE sends no logs. Two files in the kit's
# `local/` configure that: `resources.json`, rewritten each time, and `authorization.json`, written if it is missing;
# one that grants more is refused.


RESOURCES = "resources.json"
AUTHORIZATION = "authorization.json"
KIT_FOLDERS = ("startup", "local")
"""Contents of a kit; FLARE creates other folders beside them."""
_SENTRY = "medfl.flare.sentry.Sentry"
_ROLES = ("project_admin", "org_admin", "lead", "member")
_CODE = ("byoc", "server-predeployed-flwr")
_SHELL = ("shell_commands", "pwd", "ls", "cat", "head", "tail", "grep")
_NEVER = {"site": (*_CODE, *_SHELL), "server": _CODE}
"""Rights granted to nobody, by the kind of the kit."""
_JOBS = ("submit_job", "clone_job", "manage_job", "download_job", "view")
_OPERATION = ("operate", "shell_commands")
_WITHHELD = (*_OPERATION, "show_errors", "configure_job_log", "configure_site_log", "call", *_CODE)


def secure(kit: Path, kind: str, classes: Sequence[str]) -> None:
    """Write and check the permissions of a kit for a "site" or "server", whose jobs may name these classes.

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
        from medfl.storage import write_json

        write_json(path, _permissions(path, kind))

    for role, right in _granted(read_kit_file(path), _NEVER[kind]):
        raise InputError(
            f"{path} grants {right} to {role}",
            f"none of {', '.join(_NEVER[kind])}: a job brings no code",
            "set it to none, or remove the file for medfl to write one",
        )


def _permissions(path: Path, kind: str) -> Document:
    """Return a site's policy, or a server kit's own without the rights granted to nobody."""
    if kind == "site":
        rights = {**dict.fromkeys(_JOBS, "any"), **dict.fromkeys(_WITHHELD, "none")}
        return {"format_version": "1.0", "permissions": dict.fromkeys(_ROLES, rights)}

    default = path.with_name(f"{path.name}.default")
    if default.is_file():
        permissions = read_kit_file(default).get("permissions", {})
    else:
        permissions = {"project_admin": "any"}

    never = dict.fromkeys(_CODE, "none")
    roles = {}
    for role, rights in permissions.items():
        if not isinstance(rights, dict):  # a single condition for all rights of a role
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
    """Return whether a FLARE condition applies to nobody."""
    # a role has the right if any of the terms holds and none that begins with "not" forbids it
    terms = [expression] if isinstance(expression, str) else expression
    words = [str(term).lower().split() for term in terms]
    if any(word in (["not", "any"], ["not", "all"]) for word in words):
        return True
    allowed = [word for word in words if word[:1] != ["not"]]
    return bool(allowed) and all(word in (["none"], ["no"]) for word in allowed)


def _resources(path: Path, kind: str, classes: Sequence[str]) -> None:
    from medfl.storage import write_json

    document = read_resources(path)
    document["class_list_enforcement_mode"] = "enforce"
    document["class_allow_list"] = list(classes)
    document["allow_log_streaming"] = False
    components = document.get("components", [])
    document["components"] = [part for part in components if "LogStreamer" not in str(part)]
    if kind == "site":
        document["app_validator"] = {"path": _SENTRY, "args": {"classes": list(classes)}}

    write_json(path, document)
