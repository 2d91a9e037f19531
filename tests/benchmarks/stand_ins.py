"""What the tests of the benchmark put in place of a GPU and its results."""

import torch

from benchmarks.peers import attend

ENVIRONMENT = {
    "device": "made up for a test",
    "versions": {"torch": "0"},
    "date": "2026-01-01T00:00:00+00:00",
    "commit": "none",
    "threads": 2,
    "copy_bytes_per_second": 4e12,
}


def looped_varlen(
    query, key, value, query_offsets, offsets, most_queries, longest, window_size=(-1, -1), enable_gqa=False
):
    """What torch's varlen_attn computes, which needs a GPU."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    out = []
    for sample in range(offsets.shape[0] - 1):
        of_sample = [slice(*bounds[sample : sample + 2].tolist()) for bounds in (query_offsets, offsets, offsets)]
        parts = [x[rows] for x, rows in zip((query, key, value), of_sample, strict=True)]
        assert parts[0].shape[0] <= most_queries and parts[1].shape[0] <= longest
        out.append(attend(*parts, causal=window_size == (-1, 0)))
    return torch.cat(out)
