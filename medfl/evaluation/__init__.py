"""Metrics, intervals, calibration and saved masks."""
