"""The check of packed ternary digits, which `digit_attention` and `jagged_attention` take."""

import torch
from torch import Tensor

from jfi.ops.checks import check_device, check_dim, check_index, check_size
from jfi.tables.gather_rows import check_indices
from jfi.utils.context import may_read
from jfi.utils.operands import DIGITS_PER_WORD, ceil_div


def check_digits(name: str, digits: Tensor, indices: Tensor | None, query: Tensor, num_digits: int) -> None:
    """digits is [S, W], or [N, W] with indices [S]; where it may be read, of digits, and indices are rows of it."""
    check_dim(name, digits, "[S, W]" if indices is None else "[N, W]")
    if digits.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {digits.dtype}")
    check_device(name, digits, "query", query)
    words = ceil_div(num_digits, DIGITS_PER_WORD)
    check_size(name, digits.shape[1], words, f"W for the query's L = {num_digits} digits")
    if indices is not None:
        check_index("indices", indices, None, "query", query)
        check_indices("indices", indices, digits.shape[0], name, padded=False)
    if may_read(digits):
        # Of a large catalogue the rows that are read.
        are_few = indices is not None and indices.shape[0] < digits.shape[0]
        own = digits.index_select(0, indices) if are_few else digits
        wrong = (own >> 1) & ~own & 0x55555555  # the low bit of 0b10
        if num_digits % DIGITS_PER_WORD:
            wrong[:, -1] &= (1 << 2 * (num_digits % DIGITS_PER_WORD)) - 1
        if bool((wrong != 0).any()):
            row = int((wrong != 0).any(1).nonzero()[0])
            row = int(indices[row]) if are_few else row
            raise ValueError(f"{name} must be of 2-bit numbers -1, 0 and 1, got -2 (0b10) in row {row}")
