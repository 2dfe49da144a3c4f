"""Names for NumPy's arrays by the kind of their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
"""Of any kind."""
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Shape = tuple[int, ...]
"""How many numbers along each axis."""
