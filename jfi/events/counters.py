"""The rows of a log that queries later than all of them need.

Of the rows of a key the oldest one, the newest ones and those of the user's last session stay, each with its position
among all of them, so that the same code computes the same numbers.
"""

from collections.abc import Callable

import numpy as np

from jfi.events.groups import WINDOW
from jfi.events.point_in_time import PastIndex

#: Arrays that make others, and serve queries of the log's own rows alone.
_LEFT_OUT = ("events", "first", "older", "agreement")
_OF_USER = "history by user"
#: The columns of the events of histories that stay.
_EVENTS = ("user", "item", "time", "label")


def counters_of(index: PastIndex, sessions: Callable[[np.ndarray], np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Returns by name the arrays that an index has made for its queries, of the rows that stay, and their events.

    Args:
        index: of the log.
        sessions: gives ids of the sessions of events `[n]`, None without a column of them.
    """
    index.past("history", ("user",))
    times, arrays, events = index.times, index.arrays, index.events
    last_session = _last_sessions(index) if "session starts" in arrays else None
    kept = {name: _kept_rows(index, name, last_session) for name in index.pasts}
    moments = {name: arrays[f"{name}: codes"][rows] % len(times) for name, rows in kept.items()}
    left = np.unique(np.concatenate([[len(times) - 1] if len(times) else [], *moments.values()]).astype(np.int64))
    found = {"times": times[left]}
    for name, rows in kept.items():
        codes, position = arrays[f"{name}: codes"], np.append(rows, len(arrays[f"{name}: codes"]))
        key = codes[rows] // len(times)
        found[f"{name}: codes"] = key * len(left) + np.searchsorted(left, moments[name])
        found[f"{name}: keys"], found[f"{name}: position"] = arrays[f"{name}: keys"], position
        for other, values in arrays.items():
            # A column "a: b" has arrays that begin with the name of the rows of a column "a".
            of = max((one for one in kept if other.startswith(f"{one}: ")), key=len, default="")
            if of == name and other.removeprefix(f"{name}: ") not in ("codes", "keys", *_LEFT_OUT):
                found[other] = values[position if len(values) > len(codes) else rows]
    rows = events.rows_at(kept[_OF_USER])
    found |= {f"event {name}": np.asarray(getattr(events, name)[rows]) for name in _EVENTS}
    if sessions is not None:
        found["event session"] = sessions(rows)
    if "rounded surprise" in arrays:
        found["rounded surprise"] = arrays["rounded surprise"][rows]
    if last_session is not None:
        starts = arrays["session starts"][kept[_OF_USER]]
        found["session starts"] = np.searchsorted(kept[_OF_USER], starts)
    return found


def _last_sessions(index: PastIndex) -> np.ndarray:
    """`[U]` int64, the first moment of each user's last session; later than all moments for one without events."""
    events = index.events
    found = np.full(int(events.user[-1]) + 1, len(index.times))
    user = events.user if events.rows is None else events.user[events.rows]
    last = np.flatnonzero(np.diff(user, append=-1) != 0)
    found[user[last]] = index.moment(events.rows_at(index.session_starts[last]))
    return found


def _kept_rows(index: PastIndex, name: str, last_session: np.ndarray | None) -> np.ndarray:
    """`[n]` int64, the sorted rows that stay: the oldest and the newest of a key, and those of a last session."""
    codes, moments = index.arrays[f"{name}: codes"], len(index.times)
    key = codes // moments
    start = np.diff(key, prepend=-1) != 0
    first = np.flatnonzero(start)
    end = np.append(first, len(codes))[1:]
    newest = WINDOW if name.endswith("by user") else 3 if name.endswith("by user x item") else 1
    stays = start | (np.arange(len(codes)) >= np.repeat(end - newest, end - first))
    if last_session is not None and name.startswith("history by user"):
        user = index.events.user[index.arrays[f"{name}: events"]]
        stays |= codes % moments >= last_session[user]
    return np.flatnonzero(stays)
