"""The networks in a run folder, ready to predict: the global model, or the one that a site is judged by.

A global model is the run's network with the weights of its file; it needs no images. Every other network is made by the
method from the saved States, as the run did for its scores: a site's own model, a network assembled by a method,
and the newest round of an interrupted run.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from medfl import methods
from medfl.core import Config, InputError, Print, Run, Task, Tensors
from medfl.methods.base import Method
from medfl.problem import Problem
from medfl.runs.plan import repeat
from medfl.runs.teachers.trained import bundle_of_run, network_with
from medfl.runtimes import Federation
from medfl.runtimes.federation import participants
from medfl.runtimes.step import judged
from medfl.storage import RunFolder, RunReader, load_state, read_weights, weights_sha256
from medfl.storage.places import WHICH

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Model:
    """A trained network on the CPU in evaluation mode; the caller may change it.

    Attributes:
        site: whose model it is, "" for the global one.
        round: after which it was taken.
        config: ids of the bundle's configuration with which the site's network is built.
    """

    network: nn.Module
    site: str
    round: int
    config: Config


class RunNetworks:
    """The networks in a run folder: the last ones, or the best by the validation metric.

    Raises:
        InputError: there is no run, or its bundle has changed. A shipped bundle may have, which is noted.
    """

    def __init__(self, path: Path, which: str = "last", say: Print = str) -> None:
        self.files = RunReader(path)
        self.document = self.files.document
        self.path = path
        self.which = which
        run = self.files.run
        self.run_hash = run.run_hash
        # wherever it was trained: weights are read here, and the caller moves them to another device
        self.run: Run = replace(run, device="cpu")
        self.computed_on_cpu = run.device == "cpu"
        self.manifest = self.files.manifest
        self.bundle: Problem = bundle_of_run(self.run, path, CPU, allow_changed=True)

        if self.bundle.dataset and self.bundle.sha256 != run.bundle_sha256:
            say(
                f"note: bundle {run.bundle!r} is not that of medfl {run.versions.get('medfl')}, which made the run: "
                "the run's weights are put into today's network"
            )

        # as recorded: to find task and classes, a third-party bundle would open its training images
        if self.document.get("task"):
            classes = tuple(self.document.get("classes") or ())
            self.bundle = self.bundle.replaced(task=self.document["task"], classes=classes)

        self.method: Method = methods.load(self.run.method, self.run.options)
        self.sites = participants(self.run, False)

    @property
    def summary(self) -> Config:
        """The run's summary, {} if it was interrupted or is being continued."""
        return self.files.final_summary

    @property
    def finished(self) -> bool:
        """Tell whether the run has finished."""
        return bool(self.summary)

    @cached_property
    def round(self) -> int:
        """The round of the model; InputError if there is none yet."""
        if self.which == "best":
            best = self.files.best_round
            if best is None or not (self.path / "best.safetensors").is_file():
                raise InputError(
                    f"the run in {self.path} has kept no best round",
                    "one is kept where the validation metric is defined in a round",
                    "use --which last",
                )

            return int(best["round"])

        if self.summary:
            return int(self.summary["rounds"])
        if self.manifest is None or not self.manifest["round"]:
            raise InputError(
                f"the run in {self.path} has no weights yet",
                "a model is there after the first round",
                f"let it train: medfl run --resume --out {self.path}",
            )

        return int(self.manifest["round"])

    @property
    def task(self) -> Task:
        """The run's problem."""
        kind = str(self.document.get("task") or self.bundle.task)
        return Task(kind, tuple(self.document.get("classes") or ()), self.bundle.embeddings)

    def models(self, site: str | None, data: str | None, say: Print) -> list[Model]:
        """Return the global model (`site` None), that of one site, or those of all ("all").

        `data` is the folder of the images if it differs from the run's; only sites' models need them.

        Raises:
            InputError: there is no such model.
        """
        if site is not None:
            self._check_site(site)
            names = self.sites if site == "all" and "all" not in self.sites else [site]
            states = _States(self, data, say)
            return [self._site_model(states, name) for name in names]

        network = self._from_file()
        if network is None:
            network = _States(self, data, say).server_network(self.round)

        if network is None:
            raise self._no_global_model_error()

        return [Model(network.eval(), "", self.round, {})]

    def _no_global_model_error(self) -> InputError:
        return InputError(
            f"method {self.run.method!r} has a model for each site and none for all",
            f"its sites are {', '.join(self.sites)}",
            "choose one with --site NAME; medfl export takes --site all too",
        )

    def _check_site(self, site: str) -> None:
        if not methods.has_site_models(self.method):
            raise InputError(
                f"--site {site} with method {self.run.method!r}",
                "it has one model, the same for all",
                "leave it out",
            )
        if site not in self.sites and site != "all":
            raise InputError(
                f"--site {site}",
                f"the sites of this run are {', '.join(self.sites)}",
                "choose one, or all of them: all",
            )

    @cached_property
    def _weights(self) -> Tensors | None:
        """The weights as the run wrote them, None if it was interrupted before writing the last ones.

        Raises:
            InputError: their file is missing, or has been changed.
        """
        # weights.safetensors of an interrupted run would be from an earlier end
        if self.which == "last" and not self.finished:
            return None

        file = self.path / f"{WHICH[self.which]}.safetensors"
        if not file.is_file():
            raise InputError(
                f"{file} is missing",
                "the weights that the run wrote",
                "restore it, or repeat the run",
            )

        weights, sha256 = read_weights(file)
        # the last weights are recorded by the hash of their tensors, the best by that of their file
        if self.which == "last":
            sha256 = weights_sha256(weights)

        recorded = self.files.sha256_of(self.which)
        if recorded and recorded != sha256:
            raise InputError(
                f"{file} is not as the run wrote it",
                f"its SHA-256 was {recorded[:12]}…",
                "restore it, or repeat the run",
            )

        return weights

    def _from_file(self) -> nn.Module | None:
        """Return the global model; None if it is more than the run's network with these weights."""
        _ = self.round  # refuses a run without weights, which `_weights` does not
        if self._weights is None:
            return None
        if any("/" in key and key.partition("/")[0] in self.sites for key in self._weights):
            raise self._no_global_model_error()

        try:
            return network_with(self._weights, self.bundle, self.method, self.task, self.run.seed)
        except ValueError:
            return None

    def _site_model(self, states: _States, name: str) -> Model:
        config = methods.site_networks(self.method, states.federation.participants).get(name, {})
        network = states.site_network(name).eval()
        if self.which == "best":
            self._load_best(network, name, states.federation)
        return Model(network, name, self.round, config)

    def _load_best(self, network: nn.Module, name: str, federation: Federation) -> None:
        """Load a site's weights of the best round, if its prediction depends on nothing else."""
        prefix = f"{name}/"
        weights = self._weights or {}
        site_weights = {}
        for key, tensor in weights.items():
            if key.startswith(prefix):
                site_weights[key.removeprefix(prefix)] = tensor

        # predictions of a wrapped network or one with hooks depend on more than its weights
        plain = federation.site(name, self.round).network()
        hooks = [module._forward_hooks for module in network.modules()]
        is_plain = type(plain) is type(network) and not any(hooks)
        if not is_plain or plain.state_dict().keys() != site_weights.keys():
            raise InputError(
                f"--which best --site {name} of method {self.run.method!r}",
                "the best round's States of the sites are not kept",
                "use --which last",
            )

        network.load_state_dict(site_weights)


class _States:
    """The networks that a method makes from the saved States, in a rebuilt federation."""

    def __init__(self, result: RunNetworks, data: str | None, say: Print) -> None:
        if result.manifest is None:
            raise InputError(
                f"the run in {result.path} has no saved States",
                "this model is made from state/, as the run left it",
                f"let it train: medfl run --resume --out {result.path}",
            )

        self.networks = result
        self.manifest = result.manifest
        self.folder = RunFolder(result.path)
        self.federation = repeat(result.run, data, say, result.path).federation(say)

    def server_network(self, round_: int) -> nn.Module | None:
        """Return a copy of the server's network, None if it has none."""
        federation = self.federation
        if self.networks.which == "best":
            server = self.folder.best_state()
        else:
            server = self.folder.server_state(self.manifest)

        with federation.networks.scope():
            network = federation.method.global_predictor(federation.host(round_), server)
            # the pool lends the network to others when the scope ends
            return deepcopy(network)

    def site_network(self, name: str) -> nn.Module:
        """Return a copy of the network that a site is judged by after the last round."""
        federation = self.federation
        round_ = int(self.manifest["round"])
        with federation.networks.scope():
            server = self.folder.server_state(self.manifest)
            # what it would receive next: this and its State determine how a site is judged
            down = federation.method.broadcast(federation.host(round_), server, name)

        state_file = self.folder.readable_state(name, self.networks.run_hash)
        state = load_state(state_file) if state_file else None
        with judged(federation, round_, name, state, down) as network:
            return deepcopy(network)
