"""Message: everything that crosses a wire, tensors and numbers only.

Encoded as safetensors, so that nothing received is ever executed or unpickled, and decoded within `MessageLimits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import safetensors.torch
import torch
from torch import Tensor

from medfl.core.errors import RunError
from medfl.core.mappings import map_values
from medfl.core.message_limits import MessageLimits, check_bools

Weights = Mapping[str, Tensor]
"""Tensor name -> tensor, as in a state dict."""
Tensors = dict[str, Tensor]
"""Such tensors while being collected."""

_SCALARS = "scalars"


def byte_count(weights: Weights) -> int:
    """Return the bytes of these tensors' values."""
    return sum(tensor.nbytes for tensor in weights.values())


def cpu_copies(weights: Weights) -> Tensors:
    """Return contiguous copies on the CPU, each with its own storage."""
    return map_values(lambda tensor: tensor.detach().to("cpu", copy=True).contiguous(), weights)


@dataclass(frozen=True)
class Message:
    """Named groups of tensors and named numbers, sent by the server (broadcast) or by a site (reply).

    Attributes:
        tensors: group name -> tensor name -> tensor, e.g. `{"weights": {"conv1.weight": ...}}`.
        scalars: name -> number, e.g. `{"samples": 120.0}`.
    """

    tensors: Mapping[str, Weights] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse group names that would be ambiguous when flattened, and make the mappings read-only."""
        bad = [group for group in self.tensors if group in ("", _SCALARS) or "/" in group]
        if bad:
            raise ValueError(
                f"message group {bad[0]!r}: a group name has no '/' and is neither empty nor {_SCALARS!r}"
            )
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))
        object.__setattr__(self, "scalars", MappingProxyType(map_values(float, self.scalars)))

    def __getitem__(self, group: str) -> Weights:
        """Return one group; KeyError names the existing groups."""
        if group not in self.tensors:
            raise KeyError(f"no group {group!r} in this message; it has {sorted(self.tensors)}")
        return self.tensors[group]

    def __contains__(self, group: object) -> bool:
        return group in self.tensors

    def __reduce__(
        self,
    ) -> tuple[type[Message], tuple[dict[str, Tensors], dict[str, float]]]:
        """Pickle with plain dicts for worker processes: a read-only mapping does not pickle."""
        return Message, (map_values(dict, self.tensors), dict(self.scalars))

    def flat(self) -> Tensors:
        """Return `group/name -> tensor`; numbers become float64 tensors of shape () named `scalars/<name>`."""
        flat = {}
        for group, members in self.tensors.items():
            for name, tensor in members.items():
                flat[f"{group}/{name}"] = tensor

        # float64 holds a Python float exactly.
        for name, number in self.scalars.items():
            flat[f"{_SCALARS}/{name}"] = torch.tensor(number, dtype=torch.float64)

        return flat

    @classmethod
    def from_flat(cls, named: Weights) -> Message:
        """Invert `flat`."""
        tensors: dict[str, Tensors] = {}
        scalars = {}
        for key, value in named.items():
            group, _, name = key.partition("/")
            if group == _SCALARS:
                scalars[name] = float(value)
            else:
                tensors.setdefault(group, {})[name] = value

        return cls(tensors, scalars)

    @classmethod
    def from_wire(cls, named: Weights, sender: str) -> Message:
        """Invert `flat` for untrusted names.

        Raises:
            RunError: a name without a group, or a number that is not a scalar; names the sender.
        """
        for key, tensor in named.items():
            group, _, name = key.partition("/")
            if not (group and name):
                raise RunError(f"{sender}: {key!r} is not named group/name")
            if group == _SCALARS and tensor.numel() != 1:
                raise RunError(f"{sender}: {key!r} is {tuple(tensor.shape)}; expected one number")

        return cls.from_flat(named)

    def encode(self) -> bytes:
        """Return the message as safetensors bytes (tensors on the CPU, each with its own storage)."""
        # Cloned: safetensors refuses tensors that share memory, as tied weights do.
        return bytes(safetensors.torch.save(cpu_copies(self.flat())))

    @classmethod
    def decode(cls, data: bytes, limits: MessageLimits | None = None, sender: str = "") -> Message:
        """Invert `encode`.

        Args:
            data: the received bytes.
            limits: on its size; None: the defaults.
            sender: named in errors.

        Raises:
            RunError: it is not a message, or exceeds the limits; nothing was allocated for it.
        """
        (limits or MessageLimits()).check_document(data, sender)
        try:
            flat = safetensors.torch.load(data)
            for name, tensor in flat.items():
                check_bools(name, tensor)
            return cls.from_flat(flat)
        except Exception as error:  # the Rust reader raises its own type for each kind of damage
            prefix = f"{sender}: " if sender else ""
            raise RunError(
                f"{prefix}a received message of {len(data)} bytes is not a safetensors document: {error}"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Length of `encode()`, without copying the tensors; 0 for an empty message, which is not sent."""
        flat = self.flat()
        if not flat:
            return 0
        return _encoded_length(tuple((n, t.dtype, tuple(t.shape)) for n, t in flat.items()))


@lru_cache(maxsize=256)
def _encoded_length(shapes: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> int:
    """Return the length of an encoding, which depends only on names, dtypes and shapes."""
    zeros = {name: torch.zeros(shape, dtype=dtype) for name, dtype, shape in shapes}
    return len(safetensors.torch.save(zeros))


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity (always true for integers and empty tensors)."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # The fastest check; finite numbers may still overflow in it.
    if bool(torch.isfinite(tensor.sum())):
        return True
    low, high = torch.aminmax(tensor)  # NaN propagates; unlike isfinite it allocates nothing
    return bool(torch.isfinite(low) & torch.isfinite(high))


Messages = Mapping[str, Message]
"""Site -> the message that it sent, or receives."""
