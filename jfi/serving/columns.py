"""Reads a request of flat rows from its bytes, column by column, without an object for each row and value.

`json.loads` makes 3,000 dicts and 10,000 values of a request of 2,000 events and 1,000 candidates. Here the commas of a
list of rows are found in one pass of NumPy, each must be followed by the name of the next field, and a field's values
stay in the body until they are looked up.

A body is read here if it is plain: no escapes, all rows with their fields in the same order and with the same spaces,
no lists in rows and no comma in a value. `read_plain` gives None for any other, which may still be right, so that
`json.loads` decides: what is read here is what it would read, and faults are its to name.
"""

import json
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from jfi.serving.json_numbers import are_integers, decimals, integers
from jfi.serving.known import FIRST_BYTES, MOST_BYTES, WORD, KnownValues
from jfi.utils.encoding import UNKNOWN, text_of

_QUOTE, _COMMA, _END, _SPACE, _POINT = b'",} .'
_MINUS = b"-"[0]
#: By the first byte of a text whether it may be the text of a number or of a boolean.
_MAY_BE_OTHER = np.isin(np.arange(256), list(b"-0123456789TF"))
_NULL = b"null"
_NULL_WORD = int.from_bytes(_NULL, "little")
#: Most lists in a plain body beside those of rows, and most bytes before a list in which its key is looked for: without
#: them a body of brackets alone would take a time that grows with the square of its size.
_MOST_LISTS, _MOST_BEFORE = 1000, 4096
#: Most bytes, and most values of a column, in one call of `json.loads`, which holds the interpreter's lock.
_MOST_BYTES, _MOST_VALUES = 2**16, 4096


class _Text:
    """A body as bytes, as numbers, and as the words and the pairs of words that begin at each byte."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        padded = bytearray(len(body) + 2 * WORD)
        padded[: len(body)] = body
        self.bytes = np.frombuffer(padded, np.uint8)
        self.words = np.ndarray(len(body) + 1, "<u8", padded, strides=(1,))
        # As numbers of 16 bytes, which NumPy reads as fast as those of 8.
        self.pairs = np.ndarray(len(body) + 1, "<c16", padded, strides=(1,))

    @cached_property
    def points(self) -> np.ndarray:
        """The places of all points, ascending, and one behind the body."""
        return np.append(np.flatnonzero(self.bytes == _POINT), len(self.bytes))


class Column:
    """The values of a field: `[N]` places of their JSON in a body, from `start` to before `end`.

    Args:
        text: the body.
        start, end: `[N]` int64.
        texts: `[N]` bool, which values are texts without escapes.
    """

    def __init__(self, text: _Text, start: np.ndarray, end: np.ndarray, texts: np.ndarray) -> None:
        self._text, self._start, self._end, self._texts = text, start, end, texts
        #: `[N]` int64, if they have been looked up.
        self.ids: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._start)

    def __getitem__(self, which: slice | np.ndarray) -> "Column":
        return Column(self._text, self._start[which], self._end[which], self._texts[which])

    def values(self) -> list:
        """Returns the values as Python objects.

        Raises:
            ValueError, RecursionError: not JSON.
        """
        body, values = self._text.body, []
        for first in range(0, len(self), _MOST_VALUES):
            some = slice(first, first + _MOST_VALUES)
            places = zip(self._start[some].tolist(), self._end[some].tolist(), strict=True)
            text = b",".join([body[start:end] for start, end in places]).decode()
            values += json.loads(f"[{text}]", parse_constant=_refuse)
        if len(values) != len(self):
            raise ValueError("lists in a row")
        return values

    def words(self, num_words: int, longer: bool = True) -> tuple[np.ndarray, np.ndarray] | None:
        """Texts, integers and null as `KnownValues.ids_of_words` takes them; None if there are other values.

        Args:
            num_words: of a value.
            longer: whether a longer value is taken for an unknown one; else there is None.

        Returns:
            `[N, num_words]` words, of an integer its digits, and `[N]` bool, which values they may be: not null, and
            not too long for so many words.
        """
        num_texts, start, length = np.count_nonzero(self._texts), self._start, self._end - self._start
        if num_texts:
            quote = 1 if num_texts == len(start) else self._texts.astype(np.int64)
            start, length = start + quote, length - 2 * quote
        known = length <= WORD * num_words
        if not longer and not known.all():
            return None
        words, last = np.empty((len(start), num_words), np.uint64), len(self._text.words) - 1
        for i in range(num_words):
            # A place beyond the body is one beyond the value, of which nothing is kept.
            found = self._text.words[np.minimum(start + WORD * i, last) if i else start]
            np.bitwise_and(found, FIRST_BYTES.take(length - WORD * i if i else length, mode="clip"), out=words[:, i])
        null = self.nulls()
        known &= ~null
        if num_texts < len(start) and (num_texts or not are_integers(words, length)):
            (numbers,) = (~self._texts & ~null).nonzero()
            if len(numbers) and not are_integers(words[numbers], length[numbers]):
                return None
        return words, known

    def ids_of_other_texts(self, ids: np.ndarray, known: KnownValues) -> None:
        """Looks up the values whose id in `ids [N]` is unknown by their texts of `text_of`: that of "7.0" is 7.

        Raises:
            ValueError: not JSON.
        """
        begin = self._text.bytes[self._start + self._texts]
        odd = np.flatnonzero((ids == UNKNOWN) & (self._texts | (begin == _MINUS)) & _MAY_BE_OTHER[begin])
        if len(odd):
            ids[odd] = known.ids([text_of(value) for value in self[odd].values()])

    def nulls(self) -> np.ndarray:
        """`[N]` bool, which values are null or the empty text."""
        is_null = self._text.words[self._start] & FIRST_BYTES[len(_NULL)] == _NULL_WORD
        length = self._end - self._start
        return np.where(self._texts, length == 2, (length == len(_NULL)) & is_null)

    def codes(self) -> np.ndarray | None:
        """`[N]`, equal for equal texts and integers, while each null differs from all others; None if there are others.

        An integer equals the text of its digits.
        """
        num_words = -(-int((self._end - self._start).max()) // WORD)
        found = self.words(num_words) if num_words <= MOST_BYTES // WORD else None
        if found is None:
            return None
        words, not_null = found
        if not not_null.all():
            (null,) = (~not_null).nonzero()
            words[null, 0] = null << 8 | 1  # no text begins with a byte of 1
        return words[:, 0] if num_words == 1 else words.view(f"S{WORD * num_words}")[:, 0]

    def check(self) -> None:
        """Checks that all values are JSON.

        Raises:
            ValueError, RecursionError: they are not.
        """
        if not self._texts.all() and self.numbers() is None and self.integers(0) is None:
            self.values()

    def numbers(self) -> np.ndarray | None:
        """`[N]` float64, by `decimals`; None if a value is not a plain number."""
        return decimals(self._text.words, self._text.points, self._start, self._end)

    def integers(self, missing: int) -> np.ndarray | None:
        """`[N]` int64 of integers, as JSON's or as texts, and `missing` for null; None if there are other values."""
        start, end, texts = self._start + self._texts, self._end - self._texts, self._texts
        null = self.nulls()
        if not null.any():
            return integers(self._text.words, start, end, texts)
        found, (there,) = np.full(len(null), missing), (~null).nonzero()
        if len(there):
            some = integers(self._text.words, start[there], end[there], texts[there])
            if some is None:
                return None
            found[there] = some
        return found


def look_up(columns: list[Column], known: KnownValues) -> None:
    """Gives columns of one vocabulary their ids, where all values are texts, integers or null.

    All together: of small arrays NumPy's calls take longer than their work.
    """
    parts = [column.words(known.num_words, not known.has_others) for column in columns] if known.num_words else [None]
    if any(part is None for part in parts):
        return
    words, may_be_known = (np.concatenate(part) for part in zip(*parts, strict=True))
    ids, at = np.where(may_be_known, known.ids_of_words(words), UNKNOWN), 0
    for column in columns:
        column.ids = ids[at : at + len(column)]
        column.ids_of_other_texts(column.ids, known)
        at += len(column)


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

    def check(self) -> None:
        """See `Column.check`."""
        for column in self.columns.values():
            column.check()


def read_plain(body: bytes, fields: dict[str, Sequence[str]]) -> dict | None:
    """The request with the columns of its rows, or None if it is not plain.

    Args:
        body: JSON in UTF-8.
        fields: by key of a list of rows the names of their fields.

    Returns:
        the request, where each of the lists that is not empty has become `Rows`.

    Example:
        >>> found = read_plain(b'{"a": 1, "rows": [{"x": 7, "y": "b"}, {"x": null, "y": "c"}]}', {"rows": ["x", "y"]})
        >>> found["a"], {name: column.values() for name, column in found["rows"].columns.items()}
        (1, {'x': [7, None], 'y': ['b', 'c']})
    """
    if b"\\" in body or not (body.isascii() or _is_utf8(body)):
        return None
    text, rows, rest, seen = _Text(body), {}, [], set()
    at = begin = others = 0
    while (begin := body.find(b"[", begin) + 1) > 0:
        key = _key_before(body[max(at, begin - _MOST_BEFORE) : begin], fields)
        if key is None:
            others += 1
            if others > _MOST_LISTS:
                return None
            continue
        end = body.find(b"]", begin)
        if key in seen or end < 0:
            return None
        seen.add(key)
        if end > begin:
            rows[key] = _rows(text, begin, end, fields[key])
            if rows[key] is None:
                return None
        rest.append(body[at:begin])
        at = begin = max(begin, end)
    rest = b"".join([*rest, body[at:]])
    if len(rest) > _MOST_BYTES:
        return None
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
        _, colon, end = head.rpartition(b'"%s"' % key.encode())
        if colon and end.translate(None, b" ") == b":[":
            return key
    return None


def _rows(text: _Text, begin: int, end: int, names: Sequence[str]) -> Rows | None:
    """The rows from one place to before another, if they are plain."""
    first = text.body[begin : text.body.find(b"}", begin, min(end, begin + _MOST_BYTES)) + 1]
    try:
        keys = list(json.loads(first))
    except (ValueError, RecursionError):
        return None
    if sorted(keys) != sorted(names) or not keys:
        return None
    region, width = text.bytes[begin:end], len(keys)
    commas = region == _COMMA
    num_values = np.count_nonzero(commas) + 1
    # The fewest bytes of a row: its braces, and of each field the name, a value and a comma.
    least = 2 + sum(len(b'"%s":' % key.encode()) + 2 for key in keys)
    if num_values % width or num_values // width * least > len(region) + 1 or region.min() < _SPACE:
        return None
    commas = np.flatnonzero(commas)
    # Spaces as the first row has them. Before it as if there were another.
    after_comma = b" " if len(commas) and region[commas[0] + 1] == _SPACE else b""
    after_colon = b" " if first.startswith(b'{"%s": ' % keys[0].encode()) else b""
    text.bytes[begin - 1] = _SPACE
    heads = [after_comma + b'{"%s":' % keys[0].encode() + after_colon]
    heads += [after_comma + b'"%s":' % key.encode() + after_colon for key in keys[1:]]
    ends = np.append(commas + begin, end)
    starts = np.append(begin - len(after_comma), ends[:-1] + 1)
    starts, ends = (np.ascontiguousarray(places.reshape(-1, width).T) for places in (starts, ends))
    values = starts + np.array([[len(head)] for head in heads])
    ends[-1] -= 1
    if (values >= ends).any() or (text.bytes[ends[-1]] != _END).any() or not _begin_with(text, starts, heads):
        return None
    texts = (text.bytes[values] == _QUOTE) & (text.bytes[ends - 1] == _QUOTE) & (ends - values >= 2)
    # All quotes are those around keys and texts: none is within a text, and no other value has any.
    if np.count_nonzero(region == _QUOTE) != 2 * (texts.size + np.count_nonzero(texts)):
        return None
    columns = {key: Column(text, values[i], ends[i], texts[i]) for i, key in enumerate(keys)}
    return Rows({name: columns[name] for name in names})


def _begin_with(text: _Text, places: np.ndarray, heads: list[bytes]) -> bool:
    """Returns whether at the places `[fields, N]` there are these bytes, by field."""
    for at in range(0, max(map(len, heads)), 2 * WORD):
        which = [i for i, head in enumerate(heads) if len(head) > at]
        here = places if len(which) == len(heads) else places[which]
        pairs = text.pairs[here + at].view(np.uint64).reshape(*here.shape, 2)
        for word in range(2):
            begin = at + word * WORD
            parts = [heads[i][begin : begin + WORD] for i in which]
            mask = FIRST_BYTES[[[len(part)] for part in parts]]
            wanted = np.array([[int.from_bytes(part, "little")] for part in parts], np.uint64)
            if mask.any() and (pairs[..., word] & mask != wanted).any():
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
