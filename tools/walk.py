"""The walk of a small phantom run through the rooms: `python -m tools.walk [--trace]`.

Counted are calls of Python functions of medfl from a function in another room, of the main process, without what runs
while a module is imported. A call goes down to a room of a lower layer of the import contract, or up to one of a higher
layer, as where a runtime calls a method or the function that it was given. `--trace` prints each such call.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType

import medfl
from medfl.bundle import files
from medfl.bundle.bundle import Bundle

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(ROOT / "medfl") + "/"
RESOLVERS = {
    files.find.__code__: "a bundle's folder is looked up",
    files.read_protocol.__code__: "federated.yaml is read",
    Bundle.__init__.__code__: "a bundle is made",
}


def floors() -> dict[str, int]:
    """Return the height of each room by the import contract, 1 for the lowest."""
    contract = re.search(
        r"^layers = (\[.*?^\])", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert contract is not None
    layers: list[str] = json.loads(contract[1].replace(",\n]", "\n]"))
    return {
        room.strip(): height
        for height, layer in enumerate(reversed(layers), 1)
        for room in layer.split("|")
    }


class Walk:
    """A profiler that notes the calls between rooms."""

    def __init__(self, trace: bool = False) -> None:
        self.floors = floors()
        self.trace = trace
        self.stack: list[str] = []
        """Functions of medfl that have not returned."""
        self.importing = 0
        self.order: list[str] = []
        self.steps: Counter[str] = Counter()
        self.pairs: dict[str, set[tuple[str, str]]] = {"down": set(), "level": set(), "up": set()}
        """Caller and called function, by direction: a call for each image counts once."""
        self.climbs: Counter[tuple[str, str]] = Counter()
        self.resolved: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Note an event of `sys.setprofile`."""
        if event not in ("call", "return"):
            return

        code = frame.f_code
        if code.co_name == "<module>":
            self.importing += 1 if event == "call" else -1
        elif not self.importing and code.co_filename.startswith(PACKAGE):
            if event == "return":
                if self.stack:
                    self.stack.pop()
                return
            module = code.co_filename.removeprefix(PACKAGE).removesuffix(".py").replace("/", ".")
            self._enter(f"{module}.{code.co_name}")
            if code in RESOLVERS:
                self.resolved[RESOLVERS[code]] += 1

    def _enter(self, function: str) -> None:
        from_function = self.stack[-1] if self.stack else function
        self.stack.append(function)
        room = function.partition(".")[0]
        caller = from_function.partition(".")[0]
        if room not in self.order:
            self.order.append(room)
        if room == caller:
            return

        top = max(self.floors.values())
        height, before = self.floors.get(room, top), self.floors.get(caller, top)
        direction = "up" if height > before else "down" if height < before else "level"
        self.steps[direction] += 1
        self.pairs[direction].add((from_function, function))
        if direction == "up":
            self.climbs[caller, room] += 1
        if self.trace:
            print("  " * len(self.stack) + function)


def main() -> None:
    """Run two sites for two rounds, and print the walk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="store_true", help="print each call into another room")
    walk = Walk(parser.parse_args().trace)
    with tempfile.TemporaryDirectory() as folder:
        asked = {"data": "phantom", "sites": 2, "rounds": 2, "partition": "iid"}
        small = {"network": "small_cnn", "image_size": 28}
        sys.setprofile(walk)
        try:
            medfl.run(bundle="mednist", config=small, out=Path(folder) / "run", jobs=1, **asked)
        finally:
            sys.setprofile(None)
    print("rooms, in the order of their first call:", ", ".join(walk.order))
    print("calls into another room:", dict(walk.steps))
    print("different ones:", {name: len(pairs) for name, pairs in walk.pairs.items()})
    print("up, different ones:", *sorted(f"{a} -> {b}" for a, b in walk.pairs["up"]), sep="\n  ")
    print("up:", {f"{a} -> {b}": count for (a, b), count in walk.climbs.most_common()})
    print("of the bundle:", dict(walk.resolved))


if __name__ == "__main__":
    main()
