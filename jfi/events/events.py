"""All events of a table, sorted so that every history is a range of them, and the sessions of their users."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from jfi.events.groups import NUM_VALUES
from jfi.utils.jagged import ranges

#: By name what gives a value of events `[n]`, whole numbers.
EventValues = dict[str, Callable[[np.ndarray], np.ndarray]]
#: Gives by length and type an array to write to.
New = Callable[[int, np.dtype | type], np.ndarray]


@dataclass(frozen=True)
class SortedEvents:
    """All E events, sorted by (user, timestamp, item). The arrays may be maps of files; nothing is copied.

    Args:
        user, item: `[E]` integers, indices of users and items. Every user in `[0, U)` has an event.
        time: `[E]` float64 seconds.
        label: `[E]` float32, 0 or 1 (of a regression any number), or NaN for a row that is only part of histories.
        split: `[E]` int8, the index in `splits.SPLITS`.
        rows: `[H]` integers, ascending, the rows that histories consist of; None if all are.
        targets: what the loss reads in addition to the label, `[E]` float32 by `DataConfig.target_names`.
        label_delay: seconds after a row's time within which rows can change its label; it is known later than that.
        of_histories: the rows of each of several histories; empty where there is one.
        oldest: `[E]` seconds, by row the time after which events are in its history; None for any.

    Example:
        >>> user, time = np.array([0, 0, 0, 1]), np.array([5.0, 7.0, 7.0, 9.0])
        >>> events = SortedEvents(user, np.array([3, 1, 2, 1]), time, np.ones(4), np.zeros(4, np.int8))
        >>> events.histories(np.array([1, 2, 3]), max_history=10)
        (array([0, 0, 3]), array([1, 1, 0]))
    """

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray
    label: np.ndarray
    split: np.ndarray
    rows: np.ndarray | None = None
    targets: dict[str, np.ndarray] = field(default_factory=dict)
    label_delay: float = 0.0
    of_histories: Sequence[np.ndarray] = ()
    oldest: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.user)

    @cached_property
    def first(self) -> np.ndarray:
        """`[U + 1]` int64: the events of user u are the rows `first[u]:first[u + 1]`."""
        return first_rows(self.user)

    @cached_property
    def each(self) -> "list[SortedEvents]":
        """The events with the rows of each history."""
        return [replace(self, rows=rows, of_histories=()) for rows in self.of_histories] or [self]

    def histories(self, rows: np.ndarray, max_history: int) -> tuple[np.ndarray, np.ndarray]:
        """`start, length [B]` int64: the newest `max_history` events of each row's user strictly before the row.

        They are ranges of the E rows, or of `self.rows` if that is given.

        Args:
            rows: `[B]` int64.
        """
        start = self.first.take(self.user.take(rows))
        end = self._first_of_the_moment(start, rows)
        if self.rows is not None:
            # Values of another type would convert all of the array.
            kind = self.rows.dtype
            start = np.searchsorted(self.rows, start.astype(kind, copy=False))
            end = np.searchsorted(self.rows, end.astype(kind, copy=False))
        start = np.maximum(start, end - max_history)
        if self.oldest is not None:
            since = self.oldest[rows]
            start = _first_not(lambda index: self.time[self.rows_at(index)] <= since, start, end)
        return start, end - start

    def rows_at(self, index: np.ndarray) -> np.ndarray:
        """Returns the rows `[M]` int64 that have the indices `[M]` int64 among the rows of histories."""
        return index if self.rows is None else self.rows.take(index).astype(np.int64, copy=False)

    def _first_of_the_moment(self, start: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The first row of the same user and time as each of `rows`, whose users' rows begin at `start`."""
        end = np.array(rows, np.int64)
        before = np.maximum(end - 1, 0)
        (tied,) = ((end > start) & (self.time.take(before) == self.time.take(end))).nonzero()
        if len(tied):
            time = self.time[end[tied]]
            end[tied] = _first_not(lambda index: self.time[index] < time, start[tied], before[tied])
        return end


def _first_not(holds: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Returns the first index from `low [B]` on for which a condition does not hold, at most `high [B]`."""
    while np.any(open_ := low < high):
        middle = np.where(open_, (low + high) // 2, 0)
        does = holds(middle) & open_
        low, high = np.where(does, middle + 1, low), np.where(does | ~open_, high, middle)
    return low


@dataclass(frozen=True)
class Histories:
    """The S events of the histories of B samples, or of B timelines.

    Args:
        lengths: `[B]` int64.
        start: `[B]` int64: the histories are ranges of the rows of histories that begin there; None with `events`.
        events: `[S]` int64, the events of the histories, or None.
        weights: `[S]` float32, the weights of the events, or None.
    """

    lengths: np.ndarray
    start: np.ndarray | None = None
    events: np.ndarray | None = None
    weights: np.ndarray | None = None

    def blocks(self, events: SortedEvents, size: int) -> Iterator[tuple[slice, slice, np.ndarray]]:
        """Yields whole histories, of at most `size` events together or a longer one.

        Returns:
            The range of the B histories and that of the S events, and these events, int64.
        """
        ends = self.lengths.cumsum()
        first = begin = 0
        while first < len(ends):
            last = max(first + 1, int(ends.searchsorted(begin + size, side="right")))
            end, own = int(ends[last - 1]), slice(first, last)
            if self.events is None:
                found = events.rows_at(ranges(self.start[own], self.lengths[own]))
            else:
                found = self.events[begin:end]
            yield own, slice(begin, end), found
            first, begin = last, end


def event_values(numbers: dict[str, np.ndarray], values: dict[str, list[np.ndarray]]) -> EventValues:
    """Returns what is summed over the events of histories.

    Args:
        numbers: by name of a number of events the numbers of their quantiles `[E]`, 0 for none.
        values: by categorical column of events the ids of its slots, `[E]` each.

    Example:
        >>> found = event_values({"dwell": np.array([2, 0])}, {"action": [np.array([1, 3])]})
        >>> list(found)[:3], found["action is 3"](np.arange(2))
        (['sum of dwell', 'has dwell', 'action is 1'], array([False,  True]))
    """
    found: EventValues = {}
    for name, ids in numbers.items():
        found[f"sum of {name}"] = lambda rows, ids=ids: ids[rows]
        found[f"has {name}"] = lambda rows, ids=ids: ids[rows] > 0
    for name, slots in values.items():
        for i in range(1, NUM_VALUES + 1):
            found[f"{name} is {i}"] = lambda rows, slots=slots, i=i: np.any([one[rows] == i for one in slots], axis=0)
    return found


def first_rows(user: np.ndarray) -> np.ndarray:
    """`[U + 1]` int64: the rows of user u are `first[u]:first[u + 1]`, of `user [E]` ascending without a gap."""
    # The type of the sought values must be that of the array, which would be converted otherwise.
    users = np.arange(int(user[-1]) + 2 if len(user) else 1, dtype=user.dtype)
    return np.searchsorted(user, users)


def order_by_item(events: SortedEvents, out: np.ndarray | None = None, rows_at_once: int = 1 << 20) -> np.ndarray:
    """`[E]`, the rows sorted by (user, item, timestamp): each user's rows, in another order.

    Args:
        out: `[E]` integers to write to, such as the map of a file.
        rows_at_once: about as many rows are sorted together, so that memory beyond the result is bounded, up to the
            longest user.
    """
    order = np.empty(len(events), index_type(len(events))) if out is None else out
    for begin, end in user_blocks(events.first, rows_at_once):
        # The sort is stable, and a user's rows are in the order of time.
        order[begin:end] = begin + np.lexsort((events.item[begin:end], events.user[begin:end]))
    return order


def user_blocks(first: np.ndarray, rows_at_once: int = 1 << 20) -> list[tuple[int, int]]:
    """Ranges of rows that hold whole users, each with `rows_at_once` rows or the rows of one longer user.

    >>> user_blocks(np.array([0, 2, 3, 9, 10]), 4)
    [(0, 3), (3, 9), (9, 10)]
    """
    blocks, user = [], 0
    while user < len(first) - 1:
        following = max(user + 1, int(np.searchsorted(first, first[user] + rows_at_once, side="right")) - 1)
        blocks.append((int(first[user]), int(first[following])))
        user = following
    return blocks


def index_type(count: int) -> type[np.signedinteger]:
    """The type of indices below `count`: int32, or int64 where that is too small."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


#: A session ends where a user pauses for longer, in seconds.
PAUSE = 1800.0


def session_starts(events: SortedEvents, session: np.ndarray | None, new: New, rows_at_once: int) -> np.ndarray:
    """`[H]` int64, for each row of histories the first one of its session, which has all of its first moment.

    Args:
        session: `[E]` integers, equal for the events of a session of a user, or None without a column of it.
        rows_at_once: about as many events are in memory together, up to the user with the most.
    """
    found = new(len(events) if events.rows is None else len(events.rows), np.int64)
    for begin, end in user_blocks(events.first, rows_at_once):
        if events.rows is not None:
            begin, end = np.searchsorted(events.rows, np.array([begin, end], events.rows.dtype))
        index = np.arange(begin, end)
        rows = events.rows_at(index)
        user, time = events.user[rows], events.time[rows]
        is_later = np.diff(time, prepend=-np.inf) > 0
        is_first = (np.diff(user, prepend=-1) != 0) | (np.diff(time, prepend=-np.inf) > PAUSE)
        moment = np.maximum.accumulate(np.where(is_first | is_later, index, 0))
        if session is not None:
            is_first[1:] |= np.diff(session[rows]) != 0
        found[begin:end] = np.maximum.accumulate(np.where(is_first, moment, 0))
    return found
