"""Which keys a query sees and in which bucket of age or distance each lies, by binary search in plain PyTorch."""

import torch
from torch import Tensor

from jfi.cpu.batches import Rows, Shapes
from jfi.utils.operands import MAX_BUCKETS

#: Padding a batch of samples up to this many pairs of query and key costs less than another batch.
PADDED_PAIRS = 2**13
#: Below this, differences of whole numbers are exact in float64.
MOST_EXACT = 2**52


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
    """Computes the operator in jfi/ops/_visibility.py; the same arguments and result."""
    device = query_offsets.device
    query_offsets, key_offsets = query_offsets.long(), key_offsets.long()
    query = torch.arange(rows, device=device)
    sample = torch.searchsorted(query_offsets, query, right=True) - 1
    count = key_offsets.diff()[sample]
    least = torch.ones((), dtype=torch.int64, device=device) << torch.arange(num_buckets - 1, device=device)
    if query_time is not None:
        older, aged = _search(query_offsets, key_offsets, query_time, key_time, least if by_time else least[:0])
    if is_causal:
        end = query - query_offsets[sample + 1] + 1 + count
        newest = end - 1
    else:
        end = newest = older
    end = torch.minimum(end.clamp(min=0), count)
    begin = torch.zeros_like(end) if max_visible is None else (end - max_visible).clamp(min=0)
    inner = aged if by_time and query_time is not None else newest[:, None] - least + 1
    inner = torch.minimum(inner.clamp(min=0), end[:, None])
    edges = torch.cat([end[:, None], inner], 1)
    # The bucket of the key before an edge: as many as there are inner edges not before that.
    descending = inner.neg().contiguous()
    buckets = torch.searchsorted(descending, edges.neg().contiguous(), right=True)
    edges = edges * MAX_BUCKETS + torch.where(edges > 0, buckets, 0)
    return torch.cat([edges, begin[:, None]], 1).int()


def _search(
    query_offsets: Tensor, key_offsets: Tensor, query_time: Tensor, key_time: Tensor, least: Tensor
) -> tuple[Tensor, Tensor]:
    """Counts the keys of its sample that are older than each query, [R], and that have at least each age, [R, n]."""
    is_exact = all(not x.is_floating_point() or _is_whole(x) for x in (query_time, key_time))
    if is_exact:
        query_time, key_time = query_time.long(), key_time.long()
    older = query_offsets.new_zeros(len(query_time), 1)
    aged = query_offsets.new_zeros(len(query_time), len(least))
    lengths = query_offsets.diff(), key_offsets.diff()
    for samples, longest, is_full in Shapes.of(*lengths).padded(PADDED_PAIRS):
        queries, keys = (
            Rows(offsets[samples], most, None if is_full else length[samples])
            for offsets, length, most in zip((query_offsets, key_offsets), lengths, longest, strict=True)
        )
        times, query_times, num_keys = key_time[keys.index], query_time[queries.index], lengths[1][samples]
        counts = torch.searchsorted(times, query_times)
        queries.put(older, torch.minimum(counts, num_keys[:, None])[..., None])
        if len(least):
            if is_exact:  # where an age may exceed 64 bits
                counts = torch.searchsorted(times, (query_times[..., None] - least).flatten(1), right=True)
                counts = counts.view(*query_times.shape, -1)
            else:
                counts = _bisect(times, query_times, least)
            queries.put(aged, torch.minimum(counts, num_keys[:, None, None]))
    return older[:, 0], aged


def _is_whole(times: Tensor) -> bool:
    return bool(((times == times.trunc()) & (times.abs() < MOST_EXACT)).all())


def _bisect(times: Tensor, query_times: Tensor, least: Tensor) -> Tensor:
    """[K, M], [K, L] and [n] -> [K, L, n]: how many times have at least each age, which is rounded."""
    low = torch.zeros(*query_times.shape, len(least), dtype=torch.int64)
    high = torch.full_like(low, times.shape[1])
    for _ in range(times.shape[1].bit_length()):
        middle = (low + high) // 2
        at = middle.clamp(max=times.shape[1] - 1)
        ages = query_times[..., None] - times.gather(1, at.flatten(1)).view_as(at)
        before = (ages >= least) & (middle < high)
        low, high = torch.where(before, middle + 1, low), torch.where(before, high, middle)
    return low
