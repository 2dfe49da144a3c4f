"""What the simulator has a worker do at one site: a function of `step`, with the site's State read from its file.

So no process holds the States of all sites, and none of them passes through the server's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from medfl.core.errors import RunError
from medfl.core.message import Message
from medfl.core.storage import State, load_state, save_state, to_device
from medfl.evaluation.metrics import Cases
from medfl.runtimes import profiling
from medfl.runtimes.absent import Absent
from medfl.runtimes.federation import Federation
from medfl.runtimes.step import StepResult, introduce, site_step


def train(
    federation: Federation,
    round_: int,
    name: str,
    kept: str | None,
    fresh: str,
    down: Message,
    judge: tuple[str, ...] = (),
) -> tuple[StepResult, bool]:
    """Train at one site.

    Args:
        federation: the sites.
        round_: in which round.
        name: the site.
        kept: file of its State, None before its first round.
        fresh: file that its next State is written to, if it has any.
        down: what the server sends it.
        judge: sections that the trained model is scored on.

    Returns:
        What the step gave, but for the State, and whether that was written.
    """
    with profiling.visit(name):
        state = _state(federation, kept)
        with profiling.during(profiling.STEP):
            result = site_step(federation, round_, name, state, down, judge)
        if result.state:
            with profiling.during(profiling.CHECKPOINT):
                save_state(Path(fresh), result.state)
    return replace(result, state={}), bool(result.state)


def tried(
    federation: Federation, round_: int, name: str, kept: str | None, down: Message, judge: tuple[str, ...]
) -> dict[str, Cases]:
    """Train at one site only to score what comes out: nothing is sent or saved."""
    with profiling.visit(name), profiling.during(profiling.STEP):
        return site_step(federation, round_, name, _state(federation, kept), down, judge).cases


def scored(
    federation: Federation,
    function: Callable[..., Any],
    round_: int,
    name: str,
    kept: str | None,
    down: Message,
    *rest: Any,
) -> Any:
    """Call a function of `step` that trains nothing: (federation, round, name, State, message, *rest)."""
    with profiling.visit(name):
        state = _state(federation, kept)
        with profiling.during(profiling.EVALUATION):
            return function(federation, round_, name, state, down, *rest)


def served(federation: Federation, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of `step` that scores the server's model."""
    with profiling.during(profiling.EVALUATION):
        return function(federation, *arguments)


_SITE = {introduce: 0, train: 1, tried: 1, scored: 2}
"""Where the name of the site stands among the arguments of what is done at one."""


def answered(function: Callable[..., Any], arguments: tuple[Any, ...], done: Callable[..., Any]) -> Any:
    """Do a task; where a site fails, its `Absent` is the answer.

    Args:
        function: of the task.
        arguments: of the task, after the federation.
        done: what does it, called with the arguments.

    Raises:
        RunError: the server failed.
    """
    try:
        return done(*arguments)
    except RunError as error:
        if function not in _SITE:
            raise
        return Absent(arguments[_SITE[function]], str(error))


def _state(federation: Federation, kept: str | None) -> State | None:
    if kept is None:
        return None
    with profiling.during(profiling.CHECKPOINT):
        return to_device(load_state(Path(kept)), federation.networks.device)
