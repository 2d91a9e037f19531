"""Which keys a query sees, and where each bucket of ages or distances begins among them.

Both follow from times that do not decrease within a sample, so they are intervals of the sample's keys: the kernels of
jagged attention read positions and never see a time.
"""

import torch
from torch import Tensor

from jfi.ops._dispatch import operator


def _bucket_edges(
    query_offsets: Tensor,
    key_offsets: Tensor,
    query_time: Tensor | None,
    key_time: Tensor | None,
    rows: int,
    is_causal: bool,
    max_visible: int | None,
    num_buckets: int,
    by_time: bool,
    impl: str,
) -> Tensor:
    arguments = (query_offsets, key_offsets, query_time, key_time, rows, is_causal, max_visible, num_buckets, by_time)
    if impl == "torch":
        from jfi.cpu import bucket_edges
    else:
        from jfi.kernels.jagged_attention import bucket_edges
    return bucket_edges.bucket_edges(*arguments)


def _fake(query_offsets, key_offsets, query_time, key_time, rows, is_causal, max_visible, num_buckets, by_time, impl):
    return query_offsets.new_empty(rows, num_buckets + 1, dtype=torch.int32)


#: [R, num_buckets + 1] int32, of N = num_buckets buckets.  A causal query sees the keys up to its own position, whose
#: distance is 0; another one sees the keys strictly older than it, of which the newest has distance 1; either sees at
#: most the ``max_visible`` newest of these.  Bucket 0 has the keys whose age (by_time) or distance is below 1, bucket b
#: those from 2^(b-1) to below 2^b, the last bucket all others.
#:
#: Query r sees the keys edges[r, N] to edges[r, 0] // 64 - 1 of its sample.  For 0 < b < N, the keys before
#: edges[r, b] // 64 are in bucket b or a later one.  edges[r, b] % 64 is the bucket of the key before that edge, 0 if
#: there is none.
bucket_edges = operator("bucket_edges", _bucket_edges, _fake)
