"""Files: replaced atomically, weights, third-party checkpoints, the run folder."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.storage.files import weights_sha256 as weights_sha256
else:
    __all__, __getattr__ = lazy_names(__name__)
