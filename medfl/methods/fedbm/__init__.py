"""FedBM: a frozen classifier built from text, and a generator guided by the same text that fills in missing classes.

"FedBM: Stealing Knowledge from Pre-trained Language Models for Heterogeneous Federated Learning" (Zhu et al., Medical
Image Analysis 2025). Linguistic knowledge-based classifier construction: FedCB with diagonal variances (eqs. 2 to 5).
Concept-guided global distribution estimation: every `g_every` rounds the server trains, without data, a generator G
against the new global model: L_G = L_sem + lambda_div L_div + lambda_dis L_dis (eqs. 6 to 10), z ~ N(mu_y, Sigma_y),
y uniform. At each local step a site adds `synthetic_batch` images G(z) of all classes to its batch, one forward pass,
one mean (eq. 11). G is sent only to a site whose copy is stale.

Where paper and public code differ, the code's behaviour is the default; each option says which is which, and the
bundles' preset `paper` uses the paper's. Departures: text dropout is off; logits are scaled by tau in testing too;
class names are the bundle's, so no site sends its own; G is also trained after the last round, so that a run can be
continued; embeddings of all-MiniLM-L6-v2, which the bundles ship, instead of BiomedCLIP's (`plm=biomedclip`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from medfl.core import (
    Constants,
    InputError,
    Message,
    Messages,
    RunError,
    Task,
    Tensors,
    Weights,
    derive,
    errors_safe_to_send,
    map_values,
    stream,
)
from medfl.methods._parts.extras import MakesImages, Synthetic
from medfl.methods._parts.prototypes import class_indices
from medfl.methods._parts.text_classifier import (
    TextGaussians,
    TextHead,
    embeddings_of,
)
from medfl.methods._parts.text_options import TextClassified
from medfl.methods.base import Collated, Group, one_of, option
from medfl.networks.generator import (
    Augmentation,
    Generator,
    check_images,
    check_size,
    diversity_loss,
    normalisation,
    statistics_gap,
)
from medfl.networks.heads import features_and_output, frozen, head
from medfl.storage import State
from medfl.training import Feed, Host, Site, snapshot

AXES = ("channels", "height", "width")
"""Of an image, as messages and States name them."""
CONDITIONS = ("concept", "noise", "noise+onehot")
"""What z is made from: the class's Gaussian; N(0, I); N(0, I) and the label."""
_BETAS = (0.5, 0.999)
_AT_ONCE = 16  # images of a picture that are generated together


@dataclass(frozen=True)
class FedBM(MakesImages, TextClassified):
    """A classifier built from class names, and a generator that adds images of all classes at every site."""

    generator: bool = option(True, "train a generator and mix its images in")
    synthetic_batch: int = option(
        16, "generated images a local step (tune over 8, 16, 32)", minimum=1
    )
    pool_per_round: bool = option(
        False, "generate one set a round, seen every local epoch (paper), not one a step"
    )
    g_every: int = option(
        5, "rounds between two trainings of the generator (paper's algorithm: 1)", minimum=1
    )
    g_start: int = option(5, "round after which it is trained first; 0: before round 1", minimum=0)
    g_iterations: int = option(100, "steps of one training", minimum=1)
    g_batch: int = option(64, "generated images a step of it", minimum=1)
    g_lr: float = option(3e-4, "learning rate of its Adam, made anew each time", minimum=0.0)
    lambda_div: float = option(1.0, "weight of the diversity loss", minimum=0.0)
    lambda_dis: float = option(
        0.1, "weight of the distance from the BatchNorm statistics (0.1 or 1)", minimum=0.0
    )
    semantic_loss: str = one_of(
        "L_sem: ce (paper), or surrogate: with the variance term (code)", "ce", "surrogate"
    )
    condition: str = one_of(
        "z: concept: the class's Gaussian; noise: N(0, I); noise+onehot: with the label",
        *CONDITIONS,
    )
    z_covariance: str = one_of("covariance of z: full (code) or diag", "full", "diag")
    augment: str = one_of(
        "one crop and flip for a batch of generated images (code), or for each image",
        "batch",
        "image",
    )
    normalise: str = option(
        "read",
        "of generated images: as the bundle's transforms do it with real ones, imagenet, half, none or MEAN/SD",
    )

    paper = (
        "FedBM: Stealing Knowledge from Pre-trained Language Models for Heterogeneous Federated Learning "
        "(Zhu et al., 2025)"
    )
    shown = {"g_start": 0, "g_iterations": 1, "g_batch": 2, "normalise": "none"}

    def __post_init__(self) -> None:
        """Refuse a normalisation in an unknown format."""
        super().__post_init__()
        if self.normalise != "read":
            normalisation(self.normalise)

    def groups(self) -> tuple[Group, ...]:
        """Declare the text embeddings, which each site gets once, and the generator."""
        return (*super().groups(), Group("generator", up=False))

    @property
    def language_model(self) -> str:
        """That of the option `plm`, if the head is built from text or z is drawn from it."""
        return self.plm if self.from_text or self.generator else ""

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Replace the head by projection and Gaussians; any head holds the embeddings from which z is drawn."""
        return self.with_head(network, task, "diag", embeddings=bool(self.language_model))

    def check(self, site: Site) -> None:
        """Refuse items that are not images, and images that the generator cannot make."""
        if (images := self._first(site)) is not None:
            shape_of(images, site.name)
            check_size(*images.shape[2:])
            check_images(images, self._constants(site.task))

    def _constants(self, task: Task) -> Constants:
        if self.normalise == "read":
            return task.intensities()

        return normalisation(self.normalise)

    # Server half

    def introduce(self, site: Site) -> Message:
        """Send the shape of the site's images."""
        images = self._first(site)
        if images is None:
            return Message()

        return Message(scalars=shape_of(images, site.name))

    def _first(self, site: Site) -> Tensor | None:
        if not self.generator or not len(site.train):
            return None

        first = replace(site.train, indices=site.train.indices[:1])
        images: Tensor = next(iter(first.batches(1)))[0]
        return images

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the initial weights; no site has embeddings or a generator yet.

        Raises:
            InputError: the sites' images differ in size, or the generator cannot make images of this size.
        """
        server = super().init_server(host, weights, introductions)
        if self.from_text or self.generator:
            server |= {"informed": {}}
        if self.generator:
            server |= {"image": common_shape(introductions), "version": 0, "generator": {}}
        return self._with_generator(host, server, 0)

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the weights; once the embeddings; the generator if the site's copy is stale."""
        down = super().broadcast(host, server, site_name)
        if not self.generator or server["informed"].get(site_name, 0) >= server["version"]:
            return down
        scalars = {"version": server["version"], **dict(zip(AXES, server["image"], strict=True))}
        return Message({**down.tensors, "generator": server["generator"]}, scalars)

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Average body and projection, then train the generator if its turn has come."""
        server = {**server, "weights": self.average_weights(host, server, replies)}
        # sites that replied have received the message: a site that failed gets embeddings and generator again
        if "informed" in server:
            has = {name: server.get("version", 0) for name in sorted(replies)}
            server["informed"] = {**server["informed"], **has}
        return self._with_generator(host, server, host.round)

    def _with_generator(self, host: Host, server: State, round_: int) -> State:
        due = round_ >= self.g_start and (round_ - self.g_start) % self.g_every == 0
        if not self.generator or not due:
            return server
        with stream(host.seed, "generator") as draws:
            trained = self._train_generator(host, server, draws)
        return {**server, "generator": trained, "version": server["version"] + 1}

    def _train_generator(self, host: Host, server: State, draws: torch.Generator) -> Tensors:
        """Train G for `g_iterations` steps against the frozen global model (eqs. 6 to 10)."""
        teacher = frozen(host.model(server["weights"]))
        # frozen parameters keep the gradients of an earlier training, which a snapshot would not show
        teacher.zero_grad()
        source = self._source(host.task, embeddings_of(teacher), draws)
        network = Generator(source.dimension, *server["image"]).to(host.device)

        # it continues from its last training; the optimiser does not (paper: Adam is made anew)
        if server["generator"]:
            network.load_state_dict(server["generator"])

        optimizer = torch.optim.Adam(network.parameters(), self.g_lr, betas=_BETAS)

        def step(z: Tensor, labels: Tensor, positions: Tensor) -> None:
            optimizer.zero_grad()
            augment = partial(source.augmentation.moved, positions=positions)
            loss = self.generator_loss(teacher, network(z), z, labels, augment)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        for _ in range(self.g_iterations):
            labels, z = source.draw(self.g_batch, host.device)
            # Eq. 9 for y and z; crops and flips come after them from the same stream.
            step(z, labels, source.positions(self.g_batch, server["image"], host.device))

        return snapshot(network)

    def generator_loss(
        self,
        teacher: nn.Module,
        images: Tensor,
        z: Tensor,
        labels: Tensor,
        augment: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return L_G (eq. 10) of generated images; `teacher` is frozen and in evaluation mode."""
        with statistics_gap(teacher) as gaps:
            features, output = features_and_output(teacher, augment(images))

        layer = head(teacher)
        if isinstance(layer, TextHead):
            h = layer.unit(features)
            gaussians = layer.gaussians
            if self.semantic_loss == "surrogate":
                loss = gaussians.surrogate(h, labels).mean()
            else:  # scaled by tau whatever the test-time scale is
                loss = nn.functional.cross_entropy(gaussians.logits(h), labels)  # eq. 6
        else:
            loss = nn.functional.cross_entropy(output, labels)

        if self.lambda_div:
            classes = len(embeddings_of(teacher))
            loss = loss + self.lambda_div * diversity_loss(images, z, labels, classes)  # eq. 7

        if self.lambda_dis and gaps:
            # L_dis, eq. 8: summed over the BatchNorm layers.
            loss = loss + self.lambda_dis * torch.stack(gaps).sum()

        return loss

    def synthetic(
        self, host: Host, server: State, labels: Tensor, draws: torch.Generator
    ) -> Synthetic | None:
        """Return images of the generator that the sites have, neither cropped nor flipped; None if there is none."""
        if not server.get("generator"):
            return None

        source = self._source(host.task, embeddings_of(host.model(server["weights"])), draws)
        network = Generator.restored(server["generator"], server["image"], host.device)
        conditions = torch.split(source.conditions(labels), _AT_ONCE)
        with torch.no_grad():  # few at a time: their feature maps are large
            images = torch.cat([network(z.to(host.device)) for z in conditions])

        return Synthetic(images, source.augmentation.normalised(images))

    def _source(self, task: Task, embeddings: Tensor, draws: torch.Generator) -> Conditions:
        """Return the source of z and augmentations, all drawn from `draws`."""
        gaussians = TextGaussians.of(embeddings.cpu(), self.tau, self.z_covariance)
        augmentation = Augmentation(*self._constants(task), per_image=self.augment == "image")
        return Conditions(gaussians, self.condition, augmentation, draws)

    # Site half

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train body and projection on real and, once there is a generator, synthetic images."""
        model, state = self.received_model(site, state, down)
        if "generator" in down:
            dimension = self._source(site.task, embeddings_of(model), torch.Generator()).dimension
            sizes = check_received(down, dimension, self.introduce(site).scalars)
            state = {
                "embeddings": embeddings_of(model),
                **state,
                "generator": down["generator"],
                **sizes,
            }

        feed = self.mixing(site, state) if state.get("generator") else None
        return self.train_and_reply(model, site, state, self.objective(), feed)

    def mixing(self, site: Site, state: State) -> Feed:
        """Return a feed that adds fresh synthetic images to a real batch (eq. 11).

        Generation uses a separate random stream, so that real batches are those of a run without generator.
        """
        draws = torch.Generator()
        seed = derive(site.seed, "synthetic")
        source = self._source(site.task, state["embeddings"], draws)
        network = Generator.restored(
            state["generator"], [state[axis] for axis in AXES], site.device
        )
        # Steps of an epoch, rounded up.
        steps = -(-len(site.train) // site.settings.batch_size)
        done = 0

        def mix(x: Collated, y: Collated) -> tuple[Tensor, Tensor]:
            nonlocal done
            if done == 0 or (self.pool_per_round and done % steps == 0):
                # With `pool_per_round` each epoch draws the same images again.
                draws.manual_seed(seed)

            done += 1
            labels, z = source.draw(self.synthetic_batch, site.device)
            with torch.no_grad():
                images = source.augment(network(z))

            # Eq. 11: one batch, one forward pass, one mean.
            return torch.cat([x, images.to(x.dtype)]), torch.cat([class_indices(y), labels])

        return mix


# The generator's input, and the shape of its output.


@dataclass(frozen=True)
class Conditions:
    """Source of pseudo-labels, conditions and augmentations.

    Attributes:
        gaussians: the classes' distributions with the covariance of z.
        kind: one of `CONDITIONS`.
        augmentation: crop, flips, normalisation.
        draws: the generator of all random numbers, on the CPU.
    """

    gaussians: TextGaussians
    kind: str
    augmentation: Augmentation
    draws: torch.Generator

    @property
    def dimension(self) -> int:
        """Length of z."""
        classes, size = self.gaussians.mean.shape
        return size + (classes if self.kind == "noise+onehot" else 0)

    def draw(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return y ~ U over all classes (count,) and z (count, dimension), eq. 9."""
        labels = torch.randint(len(self.gaussians.mean), (count,), generator=self.draws)
        return labels.to(device), self.conditions(labels).to(device)

    def conditions(self, labels: Tensor) -> Tensor:
        """Draw z (count, dimension) for labels (count,), on the CPU."""
        if self.kind == "concept":
            return self.gaussians.draw(labels, self.draws)

        classes, size = self.gaussians.mean.shape
        z = torch.randn(len(labels), size, generator=self.draws)
        if self.kind == "noise+onehot":
            z = torch.cat([z, nn.functional.one_hot(labels, classes).to(z.dtype)], 1)

        return z

    def positions(self, count: int, shape: Sequence[int], device: torch.device) -> Tensor:
        """Draw crops and flips for a number of images of a shape (channels, height, width)."""
        return self.augmentation.positions(count, shape, self.draws).to(device)

    def augment(self, images: Tensor) -> Tensor:
        """Return generated images (B, C, H, W) in the form for a network."""
        return self.augmentation(images, self.draws)


def shape_of(images: Tensor, site: str) -> dict[str, float]:
    """Return the size along `AXES` of a batch of a site's images.

    Raises:
        InputError: its items are not images.
    """
    if images.ndim != 4:
        raise InputError(
            f"site {site!r} has items of shape {tuple(images.shape[1:])}",
            "the generator makes images (channels, height, width)",
            "set generator=false",
        )

    return dict(zip(AXES, map(float, images.shape[1:]), strict=True))


def common_shape(introductions: Messages) -> list[int]:
    """Return channels, height and width common to all sites' images.

    Raises:
        InputError: they differ, there are none, or the generator cannot make images of this size.
    """
    shapes = {}
    for name in sorted(introductions):
        scalars = introductions[name].scalars
        if scalars:
            shapes[name] = [int(scalars[axis]) for axis in AXES]

    if not shapes:
        raise InputError(
            "no site has a training image", "the generator needs their size", "give sites images"
        )

    first, shape = next(iter(shapes.items()))
    for name, shape_of_site in shapes.items():
        if shape_of_site != shape:
            raise InputError(
                f"site {name!r} has images of shape {shape_of_site}, site {first!r} of {shape}",
                "the generator makes images of one size",
                "let the bundle's transforms resize them, or set generator=false",
            )

    check_size(*shape[1:])
    return shape


def check_received(down: Message, dimension: int, shape: Mapping[str, float]) -> dict[str, int]:
    """Compare a received generator with the one that a site expects; return its version and image size.

    z has this dimension, and the site's images the shape, by `AXES`; empty at a site without any.

    Raises:
        RunError: it is for other images or conditions, or not a generator.
    """
    numbers = {name: down.scalars.get(name, -1.0) for name in ("version", *AXES)}
    wrong = []
    for name, number in numbers.items():
        if not (1 <= number < 2**31 and number == int(number)):
            wrong.append(f"{name} {number:g}")

    for axis, length in shape.items():
        if numbers[axis] != length:
            wrong.append(f"{axis} {numbers[axis]:g}, not {length:g}")

    # Sizes first: a network of absurd sizes is not even described on the meta device.
    if not wrong:
        with torch.device("meta"):
            expected = Generator(dimension, *(int(numbers[axis]) for axis in AXES)).state_dict()

        weights = down["generator"]
        wrong = [f"{name!r}" for name in sorted(weights.keys() ^ expected.keys())]
        for name, like in expected.items() if not wrong else ():
            tensor = weights[name]
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                wrong.append(f"{name!r} of {tuple(tensor.shape)} {tensor.dtype}")

    if wrong:
        with errors_safe_to_send():
            raise RunError(
                f"the server's generator does not fit this site: {wrong[0]} ({len(wrong)} such)"
            )

    return map_values(int, numbers)


METHOD = FedBM
