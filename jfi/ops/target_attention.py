"""Target attention: the queries of a sample over its jagged history, which is read once.

    O[b,t,h] = Σ_s P[b,t,h,s] v[s,g(h)]        P = softmax_s(scale q[b,t,h]·k[s,g(h)] + bias[s,h])        s in sample b

The query comes from the target item, keys and values from the user's events (Zhou et al., 'Deep Interest Network', KDD
2018; Xu et al., 'Jagged Flash Attention', RecSys 2024).  The forward saves the log-sum-exp L; with Δ = Σ_e dO·O, the
backward recomputes the weights in one more sweep:

    dv = Σ_t,h P dO      dS = P (dO·v - Δ)      dk = scale Σ_t,h dS q      dq = scale Σ_s dS k      dbias = Σ_t dS

If value = key, each direction reads the history once, and the backward writes its gradient, dk + dv, once.  Where a
sample's queries fill several tiles, jagged attention with T queries a sample may be faster: the plan says so.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from jfi import reference
from jfi.kernels import plan
from jfi.kernels.plan import AttentionPlan
from jfi.ops._attention import Prepared, attention
from jfi.ops.checks import (
    check_count,
    check_dim,
    check_events,
    check_floating,
    check_history,
    check_impl,
    check_offsets,
    check_scale,
)
from jfi.ops.dispatch import operators, public
from jfi.tables.gather_rows import read_rows
from jfi.tables.rows_by_id import RowsById, fits_kernel, rows_by_id
from jfi.utils.context import may_read, without_autocast
from jfi.utils.operands import TargetAttentionInputs


def run_forward(x: TargetAttentionInputs, chosen: AttentionPlan | None) -> tuple[Tensor, Tensor]:
    """Returns the output and the log-sum-exp; autocast must be off. Without a plan a CPU computes them."""
    if chosen is None:
        from jfi.cpu import target_attention

        return target_attention.forward(x)
    from jfi.kernels.target_attention import execute

    if chosen.family == "jagged_sm90":
        out, lse = operators.jagged_attention_fwd(*execute.as_jagged(x), "triton")
        return out.unflatten(0, x.query.shape[:2]), lse.unflatten(0, x.query.shape[:2])
    return execute.forward(x, chosen)


def _forward(x: TargetAttentionInputs, prepared: Prepared) -> tuple[Tensor, Tensor]:
    with without_autocast("cpu"):
        return run_forward(x, prepared.plan)


def _backward(*args: Any) -> tuple[Tensor | None, ...]:
    grad, _, x, out, lse, needed, prepared = args
    if prepared.plan is None:
        from jfi.cpu import target_attention

        with without_autocast("cpu"):
            return target_attention.backward(grad, x, out, lse, needed)
    from jfi.kernels.target_attention import execute

    if prepared.plan.family == "jagged_sm90":
        grad, out, lse = (y.flatten(0, 1) for y in (grad, out, lse))
        needed = [*needed[:4], False]  # no table of biases
        grads = iter(operators.jagged_attention_bwd(grad, None, *execute.as_jagged(x), out, lse, needed, "triton"))
        dquery, *others = [next(grads) if need else None for need in needed]
        return None if dquery is None else dquery.view_as(x.query), *others
    return execute.backward(grad, x, out, lse, needed, prepared.plan)


_WITH_GRADIENT = ("query", "key", "value", "bias", "second")
_PASSES = (lambda *x: plan.plan_target_attention(*x)), _forward, _backward
target_attention_fwd = attention("target_attention", TargetAttentionInputs, *_PASSES, _WITH_GRADIENT)


@partial(public, packed={"offsets": ("key", "value", "indices", "key_bias", "key_bias_index", "value_scale")})
def target_attention(
    query: Tensor,
    key: Tensor | tuple[Tensor, ...] | RowsById,
    value: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    indices: Tensor | tuple[Tensor, ...] | None = None,
    key_bias: Tensor | None = None,
    key_bias_index: Tensor | None = None,
    value_scale: Tensor | None = None,
    scale: float | None = None,
    max_seqlen: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention of each sample's queries over its own history.

    Args:
        query: [B, T, H, D], floating.
        key: [S, G, D]; G divides H, and H/G query heads share a key head.
        value: [S, G, E]; None means value = key, which is read once and gets one gradient.
        offsets: [B+1], int32 or int64, from 0 to S: sample b owns rows offsets[b] to offsets[b+1]. None where an
            argument of S rows is a nested tensor.
        indices: [S], int32 or int64: key is then a table [N, G, D], and event s is its row indices[s]. With a tuple of
            tables and one of as many indices an event is the sum of its rows. Tables may have another floating dtype
            than the query, to which their rows are converted. Where few queries share a key head, the Triton kernels
            read the rows themselves and [S, G, D] is never made. A table that requires a gradient gets a dense one,
            summed in a fixed order. An index outside the table is an error on the CPU; on a GPU it is a row of zeros
            without a gradient, and an error in ``with jfi.ops.validation():``.
        key_bias: [S, H], added to the scores; -inf hides an event.  With key_bias_index a table [N, H] of any floating
            dtype.
        key_bias_index: [S], int32 or int64: the row of the table for each event.  The Triton kernels read the table
            through it and sum the table's gradient in a fixed order.  An index outside the table is an error on the
            CPU; on a GPU it is a bias of 0 without a gradient, and an error in ``with jfi.ops.validation():``.
        value_scale: [S], floating: a factor of each event's value; it does not change the softmax.
        scale: factor of the scores; None means 1/sqrt(D).
        max_seqlen: the length of the longest history, if the host knows it.  It is a hint: up to some 500 rows one
            program handles one sample, and no combine step is needed.  A wrong value changes nothing but rounding.
        impl: "triton" (rows of at most 512 float32 or 1,024 half-precision elements), "torch" (on a GPU the plain
            formula, with [S, T, H, D] intermediates), or "auto": Triton for CUDA tensors except float64, PyTorch
            otherwise.

    Returns:
        [B, T, H, E].  An empty or fully hidden history gives zeros.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi
        >>> query, history = torch.randn(3, 1, 4, 32), torch.randn(5, 1, 32)
        >>> jfi.ops.target_attention(query, history, offsets=torch.tensor([0, 2, 2, 5])).shape
        torch.Size([3, 1, 4, 32])

        The same with rows of a table by id:

        >>> table, ids = torch.randn(100, 1, 32), torch.tensor([7, 99, 3, 7, 0])
        >>> jfi.ops.target_attention(query, table, indices=ids, offsets=torch.tensor([0, 2, 2, 5])).shape
        torch.Size([3, 1, 4, 32])
    """
    by_event = (offsets, indices, key_bias, key_bias_index, value_scale)
    inputs, impl = prepare_target_attention(query, key, value, *by_event, scale, max_seqlen, impl)
    if impl == "torch" and query.is_cuda:
        query, key, value, offsets, key_bias, *_, scale, _ = inputs
        return reference.target_attention(query, key, value, offsets, key_bias, scale)
    return target_attention_fwd(*inputs, impl)[0]


def prepare_target_attention(
    query: Tensor,
    key: Tensor | tuple[Tensor, ...] | RowsById,
    value: Tensor | None,
    offsets: Tensor | None,
    indices: Tensor | tuple[Tensor, ...] | None,
    key_bias: Tensor | None,
    key_bias_index: Tensor | None,
    value_scale: Tensor | None,
    scale: float | None,
    max_seqlen: int | None,
    impl: str,
) -> tuple[TargetAttentionInputs, str]:
    """Check the arguments; returns what the kernels take, contiguous, and "triton" or "torch"."""
    by_id = None
    if indices is not None:
        check_floating(query=query)
        check_dim("query", query, "[B, T, H, D]")
        key = rows_by_id(key, indices, query.dtype, query.shape[3])
    elif isinstance(key, tuple) and not isinstance(key, RowsById):
        raise TypeError("key must be a Tensor where indices is None, got a tuple")
    if isinstance(key, RowsById):
        by_id, key, width = key, key.rows, query.shape[-1]
        key = key.unflatten(1, (-1, width)) if key.shape[1] % width == 0 else key  # which the checks refuse
    check_floating(query=query, key=key, value=value, key_bias=key_bias if key_bias_index is None else None)
    check_dim("query", query, "[B, T, H, D]")
    batch, _, num_heads, width = query.shape
    check_history(key, value, key_bias if key_bias_index is None else None, num_heads, width)
    if key_bias_index is not None or value_scale is not None:
        check_events(key, key_bias, key_bias_index, value_scale, num_heads)
    offsets = check_offsets("offsets", offsets, key.shape[0], "key", query, batch)
    impl = check_impl(impl, query)
    scale = check_scale(scale, width)
    check_count("max_seqlen", max_seqlen)
    in_kernel = impl == "triton" and query.shape[1] * num_heads // key.shape[1] <= plan.SINGLE_TILE_ROWS
    if key_bias is not None and key_bias_index is not None and not in_kernel:
        key_bias, key_bias_index = table_bias(key_bias, key_bias_index, query.dtype), None
    if by_id is not None and not (in_kernel and fits_kernel(by_id)):
        key, by_id = read_rows(by_id).view(key.shape), None
    learned = value_scale is not None and value_scale.requires_grad and torch.is_grad_enabled()
    if value_scale is not None and (learned or not in_kernel):
        if by_id is not None and value is None:
            value = read_rows(by_id).view(key.shape)
        value, value_scale = (key if value is None else value) * value_scale[:, None, None].to(key.dtype), None
    tables, indices = ([], []) if by_id is None else (list(by_id.tables), list(by_id.indices))
    if by_id is None:  # rows by id have no memory to be contiguous in
        key = key.contiguous()
    optional = (value, key_bias, key_bias_index, value_scale)
    value, key_bias, key_bias_index, value_scale = [None if x is None else x.contiguous() for x in optional]
    tensors = (query.contiguous(), key, value, offsets.contiguous(), key_bias, key_bias_index, value_scale)
    return TargetAttentionInputs(*tensors, None, tables, indices, scale, max_seqlen), impl


def table_bias(table: Tensor, index: Tensor, dtype: torch.dtype, is_read: bool | None = None) -> Tensor:
    """Returns the bias [S, H] of each event, a row of a table [R, H]; zeros without a gradient where it is outside."""
    if is_read or (is_read is None and may_read(index)):  # and has been checked
        return torch.nn.functional.embedding(index, table).to(dtype)
    index = reference.bound_ids(index, table.shape[0])
    rows = torch.nn.functional.embedding(index.clamp(min=0), table)
    return rows.masked_fill((index < 0).unsqueeze(1), 0).to(dtype)
