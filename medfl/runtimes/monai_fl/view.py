"""A federation as one site sees it: what it may send, what it checks of what it receives, and a way to stop it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfl.core.compression import Compression
from medfl.core.errors import RunError
from medfl.core.message import Message, Weights, is_finite
from medfl.data.prepared import Batch, Shard
from medfl.datasets.readers.reading import stored_key
from medfl.runtimes import site_channels, site_labels
from medfl.runtimes.federation import Federation
from medfl.storage.files import to_device

_MOST_NUMBERS, _MOST_GROUPS = 1024, 256  # of a message; methods send less than a tenth of it
Form = tuple[torch.Size, torch.dtype]


class Aborted(RunError):
    """A site was told to stop what it was doing; nothing of it is kept."""

    safe_to_send = True


class AtSite(Federation):
    """A view of a federation: its messages are opened already, and its batches end when the site is told to stop.

    Prepared images and networks are those of the given federation. A method sees of it what it sees of any other.

    Attributes:
        name: the site.
        wire_compression: how messages are made smaller on their way.
        leaves: form of each tensor of the network that leaves the site and comes back.
    """

    def __init__(self, federation: Federation, name: str, stop: threading.Event) -> None:
        """Share everything; nothing is prepared again."""
        vars(self).update(vars(federation))
        self.name, self.wire_compression, self.compression = name, federation.compression, Compression()
        self._stop, self._held_out = stop, dict[str, bool]()
        arch = self._architectures[name]
        self.leaves = arch.leaves
        self._forms = {key: (tensor.shape, tensor.dtype) for key, tensor in arch.networks.initial.items()}

    @cached_property
    def facts(self) -> dict[str, list[int]]:
        """What the run says of this site's data: positions of the `labels` that its masks show, of its `channels`."""
        run, bundle, facts = self.run, self.bundle, dict[str, list[int]]()
        if self.name in site_labels.read(run.site_labels, bundle.structures, self.names):
            known = self.known.get(self.name)
            everything = site_labels.foreground_classes(bundle.structures)
            facts["labels"] = sorted(everything) if known is None else [*known.classes]
        if run.site_channels:
            channels = site_channels.read(run.site_channels, site_channels.names(bundle), self.names)
            facts |= {"channels": [*channels[self.name]]} if self.name in channels else {}
        return facts

    def is_held_out(self, section: str) -> bool:
        """Tell whether this site's items of a section are shown to be none of its training images, nor of its patients.

        They are where each item's files and its patient are known, and both sections have none in common.
        """
        if section not in self._held_out:
            files, patients = self._files_and_patients(section)
            of_training = self._files_and_patients("train")
            known = "" not in {*files, *patients, *of_training[0], *of_training[1]}
            self._held_out[section] = known and not files & of_training[0] and not patients & of_training[1]
        return self._held_out[section]

    def _files_and_patients(self, section: str) -> tuple[set[str], set[str]]:
        """Return checksums of a section's image files, and whose images they are; "" for what is not known."""
        files: set[str] = set()
        patients: set[str] = set()
        source = self.bundle.section(section).source
        entries = source.entries if source.is_list else []
        for index in self._shards[section][self.name].indices.tolist():
            entry = entries[index] if index < len(entries) else None
            images = entry.get("image") if isinstance(entry, Mapping) else None
            for image in images if isinstance(images, list | tuple) else [images]:
                files.add(stored_key(image) if isinstance(image, str | Path) else "")
            patients.add(str(self.sections[section].items[index].get("group", "")))
        return files, patients

    # Stopping

    def shard(self, name: str, section: str) -> Shard:
        """Return a site's items in a section."""
        return self._watched(super().shard(name, section))

    def participant_shard(self, participant: str, section: str) -> Shard:
        """Return what a participant trains on."""
        return self._watched(super().participant_shard(participant, section))

    def pooled(self, section: str) -> Shard:
        """Return all held-out items of a section."""
        return self._watched(super().pooled(section))

    def go_on(self) -> None:
        """Raise `Aborted` if the site has been told to stop."""
        _go_on(self._stop)

    def _watched(self, shard: Shard) -> Shard:
        return _Watched(shard.prepared, shard.indices, shard.shown, self._stop)

    # What arrives

    def received(self, named: Mapping[Any, Any]) -> Message:
        """Return a broadcast that arrived as `Message.flat`, opened and on this site's device.

        Its weights are all that leave a site, or none at all; groups that only the method knows are limited in size.

        Raises:
            RunError: something in it is not what it should be; names the site and the tensor.
        """
        sender = f"site {self.name!r}: the server's message"
        arrived = Message.from_wire(self.message_limits.checked(named, sender), sender)
        message = self.wire_compression.decompress_broadcast(arrived, f"site {self.name!r}: the server")
        for group, part in message.tensors.items():
            if group == "weights":
                self._check_weights(part)
            elif group in self.like_weights:
                self._check_forms(group, part, self._forms)
            for name, tensor in part.items():
                self._check_finite(f"{group}/{name}", tensor)
        count = len(message.scalars)
        self.require(count <= _MOST_NUMBERS, f"it has {count} numbers; at most {_MOST_NUMBERS}")
        self.require(len(message.tensors) <= _MOST_GROUPS, f"it has {len(message.tensors)} groups of tensors")
        for name, number in message.scalars.items():
            self.require(math.isfinite(number), f"'scalars/{name}' is {number}")
        return Message(to_device(dict(message.tensors), self.networks.device), message.scalars)

    def averaged(self, named: Mapping[Any, Any]) -> Message:
        """Return weights that arrived under their own names, from a host that knows of nothing else.

        Such hosts average in a precision of their own, counters too: numbers are brought back to the network's types,
        the counters rounded.

        Raises:
            RunError: they are not all that leave a site, or not finite; names the site and the tensor.
        """
        weights = self.message_limits.checked(named, f"site {self.name!r}: the server's message")
        for name, tensor in weights.items():
            self._check_finite(f"weights/{name}", tensor)
            dtype = self.leaves[name][1] if name in self.leaves else tensor.dtype
            if tensor.is_floating_point() and dtype != tensor.dtype:
                weights[name] = (tensor if dtype.is_floating_point else tensor.round()).to(dtype)
                self._check_finite(f"weights/{name}", weights[name])
        self._check_weights(weights)
        return Message({"weights": to_device(weights, self.networks.device)})

    def require(self, holds: bool, what: str) -> None:
        """Raise RunError about what was received unless something holds."""
        if not holds:
            raise RunError(f"site {self.name!r}: the server's message: {what}")

    def _check_weights(self, weights: Weights) -> None:
        for label, names in (
            ("unexpected", weights.keys() - self.leaves.keys()),
            ("missing", self.leaves.keys() - weights.keys()),
        ):
            self.require(not names, f"{label} 'weights/{min(names, default='')}' ({len(names)} such)")
        self._check_forms("weights", weights, self.leaves)

    def _check_forms(self, group: str, part: Weights, forms: Mapping[str, Form]) -> None:
        for name, tensor in part.items():
            self.require(name in forms, f"'{group}/{name}' is no tensor of the network")
            shape, dtype = forms[name]
            self.require(
                (tensor.shape, tensor.dtype) == (shape, dtype),
                f"'{group}/{name}' is {tuple(tensor.shape)} {tensor.dtype}; expected {tuple(shape)} {dtype}",
            )

    def _check_finite(self, key: str, tensor: Tensor) -> None:
        self.require(is_finite(tensor), f"{key!r} has NaN or infinite values")


@dataclass(frozen=True)
class _Watched(Shard):
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
