"""Runtimes: the same method and sites, run by a simulator in one place or by a federation engine."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.runtimes.attendance import FailedReply as FailedReply, Tolerance as Tolerance
    from medfl.runtimes.federation import Federation as Federation
    from medfl.runtimes.launch import Launch as Launch
    from medfl.runtimes.registry import Execution as Execution, Runtime as Runtime
    from medfl.runtimes.step import introduce as introduce, site_step as site_step
    from medfl.runtimes.unlabelled import check_unlabelled as check_unlabelled
else:
    __all__, __getattr__ = lazy_names(__name__)
