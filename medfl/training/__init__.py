"""A site and its local training loop."""

from medfl.training.layers import (
    NORMS,
    evaluating,
    one_sample_safe,
    split_names,
    train_only,
)
from medfl.training.local_settings import LocalSettings
from medfl.training.network_pool import Networks
from medfl.training.site import (
    Feed,
    FitReport,
    GradientHook,
    Host,
    Objective,
    Site,
    autocast,
    clip,
    copied,
    fit,
    in_turn,
    merged,
    pull,
    push,
    snapshot,
    summed,
    trainable,
    zeros_of,
)
