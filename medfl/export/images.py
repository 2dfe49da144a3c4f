"""The images on which an export is compared: a few test items of the run, else of its phantom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from medfl.bundle.bundle import shipped
from medfl.bundle.open import bundle_of, reopened, with_data
from medfl.core.errors import InputError
from medfl.core.terminal import Print
from medfl.data.prepare import prepare
from medfl.data.prepared import Prepared, Shard, as_plain
from medfl.data.source import Source
from medfl.evaluation.metrics import Cases
from medfl.problem.problem import Problem
from medfl.runs.networks_of_run import CPU, Model, RunNetworks
from medfl.storage.places import PHANTOM
from medfl.storage.run_documents import read_rows

_COUNT = {"classification": 8}  # images by task
_DEFAULT_COUNT = 3  # fewer, because masks take longer


@dataclass(frozen=True)
class Images:
    """A few images, as validation prepares them.

    Attributes:
        bundle: the run's, opened on their folder, with the network of the model's site.
        from_run: whether they are test items of the run.
        inputs: (1, C, H, W[, D]) each.
        entries: their entries in the data list; () where only the bundle's own class can read them.
        prepared: the images with their targets.
    """

    bundle: Problem
    from_run: bool
    inputs: tuple[Tensor, ...]
    entries: tuple[Any, ...]
    prepared: Prepared


def test_images(trained: RunNetworks, model: Model, data: str | None, say: Print) -> Images:
    """Return a few test images, of the model's site where it has one; `data` is their folder, where they have moved.

    Raises:
        InputError: the folder does not have them.
    """
    run = trained.run
    name = bundle_of(trained.run)
    is_shipped = name in shipped()
    folder = data or None
    if not data and run.data.folder and Path(run.data.folder).is_dir():
        folder = run.data.folder

    from_run = folder is not None or not is_shipped or (run.data.source == PHANTOM and data is None)

    if not from_run:
        say(
            f"note: the run's images are not in {run.data.folder}: measured on PHANTOM images (or give --data DIR)"
        )

    config = {**run.config, **model.config}
    if is_shipped and from_run:
        config["split"] = run.data.split  # a phantom in the place of real images has its own

    bundle = reopened(run, config, "cpu", folder=trained.path, allow_changed=True)
    if is_shipped and not folder:
        opened = with_data(bundle, PHANTOM, config)
    else:
        opened = with_data(bundle, folder, config)

    bundle = opened.bundle

    if from_run and folder is None and is_shipped and opened.record().checksum != run.data.checksum:
        from_run = False
        say(
            "note: the run's PHANTOM images are drawn otherwise today: measured on today's (or give --data DIR)"
        )

    if bundle.custom_trainer:
        raise InputError(
            f"the export of a run with a {bundle.custom_trainer}, which has an iteration of its own",
            "what is exported is one network of images",
            "load the run's weights.safetensors into the bundle's own networks",
        )

    section = bundle.section("test")
    count = _COUNT.get(bundle.task, _DEFAULT_COUNT)
    positions = list(range(len(section.items)))
    if model.site and from_run:
        of_site = set(run.partition.sites[model.site]["test"])
        positions = [i for i in positions if section.items[i]["id"] in of_site]

    # spread over the data list, which often has one class after the other
    positions = positions[:: max(1, len(positions) // count)][:count] or [0]
    source = section.source
    listed: tuple[Any, ...] = ()
    entries: Any = Subset(source.entries, positions)
    if source.is_list:
        listed = tuple(source.entries[i] for i in positions)
        entries = list(listed)

    items = [section.items[i] for i in positions]
    chosen = Source(entries, source.transforms, source.repeatable)
    prepared = prepare(items, chosen, section.collate, section.prepare_batch, label="preparing")
    inputs = tuple(as_plain(x) for x, _ in prepared.batches(torch.arange(len(items)), 1, None))

    return Images(bundle, from_run, inputs, listed, prepared)


# The run's own predictions


def compare_predictions(
    network: nn.Module, trained: RunNetworks, model: Model, images: Images
) -> dict[str, float] | None:
    """Compare a network with predictions.csv on these images.

    Returns:
        The number of compared items and the largest difference; None where the file is of another model or images, or
        validation draws at random, by an item's place among all.
    """
    file = trained.path / "predictions.csv"
    draws = images.prepared.deterministic() is not images.prepared
    of_this_model = (
        trained.which == "last"
        and trained.finished
        and (model.site != "") == (trained.method.judged == "personal")
    )

    if not of_this_model or not images.from_run or not file.is_file() or draws:
        return None

    shard = Shard.of(images.prepared, range(len(images.inputs)))
    cases = images.bundle.evaluator(network, shard, CPU)
    rows = {row.get("id"): row for _, row in read_rows(file)}
    count = 0
    largest = 0.0
    for index, ident in enumerate(cases.ids):
        if ident in rows:
            count += 1
            differences = _differences(images.bundle, cases, index, rows[ident])
            largest = max(largest, *differences, 0.0)

    return {"items": count, "largest_difference": largest} if count else None


def _differences(bundle: Problem, cases: Cases, index: int, row: Mapping[str, str]) -> list[float]:
    if cases.reference is not None and not cases.is_classification:
        cells = bundle.kind.row(cases, index, bundle.classes, bundle.key_metric)
        predicted = [name for name in cells if name.startswith(("p_", "predicted_"))]
        return [abs(float(cells[name]) - float(row[name])) for name in predicted]
    if cases.is_classification:
        recorded = [float(value) for key, value in row.items() if key.startswith("p_")]
        computed = cases.values["probabilities"][index].tolist()
        return [abs(a - b) for a, b in zip(recorded, computed, strict=True)]
    values = {key: float(values[index]) for key, values in cases.values.items() if row.get(key)}
    return [abs(float(row[key]) - value) for key, value in values.items() if value == value]
