"""A site's check of every job before FLARE accepts it: no code, no unlisted class, no commands.

FLARE lets a job bring code if the site's authorization policy grants this to the role that the server names, and then
ignores the list of classes; a shell command bypasses that policy if the server's message omits the request. A medfl
site relies on neither: `medfl.flare.serve` names this validator in the kit's `local/resources.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from nvflare.apis.app_validation import AppValidator
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.client.info_coll_cmd import ClientInfoProcessor
from nvflare.private.fed.client.shell_cmd import ShellCommandProcessor
from nvflare.private.fed.client.sys_cmd import ReportEnvProcessor
from nvflare.private.fed.client.training_cmds import ConfigureJobLogProcessor

from medfl.core import Document, Refused, json_values, not_plain, printable

_SUFFIXES = (".json", ".crt")  # configuration, and the submitter's signature
_CONFIGURATION = "config_fed_client.json"
_CLASS_KEYS = ("path", "class_path", "name")  # by which FLARE creates components
_MAX_BYTES = 1_000_000
_COMMANDS = (
    ShellCommandProcessor,
    ClientInfoProcessor,
    ReportEnvProcessor,
    ConfigureJobLogProcessor,
)
"""Commands that show files, or errors with texts and paths, or set loggers, which are classes too."""


class Sentry(AppValidator):  # type: ignore[misc]
    """Refuses every job that is not medfl's, whoever submits it.

    Args:
        classes: class paths that a job's configuration may name.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        """Remove FLARE's commands that read or change a site's files."""
        self.classes = frozenset(classes)
        processors = ClientRequestProcessors.request_processors
        processors[:] = [
            processor for processor in processors if not isinstance(processor, _COMMANDS)
        ]

    def validate(self, app_folder: str) -> tuple[str, Document]:
        """Return (why an app is refused or "", no further details)."""
        return next(self._problems(Path(app_folder)), ""), {}

    def _problems(self, app: Path) -> Iterator[str]:
        for path in not_plain(app):
            yield f"{printable(path.relative_to(app))} is neither a file nor a folder, or lies below 100 others"

        for path in sorted(app.rglob("*")):
            name = printable(path.relative_to(app))
            if path.name == "custom" or (path.is_file() and path.suffix not in _SUFFIXES):
                yield f"{name}: a job brings no code here, only JSON"
            elif path.name == _CONFIGURATION:
                for problem in self._unlisted(path):
                    yield f"{name}: {problem}"

    def _unlisted(self, path: Path) -> Iterator[str]:
        try:
            nodes = [json_values(path, _MAX_BYTES)]
        except Refused as error:
            yield str(error)
            return

        while nodes:
            node = nodes.pop()
            if isinstance(node, list):
                nodes += node
            elif isinstance(node, dict):
                nodes += node.values()
                for key in filter(node.__contains__, _CLASS_KEYS):
                    if not (isinstance(node[key], str) and node[key] in self.classes):
                        yield f"class {printable(node[key])!r} is not on this site's list"
