"""Runs that an earlier version recorded, as this one has their settings: the same training under other names."""

from __future__ import annotations

from dataclasses import replace

from medfl.core.run import Run

_MOVED = {"weights": "site_weights", "decay_per": "decay_per", "keep_optimizer": "keep_optimizer"}
"""Options of these methods that became settings of every run after 0.6.0."""
_BEFORE = {"fedbm": tuple(_MOVED), "fedcb": tuple(_MOVED), "fedhelp": ("weights",)}
_ADDED = {"fedrod": {"personal_start": "zero"}}
"""Options that came after 0.6.0, with another default than what was done before."""


def upgraded(run: Run) -> Run:
    """Return a run with the names of today; one of today as it is.

    A kept optimiser is in States where this version does not look for it: such an option stays, and is refused.
    """
    options = {**_ADDED.get(run.method, {}), **run.options}
    moved = [name for name in _BEFORE.get(run.method, ()) if name in options and options[name] is not True]
    settings = {_MOVED[name]: options.pop(name) for name in moved}
    settings.pop("keep_optimizer", None)  # False: the default of every run
    return replace(run, options=options, **settings) if options != run.options else run
