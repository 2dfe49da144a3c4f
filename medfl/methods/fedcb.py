"""FedCB: a classifier built from text and frozen, so that no head can drift towards a site's majority classes.

"Stealing Knowledge from Pre-trained Language Models for Federated Classifier Debiasing" (Zhu et al., MICCAI 2024).
Each class is a Gaussian over the embeddings of its prompts (eq. 2). The network's head becomes a projection into the
text space, h = normalise(W x + b), with logits F_k = tau h mu_k + tau^2/2 h' Sigma_k h (eq. 4) and the loss
CE(F, y) + tau^2/2 h' Sigma_y h, an upper bound of eq. 3. Body and projection are averaged as in FedAvg; the prompt
embeddings are sent to a site once.

Departures: tau scales the logits everywhere, as the bound needs (the paper's softmax leaves it out); embeddings of
all-MiniLM-L6-v2, which the bundles ship, instead of BiomedCLIP's (`plm=biomedclip`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medfl.errors import InputError
from medfl.message import Message, Weights
from medfl.methods.base import Method, class_head, option
from medfl.site import Host, Site, snapshot
from medfl.storage import State
from medfl.task import Task
from medfl.text_classifier import (
    CLASSIFIERS,
    COVARIANCES,
    adapt,
    average,
    check_fraction,
    embeddings_for,
    embeddings_of,
    local_fit,
    received,
    text_objective,
)


@dataclass(frozen=True)
class FedCB(Method):
    """A frozen classifier built from class names; only features are trained and averaged."""

    classifier: str = option(
        "text_distribution", "the head: FedAvg's own, its own but frozen, or built from text", choices=CLASSIFIERS
    )
    tau: float = option(12.5, "inverse temperature, multiplies similarities (tune over 7.5, 12.5, 17.5)", minimum=0.0)
    covariance: str = option("full", "of the prompts: full (paper), diag (as FedBM) or none", choices=COVARIANCES)
    loss: str = option(
        "surrogate", "upper bound of eq. 4, or finite: over the prompts, eq. 1", choices=("surrogate", "finite")
    )
    plm: str = option("minilm", "language model: a name, its folder, or a file of medfl concepts (paper: biomedclip)")
    prompt_fraction: float = option(1.0, "part of the prompts that is used, drawn from the seed", minimum=0.0)
    renormalise_mean: bool = option(False, "bring class means to unit norm")
    swap: str = option("", "exchange the text of two classes; DR,MH repeats the authors' slip on OCT-C8")
    raw_test_logits: bool = option(False, "F / tau in evaluation as the authors' code: changes AUROC only")
    weights: str = option(
        "samples", "of the sites: by their samples (code), or uniform", choices=("samples", "uniform")
    )
    keep_optimizer: bool = option(False, "keep each site's optimiser over the rounds (code)")
    decay_per: str = option("round", "learning rate decays per round (code) or local epoch", choices=("round", "epoch"))

    paper: ClassVar[str] = (
        "Stealing Knowledge from Pre-trained Language Models for Federated Classifier Debiasing (Zhu et al., 2024)"
    )
    tasks: ClassVar[tuple[str, ...]] = ("classification",)

    def __post_init__(self) -> None:
        """Refuse a part of the prompts outside (0, 1], and a loss over prompts without prompts."""
        check_fraction(self.prompt_fraction)
        if self.loss == "finite" and not self._text:
            raise InputError(
                f"loss=finite with classifier={self.classifier}", "eq. 1 is over prompts", "take text_distribution"
            )

    @property
    def _text(self) -> bool:
        return self.classifier.startswith("text_")

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Replace the head by projection and Gaussians, or freeze it."""
        class_head(network, task)
        return adapt(
            network,
            embeddings_for(task, self.plm, self.prompt_fraction, self.swap) if self._text else None,
            classifier=self.classifier,
            covariance=self.covariance,
            tau=self.tau,
            renormalise=self.renormalise_mean,
            unscaled_evaluation=self.raw_test_logits,
        )

    def init_server(self, host: Host, weights: Weights, introductions: Mapping[str, Message]) -> State:
        """Start from the initial weights; no site has the embeddings."""
        return {**super().init_server(host, weights, introductions), **({"informed": []} if self._text else {})}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the weights, and the embeddings to a site that has none yet."""
        tensors = {"weights": server["weights"]}
        if self._text and site_name not in server["informed"]:
            tensors["text"] = {"embeddings": embeddings_of(host.model(server["weights"]))}
        return Message(tensors)

    def aggregate(self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int) -> State:
        """Average body and projection; whoever replied has the embeddings."""
        frozen = self.classifier == "random_frozen"
        weights = average(host, server, replies, by=self.weights, frozen_head=frozen)
        informed = {"informed": sorted({*server["informed"], *replies})} if self._text else {}
        return {"weights": weights, **informed}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train body and projection against the frozen classifier."""
        model = site.model(down["weights"])
        state = received(state, down, model)
        kept = state.get("optimizer", {}) if self.keep_optimizer else None
        objective = text_objective(self.loss == "finite") if self._text else None
        report = local_fit(model, site, objective, self.decay_per, kept)
        if self.keep_optimizer:
            state = {**state, "optimizer": report.optimizer_state}
        return state, Message({"weights": snapshot(model)}, {"samples": site.num_samples})

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the received model with the site's own copy of the classifier."""
        model = site.model(down["weights"])
        received(state, down, model)
        return model


METHOD = FedCB
