"""FedBM: a frozen classifier built from text, and a generator guided by the same text that fills in missing classes.

"FedBM: Stealing Knowledge from Pre-trained Language Models for Heterogeneous Federated Learning" (Zhu et al., Medical
Image Analysis 2025). Linguistic knowledge-based classifier construction: FedCB with diagonal variances (eqs. 2 to 5).
Concept-guided global distribution estimation: every `g_every` rounds the server trains, without data, a generator G
against the new global model: L_G = L_sem + lambda_div L_div + lambda_dis L_dis (eqs. 6 to 10), z ~ N(mu_y, Sigma_y),
y uniform. At each local step a site adds `synthetic_batch` images G(z) of all classes to its batch, one forward pass,
one mean (eq. 11). G is sent only to a site whose copy is stale.

Where paper and public code differ, the code's way is the default if the paper is silent or contradicts itself; each
option says which is which. Departures: text dropout is off; logits are scaled by tau in testing too; G is also trained
after the last round, so that a run can be continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medfl.errors import InputError
from medfl.message import Message, Weights
from medfl.methods.base import Method, class_head, option
from medfl.networks.generator import (
    NORMALISATIONS,
    Augmentation,
    Generator,
    check_size,
    diversity_loss,
    statistics_gap,
)
from medfl.networks.heads import features_and_output, frozen, head
from medfl.seeding import derive, stream
from medfl.site import Host, Site, snapshot
from medfl.storage import State
from medfl.task import Task
from medfl.text_classifier import (
    CLASSIFIERS,
    Gaussians,
    TextHead,
    adapt,
    average,
    check_fraction,
    class_indices,
    embeddings_for,
    embeddings_of,
    local_fit,
    received,
    text_objective,
)
from medfl.training import Objective

_BETAS = (0.5, 0.999)


@dataclass(frozen=True)
class FedBM(Method):
    """A classifier built from class names, and a generator that adds images of all classes at every site."""

    classifier: str = option(
        "text_distribution", "the head: FedAvg's own, its own but frozen, or built from text", choices=CLASSIFIERS
    )
    tau: float = option(12.5, "inverse temperature, multiplies similarities (tune over 7.5, 12.5, 17.5)", minimum=0.0)
    plm: str = option("minilm", "language model: a name, its folder, or a file of medfl concepts (paper: biomedclip)")
    prompt_fraction: float = option(1.0, "part of the prompts that is used, drawn from the seed", minimum=0.0)
    renormalise_mean: bool = option(False, "bring class means to unit norm")
    swap: str = option("", "exchange the text of two classes; DR,MH repeats the authors' slip on OCT-C8")
    raw_test_logits: bool = option(False, "F / tau in evaluation as the authors' code: changes AUROC only")
    weights: str = option("samples", "of the sites: by their samples (code), or uniform (paper)",
                          choices=("samples", "uniform"))  # fmt: skip
    keep_optimizer: bool = option(False, "keep each site's optimiser over the rounds (code)")
    decay_per: str = option("round", "learning rate decays per round (code) or local epoch (paper)",
                            choices=("round", "epoch"))  # fmt: skip
    generator: bool = option(True, "train a generator and mix its images in")
    synthetic_batch: int = option(16, "generated images a local step (tune over 8, 16, 32)", minimum=1)
    pool_per_round: bool = option(False, "generate one set a round, seen every local epoch (paper), not one a step")
    g_every: int = option(5, "rounds between two trainings of the generator (paper's algorithm: 1)", minimum=1)
    g_start: int = option(5, "round after which it is trained first; 0: before round 1", minimum=0)
    g_iterations: int = option(100, "steps of one training", minimum=1)
    g_batch: int = option(64, "generated images a step of it", minimum=1)
    g_lr: float = option(3e-4, "learning rate of its Adam, made anew each time", minimum=0.0)
    lambda_div: float = option(1.0, "weight of the diversity loss", minimum=0.0)
    lambda_dis: float = option(0.1, "weight of the distance from the BatchNorm statistics (0.1 or 1)", minimum=0.0)
    semantic_loss: str = option("ce", "L_sem: ce (paper), or surrogate: with the variance term (code)",
                                choices=("ce", "surrogate"))  # fmt: skip
    condition: str = option("concept", "z: concept: the class's Gaussian; noise: N(0, I); noise+onehot: with the label",
                            choices=("concept", "noise", "noise+onehot"))  # fmt: skip
    z_covariance: str = option("full", "covariance of z: full (code) or diag", choices=("full", "diag"))
    augment: str = option("batch", "one crop and flip for a batch of generated images (code), or for each image",
                          choices=("batch", "image"))  # fmt: skip
    normalise: str = option("imagenet", "of generated images, as the bundle does it with real ones",
                            choices=tuple(NORMALISATIONS))  # fmt: skip

    paper: ClassVar[str] = (
        "FedBM: Stealing Knowledge from Pre-trained Language Models for Heterogeneous Federated Learning "
        "(Zhu et al., 2025)"
    )
    tasks: ClassVar[tuple[str, ...]] = ("classification",)

    def __post_init__(self) -> None:
        """Refuse a part of the prompts outside (0, 1]."""
        check_fraction(self.prompt_fraction)

    @property
    def _text(self) -> bool:
        return self.generator or self.classifier.startswith("text_")

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Replace the head by projection and Gaussians; any head holds the embeddings that z is drawn from."""
        class_head(network, task)
        return adapt(
            network,
            embeddings_for(task, self.plm, self.prompt_fraction, self.swap) if self._text else None,
            classifier=self.classifier,
            covariance="diag",
            tau=self.tau,
            renormalise=self.renormalise_mean,
            unscaled_evaluation=self.raw_test_logits,
        )

    def check(self, site: Site) -> None:
        """Refuse items that are no images, and images of a size that the generator cannot make."""
        shape = self.introduce(site).scalars
        if shape:
            check_size(int(shape["height"]), int(shape["width"]))

    # Server half

    def introduce(self, site: Site) -> Message:
        """Tell the shape of the site's images."""
        batch = next(iter(site.train.batches(1)), None) if self.generator else None
        return Message() if batch is None else Message(scalars=_shape(batch[0], site.name))

    def init_server(self, host: Host, weights: Weights, introductions: Mapping[str, Message]) -> State:
        """Start from the initial weights; no site has embeddings, nobody a generator.

        Raises:
            InputError: the sites' images differ in size, or the generator cannot make images of this size.
        """
        server: State = {**super().init_server(host, weights, introductions), "informed": {}}
        if self.generator:
            server |= {"image": _common(introductions), "version": 0, "generator": {}}
        return self._with_generator(host, server, 0)

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the weights; once the embeddings; the generator where the site's copy is stale."""
        tensors: dict[str, Weights] = {"weights": server["weights"]}
        scalars: dict[str, float] = {}
        if self._text and site_name not in server["informed"]:
            tensors["text"] = {"embeddings": embeddings_of(host.model(server["weights"]))}
        if self.generator and server["informed"].get(site_name, 0) < server["version"]:
            tensors["generator"] = server["generator"]
            scalars = {"version": server["version"], **dict(zip(_AXES, server["image"], strict=True))}
        return Message(tensors, scalars)

    def aggregate(self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int) -> State:
        """Average body and projection, then train the generator if its turn has come."""
        frozen_head = self.classifier == "random_frozen"
        weights = average(host, server, replies, by=self.weights, frozen_head=frozen_head)
        informed = {**server["informed"], **{name: server.get("version", 0) for name in sorted(replies)}}
        return self._with_generator(host, {**server, "weights": weights, "informed": informed}, host.round)

    def _with_generator(self, host: Host, server: State, round_: int) -> State:
        due = round_ >= self.g_start and (round_ - self.g_start) % self.g_every == 0
        if not self.generator or not due:
            return server
        with stream(host.seed, "generator") as draws:
            trained = self._train_generator(host, server, draws)
        return {**server, "generator": trained, "version": server["version"] + 1}

    def _train_generator(self, host: Host, server: State, draws: torch.Generator) -> dict[str, Tensor]:
        """Train G for `g_iterations` steps against the frozen global model (eqs. 6 to 10)."""
        teacher = frozen(host.model(server["weights"]))
        teacher.zero_grad()
        source = _Source.of(self, embeddings_of(teacher), draws)
        network = Generator(source.dimension, *server["image"]).to(host.device)
        if server["generator"]:
            network.load_state_dict(server["generator"])
        optimizer = torch.optim.Adam(network.parameters(), self.g_lr, betas=_BETAS)
        for _ in range(self.g_iterations):
            labels, z = source.draw(self.g_batch, host.device)
            optimizer.zero_grad()
            self.generator_loss(teacher, network(z), z, labels, source.augment).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return snapshot(network)

    def generator_loss(self, teacher: nn.Module, images: Tensor, z: Tensor, labels: Tensor, augment: Any) -> Tensor:
        """Return L_G (eq. 10) of generated images; `teacher` is frozen and in evaluation mode."""
        with statistics_gap(teacher) as gaps:
            features, output = features_and_output(teacher, augment(images))
        layer = head(teacher)
        if isinstance(layer, TextHead):
            h, gaussians = layer.unit(features), layer.gaussians
            if self.semantic_loss == "surrogate":
                loss = gaussians.surrogate(h, labels).mean()
            else:  # scaled by tau whatever the test-time scale is
                loss = nn.functional.cross_entropy(gaussians.logits(h), labels)  # eq. 6
        else:
            loss = nn.functional.cross_entropy(output, labels)
        if self.lambda_div:
            loss = loss + self.lambda_div * diversity_loss(images, z, labels, len(embeddings_of(teacher)))
        if self.lambda_dis and gaps:
            loss = loss + self.lambda_dis * torch.stack(gaps).sum()
        return loss

    # Site half

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train body and projection on real and, once there is a generator, synthetic images."""
        model = site.model(down["weights"])
        state = received(state, down, model)
        if "generator" in down:
            state = {**state, "generator": down["generator"], **{k: int(v) for k, v in down.scalars.items()}}
        objective = text_objective() if self.classifier.startswith("text_") else None
        if state.get("generator"):
            objective = self.mixed(site, state, objective or (lambda net, x, y: site.loss(net(x), y)))
        kept = state.get("optimizer", {}) if self.keep_optimizer else None
        report = local_fit(model, site, objective, self.decay_per, kept)
        if self.keep_optimizer:
            state = {**state, "optimizer": report.optimizer_state}
        return state, Message({"weights": snapshot(model)}, {"samples": site.num_samples})

    def mixed(self, site: Site, state: State, objective: Objective) -> Objective:
        """Return the objective over the union of a real batch and fresh synthetic images (eq. 11).

        What is generated is drawn on a stream of its own, so that real batches are those of a run without generator.
        """
        draws, seed = torch.Generator(), derive(site.seed, "synthetic")
        source = _Source.of(self, state["embeddings"], draws)
        with torch.device("meta"):
            network = Generator(source.dimension, *(state[axis] for axis in _AXES))
        network.load_state_dict({k: v.to(site.device) for k, v in state["generator"].items()}, assign=True)
        frozen(network)
        steps, done = -(-len(site.train) // site.settings.batch_size), 0

        def mix(net: nn.Module, x: Any, y: Any) -> Tensor:
            nonlocal done
            if done == 0 or (self.pool_per_round and done % steps == 0):
                draws.manual_seed(seed)
            done += 1
            labels, z = source.draw(self.synthetic_batch, site.device)
            with torch.no_grad():
                images = source.augment(network(z))
            return objective(net, torch.cat([x, images.to(x.dtype)]), torch.cat([class_indices(y), labels]))

        return mix

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the received model with the site's own copy of the classifier."""
        model = site.model(down["weights"])
        received(state, down, model)
        return model


_AXES = ("channels", "height", "width")


def _shape(images: Tensor, site: str) -> dict[str, float]:
    if images.ndim != 4:
        raise InputError(
            f"site {site!r} has items of shape {tuple(images.shape[1:])}",
            "the generator makes images (channels, height, width)",
            "set generator=false",
        )
    return dict(zip(_AXES, map(float, images.shape[1:]), strict=True))


def _common(introductions: Mapping[str, Message]) -> list[int]:
    """Return channels, height and width of everybody's images."""
    told = {name: [int(m.scalars[axis]) for axis in _AXES] for name, m in sorted(introductions.items()) if m.scalars}
    if not told:
        raise InputError("no site has a training image", "the generator needs their size", "give another partition")
    first, shape = next(iter(told.items()))
    for name, other in told.items():
        if other != shape:
            raise InputError(
                f"site {name!r} has images of shape {other}, site {first!r} of {shape}",
                "the generator makes images of one size",
                "let the bundle's transforms resize them, or set generator=false",
            )
    check_size(*shape[1:])
    return shape


@dataclass(frozen=True)
class _Source:
    """Where pseudo-labels, conditions and augmentations come from.

    Attributes:
        gaussians: the classes' distributions with the covariance of z.
        kind: what z is made of.
        augment_with: crop, flips, normalisation.
        draws: the generator of all random numbers.
    """

    gaussians: Gaussians
    kind: str
    augment_with: Augmentation
    draws: torch.Generator

    @classmethod
    def of(cls, method: FedBM, embeddings: Tensor, draws: torch.Generator) -> _Source:
        gaussians = Gaussians.of(embeddings.cpu(), method.tau, method.z_covariance)
        augmentation = Augmentation(*NORMALISATIONS[method.normalise], per_image=method.augment == "image")
        return cls(gaussians, method.condition, augmentation, draws)

    @property
    def dimension(self) -> int:
        classes, size = self.gaussians.mean.shape
        return size + (classes if self.kind == "noise+onehot" else 0)

    def draw(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return y ~ U over all classes (count,) and z (count, dimension), eq. 9."""
        classes, size = self.gaussians.mean.shape
        labels = torch.randint(classes, (count,), generator=self.draws)
        if self.kind == "concept":
            z = self.gaussians.draw(labels, self.draws)
        else:
            z = torch.randn(count, size, generator=self.draws)
            if self.kind == "noise+onehot":
                z = torch.cat([z, nn.functional.one_hot(labels, classes).to(z.dtype)], 1)
        return labels.to(device), z.to(device)

    def augment(self, images: Tensor) -> Tensor:
        return self.augment_with(images, self.draws)


METHOD = FedBM
