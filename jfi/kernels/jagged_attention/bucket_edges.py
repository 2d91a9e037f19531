"""Which keys a query sees and in which bucket of age or distance each lies: a binary search per query and bucket."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.jagged_attention.buckets import MAX_BUCKETS, bucket_of
from jfi.kernels.plan import cached
from jfi.utils.integers import ceil_div, power_of_two

#: Elements of a program's tile of searches: a warp, so that a few hundred rows fill a GPU too. One size for any number
#: of rows, so that no new number compiles the kernel again.
ELEMENTS = 32


@triton.jit(do_not_specialize=["batch", "rows", "max_visible"])
def bucket_edges_kernel(
    query_offsets_ptr,
    key_offsets_ptr,
    query_time_ptr,
    key_time_ptr,
    edges_ptr,
    batch,
    rows,
    max_visible,
    NUM_BUCKETS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BY_TIME: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Column 0 is the end of the keys that a query sees, columns 1 .. N - 1 the inner edges, column N their begin."""
    query = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = query < rows
    # The query's sample is the last whose first query is not behind it.
    low = tl.zeros((ROWS,), tl.int32)
    high = low + batch
    while tl.max(high - low) > 1:
        middle = (low + high) // 2
        own = tl.load(query_offsets_ptr + middle) <= query
        low, high = tl.where(own, middle, low), tl.where(own, high, middle)
    start = tl.load(key_offsets_ptr + low, mask=mask, other=0).to(tl.int64)
    count = (tl.load(key_offsets_ptr + low + 1, mask=mask, other=0) - start).to(tl.int32)
    column = tl.arange(0, COLUMNS)
    exponent = tl.minimum(tl.maximum(column - 1, 0), 62)
    least = tl.full((COLUMNS,), 1, tl.int64) << exponent.to(tl.int64)
    found = tl.zeros((ROWS, COLUMNS), tl.int32)
    if BY_TIME or not IS_CAUSAL:
        time = tl.load(query_time_ptr + query, mask=mask, other=0)
        if time.dtype.is_int():
            time = time.to(tl.int64)
        top = found + count[:, None]
        while tl.max(tl.max(top - found, 1)) > 0:
            middle = (found + top) // 2
            searches = found < top
            at = key_time_ptr + start[:, None] + middle
            key_time = tl.load(at, mask=searches, other=0).to(time.dtype)
            if time.dtype.is_int():  # an age may exceed 64 bits
                is_aged = key_time <= time[:, None] - least[None, :]
            else:  # the age itself, rounded as in `bucket_of`
                is_aged = time[:, None] - key_time >= least[None, :].to(time.dtype)
            before = tl.where((column == 0)[None, :], key_time < time[:, None], is_aged) & searches
            found, top = tl.where(before, middle + 1, found), tl.where(before | (found >= top), top, middle)
    if IS_CAUSAL:
        end = (query - tl.load(query_offsets_ptr + low + 1, mask=mask, other=0)).to(tl.int32) + 1 + count
        newest = end - 1
    else:
        end = tl.sum(tl.where((column == 0)[None, :], found, 0), 1)
        newest = end
    end = tl.minimum(tl.maximum(end, 0), count)
    begin = tl.maximum(end - max_visible, 0)
    if not BY_TIME:
        found = (newest[:, None] - tl.minimum(least, 2**30)[None, :].to(tl.int32)) + 1
    found = tl.minimum(tl.maximum(found, 0), end[:, None])
    found = tl.where((column == 0)[None, :], end[:, None], found)
    # The bucket of the key before each edge.
    times = (query_time_ptr if BY_TIME else None, key_time_ptr if BY_TIME else None)
    before = mask[:, None] & (found > 0)
    bucket = bucket_of(times, query[:, None], end[:, None], start[:, None], found - 1, before, NUM_BUCKETS, IS_CAUSAL)
    # Never a bucket behind the edge, whatever the times: loops over buckets end because each edge leads to a later one.
    bucket = tl.maximum(bucket, column[None, :])
    found = found * MAX_BUCKETS + tl.where(before, bucket, 0)
    found = tl.where((column == NUM_BUCKETS)[None, :], begin[:, None], found)
    to = edges_ptr + query[:, None] * (NUM_BUCKETS + 1) + column[None, :]
    tl.store(to, found, mask=mask[:, None] & (column <= NUM_BUCKETS)[None, :])


@cached
def _launcher(num_buckets: int, is_causal: bool, by_time: bool) -> Launcher:
    columns = power_of_two(num_buckets + 1, 1)
    constants = {"NUM_BUCKETS": num_buckets, "IS_CAUSAL": is_causal, "BY_TIME": by_time}
    rows = max(ELEMENTS // columns, 1)
    warps = min(max(rows * columns // 32, 1), 4)
    return Launcher(bucket_edges_kernel, **constants, ROWS=rows, COLUMNS=columns, num_warps=warps)


def bucket_edges(
    query_offsets: Tensor,
    key_offsets: Tensor,
    query_time: Tensor | None,
    key_time: Tensor | None,
    rows: int,
    is_causal: bool,
    max_visible: int | None,
    num_buckets: int,
    by_time: bool,
) -> Tensor:
    """Arguments and result as those of the operator in jfi/ops/_visibility.py."""
    edges = torch.empty(rows, num_buckets + 1, dtype=torch.int32, device=query_offsets.device)
    if rows:
        launcher = _launcher(num_buckets, is_causal, by_time)
        programs = ceil_div(rows, launcher.constants["ROWS"])
        tensors = (query_offsets, key_offsets, query_time, key_time, edges)
        most = 2**30 if max_visible is None else min(max_visible, 2**30)
        launcher((programs, 1, 1), tensors, (query_offsets.shape[0] - 1, rows, most))
    return edges
