"""Prepared: the items of one section after their deterministic transforms, held once and shared by all sites.

A site's data is a `Shard`, a view of some indices; nothing is copied per site, and deterministic transforms run once
per data set. Random transforms act on whole batches if `medfl.data.batch_transforms` supports them (`Augmented`),
otherwise on one item after another (`medfl.data.samples`), depending only on the bundle and its items.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor
from torch.profiler import record_function
from torch.utils.data import default_collate

from medfl.core import Config, Floats, InputError, without
from medfl.core.seeding import generator_of
from medfl.data.known_labels import AnnotatedClasses

if TYPE_CHECKING:
    from medfl.data.batch_transforms import BatchRecipe, Rows

Item = Config
Transform = Callable[..., Any]
"""Entry or sample -> sample; MONAI's, or any callable."""
Sample = Any
"""What a bundle's transforms return for an entry: usually a mapping with `image` and `label`."""
Batch = tuple[Sample, Sample]
"""Inputs (B, C, H, W[, D]) and targets ((B,) class indices, or (B, C, H, W[, D]) maps)."""

_AHEAD = 32  # batches gathered in one indexing call
_GATHERED = 1 << 22  # numbers in one indexing call, if that is more than a batch

P = TypeVar("P", bound="Prepared")


@dataclass(frozen=True, eq=False)
class Geometry:
    """Position of a prepared image's pixels, and the grid of its file, to which a prediction can be resampled.

    Attributes:
        affine: (4, 4) float64, from index to millimetres; to pixels of the file if it has no millimetres.
        original_affine: the file's.
        original_shape: the file's (H, W[, D]).
        file: the image's file.
    """

    affine: Floats
    original_affine: Floats
    original_shape: tuple[int, ...]
    file: str

    @property
    def spacing(self) -> tuple[float, ...]:
        """Distance between neighbours along each axis of the prepared image."""
        sides = np.linalg.norm(self.affine[:3, : len(self.original_shape)], axis=0)
        return tuple(map(float, sides))

    def part_in_file(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Return the part of a grid of this shape that is inside the file, without padding by transforms.

        A grid whose pixels differ in size from the file's counts completely, as its edges are rounded.
        """
        axes = len(self.original_shape)
        parts = []
        # Index in the grid -> index in the file.
        to_file = np.linalg.inv(self.original_affine) @ self.affine
        steps = np.rint(to_file[:axes, :axes])
        start = to_file[:axes, -1]
        same_pixels = np.allclose(to_file[:axes, :axes], steps, atol=1e-4)

        # Only flips and permuted axes: each row and column of the matrix has a single 1 or -1.
        is_permutation = np.array_equal(np.abs(steps) @ np.abs(steps).T, np.eye(axes))
        if len(shape) != axes or not same_pixels or not is_permutation:
            return ()

        for column, side in zip(steps.T, shape, strict=True):
            axis = int(np.abs(column).argmax())
            there = np.rint(start[axis] + column[axis] * np.arange(side))
            inside = np.flatnonzero((there >= 0) & (there < self.original_shape[axis]))
            parts.append(slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(None))

        return tuple(parts)


class Prepared(ABC):
    """One section (train, validate or test) of a bundle's data, ready to be batched.

    Attributes:
        geometry: one per item if the transforms track it, else empty.
        extras_of: index -> the fields of its sample other than image and label, as a batch of one; None if unknown.
        pinned: whether a shard's batches are in pinned memory, from which a GPU copies asynchronously.
        labelled: whether its batches have targets; otherwise they are None (`LabelsHidden`).
    """

    pinned = False
    labelled = True

    def __init__(self, items: Sequence[Item]) -> None:
        """Store the data list entries; index i below always means `items[i]`."""
        self.items = items
        self.geometry: Sequence[Geometry] = ()
        self.extras_of: Callable[[int], Item] | None = None

    def __len__(self) -> int:
        return len(self.items)

    @abstractmethod
    def batches(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Batch]:
        """Yield the batches of `indices` in order, the last one possibly smaller.

        Args:
            indices: (N,) int64.
            size: items per batch.
            generator: seeds the random transforms; without one each item always gets the same draw.
        """

    def cases(self, indices: Tensor) -> Iterator[tuple[Sample, Sample, Item]]:
        """Yield inputs and targets of each item, a batch of one, and the other fields of the batch."""
        for index, (x, y) in zip(indices.tolist(), self.batches(indices, 1, None), strict=True):
            yield x, y, self.extras_of(index) if self.extras_of else {}

    @property
    def nbytes(self) -> int:
        """Bytes of the stacked tensors, 0 if there are none."""
        return 0

    @property
    def device(self) -> torch.device:
        """Device of its tensors, where its batches are made."""
        return torch.device("cpu")

    def to(self, device: torch.device, budget: int) -> Prepared:
        """Return the same items on a device, from which batches then come.

        Returns itself if the items are not stacked tensors or take more than `budget` bytes.
        """
        return self

    def deterministic(self, uncropped: bool = False) -> Prepared:
        """Return the same items without random transforms; itself if it knows of none.

        Args:
            uncropped: omit random crops instead of using centre crops; items may then differ in size.
        """
        return self

    def _with(self: P, **attributes: object) -> P:
        """Return the same items with some attributes changed."""
        changed = copy.copy(self)
        vars(changed).update(attributes)
        return changed

    def ids(self, indices: Sequence[int]) -> list[str]:
        """Return the item ids, or indices if the data list gives none."""
        return [str(self.items[i].get("id", i)) for i in indices]


class Wrapped(Prepared):
    """Other prepared items, on the same device; a subclass changes their batches."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared.items)
        self.prepared = prepared
        self.geometry = prepared.geometry
        self.extras_of = prepared.extras_of
        self.pinned = prepared.pinned
        self.labelled = prepared.labelled

    @property
    def nbytes(self) -> int:
        """Bytes of the stored items."""
        return self.prepared.nbytes

    @property
    def device(self) -> torch.device:
        """Where the images are."""
        return self.prepared.device

    def to(self, device: torch.device, budget: int) -> Prepared:
        """Return the same items on a device, or itself if they stay."""
        moved = self.prepared.to(device, budget)
        if moved is self.prepared:
            return self

        return self._with(prepared=moved)

    def deterministic(self, uncropped: bool = False) -> Prepared:
        """Return the same items without random transforms."""
        return self._with(prepared=self.prepared.deterministic(uncropped))


class Stacked(Prepared):
    """Items of equal shape without random transforms: two tensors."""

    def __init__(self, items: Sequence[Item], inputs: Tensor, targets: Tensor) -> None:
        """Hold inputs (N, C, H, W[, D]) and targets (N, ...)."""
        super().__init__(items)
        self.inputs = inputs
        self.targets = targets

    @property
    def nbytes(self) -> int:
        """Bytes of inputs and targets."""
        return self.inputs.nbytes + self.targets.nbytes

    @property
    def device(self) -> torch.device:
        """Where inputs and targets are."""
        return self.inputs.device

    def to(self, device: torch.device, budget: int) -> Prepared:
        """Return the same items with both tensors on a device, or itself if they do not fit."""
        if self.nbytes > budget:
            return self
        return self._with(inputs=self.inputs.to(device), targets=self.targets.to(device))

    def batches(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Batch]:
        """Yield batches; `generator` is unused, since nothing is random."""
        # An indexing call costs more than a small batch, so one call gathers several batches.
        batch = max(1, size * self.inputs.shape[1:].numel())
        for chunk in torch.split(indices, size * max(1, min(_AHEAD, _GATHERED // batch))):
            inputs, targets = self.rows(chunk)
            yield from zip(torch.split(inputs, size), torch.split(targets, size), strict=True)

    def rows(self, indices: Tensor) -> Batch:
        """Return inputs and targets at indices (B,) int64, each gathered on its device."""
        targets = self.targets[indices.to(self.targets.device)]
        return self.inputs[indices.to(self.device)], targets


class Augmented(Prepared):
    """Items whose random transforms act on whole batches.

    Args:
        items: data list entries.
        cached: two stacked tensors, or samples with an image and a label each, in memory or mapped from files.
        recipe: the random transforms; an item's result depends only on its own row of draws.
    """

    def __init__(
        self,
        items: Sequence[Item],
        cached: Stacked | Sequence[Item],
        recipe: BatchRecipe,
    ) -> None:
        super().__init__(items)
        self.cached = cached
        self.recipe = recipe

    @property
    def nbytes(self) -> int:
        """Bytes of inputs and targets if they are stacked."""
        if isinstance(self.cached, Stacked):
            return self.cached.nbytes

        return 0

    @property
    def device(self) -> torch.device:
        """Where inputs and targets are."""
        if isinstance(self.cached, Stacked):
            return self.cached.device

        return super().device

    def to(self, device: torch.device, budget: int) -> Prepared:
        """Return the same items with both tensors on a device, where they are then transformed."""
        if isinstance(self.cached, Stacked):
            moved = self.cached.to(device, budget)
            if moved is not self.cached:
                return self._with(cached=moved)

        return self

    def deterministic(self, uncropped: bool = False) -> Prepared:
        """Return the same items without random transforms, on the same device."""
        return self._with(recipe=self.recipe.deterministic(uncropped))

    def batches(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Batch]:
        """Yield batches; random transforms are drawn on the CPU from the generator, or without one by index."""
        num_draws = self.recipe.num_draws
        if generator is not None:
            draws = torch.rand(len(indices), num_draws, generator=generator, dtype=torch.float64)
        else:
            draws = torch.empty(len(indices), num_draws, dtype=torch.float64)
            for row, index in zip(draws, indices.tolist(), strict=True):
                generator = generator_of(0, "sample", index)
                torch.rand(num_draws, generator=generator, dtype=torch.float64, out=row)

        for chunk, drawn in zip(torch.split(indices, size), torch.split(draws, size), strict=True):
            yield self.recipe(*self._rows(chunk), drawn)

    def _rows(self, chunk: Tensor) -> tuple[Rows, Sample]:
        if isinstance(self.cached, Stacked):
            return self.cached.rows(chunk)
        samples = [self.cached[index] for index in chunk.tolist()]
        images, labels = (
            [as_plain(sample[key]) for sample in samples] for key in ("image", "label")
        )
        # masks may differ in size and stay a list
        masks = all(getattr(label, "ndim", 0) > 1 for label in labels)
        return images, labels if masks else default_collate(labels)


def moved(value: Sample, device: torch.device) -> Sample:
    """Return inputs or targets on a device: a tensor, or a container of tensors; the same tensor if already there."""
    if isinstance(value, Mapping):
        return {key: moved(part, device) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(part, device) for part in value)
    if isinstance(value, Tensor) and value.device != device:
        return value.to(device, non_blocking=True)

    return value


def extras(sample: Sample) -> Item:
    """Return the fields of a sample or a batch other than image and label."""
    if isinstance(sample, Mapping):
        return without(sample, ("image", "label"))

    return {}


def as_plain(value: Sample) -> Sample:
    """Return the plain tensor of MONAI's MetaTensor, whose bookkeeping costs more than small networks."""
    if isinstance(value, MetaTensor):
        return value.as_tensor()

    return value


@dataclass(frozen=True)
class Shard:
    """The items of one site (or of a pooled set) in one section.

    Attributes:
        prepared: the section.
        indices: (N,) int64, into it.
        shown: index -> what the item's mask annotates, if that is not everything.
    """

    prepared: Prepared
    indices: Tensor
    shown: Mapping[int, AnnotatedClasses] = field(default_factory=dict)

    @classmethod
    def of(cls, prepared: Prepared, indices: Sequence[int]) -> Shard:
        """Make a shard from plain integers."""
        return cls(prepared, torch.as_tensor(list(indices), dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def ids(self) -> list[str]:
        """The items' ids."""
        return self.prepared.ids(self.indices.tolist())

    @property
    def labelled(self) -> bool:
        """Whether its batches have targets."""
        return self.prepared.labelled

    @property
    def labels(self) -> list[int]:
        """The items' class labels, empty if the data list has none."""
        labels = [self.prepared.items[i].get("label") for i in self.indices.tolist()]
        if all(isinstance(x, int) for x in labels):
            # the check is written again for the type checker
            return [int(x) for x in labels if isinstance(x, int)]

        return []

    def deterministic(self, uncropped: bool = False) -> Shard:
        """Return the same items without random transforms, for measurements; see `Prepared.deterministic`."""
        return replace(self, prepared=self.prepared.deterministic(uncropped))

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """Yield batches: shuffled and freshly transformed with a generator, in fixed order and constant without."""
        order = self.indices
        if not len(order):
            return iter(())

        if generator is not None:
            order = order[torch.randperm(len(order), generator=generator)]

        batches = self.prepared.batches(order, size, generator)
        if self.prepared.pinned:
            batches = map(_pin, batches)

        return _profiled(batches)


def _profiled(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Record the making of each batch in a profile."""
    while True:
        with record_function("data"):
            batch = next(batches, None)

        if batch is None:
            return

        yield batch


def _pin(batch: Batch) -> Batch:
    x, y = (value.pin_memory() if isinstance(value, Tensor) else value for value in batch)
    return x, y


def check_channels(items: Sequence[Item], images: Sequence[Tensor]) -> None:
    """Compare the channels of images (C, H, W[, D]).

    Raises:
        InputError: two images have different numbers of channels; names both.
    """
    for item, image in zip(items, images, strict=True):
        count = len(image)
        first = len(images[0])
        if count != first:
            raise InputError(
                f"image {item.get('id', '?')!r} has {count} channels, {items[0].get('id', '?')!r} has {first}",
                "all images of a data set have the same number of channels",
                "convert the odd ones, or let the bundle's transforms do it",
            )


def stack(
    items: Sequence[Item], inputs: Sequence[Tensor], targets: Sequence[Sample]
) -> Stacked | None:
    """Stack samples into a `Stacked`, or return None if shapes differ.

    Raises:
        InputError: two images have different numbers of channels.
    """
    check_channels(items, inputs)
    for column in (inputs, targets):
        if len({torch.as_tensor(value).shape for value in column}) > 1:
            return None

    return Stacked(items, torch.stack(list(inputs)), default_collate(list(targets)))


# Items with hidden labels: the training data of an unlabelled site


class LabelsHidden(Wrapped):
    """The images of prepared items; targets of their batches are None, and records contain no class."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self.items = _WithoutLabels(prepared.items)
        self.extras_of = None
        self.labelled = False

    def batches(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Batch]:
        """Yield inputs with None."""
        return ((x, None) for x, _ in self.prepared.batches(indices, size, generator))


class _WithoutLabels(Sequence[Item]):
    """Records without their labels, made on access."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _WithoutLabels(self._items[index])
        return without(self._items[index], ["label"])


def unlabelled(shard: Shard) -> Shard:
    """Return the same items with their labels hidden."""
    return replace(shard, prepared=LabelsHidden(shard.prepared))


# Images of sites that lack channels: these are set to zero, and in training further channels may be dropped


class Channels(Wrapped):
    """Prepared items whose images lack channels; which ones may differ from item to item.

    They are set to zero after all transforms. The deterministic transforms also see zeros (`samples.ZeroChannels`).
    """

    def __init__(self, prepared: Prepared, present: Tensor, drop: float = 0.0) -> None:
        """Hold the items.

        Args:
            prepared: the items.
            present: (N, C) bool, which channels each has.
            drop: probability of setting a channel of an item to zero if a generator is given; one always stays.
        """
        super().__init__(prepared)
        self.present = present
        self.drop = drop

    def deterministic(self, uncropped: bool = False) -> Prepared:
        """Return the same items without random transforms; no channel is dropped."""
        return self._with(prepared=self.prepared.deterministic(uncropped), drop=0.0)

    def batches(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Batch]:
        """Yield batches with zeros in missing channels; dropped channels are drawn on the CPU first."""
        present = self.present[indices]
        if generator is not None and self.drop:
            # Missing channels never have the largest draw, which always stays.
            draws = torch.where(present, torch.rand(present.shape, generator=generator), -1.0)
            present = (draws >= self.drop) | (draws == draws.amax(1, keepdim=True))
        batches = self.prepared.batches(indices, size, generator)
        # Not by `yield`: dropped channels are drawn when this is called, before any batch.
        pairs = zip(batches, torch.split(present, size), strict=True)
        return ((_zeroed(x, rows), y) for (x, y), rows in pairs)


def _zeroed(x: Sample, present: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.ndim < 3 or x.shape[1] != present.shape[1]:
        raise InputError(
            f"images of shape {tuple(getattr(x, 'shape', ()))} with --site-channels or --channel-drop",
            f"{present.shape[1]} channels, as the bundle's metadata.json says of its images",
            "correct num_channels there, or leave out --site-channels and --channel-drop",
        )
    # present: (B, C, 1, ...)

    return torch.where(present.reshape(*present.shape, *[1] * (x.ndim - 2)).to(x.device), x, 0)
