"""JSON's numbers from the words of their digits, many at a time.

A little-endian word has eight characters, the first one in its lowest byte.
"""

import numpy as np

from jfi.serving.known import FIRST_BYTES, WORD

#: Of eight digits.
_ZEROS, _HIGH, _SIXES = (np.uint64(int(digits * 8, 16)) for digits in ("30", "f0", "06"))
#: By a number of bytes, zeros in the bytes behind the first ones.
_FILLS = _ZEROS & ~FIRST_BYTES
_POWERS = np.uint64(10) ** np.arange(WORD, dtype=np.uint64)
_PAIRS = ((0x0F0F0F0F0F0F0F0F, 2561, 8), (0x00FF00FF00FF00FF, 6553601, 16), (0x0000FFFF0000FFFF, 42949672960001, 32))
_SUMS = [tuple(map(np.uint64, step)) for step in _PAIRS]
#: Digits of the longest int64; all numbers of so many fit in 64 bits without a sign.
_MOST_DIGITS = 19
_LARGEST = np.uint64(2**63 - 1)


def are_integers(words: np.ndarray, length: np.ndarray) -> bool:
    """Returns whether words `[N, words]` are JSON's integers of so many digits, at least 1, with zeros behind them."""
    if length.max() > WORD * words.shape[1]:
        return False
    digits = (_are_digits(words[:, i], length - WORD * i if i else length) for i in range(words.shape[1]))
    return all(digits) and not _has_leading_zero(words[:, 0], length)


def decimals(words: np.ndarray, points: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray | None:
    """`[N]` float64, as JSON's parser reads them; None if a value is not a plain number.

    Plain are numbers without sign and exponent, of at most 8 digits before the point and 7 behind it: float64 holds
    15 digits and the power of 10 without an error, so that only their quotient is rounded, as it should be.

    Args:
        words: those that begin at each byte of a text.
        points: the places of all points in the text, ascending, and one behind it.
        start, end: `[N]`, from where to before where each value is.
    """
    whole_end = np.minimum(points.take(points.searchsorted(start)), end)
    whole, fraction = whole_end - start, end - whole_end - 1
    longest = int(fraction.max())
    if longest >= WORD or whole.min() < 1 or whole.max() > WORD or not fraction.all():
        return None
    fraction += fraction < 0  # without a point
    # [1 or 2, N]: before the point, and behind it.
    ends, counts = whole_end[None], whole[None]
    if longest > 0:
        ends, counts = np.stack([whole_end, end]), np.stack([whole, fraction])
    digits = _digits_before(words, ends, counts)
    if digits is None or _has_leading_zero(digits[0], whole):
        return None
    values = _values(digits, counts)
    if longest < 0:
        return values[0].astype(np.float64)
    power = _POWERS.take(fraction)
    return (values[0] * power + values[1]) / power


def integers(words: np.ndarray, start: np.ndarray, end: np.ndarray, texts: np.ndarray) -> np.ndarray | None:
    """`[N]` int64 of digits with or without a minus before them; None if a value is something else, or no int64.

    Args:
        words: those that begin at each byte of a text.
        start, end: `[N]`, from where to before where each value is, at least 16 bytes behind the text's begin.
        texts: `[N]` bool, which of them may begin with zeros, as JSON's own integers may not.
    """
    negative = words[start] & FIRST_BYTES[1] == ord("-")
    start = start + negative
    length = end - start
    if length.min() < 1 or length.max() > _MOST_DIGITS or _has_leading_zero(words[start], np.where(texts, 0, length)):
        return None
    # [1 to 3, N]: the last eight digits, those before, and so on.
    before = WORD * np.arange(-(-int(length.max()) // WORD))[:, None]
    counts = np.clip(length - before, 0, WORD)
    digits = _digits_before(words, end - before, counts)
    if digits is None:
        return None
    found, *higher = _values(digits, counts)
    for place, more in enumerate(higher, 1):
        found = found + more * np.uint64(10 ** (WORD * place))
    if (found > _LARGEST + negative.astype(np.uint64)).any():
        return None
    found = found.view(np.int64)
    return np.where(negative, -found, found)


def _digits_before(words: np.ndarray, ends: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    """Words of the bytes before places, so many of each and zeros behind them; None if one is no digit."""
    digits = words[ends - WORD] >> ((WORD - counts) * 8).astype(np.uint64)
    return digits if _are_digits(digits, counts) else None


def _values(digits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers that words of `_digits_before` are."""
    unused = ((WORD - counts) * 8).astype(np.uint64)
    values = (digits << unused) - (_ZEROS << unused)
    for mask, factor, shift in _SUMS:
        values = (values & mask) * factor >> shift
    return values


def _are_digits(words: np.ndarray, length: np.ndarray) -> bool:
    """Returns whether the first bytes of words, so many of each, are digits; zeros are behind them."""
    digits = words | _FILLS.take(length, mode="clip")
    # A half byte of 3, which 6 more leaves at 3.
    return not ((digits & (digits + _SIXES) & _HIGH) != _ZEROS).any()


def _has_leading_zero(words: np.ndarray, length: np.ndarray) -> bool:
    """Returns whether an integer of more than one digit begins with 0."""
    return bool((((words & FIRST_BYTES[1]) == ord("0")) & (length > 1)).any())
