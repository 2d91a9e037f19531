"""The forward of `jfi.ops.jagged_attention` for AOTInductor: the same Triton kernels, launched through `wrap_triton`.

Only until the operator itself can be exported: then `jfi.serving.attention` calls it, and this file goes.
"""

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from jfi.kernels.common import tile_scheduler
from jfi.kernels.common.primitives import cdiv
from jfi.kernels.jagged_attention import triton_fwd
from jfi.kernels.target_attention.tiles import Tile


def jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    query_offsets: Tensor,
    key_offsets: Tensor,
    causal: bool = False,
    key_bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """As the operator, forward only."""
    scale = query.size(2) ** -0.5 if scale is None else scale
    return _forward(query, key, value, query_offsets, key_offsets, key_bias, scale, causal)


@triton_op("jfi_serving::jagged_attention", mutates_args={})
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    bias: Tensor | None,
    scale: float,
    causal: bool,
) -> Tensor:
    """The steps of `triton_fwd.forward`, whose own launches a compiler cannot see."""
    query, key = query.contiguous(), key.contiguous()
    rows, heads, _ = query.shape
    tile = Tile.of(query, key, value, key_offsets, bias)
    block_m, *rest = triton_fwd._config(tile)
    batch = query_offsets.shape[0] - 1
    slots = rows * tile.heads // block_m + batch
    total = slots * tile.groups
    table = query_offsets.new_empty((slots, tile_scheduler.FIELDS.value), dtype=torch.int32)
    out = query.new_empty((rows, heads, tile.out_width))
    lse = query.new_empty((rows, heads), dtype=torch.float32)
    wrap_triton(tile_scheduler._schedule_kernel)[(cdiv(batch, tile_scheduler.OWN), 1, 1)](
        query_offsets,
        key_offsets,
        table,
        batch,
        tile.heads,
        slots,
        BLOCK=block_m,
        OWN=tile_scheduler.OWN,
        CHUNK=128,
        num_warps=4,
    )
    wrap_triton(triton_fwd._jagged_attention_fwd_kernel)[(total, 1, 1)](
        query,
        key,
        key if value is None else value.contiguous(),
        query if bias is None else bias.contiguous(),  # not read without a bias
        table,
        out,
        lse,
        total,
        0,
        0,
        scale,
        HAS_LEFT=False,
        HAS_RIGHT=causal,
        **tile.constants(block_m, *rest),
    )
    return out
