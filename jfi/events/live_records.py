"""Records of a log that grows: of each key of one set of rows the rows that questions of now need.

A record has rows of one key, such as an item's of the set "labeled by item", oldest first: the oldest one, the newest
ones, and for a user's keys the first one of the last session. Each has its time, the number of rows of the key before
it (`position`), and the sums over them; the last entry, whose time is infinite, has those over all rows. So a sum over
the rows before a moment is the difference of two entries.
"""

import zlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jfi.events.groups import WINDOW
from jfi.events.point_in_time import Key
from jfi.events.sessions import PAUSE
from jfi.utils.jagged import ranges

#: Names of sorted rows: those of a user's record of events, and the beginning of that of pairs of items.
USER_ROWS, PAIRS = "history by user", "pairs of "
#: Hours of a day.
HOURS = 24
#: Bytes of the prefix of a record's key, and of the digest of an id or a value.
PREFIX_BYTES, DIGEST_BYTES = 5, 8
#: A question is answered exactly if no more rows of a user, or of another key, are as new as itself or newer.
NEWER_ROWS = 8
#: The newest rows of a key that stay: of a user, of a user and an item, of a pair, of an item, and of all rows.
_KEPT = {"user": WINDOW + NEWER_ROWS, "user x item": 3 + NEWER_ROWS, "pairs": NEWER_ROWS, "item": NEWER_ROWS}
_KEPT_OF_ALL = 64


@dataclass(frozen=True)
class LiveEvent:
    """An event of a log that grows.

    Args:
        user, item: digests of their ids.
        time: in seconds.
        label: 0 or 1, NaN for none.
        in_history: whether it is an event of histories.
        order: what events of one user and time are sorted by.
        session: of a column of sessions, not 0; or 0.
        values: by categorical column of the item the digests of its values.
    """

    user: bytes
    item: bytes
    time: float
    label: float = np.nan
    in_history: bool = True
    order: int = 0
    session: int = 0
    values: dict[str, list[bytes]] = field(default_factory=dict)


@dataclass(frozen=True)
class SortedRows:
    """A set of rows, sorted by a key.

    Args:
        text: its name in a PastIndex, such as "labeled by item".
        rows: the set, "labeled", "history" or "labeled history"; or "pairs of ...".
        key: the parts of the key.
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
            own += [("own label", "<f4"), ("surprise", "<f8"), ("session_id", "<u8"), ("item", f"V{DIGEST_BYTES}")]
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


def append_row(name: SortedRows, record: np.ndarray, time: float, values: dict) -> np.ndarray:
    """Returns a record with a further row.

    Args:
        name: of the rows.
        record: of the key.
        time: of the row, in seconds.
        values: what is summed, and what the row has else.
    """
    times = record["time"][:-1]
    at = int(np.searchsorted(times, time, side="right"))
    if "order" in name.dtype.names:  # of equal times in the order of items
        first = int(np.searchsorted(times, time))
        at = first + int(np.searchsorted(record["order"][first:at], values["order"], side="right"))
    found = np.empty(len(record) + 1, record.dtype)
    found[:at], found[at], found[at + 1 :] = record[:at], record[at], record[at:]
    row, after = found[at], found[at + 1 :]
    row["time"] = time
    after["position"] += 1
    for one in name.sums:
        after[one] += values[one]
    for one in name.decays:
        what, _, half_life = one.partition(" by ")
        added = values["label"] if what == "labels" else 1.0
        half_life = float(half_life)
        row[one] = added + (record[one][at - 1] * np.exp2((times[at - 1] - time) / half_life) if at else 0.0)
        after[one][:-1] += added * np.exp2((time - after["time"][:-1]) / half_life)
    for one in ("own label", "surprise", "session_id", "session", "order"):
        if one in name.dtype.names:
            row[one] = values[one]
    if "item" in name.dtype.names:
        row["item"] = np.void(values["item"])
    return _trimmed(name, found)


def _trimmed(name: SortedRows, record: np.ndarray) -> np.ndarray:
    count = len(record) - 1
    if count <= name.kept + 2:
        return record
    stays = np.arange(count + 1) >= count - name.kept
    stays[0] = True
    if name.has_sessions:
        stays[int(np.argmax(record["session"][:-1] == record["session"][-2]))] = True
    return record[stays]


def session_of(one: LiveEvent, own: np.ndarray) -> float:
    """Returns the time of the first event of an event's session, given its user's record."""
    at = int(np.searchsorted(own["time"][:-1], one.time, side="right"))
    if not at:
        return one.time
    last = own[at - 1]
    is_first = one.time - last["time"] > PAUSE or one.session != last["session_id"]
    return one.time if is_first else float(last["session"])


def records_with_ends(
    name: SortedRows, source: str, arrays: dict[str, np.ndarray], first: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the rows of K keys of a log, and the entries of their records, one record after the other.

    Args:
        name: of the rows.
        source: their name in the log's index.
        arrays: of the log's index.
        first: `[K]` int64, the first row of each key.
        lengths: `[K]` int64, the number of rows of each key.

    Returns:
        The rows `[N]` int64, the entries `[N + K]`, and which of these are the rows `[N + K]` bool.
    """
    rows, ends = ranges(first, lengths), np.cumsum(lengths + 1) - 1
    found, is_row = np.zeros(len(rows) + len(first), name.dtype), np.ones(len(rows) + len(first), bool)
    is_row[ends] = False
    found["time"][is_row] = arrays["times"][arrays[f"{source}: codes"][rows] % max(len(arrays["times"]), 1)]
    found["time"][ends] = np.inf
    for one in ("position", *name.sums):
        if one != "position" and f"{source}: {one}" not in arrays:
            continue  # of an event without a label nothing is summed
        values = arrays[f"{source}: {one}"]
        start = values[first]
        found[one][is_row] = values[rows] - np.repeat(start, lengths)
        found[one][ends] = values[first + lengths] - start
    for one in name.decays:
        found[one][is_row] = arrays[f"{source}: {one}"][rows]
    return rows, found, is_row
