"""Operators over jagged tensors: packed values [S, ...] and offsets [B+1], forward and backward, without padding.

Packed values may be nested tensors of the jagged layout, which have their own offsets.
"""

from jfi.ops.checks import validation
from jfi.ops.digit_attention import digit_attention
from jfi.ops.explain import explain
from jfi.ops.gather_rows import gather_rows
from jfi.ops.jagged_attention import jagged_attention
from jfi.ops.target_attention import target_attention

__all__ = [
    "digit_attention",
    "explain",
    "gather_rows",
    "jagged_attention",
    "target_attention",
    "validation",
]
