"""FedHelp: large and small sites help each other (Wang et al., KDD 2025).

"Asymmetrical Reciprocity-based Federated Learning for Resolving Disparities in Medical Diagnosis".

Large sites j have a private large network w_j and a proxy of the small architecture; small sites i have the small
network, body theta with head phi, and a second head psi for public images. Only small networks travel.
Small:   J = L_i + lambda_J R_i on theta, phi, psi (eq. 1-3):
         R_i = mean_p [CE(psi(theta(x_p)), y_p) + lambda_R KL(t_p || softmax psi(theta(x_p)))],
         t_p = sum_m alpha_p^m T_m(x_p), the teachers' answers, asked for once (see medfl.runs.teachers.answers).
Large:   G = L_j + lambda_F KL(p || p~) + lambda_B sum_(r in Omega) -log p[r] (eq. 4-7), p~ of the proxy, p of the large
         network, Omega the proxy's top classes. The first divergence trains the proxy only, the rest the large network.
Server:  w <- sum_c n_c w_c / sum_c n_c over surrogates and proxies.
In segmentation L and R are cross-entropies of pixels weighted by beta (eq. 8-11, medfl.methods._parts.weight_map),
without Dice. Judged by the small site's network, or by the large one, after local training and before aggregation.

Departures, and what the paper leaves open. Sums over a data set are means of mini-batches (`loss_reduction`). The proxy
sees no label (`proxy_ce`); both networks step together on the same forward passes (`schedule`). The larger divergence's
teacher side is constant. alpha's rule is ours (medfl.methods._parts.teacher_weights); its rows see the gradient of KL
alone, so their rate takes no part in lambda_J. Public batches use their own BatchNorm statistics and leave the running
ones alone (`public_bn`). Optimisers start anew each round. There is no early stopping: the best round is reported
beside the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, log_softmax
from torch.nn.modules.batchnorm import _BatchNorm

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.seeding import derive, stream
from medfl.core.storage import State
from medfl.core.task import Task
from medfl.data.prepared import Shard
from medfl.data.public import cycle
from medfl.methods._parts.aggregation import sample_shares, uniform_shares, weighted_mean
from medfl.methods._parts.extras import PublicData, SiteNetworks, deal
from medfl.methods._parts.public import shared, untracked
from medfl.methods._parts.side_stream import Aside
from medfl.methods._parts.teacher_weights import RULES, Contribution, distributions, divergence_from, head_like
from medfl.methods._parts.weight_map import Border, beta, class_balance
from medfl.methods.base import Method, class_head, option
from medfl.methods.fedgh import check_pixel_head, pixel_classes
from medfl.methods.fedtype import set_loss
from medfl.methods.proxyfl import divergence, optimizing_each, proxies
from medfl.networks.heads import entering_head, feature_size, head
from medfl.training import FitReport, Host, Objective, Site, evaluating, fit, snapshot, split_names, summed

SizedLoss = Callable[[Tensor, Any], Tensor]
"""(logits, targets) -> mean loss of a batch."""


@dataclass(frozen=True)
class FedHelp(PublicData, SiteNetworks, Method):
    """Large sites lend small ones their knowledge through proxies; small sites learn from foundation models besides."""

    large: str = option("", "names of the sites with a large network, comma-separated")
    large_network: str = option("resnet110", "their network: a value of the bundle's id `network`, or ID=VALUE")
    teachers: str = option(
        "",
        "who answers about the public data: clip-vit-l14, clip-rn50x16, biomedclip, medsam, run:DIR, ...",
    )
    lambda_j: float = option(0.2, "weight of the public loss at small sites (paper: 0.2; Table 4: 0.4)", minimum=0.0)
    lambda_r: float = option(0.1, "weight of the teachers in it (paper), 0: FedHelp--", minimum=0.0)
    lambda_f: float = option(1.0, "what the large network gives its proxy (paper), 0: FedHelp_b", minimum=0.0)
    lambda_b: float = option(0.2, "what the proxy gives back (paper), 0: FedHelp_f", minimum=0.0)
    top: int = option(
        0, "size of Omega, less than all classes; 0: 3 (paper; of three classes 2), 1 of two and in masks", minimum=0
    )
    backward: str = option(
        "ranked",
        "its top classes (eq. 5), or its whole distribution: FedHelp_s",
        choices=("ranked", "symmetric"),
    )
    alpha: str = option("table", "how much each teacher counts on each public item", choices=RULES)
    lr_alpha: float = option(0.01, "rate of alpha (ours)", minimum=0.0)
    temperature: float = option(1.0, "of both divergences, with its square as a factor (paper: none)", minimum=0.01)
    loss_reduction: str = option(
        "mean", "public and private loss as means, or the public one times P/K_i as printed", choices=("mean", "sum")
    )
    public_schedule: str = option(
        "paired",
        "a public batch beside each private one, or a pass over all public items each epoch",
        choices=("paired", "full"),
    )
    public_bn: str = option(
        "no_track",
        "BatchNorm on public batches: leave the running statistics, share them, or layers of their own",
        choices=("no_track", "shared", "separate"),
    )
    proxy_ce: float = option(0.0, "weight of the labels in the proxy's loss (paper: none; FedType: 1)", minimum=0.0)
    schedule: str = option(
        "joint", "both networks in one step, or in turns of an epoch, as FedType", choices=("joint", "alternate")
    )
    weights: str = option("samples", "aggregate by samples (paper), or uniformly", choices=("samples", "uniform"))
    mask_loss: str = option(
        "weighted", "masks: cross-entropy with beta (paper), or the bundle's own loss", choices=("weighted", "bundle")
    )
    beta_0: float = option(10.0, "height of beta between objects (U-Net)", minimum=0.0)
    sigma: float = option(5.0, "width of it in pixels (U-Net)", minimum=0.01)
    single_object: str = option(
        "zero", "beta between objects where there is one: none, or with d_2 = d_1", choices=("zero", "d2_equals_d1")
    )
    inside: bool = option(False, "beta between objects also on them")

    paper: ClassVar[str] = (
        "Asymmetrical Reciprocity-based Federated Learning for Resolving Disparities in Medical Diagnosis "
        "(Wang et al., 2025)"
    )
    tasks: ClassVar[tuple[str, ...]] = ("classification", "segmentation")
    judged: ClassVar[str] = "personal"

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the bundle's network, whose head has one output a class for each item or pixel.

        Raises:
            InputError: the head is another one, or Omega would have all classes.
        """
        if task.kind == "segmentation":
            check_pixel_head(network, task)
        else:
            class_head(network, task)
        classes = len(_weight(head(network)))
        if self.top >= classes:
            raise InputError(
                f"top={self.top} with {classes} classes", "Omega is a part of the classes", "take fewer, or 0"
            )
        return network

    @property
    def uses_public(self) -> bool:
        """Whether small sites learn from public images."""
        return self.lambda_j > 0

    @property
    def uses_teachers(self) -> bool:
        """Whether they learn from what teachers say of these."""
        return self.lambda_j > 0 and self.lambda_r > 0

    # Who is large

    @property
    def large_sites(self) -> tuple[str, ...]:
        """The names in `large`."""
        return tuple(name.strip() for name in self.large.split(",") if name.strip())

    def site_networks(self, names: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Give the large sites the large network.

        Raises:
            InputError: a name is no site's, or there is no large or no small site.
        """
        wrong = [name for name in self.large_sites if name not in names]
        if wrong:
            raise InputError(f"large={self.large}: {wrong[0]!r}", f"sites are {', '.join(names)}", "name some of them")
        if not self.large_sites or len(set(self.large_sites)) == len(names):
            missing = "small" if self.large_sites else "large"
            raise InputError(
                f"large={self.large or '(none)'}: no {missing} site among {', '.join(names)}",
                "there is at least one large site and one small site",
                "name the large ones with --set large=SITE,SITE",
            )
        (config,) = deal(self.large_network, names[:1]).values()
        return {name: config if name in self.large_sites else {} for name in names}

    def keeps_network(self, config: Mapping[str, Any]) -> bool:
        """Keep a large network where it is."""
        return bool(config)

    def check(self, site: Site) -> None:
        """Refuse what small sites cannot learn from.

        Raises:
            InputError: no public data, or public masks with several structures where a teacher knows one.
        """
        if site.name in self.large_sites or not self.lambda_j:
            return
        public = shared(site)
        if site.task.kind == "segmentation" and public.answers and public.task.num_classes > 2:
            raise InputError(
                f"public masks with {public.task.num_classes} classes",
                "teachers tell a foreground from the background",
                "name other public data, or teachers= for none",
            )

    # Server half

    def aggregate(self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int) -> State:
        """Average surrogates and proxies."""
        shares = sample_shares(replies) if self.weights == "samples" else uniform_shares(replies)
        return {**server, "weights": weighted_mean(replies, "weights", shares)}

    # Site half

    def init_site(self, site: Site) -> State:
        """Start from the initial weights; a small site draws psi, and all teachers count the same."""
        network = site.model(site.initial_weights)
        state: State = {"weights": snapshot(network)}
        if site.task.kind == "segmentation" and self.mask_loss == "weighted":
            state["balance"] = _balance(site.train.deterministic(whole=True), len(_weight(head(network))))
        if site.name in self.large_sites or not self.lambda_j:
            return state
        public = shared(site)
        with stream(derive(site.seed, "public head"), "draw"):
            layer = head_like(head(network), public.task.num_classes)
        state["public_head"] = snapshot(layer)
        state["alpha"] = Contribution.start(self.alpha, len(public), len(public.answers), feature_size(network))
        if public.task.kind == "segmentation" and self.mask_loss == "weighted":
            state["public_balance"] = _balance(public.shard, public.task.num_classes)
        if self.public_bn == "separate":
            layers = split_names(network, (_BatchNorm,))
            state["public_norm"] = {name: site.initial_weights[name].clone() for name in sorted(layers)}
        return state

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train as a large or as a small site; reply the proxy or the surrogate."""
        if site.name in self.large_sites:
            trained, kept = self._large(site, state, down)
        else:
            trained, kept = self._small(site, state, down)
        return {**state, **kept}, Message({"weights": trained}, {"samples": site.num_samples})

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the large network, or the small one as it was trained here."""
        return site.model(state["weights"])

    def _loss(self, site: Site, balance: Tensor | None) -> SizedLoss:
        """Return the loss on labels: the bundle's, or in segmentation the cross-entropy of pixels times beta."""
        if balance is None:
            return site.loss
        border = Border(self.beta_0, self.sigma, self.single_object, self.inside)
        return lambda z, y: _weighted(z, y, balance, border)

    # Small sites

    def _small(self, site: Site, state: State, down: Message) -> tuple[dict[str, Tensor], State]:
        network = site.model(down["weights"])
        loss = self._loss(site, state.get("balance"))
        if not self.lambda_j:
            fit(network, site, objective=lambda net, x, y: loss(net(x), y))
            return snapshot(network), {"weights": snapshot(network)}
        lesson, items = _Lesson(self, site, state, network), _Items(self, site)
        factor = self.lambda_j * (len(lesson.public) / site.num_samples if self.loss_reduction == "sum" else 1)

        def with_items(x: Any, y: Any) -> tuple[Any, ...]:
            return x, y, *items.take(len(x))

        def objective(pair: nn.Module, x: Any, y: Any, *taken: Tensor) -> Tensor:
            return loss(network(x), y) + factor * lesson.loss(*taken)  # eq. 3

        steady = replace(site, train=_passes(site, len(lesson.public))) if self.public_schedule == "full" else site
        fit(nn.ModuleList([network, lesson.trained]), optimizing_each(steady), objective=objective, feed=with_items)
        trained = snapshot(network)
        return trained, {"weights": trained, **lesson.state}

    # Large sites

    def _large(self, site: Site, state: State, down: Message) -> tuple[dict[str, Tensor], State]:
        large, proxy = site.model(state["weights"]), proxies(site).lease(down["weights"])
        if not self.lambda_f and not self.proxy_ce:
            proxy.eval()  # it has nothing to learn, so its running statistics stay too
        loss = self._loss(site, state.get("balance"))
        train = self._in_turns if self.schedule == "alternate" else self._together
        train(site, large, proxy, loss)
        return snapshot(proxy), {"weights": snapshot(large)}

    def _together(self, site: Site, large: nn.Module, proxy: nn.Module, loss: SizedLoss) -> None:
        beside = Aside(site, "proxy")

        def objective(pair: nn.Module, x: Any, y: Any) -> Tensor:
            z = large(x)
            with beside():
                z_proxy = proxy(x)
            return self._of_large(loss, z, z_proxy, y) + self._of_proxy(loss, z, z_proxy, y)  # eq. 7

        fit(nn.ModuleList([large, proxy]), optimizing_each(site), objective=objective)

    def _in_turns(self, site: Site, large: nn.Module, proxy: nn.Module, loss: SizedLoss) -> None:
        once, memory = replace(site.for_epochs(1), journal=[]), [State(), State()]
        reports: list[FitReport] = []

        def of_large(network: nn.Module, x: Any, y: Any) -> Tensor:
            with torch.no_grad():
                z_proxy = proxy(x)
            return self._of_large(loss, network(x), z_proxy, y)

        def of_proxy(network: nn.Module, x: Any, y: Any) -> Tensor:
            with torch.no_grad():
                z = large(x)
            return self._of_proxy(loss, z, network(x), y)

        turns: tuple[tuple[nn.Module, nn.Module, Objective], ...] = ((large, proxy, of_large), (proxy, large, of_proxy))
        for epoch in range(site.settings.epochs):
            purpose = f"local {epoch}" if epoch else "local"
            for turn, (network, other, objective) in enumerate(turns):
                if turn and not (self.lambda_f or self.proxy_ce):
                    continue
                with evaluating(other):
                    report = fit(network, once, objective=objective, purpose=purpose, optimizer_state=memory[turn])
                memory[turn] = report.optimizer_state or {}
                reports += [] if turn else [report]
        site.journal.append(summed(reports))

    def _of_large(self, loss: SizedLoss, z: Tensor, z_proxy: Tensor, y: Any) -> Tensor:
        """Return L + lambda_B <-KD, what trains the large network (eq. 2, 5, 6)."""
        own = loss(z, y)
        if not self.lambda_b:
            return own
        if self.backward == "symmetric":
            return own + self.lambda_b * self._divergence(z, z_proxy)
        return own + self.lambda_b * set_loss(z, top_set(z_proxy, self._size(z)))

    def _of_proxy(self, loss: SizedLoss, z: Tensor, z_proxy: Tensor, y: Any) -> Tensor:
        """Return lambda_F ->KD, what trains the proxy (eq. 4), and the labels' part where one is asked for."""
        total = z_proxy.new_zeros(())
        if self.lambda_f:
            total = total + self.lambda_f * self._divergence(z_proxy, z)
        return total + self.proxy_ce * loss(z_proxy, y) if self.proxy_ce else total

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        return divergence(student / self.temperature, teacher / self.temperature) * self.temperature**2

    def _size(self, z: Tensor) -> int:
        """Return |Omega|."""
        return self.top or (min(3, z.shape[1] - 1) if z.ndim == 2 else 1)


class _Items:
    """The public items of a small site's round, one batch after the other, and what teachers answered about them."""

    def __init__(self, method: FedHelp, site: Site) -> None:
        self.public, self.device = shared(site), site.device
        self.answered = bool(method.lambda_r and self.public.answers)
        generator = torch.Generator().manual_seed(derive(site.seed, "public"))
        self.walk = cycle(len(self.public), generator)

    def take(self, size: int) -> list[Tensor]:
        """Return inputs, targets and positions of the next items, and the answers (M, B, ...) where some count."""
        positions = self.walk(size)
        x, y = self.public.at(positions)
        taken = [x, torch.as_tensor(y), positions]
        if self.answered:
            taken.append(self.public.answered(positions))
        return [part.to(self.device) for part in taken]


class _Lesson:
    """The public half of a small site's round: R_i of eq. 1 and 8 on one public batch after the other."""

    def __init__(self, method: FedHelp, site: Site, state: State, network: nn.Module) -> None:
        self.method, self.network, self.public = method, network, shared(site)
        self.head = head_like(head(network), self.public.task.num_classes).to(site.device)
        self.head.load_state_dict(state["public_head"])
        self.contribution = Contribution(method.alpha, state["alpha"], len(self.public.answers), method.lr_alpha)
        self.balance = state.get("public_balance")
        self.border = Border(method.beta_0, method.sigma, method.single_object, method.inside)
        self.beside = Aside(site, "lesson")
        self.norm: dict[str, Tensor] = {}
        own: list[nn.Parameter] = []
        if "public_norm" in state:
            trainable = {name for name, _ in network.named_parameters()}
            for name, tensor in state["public_norm"].items():
                copied = tensor.to(site.device).clone()
                self.norm[name] = nn.Parameter(copied) if name in trainable else copied
            own = [value for value in self.norm.values() if isinstance(value, nn.Parameter)]
        self.trained = _With(self.head, own)

    @property
    def state(self) -> State:
        """What survives the round."""
        kept: State = {"public_head": snapshot(self.head), "alpha": self.contribution.state}
        if self.norm:
            kept["public_norm"] = {name: value.detach().clone() for name, value in self.norm.items()}
        return kept

    def loss(self, x: Tensor, y: Tensor, positions: Tensor, answers: Tensor | None = None) -> Tensor:
        """Return R of public items: CE + lambda_R KL(t || q); without answers CE."""
        method = self.method
        with self.beside(), self._norms():
            features, z = self._outputs(x)
        exact = z.to(torch.promote_types(z.dtype, torch.float32))
        labels = y.long() if exact.ndim == 2 else pixel_classes(y).reshape(len(y), *exact.shape[2:])
        weight = None if self.balance is None else beta(labels, self.balance, self.border)  # eq. 10
        ce = _mean(cross_entropy(exact, labels, reduction="none"), weight)
        if answers is None:
            return ce
        warm = method.temperature
        answers = distributions(answers, exact.ndim > 2)
        if warm != 1:
            answers = answers.clamp(min=1e-12).pow(1 / warm)
            answers = answers / answers.sum(2, keepdim=True)
        log_q = log_softmax(exact / warm, 1)
        with torch.enable_grad():
            t = self.contribution.mix(positions, _pooled(features), answers, log_q, labels)
        return ce + method.lambda_r * warm**2 * _mean(divergence_from(t, log_q), weight)

    def _outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what enters the head, and what psi makes of it."""
        depth = self.public.depth
        volume = x[..., None].expand(*x.shape, depth) if depth else x
        with entering_head(self.network) as seen:
            if self.norm:
                functional_call(self.network, self.norm, (volume,))
            else:
                self.network(volume)
        return seen[0], self.public.flat(self.head(seen[0]))

    @contextmanager
    def _norms(self) -> Iterator[None]:
        with untracked(self.network) if self.method.public_bn == "no_track" else nullcontext():
            yield


class _With(nn.Module):
    """A layer and parameters of another one, trained together."""

    def __init__(self, layer: nn.Module, others: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.layer, self.others = layer, nn.ParameterList(others)


def top_set(z: Tensor, size: int) -> Tensor:
    """Return Omega: the classes with the largest logits, (B, K) or (B, K, H, W[, D]) bool; of equals the lower ones."""
    order = z.detach().argsort(dim=1, descending=True, stable=True).narrow(1, 0, size)
    return torch.zeros_like(z, dtype=torch.bool).scatter(1, order, True)


def _weighted(z: Tensor, y: Any, balance: Tensor, border: Border) -> Tensor:
    """Return the mean over pixels of beta CE (eq. 11), z (B, K, H, W[, D])."""
    exact = z.to(torch.promote_types(z.dtype, torch.float32))
    labels = pixel_classes(y).reshape(len(y), *exact.shape[2:])
    return _mean(cross_entropy(exact, labels, reduction="none"), beta(labels, balance, border))


def _mean(values: Tensor, weight: Tensor | None) -> Tensor:
    return values.mean() if weight is None else (values * weight).mean()


def _pooled(features: Tensor) -> Tensor:
    """Return features (B, d), of maps their mean over the pixels."""
    return features.detach() if features.ndim == 2 else features.detach().flatten(2).mean(2)


def _balance(shard: Shard, classes: int) -> Tensor:
    """Return beta^c over all pixels of the masks, one by one since whole ones may differ in size."""
    return class_balance((pixel_classes(y) for _, y in shard.batches(1)), classes)


def _weight(layer: Any) -> Tensor:
    weight: Tensor = layer.weight
    return weight


def _passes(site: Site, length: int) -> Shard:
    """Return a site's training items, repeated or drawn to so many."""
    own = site.train.indices
    generator = torch.Generator().manual_seed(derive(site.seed, "passes"))
    order = torch.cat([torch.randperm(len(own), generator=generator) for _ in range(-(-length // len(own)))])
    return Shard(site.train.prepared, own[order[:length]])


METHOD = FedHelp
