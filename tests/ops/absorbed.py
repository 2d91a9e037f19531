"""Target attention with absorbed projections, called as an operator is."""

import math

from torch import Tensor

from jfi.ops.absorbed_target_attention import attend_absorbed
from jfi.tables.rows_by_id import RowsById, bounded_rows_by_id


def absorbed_target_attention(
    target: Tensor,
    history: Tensor | tuple[Tensor, ...] | RowsById,
    weights: tuple[Tensor, ...],
    *,
    offsets: Tensor,
    num_heads: int,
    indices: Tensor | tuple[Tensor, ...] | None = None,
    key_bias: Tensor | None = None,
    key_bias_index: Tensor | None = None,
    value_scale: Tensor | None = None,
    max_seqlen: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Returns `attend_absorbed` with the usual scale; with indices the history is one table or several."""
    history = history if isinstance(history, tuple) else (history,)
    if indices is not None:
        history = bounded_rows_by_id(history, indices if isinstance(indices, tuple) else (indices,), weights[0].dtype)
    events = (key_bias, key_bias_index, value_scale)
    scale = 1 / math.sqrt(weights[2].shape[1] // num_heads)
    return attend_absorbed(target, history, weights, offsets, num_heads, *events, scale, max_seqlen, impl)
