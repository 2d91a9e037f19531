"""Ids of the known values of a column, looked up many at a time.

A dict of a million texts costs four cache misses a value, one after the other: 0.8 µs. Here the bytes of a value and
its id lie side by side in a hash table of NumPy, whose rows are read for all values of a request at once.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import repeat

import numpy as np

from jfi.utils.encoding import UNKNOWN, Vocabulary, mix

#: Values of a vocabulary that has no table: its dict stays in the caches of a CPU, and takes less time.
_FEW = 2**12
#: Bytes of the longest value that a table holds, such as a UUID or a SHA-256; a longer one is looked up in the dict.
_MOST_BYTES = 64
_WORD = 8
_FOLLOWING = np.arange(4)


class KnownValues(Vocabulary):
    """A Vocabulary that looks up many of many values faster.

    Args:
        values: distinct strings.

    Example:
        >>> KnownValues(["drama", "war"]).ids(["war", None, "opera", "drama"])
        array([2, 0, 0, 1])
    """

    def __init__(self, values: Sequence[str]) -> None:
        super().__init__(values)
        #: Words of a value of the table; 0 if there is none.
        self._num_words = 0
        words, fitting = _words_of(values if len(values) > _FEW else [])
        #: Whether there are values that are not in the table.
        self._has_others = len(fitting) < len(values)
        if not len(fitting):
            return
        self._num_words, self._size = words.shape[1], 4 * len(words)
        # Linear probing, all at once: in the order of their home each takes it or the next free slot.
        home = self._home(words)
        order = np.argsort(home, kind="stable")
        position = np.arange(len(words))
        slot = np.maximum.accumulate(home[order] - position) + position
        #: A row is the words of a value and its id, which is UNKNOWN in a free slot; the last ones are free.
        self._rows = np.zeros((max(self._size, int(slot[-1]) + 1) + len(_FOLLOWING), self._num_words + 1), np.uint64)
        self._rows[slot, :-1] = words[order]
        self._rows[slot, -1] = fitting[order] + 1

    def ids(self, values: Sequence[str | None]) -> np.ndarray:
        """`[N]` int64 ids of N values; `UNKNOWN` for None and for a value that is not in the vocabulary.

        Raises:
            TypeError: a value of another type, which a vocabulary of few values may also take for an unknown one.
        """
        if not self._num_words:
            return super().ids(values)
        texts = values
        try:
            joined = "".join(texts)
        except TypeError:
            joined = "".join(texts := [value or "" for value in values])
        if not joined.isascii():
            texts = [text.encode("utf-8", "surrogatepass") for text in texts]
        if "\0" in joined:  # NumPy would drop it at the end of a text
            longer = "?" * (_WORD * self._num_words + 1)
            texts = [longer if "\0" in (value or "") else text for value, text in zip(values, texts, strict=True)]
        return self._look_up(texts, values)

    def ids_of_integers(self, values: list[int]) -> np.ndarray:
        """`[N]` int64 ids of N integers by their digits."""
        if not self._num_words:
            return np.fromiter(map(self._integers.get, values, repeat(UNKNOWN)), np.int64, len(values))
        import orjson  # writes the digits of many in a third of the time of others; an exporter does without it

        return self._look_up(orjson.dumps(values)[1:-1].split(b","), values)

    @cached_property
    def _integers(self) -> dict[int, int]:
        """Ids of the values that are an integer's digits."""
        short = (value for value in self.values if len(value) <= 20 and value.removeprefix("-").isdecimal())
        return {int(value): self._ids[value] for value in short if str(int(value)) == value}

    def _look_up(self, texts: Sequence[str | bytes], values: Sequence[str | int | None]) -> np.ndarray:
        """Ids of texts in ASCII or as bytes; one longer than those of the table is looked up by its value."""
        words = np.array(texts, f"S{_WORD * (self._num_words + 1)}").view(np.uint64)
        words = words.reshape(len(texts), self._num_words + 1)
        ids = self._ids_of_words(words[:, :-1])
        (longer,) = words[:, -1].nonzero()
        if len(longer):
            found = [self._ids.get(values[i], UNKNOWN) for i in longer.tolist()] if self._has_others else UNKNOWN
            ids[longer] = found
        return ids

    def _ids_of_words(self, words: np.ndarray) -> np.ndarray:
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


def _words_of(values: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the words `[M, words]` uint64 and the indices `[M]` int64 of the values that fit a table."""
    encoded = [value.encode("utf-8", "surrogatepass") for value in values]
    fits = [0 < len(value) <= _MOST_BYTES and 0 not in value for value in encoded]
    encoded = [value for value, one in zip(encoded, fits, strict=True) if one]
    size = max(1, -(-max(map(len, encoded), default=0) // _WORD))
    return np.array(encoded, f"S{_WORD * size}").view(np.uint64).reshape(len(encoded), size), np.flatnonzero(fits)
