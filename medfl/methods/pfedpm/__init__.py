"""pFedPM: "Personalized federated learning based on feature fusion" (Xing, Shi, Peng, Hu, Li; CSCWD 2024).

h = f(x) is the feature, of the same length d at all sites; weights never leave a site, class means of h do.
(6)  C_i^j = mean of h over the site's items of class j.
(7)  C^j = sum_i (|D_ij| / N_j) C_i^j over the sites heard that own j; a class that nobody reported keeps its C^j.
(8)  C~_i^j = a C_i^j + (1 - a) C^j, constant in a round, C_i as the site sent it last; C^j for a class that it lacks.
(9)  loss = cross-entropy + lambda sum_j (n_j / B) ||C~_i^j - mean of h over the n_j samples of class j in the batch||.
(12) The relation head scores (h, C~_i^j), 0 to 1, of every known class j; mean squared error to 1[y = j]. It learns
     after each step on the network, h constant, with an optimiser of its own.
R-pFedPM predicts by the highest score (`predict=relation`). The relation head has no other role, so it is
neither trained nor kept if the decision head (the network's own) predicts. It is first trained in a site's first round
after round 1; a site without one yet is judged by its decision head, and each round reports how many sites are
judged by which.

Departures. (7) as printed is divided once more by the number of owners, which would pull every feature to 0:
`agg=literal`. C_i of (6) is computed after training in evaluation mode, not while the network moves
(`features=running`). The distance of (9) is per class; public code of its lineage has the mean squared difference of
each sample (`reg=sample_mse`). Not being squared, it pulls as hard near its target as far from it, with the paper's
lambda of 1 as hard as the labels: validation images chose 0.1 (the paper's on CIFAR-10) at each of three rates.
`mix=live` is (8) with the C_i of the loss itself, so that a only scales lambda by 1 - a. Sites start from common
weights, as in Local (`same_init`). The paper gives no sizes for the relation head: here it is one convolution over the
pair and two linear layers, without BatchNorm, and Adam, since SGD at 0.01 hardly moves it (`relation_optimizer=sgd`).
In round 1 there is no C~: no second loss, no relation step. With `bodies` the sites' networks differ (pFedPM-mh);
`feature_size` gives all of them features of the same length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot

from medfl.core import Message, Messages, Task, Weights, stream
from medfl.methods._parts.class_heads import class_count, class_head
from medfl.methods._parts.prototype_exchange import (
    PrototypeExchange,
    average_prototypes,
    by_class,
    class_mean_groups,
    distances,
    has_prototype,
    only_classes,
    prototype_loss,
    prototypes_in,
    received,
    table,
)
from medfl.methods._parts.prototypes import (
    class_counts,
    class_indices,
    class_means,
    prototype_groups,
)
from medfl.methods.base import Collated, Group, one_of, option
from medfl.networks.heads import feature_size, features_and_output, head, replace_head
from medfl.storage import State
from medfl.training import Host, Site, evaluating, fit, snapshot


@dataclass(frozen=True)
class PFedPM(PrototypeExchange):
    """Sites share class means of features and train near a mixture of their own and the common ones."""

    a: float = option(
        0.4,
        "share of own features in the mixed ones (FEMNIST: 0.3 to 0.6)",
        minimum=0.0,
        maximum=1.0,
    )
    lam: float = option(
        0.1, "lambda, pull towards the mixed features (paper: 1, or 0.1 on CIFAR-10)", minimum=0.0
    )
    agg: str = one_of(
        "class features over their owners: by samples, plain mean, or eq. 7 as printed",
        "weighted",
        "uniform",
        "literal",
    )
    reg: str = one_of(
        "distance of each class's mean in a batch, or of each sample, squared (lineage)",
        "class_l2",
        "sample_mse",
    )
    mix: str = one_of("C_i in eq. 8: the one sent last, or that of the batch", "frozen", "live")
    features: str = one_of(
        "class means after training, or over the batches of the round (lineage; free)",
        "final",
        "running",
    )
    predict: str = one_of(
        "a site is judged by its decision head (pFedPM) or its relation head, once that has learned (R-pFedPM)",
        "decision",
        "relation",
    )
    relation_update: str = one_of(
        "the relation head learns after every step, or after the local epochs",
        "batch",
        "after_epochs",
    )
    relation_optimizer: str = one_of("Adam 1e-3, or SGD 0.01 with momentum 0.5", "adam", "sgd")
    mask_to_local: bool = option(False, "a site predicts only classes that it has")
    same_init: bool = option(True, "all sites with one architecture start from the same weights")
    feature_size: int = option(
        0, "d, by a linear layer with ReLU before the head; 0: as the network has it", minimum=0
    )

    paper = "Personalized federated learning based on feature fusion (Xing et al., 2024)"

    def groups(self) -> tuple[Group, ...]:
        """Declare the class means of features, and the classes' counts if they are used as weights."""
        return prototype_groups(counts=self.agg != "uniform")

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the bundle's network, whose head has one output per class, with features of the requested length."""
        layer = class_head(network, task)
        if not self.feature_size:
            return network
        size = self.feature_size
        layers = nn.Linear(layer.in_features, size), nn.ReLU(), nn.Linear(size, layer.out_features)
        return replace_head(network, nn.Sequential(*layers).to(layer.weight))

    # Server half

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Average each class's features over its owners, (7)."""
        after = {}
        if self.predict == "relation":
            taught = replies if server["prototypes"] else ()
            after = {"taught": sorted({*server.get("taught", ()), *taught}), "sites": num_sites}

        fresh = average_prototypes(server["prototypes"], replies, by_samples=self.agg != "uniform")
        if self.agg == "literal":
            owners = Counter[str]()
            for reply in replies.values():
                owners.update(prototypes_in(reply).keys())

            # (7) as printed, with 1 over the number of owners before the sum.
            fresh = {c: value / max(1, owners[c]) for c, value in fresh.items()}

        return {"prototypes": fresh, **after}

    def observed(self, server: State, replies: Messages) -> Mapping[str, float]:
        """Return distances between class means and class features, and how many sites are judged by which head."""
        observations = distances(server["prototypes"], replies)
        if "taught" in server:
            taught = len(server["taught"])
            observations |= {
                "sites judged by relation heads": taught,
                "by decision heads": server["sites"] - taught,
            }
        return observations

    # Site half

    def init_site(self, site: Site) -> State:
        """Start from the initial weights; nothing was sent, and the relation head, if it predicts, is new."""
        network = site.model(site.initial_weights)
        start = network if self.same_init else site.networks.fresh("site", site.name)
        state = {"weights": snapshot(start), "own": {}}
        if self.predict == "relation":
            state |= {"relation": snapshot(relation_for(site, network)), "mixed": {}}
        return state

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train near the mixed features; reply with the site's own."""
        model = site.model(state["weights"])
        common = received(down, model)
        mixed = None
        relation = None
        if common is not None:
            mixed = mix(common, state["own"], self.a)  # (8)
            if "relation" in state:
                relation = relation_for(site, model, state["relation"])

        target = common if self.mix == "live" else mixed
        means, counts = self._trained(model, site, target, mixed, relation)
        groups = class_mean_groups(means, counts, with_counts=self.agg != "uniform")
        after = {**state, "weights": snapshot(model), "own": groups["prototypes"]}
        if relation is not None and mixed is not None:
            after |= {
                "relation": snapshot(relation),
                "mixed": by_class(mixed, has_prototype(mixed)),
            }

        return after, Message(groups)

    def _trained(
        self,
        model: nn.Module,
        site: Site,
        target: Tensor | None,
        mixed: Tensor | None,
        relation: Relation | None,
    ) -> tuple[Tensor, Tensor]:
        """Train the network by (9) and the relation head by (12); return class means (K, d) and counts (K,), (6)."""
        classes = class_count(model)
        last = list[Collated]()
        sums = torch.zeros(classes, feature_size(model), dtype=torch.float64, device=site.device)
        counts = torch.zeros(classes, dtype=torch.int64, device=site.device)

        def objective(network: nn.Module, x: Collated, y: Collated) -> Tensor:
            h, output = features_and_output(network, x)
            label = class_indices(y)
            last[:] = x, label
            if self.features == "running":
                # (6) over the batches as they come, while the network moves.
                sums.index_add_(0, label, h.detach().double())
                counts.add_(torch.bincount(label, minlength=classes))

            loss = site.loss(output, y)
            if self.lam == 0 or target is None:
                return loss

            # (9)
            return loss + self.lam * self._distance(h, label, target)

        if relation is None or mixed is None:
            fit(model, site, objective=objective)
        else:
            optimizer = OPTIMIZERS[self.relation_optimizer](relation)
            learn = partial(relation_step, relation, optimizer, mixed, model)
            if self.relation_update == "batch":
                fit(model, after_steps(site, lambda: learn(*last)), objective=objective)
            else:
                fit(model, site, objective=objective)
                with stream(site.seed, "relation epochs") as generator:
                    for _ in range(site.settings.epochs):
                        for x, y in site.train.batches(site.settings.batch_size, generator):
                            learn(x.to(site.device), class_indices(y).to(site.device))

        if self.features == "running":
            means = (sums / counts.clamp(min=1)[:, None]).to(next(head(model).parameters()).dtype)
            return means, class_counts(site.train, classes).to(site.device)

        return class_means(model, site)

    def _distance(self, h: Tensor, label: Tensor, target: Tensor) -> Tensor:
        """Return the second term of (9) without lambda; live mixing leaves 1 - a of each difference."""
        left = 1 - self.a if self.mix == "live" else 1.0
        if self.reg == "sample_mse":
            return left**2 * prototype_loss(h, label, target)
        return left * class_distance(h, label, target)

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the site's network; its relation head predicts with the mixed features that it was trained against."""
        model = site.model(state["weights"])
        allowed = torch.ones(class_count(model), dtype=torch.bool, device=site.device)
        if self.mask_to_local:
            allowed = class_counts(site.train, len(allowed)).to(site.device) > 0

        if not state.get("mixed"):
            if self.mask_to_local:
                return Judged(model, allowed)

            return model

        mixed = table(state["mixed"], len(allowed)).to(site.device)
        scored = has_prototype(mixed)
        # A class without C~ has no score; if none remains, all that have one are allowed.
        allowed = allowed & scored if (allowed & scored).any() else scored
        return Judged(
            model, allowed, relation_for(site, model, state["relation"]), mixed.nan_to_num()
        )


def mix(common: Tensor, own: Weights, a: float) -> Tensor:
    """Return C~ (8): (K, d), NaN for a class that the server does not know either.

    Args:
        common: the server's class features (K, d), NaN for an unknown class.
        own: class -> the site's last message.
        a: share of the site's own.
    """
    if not own:
        return common
    mine = table(own, len(common)).to(common)  # (K, d)
    return torch.where(mine.isnan(), common, torch.lerp(common, mine, a))


def class_distance(h: Tensor, label: Tensor, target: Tensor) -> Tensor:
    """Return sum_j (n_j / B) ||C^j - mean of h over class j||_2 over the classes of a batch; 0 for unknown ones.

    Args:
        h: features (B, d).
        label: (B,) class indices.
        target: C (K, d), constant, NaN for an unknown class.
    """
    # (B, K)
    members = (label[:, None] == torch.arange(len(target), device=label.device)).to(h.dtype)
    counts = members.sum(0)
    means = members.T @ h / counts.clamp(min=1)[:, None]  # (K, d)
    # `vector_norm` has the gradient 0 at 0.
    norms = torch.linalg.vector_norm(target.nan_to_num().to(h.dtype) - means, dim=1)
    # n_j times the distance; the division by B follows.
    total: Tensor = (counts * has_prototype(target) * norms).sum()
    return total / len(label)


METHOD = PFedPM


# The relation head of R-pFedPM: a small network that scores how well features and class features match.


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda head: torch.optim.Adam(head.parameters(), 1e-3),
    "sgd": lambda head: torch.optim.SGD(head.parameters(), 0.01, momentum=0.5),
}


class Relation(nn.Module):
    """Scores (B, J) in (0, 1) of features (B, d) with class features (J, d); 6,641 parameters with d = 50."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(2, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool1d(2, ceil_mode=True),  # needed for an odd d
            nn.Flatten(),
            nn.Linear(32 * ((features + 1) // 2), 8),
            nn.ReLU(),
            nn.Linear(8, 1),
            nn.Sigmoid(),
        )

    def forward(self, h: Tensor, means: Tensor) -> Tensor:
        """Return the scores of all pairs; a pair is two channels, the sample's first."""
        # (B, J, d) each
        samples = h[:, None].expand(-1, len(means), -1)
        classes = means.expand(len(h), -1, -1)
        scores: Tensor = self.layers(torch.stack([samples, classes], 2).flatten(0, 1))
        return scores.view(len(h), len(means))


class Judged(nn.Module):
    """A site's network with a relation head in place of its own, or restricted to some classes.

    The relation head comes first, so that the last linear layer is the network's and body and head can be identified.

    Args:
        network: the site's, images -> (B, K).
        allowed: (K,) bool, the classes that may be predicted.
        relation: scores features against `mixed`; None: the network's own head predicts.
        mixed: (K, d), anything for a class that is not allowed.
    """

    allowed: Tensor
    mixed: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        allowed: Tensor,
        relation: Relation | None = None,
        mixed: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.relation = relation
        self.network = network
        self.register_buffer("allowed", allowed)
        self.register_buffer("mixed", mixed)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores or logits (B, K); those of other classes lie far below."""
        h, logits = features_and_output(self.network, x)
        if self.relation is not None and self.mixed is not None:
            logits = self.relation(h, self.mixed)
        return only_classes(logits, self.allowed)


def relation_for(site: Site, network: nn.Module, weights: Weights | None = None) -> Relation:
    """Build a relation head for a network's features, drawn from a separate stream, or with these weights."""
    with stream(site.seed, "relation"):
        relation = Relation(feature_size(network)).to(
            site.device, next(head(network).parameters()).dtype
        )
    if weights is not None:
        relation.load_state_dict(weights)
    return relation


def relation_loss(relation: Relation, h: Tensor, label: Tensor, mixed: Tensor) -> Tensor:
    """Return (12): the mean over batch and known classes of (score - 1[y = j])^2; h and C~ are constant."""
    scored = has_prototype(mixed)
    scores = relation(h.detach(), mixed[scored].to(h.dtype))
    return mse_loss(scores, one_hot(label, len(mixed))[:, scored].to(scores.dtype))


def relation_step(
    relation: Relation,
    optimizer: torch.optim.Optimizer,
    mixed: Tensor,
    network: nn.Module,
    x: Collated,
    label: Tensor,
) -> None:
    """Take one step of the relation head; the network is run in evaluation mode, so it does not change."""
    with evaluating(network), torch.no_grad():
        h, _ = features_and_output(network, x)
    optimizer.zero_grad()
    relation_loss(relation, h, label, mixed).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def after_steps(site: Site, call: Callable[[], None]) -> Site:
    """Return the site with a call after every step of its optimiser."""

    def optimizer(network: nn.Module) -> torch.optim.Optimizer:
        hooked = site.settings.optimizer(network)
        hooked.register_step_post_hook(lambda *_: call())
        return hooked

    return replace(site, settings=replace(site.settings, optimizer=optimizer))
