"""A federation in memory for tests: a few tensors a site, tiny networks, no bundle, no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from medfl.core.message import Message
from medfl.core.run import DataRecord, PartitionRecord, Run
from medfl.core.seeding import derive
from medfl.core.task import Task
from medfl.data.prepared import Augmented, Shard, Stacked
from medfl.data.public import Public
from medfl.data.source import Source
from medfl.evaluation.evaluators import ClassEvaluator
from medfl.methods import Method, method_class, names
from medfl.problem.problem import Problem
from medfl.problem.sections import Section
from medfl.storage.files import State
from medfl.training.local_settings import LocalSettings
from medfl.training.network_pool import Networks
from medfl.training.site import Host, Site

Data = Mapping[str, tuple[Tensor, Tensor]]
"""Site -> (inputs, targets)."""

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]

WHOLE = 10**6
"""A batch size that takes all of a site's items at once."""


WITHOUT_IMAGES: Mapping[str, Mapping[str, Any]] = {
    "fedbm": {"generator": False},
    "fedhelp": {"large": "a"},
}
"""Method -> the options that it needs on data that are no images, with sites named a, b, c."""
CLASSIFYING = [name for name in names() if "classification" in method_class(name).tasks]
"""The methods that fit the toys' task; ConDistFL is tried by what it needs, masks."""


# Optimisers


def sgd(lr: float, **settings: float) -> Optimizer:
    return lambda network: torch.optim.SGD(
        [p for p in network.parameters() if p.requires_grad], lr, **settings
    )


def adam(lr: float) -> Optimizer:
    return lambda network: torch.optim.Adam(
        [p for p in network.parameters() if p.requires_grad], lr
    )


# Networks and losses


def linear(dimension: int = 3) -> nn.Module:
    """One weight row, float64; with `half_square` a site's loss is the quadratic of `quadratic`."""
    return nn.Linear(dimension, 1, bias=False, dtype=torch.float64)


def classifier(norm: bool = False, dropout: float = 0.0) -> Callable[[], nn.Module]:
    """A float32 network (B, 8) -> (B, 3)."""
    return lambda: nn.Sequential(
        nn.Linear(8, 6),
        nn.BatchNorm1d(6) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(6, 3),
    )


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output[:, 0] - target).square().mean()


cross_entropy = nn.functional.cross_entropy


# Data


def regression(counts: Mapping[str, int], dimension: int = 3, seed: int = 0) -> Data:
    """Well-conditioned linear regressions whose minimisers differ between the sites, float64."""
    generator = torch.Generator().manual_seed(seed)
    data = {}
    for name, n in counts.items():
        x = torch.randn(n, dimension, generator=generator, dtype=torch.float64)
        truth = torch.randn(dimension, generator=generator, dtype=torch.float64)
        data[name] = (x, x @ truth + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64))
    return data


def quadratic(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and b of the loss 1/2 w'Aw - b'w + const that `linear` has on (x, y)."""
    return x.T @ x / len(x), x.T @ y / len(x)


def prompts(plm: str) -> Tensor:
    """Embeddings of five prompts for each of three classes: unit norm, 12 dimensions, float32."""
    generator = torch.Generator().manual_seed(0)
    around = torch.randn(3, 1, 12, generator=generator)
    return nn.functional.normalize(around + 0.3 * torch.randn(3, 5, 12, generator=generator), dim=2)


def blobs(
    counts: Mapping[str, int], seed: int = 0, labels: Mapping[str, Sequence[int]] | None = None
) -> Data:
    """Three Gaussian classes in 8 dimensions, float32; `labels` limits a site to some classes."""
    generator = torch.Generator().manual_seed(seed)
    data = {}
    for name, n in counts.items():
        own = torch.tensor((labels or {}).get(name, (0, 1, 2)))
        y = own[torch.arange(n) % len(own)]
        data[name] = (torch.randn(n, 8, generator=generator) + 2 * nn.functional.one_hot(y, 8), y)
    return data


def public_blobs(count: int = 10, teachers: int = 2, classes: int = 4, seed: int = 7) -> Public:
    """Public items of four classes in the 8 dimensions of `blobs`, with the answers of teachers drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % classes
    x = torch.randn(count, 8, generator=generator) - 2 * nn.functional.one_hot(y, 8)
    answers = [torch.randn(count, classes, generator=generator).softmax(1) for _ in range(teachers)]
    shard = Shard.of(
        Stacked([{"id": f"public{i}", "label": int(label)} for i, label in enumerate(y)], x, y),
        range(count),
    )
    task = Task("classification", tuple("klmnopqr"[:classes]))
    return Public("toy-public", shard, task, tuple(answers))


@dataclass(frozen=True)
class Shaking:
    """A random transform that adds up to 100 to each input."""

    num_draws: int = 1

    def __call__(self, inputs: Any, targets: Any, draws: Tensor) -> Any:
        return inputs + 100 * draws.sum(1).to(inputs).view(-1, *[1] * (inputs.ndim - 1)), targets

    def deterministic(self, whole: bool) -> Shaking:
        return Shaking(0)


def shaken(shard: Shard) -> Shard:
    """Return the same stacked items with a random transform."""
    kept = shard.prepared
    assert isinstance(kept, Stacked)
    return Shard(Augmented(kept.items, kept, Shaking()), shard.indices)


# The federation


@dataclass
class Toy:
    """Sites and server made by hand.

    Attributes:
        data: site -> (inputs, targets).
        network: builds the network.
        loss: (output, targets) -> mean loss.
        optimizer: builds a network's optimiser.
        lr_decay: factor on the learning rate after each round.
        public: public data of sites and server.
    """

    data: Data
    network: Callable[[], nn.Module] = linear
    loss: Callable[[Tensor, Tensor], Tensor] = half_square
    optimizer: Optimizer = field(default_factory=lambda: sgd(0.1))
    epochs: int = 1
    batch_size: int = WHOLE
    lr_decay: float = 1.0
    seed: int = 0
    amp: bool = False
    public: Public | None = None

    def __post_init__(self) -> None:
        self.networks = Networks(self.network, self.seed, torch.device("cpu"))

    def adapted(self, method: Method) -> Toy:
        """Return the same federation with the network that a method makes of it, three classes."""
        network, task = self.network, Task("classification", ("p", "q", "r"), prompts)
        return replace(self, network=lambda: method.adapt(network(), task))

    @property
    def names(self) -> list[str]:
        return list(self.data)

    def site(self, name: str, round_: int = 1) -> Site:
        """Return a site in a round; "central" has everybody's items."""
        pooled = [torch.cat(parts) for parts in zip(*self.data.values(), strict=True)]
        x, y = pooled if name == "central" else self.data[name]
        shard = Shard.of(
            Stacked([{"id": f"{name}{i}"} for i in range(len(x))], x, y), range(len(x))
        )
        factor = self.lr_decay ** (round_ - 1)
        settings = LocalSettings(self.epochs, self.batch_size, self.optimizer, factor, self.amp)
        seed = derive(self.seed, "round", round_, name)
        return Site(
            name,
            seed,
            shard,
            shard,
            shard,
            self.loss,
            settings,
            self.networks,
            round=round_,
            public=self.public,
        )

    def host(self, round_: int = 1) -> Host:
        return Host(
            derive(self.seed, "round", round_, "server"),
            self.networks,
            round=round_,
            public=self.public,
        )

    @property
    def initial(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.networks.initial.items()}


def three_classes() -> Toy:
    """Return three sites with three classes, a float32 network with BatchNorm and dropout; some batches are short.

    The public data are of four other classes.
    """
    network, public = classifier(norm=True, dropout=0.3), public_blobs()
    return Toy(
        blobs({"a": 9, "b": 6, "c": 11}),
        network,
        cross_entropy,
        sgd(0.1),
        batch_size=4,
        public=public,
    )


@dataclass
class Outcome:
    """What `simulate` leaves: the last State of the server and of the sites, the last messages, all server States."""

    server: State
    states: dict[str, State]
    down: dict[str, Message]
    replies: dict[str, Message]
    history: list[State]


def simulate(
    method: Method,
    toy: Toy,
    rounds: int = 1,
    cohorts: Sequence[Sequence[str]] | None = None,
    wire: bool = False,
    after: Outcome | None = None,
) -> Outcome:
    """Run both halves of a method as a runtime does, until so many rounds are over.

    Args:
        method: of which.
        toy: on which sites.
        rounds: the last one.
        cohorts: the sites of round i + 1 are `cohorts[i]`.
        wire: encode what is sent.
        after: what an earlier call left, to go on from.
    """
    names = ["central"] if method.pools_data else toy.names

    def sent(message: Message) -> Message:
        return Message.decode(message.encode()) if wire else message

    if after is None:
        with toy.networks.scope():
            introductions = {name: sent(method.introduce(toy.site(name, 0))) for name in names}
            server = method.init_server(toy.host(0), toy.networks.initial, introductions)
        outcome = Outcome(server, {}, {}, {}, [server])
    else:
        outcome = replace(after, states={**after.states}, history=[*after.history])
    for round_ in range(len(outcome.history), rounds + 1):
        cohort = names if cohorts is None else cohorts[round_ - 1]
        with toy.networks.scope():
            host = toy.host(round_)
            outcome.down = {
                name: sent(method.broadcast(host, outcome.server, name)) for name in cohort
            }
        outcome.replies = {}
        for name in cohort:
            with toy.networks.scope():
                site = toy.site(name, round_)
                state = outcome.states.get(name)
                state = method.init_site(site) if state is None else state
                outcome.states[name], reply = method.local_update(site, state, outcome.down[name])
                outcome.replies[name] = sent(reply)
        with toy.networks.scope():
            outcome.server = method.aggregate(
                toy.host(round_), outcome.server, outcome.replies, len(names)
            )
        outcome.history.append(outcome.server)
    return outcome


def judged(method: Method, toy: Toy, outcome: Outcome, name: str) -> dict[str, Tensor]:
    """Return the weights that a site is judged by after `outcome`."""
    with toy.networks.scope():
        site, down = toy.site(name), method.broadcast(toy.host(), outcome.server, name)
        state = outcome.states.get(name) or method.init_site(site)
        network = method.predictor(site, state, down)
        return {key: tensor.clone() for key, tensor in network.state_dict().items()}


# Comparison


def bits(value: Any) -> Any:
    """Turn tensors inside mappings, lists and messages into (dtype, shape, bytes), so that `==` means bit for bit."""
    if isinstance(value, Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), data
    if isinstance(value, Message):
        return bits(value.tensors), bits(value.scalars)
    if isinstance(value, Mapping):
        return {key: bits(member) for key, member in value.items()}
    return [bits(member) for member in value] if isinstance(value, list | tuple) else value


# A federation with records


def run_record(**changes: Any) -> Run:
    """Return a complete `Run` over three sites; `changes` replace fields."""
    ids = {name: {s: [f"{s}{i}" for i in where] for s in SECTIONS} for name, where in PARTS.items()}
    values: dict[str, Any] = {
        "bundle": "toy", "bundle_path": "/bundles/toy", "bundle_sha256": "0" * 64, "method": "fedavg", "options": {},
        "config": {}, "data": DataRecord("phantom", "/data/toy", "1" * 64, "default", dict.fromkeys(SECTIONS, 12)),
        "partition": PartitionRecord("iid", 0, (), ids), "cohort": 1.0, "rounds": 3, "local_epochs": 1, "batch_size": 4,
        "lr": 0.1, "lr_decay": 0.5, "seed": 0, "device": "cpu", "amp": False, "threads": 1, "eval_every": 1,
        "versions": {"medfl": "0"},
    }  # fmt: skip
    return Run(**{**values, **changes})


SECTIONS = ("train", "validate", "test")
PARTS = {"x": range(0, 3), "y": range(3, 8), "z": range(8, 12)}


class ToyBundle(Problem):
    """A problem without a folder: three classes, twelve items a section; other `parts` in the place of its own."""

    def __init__(self, norm: bool = True, **parts: Any) -> None:
        own = {
            "network": classifier(norm=norm, dropout=0.2), "loss": cross_entropy, "embeddings": prompts,
            "evaluator": ClassEvaluator(), "classes": ("p", "q", "r"), "sections": ToySections(),
        }  # fmt: skip
        super().__init__("toy", **{**own, **parts})

    is_scheduled = False

    def optimizer(
        self, network: nn.Module, lr: float | None = None, epoch: int = 0
    ) -> torch.optim.Optimizer:
        return sgd(0.05 if lr is None else lr, momentum=0.9)(network)

    def prepared(self, section: str, *, jobs: int = 1, progress: bool = False) -> Stacked:
        x, y = blobs({section: 12}, seed=SECTIONS.index(section))[section]
        return Stacked(
            [{"id": f"{section}{i}", "label": int(label)} for i, label in enumerate(y)], x, y
        )


@dataclass(frozen=True)
class ToySections:
    """Sections whose data lists are empty: what they hold is made by `prepared`."""

    has_test: bool = True
    test_error: str = ""

    def __getitem__(self, section: str) -> Section:
        return Section(Source([]), [], None, tuple)
