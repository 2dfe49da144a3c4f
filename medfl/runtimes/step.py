"""What every runtime does at a site: `site_step` is the only caller of a method's `local_update`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.func import replace_all_batch_norm_modules_

from medfl.core import Message, RunError, Tensors, derive, readable_file_name
from medfl.data import Shard
from medfl.evaluation import CaseEvaluator, Cases, CasesByName, MaskEvaluator, Masks
from medfl.evaluation.save_masks import save
from medfl.problem import mask_values
from medfl.problem.tasks.kind import Examined, no_sets
from medfl.runtimes.profiling import EVALUATION, during
from medfl.runtimes.rules import check_update
from medfl.storage import State
from medfl.training.site import Site, summed

if TYPE_CHECKING:
    from medfl.runtimes.federation import Federation
    from medfl.runtimes.monai_fl.view import SiteView

    SiteContext: TypeAlias = "Federation | SiteView"
    """What a step needs from a federation: all of it in a simulation, one site's view elsewhere."""

T = TypeVar("T")
UNSENT = "unsent"
OPTIMIZERS = "optimizers"
"""Keys of a site's State for its error feedback and the optimisers it keeps; hidden from methods."""


@dataclass(frozen=True)
class StepResult:
    """Result of one local update.

    Attributes:
        state: the site's next State; stays at the site.
        reply: what leaves, as the server receives it.
        loss: mean training loss; sent to the server with the reply unless the site's policy withholds it.
        steps: optimiser updates, over all networks that the site trained.
        bytes_up, bytes_down: of the reply and of the broadcast as transmitted.
        cases: section -> outcomes of the locally trained model, for the requested sections.
    """

    state: State
    reply: Message
    loss: float
    steps: int
    cases: CasesByName
    bytes_up: int
    bytes_down: int


def site_step(
    federation: SiteContext,
    round_: int,
    name: str,
    state: State | None,
    down: Message,
    score_on: Sequence[str] = (),
) -> StepResult:
    """Train at one site; for globally judged methods also score the trained model on its own sections `score_on`.

    Both ends of the wire are here: the broadcast and the reply are compressed, counted and decompressed.
    """
    method = federation.method
    site = federation.site(name, round_)
    compression = federation.compression
    # a copy: `fit` writes to it, and the State must stay unchanged if the step fails
    if site.optimizer_states is not None:
        site = replace(site, optimizer_states=dict((state or {}).get(OPTIMIZERS, {})))

    # what was transmitted, not what the server has: with compression the two differ
    received, bytes_down = _delivered(federation, round_, name, down)
    unsent = (state or {}).get(UNSENT, {})
    with federation.scope():
        # the only place: every runtime trains by this call, and so with the same bits
        result = method.local_update(site, _method_state(federation, site, state), received)
        state, reply = check_update(federation.run.method, site, result)
        assert not {UNSENT, OPTIMIZERS} & state.keys(), (
            f"a method's State has no keys {UNSENT!r} and {OPTIMIZERS!r}"
        )
        federation.message_rules(name).check_reply(reply)
        cases = {}

        if score_on and "weights" in reply:
            # before compression: the site is scored on what it trained, not on what is transmitted
            network = _trained(federation, site, state, received, reply)
            cases = _scores(federation, network, name, score_on)

        # the server's end is here too: it can only restore what was transmitted
        wire, unsent = compression.reply(reply, received, derive(site.seed, "messages"), unsent)
        arrived = compression.decompress_reply(wire, down, f"site {name!r}")
        # rounding may have made a large value infinite
        if not compression.lossless:
            federation.message_rules(name).check_reply(arrived)

    report = summed(site.journal)
    # no empty entries: a State without them equals that of an earlier version
    next_state = dict(state)
    if unsent:
        next_state[UNSENT] = unsent
    if site.optimizer_states:
        next_state[OPTIMIZERS] = site.optimizer_states

    return StepResult(
        next_state, arrived, report.loss, report.steps, cases, wire.num_bytes, bytes_down
    )


def _trained(
    federation: SiteContext, site: Site, state: State, received: Message, reply: Message
) -> nn.Module:
    """Return the trained network: that of a complete reply, or what the site would make of its own reply."""
    # a method with personal layers sends a part, and knows where the rest is
    if reply["weights"].keys() == site.initial_weights.keys():
        return site.model(reply["weights"])
    updated = Message({**received.tensors, **reply.tensors}, {**received.scalars, **reply.scalars})
    return federation.method.predictor(site, state, updated)


def with_judged(work: Callable[..., T]) -> Callable[..., T]:
    """Make a step of work (federation, network, site, *arguments) on the network that a site is judged by.

    Like every step it is called as (federation, round, site, State, broadcast, *arguments).
    """

    @wraps(work)
    def step(
        federation: SiteContext,
        round_: int,
        name: str,
        state: State | None,
        down: Message,
        *rest: Any,
    ) -> T:
        with judged(federation, round_, name, state, down) as network:
            return work(federation, network, name, *rest)

    return step


@with_judged
def score_site(
    federation: SiteContext, network: nn.Module, name: str, sections: Sequence[str]
) -> CasesByName:
    """Score the network that the site is judged by on its own items, without training."""
    return _scores(federation, network, name, sections)


@with_judged
def score_sets(
    federation: SiteContext, network: nn.Module, name: str, sections: Sequence[str], scores: int
) -> CasesByName:
    """Score the site's own items for prediction sets (`Kind.sets`); `scores` is an index in `Kind.set_scores`."""
    bundle = federation.bundle
    kind = bundle.kind
    if not 0 <= scores < len(kind.set_scores):
        raise no_sets(f"scores number {scores} of a {kind.name} task")

    parts = {}
    for section in ("validate", "test"):
        shard = federation.shard(name, section)
        device = federation.networks.device
        parts[section] = Examined(bundle.evaluator, bundle.metadata, network, shard, device)

    sets = kind.sets(**parts, scores=kind.set_scores[scores], seed=federation.run.seed)
    return {section: sets[section].as_cases() for section in sections if section in sets}


def score_newcomer(
    federation: SiteContext, round_: int, name: str, down: Message, sections: Sequence[str]
) -> CasesByName:
    """Score a site that has not trained on its own items: with the server's broadcast and a first State.

    If BatchNorm statistics stay at the sites, those of the site's own batches are used, without its labels
    (Li et al., Revisiting Batch Normalization For Practical Domain Adaptation, 2016; as FedBN's authors advise).
    """
    with judged(federation, round_, name, None, down) as network:
        personal = federation.method.personal_names(network)
        if any(name.endswith("running_mean") for name in personal):
            # a copy, since the network belongs to the pool
            # without running statistics, a BatchNorm layer uses the batch in evaluation too
            network = replace_all_batch_norm_modules_(deepcopy(network))

        return _scores(federation, network, name, sections)


@with_judged
def score_site_on_all(federation: SiteContext, network: nn.Module, name: str) -> Cases:
    """Score the network that a site is judged by on all test items."""
    return score(federation, network, federation.pooled("test"), "test")


@with_judged
def copy_site_weights(federation: SiteContext, network: nn.Module, name: str) -> State:
    """Return a copy of the weights that the site is judged by (they leave the site in a simulation only)."""
    return copied_weights(network)


def introduce(federation: SiteContext, name: str) -> Message:
    """Return a site's message to the server before round 1."""
    with federation.scope():
        message = federation.method.introduce(federation.site(name, 0))
        federation.message_rules(name).check_reply(message)
    return message


def _delivered(
    federation: SiteContext, round_: int, name: str, down: Message
) -> tuple[Message, int]:
    """Return a broadcast as a site receives it, and its transmitted bytes."""
    wire = federation.compress_broadcast(round_, name, down)
    return federation.compression.decompress_broadcast(wire), wire.num_bytes


def _method_state(federation: SiteContext, site: Site, state: State | None) -> State:
    """Return the State known to the method, without what is kept beside it; the first State if nothing remains."""
    entries = dict(state or {})
    for key in (UNSENT, OPTIMIZERS):
        entries.pop(key, None)

    # {} is a valid State, of a method that keeps nothing
    if entries or state == {}:
        return entries

    return federation.method.init_site(site)


def refuse_other_state(
    federation: SiteContext, round_: int, name: str, state: State, path: Path, error: Exception
) -> None:
    """Report that a step failed because its State has another form than the method's, if so.

    Raises:
        RunError: the State lacks an entry of the method's first one, or has it in another form.
    """
    with federation.scope():
        # only after a failure: making a first State costs a network
        why = _unlike(state, federation.method.init_site(federation.site(name, round_)), "")
    if why:
        raise RunError(
            f"site {name!r}: {path} is no State of method {federation.run.method!r}: {why}; restore it, or start the "
            "run anew in another folder"
        ) from error


def _unlike(state: object, first: object, path: str) -> str:
    """Describe where the form of a State differs from a site's first one, "" if it has all its entries."""
    if isinstance(first, dict) and isinstance(state, dict):
        paths = {key: f"{path}/{key}".lstrip("/") for key in first}
        for key in first:
            if key not in state:
                return f"{paths[key]!r} is missing"

        for key, value in first.items():
            if problem := _unlike(state[key], value, paths[key]):
                return problem

        return ""

    if isinstance(first, Tensor) and isinstance(state, Tensor):
        if (first.shape, first.dtype) == (state.shape, state.dtype):
            return ""

        return f"{path!r} has another form"

    if first is None or type(first) is type(state):
        return ""

    return f"{path!r} is a {type(state).__name__}"


@contextmanager
def judged(
    federation: SiteContext, round_: int, name: str, state: State | None, down: Message
) -> Iterator[nn.Module]:
    """Yield the network that a site is judged by."""
    site = federation.site(name, round_)
    with federation.scope():
        received, _ = _delivered(federation, round_, name, down)
        yield federation.method.predictor(site, _method_state(federation, site, state), received)


def copied_weights(network: nn.Module) -> Tensors:
    """Return a copy of a network's state dict on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in network.state_dict().items()}


def _scores(
    federation: SiteContext, network: nn.Module, site: str, sections: Sequence[str]
) -> CasesByName:
    """Score a network on a site's own sections."""
    cases = {}
    for section in sections:
        cases[section] = score(federation, network, federation.shard(site, section), section)

    return cases


def score(federation: SiteContext, network: nn.Module, items: Shard, section: str) -> Cases:
    """Score a network on items of a section; slow metrics are computed on test items only."""
    surface_metrics = federation.surface_metrics if section == "test" else ()
    with during(EVALUATION):
        return federation.bundle.evaluator(
            network, items, federation.networks.device, surface_metrics=surface_metrics
        )


def segment(
    federation: SiteContext,
    network: nn.Module,
    name: str,
    ids: Sequence[str],
    folder: str | None,
    largest: Collection[str] = (),
) -> dict[str, Masks]:
    """Segment a site's test items with a network.

    Masks of the cases `ids` are returned; the predictions of all cases are written into `folder`, if given.

    Returns:
        id -> masks, without cases whose channels overlap, for which nothing is written.
    """
    shard = federation.shard(name, "test")
    evaluator = federation.bundle.evaluator
    if not isinstance(evaluator, MaskEvaluator | CaseEvaluator):
        return {}

    if isinstance(evaluator, MaskEvaluator) and evaluator.compares:
        evaluator = replace(evaluator, largest=largest)

    part = shard
    # all cases are written, a few masks are returned
    if folder is None:
        rows = [row for row, ident in enumerate(shard.ids) if ident in ids]
        part = Shard(shard.prepared, shard.indices[rows])

    shown = {}
    masks_of_items = evaluator.masks(network, part, federation.networks.device)

    for index, ident, masks in zip(part.indices.tolist(), part.ids, masks_of_items, strict=True):
        if masks is None:
            continue
        if folder is not None:
            path = Path(folder) / readable_file_name(ident)
            values = mask_values(federation.bundle.metadata)
            save(masks.prediction, masks.classes, part.prepared.geometry[index], path, values)

        if ident in ids:
            shown[ident] = masks

    return shown


segment_site = with_judged(segment)
