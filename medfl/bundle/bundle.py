"""Bundle: a MONAI bundle, shipped or third-party, read as a problem: networks, data, loss and optimiser.

Everything is reached from the bundle's trainer (`train#trainer` or flat `trainer`) by following references, so both of
the zoo's styles work unmodified. Handlers are never created, since they write files; a trainer and an evaluator
only if the trainer has its own iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from monai.data import decollate_batch
from monai.utils import convert_to_tensor
from torch import Tensor, nn

from medfl.bundle import text_embeddings
from medfl.bundle.configuration import Configuration
from medfl.bundle.engines import find_schedule, find_trainer, key_metric, own_trainer_class, scoring
from medfl.bundle.files import (
    config_file,
    find,
    read_metadata,
    read_protocol as read_protocol,
    sha256_of,
    shipped as shipped,
    shipped_folders,
    shipped_root as shipped_root,
    ships_unchanged,
)
from medfl.bundle.sections import BundleSections, UnlabelledEntries
from medfl.bundle.zoo import compatibility, custom_trainer
from medfl.bundle.zoo.notes import notes
from medfl.core import (
    OF_VECTORS,
    InputError,
    RunError,
    as_text,
    root_cause,
    stream,
    version_of,
    without,
)
from medfl.data import DiskCache, budget
from medfl.data.prepare import sample_key
from medfl.evaluation import CaseEvaluator, Cases, ClassEvaluator, Evaluator, MaskEvaluator, title
from medfl.evaluation.evaluators import EpochMetric
from medfl.evaluation.metrics import IF_MISSING, WHOLE
from medfl.networks.initialisation import INIT_WEIGHTS, apply_init_weights
from medfl.policy import admission
from medfl.policy.inspection import TRAINING
from medfl.policy.policy import Policy
from medfl.problem import LARGEST_COMPONENT, Problem, Text, channel_names, mask_names
from medfl.problem.described import Config, Document
from medfl.problem.optimizers import OptimizerFactory
from medfl.problem.problem import LossFunction, Trial
from medfl.problem.prompts import read_text
from medfl.problem.sections import check_labels
from medfl.problem.tasks import check_task, told_by
from medfl.problem.tasks.kind import Kind
from medfl.problem.tasks.multilabel import FindingEvaluator
from medfl.problem.tasks.regression import NumberEvaluator
from medfl.storage import cache_folder
from medfl.training.site import mean_loss

# A third-party bundle's own key metric, computed on a whole set of cases as its evaluator computes it for an epoch

PREDICTION = "own_pred"
LABEL = "own_label"


@dataclass(frozen=True)
class OwnMetric:
    """An ignite metric over a list of {"pred", "label"}.

    Attributes:
        name: in results.
        metric: of ignite.
        postprocessing: dictionary transform over "pred" and "label", or None.
    """

    name: str
    metric: Any
    postprocessing: Callable[[Any], Any] | None

    @cached_property
    def _epoch(self) -> EpochMetric:
        return EpochMetric(self.name, self.metric)

    def postprocessed(self, prediction: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the metric's inputs for a batch, stacked: "own_pred" and "own_label" (B, ...).

        Raises:
            RunError: the bundle's postprocessing fails.
        """
        batch = decollate_batch({"pred": prediction, "label": target})
        try:
            if self.postprocessing is not None:
                batch = list(map(self.postprocessing, batch))

            # MONAI's metadata of an image are not sent
            predictions = torch.stack([convert_to_tensor(case["pred"]) for case in batch])
            labels = torch.stack([convert_to_tensor(case["label"]) for case in batch])
        except Exception as error:
            raise RunError(
                f"the bundle's postprocessing fails: {as_text(root_cause(error))}"
            ) from error

        return {PREDICTION: predictions.cpu(), LABEL: labels.cpu()}

    def of(self, cases: Cases) -> dict[str, float]:
        """Return {name: value}, {} if it is undefined on these cases."""
        if PREDICTION not in cases.values or not len(cases):
            return {}

        columns = zip(cases.values[PREDICTION], cases.values[LABEL], strict=True)
        try:
            value = self._epoch.of([{"pred": pred, "label": label} for pred, label in columns])
        except Exception as error:
            raise RunError(
                f"the bundle's metric {self.name!r} fails: {as_text(root_cause(error))}"
            ) from error

        return {} if math.isnan(value) else {self.name: value}


# The bundle

FindUnlabelled = Callable[["Bundle"], UnlabelledEntries]

_FORMER = {"trial": False, "scores": "medfl"}
"""Declared for shipped bundles of earlier releases, whose own federated.yaml lacks these keys."""


class Bundle(Problem):
    """A MONAI bundle with a trainer, supervised or with its own iteration.

    Its federated.yaml may declare two things. With `trial: false`, task, `in_channels` and class names are taken from
    the configuration, without a trial step. With `scores: medfl`, it is scored by medfl's own evaluator of the task.

    Args:
        name_or_path: a shipped bundle's name, or the folder of any MONAI bundle.
        config: overridden ids of the bundle's own configuration, as in `monai.bundle run` (`{"image_size": 28}`).
        device: of its networks.
        policy: what it may do beyond the default; None: the policy in force in `medfl.policy.admission`.
        known_as: the name of the shipped bundle whose earlier version the folder contains.

    Raises:
        InputError: no such bundle, one that inspection refuses, an id that does not exist, or a configuration without
            what federated training needs; names the id and the file.
    """

    root: Path
    sections: BundleSections

    def __init__(
        self,
        name_or_path: str,
        config: Config | None = None,
        device: torch.device | str = "cpu",
        policy: Policy | None = None,
        *,
        known_as: str = "",
    ) -> None:
        """Inspect the bundle unless it ships unchanged, and parse its configuration; nothing is evaluated yet."""
        root = find(name_or_path)
        policy = admission.in_force() if policy is None else policy
        if not ships_unchanged(root):
            admission.admit(root, policy, TRAINING)

        super().__init__(
            known_as or root.name,
            source=str(root),
            device=torch.device(device),
            dataset=root.name if root in shipped_folders().values() else known_as,
        )
        vars(self).update(root=root, policy=policy)
        self._open(_by_id(config or {}), None, {})

    def _open(
        self,
        overrides: Config,
        find_unlabelled: FindUnlabelled | None,
        embeddings: Mapping[str, tuple[Tensor, str]],
    ) -> None:
        """Parse the configuration with these overrides."""
        train = config_file(self.root, "train") or self.root / "configs" / "train.json"
        config = self._read(overrides, train)
        trainer = find_trainer(config)
        trainer_class = own_trainer_class(config, trainer)

        def with_evaluate() -> Configuration:
            """Read the training configuration with evaluate.* merged in, as MONAI runs the two."""
            evaluate = config_file(self.root, "evaluate")
            if evaluate:
                return self._read(overrides, train, evaluate)

            return config

        sections = BundleSections(
            self.root,
            trainer,
            config,
            with_evaluate,
            bool(trainer_class),
            partial(find_unlabelled, self) if find_unlabelled else None,
        )
        vars(self).update(
            custom_trainer=trainer_class,
            sections=sections,
            _validation_batch_size=sections.validation_batch_size,
            _overrides=overrides,
            _file=train,
            _config=config,
            _trainer=trainer,
            _find_unlabelled=find_unlabelled,
            _embeddings=dict(embeddings),
        )

    _overrides: Config
    _file: Path
    _config: Configuration
    _trainer: str
    _find_unlabelled: FindUnlabelled | None
    _embeddings: dict[str, tuple[Tensor, str]]
    _validation_batch_size: Callable[[], int]

    def variant(self, config: Config, find_unlabelled: FindUnlabelled | None = None) -> Bundle:
        """Return this bundle with further ids of its configuration overridden.

        Args:
            config: as for `Bundle`.
            find_unlabelled: finds training images without labels, if requested.
        """
        # not by its constructor: this bundle was inspected when opened, and nothing in its folder has changed
        bundle = Bundle.__new__(Bundle)
        parts = ("name", "source", "device", "dataset", "root", "policy", "start")
        vars(bundle).update({key: getattr(self, key) for key in parts})
        overrides = {**self._overrides, **_by_id(config)}
        bundle._open(overrides, find_unlabelled or self._find_unlabelled, self._embeddings)
        return bundle

    def open_places(self, paths: Iterable[Path | str]) -> None:
        """Let the validation transforms read files and folders that a user named."""
        self._config.open_places(paths)

    def get(self, key: str) -> Any:
        """Return the object of a configuration id.

        Raises:
            InputError: the id is missing, or the bundle's own expression fails; names id and cause.
        """
        return self._config.evaluated(key)

    def __contains__(self, key: str) -> bool:
        """Tell whether the configuration has an id."""
        return key in self._config

    def _read(self, overrides: Config, *files: Path) -> Configuration:
        config = without(overrides, [LARGEST_COMPONENT])
        return Configuration(self.root, files, config, self.metadata, self.device, self.policy)

    @cached_property
    def metadata(self) -> Config:  # type: ignore[override]
        """The content of metadata.json, empty if there is none."""
        return read_metadata(self.root)

    @cached_property
    def protocol(self) -> Config:  # type: ignore[override]
        """The content of federated.yaml, the defaults of a run; empty if there is none."""
        declared = read_protocol(str(self.root))
        if self.dataset and self.root not in shipped_folders().values():
            return {**_FORMER, **declared}

        return declared

    @cached_property
    def sha256(self) -> str:  # type: ignore[override]
        """Hash of the bundle's behaviour: configuration without overrides, class texts, embeddings, its own Python.

        Files of the bundle named in its configuration count too: weights of a searched network, lists, labels. Of
        federated.yaml only the class texts count: its other values are defaults, and a Run records those used.
        """
        return sha256_of(self.root, self.protocol)

    # Network, loss, optimiser

    def network(self) -> nn.Module:
        """Build the network anew; two calls share nothing."""
        if self.custom_trainer:
            return custom_trainer.CustomTrainer(self._config, self._trainer).model.to(self.device)

        # a bundle with an id of this name initialises its network itself
        overrides = {} if INIT_WEIGHTS in self._config else self._overrides
        return apply_init_weights(self._network_with()[0], overrides)

    def _network_with(self, *keys: str) -> list[Any]:
        """Return a new network, and the objects of ids that belong to it."""
        # ids evaluated together hold the same network: an optimiser has its parameters
        network, *dependents = self._config.build_new(f"{self._trainer}#network", *keys)
        self._require(network, nn.Module, "network", "module", "nn.Module")
        return [network.to(self.device), *dependents]

    def _require(self, value: object, kind: type, part: str, noun: str, path: str) -> None:
        if not isinstance(value, kind):
            raise InputError(
                f"{self._file}: id '{self._trainer}#{part}' is a {type(value).__name__}",
                f"it is a torch {noun}",
                f"let its _target_ build a torch.{path}",
            )

    @cached_property
    def loss_function(self) -> LossFunction:  # type: ignore[override]
        """The trainer's loss; for a custom trainer one that refuses."""
        if self.custom_trainer:
            return partial(
                custom_trainer.refuse,
                "a method that computes the loss by itself",
                self.custom_trainer,
            )

        function: LossFunction = self._config.evaluated(f"{self._trainer}#loss_function")
        if isinstance(function, nn.Module):
            return function.to(self.device)

        return function

    @cached_property
    def loss(self) -> LossFunction:
        """The trainer's loss of (prediction, target), reduced to its mean as MONAI's trainer does."""
        loss = self.loss_function
        if compatibility.FLOAT_LABELS in self._config.adapted:
            loss = compatibility.with_float_labels(loss)

        return mean_loss(loss)

    def optimizer(
        self, network: nn.Module, lr: float | None = None, epoch: int = 0
    ) -> torch.optim.Optimizer:
        """Build the trainer's optimiser for a network, with another learning rate if one is given."""
        if self.custom_trainer:
            return custom_trainer.of(network).optimizer(lr)
        return super().optimizer(network, lr, epoch)

    @property
    def is_scheduled(self) -> bool:
        """Tell whether the learning rates change from epoch to epoch."""
        return not self.custom_trainer and super().is_scheduled

    @cached_property
    def optimizers(self) -> OptimizerFactory:
        """The trainer's optimiser and schedule, made once on a network of their own."""
        optimizer_id = f"{self._trainer}#optimizer"
        schedule_id = find_schedule(self._config)
        with stream(0, "optimizer"):
            network, optimizer = self._network_with(optimizer_id)
            scheduler = None
            if schedule_id:
                scheduler = self._network_with(optimizer_id, schedule_id)[2]

        self._require(optimizer, torch.optim.Optimizer, "optimizer", "optimiser", "optim.Optimizer")
        return OptimizerFactory(optimizer, network, scheduler)

    @cached_property
    def amp(self) -> bool:  # type: ignore[override]
        """Tell whether the trainer asks for mixed precision, which MONAI's trainer uses only on GPUs."""
        key = f"{self._trainer}#amp"
        return key in self._config and bool(self.get(key))

    # Data

    def disk_cache(self, section: str) -> DiskCache | None:
        """Return the cache for prepared samples that are too large for memory; None if entries have no names."""
        source = self.sections[section].source
        if not (source.is_list and source.repeatable):
            return None

        # the same images in another folder are the same samples
        overrides = without(self._overrides, ["dataset_dir"])
        versions = {name: version_of(name) for name in ("medfl", "monai", "torch")}
        parts = [self.sha256, overrides, "train" if section == "train" else "evaluate", versions]
        return DiskCache(
            cache_folder("prepared"),
            lambda index: sample_key(parts, source.entries[index]),
            budget(),
        )

    # Task and evaluation

    @property
    def _is_declared(self) -> bool:
        """Whether task, channels and classes are declared, so that no trial step is needed."""
        return self.protocol.get("trial") is False

    @property
    def kind(self) -> Kind:
        """The behaviour of its kind of task; `largest_component: true` is decided on validation cases."""
        return replace(super().kind, decides=super().kind.decides or self._largest is True)

    @cached_property
    def _largest(self) -> Literal[True] | list[str]:
        """The structures of which only the largest component is kept; True: validation cases decide."""
        largest: Literal[True] | list[str] = self._overrides.get(
            LARGEST_COMPONENT, self.protocol.get(LARGEST_COMPONENT, [])
        )
        if not largest:
            return []

        is_named = isinstance(largest, list) and all(name in self.structures for name in largest)
        if not (self._is_scored_as_masks and (largest is True or is_named)):
            raise InputError(
                f"{LARGEST_COMPONENT} {largest!r} of bundle {self.name!r}, a {self.task}",
                "true, or structures, in the federated.yaml of a segmentation with `scores: medfl`",
                "declare both, or neither",
            )

        return largest

    @property
    def _is_scored_as_masks(self) -> bool:
        return self.task == "segmentation" and self._is_scored_by_medfl

    @property
    def _is_scored_by_medfl(self) -> bool:
        return self.protocol.get("scores") == "medfl"

    @cached_property
    def trial(self) -> Trial:
        """A trial step as in `Problem`; an empty one for a custom trainer."""
        if not self.custom_trainer:
            return super().trial

        with stream(0, "trial"):
            self.network()  # raises if a package or file is missing; no image is read
        return Trial()

    def _try_loss(self, prediction: Any, target: Any) -> None:
        """Compute the loss; if it fails on boolean labels or bytes, convert them to numbers from now on."""
        try:
            self.loss(prediction, target)
        except RuntimeError:
            if not isinstance(target, Tensor) or target.dtype not in (torch.bool, torch.uint8):
                raise

            self._config.adapted.add(compatibility.FLOAT_LABELS)
            del self.loss
            self.loss(prediction, target)

    @property
    def adapted(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the adaptations of a bundle written for older MONAI or NumPy (`medfl.bundle.zoo.compatibility`)."""
        if self.task:
            return tuple(sorted(self._config.adapted))

        return ()

    @cached_property
    def task(self) -> str:  # type: ignore[override]
        """Its kind of task: declared in federated.yaml, or inferred from a trial step."""
        prediction, target, _ = Trial() if self._is_declared else self.trial
        if "task" in self.protocol:
            return check_task(str(self.protocol["task"]), "federated.yaml: task")

        has_class = all("label" in item for item in self.sections["train"].items)
        return told_by(prediction, target, self.loss_function, has_class)

    @cached_property
    def channels(self) -> int:
        """Channels of its images, 0 if its inputs are not images."""
        if self._is_declared:
            return int(self.get("in_channels"))

        return super().channels

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of classes in label order, of findings or of numbers (metadata's channel_def), () for other tasks.

        Raises:
            InputError: an item's label is not one of them.
        """
        if self.task not in OF_VECTORS:
            return ()

        names = channel_names(self.metadata)
        count = len(names)
        if not self._is_declared:
            count = self.trial.prediction.reshape(2, -1).shape[1]

        if self.task == "classification":
            count = max(2, count)  # a single output is the second class's logit
            check_labels(self.items, count, f"bundle {self.name!r}")

        if len(names) == count:
            return names

        return tuple(f"{self.kind.noun} {index}" for index in range(count))

    @property
    def structures(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of a segmentation mask's values 0, 1, ... (metadata's channel_def), () for other tasks."""
        if self.task == "segmentation":
            return mask_names(self.metadata)

        return ()

    @cached_property
    def key_metric(self) -> str:
        """Name of the validation metric that selects the best round."""
        by_medfl = self._is_scored_by_medfl and self.task != "other"
        if by_medfl or (self.task in OF_VECTORS and self._own_metric is None):
            return str(self.protocol.get("key_metric", self.kind.key_metric))

        return self._key_metric[0]

    @cached_property
    def _own_metric(self) -> OwnMetric | None:
        """The bundle's own metric on a set of vectors, None if medfl's metrics choose the best round."""
        name, metric = self._key_metric
        is_decided = {"scores", "key_metric"} & self.protocol.keys()
        if self.task not in OF_VECTORS or is_decided or name == "loss":
            return None

        return OwnMetric(name, metric, scoring(self._config)[1])

    def summarise(self, cases: Cases) -> dict[str, float]:
        """Return the metrics of a set of cases, including the bundle's own."""
        metrics = super().summarise(cases)
        if self._own_metric is not None:
            metrics |= self._own_metric.of(cases)

        return metrics

    def told(self, cases: Cases) -> Cases:
        """Return cases with the value of the bundle's own metric in place of its inputs."""
        if self._own_metric is None:
            return cases

        values = dict(cases.values)
        values.pop(PREDICTION, None)
        values.pop(LABEL, None)
        for name, value in self._own_metric.of(cases).items():
            values[f"{WHOLE}{name}"] = torch.full((len(cases),), value, dtype=torch.float64)

        return Cases(cases.ids, values)

    @cached_property
    def _key_metric(self) -> tuple[str, Any]:
        return key_metric(self._config, self.loss)

    @cached_property
    def evaluator(self) -> Evaluator:
        """Scores this bundle's networks."""
        if self.task in OF_VECTORS and not self.custom_trainer:
            # if the bundle's own evaluator scores, batches are as large as its own
            size = ClassEvaluator.batch_size
            if not self._is_scored_by_medfl:
                size = self._validation_batch_size()

            inputs = getattr(self._own_metric, "postprocessed", None)
            if self.task == "regression":
                return NumberEvaluator(
                    self.loss, self.metadata, batch_size=size, metric_inputs=inputs
                )

            evaluator = FindingEvaluator if self.task == "multilabel" else ClassEvaluator
            return evaluator(
                batch_size=size,
                metric_inputs=inputs,
                ends_in_sigmoid=isinstance(self.loss_function, nn.BCELoss),
            )

        if self.custom_trainer:
            return CaseEvaluator(
                self.key_metric,
                lambda value, _: value,
                lambda x, network: custom_trainer.of(network).score(x),
            )

        # other tasks and bundles are scored by their own evaluator
        inferer, postprocessing = scoring(self._config)
        tolerance = 1.0  # mm
        if "surface_tolerance" in self._config:
            tolerance = float(self.get("surface_tolerance"))

        if self._is_scored_as_masks:
            scorer = MaskEvaluator(self.loss, self.structures, inferer, tolerance)
            if self._largest is True:
                return replace(scorer, compares=True)

            return replace(scorer, largest=self._largest)

        if self.task == "segmentation":
            return CaseEvaluator(
                *self._key_metric, inferer, postprocessing, tolerance, self.structures
            )

        return CaseEvaluator(*self._key_metric, inferer, postprocessing)

    # Classes in words

    @cached_property
    def text(self) -> Text:
        """The classes in words, with prompts: the key `text` of federated.yaml.

        Raises:
            InputError: there is none, or it is for other classes.
        """
        where = config_file(self.root, "federated") or self.root / "configs" / "federated.yaml"
        if "text" not in self.protocol:
            raise InputError(
                f"{where} has no key 'text'",
                "language-built classifiers need each class in words, and prompts",
                "add it, as in the shipped bundles",
            )

        # declared classes are known without the data
        classes = channel_names(self.metadata) if self._is_declared else self.classes
        return read_text(self.protocol["text"], classes, str(where))

    def embeddings(self, plm: str) -> Tensor:
        """Return unit-norm prompt embeddings (K, M, D) of the classes; the shipped ones need no language model.

        Args:
            plm: name or folder of a language model, or a file that `medfl concepts` wrote.

        Raises:
            InputError: the bundle has no text, the file is for another one, or the language model is not installed.
        """
        if plm not in self._embeddings:
            embeddings = text_embeddings.obtain(plm, self.text, self.root / "embeddings")
            self._embeddings[plm] = embeddings.values, embeddings.plm
        return self._embeddings[plm][0]

    def plm_of(self, plm: str) -> str:
        """Return the name of the language model that produces `embeddings`."""
        self.embeddings(plm)
        return self._embeddings[plm][1]

    def with_embeddings(self, plm: str, values: Tensor, name: str) -> Problem:
        """Return this bundle with other `embeddings` (K, M, D), produced by the named language model."""
        return self.replaced(_embeddings={**self._embeddings, plm: (values, name)})

    @cached_property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the user should know: what runs here, and which parts of the bundle's own training do not."""
        if self.dataset:
            return ()

        # evaluated first: the trial may add adaptations
        by_loss = self.key_metric == "loss"
        train = self.sections["train"]
        texts = [
            *notes(self.root, self.policy, self._config, self._trainer, train, self.is_scheduled)
        ]
        if by_loss and not self.custom_trainer:
            texts.append("it has no key metric: the best round has the lowest validation loss")

        name, metric = self._key_metric
        leaves_out = getattr(getattr(metric, "metric_fn", None), "ignore_empty", False)
        if leaves_out or (name == "dice" and self._config.recounted):
            metric_name = title(name.removeprefix("own_"))
            texts.append(
                f"its own {metric_name} leaves out structures that a reference lacks; dice here is {IF_MISSING}"
            )

        return tuple(f"bundle {self.name}: {text}" for text in texts)


def _by_id(config: Config) -> Document:
    """Return overrides with ids in MONAI's present form: `a#b`, formerly `a::b`."""
    return {key.replace("::", "#"): value for key, value in config.items()}
