"""The types of the entries of a run's files that a report reads; an entry that is missing is no error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from medfl.core.type_checks import describe_type, matches_type

_METRICS = dict[str, float | None] | None
_BY_ROUND = dict[str, dict[str, float | None] | None] | None
_OBJECT = dict[str, Any] | None
RUN: Mapping[str, Any] = {
    "method": str, "bundle": str, "task": str, "key_metric": str, "rounds": int, "classes": list[str] | None,
    "options": _OBJECT, "config": _OBJECT, "versions": dict[str, str] | None, "command": str | None,
    "run_hash": str | None, "site_class_counts": dict[str, list[int]] | None, "public": _OBJECT,
    "data": {
        "source": str, "folder": str | None, "checksum": str | None, "split": str | None,
        "counts": dict[str, int] | None, "notes": list[str] | None,
    },
    "partition": {
        "spec": str, "seed": int, "notes": list[str] | None, "sites": dict[str, dict[str, list[str]]] | None,
    },
    "resumed": list[dict[str, Any]] | None,
}  # fmt: skip
RESUMED: Mapping[str, Any] = {"round": int, "versions": dict[str, str], "command": str | None}
_COSTS = dict.fromkeys(
    ("seconds", "seconds_train", "seconds_server", "seconds_eval", "bytes_up", "bytes_down"), float
)  # fmt: skip
ROUND: Mapping[str, Any] = {
    "round": int, **_COSTS, "cohort": list[str] | None, "train_loss": float | None, "judged": str | None,
    "val": _METRICS, "val_global": _METRICS, "val_personal": _METRICS, "sites": dict[str, dict[str, Any]] | None,
    "observed": _METRICS, "left_out": dict[str, str] | None,
}  # fmt: skip
SUMMARY: Mapping[str, Any] = {
    "rounds": int, **_COSTS, "seconds_per_round": float, "peak_memory_bytes": float, "judged": str | None,
    "last": _METRICS, "best": _METRICS, "global": _BY_ROUND, "personal": _BY_ROUND, "site_models": _BY_ROUND,
    "local": _BY_ROUND, "left_out": dict[str, int] | None, "absent": dict[str, str] | None,
}  # fmt: skip


def type_errors(document: Mapping[str, Any], types: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Yield the entries of a wrong type, as "has 'x' under rounds, where a whole number belongs"."""
    for name, expected in types.items():
        if name not in document:
            continue
        value, where = document[name], f"{within}{name}"
        if isinstance(expected, Mapping):
            if not isinstance(value, Mapping):
                yield f"has {value!r:.60} under {where}, where a dict belongs"
            else:
                yield from type_errors(value, expected, f"{where}.")
        elif not matches_type(value, expected) or (expected is float and not math.isfinite(value)):
            yield f"has {value!r:.60} under {where}, where {describe_type(expected)} belongs"
