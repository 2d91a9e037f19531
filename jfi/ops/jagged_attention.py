"""Jagged flash attention: queries with their own offsets against keys with theirs.

    O[i] = Σ_j P[i,j] v_j        P[i,:] = softmax_j(scale · q_i k_j + bias_j)

over the keys j of the sample of query i, per head.  With the same offsets for both it is self-attention over histories;
with others, each sample has its own number of candidates to rank against its history (Xu et al., 'Enhancing Performance
and Scalability of Large-Scale Recommendation Systems with Jagged Flash Attention', RecSys 2024).  The forward saves the
log-sum-exp L; with Δ = Σ_e dO·O - dL, the backward recomputes the weights:

    dv = Σ_i P dO      dS = P (dO·v - Δ)      dk = scale Σ_i dS q      dq = scale Σ_j dS k      dbias = Σ_i dS
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from jfi import reference
from jfi.ops._checks import check_dim, check_floating, check_history, check_impl, check_offsets, check_scale
from jfi.ops._dispatch import aligned, operator, public
from jfi.ops.explain import explains
from jfi.plan import JaggedAttentionInputs, plan_jagged_attention


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    bias: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    inputs = (query, key, value, query_offsets, key_offsets, bias, scale, left, right)
    if impl == "torch":
        from jfi.cpu import jagged_attention

        return jagged_attention.forward(*inputs)
    from jfi.kernels.jagged_attention import launch

    x = JaggedAttentionInputs(*inputs)
    return launch.forward(x, plan_jagged_attention(x, impl))


def _forward_fake(query, key, value, *_):
    stats = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_empty(*query.shape[:2], (key if value is None else value).shape[2])
    return out, query.new_empty(query.shape[:2], dtype=stats)


def _backward(
    grad: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    impl: str,
) -> list[Tensor]:
    grad, dlse = aligned(grad), None if dlse is None else dlse.contiguous()
    tensors, window = (query, key, value, query_offsets, key_offsets, bias), (left, right)
    if impl == "torch":
        from jfi.cpu import jagged_attention

        grads = jagged_attention.backward(grad, dlse, *tensors, out, lse, scale, *window)
    else:
        from jfi.kernels.jagged_attention import launch

        x = JaggedAttentionInputs(*tensors, scale, *window)
        grads = launch.backward(grad, dlse, x, out, lse, plan_jagged_attention(x, impl))
    return [x for x in grads if x is not None]


def _backward_fake(grad, dlse, query, key, value, query_offsets, key_offsets, bias, *_):
    return [torch.empty_like(x) for x in (query, key, value, bias) if x is not None]


def _save(ctx, inputs, output) -> None:
    *tensors, scale, left, right, impl = inputs
    ctx.rest = scale, left, right, impl
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, dlse):
    if grad is None and dlse is None:
        return (None,) * 10
    saved = ctx.saved_tensors
    _, _, value, _, _, bias, out, _ = saved
    grad = torch.zeros_like(out) if grad is None else grad
    grads = iter(_jagged_attention_bwd(grad, dlse, *saved, *ctx.rest))
    dquery, dkey = next(grads), next(grads)
    dvalue = None if value is None else next(grads)
    dbias = None if bias is None else next(grads)
    return dquery, dkey, dvalue, None, None, dbias, None, None, None, None


_jagged_attention_bwd = operator("jagged_attention_bwd", _backward, _backward_fake)
_jagged_attention_fwd = operator("jagged_attention_fwd", _forward, _forward_fake, _save, _differentiate)


@cache
def _exported_fwd() -> Callable:
    """The forward that AOTInductor compiles into a package; imported when wanted, since it needs Triton."""
    from jfi.kernels.jagged_attention import export

    export.forward.register_autograd(_differentiate, setup_context=_save)
    return export.forward


def _window(causal: bool, window_size: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query sees."""
    if window_size is not None and not (isinstance(window_size, tuple) and len(window_size) == 2):
        raise TypeError(f"window_size must be a pair (left, right) or None, got {window_size!r}")
    left, right = window_size or (None, None)
    for side, bound in (("left", left), ("right", right)):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | torch.SymInt)):
            raise TypeError(f"window_size must have a {side} of None (unbounded) or an int, got {bound!r}")
        if bound is not None and bound < 0:
            raise ValueError(f"window_size must have a {side} of None (unbounded) or at least 0, got {bound}")
    return left, 0 if causal else right


@public
def jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    query_offsets: Tensor,
    key_offsets: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    key_bias: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed queries over the packed keys of the same sample.

    Args:
        query: [R, H, D], floating.
        key: [S, G, D]; G divides H, and H/G query heads share a key head.
        value: [S, G, E]; None means value = key, which then gets both gradients.
        query_offsets: [B+1], int32 or int64, from 0 to R.
        key_offsets: [B+1], from 0 to S; None means query_offsets: self-attention.
        causal: hide keys after the query.  The last query of a sample is at the position of its last key.
        window_size: (left, right), how many keys before and after its own position a query sees; None, not -1, for no
            bound.
        key_bias: [S, H], added to the scores; -inf hides an event.
        scale: factor of the scores; None means 1/sqrt(D).
        return_lse: also return the log-sum-exp of each query's scores, which is needed to combine the attention to
            parts of a history; it is differentiable like the output.
        impl: "triton" (rows of at most 512 float32 or 1,024 half-precision elements), "torch" (on a GPU the plain
            formula, which holds every query-key pair in memory and synchronizes once), or "auto": Triton for CUDA
            tensors except float64, PyTorch otherwise.

    Returns:
        [R, H, E]; with ``return_lse`` also [R, H], float32 (float64 for float64).  For a query that sees no key these
        are zeros and -inf.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi
        >>> x = torch.randn(5, 2, 8)
        >>> offsets = torch.tensor([0, 2, 2, 5])
        >>> jfi.ops.jagged_attention(x, x, x, query_offsets=offsets, causal=True).shape
        torch.Size([5, 2, 8])
    """
    options = {"causal": causal, "window_size": window_size, "key_bias": key_bias, "scale": scale, "impl": impl}
    inputs, impl = _prepare(query, key, value, query_offsets=query_offsets, key_offsets=key_offsets, **options)
    if impl == "torch" and query.is_cuda:
        query, key, value, query_offsets, key_offsets, key_bias, scale, *window = inputs
        offsets = (query_offsets, key_offsets)
        out, lse = reference.jagged_attention(query, key, value, *offsets, False, tuple(window), key_bias, scale)
    else:
        # Dynamo takes is_exporting() for true in torch 2.11, also where nothing is exported.
        exports = impl == "triton" and torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
        exports = exports and query.is_cuda
        out, lse = (_exported_fwd() if exports else _jagged_attention_fwd)(*inputs, impl)
    return (out, lse) if return_lse else out


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    query_offsets: Tensor,
    key_offsets: Tensor | None,
    causal: bool,
    window_size: tuple[int | None, int | None] | None,
    key_bias: Tensor | None,
    scale: float | None,
    return_lse: bool = False,
    impl: str,
) -> tuple[JaggedAttentionInputs, str]:
    """Check the arguments; returns what the kernels take, contiguous, and "triton" or "torch"."""
    key_offsets = query_offsets if key_offsets is None else key_offsets
    check_floating(query=query, key=key, value=value, key_bias=key_bias)
    check_dim("query", query, "[R, H, D]")
    rows, num_heads, width = query.shape
    check_history(key, value, key_bias, num_heads, width)
    window = _window(causal, window_size)
    check_offsets("query_offsets", query_offsets, rows, "query", query)
    check_offsets("key_offsets", key_offsets, key.shape[0], "key", query, query_offsets.shape[0] - 1)
    impl = check_impl(impl, query)
    scale = check_scale(scale, width)
    tensors = (query, key, value, query_offsets, key_offsets, key_bias)
    tensors = (None if x is None else x.contiguous() for x in tensors)
    return JaggedAttentionInputs(*tensors, scale, *window), impl


explains(jagged_attention, _prepare, plan_jagged_attention)
