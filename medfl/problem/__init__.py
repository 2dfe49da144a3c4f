"""What a federation trains, as a value: networks, loss, optimiser, data, and how results are scored."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.problem.described import (
        LARGEST_COMPONENT,
        channel_names,
        mask_names,
        mask_values,
        tensor_described,
    )
    from medfl.problem.parts import is_parts
    from medfl.problem.problem import Problem, prepared_sections
    from medfl.problem.prompts import Text
    from medfl.problem.sections import Section
else:
    __all__, __getattr__ = lazy_names(__name__)
