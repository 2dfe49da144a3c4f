"""From a request to a finished run folder: plan, launch, resume, read back."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.runs.folds import cross_validate
    from medfl.runs.launch import site_algo
    from medfl.runs.plan import Request, make_plan
else:
    __all__, __getattr__ = lazy_names(__name__)
