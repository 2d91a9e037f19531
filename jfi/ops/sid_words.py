"""Semantic IDs of ternary digits, five to a byte of an int64, as the words that `jfi.ops.digit_attention` reads."""

import functools

import torch
from torch import Tensor

from jfi.utils.operands import DIGITS_PER_WORD, ceil_div

#: The ID of an item without content; all of its bytes are 255, which no digits give.
_UNKNOWN = -1


def sid_words(sids: Tensor, num_digits: int, impl: str = "auto") -> Tensor:
    """The words of L + 2 digits: those of the ID, then 1 and 0; of -1, an unknown item, zeros, then 0 and 1.

    Args:
        sids: [S] int64, as `jfi.semantic_ids.Layout` packs them, or -1; not checked.
        num_digits: L, at most 40.
        impl: "triton", "torch", or "auto": Triton on a GPU.

    Returns:
        [S, ceil((L + 2) / 16)] int32.
    """
    if impl == "triton" or (impl == "auto" and sids.is_cuda):
        from jfi.kernels.digit_attention.sid_words import sid_words as launch

        return launch(sids.contiguous(), num_digits)
    bits = _bits_of_bytes().to(sids.device)
    words = [torch.zeros_like(sids, dtype=torch.int32) for _ in range(ceil_div(num_digits + 2, DIGITS_PER_WORD))]
    for byte in range(ceil_div(num_digits, 5)):
        digits = bits[sids >> 8 * byte & 255]
        word, first = divmod(10 * byte, 32)
        words[word] |= digits << first
        if first > 22:  # its digits go on in the next word
            words[word + 1] |= digits >> 32 - first
    # Behind digit L - 1 the last byte has digits of -1.
    whole, rest = divmod(num_digits, DIGITS_PER_WORD)
    words[whole] &= (1 << 2 * rest) - 1
    for word in words[whole + 1 :]:
        word.zero_()
    unknown = sids == _UNKNOWN
    for digit, flag in ((num_digits, ~unknown), (num_digits + 1, unknown)):
        word, position = divmod(digit, DIGITS_PER_WORD)
        words[word] |= flag.int() << 2 * position
    return torch.stack(words, dim=1)


@functools.cache
def _bits_of_bytes() -> Tensor:
    """[256] int32: by byte its five digits, two bits each; of 255 zeros."""
    every = torch.arange(256, device="cpu")
    bits = sum([(every // 3**j % 3 - 1 & 3) << 2 * j for j in range(5)])
    bits[255] = 0
    return bits.int()
