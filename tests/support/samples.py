"""Samples without transforms, for items that are made one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Plain:
    """What a function makes of an index, as a SampleMaker that has nothing random."""

    has_steps_left = False

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __call__(self, index: int) -> Any:
        return self.make(index)

    def without_draws(self, uncropped: bool) -> Plain:
        return self
