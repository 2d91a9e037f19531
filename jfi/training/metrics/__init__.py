"""Metrics of labels and of rankings, calibration and shares of unknown values."""
