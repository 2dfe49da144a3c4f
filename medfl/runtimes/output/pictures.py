"""Which pictures a run leaves, and their data; nothing here changes a result.

Random draws use separate streams, and pictures are not part of the state: a resumed run draws those of its rounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn

from medfl import methods
from medfl.core import Integers, Shape, derive, stream
from medfl.data import Geometry, Shard, Stacked
from medfl.evaluation import Cases, Masks, planes
from medfl.methods._parts.extras import Synthetic
from medfl.methods._parts.prototypes import DISTANCES, features
from medfl.networks.heads import entering_head, head
from medfl.report import model_plots
from medfl.report.picture import WORST, Floats, Picture, generated_grids, grid_name, image_picture
from medfl.runtimes.federation import Federation
from medfl.runtimes.output import overlays
from medfl.runtimes.output.events import Events
from medfl.runtimes.output.overlays import in_true_colours, test_item
from medfl.storage import RunFolder, State
from medfl.training.layers import evaluating

_COLUMNS = 8  # generated images per class in a grid
# maximum of test items; of their pixels; minimum of items per class
_ITEMS = 1000
_PIXELS = 1000 * 64 * 64
_LEAST = 25
# points of a map: test items, generated images
_MAPPED = 300
_GENERATED = 100
_BATCH = 64


class Pictures:
    """Draws the pictures of one run into its folder and as TensorBoard images."""

    def __init__(
        self, federation: Federation, folder: RunFolder, events: Events, done: int
    ) -> None:
        """Store the parts; `done` rounds were completed before this process."""
        self.federation = federation
        self.folder = folder
        self.events = events
        self._mark = _last_mark(folder, done)

    def begin(self) -> None:
        """Draw the geometry of the class texts if the network's head holds their embeddings."""
        federation = self.federation
        classes = self.federation.task.classes
        if federation.task.kind != "classification":
            return

        with federation.networks.scope():
            layer = _linear_head(federation.networks.lease(federation.networks.initial))
            embeddings = getattr(layer, "embeddings", None)
            if (
                isinstance(embeddings, Tensor)
                and embeddings.ndim == 3
                and len(embeddings) == len(classes)
            ):
                # (classes, texts per class, d)
                means = embeddings.double().mean(1).cpu().numpy()
                self._keep(model_plots.text_similarities(means, classes), 0)

    def after(self, round_: int, server: State) -> None:
        """Draw generated images of each class, if the method makes any and they differ from the last picture."""
        classes = self.federation.task.classes
        labels = torch.arange(len(classes)).repeat_interleave(_COLUMNS)
        generated = self._synthetic(round_, server, labels, "grid")
        if generated is None:
            return

        images = generated.images.float().cpu().numpy()
        mark = hashlib.sha256(images.tobytes()).hexdigest()
        # otherwise a method that makes them once would leave the same picture each round
        if mark != self._mark:
            grid = model_plots.generated_grid(images, classes, round_, mark)
            self._keep(grid, round_, "generated")
            self._mark = mark

    def finish(self, round_: int, server: State) -> None:
        """Draw the observed values and, if there is a global network, features of test and generated items."""
        curves: dict[str, list[tuple[int, float]]] = {}
        for entry in self.folder.rounds():
            for name, value in entry.get("observed", {}).items():
                if name in DISTANCES:
                    curves.setdefault(name, []).append((entry["round"], value))

        drawn = model_plots.prototype_distances(curves)
        if drawn is not None:
            self._keep(drawn, round_)

        federation = self.federation
        classes = self.federation.task.classes
        seed = federation.run.seed
        pooled = federation.pooled("test")

        if federation.task.kind != "classification" or not len(pooled):
            return

        drawn_labels = torch.arange(len(classes)).repeat(max(1, _GENERATED // len(classes)))
        generated = self._synthetic(round_, server, drawn_labels, "features")
        # a separate stream: pictures change no number of a run
        with stream(seed, "pictures", "items") as draws, federation.networks.scope():
            network = federation.method.global_predictor(federation.host(round_), server)
            if network is None or not _has_vectors(network, pooled, federation.networks.device):
                return

            real, labels = self._read(network, _sample_items(pooled, len(classes), draws))
            synthetic = real[:0]
            synthetic_labels = labels[:0]
            if generated is not None:
                count = len(drawn_labels)
                images = Stacked([{}] * count, generated.inputs, drawn_labels)
                synthetic, synthetic_labels = self._read(network, Shard.of(images, range(count)))

        # the first ones: `_sample_items` interleaves the classes
        points = (real[:_MAPPED], labels[:_MAPPED], synthetic, synthetic_labels)
        for picture in model_plots.feature_scatters(
            *points, classes, derive(seed, "pictures"), round_
        ):
            self._keep(picture, round_)

        spectrum = model_plots.spectrum(real, labels, classes, round_)
        if spectrum is not None:
            self._keep(spectrum, round_)

    def draw_cases(
        self, round_: int, cases: Mapping[str, Cases], masks: Mapping[str, Mapping[str, Masks]]
    ) -> None:
        """Show test cases with the predictions of the judged models.

        For segmentation the Dice of all cases, and each site's best, median and worst case; for classification the
        images with the highest loss.
        """
        pictures: Iterable[Picture] = ()
        if self.federation.task.kind == "segmentation":
            pictures = overlays.case_pictures(self.federation, cases, masks)
        elif self.federation.task.kind == "classification":
            pictures = worst_pictures(self.federation, cases)

        for picture in pictures:
            self._keep(picture, round_)

    def _synthetic(
        self, round_: int, server: State, labels: Tensor, purpose: str
    ) -> Synthetic | None:
        federation = self.federation
        maker = methods.extra(self.federation.method, methods.MakesImages)
        if maker is None:
            return None
        with stream(federation.run.seed, "pictures", purpose) as draws, federation.networks.scope():
            return maker.synthetic(federation.host(round_), server, labels, draws)

    def _read(self, network: nn.Module, shard: Shard) -> tuple[Floats, Integers]:
        """Return the features (N, d) of a shard's items and their classes (N,)."""
        batches = features(network, shard, _BATCH, self.federation.networks.device)
        values, labels = zip(*batches, strict=True)
        return torch.cat(values).float().cpu().numpy(), torch.cat(labels).cpu().numpy()

    def _keep(self, picture: Picture, step: int, tag: str = "") -> None:
        self.folder.write_picture(picture.name, picture.png)
        self.events.add_image(
            f"pictures/{tag or picture.name}", picture.pixels, step, dataformats="HWC"
        )


def _sample_items(pooled: Shard, classes: int, draws: torch.Generator) -> Shard:
    """Draw a number of items that takes seconds; classes are balanced as far as possible in every prefix."""
    x, _ = next(pooled.batches(1))
    limit = max(_LEAST * classes, min(_ITEMS, _PIXELS // max(1, x[0, 0].numel())))
    order = torch.randperm(len(pooled), generator=draws)
    if pooled.labels:
        one_hot = nn.functional.one_hot(torch.tensor(pooled.labels)[order])
        # an item's rank within its class: first the first of each class, then the second
        order = order[(one_hot.cumsum(0) * one_hot).sum(1).argsort(stable=True)]

    return Shard(pooled.prepared, pooled.indices[order[:limit]])


@torch.no_grad()
def _has_vectors(network: nn.Module, shard: Shard, device: torch.device) -> bool:
    """Tell whether the head is a linear layer on one vector per item."""
    if _linear_head(network) is None:
        return False
    x, _ = next(shard.batches(1))
    with evaluating(network), entering_head(network) as inputs:
        network(x.to(device))

    return bool(inputs) and inputs[-1].ndim == 2 and len(inputs[-1]) == len(x)


def _linear_head(network: nn.Module) -> nn.Module | None:
    layer = head(network)
    return layer if isinstance(layer, nn.Linear) else None


def _last_mark(folder: RunFolder, done: int) -> str:
    """Return the mark of the last committed grid; an unreadable picture counts as none."""
    names = set(map(grid_name, range(done + 1)))
    mark = ""
    for path in reversed(generated_grids(folder.path)):
        # a picture of an uncommitted round is drawn again
        if path.stem in names:
            with suppress(OSError):
                mark = Picture.read(path).mark
            break

    return mark


# The test images that a run's judged models classify worst.


def worst_pictures(federation: Federation, cases: Mapping[str, Cases]) -> Iterator[Picture]:
    """Yield the images with the highest loss in descending order, as network inputs; a slice of each volume.

    None if items are not images. A case of several sites is shown once, for the first of them.
    """
    losses: dict[str, tuple[float, str, int]] = {}
    for site, outcomes in cases.items():
        if not outcomes.is_classification:
            continue
        rows = zip(outcomes.ids, outcomes.values["loss"].tolist(), strict=True)
        for row, (ident, loss) in enumerate(rows):
            # an item may be tested at several sites, but is shown once
            losses.setdefault(ident, (loss, site, row))

    rows_first = _reads_rows(federation)
    # ties by id, so that the order does not depend on that of the sites
    order = sorted(losses, key=lambda ident: (-losses[ident][0], ident))[:WORST]
    for rank, ident in enumerate(order, 1):
        loss, site, row = losses[ident]
        image, geometry = test_item(federation, site, ident)
        if not isinstance(image, Tensor) or image.ndim not in (4, 5):
            return

        if geometry is None and rows_first:
            geometry = _upright(tuple(image.shape[2:]))

        nothing = np.zeros(image.shape[2:], np.int64)
        plane = planes(in_true_colours(federation, image), nothing, nothing, geometry)[0]
        label = int(cases[site].values["label"][row])
        chances = cases[site].values["probabilities"][row]
        predicted = int(chances.argmax())
        true = _name(federation, label, len(chances))
        title = f"{true}, rightly"
        confidence = f"confidence {float(chances[predicted]):.3f}"
        if label != predicted:
            title = f"{true}, taken for {_name(federation, predicted, len(chances))}"
            confidence += f" ({true}: {float(chances[label]):.2g})"

        caption = f"{confidence}; loss {loss:.2f}; {ident}, {site}"
        yield image_picture(f"worst-{rank:02d}", plane.image, title, caption)


def _reads_rows(federation: Federation) -> bool:
    """Tell whether pictures are (H, W), as from our own readers; MONAI's are (W, H)."""
    root = getattr(federation.bundle, "root", None)
    files = [] if root is None else sorted((root / "configs").glob("train.*"))
    text = "".join(file.read_text(errors="replace") for file in files)
    return not files or "medfl.datasets.Read" in text


def _upright(shape: Shape) -> Geometry | None:
    """Return a geometry that only says that rows come first; None for a volume."""
    if len(shape) == 2:
        return Geometry(np.eye(4), np.eye(4), shape, "")

    return None


def _name(federation: Federation, label: int, classes: int) -> str:
    names = federation.task.classes
    if len(names) == classes:
        return names[label]

    return f"class {label}"
