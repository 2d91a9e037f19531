"""Jagged flash attention: queries with their own offsets against keys with theirs.

    O[i] = Σ_j P[i,j] v_j        P[i,:] = softmax_j(scale · q_i k_j + bias_j)

over the keys j of the sample of query i, per head.  With the same offsets for both it is self-attention over histories;
with others, each sample has its own number of candidates to rank against its history (Xu et al., 'Enhancing Performance
and Scalability of Large-Scale Recommendation Systems with Jagged Flash Attention', RecSys 2024).  The forward saves the
log-sum-exp L; with Δ = Σ_e dO·O - dL, the backward recomputes the weights:

    dv = Σ_i P dO      dS = P (dO·v - Δ)      dk = scale Σ_i dS q      dq = scale Σ_j dS k      dbias = Σ_i dS

With times a query sees the keys that are strictly older than itself, so that all labelled rows of a user can share one
timeline; a bias by the pair's age or distance is that of Raffel et al., 'Exploring the Limits of Transfer Learning'
(2020), in powers of two as in Zhai et al., 'Actions Speak Louder than Words' (HSTU, 2024).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from jfi import reference
from jfi.kernels import plan
from jfi.ops._attention import Prepared, attention
from jfi.ops._visibility import visibility
from jfi.ops.checks import (
    FLOATING,
    check_dim,
    check_dtype,
    check_events,
    check_floating,
    check_history,
    check_impl,
    check_key_bias,
    check_offsets,
    check_scale,
    check_untrained,
)
from jfi.ops.digit_attention import check_digits
from jfi.ops.dispatch import public
from jfi.utils.context import without_autocast
from jfi.utils.operands import JaggedAttentionInputs, is_packed


def _forward(x: JaggedAttentionInputs, prepared: Prepared) -> tuple[Tensor, Tensor]:
    if prepared.plan is None:
        from jfi.cpu import jagged_attention

        with without_autocast("cpu"):
            return jagged_attention.forward(x)
    from jfi.kernels.jagged_attention import execute

    out, lse, prepared.schedule = execute.forward(x, prepared.plan)
    return out, lse


def _backward(*args: Any) -> tuple[Tensor | None, ...]:
    grad, dlse, x, out, lse, needed, prepared = args
    if prepared.plan is None:
        from jfi.cpu import jagged_attention

        with without_autocast("cpu"):
            return jagged_attention.backward(*args[:-1])
    from jfi.kernels.jagged_attention import execute

    schedule, prepared.schedule = prepared.schedule, None  # its counters are used up
    if schedule is not None and schedule.is_cuda and torch.cuda.is_current_stream_capturing():
        schedule = None  # a captured pass may be replayed several times, without its forward
    return execute.backward(grad, dlse, x, out, lse, needed, prepared.plan, schedule)


_WITH_GRADIENT = ("query", "key", "value", "bias", "table")
_PASSES = (lambda *x: plan.plan_jagged_attention(*x)), _forward, _backward
_jagged_attention_fwd = attention("jagged_attention", JaggedAttentionInputs, *_PASSES, _WITH_GRADIENT, True)


_BY_QUERY = ("query", "query_time")
_BY_EVENT = ("key", "value", "key_bias", "value_scale", "key_time")


@partial(public, packed={"query_offsets": _BY_QUERY, "key_offsets": _BY_EVENT}, result="query_offsets")
def jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    query_offsets: Tensor | None = None,
    key_offsets: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    max_visible: int | None = None,
    key_bias: Tensor | None = None,
    value_scale: Tensor | None = None,
    query_time: Tensor | None = None,
    key_time: Tensor | None = None,
    time_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed queries over the packed keys of the same sample.

    Args:
        query: [R, H, D], floating.
        key: [S, G, D]; G divides H, and H/G query heads share a key head. Or packed ternary digits, int32 [S, W] with W
            = ceil(D / 16), as `digit_attention` takes them: key and value of every head, without a gradient. Tiles of
            them are decoded in registers, and no [S, D] is made.
        value: [S, G, E]; None means value = key, which then gets both gradients; packed digits have no other.
        query_offsets: [B+1], int32 or int64, from 0 to R. None where an argument of R rows is a nested tensor.
        key_offsets: [B+1], from 0 to S. None where an argument of S rows is a nested tensor; else it means
            query_offsets: self-attention.
        causal: hide keys after the query.  The last query of a sample is at the position of its last key.
        window_size: (left, right), how many keys before and after its own position a query sees; None, not -1, for no
            bound.
        max_visible: a query sees at most this many of the newest keys that ``causal`` or the times leave it; None for
            all.
        key_bias: [S, H], added to the scores; -inf hides an event.
        value_scale: [S], floating: a factor of each event's value; it does not change the softmax. With packed digits
            it must not require a gradient, nor be float64 unless the query is.
        query_time: [R], int32, int64 or float64 in any unit, not decreasing within a sample.  With times and without
            ``causal``, a query sees the keys that are strictly older than itself, never those of its own time.  Ages
            count exactly below 2^53.
        key_time: [S], of the same dtype, not decreasing within a sample; given with query_time.
        time_bias: [N, H] with 1 <= N <= 64, added to a pair's score: row floor(log2(age)) + 1, at most N - 1, where age
            = query_time - key_time; row 0 for ages below 1.
        position_bias: [N, H], the same by a pair's distance: how many of the keys that the query sees are from this key
            on, the newest of them having 1; in causal attention the query's position minus the key's.  Needs
            ``causal`` or times.
        scale: factor of the scores; None means 1/sqrt(D).
        return_lse: also return the log-sum-exp of each query's scores, which is needed to combine the attention to
            parts of a history; it is differentiable like the output.
        impl: "triton" (rows of at most 512 float32 or 1,024 half-precision elements), "torch" (on a GPU the plain
            formula, which holds every query-key pair in memory and synchronizes once), or "auto": Triton for CUDA
            tensors except float64, PyTorch otherwise.

    Returns:
        [R, H, E]; with ``return_lse`` also [R, H], float32 (float64 for float64). Nested if an argument of R rows is.
        For a query that sees no key these are zeros and -inf.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi
        >>> x = torch.randn(5, 2, 8)
        >>> offsets = torch.tensor([0, 2, 2, 5])
        >>> jfi.ops.jagged_attention(x, x, x, query_offsets=offsets, causal=True).shape
        torch.Size([5, 2, 8])

        Two targets of one user, at times 20 and 90, attend to the user's timeline; the second sees all three events:

        >>> events, targets = torch.randn(3, 1, 8), torch.randn(2, 2, 8)
        >>> jfi.ops.jagged_attention(
        ...     targets, events, query_offsets=torch.tensor([0, 2]), key_offsets=torch.tensor([0, 3]),
        ...     query_time=torch.tensor([20, 90]), key_time=torch.tensor([10, 20, 80]), time_bias=torch.zeros(32, 2),
        ... ).shape
        torch.Size([2, 2, 8])
    """
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse must be True or False, got {return_lse!r}")
    events: dict[str, Any] = {"query_offsets": query_offsets, "key_offsets": key_offsets}
    events |= {"key_bias": key_bias, "value_scale": value_scale}
    seen: dict[str, Any] = {"causal": causal, "window_size": window_size, "max_visible": max_visible}
    seen |= {"query_time": query_time, "key_time": key_time, "time_bias": time_bias, "position_bias": position_bias}
    inputs, impl = prepare_jagged_attention(query, key, value, **events, **seen, scale=scale, impl=impl)
    if impl == "torch" and query.is_cuda:
        times = None if query_time is None or key_time is None else (query_time, key_time)
        options = (causal, window_size, key_bias, inputs.scale, times, max_visible, time_bias, position_bias)
        key, value = inputs.key, inputs.value
        if inputs.is_packed:
            key = reference.unpack_digits(key, query.shape[2])[:, None].to(query.dtype)
            value = None if value is None else _scaled(key, value)
        out, lse = reference.jagged_attention(query, key, value, inputs.query_offsets, inputs.key_offsets, *options)
    else:
        out, lse = _jagged_attention_fwd(*inputs, impl)
    return (out, lse) if return_lse else out


def prepare_jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    query_offsets: Tensor,
    key_offsets: Tensor | None,
    key_bias: Tensor | None,
    value_scale: Tensor | None = None,
    scale: float | None,
    impl: str,
    return_lse: bool = False,
    **seen: Any,
) -> tuple[JaggedAttentionInputs, str]:
    """Check the arguments; returns what the kernels take, contiguous, and "triton" or "torch".

    ``seen`` are the keyword arguments of `visibility`.
    """
    packed, biases = is_packed(key), (seen["time_bias"], seen["position_bias"])
    if packed and value is not None:
        raise ValueError("value must be None where key is packed digits, which are key and value")
    keys = {} if packed else {"key": key, "value": value}
    check_floating(query=query, **keys, key_bias=key_bias, time_bias=biases[0], position_bias=biases[1])
    check_dim("query", query, "[R, H, D]")
    rows, num_heads, width = query.shape
    if packed:
        check_digits("key", key, query, width)
        check_key_bias(key_bias, key.shape[0], num_heads)
    else:
        check_history(key, value, key_bias, num_heads, width)
    if value_scale is not None:
        check_events(key, None, None, value_scale, num_heads)
    if packed:
        check_untrained("value_scale", value_scale)
        if value_scale is not None and value_scale.dtype != query.dtype:
            check_dtype("value_scale", value_scale, FLOATING[:3])  # no kernel reads float64
        value = value_scale
    elif value_scale is not None:
        value = _scaled(key if value is None else value, value_scale)
    check_offsets("query_offsets", query_offsets, rows, "query", query)
    if key_offsets is None:
        key_offsets = query_offsets
    if key_offsets is not query_offsets or key.shape[0] != rows:
        check_offsets("key_offsets", key_offsets, key.shape[0], "key", query, query_offsets.shape[0] - 1)
    impl = check_impl(impl, query)
    scale = check_scale(scale, width)
    query, key, query_offsets, key_offsets = [x.contiguous() for x in (query, key, query_offsets, key_offsets)]
    value, key_bias = [None if x is None else x.contiguous() for x in (value, key_bias)]
    buckets, window = visibility(query, key, query_offsets, key_offsets, impl, **seen)
    tensors = (query, key, value, query_offsets, key_offsets, key_bias)
    return JaggedAttentionInputs(*tensors, *buckets, scale, *window), impl


def _scaled(rows: Tensor, value_scale: Tensor) -> Tensor:
    return rows * value_scale.to(rows.dtype)[:, None, None]
