"""What only some methods have beside the hooks of `Method`, as classes to inherit from.

A runtime asks for one with `medfl.methods.extra(method, SiteNetworks)` and gets None where the method has it not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medfl.core.errors import InputError
from medfl.core.untrusted import Refused, typed_value
from medfl.methods.base import option
from medfl.storage.files import State
from medfl.training import Host


class SiteNetworks(ABC):
    """The sites need not have the same network."""

    def settled(self, sizes: Mapping[str, int]) -> SiteNetworks:
        """Return the method with options that say names where they said "auto"."""
        return self

    @abstractmethod
    def site_networks(self, names: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return, for each site, the ids of the bundle's configuration that its network is built with.

        Args:
            names: the participants, in the partition's order.

        Raises:
            InputError: what the method's options say does not fit these sites.
        """

    def keeps_network(self, config: Mapping[str, Any]) -> bool:
        """Tell whether a site with a network of this configuration keeps it, and sends one of the server's kind."""
        return False


@dataclass(frozen=True)
class Bodies(SiteNetworks):
    """The option `bodies` says which networks the sites have."""

    bodies: str = option(
        "", "networks dealt to the sites in equal blocks: resnet20,resnet110, or ID=VALUE,... of the configuration"
    )

    def site_networks(self, names: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return what the option `bodies` says of each site; see `deal`."""
        return deal(self.bodies, names)


@dataclass(frozen=True)
class PublicData:
    """Learns from images that all sites have; the options say which."""

    public: str = option("", "the public data: BUNDLE or BUNDLE:DIR; default: what the bundle's protocol names")
    public_section: str = option(
        "",
        "the public bundle's section that is taken; default: what its protocol says, else test",
        choices=("", "train", "validate", "test"),
    )
    public_items: int = option(
        0, "so many public items, classes balanced (a fixed draw); 0: what its protocol says, else all", minimum=0
    )
    public_size: int = option(0, "side of public images; 0: their bundle's own, in segmentation the sites'", minimum=0)
    lift: str = option(
        "pseudo3d",
        "public images where the sites have volumes: repeat each along a third axis and average the output over it, "
        "or refuse",
        choices=("pseudo3d", "refuse"),
    )

    @property
    def uses_public(self) -> bool:
        """Whether its other options have it learn from public data."""
        return True

    @property
    def uses_teachers(self) -> bool:
        """Whether they have it learn from the teachers' answers, where it has the option `teachers`."""
        return True


class TextEmbeddings(ABC):
    """Learns from text embeddings of its task's prompts."""

    @property
    @abstractmethod
    def language_model(self) -> str:
        """The model that embeds them, "" where the options need none."""


class SiteModels:
    """A site has a model of its own, `predictor`'s, though the global one is judged.

    Without this, a site of such a method is scored by the global model after one more local training.
    """

    def has_site_models(self) -> bool:
        """Tell whether the options give a site one."""
        return True


class WithoutLabels:
    """Learns at sites without labels too: there `site.train.labelled` is false, and the targets of batches are None."""


class WholeCohort:
    """Can train all sites in every round, whatever the cohort: where `everyone` is true."""

    everyone: bool


@dataclass(frozen=True)
class Synthetic:
    """Images that a method's server has made.

    Attributes:
        images: (N, C, H, W) in 0 to 1, to be looked at.
        inputs: the same images as a network takes them, normalised as real ones.
    """

    images: Tensor
    inputs: Tensor


class MakesImages(ABC):
    """Its server makes images, of which pictures are drawn."""

    @abstractmethod
    def synthetic(self, host: Host, server: State, labels: Tensor, draws: torch.Generator) -> Synthetic | None:
        """Return an image for each label (N,), None while there are none.

        All that is random comes from `draws`, so that the same labels and draws compare over the rounds.
        """


def deal(spec: str, names: Sequence[str], option: str = "bodies") -> dict[str, dict[str, Any]]:
    """Deal networks to the sites, in blocks as equal as can be.

    Args:
        spec: `ID=VALUE,VALUE,...`: values of an id of the bundle's configuration; `VALUE,VALUE,...` is of the id
            `network`. As many values as sites give each site its own; "" gives all the bundle's network.
        names: the sites, in the partition's order.
        option: of the method, for errors.

    Returns:
        site -> ids of the configuration that its network is built with.

    Raises:
        InputError: this is no such list, or one with more values than there are sites.
    """
    if not spec:
        return {name: {} for name in names}
    key, _, text = spec.partition("=") if "=" in spec else ("network", "", spec)
    try:
        values = typed_value(f"[{text}]")
    except Refused:
        values = []
    if not values or not isinstance(values, list) or None in values or not key.strip():
        raise InputError(
            f"{option}={spec}",
            f"{option} is VALUE,VALUE,... or ID=VALUE,VALUE,...",
            f"for example {option}=resnet20,resnet110",
        )
    if len(values) > len(names):
        raise InputError(
            f"{option}={spec} for {len(names)} sites",
            "there are at most as many networks as sites",
            f"name at most {len(names)} networks",
        )
    return {name: {key.strip(): values[i * len(values) // len(names)]} for i, name in enumerate(names)}
