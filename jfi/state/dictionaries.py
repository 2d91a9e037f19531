"""Numbers of the values of the columns of a state: each text has one, whatever model reads it."""

import hashlib
import struct
from collections.abc import Iterable, Sequence

import numpy as np

from jfi.state.stores import Changes, Get, StateError, finding_damage

#: Before the keys of a dictionary: numbers by text, texts by number, and how many there are.
_NUMBER, _TEXT, _COUNT = b"n", b"t", b"c"
#: In place of `_NUMBER` before the digest of a text that is too long for a key.
_LONG = b"d"
#: Values of a dictionary that get a number; a further one counts as missing.
MAX_NUMBERS = 2**31 - 1
#: Bytes of the longest key of LMDB.
LONGEST_KEY = 511
#: Numbers and texts that are kept in memory.
_MAX_CACHED = 1_000_000
_INTEGER = struct.Struct("<q")


class Cache:
    """Numbers and texts of a store that were read before: they never change."""

    def __init__(self) -> None:
        #: By dictionary the numbers of texts, and the texts of numbers.
        self.numbers: dict[str, dict[str | None, int]] = {}
        self.texts: dict[str, dict[int, str | None]] = {}

    def keep(self, numbers: dict[str, dict[str | None, int]]) -> None:
        """Adds numbers that a store has now."""
        for values, own in numbers.items():
            self.numbers.setdefault(values, {None: 0}).update(own)
        self.trim()

    def trim(self) -> None:
        """Forgets what is more than memory may hold."""
        for cached in (self.numbers, self.texts):
            if sum(map(len, cached.values())) > _MAX_CACHED:
                cached.clear()


class Dictionaries:
    """The numbers of texts, from 1 in each dictionary, and the texts of numbers; 0 is a missing value.

    Args:
        get: reads keys of the store; by default there are none.
    """

    def __init__(self, get: Get | None = None, cache: Cache | None = None) -> None:
        self._get = get or (lambda keys: [None] * len(keys))
        self._cache = cache or Cache()
        #: By dictionary the numbers that the store does not have yet.
        self.new: dict[str, dict[str | None, int]] = {}
        self._new_texts: dict[str, dict[int, str]] = {}
        self._counts: dict[str, int] = {}

    def numbers(self, values: str, texts: Sequence[str | None]) -> np.ndarray:
        """`[N]` int32 numbers of texts of a dictionary; those that have none get the next ones.

        Raises:
            StateError: the next numbers are taken, since the store has lost the count of the dictionary.
        """
        known, new = self._cache.numbers.setdefault(values, {None: 0}), self.new.setdefault(values, {})
        if absent := [text for text in dict.fromkeys(texts) if text not in known and text not in new]:
            self._read(values, absent, known)
        found = (known[text] if text in known else new[text] for text in texts)
        return np.fromiter(found if new else map(known.__getitem__, texts), np.int32, len(texts))

    def _read(self, values: str, absent: list[str], known: dict[str | None, int]) -> None:
        """Adds to `known` the numbers that the store has of texts; the others get new ones."""
        *found, count = self._get([*(_number_key(values, text) for text in absent), _COUNT + values.encode()])
        with finding_damage(f"the numbers of values of '{values}'"):
            own = {text: _INTEGER.unpack(one)[0] for text, one in zip(absent, found, strict=True) if one is not None}
            first = self._counts.setdefault(values, _INTEGER.unpack(count)[0] if count else 0) + 1
        known.update(own)
        lacking = [text for text in absent if text not in own]
        numbers = range(first, min(first + len(lacking), MAX_NUMBERS + 1))
        if any(one is not None for one in self._get([text_key(values, number) for number in numbers])):
            why = f"it has lost the number of values of '{values}'; restore a backup"
            raise StateError(f"the state of users is damaged: {why}")
        self.new[values] |= dict.fromkeys(lacking, 0) | dict(zip(lacking, numbers, strict=False))
        self._new_texts.setdefault(values, {}).update(zip(numbers, lacking, strict=False))
        self._counts[values] += len(numbers)

    def texts(self, values: str, numbers: Iterable[int]) -> list[str | None]:
        """The texts of numbers of a dictionary, None for 0."""
        numbers = list(numbers)
        cached, new = self._cache.texts.setdefault(values, {}), self._new_texts.get(values, {})
        known = {number: new.get(number, cached.get(number)) for number in numbers}
        absent = [number for number, text in known.items() if text is None and number != 0]
        if absent:
            for number, text in zip(absent, self._get([text_key(values, one) for one in absent]), strict=True):
                with finding_damage(f"the values of '{values}'"):
                    if text is None:
                        raise ValueError(f"there is none of number {number}")
                    known[number] = cached[number] = text.decode()
        return list(map(known.__getitem__, numbers))

    def changes(self) -> Changes:
        """Returns what the store gets."""
        found: Changes = {}
        for values, own in self._new_texts.items():
            for number, text in own.items():
                found[_number_key(values, text)] = _INTEGER.pack(number)
                found[text_key(values, number)] = text.encode()
            if own:
                found[_COUNT + values.encode()] = _INTEGER.pack(self._counts[values])
        return found


def _number_key(values: str, text: str) -> bytes:
    key = b"\0".join([_NUMBER + values.encode(), text.encode()])
    if len(key) <= LONGEST_KEY:
        return key
    return b"\0".join([_LONG + values.encode(), hashlib.blake2b(text.encode(), digest_size=32).digest()])


def text_key(values: str, number: int) -> bytes:
    """The key of the text of a number of a dictionary."""
    return b"\0".join([_TEXT + values.encode(), _INTEGER.pack(number)])
