"""The test images that a run's judged models classify worst."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from torch import Tensor

from medfl.data.prepared import Geometry
from medfl.evaluation.metrics import Cases
from medfl.evaluation.slices import planes, true_colours
from medfl.report.picture import Picture, image_picture
from medfl.report.saved_pictures import WORST
from medfl.runtimes.federation import Federation
from medfl.runtimes.output.overlays import test_item


def worst_pictures(federation: Federation, cases: Mapping[str, Cases]) -> Iterator[Picture]:
    """Yield the images with the highest loss, the highest first, as the network is given them; volumes in a slice.

    None where items are no images. A case that several sites own is shown once, as the first of them has it.
    """
    losses: dict[str, tuple[float, str, int]] = {}
    for site, outcomes in cases.items():
        if not outcomes.is_classification:
            continue
        rows = zip(outcomes.ids, outcomes.values["loss"].tolist(), strict=True)
        for row, (ident, loss) in enumerate(rows):
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
        pixels = true_colours(
            image[0].float().numpy(force=True), federation.bundle.section("test").source.transforms
        )
        plane = planes(pixels, nothing, nothing, geometry)[0]
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
    """Tell whether pictures are (H, W): those of our own readers are, MONAI's are (W, H)."""
    root = getattr(federation.bundle, "root", None)
    files = [] if root is None else sorted((root / "configs").glob("train.*"))
    text = "".join(file.read_text(errors="replace") for file in files)
    return not files or "medfl.datasets.Read" in text


def _upright(shape: tuple[int, ...]) -> Geometry | None:
    """Return a geometry that says no more than that rows come first; None of a volume."""
    if len(shape) == 2:
        return Geometry(np.eye(4), np.eye(4), shape, "")

    return None


def _name(federation: Federation, label: int, classes: int) -> str:
    names = federation.task.classes
    if len(names) == classes:
        return names[label]

    return f"class {label}"
