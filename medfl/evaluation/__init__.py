"""Metrics, intervals, calibration and saved masks."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.evaluation.bootstrap import (
        Draws,
        Interval,
        t_interval,
    )
    from medfl.evaluation.calibration import reliability
    from medfl.evaluation.conformal import Rule, Scored, bins_of
    from medfl.evaluation.delong import Area
    from medfl.evaluation.evaluators import (
        CaseEvaluator,
        ClassEvaluator,
        Evaluator,
        Foreign,
        MaskEvaluator,
        Masks,
        VectorEvaluator,
    )
    from medfl.evaluation.mask_metrics import (
        surface_metrics_of,
    )
    from medfl.evaluation.metrics import (
        METRICS,
        OVER_CLASSES,
        Cases,
        CasesByName,
        direction,
        higher_is_better,
        summarise,
        title,
        without_repeats,
    )
    from medfl.evaluation.slices import planes, unit
    from medfl.evaluation.tally import Tally
    from medfl.evaluation.undefined import told_by
else:
    __all__, __getattr__ = lazy_names(__name__)
