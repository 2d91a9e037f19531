"""The records of a question, as the arrays of a PastIndex, so that training's functions answer it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from jfi.events.counters import index_of_counters
from jfi.events.live_records import DIGEST_BYTES, HOURS, NEWER_ROWS, PAIRS, USER_ROWS, SortedRows, empty_record
from jfi.events.point_in_time import PastIndex, Questions, Rows
from jfi.utils.jagged import blocks

#: Keys whose bytes are made together.
_KEYS_AT_ONCE = 1 << 20
#: The digest of no value.
_NONE = bytes(DIGEST_BYTES)
#: No two sets of rows share an array.
SETS: dict[Rows, Rows] = {name: name for name in ("labeled", "history", "labeled history")}


@dataclass(frozen=True)
class LiveQuestion:
    """A user's candidates, whose statistics are asked for.

    Args:
        user: digest of the user's id.
        items: `[R]` digests of the candidates' ids.
        time: in seconds.
        values: by categorical column of the item the digests `[R]` of each candidate's values.
    """

    user: bytes
    items: list[bytes]
    time: float
    values: dict[str, list[list[bytes]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Counted:
    """Settings of the counters.

    Args:
        names: the sorted rows by their names.
        columns: by categorical column of the item the number of values that count.
        window: the newest events that `similar` compares a target with.
        is_implicit: whether every row is a positive.
        num_known: the number of items that training knows.
    """

    names: dict[str, SortedRows]
    columns: dict[str, int]
    window: int
    is_implicit: bool
    num_known: int


class Gathered:
    """The keys of a question, and their records as the arrays of an index.

    Items and values get numbers from their first occurrence on: of the candidates, then of the user's events.

    Args:
        counted: settings of the counters.
        question: the candidates.
        user: the user's record of `history by user`, or None.
    """

    def __init__(self, counted: Counted, question: LiveQuestion, user: bytes | None) -> None:
        self._counted, own = counted, None
        if USER_ROWS in counted.names:
            dtype = counted.names[USER_ROWS].dtype
            own = empty_record(dtype) if user is None else np.frombuffer(user, dtype)
        self._user_record = own
        self._items: dict[bytes, int] = {}
        item = np.array([self._items.setdefault(one, len(self._items)) for one in question.items], np.int64)
        others = [] if own is None else [one.tobytes() for one in own["item"][:-1]]
        self._others = np.array([self._items.setdefault(one, len(self._items)) for one in others], np.int64)
        self._values: dict[str, dict[bytes, int]] = {}
        ids = {}
        for name, slots in counted.columns.items():
            known = self._values.setdefault(f"column {name}", {})
            ids[f"column {name}"] = matrix = np.zeros((len(item), slots), np.int64)
            for row, values in enumerate(question.values.get(name, [[]] * len(item))):
                for slot, value in enumerate(values[:slots]):
                    matrix[row, slot] = 1 + known.setdefault(value, len(known))
        count = len(item)
        self.questions = Questions(np.zeros(count, np.int64), np.full(count, question.time), item, ids=ids)
        self._sizes = {name: len(known) + 1 for name, known in self._values.items()}
        self._digests = {"user": as_matrix([question.user]), "item": as_matrix(self._items)}
        self._digests |= {part: as_matrix([_NONE, *known]) for part, known in self._values.items()}
        self._empty = self._index({"times": np.zeros(0), **_no_events()})
        #: By name the numbers and the keys of the records that it has.
        self._of_names = {name: self._find_keys(name) for name in counted.names.values()}

    @property
    def keys(self) -> list[bytes]:
        """The keys of all records but the user's own."""
        return [key for name, (_, keys) in self._of_names.items() if name.text != USER_ROWS for key in keys]

    def _find_keys(self, name: SortedRows) -> tuple[np.ndarray, list[bytes]]:
        if name.text.startswith(PAIRS):
            window = self._others[max(0, len(self._others) - self._counted.window - NEWER_ROWS) :]
            one, other = (found.ravel() for found in np.meshgrid(self.questions.item, window))
            numbers = np.unique(np.minimum(one, other) * len(self._items) + np.maximum(one, other))
        else:
            numbers = np.unique(self._empty.keys(name.key, self.questions))
            if name.text == "history by item":
                numbers = np.union1d(numbers, self._others)
        numbers = numbers[numbers >= 0]
        return numbers, keys_of(name, numbers, self._digests)

    def index(self, found: dict[bytes, bytes]) -> PastIndex:
        """Returns the index of the records, by key."""
        records = {name: self._records(name, found) for name in self._of_names}
        times = [own["time"] for _, own in records.values()]
        times = np.unique(np.concatenate([np.zeros(0), *times]))
        arrays = {"times": times[np.isfinite(times)], **_no_events()}
        for name, (numbers, own) in records.items():
            _add_arrays(arrays, name, numbers, own)
        if USER_ROWS in self._counted.names:
            self._add_events(arrays)
        return self._index(arrays)

    def _records(self, name: SortedRows, found: dict[bytes, bytes]) -> tuple[np.ndarray, np.ndarray]:
        """The numbers `[K]` of the keys that have a record, and the entries of these, one after the other."""
        if name.text == USER_ROWS:
            own = self._user_record if len(self._user_record) > 1 else self._user_record[:0]
            return np.zeros(min(len(own), 1), np.int64), own
        numbers, keys = self._of_names[name]
        values = [found.get(key) for key in keys]
        there = np.array([value is not None for value in values], bool)
        return numbers[there], np.frombuffer(b"".join(value for value in values if value is not None), name.dtype)

    def _add_events(self, arrays: dict[str, np.ndarray]) -> None:
        """Adds what is known of the user's events."""
        rows = self._user_record[:-1]
        arrays |= {"event user": np.zeros(len(rows), np.int64), "event item": self._others}
        arrays |= {"event time": np.array(rows["time"]), "event label": np.array(rows["own label"])}
        arrays["rounded surprise"] = np.array(rows["surprise"])
        arrays["session starts"] = np.searchsorted(rows["time"], rows["session"])

    def _index(self, arrays: dict[str, np.ndarray]) -> PastIndex:
        counted = self._counted
        known = max(len(self._items), 1), counted.num_known, self._sizes, counted.is_implicit
        return index_of_counters(arrays, *known, SETS)


def as_matrix(digests: Iterable[bytes]) -> np.ndarray:
    """Returns digests as `[N, 8]` uint8."""
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)


def keys_of(name: SortedRows, numbers: np.ndarray, digests: Mapping[str, np.ndarray]) -> list[bytes]:
    """Returns the keys of the records of sorted rows.

    Args:
        name: of the rows.
        numbers: `[K]` int64, keys as `PastIndex.keys` makes them.
        digests: by part of a key those of its values `[N, 8]`, by number.
    """
    whole = _key_matrix(name, numbers, digests)
    joined, size = whole.tobytes(), whole.shape[1]
    return [joined[begin : begin + size] for begin in range(0, len(joined), size)]


def sort_keys(name: SortedRows, numbers: np.ndarray, digests: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the order `[K]` of keys by the first 8 bytes behind their prefix, in which a store is filled fastest."""
    begin = np.zeros((len(numbers), DIGEST_BYTES), np.uint8)
    for first, end in blocks(len(numbers), _KEYS_AT_ONCE):
        whole = _key_matrix(name, numbers[first:end], digests)[:, len(name.prefix) :][:, :DIGEST_BYTES]
        begin[first:end, : whole.shape[1]] = whole
    return np.argsort(begin.view(">u8")[:, 0].astype(np.uint64), kind="stable")


def _key_matrix(name: SortedRows, numbers: np.ndarray, digests: Mapping[str, np.ndarray]) -> np.ndarray:
    """The keys as `[K, bytes]` uint8."""
    if name.text.startswith(PAIRS):
        items = digests["item"]
        low, high = numbers // max(len(items), 1), numbers % max(len(items), 1)
        order = items.view(">u8")[:, 0]
        swapped = order[low] > order[high]
        parts = [items[np.where(swapped, high, low)], items[np.where(swapped, low, high)]]
    else:
        parts, left = [], numbers
        for part in reversed(name.key):
            known = np.arange(HOURS, dtype=np.uint8)[:, None] if part == "hour" else digests[part]
            parts.insert(0, known[left if part == "user" else left % max(len(known), 1)])
            left = left // max(len(known), 1)
    prefix = np.broadcast_to(np.frombuffer(name.prefix, np.uint8), (len(numbers), len(name.prefix)))
    return np.concatenate([prefix, *parts], axis=1)


def _no_events() -> dict[str, np.ndarray]:
    kinds = {"user": np.int64, "item": np.int64, "time": np.float64, "label": np.float32}
    return {f"event {name}": np.zeros(0, kind) for name, kind in kinds.items()}


def _add_arrays(arrays: dict[str, np.ndarray], name: SortedRows, numbers: np.ndarray, records: np.ndarray) -> None:
    """Adds the arrays of sorted rows, as `jfi.events.counters` has them.

    Args:
        arrays: gets them.
        name: of the rows.
        numbers: `[K]` int64, the keys.
        records: the entries of their records.
    """
    is_end = np.isinf(records["time"])
    rows, ends, times = records[~is_end], np.flatnonzero(is_end), arrays["times"]
    lengths = np.diff(ends, prepend=-1) - 1
    arrays[f"{name.text}: codes"] = np.repeat(numbers, lengths) * len(times) + np.searchsorted(times, rows["time"])
    arrays[f"{name.text}: keys"] = np.zeros(0, np.int64)
    for one in ("position", *name.sums):
        before = np.append(0, np.cumsum(records[one][ends]))  # all rows of the keys before
        values = np.append(rows[one] + np.repeat(before[:-1], lengths), before[-1])
        arrays[f"{name.text}: {one}"] = values
    for one in name.decays:
        arrays[f"{name.text}: {one}"] = np.array(rows[one])
