"""The forward kernels of `jfi.ops.jagged_attention`, launched so that torch.export and AOTInductor take them along."""

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from jfi.kernels.common import tile_scheduler as schedule
from jfi.kernels.common.primitives import cdiv
from jfi.kernels.jagged_attention import triton_fwd as attention
from jfi.kernels.target_attention.tiles import Tile


@triton_op("jfi_serving::jagged_attention", mutates_args={})
def jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    bias: Tensor | None,
    scale: float,
    causal: bool,
) -> Tensor:
    """`jagged_attention_fwd.forward` step by step, for what goes past its launchers a compiler cannot see."""
    query, key = query.contiguous(), key.contiguous()
    rows, heads, _ = query.shape
    tile = Tile.of(query, key, value, key_offsets, bias)
    block_m, *rest = attention._config(tile)
    batch = query_offsets.shape[0] - 1
    slots = rows * tile.heads // block_m + batch
    total = slots * tile.groups
    table = query_offsets.new_empty((slots, schedule.FIELDS.value), dtype=torch.int32)
    out = query.new_empty((rows, heads, tile.out_width))
    lse = query.new_empty((rows, heads), dtype=torch.float32)
    wrap_triton(schedule._schedule_kernel)[(cdiv(batch, schedule.OWN), 1, 1)](
        query_offsets,
        key_offsets,
        table,
        batch,
        tile.heads,
        slots,
        BLOCK=block_m,
        OWN=schedule.OWN,
        CHUNK=128,
        num_warps=4,
    )
    wrap_triton(attention._jagged_attention_fwd_kernel)[(total, 1, 1)](
        query,
        key,
        key if value is None else value.contiguous(),
        query if bias is None else bias.contiguous(),  # not looked at without a bias
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
