"""The published tables as data, and the runs that reproduce them."""
