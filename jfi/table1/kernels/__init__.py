"""Kernels of the six operators in Table 1 of the Jagged Flash Attention paper."""

from jfi.table1.kernels.products import (  # noqa: F401
    array_jagged_bmm_jagged_out,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
)
from jfi.table1.kernels.softmax import jagged2_softmax, jagged2_softmax_bwd, jagged_softmax, jagged_softmax_bwd  # noqa: F401
