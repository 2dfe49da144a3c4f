"""What stands at a site before FLARE takes a job: no code, no class but the listed ones, no commands.

FLARE asks its site's authorization policy whether a job may bring code, by the role that the server names, and looks at
no list of classes where it may. A shell command is not even asked for where the server's message leaves that out. So a
site of medfl does not rely on either: `medfl.flare.serve` names this validator in the kit's `local/resources.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.app_validation import AppValidator
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.client.info_coll_cmd import ClientInfoProcessor
from nvflare.private.fed.client.shell_cmd import ShellCommandProcessor
from nvflare.private.fed.client.sys_cmd import ReportEnvProcessor
from nvflare.private.fed.client.training_cmds import ConfigureJobLogProcessor

from medfl.core.untrusted import printable

_KINDS = (".json", ".crt")  # configuration, and the signature of who submitted it
_CONFIGURATION = "config_fed_client.json"
_BYTES = 1_000_000
_COMMANDS = (ShellCommandProcessor, ClientInfoProcessor, ReportEnvProcessor, ConfigureJobLogProcessor)
"""What shows files, errors with their texts and paths, or sets loggers, which are classes too."""


class Sentry(AppValidator):  # type: ignore[misc]
    """Refuses every job but those of medfl, whoever submits them.

    Args:
        classes: class paths that a job's configuration may name.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        """Take the list, and take the commands off FLARE's that read or change a site's files."""
        self.classes = frozenset(classes)
        known = ClientRequestProcessors.request_processors
        known[:] = [one for one in known if not isinstance(one, _COMMANDS)]

    def validate(self, app_folder: str) -> tuple[str, dict[str, Any]]:
        """Return why an app is refused, "" if it is not, and nothing about it."""
        return next(self._problems(Path(app_folder)), ""), {}

    def _problems(self, app: Path) -> Iterator[str]:
        for path in sorted(app.rglob("*")):
            name = printable(path.relative_to(app))
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                yield f"{name} is neither a file nor a folder"
            elif path.name == "custom" or (path.is_file() and path.suffix not in _KINDS):
                yield f"{name}: a job brings no code here, only JSON"
            elif path.name == _CONFIGURATION:
                yield from (f"{name}: {why}" for why in self._unlisted(path))

    def _unlisted(self, path: Path) -> Iterator[str]:
        if path.stat().st_size > _BYTES:
            yield f"more than {_BYTES} bytes"
            return
        try:
            todo = [json.loads(path.read_text())]
        except (ValueError, RecursionError):
            yield "no JSON"
            return
        while todo:
            node = todo.pop()
            if isinstance(node, list):
                todo += node
            elif isinstance(node, dict):
                todo += node.values()
                for key in ("path", "class_path", "name"):  # all that FLARE makes components by
                    if key in node and not (isinstance(node[key], str) and node[key] in self.classes):
                        yield f"class {printable(node[key])!r} is not on this site's list"
