"""The worker's end of a site inside walls: it opens the bundle, reads images and trains, and keeps nothing."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfl.core.importing import without_gc
from medfl.safety.bounds import end_group_with_keeper
from medfl.safety.sandbox import Allowed, Sandbox

if TYPE_CHECKING:
    from medfl.runtimes.federation import Federation
    from medfl.runtimes.monai_fl.view import SiteView
    from medfl.storage.files import State


def begin(opened: Callable[[State], tuple[Federation, str]]) -> None:
    """Enter the walls that the keeper names on the standard input, and answer its questions until it closes the pipe.

    Args:
        opened: makes the federation with the site's images, and the site's name, from the keeper's job.
    """
    document = json.loads(sys.stdin.readline())
    read, write = (tuple(map(Path, document[name])) for name in ("read", "write"))
    end = socket.socket(fileno=document["pipe"])
    end_group_with_keeper(sys.stdin.fileno())
    # PyTorch and NumPy, which start threads, are imported behind the walls
    Sandbox(Allowed(read, write)).enter()
    _answer(end, lambda: opened(document["job"]))


def _answer(end: socket.socket, opened: Callable[[], tuple[Federation, str]]) -> None:
    # MONAI imports it where it finds it, for a handler that no bundle's training has here
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    with without_gc():
        from medfl.runtimes.monai_fl.guard import in_words
        from medfl.runtimes.monai_fl.pipe import Pipe
        from medfl.runtimes.monai_fl.view import Aborted, SiteView

    stop = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: stop.set())
    pipe = Pipe(end)
    view: SiteView | None = None
    while True:
        try:
            question = pipe.receive()
        except EOFError:
            return

        stop.clear()
        try:
            if view is None:
                federation, name = opened()
                view = SiteView(federation, name, stop)
            answer = _ANSWERS[question["question"]](view, question)
        except Aborted:
            answer = {"aborted": True}
        except Exception as error:  # the keeper decides what it means
            answer = {"error": in_words(error)}

        pipe.send(answer)


def _stated(view: SiteView, _: State) -> State:
    from medfl.core.task import SECTIONS
    from medfl.runtimes.monai_fl.pipe import forms_state

    rules = view.rules
    return {
        "run_hash": view.run_hash,
        "training_items": view.training_items,
        "leaves": forms_state(rules.leaves),
        "network": forms_state(rules.network),
        "personal": sorted(rules.personal),
        "exact": sorted(view.wire_compression.exact),
        "held_out": [section for section in SECTIONS if view.is_held_out(section)],
        "facts": {name: list(values) for name, values in view.facts.items()},
    }


def _trained(view: SiteView, question: State) -> State:
    from medfl.runtimes.monai_fl.held import cases_state
    from medfl.runtimes.step import site_step

    result = _called(view, site_step, question)
    return {
        "state": result.state,
        "message": result.reply.flat(),
        "loss": float(result.loss),
        "steps": int(result.steps),
        "cases": cases_state({name: view.told(part) for name, part in result.cases.items()}),
    }


def _scored(view: SiteView, question: State) -> State:
    from medfl.runtimes.monai_fl.held import cases_state
    from medfl.runtimes.step import score_site

    cases = _called(view, score_site, question)
    return {"cases": cases_state({name: view.told(part) for name, part in cases.items()})}


def _called(view: SiteView, function: Callable[..., Any], question: State) -> Any:
    from medfl.core.message import Message
    from medfl.storage.files import to_device

    state = to_device(question["state"], view.device) if question["has_state"] else None
    message = Message.from_flat(to_device(question["message"], view.device))
    result = view.call(function, question["round"], state, message, *question["arguments"])
    view.go_on()
    return result


def _introduced(view: SiteView, _: State) -> State:
    from medfl.runtimes.step import introduce

    return {"message": view.introduction(introduce).flat()}


_ANSWERS: dict[str, Callable[[SiteView, State], State]] = {
    "begin": _stated,
    "site_step": _trained,
    "score_site": _scored,
    "introduction": _introduced,
}
