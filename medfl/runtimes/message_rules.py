"""The rules for messages between the server and a site, enforced at both ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medfl.core import Message, MessageLimits, RunError, Weights, is_finite
from medfl.core.compression import Compression

Wire = Mapping[Any, Any]
"""What a transport restored, before any check."""

Form = tuple[torch.Size, torch.dtype]
"""Shape and type of a tensor."""


@dataclass(frozen=True)
class MessageRules:
    """What a message between the server and one site may contain.

    Attributes:
        site: its name.
        leaves: form of each tensor of the network that leaves the site and comes back.
        network: form of each tensor of the site's network.
        personal: names of the tensors that leave in no group.
        uploads: groups that a site may send, "weights" among them.
        like_weights: groups whose tensors have names and forms of the network's.
        fedavg: the server averages the weights by numbers of items, so every reply must have both.
        limits: on the size of a message.
    """

    site: str
    leaves: Mapping[str, Form]
    network: Mapping[str, Form]
    personal: frozenset[str]
    uploads: frozenset[str]
    like_weights: frozenset[str]
    fedavg: bool
    limits: MessageLimits

    @property
    def sender(self) -> str:
        """The site, as named in errors about what it sends."""
        return f"site {self.site!r}"

    # What the server receives

    def decode_reply(self, arrived: Wire) -> Message:
        """Return a site's message, restored by a transport under the names of `Message.flat`.

        Raises:
            RunError: it is not a message, or exceeds the limits; names the site.
        """
        return Message.from_wire(self.limits.checked(arrived, self.sender), self.sender)

    def check_reply(self, message: Message) -> None:
        """Check a site's message: declared groups, no personal tensor, known forms, finite values.

        A tensor is personal by its name in the network, whichever group it is in.

        Raises:
            RunError: names the site and the tensor, or what is too large.
        """
        flat = self.limits.checked(message.flat(), self.sender)
        undeclared = message.tensors.keys() - self.uploads

        for key, tensor in flat.items():
            group, _, name = key.partition("/")
            # in any group: a method might send a personal tensor under another heading
            if name in self.personal or (group == "weights" and name not in self.leaves):
                raise RunError(f"{self.sender}: tensor {key!r} must not leave it")
            if group in undeclared:
                raise RunError(
                    f"{self.sender}: {key!r} is in a group that the method's groups() does not declare"
                )

            self._check_form(self.sender, group, name, tensor)
            if not is_finite(tensor):
                raise RunError(
                    f"{self.sender}: {key!r} has NaN or infinite values; the last good round is kept"
                )

    def check_complete(self, reply: Message) -> None:
        """Check that a reply lacks none of the weights and, for FedAvg's server half, has the number of items.

        Raises:
            RunError: names the site and what is missing.
        """
        if self.fedavg or "weights" in reply:
            missing = self.leaves.keys() - reply.tensors.get("weights", {}).keys()
            if missing:
                first = f"'weights/{min(missing)}'"
                raise RunError(
                    f"{self.sender}: {first} is missing in its reply ({len(missing)} such)"
                )

        if self.fedavg and "samples" not in reply.scalars:
            raise RunError(f"{self.sender}: its reply lacks the number of training samples")

    # What the site receives

    def decode_broadcast(self, tensors_arrived: Wire, compression: Compression) -> Message:
        """Return a broadcast received under the names of `Message.flat` and compressed by `compression`.

        It contains all weights that leave a site, or none; groups known only to the method are limited in size.

        Raises:
            RunError: it violates a rule; names the site and the tensor.
        """
        sender = self._sender_of_broadcast
        arrived = Message.from_wire(self.limits.checked(tensors_arrived, sender), sender)
        message = compression.decompress_broadcast(arrived, f"{self.sender}: the server")

        for group, tensors in message.tensors.items():
            # a method may send no weights at all, but not a part of them
            if group == "weights":
                self._check_same_names(tensors)

            for name, tensor in tensors.items():
                self._check_form(sender, group, name, tensor)
                self._check_finite(f"{group}/{name}", tensor)

        for name, number in message.scalars.items():
            self.require(math.isfinite(number), f"'scalars/{name}' is {number}")

        return message

    def decode_average(self, arrived: Wire) -> Message:
        """Return weights received under their own names, from a host that knows nothing else.

        Such hosts average in their own precision, counters included: numbers are converted back to the network's types,
        counters rounded.

        Raises:
            RunError: they are not all that leave a site, or not finite; names the site and the tensor.
        """
        weights = self.limits.checked(arrived, self._sender_of_broadcast)
        self._check_same_names(weights)
        for name, tensor in weights.items():
            self._check_finite(f"weights/{name}", tensor)
            dtype = self.leaves[name][1]
            if tensor.is_floating_point() and dtype != tensor.dtype:
                if not dtype.is_floating_point:
                    tensor = tensor.round()

                weights[name] = tensor.to(dtype)
                # a number too large for a smaller type becomes infinite
                self._check_finite(f"weights/{name}", weights[name])

            self._check_form(self._sender_of_broadcast, "weights", name, weights[name])

        return Message({"weights": weights})

    def require(self, holds: bool, problem: str) -> None:
        """Raise RunError about the server's message unless a condition holds."""
        if not holds:
            raise RunError(f"{self._sender_of_broadcast}: {problem}")

    @property
    def _sender_of_broadcast(self) -> str:
        return f"{self.sender}: the server's message"

    def _check_same_names(self, weights: Weights) -> None:
        unexpected = weights.keys() - self.leaves.keys()
        missing = self.leaves.keys() - weights.keys()
        for label, names in (("unexpected", unexpected), ("missing", missing)):
            self.require(
                not names, f"{label} 'weights/{min(names, default='')}' ({len(names)} such)"
            )

    def _check_finite(self, key: str, tensor: Tensor) -> None:
        self.require(is_finite(tensor), f"{key!r} has NaN or infinite values")

    # Both

    def _check_form(self, sender: str, group: str, name: str, tensor: Tensor) -> None:
        if group == "weights":
            forms = self.leaves
        elif group in self.like_weights:
            forms = self.network
        else:
            return

        if name not in forms:
            raise RunError(f"{sender}: '{group}/{name}' is no tensor of the network")

        shape, dtype = forms[name]
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            sent = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise RunError(f"{sender}: '{group}/{name}' is {sent}; expected {tuple(shape)} {dtype}")
