"""The groups of `data.statistics`, their settings, and the names of the dense features that they make."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

Group = Literal["item", "user", "user_item", "similar", "popularity", "age", "user_category", "session", "event_values"]

#: The half-lives of `popularity`, as parts of the time from the first to the last training sample.
HALF_LIVES = (1 / 64, 1 / 16, 1 / 4, 1.0)
#: The newest events that `similar` compares a target with, at most, and the pairs of a row and such an event.
WINDOW, _MAX_PAIRS = 32, 1 << 26
_RECENT = [f"past_recent_rate_{i}" for i in range(1, len(HALF_LIVES) + 1)]
_POPULARITY = [f"past_popularity_{i}" for i in range(1, len(HALF_LIVES) + 1)]
#: The values of a categorical column of events that are counted: those with the first ids.
NUM_VALUES = 4
_BY_VALUE = [f"past_{where}_{{value}}_{i + 1}" for where in ("session", "user_item") for i in range(NUM_VALUES)]
_MEANS = [f"past_{where}_mean_{{number}}" for where in ("item", "user", "user_{category}", "session")]
#: By group its columns: of a table with labels, and of implicit feedback. One with `{category}` is made for each
#: categorical column of the item, and one with `{number}` or `{value}` for each number or categorical column of events.
GROUPS: dict[Group, tuple[list[str], list[str]]] = {
    "item": (["past_item_rate", "past_item_count"], ["past_item_share", "past_item_count"]),
    "user": (
        ["past_user_rate", "past_user_count", *(f"past_user_newest_{most}" for most in (3, 10, 30))],
        ["past_user_count"],
    ),
    "user_item": (
        ["past_user_item_rate", "past_user_item_count", "past_user_item_newest_3"],
        ["past_user_item_share", "past_user_item_count", "past_user_item_pause"],
    ),
    "similar": (["past_similarity", "past_similar_rate", "past_agreement"], ["past_similarity"]),
    "popularity": ([*_RECENT, *_POPULARITY], _POPULARITY),
    "age": (["past_item_age", "past_user_pause", "past_user_item_pause"], ["past_item_age", "past_user_pause"]),
    "user_category": (
        ["past_user_{category}_rate", "past_user_{category}_count"],
        ["past_user_{category}_share", "past_user_{category}_count"],
    ),
    "session": (["past_session_count", "past_session_{category}_share"],) * 2,
    "event_values": ([*_MEANS, *_BY_VALUE],) * 2,
}
#: The groups that "auto" stands for: of a table with labels, and of implicit feedback, where `user_item` and `similar`
#: tell positives from negatives, since an item that the user has had is no negative. docs/features.md has figures.
AUTO: tuple[list[Group], list[Group]] = (
    [*GROUPS],
    ["item", "user", "popularity", "age", "user_category", "session"],
)
#: The groups that count by the values of categorical columns of the item.
BY_CATEGORY: tuple[Group, ...] = ("user_category", "session", "event_values")
#: The groups that read sessions.
SESSIONS: tuple[Group, ...] = ("session", "event_values")


def similar_window(num_events: int, max_history: int) -> int:
    """The number of newest events that `similar` compares a target with; fewer for tables with very many events.

    >>> similar_window(1_000_000, 200), similar_window(50_000_000, 200), similar_window(1_000_000, 5)
    (32, 1, 5)
    """
    return min(WINDOW, max_history, max(1, _MAX_PAIRS // max(num_events, 1)))


def columns_of(
    groups: Sequence[str],
    is_implicit: bool,
    categories: Iterable[str],
    numbers: Iterable[str] = (),
    values: Iterable[str] = (),
) -> list[str]:
    """The dense features that groups make, in their order.

    Args:
        categories: the categorical columns of the item but its id.
        numbers, values: the numbers and the categorical columns of events.

    Example:
        >>> columns_of(["session", "item"], is_implicit=True, categories=["genres"])
        ['past_item_share', 'past_item_count', 'past_session_count', 'past_session_genres_share']
    """
    names = [name for group, kinds in GROUPS.items() if group in groups for name in kinds[is_implicit]]
    found, known = [], {"category": [*categories], "number": [*numbers], "value": [*values]}
    for name in names:
        parts = [part for part in known if f"{{{part}}}" in name]
        found += [name.format(**dict(zip(parts, of, strict=True))) for of in product(*map(known.get, parts))]
    return found


@dataclass(frozen=True)
class ItemColumn:
    """A categorical column of the item that statistics count by.

    Args:
        key: of the column's ids among the inputs of a model.
        size: all ids are below it.
        slots: of a column with lists the number of values that count, else 1.
    """

    key: str
    size: int
    slots: int


@dataclass(frozen=True)
class StatisticsSettings:
    """The settings of statistics of the past: what they are of, and how they are counted.

    Args:
        window: the newest events that `similar` compares a target with.
        half_lives: of `popularity`, in seconds.
        is_implicit: whether every row is a positive.
        num_known: the number of items that training knows.
        columns: those of them that have values, by name.
        session: name of the column of sessions that is read, or None.
        numbers: by name the quantiles of the numbers of events that count.
        values: by name of a categorical column of events the values that are counted.
    """

    user: str
    item: str
    groups: list[str]
    window: int
    half_lives: list[float]
    is_implicit: bool
    num_known: int
    categories: list[str]
    columns: dict[str, ItemColumn]
    session: str | None = None
    numbers: dict[str, list[float]] = field(default_factory=dict)
    values: dict[str, list[str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The statistics, which are the last of the dense features of a candidate."""
        return columns_of(self.groups, self.is_implicit, self.categories, self.numbers, self.values)
