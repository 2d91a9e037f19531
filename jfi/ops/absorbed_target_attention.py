"""Target attention with absorbed projections: multi-head attention over a history that is never projected.

For each of F features, with the target e of a sample and its events x, h a head of width d = D / H and t one of T
queries:

    q_th = W_q,th e + b_q,th
    p_th = softmax over the sample's events of (scale q_th · W_k,h x + bias_h)
    o    = W_o concat_{t,h}(Σ_x p_th c W_v,h x) + b_o              c the event's value scale, if any

W_k and W_v can be applied on either side, since q · W_k x = W_kᵀ q · x, and a sum commutes with W_v.  Absorbed into the
targets' projections (`absorb`), they leave the S rows of the history unprojected, and one call of target attention with
value = key reads them once:

    q'_th = W_qk,th e + b_qk,th        a_th = Σ_x p_th c x        o = W_voᵀ a + b_o

    W_qk = W_kᵀ W_q [D_x, D_e]         b_qk = W_kᵀ b_q [D_x]       W_vo = W_vᵀ W_oᵀ [D_x, D]

The products of the weights, of each feature, query and head, take some D^3 operations, whatever the batch size.

Eager calls on plain tensors are one node of autograd's graph with its gradients written out: with short histories the
host's time dominates, and autograd's bookkeeping for a dozen small products and views would be most of it.  A compiler
or a tracer sees the composition of operators instead.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jfi.kernels import plan
from jfi.ops._attention import Prepared
from jfi.ops.dispatch import PLAIN, operators, refusal
from jfi.ops.target_attention import run_forward, table_bias, target_attention
from jfi.tables.gather_rows import read_rows
from jfi.tables.rows_by_id import RowsById, SavedTables, fits_kernel
from jfi.utils import compat
from jfi.utils.context import default_impl, is_traced, may_read, once_differentiable, without_autocast
from jfi.utils.operands import TargetAttentionInputs


def attend_absorbed(
    target: Tensor,
    history: tuple[Tensor, ...] | RowsById,
    weights: tuple[Tensor, ...],
    offsets: Tensor,
    num_heads: int,
    key_bias: Tensor | None,
    key_bias_index: Tensor | None,
    value_scale: Tensor | None,
    scale: float,
    max_seqlen: int | None,
    impl: str = "auto",
) -> Tensor:
    """Attends from each sample's target to its history, which is read once and never projected.

    Nothing is checked: the caller has checked its batch.

    Args:
        target: [F, B, D_e], the targets of F features; or [B, D_e], with weights that have no F, of one.
        history: tensors [S, .] that are D_x wide together, the events of feature 0, then of feature 1, ...; or table
            rows by id.  The Triton kernels for few query rows read two tensors of one width, a power of two from 16
            on, without concatenating them.
        weights: query_weight [F, T · D, D_e], query_bias [F, T · D], key_weight and value_weight [F, D, D_x],
            output_weight [F, D, T · D] and output_bias [F, D], of one dtype, laid out as in
            ``torch.nn.MultiheadAttention``.
        num_heads: H, which divides D.
        offsets, key_bias, key_bias_index, value_scale, scale, max_seqlen, impl: as in `target_attention`, with F · B
            samples.

    Returns:
        [F, B, D], or [B, D], in the dtype of the weights, or autocast's.  The attention itself runs in the dtype of the
        history, which is never cast.  An empty history gives output_bias.
    """
    by_id = history if isinstance(history, RowsById) else None
    fields = (history.rows,) if isinstance(history, RowsById) else history
    impl = default_impl(fields[0]) if impl == "auto" else impl
    num_queries = weights[0].shape[-2] // weights[2].shape[-2]
    # Whether the attention's kernels read a bias by its index and a value scale.
    in_kernel, is_read = impl == "triton" and num_queries * num_heads <= plan.SINGLE_TILE_ROWS, False
    if key_bias is not None and key_bias_index is not None and not in_kernel:
        is_read = may_read(key_bias_index)
        key_bias, key_bias_index = table_bias(key_bias, key_bias_index, fields[0].dtype, is_read), None
    if by_id is not None and not (in_kernel and fits_kernel(by_id)):
        fields, by_id = (read_rows(by_id),), None
    first = fields[0]
    tensors = (target, *fields, key_bias, *weights)
    # A tracer lets nobody read.
    if (is_read or not is_traced()) and _fits_one_node(tensors, value_scale, impl, in_kernel):
        if compat.functorch_transforms_active():
            raise refusal("jfi.ops.target_attention")
        if not (len(fields) == 1 or (in_kernel and _are_halves(fields))):
            fields = (torch.cat(fields, dim=1),)
        # Rows by id have no memory to be contiguous in.
        first = fields[0].contiguous() if by_id is None else fields[0]
        second = fields[1] if len(fields) == 2 else None
        others = (second, offsets, key_bias, key_bias_index, value_scale)
        others = [None if x is None else x.contiguous() for x in others]
        tables, indices = ([], []) if by_id is None else (list(by_id.tables), list(by_id.indices))
        settings = (num_heads, scale, max_seqlen, impl, _product_dtype(first, weights[0]), tables, indices)
        with without_autocast(first.device.type):  # the node chooses every dtype itself
            return _AbsorbedTargetAttention.apply(target, first, *others, *weights, settings)
    if target.dim() == 2:
        stacked = [x.unsqueeze(0) for x in (target, *weights)]
        options = (key_bias, key_bias_index, value_scale, scale, max_seqlen, impl)
        return attend_absorbed(stacked[0], history, tuple(stacked[1:]), offsets, num_heads, *options).squeeze(0)
    history = first if len(fields) == 1 else torch.cat(fields, dim=1)
    events = {"offsets": offsets, "key_bias": key_bias, "key_bias_index": key_bias_index, "value_scale": value_scale}
    key = history.unsqueeze(1) if by_id is None else by_id
    attention = partial(target_attention, key=key, **events, scale=scale, max_seqlen=max_seqlen, impl=impl)
    return compose(target, weights, num_heads, history, attention)


def compose(
    target: Tensor,
    weights: tuple[Tensor, ...],
    num_heads: int,
    history: Tensor,
    attention: Callable[[Tensor], Tensor],
) -> Tensor:
    """Projects the targets and what an attention returns, as `attend_absorbed` does, by operators of PyTorch.

    The attention is that of queries [F · B, T, H, D_x], in the dtype of the history, to raw events, and returns outputs
    of this shape.
    """
    dtype = _product_dtype(history, weights[0])
    with without_autocast(history.device.type):
        w_qk, b_qk, w_vo = absorb(weights[:5], num_heads, dtype)
        num_queries, width = weights[0].shape[1] // weights[2].shape[1], weights[2].shape[2]
        query = affine(b_qk, target, w_qk).to(history.dtype).view(-1, num_queries, num_heads, width)
        return affine(weights[5], attention(query).reshape(target.shape[0], -1, w_vo.shape[1]), w_vo.mT)


def _product_dtype(history: Tensor, weight: Tensor) -> torch.dtype:
    """Returns the dtype of the projections: that of the weights, or autocast's."""
    device = history.device.type
    autocast = not history.is_meta and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else weight.dtype


def _fits_one_node(tensors: tuple[Tensor | None, ...], value_scale: Tensor | None, impl: str, in_kernel: bool) -> bool:
    """Returns whether the one node takes these tensors, no subclasses or meta ones, and the value scale."""
    for x in tensors:
        if x is None:
            continue
        if type(x) not in PLAIN or x.is_meta or (x.dtype == torch.float64 if impl == "triton" else x.is_cuda):
            return False
    # Kernels alone read the value scale, and the node has no gradient of it.
    return value_scale is None or (in_kernel and not (value_scale.requires_grad and torch.is_grad_enabled()))


def _are_halves(fields: tuple[Tensor, ...]) -> bool:
    """Returns whether kernels that take a bias by its index can read two fields as the halves of a row."""
    width = fields[0].shape[1]
    return (
        len(fields) == 2
        and width >= 16
        and width & (width - 1) == 0
        and fields[1].shape[1] == width
        and all(field.is_contiguous() and field.data_ptr() % 16 == 0 for field in fields)
    )


class _AbsorbedTargetAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, target, history, second, offsets, bias, index, value_scale, *weights_and_options):
        *weights, output_bias, options = weights_and_options
        num_heads, scale, max_seqlen, impl, dtype, *by_id = options
        w_qk, b_qk, w_vo = absorb(weights, num_heads, dtype, impl)
        query = affine(b_qk, target, w_qk)
        if query.dtype != history.dtype:
            query = query.to(history.dtype)
        query = query.view(-1, weights[0].shape[-2] // weights[2].shape[-2], num_heads, weights[2].shape[-1])
        events = (offsets, bias, index, value_scale, second)
        x = TargetAttentionInputs(query, history.unsqueeze(1), None, *events, *by_id, scale, max_seqlen)
        ctx.plan = plan.plan_target_attention(x, impl) if impl == "triton" else None
        if compat.profiler_enabled():  # a profile shows the operator's name; nothing else can be at work here
            attended, lse = operators.target_attention_fwd(*x, impl)
        else:
            attended, lse = run_forward(x, ctx.plan)
        ctx.options, ctx.bias_dtype = options[:4], output_bias.dtype
        tables, indices = by_id
        ctx.tables = SavedTables(tables) if tables else None
        ctx.save_for_backward(target, history, *events, query, attended, lse, w_qk, w_vo, *weights, *indices)
        attended = attended.view(*target.shape[:-1], w_vo.shape[-2])
        return affine(output_bias, attended, w_vo.mT, by_sample=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        target, history, *rest = ctx.saved_tensors
        events, (query, attended, lse, w_qk, w_vo), weights, indices = rest[:5], rest[5:10], rest[10:15], rest[15:]
        key = history.unsqueeze(1)
        by_id: Any = [], []
        if ctx.tables is not None:
            key, *by_id = ctx.tables.read(key, indices)
        num_heads, scale, max_seqlen, impl = ctx.options
        needs_target, needs_history, needs_second, _, needs_bias, *needs_weights = ctx.needs_input_grad[:13]
        needs_weights = any(needs_weights[2:])  # two kernels give the gradients of all six
        needed = [needs_target or needs_weights, needs_history, False, needs_bias, needs_second]
        shape = (*target.shape[:-1], w_qk.shape[-2])
        dtarget, dweights = None, (None,) * 6
        with without_autocast(history.device.type):
            grads = operators.target_attention_bwd(
                torch.matmul(grad, w_vo.mT).to(history.dtype).view(query.shape),  # freed as soon as it is read
                None,
                *(query, key, None, *events, *by_id, scale, max_seqlen),
                *(attended, lse, needed, impl),
                prepared=Prepared(ctx.plan),
            )
            grads = iter(grads)
            found: list[Any] = [next(grads) if need else None for need in needed]
            dquery, dhistory, _, dbias, dsecond = found
            if needs_target:
                dtarget = torch.matmul(dquery.view(shape).to(w_qk.dtype), w_qk).to(target.dtype)
            if needs_weights:
                rows = (dquery.view(shape), target, attended.view(shape), grad)
                dweights = weight_gradients(rows, weights, ctx.bias_dtype, num_heads, impl)
        dhistory = None if dhistory is None else dhistory.squeeze(1)
        return dtarget, dhistory, dsecond, None, dbias, None, None, *dweights, None


def _by_head(weights: tuple[Tensor, ...], num_queries: int, num_heads: int) -> tuple[Tensor, ...]:
    """Splits W_q [FTH, d, D_e], b_q [.., 1, d], W_k and W_v [.., d, D_x], W_oᵀ [.., d, D] by feature, query, head."""
    w_q, b_q, w_k, w_v, w_o = weights
    width = w_k.size(-2) // num_heads
    if num_queries > 1:
        w_k, w_v = (x.unsqueeze(-3).expand(*x.shape[:-2], num_queries, -1, -1) for x in (w_k, w_v))
    return (
        w_q.reshape(-1, width, w_q.size(-1)),
        b_q.reshape(-1, 1, width),
        w_k.reshape(-1, width, w_k.size(-1)),
        w_v.reshape(-1, width, w_v.size(-1)),
        w_o.mT.reshape(-1, width, w_o.size(-2)),
    )


def absorb(
    weights: tuple[Tensor, ...], num_heads: int, dtype: torch.dtype, impl: str = "torch"
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies the weights of multi-head target attention, so that keys and values need no projection.

    Args:
        weights: W_q [F, T · D, D_e], b_q [F, T · D], W_k and W_v [F, D, D_x] and W_o [F, D, T · D] of F features, laid
            out as in ``torch.nn.MultiheadAttention``; of one feature all, and the results, may be without F.
        num_heads: H, which divides D.
        dtype: of the products.
        impl: "triton" computes them in one launch, without a graph.

    Returns:
        W_qk [F, T · H · D_x, D_e], b_qk [F, T · H · D_x] and W_vo [F, T · H · D_x, D], differentiable.  The queries
        of a target e are W_qk e + b_qk; the output is W_voᵀ a + b_o, where a is what the queries attended to.
    """
    num_queries = weights[0].size(-2) // weights[2].size(-2)
    if impl == "triton":
        from jfi.kernels import absorbed_weights

        return absorbed_weights.absorb(tuple([x.contiguous() for x in weights]), num_queries, num_heads, dtype)
    stacked = weights[0].shape[:-2]
    w_q, b_q, w_k, w_v, w_o = _by_head(tuple([x.to(dtype) for x in weights]), num_queries, num_heads)
    w_qk = torch.bmm(w_k.mT, w_q).view(*stacked, -1, w_q.size(2))
    b_qk = torch.bmm(b_q, w_k).view(*stacked, -1)
    return w_qk, b_qk, torch.bmm(w_v.mT, w_o).view(*stacked, -1, w_o.size(2))


def affine(bias: Tensor, rows: Tensor, weight: Tensor, by_sample: bool = False) -> Tensor:
    """Maps [F, N] + [F, B, M] x [F, N, M] to [F, B, N], in the weight's dtype; `by_sample`: in memory [B, F, N].

    Without F it maps [N] + [B, M] x [N, M] to [B, N].
    """
    if rows.dtype != weight.dtype:
        rows = rows.to(weight.dtype)
    if bias.dtype != weight.dtype:
        bias = bias.to(weight.dtype)
    if rows.dim() == 2:
        return F.linear(rows, weight, bias)
    if rows.shape[0] == 1:  # the product of one matrix adds the bias itself; baddbmm copies it first
        return F.linear(rows[0], weight[0], bias[0]).unsqueeze(0)
    features, batch, _ = rows.shape
    out = weight.new_empty(batch, features, weight.shape[1]).transpose(0, 1) if by_sample else None
    return torch.baddbmm(bias.unsqueeze(1), rows, weight.mT, out=out)


def weight_gradients(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: tuple[Tensor, ...],
    bias_dtype: torch.dtype,
    num_heads: int,
    impl: str,
) -> tuple[Tensor, ...]:
    """Returns the gradients of the weights, each in its dtype, and of the output's bias [F, D]; on a GPU two launches.

    Args:
        rows: by feature the gradient of the queries W_qk e + b_qk [F, B, T · H · D_x], the targets e [F, B, D_e], what
            the queries attended to, a, like the queries, and the gradient of the outputs W_voᵀ a + b_o [F, B, D], whose
            dtype is that of the products.
        weights, num_heads: as `absorb` takes them.
        bias_dtype: of the output's bias.
    """
    num_queries = weights[0].shape[-2] // weights[2].shape[-2]
    if impl == "triton":
        from jfi.kernels import absorbed_weights

        rows, weights = (tuple([x.contiguous() for x in group]) for group in (rows, weights))
        return absorbed_weights.gradients(rows, weights, bias_dtype, num_queries, num_heads)
    dtype = rows[3].dtype
    dquery, target, attended, grad = (x.to(dtype) for x in rows)
    w_q, b_q, w_k, w_v, w_o = _by_head(tuple([x.to(dtype) for x in weights]), num_queries, num_heads)
    features, parts = weights[0].shape[:-2].numel(), w_q.size(0)
    dw_qk = torch.matmul(dquery.mT, target).view(parts, -1, w_q.size(2))
    dw_vo = torch.matmul(attended.mT, grad).view(parts, -1, w_o.size(2))
    db_qk = dquery.sum(-2).view(parts, -1, 1)
    dw_k = torch.baddbmm(torch.bmm(w_q, dw_qk.mT), b_q.mT, db_qk.mT)
    dw_v = torch.bmm(w_o, dw_vo.mT)
    dw_k, dw_v = (x.view(features, num_queries, -1).sum(1) for x in (dw_k, dw_v))
    # Contiguous, or autograd would copy the gradients of the features' parameters one by one.
    dw_o = torch.bmm(w_v, dw_vo).view(features, -1, w_o.size(2)).mT.contiguous()
    out = (torch.bmm(w_k, dw_qk), torch.bmm(w_k, db_qk), dw_k, dw_v, dw_o)
    out = tuple([x.reshape(like.shape).to(like.dtype) for x, like in zip(out, weights, strict=True)])
    return *out, grad.sum(-2).to(bias_dtype)
