"""Preparing, caching and batch-wise transforming of images."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.data.fingerprint import Fingerprint, Tally
    from medfl.data.known_labels import AnnotatedClasses
    from medfl.data.on_device import free_gpu_memory
    from medfl.data.prepare import DiskCache, budget, free_ram
    from medfl.data.prepared import (
        Batch,
        Geometry,
        Item,
        Prepared,
        Shard,
        Stacked,
        moved,
    )
    from medfl.data.public import Public
    from medfl.data.samples import (
        SampleMaker,
        allow_missing_labels,
        drop_label,
        fill_missing,
    )
    from medfl.data.source import (
        LACKS,
        NO_LABEL,
        Source,
        records,
        take_apart,
    )
else:
    __all__, __getattr__ = lazy_names(__name__)
