"""The newest rows of users as rows of a log change them: one identity, one rule of late and future rows, one order.

Servers and training that follows a log use the same code. A row is known again by its id, see `ids_of`. Of rows of a
user with one id the first one with a label counts, or without labels the first one; of rows that come together the one
of the earliest time is the first. A row that was there without a label is replaced by one with it. Of a user with as
many rows as are kept, a row that is as old as the oldest of these counts as repeated, since nobody knows whether it was
there. So does an older one. A row that is much older than its user's newest one is late, and does not count, unless it
brings the label of a row that is there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jfi.serving.validation import Place, Values
from jfi.state.dictionaries import Dictionaries
from jfi.state.layout import ID, LABELED, OTHERS, TIME, EventLayout, newest, other_key, take, user_key
from jfi.state.retention import Quota, newer
from jfi.state.stores import Changes, Get, Store, finding_damage
from jfi.utils.jagged import ranges

#: Seconds that a row may be older than the newest one of its user, by default.
MAX_LATE = 86400.0
#: Seconds that a row may be ahead of the clock of the machine that reads it. Clocks of clients are off by minutes. A
#: local time that is taken for UTC is off by an hour or more, which the limit must not let through: such rows would
#: hide the events of that hour from requests, and make later rows of their users late.
MAX_AHEAD = 600.0
TOO_FAR_AHEAD = f"more than {MAX_AHEAD:g} s in the future"
#: What was given of a column of the log, see `LogRows.given`.
Given = Values | tuple[list[str], np.ndarray]


@dataclass(frozen=True)
class LogRows:
    """N valid rows of a log, in the order in which they came.

    Args:
        users: `[N]` texts of the users' ids.
        records: `[N]`, of EventLayout; the numbers of texts are 0.
        texts: by column of texts the value of each row, `[N]`; of lists `[N * size]`.
        labels: `[N]` float32, NaN for none.
        in_history: `[N]` bool, whether a row is an event of histories.
        sessions: `[N]` uint64, equal for those of a session, 0 for none.
        given: by column the values that the rows have: of texts, numbers or times `[N]`; of lists all texts and the
            lengths `[N]`. Of sent rows all columns of the log, of a table's those of items and users.
        raw: by column that a rule reads the values `[N]` as they were sent.
    """

    users: list[str]
    records: np.ndarray
    texts: dict[str, list[str | None]]
    labels: np.ndarray
    in_history: np.ndarray
    sessions: np.ndarray
    place: Place
    given: Mapping[str, Given] = field(default_factory=dict)
    raw: Mapping[str, Given] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.users)

    def take(self, rows: np.ndarray) -> "LogRows":
        """Returns rows `[K]` int64."""
        texts = {name: np.array(own, object).reshape(len(self), -1)[rows].ravel() for name, own in self.texts.items()}
        own = {name: one.tolist() for name, one in texts.items()}
        of_rows = (one[rows] for one in (self.labels, self.in_history, self.sessions))
        users, place = [self.users[row] for row in rows], lambda row, name: self.place(int(rows[row]), name)
        given, raw = ({name: taken(one, rows) for name, one in of.items()} for of in (self.given, self.raw))
        return LogRows(users, self.records[rows], own, *of_rows, place, given, raw)

    def numbered(self, names: Dictionaries, rows: np.ndarray) -> np.ndarray:
        """Returns the records of rows `[K]` int64, with the numbers of their texts."""
        records = take(self.records, rows)
        for name, own in self.texts.items():
            shape = records[name].shape
            if len(rows) < len(self):
                wide = np.array(own, object).reshape(len(self), -1)[rows]
                own = wide.ravel().tolist()
            records[name] = names.numbers(name, own).reshape(shape)
        return records


def taken(values: Given, rows: np.ndarray) -> Given:
    """Returns the values of rows `[K]` int64."""
    if isinstance(values, tuple):
        flat, lengths = values
        index = ranges((np.cumsum(lengths) - lengths)[rows], lengths[rows])
        return [flat[number] for number in index.tolist()], lengths[rows]
    return values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows.tolist()]


def is_ahead(seconds: np.ndarray, now: float) -> np.ndarray:
    """Returns which times of rows are further ahead of `now` than is allowed: posted, in parts or in a log."""
    return seconds > now + MAX_AHEAD


@dataclass(frozen=True)
class Chosen:
    """Which of N new rows count.

    Args:
        kept: `[K]` int64, the indices of those that do.
        replaced: `[K]` int64, the indices of the rows among the old ones that they take the place of, or -1.
        was_event: `[K]` bool, those that were there as events of histories, without the label that they have now.
        late: `[L]` int64, the indices of those that are too late.
        over_quota: how many are left out, since their users have had all rows of the day.
        stays: `[O]` bool, the old rows of all users, events before others, that no row takes the place of.
    """

    kept: np.ndarray
    replaced: np.ndarray
    was_event: np.ndarray
    late: np.ndarray
    repeated: int
    over_quota: int
    stays: np.ndarray


class UserRows:
    """The rows that are kept of some users.

    Args:
        users: distinct ids.
        oldest: time after which rows are kept; older ones count as repeated: nobody knows whether they were there.
        quota: how many further rows of these users count, or None for any number.
    """

    def __init__(
        self,
        layout: EventLayout,
        get: Get,
        users: Sequence[str],
        oldest: float = -np.inf,
        quota: Quota | None = None,
    ) -> None:
        self.layout, self.users, count = layout, users, len(users)
        self._oldest, self._quota = oldest, quota
        self._number = {user: number for number, user in enumerate(users)}
        values = get([*map(user_key, users), *map(other_key, users)])
        #: By user the events of histories, by time, and what is kept of the other rows.
        self.events = [newer(one, oldest) for one in map(layout.records, values[:count], users)]
        self.others = [newer(one, oldest) for one in map(layout.other_rows, values[count:], users)]
        self._before = [*self.events], [*self.others]
        self._whole: tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]] | None = None

    def choose(self, rows: LogRows, max_late: float) -> Chosen:
        """Finds the rows that count.

        Args:
            rows: of these users, in the order in which they came.
            max_late: seconds that a row may be older than the newest one of its user before these.
        """
        user, (_, lengths, old) = self._numbers(rows.users), self._old()
        again, replaced = self._found_again(user, rows.records)
        # The rows of a user are sorted by time: the first is the oldest, the last the newest.
        time, ends = np.concatenate([old[0][TIME], old[1][TIME], [-np.inf]]), lengths.cumsum()
        full = np.array([self.layout.keep, OTHERS]).repeat(len(self.users))
        oldest = np.where(lengths >= full, time[ends - lengths], -np.inf)
        latest = np.where(lengths > 0, time[ends - 1], -np.inf).reshape(2, -1).max(axis=0)
        oldest = np.maximum(oldest, self._oldest)[np.where(rows.in_history, user, len(self.users) + user)]
        repeated = (again | (rows.records[TIME] <= oldest)) & (replaced < 0)
        late = ~repeated & (replaced < 0) & (rows.records[TIME] < latest[user] - max_late)
        (valid,) = np.nonzero(~repeated & ~late)
        kept = valid if self._quota is None else valid[self._quota.within(user[valid])]
        replaced, stays = replaced[kept], np.ones(len(time) - 1, bool)
        stays[replaced[replaced >= 0]] = False
        was_event = (replaced >= 0) & (replaced < len(old[0]))
        over_quota = len(valid) - len(kept)
        return Chosen(kept, replaced, was_event, np.flatnonzero(late), int(repeated.sum()), over_quota, stays)

    def add(self, rows: LogRows, chosen: Chosen, records: np.ndarray, texts: Callable[[list[int]], list]) -> None:
        """Adds rows that count.

        Args:
            records: `[K]`, these, with the numbers of their texts.
        """
        user, is_event = self._numbers(rows.users)[chosen.kept], rows.in_history[chosen.kept]
        if self._quota is not None:
            self._quota.left -= np.bincount(user, minlength=len(self.users))
        (old_user, _, joined), stays = self._old(), chosen.stays
        count = len(joined[0])
        for kind, of, before in ((True, self.events, joined[0]), (False, self.others, joined[1])):
            old = slice(0, count) if kind else slice(count, None)
            new, kept = is_event == kind, stays[old]
            if not new.any() and kept.all():
                continue
            users = np.concatenate([old_user[old][kept], user[new]])
            stay = before if kept.all() else take(before, kept)
            whole = _joined([stay, _as(records[new], before.dtype)], before.dtype)
            if kind:
                found = self.layout.merge(users, whole, np.arange(len(whole)) >= len(stay), len(self.users), texts)
            else:
                found = [take(whole, index) for index in newest(users, whole[TIME], len(self.users), OTHERS)]
            changed = np.zeros(len(self.users), bool)
            changed[user[new]] = True
            changed[old_user[old][~kept]] = True
            for number in np.flatnonzero(changed).tolist():
                of[number] = found[number]
        self._whole = None

    def newest(self, user: str) -> float:
        """Returns the time of a user's newest row, who has one."""
        own = self.events[self._number[user]], self.others[self._number[user]]
        return max(float(one[TIME][-1]) for one in own if len(one))

    def changes(self) -> Changes:
        """Returns what the store gets."""
        changes: Changes = {} if self._quota is None else self._quota.changes()
        for key, of, before in zip((user_key, other_key), (self.events, self.others), self._before, strict=True):
            pairs = zip(self.users, of, before, strict=True)
            changes |= {key(user): now.tobytes() or None for user, now, then in pairs if now is not then}
        return changes

    def _old(self) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """The users' numbers of all rows, events before others, the lengths of each user's, and the rows of both."""
        if self._whole is None:
            lengths = np.fromiter(map(len, [*self.events, *self.others]), np.int64, 2 * len(self.users))
            numbers = np.repeat(np.tile(np.arange(len(self.users)), 2), lengths)
            events, others = _joined(self.events, self.layout.dtype), _joined(self.others, self.layout.others)
            self._whole = numbers, lengths, (events, others)
        return self._whole

    def _found_again(self, user: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns which new rows come after another one of their user and id, and the old rows of the others, or -1."""
        (old_user, _, old), new_ids = self._old(), new[ID]
        # Of the old rows only those with the last bits of a new one's id may be the same row; few others have them.
        old_ids, is_near = np.concatenate([old[0][ID], old[1][ID]]), np.zeros(2**16, bool)
        is_near[new_ids % 2**16] = True
        (near,) = is_near[old_ids % 2**16].nonzero()
        if len(new) == 1 and not len(near):
            return np.zeros(1, bool), np.full(1, -1)
        labeled = np.concatenate([old[0][LABELED], old[1][LABELED]])[near]
        count, users, ids = len(near), np.append(old_user[near], user), np.append(old_ids[near], new_ids)
        times = np.append(np.full(count, -np.inf), new[TIME])
        order = np.lexsort((times, np.append(labeled, new[LABELED]) == 0, ids, users))
        again = np.zeros(len(order), bool)
        again[order[1:]] = (users[order[1:]] == users[order[:-1]]) & (ids[order[1:]] == ids[order[:-1]])
        group, is_old = np.cumsum(~again[order]) - 1, order < count
        replaced = np.full(len(order), -1)
        replaced[group[is_old]] = near[order[is_old]]  # by group
        return again[count:], np.where(again, -1, replaced[group[np.argsort(order)]])[count:]

    def _numbers(self, users: Sequence[str]) -> np.ndarray:
        return np.fromiter(map(self._number.__getitem__, users), np.int64, len(users))


def scan_records(store: Store, layout: EventLayout) -> Iterator[tuple[str, np.ndarray]]:
    """Yields all users and their records."""
    for key, value in store.scan(user_key("")):
        with finding_damage("the id of a user"):
            user = key[1:].decode()
        yield user, layout.records(value, user)


def _as(records: np.ndarray, kind: np.dtype) -> np.ndarray:
    """The fields of `kind` of records."""
    return records if records.dtype == kind else records[[*kind.names]].astype(kind)


def _joined(parts: Sequence[np.ndarray], kind: np.dtype) -> np.ndarray:
    """Concatenates records of one type as bytes, which takes a quarter of the time."""
    whole = np.dtype((np.void, kind.itemsize))
    return np.concatenate([np.empty(0, whole), *(one.view(whole) for one in parts)]).view(kind)
