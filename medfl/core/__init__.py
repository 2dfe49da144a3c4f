"""What every other room uses: errors, seeding, storage, messages, `Run`, the run folder, the terminal."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.core.seeding import stream as stream
    from medfl.core.storage import weights_sha256 as weights_sha256
else:
    __all__, __getattr__ = lazy_names(__name__)
