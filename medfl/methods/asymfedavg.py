"""AsymFedAvg: "Federated nnU-Net for Privacy-Preserving Medical Image Segmentation" (Skorupko et al., Sci. Rep. 2025).

Asymmetric federated averaging, the paper's second way beside the common fingerprint: each site has a network of its own
(option `bodies`), made for its images. An entry is a tensor of the state dict with its name and its shape.
Site:    theta_k <- the received entries, all others as they are; local training; reply: the entries that others have
Server:  e = sum_k p_k e_k over the round's sites that have the entry e
An entry that one site alone has never leaves it after training. Judged by each site's own network.

Departures. The authors' code averages what all sites have, here two are enough; it takes the plain mean
(`--site-weights uniform`), here it is by samples, so that equal networks give FedAvg. There all sites start from the
entries of one that is drawn, here from those of the first that has them: sites tell their initial weights, which know
no image.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from medfl.core.errors import InputError, RunError
from medfl.core.mappings import pick_known
from medfl.core.message import Message, Messages, Tensors, Weights
from medfl.methods._parts.own_networks import OwnNetworks
from medfl.methods.base import Group, sample_shares, weighted_mean
from medfl.storage.files import State
from medfl.training import Host, Site, snapshot


@dataclass(frozen=True)
class AsymFedAvg(OwnNetworks):
    """FedAvg of what fits: sites with different networks share the layers of the same name and shape."""

    paper = "Federated nnU-Net for Privacy-Preserving Medical Image Segmentation (Skorupko et al., 2025)"

    def groups(self) -> tuple[Group, ...]:
        """Declare the entries, both ways."""
        return (Group("entries"),)

    # Server half

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the initial entries that sites have in common, each as the first of them has it.

        Raises:
            InputError: the sites' networks have nothing in common.
        """
        first: Tensors = {}
        shared: Tensors = {}
        for name in sorted(introductions):
            entries = introductions[name]["entries"]
            shared |= pick_known(first, entries)  # another site has them too
            first = {**entries, **first}

        if not shared and len(introductions) > 1:
            raise InputError(
                f"bodies={self.bodies}, networks without a common layer",
                "layers of the same name and shape are averaged",
                "choose networks that share some, or the method local",
            )

        return {"entries": shared}

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Average each entry over the participants that have it.

        Raises:
            RunError: an entry has another shape.
        """
        means = dict(server["entries"])
        for key in means:
            owners = {}
            for name, reply in replies.items():
                entries = reply.tensors.get("entries", {})
                if key in entries:
                    entry = _checked(key, entries[key], f"site {name!r}")
                    owners[name] = Message({"entries": {key: entry}}, reply.scalars)

            if owners:
                means |= weighted_mean(owners, "entries", sample_shares(owners))

        return {"entries": means}

    # Site half

    def introduce(self, site: Site) -> Message:
        """Send the initial weights, which nothing has been learnt by."""
        return Message({"entries": _by_shape(site.initial_weights)})

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train the network with the received entries; reply with the same entries."""
        model = self.predictor(site, state, down)
        self.train(model, site, state, down)
        trained = snapshot(model)
        sent = pick_known(_by_shape(trained), down.tensors.get("entries", {}))
        return {"weights": trained}, Message({"entries": sent}, {"samples": site.num_samples})

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the site's network with the newest common entries.

        Raises:
            RunError: an entry has another shape.
        """
        weights = dict(state["weights"])
        received = down.tensors.get("entries", {})
        for name, tensor in state["weights"].items():
            key = _key(name, tensor)
            if key in received:
                weights[name] = _checked(key, received[key], "the server")

        return site.model(weights)


def _key(name: str, tensor: Tensor) -> str:
    """Return a tensor's name with its shape, as `conv.weight[8, 1, 3, 3]`."""
    return f"{name}{list(tensor.shape)}"


def _by_shape(weights: Weights) -> Tensors:
    return {_key(name, tensor): tensor for name, tensor in weights.items()}


def _checked(key: str, tensor: Tensor, sender: str) -> Tensor:
    if not key.endswith(_key("", tensor)):
        raise RunError(f"{sender}: 'entries/{key}' has the shape {list(tensor.shape)}")

    return tensor


METHOD = AsymFedAvg
