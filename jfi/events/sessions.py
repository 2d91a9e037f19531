"""Sessions of a user's events."""

import numpy as np

from jfi.events.events import SortedEvents, user_blocks
from jfi.events.past import New

#: A session ends where a user pauses for longer, in seconds.
PAUSE = 1800.0


def session_starts(events: SortedEvents, session: np.ndarray | None, new: New, rows_at_once: int) -> np.ndarray:
    """`[H]` int64, for each row of histories the first one of its session, which has all of its first moment.

    Args:
        events: all E events.
        session: `[E]` integers, equal for the events of a session of a user, or None without a column of it.
        new: makes the array.
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
