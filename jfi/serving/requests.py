"""Checks requests, and encodes their values as training encodes the values of its table.

A value that training has not seen, or that is null, gets id 0; a number that is null becomes the training mean. Any
other fault is refused with its place: an unknown or missing field, a value of a wrong type, a number that is infinite.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from jfi.serving.history_policy import RequestPolicy
from jfi.serving.schema import Field, Limits, Schema, bounded_fields, request_schema, schemas_of
from jfi.serving.validation import (
    BadRequestError,
    Place,
    Rows,
    Values,
    check_count,
    check_names,
    columns_of,
    ids_of,
    lists,
    numbers,
    read_id,
    read_time,
    shown,
    sids,
    take,
    texts,
)
from jfi.serving.vocabulary_tables import KnownValues
from jfi.state.stored_history import StoredHistory
from jfi.utils.encoding import HashBuckets, HashedIds, age_buckets, cross, quantile_ids, standardize
from jfi.utils.errors import suggest

#: The fields of a request that name the codec of its semantic IDs, and its time in seconds.
CODEC, TIME = "codec", "time"
HISTORY = "history"
#: The part of a request with fields that all candidates share.
CONTEXT = "context"


@dataclass(eq=False)
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
        stored: the events that the state of users has in place of the request's, which are read when it is scored.
        version: of the model that has scored it, see `jfi.serving.published`; None of an artifact alone.
    """

    ids: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]
    ages: np.ndarray | None
    dense: np.ndarray
    num_events: int
    num_candidates: int
    weights: np.ndarray | None = None
    stored: StoredHistory | None = None
    version: int | None = None


class RequestReader:
    """Checks and encodes requests.

    Args:
        schema: the fields of a request.
        limits: the limits of a request.
        policy: chooses among the events, with `schema.policy`.
        answer: what a score is.
        has_state: whether a request without events has those of the state of users.

    Raises:
        ValueError: the model reads statistics of the past, and there is no state.
    """

    def __init__(
        self,
        schema: Schema,
        limits: Limits,
        policy: RequestPolicy | None = None,
        answer: str = "logit",
        has_state: bool = False,
    ) -> None:
        if schema.statistics is not None and not has_state:
            raise ValueError("the model reads statistics of the past, which only a state of users has")
        self.has_state = has_state
        self.schema, self.limits, self._policy, self._answer = schema, limits, policy, answer
        #: Fields of an event that the policy reads, by what they are for it; the model may read them too.
        self._of_policy: dict[str, Field] = {}
        if schema.policy is not None:
            self._of_policy = {"age": next(one for one in schema.event if one.kind == "age")} | schema.policy.fields()
        #: By column with ids what gives them.
        self.known: dict[str, KnownValues | HashBuckets | HashedIds] = {
            column: KnownValues(values) for column, values in schema.vocabularies.items()
        }
        for one in schema.user + schema.candidate + schema.event_fields:
            if (hashing := one.encoding()) is not None:
                self.known[one.name] = hashing
        #: Fields of a candidate: those of the request, and the statistics, which are behind them.
        count = len(schema.candidate) - (0 if schema.statistics is None else len(schema.statistics.names))
        self._candidate, self._statistics = schema.candidate[:count], schema.candidate[count:]
        parts = {"user": schema.user, "history": schema.event, "candidates": self._candidate}
        read = parts | {"history": [*schema.event, *self._of_policy.values()]}
        #: By part of a request the kinds of its fields by name; the policy may read fields that the model reads too.
        self.fields = {
            part: {one.name: one.kind for one in fields if one.kind != "cross"}
            for part, fields in read.items()
            if fields or part != "history"
        }
        if schema.statistics is not None:  # statistics are those of the ids, which the model may not read
            self.fields["user"].setdefault(schema.statistics.user, "category")
            self.fields["candidates"].setdefault(schema.statistics.item, "category")
        #: By field with a vocabulary, a key of its ids. Slots of a list are left out: 0 is an empty slot there too.
        self._categories = {
            f"{part}.{one.name}": one.keys[0]
            for part, fields in parts.items()
            for one in fields
            if one.kind in ("category", "categories") and one.encoding() is None
        }
        self._parts = [*self.fields, *([] if schema.codec is None else [CODEC])]
        #: Parts that a request may have, for messages.
        self._optional = [TIME]
        if has_state:
            self._optional = [*([HISTORY] if HISTORY in self.fields else []), CONTEXT, TIME]

    def json_schema(self) -> dict:
        """Returns the JSON Schema of a request."""
        of = {"user": self.schema.user, "candidates": self.schema.candidate, "history": self.schema.event}
        fields = {part: schemas_of(kinds, bounded_fields(of[part])) for part, kinds in self.fields.items()}
        user_id = self.schema.user_id if self.has_state else None
        has_statistics = self.schema.statistics is not None
        return request_schema(fields, self.schema.codec, self.limits, self._answer, user_id, has_statistics)

    def unknown(self, request: Request) -> dict[str, tuple[int, int]]:
        """Returns by field with a vocabulary how many values are unknown or null, and how many there are."""
        ids = {name: request.ids[key] for name, key in self._categories.items() if key in request.ids}
        return {name: (len(own) - np.count_nonzero(own), len(own)) for name, own in ids.items()}

    def read(self, body: bytes) -> Request:
        """Parses and encodes a request.

        Raises:
            BadRequestError: not JSON, or a fault, with its place.
        """
        from jfi.serving.server.body import read_body  # by orjson, which an exporter does not need

        return read_body(body, self)

    def __call__(self, request: object) -> Request:
        """Encodes a request.

        Args:
            request: of `jfi.serving.server.body.parse`.

        Raises:
            BadRequestError: a fault, with its place.
        """
        if not isinstance(request, dict):
            raise BadRequestError(f"the request must be an object, got {shown(request)}")
        now, stored, has_history = None, None, HISTORY in request
        check_count("candidates", request.get("candidates"), self.limits.max_candidates)
        if TIME in request:
            now = read_time(request[TIME], TIME)
            request = {name: part for name, part in request.items() if name != TIME}
        parts = self._parts
        if self.has_state:
            request = self._with_context(request)
            parts = parts if has_history else [part for part in parts if part != HISTORY]
            if "user" in request and not (has_history and self.schema.statistics is None):
                request, stored = self._of_state(request, time.time() if now is None else now)
        check_names("the request", request, parts, self._optional)
        if self.schema.codec is not None and request[CODEC] != self.schema.codec:
            got = shown(request[CODEC])
            raise BadRequestError(
                f"{CODEC} must be '{self.schema.codec}', whose semantic IDs the model reads, got {got}"
            )
        candidates = Rows("candidates", request["candidates"], [*self.fields["candidates"]])
        if not (count := len(candidates)):
            raise BadRequestError("candidates must not be empty")
        history = Rows("history", request.get("history", []), [*self.fields.get("history", ())])
        history.keep_last(self.limits.max_history)

        values = columns_of([request["user"]], [*self.fields["user"]], _place_of_user)
        user, columns = self._encode(self.schema.user, values, _place_of_user), candidates.columns()
        candidate = self._encode(self._candidate, columns, candidates.place)
        if self.schema.statistics is not None:
            item = self.schema.statistics.item
            stored.items = texts(Field(item, "category"), columns[item], candidates.place)
            stored.column_ids = self._ids_of_columns(candidate)
            # Until the state is read each statistic is the training mean, as for null.
            candidate.dense += [np.zeros(count, np.float32)] * len(self._statistics)
        own = stored is None or not stored.reads_events
        event, num_events, weights = self._encode_history(history) if own else (_Encoded(), 0, None)
        dense_columns = [column.repeat(count) for column in user.dense] + candidate.dense
        # As in training, a model without dense features reads a column of zeros.
        dense = np.stack(dense_columns, axis=1) if dense_columns else np.zeros((count, 1), np.float32)
        ids, counts = user.ids | candidate.ids | event.ids, user.counts | candidate.counts
        return Request(ids, counts, event.ages, dense, num_events, count, weights, stored)

    def _with_context(self, request: dict) -> dict:
        """The request with the fields of its context in each candidate."""
        if CONTEXT not in request:
            return request
        context, given = request[CONTEXT], request.get("candidates")
        if not isinstance(context, dict):
            raise BadRequestError(f"{CONTEXT} must be an object, got {shown(context)}")
        for name in context:
            if name not in self.fields["candidates"]:
                hint = suggest(name, self.fields["candidates"])
                raise BadRequestError(f"{CONTEXT} has an unknown field {shown(name)}; {hint}")
            if _has_any(given, [name]):
                raise BadRequestError(f"{CONTEXT} has the field '{name}', and the candidates have it too")
        if isinstance(given, dict):
            count = next((len(values) for values in given.values() if isinstance(values, list)), 0)
            given = given | {name: [value] * count for name, value in context.items()}
        elif isinstance(given, list):
            given = [row | context if isinstance(row, dict) else row for row in given]
        return {name: part for name, part in request.items() if name != CONTEXT} | {"candidates": given}

    def _of_state(self, request: dict, now: float) -> tuple[dict, StoredHistory]:
        """The request with the user as an object of the fields that are read, and what the state is read for."""
        name, fields, user = self.schema.user_id, self.fields["user"], request["user"]
        reads_events = HISTORY in self.fields and HISTORY not in request
        if not isinstance(user, dict):
            if others := [f"'{one}'" for one in fields if one != name]:
                what = f"an object with '{name}' and {', '.join(others)}, which the model reads"
                raise BadRequestError(f"user must be {what}, got {shown(user)}")
            user = {name: user}
        if name not in user:
            raise BadRequestError(f"user lacks the field '{name}', by which the server knows the user's events")
        place = "user" if request["user"] is not user else f"user.{name}"
        (text,) = texts(Field(name, "category"), [user[name]], lambda *_: place)
        if reads_events:
            text = read_id(user[name], text, place)
        kept = {one: value for one, value in user.items() if one != name or name in fields}
        return request | {"user": kept}, StoredHistory(text, now, reads_events)

    def with_statistics(self, request: Request, found: Mapping[str, np.ndarray]) -> Request:
        """Returns a request with the statistics of its candidates, `[R]` by name, in place of their means."""
        dense, own = request.dense.copy(), self._encode(self._statistics, found, _place_of_user).dense
        dense[:, dense.shape[1] - len(own) :] = np.stack(own, axis=1)
        return replace(request, dense=dense)

    def without_state(self, request: Request) -> Request:
        """Returns a request as that of a new user, whose statistics are the training means."""
        if not request.stored.reads_events:
            return request
        event, num_events, weights = self._encode_history(Rows(HISTORY, [], []))
        ids = request.ids | event.ids
        return replace(request, ids=ids, ages=event.ages, num_events=num_events, weights=weights)

    def choose(self, ages: np.ndarray, engagement: tuple[Values | None, ...]) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the events of the state of users that the policy keeps, and their weights, as RequestPolicy."""
        if self._policy is None:
            return np.arange(len(ages)), None
        return self._policy(ages, *engagement)

    def _ids_of_columns(self, candidate: "_Encoded") -> dict[str, np.ndarray]:
        """Returns the ids `[R, K]` of the candidates' columns that statistics count by, by key."""
        found = {}
        for column in self.schema.statistics.columns.values():
            ids, counts = candidate.ids[column.key], candidate.counts.get(column.key)
            found[column.key] = ids[:, None] if counts is None else _first_values(ids, counts, column.slots)
        return found

    def _encode_history(self, history: Rows) -> "tuple[_Encoded, int, np.ndarray | None]":
        """The events that the policy keeps, their number and their weights, if any."""
        if not len(history):
            none = np.zeros(0, np.int64)
            ids = {key: none for one in self.schema.event for key in one.keys}
            return _Encoded(ids, ages=none), 0, None
        columns, place, weights, kept = history.columns(), history.place, None, len(history)
        if self._policy is not None:
            rows, weights = self._choose(columns, place)
            stay, kept = rows.tolist(), len(rows)
            if kept < len(history):
                columns = {name: take(values, rows, stay) for name, values in columns.items()}

            def place(i: int, field: str) -> str:
                return history.place(stay[i], field)

        return self._encode(self.schema.event, columns, place), kept, weights

    def _choose(self, columns: dict[str, Values], place: Place) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns what the policy gives; of `columns` those that it reads are checked then."""
        found: dict[str, Values | None] = dict.fromkeys(("age", "dwell", "surface", "session"))
        for role, one in self._of_policy.items():
            values = columns[one.name]
            if one.kind == "category":
                columns[one.name] = texts(one, values, place, only_equality=role == "session")
            else:
                columns[one.name] = numbers(one, values, place)
            found[role] = columns[one.name]
        return self._policy(*found.values())

    def _encode(self, fields: list[Field], columns: Mapping[str, Values], place: Place) -> "_Encoded":
        """Encodes the user, the candidates or the events."""
        encoded = _Encoded()
        for one in fields:
            if one.kind == "cross":
                parts = [texts(replace(one, name=name), columns[name], place) for name in one.columns]
                encoded.ids[one.keys[0]] = self.known[one.name].ids(cross(*parts))
                continue
            values = columns[one.name]
            if one.kind == "category":
                encoded.ids[one.keys[0]] = ids_of(one, self.known[one.name], values, place)
            elif one.kind == "sid":
                encoded.ids[one.keys[0]] = sids(one, values, place)
            elif one.kind == "categories":
                encoded.ids[one.keys[0]], encoded.counts[one.keys[0]] = lists(one, self.known[one.name], values, place)
            elif one.kind == "slots":
                of_slots = _first_values(*lists(one, self.known[one.name], values, place), len(one.keys))
                encoded.ids |= {key: of_slots[:, slot] for slot, key in enumerate(one.keys)}
            else:
                _add_numbers(encoded, one, values, place)
        return encoded


def _has_any(rows: object, names: list[str]) -> bool:
    """Returns whether the user or candidates, by rows or by columns, have one of these fields."""
    known = frozenset(names)
    return any(
        isinstance(row, dict) and not known.isdisjoint(row) for row in (rows if isinstance(rows, list) else [rows])
    )


def _first_values(ids: np.ndarray, counts: np.ndarray, most: int) -> np.ndarray:
    """`[R, most]`, the first ids of each row of lists, 0 where there are fewer."""
    found, start = np.zeros((len(counts), most), np.int64), counts.cumsum() - counts
    for slot in range(most):
        found[counts > slot, slot] = ids[start[counts > slot] + slot]
    return found


def _place_of_user(_: int, field: str) -> str:
    return f"user.{field}" if field else "user"


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
        encoded.dense.append(standardize(found, one.mean, one.deviation, one.default, one.bounds))
