"""Where a site that is its own process keeps its State: by the round that made it, so that a round can be repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from medfl.storage import State, load_state, moved, save_state


class States(Protocol):
    """A site's States."""

    @property
    def last(self) -> int:
        """The newest round that is over, 0 before the first."""

    def newest(self, round_: int) -> State | None:
        """Return the newest State of a round up to this one, None if there is none."""

    def keep(self, round_: int, state: State) -> None:
        """Keep the State of a round, and of the older ones the newest; later ones are of a past that is no more."""


class InMemory:
    """States that are gone with the process."""

    def __init__(self) -> None:
        """Begin with none."""
        self._held: dict[int, State] = {}

    @property
    def last(self) -> int:
        """The newest round that is over."""
        return max(self._held, default=0)

    def newest(self, round_: int) -> State | None:
        """Return the newest State of a round up to this one."""
        made = max((made for made in self._held if made <= round_), default=None)
        return None if made is None else self._held[made] or None

    def keep(self, round_: int, state: State) -> None:
        """Keep the State of a round."""
        before = [made for made in self._held if made < round_]
        self._held = {made: self._held[made] for made in sorted(before)[-1:]} | {round_: state}


class InFolder:
    """States in files, with which a site goes on after it was stopped.

    Args:
        folder: of this site and run alone; it is made when the first State is kept.
        device: where the tensors are wanted.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Point at the folder."""
        self.folder, self._device = folder, device

    @property
    def last(self) -> int:
        """The newest round that is over."""
        return max(self._rounds(), default=0)

    def newest(self, round_: int) -> State | None:
        """Return the newest State of a round up to this one."""
        made = max((made for made in self._rounds() if made <= round_), default=None)
        return None if made is None else moved(load_state(self._file(made)), self._device) or None

    def keep(self, round_: int, state: State) -> None:
        """Keep the State of a round, also an empty one: its file says that the round is over."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_state(self._file(round_), state)
        kept = {round_, *[made for made in self._rounds() if made < round_][-1:]}
        for made in set(self._rounds()) - kept:
            self._file(made).unlink()

    def _rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("[0-9]*.safetensors"))

    def _file(self, round_: int) -> Path:
        return self.folder / f"{round_:06d}.safetensors"
