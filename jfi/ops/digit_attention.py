"""Target attention over packed ternary digits: an event is a few int32 words, decoded in registers.

    O[b,t,h] = Σ_s P[b,t,h,s] d[s]        P = softmax_s(scale q[b,t,h]·d[s] + bias[s,h])        s in sample b

d[s] are the L digits of event s, each -1, 0 or 1: key and value of every head.  Projections of the digits stay outside:
with keys W_k d and values W_v d, q = W_kᵀ q' and W_v O give the attention of q' over them, since both commute with the
sums.  With the saved log-sum-exp and Δ = Σ dO·O the backward decodes the events once more:

    dS = P (dO·d - Δ)        dq = scale Σ_s dS d        dbias = Σ_t dS

Digits have no gradient.  Neither direction makes [S, L].
"""

import torch
from torch import Tensor

from jfi import plan, reference
from jfi.operands import DigitAttentionInputs
from jfi.ops._checks import (
    check_dim,
    check_events,
    check_floating,
    check_impl,
    check_key_bias,
    check_offsets,
    check_scale,
    check_untrained,
)
from jfi.ops._digits import check_digits
from jfi.ops._dispatch import aligned, operator, public
from jfi.ops.explain import explains
from jfi.ops.gather_rows import table_bias


def _forward(
    query: Tensor,
    digits: Tensor,
    offsets: Tensor,
    indices: Tensor | None,
    bias: Tensor | None,
    bias_index: Tensor | None,
    value_scale: Tensor | None,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    x = DigitAttentionInputs(query, digits, offsets, indices, bias, bias_index, value_scale, scale)
    if impl == "triton":
        from jfi.kernels.digit_attention import launch

        return launch.forward(x)
    from jfi.cpu import digit_attention

    with torch.autocast("cpu", enabled=False):
        return digit_attention.forward(x)


def _forward_fake(query, *_):
    stats = torch.float64 if query.dtype == torch.float64 else torch.float32
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=stats)


def _backward(
    grad: Tensor,
    query: Tensor,
    digits: Tensor,
    offsets: Tensor,
    indices: Tensor | None,
    bias: Tensor | None,
    bias_index: Tensor | None,
    value_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needed: list[bool],
    scale: float,
    impl: str,
) -> list[Tensor]:
    """The gradients of query and bias that are needed, in this order."""
    x = DigitAttentionInputs(query, digits, offsets, indices, bias, bias_index, value_scale, scale)
    if impl == "triton":
        from jfi.kernels.digit_attention import launch

        grads = launch.backward(aligned(grad), x, out, lse, needed)
    else:
        from jfi.cpu import digit_attention

        with torch.autocast("cpu", enabled=False):
            grads = digit_attention.backward(grad.contiguous(), x, out, lse, needed)
    return [y for y, need in zip(grads, needed, strict=True) if need]


def _backward_fake(grad, query, digits, offsets, indices, bias, *rest):
    return [torch.empty_like(x) for x, need in zip((query, bias), rest[4], strict=True) if need]


def _save(ctx, inputs, output) -> None:
    *tensors, scale, impl = inputs
    ctx.rest = scale, impl
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad, _):
    if grad is None:
        return (None,) * 9
    needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[4]]
    grads = iter(_digit_attention_bwd(grad, *ctx.saved_tensors, needed, *ctx.rest))
    dquery, dbias = [next(grads) if need else None for need in needed]
    return dquery, None, None, None, dbias, *(None,) * 4


_digit_attention_bwd = operator("digit_attention_bwd", _backward, _backward_fake)
_digit_attention_fwd = operator("digit_attention_fwd", _forward, _forward_fake, _save, _differentiate)


@public
def digit_attention(
    query: Tensor,
    digits: Tensor,
    *,
    offsets: Tensor,
    indices: Tensor | None = None,
    key_bias: Tensor | None = None,
    key_bias_index: Tensor | None = None,
    value_scale: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Target attention over events of packed ternary digits, which are key and value of every head.

    Args:
        query: [B, T, H, L], floating; L is the number of digits of an event.
        digits: [S, W] int32, W = ceil(L / 16). Digit l of an event is bits 2 (l % 16) and 2 (l % 16) + 1 of its word
            l // 16, as a signed number of 2 bits: 1 is 0b01, 0 is 0b00 and -1 is 0b11. Bits behind digit L - 1 are not
            read. `jfi.sid.pack_words` and `jfi.sid.sid_words` make such words. They have no gradient.
        offsets: [B+1], int32 or int64, from 0 to S: sample b owns events offsets[b] to offsets[b+1].
        indices: [S], int32 or int64: digits is then a table [N, W], and event s is its row indices[s].
        key_bias: [S, H], added to the scores; -inf hides an event. With key_bias_index a table [R, H] of any floating
            dtype.
        key_bias_index: [S], int32 or int64: the row of the table of biases for each event.
        value_scale: [S], floating: a factor of each event's value; it does not change the softmax and must not require
            a gradient.
        scale: factor of the scores; None means 1/sqrt(L).
        impl: "triton" (at most 512 digits), "torch" (on a GPU the plain formula, with [S, T, H, L] intermediates), or
            "auto": Triton for CUDA tensors except float64, PyTorch otherwise.

    Returns:
        [B, T, H, L]: the weighted sums of digits. An empty or fully hidden history gives zeros.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it. The 2-bit number 0b10, which
            is no digit, and an index outside a table are errors on the CPU, and on a GPU in ``with
            jfi.ops.validation():``. Otherwise an index outside a table gives digits or a bias of 0 on a GPU; what 0b10
            gives there is undefined.

    Example:
        >>> import torch, jfi
        >>> from jfi.sid import pack_words
        >>> digits = torch.randint(-1, 2, (5, 25))
        >>> query, offsets = torch.randn(3, 1, 4, 25), torch.tensor([0, 2, 2, 5])
        >>> out = jfi.ops.digit_attention(query, pack_words(digits), offsets=offsets)
        >>> same = jfi.ops.target_attention(query, digits[:, None].float(), offsets=offsets)
        >>> torch.allclose(out, same, atol=1e-6)
        True
    """
    inputs, impl = prepare_digit_attention(
        query,
        digits,
        offsets=offsets,
        indices=indices,
        key_bias=key_bias,
        key_bias_index=key_bias_index,
        value_scale=value_scale,
        scale=scale,
        impl=impl,
    )
    if impl == "torch" and query.is_cuda:
        query, digits, offsets, indices, key_bias, _, value_scale, scale = inputs
        return reference.digit_attention(query, digits, offsets, indices, key_bias, value_scale, scale)
    return _digit_attention_fwd(*inputs, impl)[0]


def prepare_digit_attention(
    query: Tensor,
    digits: Tensor,
    *,
    offsets: Tensor,
    indices: Tensor | None,
    key_bias: Tensor | None,
    key_bias_index: Tensor | None,
    value_scale: Tensor | None,
    scale: float | None,
    impl: str,
) -> tuple[DigitAttentionInputs, str]:
    """Check the arguments; returns what the kernels take, contiguous, and "triton" or "torch"."""
    check_floating(query=query, key_bias=key_bias if key_bias_index is None else None)
    check_dim("query", query, "[B, T, H, L]")
    batch, _, num_heads, num_digits = query.shape
    check_digits("digits", digits, indices, query, num_digits)
    events = digits if indices is None else indices
    if key_bias_index is None:
        check_key_bias(key_bias, events.shape[0], num_heads)
    check_events(events, key_bias, key_bias_index, value_scale, num_heads)
    check_untrained("value_scale", value_scale)
    check_offsets("offsets", offsets, events.shape[0], "digits" if indices is None else "indices", query, batch)
    impl = check_impl(impl, query)
    scale = check_scale(scale, num_digits)
    if impl == "triton" and num_digits > plan.MAX_DIGITS:
        raise ValueError(
            f"query must have at most {plan.MAX_DIGITS} digits for impl='triton', got {num_digits}: use impl='torch'"
        )
    if key_bias_index is not None and impl == "torch":
        key_bias, key_bias_index = table_bias(key_bias, key_bias_index).to(query.dtype), None
    tensors = (query, digits, offsets, indices, key_bias, key_bias_index, value_scale)
    return DigitAttentionInputs(*[None if x is None else x.contiguous() for x in tensors], scale), impl


explains(digit_attention, prepare_digit_attention, plan.plan_digit_attention)
