"""Checks requests, and encodes their values as training encodes the values of its table.

A value that training has not seen, or that is null, gets id 0; a number that is null becomes the training mean. Any
other fault is refused with its place: an unknown or missing field, a value of a wrong type, a number that is infinite.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from jfi.serving.history_policy import RequestPolicy
from jfi.serving.schema import Field, Limits, Schema, Served
from jfi.serving.validation import (
    LATEST,
    LONGEST_ID,
    TYPES,
    VALUE,
    BadRequestError,
    BodyType,
    KnownValues,
    Place,
    TableColumns,
    Values,
    fields_of,
    flat_values,
    ids_of,
    object_type,
    read_id,
    shown,
    sids,
    table_type,
    take,
    texts,
)
from jfi.state.lookups import Encoded, Lookup
from jfi.utils.encoding import UNKNOWN, HashBuckets, HashedIds, age_buckets, cross, quantile_ids, standardize
from jfi.utils.jagged import first_values

if TYPE_CHECKING:
    from jfi.state.layout import StateInfo

#: The fields of a request that name the codec of its semantic IDs, and its time in seconds.
CODEC, TIME = "codec", "time"
USER, HISTORY, CANDIDATES = "user", "history", "candidates"
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
        stored: what is read from the state when the request is scored, in place of what it does not have; or None.
        now: time of the request in seconds.
        version: of the model that has scored it, see `jfi.serving.published`; None of an artifact alone.
        filled: the request with what was read from the state, as the model has read it; None where nothing was.
    """

    ids: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]
    ages: np.ndarray | None
    dense: np.ndarray
    num_events: int
    num_candidates: int
    weights: np.ndarray | None = None
    stored: Lookup | None = None
    now: float = 0.0
    version: int | None = None
    model: Served | None = None
    filled: "Request | None" = None


class RequestReader:
    """Checks and encodes requests.

    Args:
        policy: chooses among the events, with `schema.policy`.
        answer: what a score is.
        state: describes the state, which has what a request may leave out; None without one.

    Raises:
        ValueError: the model reads statistics of the past, and there is no state.
    """

    def __init__(
        self,
        schema: Schema,
        limits: Limits,
        policy: RequestPolicy | None = None,
        answer: str = "logit",
        state: "StateInfo | None" = None,
    ) -> None:
        if schema.statistics is not None and state is None:
            raise ValueError("the model reads statistics of the past, which only a state of users has")
        self.schema, self.limits, self.policy, self._answer = schema, limits, policy, answer
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
        parts = {USER: schema.user, HISTORY: schema.event, CANDIDATES: self._candidate}
        read = parts | {HISTORY: [*schema.event, *self._of_policy.values()]}
        #: By part of a request the kinds of its fields by name; the policy may read fields that the model reads too.
        self.fields = {
            part: {one.name: one.kind for one in fields if one.kind != "cross"}
            for part, fields in read.items()
            if fields or part != HISTORY
        }
        #: By part the names of the fields that the model reads, of which the state may have some.
        self._read_fields = {part: [*kinds] for part, kinds in self.fields.items()}
        #: By part the field of the id, by which the state is read; a request may have it even if the model does not.
        self._ids = {USER: schema.user_id, CANDIDATES: schema.item_id}
        for part, name in self._ids.items():
            if name is not None:
                self.fields[part].setdefault(name, "category")
        self._state, columns = state, {} if state is None else {USER: state.users, CANDIDATES: state.items}
        self._stored = {part: {one.name for one in columns.get(part, ())} for part in self.fields}
        dense = [(part, one.name) for part in (USER, CANDIDATES) for one in parts[part] if one.kind == "number"]
        dense += [(CANDIDATES, one.name) for one in self._statistics]
        #: By part and name the columns of the dense features; and their names, in their order.
        self._dense_at = {key: index for index, key in enumerate(dense)}
        self.dense_names = [name for _, name in dense]
        #: By field with a vocabulary, a key of its ids. Slots of a list are left out: 0 is an empty slot there too.
        self._categories = {
            f"{part}.{one.name}": one.keys[0]
            for part, fields in parts.items()
            for one in fields
            if one.kind in ("category", "categories") and one.encoding() is None
        }
        names = {"": [*self.fields, CONTEXT, TIME, *([CODEC] if schema.codec else [])], **self.fields}
        self._body = BodyType(self._type(), names | {CONTEXT: self.fields[CANDIDATES]})

    def _type(self) -> type[Struct]:
        """The type of a request. It does not say which fields of candidates are needed: the context may have them."""
        types = {part: {name: TYPES[kind] for name, kind in kinds.items()} for part, kinds in self.fields.items()}
        has_state, most = self._state is not None, self.limits.max_history
        needed = {*self._read_fields[USER]} - self._stored[USER] - ({self._ids[USER]} if has_state else set())
        user: Any = object_type("User", types[USER], types[USER].keys() - needed)
        of_ids, candidate = None if self._ids[CANDIDATES] is None else VALUE, types[CANDIDATES]
        bounds = Meta(min_length=1, max_length=self.limits.max_candidates)
        whole = {USER: user if self._ids[USER] is None else user | VALUE}
        if HISTORY in types:
            about = Meta(description=f"events, oldest first; of more than {most} the newest are read")
            whole[HISTORY] = Annotated[table_type("Event", types[HISTORY]), about]
        whole[CANDIDATES] = table_type("Candidate", candidate, candidate, of_ids, bounds)
        about = Meta(description="fields that all candidates share, which they lack then")
        whole[CONTEXT] = Annotated[object_type("Context", candidate, candidate), about]
        if self.schema.codec is not None:
            whole[CODEC] = Annotated[str, Meta(extra_json_schema={"const": self.schema.codec})]
        text = "at which the state is read; by default now" if has_state else "which this model does not read"
        whole[TIME] = Annotated[float, Meta(gt=-LATEST, lt=LATEST, description=f"seconds since 1970, {text}")]
        return object_type("Request", whole, [CONTEXT, TIME, *([HISTORY, CODEC] if has_state else [])])

    def json_schema(self) -> dict:
        """Returns the JSON Schema of a request.

        It does not say which fields of the candidates are needed, as the context or the state may have them, and that
        semantic IDs are those of the codec.
        """
        answer = f'The answer is {{"scores": [...]}}: a {self._answer} for each candidate, in their order.'
        return self._body.json_schema("A request of POST /score", answer)

    def unknown(self, request: Request) -> dict[str, tuple[int, int]]:
        """Returns by field with a vocabulary how many values are unknown or null, and how many there are."""
        ids = {name: request.ids[key] for name, key in self._categories.items() if key in request.ids}
        return {name: (len(own) - np.count_nonzero(own), len(own)) for name, own in ids.items()}

    def read(self, body: bytes) -> Request:
        """Parses and encodes a request.

        Raises:
            BadRequestError: not JSON, or a fault, with its place.
        """
        return self._read(fields_of(self._body.read(body)))

    def __call__(self, request: object) -> Request:
        """Encodes a request.

        Args:
            request: what its JSON stands for.

        Raises:
            BadRequestError: a fault, with its place.
        """
        return self._read(fields_of(self._body.convert(request)))

    def _read(self, request: dict[str, Any]) -> Request:
        now, reads_events = request.get(TIME, time.time()), HISTORY in self.fields and HISTORY not in request
        stored = Lookup(now, reads_events, reads_statistics=self.schema.statistics is not None)
        user = self._read_user(request[USER], stored)
        candidates, place = self._candidates_of(request)
        candidate = self._read_candidates(candidates, place, stored)
        kinds = self.fields.get(HISTORY, {})
        history = TableColumns(HISTORY, request.get(HISTORY, []), self.limits.max_history)
        given = [self.fields[CANDIDATES][name] for name in candidates] + [kinds[name] for name in history.columns]
        if (codec := self.schema.codec) is not None and (found := request.get(CODEC, codec)) != codec:
            whose = f"'{codec}', whose semantic IDs the model reads"
            raise BadRequestError(f"{CODEC} must be {whose}, got {shown(found)}")
        if "sid" in given and codec is not None and CODEC not in request:
            raise BadRequestError(f"the request lacks the field '{CODEC}'")
        event, num_events, weights = (Encoded(), 0, None) if reads_events else self._encode_history(history)
        count = len(next(iter(candidates.values()))) if candidates else len(request[CANDIDATES])
        # As in training, a model without dense features reads a column of zeros.
        dense = np.zeros((count, max(1, len(self._dense_at))), np.float32)
        read = Request({}, {}, event.ages, dense, num_events, count, weights, stored if stored else None, now)
        read.ids |= event.ids
        self._add(read, user, candidate)
        return read

    def _read_user(self, given: object, stored: Lookup) -> Encoded:
        """Encodes what a request has of the user; `stored` gets what it lacks."""
        name, place = self._ids[USER], _place_of_user
        if isinstance(given, Struct):
            given = fields_of(given)
        else:
            given, place = {name: given}, lambda *_: USER
        stored.user_columns = self._lacking(USER, USER, given)
        if stored and name not in given:
            raise BadRequestError(f"user lacks the field '{name}', by which the server knows the user")
        columns = {field: [value] for field, value in given.items()}
        if name in given and (stored or name not in self._read_fields[USER]):
            (stored.user,) = texts(columns[name])
            if stored.reads_events or stored.user_columns:
                read_id(given[name], stored.user, place(0, name))
        return self._encode([one for one in self.schema.user if one.name in given], columns, place)

    def _candidates_of(self, request: dict) -> tuple[dict[str, Sequence[object]], Place]:
        """Returns by name the values of the candidates and of the context, and their places."""
        rows, context = TableColumns(CANDIDATES, request[CANDIDATES], of_ids=self._ids[CANDIDATES]), {}
        if not len(rows):
            raise BadRequestError("candidates must not be empty")
        if CONTEXT in request:
            context = fields_of(request[CONTEXT])
            if both := [name for name in context if name in rows.columns]:
                raise BadRequestError(f"{CONTEXT} has the field '{both[0]}', and the candidates have it too")

        def place(row: int, name: str) -> str:
            return f"{CONTEXT}.{name}" if name in context else rows.place(row, name)

        return rows.columns | {name: [value] * len(rows) for name, value in context.items()}, place

    def _read_candidates(self, columns: dict[str, Sequence[object]], place: Place, stored: Lookup) -> Encoded:
        """Encodes what a request has of its candidates; `stored` gets what it lacks."""
        name = self._ids[CANDIDATES]
        stored.item_columns = self._lacking(CANDIDATES, place(0, ""), columns)
        looks_up = stored.item_columns or stored.reads_statistics
        if looks_up and name not in columns:
            raise BadRequestError(f"{place(0, '')} lacks the field '{name}', by which the server knows the item")
        if name in columns and (looks_up or name not in self._read_fields[CANDIDATES]):
            stored.items = texts(columns[name])
            if stored.item_columns and (None in stored.items or max(map(len, stored.items)) > LONGEST_ID // 4):
                for row, text in enumerate(stored.items):
                    read_id(columns[name][row], text, place(row, name), "an item")
        return self._encode([one for one in self._candidate if one.name in columns], columns, place)

    def _lacking(self, part: str, place: str, given: Collection[str]) -> list[str]:
        """Returns the fields that the state has in place of a request.

        Raises:
            BadRequestError: the request lacks another one.
        """
        lacking = sorted(name for name in self._read_fields[part] if name not in given)
        if others := [name for name in lacking if name not in self._stored[part]]:
            known = (
                {*self.schema.item_columns} if part == CANDIDATES else {*self._read_fields[part]} - {self._ids[part]}
            )
            advice = "; send it, or serve with a state that has it" if others[0] in known else ""
            raise BadRequestError(f"{place} lacks the field '{others[0]}'{advice}")
        return lacking

    def _add(self, request: Request, user: Encoded, candidate: Encoded) -> None:
        """Adds fields of the user and of the candidates to a request."""
        request.ids |= user.ids | candidate.ids
        request.counts |= user.counts | candidate.counts
        for part, own in ((USER, user), (CANDIDATES, candidate)):
            for name, column in own.numbers.items():
                request.dense[:, self._dense_at[part, name]] = column

    def complete(self, request: Request, user: Encoded, candidate: Encoded) -> Request:
        """Returns a request with fields of the user and of the candidates, which it lacked."""
        whole = replace(request, ids={**request.ids}, counts={**request.counts}, dense=request.dense.copy())
        self._add(whole, user, candidate)
        return whole

    def with_statistics(self, request: Request, found: Mapping[str, np.ndarray]) -> Request:
        """Returns a request with the statistics of its candidates, `[R]` by name, in place of their means."""
        return self.complete(request, Encoded(), self._encode(self._statistics, found, _place_of_user))

    def column_ids(self, request: Request) -> dict[str, np.ndarray]:
        """Returns the ids `[R, K]` of the candidates' columns that statistics count by, by key."""
        found = {}
        for column in self.schema.statistics.columns.values():
            ids, counts = request.ids[column.key], request.counts.get(column.key)
            found[column.key] = ids[:, None] if counts is None else _first_values(ids, counts, column.slots)
        return found

    def _encode_history(self, history: TableColumns) -> tuple[Encoded, int, np.ndarray | None]:
        """The events that the policy keeps, their number and their weights, if any."""
        if not len(history):
            none = np.zeros(0, np.int64)
            ids = {key: none for one in self.schema.event for key in one.keys}
            return Encoded(ids, ages=none), 0, None
        columns, place, weights, kept = history.columns, history.place, None, len(history)
        if self.policy is not None:
            rows, weights = self._choose(columns)
            stay, kept = rows.tolist(), len(rows)
            if kept < len(history):
                columns = {name: take(values, rows, stay) for name, values in columns.items()}

            def place(i: int, field: str) -> str:
                return history.place(stay[i], field)

        return self._encode(self.schema.event, columns, place), kept, weights

    def _choose(self, columns: dict[str, Values]) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns what the policy gives; of `columns` those that it reads are texts or numbers then."""
        found: dict[str, Values | None] = dict.fromkeys(("age", "dwell", "surface", "session"))
        for role, one in self._of_policy.items():
            values = columns[one.name]
            found[role] = columns[one.name] = texts(values) if one.kind == "category" else _numbers(values)
        return self.policy(*found.values())

    def _encode(self, fields: list[Field], columns: Mapping[str, Values], place: Place) -> Encoded:
        """Encodes the user, the candidates or the events."""
        encoded = Encoded()
        for one in fields:
            if one.kind == "cross":
                crossed = cross(*(texts(columns[name]) for name in one.columns))
                encoded.ids[one.keys[0]] = self.known[one.name].ids(crossed)
                continue
            values = columns[one.name]
            if one.kind == "category":
                encoded.ids[one.keys[0]] = ids_of(one, self.known[one.name], values)
            elif one.kind == "sid":
                encoded.ids[one.keys[0]] = sids(one.name, one.layout, values, place)
            elif one.kind in ("categories", "slots"):
                flat, counts = flat_values(values)
                ids = ids_of(one, self.known[one.name], flat)
                if one.kind == "categories":
                    encoded.ids[one.keys[0]], encoded.counts[one.keys[0]] = ids, counts
                else:
                    encoded.ids |= zip(one.keys, _first_values(ids, counts, len(one.keys)).T, strict=True)
            elif one.kind == "age":
                encoded.ages = age_buckets(_numbers(values), one.num_buckets)
            elif one.kind == "quantile":
                encoded.ids[one.keys[0]] = quantile_ids(_numbers(values), np.array(one.edges), one.default)
            else:
                scale = one.mean, one.deviation, one.default, one.bounds
                encoded.numbers[one.name] = standardize(_numbers(values), *scale)
        return encoded


def _first_values(ids: np.ndarray, counts: np.ndarray, most: int) -> np.ndarray:
    return first_values(ids, np.append(0, counts.cumsum()), most, UNKNOWN)


def _place_of_user(_: int, field: str) -> str:
    return f"user.{field}" if field else "user"


def _numbers(values: Values) -> np.ndarray:
    """`[N]` float64, NaN where missing."""
    return np.asarray(values, np.float64)
