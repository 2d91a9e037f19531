"""The records of a question, as the arrays of a PastIndex, so that training's functions answer it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jfi.events.counters import index_of_counters
from jfi.events.live_records import HOURS, PAIRS, USER_ROWS, SortedRows, empty_record
from jfi.events.point_in_time import PastIndex, Questions, Rows

#: Each set of rows is sorted by itself.
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
    """What is counted.

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
        counted: what is counted.
        question: the candidates.
        user: the user's record of `history by user`, or None.
    """

    def __init__(self, counted: Counted, question: LiveQuestion, user: bytes | None) -> None:
        self._counted, own = counted, None
        if USER_ROWS in counted.names:
            dtype = counted.names[USER_ROWS].dtype
            own = empty_record(dtype) if user is None else np.frombuffer(user, dtype)
        self._user_record, self._user = own, question.user
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
        #: By name the numbers and the keys of the records that it has.
        self._of_names = {name: self._find_keys(name) for name in counted.names.values()}

    @property
    def keys(self) -> list[bytes]:
        """The keys of all records but the user's own."""
        return [key for name, (_, keys) in self._of_names.items() if name.text != USER_ROWS for key in keys]

    def _find_keys(self, name: SortedRows) -> tuple[np.ndarray, list[bytes]]:
        if name.text.startswith(PAIRS):
            window = self._others[max(0, len(self._others) - self._counted.window - 8) :]
            one, other = (found.ravel() for found in np.meshgrid(self.questions.item, window))
            numbers = np.unique(np.minimum(one, other) * len(self._items) + np.maximum(one, other))
        else:
            index = self._index({"times": np.zeros(0), **_no_events()})
            numbers = np.unique(index.keys(name.key, self.questions))
            if name.text == "history by item":
                numbers = np.union1d(numbers, self._others)
        numbers = numbers[numbers >= 0]
        digests = {"user": [self._user], "item": list(self._items)}
        digests |= {part: [b"", *known] for part, known in self._values.items()}
        return numbers, [name.prefix + key for key in digests_of(name, numbers, digests)]

    def index(self, found: dict[bytes, bytes]) -> PastIndex:
        """Returns the index of the records, by key."""
        records: dict[SortedRows, list[tuple[int, np.ndarray]]] = {}
        for name, (numbers, keys) in self._of_names.items():
            own = [(number, found[key]) for number, key in zip(numbers.tolist(), keys, strict=True) if key in found]
            records[name] = [(number, np.frombuffer(value, name.dtype)) for number, value in own]
            if name.text == USER_ROWS:
                records[name] = [(0, self._user_record)] if len(self._user_record) > 1 else []
        times = [record["time"][:-1] for own in records.values() for _, record in own]
        arrays = {"times": np.unique(np.concatenate([np.zeros(0), *times])), **_no_events()}
        for name, own in records.items():
            _add_arrays(arrays, name, own)
            if name.text == USER_ROWS:
                self._add_events(arrays, own)
        return self._index(arrays)

    def _add_events(self, arrays: dict[str, np.ndarray], own: list[tuple[int, np.ndarray]]) -> None:
        """Adds what is known of the user's events."""
        if not own:
            arrays["rounded surprise"], arrays["session starts"] = np.zeros(0), np.zeros(0, np.int64)
            return
        rows = self._user_record[:-1]
        arrays |= {"event user": np.zeros(len(rows), np.int64), "event item": self._others}
        arrays |= {"event time": np.array(rows["time"]), "event label": np.array(rows["own label"])}
        arrays["rounded surprise"] = np.array(rows["surprise"])
        arrays["session starts"] = np.searchsorted(rows["time"], rows["session"])

    def _index(self, arrays: dict[str, np.ndarray]) -> PastIndex:
        counted = self._counted
        known = max(len(self._items), 1), counted.num_known, self._sizes, counted.is_implicit
        return index_of_counters(arrays, *known, SETS)


def digests_of(name: SortedRows, numbers: np.ndarray, digests: dict[str, Sequence[bytes]]) -> list[bytes]:
    """Returns the keys behind the prefix of a name, of numbers."""
    items = digests["item"]
    if name.text.startswith(PAIRS):
        low, high = (numbers // max(len(items), 1)).tolist(), (numbers % max(len(items), 1)).tolist()
        pairs = ((items[one], items[other]) for one, other in zip(low, high, strict=True))
        return [min(pair) + max(pair) for pair in pairs]
    parts, left = [], numbers
    for part in reversed(name.key):
        known = [bytes([hour]) for hour in range(HOURS)] if part == "hour" else digests[part]
        size = max(len(known), 1)
        parts.append([known[i] for i in (left if part == "user" else left % size).tolist()])
        left = left // size
    return [b"".join(reversed(key)) for key in zip(*parts, strict=True)] if parts else [b""] * len(numbers)


def _no_events() -> dict[str, np.ndarray]:
    kinds = {"user": np.int64, "item": np.int64, "time": np.float64, "label": np.float32}
    return {f"event {name}": np.zeros(0, kind) for name, kind in kinds.items()}


def _add_arrays(arrays: dict[str, np.ndarray], name: SortedRows, own: list[tuple[int, np.ndarray]]) -> None:
    """Adds the arrays of sorted rows, as `jfi.events.counters` has them."""
    times, rows = arrays["times"], [record[:-1] for _, record in own]
    ends = {one: np.cumsum([0.0, *(record[one][-1] for _, record in own)]) for one in ("position", *name.sums)}
    joined = np.concatenate([np.zeros(0, name.dtype), *rows])
    numbers = np.repeat(np.array([number for number, _ in own], np.int64), list(map(len, rows)))
    arrays[f"{name.text}: codes"] = numbers * len(times) + np.searchsorted(times, joined["time"])
    arrays[f"{name.text}: keys"] = np.zeros(0, np.int64)
    before = np.repeat(np.arange(len(own)), list(map(len, rows)))
    for one, end in ends.items():
        values = np.append(joined[one] + end[before], end[-1])
        arrays[f"{name.text}: {one}"] = values.astype(np.int64) if one == "position" else values
    for one in name.decays:
        arrays[f"{name.text}: {one}"] = np.array(joined[one])
