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
In segmentation L and R are the bundle's loss, or as printed cross-entropies of pixels weighted by beta (`mask_loss`;
eq. 8-11, `pixel_weights`). Judged by a site's small or large network, between training and aggregation.

Departures, and what the paper leaves open. Sums over a data set are means over mini-batches (`loss_reduction`; as
printed the public loss of a small site would weigh P/K_i times as much, 3 to 11 times lambda_J's 0.2), with a public
batch beside each private one (`public_schedule`); masks by the bundle's own loss (docs/results.md says why); the
bundles' preset `paper` has all three as printed. The proxy sees no label (`proxy_ce`); both networks step together on
the same forward passes (`schedule`). The teacher side of the larger divergence is constant. alpha's rule is ours
(`lesson`), by the gradient of KL alone, whatever lambda_J. Public batches use their own
BatchNorm statistics and leave the running ones unchanged (`public_bn`). Optimisers restart each round (the run's
`keep_optimizer`). Early stopping is the run's `patience`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from medfl.core import (
    Config,
    InputError,
    Message,
    Task,
    Tensors,
    generator_of,
    not_among,
    split_commas,
)
from medfl.data import Shard
from medfl.methods._parts.class_heads import class_count, with_class_head
from medfl.methods._parts.distillation import divergence, set_loss
from medfl.methods._parts.extras import SiteNetworks, deal
from medfl.methods._parts.mutual_learning import (
    optimizing_each,
    proxy_model,
    train_in_turns,
    train_together,
)
from medfl.methods._parts.public import public_data
from medfl.methods.base import Collated, one_of, option
from medfl.methods.fedhelp.lesson import Lesson, LessonOptions
from medfl.methods.fedhelp.pixel_weights import pixel_loss
from medfl.storage import State
from medfl.training import Site, fit, snapshot

SizedLoss = Callable[[Tensor, Collated], Tensor]
"""(logits, targets) -> mean loss of a batch."""


@dataclass(frozen=True)
class FedHelp(LessonOptions, SiteNetworks):
    """Large sites lend small ones their knowledge through proxies; small sites learn from foundation models besides."""

    large: str = option(
        "auto", "names of the sites with a large network, comma-separated; auto: the larger half"
    )
    large_network: str = option(
        "resnet110", "their network: a value of the bundle's id `network`, or ID=VALUE"
    )
    lambda_j: float = option(
        0.2, "weight of the public loss at small sites (paper: 0.2; Table 4: 0.4)", minimum=0.0
    )
    lambda_f: float = option(
        1.0, "what the large network gives its proxy (paper), 0: FedHelp_b", minimum=0.0
    )
    lambda_b: float = option(0.2, "what the proxy gives back (paper), 0: FedHelp_f", minimum=0.0)
    top: int = option(
        0,
        "size of Omega, less than all classes; 0: 3 (paper; of three classes 2), 1 of two and in masks",
        minimum=0,
    )
    backward: str = one_of(
        "its top classes (eq. 5), or all of it: FedHelp_s", "ranked", "symmetric"
    )
    loss_reduction: str = one_of(
        "public and private loss as means, or the public one times P/K_i as printed", "mean", "sum"
    )
    public_schedule: str = one_of(
        "a public batch beside each private one, or a pass over all public items each epoch",
        "paired",
        "full",
    )
    proxy_ce: float = option(
        0.0, "weight of the labels in the proxy's loss (paper: none; FedType: 1)", minimum=0.0
    )
    schedule: str = one_of(
        "both networks in one step, or in turns of an epoch, as FedType", "joint", "alternate"
    )

    paper = (
        "Asymmetrical Reciprocity-based Federated Learning for Resolving Disparities in Medical Diagnosis "
        "(Wang et al., 2025)"
    )
    tasks = ("classification", "segmentation")
    judged = "personal"

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the bundle's network, whose head has one output per class for each item or pixel.

        Raises:
            InputError: the head is of another kind, or Omega would contain all classes.
        """
        classes = class_count(with_class_head(network, task))
        if self.top >= classes:
            raise InputError(
                f"top={self.top} with {classes} classes",
                "Omega is a part of the classes",
                "take fewer, or 0",
            )
        return network

    @property
    def uses_public(self) -> bool:
        """Whether small sites learn from public images."""
        return self.lambda_j > 0

    @property
    def uses_teachers(self) -> bool:
        """Whether they learn from teachers' outputs for these."""
        return self.lambda_j > 0 and self.lambda_r > 0

    # Who is large

    @property
    def large_sites(self) -> tuple[str, ...]:
        """The names in `large`; none as long as they are not settled."""
        return tuple(name for name in split_commas(self.large) if name not in ("", "auto"))

    def settled(self, sizes: Mapping[str, int]) -> FedHelp:
        """Choose the larger half of the sites (of equal ones the first) if the user names none."""
        # sorting is stable: of equal sites the first of the partition is large
        larger = sorted(sizes, key=lambda name: -sizes[name])[: len(sizes) // 2]
        if self.large != "auto":
            return self

        return replace(self, large=",".join(n for n in sizes if n in larger))

    def site_networks(self, names: Sequence[str]) -> Mapping[str, Config]:
        """Give the large sites the large network.

        Raises:
            InputError: a name is not a site's, or there is no large or no small site.
        """
        wrong = not_among(self.large_sites, names)
        if wrong:
            raise InputError(
                f"large={self.large}: {wrong[0]!r}",
                f"sites are {', '.join(names)}",
                "name some of them",
            )

        if not self.large_sites or len(set(self.large_sites)) == len(names):
            missing = "small" if self.large_sites else "large"
            raise InputError(
                f"large={self.large or '(none)'}: no {missing} site among {', '.join(names)}",
                "there is at least one large site and one small site",
                "name the large ones with --set large=SITE,SITE",
            )

        (config,) = deal(self.large_network, names[:1], "large_network").values()
        return {name: config if name in self.large_sites else {} for name in names}

    def keeps_network(self, config: Config) -> bool:
        """Keep a large network where it is."""
        return bool(config)

    def check(self, site: Site) -> None:
        """Refuse what small sites cannot learn from.

        Raises:
            InputError: no public data, or public masks with several structures where a teacher knows one.
        """
        if site.name in self.large_sites or not self.lambda_j:
            return
        public = public_data(site)
        if site.task.kind == "segmentation" and public.answers and public.task.num_classes > 2:
            raise InputError(
                f"public masks with {public.task.num_classes} classes",
                "teachers tell a foreground from the background",
                "name other public data, or teachers= for none",
            )

    # Site half

    def init_site(self, site: Site) -> State:
        """Start from the initial weights; a small site prepares its lessons."""
        network = site.model(site.initial_weights)
        state: State = {"weights": snapshot(network)}
        if self.weighs_pixels(site.task):
            state["balance"] = self.balance(
                site.train.deterministic(uncropped=True), class_count(network)
            )

        if site.name in self.large_sites or not self.lambda_j:
            return state

        return {**state, **self.initial_lesson_state(site, network)}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train as a large or as a small site; reply with the proxy or the surrogate."""
        half = self._train_large if site.name in self.large_sites else self._train_small
        trained, changed_state = half(site, state, down)
        return {**state, **changed_state}, site.reply(trained)

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the large network, or the small one as it was trained here."""
        return site.model(state["weights"])

    def _loss(self, site: Site, balance: Tensor | None) -> SizedLoss:
        """Return the loss on labels: the bundle's, or for segmentation that of pixels times beta (eq. 11)."""
        if balance is None:
            return site.loss
        border = self.border()
        return lambda z, y: pixel_loss(z, y, balance, border)

    # Small sites

    def _train_small(self, site: Site, state: State, down: Message) -> tuple[Tensors, State]:
        network = site.model(down["weights"])
        loss = self._loss(site, state.get("balance"))
        if not self.lambda_j:
            fit(network, site, objective=lambda net, x, y: loss(net(x), y))
            return snapshot(network), {"weights": snapshot(network)}

        lesson = Lesson(self, site, state, network)
        following = lesson.items(site)
        factor = self.lambda_j
        if self.loss_reduction == "sum":  # P / K_i: the sums of eq. 3, over the site's number
            factor *= len(lesson.public) / site.num_samples

        def objective(pair: nn.Module, x: Collated, y: Collated, *items: Tensor) -> Tensor:
            return loss(network(x), y) + factor * lesson.loss(*items)  # eq. 3

        steady = site
        if self.public_schedule == "full":
            steady = replace(site, train=_passes(site, len(lesson.public)))

        both = nn.ModuleList([network, lesson.trained])
        fit(
            both,
            optimizing_each(steady),
            objective=objective,
            feed=lambda x, y: (x, y, *following(len(x))),
        )
        trained = snapshot(network)
        return trained, {"weights": trained, **lesson.state}

    # Large sites

    def _train_large(self, site: Site, state: State, down: Message) -> tuple[Tensors, State]:
        large = site.model(state["weights"])
        proxy = proxy_model(site, down["weights"])
        if not self.lambda_f and not self.proxy_ce:
            proxy.eval()  # it has nothing to learn, so its running statistics are unchanged too

        loss = self._loss(site, state.get("balance"))
        if self.schedule == "alternate":
            self._in_turns(site, large, proxy, loss)
        else:
            self._together(site, large, proxy, loss)

        return snapshot(proxy), {"weights": snapshot(large)}

    def _together(self, site: Site, large: nn.Module, proxy: nn.Module, loss: SizedLoss) -> None:
        def both_losses(z: Tensor, z_proxy: Tensor, y: Collated) -> Tensor:
            # Eq. 7
            return self._large_loss(loss, z, z_proxy, y) + self._proxy_loss(loss, z, z_proxy, y)

        train_together(site, large, proxy, both_losses, "proxy")

    def _in_turns(self, site: Site, large: nn.Module, proxy: nn.Module, loss: SizedLoss) -> None:
        def large_objective(network: nn.Module, x: Collated, y: Collated) -> Tensor:
            with torch.no_grad():
                z_proxy = proxy(x)
            return self._large_loss(loss, network(x), z_proxy, y)

        def proxy_objective(network: nn.Module, x: Collated, y: Collated) -> Tensor:
            with torch.no_grad():
                z = large(x)
            return self._proxy_loss(loss, z, network(x), y)

        turns = [(large, proxy, {"objective": large_objective})]
        if self.lambda_f or self.proxy_ce:
            turns.append((proxy, large, {"objective": proxy_objective}))

        train_in_turns(site, lambda epoch: turns)

    def _large_loss(self, loss: SizedLoss, z: Tensor, z_proxy: Tensor, y: Collated) -> Tensor:
        """Return L + lambda_B <-KD, which trains the large network (eq. 2, 5, 6)."""
        on_labels = loss(z, y)
        if not self.lambda_b:
            return on_labels
        if self.backward == "symmetric":
            return on_labels + self.lambda_b * self._divergence(z, z_proxy)
        return on_labels + self.lambda_b * set_loss(z, top_set(z_proxy, self._size(z)))

    def _proxy_loss(self, loss: SizedLoss, z: Tensor, z_proxy: Tensor, y: Collated) -> Tensor:
        """Return lambda_F ->KD, which trains the proxy (eq. 4), and the labels' part if requested."""
        total = z_proxy.new_zeros(())
        if self.lambda_f:
            total = total + self.lambda_f * self._divergence(z_proxy, z)

        if self.proxy_ce:
            return total + self.proxy_ce * loss(z_proxy, y)

        return total

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        warm = self.temperature
        # Gradients shrink with the square of the temperature; the factor compensates.
        return divergence(student / warm, teacher / warm) * warm**2

    def _size(self, z: Tensor) -> int:
        """Return |Omega|."""
        if self.top:
            return self.top
        if z.ndim > 2:  # maps
            return 1

        return min(3, z.shape[1] - 1)


def top_set(z: Tensor, size: int) -> Tensor:
    """Return Omega: the classes with the largest logits, (B, K) or (B, K, H, W[, D]) bool; of equals the lower ones."""
    order = z.detach().argsort(dim=1, descending=True, stable=True).narrow(1, 0, size)
    return torch.zeros_like(z, dtype=torch.bool).scatter(1, order, True)


def _passes(site: Site, length: int) -> Shard:
    """Return a site's training items, repeated or subsampled to this number."""
    indices = site.train.indices
    generator = generator_of(site.seed, "passes")
    passes = -(-length // len(indices))  # rounded up
    orders = [torch.randperm(len(indices), generator=generator) for _ in range(passes)]
    return Shard(site.train.prepared, indices[torch.cat(orders)[:length]])


METHOD = FedHelp
