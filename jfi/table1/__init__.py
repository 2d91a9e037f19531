"""The six operators of Table 1 of the Jagged Flash Attention paper; nothing else in jfi uses them.

They take packed values [S, ...] and offsets [B+1], forward and backward, without padding.
"""

from jfi.table1.operators import (
    array_jagged_bmm_jagged_out,
    jagged2_softmax,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
    jagged_softmax,
)

__all__ = [
    "array_jagged_bmm_jagged_out",
    "jagged2_softmax",
    "jagged_dense_bmm",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_softmax",
]
