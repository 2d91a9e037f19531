"""Baselines of statistics of the past, on the rows and with the metrics of a training run."""

from jfi.baselines.models import BaselineResult
from jfi.baselines.run import run_baselines

__all__ = ["BaselineResult", "run_baselines"]
