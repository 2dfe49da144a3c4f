"""Preparing, caching and batch-wise transforming of images."""
