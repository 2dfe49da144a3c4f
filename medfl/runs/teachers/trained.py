"""Trained networks as teachers: the global model of a run, and any MONAI bundle with weights.

They are also a substitute if no foundation model is available. Each reads the public images with its own
pre-processing, that of its validation or inference: without augmentation, at its own size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from monai.data import MetaTensor
from monai.inferers import SimpleInferer
from torch import Tensor, nn

from medfl import methods
from medfl.bundle.bundle import shipped
from medfl.bundle.configuration import own_modules
from medfl.bundle.inference import open_inference
from medfl.bundle.open import bundle_of, reopened
from medfl.bundle.text_embeddings import unlike
from medfl.core import (
    SECTIONS,
    Config,
    InputError,
    Run,
    RunError,
    Task,
    Tensors,
    Weights,
    versions_of,
)
from medfl.data import SampleMaker, Shard, Source, Stacked
from medfl.datasets.readers.reading import files_of
from medfl.evaluation import ClassEvaluator, Foreign
from medfl.methods.base import Method
from medfl.policy.policy import Policy
from medfl.problem import Problem
from medfl.runs import text_record
from medfl.runs.initial_weights import first_file
from medfl.runs.teachers.questions import Questions, public_classes
from medfl.storage import file_sha256, load_weights, read_run, weights_sha256
from medfl.training.network_pool import Networks

_BATCH = 16
_WEIGHTS = ("best.safetensors", "weights.safetensors")
_INTERPOLATION = {2: "bilinear", 3: "trilinear"}


@dataclass(frozen=True, eq=False)
class Trained:
    """A network with its own way of reading images.

    For classification its output is interpreted as by `medfl.evaluation.evaluators.ClassEvaluator`, as logits; for
    segmentation as logits of one structure or of exclusive classes, background first.

    Attributes:
        network: on its device, in evaluation mode.
        preprocessing: data list entry -> {"image": (C, H, W[, D]), ...}.
        open_places: allows the pre-processing to read files of the public data.
        inferer: (inputs, network) -> outputs of whole images.
        ends_in_sigmoid: the network returns probabilities.
        learned: ids of the items that it was trained on, of the same data set as the public data.
        chosen_by: ids of those that selected its best round.
        remarks: further notes for the user.
    """

    name: str
    sha256: str
    facts: Config
    network: nn.Module
    device: torch.device
    preprocessing: Callable[[Foreign], Foreign]
    open_places: Callable[[Iterable[str]], None]
    inferer: Callable[..., Foreign]
    ends_in_sigmoid: bool = False
    learned: frozenset[str] = frozenset()
    chosen_by: frozenset[str] = frozenset()
    remarks: tuple[str, ...] = ()
    batch_size: int = _BATCH

    def notes(self, questions: Questions) -> list[str]:
        """Report how many of the items it was trained on: its outputs for these are optimistic."""
        notes = [*self.remarks]
        uses = {"was trained on": self.learned, "was chosen by its scores on": self.chosen_by}
        for use, ids in uses.items():
            count = sum(ident in ids for ident in questions.ids)
            if count:
                notes.append(
                    f"teacher {self.name} {use} {count} of the {len(questions)} public items: what it says of them is "
                    "optimistic"
                )

        return notes

    def answer(self, questions: Questions, positions: Sequence[int]) -> Tensor:
        """Return distributions over the classes (B, C), or logits of the foreground on the public grid."""
        images = self._images(questions, positions)
        # images of one size go through the network together
        batches = [image[None] for image in images]
        if len({image.shape for image in images}) == 1:
            batches = [torch.stack(images)]

        if questions.bundle.task == "classification":
            return torch.cat(list(map(self._distributions, batches)))
        return torch.cat([self._logits(x, questions.grid) for x in batches])

    def _images(self, questions: Questions, positions: Sequence[int]) -> list[Tensor]:
        entries = list(map(questions.entry, positions))
        items = [{"id": questions.ids[position]} for position in positions]
        places = []
        for value in _values_inside(entries):
            if isinstance(value, str | Path):
                places.append(str(value))

        # the teacher's transforms may read only the public items' own files
        self.open_places(files_of(places))
        samples = SampleMaker(items, Source(entries, (self.preprocessing,)))
        images = []

        for index, item in enumerate(items):
            sample = samples(index)
            image = sample.get("image") if isinstance(sample, Mapping) else None
            if not isinstance(image, Tensor):
                raise InputError(
                    f"teacher {self.name!r}: its pre-processing makes no image of public item {item['id']!r}",
                    "it takes {'image': FILE} and leaves a tensor in its place",
                    "let its pre-processing begin with LoadImaged of 'image' and end with a tensor",
                )

            if isinstance(image, MetaTensor):
                image = image.as_tensor()

            images.append(image.float())

        return images

    def _distributions(self, x: Tensor) -> Tensor:
        items = [{"id": str(i)} for i in range(len(x))]
        # the evaluator needs some; they are not read
        labels = torch.zeros(len(x), dtype=torch.int64)
        evaluator = ClassEvaluator(batch_size=max(1, len(x)), ends_in_sigmoid=self.ends_in_sigmoid)
        shard = Shard.of(Stacked(items, x, labels), range(len(x)))
        return evaluator(self.network, shard, self.device).values["probabilities"]

    def _logits(self, x: Tensor, grid: tuple[int, ...]) -> Tensor:
        logits = foreground(self.inferer(x.to(self.device), self.network).float())
        if tuple(logits.shape[1:]) == grid or len(grid) != logits.ndim - 1:
            return logits  # the caller refuses another number of dimensions

        mode = _INTERPOLATION[len(grid)]
        resized = nn.functional.interpolate(
            logits[:, None], size=grid, mode=mode, align_corners=False
        )
        return resized[:, 0]


def _values_inside(value: object) -> Iterator[object]:
    """Yield a value, or the contents of a container."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for member in value:
            yield from _values_inside(member)
    else:
        yield value


def foreground(logits: Tensor) -> Tensor:
    """Return the logit of "any structure" (B, H, W[, D]) from those of a network (B, K, H, W[, D]).

    A single channel is that logit; with more, softmax over them gives log(p_1 + ... + p_{K-1}) - log(p_0).
    """
    if logits.shape[1] == 1:
        return logits[:, 0]

    # the log-odds of not being background: log(sum of e^structures) - background
    return logits[:, 1:].logsumexp(1) - logits[:, 0]


# A run


def open_run(name: str, where: str, bundle: Problem, device: torch.device) -> Trained:
    """Open the global model in a run folder, of its best round if that was kept.

    Raises:
        InputError: there is no run or no global model, its bundle has changed, or it has other classes.
    """
    folder = Path(where).expanduser()
    run, document = read_run(folder / "run.json")
    run_bundle = bundle_of_run(run, folder, device, bundle.policy)
    task = str(document.get("task", run_bundle.task))
    classes = tuple(document.get("classes", ()))
    _refuse_others(name, task, classes or run_bundle.structures, bundle)
    stem, weights = _weights(folder)
    embeddings = run_bundle.embeddings
    network = _global_model(run_bundle, Task(task, classes, embeddings), weights, folder, run)
    evaluator = run_bundle.evaluator
    learned = _ids(run, run_bundle, bundle, "train")
    overlaps = {}
    for section in SECTIONS:
        ids = {str(item["id"]) for item in bundle.items(section)}
        overlaps[section] = len(ids & learned)

    # no scores selected the last weights
    chosen_by = frozenset[str]()
    if stem == "best":
        chosen_by = _ids(run, run_bundle, bundle, "validate")

    facts = {
        "kind": "run",
        "method": run.method,
        "bundle": run_bundle.name,
        "bundle_sha256": run_bundle.sha256,
        "config": run.config,
        "run_hash": run.run_hash,
        "weights": stem,
        "trained_on": run.data.source,
        "classes": list(public_classes(bundle)),
        "preprocessing": "validate#preprocessing of the run's bundle",
        "trained_on_public": overlaps,
        "versions": versions_of("torch", "monai"),
    }

    remarks: tuple[str, ...] = ()
    if run.data.source != "real":
        remarks = (f"teacher {name} was trained on drawn images, not on real ones",)

    return Trained(
        name,
        weights_sha256(weights),
        facts,
        network.eval(),
        device,
        run_bundle.get("validate#preprocessing"),
        run_bundle.open_places,
        getattr(evaluator, "inferer", SimpleInferer()),
        getattr(evaluator, "ends_in_sigmoid", False),
        learned,
        chosen_by,
        remarks,
    )


def bundle_of_run(
    run: Run,
    folder: Path,
    device: torch.device,
    policy: Policy | None = None,
    allow_changed: bool = False,
) -> Problem:
    """Return a recorded run's bundle without its data; InputError if it has changed since (`reopened`)."""
    data = {}
    # a shipped bundle finds its own data
    if bundle_of(run) not in shipped() and run.data.folder:
        data["dataset_dir"] = run.data.folder

    bundle = reopened(
        run, {**run.config, **data}, device, policy, folder=folder, allow_changed=allow_changed
    )
    return text_record.restored(bundle, run, methods.load(run.method, run.options), folder)


def _weights(folder: Path) -> tuple[str, Tensors]:
    path = first_file(folder, *_WEIGHTS)
    if path is None:
        raise InputError(
            f"the run in {folder} has no weights yet",
            f"a teacher has {' or '.join(_WEIGHTS)}",
            "let it finish: medfl run --resume --out DIR",
        )

    try:
        return path.stem, load_weights(path)
    except RunError as error:
        raise InputError(
            str(error), "weights that medfl wrote", "restore the file, or name another run"
        ) from error


def _global_model(
    bundle: Problem, task: Task, weights: Weights, folder: Path, run: Run
) -> nn.Module:
    """Return a run's network with its global weights."""
    if any(key.partition("/")[0] in run.partition.sites and "/" in key for key in weights):
        raise InputError(
            f"the run in {folder} has a model for each site (method {run.method}) and none for all",
            "a teacher is one global model",
            "name a run of another method, for example fedavg",
        )

    method = methods.load(run.method, run.options)
    try:
        return network_with(weights, bundle, method, task, run.seed)
    except ValueError as error:
        raise InputError(
            f"the weights in {folder} are no single network of method {run.method} on bundle {bundle.name!r} ({error})",
            "a teacher is one global model of the run's own network",
            "restore the file, or name another run",
        ) from error


def network_with(
    weights: Weights, bundle: Problem, method: Method, task: Task, seed: int
) -> nn.Module:
    """Return a run's network with these weights; tensors not among them (a fixed classifier) are drawn as in the run.

    Raises:
        ValueError: they belong to another network.
    """
    pool = Networks(lambda: method.adapt(bundle.network(), task), seed, bundle.device)
    return pool.lease(weights)


def _ids(run: Run, run_bundle: Problem, public: Problem, section: str) -> frozenset[str]:
    """Return the ids of a run's items in a section; none if its data set differs from the public one."""
    if run_bundle.source != public.source:
        return frozenset()

    return frozenset(run.partition.owners(section))


# Any bundle


def open_bundle(name: str, where: str, bundle: Problem, device: torch.device) -> Trained:
    """Open a MONAI bundle with weights: models/model.pt for its `network_def`, or else TorchScript in models/model.ts.

    Its inference configuration defines how images are read (`preprocessing`) and inferred (`inferer`), its metadata
    the output's channels.

    Raises:
        InputError: no such bundle or no weights in it, or other classes.
    """
    opened = open_inference(where, bundle.policy, device, ("pt", "ts"), f"teacher {name!r}")
    classes = opened.classes or public_classes(bundle)
    _refuse_others(name, opened.task if opened.classes else bundle.task, classes, bundle)
    facts = {
        "kind": "bundle",
        "bundle": opened.root.name,
        "version": str(opened.described.get("version", "")),
        "configuration_sha256": file_sha256(opened.file),
        "weights": opened.weights.name,
        "classes": list(classes),
        "preprocessing": "its inference configuration's",
        "versions": versions_of("torch", "monai"),
    }
    remarks: tuple[str, ...] = ()
    modules = own_modules(opened.root) if bundle.policy.runs_scripts else ()
    if modules:
        remarks = (f"teacher {name}: its own Python ({', '.join(sorted(modules))}) is run",)

    return Trained(
        name,
        opened.sha256,
        facts,
        opened.network,
        device,
        opened.config.evaluated("preprocessing"),
        opened.config.open_places,
        opened.inferer,
        remarks=remarks,
    )


# Both


def _refuse_others(name: str, task: str, classes: Sequence[str], bundle: Problem) -> None:
    """Raise an InputError if a teacher's task or classes differ from those of the public data, in order too."""
    if task != bundle.task:
        raise InputError(
            f"teacher {name!r}, a {task} model, for {bundle.name!r}, a {bundle.task} task",
            "teacher and public data have one task",
            f"name a teacher for {bundle.task}, or public data for {task}",
        )

    public_names = public_classes(bundle)
    if tuple(classes) != public_names:
        raise InputError(
            f"teacher {name!r} has other classes: {unlike(classes, public_names, 8)}",
            f"the public data {bundle.name!r} have {unlike(public_names, classes, 8)}",
            "name a teacher with the same classes in the same order",
        )
