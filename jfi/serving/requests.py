"""Checks requests, and encodes their values as training encodes the values of its table.

A value that training has not seen, or that is null, gets id 0; a number that is null becomes the training mean. Any
other fault is refused with its place: an unknown or missing field, a value of a wrong type, a number that is infinite.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from jfi.encoding import HashBuckets, Vocabulary, age_buckets, cross, quantile_ids, standardize
from jfi.serving.history_policy import RequestPolicy
from jfi.serving.schema import MAX_VALUES, TYPES, Field, Limits, Schema
from jfi.sid.packing import UNKNOWN_SID, Layout
from jfi.suggest import suggest

#: The field of a request that names the codec of its semantic IDs.
CODEC = "codec"
_INTEGER = re.compile(r"-?[0-9]{1,19}")

#: From the index of a row to its place in the request, for messages.
Place = Callable[[int], str]


class BadRequestError(ValueError):
    """A fault in a request, as one line that names the field."""


@dataclass(frozen=True)
class Request:
    """A valid request as the model reads it: S events, R candidates.

    Args:
        ids: int64 ids by key: those of the user, [R] or more of a candidate's key, [S] of an event's key.
        counts: by multi-valued key the number of ids of the user or of each candidate.
        ages: [S] buckets of the events' ages, or None for a model that does not read them.
        dense: [R, n] float32, the dense features of the user and of each candidate.
        num_events: S.
        num_candidates: R.
    """

    ids: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]
    ages: np.ndarray | None
    dense: np.ndarray
    num_events: int
    num_candidates: int


def parse(body: bytes) -> object:
    """Parses JSON, but refuses the NaN and the infinities that Python's parser would accept.

    Raises:
        BadRequestError: not JSON.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the request is not JSON: {error}") from None


class RequestReader:
    """Checks and encodes requests.

    Args:
        schema: the fields of a request.
        limits: the limits of a request.
        policy: chooses among the events, with `schema.policy`.
    """

    def __init__(self, schema: Schema, limits: Limits, policy: RequestPolicy | None = None) -> None:
        self.schema, self.limits, self._policy = schema, limits, policy
        #: Fields of an event that no model reads.
        self._of_policy = [] if schema.policy is None else schema.policy.fields()
        self._known: dict[str, Vocabulary | HashBuckets] = {
            column: Vocabulary(values) for column, values in schema.vocabularies.items()
        }
        for one in schema.user + schema.candidate + schema.event:
            if one.kind in ("category", "categories", "slots", "cross") and one.num_buckets:
                self._known[one.name] = HashBuckets(one.num_buckets)
        self._parts = ["user", "history", "candidates"] if schema.event else ["user", "candidates"]
        self._parts += [] if schema.codec is None else [CODEC]

    def describe(self) -> dict:
        """The fields and limits, for people and clients."""
        events = self.schema.event + self._of_policy
        parts = {"user": self.schema.user, "history": events, "candidates": self.schema.candidate}
        described = {
            part: {one.name: TYPES[one.kind] for one in fields if one.kind != "cross"} for part, fields in parts.items()
        }
        return (
            described
            | ({} if self.schema.codec is None else {CODEC: self.schema.codec})
            | {
                "max_candidates": self.limits.max_candidates,
                "max_history": self.limits.max_history,
                "answer": {"scores": "a logit for each candidate, in the order of the request"},
            }
        )

    def __call__(self, request: object) -> Request:
        """Encodes a parsed request.

        Raises:
            BadRequestError: a fault, with its place.
        """
        if not isinstance(request, dict):
            raise BadRequestError(f"the request must be an object, got {_shown(request)}")
        _check_names("the request", request, self._parts)
        if self.schema.codec is not None and request[CODEC] != self.schema.codec:
            got = _shown(request[CODEC])
            raise BadRequestError(
                f"{CODEC} must be '{self.schema.codec}', whose semantic IDs the model reads, got {got}"
            )
        candidates = _rows("candidates", request["candidates"])
        if len(candidates) > self.limits.max_candidates:
            raise BadRequestError(f"candidates must be at most {self.limits.max_candidates}, got {len(candidates)}")
        history = _rows("history", request["history"]) if self.schema.event else []
        dropped = max(0, len(history) - self.limits.max_history)
        history = history[dropped:]

        user = self._encode(self.schema.user, [request["user"]], lambda _: "user")
        candidate = self._encode(self.schema.candidate, candidates, lambda i: f"candidates[{i}]")
        stay = self._choose(history, lambda i: f"history[{i + dropped}]")
        history = [history[i] for i in stay]
        more = [one.name for one in self._of_policy]
        event = self._encode(self.schema.event, history, lambda i: f"history[{stay[i] + dropped}]", more)
        columns = [column.repeat(len(candidates)) for column in user.dense] + candidate.dense
        # As in training, a model without dense features reads a column of zeros.
        dense = np.stack(columns, axis=1) if columns else np.zeros((len(candidates), 1), np.float32)
        ids, counts = user.ids | candidate.ids | event.ids, user.counts | candidate.counts
        return Request(ids, counts, event.ages, dense, len(history), len(candidates))

    def _choose(self, history: list, place: Place) -> Sequence[int]:
        """The places of the events that the policy keeps."""
        if self._policy is None or not history:
            return range(len(history))
        events = [one for one in self.schema.event if one.kind != "cross"] + self._of_policy
        _check_rows(history, {one.name for one in events}, place)
        fields = self.schema.policy
        age = next(one for one in events if one.kind == "age")
        values = {one.name: [row[one.name] for row in history] for one in (age, *self._of_policy)}
        dwell, named = None, {}
        for one in self._of_policy:
            if one.kind == "number":
                dwell = _numbers(one, values[one.name], place)
            else:
                named[one.name] = _texts(one, values[one.name], place)
        chosen = self._policy(
            _numbers(age, values[age.name], place), dwell, named.get(fields.surface), named.get(fields.session)
        )
        return chosen.tolist()

    def _encode(self, fields: list[Field], rows: list, place: Place, more: Sequence[str] = ()) -> "_Encoded":
        """Encodes the user, the candidates or the events, which have the fields `more` too."""
        _check_rows(rows, {one.name for one in fields if one.kind != "cross"} | {*more}, place)
        encoded = _Encoded()
        for one in fields:
            if one.kind == "cross":  # of fields that are checked before, since they come first
                parts = [[None if row[name] is None else str(row[name]) for row in rows] for name in one.columns]
                encoded.ids[one.keys[0]] = self._known[one.name].ids(cross(*parts))
                continue
            values = [row[one.name] for row in rows]
            if one.kind == "category":
                encoded.ids[one.keys[0]] = self._category(one, values, place)
            elif one.kind == "sid":
                encoded.ids[one.keys[0]] = _sids(one, values, place)
            elif one.kind in ("categories", "slots"):
                self._lists(encoded, one, values, place)
            else:
                _add_numbers(encoded, one, values, place)
        return encoded

    def _category(self, one: Field, values: list, place: Place) -> np.ndarray:
        return self._known[one.name].ids(_texts(one, values, place))

    def _lists(self, encoded: "_Encoded", one: Field, values: list, place: Place) -> None:
        valid = [type(value) is list and set(map(type, value)) <= {str, int} for value in values]
        if not all(valid):
            _refuse(one, values, place, valid)
        longest = max(values, key=len)
        if len(longest) > MAX_VALUES:
            at = place(values.index(longest))
            raise BadRequestError(f"{at}.{one.name} must be at most {MAX_VALUES} values, got {len(longest)}")
        lists = [[str(v) for v in value if v != ""] for value in values]
        vocabulary = self._known[one.name]
        if one.kind == "slots":
            for slot, key in enumerate(one.keys):
                encoded.ids[key] = vocabulary.ids([value[slot] if slot < len(value) else None for value in lists])
        else:
            encoded.ids[one.keys[0]] = vocabulary.ids([v for value in lists for v in value])
            encoded.counts[one.keys[0]] = np.array([len(value) for value in lists], np.int64)


@dataclass
class _Encoded:
    """The encoded fields of the user, of the candidates or of the events."""

    ids: dict[str, np.ndarray] = field(default_factory=dict)
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    ages: np.ndarray | None = None
    dense: list[np.ndarray] = field(default_factory=list)


def _sids(one: Field, values: list, place: Place) -> np.ndarray:
    """Semantic IDs, -1 for null; their digits must be in the range of the codec's."""
    found = [_as_int64(value) for value in values]
    if None in found:
        _refuse(one, values, place, [sid is not None for sid in found])
    sids, layout = torch.tensor(found, dtype=torch.int64), Layout(**one.layout)
    valid = layout.valid(sids).tolist()
    if not all(valid):
        i = valid.index(False)
        raise BadRequestError(f"{place(i)}.{one.name} is {found[i]}, which is no ID of {layout}; another codec's?")
    return sids.numpy()


def _as_int64(value: object) -> int | None:
    """A semantic ID of JSON, -1 for null; None if it is none. As text, since JavaScript rounds integers over 2^53."""
    if value is None:
        return UNKNOWN_SID
    if type(value) is str and _INTEGER.fullmatch(value):
        value = int(value)
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def _check_rows(rows: list, names: set[str], place: Place) -> None:
    """Checks that each row is an object with these fields."""
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise BadRequestError(f"{place(i)} must be an object, got {_shown(row)}")
        if row.keys() != names:
            _check_names(place(i), row, names)


def _texts(one: Field, values: list, place: Place) -> list[str | None]:
    """The values of a category as texts."""
    types = {str, int, type(None)}
    if not set(map(type, values)) <= types:
        _refuse(one, values, place, [type(value) in types for value in values])
    if int in map(type, values):  # JSON's 5 and "5" are the same value of a column
        values = [str(value) if type(value) is int else value for value in values]
    return values


def _numbers(one: Field, values: list, place: Place) -> np.ndarray:
    """`[N]` float64, NaN where missing."""
    types = {int, float} if one.kind == "age" else {int, float, type(None)}
    if not set(map(type, values)) <= types:
        _refuse(one, values, place, [type(value) in types for value in values])
    missing = np.array([value is None for value in values], bool)
    try:
        numbers = np.array([np.nan if value is None else value for value in values], np.float64)
    except OverflowError:  # an integer of hundreds of digits
        numbers = np.array([np.inf if value is not None and abs(value) >= 1e300 else np.nan for value in values])
        missing = np.isnan(numbers)
    valid = (np.isfinite(numbers) & ((numbers >= 0) | (one.kind != "age"))) | missing
    if not valid.all():
        _refuse(one, values, place, valid)
    return numbers


def _add_numbers(encoded: _Encoded, one: Field, values: list, place: Place) -> None:
    numbers = _numbers(one, values, place)
    if one.kind == "age":
        encoded.ages = age_buckets(numbers, one.num_buckets)
    elif one.kind == "quantile":
        encoded.ids[one.keys[0]] = quantile_ids(numbers, np.array(one.edges))
    else:
        encoded.dense.append(standardize(numbers, one.mean, one.deviation))


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
            raise BadRequestError(f"{place} has an unknown field {_shown(name)}; {suggest(name, known)}")
    for name in known:
        if name not in given:
            raise BadRequestError(f"{place} lacks the field '{name}'")


def _refuse(one: Field, values: list, place: Place, valid: Sequence[bool]) -> None:
    """Raises BadRequestError for the first value that is not valid."""
    i = list(valid).index(False)
    raise BadRequestError(f"{place(i)}.{one.name} must be {TYPES[one.kind]}, got {_shown(values[i])}")


def _shown(value: object) -> str:
    """A value as a message shows it, shortened."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
