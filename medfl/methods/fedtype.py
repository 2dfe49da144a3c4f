"""FedType: private models and averaged proxies teach each other, asymmetrically (Wang et al., ICML 2024).

"Bridging Model Heterogeneity in Federated Learning via Uncertainty-based Asymmetrical Reciprocity Learning". A site has
a private large model, any network (option `bodies`), and a proxy, the bundle's own network; only proxies travel. p are
the probabilities of the large model, p~ those of the proxy.
Site:    in each local epoch first the large model with the proxy frozen, then the proxy with the large model frozen:
         large: CE + lambda_B kappa L,  L = mean over the batch of -sum_(r in S) log p[r];
         proxy: CE + lambda_F KL(p || p~).
         S and S_l are uncertainty sets of the proxy and of the large model, kappa the mean of their consensus:
         #(S and S_l) / #(S or S_l) where #S_l <= #S, else #(S and S_l) / #S.
Sets:    regularised adaptive prediction sets (Angelopoulos et al. 2021): class y of rank o has the score
         sum of the larger probabilities + u p[y] + lambda (o - k)+, u uniform; a set has the classes whose score is at
         most the conformal quantile of the labels' scores, and always the most probable one.
         The proxy's lambda is lambda_0 + (1 - lambda_0) d for an epoch after one in which the large model's training
         accuracy fell by d.
Server:  the mean of the proxies by samples, as FedAvg.
Judged by the large model; the server's is the averaged proxy.

Departures. The public code's L is a ranking loss of the proxy's constant logits, so that no gradient reaches the
large model; L here is FedHelp's eq. 5 with a set for each sample. That code calibrates once per round and so never uses
the lambda that it adapts; here sets are calibrated before each local epoch, also on the training items, and the
accuracy persists between rounds. It also divides its KL by the number of classes, and takes the plain mean over sites.
Its temperature scaling before calibration is omitted. Models start from the run's initial weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from medfl.core import Document, InputError, Message, generator_of
from medfl.methods._parts.class_heads import with_class_head
from medfl.methods._parts.distillation import divergence, set_loss
from medfl.methods._parts.mutual_learning import PrivateModels, Turn, proxy_model, train_in_turns
from medfl.methods._parts.prototypes import class_indices
from medfl.methods.base import Collated, option
from medfl.storage import State
from medfl.training import Objective, Site, evaluating, snapshot

Sets = Callable[[Tensor, Tensor], Tensor]
"""Logits (B, K), random numbers from `uniform` -> (B, K) bool, the classes of each sample's uncertainty set."""


@dataclass(frozen=True)
class FedType(PrivateModels):
    """Large private models teach proxies of one kind, and learn from the proxies' uncertainty sets."""

    lam_f: float = option(
        1.0, "lambda_F, what a proxy learns from its large model (paper: 1)", minimum=0.0
    )
    lam_b: float = option(
        1.0, "lambda_B, what it gives back, times kappa (paper: 1; FedHelp: 0.2)", minimum=0.0
    )
    coverage: float = option(
        0.9, "part of the labels that the uncertainty sets are to have, below 1", minimum=0.0
    )
    k_reg: int = option(5, "ranks of a set that cost nothing (public code)", minimum=0)
    lam_proxy: float = option(
        0.5, "lambda_0, cost of each further rank in the proxy's sets (public code)", minimum=0.0
    )
    lam_large: float = option(1.0, "the same in the large model's sets (public code)", minimum=0.0)

    paper = (
        "Bridging Model Heterogeneity in Federated Learning via Uncertainty-based Asymmetrical Reciprocity Learning "
        "(Wang et al., 2024)"
    )
    tasks = ("classification",)
    adapt = staticmethod(with_class_head)  # one output per class

    def __post_init__(self) -> None:
        """Refuse a coverage that only sets of all classes reach."""
        if self.coverage >= 1:
            raise InputError(
                f"coverage={self.coverage:g}", "a part of the labels, 0 to below 1", "take 0.9"
            )

    def init_site(self, site: Site) -> State:
        """Start the large model from the initial weights; its training accuracy can only rise."""
        return {**super().init_site(site), "accuracy": 0.0, "lam": self.lam_proxy}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train the large model and the received proxy alternately; reply with the proxy."""
        large = site.model(state["private"])
        proxy = proxy_model(site, down["weights"])
        accuracy = state["accuracy"]
        lam = state["lam"]

        def turns(epoch: int) -> Iterator[Turn]:
            nonlocal accuracy, lam
            hits = torch.zeros((), dtype=torch.int64, device=site.device)
            yield large, proxy, self._large_objective(site, large, proxy, lam, epoch, hits)
            yield proxy, large, {"objective": self._proxy_objective(site, large)}
            before = accuracy
            accuracy = float(hits) / site.num_samples
            lam = grown(self.lam_proxy, before - accuracy)

        train_in_turns(site, turns)
        after = {"private": snapshot(large), "accuracy": accuracy, "lam": lam}
        return after, site.reply(snapshot(proxy))

    def _large_objective(
        self, site: Site, large: nn.Module, proxy: nn.Module, lam: float, epoch: int, hits: Tensor
    ) -> Document:
        """Return the large model's loss and feed; each step adds the number of correct samples to `hits`."""

        def logits_and_loss(network: nn.Module, x: Collated, y: Collated) -> tuple[Tensor, Tensor]:
            z = network(x)
            hits.add_((z.detach().argmax(1) == class_indices(y)).sum())
            return z, site.loss(z, y)

        if not self.lam_b:
            return {"objective": lambda network, x, y: logits_and_loss(network, x, y)[1]}

        draws = generator_of(site.seed, "sets", epoch)
        of_proxy = self._sets(site, proxy, lam, draws)
        of_large = self._sets(site, large, self.lam_large, draws)

        def with_draws(x: Collated, y: Collated) -> tuple[Collated, ...]:
            return x, y, *[uniform(len(x), draws).to(site.device) for _ in range(2)]

        def objective(
            network: nn.Module, x: Collated, y: Collated, u_proxy: Tensor, u_large: Tensor
        ) -> Tensor:
            z, loss = logits_and_loss(network, x, y)
            with torch.no_grad():
                sets = of_proxy(proxy(x), u_proxy)
                kappa = consensus(sets, of_large(z, u_large)).mean()

            # CE + lambda_B kappa L
            return loss + self.lam_b * kappa * set_loss(z, sets)

        return {"objective": objective, "feed": with_draws}

    def _proxy_objective(self, site: Site, large: nn.Module) -> Objective:
        def objective(network: nn.Module, x: Collated, y: Collated) -> Tensor:
            z = network(x)
            if not self.lam_f:
                return site.loss(z, y)

            with torch.no_grad():
                teacher = large(x)

            # CE + lambda_F KL(p || p~)
            return site.loss(z, y) + self.lam_f * divergence(z, teacher)

        return objective

    def _sets(self, site: Site, network: nn.Module, lam: float, draws: torch.Generator) -> Sets:
        """Calibrate a network's uncertainty sets on the site's training items."""
        rate = partial(scores, k_reg=self.k_reg, lam=lam)
        label_scores = []
        with evaluating(network), torch.no_grad():
            for x, y in site.still.batches(site.settings.batch_size):
                labels = class_indices(y).to(site.device)
                z = network(x.to(site.device))
                u = uniform(len(x), draws).to(site.device)
                label_scores.append(rate(z, u).gather(1, labels[:, None]))

        threshold = conformal_quantile(torch.cat(label_scores)[:, 0], self.coverage)
        return lambda z, u: (rate(z, u) <= threshold).scatter(1, z.argmax(1, keepdim=True), True)


def uniform(count: int, draws: torch.Generator) -> Tensor:
    """Draw a number in [0, 1) for each of so many samples, (count, 1) float64, on the CPU."""
    return torch.rand(count, 1, generator=draws, dtype=torch.float64)


def scores(z: Tensor, u: Tensor, k_reg: int, lam: float) -> Tensor:
    """Return how unusual each class would be as the label, (B, K) float64, using a random number per sample.

    Args:
        z: logits (B, K); of equal ones the lower class ranks first.
        u: the random numbers, from `uniform`.
        k_reg: k, the ranks without a cost.
        lam: lambda, the cost of each further rank.
    """
    # (B, K), the most probable class first
    p, order = z.double().softmax(1).sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(1, p.shape[1] + 1, dtype=p.dtype, device=p.device)
    # The larger probabilities, a random part of the class's own, and the cost of ranks beyond k.
    ranked = p.cumsum(1) - p + u * p + lam * (ranks - k_reg).clamp(min=0)
    return torch.empty_like(p).scatter(1, order, ranked)


def conformal_quantile(values: Tensor, coverage: float) -> Tensor:
    """Return the ceil((n + 1) coverage)-th smallest of n values, from the smallest to the largest."""
    n = len(values)
    rank = math.ceil((n + 1) * coverage - 1e-9)  # 100 * 0.55 is 55.000…01
    return values.kthvalue(min(max(rank, 1), n)).values


def consensus(sets: Tensor, of_large: Tensor) -> Tensor:
    """Return the consensus (B,) of the proxy's sets and the large model's, (B, K) bool, none empty: 0 to 1."""
    both, size, size_large = (members.sum(1) for members in (sets & of_large, sets, of_large))
    # #(S and S_l) / #(S or S_l) where #S_l <= #S, else #(S and S_l) / #S.
    return both / torch.where(size_large <= size, (sets | of_large).sum(1), size)


def grown(lam: float, fall: float) -> float:
    """Return the proxy's lambda after a drop of the large model's training accuracy: from lambda_0 towards 1."""
    return lam + max(0.0, 1 - lam) * max(0.0, fall)


METHOD = FedType
