"""Target attention backward for many query rows: many candidates, or many heads, to one history.

Up to a tile of query rows, one sweep has all gradients at hand, and each history row is read once.  More of them take
two, since neither side's gradient fits beside the other's: one for the gradient of the queries, which also leaves their
log-sum-exp L and Δ = Σ_e dO · O for the other, a program a tile of history rows with a loop over the query rows.  Seven
products instead of five, and still faster than one sweep that adds the gradient of the queries up in memory.
"""

import torch
from torch import Tensor

from jfi.kernels.common.primitives import cdiv, tile_slots
from jfi.kernels.target_attention.many_dkey import target_attention_many_dhistory_kernel
from jfi.kernels.target_attention.many_dquery import target_attention_many_dquery_kernel
from jfi.kernels.target_attention.many_tiles import (
    STATS,
    chunk_of,
    chunk_slots,
    describable,
    head_columns,
    history_tiles,
    merge_chunks,
    parts_of,
    query_tiles,
)
from jfi.kernels.target_attention.tiles import Tile


def _one_config(tile: Tile) -> tuple[int, int, int, int, int | None]:
    """(query rows, history rows a step, warps, stages, registers) where all query rows are in a tile; 0 rows: never."""
    if tile.width_bytes > 256 or tile.dtype.itemsize > 2:
        return 0, 0, 0, 0, None
    return 64, 64, 4, 3 if tile.shared else 2, None


def _dquery_config(tile: Tile) -> tuple[int, int, int, int, int | None]:
    """The same where they are not; both the best of those measured on an H200."""
    if tile.width_bytes > 512:
        return (16, 16, 8, 1, None) if tile.width_bytes > 1024 else (16, 16, 4, 1, None)
    if tile.dtype.itemsize > 2:
        return 64, 32, 4, 2 if tile.shared else 1, None
    if tile.width_bytes > 256:
        return 64, 32, 4, 3 if tile.shared else 2, None
    if not tile.shared and tile.rows > 64:
        return 128, 64, 8, 3, None
    # 168 registers let three programs run at once.
    return 64, 64, 4, 2, 168


def _dhistory_config(tile: Tile) -> tuple[int, int, int, int]:
    """(query rows a step, history rows, warps, stages), the best of those measured."""
    if tile.width_bytes > 512:
        return (16, 16, 8, 1) if tile.width_bytes > 1024 else (16, 16, 4, 1)
    if tile.dtype.itemsize > 2:
        return (64, 32, 4, 2) if tile.width_bytes <= 256 else (64, 32, 8, 1)
    if tile.width_bytes > 256:
        return (32, 64, 4, 2) if tile.shared else (32, 64, 8, 2)
    return (32, 64, 4, 3) if tile.shared else (64, 64, 4, 2)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of query, key (key + value where they are shared), value and bias."""
    batch, times, heads, width = query.shape
    rows = key.shape[0]
    dquery, dkey = torch.empty_like(query), torch.empty_like(key)
    dvalue = None if value is None else torch.empty_like(value)
    dbias = None if bias is None else torch.empty_like(bias)
    if batch == 0:
        return dquery, dkey, dvalue, dbias
    tile = Tile.of(query, key, value, offsets, bias)
    queries = times * heads // tile.groups
    one = queries <= _one_config(tile)[0]
    block_m, block_n, warps, stages, registers = _one_config(tile) if one else _dquery_config(tile)
    other_m, other_n, *other_options = _dhistory_config(tile)
    tiles, slots = cdiv(queries, block_m), tile_slots(rows, batch, other_n)
    chunk = chunk_of(rows, batch, query.device, tiles * tile.groups, max_seqlen)
    parts = parts_of(rows, chunk, times * heads, width, query.device)
    padded = cdiv(queries, STATS.value) * STATS.value
    stats = lse.new_empty(0 if one else batch * tile.groups * 2 * padded)
    slot_samples = offsets.new_empty(0 if one else slots, dtype=torch.int32)
    described = describable(key, value)
    history = (key, key if value is None else value, bias, offsets)
    more = {"BLOCK_H": head_columns(tile.heads)}
    target_attention_many_dquery_kernel[(chunk_slots(rows, batch, chunk) * tiles, tile.groups)](
        query,
        *history,
        grad,
        out,
        lse,
        dquery,
        dkey,
        dvalue,
        dbias,
        parts[0],
        stats,
        slot_samples,
        history_tiles(key, block_n) if described else None,
        history_tiles(value, block_n) if described and value is not None else None,
        history_tiles(dkey, block_n) if described and tile.shared else None,
        batch,
        queries,
        tiles,
        chunk,
        scale,
        HISTORY=one,
        SLOT=other_n,
        DESCRIBED=described,
        maxnreg=registers,
        **more,
        **tile.constants(block_m, block_n, warps, stages),
    )
    if parts[0].shape[0]:
        merge_chunks(parts, offsets, dquery, None, chunk)
    if one:
        return dquery, dkey, dvalue, dbias
    described = described and describable(query, grad) and tile.groups in (1, heads)
    target_attention_many_dhistory_kernel[(slots, tile.groups)](
        query,
        *history,
        grad,
        dkey,
        dvalue,
        dbias,
        stats,
        slot_samples,
        query_tiles(query, tile.groups, other_m) if described else None,
        query_tiles(grad, tile.groups, other_m) if described else None,
        batch,
        queries,
        scale,
        DESCRIBED=described,
        **more,
        **tile.constants(other_m, other_n, *other_options),
    )
    return dquery, dkey, dvalue, dbias
