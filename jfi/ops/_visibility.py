"""Which keys a query sees, and where each bucket of ages or distances begins among them.

Both follow from times that do not decrease within a sample, so they are intervals of the sample's keys: the kernels of
jagged attention read positions and never see a time.
"""

import torch
from torch import Tensor

from jfi.ops.checks import check_count, check_dim, check_times
from jfi.ops.dispatch import is_exported, operator
from jfi.utils.context import is_traced, may_read
from jfi.utils.operands import MAX_BUCKETS

#: Keys of a sample whose positions fit 32 bits together with a bucket.
MAX_KEYS = 2**31 // MAX_BUCKETS - 1


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
        from jfi.kernels.jagged_attention import buckets as bucket_edges
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


def visibility(
    query: Tensor,
    key: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    impl: str,
    *,
    causal: bool,
    window_size: tuple[int | None, int | None] | None,
    max_visible: int | None,
    query_time: Tensor | None,
    key_time: Tensor | None,
    time_bias: Tensor | None,
    position_bias: Tensor | None,
) -> tuple[tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None], tuple[int | None, int | None, bool]]:
    """Returns (edges, table, query_time, key_time) and (left, right, is_causal) of `JaggedAttentionInputs`."""
    options = (window_size, max_visible, query_time, key_time, time_bias, position_bias)
    if isinstance(causal, bool) and all([x is None for x in options]):
        return (None,) * 4, (None, 0 if causal else None, False)
    left, right = _window(causal, window_size)
    rows = query.shape[0]
    has_times = query_time is not None or key_time is not None
    if has_times:
        check_times(query_time, key_time, query_offsets, key_offsets, rows, key)
        query_time, key_time = query_time.contiguous(), key_time.contiguous()
    _check_visible(causal, window_size, max_visible, has_times)
    table = _relative_bias(causal, has_times, time_bias, position_bias, query.shape[1])
    times = (None, None) if time_bias is None else (query_time, key_time)
    # The plain formula on a GPU needs no edges.
    if not (has_times or table is not None) or (impl == "torch" and query.is_cuda):
        if max_visible is not None:
            left, right = max_visible - 1, 0
        return (None, table, *times), (left, right, False)
    if isinstance(key.shape[0], int) and key.shape[0] > MAX_KEYS:
        _check_longest(key_offsets)
    if max_visible is None and left is not None:
        max_visible = left + 1
    num_buckets = 1 if table is None else table.shape[0]
    arguments = (query_offsets, key_offsets, query_time, key_time, rows, causal, max_visible, num_buckets)
    arguments += (position_bias is None,)
    if not has_times and is_exported(query, impl):
        from jfi.cpu import bucket_edges as plain  # without times a few operations of PyTorch

        edges = plain.bucket_edges(*arguments)
    else:
        edges = bucket_edges(*arguments, impl)
    return (edges.contiguous(), table, *times), (None, None, causal)


def _check_longest(key_offsets: Tensor) -> None:
    """Raises for a sample of too many keys; on a GPU whose offsets may not be read, the device does so later."""
    longest = key_offsets.diff().max()
    must = f"key must have at most {MAX_KEYS} rows a sample with times or a bias by bucket"
    if may_read(key_offsets):
        if longest > MAX_KEYS:
            raise ValueError(f"{must}, got {int(longest)}")
    elif not (key_offsets.is_meta or is_traced()):
        torch._assert_async(longest <= MAX_KEYS, must)


def _window(causal: bool, window_size: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    if window_size is not None and not (isinstance(window_size, tuple) and len(window_size) == 2):
        raise TypeError(f"window_size must be a pair (left, right) or None, got {window_size!r}")
    left, right = window_size or (None, None)
    for side, bound in (("left", left), ("right", right)):
        check_count(f"{side} of window_size (None: no bound)", bound)
    return left, 0 if causal else right


def _check_visible(
    causal: bool, window_size: tuple[int | None, int | None] | None, max_visible: int | None, has_times: bool
) -> None:
    if max_visible is not None:
        check_count("max_visible", max_visible, least=1)
        if window_size is not None:
            raise ValueError("max_visible and window_size must not both be given")
        if not (causal or has_times):
            raise ValueError("max_visible needs causal=True or times, which say what lies before a query")
    if has_times and not causal and window_size is not None:
        raise ValueError("window_size counts positions: with times give max_visible")


def _relative_bias(
    causal: bool, has_times: bool, time_bias: Tensor | None, position_bias: Tensor | None, num_heads: int
) -> Tensor | None:
    if time_bias is not None and position_bias is not None:
        raise ValueError("time_bias and position_bias must not both be given")
    if time_bias is not None and not has_times:
        raise ValueError("time_bias needs query_time and key_time, got None")
    if position_bias is not None and not (causal or has_times):
        raise ValueError("position_bias needs causal=True or times, which say what lies before a query")
    for name, table in (("time_bias", time_bias), ("position_bias", position_bias)):
        if table is not None:
            check_dim(name, table, "[N, H]", H=num_heads)
            if not 1 <= table.shape[0] <= MAX_BUCKETS:
                raise ValueError(f"{name} must have 1 to {MAX_BUCKETS} rows, got {table.shape[0]}")
            return table.contiguous()
    return None
