"""FedSemi: sites without labels learn from the global model, as a mean teacher that starts as that model.

The setting is that of RSCFed (Liang et al., CVPR 2022), each site with all labels or with none; threshold and strong
view are FixMatch's (Sohn et al., NeurIPS 2020), the teacher Mean Teacher's (Tarvainen and Valpola, NIPS 2017).

With labels:    FedAvg's site.
Without:        teacher t <- w, student s <- w; each step, for a batch x as the bundle's random transforms give it
                q = softmax(t(x));  a = 1[max q >= threshold]                      (in segmentation of each pixel)
                y = one-hot argmax q, u = 1 where a;  y = q, u = unsure elsewhere
                s <- s - lr grad mean(u CE(s(A(x)), y)),   A: other intensities, a part cut out, perhaps mirrored
                t <- decay t + (1 - decay) s, parameters alone
                the reply has s with the buffers of w: running statistics are those of images that nobody changed
Server:         w <- sum_k p_k w_k,  p_k ~ n_k at sites with labels, weight r_k n_k at the others, r_k their mean of a;
                in the first `warmup` rounds 0 there, for a teacher that knows nothing is soon sure of it: such a
                site then takes one batch, only to tell r_k, by which one sees what the model has learned

Departures. FixMatch has labelled images in each batch; here an unlabelled site has none, and its confident predictions
cover few classes, so that it would forget the others: where it is not confident it keeps the teacher's probabilities
(`unsure=0` omits them). RSCFed uses the squared distance to sharpened ones and keeps teachers between rounds, and its
server averages random subsets by their distance; `warmup` replaces its first model, of the labelled sites. r_k is
ours (`count=all` omits it): a site without confident predictions has learned nothing. A moves no pixel except by the
mirroring, in classification; in segmentation the cut-out part is not learned. A single output is the logit of class 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from medfl.core import InputError, Message, Messages, generator_of
from medfl.methods._parts.extras import WithoutLabels
from medfl.methods.base import Collated, Method, one_of, option, sample_shares, weighted_mean
from medfl.storage import State
from medfl.training import Feed, Host, Site, autocast, evaluating, fit, snapshot

_LEAST = 1e-3  # for r_k, which is in a reply: a number a thousand times smaller than others' is refused there


@dataclass(frozen=True)
class FedSemi(Method, WithoutLabels):
    """Unlabelled sites train on the global model's confident pseudo-labels; labelled sites train as in FedAvg."""

    threshold: float = option(
        0.95, "least probability of a pseudo-label (FixMatch)", minimum=0.0, maximum=1.0
    )
    warmup: int = option(5, "first rounds, in which only sites with labels count", minimum=0)
    unsure: float = option(
        1.0, "weight of the teacher's probabilities below that; 0: left out", minimum=0.0
    )
    weight: float = option(1.0, "multiplier for the sample count of unlabelled sites", minimum=0.0)
    count: str = one_of("images of such a site: those with pseudo-labels, or all", "sure", "all")
    decay: float = option(
        0.999, "of the teacher's mean over steps; 1: it stays", minimum=0.0, maximum=1.0
    )
    strength: float = option(1.0, "of the change of intensities", minimum=0.0)
    mirror: bool = option(True, "mirror images (classification)")

    paper = (
        "RSCFed: Random Sampling Consensus Federated Semi-supervised Learning (Liang et al., 2022)"
    )
    tasks = ("classification", "segmentation")

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Average, with unlabelled sites weighted by `weight`; if all weights are 0, change nothing."""
        counted = {}
        for name, reply in replies.items():
            counted[name] = Message({}, {"samples": self._counted(reply, host.round)})

        if not any(message.scalars["samples"] for message in counted.values()):
            return server
        return {**server, "weights": weighted_mean(replies, "weights", sample_shares(counted))}

    def _weight(self, round_: int) -> float:
        return self.weight if round_ > self.warmup else 0.0

    def _counted(self, reply: Message, round_: int) -> float:
        samples = reply.scalars["samples"]
        if "sure" not in reply.scalars:
            return samples

        share = 1.0
        if self.count == "sure":
            share = min(1.0, max(0.0, reply.scalars["sure"]))  # r_k, from outside: not trusted

        return samples * self._weight(round_) * share

    def observed(self, server: State, replies: Messages) -> Mapping[str, float]:
        """Return the mean share of pseudo-labelled items at the unlabelled sites."""
        sure = []
        for name in sorted(replies):
            if "sure" in replies[name].scalars:
                sure.append(replies[name].scalars["sure"])

        return {"sure": sum(sure) / len(sure)} if sure else {}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train as FedAvg; without labels on the teacher's pseudo-labels, in the warm-up on one batch only."""
        samples = site.num_samples
        if site.train.labelled:
            return super().local_update(site, state, down)

        if not self._weight(site.round):
            first = site.train.indices[: site.settings.batch_size]
            site = replace(site.for_epochs(1), train=replace(site.train, indices=first))

        model = site.model(down["weights"])
        teacher = site.model(down["weights"])
        sure: list[Tensor] = []
        fit(
            model,
            site,
            objective=masked_cross_entropy,
            feed=self._lessons(model, teacher, site, sure),
        )
        share = max(_LEAST, float(torch.stack(sure).mean())) if sure else _LEAST
        # The buffers of w: those of s come from strong views, which no real image resembles.
        weights = snapshot(model)
        for name, _ in model.named_buffers():
            if name in down["weights"]:
                weights[name] = down["weights"][name]

        return state, Message({"weights": weights}, {"samples": samples, "sure": share})

    def _lessons(
        self, model: nn.Module, teacher: nn.Module, site: Site, sure: list[Tensor]
    ) -> Feed:
        """Return a feed: batch -> its strong view, the pseudo-labels and the weight of each."""
        generator = generator_of(site.seed, "strong view")
        is_classification = site.task.kind == "classification"

        def feed(x: Collated, y: None) -> tuple[Collated, ...]:
            if sure and self.decay < 1:
                # The step on the previous batch has been taken by now: t <- decay t + (1 - decay) s.
                ema_update(teacher, model, self.decay)

            with torch.no_grad(), evaluating(teacher), autocast(site):
                q = class_logits(teacher, x).float().softmax(1)  # (B, K, ...)

            chance, label = q.max(1, keepdim=True)  # (B, 1, ...)
            certain = chance >= self.threshold
            sure.append(certain.float().mean())
            # y: one-hot where the teacher is sure, its probabilities elsewhere.
            target = torch.where(certain, torch.zeros_like(q).scatter_(1, label, 1.0), q)
            weight = torch.where(certain, 1.0, self.unsure).squeeze(1)
            view, visible = strong_view(
                x, self.strength, self.mirror and is_classification, generator
            )

            return view, target, weight if is_classification else weight * visible

        return feed


# Pseudo-labels. All random numbers are drawn on the CPU, one row per image, so that all devices see the same views.


def strong_view(
    x: Tensor, strength: float, mirror: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return changed images (B, C, H, W[, D]), and a map (B, H, W[, D]) that is 0 where something was cut out, else 1.

    With m and s the mean and deviation of an image and u_i uniform in -1 to 1, it becomes
    m + (1 + 0.5 u_1)(x - m) + 0.5 s u_2 + 0.25 s |u_3| n, n normal, where 0.5 and 0.25 are times `strength`; then a box
    with a quarter to half of each side is set to m.

    Args:
        x: the images.
        strength: of the change of intensities; 0 leaves them unchanged.
        mirror: flip half of the images along their last axis.
        generator: for all random numbers.
    """
    count = len(x)
    # of each image: three changes of intensity, whether it is mirrored, and a length and a start along each axis
    sides = x.shape[2:]
    u = torch.rand(count, 4 + 2 * len(sides), generator=generator)
    normal = torch.randn(x.shape, generator=generator).to(x)
    per_image = (count, *[1] * (x.ndim - 1))
    terms = [(2 * column - 1).reshape(per_image).to(x) for column in u[:, :3].T]
    flat = x.flatten(1)
    mean = flat.mean(1).reshape(per_image)
    deviation = flat.std(1, correction=0).reshape(per_image)
    gain = strength * 0.5 * terms[0]
    shift = strength * 0.5 * terms[1]
    noise = strength * 0.25 * terms[2]
    view = mean + (1 + gain) * (x - mean) + deviation * (shift + noise.abs() * normal)
    visible = _outside_a_box(u[:, 4:], sides).to(x)
    view = torch.where(visible.unsqueeze(1) > 0, view, mean)

    if mirror:
        view = torch.where(u[:, 3].reshape(per_image).to(x) < 0.5, view.flip(-1), view)

    return view, visible


def _outside_a_box(u: Tensor, sides: torch.Size) -> Tensor:
    """Return (B, *sides): 0 in a box drawn by u (B, 2 * axes) in 0 to 1, 1 elsewhere."""
    inside = torch.full((len(u), *sides), float(bool(sides)))
    for axis, side in enumerate(sides):
        # A quarter to half of each side, rounded to whole pixels.
        length = (side * (0.25 + 0.25 * u[:, 2 * axis])).round()
        start = ((side - length) * u[:, 2 * axis + 1]).round()
        coordinates = torch.arange(side).expand(len(u), -1)
        within = (coordinates >= start[:, None]) & (coordinates < (start + length)[:, None])
        inside = inside * within.reshape(len(u), *[1] * axis, side, *[1] * (len(sides) - axis - 1))

    return 1 - inside


def masked_cross_entropy(model: nn.Module, x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    """Return the mean over images, or pixels, of the cross-entropy with probabilities y (B, K, ...), times `keep`."""
    return (cross_entropy(class_logits(model, x).float(), y, reduction="none") * keep).mean()


def class_logits(model: nn.Module, x: Collated) -> Tensor:
    """Return logits (B, K, ...); for a network with one output K = 2: 0 and that one.

    Raises:
        InputError: its output is not such a tensor.
    """
    output = model(x)
    if not isinstance(output, Tensor) or output.ndim < 2:
        raise InputError(
            f"a network whose output is a {type(output).__name__}",
            "pseudo-labels need one tensor with a channel for each class",
            "leave deep supervision out, or take another network",
        )
    if output.shape[1] > 1:
        return output

    return pad(output, (*[0, 0] * (output.ndim - 2), 1, 0))


def ema_update(teacher: nn.Module, model: nn.Module, decay: float) -> None:
    """Move a teacher's parameters to decay * its own + (1 - decay) * the model's."""
    # the parameters alone: running statistics stay those of real images
    with torch.no_grad():
        for mean, newest in zip(teacher.parameters(), model.parameters(), strict=True):
            mean.lerp_(newest, 1 - decay)


METHOD = FedSemi
