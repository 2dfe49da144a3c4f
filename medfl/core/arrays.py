"""Names for NumPy arrays by the type of their numbers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
"""Of any type."""
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Shape = tuple[int, ...]
"""Number of elements along each axis."""
