"""FedSM: "Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation" (Xu et al., CVPR 2022).

Three kinds of models: a global one w_g, one w_p,i for each site i, and a selector s: image -> site.
Site:    train w_g, and w_p,i from its pulled value, each for the local epochs on the same batches. The selector learns
         the site's number; as a site has a single label, it takes one Adam step a round, by the gradient of all images.
Server:  w_g as FedAvg; SoftPull w_p,i <- lambda w_p,i + (1 - lambda) / (N - 1) sum_(j != i) w_p,j over the N
         participants, buffers like weights; selector and its Adam moments averaged by samples.
Result:  the super model: where max softmax(s(x)) > threshold the w_p of that site predicts x, else w_g.

Departures. The super model of all sites is the server's, and judged; at the end of a run a site is also scored by what
it holds: its own w_p if the selector says so, else w_g. The original's selector is a VGG-11, here it is any of our
classifiers, small by default. It has the same input as the segmentation network: for volumes the patches, in training
as in a sliding window. A network on vectors has a linear selector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from medfl import networks
from medfl.core import InputError, Message, Messages, Tensors, Weights, pick, stream
from medfl.methods._parts.extras import SiteModels
from medfl.methods.base import Collated, Group, Method, option, sample_shares, weighted_mean
from medfl.storage import State
from medfl.training import Host, Site, fit, one_sample_safe, snapshot, zeros_of

_CLASSIFIERS = tuple(name for name in networks.names() if name not in networks.SEGMENTERS)


@dataclass(frozen=True)
class FedSM(SiteModels, Method):
    """A global model, personal ones that are softly pulled together, and a selector that routes each image."""

    lam: float = option(
        0.7, "lambda, what a site keeps of its own model in SoftPull", minimum=0.0, maximum=1.0
    )
    threshold: float = option(
        0.9, "confidence above which the selector chooses a personal model", minimum=0.0
    )
    selector: str = option("small_cnn", "network that tells sites apart", choices=_CLASSIFIERS)
    selector_lr: float = option(1e-3, "learning rate of the selector's Adam", minimum=0.0)

    paper = "Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation (Xu et al., 2022)"
    tasks = ("classification", "segmentation")

    def groups(self) -> tuple[Group, ...]:
        """Declare the site's own model, and the selector with its moments."""
        return (
            Group("personal", like_weights=True),
            Group("selector"),
            Group("mean"),
            Group("square"),
        )

    # Server half

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start every segmentation model from the initial weights, and draw the selector's."""
        names = sorted(introductions)
        with stream(host.seed, "selector"):
            selector = self._selector(host.model(weights), len(names))

        return {
            "weights": dict(weights),
            "personal": {name: dict(weights) for name in names},
            "selector": snapshot(selector),
            "mean": zeros_of(selector),
            "square": zeros_of(selector),
        }

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send w_g, the site's pulled w_p, the selector with its moments, and the site's number."""
        # a site's number is its index among the sorted names, as in `init_server`
        names = sorted(server["personal"])
        groups = pick(server, ("weights", "selector", "mean", "square"))
        groups["personal"] = server["personal"][site_name]
        return Message(groups, {"site": names.index(site_name), "sites": len(names)})

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Average w_g and the selector, and pull the participants' personal models towards each other."""
        shares = sample_shares(replies)
        after = {**server, "personal": {**server["personal"], **soft_pull(replies, self.lam)}}
        for group in ("weights", "selector", "mean", "square"):
            after[group] = weighted_mean(replies, group, shares)

        return after

    def global_predictor(self, host: Host, server: State) -> nn.Module:
        """Return the super model."""
        w_g = host.model(server["weights"])
        experts = [host.model(server["personal"][name]) for name in sorted(server["personal"])]
        return self._routed(w_g, dict(enumerate(experts)), server["selector"], len(experts))

    # Site half

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train w_g, w_p and the selector."""
        _, reply = super().local_update(site, {}, down)
        personal = site.model(down["personal"])
        fit(personal, site)
        selector = self._selector(personal, int(down.scalars["sites"]))
        selector.load_state_dict(dict(down["selector"]))
        moments = self._step(selector, site, down)
        groups = {
            "weights": reply["weights"],
            "personal": snapshot(personal),
            "selector": snapshot(selector),
        }

        return state, Message({**groups, **moments}, reply.scalars)

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return w_p for images that the selector assigns to this site, else w_g."""
        expert = {int(down.scalars["site"]): site.model(down["personal"])}
        return self._routed(
            site.model(down["weights"]), expert, down["selector"], int(down.scalars["sites"])
        )

    # The selector

    def _selector(self, network: nn.Module, sites: int) -> nn.Module:
        """Build a selector of what enters this network."""
        # one output alone would have nothing to tell apart, hence two at least; a server may say any number
        sites = min(max(2, sites), 10_000)
        kinds = (nn.Linear, nn.Conv2d, nn.Conv3d)
        first = next((module for module in network.modules() if isinstance(module, kinds)), None)
        device = next(network.parameters()).device
        if isinstance(first, nn.Conv2d | nn.Conv3d):
            dims = 3 if isinstance(first, nn.Conv3d) else 2
            return networks.build(self.selector, first.in_channels, sites, dims).to(device)

        if first is None:
            raise InputError(
                f"a {type(network).__name__}",
                "a network with convolutions or linear layers",
                "use such a network",
            )

        return nn.Linear(first.in_features, sites, dtype=first.weight.dtype, device=device)

    def _routed(
        self, w_g: nn.Module, experts: Mapping[int, nn.Module], weights: Weights, sites: int
    ) -> nn.Module:
        selector = self._selector(w_g, sites)
        selector.load_state_dict(dict(weights))
        return SuperModel(w_g, experts, selector, self.threshold)

    def _step(self, selector: nn.Module, site: Site, down: Message) -> dict[str, Tensors]:
        """Take one Adam step by the mean gradient over the site's images; return the new moments."""
        selector.train()
        with stream(site.seed, "selector") as generator:
            # gradients add up over the batches: the step uses their mean over all images
            for x, _ in site.train.batches(site.settings.batch_size, generator):
                with one_sample_safe(selector, x):
                    output = selector(x.to(site.device))

                # an IndexError where there is no such site: on a GPU the process would end
                number = torch.full(
                    (len(x),), range(output.shape[1])[int(down.scalars["site"])], device=site.device
                )
                loss = cross_entropy(output, number, reduction="sum") / site.num_samples
                loss.backward()  # type: ignore[no-untyped-call]

        # Adam with the averaged moments of the previous round, as if one optimiser moved from site to site.
        optimizer = torch.optim.Adam(selector.parameters(), lr=self.selector_lr)
        for name, parameter in selector.named_parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(float(site.round - 1)),
                "exp_avg": down["mean"][name].clone(),
                "exp_avg_sq": down["square"][name].clone(),
            }

        optimizer.step()
        moments: dict[str, Tensors] = {"mean": {}, "square": {}}
        for name, parameter in selector.named_parameters():
            moments["mean"][name] = optimizer.state[parameter]["exp_avg"]
            moments["square"][name] = optimizer.state[parameter]["exp_avg_sq"]

        return moments


class SuperModel(nn.Module):
    """Routes each image to the expert that the selector is confident about, or to the global model.

    Args:
        w_g: the global model.
        experts: site's number -> its personal model.
        selector: images -> (B, N) logits of the sites.
        threshold: confidence that an expert needs; from 1 on none is used.
    """

    def __init__(
        self,
        w_g: nn.Module,
        experts: Mapping[int, nn.Module],
        selector: nn.Module,
        threshold: float,
    ) -> None:
        super().__init__()
        self.w_g = w_g
        self.selector = selector
        self.threshold = threshold
        self.experts = nn.ModuleDict({str(number): expert for number, expert in experts.items()})

    def route(self, x: Tensor) -> Tensor:
        """Return for each image the number of the site whose model predicts it (B,), -1 for the global model."""
        sure, who = self.selector(x).float().softmax(1).max(1)  # (B,) each
        # a site has its own expert alone: what the selector takes for another site's goes to w_g
        held = torch.zeros_like(who, dtype=torch.bool)
        for number in self.experts:
            held = held | (who == int(number))

        return torch.where(held & (sure > self.threshold), who, -1)

    def forward(self, x: Tensor) -> Collated:
        """Return the output of the routed models (B, ...)."""
        routes = self.route(x)
        if torch.jit.is_tracing() or torch.compiler.is_compiling():  # type: ignore[attr-defined, no-untyped-call]
            return self._blended(x, routes)

        used = sorted(set(routes.tolist()))
        if len(used) == 1:
            return self._model(used[0])(x)

        output = None
        for number in used:
            rows = (routes == number).nonzero()[:, 0]
            part = self._model(number)(x[rows])
            if output is None:
                output = part.new_empty((len(x), *part.shape[1:]))

            output[rows] = part

        return output

    def _blended(self, x: Tensor, routes: Tensor) -> Collated:
        """Compute `forward` with every model on every image: a recorded program has no routes to choose."""
        output = self.w_g(x)
        for number, expert in self.experts.items():
            chosen = (routes == int(number)).reshape(-1, *[1] * (output.ndim - 1))
            output = torch.where(chosen, expert(x), output)
        return output

    def _model(self, number: int) -> nn.Module:
        return self.w_g if number < 0 else self.experts[str(number)]


def soft_pull(replies: Messages, lam: float) -> dict[str, Tensors]:
    """Return lambda w_p,i + (1 - lambda) / (N - 1) sum_(j != i) w_p,j of each of the N participants.

    The rows sum to 1, so the participants' mean is unchanged. A single one keeps its own. Integer counters are
    unchanged.
    """
    names = sorted(replies)
    # the mean of no others is none
    if len(names) == 1:
        return {names[0]: dict(replies[names[0]]["personal"])}

    pulled: dict[str, Tensors] = {name: {} for name in names}
    for key, first in replies[names[0]]["personal"].items():
        values = [replies[name]["personal"][key] for name in names]
        for i, name in enumerate(names):
            if not first.is_floating_point():
                pulled[name][key] = values[i]
                continue

            mean_of_rest = torch.stack(values[:i] + values[i + 1 :]).mean(0)
            if lam == 1:  # bit for bit, whatever the others sent
                pulled[name][key] = values[i]
            else:
                pulled[name][key] = lam * values[i] + (1 - lam) * mean_of_rest

    return pulled


METHOD = FedSM
