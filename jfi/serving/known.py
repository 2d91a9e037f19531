"""Ids of the known values of a column, looked up many at a time.

A dict of a million texts costs four cache misses a value, one after the other: 0.8 µs. Here the bytes of a value and
its id lie side by side in a hash table of NumPy, whose rows are read for all values of a request at once.
"""

from collections.abc import Sequence

import numpy as np

from jfi.utils.encoding import UNKNOWN, Vocabulary, mix

#: Bytes of the longest value that a table holds, such as a UUID or a SHA-256; a longer one is looked up in the dict.
MOST_BYTES = 64
WORD = 8
_FOLLOWING = np.arange(4)
#: Slots of a small table, most of which are free, so that nearly all values are in their home.
_SPARSE = 2**16
#: By a number of bytes, the mask of the first ones of a little-endian word.
FIRST_BYTES = np.array([(1 << 8 * n) - 1 for n in range(WORD + 1)], np.uint64)


class KnownValues(Vocabulary):
    """A Vocabulary that also takes the bytes of values.

    Args:
        values: distinct strings.

    Example:
        >>> KnownValues(["drama", "war"]).ids(["war", None, "opera", "drama"])
        array([2, 0, 0, 1])
    """

    def __init__(self, values: Sequence[str]) -> None:
        super().__init__(values)
        #: Words of a value of the table; 0 if there is none.
        self.num_words = 0
        words, fitting = _words_of(list(values))
        #: Whether there are values that are not in the table.
        self.has_others = len(fitting) < len(values)
        if not len(fitting):
            return
        self.num_words = words.shape[1]
        self._size = max(4 * len(words), min(16 * len(words), _SPARSE))
        # Linear probing, all at once: in the order of their home each takes it or the next free slot.
        home = self._home(words)
        order = np.argsort(home, kind="stable")
        places = np.arange(len(words))
        slot = np.maximum.accumulate(home[order] - places) + places
        #: A row is the words of a value and its id, which is UNKNOWN in a free slot; the last ones are free.
        self._rows = np.zeros((max(self._size, int(slot[-1]) + 1) + len(_FOLLOWING), self.num_words + 1), np.uint64)
        self._rows[slot, :-1] = words[order]
        self._rows[slot, -1] = fitting[order] + 1

    def ids(self, values: Sequence[str | None]) -> np.ndarray:
        """`[N]` int64 ids of N values; `UNKNOWN` for None and for a value that is not in the vocabulary."""
        if not self.num_words:
            return super().ids(values)
        encoded = [b"" if value is None else value.encode("utf-8", "surrogatepass") for value in values]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        # NumPy drops zeros at the end of a text: one with such a byte would be taken for another.
        known = (lengths <= WORD * self.num_words) & ~np.fromiter((0 in one for one in encoded), bool, len(encoded))
        if self.has_others and not known.all():
            return super().ids(values)
        if None in values:
            known &= np.fromiter((value is not None for value in values), bool, len(values))
        words = np.array(encoded, f"S{WORD * self.num_words}").view(np.uint64).reshape(len(encoded), self.num_words)
        return np.where(known, self.ids_of_words(words), UNKNOWN)

    def ids_of_words(self, words: np.ndarray) -> np.ndarray:
        """`[N]` int64 ids of values `[N, num_words]` uint64: UTF-8 without a byte of 0, and zeros behind it."""
        at = self._home(words)
        rows = self._rows.take(at, axis=0)
        ids, other = rows[:, -1].astype(np.int64), ~_equal(rows, words)
        left = np.flatnonzero(other)
        ids[left] = UNKNOWN
        left = left[rows[left, -1] != UNKNOWN]
        at = at[left] + 1
        while len(left):  # their home is another's: the slots that follow, several at a time
            rows = self._rows.take(at[:, None] + _FOLLOWING, axis=0)
            found = np.where(_equal(rows, words[left, None]), rows[..., -1], UNKNOWN).max(axis=1)
            ids[left] = found
            on = (found == UNKNOWN) & (rows[..., -1] != UNKNOWN).all(axis=1)
            left, at = left[on], at[on] + len(_FOLLOWING)
        return ids

    def _home(self, words: np.ndarray) -> np.ndarray:
        state = mix(words[:, 0])
        for column in range(1, words.shape[1]):
            state = mix(state ^ words[:, column])
        return ((state >> np.uint64(32)) * np.uint64(self._size) >> np.uint64(32)).astype(np.int64)


def _equal(rows: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Returns whether rows of a table hold these words."""
    equal = rows[..., 0] == words[..., 0]
    for column in range(1, words.shape[-1]):
        equal &= rows[..., column] == words[..., column]
    return equal


def _words_of(values: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the words `[M, words]` uint64 and the places `[M]` int64 of the values that fit a table."""
    encoded = [value.encode("utf-8", "surrogatepass") for value in values]
    fits = [len(value) <= MOST_BYTES and 0 not in value for value in encoded]
    encoded = [value for value, one in zip(encoded, fits, strict=True) if one]
    size = max(1, -(-max(map(len, encoded), default=0) // WORD))
    return np.array(encoded, f"S{WORD * size}").view(np.uint64).reshape(len(encoded), size), np.flatnonzero(fits)
