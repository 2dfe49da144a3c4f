"""A run's numbers in Weights & Biases: `--track wandb[:PROJECT]`, one of its runs for each run folder.

The numbers are those of TensorBoard, the configuration that of `run.json` but for where things lie and which items a
site has. Account and server are what its own variables say (WANDB_API_KEY, WANDB_BASE_URL, WANDB_MODE=offline).
`wandb.json` in the run folder has the project and the id, with which a resumed run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medfl.core.terminal import Print
from medfl.runtimes.output.tracker import Tracker, settings_of
from medfl.storage.run_folder import RunFolder

PROJECT = "medfl"


class Wandb(Tracker):
    """One run of Weights & Biases, in `project`; without one in that which the folder names, else in "medfl"."""

    title = "Weights & Biases"
    file = "wandb.json"

    def __init__(self, folder: RunFolder, project: str | None, say: Print) -> None:
        super().__init__(folder, say)
        self.project = project or self.known.get("project") or PROJECT
        self.shown = f"project {self.project}"
        self.id = ""
        if self.known.get("project") == self.project:
            self.id = self.known.get("run_id", "")

    def _open(self) -> None:
        import wandb

        # before `init`, which may fail: a resumed run then tries the same project
        self.note(project=self.project, run_id=self.id)
        run, document = self.folder.read_run()
        config = {
            **settings_of(run.to_dict()),
            "sites": len(run.partition.sites),
            "run_hash": run.run_hash,
        }
        self._run: Any = wandb.init(
            project=self.project, id=self.id or None, resume="allow", name=self.folder.path.resolve().name,
            dir=str(self.folder.path), config={**config, "runtime": document.get("runtime", "")},
        )  # fmt: skip
        self.id = str(self._run.id)
        self.note(project=self.project, run_id=self.id)
        self.say(f"{self.title}: run {self.id} of {self.shown}")
        self._there = int(self._run.step or 0)  # it takes no numbers of earlier rounds than this

    def _log(self, round_: int, numbers: Mapping[str, float]) -> None:
        if round_ >= self._there:
            self._run.log(dict(numbers), step=round_)

    def _close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
