"""One site's view of a federation, and a way to stop its work."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

import torch

from medfl.core.compression import Compression
from medfl.core.errors import RunError
from medfl.core.message import Message
from medfl.data.prepared import Batch, Shard
from medfl.datasets.readers.reading import stored_key
from medfl.runtimes import site_channels, site_labels
from medfl.runtimes.federation import Federation
from medfl.runtimes.message_rules import MessageRules, Wire
from medfl.storage.files import to_device
from medfl.training import Site


class Aborted(RunError):
    """A site was told to stop what it was doing; nothing of it is kept."""

    safe_to_send = True


class SiteView:
    """A federation for the steps of one site: broadcasts are opened already, and batches end when the site is to stop.

    Prepared images and networks are those of the given federation.

    Attributes:
        name: the site.
        rules: for what it sends and receives.
        compression: none, as steps are given opened messages and return replies that are still whole.
        wire_compression: how messages are made smaller on their way.
        run, bundle, method, task, networks, surface_metrics: as `Federation`.
    """

    def __init__(self, federation: Federation, name: str, stop: threading.Event) -> None:
        """Share everything; nothing is prepared again."""
        self._federation = federation
        self._stop = stop
        self._held_out: dict[str, bool] = {}
        self.name = name
        self.rules = federation.message_rules(name)
        self.compression = Compression()
        self.wire_compression = federation.compression
        self.run = federation.run
        self.bundle = federation.bundle
        self.method = federation.method
        self.task = federation.task
        self.networks = federation.networks
        self.surface_metrics = federation.surface_metrics

    @cached_property
    def facts(self) -> dict[str, list[int]]:
        """What the run says of this site's data: positions of the `labels` that its masks show, of its `channels`."""
        run = self.run
        bundle = self.bundle
        sites = self._federation.names
        facts: dict[str, list[int]] = {}

        if self.name in site_labels.read(run.site_labels, bundle.structures, sites):
            annotated = self._federation.known.get(self.name)
            everything = site_labels.foreground_classes(bundle.structures)
            facts["labels"] = sorted(everything) if annotated is None else [*annotated.classes]

        if run.site_channels:
            channels = site_channels.read(run.site_channels, site_channels.names(bundle), sites)
            if self.name in channels:
                facts["channels"] = [*channels[self.name]]

        return facts

    def is_held_out(self, section: str) -> bool:
        """Tell whether this site's items of a section are shown to be none of its training images, nor of its patients.

        They are where each item's files and its patient are known, and both sections have none in common.
        """
        if section not in self._held_out:
            files, patients = self._files_and_patients(section)
            training_files, training_patients = self._files_and_patients("train")
            is_known = "" not in {*files, *patients, *training_files, *training_patients}
            self._held_out[section] = (
                is_known and not files & training_files and not patients & training_patients
            )
        return self._held_out[section]

    def _files_and_patients(self, section: str) -> tuple[set[str], set[str]]:
        """Return checksums of a section's image files, and whose images they are; "" for what is not known."""
        files: set[str] = set()
        patients: set[str] = set()
        source = self.bundle.section(section).source
        entries = source.entries if source.is_list else []

        for index in self._federation.shard(self.name, section).indices.tolist():
            # a source that is no list of items names no files
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
        """Compute as the run says inside."""
        return self._federation.scope()

    def compress_broadcast(self, round_: int, name: str, broadcast: Message) -> Message:
        """Return a broadcast as it is: it came made smaller, and was opened on arrival."""
        return broadcast

    def site(self, name: str, round_: int) -> Site:
        """Return a participant as it is in a round."""
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

    def training_items(self) -> int:
        """Return how many items the site trains on."""
        return len(self._federation.participant_shard(self.name, "train"))

    def go_on(self) -> None:
        """Raise `Aborted` if the site has been told to stop."""
        _go_on(self._stop)

    def _stoppable(self, shard: Shard) -> Shard:
        values = {entry.name: getattr(shard, entry.name) for entry in fields(Shard)}
        return _StoppableShard(**values, stop=self._stop)

    # What arrives

    def received(self, arrived: Wire) -> Message:
        """Return a broadcast that arrived, checked and opened, on this site's device; errors of `decode_broadcast`."""
        return self._on_device(self.rules.decode_broadcast(arrived, self.wire_compression))

    def averaged(self, arrived: Wire) -> Message:
        """Return weights that a plain averaging host sent, likewise; errors of `decode_average`."""
        return self._on_device(self.rules.decode_average(arrived))

    def _on_device(self, message: Message) -> Message:
        return Message(to_device(dict(message.tensors), self.networks.device), message.scalars)


@dataclass(frozen=True)
class _StoppableShard(Shard):
    """Items of which no more batches come once somebody has said stop."""

    stop: threading.Event = field(default_factory=threading.Event)

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """Yield batches; Aborted in the place of the next one."""
        for batch in super().batches(size, generator):
            _go_on(self.stop)
            yield batch


def _go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise Aborted("aborted")
