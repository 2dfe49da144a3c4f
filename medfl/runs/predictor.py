"""A trained network that predicts new images: that of a run's folder, or of a MONAI bundle with weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from monai.transforms import Transform
from torch import Tensor, nn

from medfl import methods
from medfl.bundle import new_images
from medfl.bundle.files import config_file, read
from medfl.bundle.inference import Inference, open_inference
from medfl.core.documents import Config
from medfl.core.errors import InputError
from medfl.core.names import is_plain_text, slug
from medfl.core.setting_values import SURFACE_METRICS
from medfl.core.task import OF_VECTORS
from medfl.core.terminal import Print
from medfl.core.type_checks import type_errors
from medfl.core.untrusted import printable
from medfl.data.samples import allow_missing_labels
from medfl.evaluation.conformal import Rule
from medfl.evaluation.evaluators import CaseEvaluator, ClassEvaluator, MaskEvaluator
from medfl.evaluation.mask_metrics import surface_metrics_of
from medfl.policy import admission
from medfl.problem.described import channel_names
from medfl.problem.tasks import KINDS
from medfl.problem.tasks.kind import Kind
from medfl.problem.tasks.multilabel import FindingEvaluator
from medfl.problem.tasks.regression import NumberEvaluator
from medfl.runs.networks_of_run import RunNetworks
from medfl.runs.plan import device_named
from medfl.storage.files import file_sha256
from medfl.storage.places import CALIBRATION, check_which, is_run
from medfl.storage.run_documents import ALL_SITES, read_calibration

VectorEvaluator = ClassEvaluator | FindingEvaluator | NumberEvaluator


@dataclass(frozen=True, eq=False)
class Predictor:
    """A network, and how its images are read and its outputs judged.

    Attributes:
        title: what it is, for the user.
        task: its kind.
        classes: names in label order, of findings or of numbers; in segmentation of a mask's values or channels.
        network: on its device, in evaluation mode.
        transforms: data list entry -> {"image": (C, H, W[, D]), ...}; entries may lack a label.
        open_places: lets the transforms read files that a user named.
        evaluator: what scored the run, of masks without the loss.
        metadata: of the bundle, which says what its images are.
        data_source: of its training images: real, phantom, or "" where it is not known.
        surface_metrics: the metrics of surfaces that masks are scored by.
        threads: that it computes with, None for as many as PyTorch takes.
        tf32: as the run had it.
        thresholds: of each finding, () for other tasks.
        rule: by which sets, intervals or masks are made, None where nothing was calibrated.
    """

    title: str
    task: str
    classes: tuple[str, ...]
    network: nn.Module
    transforms: Transform
    open_places: Callable[[Iterable[str]], None]
    evaluator: VectorEvaluator | MaskEvaluator | CaseEvaluator
    device: torch.device
    metadata: Config
    data_source: str
    surface_metrics: tuple[str, ...] = SURFACE_METRICS
    threads: int | None = None
    tf32: bool = False
    thresholds: tuple[float, ...] = ()
    rule: Rule | None = None

    @property
    def kind(self) -> Kind:
        """The kind of its task."""
        return KINDS[self.task]


def open_predictor(
    where: str | Path,
    which: str,
    site: str | None,
    device: str,
    say: Print,
    calibrated: bool = True,
) -> Predictor:
    """Open a run's folder, or that of a MONAI bundle with weights; arguments are as of `medfl.runs.predict.predict`.

    Raises:
        InputError: it is neither, has no weights yet, no such model, or a bundle that inspection refuses.
    """
    path = Path(where).expanduser()
    placed = torch.device(device_named(device))
    check_which(which)
    if is_run(path):
        return _checked(_of_run(path, which, site, placed, say, calibrated))

    file = path / "docs" / CALIBRATION
    if calibrated and file.is_file():
        document = read_calibration(file)
    else:
        document = None

    if (site is not None and document is None) or which != "last":
        raise InputError(
            f"--site or --which with the bundle {path}", "a bundle has one model", "leave it out"
        )

    predictor = _of_bundle(path, placed)
    if document is not None:
        weights = path / "models" / "model.safetensors"
        fits = weights.is_file() and file_sha256(weights) == document["weights_sha256"]
        predictor = _with_rule(predictor, document if fits else None, site, say)

    return _checked(predictor)


def _with_rule(
    predictor: Predictor, document: Config | None, site: str | None, say: Print
) -> Predictor:
    """Return a predictor that makes sets by what `medfl calibrate` wrote, None of another model; says which."""
    if document is None or document["task"] != predictor.task:
        say(f"note: {CALIBRATION} is of another model, and left out: run medfl calibrate again")
        return predictor

    name = site or document["site"] or ALL_SITES
    if name == ALL_SITES:
        way = "pooled"
    else:
        way = document["share"]

    rows = [row for row in document["rows"] if (row["name"], row["way"]) == (name, way)]
    if not rows or "threshold" not in rows[0]:
        raise InputError(
            f"--site {name}",
            f"a site that {CALIBRATION} has a threshold of",
            "name one, leave it out, or add --uncalibrated",
        )

    threshold = float(rows[0]["threshold"])
    say(
        f"note: coverage {document['coverage']:g} is promised of {document['promise']} ({way}, threshold "
        f"{threshold:.4g}); --uncalibrated leaves it out"
    )
    rule = Rule(threshold, document["scores"], tuple(document["scale"]))
    evaluator = predictor.evaluator
    if isinstance(evaluator, MaskEvaluator):
        evaluator = replace(evaluator, background_limit=threshold)

    return replace(predictor, rule=rule, evaluator=evaluator)


def _checked(predictor: Predictor) -> Predictor:
    """Return a predictor whose classes can be columns of predictions.csv, and whose weights say something."""
    for name in predictor.classes:
        if (
            not is_plain_text(name)
            or name in ("id", "prediction")
            or (predictor.rule and name in ("set", "abstain"))
            or predictor.classes.count(name) > 1
        ):
            raise InputError(
                f"{predictor.title}: the class {printable(name)!r}",
                "names that differ, in one line, no formula of a spreadsheet, and not id or prediction",
                "rename it",
            )

    for name, value in predictor.network.state_dict().items():
        # What is no tensor is a module's extra state
        if isinstance(value, Tensor) and not value.isfinite().all():
            raise InputError(
                f"{predictor.title}: its weights {name!r} are not finite",
                "numbers",
                "train it again",
            )

    return predictor


def _of_run(
    path: Path,
    which: str,
    site: str | None,
    device: torch.device,
    say: Print,
    calibrated: bool,
) -> Predictor:
    networks = RunNetworks(path, which, say)
    calibrated = calibrated and networks.files.promised is not None
    threshold_site = site
    if calibrated and not methods.has_site_models(networks.method):
        site = None  # it names a threshold: all sites have one model
    run = networks.run
    bundle = networks.bundle
    task = networks.task

    if site == "all" and site not in networks.sites:
        raise InputError(
            "--site all",
            "the model of one site predicts",
            f"name one of {', '.join(networks.sites)}",
        )

    if task.kind not in (*OF_VECTORS, "segmentation"):
        arguments = f"the model of {path}, a {task.kind} task"
        raise InputError(
            arguments,
            "classes, findings, numbers or masks are predicted",
            "run its own inference by MONAI",
        )

    (model,) = networks.models(site, None, say)
    if not networks.finished:
        say(
            f"note: the run in {path} was interrupted: this is round {networks.round} of {run.rounds}"
        )

    evaluator = bundle.evaluator
    assert isinstance(evaluator, VectorEvaluator | MaskEvaluator | CaseEvaluator)
    if isinstance(evaluator, MaskEvaluator | NumberEvaluator):
        evaluator = replace(evaluator, loss=_no_loss)
    if isinstance(evaluator, FindingEvaluator | NumberEvaluator):
        evaluator = replace(evaluator, metric_inputs=None)

    if task.kind == "segmentation":
        structures = bundle.structures
    else:
        structures = None

    if site:
        whose = f"the model of site {site}"
    else:
        whose = "the global model"

    predictor = Predictor(
        f"{whose} of {path} ({run.method} on {run.bundle}, round {model.round})",
        task.kind,
        task.classes if structures is None else structures,
        model.network.to(device).eval(),
        new_images.transforms_of(bundle),
        bundle.open_places,
        evaluator,
        device,
        bundle.metadata,
        run.data.source,
        surface_metrics_of(run.metrics, structures),
        run.threads,
        run.tf32,
        thresholds_of(networks, site, say),
    )
    if not calibrated:
        return predictor

    calibration = networks.files.calibration(which, "personal" if site else "global")
    return _with_rule(predictor, calibration, threshold_site, say)


def thresholds_of(networks: RunNetworks, site: str | None, say: Print) -> tuple[float, ...]:
    """Return the threshold of each finding that the run chose on its validation images, () for other tasks.

    Where it has none, it is 0.5, which is said: of an interrupted run, or of a site's model of the best round.
    """
    task = networks.task
    if not KINDS[task.kind].decides:
        return ()

    if site is None:
        entry = ((networks.summary or {}).get(networks.which) or {}).get("classes") or {}
        chosen = {name: (entry.get(name) or {}).get("threshold") for name in task.classes}
    else:
        rows = [row for row in networks.files.sites if row["site"] == site]
        if rows and networks.which == "last" and networks.finished:
            row = rows[0]
        else:
            row = {}

        chosen = {name: row.get(f"personal_threshold_{slug(name)}") for name in task.classes}

    without = [name for name, value in chosen.items() if value is None]
    if without:
        say(
            f"note: this run has no thresholds of {', '.join(without)} for this model: 0.5 decides what is present"
        )

    return tuple(0.5 if value is None else float(value) for value in chosen.values())


def _of_bundle(path: Path, device: torch.device) -> Predictor:
    opened = open_inference(
        path, admission.in_force(), device, ("safetensors", "pt", "ts"), f"bundle {path.name!r}"
    )
    meta = opened.described
    classes = opened.classes
    if not classes:
        raise InputError(
            f"configs/metadata.json of bundle {path} names no classes",
            "network_data_format#outputs#pred#channel_def says what the network's outputs are",
            "add it",
        )

    entry = meta.get("medfl")
    if isinstance(entry, Mapping):
        exported = entry
    else:
        exported = {}

    task = opened.task
    thresholds: tuple[float, ...] = ()
    evaluator: VectorEvaluator | MaskEvaluator = ClassEvaluator()
    if exported.get("task") == "multilabel":
        task = "multilabel"
        classes = channel_names(meta)
        evaluator = FindingEvaluator()
        errors = [*type_errors(exported, {"thresholds": list[float]})]
        if errors:
            values = ()
        else:
            values = exported.get("thresholds", ())

        if len(values) == len(classes):
            thresholds = tuple(values)
        else:
            thresholds = (0.5,) * len(classes)

    elif exported.get("task") == "regression":
        task = "regression"
        classes = channel_names(meta)  # one output is no background and structure
        evaluator = NumberEvaluator(_no_loss, meta)
    else:
        _refuse_overlaps(opened, path)

    if task == "segmentation":
        evaluator = MaskEvaluator(_no_loss, classes, opened.inferer, _tolerance(path))

    chain = allow_missing_labels((opened.config.evaluated("preprocessing"),))
    title = (
        f"bundle {path} ({meta.get('name') or path.name}, version {meta.get('version', 'unknown')})"
    )
    open_places = opened.config.open_places
    network = opened.network

    source = str(exported.get("data_source", ""))
    return Predictor(
        title, task, classes, network, chain, open_places, evaluator, device, meta, source,
        thresholds=thresholds,
    )  # fmt: skip


def _refuse_overlaps(opened: Inference, path: Path) -> None:
    """Raise an InputError if the bundle reads its outputs as several findings at once, not as one class of all."""
    for key, node in [*opened.config.nodes("Activationsd"), *opened.config.nodes("Activations")]:
        if node.get("sigmoid") and len(opened.classes) > 2:
            raise InputError(
                f"bundle {path}: {key or 'its postprocessing'} takes the sigmoid of {len(opened.classes)} outputs",
                "classes that exclude each other, by softmax",
                "run it by MONAI: python -m monai.bundle run --config_file configs/inference.json",
            )


def _tolerance(path: Path) -> float:
    """Return the tolerance of the surface Dice that the bundle is scored with, 1 where it says none."""
    train = config_file(path, "train")
    if train:
        arguments = read(train).get("surface_tolerance", 1.0)
    else:
        arguments = 1.0

    if isinstance(arguments, int | float):
        return float(arguments)

    return 1.0


def _no_loss(prediction: object, target: object) -> Tensor:
    """Score no loss: new images are judged by what is seen of them."""
    return torch.zeros(())
