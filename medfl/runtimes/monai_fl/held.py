"""A site whose work is done by a sandboxed worker: its keeper's end, which never creates an object of the bundle.

The keeper holds the connection, the policy, the account, the audit log and the site's States. It decodes what the
server sends, passes it to the worker with the State, and checks the answer before the site's rules see it. The worker
(`worker.begin`) keeps nothing: once ended, it is started again with the next request.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Annotated, Any

import torch

from medfl import methods
from medfl.core import (
    Count,
    Message,
    MessageLimits,
    Print,
    Run,
    RunError,
    map_values,
    matches_type,
    printable,
    without_round_limit,
)
from medfl.core.compression import Compression
from medfl.data.fingerprint import Fingerprint, read
from medfl.evaluation import Cases, CasesByName
from medfl.runtimes.message_rules import MessageRules
from medfl.runtimes.monai_fl.data_stats import Bins
from medfl.runtimes.monai_fl.pipe import Pipe, read_forms
from medfl.runtimes.monai_fl.view import Aborted, SiteEnd
from medfl.runtimes.registry import Document
from medfl.runtimes.step import UNSENT, StepResult, score_sets, score_site, site_step
from medfl.safety.bounds import beyond
from medfl.safety.sandbox import Allowed, variables
from medfl.storage import State

_PATIENCE = 60.0
"""Seconds from an abort until a worker that continues is killed."""
_STATED = {
    "run_hash": str,
    "training_items": Count,
    "leaves": list[list[object]],
    "network": list[list[object]],
    "personal": list[str],
    "exact": list[str],
    "held_out": list[str],
    "facts": dict[str, list[Annotated[int, range(1000)]]],
}
"""What a worker states about itself at its start, and the type of each value."""
_TRAINED = {"state": State, "loss": float, "steps": Count}
_FACTS = {"labels", "channels"}
_MOST_TEXT = 50_000
"""Characters of all names, of metrics and numbers, that a worker may use: a few for each structure."""
_LINE = 500
_MOST_LINES = 10_000
"""Of one process: its keeper's log is beside the States."""


class Worker:
    """A worker's process.

    Args:
        module: what Python runs (`python -m`); it calls `worker.begin`.
        job: passed to the module, as plain values.
        allowed: what the process may still do.
        variables: for its environment.
        say: receives the lines that it prints.
    """

    def __init__(
        self,
        module: str,
        job: Document,
        allowed: Allowed,
        variables: Mapping[str, str],
        say: Print,
    ) -> None:
        """Prepare the worker; no process is started yet."""
        self._module = module
        self._document = {
            "job": job,
            "read": [*map(str, allowed.read)],
            "write": [*map(str, allowed.write)],
        }
        self._variables = dict(variables)
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Pipe | None = None
        self._stopped = 0.0
        self.stop = threading.Event()

    def ask(self, question: str, **values: object) -> State:
        """Return the answer to a request, starting a new process if there is none.

        Raises:
            Aborted: it was told to stop.
            RunError: it has failed, or ended.
        """
        self._stopped = 0.0
        try:
            if self._pipe is None:
                self._begin()

            assert self._pipe is not None
            self._pipe.send({"question": question, **values})
            answer = self._pipe.receive()
        except (EOFError, OSError) as error:
            how = self.close()
            if self.stop.is_set():  # not yet ready for the signal, so it ended by it
                raise Aborted("aborted") from error
            raise RunError(f"the worker has ended: {how}") from error
        except RunError:
            self.close()
            raise

        if "aborted" in answer:
            raise Aborted("aborted")
        if "error" in answer:
            raise RunError(printable(answer["error"], _LINE))

        return answer

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self._pipe is not None

    def _begin(self) -> None:
        here, there = socket.socketpair()
        with there:
            document = {**self._document, "pipe": there.fileno()}
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[there.fileno()],
                env={**variables(), **self._variables},
                start_new_session=True,
            )

        self._pipe = Pipe(here, self._wait)
        assert process.stdin is not None
        assert process.stdout is not None
        threading.Thread(target=self._pass_on, args=(process.stdout,), daemon=True).start()
        # And left open: its closing signals that the keeper was killed
        process.stdin.write(json.dumps(document).encode() + b"\n")
        process.stdin.flush()

    def _pass_on(self, output: IO[bytes]) -> None:
        """Forward what the process prints."""
        left = _MOST_LINES
        with output:
            while line := output.readline(_LINE):
                left -= 1
                if left > 0:
                    self._say(f"worker: {printable(line.decode(errors='replace').rstrip(), _LINE)}")
                elif left == 0:
                    self._say(f"worker: more than {_MOST_LINES:,} lines, of which no others follow")

    def _wait(self) -> None:
        """Forward a stop, and kill a worker that exceeds its limits or does not stop."""
        process = self._process
        if process is None:
            raise EOFError

        if reason := beyond(process.pid):
            self.close()
            raise RunError(f"the worker was ended: {reason}")

        # Repeatedly: a signal that arrives before the next request is read is lost
        if self.stop.is_set():
            self._stopped = self._stopped or time.monotonic()
            if time.monotonic() - self._stopped > _PATIENCE:
                self.close()
                raise Aborted("aborted")
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)

    def close(self) -> str:
        """End the process and everything it has started, and say how it had ended before."""
        if self._pipe is not None:
            self._pipe.close()

        process = self._process
        self._pipe = None
        self._process = None
        if process is None:
            return "it could not be started"

        # It may be ending by itself: its last lines tell why
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

        code = process.wait()
        assert process.stdin is not None
        process.stdin.close()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class HeldSite(SiteEnd):
    """A site whose work a worker does.

    Args:
        name: the site.
        run: as accepted, with the folder of the site's images, whose account is charged.
        worker: not started yet.
        is_reviewed: the site's policy pins the bundle's files. Then the bundle's statement that a section shares no
            images with the training data is trusted; otherwise scores count as releases about the training images.

    Raises:
        RunError: the worker fails, or its statements about itself have another form.
    """

    def __init__(self, name: str, run: Run, worker: Worker, *, is_reviewed: bool) -> None:
        """Start the worker, which prepares the site's images."""
        self.name = name
        self.run = run
        self.participants = [name]
        self.device = torch.device("cpu")
        self.stop = worker.stop
        self._worker = worker
        self._is_reviewed = is_reviewed
        # Names and forms are the worker's statement: a broadcast with others is refused, so it cannot name what it
        # likes
        self._stated = stated = worker.ask("begin")
        odd = [key for key, kind in _STATED.items() if not matches_type(stated.get(key), kind)]
        self.facts = {} if odd else stated["facts"]
        ascend = all(values == sorted(set(values)) for values in self.facts.values())
        if odd or self.facts.keys() - _FACTS or not ascend:
            raise RunError(f"site {name!r}: its worker says something odd of {odd or 'its data'}")

        # The method's own code, which both ends have, decides which groups a site sends
        method = methods.load(run.method, run.options)
        network = read_forms(stated["network"])
        # The folder of States depends on the run, whatever the worker states about the images
        both = f"{without_round_limit(run).run_hash} {stated['run_hash']}"
        self.run_hash = hashlib.sha256(both.encode()).hexdigest()
        self.training_items = stated["training_items"]
        self._names: set[str] = set()
        self.rules = MessageRules(
            name,
            read_forms(stated["leaves"]),
            network,
            personal=frozenset(stated["personal"]),
            uploads=frozenset(methods.group_names(method, "up")),
            like_weights=frozenset(methods.group_names(method, "like_weights")),
            fedavg=methods.has_fedavg_server(method),
            limits=MessageLimits.for_networks(
                {
                    key: torch.empty(form[0], dtype=form[1], device="meta")
                    for key, form in network.items()
                }
            ),
        )
        messages = Compression.parse(run.messages)
        if not messages.lossless:
            lossy = frozenset(methods.group_names(method, "smaller"))
            exact = frozenset(stated["exact"])
            messages = Compression(messages.kind, messages.fraction, exact, lossy)

        self.wire_compression = messages

    def call(
        self, function: Callable[..., Any], round_: int, state: State | None, *rest: object
    ) -> Any:
        """Return the result of a function of `step` for (this site, round, name, State, ...); only releasable kinds."""
        # The others return cases or weights, which only leave a site in a simulation
        if function not in (site_step, score_site, score_sets):
            raise RunError(f"site {self.name!r} is not asked for {function.__name__}")

        message, *arguments = rest
        assert isinstance(message, Message)
        # The error feedback is added behind the checks, so it stays here
        sent_state = dict(state or {})
        unsent = sent_state.pop(UNSENT, None)
        answer = self._ask(
            function.__name__,
            round=round_,
            has_state=state is not None,
            state=sent_state,
            message=message.flat(),
            arguments=arguments,
        )
        assert isinstance(arguments[0], Sequence)
        cases = self._cases(answer.get("cases", State()), arguments[0])
        if function is not site_step:
            return cases

        if not all(matches_type(answer.get(key), kind) for key, kind in _TRAINED.items()):
            raise RunError(f"site {self.name!r}: its worker's answer is no result of a training")

        reply = self._message(answer)
        trained = answer["state"]
        trained.pop(UNSENT, None)
        if unsent:
            trained[UNSENT] = unsent

        return StepResult(trained, reply, answer["loss"], answer["steps"], cases, 0, 0)

    def introduction(self, introduce: Callable[..., Message] | None) -> Message:
        """Return the site's message before its first training."""
        message = self._message(self._ask("introduction"))
        # Before the server has sent tensors, their names are the worker's own
        if message.tensors:
            raise RunError(f"site {self.name!r}: its worker introduces itself with tensors")

        return message

    def statistics(self, bins: Bins | None, min_count: int) -> Document:
        """Raise a RunError: statistics would be unchecked statements of the worker, and no job asks for them."""
        raise RunError(f"site {self.name!r}: a worker is not asked for statistics")

    def fingerprint(self, min_count: int, epsilon: float) -> Fingerprint:
        """Return a reviewed bundle's fingerprint, checked as at the server; RunError for other bundles."""
        if not self._is_reviewed:
            raise RunError(
                f"site {self.name!r}: a fingerprint would be the word of a bundle whose files its policy does not pin"
            )

        answer = self._ask("fingerprint", min_count=min_count, epsilon=epsilon)
        return read(str(answer.get("fingerprint")).encode(), f"site {self.name!r}: its worker")

    def is_held_out(self, section: str) -> bool:
        """Tell whether a reviewed bundle says so."""
        return self._is_reviewed and section in self._stated["held_out"]

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def _ask(self, question: str, **values: object) -> State:
        """Ask the worker; a restarted worker must first state the same about itself."""
        if not self._worker.is_running and self._worker.ask("begin") != self._stated:
            raise RunError(f"site {self.name!r}: its worker says something else than before")

        return self._worker.ask(question, **values)

    def _cases(self, value: State, asked: Sequence[str]) -> CasesByName:
        """Return the outcomes of the requested sections."""
        if not matches_type(value, dict[str, State]) or not value.keys() <= {*asked}:
            raise RunError(f"site {self.name!r}: its worker scores something else")

        cases = map_values(_outcomes, value)
        for outcome in cases.values():
            self._count_names(outcome.values)

        return cases

    def _message(self, answer: State) -> Message:
        """Return the message in an answer, checked as at the server."""
        flat = answer.get("message")
        if not isinstance(flat, dict):
            raise RunError(f"site {self.name!r}: its worker's answer has no message")

        message = self.rules.decode_reply(flat)
        self.rules.check_reply(message)
        self._count_names(message.scalars)
        for group in message.tensors.keys() - self.rules.like_weights:
            self._count_names(message[group])

        return message

    def _count_names(self, names: Iterable[str]) -> None:
        """Limit what a worker can encode in names that neither the server nor the network has."""
        self._names.update(names)
        if sum(map(len, self._names)) > _MOST_TEXT:
            raise RunError(f"site {self.name!r}: its worker uses too many names")


def cases_state(cases: Mapping[str, Cases]) -> State:
    """Return outcomes as they are sent through the pipe."""
    return {
        section: {"ids": list(outcome.ids), "values": dict(outcome.values)}
        for section, outcome in cases.items()
    }


def _outcomes(value: State) -> Cases:
    try:
        return Cases(tuple(map(str, value["ids"])), dict(value["values"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError("a worker's scores are no outcomes of cases") from error
