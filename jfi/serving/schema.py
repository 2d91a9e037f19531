"""The fields of a request, as `artifact.json` holds them, and their JSON Schema (draft 2020-12) for clients."""

from collections.abc import Collection, Mapping
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
#: Bytes of the longest text of a value.
LONGEST_TEXT = 1024
_VALUE = {"type": ["string", "number", "boolean", "null"], "maxLength": LONGEST_TEXT}
_LIST = {"type": ["array", "null"], "items": _VALUE, "maxItems": MAX_VALUES}
_TEXT_OF_LIST = f"a list of strings, numbers or booleans, at most {MAX_VALUES}, or null"
_FLOAT32 = {"minimum": -LARGEST_NUMBER, "maximum": LARGEST_NUMBER}
#: By kind of field, the JSON Schema of its values in a request.
KINDS: dict[str, dict] = {
    "category": {"description": "a string, a number or a boolean, or null", **_VALUE},
    "categories": {"description": _TEXT_OF_LIST, **_LIST},
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


@dataclass(frozen=True)
class PolicyFields:
    """The fields of an event, but for its age, that a history policy reads.

    Args:
        dwell, surface, session: their names in the request, each None if the policy was fitted without it.
        dwell_per_second: how many of the unit of dwells are a second.
    """

    dwell: str | None
    surface: str | None
    session: str | None
    dwell_per_second: float = 1.0

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
        item_columns: names of the fields of a candidate that are columns of the item, and not of the interaction.
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
    item_columns: list[str] = field(default_factory=list)

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
    read: Mapping[str, Collection[str]],
    stored: Mapping[str, Collection[str]],
    user_id: str | None,
    item_id: str | None,
    codec: str | None,
    limits: Limits,
    answer: str,
    has_state: bool,
) -> dict:
    """Returns the JSON Schema of a request.

    It does not say what no JSON Schema can: that the lists of a table by columns have one length, that no key is there
    twice, and that semantic IDs are those of the codec; nor that candidates need an id if the state is read by it.

    Args:
        parts: by part of a request the JSON Schemas of its fields by name.
        read: by part the names of the fields that the model or its statistics read.
        stored: by part the names of those that the state has.
        user_id, item_id: the fields of the ids.
        codec: fingerprint of the codec of semantic IDs, None without such IDs.
        limits: of a request.
        answer: what a score is.
        has_state: whether a state has what a request may leave out.
    """
    fields, optional, choices = parts["candidates"], ["context", "time"], []
    needed = {*read["candidates"]} - {*stored["candidates"]}
    of_user = parts["user"], {*read["user"]}, {*stored["user"]}, user_id
    properties = {"user": {"anyOf": _users(*of_user)}}
    if "history" in parts:
        kept = f"events, oldest first; of more than {limits.max_history} the newest are read"
        properties["history"] = {"description": kept} | _table(parts["history"], {})
    if "history" in parts and has_state:
        of_state = {"properties": {"user": {"anyOf": _users(*of_user, reads_events=True)}}}
        choices.append({"if": {"not": {"required": ["history"]}}, "then": of_state})
    bounds = {"minItems": 1, "maxItems": limits.max_candidates}
    properties["candidates"] = _table(fields, bounds, [*fields], fields.get(item_id))
    shared = "fields that all candidates share, which they lack then"
    properties["context"] = {"description": shared} | _object(fields, [*fields])
    choices += [_in_one(name, name in needed, name == item_id) for name in fields]
    if codec is not None:
        properties["codec"] = {"const": codec}
    if has_state:
        optional += ["history", "codec"]
    text = "at which the state is read; by default now" if has_state else "which this model does not read"
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


def id_schema(description: str, longest: int = LONGEST_ID) -> dict:
    """Returns the JSON Schema of an id of at most so many bytes."""
    types = {"type": ["string", "number", "boolean"], "minLength": 1, "maxLength": longest}
    return {"description": f"{description}, at most {longest} bytes"} | types


def _users(
    fields: Mapping[str, dict], read: set[str], stored: set[str], name: str | None, reads_events: bool = False
) -> list[dict]:
    """The forms of a user: with all that the model reads, or with the id, by which the state is read, or it alone."""
    forms = [] if reads_events else [_object(fields, {*fields} - read)]
    if reads_events or read & stored:
        own = id_schema("the id of the user, by which the state is read")
        forms.append(_object(fields | {name: own}, {*fields} - (read - stored) - {name}))
        forms += [own] if read - stored <= {name} else []
    elif name is not None and read <= {name}:
        forms.append(fields[name])
    return forms


def _in_one(name: str, is_needed: bool, is_id: bool) -> dict:
    """A field that the context has or all candidates have, by rows or by columns; a list of ids has the id alone."""
    lacks, has = {"properties": {name: False}}, {"required": [name]} if is_needed else {}
    of_rows = lacks | ({"type": "object"} if is_id else {}), has | ({"type": "object"} if has and not is_id else {})
    then, other = (
        {"properties": {"candidates": own | {"items": rows}}} for own, rows in zip((lacks, has), of_rows, strict=True)
    )
    of_context = {"required": ["context"], "properties": {"context": {"type": "object", "required": [name]}}}
    return {"if": of_context, "then": then, "else": other}


def _object(properties: Mapping[str, Any], optional: Collection[str] = ()) -> dict:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _table(
    fields: Mapping[str, dict], bounds: dict[str, int], optional: Collection[str] = (), ids: dict | None = None
) -> dict:
    """Rows by rows or by columns, or a list of ids."""
    columns = {name: {"type": "array", "items": one, **bounds} for name, one in fields.items()}
    forms = [{"type": "array", "items": _object(fields, optional), **bounds}, _object(columns, optional)]
    if bounds:
        forms[1] |= {"minProperties": 1}
    return {"anyOf": [*forms, *([] if ids is None else [{"type": "array", "items": ids, **bounds}])]}
