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

from jfi import reference
from jfi.kernels import plan
from jfi.ops.checks import (
    check_device,
    check_dim,
    check_events,
    check_floating,
    check_impl,
    check_key_bias,
    check_offsets,
    check_scale,
    check_untrained,
)
from jfi.ops.dispatch import public
from jfi.ops.target_attention import table_bias, target_attention_fwd
from jfi.utils.context import may_read
from jfi.utils.operands import DIGITS_PER_WORD, TargetAttentionInputs, ceil_div


@public
def digit_attention(
    query: Tensor,
    digits: Tensor,
    *,
    offsets: Tensor,
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
            read. `jfi.semantic_ids.pack_words` makes such words. They have no gradient.
        offsets: [B+1], int32 or int64, from 0 to S: sample b owns events offsets[b] to offsets[b+1].
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
            is no digit, and an index outside the table are errors on the CPU, and on a GPU in ``with
            jfi.ops.validation():``. Otherwise an index outside the table gives a bias of 0 on a GPU; what 0b10 gives
            there is undefined.

    Example:
        >>> import torch, jfi
        >>> from jfi.semantic_ids import pack_words
        >>> digits = torch.randint(-1, 2, (5, 25))
        >>> query, offsets = torch.randn(3, 1, 4, 25), torch.tensor([0, 2, 2, 5])
        >>> out = jfi.ops.digit_attention(query, pack_words(digits), offsets=offsets)
        >>> same = jfi.ops.target_attention(query, digits[:, None].float(), offsets=offsets)
        >>> torch.allclose(out, same, atol=1e-6)
        True
    """
    by_event = (offsets, key_bias, key_bias_index, value_scale)
    inputs, impl = prepare_digit_attention(query, digits, *by_event, scale, impl)
    if impl == "torch" and query.is_cuda:
        tensors = (inputs.offsets, inputs.bias, inputs.value_scale)
        return reference.digit_attention(inputs.query, digits, *tensors, inputs.scale)
    return target_attention_fwd(*inputs, impl)[0]


def prepare_digit_attention(
    query: Tensor,
    digits: Tensor,
    offsets: Tensor,
    key_bias: Tensor | None,
    key_bias_index: Tensor | None,
    value_scale: Tensor | None,
    scale: float | None,
    impl: str,
) -> tuple[TargetAttentionInputs, str]:
    """Check the arguments; returns what the kernels take, contiguous, and "triton" or "torch"."""
    check_floating(query=query, key_bias=key_bias if key_bias_index is None else None)
    check_dim("query", query, "[B, T, H, L]")
    batch, _, num_heads, num_digits = query.shape
    check_digits("digits", digits, query, num_digits)
    if key_bias_index is None:
        check_key_bias(key_bias, digits.shape[0], num_heads)
    check_events(digits, key_bias, key_bias_index, value_scale, num_heads)
    check_untrained("value_scale", value_scale)
    offsets = check_offsets("offsets", offsets, digits.shape[0], "digits", query, batch)
    impl = check_impl(impl, query)
    scale = check_scale(scale, num_digits)
    if impl == "triton" and num_digits > plan.MAX_DIGITS:
        raise ValueError(
            f"query must have at most {plan.MAX_DIGITS} digits for impl='triton', got {num_digits}: use impl='torch'"
        )
    if key_bias is not None and key_bias_index is not None and impl == "torch":
        key_bias, key_bias_index = table_bias(key_bias, key_bias_index, query.dtype), None
    optional = (key_bias, key_bias_index, value_scale)
    key_bias, key_bias_index, value_scale = [None if x is None else x.contiguous() for x in optional]
    key = digits.contiguous().unsqueeze(1)
    tensors = (query.contiguous(), key, None, offsets.contiguous(), key_bias, key_bias_index, value_scale)
    return TargetAttentionInputs(*tensors, None, [], [], scale, None), impl


def check_digits(name: str, digits: Tensor, query: Tensor, num_digits: int) -> None:
    """Checks that digits are [S, W]; if readable, that all are -1, 0 or 1."""
    check_dim(name, digits, "[S, W]")
    if digits.shape[1] != (words := ceil_div(num_digits, DIGITS_PER_WORD)):
        must = f"W = {words} for the query's L = {num_digits} digits"
        raise ValueError(f"{name} must have {must}, got {digits.shape[1]}")
    if digits.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {digits.dtype}")
    check_device(name, digits, "query", query)
    if may_read(digits):
        wrong = (digits >> 1) & ~digits & 0x55555555  # the low bit of 0b10
        if num_digits % DIGITS_PER_WORD:
            wrong[:, -1] &= (1 << 2 * (num_digits % DIGITS_PER_WORD)) - 1
        if bool((wrong != 0).any()):
            row = int((wrong != 0).any(1).nonzero()[0])
            raise ValueError(f"{name} must be of 2-bit numbers -1, 0 and 1, got -2 (0b10) in row {row}")
