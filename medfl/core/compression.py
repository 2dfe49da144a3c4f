"""Message compression: half precision, 8 bits, or only the largest changes. The default is lossless.

A reply's group `weights` is sent as the change d = w_k - v from the received weights v; the server adds d to its
weights w as they were before rounding. So rounding errors of a broadcast never enter the server's weights, and small
steps are not lost beside large weights.

float16, bfloat16: round to nearest.
int8 (QSGD, Alistarh et al., 2017; on changes: FedPAQ, Reisizadeh et al., 2020), for each row of a tensor:
    s = max |x| / 127,  q = floor(x/s) + [u < x/s - floor(x/s)],  u uniform in [0, 1):  E[s q] = x  (1)
topk:F (Stich et al., 2018; Seide et al., 2014), replies only, over all numbers of the weights together:
    a = d + e;  the share F of a with the largest |a| is sent;  e <- a - what was sent  (2)
    e, the error feedback, is the site's own and never leaves. Broadcasts are lossless.

Sent unchanged: integers; numbers; tensors so small that their names take as much space; all parameters of the network
except matrices and kernels (biases and normalisation are few, and a small variance, a divisor, would round to 0); and
groups that the method does not declare tolerant of noise.

In transmission the group `weights@int8@float32` holds what was float32 before; message sizes refer to that form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from medfl.core import setting_values
from medfl.core.errors import RunError
from medfl.core.mappings import without
from medfl.core.message import Message, Tensors, Weights, is_finite

_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_LEAST = 64  # numbers: an entry in a message header takes 60 to 100 bytes
_LEVELS = 127
_COMPRESSIBLE = {"float32": torch.float32, "float64": torch.float64}
_SCALES = "scales"
_SPARSE = ("indices", "values")


@dataclass(frozen=True)
class Compression:
    """How messages are compressed and restored, identical at both ends.

    Attributes:
        kind: one of `setting_values.MESSAGES`.
        fraction: for `topk`, the share of the numbers that is sent.
        exact: tensors of the network that are always sent unchanged.
        groups: compressed groups of messages, which tolerate zero-mean noise in each number.
    """

    kind: str = "lossless"
    fraction: float = 0.0
    exact: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset({"weights"})

    @classmethod
    def parse(cls, text: str) -> Compression:
        """Parse a value of `--messages`; InputError for anything else."""
        return cls(*setting_values.messages(text))

    def __str__(self) -> str:
        """Return what `parse` reads."""
        if self.kind == "topk":
            return f"topk:{self.fraction!r}"

        return self.kind

    @property
    def lossless(self) -> bool:
        """Whether compression changes nothing."""
        return self.kind == "lossless"

    def takes(self, group: str, name: str, dtype: torch.dtype, size: int) -> bool:
        """Return whether a tensor of `size` numbers is compressed."""
        groups = ("weights",) if self.kind == "topk" else self.groups
        fits = group in groups and dtype in _COMPRESSIBLE.values() and size >= _LEAST
        return not self.lossless and fits and name not in self.exact

    # The sending ends

    def broadcast(self, message: Message, seed: int) -> Message:
        """Return the server's message as it is sent, rounded with this seed."""
        if self.lossless or self.kind == "topk":
            return message

        return self._rounded(message, {}, seed)

    def reply(
        self, message: Message, received: Message, seed: int, unsent: Weights
    ) -> tuple[Message, Weights]:
        """Return a reply as it is sent, and the new error feedback; `unsent` is the previous one, empty at first."""
        if self.lossless:
            return message, unsent
        base = received.tensors.get("weights", {})
        if self.kind == "topk":
            return self._largest(message, base, unsent)
        return self._rounded(message, base, seed), unsent

    def _rounded(self, message: Message, base: Weights, seed: int) -> Message:
        """Return the message with each compressible tensor in fewer bits; `weights` as changes from `base`."""
        generator = torch.Generator().manual_seed(seed)
        half = _HALVES.get(self.kind)
        groups: dict[str, Tensors] = {}
        scales: dict[str, list[Tensor]] = {}

        # Sorted: the order of the draws must not depend on how the message was made.
        for group in sorted(message.tensors):
            groups[group] = {}
            for name, tensor in sorted(message[group].items()):
                if not self.takes(group, name, tensor.dtype, tensor.numel()):
                    groups[group][name] = tensor
                    continue

                if _changes(group, name, tensor, base):
                    value = tensor - base[name]
                else:
                    value = tensor

                label = _label(group, self.kind, tensor.dtype)
                if half is None:
                    groups.setdefault(label, {})[name], scale = _quantised(value, generator)
                    scales.setdefault(_label(group, _SCALES, tensor.dtype), []).append(scale)
                elif bool(value.abs().max() > torch.finfo(half).max):
                    # It would round to infinity, so it is sent unchanged, not as a change.
                    groups[group][name] = tensor
                else:
                    groups.setdefault(label, {})[name] = value.to(half)

        for label, parts in scales.items():
            groups[label] = {_SCALES: torch.cat(parts)}

        return Message(groups, message.scalars)

    def _largest(self, message: Message, base: Weights, unsent: Weights) -> tuple[Message, Weights]:
        """Return the message with the largest changes of its weights, and the remainder (2).

        Weights that lack a tensor of the broadcast are sent unchanged: the server could not assign the positions.
        """
        weights = message.tensors.get("weights", {})
        parts = self._parts(base)
        compressed = set(chain.from_iterable(parts.values()))
        if not compressed:
            return message, unsent
        for name in compressed:
            if name not in weights or not _changes("weights", name, weights[name], base):
                return message, unsent

        groups = dict(message.tensors)
        groups["weights"] = without(weights, compressed)
        rest: Tensors = {}
        for dtype, names in parts.items():
            changes = []
            for name in names:
                feedback = unsent[name].to(base[name]) if name in unsent else 0
                change = weights[name] - base[name] + feedback  # a of (2)
                changes.append(change.reshape(-1))

            vector = torch.cat(changes)
            largest = torch.topk(vector.abs(), self._count(len(vector)), sorted=False)
            indices = largest.indices.sort().values
            sent = {"indices": indices.to(_positions(len(vector))), "values": vector[indices]}
            groups[_label("weights", self.kind, dtype)] = sent
            vector[indices] = 0  # what remains of a is the error feedback e
            # Cloned: a view would keep the vector of all changes in memory.
            rest |= {name: left.clone() for name, left in _cut(vector, names, base)}

        return Message(groups, message.scalars), rest

    # The receiving ends

    def decompress_broadcast(self, wire: Message, sender: str = "the server") -> Message:
        """Return a broadcast as the site uses it; RunError, naming the tensor, if `broadcast` cannot have made it."""
        if self.lossless or self.kind == "topk":
            return wire

        return self._opened(wire, {}, sender)

    def decompress_reply(self, wire: Message, sent: Message, sender: str) -> Message:
        """Return a reply as the server uses it; `sent` is the broadcast before compression.

        Raises:
            RunError: `reply` cannot have made it; names the sender and the tensor.
        """
        if self.lossless:
            return wire

        return self._opened(wire, sent.tensors.get("weights", {}), sender)

    def _opened(self, wire: Message, base: Weights, sender: str) -> Message:
        groups = {group: dict(wire[group]) for group in wire.tensors if "@" not in group}
        expected = set(groups)
        for group in sorted(self.groups):
            for dtype in _COMPRESSIBLE.values():
                label = _label(group, self.kind, dtype)
                if label not in wire:
                    continue

                expected.add(label)
                if self.kind == "int8":
                    expected.add(_label(group, _SCALES, dtype))

                into = groups.setdefault(group, {})
                for name, value in self._restored(wire, group, dtype, base, sender):
                    if name in into:
                        raise RunError(f"{sender}: '{group}/{name}' comes twice in its message")
                    if _changes(group, name, value, base):
                        value = base[name] + value.to(base[name].device)
                    into[name] = value

        if unexpected := wire.tensors.keys() - expected:
            raise RunError(f"{sender}: unexpected group {min(unexpected)!r} in its message")

        return Message(groups, wire.scalars)

    def _restored(
        self, wire: Message, group: str, dtype: torch.dtype, base: Weights, sender: str
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a group in fewer bits, converted to their own type."""
        label = _label(group, self.kind, dtype)
        if self.kind == "topk":
            names = self._parts(base).get(dtype, []) if group == "weights" else []
            yield from _cut(self._dense(wire[label], label, names, base, sender), names, base)
        elif self.kind == "int8":
            scales = _scales(wire, label, _label(group, _SCALES, dtype), dtype, sender)
            for name in sorted(wire[label]):
                value = wire[label][name]
                yield name, (_rowed(value).to(dtype) * next(scales)[:, None]).reshape(value.shape)
        else:
            for name, value in wire[label].items():
                _check(value, f"{label}/{name}", _HALVES[self.kind], value.shape, sender)
                yield name, value.to(dtype)

    def _dense(
        self, sent: Weights, label: str, names: Sequence[str], base: Weights, sender: str
    ) -> Tensor:
        """Return the changes of `names`, concatenated, from the positions and values of the largest."""
        size = sum(base[name].numel() for name in names)
        expected = list(_SPARSE) if size else "no such group"
        if not size or sent.keys() != set(_SPARSE):
            raise RunError(f"{sender}: {label!r} has {sorted(sent)}; expected {expected}")

        indices, values = (sent[name] for name in _SPARSE)
        count = torch.Size([self._count(size)])
        first = base[names[0]]
        _check(indices, f"{label}/indices", _positions(size), count, sender)
        _check(values, f"{label}/values", first.dtype, count, sender)
        low = int(indices[0])
        high = int(indices[-1])

        if low < 0 or high >= size or not bool((indices[1:] > indices[:-1]).all()):
            raise RunError(f"{sender}: '{label}/indices' is not ascending in 0 to {size - 1}")

        return torch.zeros(size, dtype=first.dtype, device=first.device).index_copy_(
            0, indices.to(first.device, torch.int64), values.to(first.device)
        )

    def _parts(self, base: Weights) -> dict[torch.dtype, list[str]]:
        """Return which tensors of a broadcast's weights have their changes sorted together: those of each dtype."""
        parts: dict[torch.dtype, list[str]] = {}
        for name in sorted(base):
            if self.takes("weights", name, base[name].dtype, base[name].numel()):
                parts.setdefault(base[name].dtype, []).append(name)
        return parts

    def _count(self, size: int) -> int:
        """Return how many of `size` numbers are sent: at least one."""
        # 0.29 * 100 is 28.999…
        return max(1, math.floor(self.fraction * size + 1e-9))


def _label(group: str, kind: str, dtype: torch.dtype) -> str:
    """Return the name of a group in transmission."""
    return f"{group}@{kind}@{str(dtype).removeprefix('torch.')}"


def _changes(group: str, name: str, tensor: Tensor, base: Weights) -> bool:
    """Return whether a tensor is sent as a change from the received one."""
    held = base.get(name) if group == "weights" else None
    return held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype)


def _positions(size: int) -> torch.dtype:
    return torch.int32 if size < 2**31 else torch.int64


def _rowed(tensor: Tensor) -> Tensor:
    """Reshape a tensor to (R, numbers per row): a row per output channel, or one row if these would be short."""
    rows = 1
    if tensor.ndim > 1 and tensor.numel() >= _LEAST * max(1, len(tensor)):
        rows = len(tensor)
    return tensor.reshape(rows, -1)


def _quantised(value: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return q, int8 of the same shape, and s of each row (1)."""
    rows = _rowed(value.detach())
    scale = rows.abs().amax(1, keepdim=True) / _LEVELS
    # A row of zeros has the scale 0, and the quotient may be 127.00001.
    exact = (rows / torch.where(scale > 0, scale, 1)).clamp_(-_LEVELS, _LEVELS)
    low = exact.floor()
    # Drawn on the CPU: the same bits on any device.
    drawn = torch.rand(exact.shape, generator=generator, dtype=exact.dtype).to(exact.device)
    up = drawn < exact - low
    return (low + up).to(torch.int8).reshape(value.shape), scale[:, 0]


def _scales(
    wire: Message, label: str, scales: str, dtype: torch.dtype, sender: str
) -> Iterator[Tensor]:
    """Return the scales of each 8-bit tensor of a group, in the order of their names, after checking both."""
    for name, value in wire[label].items():
        _check(value, f"{label}/{name}", torch.int8, value.shape, sender)

    sizes = [len(_rowed(wire[label][name])) for name in sorted(wire[label])]
    if scales not in wire or wire[scales].keys() != {_SCALES}:
        raise RunError(f"{sender}: {scales!r} is not one tensor {_SCALES!r} in its message")

    values = wire[scales][_SCALES]
    _check(values, f"{scales}/{_SCALES}", dtype, torch.Size([sum(sizes)]), sender)
    # An int8 may be -128, and its product with the scale must not become infinite.
    if bool((values < 0).any()) or not is_finite(values * (_LEVELS + 1)):
        raise RunError(f"{sender}: '{scales}/{_SCALES}' has a scale below 0, or too large a one")

    return iter(torch.split(values, sizes))


def _check(tensor: Tensor, name: str, dtype: torch.dtype, shape: torch.Size, sender: str) -> None:
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise RunError(
            f"{sender}: {name!r} is {tuple(tensor.shape)} {tensor.dtype}; expected {tuple(shape)} {dtype}"
        )
    if not is_finite(tensor):
        raise RunError(f"{sender}: {name!r} has NaN or infinite values")


def _cut(vector: Tensor, names: Sequence[str], like: Weights) -> Iterator[tuple[str, Tensor]]:
    """Split a vector into consecutive tensors of the shapes in `like`."""
    parts = torch.split(vector, [like[name].numel() for name in names])
    for name, part in zip(names, parts, strict=True):
        yield name, part.reshape(like[name].shape)
