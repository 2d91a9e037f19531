"""Reads a request of flat rows from its bytes, column by column, without an object for each row and value.

`json.loads` makes 3,000 dicts and 10,000 values of a request of 2,000 events and 1,000 candidates. Here the commas and
colons of a list of rows are found in one pass of NumPy; what lies between them is compared with the names of the fields,
and a field's values stay in the body until they are looked up.

A body is read here if it is plain: no escapes, all rows with their fields in the same order and with the same spaces, no
lists in rows, no comma or colon in a value. `read` gives None for any other, which may still be right, so that
`json.loads` decides: what is read here is what it would read, and faults are its to name.
"""

import json
from collections.abc import Sequence

import numpy as np

from jfi.serving.known import FIRST_BYTES, WORD

_QUOTE, _COMMA, _COLON, _END, _SPACE = b'",:} '
_NULL = b"null"
_NULL_WORD = int.from_bytes(_NULL, "little")
#: Of eight digits in a little-endian word, the first of which is its lowest byte.
_ZEROS, _HIGH, _SIXES = (np.uint64(int(digits * 8, 16)) for digits in ("30", "f0", "06"))
_PAIRS = ((0x0F0F0F0F0F0F0F0F, 2561, 8), (0x00FF00FF00FF00FF, 6553601, 16), (0x0000FFFF0000FFFF, 42949672960001, 32))
_SUMS = [tuple(map(np.uint64, step)) for step in _PAIRS]


class _Text:
    """A body as bytes, as numbers, and as the words that begin at each byte."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        padded = body + bytes(WORD)
        self.bytes = np.frombuffer(padded, np.uint8)
        self.words = np.ndarray(len(body) + 1, "<u8", padded, strides=(1,))


class Column:
    """The values of a field: `[N]` places of their JSON in a body, from `start` to before `end`.

    Args:
        text: the body.
        start, end: `[N]` int64.
        texts: `[N]` bool, which values are texts without escapes.
    """

    def __init__(self, text: _Text, start: np.ndarray, end: np.ndarray, texts: np.ndarray) -> None:
        self._text, self._start, self._end, self._texts = text, start, end, texts

    def __len__(self) -> int:
        return len(self._start)

    def __getitem__(self, which: slice) -> "Column":
        return Column(self._text, self._start[which], self._end[which], self._texts[which])

    def values(self) -> list:
        """As Python objects.

        Raises:
            ValueError, RecursionError: not JSON.
        """
        body, places = self._text.body, zip(self._start.tolist(), self._end.tolist(), strict=True)
        text = b",".join([body[start:end] for start, end in places]).decode()
        values = json.loads(f"[{text}]", parse_constant=_refuse)
        if len(values) != len(self):
            raise ValueError("lists in a row")
        return values

    def words(self, num_words: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Texts, integers and null as `KnownValues.ids_of_words` takes them; None if there are other values.

        Returns:
            `[N, num_words]` words, of an integer its digits, and `[N]` bool, which values they may be: not null, and
            not too long for so many words.
        """
        start, length = self._start + self._texts, self._end - self._start - 2 * self._texts
        words, last = np.empty((len(start), num_words), np.uint64), len(self._text.words) - 1
        for i in range(num_words):
            # A place beyond the body is one beyond the value, of which nothing is kept.
            found = self._text.words[np.minimum(start + WORD * i, last)]
            np.bitwise_and(found, FIRST_BYTES.take(length - WORD * i, mode="clip"), out=words[:, i])
        known = length <= WORD * num_words
        if not self._texts.all():
            null = ~self._texts & (length == len(_NULL)) & (words[:, 0] == _NULL_WORD)
            (numbers,) = (~self._texts & ~null).nonzero()
            if len(numbers) and not _are_integers(words[numbers], length[numbers]):
                return None
            known &= ~null
        return words, known

    def integers(self) -> np.ndarray | None:
        """`[N]` float64 of values of at most eight digits; None if there are others."""
        length = self._end - self._start
        if length.max() > WORD:
            return None
        unused = ((WORD - length) * 8).astype(np.uint64)
        digits = self._text.words[self._end - WORD] >> unused
        if not _are_integers(digits[:, None], length):
            return None
        digits = (digits << unused) - (_ZEROS << unused)
        for mask, factor, shift in _SUMS:
            digits = (digits & mask) * factor >> shift
        return digits.astype(np.float64)


def _are_integers(words: np.ndarray, length: np.ndarray) -> bool:
    """Whether words `[N, words]` are JSON's integers of so many digits, at least 1, with zeros behind them."""
    if length.max() > WORD * words.shape[1]:
        return False
    for i in range(words.shape[1]):
        digits = words[:, i] | (_ZEROS & ~FIRST_BYTES.take(length - WORD * i, mode="clip"))
        if ((digits & _HIGH) != _ZEROS).any() or (((digits + _SIXES) & _HIGH) != _ZEROS).any():
            return False
    leading_zero = (words[:, 0] & FIRST_BYTES[1]) == ord("0")
    return not (leading_zero & (length > 1)).any()


class Rows:
    """Rows by their columns.

    Args:
        columns: by name of the field, at least one.
    """

    def __init__(self, columns: dict[str, Column]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, which: slice) -> "Rows":
        return Rows({name: column[which] for name, column in self.columns.items()})


def read(body: bytes, fields: dict[str, Sequence[str]]) -> dict | None:
    """The request with the columns of its rows, or None if it is not plain.

    Args:
        body: JSON in UTF-8.
        fields: by key of a list of rows the names of their fields.

    Returns:
        the request, where each of the lists that is not empty has become `Rows`.

    Example:
        >>> found = read(b'{"a": 1, "rows": [{"x": 7, "y": "b"}, {"x": null, "y": "c"}]}', {"rows": ["x", "y"]})
        >>> found["a"], {name: column.values() for name, column in found["rows"].columns.items()}
        (1, {'x': [7, None], 'y': ['b', 'c']})
    """
    if b"\\" in body or not (body.isascii() or _is_utf8(body)):
        return None
    text, rows, rest = _Text(body), {}, []
    at = begin = 0
    while (begin := body.find(b"[", begin) + 1) > 0:
        key = _key_before(body[at:begin], fields)
        if key is None:
            continue
        end = body.find(b"]", begin)
        if end > begin:
            rows[key] = _rows(text, begin, end, fields[key])
            if rows[key] is None:
                return None
        rest.append(body[at:begin])
        at = begin = max(begin, end)
    rest = b"".join([*rest, body[at:]])
    # A key that occurs once is none within a text, where its quotes would be escaped.
    if any(rest.count(b'"%s"' % key.encode()) != 1 for key in fields):
        return None
    try:
        whole = json.loads(rest, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(whole, dict) or any(whole.get(key) != [] for key in fields):
        return None
    return whole | rows


def _key_before(head: bytes, fields: dict[str, Sequence[str]]) -> str | None:
    """The key whose list begins at the end of a text, if it is one of these."""
    for key in fields:
        name, colon, end = head.rpartition(b'"%s"' % key.encode())
        if colon and end.translate(None, b" ") == b":[":
            return key
    return None


def _rows(text: _Text, begin: int, end: int, names: Sequence[str]) -> Rows | None:
    """The rows from one place to before another."""
    first = text.body[begin : text.body.find(b"}", begin, end) + 1]
    try:
        keys = list(json.loads(first))
    except (ValueError, RecursionError):
        return None
    if sorted(keys) != sorted(names) or not keys:
        return None
    region = text.bytes[begin:end]
    found = np.flatnonzero((region == _COMMA) | (region == _COLON)) + begin
    width = len(keys)
    if len(found) % (2 * width) != 2 * width - 1 or region.min() < _SPACE:
        return None
    colons, commas = found[::2], found[1::2]
    if (text.bytes[colons] != _COLON).any() or (text.bytes[commas] != _COMMA).any():
        return None
    after_colon = int(text.bytes[colons[0] + 1] == _SPACE)
    after_comma = int(len(commas) > 0 and text.bytes[commas[0] + 1] == _SPACE)
    # After each value; before the first one as if there were a row before it.
    commas = np.concatenate([[begin - 1 - after_comma], commas, [end]])
    starts, ends = commas[:-1] + 1, commas[1:].copy()
    if (starts >= colons).any() or (colons + after_colon >= ends).any():
        return None
    # Keys with their quotes, and a bracket before the first of a row, as far as the colon.
    starts, colons, ends = (places.reshape(-1, width) for places in (starts, colons, ends))
    for i, key in enumerate(keys):
        lead = b" " * after_comma + (b"{" if i == 0 else b"") + b'"%s":' % key.encode()
        here = starts[:, i]
        if i == 0 and after_comma:  # nothing is before the first
            lead, here = lead[1:], here + 1
            if (text.bytes[here[1:] - 1] != _SPACE).any():
                return None
        if (colons[:, i] + 1 - here != len(lead)).any() or not _all_equal(text, here, lead):
            return None
    values = colons + 1 + after_colon
    if after_colon and (text.bytes[values - 1] != _SPACE).any():
        return None
    ends[:, -1] -= 1
    if (text.bytes[ends[:, -1]] != _END).any():
        return None
    texts = (text.bytes[values] == _QUOTE) & (text.bytes[ends - 1] == _QUOTE) & (ends - values >= 2)
    # All quotes are those around keys and texts: none is within a text, and no other value has any.
    if (values >= ends).any() or np.count_nonzero(region == _QUOTE) != 2 * (colons.size + np.count_nonzero(texts)):
        return None
    columns = {key: (values[:, i], ends[:, i], texts[:, i]) for i, key in enumerate(keys)}
    return Rows({name: Column(text, *map(np.ascontiguousarray, columns[name])) for name in names})


def _all_equal(text: _Text, places: np.ndarray, what: bytes) -> bool:
    """Whether these bytes are at all places."""
    for i in range(0, len(what), WORD):
        part = what[i : i + WORD]
        found = text.words[places + i]
        if len(part) < WORD:
            found &= FIRST_BYTES[len(part)]
        if (found != int.from_bytes(part, "little")).any():
            return False
    return True


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
