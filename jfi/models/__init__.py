"""Recommendation models built from TorchRec's parts and jfi's layers."""

from jfi import lockstep  # noqa: F401  # before TorchRec: it checks that torch and fbgemm fit each other
from jfi.models.heads import Heads
from jfi.models.sequence_dlrm import SequenceDLRM
from jfi.models.tables import require_optimizer_in_backward, table_parameters

__all__ = ["Heads", "SequenceDLRM", "require_optimizer_in_backward", "table_parameters"]
