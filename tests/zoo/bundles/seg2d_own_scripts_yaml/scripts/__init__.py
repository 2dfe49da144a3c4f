"""Code of this bundle: its network, its transforms and its batches."""
