"""One evaluation for all methods: takes a network and a shard, returns per-case outcomes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import EllipsisType
from typing import Any, NamedTuple, Protocol

import torch
from ignite.engine import Engine
from ignite.exceptions import NotComputableError
from monai.data import MetaTensor, decollate_batch
from monai.inferers import SimpleInferer
from monai.transforms import KeepLargestConnectedComponent
from torch import Tensor, nn

from medfl.core import InputError, MedflError, Metrics, RunError, Tensors, as_text, root_cause, slug
from medfl.data import AnnotatedClasses, Prepared, Shard, Stacked, moved
from medfl.evaluation.mask_metrics import channel_scores, foreground, scores
from medfl.evaluation.metrics import LARGEST, Cases

_BATCH = 16  # maximum number of items in a batch of masks
_PIXELS = 16 * 256 * 256  # and of their pixels

Foreign = Any
"""What a bundle's code takes and returns: mostly tensors, but without any declaration."""
OwnValues = Callable[[Tensor, Tensor], dict[str, Tensor]]
"""(output, target) of a batch -> values by name, (B, ...)."""
OwnMetrics = Mapping[str, Callable[[Any, Any], Any]]
"""Name -> metric of (output, target) of one case, a batch of one, in addition to medfl's."""


class Masks(NamedTuple):
    """Prediction and reference of one case, (H, W[, D]) class indices, and the number of classes."""

    prediction: Tensor
    reference: Tensor
    classes: int


class Evaluator(Protocol):
    """Scores a network on a shard."""

    def __call__(
        self,
        network: nn.Module,
        shard: Shard,
        device: torch.device,
        *,
        surface_metrics: Sequence[str] = (),
    ) -> Cases:
        """Return one outcome per item, in the shard's order; the network, on `device`, is put in evaluation mode.

        `surface_metrics` are the mask surface metrics to compute as well; they are too slow for every round.
        """


@dataclass(frozen=True, kw_only=True)
class VectorEvaluator(ABC):
    """A task with some outputs an image, which are scored batch by batch.

    Attributes:
        batch_size: items of a forward pass; fixed, so that no setting changes the last bits of a score.
        metric_inputs: (output, target) of a batch -> further values that the bundle's own metric takes, or None.
        metrics: further ones, of what `values` has first: probabilities or numbers, and their truth.
    """

    batch_size: int = 256
    metric_inputs: OwnValues | None = None
    metrics: OwnMetrics = field(default_factory=dict)

    @torch.no_grad()
    def __call__(
        self,
        network: nn.Module,
        shard: Shard,
        device: torch.device,
        *,
        surface_metrics: Sequence[str] = (),
    ) -> Cases:
        """Return what `values` makes of the cases, and the further values of `metric_inputs`.

        Raises:
            InputError: the targets are not one for each output; an item is named.
        """
        network.eval()
        columns = []
        own_values = []
        position = 0
        for x, y in shard.batches(self.batch_size):
            output = network(x.to(device)).float()
            columns.append(self.columns(output, y, shard, position))
            position += len(output)
            if self.metric_inputs is not None:
                own_values.append(self.metric_inputs(output, y))

        if not columns:
            return Cases((), {})

        values = self.values(shard, *map(torch.cat, zip(*columns, strict=True)))
        for name in chain.from_iterable(own_values[:1]):
            values[name] = torch.cat([batch[name] for batch in own_values])

        if self.metrics:
            outputs, targets = (torch.split(column, 1) for column in [*values.values()][:2])
            rows = list(map(partial(_own_metrics, self.metrics), shard.ids, outputs, targets))
            values |= _cases(shard, rows).values

        return Cases(tuple(shard.ids), values)

    @abstractmethod
    def columns(self, output: Tensor, y: Tensor, shard: Shard, position: int) -> tuple[Tensor, ...]:
        """Return what is kept of a batch, (B, ...) each; it begins at a position of the shard."""

    @abstractmethod
    def values(self, shard: Shard, *columns: Tensor) -> Tensors:
        """Return the values of all cases, by what was kept of the batches."""


@dataclass(frozen=True, kw_only=True)
class LogitEvaluator(VectorEvaluator):
    """A task whose network returns a logit for each class or finding.

    Attributes:
        ends_in_sigmoid: the network returns probabilities, not logits.
    """

    ends_in_sigmoid: bool = False

    def logits(self, output: Tensor) -> Tensor:
        """Return the logits (B, K) of an output (B, K, ...); probabilities are kept 1e-6 from 0 and 1."""
        logits = output.flatten(1)
        return logits.logit(1e-6) if self.ends_in_sigmoid else logits


@dataclass(frozen=True)
class ClassEvaluator(LogitEvaluator):
    """Classification: "probabilities" (N, K), "label" (N,) and cross-entropy "loss" (N,).

    A network with one output is read as the logit of class 1.
    """

    def columns(self, output: Tensor, y: Tensor, shard: Shard, position: int) -> tuple[Tensor, ...]:
        """Return logits (B, K) and class indices (B,)."""
        logits = self.logits(output)

        # A single logit z of class 1 is the pair (0, z): its softmax is (1 - sigmoid, sigmoid).
        if logits.shape[1] == 1:
            logits = torch.cat([torch.zeros_like(logits), logits], 1)

        one_hot = y.ndim == 2 and y.shape[1] > 1
        label = y.argmax(1) if one_hot else y.reshape(len(logits))
        return logits, label.to(logits.device).long()

    def values(self, shard: Shard, *columns: Tensor) -> Tensors:
        """Return probabilities, labels and losses."""
        logits, label = columns
        return {
            "probabilities": logits.softmax(1).cpu(),
            "label": label.cpu(),
            "loss": nn.functional.cross_entropy(logits, label, reduction="none").cpu(),
        }


@dataclass(frozen=True)
class MaskEvaluator:
    """Segmentation into K classes: the metrics of `medfl.evaluation.mask_metrics` and the loss, of each whole case.

    The predicted class has the largest logit; a network with one output returns the logit of class 1.

    Attributes:
        loss: (logits (1, K, H, W[, D]), target) -> loss.
        classes: K names, background first.
        inferer: (inputs, network) -> logits of whole images, e.g. a sliding window.
        tolerance: of the surface Dice, in the unit of the images' spacing.
        background_limit: a pixel is background if its background probability exceeds this; None: if it is the largest.
        metrics: further ones, of logits and target.
        largest: names of the classes of which only the largest component is kept.
        compares: also return what each structure's largest component would score, as `largest_<metric>_<name>`.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    classes: tuple[str, ...]
    inferer: Callable[..., Tensor]
    tolerance: float = 1.0
    background_limit: float | None = None
    metrics: OwnMetrics = field(default_factory=dict)
    largest: Collection[str] = ()
    compares: bool = False

    @torch.no_grad()
    def __call__(
        self,
        network: nn.Module,
        shard: Shard,
        device: torch.device,
        *,
        surface_metrics: Sequence[str] = (),
    ) -> Cases:
        """Return one (N,) tensor per metric; surface metrics only if requested.

        Raises:
            InputError: a reference mask has a value that is not a class; the item is named.
            RunError: the inferer or the loss fails on a case, or the output is not finite; the item is named.
        """
        rows = []
        for index, (logits, y) in zip(
            shard.indices.tolist(), self._outputs(network, shard, device), strict=True
        ):
            (ident,) = shard.prepared.ids([index])
            prediction, reference, count = self._masks(ident, logits, y)
            predictions = [prediction]
            if self.compares:
                predictions.append(_largest(prediction, range(1, count)))

            spacing = _spacing(shard.prepared, index, reference.ndim)
            # Padding added by the transforms is not part of the case.
            part = _in_file(shard.prepared, index, reference.shape)
            predictions = [mask[part] for mask in predictions]
            reference = reference[part]
            names = ("background", *foreground(self.classes, count - 1))

            own_row = _own_metrics(self.metrics, ident, logits, y)
            annotated = shard.shown.get(index)
            if annotated is not None:  # do not score structures that its mask does not annotate
                predictions = [annotated.renumbered(mask) for mask in predictions]
                reference = annotated.renumbered(reference)
                names = ("background", *(names[c] for c in annotated.classes))
                logits = annotated.marginal_logits(logits)
                y = annotated.renumbered(y)

            measure = partial(
                scores,
                reference=reference,
                classes=names,
                spacing=spacing,
                tolerance=self.tolerance,
                surface_metrics=surface_metrics,
            )
            row = measure(predictions[0])
            if self.compares:
                row |= _compared(predictions, reference, names, measure(predictions[1]))

            with _naming_item(ident):
                # on the whole grid, with padding: the same loss as in training
                rows.append({**row, "loss": float(self.loss(logits, y)), **own_row})

        return _cases(shard, rows)

    @torch.no_grad()
    def masks(self, network: nn.Module, shard: Shard, device: torch.device) -> Iterator[Masks]:
        """Yield the predicted and the reference mask of each item."""
        for ident, (logits, y) in zip(
            shard.ids, self._outputs(network, shard, device), strict=True
        ):
            yield self._masks(ident, logits, y)

    @torch.no_grad()
    def backgrounds(
        self, network: nn.Module, shard: Shard, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each item the background probability and whether its mask has a structure, both (H, W[, D])."""
        outputs = self._outputs(network, shard, device)
        for index, ident, (logits, y) in zip(
            shard.indices.tolist(), shard.ids, outputs, strict=True
        ):
            reference = self._masks(ident, logits, y).reference
            part = _in_file(shard.prepared, index, reference.shape)
            annotated = shard.shown.get(index)
            if annotated is not None:
                reference = annotated.renumbered(reference)

            yield _background(logits)[part], reference[part] > 0

    def _outputs(
        self, network: nn.Module, shard: Shard, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each item logits (1, K, H, W[, D]) and target (1, ...)."""
        network.eval()
        ids = shard.ids
        start = 0
        for x, y in shard.batches(self._batch_size(shard.prepared)):
            with _naming_item(ids[start]):
                logits = self.inferer(x.to(device), network).float()

            y = y.to(device)
            for i in range(len(y)):
                yield logits[i : i + 1], y[i : i + 1]

            start += len(y)

    def _batch_size(self, prepared: Prepared) -> int:
        """Return how many items are inferred at once: a power of two."""
        # Other inferers cut windows of their own size, and unstacked items differ in size.
        if not isinstance(prepared, Stacked) or type(self.inferer) is not SimpleInferer:
            return 1
        most = _PIXELS // max(1, math.prod(prepared.inputs.shape[2:]))
        # a power of two: sums over a batch then round identically on more devices
        return int(2 ** math.floor(math.log2(min(_BATCH, max(1, most)))))

    def _masks(self, ident: str, logits: Tensor, y: Tensor) -> Masks:
        if not logits.isfinite().all():
            raise RunError(f"the model's output is not finite for case {ident!r}")

        channels = logits.shape[1]
        classes = max(2, channels)
        # A logit above 0 means that class 1 has a probability above one half.
        winner = logits.argmax(1) if channels > 1 else logits[:, 0] > 0
        # with a limit a pixel is background only above it, and else the most probable structure
        if self.background_limit is not None:
            is_structure = (_background(logits) <= self.background_limit).to(logits.device)
            winner = is_structure[None].long()
            if channels > 1:
                winner *= 1 + logits[:, 1:].argmax(1)

        predicted = _largest(
            winner[0].to(torch.uint8).cpu(), class_indices(self.largest, self.classes, classes)
        )
        reference = (y.argmax(1) if y.shape[1] > 1 else y[:, 0])[0].cpu()
        low = int(reference.min())
        high = int(reference.max())

        if low < 0 or high >= classes:
            raise InputError(
                f"the reference mask of item {ident!r} has the value {low if low < 0 else high}",
                f"the network has {classes} classes: values 0 to {classes - 1}",
                "correct this mask's file, or the number of classes in the bundle's configuration",
            )
        if predicted.shape != reference.shape:
            raise RunError(
                f"the model's output for case {ident!r} is {_sides(predicted)}, its reference mask {_sides(reference)}"
            )

        return Masks(predicted, reference.to(torch.uint8), classes)


def class_indices(largest: Collection[str], names: Sequence[str], count: int) -> list[int]:
    """Return which of this many classes with these names are those in `largest`."""
    structures = enumerate(foreground(names, count - 1), 1)
    return [index for index, name in structures if name in largest]


def _largest(mask: Tensor, classes: Sequence[int]) -> Tensor:
    """Return a mask (H, W[, D]) with only the largest connected component of these classes."""
    if not classes:
        return mask

    # a copy, because MONAI's transform changes its input
    return KeepLargestConnectedComponent(classes, is_onehot=False)(mask[None].clone())[0]


def _compared(
    predictions: Sequence[Tensor], reference: Tensor, names: Sequence[str], scored: Metrics
) -> Metrics:
    """Return scores by largest components: `scored`, which is of the second prediction, and what each one changes."""
    prediction, largest_alone = predictions
    row = {LARGEST + metric: value for metric, value in scored.items()}
    for index, name in enumerate(map(slug, names[1:]), 1):
        removed = reference[(prediction == index) & (largest_alone != index)]
        right = (removed == 0).sum() - (removed == index).sum()
        row[f"{LARGEST}pixel_accuracy_{name}"] = float(right) / reference.numel()

    return row


def _background(logits: Tensor) -> Tensor:
    """Return the background probability (H, W[, D]) from logits (1, K, H, W[, D]) on any device."""
    if logits.shape[1] > 1:
        probability = logits.double().softmax(1)[0, 0]
    else:
        probability = (-logits.double()).sigmoid()[0, 0]

    return probability.cpu()


class EpochMetric:
    """An ignite metric of a list of {"pred", "label", ...}, on an engine of its own, as MONAI's metrics require."""

    def __init__(self, name: str, metric: Foreign) -> None:
        self._engine = Engine(lambda engine, batch: None)
        self._metric = metric
        metric.attach(self._engine, name)

    def of(self, cases: list[Foreign]) -> float:
        """Return the metric of these cases, the mean if it has several values; NaN if it is undefined."""
        # Does what an ignite engine does in an epoch of one iteration.
        self._engine.state.output = cases  # type: ignore[assignment]
        self._metric.started(self._engine)
        try:
            self._metric.iteration_completed(self._engine)
            value = self._metric.compute()
        except NotComputableError:  # nothing to score
            return math.nan

        metric = getattr(self._metric, "metric_fn", None)
        details = getattr(metric, "get_buffer", lambda: None)()
        # MONAI's mean of nothing is 0.
        if isinstance(details, Tensor) and details.isnan().all():
            return math.nan

        parts = list(value.values()) if isinstance(value, Mapping) else value
        return float(torch.as_tensor(parts, dtype=torch.float64).nanmean())


class CaseEvaluator:
    """Any other task, and third-party bundles: the bundle's inferer, postprocessing and key metric, case by case.

    A segmentation also gets the metrics of `medfl.evaluation.mask_metrics`, NaN unless postprocessing turns "pred" and
    "label" into binary channels of the image's size. Only then is the bundle's own "dice" not used.

    Args:
        name: the metric's name in results.
        metric: an ignite metric over a list of {"image", "label", "pred"}, or (prediction, target) -> loss.
        inferer: (inputs, network) -> prediction, e.g. a sliding window.
        postprocessing: dictionary transform over the batch's keys and "pred", or None.
        tolerance: of the surface Dice, in the unit of the images' spacing; None unless the task is segmentation.
        structures: names of the channels, () if they have none.
        metrics: further ones, of prediction and target.
    """

    def __init__(
        self,
        name: str,
        metric: Foreign,
        inferer: Callable[..., Foreign],
        postprocessing: Callable[[Foreign], Foreign] | None = None,
        tolerance: float | None = None,
        structures: Sequence[str] = (),
        metrics: OwnMetrics | None = None,
    ) -> None:
        self.metrics = metrics or {}
        self.name = name
        self.inferer = inferer
        self.postprocessing = postprocessing
        self.tolerance = tolerance
        self.structures = structures
        self._metric = metric
        self._epoch = EpochMetric(name, metric) if hasattr(metric, "attach") else None

    @torch.no_grad()
    def __call__(
        self,
        network: nn.Module,
        shard: Shard,
        device: torch.device,
        *,
        surface_metrics: Sequence[str] = (),
    ) -> Cases:
        """Return the metric's value per case (N,), NaN where undefined, and the metrics of a segmentation.

        Raises:
            RunError: inferer, postprocessing or metric fails on a case; the item is named.
        """
        rows = []
        outputs = self._outputs(network, shard, device)
        for index, (x, y, prediction, fields) in zip(shard.indices.tolist(), outputs, strict=True):
            (ident,) = shard.prepared.ids([index])
            row = _own_metrics(self.metrics, ident, prediction, y)
            with _naming_item(ident):
                cases = self._processed(x, y, prediction, fields)
                annotated = shard.shown.get(index)
                names = self.structures
                if annotated is not None:  # do not score structures that its mask does not annotate
                    names = annotated.named(names)
                    cases = [_shown(case, annotated) for case in cases]
                    y = annotated.renumbered(y)
                    prediction = annotated.marginal_logits(prediction)

                if self.tolerance is not None:
                    row |= self._mask_row(x, cases, shard.prepared, index, surface_metrics, names)

                # the bundle's own metric where medfl's is undefined
                if math.isnan(row.get(self.name, math.nan)):
                    row[self.name] = float(
                        self._epoch.of(cases) if self._epoch else self._metric(prediction, y)
                    )

                rows.append(row)

        return _cases(shard, rows)

    @torch.no_grad()
    def masks(
        self, network: nn.Module, shard: Shard, device: torch.device
    ) -> Iterator[Masks | None]:
        """Yield the predicted and the reference mask of each item, None if their channels overlap."""
        for ident, (x, *output) in zip(
            shard.ids, self._outputs(network, shard, device), strict=True
        ):
            with _naming_item(ident):
                pair = _channels(x, self._processed(x, *output))

            if pair is None:
                yield None
            else:
                yield _indices(*pair)

    def _outputs(
        self, network: nn.Module, shard: Shard, device: torch.device
    ) -> Iterator[tuple[Foreign, Foreign, Foreign, Mapping[str, Foreign]]]:
        """Yield the input, target, prediction and further fields of each item, in batches of one."""
        network.eval()
        if not len(shard):
            return

        cases = shard.prepared.cases(shard.indices)
        for ident, (x, y, fields) in zip(shard.ids, cases, strict=True):
            x = moved(x, device)
            y = moved(y, device)
            with _naming_item(ident):
                prediction = self.inferer(x, network)

            yield x, y, prediction, fields

    def _processed(
        self, x: Foreign, y: Foreign, prediction: Foreign, fields: Mapping[str, Foreign]
    ) -> list[Foreign]:
        # A plain loss needs only prediction and target, not processed cases.
        if self._epoch is None and self.tolerance is None:
            return []
        cases = decollate_batch({**fields, "image": x, "label": y, "pred": prediction})
        if self.postprocessing is None:
            return list(cases)

        return list(map(self.postprocessing, cases))

    def _mask_row(
        self,
        x: Foreign,
        cases: Sequence[Foreign],
        prepared: Prepared,
        index: int,
        surface_metrics: Sequence[str],
        names: Sequence[str],
    ) -> Metrics:
        pair = _channels(x, cases)
        if pair is None or self.tolerance is None:
            return dict.fromkeys(("dice", "pixel_accuracy", *surface_metrics), math.nan)
        spacing = _spacing(prepared, index, x.ndim - 2)
        return channel_scores(
            *pair, spacing, self.tolerance, surface_metrics=surface_metrics, names=names
        )


@contextmanager
def _naming_item(ident: str) -> Iterator[None]:
    """Turn an error of the bundle's code into a RunError that names the item."""
    try:
        yield
    except MedflError:
        raise
    except Exception as error:
        raise RunError(
            f"the bundle's validation fails on item {ident!r}: {as_text(root_cause(error))}"
        ) from error


def _own_metrics(metrics: OwnMetrics, ident: str, output: Any, target: Any) -> dict[str, float]:
    """Return a case's metrics, each the mean of its values that are not NaN, NaN if there are none.

    Raises:
        RunError: one fails; names it and the item.
    """
    row = {}
    for name, metric in metrics.items():
        try:
            mean = torch.as_tensor(metric(output, target), dtype=torch.float64).nanmean()
        except Exception as error:  # a user's function may raise anything
            raise RunError(
                f"metric {name!r} fails on item {ident!r}: {type(error).__name__}: {error}"
            ) from error

        row[name] = float(torch.where(mean.isfinite(), mean, math.nan))

    return row


def _cases(shard: Shard, rows: Sequence[Mapping[str, float]]) -> Cases:
    values = {}
    # in order; cases of different kinds have different metrics
    for name in dict.fromkeys(chain.from_iterable(rows)):
        values[name] = torch.tensor([row.get(name, math.nan) for row in rows], dtype=torch.float64)

    return Cases(tuple(shard.ids), values)


def _spacing(prepared: Prepared, index: int, dimensions: int) -> tuple[float, ...]:
    """Return the pixel spacing of an item along each axis; 1 if the transforms do not record it."""
    if prepared.geometry and len(prepared.geometry[index].spacing) == dimensions:
        return prepared.geometry[index].spacing

    return (1.0,) * dimensions


def _in_file(
    prepared: Prepared, index: int, shape: Sequence[int]
) -> tuple[EllipsisType | slice, ...]:
    """Return the index (..., slices) of the part of an item's grid that its file covers, without padding."""
    if not prepared.geometry:
        return (...,)

    return (..., *prepared.geometry[index].part_in_file(shape))


def _channels(x: Foreign, cases: Sequence[Foreign]) -> tuple[Tensor, Tensor] | None:
    """Return a processed case's prediction and label (C, H, W[, D]) if they are binary and of the image's size."""
    if not isinstance(x, Tensor) or len(cases) != 1 or not isinstance(cases[0], Mapping):
        return None

    masks = []
    for key in ("pred", "label"):
        channels = cases[0].get(key)
        if not isinstance(channels, Tensor) or channels.shape[1:] != x.shape[2:]:
            return None
        if not ((channels == 0) | (channels == 1)).all():
            return None
        if isinstance(channels, MetaTensor):
            channels = channels.as_tensor()

        masks.append(channels.to(torch.uint8).cpu())

    prediction, label = masks
    return (prediction, label) if len(prediction) == len(label) else None


def _shown(case: Foreign, annotated: AnnotatedClasses) -> Foreign:
    """Return a processed case with only the binary channels that its reference annotates."""
    if not isinstance(case, Mapping):
        return case
    shown = {}
    for key in ("pred", "label"):
        channels = case.get(key)
        if not isinstance(channels, Tensor) or len(channels) != annotated.count:
            return case
        shown[key] = annotated.renumbered(channels[None])[0]

    return {**case, **shown}


def _indices(prediction: Tensor, reference: Tensor) -> Masks | None:
    """Return channels (C, H, W[, D]) as class indices, None if they overlap."""
    if len(reference) == 1:
        return Masks(prediction[0], reference[0], 2)

    # Channels are class indices only if each pixel is set in exactly one.
    if (prediction.sum(0) == 1).all() and (reference.sum(0) == 1).all():
        return Masks(prediction.argmax(0), reference.argmax(0), len(reference))

    return None


def _sides(mask: Tensor) -> str:
    return " x ".join(map(str, mask.shape))
