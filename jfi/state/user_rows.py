"""The newest rows of users as rows of a log change them: one identity, one rule of late rows and one order.

Servers and training that follows a log use the same code. A row is known again by its id, see `ids_of`. Of rows of a
user with one id the first one with a label counts, or without labels the first one; a row that was there without a
label is replaced by one with it. Of a user with as many rows as are kept, a row that is as old as the oldest of these
counts as repeated, since nobody knows whether it was there. So does an older one. A row that is much older than its
user's newest one is late, and does not count, unless it brings the label of a row that is there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jfi.state.events import LogRows
from jfi.state.layout import ID, LABELED, OTHERS, TIME, EventLayout, newest, other_key, user_key
from jfi.state.stores import Changes, Get

#: Seconds that a row may be older than the newest one of its user, by default.
MAX_LATE = 86400.0


@dataclass(frozen=True)
class Chosen:
    """Which of N new rows count.

    Args:
        kept: `[K]` int64, the indices of those that do.
        replaced: `[K]` int64, the indices of the rows among the old ones that they take the place of, or -1.
        was_event: `[K]` bool, those that were there as events of histories, without the label that they have now.
        late: `[L]` int64, the indices of those that are too late.
        repeated: how many are there already.
        stays: `[O]` bool, the old rows of all users, events before others, that no row takes the place of.
    """

    kept: np.ndarray
    replaced: np.ndarray
    was_event: np.ndarray
    late: np.ndarray
    repeated: int
    stays: np.ndarray


class UserRows:
    """The rows that are kept of some users.

    Args:
        layout: of the records.
        get: reads keys of the store.
        users: distinct ids.

    Raises:
        StateError: a user's rows are damaged.
    """

    def __init__(self, layout: EventLayout, get: Get, users: Sequence[str]) -> None:
        self.layout, self.users, count = layout, users, len(users)
        self._number = {user: number for number, user in enumerate(users)}
        values = get([*map(user_key, users), *map(other_key, users)])
        #: By user the events of histories, by time, and what is kept of the other rows.
        self.events = list(map(layout.records, values[:count], users))
        self.others = list(map(layout.other_rows, values[count:], users))
        self._before = [*self.events], [*self.others]
        self._decisive: tuple[np.ndarray, dict[str, np.ndarray]] | None = None

    def choose(self, rows: LogRows, max_late: float) -> Chosen:
        """Finds the rows that count.

        Args:
            rows: of these users, in the order in which they came.
            max_late: seconds that a row may be older than the newest one of its user before these.
        """
        user, old_user, old = self._numbers(rows.users), *self._old()
        is_event = np.append(np.arange(len(old_user)) < sum(map(len, self.events)), rows.in_history)
        count, users = len(old_user), np.concatenate([old_user, user])
        time, ids, labeled = (np.concatenate([old[name], rows.records[name]]) for name in (TIME, ID, LABELED))
        order = np.lexsort((labeled == 0, ids, users))  # stable: an old row comes before an equal new one
        again = np.zeros(len(order), bool)
        again[order[1:]] = (users[order[1:]] == users[order[:-1]]) & (ids[order[1:]] == ids[order[:-1]])
        group, is_old = np.cumsum(~again[order]) - 1, order < count
        replaced = np.full(len(order), -1)
        replaced[group[is_old]] = order[is_old]  # by group
        replaced = np.where(again, -1, replaced[group[np.argsort(order)]])[count:]
        kind = 2 * users + is_event  # a user's other rows, and their events
        oldest, latest = np.full(2 * len(self.users), np.inf), np.full(len(self.users), -np.inf)
        np.minimum.at(oldest, kind[:count], time[:count])
        np.maximum.at(latest, old_user, time[:count])
        full = np.tile([OTHERS, self.layout.keep], len(self.users))
        oldest[np.bincount(kind[:count], minlength=len(full)) < full] = -np.inf
        repeated = (again | (time <= oldest[kind]))[count:] & (replaced < 0)
        late = ~repeated & (replaced < 0) & (rows.records[TIME] < latest[user] - max_late)
        (kept,) = np.nonzero(~repeated & ~late)
        replaced, stays = replaced[kept], np.ones(count, bool)
        stays[replaced[replaced >= 0]] = False
        was_event = np.append(is_event[:count], False)[replaced]  # -1 is False
        return Chosen(kept, replaced, was_event, np.flatnonzero(late), int(repeated.sum()), stays)

    def add(self, rows: LogRows, chosen: Chosen, records: np.ndarray, texts: Callable[[list[int]], list]) -> None:
        """Adds rows that count.

        Args:
            rows: all rows.
            chosen: those that count, of `choose`.
            records: `[K]`, these, with the numbers of their texts.
            texts: gives the texts of numbers of items.
        """
        user, is_event = self._numbers(rows.users)[chosen.kept], rows.in_history[chosen.kept]
        old_user, stays, count = self._old()[0], chosen.stays, sum(map(len, self.events))
        for kind, of in ((True, self.events), (False, self.others)):
            old = slice(0, count) if kind else slice(count, None)
            new, kept = is_event == kind, stays[old]
            if not new.any() and kept.all():
                continue
            users = np.concatenate([old_user[old][kept], user[new]])
            joined = _joined([_joined(of)[kept], _as(records[new], of[0].dtype)])
            if kind:
                is_new = np.arange(len(joined)) >= kept.sum()
                found = self.layout.merge(users, joined, is_new, len(self.users), texts)
            else:
                found = [joined[index] for index in newest(users, joined[TIME], len(self.users), OTHERS)]
            changed = np.zeros(len(self.users), bool)
            changed[user[new]] = True
            changed[old_user[old][~kept]] = True
            for number in np.flatnonzero(changed).tolist():
                of[number] = found[number]
        self._decisive = None

    def newest(self, user: str) -> float:
        """Returns the time of a user's newest row, who has one."""
        own = self.events[self._number[user]], self.others[self._number[user]]
        return max(float(one[TIME][-1]) for one in own if len(one))

    def changes(self) -> Changes:
        """Returns what the store gets."""
        changes: Changes = {}
        for key, of, before in zip((user_key, other_key), (self.events, self.others), self._before, strict=True):
            pairs = zip(self.users, of, before, strict=True)
            changes |= {key(user): now.tobytes() for user, now, then in pairs if now is not then}
        return changes

    def _old(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The numbers of the users of all rows, events before others, and what decides about them."""
        if self._decisive is None:
            parts, none = [*self.events, *self.others], np.zeros(0, self.layout.others)
            numbers = np.array(2 * [*range(len(self.users))], np.int64)
            fields = {name: np.concatenate([none[name], *(one[name] for one in parts)]) for name in none.dtype.names}
            self._decisive = np.repeat(numbers, list(map(len, parts))), fields
        return self._decisive

    def _numbers(self, users: Sequence[str]) -> np.ndarray:
        return np.fromiter(map(self._number.__getitem__, users), np.int64, len(users))


def _as(records: np.ndarray, kind: np.dtype) -> np.ndarray:
    """The fields of `kind` of records."""
    return records if records.dtype == kind else records[[*kind.names]].astype(kind)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates records of one type as bytes, which takes a quarter of the time."""
    whole = np.dtype((np.void, parts[0].itemsize))
    return np.concatenate([one.view(whole) for one in parts]).view(parts[0].dtype)
