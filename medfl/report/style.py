"""Colours and sizes that all pictures share."""

INK = "#1f2937"  # texts
SOFT = "#6b7280"  # secondary texts and frames
BAND = "#f3f5f8"  # every other row, and grids
TINTS = {"train": "#2f6f9f", "validate": "#86b6d8", "test": "#e0b457"}
