"""Which structures or findings each site annotates: as the run says, or as its own training labels show."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from medfl.core import FROM_MASKS, Config, InputError, Run, by_site, slug
from medfl.data import AnnotatedClasses, Shard
from medfl.data.known_labels import PartialLoss
from medfl.methods.base import Method
from medfl.problem import Problem
from medfl.runtimes.site_settings import positions, require_sites

_FLAG = "--site-labels"


def read(
    text: str, structures: Sequence[str], sites: Collection[str]
) -> dict[str, tuple[int, ...] | None]:
    """Return site -> ascending indices of its structures among those of the bundle, None to look into its masks.

    Raises:
        InputError: a name is not a structure, or not a site of the run.
    """
    position = {slug(structures[index]): index for index in sorted(foreground_classes(structures))}
    allowed = f"the names of the bundle are {', '.join(position) or 'not named'}"
    advice = "choose among them, or auto: those that its labels show"
    site_labels = by_site(_FLAG)(text)
    require_sites(_FLAG, site_labels, sites, "=...")

    classes: dict[str, tuple[int, ...] | None] = {}
    for site, names in site_labels.items():
        if names == (FROM_MASKS,):
            classes[site] = None
        else:
            slugs = {name: slug(name) for name in names}
            classes[site] = positions("label", site, slugs, position, allowed, advice)

    return classes


def names_of(bundle: Problem) -> tuple[str, ...]:
    """Return the names of a bundle's structures, or of its findings."""
    return bundle.structures or bundle.classes


def foreground_classes(structures: Sequence[str]) -> set[int]:
    """Return the indices of all that a site may annotate: for structures all but the background."""
    slugs = map(slug, structures)
    return {index for index, name in enumerate(slugs) if name != "background"}


def check(text: str, bundle: Problem, method: Method, sites: Collection[str]) -> None:
    """Raise an InputError if a run's settings for the sites' labels do not fit its bundle, method or sites."""
    if not text:
        return

    kind = ""
    if bundle.task not in ("segmentation", "multilabel"):
        kind = f"a {bundle.task} task"

    if bundle.custom_trainer:
        kind = "a bundle whose trainer takes its steps by itself"

    if kind:
        raise InputError(
            f"{_FLAG} with {kind}",
            "it is for findings, and for segmentation by a loss of MONAI's kind",
            "leave it out",
        )

    if method.pools_data:
        raise InputError(
            f"{_FLAG} with a method that pools the images",
            "each site's masks need the loss of this site",
            "take another method, or leave it out: all masks are then taken for complete",
        )

    read(text, names_of(bundle), sites)


def known_labels(
    bundle: Problem, method: Method, run: Run, shards: Mapping[str, Shard]
) -> dict[str, AnnotatedClasses]:
    """Return what each site's masks annotate, without sites that annotate everything or have their masks elsewhere.

    Raises:
        InputError: as for `check`; or masks show none of the structures; or the bundle's loss cannot omit structures.
    """
    check(run.site_labels, bundle, method, shards)
    if not run.site_labels:
        return {}

    structures = names_of(bundle)
    label_sets = {}
    everything = foreground_classes(structures)
    for site, classes in read(run.site_labels, structures, shards).items():
        if classes is None:
            if not len(shards[site]):
                continue  # its masks are on another machine
            classes = tuple(sorted(_classes_in_masks(shards[site], len(structures)) & everything))
            if not classes:
                raise InputError(
                    f"{_FLAG} {site}={FROM_MASKS}, none of its {len(shards[site])} training labels shows one",
                    f"labels with some of {', '.join(structures[i] for i in sorted(everything))}",
                    "give the site labels that it annotated, or leave it out",
                )

        # a site that annotates everything uses the bundle's own loss
        if {*classes} != everything:
            label_sets[site] = _annotated(classes, bundle)
            _check_loss_supports(
                bundle, site, label_sets[site], shards[site], run.partial_loss == "naive"
            )

    return label_sets


def annotate(
    shards: Mapping[str, Shard], known: Mapping[str, AnnotatedClasses]
) -> dict[str, Shard]:
    """Return the sites' items of a section, together with what their masks annotate."""
    annotated = dict(shards)
    for site in known.keys() & shards.keys():
        shown = dict.fromkeys(shards[site].indices.tolist(), known[site])
        annotated[site] = replace(shards[site], shown=shown)

    return annotated


def for_summary(
    known: Mapping[str, AnnotatedClasses], bundle: Problem
) -> dict[str, dict[str, list[str]]]:
    """Return {"labels": site -> names of what its masks annotate}, {} if all sites annotate everything."""
    if not known:
        return {}

    labels = {}
    for site, annotated in known.items():
        labels[site] = [names_of(bundle)[index] for index in annotated.classes]

    return {"labels": labels}


def with_recorded_classes(
    shard: Shard, owner: Mapping[str, str], summary: Config, bundle: Problem
) -> Shard:
    """Return a finished run's items, together with what their masks annotate."""
    labels = summary.get("labels") or {}
    annotated = {}
    for site, names in labels.items():
        annotated[site] = _annotated(list(map(names_of(bundle).index, names)), bundle)

    shown = {}
    for index, ident in zip(shard.indices.tolist(), shard.ids, strict=True):
        site = owner.get(ident)
        if site in annotated:
            shown[index] = annotated[site]

    return replace(shard, shown=shown)


def _annotated(classes: Sequence[int], bundle: Problem) -> AnnotatedClasses:
    return AnnotatedClasses(tuple(classes), len(names_of(bundle)), exclusive(bundle))


def exclusive(bundle: Problem) -> bool:
    """Return whether each pixel of a segmentation has exactly one class; otherwise each channel is binary."""
    return slug(names_of(bundle)[0]) == "background" and not _is_sigmoid(
        inspect.unwrap(bundle.loss)
    )


def described(known: Mapping[str, AnnotatedClasses], bundle: Problem) -> str:
    """Describe in words what the masks annotate, "" if all sites annotate everything."""
    labels = for_summary(known, bundle).get("labels", {})
    lists = [f"{site} {' and '.join(names)}" for site, names in labels.items()]
    return f"; masks show: {', '.join(lists)}" if lists else ""


def _classes_in_masks(shard: Shard, count: int) -> set[int]:
    """Return the values in a shard's masks, or its non-empty channels."""
    values = set()
    for _, y in shard.deterministic(uncropped=True).batches(1):
        if y.ndim == 2:  # findings
            values.update((y >= 0).any(0).nonzero().flatten().tolist())
            continue

        in_channels = y.ndim > 3 and y.shape[1] == count
        if in_channels:
            not_empty = y.transpose(0, 1).flatten(1).any(1)
            values.update(not_empty.nonzero().flatten().tolist())
        else:
            values.update(map(int, torch.unique(y)))

    return values


def _is_sigmoid(loss: object) -> bool:
    """Return whether a loss treats each channel as binary."""
    parts = [*loss.modules()] if isinstance(loss, nn.Module) else [loss]
    flags = [getattr(part, "sigmoid", None) for part in parts]
    flags = [flag for flag in flags if isinstance(flag, bool)]
    # MONAI's DiceCELoss has both a flag and a BCEWithLogitsLoss that may be unused
    return any(flags or [isinstance(part, nn.BCEWithLogitsLoss) for part in parts])


def _check_loss_supports(
    bundle: Problem, site: str, classes: AnnotatedClasses, shard: Shard, naive: bool
) -> None:
    """Raise an InputError if the bundle's loss cannot be computed over a site's structures alone."""
    # one item is enough to see whether the loss accepts fewer channels
    for _, y in shard.batches(1) if len(shard) else ():
        logits = torch.zeros(len(y), classes.count, *y.shape[2:], device=bundle.device)
        try:
            PartialLoss(bundle.loss, classes, naive)(logits, y.to(bundle.device))
        except (RuntimeError, ValueError, IndexError) as error:
            failure = f"{_FLAG} {site}=..., over whose structures the bundle's loss fails ({error})"
            needed = classes.count - len(classes.unannotated) + classes.exclusive
            raise InputError(
                " ".join(failure.split())[:300],
                f"a loss that takes any number of channels: of the {classes.count}, this site needs {needed}",
                "take a loss without weights of its channels, or --partial-loss naive",
            ) from error

        return


def loss_at(bundle: Problem, run: Run, classes: AnnotatedClasses | None) -> Callable[..., Tensor]:
    """Return the loss of a site: the bundle's, or its restriction to what the masks annotate."""
    if classes is None:
        return bundle.loss

    return PartialLoss(bundle.loss, classes, run.partial_loss == "naive")
