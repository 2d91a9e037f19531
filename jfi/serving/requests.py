"""Checks requests, and encodes their values as training encodes the values of its table.

A value that training has not seen, or that is null, gets id 0; a number that is null becomes the training mean. Any
other fault is refused with its place: an unknown or missing field, a value of a wrong type, a number that is infinite.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jfi.serving.columns import Column, Rows, look_up, read_plain
from jfi.serving.history_policy import RequestPolicy
from jfi.serving.known import KnownValues
from jfi.serving.large_json import Cut
from jfi.serving.schema import MAX_VALUES, TYPES, Field, Limits, Schema
from jfi.serving.values import (
    TEXTS,
    BadRequestError,
    Place,
    Values,
    check_names,
    check_rows,
    columns_of,
    listed,
    numbers,
    refuse,
    shown,
    sids,
    take,
    texts,
)
from jfi.utils.encoding import HashBuckets, age_buckets, cross, quantile_ids, standardize, text_of

#: The field of a request that names the codec of its semantic IDs.
CODEC = "codec"


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
        weights: [S] float32, of the events, or None where all are 1.
    """

    ids: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]
    ages: np.ndarray | None
    dense: np.ndarray
    num_events: int
    num_candidates: int
    weights: np.ndarray | None = None


def _loads(body: bytes, parse_constant: Callable[[str], object]) -> object:
    return json.loads(body, parse_constant=parse_constant)


#: From JSON, and a function that refuses NaN and infinities, to its value.
Loads = Callable[[bytes, Callable[[str], object]], object]


def parse(body: bytes, loads: Loads = _loads) -> object:
    """Parses JSON, but refuses the NaN and the infinities that Python's parser would accept.

    Args:
        body: the JSON.
        loads: parses it; gets the function that refuses.

    Raises:
        BadRequestError: not JSON.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return loads(body, refuse)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the request is not JSON: {error}") from None


class RequestReader:
    """Checks and encodes requests.

    Args:
        schema: the fields of a request.
        limits: the limits of a request.
        policy: chooses among the events, with `schema.policy`.
        answer: what a score is.
    """

    def __init__(
        self, schema: Schema, limits: Limits, policy: RequestPolicy | None = None, answer: str = "logit"
    ) -> None:
        self.schema, self.limits, self._policy, self._answer = schema, limits, policy, answer
        #: Fields of an event that the policy reads, by what they are for it; the model may read them too.
        self._of_policy: dict[str, Field] = {}
        if schema.policy is not None:
            self._of_policy = {"age": next(one for one in schema.event if one.kind == "age")} | schema.policy.fields()
        self._known: dict[str, KnownValues | HashBuckets] = {
            column: KnownValues(values) for column, values in schema.vocabularies.items()
        }
        for one in schema.user + schema.candidate + schema.event:
            if one.kind in ("category", "categories", "slots", "cross") and one.num_buckets:
                self._known[one.name] = HashBuckets(one.num_buckets)
        #: By part the fields of a row; the policy may read fields that the model reads too.
        self._names = {
            part: list(dict.fromkeys(one.name for one in fields if one.kind != "cross"))
            for part, fields in self._fields().items()
        }
        self._parts = ["user", "history", "candidates"] if schema.event else ["user", "candidates"]
        self._parts += [] if schema.codec is None else [CODEC]
        #: The lists of rows whose values are read where they are, by the names of their fields.
        self._plain = {"candidates": self._names["candidate"]} | (
            {"history": self._names["event"]} if schema.event else {}
        )
        if any(one.kind in ("categories", "slots") for one in schema.candidate + schema.event):
            self._plain = {}

    def _fields(self) -> dict[str, list[Field]]:
        """Returns by part of the schema the fields of a request, some of them twice."""
        events = self.schema.event + list(self._of_policy.values())
        return {"user": self.schema.user, "event": events, "candidate": self.schema.candidate}

    def fields(self) -> dict:
        """Returns by part of a request its fields and their types."""
        names = {"user": "user", "event": "history", "candidate": "candidates"}
        described = {
            names[part]: {one.name: TYPES[one.kind] for one in fields if one.kind != "cross"}
            for part, fields in self._fields().items()
        }
        return described | ({} if self.schema.codec is None else {CODEC: self.schema.codec})

    def describe(self) -> dict:
        """The fields and limits, for people and clients."""
        return self.fields() | {
            "max_candidates": self.limits.max_candidates,
            "max_history": self.limits.max_history,
            "answer": {"scores": f"a {self._answer} for each candidate, in the order of the request"},
        }

    def read(self, body: bytes, loads: Loads = _loads) -> Request:
        """Parses and encodes a request, a plain one without an object for each value.

        Args:
            body: the JSON.
            loads: as in `parse`, for a request that is not plain.

        Raises:
            BadRequestError: not JSON, or a fault, with its place.
        """
        if self._plain:
            try:
                if (found := read_plain(body, self._plain)) is not None:
                    return self(found)
            except (ValueError, RecursionError):  # what is wrong, is said below
                pass
        return self(parse(body, loads))

    def __call__(self, request: object) -> Request:
        """Encodes a parsed request.

        Args:
            request: of `parse`, or of `read_plain`.

        Raises:
            BadRequestError: a fault, with its place.
        """
        if not isinstance(request, dict):
            raise BadRequestError(f"the request must be an object, got {shown(request)}")
        check_names("the request", request, self._parts)
        if self.schema.codec is not None and request[CODEC] != self.schema.codec:
            got = shown(request[CODEC])
            raise BadRequestError(
                f"{CODEC} must be '{self.schema.codec}', whose semantic IDs the model reads, got {got}"
            )
        candidates = check_rows("candidates", request["candidates"])
        if not candidates:
            raise BadRequestError("candidates must not be empty")
        if (count := len(candidates) + _dropped(candidates)) > self.limits.max_candidates:
            raise BadRequestError(f"candidates must be at most {self.limits.max_candidates}, got {count}")
        history = check_rows("history", request["history"]) if self.schema.event else []
        dropped = max(0, len(history) - self.limits.max_history)
        if dropped and isinstance(history, Rows):
            history[:dropped].check()
        history, dropped = history[dropped:], dropped + _dropped(history)

        self._look_up((self.schema.candidate, candidates), (self.schema.event, history))
        user = self._encode_rows("user", [request["user"]], lambda _: "user")
        candidate = self._encode_rows("candidate", candidates, lambda i: f"candidates[{i}]")
        event, num_events, weights = self._encode_history(history, dropped)
        columns = [column.repeat(len(candidates)) for column in user.dense] + candidate.dense
        # As in training, a model without dense features reads a column of zeros.
        dense = np.stack(columns, axis=1) if columns else np.zeros((len(candidates), 1), np.float32)
        ids, counts = user.ids | candidate.ids | event.ids, user.counts | candidate.counts
        return Request(ids, counts, event.ages, dense, num_events, len(candidates), weights)

    def _encode_rows(self, part: str, rows: list | Rows, place: Place) -> "_Encoded":
        return self._encode(getattr(self.schema, part), columns_of(rows, self._names[part], place), place)

    def _encode_history(self, history: list | Rows, dropped: int) -> "tuple[_Encoded, int, np.ndarray | None]":
        """The events that the policy keeps, their number and their weights, if any."""
        if not history:
            none = np.zeros(0, np.int64)
            ids = {key: none for one in self.schema.event for key in one.keys}
            return _Encoded(ids, ages=none), 0, None

        def place(i: int) -> str:
            return f"history[{i + dropped}]"

        columns, policy = columns_of(history, self._names["event"], place), self._policy
        if policy is None:
            return self._encode(self.schema.event, columns, place), len(history), None
        stay, weights = self._choose(columns := dict(columns), place)
        if isinstance(history, Rows):
            # All events are encoded and checked: the bytes of those that stay by themselves would take longer.
            event = self._encode(self.schema.event, columns, place)
            event.ids = {key: ids.take(stay) for key, ids in event.ids.items()}
            event.ages = None if event.ages is None else event.ages.take(stay)
            return event, len(stay), weights
        kept = stay.tolist()
        if len(kept) < len(history):
            columns = {name: take(values, stay, kept) for name, values in columns.items()}
        event = self._encode(self.schema.event, columns, lambda i: place(kept[i]))
        return event, len(kept), weights

    def _choose(self, columns: dict[str, Values], place: Place) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns what the policy gives; of `columns` those that it reads are checked then."""
        found: dict[str, Values | None] = dict.fromkeys(("age", "dwell", "surface", "session"))
        for role, one in self._of_policy.items():
            values = columns[one.name]
            if one.kind != "category":
                found[role] = columns[one.name] = numbers(one, values, place)
                continue
            if isinstance(values, Column):
                found[role] = self._policy.places(values) if role == "surface" else values.codes()
            if found[role] is None:  # an object for each value
                found[role] = columns[one.name] = texts(one, listed(values), place, only_equality=role == "session")
        return self._policy(*found.values())

    def _encode(self, fields: list[Field], columns: dict[str, Values], place: Place) -> "_Encoded":
        """Encodes the user, the candidates or the events."""
        encoded = _Encoded()
        for one in fields:
            if one.kind == "cross":  # of fields that are checked before, since they come first
                parts = [[text_of(value) for value in listed(columns[name])] for name in one.columns]
                encoded.ids[one.keys[0]] = self._known[one.name].ids(cross(*parts))
                continue
            values = columns[one.name]
            if one.kind == "category":
                encoded.ids[one.keys[0]] = self._ids(one, values, place)
            elif one.kind == "sid":
                encoded.ids[one.keys[0]] = sids(one, values, place)
            elif one.kind in ("categories", "slots"):
                self._lists(encoded, one, values, place)
            else:
                _add_numbers(encoded, one, values, place)
        return encoded

    def _look_up(self, *parts: tuple[list[Field], list | Rows]) -> None:
        """Looks up the categories of plain rows, those of one vocabulary together."""
        found: dict[str, list[Column]] = {}
        for fields, rows in parts:
            for one in fields if isinstance(rows, Rows) else []:
                # The look-up of bytes does not tell a missing value from an unknown one.
                if one.kind == "category" and one.default is None and isinstance(self._known[one.name], KnownValues):
                    found.setdefault(one.name, []).append(rows.columns[one.name])
        for name, own in found.items():
            look_up(own, self._known[name])

    def _ids(self, one: Field, values: Values, place: Place) -> np.ndarray:
        """`[N]` ids of a category."""
        if isinstance(values, Column) and values.ids is not None:
            return values.ids
        found = texts(one, listed(values), place)
        if one.default is not None:
            found = [one.default if text is None else text for text in found]
        return self._known[one.name].ids(found)

    def _lists(self, encoded: "_Encoded", one: Field, values: Values, place: Place) -> None:
        valid = [type(value) is list and set(map(type, value)) <= TEXTS for value in values]
        if not all(valid):
            refuse(one, values, place, valid)
        longest = max(values, key=len)
        if len(longest) > MAX_VALUES:
            at = place(values.index(longest))
            raise BadRequestError(f"{at}.{one.name} must be at most {MAX_VALUES} values, got {len(longest)}")
        lists = [[text for v in value if (text := text_of(v)) is not None] for value in values]
        vocabulary = self._known[one.name]
        if one.kind == "slots":
            for slot, key in enumerate(one.keys):
                encoded.ids[key] = vocabulary.ids([value[slot] if slot < len(value) else None for value in lists])
        else:
            encoded.ids[one.keys[0]] = vocabulary.ids([v for value in lists for v in value])
            encoded.counts[one.keys[0]] = np.array([len(value) for value in lists], np.int64)


def _dropped(rows: list | Rows) -> int:
    """Returns how many rows were before these in the request."""
    return rows.dropped if isinstance(rows, Cut) else 0


@dataclass
class _Encoded:
    """The encoded fields of the user, of the candidates or of the events."""

    ids: dict[str, np.ndarray] = field(default_factory=dict)
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    ages: np.ndarray | None = None
    dense: list[np.ndarray] = field(default_factory=list)


def _add_numbers(encoded: _Encoded, one: Field, values: Values, place: Place) -> None:
    found = numbers(one, values, place)
    if one.kind == "age":
        encoded.ages = age_buckets(found, one.num_buckets)
    elif one.kind == "quantile":
        encoded.ids[one.keys[0]] = quantile_ids(found, np.array(one.edges), one.default)
    else:
        encoded.dense.append(standardize(found, one.mean, one.deviation, one.default))
