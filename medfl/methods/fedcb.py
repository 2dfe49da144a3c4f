"""FedCB: a classifier built from text and frozen, so that no head can drift towards a site's majority classes.

"Stealing Knowledge from Pre-trained Language Models for Federated Classifier Debiasing" (Zhu et al., MICCAI 2024).
Each class is a Gaussian over the embeddings of its prompts (eq. 2). The network's head becomes a projection into the
text space, h = normalise(W x + b), with logits F_k = tau h mu_k + tau^2/2 h' Sigma_k h (eq. 4) and the loss
CE(F, y) + tau^2/2 h' Sigma_y h, an upper bound of eq. 3. Body and projection are averaged as in FedAvg; the prompt
embeddings are sent to a site once.

Departures: tau scales the logits everywhere, as the bound requires (the paper's softmax omits it, as does
`classifier=text_printed`); class names are the bundle's, so no site sends its own; embeddings of all-MiniLM-L6-v2,
which the bundles ship, instead of BiomedCLIP's (`plm=biomedclip`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from medfl.core import InputError, Message, Messages, Task, Weights
from medfl.methods._parts.text_classifier import COVARIANCES
from medfl.methods._parts.text_options import TextClassified
from medfl.methods.base import one_of
from medfl.storage import State
from medfl.training import Host, Site


@dataclass(frozen=True)
class FedCB(TextClassified):
    """A frozen classifier built from class names; only features are trained and averaged."""

    covariance: str = one_of("of the prompts: full (paper), diag (as FedBM) or none", *COVARIANCES)
    loss: str = one_of("bound of eq. 4, or finite: over prompts, eq. 1", "surrogate", "finite")

    paper = "Stealing Knowledge from Pre-trained Language Models for Federated Classifier Debiasing (Zhu et al., 2024)"

    def __post_init__(self) -> None:
        """Refuse what the common options do not allow, and a loss over prompts without prompts."""
        super().__post_init__()
        if self.loss == "finite" and not self.from_text:
            raise InputError(
                f"loss=finite with classifier={self.classifier}",
                "eq. 1 is over prompts",
                "take text_distribution",
            )

    @property
    def language_model(self) -> str:
        """That of the option `plm`, if the head is built from text."""
        return self.plm if self.from_text else ""

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Replace the head by projection and Gaussians, or freeze it."""
        return self.with_head(network, task, self.covariance, embeddings=self.from_text)

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the initial weights; no site has the embeddings."""
        server = super().init_server(host, weights, introductions)
        if self.from_text:
            server = {**server, "informed": []}

        return server

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Average body and projection; sites that replied have the embeddings."""
        after: State = {"weights": self.average_weights(host, server, replies)}
        if self.from_text:
            after["informed"] = sorted({*server["informed"], *replies})

        return after

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train body and projection against the frozen classifier."""
        model, state = self.received_model(site, state, down)
        return self.train_and_reply(model, site, state, self.objective(self.loss == "finite"))


METHOD = FedCB
