"""The weights of multi-head target attention multiplied with each other: what `jfi.modules.merged_attention` applies.

`merge` is differentiable as it stands; `merge_eagerly` and `gradients`, one launch and two on a GPU, are for a caller
that is a node of autograd's graph itself.  See `jfi.kernels.absorbed_weights` for
the formulas.
"""

import torch
from torch import Tensor


def _by_head(weights: tuple[Tensor, ...], times: int, heads: int) -> tuple[Tensor, ...]:
    """By feature, query and head: W_q [FTH, d, D_e], b_q [.., 1, d], W_k and W_v [.., d, D_x], W_oᵀ [.., d, D]."""
    w_q, b_q, w_k, w_v, w_o = weights
    width = w_k.size(1) // heads
    if times > 1:
        w_k, w_v = (x.unsqueeze(1).expand(-1, times, -1, -1) for x in (w_k, w_v))
    return (
        w_q.reshape(-1, width, w_q.size(2)),
        b_q.reshape(-1, 1, width),
        w_k.reshape(-1, width, w_k.size(-1)),
        w_v.reshape(-1, width, w_v.size(-1)),
        w_o.reshape(-1, w_o.size(1), times * heads, width).permute(0, 2, 3, 1).reshape(-1, width, w_o.size(1)),
    )


def merge(weights: tuple[Tensor, ...], times: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """W_qk [F, T · H · D_x, D_e], b_qk [F, T · H · D_x] and W_vo [F, T · H · D_x, D].

    Args:
        weights: W_q [F, T · D, D_e], b_q [F, T · D], W_k and W_v [F, D, D_x], W_o [F, D, T · D].
        times, heads: T and H, which divides D.
        dtype: of the results.
    """
    w_q, b_q, w_k, w_v, w_o = _by_head(tuple(x.to(dtype) for x in weights), times, heads)
    features = weights[0].size(0)
    w_qk = torch.bmm(w_k.mT, w_q).view(features, -1, w_q.size(2))
    b_qk = torch.bmm(b_q, w_k).view(features, -1)
    return w_qk, b_qk, torch.bmm(w_v.mT, w_o).view(features, -1, w_o.size(2))


def merge_eagerly(
    weights: tuple[Tensor, ...], times: int, heads: int, dtype: torch.dtype, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`merge` without a graph."""
    if impl == "triton":
        from jfi.kernels.absorbed_weights import fwd

        return fwd.merge(tuple(x.contiguous() for x in weights), times, heads, dtype)
    return merge(weights, times, heads, dtype)


def gradients(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: tuple[Tensor, ...],
    bias_dtype: torch.dtype,
    times: int,
    heads: int,
    impl: str,
) -> tuple[Tensor, ...]:
    """The gradients of the weights, each in its dtype, and of the output's bias [F, D].

    Args:
        rows: of a batch, what the layer's products met, by feature: the gradient of the queries q = W_qk e + b_qk
            [F, B, T · H · D_x], the targets e [F, B, D_e], what was attended to, a, like the queries, and the gradient
            of the outputs W_voᵀ a + b_o [F, B, D], in whose dtype products are taken.
        weights, times, heads: as `merge` took them.
        bias_dtype: of the output's bias.
    """
    if impl == "triton":
        from jfi.kernels.absorbed_weights import bwd

        rows, weights = (tuple(x.contiguous() for x in group) for group in (rows, weights))
        return bwd.gradients(rows, weights, bias_dtype, times, heads)
    dtype = rows[3].dtype
    dquery, target, attended, grad = (x.to(dtype) for x in rows)
    w_q, b_q, w_k, w_v, w_o = _by_head(tuple(x.to(dtype) for x in weights), times, heads)
    features, parts = weights[0].size(0), w_q.size(0)
    dw_qk = torch.bmm(dquery.mT, target).view(parts, -1, w_q.size(2))
    dw_vo = torch.bmm(attended.mT, grad).view(parts, -1, w_o.size(2))
    db_qk = dquery.sum(1).view(parts, -1, 1)
    dw_k = torch.baddbmm(torch.bmm(w_q, dw_qk.mT), b_q.mT, db_qk.mT)
    dw_v = torch.bmm(w_o, dw_vo.mT)
    dw_k, dw_v = (x.view(features, times, -1).sum(1) for x in (dw_k, dw_v))
    dw_o = torch.bmm(w_v, dw_vo).view(features, -1, w_o.size(2)).mT
    out = (torch.bmm(w_k, dw_qk), torch.bmm(w_k, db_qk), dw_k, dw_v, dw_o)
    out = tuple(x.reshape(like.shape).to(like.dtype) for x, like in zip(out, weights, strict=True))
    return *out, grad.sum(1).to(bias_dtype)
