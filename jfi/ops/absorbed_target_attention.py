"""Target attention with absorbed projections: multi-head attention over a history that is never projected.

For each of F features, with the target e of a sample and its events x, h a head of width d = D / H and t one of T
queries:

    q_th = W_q,th e + b_q,th
    p_th = softmax over the sample's events of (scale q_th · W_k,h x + bias_h)
    o    = W_o concat_{t,h}(Σ_x p_th c W_v,h x) + b_o              c the event's value scale, if any

W_k and W_v can be applied on either side, since q · W_k x = W_kᵀ q · x, and a sum commutes with W_v.  Absorbed into the
targets' projections (`absorb_weights`), they leave the S rows of the history unprojected, and one call of target
attention with value = key reads them once:

    q'_th = W_qk,th e + b_qk,th        a_th = Σ_x p_th c x        o = W_vo a + b_o

Eager calls on plain tensors are one node of autograd's graph with its gradients written out: with short histories the
host's time dominates, and autograd's bookkeeping for a dozen small products and views would be most of it.  A compiler
or a tracer sees the composition of operators instead.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from jfi.kernels.plan import plan_absorbed_target_attention
from jfi.ops.absorb_weights import (
    absorb,
    absorb_in_kernel,
    affine,
    check_shapes,
    check_weights,
    weight_gradients,
)
from jfi.ops.checks import (
    FLOATING,
    check_all_dense,
    check_count,
    check_device,
    check_events,
    check_floating,
    check_impl,
    check_key_bias,
    check_offsets,
    check_scale,
)
from jfi.ops.dispatch import PLAIN, operators, public, refusal
from jfi.ops.explain import explains
from jfi.ops.gather_rows import read_rows
from jfi.ops.rows_by_id import RowsById, SavedTables, fits_kernel, rows_by_id
from jfi.ops.target_attention import fits_single_tile, prepare_target_attention, table_bias, target_attention
from jfi.utils import compat
from jfi.utils.context import is_traced, once_differentiable, without_autocast
from jfi.utils.operands import TargetAttentionInputs

_BY_EVENT = ("history", "indices", "key_bias", "key_bias_index", "value_scale")


@partial(public, packed={"offsets": _BY_EVENT})
def absorbed_target_attention(
    target: Tensor,
    history: Tensor | tuple[Tensor, ...] | RowsById,
    weights: tuple[Tensor, ...],
    *,
    offsets: Tensor | None = None,
    num_heads: int,
    indices: Tensor | tuple[Tensor, ...] | None = None,
    key_bias: Tensor | None = None,
    key_bias_index: Tensor | None = None,
    value_scale: Tensor | None = None,
    scale: float | None = None,
    max_seqlen: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Multi-head attention of each sample's target over its history, which is read once and never projected.

    Args:
        target: [F, B, D_e], the targets of F features.
        history: [S, D_x], the events of feature 0, then of feature 1, ...; or a tuple of tensors that are concatenated
            along the last dimension.  The Triton kernels for few query rows read two tensors of one width, a power of
            two from 16 on, without concatenating them.
        weights: query_weight [F, T · D, D_e], query_bias [F, T · D], key_weight and value_weight [F, D, D_x],
            output_weight [F, D, T · D] and output_bias [F, D], of one dtype, laid out as in
            ``torch.nn.MultiheadAttention``.
        offsets: [F · B + 1], int32 or int64, from 0 to S. None where an argument of S rows is a nested tensor.
        num_heads: H, which divides D.
        indices: [S]: history is then a table [N, D_x], and event s is its row indices[s]; with a tuple of tables the
            sum of its rows, not their concatenation. As in `target_attention`; the rows are converted to the dtype of
            the weights.
        key_bias: [S, H], or with key_bias_index a table [N, H]; as in `target_attention`.
        key_bias_index: [S], the row of the table for each event.
        value_scale: [S], a factor of each event's value.
        scale: factor of the scores; None means 1/sqrt(D / H).
        max_seqlen: the longest history, if the host knows it; a hint, as in `target_attention`.
        impl: "triton", "torch" or "auto", as in `target_attention`.

    Returns:
        [F, B, D] in the dtype of the weights, or autocast's.  The attention itself runs in the dtype of the history,
        which is never cast.  An empty history gives output_bias.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi
        >>> shapes = (1, 8, 4), (1, 8), (1, 8, 16), (1, 8, 16), (1, 8, 8), (1, 8)
        >>> weights = tuple(torch.randn(shape) for shape in shapes)
        >>> target, history, offsets = torch.randn(1, 3, 4), torch.randn(5, 16), torch.tensor([0, 2, 2, 5])
        >>> jfi.ops.absorbed_target_attention(target, history, weights, offsets=offsets, num_heads=2).shape
        torch.Size([1, 3, 8])
    """
    by_event = (key_bias, key_bias_index, value_scale)
    arguments = (target, history, weights, indices, offsets, num_heads, *by_event, scale, max_seqlen)
    history, offsets, scale = _check(*arguments)
    return attend_absorbed(target, history, weights, offsets, num_heads, *by_event, scale, max_seqlen, impl)


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
    """Computes `absorbed_target_attention` of checked arguments, for a caller that has checked its batch already."""
    by_id = history if isinstance(history, RowsById) else None
    fields = (history.rows,) if isinstance(history, RowsById) else history
    impl = check_impl(impl, fields[0])
    num_queries, in_kernel = _in_kernel(weights, num_heads, impl)
    if key_bias is not None and key_bias_index is not None and not in_kernel:
        key_bias, key_bias_index = table_bias(key_bias, key_bias_index).to(fields[0].dtype), None
    if by_id is not None and not (in_kernel and fits_kernel(by_id)):
        fields, by_id = (read_rows(by_id),), None
    first = fields[0]
    device = first.device.type
    autocast = not first.is_meta and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else weights[0].dtype
    tensors = (target, *fields, key_bias, *weights)
    if not is_traced() and _are_plain(tensors) and _fits_one_node(tensors, value_scale, impl, in_kernel):
        if compat.functorch_transforms_active():
            raise refusal("jfi.ops.absorbed_target_attention")
        if not (len(fields) == 1 or (in_kernel and _are_halves(fields))):
            fields = (torch.cat(fields, dim=1),)
        # Rows by id have no memory to be contiguous in.
        first = fields[0].contiguous() if by_id is None else fields[0]
        second = fields[1] if len(fields) == 2 else None
        others = (second, offsets, key_bias, key_bias_index, value_scale)
        others = [None if x is None else x.contiguous() for x in others]
        tables, indices = ([], []) if by_id is None else (list(by_id.tables), list(by_id.indices))
        settings = (num_heads, scale, max_seqlen, impl, dtype, tables, indices)
        if autocast:  # the node chooses every dtype itself
            with torch.autocast(device, enabled=False):
                return _AbsorbedTargetAttention.apply(target, first, *others, *weights, settings)
        return _AbsorbedTargetAttention.apply(target, first, *others, *weights, settings)
    history = first if len(fields) == 1 else torch.cat(fields, dim=1)
    w_qk, b_qk, w_vo = absorb(weights[:5], num_heads, dtype)
    query = affine(b_qk, target, w_qk).to(history.dtype).view(-1, num_queries, num_heads, history.shape[1])
    attended = target_attention(
        query,
        history.unsqueeze(1) if by_id is None else by_id,
        offsets=offsets,
        key_bias=key_bias,
        key_bias_index=key_bias_index,
        value_scale=value_scale,
        scale=scale,
        max_seqlen=max_seqlen,
        impl=impl,
    )
    return affine(weights[5], attended.view(target.shape[0], -1, w_vo.shape[1]), w_vo.mT)


def _check(
    target: Tensor,
    history: Tensor | tuple[Tensor, ...] | RowsById,
    weights: tuple[Tensor, ...],
    indices: Tensor | tuple[Tensor, ...] | None,
    offsets: Tensor | None,
    num_heads: int,
    key_bias: Tensor | None,
    key_bias_index: Tensor | None,
    value_scale: Tensor | None,
    scale: float | None,
    max_seqlen: int | None,
) -> tuple[tuple[Tensor, ...] | RowsById, Tensor, float]:
    """Checks the arguments; returns the history, the offsets, and the scale as a number."""
    check_weights(weights, 6, num_heads)
    if indices is not None:
        history = rows_by_id(history, indices, weights[0].dtype, "history")
    elif not isinstance(history, tuple):
        history = (history,)
    fields = (history.rows,) if isinstance(history, RowsById) else history
    _check_shapes(target, fields, weights, num_heads)
    first = fields[0]
    batch = target.shape[0] * target.shape[1]
    offsets = check_offsets("offsets", offsets, first.shape[0], "history", first, batch)
    if key_bias is not None and key_bias_index is None:
        check_floating(history=first, key_bias=key_bias)
        check_key_bias(key_bias, first.shape[0], num_heads)
    if key_bias_index is not None or value_scale is not None:
        check_events(first, key_bias, key_bias_index, value_scale, num_heads)
    scale = check_scale(scale, weights[2].shape[1] // num_heads)
    check_count("max_seqlen", max_seqlen)
    return history, offsets, scale


def _check_shapes(target: Tensor, fields: tuple[Tensor, ...], weights: tuple[Tensor, ...], num_heads: int) -> None:
    """Checks that targets, histories and weights fit each other."""
    if not fields:
        raise ValueError("history must be a tensor or a tuple of at least one, got ()")
    for i, x in enumerate((target, *fields)):
        name = "history" if i else "target"
        if not isinstance(x, Tensor) or x.dtype not in FLOATING:
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a Tensor of float32, bfloat16, float16 or float64, got {got}")
    check_all_dense(("target", *["history"] * len(fields)), (target, *fields))
    first, d_x = fields[0], 0
    for x in fields:
        if x.dim() != 2 or 0 in x.shape[1:]:
            raise ValueError(f"history must be [S, D_x] with D_x at least 1, got shape {list(x.shape)}")
        d_x += x.shape[1]
        if x is not first and (x.shape[0] != first.shape[0] or x.dtype != first.dtype or x.device != first.device):
            raise ValueError(
                f"history must be tensors of as many rows, one dtype and one device, got {list(first.shape)} "
                f"{first.dtype} on {first.device} and {list(x.shape)} {x.dtype} on {x.device}"
            )
    if target.dim() != 3 or target.shape[0] == 0 or target.shape[2] == 0:
        raise ValueError(f"target must be [F, B, D_e] with F and D_e at least 1, got shape {list(target.shape)}")
    check_device("target", target, "history", first)
    features, dim = weights[5].shape
    if features != target.shape[0] or dim == 0 or dim % num_heads:
        raise ValueError(
            f"output_bias must be [F, D] of F = {target.shape[0]} and a D >= 1 that num_heads = {num_heads} divides, "
            f"got shape {list(weights[5].shape)}"
        )
    check_shapes(weights, (features, dim, target.shape[2], d_x), num_heads, first.device)


def _in_kernel(weights: tuple[Tensor, ...], num_heads: int, impl: str) -> tuple[int, bool]:
    """Returns T, and whether the attention's kernels read a bias by its index and a value scale."""
    num_queries = weights[0].shape[1] // weights[2].shape[1]
    return num_queries, impl == "triton" and fits_single_tile(num_queries * num_heads)


def _are_plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Returns whether none of these tensors is a subclass or meta."""
    for x in tensors:  # noqa: SIM110 - a comprehension would be one more call
        if x is not None and (type(x) not in PLAIN or x.is_meta):
            return False
    return True


def _fits_one_node(tensors: tuple[Tensor | None, ...], value_scale: Tensor | None, impl: str, in_kernel: bool) -> bool:
    """Returns whether the one node takes these dtypes on this device, and the value scale."""
    for x in tensors:
        if x is not None and (x.dtype == torch.float64 if impl == "triton" else x.is_cuda):
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
    """The one node.  It chooses every dtype itself, so autocast must be off around it."""

    @staticmethod
    def forward(ctx, target, history, second, offsets, bias, index, value_scale, *weights_and_options):
        *weights, output_bias, options = weights_and_options
        num_heads, scale, max_seqlen, impl, dtype, *by_id = options
        w_qk, b_qk, w_vo = absorb_in_kernel(weights, num_heads, dtype, impl)
        query = affine(b_qk, target, w_qk)
        if query.dtype != history.dtype:
            query = query.to(history.dtype)
        query = query.view(-1, weights[0].shape[1] // weights[2].shape[1], num_heads, weights[2].shape[2])
        events = (offsets, bias, index, value_scale, second)
        attend = operators.target_attention_fwd
        if not compat.profiler_enabled():  # a profile shows the operator's name; nothing else can be at work here
            attend = attend.eager
        attended, lse = attend(query, history.unsqueeze(1), None, *events, *by_id, scale, max_seqlen, impl)
        ctx.options, ctx.bias_dtype = options[:4], output_bias.dtype
        tables, indices = by_id
        ctx.tables = SavedTables(tables) if tables else None
        ctx.save_for_backward(target, history, *events, query, attended, lse, w_qk, w_vo, *weights, *indices)
        return affine(output_bias, attended.view(target.shape[0], -1, w_vo.shape[1]), w_vo.mT, by_sample=True)

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
        shape = (*target.shape[:2], w_qk.shape[1])
        dtarget, dweights = None, (None,) * 6
        with without_autocast(history.device.type):
            grads = operators.target_attention_bwd(
                torch.bmm(grad, w_vo.mT).to(history.dtype).view(query.shape),  # freed as soon as it is read
                None,
                *(query, key, None, *events, *by_id, scale, max_seqlen),
                *(attended, lse, needed, impl),
            )
            grads = iter(grads)
            found: list[Any] = [next(grads) if need else None for need in needed]
            dquery, dhistory, _, dbias, dsecond = found
            if needs_target:
                dtarget = torch.bmm(dquery.view(shape).to(w_qk.dtype), w_qk).to(target.dtype)
            if needs_weights:
                rows = (dquery.view(shape), target, attended.view(shape), grad)
                dweights = weight_gradients(rows, weights, ctx.bias_dtype, num_heads, impl)
        dhistory = None if dhistory is None else dhistory.squeeze(1)
        return dtarget, dhistory, dsecond, None, dbias, None, None, *dweights, None


def _prepare_plan(
    target: Tensor,
    history: Tensor | tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    *,
    num_heads: int,
    indices: Tensor | tuple[Tensor, ...] | None,
    scale: float | None,
    max_seqlen: int | None,
    impl: str,
    **events: Any,
) -> tuple[tuple[TargetAttentionInputs, bool], str]:
    """Returns for `explain` the operands of the attention, whether kernels absorb the weights, "triton" or "torch"."""
    options: dict[str, Any] = {"num_heads": num_heads, "scale": scale, "max_seqlen": max_seqlen}
    history, _, scale = _check(target, history, weights, indices, **events, **options)
    fields = (history.rows,) if isinstance(history, RowsById) else history
    impl = check_impl(impl, fields[0])
    num_queries, in_kernel = _in_kernel(weights, num_heads, impl)
    key = fields[0] if len(fields) == 1 else torch.cat(fields, dim=1)
    query = key.new_empty(target.shape[0] * target.shape[1], num_queries, num_heads, key.shape[1])
    operand = history if isinstance(history, RowsById) else key.unsqueeze(1)
    settings: dict[str, Any] = {"scale": scale, "max_seqlen": max_seqlen, "impl": impl}
    inputs, _ = prepare_target_attention(query, operand, None, indices=None, **events, **settings)
    tensors = (target, *fields, events["key_bias"], *weights)
    absorbs = impl == "triton" and _fits_one_node(tensors, events["value_scale"], impl, in_kernel)
    if absorbs and in_kernel and _are_halves(fields):
        inputs = inputs._replace(key=fields[0].unsqueeze(1), second=fields[1])
    return (inputs, absorbs), impl


explains(absorbed_target_attention, _prepare_plan, plan_absorbed_target_attention, decisive="history")
