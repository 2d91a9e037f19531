"""Predictions beside the best of others: ``python -m benchmarks.quality --help``."""
