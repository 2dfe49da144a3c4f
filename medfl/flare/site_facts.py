"""What a site of a FLARE job tells of its data beside counts: what its masks show, and which channels its images have.

On the wire it is positions among the names of the bundle, which both ends have: tensors `site/labels`, `site/channels`.
A site tells of what the job or its own file says of it, with its introduction and with every reply.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from medfl.core.documents import Config
from medfl.core.errors import RunError
from medfl.core.message import Tensors
from medfl.core.names import slug
from medfl.core.untrusted import printable
from medfl.flare.wire import Payload
from medfl.problem.problem import Problem
from medfl.runtimes import site_channels

Facts = Mapping[str, list[str]]
"""`labels` and `channels`, each with names of the bundle; what a site does not tell of is not there."""
_DESCRIPTIONS = {"labels": "its masks show {}", "channels": "its images have the channels {}"}


def tensors(statistics: Config) -> Tensors:
    """Return what a site tells as it crosses; `statistics` are those beside its message."""
    kinds = [kind for kind in _DESCRIPTIONS if kind in statistics]
    return {f"site/{kind}": torch.tensor(statistics[kind]) for kind in kinds}


def read(payload: Payload, bundle: Problem) -> dict[str, list[str]]:
    """Return what a site has told.

    Raises:
        RunError: it is something else than ascending positions among the bundle's structures or channels.
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
    """Return position -> name of all that a site may have."""
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
    """Return kind -> site -> names, of the sites that lack some; of one that has not told what the job says."""
    names_by_kind = {}
    for kind in _DESCRIPTIONS:
        names_by_site = dict(summary.get(kind) or {})
        for site in sorted(facts):
            if kind in facts[site]:
                names_by_site[site] = facts[site][kind]

        if names_by_site:
            total = len(_names(kind, bundle))
            incomplete = [site for site, names in names_by_site.items() if len(names) < total]
            names_by_kind[kind] = {site: names_by_site[site] for site in incomplete}

    return names_by_kind
