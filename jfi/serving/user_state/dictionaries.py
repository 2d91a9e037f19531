"""Numbers of the values that the vocabularies of a state of users lack."""

import struct
from collections.abc import Iterable

from jfi.serving.user_state.stores import Changes, Get, StateError, Store, finding_damage
from jfi.utils.encoding import UNKNOWN

#: Before the keys of the values that the vocabularies lack: by text, by number, and how many there are.
_NUMBER, _TEXT, _COUNT = b"n", b"t", b"c"
#: Most values of a dictionary that get a number of their own; a further one is unknown for good.
MAX_UNKNOWN = 10_000_000
#: Bytes of the longest key of LMDB; a longer value is unknown for good, too.
LONGEST_KEY = 511
_INTEGER = struct.Struct("<q")


class Dictionaries:
    """Numbers of the values that the vocabularies of a state lack: -1, -2 and so on in each of its dictionaries.

    Args:
        get: reads keys of the store; by default there are none.
        numbers, texts: numbers by key and texts by key that were read before; both never change.
    """

    def __init__(
        self, get: Get | None = None, numbers: dict[bytes, int] | None = None, texts: dict[bytes, str] | None = None
    ) -> None:
        self._get = get or (lambda keys: [None] * len(keys))
        self._numbers, self._texts = {} if numbers is None else numbers, {} if texts is None else texts
        #: Those that the store does not have yet.
        self.new: dict[bytes, int] = {}
        self._new_texts: dict[bytes, str] = {}
        #: By dictionary its count, and by key the counts that have grown.
        self._counts: dict[str, int] = {}
        self._grown: dict[bytes, int] = {}

    def read(self, values: str, texts: Iterable[str]) -> None:
        """Reads the numbers of texts of a dictionary, all at once.

        Raises:
            StateError: the next numbers are taken, since the store has lost the count of the dictionary.
        """
        keys = dict.fromkeys(_number_key(values, text) for text in texts)
        absent = [key for key in keys if key not in self._numbers and key not in self.new]
        if not absent:
            return
        *found, count = self._get([*absent, _COUNT + values.encode()])
        with finding_damage(f"the numbers of values of '{values}'"):
            known = {key: _INTEGER.unpack(one)[0] for key, one in zip(absent, found, strict=True) if one is not None}
            self._counts.setdefault(values, _INTEGER.unpack(count)[0] if count else 0)
        self._numbers |= known
        first = self._counts[values] + 1
        taken = self._get([text_key(values, -number) for number in range(first, first + len(absent) - len(known))])
        if any(one is not None for one in taken):
            why = f"it has lost the number of values of '{values}'; restore a backup"
            raise StateError(f"the state of users is damaged: {why}")

    def number(self, values: str, text: str) -> int:
        """Returns the number of a text that `read` has read, or a new one; 0 if it is too long or there are too many.

        Args:
            values: the dictionary.
            text: a value.
        """
        key = _number_key(values, text)
        found = self._numbers.get(key) or self.new.get(key)
        if found is not None:
            return found
        if self._counts.setdefault(values, 0) >= MAX_UNKNOWN or len(key) > LONGEST_KEY:
            return UNKNOWN
        self._counts[values] += 1
        self._grown[_COUNT + values.encode()] = self._counts[values]
        number = self.new[key] = -self._counts[values]
        self._new_texts[text_key(values, number)] = text
        return number

    def text(self, values: str, number: int) -> str | None:
        """Returns the text of a number of a dictionary."""
        key = text_key(values, number)
        found = self._new_texts.get(key, self._texts.get(key))
        if found is None:
            (value,) = self._get([key])
            if value is not None:
                with finding_damage(f"a value of '{values}'"):
                    found = self._texts[key] = value.decode()
        return found

    def changes(self) -> Changes:
        """Returns what the store gets."""
        found: Changes = {key: _INTEGER.pack(number) for key, number in self.new.items()}
        found |= {key: text.encode() for key, text in self._new_texts.items()}
        return found | {key: _INTEGER.pack(count) for key, count in self._grown.items()}


def _number_key(values: str, text: str) -> bytes:
    return b"\0".join([_NUMBER + values.encode(), text.encode()])


def text_key(values: str, number: int) -> bytes:
    """The key of the text of a number of a dictionary."""
    return b"\0".join([_TEXT + values.encode(), _INTEGER.pack(number)])


def read_dictionary(store: Store, values: str) -> list[str]:
    """Reads the texts of a dictionary by number: the first is that of -1.

    Raises:
        StateError: one is missing or damaged.
    """
    prefix = text_key(values, 0)[: -_INTEGER.size]

    def scan() -> dict[int, str]:
        return {_INTEGER.unpack(key[-_INTEGER.size :])[0]: text.decode() for key, text in store.scan(prefix)}

    with finding_damage(f"the values of '{values}'"):
        found = scan()
        last = -min(found, default=0)
        if len(found) < last:  # a scan may lack some of what is written meanwhile
            found |= scan()
        return [found[-number] for number in range(1, last + 1)]
