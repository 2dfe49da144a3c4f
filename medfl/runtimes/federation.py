"""Federation: the sites of one run, built from its bundle, its method and its record. No runtime logic."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from medfl import methods
from medfl.core import (
    POLY,
    SECTIONS,
    InputError,
    Message,
    MessageLimits,
    Messages,
    Run,
    Task,
    Tensors,
    Weights,
    derive,
    examines,
    generator_of,
    listed,
    not_among,
    stream,
)
from medfl.core.compression import Compression
from medfl.data import AnnotatedClasses, Prepared, Public, Shard, free_gpu_memory
from medfl.data.intensities import constants
from medfl.data.on_device import Free, hold
from medfl.evaluation import surface_metrics_of
from medfl.methods.base import Method
from medfl.problem import Problem, prepared_sections
from medfl.runtimes import site_channels, site_labels
from medfl.runtimes.message_rules import Form, MessageRules, Wire
from medfl.runtimes.server.robust import Aggregation, with_effective_counts
from medfl.runtimes.unlabelled import check_sites, hide_labels
from medfl.storage import State, to_device
from medfl.training import Host, LocalSettings, Networks, Site
from medfl.training.accelerate.arithmetic import run_precision
from medfl.training.accelerate.compiled import compile_steps
from medfl.training.accelerate.precision import with_channels_last
from medfl.training.site import snapshot

POOLED = "central"
"""Name of the one participant of a method that pools the data."""


@dataclass(frozen=True)
class _Architecture:
    """What sites with the same network share: the bundle that builds it and its optimiser, and the pool.

    `leaves` is the form of each tensor of the network that may leave; `personal` names the tensors that leave in no
    group, and `stays` is how many never leave.
    """

    bundle: Problem
    networks: Networks
    leaves: Mapping[str, Form]
    personal: frozenset[str]
    stays: int


def participants(run: Run, pooled: bool) -> list[str]:
    """Return who takes part: sites with training images, or one that pools all data; all if nothing is trained."""
    if pooled:
        return [POOLED]

    sites = run.partition.sites
    trained = [name for name, ids in sites.items() if ids.get("train") or examines(run)]
    # the images may be unknown here: in a federation they are elsewhere
    return trained or list(sites)


def site_seed(run: Run, round_: int, name: str) -> int:
    """Return the seed of a site's random draws in a round."""
    return derive(run.seed, "round", round_, name)


class Federation:
    """Sites and server of one run.

    All sites have the bundle's network, or each has the one that the method assigns to it.

    Attributes:
        names: the sites, in the partition's order.
        participants: who trains: the sites, or one participant with everybody's data.
        networks: the pool of the bundle's own network, which is the server's.
        public: the run's public data, None if the method uses none.
        compression: of messages.
        aggregation: how the server combines the weights of the replies.
        surface_metrics: mask surface metrics computed on test items.
        sections: section -> prepared items, shared by all sites.
        known: site -> structures that its masks annotate, for sites that do not annotate all.
    """

    def __init__(
        self,
        bundle: Problem,
        method: Method,
        run: Run,
        *,
        prepared: Mapping[str, Prepared] | None = None,
        public: Public | None = None,
        jobs: int = 1,
        progress: bool = False,
    ) -> None:
        """Prepare the data of all sections once, or share those that another federation prepared.

        Raises:
            InputError: an item of the partition is not in the data, the method does not support the bundle's task, its
                images or the aggregation, or networks cannot be assigned.
        """
        if bundle.task not in method.tasks:
            allowed = f"it supports {', '.join(method.tasks)}"
            if "classification" in method.tasks:
                allowed += ": its losses need a class for each image or pixel"

            raise InputError(
                f"method {run.method!r} on bundle {bundle.name!r}, a {bundle.task} task",
                allowed,
                "see medfl methods",
            )

        self.bundle = bundle
        self.method = method
        self.run = run
        self.task = Task(
            bundle.task,
            bundle.classes,
            bundle.embeddings,
            lambda: constants(bundle.section("train").source.transforms),
        )
        self.names = list(run.partition.sites)
        self.participants = participants(run, method.pools_data)
        # after the participants: a robust rule needs a minimum number of them
        self.aggregation = self._aggregation()

        if run.max_share is not None and self.equal_weight_flag:
            raise InputError(
                f"--max-share {run.max_share:g} with {self.equal_weight_flag}",
                "sites count the same there",
                "leave one of them out",
            )

        structures = bundle.structures if bundle.task == "segmentation" else None
        self.surface_metrics = surface_metrics_of(run.metrics, structures)
        # before the data are prepared: refuse within seconds what cannot be built or started
        self.networks = self._pool(bundle)
        self._architectures = self._assign_architectures()
        self.public = public
        self.compression = self._make_compression()
        site_labels.check(run.site_labels, bundle, method, self.names)
        prepared = prepared or prepared_sections(bundle, jobs=jobs, progress=progress)
        self.sections = site_channels.filled(prepared, bundle, run)
        self._shards = {section: self._divide(section) for section in SECTIONS}
        self.known = site_labels.known_labels(bundle, method, run, self._shards["train"])
        for section, shards in self._shards.items():
            self._shards[section] = site_labels.annotate(shards, self.known)

        # before anything is written: a run that cannot be trained leaves no folder
        check_sites(method, (self.site(name, 0) for name in self.participants), bundle)

    def _pool(self, bundle: Problem) -> Networks:
        def network() -> nn.Module:
            model = self.method.adapt(bundle.network(), self.task)
            if self.run.channels_last:
                return with_channels_last(model)

            return model

        pool = Networks(network, self.run.seed, torch.device(self.run.device))
        if self.run.init and bundle is self.bundle:
            pool.set_initial_weights(initial_state_dict(bundle, self.method, self.task, self.run))

        return pool

    def _assign_architectures(self) -> dict[str, _Architecture]:
        """Return each participant's architecture; sites with the same network share one."""
        built = {}
        architectures = {}
        for name, config in methods.site_networks(self.method, self.participants).items():
            key = repr(config)
            if key not in built:
                built[key] = self._build_architecture(config)

            architectures[name] = built[key]

        return architectures

    @cached_property
    def _of_newcomers(self) -> _Architecture:
        """The architecture of a site that takes no part: the bundle's own."""
        return self._build_architecture({})

    def _build_architecture(self, config: Mapping[str, object]) -> _Architecture:
        """Return the architecture with these ids of the bundle's configuration.

        The tensors that leave must fit the server's network, and must not be personal there or at the site.
        """
        bundle = self.bundle
        networks = self.networks
        # {} is the bundle's own network, which the server has too
        if config:
            if self.run.init:
                raise InputError(
                    f"--init with method {self.run.method!r}, whose sites have networks of several kinds",
                    "weights are of one network",
                    "leave it out, or take another method",
                )

            bundle = bundle.variant(config)
            networks = self._pool(bundle)

        personal: set[str] = set()
        for pool in {self.networks, networks}:
            with pool.scope():
                personal |= self.method.personal_names(pool.lease(pool.initial))

        # a method with personal layers may find them in the server's network, the site's own, or both
        leaves = _forms(self.networks.initial)
        for name in personal:
            leaves.pop(name, None)

        staying = set(networks.initial)
        if not methods.keeps_network(self.method, config):
            staying -= leaves.keys()

        # the server could not average a tensor that only the site's network has
        personal |= networks.initial.keys() - self.networks.initial.keys()
        return _Architecture(bundle, networks, leaves, frozenset(personal), len(staying))

    def _make_compression(self) -> Compression:
        """Return how messages are compressed; all tensors but matrices and kernels stay exact."""
        messages = Compression.parse(self.run.messages)
        exact = set()
        if messages.lossless:
            return messages

        for pool in self._pools:
            with pool.scope():
                network = pool.lease(pool.initial)
                # with duplicates: a tied layer is in the state dict under each of its names
                parameters = network.named_parameters(remove_duplicate=False)
                large = {name for name, parameter in parameters if parameter.ndim > 1}
                exact |= network.state_dict().keys() - large

        lossy = frozenset(methods.group_names(self.method, "smaller"))
        # biases and normalisation are few numbers, and rounding them costs accuracy
        return replace(messages, exact=frozenset(exact), groups=lossy)

    @cached_property
    def like_weights(self) -> frozenset[str]:
        """Message groups whose tensors have names and forms of the network's."""
        return frozenset(methods.group_names(self.method, "like_weights"))

    def _aggregation(self) -> Aggregation:
        """Return how replies are combined; rules other than the mean require FedAvg's server half."""
        aggregation = Aggregation.parse(self.run.aggregation)
        size = len(self.cohort(1))
        if not aggregation.is_mean and not methods.has_fedavg_server(self.method):
            raise InputError(
                f"--aggregation {aggregation} with method {self.run.method!r}",
                "it is for methods that keep FedAvg's server half (medfl methods); this one has its own",
                "use one of these, or leave it out",
            )
        if size < aggregation.least:
            raise InputError(
                f"--aggregation {aggregation} with {size} sites in a round",
                f"{aggregation} needs at least {aggregation.least}",
                "have more sites in the cohort, or a rule for fewer faulty ones",
            )

        return aggregation

    @property
    def equal_weight_flag(self) -> str:
        """The setting that gives all sites equal weight; "" if they are weighted by their numbers of items."""
        if not self.aggregation.counts_samples:
            return f"--aggregation {self.aggregation}"

        if self.run.site_weights == "uniform":
            return "--site-weights uniform"

        if getattr(self.method, "weights", "") == "uniform":
            return "--set weights=uniform"

        return ""

    @cached_property
    def message_limits(self) -> MessageLimits:
        """Limits on the size of messages, set by the largest network."""
        return MessageLimits.for_networks(*(pool.initial for pool in self._pools))

    @cached_property
    def _pools(self) -> set[Networks]:
        return {self.networks, *(arch.networks for arch in self._architectures.values())}

    def _divide(self, section: str) -> dict[str, Shard]:
        prepared = self.sections[section]
        ids_of_data = prepared.ids(range(len(prepared)))
        position = dict(zip(ids_of_data, range(len(prepared)), strict=True))
        shards = {}
        for name, ids_of_site in self.run.partition.sites.items():
            ids = ids_of_site.get(section, [])
            missing = not_among(ids, position)
            if missing:
                raise InputError(
                    f"site {name!r} has {section} item {missing[0]!r}, which is not in the data ({len(missing)} such)",
                    "every item of the partition is in the data",
                    "use the same data folder, or draw a new partition",
                )

            shards[name] = Shard.of(prepared, [position[ident] for ident in ids])

        return shards

    def hold(self, free: Free = free_gpu_memory) -> str:
        """Keep the data on the networks' device, as far as they fit in half of its free memory; say what is kept."""
        prepared = dict(self.sections)
        if self.public is not None:
            prepared["public"] = self.public.shard.prepared

        held, report = hold(prepared, self.networks.device, free)
        if self.public is not None:
            shard = replace(self.public.shard, prepared=held.pop("public"))
            self.public = replace(self.public, shard=shard)

        self.sections = held
        for section, shards in self._shards.items():
            for name, shard in shards.items():
                shards[name] = replace(shard, prepared=held[section])

        return report

    def shard(self, name: str, section: str) -> Shard:
        """Return a site's items in a section."""
        return self._shards[section][name]

    def participant_shard(self, participant: str, section: str) -> Shard:
        """Return what a participant trains on: its own items, or everybody's if the method pools the data."""
        if not self.method.pools_data:
            return self.shard(participant, section)

        return self._of_all_sites(section)

    def _of_all_sites(self, section: str) -> Shard:
        # in the order of the data, whichever site has an item: the result must not depend on the partition
        union = torch.cat([self.shard(name, section).indices for name in self.names]).sort().values
        return Shard(self.sections[section], union)

    def pooled(self, section: str) -> Shard:
        """Return all held-out items of a section, whether or not a site has them.

        If a site only tests, validation items without a site are not among them: its own choose no round.
        """
        prepared = self.sections[section]
        # a global model is scored on the structures that each image's own site annotates
        shown: dict[int, AnnotatedClasses] = {}
        for shard in self._shards[section].values():
            shown.update(shard.shown)

        pooled = Shard.of(prepared, range(len(prepared)))
        if section == "validate" and len(participants(self.run, False)) < len(self.names):
            pooled = self._of_all_sites(section)

        return replace(pooled, shown=shown)

    def site(self, name: str, round_: int) -> Site:
        """Return a participant's state for a round."""
        run = self.run
        arch = self._architectures.get(name) or self._of_newcomers
        bundle = arch.bundle
        # epochs before this round: rounds count from 1, and nothing is trained in round 0
        rounds_before = max(0, round_ - 1)
        first = rounds_before * run.local_epochs
        lr_factor = run.lr_decay ** (round_ - 1)
        epoch_factor = 1.0
        if run.decay_per == "epoch":
            lr_factor = run.lr_decay**first
            epoch_factor = run.lr_decay
        elif run.decay_per == POLY:
            # a host of MONAI FL that counts further trains at the rate of the last round
            last = max(1, run.rounds)
            lr_factor = (1 - min(rounds_before, last - 1) / last) ** 0.9

        # the bundle's schedule continues from the last round, although the optimiser is new
        def rates(epoch: int) -> Sequence[float]:
            return bundle.rates(first + epoch, run.lr)

        settings = LocalSettings(
            run.local_epochs,
            run.batch_size,
            partial(bundle.optimizer, lr=run.lr, epoch=first),
            lr_factor=lr_factor,
            amp=run.amp,
            rates=rates if bundle.is_scheduled else None,
            epoch_factor=epoch_factor,
        )
        train, validate, test = hide_labels(
            run, name, [self.participant_shard(name, section) for section in SECTIONS]
        )
        classes = self.known.get(name)
        return Site(
            name,
            site_seed(run, round_, name),
            train,
            validate,
            test,
            site_labels.loss_at(self.bundle, run, classes),
            settings,
            arch.networks,
            round_,
            self.task,
            known=classes,
            common=self.networks,
            public=self.public,
            method=run.method,
            optimizer_states={} if run.keep_optimizer else None,
        )

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Use the run's compute settings inside; then return every network leased there to its pool."""
        with ExitStack() as stack:
            stack.enter_context(run_precision(self.run))
            if self.run.compile:
                stack.enter_context(compile_steps())

            for pool in self._pools:
                stack.enter_context(pool.scope())

            yield

    def host(self, round_: int) -> Host:
        """Return the server's side in a round."""
        return Host(
            derive(self.run.seed, "round", round_, "server"),
            self.networks,
            round_,
            self.task,
            self.public,
        )

    def describe_exchange(self) -> str:
        """Describe what leaves a site and what of the network stays, and how much is compressed."""
        used = self._architectures.values()
        leave = _span([len(arch.leaves) for arch in used])
        stay = _span([arch.stays for arch in used])
        besides = sorted(methods.group_names(self.method, "up")[1:])
        text = f"{leave} tensors leave each site, {stay} stay"
        if besides:
            text = (
                f"{leave} tensors of the network leave each site, {stay} stay; "
                f"besides them leave: {', '.join(besides)}"
            )
        if not self.aggregation.is_mean:
            text += f"; aggregation: {self.aggregation.described}"

        text += site_labels.described(self.known, self.bundle)

        if self.compression.lossless:
            return text

        smaller = []
        exact = []
        for arch in used:
            number = 0
            for name, (shape, dtype) in arch.leaves.items():
                number += self.compression.takes("weights", name, dtype, shape.numel())

            smaller.append(number)
            exact.append(len(arch.leaves) - number)

        # topk selects the largest entries of a change, and a broadcast is not a change
        text += "; replies" if self.compression.kind == "topk" else "; replies and broadcasts"

        return f"{text}: {self.compression}, {_span(smaller)} tensors of the network; {_span(exact)} lossless"

    def message_rules(self, name: str) -> MessageRules:
        """Return the rules for messages between the server and a participant."""
        arch = self._architectures[name]
        return MessageRules(
            name,
            arch.leaves,
            _forms(arch.networks.initial),
            arch.personal,
            uploads=frozenset(methods.group_names(self.method, "up")),
            like_weights=self.like_weights,
            fedavg=methods.has_fedavg_server(self.method),
            limits=self.message_limits,
        )

    def compress_broadcast(self, round_: int, name: str, broadcast: Message) -> Message:
        """Return a broadcast compressed for transmission to a site."""
        return self.compression.broadcast(
            broadcast, derive(self.host(round_).seed, "messages", name)
        )

    def decode_reply(self, name: str, arrived: Wire) -> Message:
        """Return a site's reply on this device, as `MessageRules.decode_reply` does."""
        message = self.message_rules(name).decode_reply(arrived)
        return Message(to_device(dict(message.tensors), self.networks.device), message.scalars)

    def aggregate(self, round_: int, server: State, replies: Messages) -> State:
        """Return the server's next State: the method's, or with FedAvg's mean replaced by a robust rule.

        Raises:
            RunError: there are too few replies.
        """
        with self.scope():
            replies = with_effective_counts(replies, self.run)
            # {}: the method keeps no weights at the server
            if not self.aggregation.is_mean and server.get("weights") != {}:
                combined = self.aggregation.combined(replies, server["weights"])
                return {**server, "weights": combined}

            after = self.method.aggregate(
                self.host(round_), server, replies, len(self.participants)
            )
            weights = after.get("weights")
            if weights:
                # a mean gives a tied tensor a copy under each name, but they must stay one tensor
                return {**after, "weights": self.networks.under_one_name(weights)}

            return after

    def leave_out(self, names: Collection[str]) -> None:
        """Drop participants for the rest of the run."""
        self.participants = not_among(self.participants, names)

    def cohort(self, round_: int) -> list[str]:
        """Draw the participants of a round: a fixed fraction, at least one, without replacement."""
        # 0.29 * 100 is 28.999…
        count = max(1, math.floor(self.run.cohort * len(self.participants) + 1e-9))
        rule = methods.extra(self.method, methods.WholeCohort)
        if count == len(self.participants) or (rule is not None and rule.everyone):
            return list(self.participants)

        # seeded by round: a resumed run draws the same cohorts
        generator = generator_of(self.run.seed, "cohort", round_)
        drawn = torch.randperm(len(self.participants), generator=generator)[:count].sort().values
        return [self.participants[i] for i in drawn.tolist()]


def _forms(tensors: Weights) -> dict[str, Form]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _span(numbers: Sequence[int]) -> str:
    if len(set(numbers)) == 1:
        return str(numbers[0])

    return f"{min(numbers)} to {max(numbers)}"


# The initial weights of all networks of a run if they are given by `--init` instead of drawn.


_NAMED = 3  # tensors named in an error


def initial_state_dict(bundle: Problem, method: Method, task: Task, run: Run) -> Tensors:
    """Return the initial state dict of a run's network.

    The given weights belong to the bundle's network, or to the network that the method adapts from it; in the first
    case the tensors that the method adds are drawn from the run's seed.

    Raises:
        InputError: they belong to another network, or are missing.
    """
    if bundle.start is None:
        raise InputError(
            f"a run that begins with the weights {run.init[:19]}, which are not at hand",
            "init.safetensors in its folder",
            "restore the file, or start a new run with --init",
        )

    # from the stream of a drawn network, so that the method's additions are the same without --init
    with stream(run.seed, "network"):
        plain = bundle.network()
        is_plain = not _differences(plain, bundle.start)
        # before the method adapts it: a method may copy or freeze layers
        if is_plain:
            plain.load_state_dict(bundle.start)

        adapted = method.adapt(plain, task)

    if not is_plain:
        if _differences(adapted, bundle.start):
            # compared with the network that the weights resemble, so that the error lists few tensors
            similar = len(adapted.state_dict()) == len(bundle.start)
            network = adapted if similar else plain
            raise InputError(
                f"weights of another network than bundle {bundle.name!r}: {_differences(network, bundle.start)}",
                f"all {len(network.state_dict())} tensors of the network, by name and shape",
                "give weights of this network, or choose it with --config network=NAME",
            )

        adapted.load_state_dict(bundle.start)

    return snapshot(adapted)


def _differences(network: nn.Module, weights: Weights) -> str:
    """Describe how weights differ from a network's, "" if they do not: other forms, missing and unexpected tensors."""
    state = network.state_dict()
    forms = []
    for name, tensor in state.items():
        if name in weights and _form(weights[name]) != _form(tensor):
            forms.append(f"{name!r} is {_form(weights[name])}, the network's {_form(tensor)}")

    kinds = {
        "tensors have another shape": forms,
        "tensors are missing": [repr(name) for name in state if name not in weights],
        "tensors are not of the network": [repr(name) for name in weights if name not in state],
    }
    return "; ".join(f"{len(kinds[k])} {k}: {listed(kinds[k], _NAMED)}" for k in kinds if kinds[k])


def _form(tensor: Tensor) -> str:
    kind = ""
    if tensor.dtype != torch.float32:
        kind = f" {str(tensor.dtype).removeprefix('torch.')}"

    return f"({', '.join(map(str, tensor.shape))}){kind}"
