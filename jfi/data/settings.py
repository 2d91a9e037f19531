"""Parts of the `data` section of a config: names, and its smaller sections."""

from dataclasses import dataclass
from typing import Literal

AGE = "age"
HISTORY = "history_"
#: The column of semantic IDs in their file, and in the names of their keys.
SID = "sid"
Batching = Literal["sample", "user"]
Task = Literal["binary", "regression"]
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
        name: of letters, digits and underscores; metrics, columns of predictions and scores of a request have it.
        label: a column or a rule, as `data.label`.
        task: as `data.task`.
        weight: of its loss in the sum over all labels, positive.
    """

    name: str
    label: str
    task: Task = "binary"
    weight: float = 1.0
