"""A place besides the run folder where a run's numbers go: MLflow, Weights & Biases (`tracking`).

A tracker opens, takes each round's numbers and closes; it says where the run is in a file of the run folder, with which
a resumed run goes on. Whatever happens there, the run goes on: it is said once, and nothing more is tried until the run
is resumed.
"""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from medfl.core.documents import Document, Metrics
from medfl.core.terminal import Print
from medfl.core.untrusted import Refused, json_values
from medfl.storage.files import write_atomic
from medfl.storage.run_folder import RunFolder

# parts of a record that are no settings: where things lie, and which items each site has
_APART = (
    "bundle_path",
    "data.folder",
    "data.counts",
    "data.notes",
    "partition.notes",
    "partition.sites",
)


class Tracker(ABC):
    """One run elsewhere, which `Events` writes to besides; nothing that happens there ends a run.

    Its place is as `--track KIND:PLACE` says; without one what the folder of the run says, else the default of its
    kind.

    Attributes:
        known: what the file in the run folder says; {} without one that can be read.
        title: its name in lines for the user.
        file: in a run folder, which run elsewhere it is.
        shown: the place in lines for the user, without secrets.
        secret: the place as it is given, which lines do not show.
    """

    title = ""
    file = ""
    shown = ""
    secret = ""

    def __init__(self, folder: RunFolder, say: Print) -> None:
        """Connect to nothing yet."""
        self.folder = folder
        self.say = say
        self._on = False
        self.known = self._known()

    @abstractmethod
    def _open(self) -> None:
        """Begin the run there, or go on with it."""

    @abstractmethod
    def _log(self, round_: int, numbers: Mapping[str, float]) -> None:
        """Write a round's numbers, unless they are there."""

    @abstractmethod
    def _close(self, finished: bool) -> None:
        """Say that the run is over, or was cut short."""

    def open(self, done: int) -> None:
        """Begin, of a run of which `done` rounds are done, and write those of them that are not there."""
        with self._kept_going():
            self._open()
            for entry in self.folder.rounds():
                if entry["round"] <= done:
                    self._log(entry["round"], scalars(entry))
            self._on = True

    def log(self, round_: int, numbers: Mapping[str, float]) -> None:
        """Write a round's numbers."""
        if self._on:
            with self._kept_going():
                self._log(round_, numbers)

    def close(self, finished: bool) -> None:
        """Say that the run is over, or was cut short."""
        if self._on:
            with self._kept_going():
                self._close(finished)

    def note(self, **place: str) -> None:
        """Write down where the run is tracked, also before anything is there: a resumed run then tries again."""
        write_atomic(self.folder.path / self.file, json.dumps(place).encode())

    def _known(self) -> dict[str, str]:
        try:
            document = json_values(self.folder.path / self.file, 2**16)
        except Refused:
            return {}

        if isinstance(document, dict):
            return {key: str(value) for key, value in document.items()}

        return {}

    @contextmanager
    def _kept_going(self) -> Iterator[None]:
        """Whatever fails here, say it, and have nothing more to do with this place."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of their libraries, about each other
                yield
        except Exception as error:  # of a library, of its database, of the network: of any kind
            self._on = False
            text = " ".join(f"{type(error).__name__}: {error}".split())
            if self.secret:
                text = text.replace(self.secret, self.shown)

            self.say(
                f"{self.title} at {self.shown}: {text[:200]}; the run goes on without it, and what it lacks is "
                "written when the run is resumed"
            )


def settings_of(document: Mapping[str, object], above: str = "") -> Document:
    """Return the settings of a record under dotted names."""
    settings: Document = {}
    for key, value in document.items():
        name = above + key
        if name.endswith(_APART):
            continue
        if isinstance(value, Mapping):
            settings |= settings_of(value, f"{name}.")
        else:
            settings[name] = value

    return settings


def scalars(entry: Document) -> Metrics:
    """Return the numbers of a line of rounds.jsonl that become curves."""
    numbers = {"train/loss": entry["train_loss"]}
    for group in ("val_global", "val_personal", "observed"):
        # a round that was not evaluated has None there
        for name, value in (entry.get(group) or {}).items():
            numbers[f"{group}/{name}"] = value

    for name in ("bytes_up", "bytes_down", "seconds"):
        numbers[f"cost/{name}"] = entry[name]

    return numbers
