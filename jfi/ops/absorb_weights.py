"""Absorbed projections: products of the weights of multi-head target attention.

By feature f, query t and head h, with each head's part of the weights d = D / H wide:

    W_qk = W_kᵀ W_q [D_x, D_e]      b_qk = W_kᵀ b_q [D_x]      W_vo = W_vᵀ W_oᵀ [D_x, D]

They take some D^3 operations, whatever the batch size.  `jfi.kernels.absorbed_weights` derives their gradients.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def _by_head(weights: tuple[Tensor, ...], num_queries: int, num_heads: int) -> tuple[Tensor, ...]:
    """Splits W_q [FTH, d, D_e], b_q [.., 1, d], W_k and W_v [.., d, D_x], W_oᵀ [.., d, D] by feature, query, head."""
    w_q, b_q, w_k, w_v, w_o = weights
    width = w_k.size(1) // num_heads
    if num_queries > 1:
        w_k, w_v = (x.unsqueeze(1).expand(-1, num_queries, -1, -1) for x in (w_k, w_v))
    return (
        w_q.reshape(-1, width, w_q.size(2)),
        b_q.reshape(-1, 1, width),
        w_k.reshape(-1, width, w_k.size(-1)),
        w_v.reshape(-1, width, w_v.size(-1)),
        w_o.mT.reshape(-1, width, w_o.size(1)),
    )


def absorb(weights: tuple[Tensor, ...], num_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies the weights of multi-head target attention, so that keys and values need no projection.

    Args:
        weights: W_q [F, T · D, D_e], b_q [F, T · D], W_k and W_v [F, D, D_x] and W_o [F, D, T · D] of F features, laid
            out as in ``torch.nn.MultiheadAttention``.
        num_heads: H, which divides D.
        dtype: of the products.

    Returns:
        W_qk [F, T · H · D_x, D_e], b_qk [F, T · H · D_x] and W_vo [F, T · H · D_x, D], differentiable.  The queries
        of a target e are W_qk e + b_qk; the output is W_voᵀ a + b_o, where a is what the queries attended to.
    """
    features, num_queries = weights[0].size(0), weights[0].size(1) // weights[2].size(1)
    w_q, b_q, w_k, w_v, w_o = _by_head(tuple([x.to(dtype) for x in weights]), num_queries, num_heads)
    w_qk = torch.bmm(w_k.mT, w_q).view(features, -1, w_q.size(2))
    b_qk = torch.bmm(b_q, w_k).view(features, -1)
    return w_qk, b_qk, torch.bmm(w_v.mT, w_o).view(features, -1, w_o.size(2))


def absorb_in_kernel(
    weights: tuple[Tensor, ...], num_heads: int, dtype: torch.dtype, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `absorb` without a graph, on a GPU in one launch."""
    if impl == "triton":
        from jfi.kernels import absorbed_weights

        num_queries = weights[0].shape[1] // weights[2].shape[1]
        return absorbed_weights.absorb(tuple([x.contiguous() for x in weights]), num_queries, num_heads, dtype)
    return absorb(weights, num_heads, dtype)


def affine(bias: Tensor, rows: Tensor, weight: Tensor, by_sample: bool = False) -> Tensor:
    """Maps [F, N] + [F, B, M] x [F, N, M] to [F, B, N], in the weight's dtype; `by_sample`: in memory [B, F, N]."""
    if rows.dtype != weight.dtype:
        rows = rows.to(weight.dtype)
    if bias.dtype != weight.dtype:
        bias = bias.to(weight.dtype)
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
    num_queries = weights[0].shape[1] // weights[2].shape[1]
    if impl == "triton":
        from jfi.kernels import absorbed_weights

        rows, weights = (tuple([x.contiguous() for x in group]) for group in (rows, weights))
        return absorbed_weights.gradients(rows, weights, bias_dtype, num_queries, num_heads)
    dtype = rows[3].dtype
    dquery, target, attended, grad = (x.to(dtype) for x in rows)
    w_q, b_q, w_k, w_v, w_o = _by_head(tuple([x.to(dtype) for x in weights]), num_queries, num_heads)
    features, parts = weights[0].size(0), w_q.size(0)
    dw_qk = torch.bmm(dquery.mT, target).view(parts, -1, w_q.size(2))
    dw_vo = torch.bmm(attended.mT, grad).view(parts, -1, w_o.size(2))
    db_qk = dquery.sum(1).view(parts, -1, 1)
    dw_k = torch.baddbmm(torch.bmm(w_q, dw_qk.mT), b_q.mT, db_qk.mT)
    dw_v = torch.bmm(w_o, dw_vo.mT)
    dw_k, dw_v = (x.view(features, num_queries, -1).sum(1) for x in (dw_k, dw_v))
    # Contiguous, or autograd would copy the gradients of the features' parameters one by one.
    dw_o = torch.bmm(w_v, dw_vo).view(features, -1, w_o.size(2)).mT.contiguous()
    out = (torch.bmm(w_k, dw_qk), torch.bmm(w_k, db_qk), dw_k, dw_v, dw_o)
    out = tuple([x.reshape(like.shape).to(like.dtype) for x, like in zip(out, weights, strict=True)])
    return *out, grad.sum(1).to(bias_dtype)
