"""Limits how long a state keeps the rows of users, and how many rows of a user it takes on a day."""

import math
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jfi.state.layout import TIME, EventLayout, other_key, user_key
from jfi.state.stores import Changes, Get, Store, finding_damage

#: Seconds of a day of UTC.
DAY = 86400.0
#: A user's quota: when the day began, by which it expires, and the rows that count on it.
_QUOTA, _QUOTA_DTYPE, _TIME = struct.Struct("<dq"), np.dtype([(TIME, "<f8"), ("count", "<i8")]), struct.Struct("<d")


@dataclass(frozen=True)
class Retention:
    """Which rows of users a state takes and keeps.

    Args:
        seconds: for which rows are kept, by their times.
        quota: most rows of a user that count on a day of UTC, by the time at which they come; None for any number.
        parts: folder of the log's parts, whose list of deletions gets users who are deleted; None without one.
        clock: gives the seconds since 1970.
    """

    seconds: float = math.inf
    quota: int | None = None
    parts: Path | None = None
    clock: Callable[[], float] = time.time

    @property
    def is_bounded(self) -> bool:
        """Returns whether anything expires: rows, or the quotas of a day."""
        return self.quota is not None or self.seconds < math.inf

    def oldest(self) -> float:
        """Returns the time after which rows are kept now."""
        return self.clock() - self.seconds


#: All rows of all times.
KEEP_ALL = Retention()


class Quota:
    """Counts how many further rows of some users the state takes today.

    Args:
        most: rows of a user a day.
        users: distinct ids.
        now: seconds since 1970.
    """

    def __init__(self, most: int, get: Get, users: Sequence[str], now: float) -> None:
        self._most, self._users, self._day = most, users, now // DAY * DAY
        with finding_damage("the quota of a user"):
            found = [_QUOTA.unpack(value or bytes(_QUOTA.size)) for value in get([*map(quota_key, users)])]
        #: `[U]` int64, by user.
        self.left = np.array([most - (count if day == self._day else 0) for day, count in found], np.int64)
        self._before = self.left.copy()

    def within(self, users: np.ndarray) -> np.ndarray:
        """Returns which of N rows count `[N]` bool: of each user the first ones.

        Args:
            users: `[N]` int64, the number of each row's user.
        """
        order = np.argsort(users, kind="stable")
        rank = np.empty(len(users), np.int64)
        rank[order] = np.arange(len(users)) - np.searchsorted(users[order], users[order])
        return rank < self.left[users]

    def changes(self) -> Changes:
        """Returns what the store gets."""
        changed = np.flatnonzero(self.left != self._before).tolist()
        counts = (self._most - self.left).tolist()
        return {quota_key(self._users[user]): _QUOTA.pack(self._day, counts[user]) for user in changed}


def quota_key(user: str) -> bytes:
    """The key of a user's quota."""
    return b"q" + user.encode()


#: The keys of a user's rows and quota, by the id.
USER_KEYS = user_key, other_key, quota_key


def newer(records: np.ndarray, oldest: float) -> np.ndarray:
    """Returns the records of a user that are newer than a moment."""
    return records if oldest == -math.inf else records[int(records[TIME].searchsorted(oldest, "right")) :]


def expire(
    store: Store, layout: EventLayout, retention: Retention, check: Callable[[Get], None] = lambda get: None
) -> Iterator[int]:
    """Removes the rows that are kept no longer, and quotas of earlier days, a few users in a transaction.

    Yields:
        After each step the number of rows that it has removed.
    """
    oldest, today = retention.oldest(), retention.clock() - DAY
    kinds = (layout.dtype, oldest), (layout.others, oldest), (_QUOTA_DTYPE, today)
    for key, (kind, moment) in zip(USER_KEYS, kinds, strict=True):
        for page in store.pages([key("")]) if moment > -math.inf else ():
            with finding_damage("the time of a row"):  # the first field of a record, of which the oldest is the first
                found = [key for key, value in page if value and _TIME.unpack_from(value)[0] <= moment]
            removed = _remove(store, found, kind, moment, check) if found else 0
            yield removed if key is not quota_key else 0


def _remove(store: Store, keys: Sequence[bytes], kind: np.dtype, oldest: float, check: Callable[[Get], None]) -> int:
    """Removes old records of keys, and the keys that have no others; returns how many records."""
    removed = 0

    def change(get: Get) -> Changes:
        nonlocal removed
        check(get)
        changes, removed = {}, 0
        for key, value in zip(keys, get(keys), strict=True):
            with finding_damage(f"the rows of user '{key[1:].decode()}'"):
                records = np.frombuffer(value or b"", kind)
            stay = newer(records, oldest)
            if len(stay) < len(records):
                changes[key] = stay.tobytes() or None
                removed += len(records) - len(stay)
        return changes

    store.update(change)
    return removed
