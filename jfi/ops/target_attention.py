"""Target attention: the queries of a sample over its jagged history, which is read once.

    O[b,t,h] = Σ_s P[b,t,h,s] v[s,g(h)]        P = softmax_s(scale q[b,t,h]·k[s,g(h)] + bias[s,h])        s in sample b

The query comes from the target item, keys and values from the user's events (Zhou et al., 'Deep Interest Network', KDD
2018; Xu et al., 'Jagged Flash Attention', RecSys 2024).  The forward saves the log-sum-exp L; with Δ = Σ_e dO·O, the
backward recomputes the weights in one more sweep:

    dv = Σ_t,h P dO      dS = P (dO·v - Δ)      dk = scale Σ_t,h dS q      dq = scale Σ_s dS k      dbias = Σ_t dS

If value = key, each direction reads the history once, and the backward writes its gradient, dk + dv, once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from jfi import reference
from jfi.kernels import plan
from jfi.kernels.plan import fits_single_tile
from jfi.ops._checks import (
    check_count,
    check_dim,
    check_events,
    check_floating,
    check_history,
    check_impl,
    check_offsets,
    check_scale,
    may_read,
)
from jfi.ops._dispatch import aligned, operator, public
from jfi.ops.explain import explains
from jfi.ops.gather_rows import read_rows
from jfi.ops.rows_by_id import RowsById, fits_kernel, rows_by_head, rows_by_id
from jfi.utils.operands import TargetAttentionInputs


def _on_cpu(function: Callable, *args):
    """Call a function with autocast disabled.  Disabling takes 3 µs, so it happens only where autocast is on."""
    if not torch.is_autocast_enabled("cpu"):
        return function(*args)
    with torch.autocast("cpu", enabled=False):
        return function(*args)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    buckets: Tensor | None,
    value_scale: Tensor | None,
    second: Tensor | None,
    tables: list[Tensor],
    indices: list[Tensor],
    scale: float,
    max_seqlen: int | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    if impl == "triton":
        from jfi.kernels.target_attention import execute

        inputs = (query, key, value, offsets, bias, buckets, value_scale, second, tables, indices, scale, max_seqlen)
        return execute.forward(TargetAttentionInputs(*inputs))
    if key.dtype == torch.int32:  # packed digits
        from jfi.cpu import digit_attention

        return _on_cpu(digit_attention.forward, query, key, offsets, bias, value_scale, tables, indices, scale)
    from jfi.cpu import target_attention

    return _on_cpu(target_attention.forward, query, key, value, offsets, bias, scale)


def _forward_fake(query, key, value, *_):
    stats = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty(*query.shape[:3], query.shape[3] if value is None else value.shape[2])
    return out, query.new_empty(query.shape[:3], dtype=stats)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    buckets: Tensor | None,
    value_scale: Tensor | None,
    second: Tensor | None,
    by_id: list[Tensor],
    saved: list[Tensor],
    needed: list[bool],
    scale: float,
    max_seqlen: int | None,
    impl: str,
) -> list[Tensor]:
    """Returns the gradients of query, key, value, bias and second that are needed, in this order.

    ``by_id`` are the tables and then their indices; ``saved`` is (output, log-sum-exp).
    """
    (out, lse), tables, indices = saved, by_id[: len(by_id) // 2], by_id[len(by_id) // 2 :]
    if impl == "triton":
        from jfi.kernels.target_attention import execute

        inputs = (query, key, value, offsets, bias, buckets, value_scale, second, tables, indices, scale, max_seqlen)
        grads = execute.backward(aligned(grad), TargetAttentionInputs(*inputs), out, lse, needed)
    elif key.dtype == torch.int32:  # packed digits
        from jfi.cpu import digit_attention

        inputs = (grad.contiguous(), query, key, offsets, bias, value_scale, tables, indices, scale)
        grads = _on_cpu(digit_attention.backward, *inputs, out, lse, needed)
    else:
        from jfi.cpu import target_attention

        inputs = (grad.contiguous(), query, key, value, offsets, bias, out, lse, scale, needed[:4])
        grads = _on_cpu(target_attention.backward, *inputs)
    return [x for x, need in zip(grads, needed, strict=False) if need]


def _backward_fake(grad, query, key, value, offsets, bias, buckets, value_scale, second, *rest):
    needed = zip((query, key, value, bias, second), rest[2], strict=True)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, need in needed if need]


def _save(ctx, inputs, output) -> None:
    *tensors, tables, indices, scale, max_seqlen, impl = inputs
    ctx.rest, ctx.num_tables = (scale, max_seqlen, impl), len(tables)
    # The tables too: autograd refuses a backward pass that would read rows which were stepped since.
    ctx.save_for_backward(*tensors, *output, *tables, *indices)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, _):
    no_lists = [None] * ctx.num_tables
    if grad is None:
        return *(None,) * 8, no_lists, no_lists, None, None, None
    query, key, value, offsets, bias, buckets, value_scale, second, out, lse, *by_id = ctx.saved_tensors
    tensors = (query, key, value, offsets, bias, buckets, value_scale, second)
    needed = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4, 7)]
    grads = iter(_target_attention_bwd(grad, *tensors, by_id, [out, lse], needed, *ctx.rest))
    dquery, dkey, dvalue, dbias, dsecond = [next(grads) if need else None for need in needed]
    return dquery, dkey, dvalue, None, dbias, None, None, dsecond, no_lists, no_lists, None, None, None


_target_attention_bwd = operator("target_attention_bwd", _backward, _backward_fake)
target_attention_fwd = operator("target_attention_fwd", _forward, _forward_fake, _save, _differentiate)


@public
def target_attention(
    query: Tensor,
    key: Tensor | tuple[Tensor, ...] | RowsById,
    value: Tensor | None = None,
    *,
    offsets: Tensor,
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
        offsets: [B+1], int32 or int64, from 0 to S: sample b owns rows offsets[b] to offsets[b+1].
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
    inputs, impl = prepare_target_attention(
        query,
        key,
        value,
        offsets=offsets,
        indices=indices,
        key_bias=key_bias,
        key_bias_index=key_bias_index,
        value_scale=value_scale,
        scale=scale,
        max_seqlen=max_seqlen,
        impl=impl,
    )
    if impl == "torch" and query.is_cuda:
        query, key, value, offsets, key_bias, *_, scale, _ = inputs
        return reference.target_attention(query, key, value, offsets, key_bias, scale)
    return target_attention_fwd(*inputs, impl)[0]


def prepare_target_attention(
    query: Tensor,
    key: Tensor | tuple[Tensor, ...] | RowsById,
    value: Tensor | None,
    *,
    offsets: Tensor,
    indices: Tensor | tuple[Tensor, ...] | None = None,
    key_bias: Tensor | None,
    key_bias_index: Tensor | None,
    value_scale: Tensor | None,
    scale: float | None,
    max_seqlen: int | None,
    impl: str,
) -> tuple[TargetAttentionInputs, str]:
    """Check the arguments; returns what the kernels take, contiguous, and "triton" or "torch"."""
    by_id = key if isinstance(key, RowsById) else None
    if indices is not None:
        check_floating(query=query)
        check_dim("query", query, "[B, T, H, D]")
        by_id = rows_by_id(key, indices, query.dtype, width=query.shape[3])
    elif by_id is None and isinstance(key, tuple):
        raise TypeError("key must be a Tensor where indices is None, got a tuple")
    if by_id is not None:
        key = rows_by_head(by_id.rows, query.shape[-1])
    check_floating(query=query, key=key, value=value, key_bias=key_bias if key_bias_index is None else None)
    check_dim("query", query, "[B, T, H, D]")
    batch, _, num_heads, width = query.shape
    check_history(key, value, key_bias if key_bias_index is None else None, num_heads, width)
    if key_bias_index is not None or value_scale is not None:
        check_events(key, key_bias, key_bias_index, value_scale, num_heads)
    check_offsets("offsets", offsets, key.shape[0], "key", query, batch)
    impl = check_impl(impl, query)
    scale = check_scale(scale, width)
    check_count("max_seqlen", max_seqlen)
    in_kernel = impl == "triton" and fits_single_tile(query.shape[1] * num_heads // key.shape[1])
    if key_bias_index is not None and not in_kernel:
        key_bias, key_bias_index = table_bias(key_bias, key_bias_index).to(query.dtype), None
    if by_id is not None and not (in_kernel and fits_kernel(by_id)):
        key, by_id = read_rows(by_id).view(key.shape), None
    learned = value_scale is not None and value_scale.requires_grad and torch.is_grad_enabled()
    if value_scale is not None and (learned or not in_kernel):
        if by_id is not None and value is None:
            value = read_rows(by_id).view(key.shape)
        value, value_scale = (key if value is None else value) * value_scale[:, None, None].to(key.dtype), None
    tensors = (query, key, value, offsets, key_bias, key_bias_index, value_scale)
    # Rows by id have no memory to be contiguous in.
    tensors = [x if x is None or (by_id is not None and x is key) else x.contiguous() for x in tensors]
    tables, indices = ([], []) if by_id is None else (list(by_id.tables), list(by_id.indices))
    return TargetAttentionInputs(*tensors, None, tables, indices, scale, max_seqlen), impl


def table_bias(table: Tensor, index: Tensor) -> Tensor:
    """Returns the bias [S, H] of each event, a row of a table [R, H]; zeros without a gradient where it is outside."""
    if may_read(index):  # and has been checked
        return torch.nn.functional.embedding(index, table)
    index = reference.bound_ids(index, table.shape[0])
    rows = torch.nn.functional.embedding(index.clamp(min=0), table)
    return rows.masked_fill((index < 0).unsqueeze(1), 0)


explains(target_attention, prepare_target_attention, plan.plan_target_attention)
