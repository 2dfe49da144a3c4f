"""A site's facts about its data in a FLARE job, beside counts: structures that it annotates, channels that it has.

It is sent as indices into the names of the bundle, which both ends have: tensors `site/labels`, `site/channels`.
A site reports them, if declared in the job or its own file, with its introduction and with every reply.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from medfl.core import Config, RunError, Tensors, pick, printable, slug
from medfl.flare.wire import Payload
from medfl.problem import Problem
from medfl.runtimes import site_channels

Facts = Mapping[str, list[str]]
"""`labels` and `channels`, each with names of the bundle; without what a site does not report."""
_DESCRIPTIONS = {"labels": "its masks show {}", "channels": "its images have the channels {}"}


def tensors(statistics: Config) -> Tensors:
    """Return a site's facts as they are sent; `statistics` are those beside its message."""
    kinds = [kind for kind in _DESCRIPTIONS if kind in statistics]
    return {f"site/{kind}": torch.tensor(statistics[kind]) for kind in kinds}


def read(payload: Payload, bundle: Problem) -> dict[str, list[str]]:
    """Return the facts that a site reported.

    Raises:
        RunError: they are not ascending indices of the bundle's structures or channels.
    """
    tensors_by_kind = payload.group("site")
    return {
        kind: _reported_names(kind, tensors_by_kind[kind], bundle)
        for kind in sorted(tensors_by_kind)
    }


def _reported_names(kind: str, tensor: Tensor, bundle: Problem) -> list[str]:
    if kind not in _DESCRIPTIONS:
        raise RunError(
            f"it tells of its {printable(kind, 40)!r}; of its data a site tells {', '.join(_DESCRIPTIONS)}"
        )

    names = _names(kind, bundle)
    small = tensor.dtype == torch.int64 and tensor.ndim == 1 and len(tensor) <= len(names)
    positions = tensor.tolist() if small else []
    if not positions or positions != sorted({*positions} & names.keys()):
        raise RunError(
            f"its {kind} are not ascending positions among the {len(names)} of the bundle"
        )

    return [names[position] for position in positions]


def _names(kind: str, bundle: Problem) -> dict[int, str]:
    """Return index -> name of everything that a site may have."""
    if kind == "channels":
        return dict(enumerate(site_channels.names(bundle)))

    names = dict(enumerate(bundle.structures))
    return {i: name for i, name in names.items() if slug(name) != "background"}


def describe(facts: Facts) -> str:
    """Describe facts in a line, "" for none."""
    parts = [_DESCRIPTIONS[kind].format(" and ".join(names)) for kind, names in facts.items()]
    return ", ".join(parts)


def by_kind(
    facts: Mapping[str, Facts], summary: Config, bundle: Problem
) -> dict[str, dict[str, list[str]]]:
    """Return kind -> site -> names, for sites that lack some; the job's statement for one that reported nothing."""
    names_by_kind = {}
    for kind in _DESCRIPTIONS:
        names_by_site = dict(summary.get(kind) or {})
        for site in sorted(facts):
            if kind in facts[site]:
                names_by_site[site] = facts[site][kind]

        if names_by_site:
            total = len(_names(kind, bundle))
            incomplete = [site for site, names in names_by_site.items() if len(names) < total]
            names_by_kind[kind] = pick(names_by_site, incomplete)

    return names_by_kind
