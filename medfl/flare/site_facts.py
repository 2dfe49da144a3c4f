"""What a site of a FLARE job tells of its data beside counts: what its masks show, and which channels its images have.

On the wire it is positions among the names of the bundle, which both ends have: tensors `site/labels`, `site/channels`.
A site tells of what the job or its own file says of it, with its introduction and with every reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from medfl.core.errors import RunError
from medfl.core.untrusted import printable
from medfl.evaluation.mask_metrics import slug
from medfl.flare.wire import Payload
from medfl.problem.problem import Problem
from medfl.runtimes import site_channels

Facts = Mapping[str, list[str]]
"""`labels` and `channels`, each with names of the bundle; what a site does not tell of is not there."""
_DESCRIPTIONS = {"labels": "its masks show {}", "channels": "its images have the channels {}"}


def tensors(statistics: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a site tells as it crosses; `statistics` are those beside its message."""
    return {
        f"site/{kind}": torch.tensor(statistics[kind])
        for kind in _DESCRIPTIONS
        if kind in statistics
    }


def read(payload: Payload, bundle: Problem) -> dict[str, list[str]]:
    """Return what a site has told.

    Raises:
        RunError: it is something else than ascending positions among the bundle's structures or channels.
    """
    return {
        kind: _named(kind, tensor, bundle) for kind, tensor in sorted(payload.group("site").items())
    }


def _named(kind: str, tensor: Tensor, bundle: Problem) -> list[str]:
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
    names = bundle.structures if kind == "labels" else site_channels.names(bundle)
    return {
        i: name for i, name in enumerate(names) if kind == "channels" or slug(name) != "background"
    }


def describe(facts: Facts) -> str:
    """Say it in a line's words, "" for nothing."""
    return ", ".join(
        _DESCRIPTIONS[kind].format(" and ".join(names)) for kind, names in facts.items()
    )


def by_kind(
    facts: Mapping[str, Facts], summary: Mapping[str, Any], bundle: Problem
) -> dict[str, dict[str, list[str]]]:
    """Return kind -> site -> names, of the sites that lack some; of one that has not told what the job says."""
    names_by_kind: dict[str, dict[str, list[str]]] = {}
    for kind in _DESCRIPTIONS:
        reports = {
            site: site_facts[kind]
            for site, site_facts in sorted(facts.items())
            if kind in site_facts
        }
        if names_by_site := {**(summary.get(kind) or {}), **reports}:
            every = len(_names(kind, bundle))
            names_by_kind[kind] = {
                site: names for site, names in names_by_site.items() if len(names) < every
            }

    return names_by_kind
