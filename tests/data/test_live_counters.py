"""Statistics of a log that grows are those of training's index of the same rows."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from jfi.events import live_counters
from jfi.events.events import EventValues, SortedEvents, event_values
from jfi.events.groups import GROUPS, ItemColumn, StatisticsSettings
from jfi.events.live_counters import LiveCounters
from jfi.events.live_index import LiveRows
from jfi.events.point_in_time import KeyColumn, PastIndex, Queries
from jfi.events.statistics import StatisticColumns, Statistics

USERS, ITEMS, WINDOW = 5, 12, 8
HALF_LIVES = [1e3, 1e4, 1e5, 1e6]
OF_EVENTS = ["dwell"], ["action"]


def digests(kind: bytes, numbers: np.ndarray) -> np.ndarray:
    return np.uint64(kind[0] << 56) + numbers.astype(np.uint64)


@dataclass
class Log:
    """Rows in the order of their arrival, with ties, pauses, rows without a label and rows not of histories."""

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray
    label: np.ndarray
    in_history: np.ndarray
    tags: np.ndarray
    is_implicit: bool
    session: np.ndarray | None = None
    dwell: np.ndarray | None = None
    action: np.ndarray | None = None

    @classmethod
    def draw(cls, is_implicit: bool, seed: int, count: int = 300) -> "Log":
        rng = np.random.default_rng(seed)
        tags = np.zeros((ITEMS, 2), np.int64)
        for own in tags:
            chosen = rng.choice(5, rng.integers(0, 3), replace=False)
            own[: len(chosen)] = 1 + chosen
        label = np.ones(count) if is_implicit else np.where(rng.random(count) < 0.1, np.nan, rng.integers(0, 2, count))
        in_history = np.ones(count, bool) if is_implicit else rng.random(count) < 0.8
        user, item = rng.integers(0, USERS, count), rng.integers(0, ITEMS, count)
        time = np.cumsum(rng.choice([0, 0, 1, 30, 4000], count)) + 1e9
        order = np.lexsort((item, time))  # of a time in the order of items, as training sorts them
        of_events = rng.integers(0, 9, count), rng.integers(0, 7, count)
        return cls(user[order], item[order], time, label[order], in_history[order], tags, is_implicit, None, *of_events)

    def values_of(self, rows: np.ndarray) -> EventValues:
        return event_values({"dwell": self.dwell[rows]}, {"action": [self.action[rows]]})

    def events(self, rows: np.ndarray) -> LiveRows:
        item = self.item[rows]
        return LiveRows(
            digests(b"u", self.user[rows]),
            digests(b"i", item),
            self.time[rows],
            {"tags": self.values(item)},
            self.label[rows],
            self.in_history[rows],
            item.astype(np.uint64),
            None if self.session is None else self.session[rows].astype(np.uint64),
            {name: of(np.arange(len(rows))) for name, of in self.values_of(rows).items()},
        )

    def values(self, item: np.ndarray) -> np.ndarray:
        return np.where(self.tags[item] > 0, digests(b"t", self.tags[item]), np.uint64(0))

    def index(self, rows: np.ndarray) -> tuple[PastIndex, np.ndarray]:
        """The index of rows, and the number of each user in it, -1 for one without rows."""
        rows = rows[np.lexsort((self.item[rows], self.time[rows], self.user[rows]))]
        present, user = np.unique(self.user[rows], return_inverse=True)
        known = np.full(USERS + 1, -1)
        known[present] = np.arange(len(present))
        histories = None if self.in_history[rows].all() else np.flatnonzero(self.in_history[rows])
        label, split = self.label[rows].astype(np.float32), np.zeros(len(rows), np.int8)
        events = SortedEvents(user, self.item[rows], self.time[rows], label, split, histories)
        columns = {"column tags": KeyColumn("item", self.tags, 6, "tags")}
        session = None if self.session is None else np.where(self.session[rows] == 0, -1 - rows, self.session[rows])
        known_values = {"values": self.values_of(rows)}
        return PastIndex(events, columns, ITEMS, ITEMS, self.is_implicit, session, **known_values), known

    def compute(self, rows: np.ndarray, user: int, now: float) -> StatisticColumns:
        """What training computes for all items."""
        index, known = self.index(rows)
        queries = Queries(
            np.full(ITEMS, known[user]), np.full(ITEMS, now), np.arange(ITEMS), ids={"column tags": self.tags}
        )
        return Statistics(index, list(GROUPS), ["tags"], WINDOW, HALF_LIVES, *OF_EVENTS).compute(queries)

    def query(self, user: int, now: float) -> LiveRows:
        items = np.arange(ITEMS)
        of = digests(b"u", np.full(ITEMS, user)), digests(b"i", items), np.full(ITEMS, now)
        return LiveRows(*of, {"tags": self.values(items)})


def settings_of(is_implicit: bool, columns: dict[str, ItemColumn], of_events) -> StatisticsSettings:
    numbers, values = ({name: [] for name in names} for names in of_events)
    known = WINDOW, HALF_LIVES, is_implicit, ITEMS, [*columns], columns
    return StatisticsSettings("user", "item", list(GROUPS), *known, numbers=numbers, values=values)


class Counted:
    """Live counters with the records in a dict."""

    def __init__(self, log: Log) -> None:
        self.live = LiveCounters(settings_of(log.is_implicit, {"tags": ItemColumn("tags", 6, 2)}, OF_EVENTS))
        self.records: dict[bytes, bytes] = {}

    def get(self, keys) -> list[bytes | None]:
        return [self.records.get(key) for key in keys]

    def add(self, events: LiveRows) -> None:
        self.records |= self.live.add(self.get, events)


def check(found: StatisticColumns, wanted: StatisticColumns, but: tuple[str, ...] = ()) -> None:
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        if not name.startswith(but):
            # Sums that halve by their age are added in another order than in training.
            np.testing.assert_allclose(found[name], values, rtol=1e-13, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("is_implicit", [False, True], ids=["labels", "implicit"])
def test_events_one_by_one(is_implicit, seed):
    log = Log.draw(is_implicit, seed)
    counted, rng = Counted(log), np.random.default_rng(seed)
    for row in range(len(log.user)):
        counted.add(log.events(np.array([row])))
        if row % 23 == 5:
            for now in (log.time[row], log.time[row] + 0.5, log.time[row] + 2000.0):  # at its own time it is not older
                user = int(rng.integers(0, USERS + 1))
                found = counted.live.compute(counted.get, log.query(user, float(now)))
                check(found, log.compute(np.arange(row + 1), user, float(now)))


@pytest.mark.parametrize("is_implicit", [False, True], ids=["labels", "implicit"])
@pytest.mark.parametrize("size", [1, 7, 300])
def test_events_are_answered_as_of_their_own_times(is_implicit, size, monkeypatch):
    """Each block of them counts in the next one."""
    monkeypatch.setattr(live_counters, "_AT_ONCE", size)
    log = Log.draw(is_implicit, 7)
    counted, rows = Counted(log), np.arange(300)
    found, changes = counted.live.compute_and_add(counted.get, log.events(rows))
    order = np.lexsort((log.item, log.time, log.user))
    wanted = Statistics(log.index(rows)[0], list(GROUPS), ["tags"], WINDOW, HALF_LIVES, *OF_EVENTS).of(rows)
    check({name: one[order] for name, one in found.items()}, wanted)
    one_by_one = Counted(log)
    for row in rows:
        one_by_one.add(log.events(row[None]))
    assert changes.keys() == one_by_one.records.keys()
    assert {key: len(one) for key, one in changes.items()} == {key: len(one) for key, one in one_by_one.records.items()}


@pytest.mark.parametrize("is_implicit", [False, True], ids=["labels", "implicit"])
def test_events_of_one_time_do_not_see_each_other(is_implicit, monkeypatch):
    """A key has more of them than its record keeps newest rows, and they are more than are counted together."""
    monkeypatch.setattr(live_counters, "_AT_ONCE", 50)
    log, rows = Log.draw(is_implicit, 3), np.arange(300)
    log.time[20:240] = log.time[20]
    order = np.lexsort((log.item, log.time))
    log = replace(
        log, user=log.user[order], item=log.item[order], label=log.label[order], in_history=log.in_history[order]
    )
    counted = Counted(log)
    found, _ = counted.live.compute_and_add(counted.get, log.events(rows))
    order = np.lexsort((log.item, log.time, log.user))
    wanted = Statistics(log.index(rows)[0], list(GROUPS), ["tags"], WINDOW, HALF_LIVES, *OF_EVENTS).of(rows)
    check({name: one[order] for name, one in found.items()}, wanted)


@pytest.mark.parametrize("size", [1, 3, 60])
def test_an_event_without_a_session_is_one_of_its_own(size):
    log, rng = Log.draw(False, 6), np.random.default_rng(6)
    log.session = np.where(rng.random(300) < 0.3, 0, 1 + (log.time // 9000 % 50).astype(np.int64))
    counted, longest = Counted(log), 0.0
    for begin in range(0, 300, size):
        counted.add(log.events(np.arange(begin, begin + size)))
        now = float(log.time[begin + size - 1] + 0.5)
        for user in np.unique(log.user[begin : begin + size]).tolist():
            found = counted.live.compute(counted.get, log.query(user, now))
            check(found, log.compute(np.arange(begin + size), user, now))
            longest = max(longest, found["past_session_count"].max())
    assert longest > 0.0


@pytest.mark.parametrize("is_implicit", [False, True], ids=["labels", "implicit"])
def test_a_log_and_the_events_after_it(is_implicit):
    log = Log.draw(is_implicit, 3)
    log.in_history[:] = True
    first = np.arange(200)
    index, _ = log.index(first)
    none = np.zeros(1, np.int64)
    queries = Queries(none, np.array([2e9]), none, ids={"column tags": log.tags[:1]})
    Statistics(index, list(GROUPS), ["tags"], WINDOW, HALF_LIVES, *OF_EVENTS).compute(queries)
    sizes = {"user": USERS, "item": ITEMS, "column tags": 6}
    by_part = {
        part: digests(part.removeprefix("column ")[:1].encode(), np.arange(size)) for part, size in sizes.items()
    }
    counted = Counted(log)
    counted.records |= counted.live.records_of(index, by_part, np.arange(ITEMS, dtype=np.uint64))
    for rows in (first, np.arange(300)):
        counted.add(log.events(rows[200:]))
        for user in range(USERS):
            now = float(log.time[rows[-1]] + 60)
            found = counted.live.compute(counted.get, log.query(user, now))
            check(found, log.compute(rows, user, now))


def test_columns_may_have_names_that_look_like_those_of_arrays():
    rng, names, of_events = np.random.default_rng(0), ["a", "a: b", "size x color"], (["c: codes"], ["rows by 5.0"])
    ids = {f"column {name}": rng.integers(0, 3, (ITEMS, 1)) for name in names}
    user, item, values = (np.sort(rng.integers(0, n, 200)) for n in (USERS, ITEMS, 5))
    label = rng.integers(0, 2, 200).astype(np.float32)
    events = SortedEvents(user, rng.permutation(item), np.arange(200.0), label, np.zeros(200, np.int8))
    columns = {part: KeyColumn("item", own, 3, part.removeprefix("column ")) for part, own in ids.items()}
    known = {"values": event_values({"c: codes": values}, {"rows by 5.0": [values]})}
    index = PastIndex(events, columns, ITEMS, ITEMS, False, **known)
    made = list(GROUPS), names, WINDOW, HALF_LIVES, *of_events
    none = np.zeros(ITEMS, np.int64)
    queries = Queries(none, none + 300.0, np.arange(ITEMS), ids=ids)
    wanted = Statistics(index, *made).compute(queries)
    live = LiveCounters(settings_of(False, {name: ItemColumn(name, 3, 1) for name in names}, of_events))
    sizes = {"user": USERS, "item": ITEMS, **dict.fromkeys(ids, 3)}
    by_part = {part: digests(b"d", np.arange(n)) for part, n in sizes.items()}
    records = dict(live.records_of(index, by_part, np.arange(ITEMS, dtype=np.uint64)))
    of_items = {one.key: np.where(one.ids > 0, digests(b"d", one.ids), np.uint64(0)) for one in columns.values()}
    query = LiveRows(digests(b"d", none), digests(b"d", np.arange(ITEMS)), queries.seconds, of_items)
    check(live.compute(lambda keys: [records.get(key) for key in keys], query), wanted)


@pytest.mark.parametrize("is_implicit", [False, True], ids=["labels", "implicit"])
def test_late_events_count_from_their_own_time_on(is_implicit):
    log = Log.draw(is_implicit, 4)
    counted = Counted(log)
    rows = np.argsort(np.arange(300) + np.random.default_rng(0).integers(0, 6, 300), kind="stable")
    assert (np.diff(rows) < 0).sum() > 50
    for row in rows:
        counted.add(log.events(np.array([row])))
    for user in range(USERS + 1):
        now = float(log.time[-1] + 60)
        found = counted.live.compute(counted.get, log.query(user, now))
        wanted = log.compute(np.arange(300), user, now)
        # The surprise in labels, and the pairs of items, are of what was known when an event came.
        check(found, wanted, but=("past_user_newest", "past_agreement", "past_similar", "past_session"))


def test_records_stay_small():
    log = Log.draw(False, 5, count=3000)
    counted = Counted(log)
    counted.add(log.events(np.arange(1500)))
    half = len(counted.records), max(map(len, counted.records.values()))
    counted.add(log.events(np.arange(1500, 3000)))
    assert len(counted.records) < 1.2 * half[0] and max(map(len, counted.records.values())) <= half[1] * 1.05
    assert half[1] < 10_000
