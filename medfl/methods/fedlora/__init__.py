"""FedLoRA: low-rank adapters of a frozen base, "LoRA" (Hu et al., ICLR 2022), in federation; by `share` five rules.

W = W0 + s B A in each chosen layer, s = alpha / rank. W0 is the run's initial network (`--init`, or drawn from its
seed); every site has it, and it is never sent. A starts as drawn from the run's seed, B as 0. The layers of `full` (the
head) are fully trained and averaged by samples; everything else keeps its initial value.

both:   A = sum_k p_k A_k, B = sum_k p_k B_k                      FedIT (Zhang et al., ICASSP 2024)
a:      A = sum_k p_k A_k; B_k stays at its site, judged by it    FedSA-LoRA (Guo et al., ICLR 2025)
b:      A stays as drawn and is not sent; B = sum_k p_k B_k       FFA-LoRA (Sun et al., ICLR 2024)
stack:  D <- D + s [p_1 B_1 ... p_K B_K] [A_1; ...; A_K], W0 + D the next base    FLoRA (Wang et al., NeurIPS 2024)
svd:    B A = the best product of this rank to sum_k p_k B_k A_k: A = V^T, B = U S

A site of a smaller rank (`ranks`) has the first rows of A and columns of B and sends no others; the server fills their
place with zeros. The judged, saved and exported network has the products in its weights.
Departures. BatchNorm outside `full` uses the base's running statistics. `stack` sends the sum D, so that an absent
site misses nothing (FLoRA: the round's factors, to everybody), and draws the same A at all sites. The head is trained
by default, even if a paper freezes it (`full=none`). `peft` is not used: it has no transposed convolution, merges no
grouped one, and renames the tensors, whose names identify them in messages and saved weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from medfl.core import Message, Messages, RunError, Task, Weights, without
from medfl.methods.base import Group
from medfl.methods.fedlora.adapters import Adapters
from medfl.methods.fedlora.low_rank import adapting, delta_name, named_factors
from medfl.storage import State, weights_sha256
from medfl.training import Host, Site, fit


@dataclass(frozen=True)
class FedLoRA(Adapters):
    """Train low-rank adapters of a base that every site has and nobody sends."""

    paper = "LoRA: Low-Rank Adaptation of Large Language Models (Hu et al., ICLR 2022)"
    shown = {"rank": 2}

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the bundle's network, checked against the options."""
        return self.checked(network)

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return the base's tensors."""
        return frozenset(network.state_dict()) - self.whole(network)

    def groups(self) -> tuple[Group, ...]:
        """Declare the factors, and for `stack` the sum of the products."""
        factors = Group("adapters", down=self.share != "stack", smaller=True)
        if self.share == "stack":
            return (factors, Group("delta", up=False, smaller=True))

        return (factors,)

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from A as drawn and B = 0, or from D = 0."""
        server = super().init_server(host, weights, introductions)
        layers = self.matrices(host.model(weights))
        base_state = {"base": _base_hash(weights, server["weights"])}
        if self.share == "stack":
            zero = {}
            for name, m in layers.items():
                zero[delta_name(name)] = m.new_zeros(m.shape)

            return {**server, **base_state, "delta": zero}

        first = named_factors(self.first(host, layers, self.max_rank), self.sent_down)
        return {**server, **base_state, "adapters": first}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the shared tensors, and 48 bits of the base's SHA-256."""
        # a number is sent as float64, which has 53 bits
        sent = super().broadcast(host, server, site_name)
        return Message(sent.tensors, {"base": int(server["base"][:12], 16)})

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Combine the sites' factors, by the rule of `share`."""
        after = super().aggregate(host, server, replies, num_sites)
        weight_matrices = self.matrices(host.model(host.networks.initial))
        if self.share != "stack":
            return {**after, "adapters": self.server_factors(replies, weight_matrices)}

        # D <- D + s sum_k p_k B_k A_k, in float64 and rounded once
        delta = {}
        for name, mean in self.mean_products(replies, weight_matrices).items():
            old = server["delta"][delta_name(name)]
            delta[delta_name(name)] = (old.double() + self.scale * mean).to(old)

        return {**after, "delta": delta}

    def global_predictor(self, host: Host, server: State) -> nn.Module | None:
        """Return the base with the head and the products; None if each site has its own B."""
        if self.share == "a":
            return None

        return self.complete(host, {}, self.broadcast(host, server, ""), self.max_rank)

    def init_site(self, site: Site) -> State:
        """Return B = 0 if a site keeps it."""
        if self.share != "a":
            return {}
        first = self.first(
            site, self.matrices(site.model(site.initial_weights)), self.rank_of(site.name)
        )
        return {"adapters": named_factors(first, "B")}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train the adapters and the head."""
        model = self.begun(site, down)
        rank = self.rank_of(site.name)
        full_names = self.whole(model)
        pairs = self.pairs(site, state, down, self.matrices(model), rank)
        base = _base_hash(site.initial_weights, full_names)

        if int(base[:12], 16) != down.scalars.get("base"):
            raise RunError(
                f"site {site.name!r}: its base {base[:12]} is not the server's; give both the same --init"
            )

        with adapting(model, pairs, self.scale, full_names, trains_a=self.share != "b") as trained:
            fit(model, site)

        weights = {}
        for name, tensor in model.state_dict().items():
            if name in full_names:
                weights[name] = tensor.detach().clone()

        reply = site.reply(weights, adapters=named_factors(trained, self.sent_up))
        if self.share == "a":
            return {"adapters": named_factors(trained, "B")}, reply

        return state, reply

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the base with the newest head and products, for `share=a` the site's own."""
        rank = self.rank_of(site.name)
        # a reply has the site's own rank, a broadcast the largest; for `share=a` the State has the site's own
        received = down.tensors.get("adapters", {})
        if self.share != "a" and not any(name.endswith(f".{rank}") for name in received):
            rank = self.max_rank

        return self.complete(site, state, down, rank)


def _base_hash(weights: Weights, whole: Weights | frozenset[str]) -> str:
    return weights_sha256(without(weights, whole))


METHOD = FedLoRA
