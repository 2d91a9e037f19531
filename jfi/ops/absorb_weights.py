"""Absorbed projections: products of the weights of multi-head target attention.

By feature f, query t and head h, with each head's part of the weights d = D / H wide:

    W_qk = W_kᵀ W_q [D_x, D_e]      b_qk = W_kᵀ b_q [D_x]      W_vo = W_vᵀ W_oᵀ [D_x, D]

They take some D^3 operations, whatever the batch size.  `jfi.kernels.absorbed_weights` derives their gradients.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from jfi.ops.checks import FLOATING, check_all_dense, check_count
from jfi.ops.dispatch import public


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


#: What the weights are called, and how many dimensions each has.
WEIGHTS = {
    "query_weight": 3,
    "query_bias": 2,
    "key_weight": 3,
    "value_weight": 3,
    "output_weight": 3,
    "output_bias": 2,
}


def check_weights(weights: tuple[Tensor, ...], count: int, num_heads: int) -> None:
    """Checks that weights are the first ``count`` of WEIGHTS, dense and floating, and num_heads a number."""
    if not isinstance(weights, tuple | list) or len(weights) != count:
        names = ", ".join([*WEIGHTS][:count])
        got = len(weights) if isinstance(weights, tuple | list) else type(weights).__name__
        raise (ValueError if isinstance(got, int) else TypeError)(f"weights must be the tensors {names}, got {got}")
    check_all_dense(WEIGHTS, weights)
    for (name, dims), x in zip(WEIGHTS.items(), weights, strict=False):
        if x.dtype not in FLOATING:
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}")
        if x.dim() != dims or 0 in x.shape[2:]:
            raise ValueError(f"{name} must have {dims} dimensions, [F, ...], of no width 0, got shape {list(x.shape)}")
    check_count("num_heads", num_heads, least=1, optional=False)


def check_shapes(
    weights: tuple[Tensor, ...], sizes: tuple[int, int, int, int], num_heads: int, device: torch.device
) -> None:
    """Checks that weights fit each other and sizes (F, D, D_e, D_x), are of one dtype, and on a device."""
    features, dim, d_e, d_x = sizes
    queries, dtype = weights[0].shape[1], weights[0].dtype
    if dim == 0 or dim % num_heads or queries % dim:
        raise ValueError(
            f"query_weight must be [F, T · D, D_e] of a D >= 1 that num_heads = {num_heads} divides, D = {dim}, "
            f"got shape {list(weights[0].shape)}"
        )
    by_event = (features, dim, d_x)
    shapes = ((features, queries, d_e), (features, queries), by_event, by_event, (features, dim, queries))
    for name, x, shape in zip(WEIGHTS, weights, (*shapes, (features, dim)), strict=False):
        if x.shape != shape:
            raise ValueError(f"{name} must be [F, ...] = {list(shape)}, got {list(x.shape)}")
        if x.dtype != dtype or x.device != device:
            raise ValueError(f"{name} must be {dtype} on {device}, like the other tensors, got {x.dtype} on {x.device}")


@public
def absorb_weights(
    weights: tuple[Tensor, ...], num_heads: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply the weights of multi-head target attention, so that keys and values need no projection.

    Args:
        weights: W_q [F, T · D, D_e], b_q [F, T · D], W_k and W_v [F, D, D_x] and W_o [F, D, T · D] of F features, laid
            out as in ``torch.nn.MultiheadAttention``.
        num_heads: H, which divides D.
        dtype: of the products, floating; None means that of the weights.

    Returns:
        W_qk [F, T · H · D_x, D_e], b_qk [F, T · H · D_x] and W_vo [F, T · H · D_x, D], differentiable.  The queries
        of a target e are W_qk e + b_qk; the output is W_voᵀ a + b_o, where a is what the queries attended to.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it, or one of the weights.

    Example:
        >>> import torch, jfi
        >>> shapes = (1, 8, 8), (1, 8), (1, 8, 16), (1, 8, 16), (1, 8, 8)
        >>> w_qk, b_qk, w_vo = jfi.ops.absorb_weights(tuple(torch.randn(shape) for shape in shapes), num_heads=2)
        >>> w_qk.shape, b_qk.shape, w_vo.shape
        (torch.Size([1, 32, 8]), torch.Size([1, 32]), torch.Size([1, 32, 8]))
    """
    check_weights(weights, 5, num_heads)
    w_q, _, w_k, *_ = weights
    check_shapes(weights, (w_q.shape[0], w_k.shape[1], w_q.shape[2], w_k.shape[2]), num_heads, w_q.device)
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in FLOATING):
        raise TypeError(f"dtype must be float32, bfloat16, float16, float64 or None, got {dtype!r}")
    return absorb(weights, num_heads, w_q.dtype if dtype is None else dtype)


def absorb(weights: tuple[Tensor, ...], num_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `absorb_weights` of checked arguments."""
    features, num_queries = weights[0].size(0), weights[0].size(1) // weights[2].size(1)
    w_q, b_q, w_k, w_v, w_o = _by_head(tuple([x.to(dtype) for x in weights]), num_queries, num_heads)
    w_qk = torch.bmm(w_k.mT, w_q).view(features, -1, w_q.size(2))
    b_qk = torch.bmm(b_q, w_k).view(features, -1)
    return w_qk, b_qk, torch.bmm(w_v.mT, w_o).view(features, -1, w_o.size(2))


def absorb_in_kernel(
    weights: tuple[Tensor, ...], num_heads: int, dtype: torch.dtype, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `absorb_weights` without a graph, on a GPU in one launch."""
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
        weights, num_heads: as `absorb_weights` takes them.
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
