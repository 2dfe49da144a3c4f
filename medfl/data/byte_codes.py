"""Tensors with few distinct values, such as 8-bit images: one byte per element, and a table of the values.

Decoding restores every bit, whatever point-wise transforms were applied. A tensor with more than 256 values in a
channel is not encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_VALUES = 256  # distinguishable by a byte
_GLANCE = 2048  # numbers looked at first: most tensors that do not fit show it there
# Bit patterns, so that -0.0 and NaN stay what they are.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Coded:
    """A batch of tensors; a single one is a batch of one.

    Attributes:
        codes: (B, C, ...) uint8, indices into the table.
        values: the table, (C, K) for the whole batch or (B, C, K) per item.
    """

    codes: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, indices: Tensor) -> Coded:
        """Return some of the batch, (N,) int64."""
        rows = indices.to(self.codes.device)
        codes = self.codes.index_select(0, rows)
        # one table (C, K) may serve all items
        return Coded(
            codes, self.values if self.values.ndim == 2 else self.values.index_select(0, rows)
        )

    @property
    def shape(self) -> torch.Size:
        """The shape of the decoded tensors."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Device of codes and table."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and table."""
        return self.codes.nbytes + self.values.nbytes

    def rearranged(self, move: Callable[[Tensor], Tensor]) -> Coded:
        """Return the batch after `move`, which only permutes the numbers of (B, C, ...) within their channel."""
        return Coded(move(self.codes), self.values)

    def to(self, device: torch.device) -> Coded:
        """Return the batch on a device."""
        return Coded(self.codes.to(device), self.values.to(device))

    def decode(self) -> Tensor:
        """Return the tensors, (B, C, ...)."""
        channels, count = self.values.shape[-2:]
        tables = channels if self.values.ndim == 2 else len(self) * channels
        # where each channel's table begins in the flat values
        starts = torch.arange(tables, dtype=torch.int32, device=self.codes.device) * count
        starts = starts.view(-1, channels, *[1] * (self.codes.ndim - 2))
        positions = self.codes.contiguous().to(torch.int32) + starts
        return self.values.reshape(-1).index_select(0, positions.view(-1)).view(self.shape)


Column = Tensor | Coded
"""(N, ...), one row per item."""
Rows = Column | Sequence[Tensor | Coded]
"""Images or masks of a batch: stacked, or one by one if their sizes differ."""


def encode(tensor: Tensor) -> Coded | None:
    """Encode a tensor (C, ...) as a batch of one, or return None if that saves no memory or has too many values."""
    size = tensor.element_size()
    if type(tensor) is not Tensor or tensor.ndim < 2 or size not in _BITS or not tensor.numel():
        return None

    bits = tensor.contiguous().view(_BITS[size]).numpy(force=True).reshape(len(tensor), -1)
    # Sampling every n-th number rules out most tensors before sorting.
    if len(np.unique(bits[0, :: max(1, bits.shape[1] // _GLANCE)])) > _VALUES:
        return None

    codes = np.empty(bits.shape, np.uint8)
    tables = []
    for channel, numbers in enumerate(bits):
        table, inverse = np.unique(numbers, return_inverse=True)
        if len(table) > _VALUES:
            return None

        codes[channel] = inverse
        tables.append(table)

    values = _padded(tables)
    if codes.nbytes + values.nbytes >= bits.nbytes:
        return None

    coded = torch.from_numpy(codes).view(1, *tensor.shape)
    return Coded(coded, torch.from_numpy(values).view(tensor.dtype)[None])


def decoded(value: Tensor | Coded) -> Tensor:
    """Return one item's tensor (C, ...)."""
    if isinstance(value, Coded):
        return value.decode()[0]

    return value


def plain(column: Column) -> Tensor:
    """Return a column's tensor (N, ...)."""
    if isinstance(column, Coded):
        return column.decode()

    return column


def shape_of(value: Tensor | Coded) -> torch.Size:
    """Return the shape (C, ...) of one item."""
    if isinstance(value, Coded):
        return value.shape[1:]

    return value.shape


def stacked(parts: Sequence[Tensor | Coded], *, share: bool = True) -> Column:
    """Stack items of one shape; coded ones stay so if all are.

    Args:
        parts: one per item.
        share: look for one common table, which images that passed through the same transforms have.
    """
    coded = [part for part in parts if isinstance(part, Coded)]
    if len(coded) < len(parts) or len({part.values.dtype for part in coded}) > 1:
        return torch.stack(list(map(decoded, parts)))

    dtype = coded[0].values.dtype
    tables = []
    for part in coded:
        tables.append(part.values[0].view(_BITS[dtype.itemsize]).numpy(force=True))

    # Each channel's values in any of the tables, sorted.
    common = []
    for channel_tables in zip(*tables, strict=True) if share else ():
        common.append(np.unique(np.concatenate(channel_tables)))

    is_common = bool(common) and max(map(len, common)) <= _VALUES

    codes = torch.empty(len(coded), *shape_of(coded[0]), dtype=torch.uint8)
    for row, table, part in zip(codes, tables, coded, strict=True):
        row.copy_(part.codes[0])
        if is_common:
            _recode(row, table, common)

    values = torch.from_numpy(_padded(common if is_common else tables)).view(dtype)
    column = Coded(codes, values)
    if column.nbytes < codes.numel() * dtype.itemsize:
        return column

    return column.decode()


def _recode(
    codes: Tensor, table: NDArray[np.signedinteger], common: Sequence[NDArray[np.signedinteger]]
) -> None:
    """Replace indices into a table by indices into the common one, in place."""
    for row, old, values in zip(codes.numpy(), table, common, strict=True):
        positions = np.searchsorted(values, old).astype(np.uint8)
        if not np.array_equal(positions, np.arange(len(old))):
            row[...] = positions[row]


def _padded(tables: Sequence[NDArray[np.signedinteger]]) -> NDArray[np.signedinteger]:
    """Stack tables (..., K) of different lengths, the shorter ones filled with their last value."""
    longest = max(table.shape[-1] for table in tables)
    rows = []
    for table in tables:
        filling = np.repeat(table[..., -1:], longest - table.shape[-1], axis=-1)
        rows.append(np.concatenate([table, filling], axis=-1))

    return np.stack(rows)
