"""Metrics, intervals, calibration and saved masks."""

from medfl.evaluation.calibration import reliability as reliability
