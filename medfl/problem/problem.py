"""Problem: what a federation trains, defined by a MONAI bundle, by parts in Python or by a test."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from medfl.core import SECTIONS, InputError, MedflError, as_text, root_cause, stream, words_of
from medfl.data import DiskCache, Item, Prepared, Shard, moved
from medfl.data.prepare import prepare
from medfl.datasets import own
from medfl.datasets.readers.reading import JOINED
from medfl.evaluation import Cases, Evaluator, summarise
from medfl.networks.deep_supervision import with_full_size
from medfl.policy.policy import Policy
from medfl.problem.described import Config
from medfl.problem.optimizers import OptimizerFactory
from medfl.problem.prompts import Text
from medfl.problem.sections import Section, Sections
from medfl.problem.tasks import KINDS
from medfl.problem.tasks.kind import Kind
from medfl.training.site import mean_loss

LossFunction = Callable[..., Tensor]


class Trial(NamedTuple):
    """Result of a step on the first training item, twice in a batch; values are None if there are none.

    Attributes:
        prediction: network output, (2, K) for classification, (2, K, H, W[, D]) for masks.
        target: as passed to the loss.
        inputs: network input, (2, C, H, W[, D]) for images.
    """

    prediction: Any = None
    target: Any = None
    inputs: Any = None


_PARTS = {
    *words_of("""
    source device dataset metadata protocol sha256 policy notes adapted network start loss_function
    loss optimizers custom_trainer amp sections task classes structures channels key_metric
    evaluator embeddings text
""")
}
"""What may be given to a problem."""


class Problem:
    """A learning problem as a value: its parts are given, or derived from others on first use.

    It is immutable: `replaced` returns a modified copy. A subclass, such as a bundle or `medfl.Parts`, derives parts in
    its own way; to make a problem directly, give the parts that will be used:

        Problem("toy", network=make_network, loss=cross_entropy, sections=sections, classes=("no", "yes"))

    Attributes:
        name: used in messages and as folder name.
        source: by which it can be opened again: a folder, or the name of parts.
        device: of its networks.
        dataset: the medfl data set whose layouts its data have, "" if they have their own.
        metadata: of its inputs and outputs, as in a bundle's metadata.json.
        protocol: defaults of a run.
        start: initial weights of its networks, None for those of a new network.
        custom_trainer: class of a trainer with its own training step, "" if the loss defines the step.
        amp: whether it asks for mixed precision, on GPUs only.
        adapted: names of its adaptations to today's MONAI and NumPy.
        notes: for the user.
        sha256: of its behaviour.
        policy: applied when bundles and teachers beside it are opened.
    """

    name: str
    source: str = ""
    device: torch.device = torch.device("cpu")
    dataset: str = ""
    metadata: Config = {}
    protocol: Config = {}
    start: Mapping[str, Tensor] | None = None
    custom_trainer: str = ""
    amp: bool = False
    adapted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sha256: str = ""
    policy: Policy = Policy()
    sections: Sections
    task: str = "classification"
    structures: tuple[str, ...] = ()
    loss_function: LossFunction

    def __init__(self, name: str, **parts: object) -> None:
        """Store the given parts by name; TypeError for an unknown name."""
        if unknown := parts.keys() - _PARTS:
            raise TypeError(f"{min(unknown)!r} is no part of a problem")
        vars(self).update(parts, name=name)  # a given part is not derived

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a problem is a value: replaced({name}=...) returns another one")

    def _lacks(self, part: str) -> InputError:
        """Return the error for a part that was not given and cannot be derived here."""
        return InputError(
            f"problem {self.name!r} has no {part}", f"what is used is given: {part}=...", "give it"
        )

    def replaced(self, **parts: object) -> Problem:
        """Return this problem with other parts; parts already derived are kept."""
        problem = copy.copy(self)
        vars(problem).update(parts)
        return problem

    def variant(self, config: Config) -> Problem:
        """Return this problem with other ids in its configuration; only a bundle has one."""
        if not config:
            return self
        raise InputError(
            f"{next(iter(config))!r} of {self.name}",
            "it has no configuration",
            "give other parts, or a bundle",
        )

    def get(self, key: str) -> Any:
        """Return the object of an id of its configuration; InputError if there is none."""
        raise InputError(
            f"configuration id {key!r} of {self.name}",
            "it has no configuration",
            "give a bundle instead",
        )

    def __contains__(self, key: str) -> bool:
        """Tell whether its configuration has an id."""
        return False

    def open_places(self, paths: Iterable[Path | str]) -> None:
        """Let the validation transforms read files and folders that a user named; other transforms may read any."""

    # Network, loss, optimiser

    def network(self) -> nn.Module:
        """Build the network anew; two calls share nothing."""
        raise self._lacks("network")

    @cached_property
    def loss(self) -> LossFunction:
        """The loss of (prediction, target), reduced to its mean."""
        return mean_loss(self.loss_function)

    @cached_property
    def optimizers(self) -> OptimizerFactory:
        """Builds optimisers, and schedules their learning rates."""
        raise self._lacks("optimizers")

    def optimizer(
        self, network: nn.Module, lr: float | None = None, epoch: int = 0
    ) -> torch.optim.Optimizer:
        """Build the optimiser of a network, with another learning rate if one is given."""
        return self.optimizers.build(network, self.rates(epoch, lr))

    def rates(self, epoch: int, lr: float | None = None) -> tuple[float, ...]:
        """Return the learning rates of an epoch, from 0, one for each parameter group."""
        return self.optimizers.rates(epoch, lr)

    @property
    def is_scheduled(self) -> bool:
        """Tell whether the learning rates change from epoch to epoch."""
        return self.optimizers.scheduler is not None

    # Data

    @property
    def batch_size(self) -> int:
        """Images per training step if a run does not specify it."""
        return self.sections["train"].batch_size

    @property
    def has_test(self) -> bool:
        """Tell whether there are test data; otherwise the validation items are used for testing."""
        return self.sections.has_test

    def section(self, name: str) -> Section:
        """Return a section: items, transforms and how they are read."""
        return self.sections[name]

    def data(self, section: str) -> Sequence[Any]:
        """Return a section's data list as given, or its data set if only that can read the items."""
        entries: Sequence[Any] = self.sections[section].source.entries
        return entries

    def items(self, section: str) -> list[Item]:
        """Return one record per item: id, and label (a class index), centre and group if the data list has them."""
        return self.sections[section].items

    def records(self, section: str) -> list[Item]:
        """Return the records of `items` as this kind of task reads them: a class under label, numbers under target.

        The numbers are those of a regression, or 1.0, 0.0 or None (unknown) for each finding.
        """
        return list(map(self.kind.item, self.items(section)))

    def prepared(self, section: str, *, jobs: int = 1, progress: bool = False) -> Prepared:
        """Run the section's deterministic transforms once and return its items ready to be batched."""
        data = self.sections[section]
        records = self.records(section)
        prepared = prepare(
            records,
            data.source,
            data.collate,
            data.prepare_batch,
            label=f"preparing {section} images",
            jobs=jobs,
            progress=progress,
            cache=self.disk_cache(section),
        )
        if self.kind.record_key == "target" and records and "target" not in records[0]:
            first = Shard.of(prepared, range(min(len(records), self.batch_size)))
            for _, targets in first.batches(len(first)):
                self.kind.check(first.ids, targets.reshape(len(first), -1).tolist())

        return prepared

    def data_checksum(self) -> str:
        """Hash the items of the data lists and the sizes of the files that they name."""
        digest = hashlib.sha256()
        for section in SECTIONS:
            data = self.data(section)
            for index, record in enumerate(self.items(section)):
                digest.update(json.dumps([section, record], sort_keys=True).encode())
                for path in _paths(data[index] if isinstance(data, list | tuple) else None):
                    if path.is_file():
                        digest.update(str(path.stat().st_size).encode())

        return digest.hexdigest()

    def is_drawn(self, folder: str) -> bool:
        """Tell whether the images are phantoms, by a file beside them; `folder` is theirs, "" if unknown."""
        paths = [Path(folder)] if folder else []
        for section in SECTIONS:
            data = self.data(section)
            if isinstance(data, list | tuple):
                for entry in data:
                    paths += _paths(entry)

        return own.cohort_of(paths) is not None

    def disk_cache(self, section: str) -> DiskCache | None:
        """Return the cache for samples that are too large for memory; None if their transforms have no stable name."""
        return None

    # Task and evaluation

    @cached_property
    def trial(self) -> Trial:
        """A training step on the first item, twice in a batch, which reveals parts that do not fit together.

        Raises:
            InputError: network, loss and transforms do not fit together; names the item.
        """
        data = self.sections["train"]
        item, source, is_labelled = data.first
        # a generator of its own: random numbers drawn by the trial change no run
        with stream(0, "trial") as generator, torch.no_grad():
            samples = prepare([item], source, data.collate, data.prepare_batch)
            try:
                x, y = next(samples.batches(torch.zeros(2, dtype=torch.int64), 2, generator))
                network = with_full_size(self.network())
                self.optimizer(network)  # also reveals an optimiser that cannot be built
                # training mode would refuse batch statistics of a single item, so it is in the batch twice
                prediction = network.train()(moved(x, self.device))

                if is_labelled:
                    self._try_loss(prediction, moved(y, self.device))
            except MedflError:
                raise
            except Exception as error:
                raise InputError(
                    f"bundle {self.name!r}: network and loss fail on item {item['id']!r}: {as_text(root_cause(error))}",
                    "network, loss and transforms fit together",
                    "see that the bundle trains by itself",
                ) from error

        return Trial(prediction, y, x)

    def _try_loss(self, prediction: Any, target: Any) -> None:
        self.loss(prediction, target)

    @cached_property
    def channels(self) -> int:
        """Channels of its images, 0 if its inputs are not images."""
        x = self.trial.inputs
        if isinstance(x, Tensor) and x.ndim > 3:
            return int(x.shape[1])

        return 0

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Class names in label order, names of findings or numbers; () for other tasks."""
        return ()

    @property
    def kind(self) -> Kind:
        """The behaviour of its kind of task."""
        return KINDS[self.task]

    @cached_property
    def key_metric(self) -> str:
        """Name of the validation metric that selects the best round."""
        return self.kind.key_metric

    def summarise(self, cases: Cases) -> dict[str, float]:
        """Return the metrics of a set of cases that its evaluator scored."""
        return summarise(cases)

    def told(self, cases: Cases) -> Cases:
        """Return cases with the value of the problem's own metric in place of its inputs."""
        return cases

    @cached_property
    def evaluator(self) -> Evaluator:
        """Scores its networks."""
        raise self._lacks("evaluator")

    # Classes in words

    @cached_property
    def text(self) -> Text:
        """The classes in words, with prompts; InputError if none are described."""
        raise InputError(
            f"language-built classifiers on {self.name}, which describes no class",
            "a bundle with the classes in words (federated.yaml)",
            "take another method",
        )

    def plm_of(self, plm: str) -> str:
        """Return the name of the language model that produces `embeddings`."""
        self.embeddings(plm)
        return plm

    def with_embeddings(self, plm: str, values: Tensor, name: str) -> Problem:
        """Return this problem with other `embeddings` (K, M, D), produced by the named language model."""
        return self.replaced(embeddings=lambda _: values, plm_of=lambda _: name)

    def embeddings(self, plm: str) -> Tensor:
        """Return unit-norm prompt embeddings (K, M, D) of the classes by a language model; InputError without text."""
        assert self.text  # raises if no class is described
        raise self._lacks("embeddings")


def _paths(entry: object) -> Iterator[Path]:
    """Yield all strings and paths in an entry of a data list."""
    if not isinstance(entry, Mapping):
        return

    for value in entry.values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, str | os.PathLike):
                yield from map(Path, str(part).split(JOINED))


def prepared_sections(
    problem: Problem, *, jobs: int = 1, progress: bool = False
) -> dict[str, Prepared]:
    """Run the deterministic transforms of all sections once; without test data the validation items replace them."""
    sections: dict[str, Prepared] = {}
    for section in SECTIONS:
        if section == "test" and not problem.has_test:
            sections[section] = sections["validate"]
        else:
            sections[section] = problem.prepared(section, jobs=jobs, progress=progress)

    return sections
