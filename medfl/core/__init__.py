"""What all other rooms use: errors, seeding, settings, messages, `Run`, untrusted text, the terminal."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.core.seeding import stream as stream
else:
    __all__, __getattr__ = lazy_names(__name__)
