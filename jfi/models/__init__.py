"""Recommendation models built from TorchRec's parts and jfi's layers."""

from jfi import lockstep  # noqa: F401  # before TorchRec: a wrong pair of torch and fbgemm is said in one line
from jfi.models.sequence_dlrm import SequenceDLRM

__all__ = ["SequenceDLRM"]
