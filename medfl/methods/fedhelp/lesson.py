"""Lessons on public items: a second head on a site's body learns their labels and the frozen teachers' outputs.

R = mean_p [CE(psi(theta(x_p)), y_p) + lambda_R KL(t_p || softmax psi(theta(x_p)))], t_p = sum_m alpha_p^m T_m(x_p):
FedHelp (Wang et al., KDD 2025), eq. 1, of masks with every pixel weighted by beta, eq. 8.

The paper calls alpha a "learned contribution score" and gives no rule. `table` is the literal one:
a row of logits for each public item, alpha its softmax, trained by the gradient of eq. 1. That rule favours the
teacher that agrees with the student; `ce` trains the same table on -log t(y) instead, `gate` computes alpha from the
item's feature, `uniform` is 1/M.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, embedding, linear, log_softmax
from torch.nn.modules.batchnorm import _BatchNorm

from medfl.core import Tensors, Weights, derive, generator_of, pick, stream
from medfl.data.public import cycle
from medfl.methods._parts.class_heads import head_like
from medfl.methods._parts.extras import PublicData
from medfl.methods._parts.public import public_data, untracked
from medfl.methods._parts.separate_randomness import SeparateRandomness
from medfl.methods.base import one_of, option
from medfl.methods.fedhelp.pixel_weights import PixelWeights, beta, pixel_labels, weighted
from medfl.networks.heads import entering_head, feature_size, head
from medfl.storage import State
from medfl.training import Site, copied, snapshot, split_names

RULES = ("table", "gate", "ce", "uniform")
_LEAST = 1e-12  # a teacher's zero has no logarithm


@dataclass(frozen=True)
class LessonOptions(PublicData, PixelWeights):
    """A method whose sites learn from public items and teachers' outputs."""

    teachers: str = option(
        "",
        "who answers about the public data: clip-vit-l14, clip-rn50x16, biomedclip, medsam, run:DIR",
    )
    lambda_r: float = option(0.1, "weight of the teachers in it (paper), 0: FedHelp--", minimum=0.0)
    alpha: str = one_of("how much each teacher counts on each public item", *RULES)
    lr_alpha: float = option(
        0.1, "rate of alpha (ours; an item's moves by this much a round)", minimum=0.0
    )
    temperature: float = option(
        1.0, "of both divergences, with its square as a factor (paper: none)", minimum=0.01
    )
    public_bn: str = one_of(
        "BatchNorm on public batches: leave the running statistics, share them, or layers of their own",
        "no_track",
        "shared",
        "separate",
    )

    def initial_lesson_state(self, site: Site, network: nn.Module) -> State:
        """Return a site's initial State of its lessons: psi is drawn, and all teachers have equal weight."""
        public = public_data(site)
        # a stream of its own, so that no other draw moves
        with stream(derive(site.seed, "public head"), "draw"):
            layer = head_like(head(network), public.task.num_classes)

        alpha = Contribution.start(
            self.alpha, len(public), len(public.answers), feature_size(network)
        )
        state: State = {"public_head": snapshot(layer), "alpha": alpha}
        if self.weighs_pixels(public.task):
            state["public_balance"] = self.balance(public.shard, public.task.num_classes)

        if self.public_bn == "separate":
            layers = split_names(network, (_BatchNorm,))
            state["public_norm"] = copied(pick(site.initial_weights, sorted(layers)))

        return state


class Lesson:
    """The public half of a site's round; `state` is the result of the first lesson or of an earlier one's `state`.

    Attributes:
        trained: psi, and normalisation layers for public batches where they are separate.
    """

    def __init__(
        self, options: LessonOptions, site: Site, state: State, network: nn.Module
    ) -> None:
        self.options = options
        self.network = network
        self.public = public_data(site)
        self.device = site.device
        self.head = head_like(head(network), self.public.task.num_classes).to(site.device)
        self.head.load_state_dict(state["public_head"])
        self.contribution = Contribution(
            options.alpha, state["alpha"], len(self.public.answers), options.lr_alpha
        )
        self.balance = state.get("public_balance")
        self.border = options.border()
        self.randomness = SeparateRandomness(site, "lesson")
        parameters = dict(network.named_parameters())
        self.norm: Tensors = {}
        for name, tensor in state.get("public_norm", {}).items():
            value = tensor.to(site.device).clone()
            self.norm[name] = nn.Parameter(value) if name in parameters else value

        norm_parameters = [value for value in self.norm.values() if isinstance(value, nn.Parameter)]
        self.trained = nn.ModuleList([self.head, nn.ParameterList(norm_parameters)])

    @property
    def state(self) -> State:
        """What persists between rounds."""
        state = {"public_head": snapshot(self.head), "alpha": self.contribution.state}
        if self.norm:
            state["public_norm"] = copied(self.norm)
        return state

    def items(self, site: Site) -> Callable[[int], list[Tensor]]:
        """Return a function that returns inputs, targets and indices of the next items of the round.

        And the outputs (M, B, ...) if some count. Seed and position in the order belong to this function.
        """
        walk = cycle(len(self.public), generator_of(site.seed, "public"))

        def following(size: int) -> list[Tensor]:
            positions = walk(size)
            x, y = self.public.at(positions)
            batch = [x, torch.as_tensor(y), positions]
            if self.options.lambda_r and self.public.answers:
                batch.append(self.public.answered(positions))

            return [part.to(self.device) for part in batch]

        return following

    def loss(
        self, x: Tensor, y: Tensor, positions: Tensor, answers: Tensor | None = None
    ) -> Tensor:
        """Return R of public items: CE + lambda_R KL(t || q); without teachers CE."""
        warm = self.options.temperature
        with self.randomness(), untracked(self.network, self.options.public_bn == "no_track"):
            features, z = self._outputs(x)

        exact = z.to(torch.promote_types(z.dtype, torch.float32))
        labels = y.long() if exact.ndim == 2 else pixel_labels(y, exact)
        weight = None if self.balance is None else beta(labels, self.balance, self.border)  # eq. 10
        ce = weighted(cross_entropy(exact, labels, reduction="none"), weight)

        if answers is None:
            return ce

        answers = distributions(answers, exact.ndim > 2)
        if warm != 1:
            # Distributions softened by the temperature: p^(1/T), normalised again.
            answers = answers.clamp(min=1e-12).pow(1 / warm)
            answers = answers / answers.sum(2, keepdim=True)

        log_q = log_softmax(exact / warm, 1)
        if features.ndim == 2:
            pooled = features.detach()
        else:
            pooled = features.detach().flatten(2).mean(2)

        with torch.enable_grad():
            # The caller may have disabled gradients; alpha's own step needs them.
            t = self.contribution.mix(positions, pooled, answers, log_q, labels)

        return ce + self.options.lambda_r * warm**2 * weighted(divergence_from(t, log_q), weight)

    def _outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's input, and psi's output for it."""
        depth = self.public.depth
        volume = x[..., None].expand(*x.shape, depth) if depth else x
        with entering_head(self.network) as entering:
            if self.norm:
                functional_call(self.network, self.norm, (volume,))
            else:
                self.network(volume)

        return entering[0], self.public.flat(self.head(entering[0]))


# The weight of each teacher


class Contribution:
    """The teachers' shares alpha (M, B) on the public items of a batch, and one step of their training."""

    def __init__(self, rule: str, state: Weights, teachers: int, lr: float) -> None:
        """Continue from what `state` returned before."""
        self.rule = rule
        self.teachers = teachers
        self.values = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
        self._optimizer: torch.optim.Optimizer | None = None

        parameters = list(self.values.values())
        if rule == "gate" and parameters:
            # a new one each round: its moments would have to be in the State
            self._optimizer = torch.optim.Adam(parameters, lr=lr)
        elif parameters:
            # Only the rows of a batch move: with Adam's dense moments others would drift.
            self._optimizer = torch.optim.SparseAdam(parameters, lr=lr)

    @staticmethod
    def start(rule: str, items: int, teachers: int, features: int) -> Tensors:
        """Return the first state: alpha = 1/M everywhere; nothing if nothing can be learned."""
        if teachers < 2 or rule == "uniform":
            return {}
        if rule == "gate":
            return {"weight": torch.zeros(teachers, features), "bias": torch.zeros(teachers)}
        return {"table": torch.zeros(items, teachers)}

    @property
    def state(self) -> State:
        """What persists between rounds."""
        return copied(self.values)

    def alpha(self, positions: Tensor, features: Tensor) -> Tensor:
        """Return alpha (M, B) for the items at indices (B,) with features (B, d), which are held constant."""
        if not self.values:
            return torch.full(
                (self.teachers, len(positions)), 1 / self.teachers, device=features.device
            )
        if self.rule == "gate":
            logits = linear(features.detach().float(), self.values["weight"], self.values["bias"])
        else:
            # A sparse gradient: SparseAdam then moves only the rows of this batch.
            logits = embedding(positions.to(features.device), self.values["table"], sparse=True)

        return logits.softmax(1).T

    def mix(
        self, positions: Tensor, features: Tensor, answers: Tensor, log_q: Tensor, y: Tensor
    ) -> Tensor:
        """Return the teachers' mixture (B, C, ...), and train alpha by one step on the inputs of the mixture.

        Args:
            positions: (B,) of the public items.
            features: (B, d) of the student.
            answers: (M, B, C, ...) distributions.
            log_q: (B, C, ...) the student's log-probabilities; held constant: the mixture's gradient is only for alpha.
            y: (B, ...) class indices, for the rule `ce`.
        """
        t = mixture(self.alpha(positions, features), answers)
        if self._optimizer is not None:
            nll = -t.clamp(min=_LEAST).log().gather(1, y[:, None])  # (B, 1, ...)
            if self.rule == "ce":
                loss = nll.mean()
            else:
                loss = divergence_from(t, log_q.detach()).mean()

            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()

        return t.detach()


def mixture(alpha: Tensor, answers: Tensor) -> Tensor:
    """Return t = sum_m alpha^m T_m, (B, C, ...), of alpha (M, B) and distributions (M, B, C, ...)."""
    return (alpha.reshape(*alpha.shape, *[1] * (answers.ndim - 2)) * answers).sum(0)


def divergence_from(t: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(t || q) of each item or pixel, (B, ...), of t (B, C, ...) and log q; finite where t has zeros."""
    safe = t.clamp(min=_LEAST)
    return (safe * (safe.log() - log_q)).sum(1)


def distributions(answers: Tensor, segmentation: bool) -> Tensor:
    """Return teachers' answers as distributions (M, B, C, ...): a foreground logit l is [1 - sigma(l), sigma(l)]."""
    if not segmentation:
        return answers
    # sigma(-l) is 1 - sigma(l) without cancelling.
    return torch.stack([(-answers).sigmoid(), answers.sigmoid()], 2)
