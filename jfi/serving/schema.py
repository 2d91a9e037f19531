"""The fields of a request, as `artifact.json` holds them."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta, Struct

from jfi.events.groups import StatisticsSettings
from jfi.utils.encoding import HashBuckets, HashedIds

Positive = Annotated[int, Meta(ge=1)]


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
        label: the first label, as `data.label`; a state's statistics must be of the same one.
        history: `data.history`; a state's histories must be of the same rule.
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
    label: str | None = None
    history: str | None = None

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


class Served(Struct, frozen=True):
    """Says what has scored a request.

    Args:
        checkpoint: fingerprint of the run's parameters; None where those that scored are others.
        output: what a score is, of `jfi.serving.scorer.OUTPUTS`.
    """

    artifact: str
    run: str | None
    checkpoint: str | None
    output: str


#: The scores of a request's candidates, of several labels by their names.
Answer = list[float] | dict[str, list[float]]


class NotFiniteError(ArithmeticError):
    """Scores that are infinite or NaN."""


def check_finite(scores: Answer, version: int | None = None) -> None:
    """Raises NotFiniteError if a score is infinite or NaN."""
    lists = scores.values() if isinstance(scores, dict) else [scores]  # by label, of a model of several
    if not all(math.isfinite(sum(one)) for one in lists):  # no sum of float32 leaves float64's range
        raise NotFiniteError(f"the scores of {'the model' if version is None else f'version {version}'} are not finite")
