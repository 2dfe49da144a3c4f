"""A trained network that predicts new images: from a run folder, or a MONAI bundle with weights."""

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
from medfl.core import (
    OF_VECTORS,
    SURFACE_METRICS,
    Config,
    InputError,
    Print,
    either,
    is_plain_text,
    printable,
    slug,
    type_errors,
)
from medfl.data import allow_missing_labels
from medfl.evaluation import (
    CaseEvaluator,
    Cases,
    ClassEvaluator,
    Evaluator,
    MaskEvaluator,
    Rule,
    VectorEvaluator,
    summarise,
    surface_metrics_of,
)
from medfl.evaluation.evaluators import OwnValues
from medfl.policy import admission
from medfl.problem import LARGEST_COMPONENT, Problem, channel_names
from medfl.problem.described import largest_components
from medfl.problem.tasks import KINDS
from medfl.problem.tasks.kind import Kind
from medfl.problem.tasks.multilabel import FindingEvaluator
from medfl.problem.tasks.regression import NumberEvaluator
from medfl.runs.networks_of_run import RunNetworks
from medfl.runs.plan import device_named
from medfl.storage import ALL_SITES, check_which, is_run
from medfl.storage.places import CALIBRATION
from medfl.storage.run_documents import read_calibration


@dataclass(frozen=True, eq=False)
class Predictor:
    """A network, how its images are read, and how its outputs are evaluated.

    Attributes:
        title: description for the user.
        task: its kind.
        classes: names in label order, of findings or of numbers; for segmentation of a mask's values or channels.
        network: on its device, in evaluation mode.
        transforms: data list entry -> {"image": (C, H, W[, D]), ...}; entries may lack a label.
        open_places: allows the transforms to read files that a user named.
        evaluator: as in the run, for masks without the loss.
        metadata: of the bundle, which describes its images.
        data_source: of its training images: real, phantom, or "" if unknown.
        surface_metrics: surface metrics computed for masks.
        threads: number used, None for PyTorch's default.
        tf32: as in the run.
        thresholds: of each finding, () for other tasks.
        rule: by which sets, intervals or masks are made, None where nothing was calibrated.
        own_inputs: what the bundle's own metric takes, None where medfl's choose the best round.
        summarise: cases -> metrics, the bundle's own among them.
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
    own_inputs: OwnValues | None = None
    summarise: Callable[[Cases], Mapping[str, float]] = summarise

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
    calibrated: bool,
) -> Predictor:
    """Open a run folder, or a MONAI bundle with weights; same arguments as `medfl.runs.predict.predict`.

    Raises:
        InputError: it is neither, has no weights yet, no such model, or is a bundle that inspection refuses.
    """
    path = Path(where).expanduser()
    placed = torch.device(device_named(device))
    check_which(which)
    if is_run(path):
        return _checked(_of_run(path, which, site, placed, say, calibrated))

    file = path / "docs" / CALIBRATION
    document = read_calibration(file) if calibrated and file.is_file() else None
    if (site is not None and document is None) or which != "last":
        raise InputError(
            f"--site or --which with the bundle {path}", "a bundle has one model", "leave it out"
        )

    opened = open_inference(
        path, admission.in_force(), placed, ("safetensors", "pt", "ts"), f"bundle {path.name!r}"
    )
    predictor = _of_bundle(opened, path, placed)
    if document is not None:
        # thresholds of other weights promise nothing
        fits = opened.sha256 == document["weights_sha256"]
        predictor = _with_rule(predictor, document if fits else None, site, say)

    return _checked(predictor)


def _with_rule(
    predictor: Predictor, document: Config | None, site: str | None, say: Print
) -> Predictor:
    """Return a predictor that makes sets by a calibration of this model, if there is one; report which."""
    if document is None or document["task"] != predictor.task:
        say(f"note: {CALIBRATION} is of another model, and left out: run medfl calibrate again")
        return predictor

    name = site or document["site"] or ALL_SITES
    way = "pooled" if name == ALL_SITES else document["share"]
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
        # masks are enlarged instead of listed: a set of masks would be unreadable
        # of these the coverage is promised, not of their largest components
        evaluator = replace(evaluator, background_limit=threshold, largest=())

    return replace(predictor, rule=rule, evaluator=evaluator)


def _checked(predictor: Predictor) -> Predictor:
    """Return a predictor whose classes, as checked, can be columns of predictions.csv and whose weights are valid."""
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
        # Anything but tensors is a module's extra state
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

    # a site may be called so
    if site == "all" and site not in networks.sites:
        raise InputError(
            "--site all",
            "the model of one site predicts",
            f"name one of {either(networks.sites)}",
        )

    if task.kind not in (*OF_VECTORS, "segmentation"):
        raise InputError(
            f"the model of {path}, a {task.kind} task",
            "classes, findings, numbers or masks are predicted",
            "run its own inference by MONAI",
        )

    (model,) = networks.models(site, None, say)
    if not networks.finished:
        say(
            f"note: the run in {path} was interrupted: this is round {networks.round} of {run.rounds}"
        )

    evaluator = evaluator_of(networks, bundle, site)
    assert isinstance(evaluator, VectorEvaluator | MaskEvaluator | CaseEvaluator)
    # new images have no reference that a loss, or the bundle's metric, could be of
    if isinstance(evaluator, MaskEvaluator | NumberEvaluator):
        evaluator = replace(evaluator, loss=_no_loss)
    own_inputs = None
    if isinstance(evaluator, VectorEvaluator):
        own_inputs = evaluator.metric_inputs
        evaluator = replace(evaluator, metric_inputs=None)

    structures = bundle.structures if task.kind == "segmentation" else None
    whose = f"the model of site {site}" if site else "the global model"
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
        own_inputs=own_inputs,
        summarise=bundle.summarise if own_inputs else summarise,
    )
    if not calibrated:
        return predictor

    calibration = networks.files.calibration(which, "personal" if site else "global")
    return _with_rule(predictor, calibration, threshold_site, say)


def evaluator_of(networks: RunNetworks, bundle: Problem, site: str | None) -> Evaluator:
    """Return the evaluator of a model, which keeps the largest components that the run decided to keep."""
    evaluator = bundle.evaluator
    if not (isinstance(evaluator, MaskEvaluator) and evaluator.compares):
        return evaluator

    decided = _recorded(networks, site, LARGEST_COMPONENT).items()
    largest = [name for name, value in decided if float(value or 0)]
    return replace(evaluator, largest=largest, compares=False)


def _recorded(networks: RunNetworks, site: str | None, key: str) -> dict[str, str | float | None]:
    """Return what a finished run recorded under a key for each finding or structure, None where it did not."""
    # in a run judged by personal models, the global one's scores stand apart
    summary = networks.summary.get("global") or networks.summary
    of_round = (summary.get(networks.which) or {}).get("classes") or {}
    row: Mapping[str, str] = {}
    # sites.csv is of the last round
    if site and networks.which == "last" and networks.finished:
        row = next((row for row in networks.files.sites if row["site"] == site), row)

    values = {}
    for name in (*networks.task.classes, *of_round):
        values[name] = (of_round.get(name) or {}).get(key)
        if site:
            values[name] = row.get(f"personal_{key}_{slug(name)}")

    return values


def thresholds_of(networks: RunNetworks, site: str | None, say: Print) -> tuple[float, ...]:
    """Return the threshold of each finding that the run chose on its validation images, () for other tasks.

    If there is none, it is 0.5, which is reported: for an interrupted run, or a site's model of the best round.
    """
    if not KINDS[networks.task.kind].decides:
        return ()

    chosen = _recorded(networks, site, "threshold")
    without = [name for name, value in chosen.items() if value is None]
    if without:
        say(
            f"note: this run has no thresholds of {', '.join(without)} for this model: 0.5 decides what is present"
        )

    return tuple(0.5 if value is None else float(value) for value in chosen.values())


def _of_bundle(opened: Inference, path: Path, device: torch.device) -> Predictor:
    meta = opened.described
    classes = opened.classes
    if not classes:
        raise InputError(
            f"configs/metadata.json of bundle {path} names no classes",
            "network_data_format#outputs#pred#channel_def says what the network's outputs are",
            "add it",
        )

    # written by `medfl export` beside MONAI's entries
    entry = meta.get("medfl")
    exported = entry if isinstance(entry, Mapping) else {}
    task = opened.task
    thresholds: tuple[float, ...] = ()
    evaluator: VectorEvaluator | MaskEvaluator = ClassEvaluator()
    if exported.get("task") in ("multilabel", "regression"):
        task = exported["task"]

    if task == "multilabel":
        classes = channel_names(meta)
        evaluator = FindingEvaluator()
        values = exported.get("thresholds", ())
        # the file may come from anybody
        if any(type_errors(exported, {"thresholds": list[float]})) or len(values) != len(classes):
            values = (0.5,) * len(classes)

        thresholds = tuple(values)
    elif task == "regression":
        classes = channel_names(meta)  # a single output is not background and structure
        evaluator = NumberEvaluator(_no_loss, meta)
    elif task == "segmentation":
        if opened.sigmoid and len(classes) > 2:
            raise InputError(
                f"bundle {path}: {opened.sigmoid} takes the sigmoid of {len(classes)} outputs",
                "classes that exclude each other, by softmax",
                "run it by MONAI: python -m monai.bundle run --config_file configs/inference.json",
            )

        evaluator = MaskEvaluator(
            _no_loss, classes, opened.inferer, _tolerance(path), largest=largest_components(meta)
        )

    chain = allow_missing_labels((opened.config.evaluated("preprocessing"),))
    title = (
        f"bundle {path} ({meta.get('name') or path.name}, version {meta.get('version', 'unknown')})"
    )
    return Predictor(
        title,
        task,
        classes,
        opened.network,
        chain,
        opened.config.open_places,
        evaluator,
        device,
        meta,
        str(exported.get("data_source", "")),
        thresholds=thresholds,
    )


def _tolerance(path: Path) -> float:
    """Return the bundle's tolerance of the surface Dice, 1 by default."""
    train = config_file(path, "train")
    tolerance = read(train).get("surface_tolerance") if train else None
    return float(tolerance) if isinstance(tolerance, int | float) else 1.0


def _no_loss(prediction: object, target: object) -> Tensor:
    """Return no loss: only outputs of new images are evaluated."""
    return torch.tensor(torch.nan)
