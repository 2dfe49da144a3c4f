"""Drawn images in the layouts of real data sets."""
