"""Commands of the docs that are planned: all is done that `medfl` does before the first round, and no round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from medfl.cli import verbs as cli
from medfl.compare import grid, tune
from medfl.compare.search import BEST
from medfl.runs import launch
from medfl.runs.plan import Plan
from medfl.runtimes.launch import Launch
from medfl.storage.files import write_json
from tests.support.docs_pages import shortened


class Planned(Exception):
    """A run would begin now: it is planned, its overrides are tried by a step, its public images are there."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.run.method)
        self.plan = plan


def _stop(plan: Plan, *_: Any) -> None:
    raise Planned(plan)


def _stop_grid(
    planned: grid.Grid, cells: Sequence[grid.Cell], shared: launch.Shared, whole: Launch
) -> None:
    """Begin the first run of a grid, all rows of which are planned; a search leaves its first trial as its best."""
    if planned.search:
        settings = tune._settings(planned.options, planned.entries[0])
        document = {"method": planned.entries[0].method, "settings": settings, "trials": len(cells)}
        write_json(whole.folder / BEST, document)

    first = grid._request(planned, cells[0])
    requested = {
        name: value
        for name, value in vars(first).items()
        if name not in ("bundle", "options", "config") and value is not None
    }
    launch.federate(
        first.bundle,
        options=first.options,
        config=first.config,
        requested=requested,
        shared=shared,
        launch=Launch(out=cells[0].folder, jobs=1),
    )


def is_training(command: str) -> bool:
    """Tell whether a command would train."""
    verb = command.split()[1:3]
    return verb[0] in ("run", "compare", "tune") or verb in (
        ["flare", "simulate"],
        ["flare", "poc"],
    )


def plan(command: str, *more: str) -> Plan:
    """Plan what a command of a page, shortened, with more words, would run; return the plan of its first run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_execute", _stop)
        patch.setattr(grid, "_run_all", _stop_grid)
        try:
            code = cli.main([*shortened(command)[1:], *more])
        except Planned as planned:
            return planned.plan
    raise AssertionError(f"{command}: ended with {code} before it would train")
