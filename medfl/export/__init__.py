"""The result of a run as a MONAI bundle."""
