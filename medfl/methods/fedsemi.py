"""FedSemi: sites without labels learn from the global model, as a mean teacher that begins as that model.

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

Departures. FixMatch has images with labels in each batch; a site of ours has none, and what it is sure of is of few
classes, so that it would forget the others: where it is not sure it keeps the teacher's probabilities (`unsure=0`
leaves them out). RSCFed takes the squared distance to sharpened ones and keeps teachers from round to round, and its
server averages random subsets by their distance; `warmup` stands for its first model, of the sites with labels. r_k is
ours (`count=all` leaves it out): a site that was sure of nothing has learned nothing. A moves no pixel but by the
mirror, in classification; in segmentation the part that is cut out is not learned. One output is the logit of class 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from medfl.core.message import Message
from medfl.core.seeding import derive
from medfl.methods._parts.extras import WithoutLabels
from medfl.methods._parts.pseudo_labels import class_logits, ema_update, masked_cross_entropy, strong_view
from medfl.methods.base import Method, option, sample_shares, weighted_mean
from medfl.storage.files import State
from medfl.training import Feed, Host, Site, autocast, evaluating, fit, snapshot

_LEAST = 1e-3  # of r_k, which is in a reply: a number a thousand times smaller than others' is refused there


@dataclass(frozen=True)
class FedSemi(Method, WithoutLabels):
    """Sites without labels learn from the global model what it is sure of; the others train as FedAvg's do."""

    threshold: float = option(0.95, "least probability of a pseudo-label (FixMatch)", minimum=0.0, maximum=1.0)
    warmup: int = option(5, "first rounds, in which only sites with labels count", minimum=0)
    unsure: float = option(1.0, "weight of the teacher's probabilities below that; 0: left out", minimum=0.0)
    weight: float = option(1.0, "what the number of images of a site without labels is multiplied by", minimum=0.0)
    count: str = option("sure", "images of such a site: those with pseudo-labels, or all", choices=("sure", "all"))
    decay: float = option(0.999, "of the teacher's mean over steps; 1: it stays", minimum=0.0, maximum=1.0)
    strength: float = option(1.0, "of the change of intensities", minimum=0.0)
    mirror: bool = option(True, "mirror images (classification)")

    paper = "RSCFed: Random Sampling Consensus Federated Semi-supervised Learning (Liang et al., 2022)"
    tasks = ("classification", "segmentation")

    def aggregate(self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int) -> State:
        """Average, sites without labels by their weight; where that is 0 for all who replied nothing changes."""
        counted = {name: Message({}, {"samples": self._counted(reply, host.round)}) for name, reply in replies.items()}
        if not any(message.scalars["samples"] for message in counted.values()):
            return server
        return {**server, "weights": weighted_mean(replies, "weights", sample_shares(counted))}

    def _weight(self, round_: int) -> float:
        return self.weight if round_ > self.warmup else 0.0

    def _counted(self, reply: Message, round_: int) -> float:
        samples = reply.scalars["samples"]
        if "sure" not in reply.scalars:
            return samples
        share = min(1.0, max(0.0, reply.scalars["sure"])) if self.count == "sure" else 1.0
        return samples * self._weight(round_) * share

    def observed(self, server: State, replies: Mapping[str, Message]) -> Mapping[str, float]:
        """Return the mean share of pseudo-labels at the sites without labels."""
        sure = [replies[name].scalars["sure"] for name in sorted(replies) if "sure" in replies[name].scalars]
        return {"sure": sum(sure) / len(sure)} if sure else {}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train as FedAvg, or without labels on what the teacher is sure of; in the warm-up on one batch."""
        samples = site.num_samples
        if site.train.labelled:
            return super().local_update(site, state, down)
        if not self._weight(site.round):
            first = site.train.indices[: site.settings.batch_size]
            site = replace(site.for_epochs(1), train=replace(site.train, indices=first))
        model, teacher = site.model(down["weights"]), site.model(down["weights"])
        sure: list[Tensor] = []
        fit(model, site, objective=masked_cross_entropy, feed=self._lessons(model, teacher, site, sure))
        share = max(_LEAST, float(torch.stack(sure).mean())) if sure else _LEAST
        received = {name: down["weights"][name] for name, _ in model.named_buffers() if name in down["weights"]}
        return state, Message({"weights": {**snapshot(model), **received}}, {"samples": samples, "sure": share})

    def _lessons(self, model: nn.Module, teacher: nn.Module, site: Site, sure: list[Tensor]) -> Feed:
        """Return what makes of each batch the strong view, its pseudo-labels and where they are learned."""
        generator = torch.Generator().manual_seed(derive(site.seed, "strong view"))
        is_classification = site.task.kind == "classification"

        def feed(x: Any, y: None) -> tuple[Any, ...]:
            if sure and self.decay < 1:
                ema_update(teacher, model, self.decay)
            with torch.no_grad(), evaluating(teacher), autocast(site):
                q = class_logits(teacher, x).float().softmax(1)
            chance, label = q.max(1, keepdim=True)
            certain = chance >= self.threshold
            sure.append(certain.float().mean())
            target = torch.where(certain, torch.zeros_like(q).scatter_(1, label, 1.0), q)
            weight = torch.where(certain, 1.0, self.unsure).squeeze(1)
            view, seen = strong_view(x, self.strength, self.mirror and is_classification, generator)
            return view, target, weight if is_classification else weight * seen

        return feed


METHOD = FedSemi
