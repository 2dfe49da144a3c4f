"""Try everything that expressions and components can reach, each with many arguments, and print what it did outside.

Run as a script in a process of its own: `python -m tests.policy.reach FOLDER`; prints one JSON document.
"""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from monai.data import Dataset, MetaTensor
from monai.transforms import Compose, Flip
from PIL import Image

from medfl.bundle.guarded import _Component
from medfl.core.untrusted import Refused
from medfl.policy import allowed, allowed_in_expressions, components
from medfl.policy.evaluate import ExpressionEvaluator
from medfl.policy.imports import DEFAULT_NAMES
from tests.support.audit import Watch


def values(folder: Path) -> dict[str, Any]:
    """One of each kind of object that an expression may hold."""
    network = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return {
        "text": "note.txt", "absolute": str(folder / "note.txt"), "list": [1, 2], "tuple": (1, 2), "dict": {"a": 1},
        "set": {1}, "number": 2, "fraction": 0.5, "path": folder / "note.txt", "folder": folder,
        "tensor": torch.ones(2, 2), "meta": MetaTensor(torch.ones(1, 2)), "array": np.ones(2),
        "scalar": np.float32(1), "network": network, "optimizer": optimizer, "device": torch.device("cpu"),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "dataset": Dataset([1]), "transform": Flip(0),
        "compose": Compose([Flip(0)]), "picture": Image.new("L", (2, 2)), "file": io.StringIO("a"),
        "partial": functools.partial(max, 1), "function": len, "none": None, "module": json, "class": Dataset,
    }  # fmt: skip


class TooLong(Exception):
    """A call that takes more than a second."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooLong


_CONTROLS: tuple[Callable[[Path], Any], ...] = (
    Path.touch, Path.mkdir, Path.rmdir, lambda place: place.write_text("x"), lambda place: place.replace(place),
    lambda place: place.chmod(0o600), Path.unlink, lambda place: os.system("true"),
    lambda place: subprocess.run(["true"]), lambda place: socket.create_connection(("127.0.0.1", 9)),
    lambda place: json, lambda place: pickle.loads(pickle.dumps(Flip)),
)  # fmt: skip
"""Calls that have to be seen."""


class Reach:
    """Tries calls, and says which changed something."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.values = folder, values(folder)
        self.evaluator = ExpressionEvaluator(DEFAULT_NAMES, (), (), (folder,))
        self.watch = Watch(may=("ctypes.dlopen",))  # libraries that PyTorch loads when first used
        self.tried = self.succeeded = 0
        self.found: list[str] = []
        self._walked: set[tuple[type, int]] = set()  # types of what objects gave

    def attempt(self, what: str, call: Callable[[], Any]) -> Any:
        self.tried += 1
        before = len(self.watch.seen)
        result = None
        signal.setitimer(signal.ITIMER_REAL, 1)
        try:
            with self.watch.on():
                result = call()
                if inspect.isgenerator(result) or isinstance(result, map):
                    result = list(itertools.islice(result, 5))
                self.succeeded += 1
        except (Exception, SystemExit):
            pass  # most arguments do not fit; what counts is what the watch has seen
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.found += [f"{what}: {seen}" for seen in self.watch.seen[before:]]
        if isinstance(result, ModuleType):
            self.found.append(f"{what}: the module {result.__name__}")
        return result

    def arguments(self) -> Iterator[tuple[Any, ...]]:
        """No argument, each value, and pairs of paths, texts and functions."""
        yield ()
        names = [name for name in self.values if name != "module"]
        yield from ((self.values[name],) for name in names)
        pairs = ("text", "path", "number", "function", "dict")
        yield from ((self.values[a], self.values[b]) for a in pairs for b in pairs)

    def members(self) -> None:
        functions = {f"{module.__name__}.{name}" for module in (torch, np) for name in dir(module)}
        plain = {path for path in functions if components.for_expressions(path)}
        for path in sorted(allowed_in_expressions.MEMBERS | plain):
            try:
                member = self.evaluator._value_of(path)
            except (Refused, AttributeError):
                continue
            if not callable(member):
                continue
            for index, arguments in enumerate(self.arguments()):
                self.attempt(
                    f"{path} {index}", lambda m=member, a=arguments: self.evaluator._call(m, *a)
                )

    def attributes(self) -> None:
        """Every attribute and method that a value lets be asked for, and so on with what that gives, to depth three."""
        for kind, value in self.values.items():
            self._walk(kind, value, 3)

    def _walk(self, what: str, value: Any, depth: int) -> None:
        for name in sorted({*dir(value), *allowed_in_expressions.METHODS}):
            path = f"{what}.{name}"
            given = [self.attempt(path, lambda n=name: self.evaluator._attribute(value, n))]
            try:
                self.evaluator._check_attribute(value, name)
            except (Refused, ValueError):
                continue  # no arguments change that
            for index, arguments in enumerate(self.arguments() if depth == 3 else [(), (1,)]):
                made = self.attempt(
                    f"{path} {index}",
                    lambda n=name, a=arguments: self.evaluator._method(value, n, *a),
                )
                given += [made] if index < 2 else []
            for each in given if depth > 1 else ():
                if each is None or (type(each), depth) in self._walked:
                    continue
                self._walked.add((type(each), depth))
                self._walk(path, each, depth - 1)
                self._hand_on(path, each)

    def _hand_on(self, path: str, value: Any) -> None:
        """Try all that would call what an object gave."""
        call = self.evaluator._value_of
        self.attempt(f"{path} called", lambda: self.evaluator._call(value, "true"))
        for name in ("map", "filter", "sorted", "max"):
            guard = self.evaluator._builtins[name]
            self.attempt(f"{path} {name}", lambda g=guard: list(g(value, ["true"])))
            self.attempt(f"{path} {name} key", lambda g=guard: g(["true"], key=value))
        self.attempt(f"{path} partial", lambda: call("functools.partial")(value)("true"))
        for config in (
            {"_target_": "Lambda", "func": value},
            {"_target_": "Dataset", "data": ["true"], "transform": value},
            {"_target_": "Compose", "transforms": [value]},
        ):
            self.attempt(
                f"{path} {config['_target_']}",
                lambda c=config: _use(_Component(c, "x", self.evaluator)),
            )

    def poisoned(self) -> None:
        """Objects whose state others set, as a loader of checkpoints does: nothing that was put there is called."""

        def danger(*_: Any, **__: Any) -> None:
            (self.folder / "danger").touch()

        setters = {
            "load_state_dict": lambda value, name: value.load_state_dict({name: danger}),
            "__setstate__": lambda value, name: value.__setstate__({name: danger}),
            "__dict__.update": lambda value, name: vars(value).update({name: danger}),
        }
        for kind, (setter, put) in itertools.product(self.values, setters.items()):
            value = self.values[kind]
            for name in sorted(allowed_in_expressions.METHODS):
                try:
                    put(value, name)
                except Exception:
                    break  # not every object has a state that can be set
                what = f"{kind} set by {setter}: .{name}"
                self.attempt(what, lambda v=value, n=name: self.evaluator._method(v, n))
                given = self.attempt(what, lambda v=value, n=name: self.evaluator._attribute(v, n))
                if callable(given):
                    self._hand_on(what, given)
                getattr(value, "__dict__", {}).pop(name, None)
            self.values = values(self.folder)

    def made(self) -> None:
        """Every component with its required arguments, and each of its optional ones, that could be a place."""
        short, listed = components._listed()
        full = {f"{found.__module__}.{found.__qualname__}" for found in listed.values()}
        for name in (
            "kaiming_uniform_",
            "kaiming_normal_",
            "trunc_normal_",
            "xavier_uniform_",
            "normal_",
            "uniform_",
        ):
            setattr(
                torch.nn.init, name, lambda tensor, *_, **__: tensor
            )  # what large networks draw takes long
        targets = sorted({*short, *allowed.COMPONENTS, *full})
        for target in targets:
            try:
                parameters = inspect.signature(components.component(target)).parameters.values()
            except ValueError:  # torch.device tells none
                parameters = {}.values()
            needed = {
                p.name: self._guess(p.name)
                for p in parameters
                if p.default is p.empty and p.kind == 1
            }
            places = [p.name for p in parameters if p.kind in (1, 3) and _is_place(p.name)]
            for more in ({}, *({name: str(self.folder / "made")} for name in places)):
                config = {"_target_": target, **needed, **more}
                self.attempt(
                    f"{target} {sorted(more)}",
                    lambda c=config: _Component(c, "x", self.evaluator).instantiate(),
                )

    def handed_on(self) -> None:
        """Every component that expressions may name, called by `map` and `partial` with texts that name a danger."""
        _, listed = components._listed()
        for path in sorted(
            {f"{found.__module__}.{found.__qualname__}" for found in listed.values()}
        ):
            if components.for_expressions(path) is None:
                continue
            value = self.evaluator._value_of(path)
            for count in range(1, 13):
                texts = ["os.system", *["true"] * (count - 1)]
                self.attempt(
                    f"map {path} {count}",
                    lambda v=value, t=texts: list(map(v, *([text] for text in t))),
                )
                self.attempt(
                    f"partial {path} {count}",
                    lambda v=value, t=texts: self.evaluator._call(
                        functools.partial(v, *t[:-1]), t[-1]
                    ),
                )

    def _guess(self, name: str) -> Any:
        if "network" in name or "model" in name or "encoder" in name:
            return self.values["network"]
        if "transform" in name or "func" in name or "fn" in name:
            return self.values["transform"]
        if _is_place(name):
            return str(self.folder / "made")
        return {
            "data": [1, 2],
            "dataset": self.values["dataset"],
            "keys": "a",
            "params": [torch.ones(1)],
        }.get(name, 2)


def _use(component: _Component) -> Any:
    """Make a component, and let it call what it was given."""
    made = component.instantiate()
    return made[0] if isinstance(made, Dataset) else made("true")


def _is_place(name: str) -> bool:
    return any(part in name for part in ("dir", "path", "file", "root"))


def main(folder: Path) -> None:
    """Try all and print what was found."""
    warnings.simplefilter("ignore")  # of deprecated names, and of arguments that do not fit
    signal.signal(signal.SIGALRM, lambda number, frame: _stop(number, frame))
    (folder / "note.txt").write_text("note")
    reach = Reach(folder)
    counts = {}
    for part in (reach.members, reach.attributes, reach.made, reach.handed_on, reach.poisoned):
        before = reach.tried, reach.succeeded
        part()
        counts[part.__name__] = reach.tried - before[0], reach.succeeded - before[1]
    files = {path.name: path.read_text() for path in folder.iterdir()}
    found, reach.found = reach.found, []
    for call in _CONTROLS:
        reach.attempt("control", functools.partial(call, folder / "control"))
    document = {"counts": counts, "found": found, "files": files, "controls": reach.found}
    sys.__stdout__.write("\n" + json.dumps(document) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
