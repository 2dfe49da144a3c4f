"""Tools for a hospital: inspect a bundle, check data, share statistics."""
