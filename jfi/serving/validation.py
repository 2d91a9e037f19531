"""Checks the values of a request, column by column; a fault is refused with its place."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from operator import itemgetter

import msgspec
import numpy as np
import torch

from jfi.semantic_ids.packing import UNKNOWN_SID, Layout
from jfi.serving.schema import KINDS, LATEST, LONGEST_ID, LONGEST_TEXT, MAX_VALUES, Field
from jfi.serving.vocabulary_tables import KnownValues
from jfi.utils.encoding import LARGEST_NUMBER, UNKNOWN, HashBuckets, HashedIds, are_canonical, text_of
from jfi.utils.errors import suggest

#: Values of a field, row by row: as JSON has them, or an array of those that `numbers` has checked.
Values = Sequence[object] | np.ndarray
#: From the index of a row and the name of a field, or "" for the row, to the place in the request, for messages.
Place = Callable[[int, str], str]
_INTEGER = re.compile(r"-?[0-9]{1,19}")
#: Types of a value that has a text.
_TEXTS = {str, int, float, bool, type(None)}


class BadRequestError(ValueError):
    """A fault in a request, as one line that names the field."""


class Rows:
    """The candidates or the events: a list of objects or of ids, or an object of lists, one for each field.

    Args:
        name: of the part of the request.
        given: what the request has there.
        known: names of the fields that a row may have; all rows have the same ones.
        most: of more rows the last ones are kept.
        of_ids: the field whose values a list may have in place of objects, or None.

    Raises:
        BadRequestError: none of these, an unknown field, or lists that differ in length.
    """

    def __init__(
        self, name: str, given: object, known: Collection[str], most: int | None = None, of_ids: str | None = None
    ) -> None:
        self.name, self._is_by_columns, self._of_ids = name, isinstance(given, dict), False
        if isinstance(given, list):
            self._first = max(0, len(given) - (len(given) if most is None else most))
            kept = given[self._first :] if self._first else given
            self._of_ids = of_ids is not None and bool(kept) and not isinstance(kept[0], dict)
            #: By name the values of each field.
            self.columns = {of_ids: kept} if self._of_ids else columns_of(kept, known, self.place)
            self._count = len(kept)
            return
        if not isinstance(given, dict):
            raise BadRequestError(f"{name} must be a list of objects or an object of lists, got {shown(given)}")
        check_names(name, given, known)
        for field, values in given.items():
            if type(values) is not list:
                raise BadRequestError(f"{name}.{field} must be a list with a value for each row, got {shown(values)}")
        lengths = {field: len(values) for field, values in given.items()}
        count = max(lengths.values(), default=0)
        if len(set(lengths.values())) > 1:
            lengths = ", ".join(f"{length} of {field}" for field, length in lengths.items())
            raise BadRequestError(f"{name} must have as many values of each field, got {lengths}")
        self._first = 0 if most is None else max(0, count - most)
        self._count = count - self._first
        self.columns = {field: values[self._first :] if self._first else values for field, values in given.items()}

    def __len__(self) -> int:
        return self._count

    def require(self, names: Iterable[str]) -> None:
        """Refuses rows, if there are any, that lack one of these fields."""
        if self._is_by_columns or len(self):
            check_required(self.place(0, ""), self.columns, names)

    def place(self, row: int, field: str) -> str:
        """Returns how messages name a value, as of `Place`."""
        row += self._first
        if self._is_by_columns:
            return f"{self.name}.{field}[{row}]" if field else self.name
        return f"{self.name}[{row}].{field}" if field and not self._of_ids else f"{self.name}[{row}]"


def check_count(name: str, given: object, most: int) -> None:
    """Checks how many rows a part of a request has, before anything is made of them."""
    lists = list(given.values()) if isinstance(given, dict) else [given]
    count = max((len(one) for one in lists if isinstance(one, list)), default=0)
    if count > most:
        raise BadRequestError(f"{name} must be at most {most}, got {count}")


def columns_of(rows: list, known: Collection[str], place: Place) -> dict[str, Sequence[object]]:
    """The values of each field; every row must be an object with the fields of the others, all of them known."""
    names = rows[0] if rows and isinstance(rows[0], dict) else {}
    try:
        if set(map(len, rows)) <= {len(names)} and names.keys() <= {*known} and (names or all(map(_is_object, rows))):
            return {name: [row[name] for row in rows] for name in names}
    except (TypeError, KeyError):
        pass
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise BadRequestError(f"{place(i, '')} must be an object, got {shown(row)}")
        check_names(place(i, ""), row, known)
    names = set().union(*rows)
    for i, row in enumerate(rows):
        check_required(place(i, ""), row, names)
    raise AssertionError("rows with the same known fields have columns")


def _is_object(row: object) -> bool:
    return isinstance(row, dict)


def check_names(place: str, given: dict, known: Collection[str]) -> None:
    """Checks that an object has no other fields than these."""
    for name in given:
        if name not in known:
            raise BadRequestError(f"{place} has an unknown field {shown(name)}; {suggest(name, sorted(known))}")


def check_required(place: str, given: Collection[str], names: Iterable[str]) -> None:
    """Checks that an object has these fields."""
    if lacking := sorted(name for name in names if name not in given):
        raise BadRequestError(f"{place} lacks the field '{lacking[0]}'")


def take(values: Values, rows: np.ndarray, indices: list[int]) -> Values:
    """The values of some rows, at least one, which are given as an array and as a list."""
    if isinstance(values, np.ndarray):
        return values.take(rows)
    return itemgetter(*indices)(values) if len(indices) > 1 else [values[indices[0]]]


def texts(
    one: Field, values: Sequence[object], place: Place, only_equality: bool = False
) -> Sequence[str | int | None]:
    """The values of a category as texts; where only their equality is asked for, integers may stay."""
    kinds = set(map(type, values))
    if not kinds <= _TEXTS:
        refuse(one, values, place, [type(value) in _TEXTS for value in values])
    if only_equality and kinds <= {int, type(None)}:
        return values
    if kinds == {int}:
        return msgspec.json.encode(values)[1:-1].decode().split(",")  # faster than str
    if kinds == {str} and are_canonical(values):
        found = distinct = values
    elif kinds <= {str, type(None)}:  # many are equal
        by_value = {value: text_of(value) for value in set(values)}
        found, distinct = list(map(by_value.__getitem__, values)), by_value.values()
    else:
        found = distinct = list(map(text_of, values))
    if str in kinds and max(map(len, filter(None, distinct)), default=0) > LONGEST_TEXT // 4:
        for row, text in enumerate(found):
            if text is not None and (size := len(text.encode())) > LONGEST_TEXT:
                at = place(row, one.name)
                raise BadRequestError(f"{at} must have texts of at most {LONGEST_TEXT} bytes, got one of {size}")
    return found


def ids_of(
    one: Field, known: KnownValues | HashBuckets | HashedIds, values: Sequence[object], place: Place
) -> np.ndarray:
    """`[N]` int64 ids of a category's values."""
    if one.default is not None or not isinstance(known, KnownValues):
        return known.ids([one.default if text is None else text for text in texts(one, values, place)])
    if values and type(values[0]) is int:
        values = texts(one, values, place)
    try:  # most texts are those of the vocabulary, as they are
        ids = known.ids(values)
    except TypeError:  # of a list or an object
        return known.ids(texts(one, values, place))
    (unknown,) = (ids == UNKNOWN).nonzero()
    if len(unknown):
        rows = unknown.tolist()
        found = texts(one, take(values, unknown, rows), lambda i, field: place(rows[i], field))
        ids[unknown] = known.ids(found)
    return ids


def lists(
    one: Field, known: KnownValues | HashBuckets | HashedIds, values: Sequence[object], place: Place
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of all values of a field that has lists, and `[N]` int64 numbers of them, as of `flat_values`."""
    flat, lengths, place = flat_values(one, values, place)
    return ids_of(one, known, flat, place), lengths


def flat_values(one: Field, values: Sequence[object], place: Place) -> tuple[Sequence[object], np.ndarray, Place]:
    """All values of a field that has lists, one list after the other, `[N]` int64 numbers of them, and their places.

    Values without a text are left out; null is an empty list.
    """
    kinds = (list, type(None))
    if not set(map(type, values)) <= set(kinds):
        refuse(one, values, place, [type(value) in kinds for value in values])
    values = [value or [] for value in values]
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    if len(lengths) and (most := lengths.max()) > MAX_VALUES:
        at = place(int(lengths.argmax()), one.name)
        raise BadRequestError(f"{at} must be at most {MAX_VALUES} values, got {most}")
    flat = list(chain.from_iterable(values))
    if not set(map(type, flat)) <= _TEXTS:
        refuse(one, values, place, [set(map(type, value)) <= _TEXTS for value in values])
    if None in flat or "" in flat:
        there = np.array([text_of(value) is not None for value in flat])
        lengths = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[there], minlength=len(lengths))
        flat = take(flat, there.nonzero()[0], there.nonzero()[0].tolist()) if there.any() else []
    ends = lengths.cumsum()
    return flat, lengths, lambda i, name: place(int(np.searchsorted(ends, i, "right")), name)


def numbers(one: Field, values: Values, place: Place) -> np.ndarray:
    """`[N]` float64, NaN where missing."""
    if isinstance(values, np.ndarray):
        return values
    types = {int, float} if one.kind == "age" else {int, float, type(None)}
    if not set(map(type, values)) <= types:
        refuse(one, values, place, [type(value) in types for value in values])
    found = np.array(values, np.float64)  # None becomes NaN
    valid = np.isfinite(found)
    if one.kind == "number":
        valid &= np.abs(found) <= LARGEST_NUMBER  # training would take it for missing
    elif one.kind == "age":
        valid &= found >= 0
    if not valid.all():
        valid |= [value is None for value in values]
        if not valid.all():
            refuse(one, values, place, valid)
    return found


def read_time(value: object, place: str) -> float:
    """Returns a time in seconds; one in milliseconds is refused."""
    if type(value) not in (int, float) or not abs(value) < LATEST:
        raise BadRequestError(f"{place} must be a number of seconds since 1970, got {shown(value)}")
    return float(value)


def read_id(value: object, text: str | None, place: str, of: str = "a user") -> str:
    """Returns the text of an id; none, and one that is too long to be a key of the state, is refused."""
    if text is None:
        raise BadRequestError(f"{place} must be the id of {of}, got {shown(value)}")
    if len(text) > LONGEST_ID // 4 and len(text.encode()) > LONGEST_ID:
        raise BadRequestError(f"{place} must be at most {LONGEST_ID} bytes, got {len(text.encode())}")
    return text


def sids(one: Field, values: Sequence[object], place: Place) -> np.ndarray:
    """Semantic IDs, -1 for null; their digits must be in the range of the codec's."""
    found = np.array(values) if set(map(type, values)) == {int} else None
    if found is None or found.dtype != np.int64:
        ids = [_as_int64(value) for value in values]
        if None in ids:
            refuse(one, values, place, [sid is not None for sid in ids])
        found = np.array(ids, np.int64)
    layout = Layout(**one.layout)
    valid = layout.valid(torch.from_numpy(found)).numpy()
    if not valid.all():
        i = int(valid.argmin())
        at = place(i, one.name)
        raise BadRequestError(f"{at} is {found[i]}, which is no ID of {layout}; another codec's?")
    return found


def _as_int64(value: object) -> int | None:
    """A semantic ID of JSON, -1 for null; None if it is none. As text, since JavaScript rounds integers over 2^53."""
    if value is None or value == "":
        return UNKNOWN_SID
    if type(value) is float and value.is_integer() and abs(value) <= 2**53:  # 1.0 is an integer of JSON Schema
        return int(value)
    if type(value) is str and _INTEGER.fullmatch(value):
        value = int(value)
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def refuse(one: Field, values: Values, place: Place, valid: Sequence[bool]) -> None:
    """Raises BadRequestError for the first value that is not valid."""
    i = list(valid).index(False)
    raise BadRequestError(f"{place(i, one.name)} must be {KINDS[one.kind]['description']}, got {shown(values[i])}")


def shown(value: object) -> str:
    """A value as a message shows it, shortened."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
