"""Records of a log that grows: of each key of one set of rows the rows that queries of now need.

A record has rows of one key, such as an item's of the set "labeled by item", oldest first: the oldest one, the newest
ones, and for a user's keys the first one of the last session. Each has its time, the number of rows of the key before
it (`position`), and the sums over them; the last entry, whose time is infinite, has those over all rows. So a sum over
the rows before a moment is the difference of two entries.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jfi.events.events import PAUSE
from jfi.events.groups import WINDOW
from jfi.events.past import Past
from jfi.events.point_in_time import Key, PastIndex

#: Names of sorted rows: those of a user's record of events, and the beginning of that of pairs of items.
USER_ROWS, PAIRS = "history by user", "pairs of "
#: Bytes of the prefix of a record's key, and of the digest of an id or a value.
PREFIX_BYTES, DIGEST_BYTES = 5, 8
#: A query is computed exactly if no more rows of a user, or of another key, are as new as itself or newer.
NEWER_ROWS = 8
#: The newest rows of a key that stay: of a user, of a user and an item, of a pair, of an item, and of all rows.
_KEPT = {"user": WINDOW + NEWER_ROWS, "user x item": 3 + NEWER_ROWS, "pairs": NEWER_ROWS, "item": NEWER_ROWS}
_KEPT_OF_ALL = 64


@dataclass(frozen=True)
class KeyedRows:
    """A set of rows, sorted by a key.

    Args:
        text: its name in a PastIndex, such as "labeled by item".
        rows: the set, "labeled" or "history"; or "pairs of ...".
        sums: what is summed over the rows.
        decays: the sums that are halved by half-lives, such as "rows by 3600.0".
    """

    text: str
    rows: str
    key: Key
    sums: tuple[str, ...]
    decays: tuple[str, ...]

    @cached_property
    def prefix(self) -> bytes:
        """The beginning of the keys of its records."""
        return b"k" + zlib.crc32(self.text.encode()).to_bytes(4, "big")

    @cached_property
    def dtype(self) -> np.dtype:
        """The type of an entry of a record."""
        own = [("time", "<f8"), ("position", "<i8"), *((name, "<f8") for name in (*self.sums, *self.decays))]
        if self.text == USER_ROWS:
            own += [("own label", "<f4"), ("surprise", "<f8"), ("session_id", "<u8"), ("item", ">u8")]
        own += [("session", "<f8")] if self.has_sessions else []
        return np.dtype([*own, ("order", "<u8")] if self.key == ("user",) else own)

    @property
    def has_sessions(self) -> bool:
        """True if a row has the time of the first event of its session."""
        return self.rows == "history" and self.key[:1] == ("user",)

    @property
    def kept(self) -> int:
        """The number of newest rows that stay."""
        if self.text.startswith(PAIRS):
            return _KEPT["pairs"]
        key = " x ".join(self.key)
        return _KEPT.get(key, _KEPT["item"] if "item" in self.key or "user" in self.key else _KEPT_OF_ALL)


def empty_record(dtype: np.dtype) -> np.ndarray:
    """Returns the record of a key without rows."""
    record = np.zeros(1, dtype)
    record["time"] = np.inf
    return record


@dataclass(frozen=True)
class AddedRows:
    """Rows that are added to the records of K keys.

    Args:
        key: `[n]` int64, the number of each row's record, from 0.
        time: `[n]` seconds.
        values: gives by name what is summed, and what a row has else, `[n]`.
    """

    key: np.ndarray
    time: np.ndarray
    values: Callable[[str], np.ndarray]


def add_rows(name: KeyedRows, old: np.ndarray, added: AddedRows, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the entries of K records with further rows, none of them dropped, and where they are from.

    Of equal times the old rows come first; in a user's records all are in the order of items.

    Args:
        old: the entries of the records, one after the other.
        times: ascending, all times of both, and infinity.

    Returns:
        The entries `[N]`, and for each the index of the row that was added `[N]` int64, -1 for an old one.
    """
    if not len(added.key):
        return old, np.full(len(old), -1)
    old_key, moment = keys_of_entries(old), np.searchsorted(times, np.append(old["time"], added.time))
    code = np.append(old_key, added.key) * len(times) + moment
    if "order" in name.dtype.names:
        order = np.lexsort((np.append(old["order"], added.values("order")), code))
    else:
        order = np.argsort(code, kind="stable")
    source = np.maximum(order - len(old), -1)
    is_new = source >= 0
    own, following = source[is_new], np.cumsum(~is_new) - ~is_new
    found, key = old[following], old_key[following]  # before a new row the sums are those before the old one after it
    found["time"][is_new] = added.time[own]
    first = np.flatnonzero(np.diff(key, prepend=-1))
    for one in ("position", *name.sums):
        values = np.zeros(len(order), found[one].dtype)
        values[is_new] = 1 if one == "position" else added.values(one)[own]
        before = np.cumsum(values) - values
        found[one] += before - before[first][key]
    if name.decays:
        _add_decayed(name, old, added, (source, following, key), found)
    for one in ("own label", "surprise", "session_id", "item", "session", "order"):
        if one in name.dtype.names:
            found[one][is_new] = added.values(one)[own]
    return found, source


def _add_decayed(
    name: KeyedRows,
    old: np.ndarray,
    added: AddedRows,
    merged: tuple[np.ndarray, np.ndarray, np.ndarray],
    found: np.ndarray,
) -> None:
    """Writes to entries the sums of the rows up to each of them, which are halved by half-life of their age.

    Args:
        merged: of the entries the source, the index of the old one that it is or that follows it, and the key.
    """
    (source, following, key), time = merged, found["time"]
    is_new, is_row = source >= 0, np.isfinite(time)
    # At an old row the sum of old ones is known; at a new one it is that at the old one before it.
    before = following - is_new
    has_old = is_row & (before >= 0) & (keys_of_entries(old)[before] == key)
    before, rows = before[has_old], np.arange(int(is_new.sum()))
    # To it come the new rows, whose sums are made apart.
    last, own = np.cumsum(is_new) - 1, source[is_new]
    has_new = is_row & (last >= 0) & (key[is_new][last] == key)
    last, times = last[has_new], added.time[own]
    past = Past(key[is_new] * len(own) + rows, len(own), np.zeros(0, np.int64), rows)
    ages = time[has_old] - old["time"][before], time[has_new] - times[last]
    label = np.asarray(added.values("label")[own], np.float64)
    for one in name.decays:
        what, _, half_life = one.partition(" by ")
        sums = past.decayed((label if what == "labels" else np.ones(len(own))).take, times, float(half_life))
        values, decays = np.zeros(len(time)), [np.exp2(-age / float(half_life)) for age in ages]
        values[has_old] = old[one][before] * decays[0]
        values[has_new] += sums[last] * decays[1]
        found[one] = values


def keys_of_entries(entries: np.ndarray) -> np.ndarray:
    """Returns for each entry the number of its record `[N]` int64, of records that follow each other."""
    is_end = np.isinf(entries["time"])
    return np.cumsum(is_end) - is_end


def rows_that_stay(name: KeyedRows, key: np.ndarray, session: np.ndarray | None) -> np.ndarray:
    """Returns which rows stay in the store `[N]` bool.

    Args:
        key: `[N]` of the rows, ascending.
        session: `[N]` equal for the rows of a session; None where sessions do not count.
    """
    is_first = np.diff(key, prepend=-1) != 0
    begin = np.flatnonzero(is_first)
    ends = np.repeat(np.append(begin, len(key))[1:], np.diff(begin, append=len(key)))
    stays = is_first | (np.arange(len(key)) >= ends - name.kept)
    if session is not None:
        in_last = np.flatnonzero(session == session[ends - 1])
        stays[in_last[np.diff(key[in_last], prepend=-1) != 0]] = True
    return stays


def sessions_of(entries: np.ndarray, is_new: np.ndarray, has_column: bool) -> np.ndarray:
    """Returns the time of the first event of each event's session, of users' records.

    Args:
        entries: of the records; of the new rows `session` does not count.
        is_new: `[N]` bool, which of them are new.
        has_column: whether sessions have ids; an event without one is a session of its own then.
    """
    time, session, key = entries["time"], entries["session_id"], keys_of_entries(entries)
    begins, since = np.diff(key, prepend=-1) != 0, np.diff(np.where(np.isinf(time), 0.0, time))
    begins[1:] |= (since > PAUSE) | (session[1:] != session[:-1])
    if has_column:
        begins |= session == 0
    known = np.where(is_new, time, entries["session"])
    return known[np.maximum.accumulate(np.where(begins | ~is_new, np.arange(len(entries)), 0))]


def entries_of_log(
    name: KeyedRows, source: str, index: PastIndex, rows: np.ndarray, of: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the entries of the records of K keys of a log, one record after the other.

    Args:
        source: their name in the log's index.
        rows: `[N]` int64, the sorted rows of the keys that stay.
        of: of each key the first of all its rows, the one behind them, and how many stay, `[K]` int64 each.

    Returns:
        The entries `[N + K]`, and which of these are rows `[N + K]` bool.
    """
    past, (begin, end, lengths) = index.sorted_rows(source), of
    found, is_row = np.zeros(len(rows) + len(lengths), name.dtype), np.ones(len(rows) + len(lengths), bool)
    is_row[ends := np.cumsum(lengths + 1) - 1] = False
    found["time"][is_row], found["time"][ends] = index.times[past.codes[rows] % past.moments], np.inf
    found["position"][is_row], found["position"][ends] = rows - np.repeat(begin, lengths), end - begin
    for one in name.sums:
        if (prefix := index.arrays.get(f"{source}: {one}")) is not None:  # without labels nothing is summed
            found[one][is_row] = prefix[rows] - np.repeat(prefix[begin], lengths)
            found[one][ends] = prefix[end] - prefix[begin]
    for one in name.decays:
        found[one][is_row] = index.arrays[f"{source}: {one}"][rows]
    return found, is_row
