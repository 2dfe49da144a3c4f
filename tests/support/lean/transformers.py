"""Stands in the place of transformers where it is not needed, as if it were not installed."""

raise ImportError("left out")
