"""Where a site that is its own process keeps its State: by the round that made it, so that a round can be repeated.

Which of its States counts is the server's to say: a reply that it refused never happened, and neither did the State
that came with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from medfl.core.errors import RunError, errors_safe_to_send
from medfl.core.storage import State, load_state, save_state, state_round, to_device


class States(Protocol):
    """A site's States."""

    @property
    def last(self) -> int:
        """The newest round that is over, 0 before the first."""

    def newest(self, round_: int) -> State | None:
        """Return the newest State of a round up to this one, None if there is none."""

    def of(self, round_: int) -> State | None:
        """Return the State of just this round; None for round 0, and where there was nothing to keep.

        Raises:
            RunError: it is not there.
        """

    def keep(self, round_: int, state: State, base: int | None = None) -> None:
        """Keep the State of a round and the one that it was made from; all others are of a past that is no more.

        Args:
            round_: the round.
            state: may be empty: then it says that the round is over.
            base: round of the State that it was made from; None: the newest before.
        """


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
        return self._held.get(_before(self._held, round_)) or None

    def of(self, round_: int) -> State | None:
        """Return the State of just this round."""
        _require(round_, self._held)
        return self._held.get(round_) or None

    def keep(self, round_: int, state: State, base: int | None = None) -> None:
        """Keep the State of a round."""
        base = _before(self._held, round_ - 1) if base is None else base
        self._held = {made: self._held[made] for made in self._held if made == base} | {round_: state}


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
        return self.of(_before(self._rounds(), round_))

    def of(self, round_: int) -> State | None:
        """Return the State of just this round."""
        _require(round_, self._rounds())
        return to_device(load_state(self._file(round_)), self._device) or None if round_ else None

    def keep(self, round_: int, state: State, base: int | None = None) -> None:
        """Keep the State of a round, also an empty one."""
        base = _before(self._rounds(), round_ - 1) if base is None else base
        self.folder.mkdir(parents=True, exist_ok=True)
        save_state(self._file(round_), state, round_)
        for made in set(self._rounds()) - {round_, base}:
            self._file(made).unlink()

    def _rounds(self) -> list[int]:
        return sorted(state_round(path) for path in self.folder.glob("*.safetensors"))

    def _file(self, round_: int) -> Path:
        return self.folder / f"{round_:06d}.safetensors"


def _before(rounds: Iterable[int], round_: int) -> int:
    """Return the newest of these rounds up to one, 0 if there is none."""
    return max((made for made in rounds if made <= round_), default=0)


def _require(round_: int, rounds: Iterable[int]) -> None:
    """Raise RunError if a State is asked for that is not there."""
    if round_ and round_ not in rounds:
        held = ", ".join(map(str, sorted(rounds))) or "none"
        with errors_safe_to_send():
            raise RunError(
                f"the server goes on from its State of round {round_}, which it does not have (those that it has: "
                f"{held}); put back the folder of its States, or start the run anew"
            )
