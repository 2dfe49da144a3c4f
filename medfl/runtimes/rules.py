"""Checks of what a method returns, mainly for user-written methods: an error names the method and the broken rule.

A method's mistake is not a site's fault: it ends the run instead of counting as a missing reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from medfl.core import InputError, Message
from medfl.storage import State
from medfl.training.site import Site

_VALUES = (Tensor, Mapping, bool, int, float, str, type(None))


class BrokenRule(InputError):
    """A method broke a rule for methods."""


Versions = dict[str, tuple[int, int]]
"""Path in a State -> which object is there, and how often it was written to."""


def check_update(method: str, site: Site, result: object) -> tuple[State, Message]:
    """Return the result of `local_update` after checking it.

    Raises:
        BrokenRule: it is not a State with a reply, or nothing was trained by `fit`.
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Message)):
        returned = type(result).__name__
        if isinstance(result, tuple):
            returned += f" of {', '.join(type(part).__name__ for part in result)}"
        raise BrokenRule(
            f"local_update of method {method!r} returned a {returned}",
            "it returns the site's next State and the reply, a Message",
            "return both",
        )

    check_state(method, "a site's State", result[0])
    if not site.journal:
        raise BrokenRule(
            f"local_update of method {method!r} trained nothing",
            "a site is trained by medfl.training.site.fit, which keeps the loss and counts the steps",
            "call it, in train or in local_update",
        )

    return result


def check_state(method: str, which: str, state: object) -> None:
    """Check that a State can be saved.

    Raises:
        BrokenRule: it contains something other than tensors, numbers and text; names it.
    """
    if isinstance(state, dict):
        wrong = _flaw(state, "")
    else:
        wrong = f"it is a {type(state).__name__}"

    if wrong:
        raise BrokenRule(
            f"{which} of method {method!r}: {wrong}",
            "a State is a plain dict of tensors, numbers, texts, lists and dicts with names",
            "keep what an object is made of, and make it anew each round",
        )


def object_versions(state: object, path: str = "") -> Versions:
    """Record the objects in a State, to detect later whether it was changed in place."""
    if isinstance(state, Tensor):
        # PyTorch counts writes to a tensor, except in inference mode
        return {path: (id(state), 0 if state.is_inference() else state._version)}

    # only dicts: a mapping on disk makes new tensors whenever it is read
    parts: Iterable[tuple[object, object]] = ()
    size = 0
    if isinstance(state, dict):
        parts = state.items()
        size = len(state)
    elif isinstance(state, list):
        parts = enumerate(state)
        size = len(state)

    noted = {path: (id(state), size)}
    for name, part in parts:
        noted |= object_versions(part, f"{path}/{name}".removeprefix("/"))

    return noted


def check_unchanged(method: str, state: State, before: Versions) -> None:
    """Check that `aggregate` left the server's State unchanged.

    Raises:
        BrokenRule: something in it was changed in place; names it.
    """
    after = object_versions(state)
    if after != before:
        # the longest path is the innermost part: its containers have changed with it
        changed = [path for path in (*before, *after) if before.get(path) != after.get(path)]
        raise BrokenRule(
            f"aggregate of method {method!r} changed {max(changed, key=len) or 'its entries'!r} of the server's State "
            "in place",
            "State in, State out: it returns a new one, or the round cannot be repeated",
            "make new dicts and tensors",
        )


def _flaw(node: object, path: str) -> str:
    """Describe what in a State cannot be saved, "" if all can."""
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, str):
                place = ""
                if path:
                    place = f" in {path!r}"

                return f"the key {key!r}{place} is a {type(key).__name__}"

        parts = [(f"{path}/{key}".lstrip("/"), part) for key, part in node.items()]
    elif isinstance(node, list | tuple):
        parts = [(f"{path}/{index}", part) for index, part in enumerate(node)]
    elif isinstance(node, _VALUES):
        return ""
    else:
        return f"{path!r} is a {type(node).__name__}"

    flaws = (_flaw(part, part_path) for part_path, part in parts)
    return next(filter(None, flaws), "")
