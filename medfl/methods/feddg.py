"""FedDG: "FedDG: Federated Domain Generalization on Medical Image Segmentation" (Liu et al., CVPR 2021), in part.

Site:    F(x) = A e^(i P), the Fourier transform of each channel over all axes, divided by their number of pixels
         x' = F^-1(((1 - l) A + l B) e^(i P)) within the block of frequencies |f| <= `frequencies` along each axis (in
         cycles an image), A elsewhere; l uniform in [0, 1], B the mean A of another site, drawn for each image anew
         training is FedAvg's on x', an image staying x with the probability 1 - `probability`
Server:  FedAvg's; hands on each site's mean A within the block.

Departures. Only the first half of the paper (ELCFS) is here: neither its meta-learning over x and x' nor the contrast
of boundary features. The paper sends the amplitudes of single images, which reveal much of an image; here only a
mean over the training images leaves, of (2 `frequencies` + 1)^d numbers per channel, and nothing from a site with fewer
than `least` images. It is a mean without noise, not a privacy guarantee. The block is in cycles per image rather than
a share of its pixels, so that sites may have images of different sizes. In round 1 no site knows another's mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fft import fftn, ifftn

from medfl.core import InputError, Message, Messages, Tensors, Weights
from medfl.methods.base import Collated, Group, Method, option
from medfl.storage import State
from medfl.training import FitReport, Host, Site, fit


@dataclass(frozen=True)
class FedDG(Method):
    """FedAvg on images that take the look of other sites: low frequencies of their amplitude spectra are mixed in."""

    probability: float = option(
        0.5, "part of the training images that are changed (ours)", minimum=0.0, maximum=1.0
    )
    frequencies: int = option(
        1, "largest frequency that is changed, in cycles an image along each axis", minimum=0
    )
    least: int = option(5, "training images below which a site sends no mean (ours)", minimum=1)

    paper = "FedDG: Federated Domain Generalization on Medical Image Segmentation (Liu et al., CVPR 2021)"
    shown = {"least": 1}

    def groups(self) -> tuple[Group, ...]:
        """Declare the mean amplitudes: a site's own, and the others'."""
        return (Group("amplitude", down=False), Group("amplitudes", up=False))

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the initial weights; no amplitudes are known."""
        return {**super().init_server(host, weights, introductions), "amplitudes": {}}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the weights and the other sites' means, without their names."""
        amplitudes = server["amplitudes"]
        means: Tensors = {}
        for name in sorted(amplitudes):
            if name != site_name:
                means[str(len(means))] = amplitudes[name]

        return Message({"weights": server["weights"], "amplitudes": means})

    def init_site(self, site: Site) -> State:
        """Take the mean over the site's training images."""
        if self.probability == 0 or site.num_samples < self.least:
            return {}

        return {"amplitude": {"mean": mean_amplitude(site, self.frequencies)}}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train, and also send the site's mean."""
        _, reply = super().local_update(site, state, down)
        return state, Message({**reply.tensors, **state}, reply.scalars)

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train on images that are mixed with the means of others."""
        sent = down.tensors.get("amplitudes", {})
        # their order is not preserved in transmission
        means = [sent[key] for key in sorted(sent, key=int)]
        if not means or self.probability == 0:
            return fit(model, site)

        def feed(x: Collated, y: Collated) -> tuple[Collated, Collated]:
            images = checked(x, site, self.frequencies)
            # drawn on the CPU, so that a GPU gets the same numbers
            drawn = torch.randint(len(means), (len(images),))
            degree = torch.rand(len(images)) * (torch.rand(len(images)) < self.probability)
            target = torch.stack(means)[drawn].to(images)
            return mixed(images, target, degree.to(images), self.frequencies), y

        return fit(model, site, feed=feed)

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Average the weights, and keep the newest mean of each site."""
        amplitudes = dict(server["amplitudes"])
        for name in sorted(replies):
            if "amplitude" in replies[name]:
                amplitudes[name] = replies[name]["amplitude"]["mean"]

        return {**super().aggregate(host, server, replies, num_sites), "amplitudes": amplitudes}


def mixed(x: Tensor, target: Tensor, degree: Tensor, frequencies: int) -> Tensor:
    """Return x' of images (B, C, H, W[, D]).

    Args:
        x: the images, with any spatial axes.
        target: B of each, (B, C, 2 f + 1, ...) for f `frequencies`.
        degree: l of each, (B,).
        frequencies: of the block.
    """
    axes = tuple(range(2, x.ndim))
    # divided by the number of pixels: amplitudes of images of any size compare
    spectrum = fftn(x, dim=axes, norm="forward")
    block = _block(x, frequencies)
    amplitude = spectrum[block].abs()  # (B, C, 2 f + 1, ...)
    weight = degree.view(-1, *[1] * (x.ndim - 1))
    changed = (1 - weight) * amplitude + weight * target
    spectrum[block] = torch.polar(changed, spectrum[block].angle())
    images: Tensor = ifftn(spectrum, dim=axes, norm="forward")
    return images.real


def mean_amplitude(site: Site, frequencies: int) -> Tensor:
    """Return the mean A of a site's training images without random transforms, (C, 2 f + 1, ...)."""
    total = torch.zeros(())
    for x, _ in site.still.batches(site.settings.batch_size):
        images = checked(x, site, frequencies)
        spectrum = fftn(images, dim=tuple(range(2, images.ndim)), norm="forward")
        total = total + spectrum[_block(images, frequencies)].abs().sum(0).double().cpu()

    return (total / site.num_samples).float()


def checked(x: Collated, site: Site, frequencies: int) -> Tensor:
    """Return a batch as images with frequencies to change; InputError if it is not."""
    if isinstance(x, Tensor) and x.ndim >= 2 and min(x.shape[2:], default=2**31) > 2 * frequencies:
        return x

    form = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
    raise InputError(
        f"method feddg at site {site.name!r}, whose batches are {form}",
        f"images (B, C, H, W[, D]) of at least {2 * frequencies + 1} pixels along each axis",
        "take --set frequencies=1, or another method",
    )


def _block(x: Tensor, frequencies: int) -> tuple[slice | Tensor, ...]:
    """Return the index of the frequencies -f to f along each spatial axis."""
    ends = torch.arange(-frequencies, frequencies + 1)
    # negative frequencies are counted from the end
    axes = [ends % size for size in x.shape[2:]]
    everything = slice(None)
    return (everything, everything, *(torch.meshgrid(*axes, indexing="ij") if axes else ()))


METHOD = FedDG
