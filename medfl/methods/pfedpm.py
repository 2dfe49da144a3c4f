"""pFedPM: "Personalized federated learning based on feature fusion" (Xing, Shi, Peng, Hu, Li; CSCWD 2024).

h = f(x) is the feature, of the same length d at all sites; weights never leave a site, class means of h do.
(6)  C_i^j = mean of h over the site's items of class j.
(7)  C^j = sum_i (|D_ij| / N_j) C_i^j over the sites heard that own j; a class that nobody reported keeps its C^j.
(8)  C~_i^j = a C_i^j + (1 - a) C^j, constant in a round, C_i as the site sent it last; C^j for a class that it lacks.
(9)  loss = cross-entropy + lambda sum_j (n_j / B) ||C~_i^j - mean of h over the n_j samples of class j in the batch||.
(12) The relation head scores (h, C~_i^j), 0 to 1, of every known class j; mean squared error to 1[y = j]. It learns
     after each step on the network, h constant, with an optimiser of its own.
R-pFedPM predicts by the highest score (`predict=relation`). The relation head takes no part in anything else, so it is
neither trained nor kept where the decision head (the network's own) predicts. It first learns in a site's first round
after round 1; a site that has had none yet is judged by its decision head, and each round tells how many sites are
judged by which.

Departures. (7) as printed is divided once more by the number of owners, which would pull every feature to 0:
`agg=literal`. C_i of (6) is taken after training in evaluation mode, not while the network moves (`features=running`).
The distance of (9) is taken class by class; public code of its lineage has the mean squared difference of each sample
(`reg=sample_mse`), to which the paper's lambda of 1 (CIFAR-10: 0.1) belong. `mix=live` is (8) with the C_i of the loss
itself, so that a only scales lambda by 1 - a. Sites start from common weights, as in Local (`same_init`). The paper
sizes no relation head: here one convolution over the pair and two linear layers, without BatchNorm, and Adam, since SGD
at 0.01 hardly moves it (`relation_optimizer=sgd`). In round 1 there is no C~: no second loss, no relation step.
With `bodies` the sites' networks differ (pFedPM-mh); `feature_size` gives all of them features of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot

from medfl.core.errors import InputError
from medfl.core.message import Message, Weights
from medfl.core.seeding import stream
from medfl.core.storage import State
from medfl.core.task import Task
from medfl.methods._parts.extras import Bodies
from medfl.methods._parts.prototypes import class_counts, class_indices, collect, prototype_groups
from medfl.methods.base import Group, Method, class_head, option
from medfl.methods.fedproto import (
    among,
    apart,
    averaged,
    check_lengths,
    distances,
    feature_length,
    num_classes,
    owned,
    received,
    table,
)
from medfl.networks.heads import feature_size, features_and_output, head, replace_head
from medfl.training import Host, Site, evaluating, fit, snapshot

_OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda head: torch.optim.Adam(head.parameters(), 1e-3),
    "sgd": lambda head: torch.optim.SGD(head.parameters(), 0.01, momentum=0.5),
}


class Relation(nn.Module):
    """Scores (B, J) in (0, 1) of features (B, d) with class features (J, d); 6,641 parameters with d = 50."""

    def __init__(self, features: int) -> None:
        """Build the layers with PyTorch's initialisation."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(2, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool1d(2, ceil_mode=True),  # which an odd d needs
            nn.Flatten(),
            nn.Linear(32 * ((features + 1) // 2), 8),
            nn.ReLU(),
            nn.Linear(8, 1),
            nn.Sigmoid(),
        )

    def forward(self, h: Tensor, means: Tensor) -> Tensor:
        """Return the scores of all pairs; a pair is two channels, the sample's first."""
        samples, classes = h[:, None].expand(-1, len(means), -1), means.expand(len(h), -1, -1)  # (B, J, d)
        scores: Tensor = self.layers(torch.stack([samples, classes], 2).flatten(0, 1))
        return scores.view(len(h), len(means))


class Judged(nn.Module):
    """A site's network with a relation head in the place of its own, or with only some of the classes allowed.

    The relation head comes first, so that the last linear layer is the network's and body and head can be told apart.
    """

    def __init__(
        self, network: nn.Module, allowed: Tensor, relation: Relation | None = None, mixed: Tensor | None = None
    ) -> None:
        """Take the parts.

        Args:
            network: the site's, images -> (B, K).
            allowed: (K,) bool, the classes that may be predicted.
            relation: scores features against `mixed`; None: the network's own head predicts.
            mixed: (K, d), anything for a class that is not allowed.
        """
        super().__init__()
        self.relation, self.network = relation, network
        self.allowed: Tensor
        self.mixed: Tensor | None
        self.register_buffer("allowed", allowed)
        self.register_buffer("mixed", mixed)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores or logits (B, K); those of other classes lie far below."""
        h, logits = features_and_output(self.network, x)
        if self.relation is not None and self.mixed is not None:
            logits = self.relation(h, self.mixed)
        return among(logits, self.allowed)


@dataclass(frozen=True)
class PFedPM(Bodies, Method):
    """Sites share class means of features and train near a mixture of their own and the common ones."""

    a: float = option(0.4, "share of own features in the mixed ones, 0 to 1 (best on FEMNIST: 0.3 to 0.6)", minimum=0.0)
    lam: float = option(1.0, "lambda, pull towards the mixed features (paper: 1, or 0.1 on CIFAR-10)", minimum=0.0)
    agg: str = option(
        "weighted",
        "class features over their owners: by samples, plain mean, or eq. 7 as printed",
        choices=("weighted", "uniform", "literal"),
    )
    reg: str = option(
        "class_l2",
        "distance of each class's mean in a batch, or of each sample, squared (lineage)",
        choices=("class_l2", "sample_mse"),
    )
    mix: str = option("frozen", "C_i in eq. 8: the one sent last, or that of the batch", choices=("frozen", "live"))
    features: str = option(
        "final",
        "class means after training, or over the batches of the round (lineage; free)",
        choices=("final", "running"),
    )
    predict: str = option(
        "decision",
        "a site is judged by its decision head (pFedPM) or its relation head, once that has learned (R-pFedPM)",
        choices=("decision", "relation"),
    )
    relation_update: str = option(
        "batch",
        "the relation head learns after every step, or after the local epochs",
        choices=("batch", "after_epochs"),
    )
    relation_optimizer: str = option("adam", "Adam 1e-3, or SGD 0.01 with momentum 0.5", choices=("adam", "sgd"))
    mask_to_local: bool = option(False, "a site predicts only classes that it has")
    same_init: bool = option(True, "all sites with one architecture start from the same weights")
    feature_size: int = option(0, "d, by a linear layer with ReLU before the head; 0: as the network has it", minimum=0)

    paper: ClassVar[str] = "Personalized federated learning based on feature fusion (Xing et al., 2024)"
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    judged: ClassVar[str] = "personal"

    def __post_init__(self) -> None:
        """Refuse a share above 1."""
        if self.a > 1:
            raise InputError(f"a={self.a:g} for method 'pfedpm'", "a is 0 to 1", "see medfl methods pfedpm")

    def groups(self) -> tuple[Group, ...]:
        """Name the class means of features, and the classes' counts where these weigh."""
        return prototype_groups(counts=self.agg != "uniform")

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the bundle's network, whose head has one output a class, with features of the length asked for."""
        layer = class_head(network, task)
        if not self.feature_size:
            return network
        size = self.feature_size
        layers = nn.Linear(layer.in_features, size), nn.ReLU(), nn.Linear(size, layer.out_features)
        return replace_head(network, nn.Sequential(*layers).to(layer.weight))

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return every tensor of the network."""
        return frozenset(network.state_dict())

    # Server half

    def introduce(self, site: Site) -> Message:
        """Tell the length of a feature, where networks differ."""
        return feature_length(site) if self.bodies else Message()

    def init_server(self, host: Host, weights: Weights, introductions: Mapping[str, Message]) -> State:
        """Start without features.

        Raises:
            InputError: the sites' features differ in length.
        """
        check_lengths({name: int(m.scalars["features"]) for name, m in introductions.items() if m.scalars})
        return {"prototypes": {}}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send C, one (d,) tensor a class, under the class's index."""
        return Message({"prototypes": server["prototypes"]})

    def aggregate(self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int) -> State:
        """Average each class's features over its owners, (7)."""
        after: State = {}
        if self.predict == "relation":
            taught = replies if server["prototypes"] else ()
            after = {"taught": sorted({*server.get("taught", ()), *taught}), "sites": num_sites}
        fresh = averaged(server["prototypes"], replies, by_samples=self.agg != "uniform")
        if self.agg == "literal":
            owners = [c for reply in replies.values() for c in received(reply)]
            fresh = {c: value / owners.count(c) if c in owners else value for c, value in fresh.items()}
        return {"prototypes": fresh, **after}

    def observed(self, server: State, replies: Mapping[str, Message]) -> Mapping[str, float]:
        """Return distances between class means and class features; by which head how many sites are judged."""
        found = distances(server["prototypes"], replies)
        if "taught" in server:
            taught = len(server["taught"])
            found |= {"sites judged by relation heads": taught, "by decision heads": server["sites"] - taught}
        return found

    def global_predictor(self, host: Host, server: State) -> None:
        """Return None: the server has no weights."""
        return

    # Site half

    def init_site(self, site: Site) -> State:
        """Start from the initial weights; nothing was sent, and the relation head, where it predicts, is fresh."""
        network = site.model(site.initial_weights)
        start = network if self.same_init else site.networks.fresh("site", site.name)
        state: State = {"weights": snapshot(start), "own": {}}
        if self.predict == "relation":
            state |= {"relation": snapshot(_relation(site, network)), "mixed": {}}
        return state

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train near the mixed features; reply the site's own."""
        model, common = site.model(state["weights"]), received(down)
        known = table(common, num_classes(model)).to(site.device) if common else None
        mixed = None if known is None else mix(known, state["own"], self.a)
        relation = _relation(site, model, state["relation"]) if "relation" in state and mixed is not None else None
        means, counts = self._trained(model, site, known if self.mix == "live" else mixed, mixed, relation)
        after: State = {**state, "weights": snapshot(model), "own": owned(means, counts)}
        if relation is not None and mixed is not None:
            after |= {"relation": snapshot(relation), "mixed": owned(mixed, _known(mixed))}
        groups = {"prototypes": after["own"]}
        if self.agg != "uniform":
            groups["counts"] = owned(counts, counts)
        return after, Message(groups)

    def _trained(
        self, model: nn.Module, site: Site, target: Tensor | None, mixed: Tensor | None, relation: Relation | None
    ) -> tuple[Tensor, Tensor]:
        """Train the network by (9) and the relation head by (12); return class means (K, d) and counts (K,), (6)."""
        running = _Running(num_classes(model), feature_size(model), site.device)
        last: list[tuple[Any, Tensor]] = []

        def objective(network: nn.Module, x: Any, y: Any) -> Tensor:
            values, output = features_and_output(network, x)
            label = class_indices(y)
            last[:] = [(x, label)]
            if self.features == "running":
                running.add(values, label)
            loss = site.loss(output, y)
            return loss if self.lam == 0 or target is None else loss + self.lam * self._distance(values, label, target)

        if relation is None or mixed is None:
            fit(model, site, objective=objective)
        else:
            learn = partial(relation_step, relation, _OPTIMIZERS[self.relation_optimizer](relation), mixed, model)
            each = self.relation_update == "batch"
            fit(model, _after_steps(site, lambda: learn(*last[0])) if each else site, objective=objective)
            if not each:
                with stream(site.seed, "relation epochs") as generator:
                    for _ in range(site.settings.epochs):
                        for x, y in site.train.batches(site.settings.batch_size, generator):
                            learn(x.to(site.device), class_indices(y).to(site.device))
        if self.features == "running":
            return running.means.to(_head_type(model)), class_counts(site.train, num_classes(model)).to(site.device)
        return collect(model, site.train, site.settings.batch_size, num_classes(model), site.device)

    def _distance(self, values: Tensor, label: Tensor, target: Tensor) -> Tensor:
        """Return the second term of (9) without lambda; live mixing leaves 1 - a of each difference."""
        left = 1 - self.a if self.mix == "live" else 1.0
        if self.reg == "sample_mse":
            return left**2 * apart(values, label, target)
        return left * class_distance(values, label, target)

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the site's network; its relation head predicts with the mixed features that it was trained against."""
        model = site.model(state["weights"])
        allowed = torch.ones(num_classes(model), dtype=torch.bool, device=site.device)
        if self.mask_to_local:
            allowed = class_counts(site.train, len(allowed)).to(site.device) > 0
        if not state.get("mixed"):
            return Judged(model, allowed) if self.mask_to_local else model
        mixed = table(state["mixed"], len(allowed)).to(site.device)
        known = _known(mixed)
        allowed = allowed & known if (allowed & known).any() else known
        return Judged(model, allowed, _relation(site, model, state["relation"]), mixed.nan_to_num())


def mix(known: Tensor, own: Weights, a: float) -> Tensor:
    """Return C~ (8): (K, d), NaN for a class that the server does not know either.

    Args:
        known: the server's class features (K, d), NaN for an unknown class.
        own: class -> what the site sent last.
        a: share of the site's own.
    """
    if not own:
        return known
    mine = table(own, len(known)).to(known)
    return torch.where(mine.isnan(), known, torch.lerp(known, mine, a))


def class_distance(values: Tensor, label: Tensor, target: Tensor) -> Tensor:
    """Return sum_j (n_j / B) ||C^j - mean of h over class j||_2 over the classes of a batch; 0 for unknown ones.

    Args:
        values: features h (B, d).
        label: (B,) class indices.
        target: C (K, d), constant, NaN for an unknown class.
    """
    members = (label[:, None] == torch.arange(len(target), device=label.device)).to(values.dtype)
    counts = members.sum(0)
    means = members.T @ values / counts.clamp(min=1)[:, None]
    norms = torch.linalg.vector_norm(target.nan_to_num().to(values.dtype) - means, dim=1)  # its gradient at 0 is 0
    total: Tensor = (counts * _known(target) * norms).sum()
    return total / len(label)


def relation_loss(relation: Relation, h: Tensor, label: Tensor, mixed: Tensor) -> Tensor:
    """Return (12): the mean over batch and known classes of (score - 1[y = j])^2; h and C~ are constant."""
    known = _known(mixed)
    scores = relation(h.detach(), mixed[known].to(h.dtype))
    return mse_loss(scores, one_hot(label, len(mixed))[:, known].to(scores.dtype))


def relation_step(
    relation: Relation, optimizer: torch.optim.Optimizer, mixed: Tensor, network: nn.Module, x: Any, label: Tensor
) -> None:
    """Take one step of the relation head; the network is run in evaluation mode, so nothing of it changes."""
    with evaluating(network), torch.no_grad():
        h, _ = features_and_output(network, x)
    optimizer.zero_grad()
    relation_loss(relation, h, label, mixed).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


class _Running:
    """Class means over the batches that training saw."""

    def __init__(self, classes: int, features: int, device: torch.device) -> None:
        self.sums = torch.zeros(classes, features, dtype=torch.float64, device=device)
        self.counts = torch.zeros(classes, dtype=torch.int64, device=device)

    def add(self, values: Tensor, label: Tensor) -> None:
        self.sums.index_add_(0, label, values.detach().double())
        self.counts += torch.bincount(label, minlength=len(self.counts))

    @property
    def means(self) -> Tensor:
        return self.sums / self.counts.clamp(min=1)[:, None]


def _known(rows: Tensor) -> Tensor:
    return ~rows.isnan().any(1)


def _relation(site: Site, network: nn.Module, weights: Weights | None = None) -> Relation:
    """Build a relation head for a network's features, drawn on a stream of its own, or with these weights."""
    with stream(site.seed, "relation"):
        relation = Relation(feature_size(network)).to(site.device, _head_type(network))
    if weights is not None:
        relation.load_state_dict(weights)
    return relation


def _after_steps(site: Site, call: Callable[[], None]) -> Site:
    """Return the site with something to be done after every step of its optimiser."""

    def optimizer(network: nn.Module) -> torch.optim.Optimizer:
        made = site.settings.optimizer(network)
        made.register_step_post_hook(lambda *_: call())
        return made

    return replace(site, settings=replace(site.settings, optimizer=optimizer))


def _head_type(network: nn.Module) -> torch.dtype:
    return next(head(network).parameters()).dtype


METHOD = PFedPM
