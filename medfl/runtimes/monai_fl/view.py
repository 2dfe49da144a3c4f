"""What a MONAI FL client needs from its site; here for a site in this process (`SiteView`)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from medfl.core import (
    InputError,
    Message,
    Run,
    RunError,
    derive,
    fields_of,
    pick,
    without_round_limit,
)
from medfl.core.compression import Compression
from medfl.data import Batch, Fingerprint, Shard
from medfl.datasets.readers.reading import stored_key
from medfl.evaluation import Cases
from medfl.problem import fingerprint
from medfl.runtimes import site_channels, site_labels
from medfl.runtimes.federation import Federation, site_seed
from medfl.runtimes.message_rules import MessageRules, Wire
from medfl.runtimes.monai_fl.data_stats import Bins, statistics
from medfl.runtimes.registry import Document
from medfl.storage import State, to_device
from medfl.training import Site

_PARTS = {"train": "train", "eval": "validate"}


class Aborted(RunError):
    """A site was told to stop its work; nothing of it is kept."""

    safe_to_send = True


class SiteEnd(ABC):
    """A site as seen by its client: the requests that it answers, and the rules for its messages.

    Attributes:
        name: the site.
        run: the federation's.
        run_hash: of the run without its number of rounds.
        rules: for messages that the site sends and receives.
        wire_compression: how messages are compressed for transmission.
        facts: the run's statements about this site's data: indices of the `labels` that its masks show, of its
            `channels`.
        training_items: number of items it trains on.
        device: where received tensors are put.
        stop: set by another thread to stop the current work.
    """

    name: str
    run: Run
    run_hash: str
    rules: MessageRules
    wire_compression: Compression
    facts: Mapping[str, list[int]]
    training_items: int
    device: torch.device
    stop: threading.Event

    @abstractmethod
    def call(
        self, function: Callable[..., Any], round_: int, state: State | None, *rest: object
    ) -> Any:
        """Return the result of a function of `step` for (this site, round, name, State, ...)."""

    @abstractmethod
    def introduction(self, introduce: Callable[..., Message] | None) -> Message:
        """Return the site's message before its first training: by `step.introduce`, or None: the initial weights."""

    @abstractmethod
    def statistics(self, bins: Bins | None, min_count: int) -> Document:
        """Return statistics of the site's images (`data_stats`).

        Raises:
            InputError: with a minimum count only the bundle's own bins are allowed.
        """

    @abstractmethod
    def fingerprint(self, min_count: int, epsilon: float) -> Fingerprint:
        """Return the input for planning a segmentation (`problem.fingerprint`)."""

    @abstractmethod
    def is_held_out(self, section: str) -> bool:
        """Tell whether this section is shown to share no images or patients with the site's training images.

        This holds if each item's files and patient are known, and the sections have none in common.
        """

    def told(self, cases: Cases) -> Cases:
        """Return outcomes in the form that a site reports (`Problem.told`)."""
        return cases

    def go_on(self) -> None:
        """Raise `Aborted` if the site has been told to stop."""
        if self.stop.is_set():
            raise Aborted("aborted")

    @abstractmethod
    def close(self) -> None:
        """Release what the site holds besides memory."""

    def message_seed(self, round_: int) -> int:
        """Return the seed for the randomness in a message's compression."""
        return derive(site_seed(self.run, round_, self.name), "messages")

    def received(self, arrived: Wire) -> Message:
        """Return a received broadcast, checked and decompressed, on the site's device; errors of `decode_broadcast`."""
        return self._on_device(self.rules.decode_broadcast(arrived, self.wire_compression))

    def averaged(self, arrived: Wire) -> Message:
        """Return weights received from a plain averaging host, likewise; errors of `decode_average`."""
        return self._on_device(self.rules.decode_average(arrived))

    def _on_device(self, message: Message) -> Message:
        return Message(to_device(dict(message.tensors), self.device), message.scalars)


class SiteView(SiteEnd):
    """A federation for the steps of one site: broadcasts are already decompressed, and batches end on a stop.

    Prepared images and networks are those of the given federation.

    Attributes:
        compression: none, as steps receive decompressed messages and return uncompressed replies.
        bundle, method, task, networks, surface_metrics: as in `Federation`.
    """

    def __init__(self, federation: Federation, name: str, stop: threading.Event) -> None:
        """Share everything; nothing is prepared again."""
        self._federation = federation
        self.stop = stop
        self._held_out: dict[str, bool] = {}
        self.name = name
        self.rules = federation.message_rules(name)
        # the client opens broadcasts on arrival: here nothing is left to undo
        self.compression = Compression()
        self.wire_compression = federation.compression
        self.run = federation.run
        self.bundle = federation.bundle
        self.method = federation.method
        self.task = federation.task
        self.networks = federation.networks
        self.surface_metrics = federation.surface_metrics
        self.device = federation.networks.device

    @cached_property
    def run_hash(self) -> str:  # type: ignore[override]
        """Hash of the run without its number of rounds."""
        return without_round_limit(self.run).run_hash

    @cached_property
    def training_items(self) -> int:  # type: ignore[override]
        """Number of items it trains on."""
        return len(self._federation.participant_shard(self.name, "train"))

    @cached_property
    def facts(self) -> dict[str, list[int]]:  # type: ignore[override]
        """The run's statements about its data."""
        run = self.run
        bundle = self.bundle
        sites = self._federation.names
        facts: dict[str, list[int]] = {}

        if self.name in site_labels.read(run.site_labels, site_labels.names_of(bundle), sites):
            annotated = self._federation.known.get(self.name)
            everything = site_labels.foreground_classes(site_labels.names_of(bundle))
            facts["labels"] = sorted(everything) if annotated is None else [*annotated.classes]

        if run.site_channels:
            channels = site_channels.read(run.site_channels, site_channels.names(bundle), sites)
            if self.name in channels:
                facts["channels"] = [*channels[self.name]]

        return facts

    def call(
        self, function: Callable[..., Any], round_: int, state: State | None, *rest: object
    ) -> Any:
        """Call a function of `step` here."""
        return function(self, round_, self.name, state, *rest)

    def introduction(self, introduce: Callable[..., Message] | None) -> Message:
        """Return the site's message before its first training."""
        if introduce is None:
            return Message({"weights": pick(self.networks.initial, self.rules.leaves)})

        return introduce(self, self.name)

    def statistics(self, bins: Bins | None, min_count: int) -> Document:
        """Return statistics of the site's images."""
        # with bounds of its choice, a server could close in on the value of one case
        if bins is not None and min_count:
            allowed = Bins.own(self.bundle.metadata)
            if bins != allowed:
                raise InputError(
                    f"site {self.name!r}: {bins}",
                    f"with min_count {allowed or 'none'}",
                    "ask for these, or none",
                )

        parts = {part: self.shard(self.name, section) for part, section in _PARTS.items()}
        return statistics(parts, self.task, bins, min_count)

    def fingerprint(self, min_count: int, epsilon: float) -> Fingerprint:
        """Return the input for planning a segmentation."""
        return fingerprint.gather(*fingerprint.of_bundle(self.bundle), min_count, epsilon)

    def is_held_out(self, section: str) -> bool:
        """Compare the items' files and patients with those of the training images."""
        if section not in self._held_out:
            files, patients = self._files_and_patients(section)
            training_files, training_patients = self._files_and_patients("train")
            # what is not known may be of the training images
            is_known = "" not in {*files, *patients, *training_files, *training_patients}
            self._held_out[section] = (
                is_known and not files & training_files and not patients & training_patients
            )
        return self._held_out[section]

    def _files_and_patients(self, section: str) -> tuple[set[str], set[str]]:
        """Return checksums of a section's image files, and their patients; "" for unknown ones."""
        files: set[str] = set()
        patients: set[str] = set()
        source = self.bundle.section(section).source
        entries = source.entries if source.is_list else []

        for index in self._federation.shard(self.name, section).indices.tolist():
            # a source that is not a list of items names no files
            images: object = None
            if index < len(entries) and isinstance(entries[index], Mapping):
                images = entries[index].get("image")
            if not isinstance(images, list | tuple):
                images = [images]

            for image in images:
                files.add(stored_key(image) if isinstance(image, str | Path) else "")

            patients.add(str(self._federation.sections[section].items[index].get("group", "")))

        return files, patients

    # What a step needs

    def message_rules(self, name: str) -> MessageRules:
        """Return the rules for a participant's messages."""
        return self._federation.message_rules(name)

    def scope(self) -> AbstractContextManager[None]:
        """Use the run's compute settings inside."""
        return self._federation.scope()

    def compress_broadcast(self, round_: int, name: str, broadcast: Message) -> Message:
        """Return a broadcast unchanged: it was decompressed on arrival."""
        return broadcast

    def site(self, name: str, round_: int) -> Site:
        """Return a participant's state for a round."""
        site = self._federation.site(name, round_)
        return replace(
            site,
            train=self._stoppable(site.train),
            validate=self._stoppable(site.validate),
            test=self._stoppable(site.test),
        )

    def shard(self, name: str, section: str) -> Shard:
        """Return a site's items in a section."""
        return self._stoppable(self._federation.shard(name, section))

    def pooled(self, section: str) -> Shard:
        """Return all held-out items of a section."""
        return self._stoppable(self._federation.pooled(section))

    def told(self, cases: Cases) -> Cases:
        """Return outcomes with the bundle's own metric as a number."""
        return self.bundle.told(cases)

    def close(self) -> None:
        """Nothing is open."""

    def _stoppable(self, shard: Shard) -> Shard:
        return _StoppableShard(**pick(vars(shard), fields_of(Shard)), stop=self.stop)


@dataclass(frozen=True)
class _StoppableShard(Shard):
    """Items whose batches end when a stop is requested."""

    stop: threading.Event = field(default_factory=threading.Event)

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """Yield batches; raise Aborted instead of the next one."""
        for batch in super().batches(size, generator):
            if self.stop.is_set():
                raise Aborted("aborted")
            yield batch
