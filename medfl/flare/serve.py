"""`medfl site serve`: join a FLARE federation with the startup kit that its operator sent.

Before FLARE's client starts, the site's policy inspects the bundle, `medfl.flare.kit` restricts the kit (a job may make
medfl's two classes for sites with images of their own, and brings no code), and the site's settings are written into
the kit (`local/medfl.yaml`, see `medfl.flare.site_config`). The server's operator uses it too.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from medfl.core.errors import InputError, RunError

if TYPE_CHECKING:
    from medfl.flare.site_sandbox import SiteSandbox

_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
_EXAMPLES = """\
examples
  medfl site serve hippocampus --kit site-1 --data /data/hippocampus \\
    --folder /var/lib/medfl --policy policies/hippocampus.yaml --permit image_size
      the first time: what is said here is kept in site-1/local/medfl.yaml
  medfl site serve --kit site-1
      every time after; ends with Ctrl-C
  medfl site serve --kit site-1 --check
      only see whether it would start"""


def add(actions: Any, verb: Callable[..., Any], show: Callable[..., int]) -> None:
    """Add the action to `medfl site`."""
    about = "join a NVIDIA FLARE federation with the operator's startup kit"
    served = verb(actions, "serve", about, partial(_serve, show=show), _EXAMPLES)
    served.add_argument(
        "bundle", nargs="?", metavar="BUNDLE", help="name of a shipped bundle, or the folder of any"
    )
    served.add_argument(
        "--kit", type=Path, required=True, metavar="DIR", help="the startup kit, unpacked"
    )
    served.add_argument(
        "--data", type=Path, metavar="DIR", help="the site's images; a server may do without"
    )
    served.add_argument(
        "--folder", type=Path, metavar="DIR", help="where States are kept; at the server, runs"
    )
    served.add_argument(
        "--policy", type=Path, metavar="FILE", help="the site's policy; default: nothing extra"
    )
    served.add_argument("--device", metavar="cpu|cuda[:i]", help="where it trains; default cpu")
    served.add_argument("--audit", type=Path, metavar="FILE", help="log of what came and left")
    served.add_argument(
        "--permit", dest="permits", action="append", metavar="ID",
        help="id of the bundle's configuration that a run may set, to plain numbers and names; may be repeated",
    )  # fmt: skip
    served.add_argument(
        "--no-sandbox",
        action="store_true",
        help="let FLARE's process do what this user may; default: Linux's Landlock",
    )
    served.add_argument("--check", action="store_true", help="only see whether it would start")


def _serve(args: Any, show: Callable[..., int]) -> int:
    from medfl.flare.job import require_flare

    kit = args.kit.expanduser().resolve()
    kind = _kind(kit)
    _write_own(args, kit)
    require_flare()
    document = prepare(kit, kind)
    sandbox, document["sandbox"] = _sandbox(kit, kind, args)
    show(args, document, lambda: "\n".join(f"{key}: {value}" for key, value in document.items()))

    return 0 if args.check else start(kit, sandbox)


def _sandbox(kit: Path, kind: str, args: Any) -> tuple[SiteSandbox | None, str]:
    """Return the sandbox of a site's FLARE, and the line about it; none where it is unwanted or there is none."""
    from medfl.flare.site_config import CONFIG_FILE, SiteConfig
    from medfl.flare.site_sandbox import SiteSandbox
    from medfl.safety.sandbox import abi

    if kind != "site":
        return None, "none at a server, which runs the bundle of its own operator"

    if args.no_sandbox or not abi():
        if args.no_sandbox:
            why = "--no-sandbox"
        else:
            why = "this kernel has no Landlock, or it is switched off"

        return None, f"WARNING: NOT IN FORCE ({why}): the bundle may do what this user may"

    if args.check:
        return None, f"Landlock ABI {abi()}"

    sandbox = SiteSandbox(kit, SiteConfig.read(kit / "local" / CONFIG_FILE))
    return sandbox, sandbox.line


def prepare(kit: Path, kind: str) -> dict[str, Any]:
    """Check what a kit's site says of itself, and let jobs make medfl's classes there and do nothing else.

    Return what would run; `kind` is "site" or "server".

    Raises:
        InputError: there is no `local/medfl.yaml`, it is wrong, the kit grants more than it may, or the bundle is
            refused.
    """
    from medfl.bundle.bundle import Bundle
    from medfl.flare.kit import secure
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

    bundle = Bundle(config.bundle, policy=policy)
    check_declared_data(config, bundle, kit.name)
    for path in (config.folder, config.audit and str(Path(config.audit).parent)):
        if path:
            Path(path).mkdir(parents=True, exist_ok=True)

    classes = [*ALLOWED, *(name for name in config.classes if name not in (*ALLOWED, *SIMULATED))]
    secure(kit, kind, classes)
    return {
        "kit": str(kit), "as": kind, "bundle": bundle.name, "bundle_sha256": bundle.sha256, "data": config.data,
        "folder": config.folder, "policy": config.policy or "none: nothing extra, nothing pinned",
        "a run may set": ", ".join(config.permits) or "nothing of the bundle", "may be made": ", ".join(classes),
        "jobs may bring": "no code, and nobody gets a shell or logs" if kind == "site" else "no code",
    }  # fmt: skip


def start(kit: Path, sandbox: SiteSandbox | None = None) -> int:
    """Run FLARE's process of a kit until it ends, in a sandbox with a folder of its own or in the kit itself.

    Raises:
        RunError: it failed.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise RunError("there is no bash, which the startup kit needs")

    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )  # its python3 is this one
    folder, variables = (sandbox.workspace, sandbox.variables) if sandbox else (kit, {})
    command = [bash, str(folder / "startup" / "sub_start.sh"), "--once"]
    begin = partial(_begin, sandbox.enter if sandbox else None)
    process = subprocess.Popen(
        command, env={**os.environ, "PATH": path, **variables}, preexec_fn=begin
    )

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
    """Let the process, in which FLARE's program is about to start, end with medfl, also where that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
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


def _write_own(args: Any, kit: Path) -> None:
    """Write what is given into the kit; what is there already is not changed.

    Raises:
        InputError: it is incomplete, or the kit says something else.
    """
    from medfl.bundle.files import shipped_folders
    from medfl.flare.site_config import CONFIG_FILE, SiteConfig
    from medfl.storage.files import write_atomic

    path = kit / "local" / CONFIG_FILE
    names = ("bundle", "data", "folder", "policy", "device", "audit", "permits")
    settings = {name: value for name in names if (value := getattr(args, name)) is not None}
    settings = {
        k: str(v.expanduser().resolve()) if isinstance(v, Path) else v for k, v in settings.items()
    }

    if not settings:
        if not path.is_file():
            problem = f"--kit {kit} without local/{CONFIG_FILE}"
            raise InputError(problem, "it is written the first time", "give BUNDLE and --folder")

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
