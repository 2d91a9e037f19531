"""Recommendation models built from TorchRec's parts and jfi's layers."""

import jfi.utils.lockstep  # noqa: F401  # before TorchRec: a wrong pair of torch and fbgemm is said in one line
from jfi.models.heads import Heads
from jfi.models.sequence_arch import AttentionPooling
from jfi.models.sequence_dlrm import SequenceDLRM
from jfi.models.tables import require_optimizer_in_backward, table_parameters

__all__ = ["AttentionPooling", "Heads", "SequenceDLRM", "require_optimizer_in_backward", "table_parameters"]
