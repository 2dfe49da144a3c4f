"""Conventions of published bundles: older MONAI, paths, custom trainers."""
