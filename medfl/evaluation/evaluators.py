"""One evaluation for all methods: a network and a shard in, per-case outcomes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from ignite.engine import Engine
from ignite.exceptions import NotComputableError
from monai.data import MetaTensor, decollate_batch
from monai.handlers import IgniteMetricHandler
from monai.inferers import SimpleInferer
from torch import Tensor, nn

from medfl.core.errors import InputError, MedflError, RunError, as_text, root_cause
from medfl.data.known_labels import AnnotatedClasses
from medfl.data.prepared import Prepared, Shard, Stacked, moved
from medfl.evaluation.mask_metrics import channel_scores, foreground, scores
from medfl.evaluation.metrics import Cases

_BATCH, _PIXELS = 16, 16 * 256 * 256  # items of a batch of masks at most, and their pixels

Names = Sequence[str]


class Masks(NamedTuple):
    """Prediction and reference of one case, (H, W[, D]) class indices, and the number of classes."""

    prediction: Tensor
    reference: Tensor
    classes: int


class Evaluator(Protocol):
    """Scores a network on a shard."""

    def __call__(
        self, network: nn.Module, shard: Shard, device: torch.device, *, surface_metrics: Names = ()
    ) -> Cases:
        """Return one outcome per item, in the shard's order; the network, on `device`, is put in evaluation mode.

        `surface_metrics` are the metrics of masks' surfaces to compute too, which are too slow for every round.
        """


@dataclass(frozen=True)
class ClassEvaluator:
    """Classification: class probabilities, label and cross-entropy per case.

    A network with one output is read as the logit of class 1.

    Attributes:
        batch_size: items of a forward pass; fixed, so that no setting changes the last bits of a score.
        ends_in_sigmoid: the network returns probabilities, not logits.
    """

    batch_size: int = 256
    ends_in_sigmoid: bool = False

    @torch.no_grad()
    def __call__(
        self, network: nn.Module, shard: Shard, device: torch.device, *, surface_metrics: Names = ()
    ) -> Cases:
        """Return "probabilities" (N, K), "label" (N,) and "loss" (N,)."""
        network.eval()
        rows: list[Tensor] = []
        labels: list[Tensor] = []
        for x, y in shard.batches(self.batch_size):
            logits = network(x.to(device)).float().flatten(1)
            logits = logits.logit(1e-6) if self.ends_in_sigmoid else logits
            rows.append(
                torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits
            )
            one_hot = y.ndim == 2 and y.shape[1] > 1
            labels.append((y.argmax(1) if one_hot else y.reshape(len(logits))).to(device).long())

        logits = torch.cat(rows) if rows else torch.zeros(0, 2, device=device)
        if labels:
            label = torch.cat(labels)
        else:
            label = torch.zeros(0, dtype=torch.int64, device=device)

        values = {
            "probabilities": logits.softmax(1).cpu(),
            "label": label.cpu(),
            "loss": nn.functional.cross_entropy(logits, label, reduction="none").cpu(),
        }

        return Cases(tuple(shard.ids), values)


@dataclass(frozen=True)
class MaskEvaluator:
    """Segmentation into K classes: the metrics of `medfl.evaluation.mask_metrics` and the loss, each of a whole case.

    The predicted class is that of the largest logit; a network with one output is read as the logit of class 1.

    Attributes:
        loss: (logits (1, K, H, W[, D]), target) -> loss.
        classes: K names, the background's first.
        inferer: (inputs, network) -> logits of whole images, e.g. a sliding window.
        tolerance: of the surface Dice, in the unit of the images' spacing.
    """

    loss: Callable[[Any, Any], Tensor]
    classes: tuple[str, ...]
    inferer: Callable[..., Any]
    tolerance: float = 1.0

    @torch.no_grad()
    def __call__(
        self, network: nn.Module, shard: Shard, device: torch.device, *, surface_metrics: Names = ()
    ) -> Cases:
        """Return one (N,) tensor per metric; of surfaces only those asked for.

        Raises:
            InputError: a reference mask has a value that is no class; the item is named.
            RunError: inferer or loss fail on a case, or the output is not finite; the item is named.
        """
        rows = []
        for index, (logits, y) in zip(
            shard.indices.tolist(), self._outputs(network, shard, device), strict=True
        ):
            (ident,) = shard.prepared.ids([index])
            prediction, reference, count = self._masks(ident, logits, y)
            spacing = _spacing(shard.prepared, index, reference.ndim)
            part = _in_file(shard.prepared, index, reference.shape)
            prediction = prediction[part]
            reference = reference[part]
            names = ("background", *foreground(self.classes, count - 1))

            annotated = shard.shown.get(index)

            if annotated is not None:  # structures that its mask does not show are not scored
                prediction = annotated.renumbered(prediction)
                reference = annotated.renumbered(reference)
                names = ("background", *(names[c] for c in annotated.classes))
                logits = annotated.marginal_logits(logits)
                y = annotated.renumbered(y)

            row = scores(
                prediction,
                reference,
                names,
                spacing,
                self.tolerance,
                surface_metrics=surface_metrics,
            )
            with _naming_item(ident):
                rows.append({**row, "loss": float(self.loss(logits, y))})

        return _cases(shard, rows)

    @torch.no_grad()
    def masks(self, network: nn.Module, shard: Shard, device: torch.device) -> Iterator[Masks]:
        """Yield the predicted and the reference mask of each item."""
        for ident, (logits, y) in zip(
            shard.ids, self._outputs(network, shard, device), strict=True
        ):
            yield self._masks(ident, logits, y)

    def _outputs(
        self, network: nn.Module, shard: Shard, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits (1, K, H, W[, D]) and target (1, ...) of each item."""
        network.eval()
        ids = shard.ids
        start = 0
        for x, y in shard.batches(self._batch_size(shard.prepared)):
            with _naming_item(ids[start]):
                logits = self.inferer(x.to(device), network).float()

            y = y.to(device)
            yield from ((logits[i : i + 1], y[i : i + 1]) for i in range(len(y)))
            start += len(y)

    def _batch_size(self, prepared: Prepared) -> int:
        """Return how many items are inferred at once: a power of two."""
        if not isinstance(prepared, Stacked) or type(self.inferer) is not SimpleInferer:
            return 1
        most = _PIXELS // max(1, math.prod(prepared.inputs.shape[2:]))
        return int(2 ** math.floor(math.log2(min(_BATCH, max(1, most)))))

    def _masks(self, ident: str, logits: Tensor, y: Tensor) -> Masks:
        if not logits.isfinite().all():
            raise RunError(f"the model's output is not finite for case {ident!r}")

        channels = logits.shape[1]
        classes = max(2, logits.shape[1])
        predicted = (
            (logits.argmax(1) if channels > 1 else logits[:, 0] > 0)[0].to(torch.uint8).cpu()
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


class CaseEvaluator:
    """Any other task, and foreign bundles: the bundle's inferer, postprocessing and key metric, case by case.

    A segmentation also has the metrics of `medfl.evaluation.mask_metrics`, but for one that its key metric is named
    like. They are NaN unless postprocessing makes "pred" and "label" binary channels of the image's size.

    Args:
        name: the metric's name in results.
        metric: an ignite metric over a list of {"image", "label", "pred"}, or (prediction, target) -> loss.
        inferer: (inputs, network) -> prediction, e.g. a sliding window.
        postprocessing: dictionary transform over the batch's keys and "pred", or None.
        tolerance: of the surface Dice, in the unit of the images' spacing; None for other tasks than segmentation.
        structures: names of the channels, () where they have none.
    """

    def __init__(
        self,
        name: str,
        metric: Any,
        inferer: Callable[..., Any],
        postprocessing: Callable[[Any], Any] | None = None,
        tolerance: float | None = None,
        structures: Sequence[str] = (),
    ) -> None:
        """Attach the metric to an engine of its own, as MONAI's metrics require."""
        self.name = name
        self.inferer = inferer
        self.postprocessing = postprocessing
        self.tolerance = tolerance
        self.structures = structures
        self._engine = Engine(lambda engine, batch: None)
        self._metric = metric
        self._is_ignite = hasattr(metric, "attach")

        if self._is_ignite:
            metric.attach(self._engine, name)

    @torch.no_grad()
    def __call__(
        self, network: nn.Module, shard: Shard, device: torch.device, *, surface_metrics: Names = ()
    ) -> Cases:
        """Return the metric's value per case (N,), NaN where it is undefined, and the metrics of a segmentation.

        Raises:
            RunError: inferer, postprocessing or metric fail on a case; the item is named.
        """
        rows = []
        outputs = self._outputs(network, shard, device)
        for index, (x, y, prediction, fields) in zip(shard.indices.tolist(), outputs, strict=True):
            with _naming_item(*shard.prepared.ids([index])):
                cases = self._processed(x, y, prediction, fields)
                annotated = shard.shown.get(index)
                if annotated is not None:  # structures that its mask does not show are not scored
                    cases = [_shown(case, annotated) for case in cases]
                    y = annotated.renumbered(y)
                    prediction = annotated.marginal_logits(prediction)

                row = {self.name: self._score(cases, y, prediction)}
                if self.tolerance is not None:
                    if annotated is None:
                        names = self.structures
                    else:
                        names = annotated.named(self.structures)

                    row = {
                        **self._mask_row(x, cases, shard.prepared, index, surface_metrics, names),
                        **row,
                    }

                rows.append(row)

        return _cases(shard, rows)

    @torch.no_grad()
    def masks(
        self, network: nn.Module, shard: Shard, device: torch.device
    ) -> Iterator[Masks | None]:
        """Yield the predicted and the reference mask of each item, None where their channels overlap."""
        for ident, (x, *output) in zip(
            shard.ids, self._outputs(network, shard, device), strict=True
        ):
            with _naming_item(ident):
                pair = _channels(x, self._processed(x, *output))
            yield None if pair is None else _indices(*pair)

    def _outputs(
        self, network: nn.Module, shard: Shard, device: torch.device
    ) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield input, target, prediction and the further fields of each item, in batches of one."""
        network.eval()
        cases = shard.prepared.cases(shard.indices) if len(shard) else iter(())
        for ident, (x, y, fields) in zip(shard.ids, cases, strict=True):
            x = moved(x, device)
            y = moved(y, device)
            with _naming_item(ident):
                prediction = self.inferer(x, network)

            yield x, y, prediction, fields

    def _processed(self, x: Any, y: Any, prediction: Any, fields: Mapping[str, Any]) -> list[Any]:
        if not self._is_ignite and self.tolerance is None:
            return []
        cases = decollate_batch({**fields, "image": x, "label": y, "pred": prediction})
        return [self.postprocessing(case) if self.postprocessing else case for case in cases]

    def _mask_row(
        self,
        x: Any,
        cases: Sequence[Any],
        prepared: Prepared,
        index: int,
        surface_metrics: Sequence[str],
        names: Names,
    ) -> dict[str, float]:
        pair = _channels(x, cases)
        if pair is None or self.tolerance is None:
            return dict.fromkeys(("dice", "pixel_accuracy", *surface_metrics), math.nan)
        spacing = _spacing(prepared, index, x.ndim - 2)
        return channel_scores(
            *pair, spacing, self.tolerance, surface_metrics=surface_metrics, names=names
        )

    def _score(self, cases: list[Any], y: Any, prediction: Any) -> float:
        if not self._is_ignite:
            return float(self._metric(prediction, y))

        self._engine.state.output = cases  # type: ignore[assignment]
        self._metric.started(self._engine)
        self._metric.iteration_completed(self._engine)
        try:
            value = self._metric.compute()
        except NotComputableError:  # nothing in this case to score
            return float("nan")

        metric: Any = (
            self._metric.metric_fn if isinstance(self._metric, IgniteMetricHandler) else None
        )
        details = metric.get_buffer() if metric is not None else None
        if (
            isinstance(details, Tensor) and details.isnan().all()
        ):  # MONAI calls the mean of nothing 0
            return float("nan")

        parts = list(value.values()) if isinstance(value, Mapping) else value
        return float(torch.as_tensor(parts, dtype=torch.float64).nanmean())


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


def _cases(shard: Shard, rows: Sequence[Mapping[str, float]]) -> Cases:
    names: dict[str, None] = {}  # in order; cases of different forms have different metrics
    for row in rows:
        names.update(dict.fromkeys(row))

    values: dict[str, Tensor] = {}
    for name in names:
        values[name] = torch.tensor([row.get(name, math.nan) for row in rows], dtype=torch.float64)

    return Cases(tuple(shard.ids), values)


def _spacing(prepared: Prepared, index: int, dimensions: int) -> tuple[float, ...]:
    """Return the distances between an item's pixels along each axis; 1 where the transforms do not record them."""
    spacing = prepared.geometry[index].spacing if prepared.geometry else ()
    if len(spacing) == dimensions:
        return spacing

    return (1.0,) * dimensions


def _in_file(prepared: Prepared, index: int, shape: Sequence[int]) -> tuple[Any, ...]:
    """Return the index (..., slices) of the part of an item's grid that its file has, without padding."""
    parts = prepared.geometry[index].part_in_file(shape) if prepared.geometry else ()
    return (..., *parts)


def _channels(x: Any, cases: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """Return a processed case's prediction and label (C, H, W[, D]) if they are binary and of the image's size."""
    if not isinstance(x, Tensor) or len(cases) != 1 or not isinstance(cases[0], Mapping):
        return None

    pair: list[Any] = [cases[0].get(key) for key in ("pred", "label")]
    if not all(isinstance(value, Tensor) and value.shape[1:] == x.shape[2:] for value in pair):
        return None
    if len(pair[0]) != len(pair[1]) or not all(
        ((value == 0) | (value == 1)).all() for value in pair
    ):
        return None

    prediction, label = (
        value.as_tensor() if isinstance(value, MetaTensor) else value for value in pair
    )
    return prediction.to(torch.uint8).cpu(), label.to(torch.uint8).cpu()


def _shown(case: Any, known: AnnotatedClasses) -> Any:
    """Return a processed case whose binary channels are those that its reference shows."""
    if not isinstance(case, Mapping):
        return case
    pair: dict[str, Any] = {key: case.get(key) for key in ("pred", "label")}
    if any(not isinstance(value, Tensor) or len(value) != known.count for value in pair.values()):
        return case
    return {**case, **{key: known.renumbered(value[None])[0] for key, value in pair.items()}}


def _indices(prediction: Tensor, reference: Tensor) -> Masks | None:
    """Return channels (C, H, W[, D]) as class indices, None where they overlap."""
    if len(reference) == 1:
        return Masks(prediction[0], reference[0], 2)

    one_hot = all(bool((value.sum(0) == 1).all()) for value in (prediction, reference))
    if one_hot:
        return Masks(prediction.argmax(0), reference.argmax(0), len(reference))

    return None


def _sides(mask: Tensor) -> str:
    return " x ".join(map(str, mask.shape))
