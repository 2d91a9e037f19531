"""Operators over jagged tensors: packed values [S, ...] and offsets [B+1], forward and backward, without padding.

Packed values may be nested tensors of the jagged layout, which have their own offsets.
"""

from jfi.ops.absorb_weights import absorb_weights
from jfi.ops.absorbed_target_attention import absorbed_target_attention
from jfi.ops.checks import validation
from jfi.ops.digit_attention import digit_attention
from jfi.ops.explain import explain
from jfi.ops.gather_rows import gather_rows
from jfi.ops.jagged_attention import jagged_attention
from jfi.ops.target_attention import target_attention

__all__ = [
    "absorb_weights",
    "absorbed_target_attention",
    "digit_attention",
    "explain",
    "gather_rows",
    "jagged_attention",
    "target_attention",
    "validation",
]
