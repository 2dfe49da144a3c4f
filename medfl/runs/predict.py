"""`medfl predict`: class probabilities or masks predicted by a trained network for new images, and scores."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from medfl.bundle import new_images
from medfl.bundle.new_images import Images, Reference
from medfl.core import (
    Bytes,
    Document,
    InputError,
    MedflError,
    Metrics,
    Print,
    map_values,
    pick,
    pick_known,
    readable_file_name,
    terminal,
    without,
)
from medfl.data import Geometry, Prepared, Shard
from medfl.datasets import own
from medfl.datasets.readers.reading import files_of
from medfl.datasets.readers.unlabelled import is_channel, other_kinds, without_ending
from medfl.datasets.readers.volumes import is_volume, read_volume
from medfl.evaluation import Cases, Masks, VectorEvaluator, save_masks, undefined, unit
from medfl.evaluation.metrics import is_distance
from medfl.problem import mask_values
from medfl.problem.tasks.regression import scale_of
from medfl.runs import references
from medfl.runs.predictor import Predictor, open_predictor
from medfl.runs.result_tables import Record, parse_row
from medfl.storage import RunFolder, made, require_unused
from medfl.training.accelerate.precision import tf32, threads

PREDICTIONS = "predictions.csv"
SCORES = "scores.csv"
BY_CASE = "scores_by_case.csv"
# images read at once for masks; one for volumes; the minimum for classification
_PICTURES = 32
_LONGEST = 1000  # characters of a path below the folder
# the dot of a folder that is named like a file which is written, as "a.png/1.png"
_OUTPUT = re.compile(r"\.(?=(?:png|nii\.gz|csv)$)", re.IGNORECASE)
_CUBIC_MM = 1000.0  # in a millilitre
_TRUE = ("label_", "target_")


@dataclass
class Predictions:
    """The predictions.

    Attributes:
        rows: id -> row of predictions.csv.
        cases: scores of the images with a reference.
        failed: id -> error of an image, or of its reference.
        units: in which distances were measured: pixels, millimetres or both.
    """

    rows: dict[str, Record] = field(default_factory=dict)
    cases: list[Cases] = field(default_factory=list)
    failed: dict[str, Exception] = field(default_factory=dict)
    units: set[str] = field(default_factory=set)


def predict(
    model: str | Path,
    images: Images,
    out: str | Path,
    *,
    reference: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    which: str = "last",
    site: str | None = None,
    device: str = "cpu",
    thread_count: int | None = None,
    calibrated: bool = True,
    progress: bool = False,
    say: Print = str,
) -> Document:
    """Write a trained network's predictions for images into a new folder.

    Classification: predictions.csv with id, prediction and the probability of each class. Findings: id, and for each
    finding whether it is called present, by the run's thresholds, and its probability. Numbers: id and each number, in
    its unit. Segmentation: a mask per image on the grid of its file, NIfTI for volumes and DICOM series, PNG for
    pictures, and predictions.csv with id, mask and each structure's millilitres, or share of a picture. With a
    reference: scores.csv and scores_by_case.csv, by the evaluators of a run. predictions.csv is written last: a folder
    without it is unfinished.

    Args:
        model: folder of a run, or of a MONAI bundle with weights.
        images: a folder, a file, or a list of these; see `Result.predict`.
        out: new or empty folder.
        reference: folder of masks or of class folders, or table of classes, findings or numbers;
            see `medfl.runs.references`.
        columns: "file" and "label" -> the table's column, if it has another name.
        which: weights of a run's "last" or "best" round.
        site: whose model, if the run's method has one for each site.
        device: auto, cpu or cuda[:i].
        thread_count: default: that of the run; for a bundle PyTorch's own.
        calibrated: add sets or intervals, or make masks, with the results of `medfl calibrate`.
        progress: show a bar.
        say: prints lines for the user.

    Returns:
        Everything that was written and what failed, for JSON.

    Raises:
        InputError: there is no model or image, no image can be predicted, or `out` is in use; nothing is written.
        RunError: the disk is full.
    """
    folder = Path(out).expanduser()
    require_unused(folder, advice="give a new folder")
    predictor = open_predictor(model, which, site, device, say, calibrated)
    for source in [images] if isinstance(images, str | Path) else images:
        if isinstance(source, str | Path):
            root = Path(source).expanduser()
            scored_by = Path(reference).expanduser() if reference else None
            for line in (*own.odd(root), *other_kinds(root, scored_by)):
                say(f"note: {source}: {line}")

    with new_images.as_files(images, predictor.metadata) as files:
        targets: Mapping[str, Reference] = {}
        if reference is not None:
            targets = _references(Path(reference).expanduser(), predictor, files, columns or {})

        masks = [target for target in targets.values() if isinstance(target, str)]
        # the bundle's transforms read only what the user named
        predictor.open_places(files_of([*files.values(), *masks]))
        with (
            threads(thread_count or predictor.threads or torch.get_num_threads()),
            tf32(predictor.tf32),
        ):
            predictions = _Writer(predictor, files, targets, folder).write(progress)

    if not predictions.rows:
        # the first error represents all: in a folder of unsuitable files all fail alike
        raise _no_prediction_error(len(files), next(iter(predictions.failed.values())))

    with made(folder, [SCORES, BY_CASE, PREDICTIONS]):
        return _document(predictor, files, predictions, folder, targets)


def _references(
    path: Path, predictor: Predictor, files: Mapping[str, str], columns: Mapping[str, str]
) -> Mapping[str, Reference]:
    if predictor.task == "segmentation":
        return references.masks_of(path, files)
    if predictor.task == "classification":
        return references.labels_of(path, files, predictor.classes, columns)

    vectors = references.vectors_of(path, files, predictor.classes, predictor.task, columns)
    if predictor.kind.decides:
        return vectors

    # like the network's outputs, by which numbers are in their unit
    mean, sd = scale_of(predictor.metadata, len(predictor.classes))
    return map_values(lambda row: tuple(((torch.tensor(row) - mean) / sd).tolist()), vectors)


_Outcome = tuple[Prepared, list[Masks | None] | Cases]


@dataclass(frozen=True)
class _Writer:
    """Predicts image after image, and writes masks as they are produced."""

    predictor: Predictor
    files: Mapping[str, str]
    targets: Mapping[str, Reference]
    folder: Path
    predictions: Predictions = field(default_factory=Predictions)

    @cached_property
    def mask_paths(self) -> dict[str, Path]:
        """Id -> path of its mask below the folder, without extension."""
        return _mask_paths(self.files)

    def write(self, progress: bool) -> Predictions:
        """Predict every image; the errors of those that fail are among the predictions."""
        with terminal.bar(
            total=len(self.files), desc="predicting", unit="image", shown=progress
        ) as bar:
            for idents in self._groups():
                group = pick(self.files, idents)
                for prepared, outcome in self._outcomes(group, self.targets):
                    self._take(prepared, outcome)

                bar.update(len(idents))

        # images that failed in a batch come after the rest of it
        self.predictions.rows = pick_known(self.predictions.rows, self.files)
        return self.predictions

    def _groups(self) -> Iterator[Sequence[str]]:
        """Yield the ids of images that are read together: few enough for memory, whatever their size."""
        evaluator = self.predictor.evaluator
        if isinstance(evaluator, VectorEvaluator):
            # full batches, so that all but the last equal those of a run
            size = evaluator.batch_size * math.ceil(_PICTURES / evaluator.batch_size)
            yield from _batched([*self.files], size)
            return

        pictures = []
        for ident, uri in self.files.items():
            if os.path.isdir(uri) or is_volume(uri):
                yield (ident,)
            else:
                pictures.append(ident)

        yield from _batched(pictures, _PICTURES)

    def _outcomes(
        self, files: Mapping[str, str], targets: Mapping[str, Reference]
    ) -> Iterator[_Outcome]:
        """Yield the outcomes of images; an image that fails with its reference is predicted without it."""
        labels = pick_known(targets, files)
        try:
            outcome = self._judged(files, labels)
        except Exception as error:  # a bundle's own transforms, inferer and network raise anything
            yield from self._apart(files, labels, error)
            return

        yield outcome

    def _apart(
        self, files: Mapping[str, str], labels: Mapping[str, Reference], error: Exception
    ) -> Iterator[_Outcome]:
        """Retry a failed batch: the readable images together, the rest one by one."""
        if len(files) > 1:
            together = {}
            alone = []
            for ident, uri in files.items():
                if self._is_read(ident, uri, labels):
                    together[ident] = uri
                else:
                    alone.append({ident: uri})

            # all are readable: the network fails on one, and only single images show which
            if not alone:
                alone = [{ident: uri} for ident, uri in files.items()]
                together = {}

            if together:
                yield from self._outcomes(together, labels)

            for part in alone:
                yield from self._outcomes(part, labels)

            return

        (ident,) = files
        self.predictions.failed[ident] = self._one_channel(ident) or _explained(error)
        if labels:
            yield from self._outcomes(files, {})

    def _one_channel(self, ident: str) -> InputError | None:
        """Return the error for a file that is a single channel of a multi-channel image, recognised by its name."""
        count = new_images.channels_of(self.predictor.metadata)
        uri = self.files[ident]
        if count < 2 or not is_channel(ident) or not is_volume(uri):
            return None
        if not self._is_read(ident, uri, {}) or len(read_volume(uri)) > 1:
            return None

        return InputError(
            f"{ident} is one channel",
            f"{count} channels an image: one file of them, or NAME_0000, NAME_0001, ... beside each other",
            "give the others too",
        )

    def _is_read(self, ident: str, uri: str, labels: Mapping[str, Reference]) -> bool:
        try:
            self._read({ident: uri}, labels)
        except Exception:  # reported when the image is predicted alone
            return False
        return True

    def _read(self, files: Mapping[str, str], labels: Mapping[str, Reference]) -> Prepared:
        predictor = self.predictor
        return new_images.of_files(
            predictor.transforms, predictor.task, files, labels, len(predictor.classes)
        )

    def _judged(self, files: Mapping[str, str], labels: Mapping[str, Reference]) -> _Outcome:
        predictor = self.predictor
        prepared = self._read(files, labels)
        shard = Shard.of(prepared, range(len(prepared)))
        evaluator = predictor.evaluator
        labelled = [index for index, ident in enumerate(files) if ident in labels]

        if isinstance(evaluator, VectorEvaluator):
            cases = evaluator(predictor.network, shard, predictor.device)
            cases = predictor.kind.decided_by(cases, predictor.thresholds)
            outputs = cases.values.get("probabilities", cases.values.get("prediction"))
            if outputs is None or not outputs.isfinite().all():
                raise InputError(
                    "the network's outputs are no numbers",
                    "finite outputs",
                    "check image and network",
                )

            if labelled:
                scored = cases.select(labelled)
                if predictor.own_inputs is not None:
                    evaluator = replace(evaluator, metric_inputs=predictor.own_inputs)
                    part = Shard.of(prepared, labelled)
                    more = evaluator(predictor.network, part, predictor.device)
                    scored = Cases(scored.ids, {**more.values, **scored.values})

                self.predictions.cases.append(scored)

            return prepared, cases

        # all before any is written: a batch fails as a whole, and is then retried one by one
        masks = [*evaluator.masks(predictor.network, shard, predictor.device)]
        for ident, mask in zip(files, masks, strict=True):
            if mask is None:
                raise InputError(
                    f"the structures of {ident} overlap",
                    "a mask has one value a pixel",
                    "run it by MONAI",
                )

        if len(prepared.geometry) != len(prepared):
            raise InputError(
                "the bundle's transforms do not say where an image's pixels lie in its file",
                "they keep the image's metadata (original_affine, spatial_shape) and draw nothing",
                "let them read images with LoadImaged and keep track_meta",
            )

        if labelled:
            part = Shard.of(prepared, labelled)
            cases = evaluator(
                predictor.network, part, predictor.device, surface_metrics=predictor.surface_metrics
            )
            self.predictions.cases.append(Cases(cases.ids, without(cases.values, ["loss"])))
            self.predictions.units |= {unit(prepared.geometry[index]) for index in labelled}

        return prepared, masks

    def _take(self, prepared: Prepared, outcome: list[Masks | None] | Cases) -> None:
        idents = prepared.ids(range(len(prepared)))
        if isinstance(outcome, Cases):
            for index, ident in enumerate(idents):
                self.predictions.rows[ident] = self._row(outcome, index, ident)

            return

        for index, (ident, masks) in enumerate(zip(idents, outcome, strict=True)):
            assert masks is not None
            geometry = prepared.geometry[index]
            mask = save_masks.to_original(masks.prediction, geometry)
            path = self.folder / self.mask_paths[ident]
            values = mask_values(self.predictor.metadata)
            with made(path.parent):
                written = save_masks.write(mask, masks.classes, geometry, path, values)
            amounts = _amounts(mask, masks.classes, geometry, self.predictor.classes)
            row = {"id": ident, "mask": written.relative_to(self.folder).as_posix(), **amounts}
            self.predictions.rows[ident] = row
            if self.predictor.rule is not None:
                # a mask of everything is uninformative
                row["abstain"] = int((masks.prediction > 0).all())

    def _row(self, cases: Cases, index: int, ident: str) -> Record:
        """Return the row of predictions.csv of a case without mask and ground truth."""
        predictor = self.predictor
        names = predictor.classes
        if predictor.task == "classification":
            row = _class_row(ident, cases.values["probabilities"][index].tolist(), names)
        else:
            cells = predictor.kind.row(cases, index, names, "")
            predicted = {
                name: str(cell) for name, cell in cells.items() if not name.startswith(_TRUE)
            }
            row = {"id": ident, **parse_row(predicted)}

        if predictor.rule is not None:
            row |= predictor.kind.set_row(cases, index, names, predictor.rule)

        return row


def _batched(idents: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (idents[start : start + size] for start in range(0, len(idents), size))


def _names(classes: tuple[str, ...], count: int) -> Sequence[str]:
    """Return the names of a network's outputs; numbers if a third-party bundle's names do not match their count."""
    if len(classes) == count:
        return classes

    return [f"class {index}" for index in range(count)]


def _class_row(ident: str, probabilities: list[float], classes: tuple[str, ...]) -> Record:
    names = _names(classes, len(probabilities))
    row: Record = {"id": ident, "prediction": names[probabilities.index(max(probabilities))]}
    for name, probability in zip(names, probabilities, strict=True):
        # a float32 has nine significant digits
        row[name] = float(f"{probability:.9g}")

    return row


def _amounts(mask: Bytes, count: int, geometry: Geometry, classes: tuple[str, ...]) -> Metrics:
    """Return the amount of each structure in an image: millilitres, or for a picture the share of its pixels."""
    pixels = np.bincount(mask.ravel(), minlength=count).tolist()
    # the determinant of the affine's linear part is a voxel's volume, in cubic millimetres
    voxel = 0.0
    if mask.ndim == 3:
        voxel = abs(float(np.linalg.det(geometry.original_affine[:3, :3]))) / _CUBIC_MM

    amounts = {}
    # the first is the background, which has no amount
    for name, number in list(zip(_names(classes, count), pixels, strict=True))[1:]:
        if mask.ndim == 3:
            amounts[f"{name}_ml"] = float(f"{number * voxel:.6g}")
        else:
            amounts[f"{name}_share"] = float(f"{number / mask.size:.6g}")

    return amounts


def _mask_paths(files: Mapping[str, str]) -> dict[str, Path]:
    """Return id -> path of its mask below the folder, without extension: readable and unique."""
    times = Counter(without_ending(ident).casefold() for ident in files)
    taken = set()
    paths = {}
    for ident in files:
        # "a.png" and "a.nii.gz" in one folder would have the same mask
        bare = without_ending(ident)
        parts = PurePosixPath(bare if times[bare.casefold()] == 1 else ident).parts
        *above, name = (readable_file_name(part) for part in parts if part != "/")
        path = Path(*(_OUTPUT.sub("%2E", folder) for folder in above), name)

        if len(str(path)) > _LONGEST:
            path = Path(readable_file_name(ident))

        number = 1
        numbered = path
        # some file systems do not distinguish A.png from a.png
        while numbered.as_posix().casefold() in taken:
            number += 1
            numbered = path.with_name(f"{path.name}-{number}")

        taken.add(numbered.as_posix().casefold())
        paths[ident] = numbered

    return paths


def _no_prediction_error(count: int, error: Exception) -> InputError:
    """Return the error that says why no image could be predicted, based on the first failure."""
    images = f"none of the {count} images can"
    if count == 1:
        images = "the one image cannot"

    if isinstance(error, InputError):
        problem, allowed, advice = error._parts
    else:
        problem = _problem(error)
        allowed = "images like those that the network was trained on"
        advice = "give such images"

    return InputError(f"{images} be predicted: {problem}", allowed, advice)


def _explained(error: Exception) -> Exception:
    """Return an error, replaced if a network needs other prompts than images."""
    cause: BaseException | None = error
    while cause is not None:
        # MONAI wraps errors of transforms, so the cause is deeper
        if isinstance(cause, KeyError) and "image" not in str(cause):
            return InputError(
                f"the bundle's transforms ask for {cause} beside each image",
                "images alone are predicted, without labels, points or boxes that prompt the network",
                "run it by MONAI",
            )

        cause = cause.__cause__

    return error


def _problem(error: Exception) -> str:
    """Describe in one line what is wrong."""
    if isinstance(error, MedflError):
        return str(error)

    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _document(
    predictor: Predictor,
    files: Mapping[str, str],
    predictions: Predictions,
    folder: Path,
    targets: Mapping[str, Reference],
) -> Document:
    """Write the tables, the predictions last, and return everything for JSON."""
    table = RunFolder(folder)
    written = {"predictions": str(folder / PREDICTIONS)}
    scores = None
    structures = None
    without = {}
    scored = 0

    if predictions.cases:
        cases = Cases.concat(predictions.cases)
        scores = {**predictor.summarise(cases)}
        scored = len(cases)
        names = list(cases.values)
        if cases.reference is not None:
            names = ["auroc" if "probabilities" in cases.values else "mae"]

        for name in names:
            if why := undefined.reason(name, scores, cases):
                without[name] = why

        structures = predictor.kind.by_name(scores, cases, predictor.classes) or None

        lines = [{"metric": name, "value": value} for name, value in scores.items()]
        table.write_table(SCORES, lines)
        table.write_table(BY_CASE, _by_case(cases, predictions, predictor))
        written |= {"scores": str(folder / SCORES), "scores_by_case": str(folder / BY_CASE)}

    # last: a folder without it is unfinished
    table.write_table(PREDICTIONS, [*predictions.rows.values()])
    failed = []
    for ident, error in predictions.failed.items():
        failed.append({"id": ident, "file": files[ident], "problem": _problem(error)})

    units = {}
    for name in scores or ():
        if is_distance(name):
            units[name] = " or ".join(sorted(predictions.units))

    return {
        "model": predictor.title,
        "task": predictor.task,
        "classes": [*predictor.classes],
        "data_source": predictor.data_source,
        "out": str(folder),
        "images": len(files),
        "files": written,
        "predictions": [*predictions.rows.values()],
        "failed": failed,
        "scores": scores,
        "undefined": without,
        "structures": structures,
        "scored": scored,
        "with_reference": len(targets),
        "units": units,
    }


def _by_case(cases: Cases, predictions: Predictions, predictor: Predictor) -> list[Record]:
    rows = []
    for index, ident in enumerate(cases.ids):
        row: Record = {"id": ident}
        rows.append(row)
        if cases.is_classification:
            row["label"] = predictor.classes[int(cases.values["label"][index])]
            row["prediction"] = predictions.rows[ident]["prediction"]
            continue

        if cases.reference is not None:
            row |= predictor.kind.row(cases, index, predictor.classes, "")
            continue

        for name, numbers in cases.values.items():
            value = float(numbers[index])
            # a structure missing from the image has no score
            if not math.isnan(value):
                row[name] = value

    return rows
