"""What a federation trains, as a value: networks, loss, optimiser, data, and how results are scored."""

from typing import TYPE_CHECKING

from medfl.core.importing import lazy_names

if TYPE_CHECKING:
    from medfl.problem.described import (
        LARGEST_COMPONENT as LARGEST_COMPONENT,
        channel_names as channel_names,
        mask_names as mask_names,
        mask_values as mask_values,
        tensor_described as tensor_described,
    )
    from medfl.problem.parts import is_parts as is_parts
    from medfl.problem.problem import Problem as Problem, prepared_sections as prepared_sections
    from medfl.problem.prompts import Text as Text
    from medfl.problem.sections import Section as Section
else:
    __all__, __getattr__ = lazy_names(__name__)
