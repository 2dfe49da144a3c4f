"""Where a site in its own process keeps its State: by the round that made it, so that a round can be repeated.

The server decides which of its States counts: a reply that it refused never happened, nor did the State that came
with it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from medfl.core import RunError, errors_safe_to_send
from medfl.storage import State, load_state, save_state, to_device
from medfl.storage.files import state_round


class States:
    """States in memory, lost when the process ends."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    @property
    def last(self) -> int:
        """The newest completed round, 0 before the first."""
        return max(self._rounds(), default=0)

    def newest(self, round_: int) -> State | None:
        """Return the newest State up to this round, None if there is none."""
        return self.of(self._newest_round(round_))

    def of(self, round_: int) -> State | None:
        """Return the State of exactly this round; None for round 0, and if there was nothing to keep.

        Raises:
            RunError: it is missing.
        """
        rounds = self._rounds()
        if round_ and round_ not in rounds:
            listed = ", ".join(map(str, sorted(rounds))) or "none"
            with errors_safe_to_send():
                raise RunError(
                    f"the server goes on from this site's State of round {round_}, which is not here (those that are: "
                    f"{listed}); put back the folder of the States, or start the run anew"
                )

        if not round_:
            return None

        return self._load(round_) or None

    def keep(self, round_: int, state: State, base: int | None = None) -> None:
        """Keep the State of a round and that of its base, from which it was made; remove all others.

        An empty State marks the round as completed; without a base, the base is the newest before it.
        """
        # the base stays: the server may refuse this reply and repeat the round
        if base is None:
            base = self._newest_round(round_ - 1)

        self._save(round_, state)
        for stale_round in self._rounds() - {round_, base}:
            self._remove(stale_round)

    def _newest_round(self, last: int) -> int:
        """Return the newest round with a State up to the given one, 0 if there is none."""
        return max((round_ for round_ in self._rounds() if round_ <= last), default=0)

    def _rounds(self) -> set[int]:
        return set(self._states)

    def _load(self, round_: int) -> State:
        return self._states[round_]

    def _save(self, round_: int, state: State) -> None:
        self._states[round_] = state

    def _remove(self, round_: int) -> None:
        del self._states[round_]


class StatesInFolder(States):
    """States in files, from which a stopped site continues; the folder belongs to this site and run alone."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self._device = device

    def _rounds(self) -> set[int]:
        return set(map(state_round, self.folder.glob("*.safetensors"))) - {0}

    def _load(self, round_: int) -> State:
        return to_device(load_state(self._file(round_)), self._device)

    def _save(self, round_: int, state: State) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        save_state(self._file(round_), state, round_)

    def _remove(self, round_: int) -> None:
        self._file(round_).unlink()

    def _file(self, round_: int) -> Path:
        return self.folder / f"{round_:06d}.safetensors"
