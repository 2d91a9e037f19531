"""Recommendation models built from TorchRec's parts and jfi's layers."""

from jfi.models.sequence_dlrm import SequenceDLRM

__all__ = ["SequenceDLRM"]
