"""Digits of a semantic ID (SID) to and from one int64, and to the words that `jfi.ops.digit_attention` reads.

Ternary digits: byte k of the int64 holds digits 5k to 5k + 4 as Σ (d_j + 1) 3^j, at most 242, so 40 digits fit. The
highest byte may make the number negative. Codes of codebooks: code l in bits l·b to (l + 1)·b - 1, at most 63 bits.
Neither gives UNKNOWN_SID.

Words: int32s of 16 ternary digits. Digit l is bits 2 (l % 16) and 2 (l % 16) + 1 of word l // 16, as a signed number of
2 bits, so that shifts alone decode it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

#: The ID of an item without content: no codec's digits give it, since each of its bytes is 255.
UNKNOWN_SID = -1
#: Most ternary digits of an int64.
MAX_TRITS = 40
#: Ternary digits of a word.
DIGITS_PER_WORD = 16
_PER_BYTE = 5
_BYTES = 8


def pack_trits(digits: Tensor) -> Tensor:
    """Packs ternary digits into int64s, five to a byte.

    Args:
        digits: `[N, L]` of an integer dtype, each -1, 0 or 1; L from 1 to 40.

    Returns:
        `[N]` int64.

    Raises:
        TypeError: the dtype is not one of integers.
        ValueError: the shape is wrong, or a digit is out of range.

    Example:
        >>> digits = torch.tensor([[1, 0, -1], [0, 0, 0]])
        >>> pack_trits(digits)
        tensor([ 5, 13])
        >>> unpack_trits(pack_trits(digits), 3)
        tensor([[ 1,  0, -1],
                [ 0,  0,  0]], dtype=torch.int8)
    """
    _check_integers("digits", digits, 2)
    rows, length = digits.shape
    check_num_digits(length)
    _check_range("digits", digits, -1, 1)
    # Digits that are not there count as -1, which adds nothing.
    padded = torch.full((rows, MAX_TRITS), -1, dtype=torch.int64, device=digits.device)
    padded[:, :length] = digits
    powers = torch.tensor([3**j for j in range(_PER_BYTE)], device=digits.device)
    values = ((padded + 1).view(rows, _BYTES, _PER_BYTE) * powers).sum(2)
    return (values << _shifts(_BYTES, 8, digits.device)).sum(1)


def unpack_trits(sids: Tensor, num_digits: int) -> Tensor:
    """The ternary digits of packed SIDs; those of UNKNOWN_SID are all 0.

    Args:
        sids: `[N]` int64, from `pack_trits`, or UNKNOWN_SID.
        num_digits: L, from 1 to 40.

    Returns:
        `[N, L]` int8, each -1, 0 or 1, on the device of `sids`.

    Raises:
        TypeError: `sids` is not int64.
        ValueError: an ID is not one of L ternary digits; the message names the row.
    """
    layout = Layout(num_digits)
    layout.check(sids)
    digits = trits_of_bytes().to(sids.device)[layout.pieces(sids)].flatten(1)[:, :num_digits]
    return digits.masked_fill((sids == UNKNOWN_SID)[:, None], 0)


def pack_words(digits: Tensor) -> Tensor:
    """Packs ternary digits into int32 words, 16 to a word: what `jfi.ops.digit_attention` reads.

    Args:
        digits: `[N, L]` of an integer dtype, each -1, 0 or 1; any L from 1 on.

    Returns:
        `[N, ceil(L / 16)]` int32; bits behind the last digit are 0.

    Raises:
        TypeError: the dtype is not one of integers.
        ValueError: the shape is wrong, or a digit is out of range.

    Example:
        >>> pack_words(torch.tensor([[1, 0, -1], [0, 0, 0]]))
        tensor([[49],
                [ 0]], dtype=torch.int32)
    """
    _check_integers("digits", digits, 2)
    if digits.shape[1] == 0:
        raise ValueError(f"digits must have at least one column, got the shape {list(digits.shape)}")
    _check_range("digits", digits, -1, 1)
    return _words(digits)


def sid_words(sids: Tensor, num_digits: int) -> Tensor:
    """The int32 words of packed SIDs of ternary digits, as `pack_words` would make them of the digits.

    Args:
        sids: `[N]` int64, from `pack_trits`, or UNKNOWN_SID, whose digits are all 0.
        num_digits: L, from 1 to 40.

    Returns:
        `[N, ceil(L / 16)]` int32, on the device of `sids`.

    Raises:
        TypeError: `sids` is not int64.
        ValueError: an ID is not one of L ternary digits; the message names the row.

    Example:
        >>> digits = torch.randint(-1, 2, (3, 25))
        >>> torch.equal(sid_words(pack_trits(digits), 25), pack_words(digits))
        True
    """
    return _words(unpack_trits(sids, num_digits))


def _words(digits: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(digits, (0, -digits.shape[1] % DIGITS_PER_WORD)).unflatten(
        1, (-1, DIGITS_PER_WORD)
    )
    # The sum of 32 bits is below 2^32; int32 keeps its lowest 32.
    return ((padded.long() & 3) << _shifts(DIGITS_PER_WORD, 2, digits.device)).sum(2).to(torch.int32)


def pack_codes(codes: Tensor, codebook_size: int) -> Tensor:
    """Packs the codes of several codebooks into int64s.

    Args:
        codes: `[N, L]` of an integer dtype, each from 0 to `codebook_size - 1`.
        codebook_size: K, codes of each codebook; L times the bits of a code are at most 63.

    Returns:
        `[N]` int64, never negative.

    Raises:
        TypeError: the dtype is not one of integers.
        ValueError: the shape is wrong, the bits do not fit, or a code is out of range.

    Example:
        >>> pack_codes(torch.tensor([[1, 2, 3]]), 256)
        tensor([197121])
        >>> unpack_codes(torch.tensor([197121, UNKNOWN_SID]), 3, 256)
        tensor([[ 1,  2,  3],
                [-1, -1, -1]])
    """
    _check_integers("codes", codes, 2)
    bits = code_bits(codes.shape[1], codebook_size)
    _check_range("codes", codes, 0, codebook_size - 1)
    return (codes.long() << _shifts(codes.shape[1], bits, codes.device)).sum(1)


def unpack_codes(sids: Tensor, num_levels: int, codebook_size: int) -> Tensor:
    """The codes of SIDs from `pack_codes`, `[N, L]` int64; those of UNKNOWN_SID are all -1.

    Args:
        sids: `[N]` int64.
        num_levels: L, the number of codebooks.
        codebook_size: K, codes of each codebook.

    Raises:
        TypeError: `sids` is not int64.
        ValueError: an ID is not one of such codes; the message names the row.
    """
    layout = Layout(num_levels, codebook_size)
    layout.check(sids)
    return layout.pieces(sids).masked_fill((sids == UNKNOWN_SID)[:, None], -1)


@dataclass(frozen=True)
class Layout:
    """Positions of the digits of a semantic ID in its int64: all that a model or a server must know to read them.

    Args:
        num_digits: L, ternary digits or codes.
        codebook_size: K, codes of each codebook; 0 for ternary digits.

    Raises:
        ValueError: so many digits do not fit an int64.

    Example:
        >>> Layout(3, 256).unpack(torch.tensor([197121]))
        tensor([[1, 2, 3]])
        >>> Layout(2).valid(torch.tensor([5, 99, UNKNOWN_SID]))
        tensor([ True, False,  True])
    """

    num_digits: int
    codebook_size: int = 0

    def __post_init__(self) -> None:
        if self.codebook_size:
            code_bits(self.num_digits, self.codebook_size)
        else:
            check_num_digits(self.num_digits)

    @property
    def piece_bits(self) -> int:
        """Bits of a piece: of a byte of five ternary digits, or of a code."""
        return code_bits(self.num_digits, self.codebook_size) if self.codebook_size else 8

    @property
    def num_pieces(self) -> int:
        """Bytes or codes of an ID."""
        return self.num_digits if self.codebook_size else -(-self.num_digits // _PER_BYTE)

    def pieces(self, sids: Tensor) -> Tensor:
        """`[N, num_pieces]` int64 of SIDs `[N]`, which are not checked; of UNKNOWN_SID all bits are set."""
        return (sids[:, None] >> _shifts(self.num_pieces, self.piece_bits, sids.device)) & ((1 << self.piece_bits) - 1)

    def unpack(self, sids: Tensor) -> Tensor:
        """`[N, L]`, what `unpack_trits` or `unpack_codes` gives."""
        if self.codebook_size:
            return unpack_codes(sids, self.num_digits, self.codebook_size)
        return unpack_trits(sids, self.num_digits)

    def valid(self, sids: Tensor) -> Tensor:
        """`[N]` bool: which of the SIDs `[N]` have such digits, or are UNKNOWN_SID."""
        if self.codebook_size:
            largest = [self.codebook_size - 1] * self.num_pieces
        else:
            last = self.num_digits - _PER_BYTE * (self.num_pieces - 1)
            largest = [3**_PER_BYTE - 1] * (self.num_pieces - 1) + [3**last - 1]
        valid = (self.pieces(sids) <= torch.tensor(largest, device=sids.device)).all(1)
        bits = self.num_pieces * self.piece_bits
        if bits < 64:
            valid &= sids >> bits == 0
        return valid | (sids == UNKNOWN_SID)

    def check(self, sids: Tensor) -> None:
        """Raises TypeError or ValueError unless `sids` is `[N]` int64, each with such digits or UNKNOWN_SID."""
        check_sids(sids)
        valid = self.valid(sids)
        if not valid.all():
            row = int((~valid).nonzero()[0])
            raise ValueError(f"sids[{row}] is {sids[row]}, which is no ID of {self}; another codec may have made it")

    def __str__(self) -> str:
        if self.codebook_size:
            return f"{self.num_digits} codes below {self.codebook_size}"
        return f"{self.num_digits} ternary digits"


def trits_of_bytes() -> Tensor:
    """`[256, 5]` int8, on the CPU: by byte of a packed SID the five ternary digits that it holds."""
    every = torch.arange(256, device="cpu")[:, None]
    powers = torch.tensor([3**j for j in range(_PER_BYTE)], device="cpu")
    return (every // powers % 3 - 1).to(torch.int8)


def check_num_digits(num_digits: int) -> None:
    """Raises ValueError unless so many ternary digits fit an int64."""
    if not 1 <= num_digits <= MAX_TRITS:
        raise ValueError(f"num_digits is {num_digits}, must be from 1 to {MAX_TRITS}, which fit an int64")


def code_bits(num_levels: int, codebook_size: int) -> int:
    """Bits of a code; raises ValueError unless the codes of all levels fit 63 bits."""
    if num_levels < 1:
        raise ValueError(f"num_levels is {num_levels}, must be at least 1")
    if codebook_size < 2:
        raise ValueError(f"codebook_size is {codebook_size}, must be at least 2")
    bits = (codebook_size - 1).bit_length()
    if num_levels * bits > 63:
        raise ValueError(f"num_levels {num_levels} of codebook_size {codebook_size} take {num_levels * bits} bits > 63")
    return bits


def check_sids(sids: Tensor) -> None:
    """Raises TypeError or ValueError unless `sids` is `[N]` int64."""
    if not isinstance(sids, Tensor) or sids.dtype != torch.int64:
        raise TypeError(f"sids must be an int64 tensor, got {getattr(sids, 'dtype', type(sids).__name__)}")
    if sids.dim() != 1:
        raise ValueError(f"sids must be [N], got the shape {list(sids.shape)}")


def _check_integers(name: str, values: Tensor, dim: int) -> None:
    if not isinstance(values, Tensor) or values.is_floating_point() or values.is_complex():
        raise TypeError(f"{name} must be a tensor of integers, got {getattr(values, 'dtype', type(values).__name__)}")
    if values.dim() != dim:
        raise ValueError(f"{name} must be [N, L], got the shape {list(values.shape)}")


def _check_range(name: str, values: Tensor, low: int, high: int) -> None:
    wide = values.long() if values.dtype.itemsize < 4 else values  # a bound that the dtype lacks would wrap around
    wrong = (wide < low) | (wide > high)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name}[{row}, {column}] is {values[row, column]}, must be from {low} to {high}")


def _shifts(count: int, bits: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device) * bits
