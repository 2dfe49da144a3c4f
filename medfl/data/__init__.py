"""Preparing, caching and batch-wise transforming of images."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.data.fingerprint import Fingerprint as Fingerprint, Tally as Tally
    from medfl.data.known_labels import AnnotatedClasses as AnnotatedClasses
    from medfl.data.on_device import free_gpu_memory as free_gpu_memory
    from medfl.data.prepare import DiskCache as DiskCache, budget as budget, free_ram as free_ram
    from medfl.data.prepared import (
        Batch as Batch,
        Geometry as Geometry,
        Item as Item,
        Prepared as Prepared,
        Shard as Shard,
        Stacked as Stacked,
        moved as moved,
    )
    from medfl.data.public import Public as Public
    from medfl.data.samples import (
        SampleMaker as SampleMaker,
        allow_missing_labels as allow_missing_labels,
        drop_label as drop_label,
        fill_missing as fill_missing,
    )
    from medfl.data.source import (
        LACKS as LACKS,
        NO_LABEL as NO_LABEL,
        Source as Source,
        records as records,
        take_apart as take_apart,
    )
else:
    __all__, __getattr__ = lazy_names(__name__)
