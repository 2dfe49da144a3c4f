"""Runtimes: the same method and sites, run by a simulator in one place or by a federation engine."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.runtimes.federation import Federation as Federation
    from medfl.runtimes.registry import Runtime as Runtime
    from medfl.runtimes.step import introduce as introduce, site_step as site_step
else:
    __all__, __getattr__ = lazy_names(__name__)
