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

Calls on plain tensors are one node of autograd's graph with its gradients written out, and one operator of a graph
that torch.compile makes: with short histories the host's time dominates, and bookkeeping for a dozen small products and
views would be most of it.  Other tracers see the composition of operators instead.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from jfi.kernels import plan
from jfi.ops._attention import Prepared
from jfi.ops.dispatch import PLAIN, operator, operators, refusal
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
    compiled = torch.compiler.is_dynamo_compiling()
    # A tracer lets nobody read.
    if (compiled or is_read or not is_traced()) and _fits_one_node(tensors, value_scale, impl, in_kernel):
        if not (len(fields) == 1 or (in_kernel and not compiled and _are_halves(fields))):
            fields = (torch.cat(fields, dim=1),)
        # Rows by id have no memory to be contiguous in.
        first = fields[0].contiguous() if by_id is None else fields[0]
        second = fields[1] if len(fields) == 2 else None
        others = (offsets, key_bias, key_bias_index, value_scale, second)
        others = [None if x is None else x.contiguous() for x in others]
        lists = ([], []) if by_id is None else (list(by_id.tables), list(by_id.indices))
        options = num_heads, scale, max_seqlen, impl, _product_dtype(first, weights[0])
        if not compiled and compat.functorch_transforms_active():
            raise refusal("jfi.ops.target_attention")
        run = _fwd if compiled else _fwd.node.apply if torch.is_grad_enabled() else _forward
        return run(target, first, *others, *weights, *lists, *options)[0]
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


_TENSORS = "Tensor target, Tensor history, Tensor offsets, Tensor? bias, Tensor? index, Tensor? scales, Tensor? second"
_TENSORS += ", Tensor w_q, Tensor b_q, Tensor w_k, Tensor w_v, Tensor w_o"
_OTHERS = "Tensor[] tables, Tensor[] indices, int num_heads, float scale, SymInt? max_seqlen, str impl"
_FOUND = "Tensor query, Tensor attended, Tensor lse, Tensor w_qk, Tensor w_vo"
#: The positions of the arguments of the forward: weights, tables, number of heads.
_WEIGHTS, _TABLES, _NUMBERS = slice(7, 12), 13, 15


def _forward(*args, ctx=None):
    target, history, *events = args[:7]
    weights, output_bias, by_id = args[_WEIGHTS], args[12], args[_TABLES:_NUMBERS]
    num_heads, scale, max_seqlen, impl, dtype = args[_NUMBERS:]
    with without_autocast(history.device.type):  # the operator chooses every dtype itself
        w_qk, b_qk, w_vo = absorb(weights, num_heads, dtype, impl)
        query = affine(b_qk, target, w_qk)
        if query.dtype != history.dtype:
            query = query.to(history.dtype)
        query = query.view(-1, weights[0].shape[-2] // weights[2].shape[-2], num_heads, weights[2].shape[-1])
        x = TargetAttentionInputs(query, history.unsqueeze(1), None, *events, *by_id, scale, max_seqlen)
        prepared = Prepared(plan.plan_target_attention(x, impl) if impl == "triton" else None)
        if ctx is not None:
            ctx.prepared = prepared
        if compat.profiler_enabled():  # a profile shows the operator's name
            attended, lse = operators.target_attention_fwd(*x, impl)
        else:
            attended, lse = run_forward(x, prepared.plan)
        out = affine(output_bias, attended.view(*target.shape[:-1], w_vo.shape[-2]), w_vo.mT, by_sample=True)
    return out, query, attended, lse, w_qk, w_vo


def _fake(*args):
    target, history, w_q, w_k, w_o = (*args[:2], args[7], args[9], args[11])
    num_heads, dtype = args[_NUMBERS], args[-1]
    samples = target.shape[:-1]
    query = history.new_empty(math.prod(samples), w_q.shape[-2] // w_k.shape[-2], num_heads, w_k.shape[-1])
    out = target.new_empty(*samples[::-1], w_o.shape[-2], dtype=dtype)
    out = out.transpose(0, 1) if target.dim() == 3 else out
    lse = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    rows = *w_q.shape[:-2], math.prod(query.shape[1:])
    w_qk, w_vo = (target.new_empty(*rows, x, dtype=dtype) for x in (target.shape[-1], w_o.shape[-2]))
    return out, query, torch.empty_like(query), lse, w_qk, w_vo


def _backward(grad, *args, prepared=None):
    target, history, *events = args[:7]
    weights, (query, attended, lse, w_qk, w_vo) = args[_WEIGHTS], args[12:17]
    *by_id, num_heads, scale, max_seqlen, impl, bias_dtype, needed = args[17:]
    needs_target, needs_history, needs_bias, needs_second, needs_weights = needed
    of_attention = [needs_target or needs_weights, needs_history, False, needs_bias, needs_second]
    shape = (*target.shape[:-1], w_qk.shape[-2])
    with without_autocast(history.device.type):
        grads = operators.target_attention_bwd(
            torch.matmul(grad, w_vo.mT).to(history.dtype).view(query.shape),  # freed as soon as it is read
            None,
            *(query, history.unsqueeze(1), None, *events, *by_id, scale, max_seqlen),
            *(attended, lse, of_attention, impl),
            prepared=prepared,
        )
        dquery = grads.pop(0).view(shape) if of_attention[0] else None
        if needs_history:
            grads[0] = grads[0].squeeze(1)
        if needs_target:
            grads.insert(0, torch.matmul(dquery.to(w_qk.dtype), w_qk).to(target.dtype))
        if needs_weights:  # two kernels give the gradients of all six
            rows = (dquery, target, attended.view(shape), grad)
            grads += weight_gradients(rows, weights, bias_dtype, num_heads, impl)
    return grads


def _fake_backward(grad, *args):
    needed, bias_dtype, w_o = args[-1], args[-2], args[11]
    like = [x for x, need in zip((args[0], args[1], args[3], args[6]), needed[:4], strict=True) if need]
    like += args[_WEIGHTS] if needed[4] else ()
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]
    return [*found, grad.new_empty(*w_o.shape[:-2], grad.shape[-1], dtype=bias_dtype)] if needed[4] else found


def _save(ctx, inputs, output) -> None:
    tables, indices = inputs[_TABLES:_NUMBERS]
    ctx.tables, ctx.options = SavedTables(tables) if tables else None, (*inputs[_NUMBERS:-1], inputs[12].dtype)
    ctx.save_for_backward(*inputs[:12], *output[1:], *indices)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


@once_differentiable
def _differentiate(ctx, grad, *_):
    target, history, *rest = ctx.saved_tensors
    rest, indices, by_id = rest[:15], rest[15:], [[], []]
    lists = [[None] * len(indices)] * 2
    if grad is None:
        return (*(None,) * _TABLES, *lists, *(None,) * 5)
    if ctx.tables is not None:
        history, *by_id = ctx.tables.read(history, indices)
    needs = ctx.needs_input_grad
    needed = [*needs[:2], needs[3], needs[6], any(needs[7:_TABLES])]
    args = grad, target, history, *rest, *by_id, *ctx.options, needed
    prepared = getattr(ctx, "prepared", None)  # torch.library keeps none
    grads = iter(_bwd(*args) if prepared is None else _backward(*args, prepared=prepared))
    dtarget, dhistory, dbias, dsecond = (next(grads) if need else None for need in needed[:4])
    dweights = grads if needed[4] else (None,) * 6
    return dtarget, dhistory, None, dbias, None, None, dsecond, *dweights, *lists, *(None,) * 5


_schema = f"(Tensor grad, {_TENSORS}, {_FOUND}, {_OTHERS}, ScalarType bias_dtype, bool[] needed) -> Tensor[]"
_bwd = operator("absorbed_target_attention_bwd", _backward, _fake_backward, schema=_schema)
_schema = f"({_TENSORS}, Tensor b_o, {_OTHERS}, ScalarType dtype) -> ({', '.join(['Tensor'] * 6)})"
_fwd = operator("absorbed_target_attention_fwd", _forward, _fake, _save, _differentiate, _schema, keeps=True)


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
