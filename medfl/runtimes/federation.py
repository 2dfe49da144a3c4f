"""Federation: the sites of one run, made from its bundle, its method and its record. No runtime logic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from medfl.bundle import SECTIONS, Bundle
from medfl.errors import InputError, RunError
from medfl.message import Message, is_finite
from medfl.methods.base import Method
from medfl.prepared import Prepared, Shard
from medfl.seeding import derive
from medfl.settings import Run
from medfl.site import Host, LocalSettings, Networks, Site
from medfl.task import Task

POOLED = "central"
"""Name of the one participant of a method that pools the data."""


class Federation:
    """Sites and server of one run.

    Attributes:
        names: the sites, in the partition's order.
        participants: who trains: the sites, or one participant with everybody's data.
        sections: section -> prepared items, shared by all sites.
    """

    def __init__(
        self,
        bundle: Bundle,
        method: Method,
        run: Run,
        *,
        prepared: Mapping[str, Prepared] | None = None,
        jobs: int = 1,
        progress: bool = False,
    ) -> None:
        """Prepare the data of all sections once, or share what another federation prepared.

        Raises:
            InputError: an item of the partition is not in the data, or the method does not support the bundle's task or
                its images.
        """
        if bundle.task not in method.tasks:
            raise InputError(
                f"method {run.method!r} on bundle {bundle.name!r}, a {bundle.task} task",
                f"it supports {', '.join(method.tasks)}",
                "see medfl methods",
            )
        self.bundle, self.method, self.run = bundle, method, run
        self.task = Task(bundle.task, bundle.classes, bundle.embeddings)
        self.networks = Networks(lambda: method.adapt(bundle.network(), self.task), run.seed, torch.device(run.device))
        self.names = list(run.partition.sites)
        self.participants = [POOLED] if method.pools_data else self.names
        self.sections: dict[str, Prepared] = dict(prepared or {})
        for section in SECTIONS if prepared is None else ():
            shared = section == "test" and not bundle.has_test
            self.sections[section] = (
                self.sections["validate"] if shared else bundle.prepared(section, jobs=jobs, progress=progress)
            )
        self._shards = {section: self._divide(section) for section in SECTIONS}
        with self.networks.scope():
            network = self.networks.lease(self.networks.initial)
            self._personal = method.personal_names(network)
            self._forms = {
                f"weights/{n}": (t.shape, t.dtype) for n, t in network.state_dict().items() if n not in self._personal
            }

        for name in self.participants:
            method.check(self.site(name, 0))

    def _divide(self, section: str) -> dict[str, Shard]:
        prepared = self.sections[section]
        position = {ident: i for i, ident in enumerate(prepared.ids(range(len(prepared))))}
        shards: dict[str, Shard] = {}
        for name, ids in self.run.partition.sites.items():
            missing = [ident for ident in ids.get(section, []) if ident not in position]
            if missing:
                raise InputError(
                    f"site {name!r} has {section} item {missing[0]!r}, which is not in the data ({len(missing)} such)",
                    "every item of the partition is in the data",
                    "use the same data folder, or draw a new partition",
                )
            shards[name] = Shard.of(prepared, [position[ident] for ident in ids.get(section, [])])
        return shards

    def shard(self, name: str, section: str) -> Shard:
        """Return a site's items in a section."""
        return self._shards[section][name]

    def work(self, participant: str, section: str) -> Shard:
        """Return what a participant trains on: its own items, or everybody's where the method pools the data."""
        if not self.method.pools_data:
            return self.shard(participant, section)
        union = torch.cat([self.shard(name, section).indices for name in self.names]).sort().values
        return Shard(self.sections[section], union)

    def pooled(self, section: str) -> Shard:
        """Return all held-out items of a section, whether or not a site has them."""
        return Shard.of(self.sections[section], range(len(self.sections[section])))

    def site(self, name: str, round_: int) -> Site:
        """Return a participant as it is in a round."""
        run = self.run
        settings = LocalSettings(
            epochs=run.local_epochs,
            batch_size=run.batch_size,
            optimizer=partial(self.bundle.optimizer, lr=run.lr),
            lr_factor=run.lr_decay ** (round_ - 1),
            amp=run.amp,
            lr_decay=run.lr_decay,
        )
        train, validate, test = (self.work(name, section) for section in SECTIONS)
        seed = derive(run.seed, "round", round_, name)
        return Site(name, seed, train, validate, test, self.bundle.loss, settings, self.networks, round_, self.task)

    def host(self, round_: int) -> Host:
        """Return the server's side in a round."""
        return Host(derive(self.run.seed, "round", round_, "server"), self.networks, round_, self.task)

    def policy(self) -> str:
        """Say what of the network leaves a site and what stays."""
        return f"{len(self._forms)} tensors leave each site, {len(self._personal)} stay"

    def check(self, name: str, reply: Message) -> None:
        """Enforce the policy on a reply: no personal tensor, the network's names, shapes and dtypes, finite values.

        Raises:
            RunError: names the site and the tensor.
        """
        for key, tensor in reply.flat().items():
            if key.startswith("weights/"):
                form = self._forms.get(key)
                if form is None:
                    raise RunError(f"site {name!r}: tensor {key!r} must not leave it")
                if form != (tensor.shape, tensor.dtype):
                    raise RunError(
                        f"site {name!r}: {key!r} is {tuple(tensor.shape)} {tensor.dtype}; "
                        f"expected {tuple(form[0])} {form[1]}"
                    )
            if not is_finite(tensor):
                raise RunError(f"site {name!r}: {key!r} has NaN or infinite values; the last good round is kept")

    def cohort(self, round_: int) -> list[str]:
        """Draw the participants of a round: a fixed fraction, at least one, without replacement."""
        count = max(1, math.floor(self.run.cohort * len(self.participants) + 1e-9))  # 0.29 * 100 is 28.999…
        if count == len(self.participants):
            return list(self.participants)
        generator = torch.Generator().manual_seed(derive(self.run.seed, "cohort", round_))
        chosen: Sequence[int] = sorted(torch.randperm(len(self.participants), generator=generator)[:count].tolist())
        return [self.participants[i] for i in chosen]
