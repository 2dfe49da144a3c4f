"""The worker's end of a sandboxed site: it opens the bundle, reads images and trains, and keeps nothing."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfl.core import map_values
from medfl.core.importing import without_gc
from medfl.safety.bounds import end_group_with_keeper
from medfl.safety.sandbox import Allowed, Sandbox

if TYPE_CHECKING:
    from medfl.runtimes.federation import Federation
    from medfl.runtimes.monai_fl.view import SiteView
    from medfl.storage import State


def begin(opened: Callable[[State], tuple[Federation, str]]) -> None:
    """Enter the sandbox given by the keeper on standard input, and answer its requests until it closes the pipe.

    Args:
        opened: from the keeper's job, makes the federation with the site's images, and the site's name.
    """
    document = json.loads(sys.stdin.readline())
    read, write = (tuple(map(Path, document[name])) for name in ("read", "write"))
    end = socket.socket(fileno=document["pipe"])
    end_group_with_keeper(sys.stdin.fileno())
    # PyTorch and NumPy, which start threads, are imported inside the sandbox
    Sandbox(Allowed(read, write)).enter()
    _answer(end, lambda: opened(document["job"]))


def _answer(end: socket.socket, opened: Callable[[], tuple[Federation, str]]) -> None:
    # MONAI imports it if available, for a handler that no bundle's training has here
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
    from medfl.core import SECTIONS
    from medfl.runtimes.monai_fl.pipe import forms_state

    rules = view.rules
    return {
        "run_hash": view.run_hash,
        "training_items": view.training_items,
        "leaves": forms_state(rules.leaves),
        "network": forms_state(rules.network),
        "personal": sorted(rules.personal),
        "exact": sorted(view.wire_compression.exact),
        "held_out": list(filter(view.is_held_out, SECTIONS)),
        "facts": map_values(list, view.facts),
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
        "cases": cases_state(map_values(view.told, result.cases)),
    }


def _scored(view: SiteView, question: State) -> State:
    from medfl.runtimes.monai_fl.held import cases_state
    from medfl.runtimes.step import score_site

    cases = _called(view, score_site, question)
    return {"cases": cases_state(map_values(view.told, cases))}


def _sets_scored(view: SiteView, question: State) -> State:
    from medfl.runtimes.monai_fl.held import cases_state
    from medfl.runtimes.step import score_sets

    return {"cases": cases_state(_called(view, score_sets, question))}


def _called(view: SiteView, function: Callable[..., Any], question: State) -> Any:
    from medfl.core import Message
    from medfl.storage import to_device

    state = to_device(question["state"], view.device) if question["has_state"] else None
    message = Message.from_flat(to_device(question["message"], view.device))
    result = view.call(function, question["round"], state, message, *question["arguments"])
    view.go_on()
    return result


def _introduced(view: SiteView, _: State) -> State:
    from medfl.runtimes.step import introduce

    return {"message": view.introduction(introduce).flat()}


def _fingerprint(view: SiteView, question: State) -> State:
    answer = view.fingerprint(question["min_count"], question["epsilon"])
    return {"fingerprint": answer.encoded().decode()}


_ANSWERS: dict[str, Callable[[SiteView, State], State]] = {
    "begin": _stated,
    "site_step": _trained,
    "score_site": _scored,
    "score_sets": _sets_scored,
    "introduction": _introduced,
    "fingerprint": _fingerprint,
}
