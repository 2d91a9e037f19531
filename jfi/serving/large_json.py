"""Reads the JSON of a large request piece by piece, so that a thread can do it beside the event loop.

Python's `json.loads` holds the interpreter's lock until the end: 75 ms for 7.5 MB, while no other request moves. Here
rows are decoded one at a time, the lock is given up after each millisecond, and of a list that the limits cut only the
rows that are kept stay in memory.
"""

import json
import re
import time
from collections import deque
from collections.abc import Callable
from json import JSONDecodeError

#: Characters of an object or a list that are decoded in one call.
PIECE = 1024
#: Seconds of work between two pauses, and of a pause.
_WORK = _PAUSE = 0.001
_skip = re.compile(r"[ \t\n\r]*").match


class Cut(list):
    """The last rows of a list.

    Args:
        rows: that are kept.
        dropped: how many came before them.
    """

    def __init__(self, rows: deque, dropped: int) -> None:
        super().__init__(rows)
        self.dropped = dropped


def loads(body: bytes, parse_constant: Callable[[str], object], most: dict[str, int]) -> object:
    """Parses, as `json.loads` does, a document whose lists at the keys of `most` are cut to as many last rows.

    Raises:
        ValueError, RecursionError: not JSON.

    Example:
        >>> found = loads(b'{"history": [1, 2, 3]}', float, {"history": 2})
        >>> found, found["history"].dropped
        ({'history': [2, 3]}, 1)
    """
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    reading = _Reading(text, parse_constant)
    value, end = reading.value(reading.skip(0), most)
    if reading.skip(end) != len(text):
        raise JSONDecodeError("Extra data", text, reading.skip(end))
    return value


class _Reading:
    def __init__(self, text: str, parse_constant: Callable[[str], object]) -> None:
        self._text, self._decode = text, json.JSONDecoder(parse_constant=parse_constant).raw_decode
        self._until = time.perf_counter() + _WORK

    def skip(self, at: int) -> int:
        """The place of the next character that is no white space."""
        return _skip(self._text, at).end()

    def value(self, at: int, most: dict[str, int] | None = None, rows: int | None = None) -> tuple[object, int]:
        """The value that begins at a place, and the place behind it."""
        if time.perf_counter() > self._until:
            time.sleep(_PAUSE)
            self._until = time.perf_counter() + _WORK
        first = self._text[at : at + 1]
        if first not in ("{", "["):
            return self._decode(self._text, at)
        if most is None and rows is None:
            try:
                value, length = self._decode(self._text[at : at + PIECE])
                return value, at + length
            except JSONDecodeError:  # it is longer, or wrong; where, is said below
                pass
        return self._object(at, most or {}) if first == "{" else self._list(at, rows)

    def _object(self, at: int, most: dict[str, int]) -> tuple[dict, int]:
        found: dict[str, object] = {}
        at = self.skip(at + 1)
        if self._text[at : at + 1] == "}":
            return found, at + 1
        while True:
            if self._text[at : at + 1] != '"':
                raise JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
            key, at = self._decode(self._text, at)
            at = self.skip(at)
            if self._text[at : at + 1] != ":":
                raise JSONDecodeError("Expecting ':' delimiter", self._text, at)
            found[key], at = self.value(self.skip(at + 1), rows=most.get(key))
            at, ends = self._next(at, "}")
            if ends:
                return found, at

    def _list(self, at: int, rows: int | None) -> tuple[list, int]:
        found: deque = deque(maxlen=rows)
        count, at = 0, self.skip(at + 1)
        if self._text[at : at + 1] == "]":
            return [], at + 1
        while True:
            value, at = self.value(at)
            found.append(value)
            count += 1
            at, ends = self._next(at, "]")
            if ends:
                return (list(found) if rows is None else Cut(found, count - len(found))), at

    def _next(self, at: int, end: str) -> tuple[int, bool]:
        """The place of the next value or behind the end, and whether it was the end."""
        at = self.skip(at)
        found = self._text[at : at + 1]
        if found == end:
            return at + 1, True
        if found != ",":
            raise JSONDecodeError("Expecting ',' delimiter", self._text, at)
        return self.skip(at + 1), False
