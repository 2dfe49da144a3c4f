"""Tiny bundles in the styles of the public MONAI model zoo, with data."""
