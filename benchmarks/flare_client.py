"""What the systems of `peers.py` share: the problem, its network, a site's training; as a script, FLARE's client.

python flare_client.py FOLDER      (started by FLARE)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

Weights = dict[str, Tensor]


class Problem:
    """The sites' images, the initial weights and the network in a folder that `peers.prepare` wrote."""

    def __init__(self, folder: str | Path) -> None:
        """Read the images."""
        self.folder = Path(folder)
        with np.load(self.folder / "problem.npz") as file:
            self.arrays = dict(file)
        names = {name.partition("/")[0] for name in self.arrays if "/" in name}
        self.sites = sorted(names, key=lambda name: int(name.rpartition("-")[2]))

    def network(self) -> nn.Module:
        """Build the network."""
        from medfl import networks

        about = json.loads((self.folder / "problem.json").read_text())
        return networks.build(about["network"], 3, about["classes"])

    def initial(self) -> Weights:
        """Return the weights that all systems start from."""
        return load_file(self.folder / "initial.safetensors")


def train(problem: Problem, site: str, weights: Weights, round_: int) -> Weights:
    """Return the weights after one local epoch: SGD 0.01, batch 8, shuffled, cross-entropy."""
    torch.set_num_threads(1)
    network = problem.network()
    network.load_state_dict(weights)
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    x, y = (torch.from_numpy(problem.arrays[f"{site}/{name}"]) for name in ("x", "y"))
    generator = torch.Generator().manual_seed(1000 * round_ + problem.sites.index(site))
    for chosen in torch.randperm(len(x), generator=generator).split(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


class Net(nn.Module):
    """The network as FLARE wants it: a class whose arguments are JSON; its weights are the initial ones."""

    def __init__(self, folder: str) -> None:
        """Build it."""
        super().__init__()
        problem = Problem(folder)
        self.folder, self.inner = folder, problem.network()
        self.inner.load_state_dict(problem.initial())

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.inner(x)
        return logits

    def state_dict(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Return the inner network's weights under their own names."""
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Load the inner network's weights."""
        return self.inner.load_state_dict(*args, **kwargs)


def main(folder: str) -> None:
    """Answer FLARE's rounds until it ends."""
    import nvflare.client as flare

    flare.init()
    problem, round_ = Problem(folder), 0
    site = flare.get_site_name()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        round_ += 1
        weights = {name: torch.as_tensor(value) for name, value in received.params.items()}
        trained = train(problem, site, weights, round_)
        flare.send(flare.FLModel(params=trained, meta={"NUM_STEPS_CURRENT_ROUND": 8}))


if __name__ == "__main__":
    main(sys.argv[1])
