"""Bundle: a MONAI bundle, ours or anybody's, read as networks, data, loss and optimiser.

Everything is reached from the bundle's trainer (`train#trainer` or flat `trainer`) by following references, so both of
the zoo's styles work unmodified. Handlers are never made, for they write files; a trainer and an evaluator
only where the trainer has an iteration of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medfl.bundle import text_embeddings
from medfl.bundle.configuration import Configuration
from medfl.bundle.engines import find_trainer, key_metric, own_trainer_class, scoring
from medfl.bundle.files import channel_names, config_file, find, mask_names, read_metadata, sha256_of, shipped_folders
from medfl.bundle.files import read_protocol as read_protocol
from medfl.bundle.files import shipped as shipped
from medfl.bundle.files import shipped_root as shipped_root
from medfl.bundle.optimizers import OptimizerFactory, find_schedule
from medfl.bundle.prompts import Text, read_text
from medfl.bundle.sections import Section, Sections, check_labels
from medfl.bundle.zoo import compatibility, custom_trainer
from medfl.bundle.zoo.notes import notes
from medfl.core.errors import InputError, MedflError, as_text, root_cause
from medfl.core.release import version_of
from medfl.core.seeding import stream
from medfl.data.disk_cache import DiskCache, budget, sample_key
from medfl.data.prepare import prepare
from medfl.data.prepared import Item, Prepared, moved
from medfl.evaluation.evaluators import CaseEvaluator, ClassEvaluator, Evaluator, MaskEvaluator
from medfl.evaluation.metrics import KEY_METRICS
from medfl.networks.initialisation import INIT_WEIGHTS, apply_init_weights
from medfl.policy import admission
from medfl.policy.findings import TRAINING
from medfl.policy.policy import Policy
from medfl.storage.places import cache_folder
from medfl.training.loss_checks import mean_loss

_REGRESSION = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


class Bundle:
    """A MONAI bundle with a trainer, supervised or with an iteration of its own.

    Args:
        name_or_path: a shipped bundle's name, or the folder of any MONAI bundle.
        config: ids of the bundle's own configuration to override, as in `monai.bundle run` (`{"image_size": 28}`).
        device: where its networks live.
        policy: what it may do beyond what every bundle may; None: what `medfl.policy.admission` has in force.

    Raises:
        InputError: no such bundle, one that inspection refuses, an id that does not exist, or a configuration without
            what federated training needs; names the id and the file.
    """

    def __init__(
        self,
        name_or_path: str,
        config: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
        policy: Policy | None = None,
    ) -> None:
        """Inspect the bundle if it is not a shipped one, and parse its configuration; nothing is evaluated yet."""
        self.root = find(name_or_path)
        self.name = self.root.name
        self.is_shipped = shipped_folders().get(self.name) == self.root
        self.policy = admission.in_force() if policy is None else policy
        if not self.is_shipped:
            admission.admit(self.root, self.policy, TRAINING)
        self.device = torch.device(device)
        self._overrides = {key.replace("::", "#"): value for key, value in (config or {}).items()}
        self._file = config_file(self.root, "train") or self.root / "configs" / "train.json"
        self._config = self._read(self._file)
        self._trainer = find_trainer(self._config)
        self.own_trainer = own_trainer_class(self._config, self._trainer)
        """Class of a trainer that takes its steps by itself, "" of MONAI's supervised one."""
        self.sections = Sections(self.root, self._trainer, self._config, self._with_evaluate, bool(self.own_trainer))
        self._embeddings: dict[str, tuple[Tensor, str]] = {}
        self.start: Mapping[str, Tensor] | None = None
        """Weights that its networks begin with, None for those that they are made with."""

    def override(self, config: Mapping[str, Any]) -> None:
        """Override further ids of the configuration; call it before the data, task or loss are asked for."""
        self._overrides |= config
        self._config.override(config)

    def open_places(self, paths: Iterable[Path | str]) -> None:
        """Let the validation transforms read files and folders that a user named."""
        self._config.open_places(paths)

    def get(self, key: str) -> Any:
        """Return the object that a configuration id stands for.

        Raises:
            InputError: the id is missing, or the bundle's own expression fails; names id and cause.
        """
        return self._config.evaluated(key)

    def __contains__(self, key: str) -> bool:
        """Tell whether the configuration has an id."""
        return key in self._config

    def _read(self, *files: Path) -> Configuration:
        return Configuration(self.root, files, self._overrides, self.metadata, self.device, self.policy)

    def _with_evaluate(self) -> Configuration:
        """Read the training configuration with evaluate.* merged in, as MONAI runs the two."""
        evaluate = config_file(self.root, "evaluate")
        return self._read(self._file, evaluate) if evaluate else self._config

    @cached_property
    def metadata(self) -> Mapping[str, Any]:
        """The content of metadata.json, empty if there is none."""
        return read_metadata(self.root)

    @cached_property
    def protocol(self) -> Mapping[str, Any]:
        """The content of federated.yaml, the defaults of a run; empty if there is none."""
        return read_protocol(str(self.root))

    @cached_property
    def sha256(self) -> str:
        """Hash of what the bundle does: configuration without overrides, class texts, embeddings, its own Python.

        Files of the bundle that its configuration names count too: weights of a searched network, lists, labels. Of
        federated.yaml only the class texts count: its other values are defaults, and a Run names what it took.
        """
        return sha256_of(self.root, self.protocol)

    # Network, loss, optimiser

    def network(self) -> nn.Module:
        """Build the network anew; two calls share nothing."""
        if self.own_trainer:
            return custom_trainer.OwnIteration(self._config, self._trainer).model.to(self.device)
        return apply_init_weights(self._network_with()[0], {} if INIT_WEIGHTS in self._config else self._overrides)

    def _network_with(self, *keys: str) -> list[Any]:
        """Return a new network, and what ids make of it."""
        network, *others = self._config.build_new(f"{self._trainer}#network", *keys)
        self._require(network, nn.Module, "network", "module", "nn.Module")
        return [network.to(self.device), *others]

    def _require(self, value: Any, kind: type, part: str, noun: str, path: str) -> None:
        if not isinstance(value, kind):
            given = f"{self._file}: id '{self._trainer}#{part}' is a {type(value).__name__}"
            raise InputError(given, f"it is a torch {noun}", f"let its _target_ build a torch.{path}")

    @cached_property
    def _loss_function(self) -> Callable[..., Tensor]:
        if self.own_trainer:
            return partial(custom_trainer.refuse, "a method that computes the loss by itself", self.own_trainer)
        function: Callable[..., Tensor] = self._config.evaluated(f"{self._trainer}#loss_function")
        return function.to(self.device) if isinstance(function, nn.Module) else function

    @cached_property
    def loss(self) -> Callable[..., Tensor]:
        """The trainer's loss of (prediction, target), reduced to its mean as MONAI's trainer does."""
        as_float = compatibility.FLOAT_LABELS in self._config.adapted
        return mean_loss(compatibility.with_float_labels(self._loss_function) if as_float else self._loss_function)

    def optimizer(self, network: nn.Module, lr: float | None = None, epoch: int = 0) -> torch.optim.Optimizer:
        """Build the trainer's optimiser for a network, with another learning rate if one is given."""
        if self.own_trainer:
            return custom_trainer.of(network).optimizer(lr)
        return self._optimizers.build(network, self.rates(epoch, lr))

    def rates(self, epoch: int, lr: float | None = None) -> tuple[float, ...]:
        """Return the learning rates of an epoch, from 0, one for each parameter group: the trainer's schedule."""
        return self._optimizers.rates(epoch, lr)

    @property
    def is_scheduled(self) -> bool:
        """Tell whether the learning rates change from epoch to epoch."""
        return not self.own_trainer and self._optimizers.scheduler is not None

    @cached_property
    def _optimizers(self) -> OptimizerFactory:
        key, schedule = f"{self._trainer}#optimizer", find_schedule(self._config)
        with stream(0, "optimizer"):
            network, optimizer = self._network_with(key)
            scheduler = self._network_with(key, schedule)[2] if schedule else None
        self._require(optimizer, torch.optim.Optimizer, "optimizer", "optimiser", "optim.Optimizer")
        return OptimizerFactory(optimizer, network, scheduler)

    @cached_property
    def amp(self) -> bool:
        """Tell whether the trainer asks for mixed precision, which MONAI's takes on GPUs alone."""
        key = f"{self._trainer}#amp"
        return key in self._config and bool(self.get(key))

    @property
    def batch_size(self) -> int:
        """The training data loader's batch size."""
        return self.sections["train"].batch_size

    # Data

    @property
    def has_test(self) -> bool:
        """Tell whether evaluate.* names data of its own; else the validation items serve as test items."""
        return self.sections.has_test

    @property
    def test_error(self) -> str:
        """Why the data that evaluate.* names cannot be read, "" where they can or it names none."""
        return self.sections.test_error

    def section(self, name: str) -> Section:
        """Return a section as the bundle's configuration gives it: items, transforms and what reads them."""
        return self.sections[name]

    def data(self, section: str) -> Sequence[Any]:
        """Return the section's data list as the bundle gives it, or its data set where only that can read it."""
        entries: Sequence[Any] = self.sections[section].source.entries
        return entries

    def items(self, section: str) -> list[Item]:
        """Return one record per item: id, and label (a class index), centre and group where the data list has them."""
        return self.sections[section].items

    def prepared(self, section: str, *, jobs: int = 1, progress: bool = False) -> Prepared:
        """Run the section's deterministic transforms once and return its items ready to be batched."""
        data = self.sections[section]
        return prepare(
            data.items, data.source, data.collate, data.prepare_batch, label=f"preparing {section} images",
            jobs=jobs, progress=progress, cache=self._disk_cache(section),
        )  # fmt: skip

    def _disk_cache(self, section: str) -> DiskCache | None:
        """Return where prepared samples go that are too large for memory; None where entries have no names."""
        source = self.sections[section].source
        if not (source.is_list and source.repeatable):
            return None
        overrides = {key: value for key, value in self._overrides.items() if key != "dataset_dir"}
        versions = {name: version_of(name) for name in ("medfl", "monai", "torch")}
        parts = [self.sha256, overrides, "train" if section == "train" else "evaluate", versions]
        return DiskCache(cache_folder("prepared"), lambda index: sample_key(parts, source.entries[index]), budget())

    # Task and evaluation

    @cached_property
    def _trial(self) -> tuple[Any, Any, Any]:
        """Network output, target and input of the first training item, twice in a batch: misfits show here."""
        if self.own_trainer:
            with stream(0, "trial"):
                self.network()  # shows what it needs; of data there is nothing to tell
            return None, None, None
        item, source, labelled = (data := self.sections["train"]).first
        with stream(0, "trial") as generator, torch.no_grad():
            samples = prepare([item], source, data.collate, data.prepare_batch)
            try:
                x, y = next(samples.batches(torch.zeros(2, dtype=torch.int64), 2, generator))
                network = self.network()
                self.optimizer(network)
                prediction = network.train()(moved(x, self.device))
                if labelled:
                    self._try_loss(prediction, moved(y, self.device))
            except MedflError:
                raise
            except Exception as error:
                raise InputError(
                    f"bundle {self.name!r}: network and loss fail on item {item['id']!r}: {as_text(root_cause(error))}",
                    "network, loss and transforms fit together",
                    "see that the bundle trains by itself",
                ) from error
        return prediction, y, x

    def _try_loss(self, prediction: Any, target: Any) -> None:
        """Compute the loss; if it fails on labels that are true or false, or bytes, let it have numbers from now on."""
        try:
            self.loss(prediction, target)
        except RuntimeError:
            if not isinstance(target, Tensor) or target.dtype not in (torch.bool, torch.uint8):
                raise
            self._config.adapted.add(compatibility.FLOAT_LABELS)
            del self.loss
            self.loss(prediction, target)

    @property
    def adapted(self) -> tuple[str, ...]:
        """Names of what was done for a bundle written for older MONAI or NumPy (`medfl.bundle.zoo.compatibility`)."""
        return () if self.is_shipped or not self.task else tuple(sorted(self._config.adapted))

    @cached_property
    def task(self) -> str:
        """classification, segmentation or other."""
        if self.is_shipped:
            return str(self.protocol["task"])
        prediction, target, _ = self._trial
        if "task" in self.protocol:
            return str(self.protocol["task"])
        if not isinstance(prediction, Tensor) or not isinstance(target, Tensor):
            return "other"
        if prediction.ndim == 2 and not isinstance(self._loss_function, _REGRESSION):
            one_index = target.numel() == len(prediction) and not target.is_floating_point()
            return "classification" if one_index or all("label" in item for item in self.items("train")) else "other"
        return "segmentation" if target.ndim >= 4 else "other"

    @cached_property
    def channels(self) -> int:
        """Channels of its images, 0 where its inputs are no images."""
        if self.is_shipped:
            return int(self.get("in_channels"))
        x = self._trial[2]
        return int(x.shape[1]) if isinstance(x, Tensor) and x.ndim > 3 else 0

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Class names in label order (metadata's channel_def), () for other tasks; InputError for a label of none."""
        if self.task != "classification":
            return ()
        named = channel_names(self.metadata)
        count = len(named) if self.is_shipped else max(2, self._trial[0].shape[1])
        check_labels(self.items, count, f"bundle {self.name!r}")
        return named if len(named) == count else tuple(f"class {index}" for index in range(count))

    @property
    def structures(self) -> tuple[str, ...]:
        """Names of a segmentation mask's values 0, 1, ... (metadata's channel_def), () for other tasks."""
        return mask_names(self.metadata) if self.task == "segmentation" else ()

    @cached_property
    def text(self) -> Text:
        """The classes in words, with prompts: the key `text` of federated.yaml.

        Raises:
            InputError: there is none, or it is for other classes.
        """
        where = config_file(self.root, "federated") or self.root / "configs" / "federated.yaml"
        if "text" not in self.protocol:
            allowed = "language-built classifiers need each class in words, and prompts"
            raise InputError(f"{where} has no key 'text'", allowed, "add it, as in the shipped bundles")
        classes = channel_names(self.metadata) if self.is_shipped else self.classes  # ours are known without the data
        return read_text(self.protocol["text"], classes, str(where))

    def embeddings(self, plm: str) -> Tensor:
        """Return unit-norm prompt embeddings (K, M, D) of the classes; the shipped ones need no language model.

        Args:
            plm: name or folder of a language model, or a file that `medfl concepts` wrote.

        Raises:
            InputError: the bundle has no text, the file is for another one, or the language model is not here.
        """
        if plm not in self._embeddings:
            embeddings = text_embeddings.obtain(plm, self.text, self.root / "embeddings")
            self._embeddings[plm] = embeddings.values, embeddings.plm
        return self._embeddings[plm][0]

    def plm_of(self, plm: str) -> str:
        """Return the name of the language model that made what `embeddings` returns."""
        self.embeddings(plm)
        return self._embeddings[plm][1]

    def give_embeddings(self, plm: str, values: Tensor, name: str) -> None:
        """Have `embeddings` return these (K, M, D), made by a language model of this name."""
        self._embeddings[plm] = values, name

    @property
    def key_metric(self) -> str:
        """Name of the validation metric that selects the best round."""
        if self.task == "classification" or (self.task == "segmentation" and self.is_shipped):
            return str(self.protocol.get("key_metric", KEY_METRICS[self.task]))
        return self._key_metric[0]

    @cached_property
    def _key_metric(self) -> tuple[str, Any]:
        return key_metric(self._config, self.loss)

    @cached_property
    def evaluator(self) -> Evaluator:
        """How this bundle's networks are scored."""
        if self.task == "classification":
            batch_size = {} if self.is_shipped else {"batch_size": self.sections.validation_batch_size()}
            return ClassEvaluator(**batch_size, ends_in_sigmoid=isinstance(self._loss_function, nn.BCELoss))
        if self.own_trainer:
            return CaseEvaluator(
                self.key_metric, lambda value, _: value, lambda x, net: custom_trainer.of(net).score(x)
            )
        inferer, postprocessing = scoring(self._config)
        tolerance = float(self.get("surface_tolerance")) if "surface_tolerance" in self._config else 1.0
        if self.task == "segmentation" and self.is_shipped:
            return MaskEvaluator(self.loss, self.structures, inferer, tolerance)
        masks = (tolerance, self.structures) if self.task == "segmentation" else ()
        return CaseEvaluator(*self._key_metric, inferer, postprocessing, *masks)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What the user should know: what runs here, and what of the bundle's own training does not."""
        if self.is_shipped:
            return ()
        by_loss = self.key_metric == "loss"  # asked for first: the trial may add to what was adapted
        texts = [*notes(self.root, self.policy, self._config, self._trainer, self.sections["train"], self.is_scheduled)]
        if by_loss and not self.own_trainer:
            texts.append("it has no key metric: the best round has the lowest validation loss")
        return tuple(f"bundle {self.name}: {text}" for text in texts)
