"""Stands in the place of mlflow where it is not needed, as if it were not installed."""

raise ImportError("left out")
