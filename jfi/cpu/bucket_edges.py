"""Which keys a query sees and in which bucket of age or distance each lies, by binary search in plain PyTorch."""

import torch
from torch import Tensor

from jfi.plan import MOST_BUCKETS


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
    """Arguments and result as those of the operator in jfi/ops/_bucket_edges.py."""
    device = query_offsets.device
    query_offsets, key_offsets = query_offsets.long(), key_offsets.long()
    query = torch.arange(rows, device=device)
    sample = torch.searchsorted(query_offsets, query, right=True) - 1
    start = key_offsets[sample]
    count = key_offsets[sample + 1] - start
    if is_causal:
        end = query - query_offsets[sample + 1] + 1 + count
        newest = end - 1
    else:
        end = newest = _count(key_time, start, count, lambda times: times < query_time[:, None], rows, 1)[:, 0]
    end = torch.minimum(end.clamp(min=0), count)
    begin = torch.zeros_like(end) if max_visible is None else (end - max_visible).clamp(min=0)
    least = torch.ones((), dtype=torch.int64, device=device) << torch.arange(num_buckets - 1, device=device)
    if by_time:
        inner = _count(key_time, start, count, lambda times: _is_aged(query_time, times, least), rows, num_buckets - 1)
    else:
        inner = newest[:, None] - least + 1
    inner = torch.minimum(inner.clamp(min=0), end[:, None])
    edges = torch.cat([end[:, None], inner], 1)
    # The bucket of the key before an edge: as many as there are inner edges not before that.
    descending = inner.neg().contiguous()
    buckets = torch.searchsorted(descending, edges.neg().contiguous(), right=True)
    edges = edges * MOST_BUCKETS + torch.where(edges > 0, buckets, 0)
    return torch.cat([edges, begin[:, None]], 1).int()


def _is_aged(query_time: Tensor, times: Tensor, least: Tensor) -> Tensor:
    """Whether the ages of times [R, N - 1] are at least ``least`` [N - 1]."""
    if times.is_floating_point():
        return query_time[:, None] - times >= least  # the age itself, rounded as wherever a bucket is computed
    return times <= query_time[:, None] - least  # where an age may exceed 64 bits


def _count(key_time: Tensor, start: Tensor, count: Tensor, is_before, rows: int, width: int) -> Tensor:
    """[R, width]: how many of a sample's keys lie before each limit; is_before takes times [R, width]."""
    low = count.new_zeros(rows, width)
    if rows == 0 or key_time.shape[0] == 0:
        return low
    high = count[:, None].expand(rows, width)
    for _ in range(int(count.max()).bit_length()):
        middle = (low + high) // 2
        at = (start[:, None] + middle).clamp(max=key_time.shape[0] - 1)
        before = is_before(key_time[at]) & (middle < high)
        low, high = torch.where(before, middle + 1, low), torch.where(before, high, torch.minimum(middle, high))
    return low
