"""Metrics, intervals, calibration and saved masks."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.evaluation.bootstrap import (
        Draws as Draws,
        Interval as Interval,
        t_interval as t_interval,
    )
    from medfl.evaluation.calibration import reliability as reliability
    from medfl.evaluation.conformal import Rule as Rule, Scored as Scored, bins_of as bins_of
    from medfl.evaluation.delong import Area as Area
    from medfl.evaluation.evaluators import (
        CaseEvaluator as CaseEvaluator,
        ClassEvaluator as ClassEvaluator,
        Evaluator as Evaluator,
        Foreign as Foreign,
        MaskEvaluator as MaskEvaluator,
        Masks as Masks,
        VectorEvaluator as VectorEvaluator,
    )
    from medfl.evaluation.mask_metrics import (
        surface_metrics_of as surface_metrics_of,
    )
    from medfl.evaluation.metrics import (
        METRICS as METRICS,
        OVER_CLASSES as OVER_CLASSES,
        Cases as Cases,
        CasesByName as CasesByName,
        direction as direction,
        higher_is_better as higher_is_better,
        summarise as summarise,
        title as title,
        without_repeats as without_repeats,
    )
    from medfl.evaluation.slices import planes as planes, unit as unit
    from medfl.evaluation.tally import Tally as Tally
    from medfl.evaluation.undefined import told_by as told_by
else:
    __all__, __getattr__ = lazy_names(__name__)
