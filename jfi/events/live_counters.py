"""Statistics of a log that grows: events are counted as they come, and questions of now get what training would.

Records of the keys of all users, items, pairs of items and values lie in a store, see `live_records`. A question reads
those of its own keys. An event that comes late is counted from its own time on, in all sums. The surprise in the labels
of events that came before it, and the pairs of items that these made, stay as they were. A record keeps the newest rows
of its key, so a question of a time before more than `NEWER_ROWS` of them is answered by those that are left.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jfi.events.events import Events
from jfi.events.live_index import SETS, Counted, Gathered, LiveQuestion, keys_of, sort_keys
from jfi.events.live_records import (
    DIGEST_BYTES,
    HOURS,
    PAIRS,
    PREFIX_BYTES,
    USER_ROWS,
    LiveEvent,
    SortedRows,
    append_row,
    empty_record,
    records_with_ends,
    session_of,
)
from jfi.events.point_in_time import Column, Key, PastIndex, Questions, Rows, Tally
from jfi.events.statistics import Columns, Statistics
from jfi.utils.jagged import blocks

Get = Callable[[Sequence[bytes]], list[bytes | None]]

_OVERALL, _ITEM, _USERS_OWN = "labeled by nothing", "labeled by item", "labeled history by user"
_SMOOTHING = 10.0
#: Keys of a log whose records are made together.
_KEYS_AT_ONCE = 1 << 16


class LiveCounters:
    """The statistics of a log that grows.

    Args:
        groups: of `data.statistics`.
        categories: the categorical columns of the item but its id.
        columns: of those that have values the number of values that count.
        window: the newest events that `similar` compares a target with.
        half_lives: of `popularity`, in seconds.
        is_implicit: whether every row is a positive.
        num_known: the number of items that training knows.

    Example:
        >>> counters, store = LiveCounters(["item"], [], {}, 8, [], False, num_known=2), {}
        >>> get = lambda keys: [store.get(key) for key in keys]
        >>> for time, label in ((1.0, 1.0), (5.0, 0.0), (9.0, 1.0)):
        ...     store |= counters.add(get, [LiveEvent(b"user 001", b"item 001", time, label)])
        >>> (found,) = counters.answers(get, [LiveQuestion(b"user 002", [b"item 001", b"item 002"], 9.0)])
        >>> np.exp(found["past_item_count"]) - 1
        array([2., 0.])
    """

    def __init__(
        self,
        groups: list[str],
        categories: list[str],
        columns: dict[str, int],
        window: int,
        half_lives: list[float],
        is_implicit: bool,
        num_known: int,
    ) -> None:
        self._groups, self._categories, self._half_lives = groups, categories, half_lives
        self._counted = Counted({}, columns, window, is_implicit, num_known)
        #: The sorted rows that questions read, by their names.
        self.names = self._counted.names
        self.names.update((one.text, one) for one in self._find_names())

    def _find_names(self) -> list[SortedRows]:
        """Finds the sorted rows that a question reads, by asking it of a log of two rows."""
        zero, one = np.zeros(2, np.int64), np.ones(2, np.float32)
        events = Events(zero, zero, np.array([0.0, 1.0]), one, zero.astype(np.int8))
        columns, ids = {}, {}
        for name, slots in self._counted.columns.items():
            ids[f"column {name}"] = np.ones((1, slots), np.int64)
            columns[f"column {name}"] = Column("item", ids[f"column {name}"], 2, name)
        index = PastIndex(events, columns, 1, self._counted.num_known, self._counted.is_implicit, sets=SETS)
        self._statistics(index).answers(Questions(zero[:1], np.array([2.0]), zero[:1], ids=ids))
        needed = {name.removesuffix(": codes") for name in index.arrays if name.endswith(": codes")}
        if "session starts" in index.arrays or any(name.startswith(PAIRS) for name in needed):
            needed.add(USER_ROWS)
        if any(name.endswith((": item surprise", ": products")) for name in index.arrays):
            needed |= {_OVERALL, _ITEM, _USERS_OWN}
        found = []
        for text in sorted(needed):
            parts = [name.removeprefix(f"{text}: ") for name in sorted(index.arrays) if name.startswith(f"{text}: ")]
            sums = [one for one in parts if one in ("label", "has label", "item surprise", "products")]
            if text in (_OVERALL, _ITEM, _USERS_OWN) and "label" not in sums and not self._counted.is_implicit:
                sums.append("label")
            decays = [one for one in parts if one.startswith(("labels by ", "rows by "))]
            rows, _, key = text.partition(" by ")
            key = () if text.startswith(PAIRS) or key == "nothing" else tuple(key.split(" x "))
            found.append(SortedRows(text, rows, key, tuple(sums), tuple(decays)))
        return found

    def _statistics(self, index: PastIndex) -> Statistics:
        return Statistics(index, self._groups, self._categories, self._counted.window, self._half_lives)

    @property
    def _pairs(self) -> SortedRows | None:
        return next((one for text, one in self.names.items() if text.startswith(PAIRS)), None)

    def answers(self, get: Get, questions: Sequence[LiveQuestion]) -> list[Columns]:
        """Returns by column the statistics `[R]` of each question's candidates; the store is read twice for all.

        Args:
            get: reads records by key.
            questions: their users, candidates and times.
        """
        users = [None] * len(questions)
        if USER_ROWS in self.names:
            users = get([self._key(USER_ROWS, [one.user]) for one in questions])
        gathered = [Gathered(self._counted, one, value) for one, value in zip(questions, users, strict=True)]
        keys = list(dict.fromkeys(key for one in gathered for key in one.keys))
        found = {key: value for key, value in zip(keys, get(keys), strict=True) if value is not None}
        return [self._statistics(one.index(found)).answers(one.questions) for one in gathered]

    def add(self, get: Get, events: Sequence[LiveEvent]) -> dict[bytes, bytes]:
        """Counts events, in the order of their times, and returns the records that have changed, by key."""
        records: dict[bytes, np.ndarray] = {}
        by_name = {name.prefix: name for name in self.names.values()}

        def load(keys: Sequence[bytes]) -> None:
            absent = [key for key in dict.fromkeys(keys) if key not in records]
            for key, value in zip(absent, get(absent) if absent else [], strict=True):
                dtype = by_name[key[:PREFIX_BYTES]].dtype
                records[key] = empty_record(dtype) if value is None else np.frombuffer(value, dtype)

        events = sorted(events, key=lambda one: (one.time, one.order))
        load([key for one in events for _, key in self._keys_of(one)])
        for one in events:
            self._count(one, records, load)
        return {key: value.tobytes() for key, value in records.items() if len(value) > 1}

    def records_of(
        self,
        arrays: dict[str, np.ndarray],
        sets: dict[Rows, Rows],
        digests: Mapping[str, np.ndarray],
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yields the keys and the records of a log, a block at a time.

        Args:
            arrays: of `jfi.events.counters.counters_of`.
            sets: of the log's index.
            digests: by part of a key, such as "user" and "column genres", those of its values `[N, 8]`, by number; the
                first of a column is not used.
        """
        times, last = arrays["times"], None
        if USER_ROWS in self.names and "session starts" in arrays:
            user, starts = arrays["event user"], arrays["session starts"]
            last = np.zeros(len(digests["user"]))
            last[user] = arrays["event time"][starts]  # of a user's rows the last one stays
        for name in self.names.values():
            rows = sets.get(name.rows, name.rows)
            source = name.text if name.rows not in sets else name.text.replace(name.rows, rows, 1)
            codes, listed = arrays[f"{source}: codes"], arrays[f"{source}: keys"]
            number = codes // max(len(times), 1)
            first = np.flatnonzero(np.diff(number, prepend=-1) != 0)
            lengths = np.diff(first, append=len(codes))
            keys = number[first] if not len(listed) else listed[number[first]]
            order = sort_keys(name, keys, digests)
            for begin, end in blocks(len(order), _KEYS_AT_ONCE):
                part = order[begin:end]
                at, found, is_row = records_with_ends(name, source, arrays, first[part], lengths[part])
                if name.text == USER_ROWS:
                    found["own label"][is_row] = arrays["event label"][at]
                    if "rounded surprise" in arrays:
                        found["surprise"][is_row] = arrays["rounded surprise"][at]
                    found["item"][is_row] = digests["item"][arrays["event item"][at]].view(f"V{DIGEST_BYTES}")[:, 0]
                if name.has_sessions:
                    since = found["time"][is_row]
                    if last is not None:
                        users = keys[part] // max(self._count_keys(name.key[1:], digests), 1)
                        own = np.repeat(last[users], lengths[part])
                        since = np.where(since >= own, own, -np.inf)
                    found["session"][is_row] = since
                ends = np.cumsum(lengths[part] + 1)
                whole = zip(keys_of(name, keys[part], digests), [0, *ends[:-1].tolist()], ends.tolist(), strict=True)
                yield from ((key, found[one:two].tobytes()) for key, one, two in whole)

    def _count_keys(self, key: Key, digests: Mapping[str, np.ndarray]) -> int:
        """The number of keys of these parts."""
        return int(np.prod([HOURS if part == "hour" else len(digests[part]) for part in key], dtype=np.int64))

    def _count(self, one: LiveEvent, records: dict[bytes, np.ndarray], load: Callable[[Sequence[bytes]], None]) -> None:
        """Adds an event to its keys."""
        has_label = self._counted.is_implicit or one.label == one.label
        surprises = self._surprises(one, records) if has_label else (0.0, 0.0)
        values = {"label": one.label if has_label else 0.0, "has label": float(has_label)}
        values |= {"item surprise": surprises[0], "surprise": surprises[1], "own label": one.label}
        session = None
        if one.in_history and USER_ROWS in self.names:
            own = records[self._key(USER_ROWS, [one.user])]
            session = session_of(one, own)
            if (pairs := self._pairs) is not None:
                older = own[: np.searchsorted(own["time"][:-1], one.time)][-self._counted.window :]
                keys = [self._pair_key(pairs, one.item, item.tobytes()) for item in older["item"]]
                load(keys)
                for key, other in zip(keys, older["surprise"], strict=True):
                    records[key] = append_row(pairs, records[key], one.time, {"products": surprises[1] * other})
        values |= {"session": session, "session_id": one.session, "order": one.order, "item": one.item}
        for name, key in self._keys_of(one):
            records[key] = append_row(name, records[key], one.time, values)

    def _surprises(self, one: LiveEvent, records: dict[bytes, np.ndarray]) -> tuple[float, float]:
        """Returns how far the label is above the item's rate, and above what item and user let expect, rounded."""
        if self._counted.is_implicit or _OVERALL not in self.names:
            return 0.0, 0.0

        def older(name: str, parts: list[bytes]) -> Tally:
            record = records[self._key(name, parts)]
            entry = record[np.searchsorted(record["time"][:-1], one.time)]
            return Tally(np.float64(entry["label"]), np.float64(entry["position"]))

        overall = older(_OVERALL, []).rate(0.5, 1.0)
        item = older(_ITEM, [one.item]).rate(overall, _SMOOTHING)
        user = overall
        if one.in_history and _USERS_OWN in self.names:  # of other events nobody reads it
            user = older(_USERS_OWN, [one.user]).rate(overall, _SMOOTHING)
        surprise = one.label - np.clip(item + user - overall, 0.0, 1.0)
        return float(one.label - item), float(np.rint(surprise * 1024) / 1024)

    def _keys_of(self, one: LiveEvent) -> list[tuple[SortedRows, bytes]]:
        """The names and keys that an event is a row of, without pairs; a key twice for a value that it has twice."""
        has_label, found = self._counted.is_implicit or one.label == one.label, []
        for name in self.names.values():
            is_row = {
                "labeled": has_label,
                "history": one.in_history,
                "labeled history": has_label and one.in_history,
            }.get(name.rows, False)
            if not is_row:
                continue
            keys = [b""]
            for part in name.key:
                keys = [key + own for key in keys for own in self._parts(part, one)]
            found += [(name, name.prefix + key) for key in keys]
        return found

    def _parts(self, part: str, one: LiveEvent) -> list[bytes]:
        if part == "user":
            return [one.user]
        if part == "item":
            return [one.item]
        if part == "hour":
            return [bytes([int(one.time // 3600 % HOURS)])]
        name = part.removeprefix("column ")
        return one.values.get(name, [])[: self._counted.columns[name]]

    def _key(self, name: str, parts: Sequence[bytes]) -> bytes:
        return self.names[name].prefix + b"".join(parts)

    @staticmethod
    def _pair_key(pairs: SortedRows, one: bytes, other: bytes) -> bytes:
        return pairs.prefix + min(one, other) + max(one, other)
