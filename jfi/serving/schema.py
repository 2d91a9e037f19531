"""The fields of a request, as `artifact.json` holds them, and their JSON Schema (draft 2020-12) for clients."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from jfi.events.groups import StatisticsSettings
from jfi.utils.encoding import LARGEST_NUMBER, HashBuckets, HashedIds

Positive = Annotated[int, Meta(ge=1)]
#: Most values of a list in a request. Training keeps all values of a user or a target.
MAX_VALUES = 1000
#: The year 5138 in seconds: times in milliseconds are above.
LATEST = 1e11
#: Bytes of the longest id of a user; LMDB's keys have 511 bytes at most.
LONGEST_ID = 480
#: Bytes of the longest text of a column with a capacity: its hash takes one step after the other for each 8 bytes.
LONGEST_RAW = 1024
_VALUE = {"type": ["string", "number", "boolean", "null"]}
_RAW = _VALUE | {"maxLength": LONGEST_RAW}
_LIST = {"type": ["array", "null"], "items": _VALUE, "maxItems": MAX_VALUES}
_TEXT_OF_LIST = f"a list of strings, numbers or booleans, at most {MAX_VALUES}, or null"
_FLOAT32 = {"minimum": -LARGEST_NUMBER, "maximum": LARGEST_NUMBER}
#: By kind of field, the JSON Schema of its values in a request.
KINDS: dict[str, dict] = {
    "category": {"description": "a string, a number or a boolean, or null", **_VALUE},
    "categories": {"description": _TEXT_OF_LIST, **_LIST},
    "raw": {"description": f"a string of at most {LONGEST_RAW} bytes, a number or a boolean, or null", **_RAW},
    "raws": {"description": f"{_TEXT_OF_LIST}; each of at most {LONGEST_RAW} bytes", **_LIST, "items": _RAW},
    "slots": {"description": _TEXT_OF_LIST, **_LIST},
    "number": {"description": "a finite number of float32's range, or null", "type": ["number", "null"], **_FLOAT32},
    "quantile": {"description": "a finite number, or null", "type": ["number", "null"]},
    "age": {"description": "a number of seconds, at least 0", "type": "number", "minimum": 0},
    "sid": {
        "description": "a semantic ID: an integer or its text, or null",
        "type": ["integer", "string", "null"],
        "pattern": "^(-?[0-9]{1,19})?$",
    },
}


@dataclass(frozen=True)
class Field:
    """A field of the user, of a candidate or of an event.

    Args:
        name: in the request; also the column of the training table, whose vocabulary it uses.
        kind: "category" has one id; "categories" has any number of ids under one key; "slots" has an id for each of its
            keys, from its first values; "number" is a dense feature; "quantile" is a number that `edges` turn into an
            id; "age" is the number of seconds since the event, which becomes a bucket; "cross" is not in the request,
            but made of the values of other fields of the event, `columns`; "sid" is a semantic ID, which is an input as
            it is, and -1 where it is null.
        keys: of the model's inputs that get its ids.
        edges: of a quantile.
        mean, deviation: of a number in training.
        bounds: of a number that is clipped to them, or None.
        num_buckets: of an age; of a category or categories, of a hash of the values in place of a vocabulary, or 0.
        columns: of a cross.
        default: the text or the number that stands for null, or None.
        layout: of a semantic ID, the arguments of `jfi.semantic_ids.packing.Layout`.
        capacity: of a category or categories whose table grows, its rows: the ids are raw ones, hashes of the values;
            0 for another.
    """

    name: str
    kind: Literal["category", "categories", "slots", "number", "quantile", "age", "cross", "sid"]
    keys: list[str] = field(default_factory=list)
    edges: list[float] = field(default_factory=list)
    mean: float = 0.0
    deviation: float = 1.0
    bounds: tuple[float, float] | None = None
    num_buckets: int = 0
    columns: list[str] = field(default_factory=list)
    default: str | float | None = None
    layout: dict[str, int] = field(default_factory=dict)
    capacity: int = 0

    def encoding(self) -> HashBuckets | HashedIds | None:
        """Returns what hashes the values, None for a field with a vocabulary or without ids."""
        if self.kind not in ("category", "categories", "slots", "cross"):
            return None
        if self.capacity:
            return HashedIds(self.capacity)
        return HashBuckets(self.num_buckets) if self.num_buckets else None


def schemas_of(kinds: Mapping[str, str], bounded: Collection[str]) -> dict[str, dict]:
    """Returns by name the JSON Schemas of values of these kinds; the texts of `bounded` have a bound."""
    raw = {"category": "raw", "categories": "raws", "slots": "raws"}
    return {name: KINDS[raw.get(kind, kind) if name in bounded else kind] for name, kind in kinds.items()}


def bounded_fields(fields: Sequence[Field]) -> set[str]:
    """Returns the names of fields whose texts are hashed as raw ids, which takes long for a long text."""
    return {name for one in fields if one.capacity for name in one.columns or [one.name]}


@dataclass(frozen=True)
class PolicyFields:
    """The fields of an event, but for its age, that a history policy reads.

    Args:
        dwell, surface, session: their names in the request, each None if the policy was fitted without it.
        dwell_seconds: seconds of a dwell of 1.
    """

    dwell: str | None
    surface: str | None
    session: str | None
    dwell_seconds: float = 1.0

    def fields(self) -> "dict[str, Field]":
        """Returns by kind, as fields of the request."""
        names = {"dwell": self.dwell, "surface": self.surface, "session": self.session}
        kinds = {"dwell": "number"}
        return {of: Field(name, kinds.get(of, "category")) for of, name in names.items() if name is not None}


@dataclass(frozen=True)
class Schema:
    """All fields of a request.

    Args:
        user: fields of the user.
        candidate: fields of each candidate.
        event: fields of each event; empty for a model that reads no history.
        vocabularies: by column the known values; their ids count from 1 in this order.
        policy: what a history policy reads of an event, or None without one.
        codec: fingerprint of the codec of semantic IDs, which a request names too, or None without such IDs.
        labels: names of the labels of a model with several, in the order of its outputs; [] for one.
        tasks: of each output, "binary" for a logit or "regression".
        statistics: of the past, which the model reads, or None.
        counted: fields of an event that these count by, of a model that reads no history.
        user_id: name of the column of the user's id, whether the model reads it or not.
        item_id: name of the column of the item's id, likewise.
    """

    user: list[Field]
    candidate: list[Field]
    event: list[Field]
    vocabularies: dict[str, list[str]] = field(default_factory=dict)
    policy: PolicyFields | None = None
    codec: str | None = None
    labels: list[str] = field(default_factory=list)
    tasks: list[Literal["binary", "regression"]] = field(default_factory=lambda: ["binary"])
    statistics: StatisticsSettings | None = None
    counted: list[Field] = field(default_factory=list)
    user_id: str | None = None
    item_id: str | None = None

    @property
    def event_fields(self) -> list[Field]:
        """The fields of an event that a state keeps: the model or its statistics read them."""
        return self.event + self.counted


@dataclass(frozen=True)
class Limits:
    """The limits of a request.

    Args:
        max_candidates: a request with more candidates is refused.
        max_history: the number of newest events that are kept, as in training.
    """

    max_candidates: Positive
    max_history: Positive


@dataclass(frozen=True)
class Table:
    """An embedding table: its sizes, the keys of the model's inputs that read it, and whether it grows.

    The inputs of a table that grows are raw ids, of which the table has a row or not.
    """

    rows: int
    width: int
    keys: list[str]
    grows: bool = False


@dataclass(frozen=True)
class Inputs:
    """The inputs of the dense part, in its order.

    Args:
        history, users, candidates: keys of embeddings.
        buckets: keys of the buckets of the events' ages that learned biases read.
        semantic: those of the keys whose values are semantic IDs, which the dense part reads itself.
        weights: whether it reads weights of the events.
    """

    history: list[str]
    users: list[str]
    candidates: list[str]
    buckets: list[str]
    semantic: list[str] = field(default_factory=list)
    weights: bool = False

    @property
    def keys(self) -> list[str]:
        return [*self.history, *self.users, *self.candidates]


def request_schema(
    parts: Mapping[str, Mapping[str, dict]],
    codec: str | None,
    limits: Limits,
    answer: str,
    user_id: str | None = None,
    has_statistics: bool = False,
) -> dict:
    """Returns the JSON Schema of a request.

    It does not say what no JSON Schema can: that the lists of a table by columns have one length, that no key is there
    twice, and that semantic IDs are those of the codec.

    Args:
        parts: by part of a request the JSON Schemas of its fields by name.
        codec: fingerprint of the codec of semantic IDs, None without such IDs.
        limits: of a request.
        answer: what a score is.
        user_id: the field of the user's id, if the server knows the users' events; None if it does not.
        has_statistics: whether the server also counts statistics of the past, of users without an id too.
    """
    kept = f"events, oldest first; of more than {limits.max_history} the newest are read"
    properties, optional, choices = {"user": _object(parts["user"])}, [], []
    if user_id is not None:
        without = {"anyOf": _with_id(parts["user"], user_id, id_schema("the user's id"))}
        with_history = properties["user"]
        if has_statistics:
            with_history = {"anyOf": _with_id(parts["user"], user_id, KINDS["category"])}
        properties["user"] = {"anyOf": [without, with_history]}
        then, other = ({"properties": {"user": one}} for one in (with_history, without))
        choices.append({"if": {"required": ["history"]}, "then": then, "else": other})
    if "history" in parts:
        properties["history"] = {"description": kept} | _table(parts["history"], {})
        optional += ["history"] if user_id is not None else []
    bounds = {"minItems": 1, "maxItems": limits.max_candidates}
    candidates = properties["candidates"] = _table(parts["candidates"], bounds)
    if user_id is not None:
        optional.append("context")
        shared = "fields that all candidates share, which they lack then"
        any_of = [*parts["candidates"]]
        context = _object(parts["candidates"], any_of)
        properties["context"] = {"description": shared} | context
        properties["candidates"] = _table(parts["candidates"], bounds, any_of)
        then = {"properties": {"candidates": candidates}}
        choices.append({"if": {"not": {"required": ["context"]}}, "then": then})
        choices += map(_in_one, any_of)
    if codec is not None:
        properties["codec"] = {"const": codec}
    optional.append("time")
    text = "at which the state of users is read; by default now"
    text = text if user_id is not None else "which this model does not read"
    properties["time"] = time_schema(f"seconds since 1970, {text}")
    return (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "A request of POST /score",
            "description": f'The answer is {{"scores": [...]}}: a {answer} for each candidate, in their order.',
        }
        | _object(properties, optional)
        | ({"allOf": choices} if choices else {})
    )


def empty_request(fields: Mapping[str, Mapping[str, str]], codec: str | None = None) -> dict:
    """Returns a request of one event and one candidate without values; the arguments are as of `request_schema`."""
    found: dict[str, Any] = {} if codec is None else {"codec": codec}
    for part, kinds in fields.items():
        row = {name: 0 if kind == "age" else None for name, kind in kinds.items()}
        found[part] = row if part == "user" else [row]
    return found


def time_schema(description: str) -> dict:
    """Returns the JSON Schema of a time."""
    return {"description": description, "type": "number", "exclusiveMinimum": -LATEST, "exclusiveMaximum": LATEST}


def id_schema(description: str) -> dict:
    """Returns the JSON Schema of a user's id."""
    types = {"type": ["string", "number", "boolean"], "minLength": 1, "maxLength": LONGEST_ID}
    return {"description": f"{description}, at most {LONGEST_ID} bytes"} | types


def _with_id(fields: dict[str, dict], name: str, user_id: dict) -> list[dict]:
    """An object with the user's id and the fields that the model reads, or the id alone where these are none."""
    return [_object(fields | {name: user_id}), *([] if fields.keys() - {name} else [user_id])]


def _in_one(name: str) -> dict:
    """A field that either the context has or all candidates have, by rows or by columns."""
    lacks, has = {"properties": {name: False}}, {"required": [name]}
    then, other = ({"properties": {"candidates": one | {"items": one}}} for one in (lacks, has))
    of_context = {"required": ["context"], "properties": {"context": {"type": "object", "required": [name]}}}
    return {"if": of_context, "then": then, "else": other}


def _object(properties: dict[str, Any], optional: Sequence[str] = ()) -> dict:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _table(fields: dict[str, dict], bounds: dict[str, int], optional: Sequence[str] = ()) -> dict:
    """Rows by rows or by columns."""
    columns = {name: {"type": "array", "items": one, **bounds} for name, one in fields.items()}
    rows = {"type": "array", "items": _object(fields, optional), **bounds}
    return {"anyOf": [rows, _object(columns, optional)]}
