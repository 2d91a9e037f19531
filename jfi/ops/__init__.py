"""Operators over jagged tensors: packed values [S, ...] and offsets [B+1], forward and backward, without padding.

The attentions of queries and keys and gather_rows take nested tensors of the jagged layout too, which have offsets.
"""

from jfi.ops.checks import validation
from jfi.ops.digit_attention import digit_attention
from jfi.ops.explain import explain
from jfi.ops.jagged_attention import jagged_attention
from jfi.ops.target_attention import target_attention
from jfi.tables.gather_rows import gather_rows

__all__ = [
    "digit_attention",
    "explain",
    "gather_rows",
    "jagged_attention",
    "target_attention",
    "validation",
]
