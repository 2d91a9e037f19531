"""The entries of `data.features` and `data.histories`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from jfi.data.errors import DataError
from jfi.data.setting_types import Size, check_bounds

Of = Literal["user", "item", "event", "context"]
FeatureType = Literal["category", "number"]


@dataclass
class FeatureConfig:
    """A feature: a column that the model reads.

    Args:
        name: the column, or any other name for a cross.
        of: "user" and "item" features describe the sample's user and target, and item features also the events; "event"
            features describe the events of the history alone; "context" features are known when the target is shown,
            such as the device or the position. A categorical column may have an entry of event and one of context,
            which share an embedding table, so that their other settings must be equal.
        type: "category" for ids of an embedding table; "number" for a dense feature, or, of an event, for ids of
            16 intervals between quantiles of the training rows.
        width: width of the embedding table; None means `model.embedding_dim`. The tables that events have must
            have one width: those of the item's id, of categories of the item and of features of the event.
        max_values: maximum number of values that get their own ids: those with the most training rows; of two with the
            same number, the one that comes first in the order of ids. All others count as unseen. None is no limit.
        min_count: the number of training rows that a value needs; a rarer one counts as unseen. See also `capacity`.
        hash_buckets: number of ids that values share by their hash, instead of an id for each value of training.
        capacity: rows of a table that grows and forgets, instead of a vocabulary: a value gets a row once it has
            occurred `min_count` times between two admissions of training (`training.admit_every`), and where the table
            is full, rows of values that have not occurred for the longest time begin anew for others. Row 0 is shared
            by all values without a row. Values are known by a hash of 63 bits.
        separator: text between the values of a multi-valued column. RecBole's `token_seq` and the genres of MovieLens
            need none.
        default: value that replaces a missing one in a column with single values: a category, which always has its own
            id, or a number. Quantiles and means are computed without it, and a cross of the column does not use it.
            None leaves a value missing.
        cross: single-valued columns among the item's id, and categories of the item and of the event, whose values
            together are the value of an event's feature.

    Example:
        >>> FeatureConfig("genres", "item", separator="|").type
        'category'
    """

    name: str
    of: Of
    type: FeatureType = "category"
    width: Annotated[int, Meta(ge=1, le=2**16)] | None = None
    max_values: Size | None = None
    min_count: Size = 1
    hash_buckets: Annotated[int, Meta(ge=1, le=2**32)] | None = None
    capacity: Annotated[int, Meta(ge=2, lt=2**31)] | None = None
    separator: str | None = None
    default: str | int | float | None = None
    cross: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_bounds(self, f"data.features '{self.name}': ", DataError)


@dataclass
class HistoryConfig:
    """A history of a sample's user.

    Args:
        rule: a rule such as `event == click`, of the form of a label's: only rows where it holds are events of the
            history. None means that every row is one.
        max_history: the number of newest events that the history keeps; None means `data.max_history`.
        features: the columns of items and events that its events have; None means all.
    """

    rule: str | None = None
    max_history: Size | None = None
    features: list[str] | None = None
