"""Encodes raw values as the ids and numbers that a model reads; needs NumPy alone.

Training (`jfi.data`) encodes whole columns and serving (`jfi.serving`) encodes requests with these same functions, so
that a value has one id in both.
"""

import re
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import repeat
from operator import itemgetter

import numpy as np

#: Id of a value that is missing or that the training rows do not have.
UNKNOWN = 0
#: By unit of a time or a duration how many are a second; the quotient is the float64 next to the moment, as of a date.
PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
#: Of a raw id. The two int64 above stand for none where ids are mapped to rows.
LARGEST_ID = 2**63 - 2
#: Of float32. A dense feature further from 0 counts as missing, so that no mean or deviation leaves float64's range.
LARGEST_NUMBER = float(np.finfo(np.float32).max)
#: Standard deviations. A number further from the mean counts as missing: the model's sums would leave float32's range.
_FURTHEST = 1e18

#: Texts that `text_of` writes otherwise, or may; an expression of RE2 and of Python, without groups that capture.
NOT_CANONICAL = (
    r"^(?:-?(?:0|[1-9][0-9]*)\.[0-9]*0|-?(?:0|[1-9][0-9]*)\.[0-9]{15,}|-?[1-9][0-9]{8,}\.[0-9]{7,}"
    r"|-0(?:\.[0-9]+)?|-?[1-9](?:\.[0-9]+)?e[+-][0-9]{1,3}|True|TRUE|False|FALSE|)$"
)
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]*)\.[0-9]+|-?[1-9](?:\.[0-9]+)?e[+-][0-9]{1,3}|-0")
#: First characters of the texts that `text_of` may change, but for whole numbers.
_FIRST_OF_CHANGED = frozenset("-0123456789TF")
_BOOLEANS = {name: name.lower() for name in ("True", "TRUE", "False", "FALSE")}


def text_of(value: str | int | float | bool | Decimal | None) -> str | None:
    """Returns the text of a value, by which values of all file formats and of requests are compared; None if missing.

    A number has one text, whatever its type: an integer its digits, another number the shortest decimal of its float64
    without an exponent. A text counts as a number if it is a plain decimal such as `-7.50`, or has the exponent that
    programs write, as `1e+16` and `2.5e-07`. Other texts, such as `007`, `+5` and `1e3`, stay as they are. An empty
    text, NaN and a text that UTF-8 cannot hold are missing.

    Example:
        >>> [text_of(value) for value in (7, 7.0, "7.0", Decimal("7.00"), "-0.0", 1e16, "007", True, "TRUE", "")]
        ['7', '7', '7', '7', '0', '10000000000000000', '007', 'true', 'true', None]
    """
    if isinstance(value, Decimal):
        value = format(value, "f") if value.is_finite() else float(value)
    if isinstance(value, str):
        if value.isdigit() and value.isascii():
            return value
        if _FLOAT.fullmatch(value):
            whole, _, fraction = value.partition(".")
            if not fraction.strip("0") and "e" not in whole:
                return "0" if whole == "-0" else whole
            number = float(value)
            return value if np.isinf(number) else text_of(number)
        if not value.isascii() and not _is_utf8(value):
            return None
        return _BOOLEANS.get(value, value) or None
    if value is None or value != value:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = repr(value)
    return format(Decimal(text), "f") if "e" in text else text


def are_canonical(texts: Sequence[str]) -> bool:
    """Returns true only if `text_of` changes none of these texts; it may miss some, such as `7 a`."""
    joined = "".join(texts)
    if not joined.isascii() or not all(texts):
        return False
    return joined.isdigit() or _FIRST_OF_CHANGED.isdisjoint(map(itemgetter(0), texts))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def finite_numbers(texts: Iterable[str]) -> list[float]:
    """Returns the numbers among texts.

    >>> finite_numbers(["NULL", "-1", "nan"])
    [-1.0]
    """
    found = []
    for text in texts:
        with suppress(ValueError):
            found.append(float(text))
    return [number for number in found if np.isfinite(number)]


class Vocabulary:
    """The known values of a categorical column; ids count from 1 in their order.

    Args:
        values: distinct strings; a list, or another sequence.

    Example:
        >>> Vocabulary(["drama", "war"]).ids(["war", None, "opera", "drama"])
        array([2, 0, 0, 1])
    """

    def __init__(self, values: Sequence[str]) -> None:
        self.values = values

    @property
    def num_ids(self) -> int:
        """All ids are below it."""
        return len(self.values) + 1

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {value: i for i, value in enumerate(self.values, 1)}

    def ids(self, values: Sequence[str | None]) -> np.ndarray:
        """`[N]` int64 ids of N values; `UNKNOWN` for None and for a value that is not in the vocabulary."""
        return np.fromiter(map(self._ids.get, values, repeat(UNKNOWN)), np.int64, len(values))


class HashBuckets:
    """Ids of a column with a fixed number of them: `1 + CRC-32 of the value's UTF-8 bytes mod num_buckets`.

    Values that share a bucket share an id. A value that training has not seen has an id like any other.

    Args:
        num_buckets: the number of buckets.

    Example:
        >>> HashBuckets(100).ids(["war", None, "war", "drama"])
        array([98,  0, 98, 17])
    """

    def __init__(self, num_buckets: int) -> None:
        self.num_buckets = num_buckets

    @property
    def num_ids(self) -> int:
        """All ids are below it."""
        return self.num_buckets + 1

    def ids(self, values: Sequence[str | None]) -> np.ndarray:
        """`[N]` int64 ids of N values; `UNKNOWN` for None."""
        hashed = hash_text("" if value is None else value for value in values)
        ids = 1 + (hashed % np.uint64(self.num_buckets)).astype(np.int64)
        return np.where([value is None for value in values], UNKNOWN, ids)


@dataclass(frozen=True)
class HashedIds:
    """Raw ids of a column whose table grows and forgets: 63 bits of a hash of the value's UTF-8 bytes.

    No vocabulary bounds them, and training decides which of them have a row of the table.

    Args:
        capacity: rows of the table.
        min_count: how often an id must occur between two admissions to get a row.

    Example:
        >>> HashedIds(1000).ids(["war", None, "war", "drama"])
        array([...,                   0, ...])
    """

    capacity: int
    min_count: int = 1

    @property
    def num_ids(self) -> int:
        """The rows of the table are below it, and the ids are not."""
        return self.capacity

    def ids(self, values: Sequence[str | None]) -> np.ndarray:
        """`[N]` int64 ids of N values, from 1 to 2^63 - 2; `UNKNOWN` for None."""
        hashed = (hash_words([value or "" for value in values]) >> np.uint64(1)).astype(np.int64)
        return np.where([value is None for value in values], UNKNOWN, hashed.clip(1, LARGEST_ID))


#: Between the values of a cross; a control character that texts do not have.
CROSSED = "\x1f"


def cross(*columns: Sequence[str | None]) -> list[str | None]:
    r"""The values of several columns, row by row, as one; None where one is missing.

    >>> cross(["war", "war", None], ["5", None, "1"])
    ['war\x1f5', None, None]
    """
    return [None if None in row else CROSSED.join(row) for row in zip(*columns, strict=True)]


def quantile_ids(values: np.ndarray, edges: np.ndarray, default: float | None = None) -> np.ndarray:
    """`[N]` int64 ids of numbers by the interval they fall in.

    Args:
        values: `[N]` float64; NaN and the infinities get `UNKNOWN`.
        edges: `[E]` ascending. Id 1 is for values below the first edge, id `E + 1` for values from the last one on.
        default: finite, stands for NaN and the infinities; None for `UNKNOWN`.

    Example:
        >>> quantile_ids(np.array([0.5, 1.0, np.nan, 7.0]), np.array([1.0, 5.0]))
        array([1, 2, 0, 3])
    """
    finite = np.isfinite(values)
    ids = edges.searchsorted(values if default is None else np.where(finite, values, default), side="right") + 1
    return ids if default is not None or finite.all() else np.where(finite, ids, UNKNOWN)


def standardize(
    values: np.ndarray,
    mean: float,
    deviation: float,
    default: float | None = None,
    bounds: tuple[float, float] | None = None,
) -> np.ndarray:
    """`[N]` float32 of numbers `[N]` float64, less the mean and over the standard deviation of the training rows.

    `default` stands for a missing value, or else the mean, which becomes 0. It also stands for an infinite number and
    one beyond float32's range. One more than 1e18 deviations from the mean becomes 0: no model can use it. A number
    outside `bounds` becomes the nearer one.

    Example:
        >>> standardize(np.array([3.0, np.nan, 1e300]), mean=1.0, deviation=2.0).tolist()
        [1.0, 0.0, 0.0]
    """
    usable = np.abs(values) <= LARGEST_NUMBER
    if bounds is not None:
        values = np.clip(values, *bounds)
    with np.errstate(over="ignore"):
        scaled = (np.where(usable, values, mean if default is None else default) - mean) / deviation
    return np.where(np.abs(scaled) <= _FURTHEST, scaled, 0.0).astype(np.float32)


def age_buckets(seconds: np.ndarray, num_buckets: int) -> np.ndarray:
    """`[N]` int64 buckets `1 + floor(log2(age))` of ages, clipped to `[0, num_buckets)`.

    Args:
        seconds: `[N]` float64, at least 0. An age below one second is in bucket 0.
        num_buckets: number of buckets.

    Example:
        >>> age_buckets(np.array([0.0, 0.5, 1.0, 3.9, 4.0, 1e9]), 8)
        array([0, 0, 1, 2, 3, 7])
    """
    buckets = np.right_shift(seconds.view(np.int64), 52)  # sign and exponent of a float64, the exponent biased by 1023
    buckets -= 1022
    return buckets.clip(0, num_buckets - 1, out=buckets)


def hash_text(values: Iterable[str]) -> np.ndarray:
    """`[N]` uint64 below 2^32: the CRC-32 of each value's UTF-8 bytes, as zlib, Spark and others compute it.

    >>> hash_text(["war", "drama"])
    array([1813179697, 3361057716], dtype=uint64)
    """
    return np.fromiter((zlib.crc32(value.encode()) for value in values), np.uint64)


def hash_words(values: Sequence[str]) -> np.ndarray:
    """`[N]` uint64: a hash of each value's UTF-8 bytes, 8 at a time, by `mix`; texts of up to 8 bytes never share one.

    >>> len(set(hash_words([str(number) for number in range(1000)]).tolist()))
    1000
    """
    encoded = [value.encode() for value in values]
    lengths = np.fromiter(map(len, encoded), np.uint64, len(encoded))
    words, hashed = np.maximum(-(-lengths.astype(np.int64) // 8), 1), mix(lengths)
    sizes = np.exp2(np.ceil(np.log2(words))).astype(np.int64)  # few tables, whatever the lengths are
    for size in np.unique(sizes).tolist():
        rows = np.flatnonzero(sizes == size)
        table = np.array([encoded[row] for row in rows.tolist()], f"S{8 * size}").view("<u8").reshape(-1, size)
        state, count = hashed[rows], words[rows]
        for position, column in enumerate(table.T[: count.max()]):
            mixed = mix(state ^ column)
            state = mixed if position <= size // 2 else np.where(position < count, mixed, state)
        hashed[rows] = state
    return hashed


def mix(state: np.ndarray) -> np.ndarray:
    """A step of SplitMix64 (Steele, Lea, Flood 2014): a bijection of uint64 with pseudo-random output."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
