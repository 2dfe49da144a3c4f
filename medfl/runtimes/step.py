"""What any runtime does at a site: `site_step` is the only caller of a method's `local_update`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor, nn
from torch.func import replace_all_batch_norm_modules_

from medfl.core.errors import RunError
from medfl.core.message import Message, Tensors
from medfl.core.names import readable_file_name
from medfl.core.seeding import derive
from medfl.data.prepared import Shard
from medfl.evaluation.evaluators import CaseEvaluator, MaskEvaluator, Masks
from medfl.evaluation.metrics import Cases, CasesByName
from medfl.evaluation.save_masks import save
from medfl.problem.described import mask_values
from medfl.runtimes.profiling import EVALUATION, during
from medfl.runtimes.rules import check_update
from medfl.storage.files import State
from medfl.training.site import Site, summed

if TYPE_CHECKING:
    from medfl.runtimes.federation import Federation
    from medfl.runtimes.monai_fl.view import SiteView

    SiteContext: TypeAlias = "Federation | SiteView"
    """What a step needs of a federation: all of it in a simulation, one site's view of it elsewhere."""

UNSENT = "unsent"
OPTIMIZERS = "optimizers"
"""Keys of a site's State under which its error feedback and the optimisers that it keeps are; no method sees them."""


@dataclass(frozen=True)
class StepResult:
    """Result of one local update.

    Attributes:
        state: the site's next State; stays at the site.
        reply: what leaves, as the server receives it.
        loss: mean training loss; goes to the server with the reply unless the site's policy keeps it back.
        steps: optimiser updates, of all networks that the site trained.
        bytes_up, bytes_down: of the reply and of the broadcast as they crossed.
        cases: section -> outcomes of the locally trained model, for the sections asked for.
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

    Both ends of the wire are here: the broadcast and the reply are made smaller, counted and restored.
    """
    method = federation.method
    site = federation.site(name, round_)
    compression = federation.compression
    # a copy: `fit` writes to it, and the State has to stay as it was if the step fails
    if site.optimizer_states is not None:
        site = replace(site, optimizer_states=dict((state or {}).get(OPTIMIZERS, {})))

    received, bytes_down = _delivered(federation, round_, name, down)
    unsent = (state or {}).get(UNSENT, {})
    with federation.scope():
        result = method.local_update(site, _method_state(federation, site, state), received)
        state, reply = check_update(federation.run.method, site, result)
        assert not {UNSENT, OPTIMIZERS} & state.keys(), (
            f"a method's State has no keys {UNSENT!r} and {OPTIMIZERS!r}"
        )
        federation.message_rules(name).check_reply(reply)
        cases = {}

        if score_on and "weights" in reply:
            network = _trained(federation, site, state, received, reply)
            cases = _scores(federation, network, name, score_on)

        # the server's end is here too: it can restore only what crossed
        wire, unsent = compression.reply(reply, received, derive(site.seed, "messages"), unsent)
        arrived = compression.decompress_reply(wire, down, f"site {name!r}")
        # rounding may have made a large value infinite
        if not compression.lossless:
            federation.message_rules(name).check_reply(arrived)

    report = summed(site.journal)
    # no empty entries: a State without them is equal to one of an earlier version
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
    """Return the network as trained: that of a whole reply, or what the site would make of its own reply."""
    # a method with personal layers sends a part, and knows itself where the rest is
    if reply["weights"].keys() == site.initial_weights.keys():
        return site.model(reply["weights"])
    updated = Message({**received.tensors, **reply.tensors}, {**received.scalars, **reply.scalars})
    return federation.method.predictor(site, state, updated)


def score_site(
    federation: SiteContext,
    round_: int,
    name: str,
    state: State | None,
    down: Message,
    sections: Sequence[str],
) -> CasesByName:
    """Score the network that the site is judged by on its own items; nothing is trained."""
    with judged(federation, round_, name, state, down) as network:
        return _scores(federation, network, name, sections)


def score_newcomer(
    federation: SiteContext, round_: int, name: str, down: Message, sections: Sequence[str]
) -> CasesByName:
    """Score on its own items what a site is given that has trained nothing: what the server sends, and a first State.

    Where the statistics of BatchNorm stay at sites, those of the site's own batches stand for them, without its labels
    (Li et al., Revisiting Batch Normalization For Practical Domain Adaptation, 2016; as FedBN's authors advise).
    """
    with judged(federation, round_, name, None, down) as network:
        personal = federation.method.personal_names(network)
        if any(name.endswith("running_mean") for name in personal):
            # a copy, as the network is the pool's
            network = replace_all_batch_norm_modules_(deepcopy(network))

        return _scores(federation, network, name, sections)


def score_site_on_all(
    federation: SiteContext, round_: int, name: str, state: State | None, down: Message
) -> Cases:
    """Score the network that a site is judged by on everybody's test items."""
    with judged(federation, round_, name, state, down) as network:
        return score(federation, network, federation.pooled("test"), "test")


def copy_site_weights(
    federation: SiteContext, round_: int, name: str, state: State | None, down: Message
) -> State:
    """Return a copy of the weights that the site is judged by (leaves the site in a simulation only)."""
    with judged(federation, round_, name, state, down) as network:
        return copied_weights(network)


def segment_site(
    federation: SiteContext,
    round_: int,
    name: str,
    state: State | None,
    down: Message,
    ids: Sequence[str],
    folder: str | None,
) -> dict[str, Masks]:
    """Segment a site's test items with the network that it is judged by.

    Masks of the cases `ids` are returned; the predictions of all cases are written into `folder`, if there is one.

    Returns:
        id -> masks; without the cases whose channels overlap, of which nothing is written.
    """
    with judged(federation, round_, name, state, down) as network:
        return segment(federation, network, name, ids, folder)


def introduce(federation: SiteContext, name: str) -> Message:
    """Return what a site tells the server before round 1."""
    with federation.scope():
        message = federation.method.introduce(federation.site(name, 0))
        federation.message_rules(name).check_reply(message)
    return message


def _delivered(
    federation: SiteContext, round_: int, name: str, down: Message
) -> tuple[Message, int]:
    """Return a broadcast as a site receives it, and its bytes as it crossed."""
    wire = federation.compress_broadcast(round_, name, down)
    return federation.compression.decompress_broadcast(wire), wire.num_bytes


def _method_state(federation: SiteContext, site: Site, state: State | None) -> State:
    """Return the State that the method knows: without what is kept beside it; the first one where nothing is left."""
    entries = dict(state or {})
    for key in (UNSENT, OPTIMIZERS):
        entries.pop(key, None)

    # {} is a State, of a method that keeps nothing
    if entries or state == {}:
        return entries

    return federation.method.init_site(site)


def refuse_other_state(
    federation: SiteContext, round_: int, name: str, state: State, path: Path, error: Exception
) -> None:
    """Say that a step failed because of a State of another form than the method's, if it is one.

    Raises:
        RunError: the State lacks something of the method's first one, or has it in another form.
    """
    with federation.scope():
        why = _unlike(state, federation.method.init_site(federation.site(name, round_)), "")
    if why:
        raise RunError(
            f"site {name!r}: {path} is no State of method {federation.run.method!r}: {why}; restore it, or start the "
            "run anew in another folder"
        ) from error


def _unlike(state: object, first: object, path: str) -> str:
    """Say where a State has another form than a site's first one, "" if it has all of that."""
    if isinstance(first, dict) and isinstance(state, dict):
        below = {f"{path}/{key}".lstrip("/"): key for key in first}
        for key_path, key in below.items():
            if key not in state:
                return f"{key_path!r} is missing"

        parts = (_unlike(state[key], first[key], key_path) for key_path, key in below.items())
        return next(filter(None, parts), "")

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
    """Give the network that a site is judged by."""
    site = federation.site(name, round_)
    with federation.scope():
        received, _ = _delivered(federation, round_, name, down)
        yield federation.method.predictor(site, _method_state(federation, site, state), received)


def copied_weights(network: nn.Module) -> Tensors:
    """Return a network's state dict as copies on the CPU."""
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
    """Score a network on items of a section; what takes long is computed on test items only."""
    if section == "test":
        surface_metrics = federation.surface_metrics
    else:
        surface_metrics = ()

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
) -> dict[str, Masks]:
    """Segment a site's test items with a network, as `segment_site`."""
    shard = federation.shard(name, "test")
    evaluator = federation.bundle.evaluator
    if not isinstance(evaluator, MaskEvaluator | CaseEvaluator):
        return {}

    # files are of all cases, masks that are returned of a few
    if folder is None:
        needed = {*ids}
    else:
        needed = {*shard.ids}

    chosen = [i for i, ident in enumerate(shard.ids) if ident in needed]
    part = Shard(shard.prepared, shard.indices[chosen])
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
