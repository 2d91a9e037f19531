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
from torch.nn import functional as F

from jfi.utils.operands import DIGITS_PER_WORD

#: The ID of an item without content: no codec's digits give it, since each of its bytes is 255.
UNKNOWN_SID = -1
#: Most ternary digits of an int64.
MAX_TRITS = 40
_PER_BYTE = 5


@dataclass(frozen=True)
class Layout:
    """Positions of the digits of a semantic ID in its int64: all that a model or a server must know to read them.

    Args:
        num_digits: L, ternary digits, at most 40, or codes.
        codebook_size: K, codes of each codebook, which take at most 63 bits together; 0 for ternary digits.

    Raises:
        ValueError: so many digits do not fit an int64.

    Example:
        >>> ternary, codes = Layout(3), Layout(3, codebook_size=256)
        >>> ternary.pack(torch.tensor([[1, 0, -1], [0, 0, 0]]))
        tensor([ 5, 13])
        >>> ternary.unpack(torch.tensor([5, UNKNOWN_SID]))
        tensor([[ 1,  0, -1],
                [ 0,  0,  0]], dtype=torch.int8)
        >>> codes.pack(torch.tensor([[1, 2, 3]]))
        tensor([197121])
        >>> codes.unpack(torch.tensor([197121, UNKNOWN_SID]))
        tensor([[ 1,  2,  3],
                [-1, -1, -1]])
        >>> Layout(2).valid(torch.tensor([5, 99, UNKNOWN_SID]))
        tensor([ True, False,  True])
    """

    num_digits: int
    codebook_size: int = 0

    def __post_init__(self) -> None:
        count, size = self.num_digits, self.codebook_size
        if not size and not 1 <= count <= MAX_TRITS:
            raise ValueError(f"num_digits is {count}, must be from 1 to {MAX_TRITS}, which fit an int64")
        if size and count < 1:
            raise ValueError(f"num_levels is {count}, must be at least 1")
        if size and size < 2:
            raise ValueError(f"codebook_size is {size}, must be at least 2")
        if size and (bits := count * self.piece_bits) > 63:
            raise ValueError(f"num_levels {count} of codebook_size {size} take {bits} bits > 63")

    @property
    def piece_bits(self) -> int:
        """Bits of a piece: of a byte of five ternary digits, or of a code."""
        return (self.codebook_size - 1).bit_length() if self.codebook_size else 8

    @property
    def num_pieces(self) -> int:
        """Bytes or codes of an ID."""
        return self.num_digits if self.codebook_size else -(-self.num_digits // _PER_BYTE)

    def pack(self, digits: Tensor) -> Tensor:
        """Packs digits into SIDs.

        Args:
            digits: `[N, L]` of an integer dtype: -1, 0 or 1, or codes from 0 to K - 1.

        Returns:
            `[N]` int64; of codes never negative.

        Raises:
            TypeError: the dtype is not one of integers.
            ValueError: the shape is wrong, or a digit is out of range.
        """
        _check_digits(digits, *((0, self.codebook_size - 1) if self.codebook_size else (-1, 1)))
        if digits.shape[1] != self.num_digits:
            raise ValueError(f"digits must be [N, {self.num_digits}], got the shape {list(digits.shape)}")
        pieces = digits.long()
        if not self.codebook_size:  # digits that are not there count as -1, which adds nothing
            powers = torch.tensor([3**j for j in range(_PER_BYTE)], device=digits.device)
            padded = F.pad(pieces + 1, (0, -self.num_digits % _PER_BYTE))
            pieces = (padded.unflatten(1, (-1, _PER_BYTE)) * powers).sum(2)
        return (pieces << _shifts(self.num_pieces, self.piece_bits, digits.device)).sum(1)

    def pieces(self, sids: Tensor) -> Tensor:
        """`[N, num_pieces]` int64 of SIDs `[N]`, which are not checked; of UNKNOWN_SID all bits are set."""
        return (sids[:, None] >> _shifts(self.num_pieces, self.piece_bits, sids.device)) & ((1 << self.piece_bits) - 1)

    def unpack(self, sids: Tensor) -> Tensor:
        """The digits of SIDs, on their device.

        Args:
            sids: `[N]` int64.

        Returns:
            `[N, L]`: int8 of -1, 0 and 1 for ternary digits, all 0 for UNKNOWN_SID; int64 of codes from 0 on for
            codebooks, all -1 for UNKNOWN_SID.

        Raises:
            TypeError: `sids` is not int64.
            ValueError: an ID has no such digits; the message names the row.
        """
        self.check(sids)
        unknown, pieces = (sids == UNKNOWN_SID)[:, None], self.pieces(sids)
        if self.codebook_size:
            return pieces.masked_fill(unknown, -1)
        digits = trits_of_bytes().to(sids.device)[pieces].flatten(1)[:, : self.num_digits]
        return digits.masked_fill(unknown, 0)

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

    def check(self, sids: Tensor, name: str = "sids") -> None:
        """Raises TypeError or ValueError unless `sids` is `[N]` int64, each with such digits or UNKNOWN_SID."""
        if not isinstance(sids, Tensor) or sids.dtype != torch.int64:
            raise TypeError(f"{name} must be an int64 tensor, got {getattr(sids, 'dtype', type(sids).__name__)}")
        if sids.dim() != 1:
            raise ValueError(f"{name} must be [N], got the shape {list(sids.shape)}")
        valid = self.valid(sids)
        if not valid.all():
            row = int((~valid).nonzero()[0])
            raise ValueError(f"{name}[{row}] is {sids[row]}, which is no ID of {self}; another codec may have made it")

    def __str__(self) -> str:
        if self.codebook_size:
            return f"{self.num_digits} codes below {self.codebook_size}"
        return f"{self.num_digits} ternary digits"


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
    _check_digits(digits, -1, 1)
    padded = F.pad(digits, (0, -digits.shape[1] % DIGITS_PER_WORD)).unflatten(1, (-1, DIGITS_PER_WORD))
    # The sum of 32 bits is below 2^32; int32 keeps its lowest 32.
    return ((padded.long() & 3) << _shifts(DIGITS_PER_WORD, 2, digits.device)).sum(2).to(torch.int32)


def trits_of_bytes() -> Tensor:
    """`[256, 5]` int8, on the CPU: by byte of a packed SID the five ternary digits that it holds."""
    every = torch.arange(256, device="cpu")[:, None]
    powers = torch.tensor([3**j for j in range(_PER_BYTE)], device="cpu")
    return (every // powers % 3 - 1).to(torch.int8)


def _check_digits(digits: Tensor, low: int, high: int) -> None:
    if not isinstance(digits, Tensor) or digits.is_floating_point() or digits.is_complex():
        raise TypeError(f"digits must be a tensor of integers, got {getattr(digits, 'dtype', type(digits).__name__)}")
    if digits.dim() != 2 or not digits.shape[1]:
        raise ValueError(f"digits must be [N, L] with L of at least 1, got the shape {list(digits.shape)}")
    wide = digits.long() if digits.dtype.itemsize < 4 else digits  # a bound that the dtype lacks would wrap around
    wrong = (wide < low) | (wide > high)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(f"digits[{row}, {column}] is {digits[row, column]}, must be from {low} to {high}")


def _shifts(count: int, bits: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device) * bits
