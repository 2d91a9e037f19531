"""What a request looks like, and how its values become ids and numbers as those of a training table do.

A value that training has not seen, or that is null, has id 0; a number that is null is the training mean. Every other
fault is refused with its place: a field that is unknown or missing, a value of a wrong type, a number that is none.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import repeat
from typing import Literal

import numpy as np

#: Values of a list; more are refused. Training has no such limit: it keeps all of a user's or candidate's.
MAX_VALUES = 1000
#: Characters of an unknown name, beyond which no near one is looked for: with megabytes that takes a second.
_MAX_NAME = 100
_TYPES = {
    "category": "a string or an integer, or null",
    "categories": f"a list of strings or integers, at most {MAX_VALUES}",
    "slots": f"a list of strings or integers, at most {MAX_VALUES}",
    "number": "a finite number, or null",
    "quantile": "a finite number, or null",
    "age": "a number of seconds, at least 0",
}


class BadRequestError(ValueError):
    """A fault of a request, in one line that names the field."""


@dataclass(frozen=True)
class Field:
    """A field of the user, of a candidate or of an event.

    Args:
        name: in the request; the column of the training table, whose vocabulary it has.
        kind: "category" has one id, "categories" any number of them, and "slots" one for each of its keys, of its first
            values; "number" is a dense feature; "quantile" is cut at `edges` to an id; "age", seconds since the event,
            is cut to the bucket of its logarithm.
        keys: of the model that have its ids.
        edges: of a quantile.
        mean, deviation: of a number in training.
        num_buckets: of an age.
    """

    name: str
    kind: Literal["category", "categories", "slots", "number", "quantile", "age"]
    keys: list[str] = field(default_factory=list)
    edges: list[float] = field(default_factory=list)
    mean: float = 0.0
    deviation: float = 1.0
    num_buckets: int = 0


@dataclass(frozen=True)
class Fields:
    """All fields, and by column the known values, whose ids are their places, from 1."""

    user: list[Field]
    candidate: list[Field]
    event: list[Field]
    vocabularies: dict[str, list[str]]


@dataclass(frozen=True)
class Limits:
    """What a request may hold.

    Args:
        max_candidates: more are refused.
        max_history: events kept of a history, the newest, as in training.
    """

    max_candidates: int
    max_history: int


@dataclass(frozen=True)
class Request:
    """A valid request as the model reads it: S events, R candidates.

    Args:
        ids: int64 by key: those of the user, [R] or more of a candidate's key, [S] of an event's.
        counts: by key with several values the number of each user's or candidate's.
        ages: [S] buckets, or None where the model reads none.
        dense: [R, n] float32, those of the user and of the candidate.
    """

    ids: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]
    ages: np.ndarray | None
    dense: np.ndarray
    num_events: int
    num_candidates: int


def parse(body: bytes) -> object:
    """What JSON says, without the NaN and the infinities that Python would read.

    Raises:
        BadRequestError: not JSON.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON number")

    try:
        return json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the request is not JSON: {error}") from None


class RequestReader:
    """Checks requests and encodes them.

    Args:
        fields: of requests.
        limits: of requests.
    """

    def __init__(self, fields: Fields, limits: Limits) -> None:
        self.fields, self.limits = fields, limits
        self._known = {
            column: {value: i for i, value in enumerate(values, 1)} for column, values in fields.vocabularies.items()
        }

    def schema(self) -> dict:
        """The fields and limits, for people and clients."""
        parts = {"user": self.fields.user, "history": self.fields.event, "candidates": self.fields.candidate}
        return {part: {field.name: _TYPES[field.kind] for field in fields} for part, fields in parts.items()} | {
            "max_candidates": self.limits.max_candidates,
            "max_history": self.limits.max_history,
            "answer": {"scores": "a logit for each candidate, in their order"},
        }

    def __call__(self, request: object) -> Request:
        """Encodes what JSON gave.

        Raises:
            BadRequestError: a fault, by its place.
        """
        if not isinstance(request, dict):
            raise BadRequestError(f"the request must be an object, got {_shown(request)}")
        reads_history = bool(self.fields.event)
        _check_names(
            "the request", request, ["user", "history", "candidates"] if reads_history else ["user", "candidates"]
        )
        candidates = _rows("candidates", request["candidates"])
        if len(candidates) > self.limits.max_candidates:
            raise BadRequestError(f"candidates must be at most {self.limits.max_candidates}, got {len(candidates)}")
        history = _rows("history", request["history"]) if reads_history else []
        left_out = max(0, len(history) - self.limits.max_history)

        encoded = _Encoded({}, {}, [], [])
        self._encode(encoded, self.fields.user, [request["user"]], lambda _: "user")
        user_columns, encoded.dense = [column.repeat(len(candidates)) for column in encoded.dense], []
        self._encode(encoded, self.fields.candidate, candidates, lambda i: f"candidates[{i}]")
        columns = user_columns + encoded.dense
        # As in training: a column of zeros where there is none.
        dense = np.stack(columns, axis=1) if columns else np.zeros((len(candidates), 1), np.float32)
        self._encode(encoded, self.fields.event, history[left_out:], lambda i: f"history[{i + left_out}]")
        ages = encoded.ages[0] if encoded.ages else None
        return Request(encoded.ids, encoded.counts, ages, dense, len(history) - left_out, len(candidates))

    def _encode(self, encoded: "_Encoded", fields: list[Field], rows: list, place: Callable[[int], str]) -> None:
        names = {field.name for field in fields}
        for i, row in enumerate(rows):
            if not isinstance(row, dict):
                raise BadRequestError(f"{place(i)} must be an object, got {_shown(row)}")
            if row.keys() != names:
                _check_names(place(i), row, names)
        for one in fields:
            values = [row[one.name] for row in rows]
            if one.kind == "category":
                encoded.ids[one.keys[0]] = self._category(one, values, place)
            elif one.kind in ("categories", "slots"):
                self._lists(encoded, one, values, place)
            else:
                _add_numbers(encoded, one, values, place)

    def _category(self, one: Field, values: list, place: Callable[[int], str]) -> np.ndarray:
        known, kinds = self._known[one.name], {str, int, type(None)}
        if not set(map(type, values)) <= kinds:
            _refuse(one, values, place, [type(value) in kinds for value in values])
        if int in map(type, values):  # JSON's 5 and "5" are the same value of a column
            values = [str(value) if type(value) is int else value for value in values]
        return np.fromiter(map(known.get, values, repeat(0)), np.int64, len(values))

    def _lists(self, encoded: "_Encoded", one: Field, values: list, place: Callable[[int], str]) -> None:
        fits = [type(value) is list and set(map(type, value)) <= {str, int} for value in values]
        if not all(fits):
            _refuse(one, values, place, fits)
        longest = max(values, key=len)
        if len(longest) > MAX_VALUES:
            at = place(values.index(longest))
            raise BadRequestError(f"{at}.{one.name} must be at most {MAX_VALUES} values, got {len(longest)}")
        known = self._known[one.name]
        lists = [[known.get(str(v), 0) for v in value if v != ""] for value in values]
        if one.kind == "slots":
            for slot, key in enumerate(one.keys):
                encoded.ids[key] = np.array([value[slot] if slot < len(value) else 0 for value in lists], np.int64)
        else:
            encoded.ids[one.keys[0]] = np.array([v for value in lists for v in value], np.int64)
            encoded.counts[one.keys[0]] = np.array([len(value) for value in lists], np.int64)


@dataclass
class _Encoded:
    """What the fields read so far gave."""

    ids: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]
    ages: list[np.ndarray]
    dense: list[np.ndarray]


def _add_numbers(encoded: _Encoded, one: Field, values: list, place: Callable[[int], str]) -> None:
    kinds = {int, float} if one.kind == "age" else {int, float, type(None)}
    if not set(map(type, values)) <= kinds:
        _refuse(one, values, place, [type(value) in kinds for value in values])
    missing = np.array([value is None for value in values], bool)
    try:
        numbers = np.array([0.0 if value is None else value for value in values], np.float64)
    except OverflowError:  # an integer of hundreds of digits
        numbers = np.array([0.0 if value is None or abs(value) < 1e300 else np.inf for value in values])
    fits = np.isfinite(numbers) & ((numbers >= 0) | (one.kind != "age"))
    if not fits.all():
        _refuse(one, values, place, fits)
    if one.kind == "age":
        # The exponent is 1 + floor(log2(age)).
        encoded.ages.append(np.clip(np.frexp(numbers)[1].astype(np.int64), 0, one.num_buckets - 1))
    elif one.kind == "quantile":
        found = np.searchsorted(np.array(one.edges), numbers, side="right") + 1
        encoded.ids[one.keys[0]] = np.where(missing, 0, found).astype(np.int64)
    else:
        encoded.dense.append(np.where(missing, 0.0, (numbers - one.mean) / one.deviation).astype(np.float32))


def _rows(name: str, rows: object) -> list:
    if not isinstance(rows, list):
        raise BadRequestError(f"{name} must be a list of objects, got {_shown(rows)}")
    if not rows:
        raise BadRequestError(f"{name} must not be empty")
    return rows


def _check_names(place: str, given: dict, known: Iterable[str]) -> None:
    known = sorted(known)
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1) if len(name) <= _MAX_NAME else []
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known) or 'none'}"
            raise BadRequestError(f"{place} has an unknown field {_shown(name)}; {hint}")
    for name in known:
        if name not in given:
            raise BadRequestError(f"{place} lacks the field '{name}'")


def _refuse(one: Field, values: list, place: Callable[[int], str], fits: Sequence[bool]) -> None:
    """Raises for the first value that does not fit."""
    at = list(fits).index(False)
    raise BadRequestError(f"{place(at)}.{one.name} must be {_TYPES[one.kind]}, got {_shown(values[at])}")


def _shown(value: object) -> str:
    """A value in a message, cut short."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
