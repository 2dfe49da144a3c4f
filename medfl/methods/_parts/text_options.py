"""The common part of FedCB and FedBM: options, and what both halves do with a classifier built from text."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from medfl.core import (
    InputError,
    Message,
    Messages,
    RunError,
    Task,
    Tensors,
    errors_safe_to_send,
    pick,
)
from medfl.methods._parts.class_heads import class_head
from medfl.methods._parts.extras import TextEmbeddings
from medfl.methods._parts.text_classifier import (
    CLASSIFIERS,
    adapt,
    embeddings_for,
    embeddings_of,
    install,
    text_objective,
)
from medfl.methods.base import Group, Method, option, sample_shares, weighted_mean
from medfl.networks.heads import head, head_names
from medfl.storage import State
from medfl.training import Feed, Host, Objective, Site, fit, snapshot


@dataclass(frozen=True)
class TextClassified(TextEmbeddings, Method):
    """A method whose head may be built from text. A site receives the prompts' embeddings once and keeps them."""

    classifier: str = option(
        "text_distribution",
        "the head: FedAvg's own, its own but frozen, or from text; text_printed: eq. 4 without tau in its softmax",
        choices=CLASSIFIERS,
    )
    tau: float = option(
        12.5,
        "inverse temperature, multiplies similarities (tune over 7.5, 12.5, 17.5)",
        minimum=0.0,
    )
    plm: str = option(
        "minilm",
        "language model: a name, its folder, or a file of medfl concepts (paper: biomedclip)",
    )
    prompt_fraction: float = option(
        1.0, "part of the prompts that is used, drawn from the seed", minimum=0.0
    )
    renormalise_mean: bool = option(False, "bring class means to unit norm")
    swap: str = option(
        "", "exchange the text of two classes; DR,MH repeats the authors' slip on OCT-C8"
    )
    raw_test_logits: bool = option(
        False,
        "F / tau in evaluation, as the authors' code: the same predictions with other probabilities (AUROC, loss)",
    )

    tasks = ("classification",)

    def __post_init__(self) -> None:
        """Refuse a temperature of 0 and a share of the prompts outside (0, 1]."""
        if not 0 < self.tau < math.inf:
            raise InputError(
                f"tau={self.tau:g}", "an inverse temperature, above 0", "take for example tau=12.5"
            )
        if not 0 < self.prompt_fraction <= 1:
            raise InputError(
                f"prompt_fraction={self.prompt_fraction:g}",
                "a part of the prompts, above 0 and at most 1",
                "take for example prompt_fraction=0.5",
            )

    @property
    def from_text(self) -> bool:
        """Whether the head is built from text."""
        return self.classifier.startswith("text_")

    def objective(self, finite: bool = False) -> Objective | None:
        """Return the loss of a head built from text, None for another head."""
        if not self.from_text:
            return None
        return text_objective(finite, self.classifier == "text_printed")

    def groups(self) -> tuple[Group, ...]:
        """Declare the text embeddings, which each site receives once."""
        return (Group("text", up=False),)

    def with_head(
        self, network: nn.Module, task: Task, covariance: str, *, embeddings: bool
    ) -> nn.Module:
        """Give a network its head; with `embeddings` any head holds the prompts' embeddings.

        Raises:
            InputError: the network's head is not a linear layer with one output per class; no embeddings, or too few.
        """
        class_head(network, task)
        return adapt(
            network,
            embeddings_for(task, self.plm, self.prompt_fraction, self.swap) if embeddings else None,
            classifier=self.classifier,
            covariance=covariance,
            tau=self.tau,
            renormalise=self.renormalise_mean,
            unscaled_evaluation=self.raw_test_logits,
        )

    # Server half

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the weights, and the embeddings to a site that is not among the server's "informed" ones."""
        tensors = {"weights": server["weights"]}
        if "informed" in server and site_name not in server["informed"]:
            tensors["text"] = {"embeddings": embeddings_of(host.model(server["weights"]))}
        return Message(tensors)

    def average_weights(self, host: Host, server: State, replies: Messages) -> Tensors:
        """Average the replies' weights; a frozen head is unchanged, bit for bit."""
        mean = weighted_mean(replies, "weights", sample_shares(replies))
        if self.classifier != "random_frozen":
            return mean

        # The mean of equal numbers may differ from them in the last bit.
        return {**mean, **pick(server["weights"], head_names(host.model(host.networks.initial)))}

    # Site half

    def received_model(self, site: Site, state: State, down: Message) -> tuple[nn.Module, State]:
        """Return the received model with the site's own embeddings in its head, and the State that holds these.

        Newly received embeddings replace the State's.

        Raises:
            RunError: the received tensor is not the embeddings of the run's classes and prompts.
        """
        model = site.model(down["weights"])
        if "text" in down:
            state = {**state, "embeddings": _embeddings(down, head(model))}
        if "embeddings" in state:
            install(head(model), state["embeddings"])
        return model, state

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the received model with the site's own copy of the classifier."""
        return self.received_model(site, state, down)[0]

    def train_and_reply(
        self,
        model: nn.Module,
        site: Site,
        state: State,
        objective: Objective | None,
        feed: Feed | None = None,
    ) -> tuple[State, Message]:
        """Train; return the next State and the reply."""
        fit(model, site, objective=objective, feed=feed)
        return state, site.reply(snapshot(model))


def _embeddings(down: Message, layer: nn.Module) -> Tensor:
    """Return the embeddings of a broadcast, which have the form of those with which a head was made."""
    received = down["text"].get("embeddings")
    like = getattr(layer, "embeddings", None)
    if (
        like is None
        or received is None
        or received.shape != like.shape
        or not received.is_floating_point()
    ):
        form = "none"
        if received is not None:
            form = f"{tuple(received.shape)} {received.dtype}"

        expected = "none" if like is None else f"{tuple(like.shape)} floating-point"
        with errors_safe_to_send():
            raise RunError(f"the server's text embeddings are {form}; expected {expected}")

    return received
