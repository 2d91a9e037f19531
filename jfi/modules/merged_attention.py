"""The targets' side of `jfi.modules.stacked_attention`: weights merged with weights, and one node of autograd's graph.

Where histories are short a training step takes the host's time, and most of that goes to a dozen small products, their
views and their sums, each way. So in eager calls the gradients are written out, those of all weights are two launches,
and training pays for few.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jfi.modules.joined import concatenated
from jfi.ops import target_attention
from jfi.ops._checks import check_events, check_impl, check_offsets, is_traced
from jfi.ops._dispatch import PLAIN, operators, without_autocast
from jfi.ops._merged_weights import gradients, merge, merge_eagerly
from jfi.ops.target_attention import takes_events


class Weights(NamedTuple):
    """The parameters of `StackedTargetAttention`, and how they are divided: T queries by H heads."""

    query_weight: Tensor  # [F, T * D, D_e]
    query_bias: Tensor  # [F, T * D]
    key_weight: Tensor  # [F, D, D_x]
    value_weight: Tensor  # [F, D, D_x]
    output_weight: Tensor  # [F, D, T * D]
    output_bias: Tensor  # [F, D]
    times: int
    heads: int

    @property
    def products(self) -> tuple[Tensor, ...]:
        """Those that are multiplied with each other."""
        return self[:5]


def merged_queries(target: Tensor, weights: Weights) -> Tensor:
    """q' = W_qk e + b_qk [F, B, T * H * D_x] of targets [F, B, D_e], in the parameters' dtype."""
    w_qk, b_qk, _ = merge(weights.products, weights.times, weights.heads, weights.query_weight.dtype)
    return affine(b_qk, target, w_qk.mT)


def affine(bias: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """[F, N] + [F, B, M] x [F, M, N] -> [F, B, N], in the dtype of the weight."""
    rows, bias = cast(rows, weight.dtype), cast(bias, weight.dtype)
    if rows.size(0) == 1:  # a bias of one matrix is added where its product is made, not copied before
        return torch.addmm(bias[0], rows[0], weight[0]).unsqueeze(0)
    return torch.baddbmm(bias.unsqueeze(1), rows, weight)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, which costs a microsecond where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def merged_attention(
    target: Tensor,
    fields: tuple[Tensor, ...],
    offsets: Tensor,
    bias: Tensor | None,
    buckets: Tensor | None,
    value_scale: Tensor | None,
    weights: Weights,
    scale: float,
    max_seqlen: int | None,
) -> Tensor:
    """Multi-head attention of each target over the history of its sample, which is read once and never projected.

    Args:
        target: [F, B, D_e].
        fields: of the history, [S, ...]: an event's row is theirs behind one another, D_x wide in all. Two of equal
            width are read where they lie, if the kernels can; more are concatenated.
        offsets: [F * B + 1].
        bias, buckets, value_scale, scale, max_seqlen: as `jfi.ops.target_attention` takes them.
        weights: the parameters.

    Returns:
        [F, B, D] in the parameters' dtype or autocast's.
    """
    device = fields[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights.query_weight.dtype
    events = (offsets, bias, buckets, value_scale)
    impl = check_impl("auto", fields[0])
    reads_events = takes_events(impl, weights.times * weights.heads)
    is_plain = _is_plain((target, *fields, *weights[:6]), value_scale, impl) and (
        reads_events or (buckets is None and value_scale is None)
    )
    if not (is_plain and reads_events and _are_halves(fields)):
        fields = (concatenated(fields),)
    history, second = (*fields, None)[:2]
    if is_plain:
        check_offsets("offsets", offsets, history.size(0), "history", history, target.size(0) * target.size(1))
        check_events(history, bias, buckets, value_scale, weights.heads)
        tensors = (None if x is None else x.contiguous() for x in (history, second, *events))
        return _MergedAttention.apply(target, *tensors, *weights, scale, max_seqlen, impl, dtype)
    w_qk, b_qk, w_vo = merge(weights.products, weights.times, weights.heads, dtype)
    query = affine(b_qk, target, w_qk.mT).view(-1, weights.times, weights.heads, history.size(1))
    more = {
        "key_bias": bias,
        "key_bias_index": buckets,
        "value_scale": value_scale,
        "scale": scale,
        "max_seqlen": max_seqlen,
    }
    attended = target_attention(cast(query, history.dtype), history.unsqueeze(1), offsets=offsets, **more)
    return affine(weights.output_bias, attended.view(w_vo.size(0), -1, w_vo.size(1)), w_vo)


def _is_plain(tensors: tuple[Tensor, ...], value_scale: Tensor | None, impl: str) -> bool:
    """Whether the operators take these tensors as they stand, and nothing but autograd looks on."""
    if is_traced() or any(type(x) not in PLAIN for x in tensors):
        return False
    if value_scale is not None and value_scale.requires_grad and torch.is_grad_enabled():
        return False
    if impl == "triton":
        return all(x.dtype != torch.float64 for x in tensors)
    return tensors[0].device.type == "cpu"


def _are_halves(fields: tuple[Tensor, ...]) -> bool:
    """Whether kernels that read events can read two fields as the halves of one row."""
    width = fields[0].size(1)
    return (
        len(fields) == 2
        and width >= 16
        and width & (width - 1) == 0
        and fields[1].size(1) == width
        and all(field.is_contiguous() and field.data_ptr() % 16 == 0 for field in fields)
    )


class _MergedAttention(torch.autograd.Function):
    """Autocast has no say within: all dtypes are chosen, and it would make one half of a launch's inputs float32."""

    @staticmethod
    def forward(ctx, target, history, second, offsets, bias, buckets, value_scale, *rest):
        *weights, scale, max_seqlen, impl, dtype = rest
        weights = Weights(*weights)
        ctx.hints, ctx.division = (scale, max_seqlen, impl), weights[6:]
        with without_autocast(history.device.type):
            return _MergedAttention._forward(
                ctx, target, history, second, offsets, bias, buckets, value_scale, weights, dtype
            )

    @staticmethod
    def _forward(ctx, target, history, second, offsets, bias, buckets, value_scale, weights, dtype):
        impl = ctx.hints[2]
        w_qk, b_qk, w_vo = merge_eagerly(weights.products, weights.times, weights.heads, dtype, impl)
        query = affine(b_qk, target, w_qk.mT).view(-1, weights.times, weights.heads, weights.key_weight.size(2))
        query = cast(query, history.dtype)
        events = (offsets, bias, buckets, value_scale, second)
        attended, lse = operators.target_attention_fwd(query, history.unsqueeze(1), None, *events, *ctx.hints)
        ctx.save_for_backward(target, history, *events, query, attended, lse, w_qk, w_vo, *weights[:6])
        return affine(weights.output_bias, attended.view(w_vo.size(0), -1, w_vo.size(1)), w_vo)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        with without_autocast(grad.device.type):
            return _MergedAttention._backward(ctx, grad)

    @staticmethod
    def _backward(ctx, grad):
        target, history, *rest = ctx.saved_tensors
        events, (query, attended, lse, w_qk, w_vo), weights = rest[:5], rest[5:10], Weights(*rest[10:], *ctx.division)
        dtype, shape = w_qk.dtype, (*target.shape[:2], w_qk.size(1))
        dquery, dhistory, *others = operators.target_attention_bwd(
            cast(torch.bmm(grad, w_vo.mT), history.dtype).view_as(query),  # not held any longer than here
            query,
            history.unsqueeze(1),
            None,
            *events,
            attended,
            lse,
            *ctx.hints,
        )
        dquery = dquery.view(shape)
        dtarget = None
        if ctx.needs_input_grad[0]:
            dtarget = cast(torch.bmm(cast(dquery, dtype), w_qk), target.dtype)
        dweights = (None,) * 6
        if any(ctx.needs_input_grad[7:13]):  # a frozen layer's weights want none
            rows = dquery, target, attended.view(shape), grad
            dweights = gradients(rows, weights.products, weights.output_bias.dtype, *ctx.division, ctx.hints[2])
        _, bias, _, _, second = events
        dbias = None if bias is None else others.pop(0)
        dsecond = None if second is None else others.pop(0)
        nothing = (None,) * 6  # times, heads, scale, max_seqlen, impl, dtype
        return dtarget, dhistory.squeeze(1), dsecond, None, dbias, None, None, *dweights, *nothing
