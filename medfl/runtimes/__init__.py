"""Runtimes: the same method and sites, run by a simulator in one place or by a federation engine."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.runtimes.attendance import FailedReply, Tolerance
    from medfl.runtimes.federation import Federation
    from medfl.runtimes.launch import Launch
    from medfl.runtimes.registry import Execution, Runtime
    from medfl.runtimes.step import introduce, site_step
    from medfl.runtimes.unlabelled import check_unlabelled
else:
    __all__, __getattr__ = lazy_names(__name__)
