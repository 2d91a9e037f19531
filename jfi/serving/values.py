"""Checks the values of a request, and makes columns of its rows; a fault is refused with its place."""

import re
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

import numpy as np
import torch

from jfi.serving.columns import Column, Rows
from jfi.serving.schema import TYPES, Field
from jfi.sid.packing import UNKNOWN_SID, Layout
from jfi.utils.encoding import LARGEST_NUMBER, text_of
from jfi.utils.suggest import suggest

#: Values of a field, row by row: as JSON has them, still in the body, or an array of those that `numbers` has checked.
Values = Sequence[object] | Column | np.ndarray
#: From the index of a row to its place in the request, for messages.
Place = Callable[[int], str]
_INTEGER = re.compile(r"-?[0-9]{1,19}")
#: Types of a value that has a text.
TEXTS = {str, int, float, bool, type(None)}


class BadRequestError(ValueError):
    """A fault in a request, as one line that names the field."""


def check_rows(name: str, rows: object) -> list | Rows:
    """The candidates or the events."""
    if not isinstance(rows, list | Rows):
        raise BadRequestError(f"{name} must be a list of objects, got {shown(rows)}")
    return rows


def columns_of(rows: list | Rows, names: Sequence[str], place: Place) -> dict[str, Values]:
    """The values of each field; every row must be an object with these fields alone."""
    if isinstance(rows, Rows):
        return rows.columns
    try:
        if set(map(len, rows)) == {len(names)} and (names or all(isinstance(row, dict) for row in rows)):
            if len(names) < 2:
                return {name: [row[name] for row in rows] for name in names}
            return dict(zip(names, zip(*map(itemgetter(*names), rows), strict=True), strict=True))
    except (TypeError, KeyError):
        pass
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise BadRequestError(f"{place(i)} must be an object, got {shown(row)}")
        check_names(place(i), row, names)
    raise AssertionError("rows with these fields alone have columns")


def check_names(place: str, given: dict, known: Iterable[str]) -> None:
    """Checks that an object has these fields and no other."""
    known = sorted(known)
    for name in given:
        if name not in known:
            raise BadRequestError(f"{place} has an unknown field {shown(name)}; {suggest(name, known)}")
    for name in known:
        if name not in given:
            raise BadRequestError(f"{place} lacks the field '{name}'")


def listed(values: Values) -> Sequence[object] | np.ndarray:
    """Values that are out of the body."""
    return values.values() if isinstance(values, Column) else values


def take(values: Values, rows: np.ndarray, places: list[int]) -> Values:
    """The values of some rows, at least one, which are given as an array and as a list."""
    if isinstance(values, np.ndarray):
        return values.take(rows)
    return itemgetter(*places)(values) if len(places) > 1 else [values[places[0]]]


def texts(
    one: Field, values: Sequence[object], place: Place, only_equality: bool = False
) -> Sequence[str | int | None]:
    """The values of a category as texts; where only their equality is asked for, integers may stay."""
    kinds = set(map(type, values))
    if not kinds <= TEXTS:
        refuse(one, values, place, [type(value) in TEXTS for value in values])
    if only_equality and kinds <= {int, type(None)}:
        return values
    return [text_of(value) for value in values]


def numbers(one: Field, values: Values, place: Place) -> np.ndarray:
    """`[N]` float64, NaN where missing."""
    if isinstance(values, Column):
        found = values.numbers()
        values = values.values() if found is None else found
    if isinstance(values, np.ndarray):
        return values
    types = {int, float} if one.kind == "age" else {int, float, type(None)}
    if not set(map(type, values)) <= types:
        refuse(one, values, place, [type(value) in types for value in values])
    try:
        found = np.array(values, np.float64)  # None becomes NaN
    except OverflowError:  # an integer of hundreds of digits
        found = np.array([np.inf if value is not None and abs(value) >= 1e300 else np.nan for value in values])
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


def sids(one: Field, values: Values, place: Place) -> np.ndarray:
    """Semantic IDs, -1 for null; their digits must be in the range of the codec's."""
    found = values.integers(UNKNOWN_SID) if isinstance(values, Column) else None
    if found is None:
        values = listed(values)
        ids = [_as_int64(value) for value in values]
        if None in ids:
            refuse(one, values, place, [sid is not None for sid in ids])
        found = np.array(ids, np.int64)
    layout = Layout(**one.layout)
    valid = layout.valid(torch.from_numpy(found)).numpy()
    if not valid.all():
        i = int(valid.argmin())
        raise BadRequestError(f"{place(i)}.{one.name} is {found[i]}, which is no ID of {layout}; another codec's?")
    return found


def _as_int64(value: object) -> int | None:
    """A semantic ID of JSON, -1 for null; None if it is none. As text, since JavaScript rounds integers over 2^53."""
    if value is None or value == "":
        return UNKNOWN_SID
    if type(value) is str and _INTEGER.fullmatch(value):
        value = int(value)
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def refuse(one: Field, values: Values, place: Place, valid: Sequence[bool]) -> None:
    """Raises BadRequestError for the first value that is not valid."""
    i = list(valid).index(False)
    raise BadRequestError(f"{place(i)}.{one.name} must be {TYPES[one.kind]}, got {shown(values[i])}")


def shown(value: object) -> str:
    """A value as a message shows it, shortened."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
