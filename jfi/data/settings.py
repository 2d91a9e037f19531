"""Parts of the `data` section of a config: names, and its smaller sections."""

from dataclasses import dataclass, field
from typing import Literal

AGE = "age"
HISTORY = "history_"
#: The column of semantic IDs in their file, and in the names of their keys.
SID = "sid"
Batching = Literal["sample", "user"]
Task = Literal["binary", "regression"]
Of = Literal["user", "item", "event", "context"]
FeatureType = Literal["category", "number"]
#: By value of `data.statistics` the dense features that it makes; see `jfi.data.features.statistics`.
STATISTICS = {
    "item": ["past_item_rate", "past_item_count"],
    "user": ["past_user_rate", "past_user_count", *(f"past_user_newest_{most}" for most in (3, 10, 30))],
    "user_item": ["past_user_item_rate", "past_user_item_count", "past_user_item_newest_3"],
    "similar": ["past_similarity", "past_similar_rate", "past_agreement"],
}
#: The settings that name tables.
FILES = ("interactions", "users", "items", "semantic_ids", "validation", "test")
MAX_COUNT = 2**31 - 1


@dataclass
class SyntheticConfig:
    """The synthetic table: it has a pattern that attention over the history can find and the mean cannot.

    Args:
        kind: "taste" is the table of `jfi.data.features.synthetic`; "dwell" is a log with dwell times, of which only
            the long ones of active users count, see `jfi.data.features.synthetic_dwell`.
        num_users: number of users.
        num_items: number of items, drawn by Zipf's law.
        num_categories: number of item categories; a user likes or dislikes each one independently.
        mean_length: mean number of events per user; the numbers are log-normal, and every user starts without events.
        taste: weight of the user's taste for the category in the logit of a like; of "taste" alone.
        active_share: probability with which a user is active; of "dwell" alone, as those below.
        horizon: the number of events after which an event counts no more.
        labeled: the number of newest events of each user that have a label.
        seed: seed of all random numbers.
    """

    kind: Literal["taste", "dwell"] = "taste"
    num_users: int = 1000
    num_items: int = 500
    num_categories: int = 10
    mean_length: float = 60.0
    taste: float = 2.5
    active_share: float = 0.5
    horizon: int = 1000
    labeled: int = 16
    seed: int = 0


@dataclass
class LabelConfig:
    """One of several labels that a model predicts at once.

    Args:
        name: letters, digits and underscores; metrics, columns of predictions and scores of a request have it.
        label: a column or a rule, as `data.label`.
        task: as `data.task`.
        weight: weight of its loss in the sum over all labels, positive.
    """

    name: str
    label: str
    task: Task = "binary"
    weight: float = 1.0


@dataclass
class FeatureConfig:
    """A feature: a column that the model reads.

    Args:
        name: the column, or any other name for a cross.
        of: "user" and "item" features describe the sample's user and target, and an item's ones its events too; "event"
            features describe the events of the history alone; "context" features are known when the target is shown,
            such as the device or the position. A categorical column may have an entry of event and one of context,
            which share an embedding table, so that their other settings must be equal.
        type: "category" for ids of an embedding table; "number" for a dense feature, or, of an event, for ids of
            intervals between quantiles of the training rows.
        width: width of the embedding table; None means `model.embedding_dim`. The tables that events have must
            have one width: those of the item's id, of categories of the item and of features of the event.
        max_values: the most values that get ids of their own: those with the most training rows, and of two with as
            many the one that comes first in the order of ids. All others count as unseen. None is no limit.
        min_count: the number of training rows that a value needs; a rarer one counts as unseen.
        hash_buckets: a number of ids that all values share by their hash, in place of an id for each value of training.
        separator: text between the values of a multi-valued column. RecBole's `token_seq` and the genres of MovieLens
            need none.
        default: value that stands for a missing one, of a column with single values: a value of a category, which
            always has an id of its own, or a number. Quantiles and means are of the values that are there, and a cross
            of the column does not read it. None leaves a value missing.
        cross: single-valued columns among the item's id, and categories of the item and of the event, whose values
            together are the value of an event's feature.

    Example:
        >>> FeatureConfig("genres", "item", separator="|").type
        'category'
    """

    name: str
    of: Of
    type: FeatureType = "category"
    width: int | None = None
    max_values: int | None = None
    min_count: int = 1
    hash_buckets: int | None = None
    separator: str | None = None
    default: str | int | float | None = None
    cross: list[str] = field(default_factory=list)
