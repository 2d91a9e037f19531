"""Jagged flash attention: queries with their own offsets against keys with theirs.

    O[i] = Σ_j softmax_j(scale · q_i k_j + bias_j) v_j        over the keys j of the sample that query i belongs to

With the same offsets twice it is self-attention over histories; with others, a different number of candidates in every
sample is ranked against its history (Xu et al., 'Enhancing Performance and Scalability of Large-Scale Recommendation
Systems with Jagged Flash Attention', RecSys 2024).
"""

from torch import Tensor

from jfi import reference
from jfi.ops._checks import check_dim, check_floating, check_history, check_impl, check_offsets, check_scale


def jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention of packed queries over the packed keys of the same sample.

    Only the PyTorch implementation exists so far: it holds every query-key pair in memory and reads their number once.

    Args:
        query: [R, H, D], floating.
        key: [S, G, D]; G divides H, and H/G query heads share a key head.
        value: [S, G, E], or None: value = key.
        query_offsets: [B+1], int32 or int64, from 0 to R.
        key_offsets: [B+1], from 0 to S.
        causal: hide keys behind the query, where the last query of a sample stands at its last key.
        window: (left, right), how many keys before and behind the query's place are seen; None for no bound.
        bias: [S, H], added to the scores; -inf hides an event.
        scale: of the scores; None means 1/sqrt(D).
        impl: "torch"; "auto" means the same.

    Returns:
        [R, H, E].  A query that sees no key gives zeros.

    Raises:
        ValueError, TypeError: an argument that does not fit, by name.

    Example:
        >>> import torch, jfi
        >>> x = torch.randn(5, 2, 8)
        >>> offsets = torch.tensor([0, 2, 2, 5])
        >>> jfi.ops.jagged_attention(x, x, x, offsets, offsets, causal=True).shape
        torch.Size([5, 2, 8])
    """
    check_floating(query=query, key=key, value=value, bias=bias)
    check_dim("query", query, "[R, H, D]")
    rows, heads, width = query.shape
    check_history(key, value, bias, heads, width)
    if window is not None and not (isinstance(window, tuple) and len(window) == 2):
        raise TypeError(f"window must be a pair (left, right) or None, got {window!r}")
    for side, bound in zip(("left", "right"), window or (None, None), strict=True):
        if bound is not None and bound < 0:
            raise ValueError(f"window must have a {side} of None or at least 0, got {bound}")
    check_offsets("query_offsets", query_offsets, rows, "query", query)
    check_offsets("key_offsets", key_offsets, key.shape[0], "key", query, query_offsets.shape[0] - 1)
    if check_impl(impl, query) == "triton" and impl == "triton":
        raise ValueError("impl must be 'auto' or 'torch' for jagged_attention, got 'triton': there is no kernel yet")
    scale = check_scale(scale, width)
    return reference.jagged_attention(query, key, value, query_offsets, key_offsets, causal, window, bias, scale)
