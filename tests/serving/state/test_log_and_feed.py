"""The log that a server writes, and a state that is fed from it: both have the same rows, bit for bit."""
# ruff: noqa: F811

import asyncio
import errno
import logging
import multiprocessing
import random
from contextlib import closing
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("aiohttp")

from jfi.data import DataError
from jfi.follow.feed import Feed
from jfi.serving.requests import BadRequestError
from jfi.serving.scorer import Scorer, StateSettings
from jfi.serving.server.events import write_parts
from jfi.state.events import EventReader
from jfi.state.outbox import PartWriter
from jfi.state.state import UserState, write_layout
from jfi.state.stores import LmdbStore, StateError

from ..test_server import samples, serve
from .adding import records_of
from .conftest import EVENT, NOW, added, answer, asked
from .test_requests_by_id import by_id, learnt  # noqa: F401
from .test_state_statistics import CASES, COUNT, KINDS, Replay, log  # noqa: F401

CASES = {name: CASES[name] for name in ("labels", "history", "session", "implicit")}


def replay_of(log, case, folder, store) -> Replay:
    folder = folder.with_name(f"run of {folder.name}")
    folder.mkdir()
    replay = Replay(log, CASES[case], folder, store, 0)
    replay.state = UserState(store, replay.reader, is_logged=True)
    return replay


def bodies_of(replay: Replay, rows: list[dict], draw: random.Random) -> list[list]:
    """Transactions of bodies: rows out of order and late, some twice, some first without their label."""
    sent = []
    for row in rows:
        at = row["timestamp"] + draw.choice([0, 0, 0, draw.uniform(0, 3000), draw.uniform(0, 150_000)])
        sent.append((at, row if draw.random() < 0.8 else row | {"rating": None}))
        if draw.random() < 0.2:
            sent.append((at + draw.uniform(0, 9000), row))
    rows = replay.body([row for _, row in sorted(sent, key=lambda one: one[0])])
    found, begin = [], 0
    while begin < len(rows):
        transaction = []
        for _ in range(draw.randrange(1, 4)):
            end = begin + draw.randrange(1, 25)
            own = rows[begin:end]
            if own and draw.random() < 0.3:
                own = {name: [row[name] for row in own] for name in own[0]}
            transaction += [replay.events(own)] if own else []
            begin = end
        found.append(transaction)
    return found


def contents(state: UserState) -> dict[bytes, bytes]:
    """All keys but for those of the state's identity, its outbox, its feed and its locks."""
    return {key: value for key, value in state.store.scan(b"") if key[:1] not in (b"m", b"o", b"f", b"l")}


def fed(replay: Replay, folder) -> list:
    feed, told = Feed(folder), []
    while feed.step(replay.state, replay.events, told.append):
        pass
    return told


def assert_same_requests(one: Replay, other: Replay, log: list[dict]) -> None:
    for user in ("u3", "u7", "new"):
        for now in (log[-1]["timestamp"] + 60, log[300]["timestamp"]):
            request = one.request(user, now)
            a, b = (each.state.fill([each.reader(request)])[0] for each in (one, other))
            assert (a.stored.events, a.stored.position) == (b.stored.events, b.stored.position)
            np.testing.assert_array_equal(a.dense, b.dense)
            assert a.ids.keys() == b.ids.keys()
            for name in a.ids:
                np.testing.assert_array_equal(a.ids[name], b.ids[name])


@pytest.mark.parametrize(
    ("case", "new_store"), [*((case, "lmdb") for case in CASES), ("labels", "redis")], indirect=["new_store"]
)
def test_a_state_that_is_fed_the_log_is_that_which_wrote_it(log, case, tmp_path, new_store):
    draw = random.Random(case)
    one = replay_of(log, case, tmp_path / "one", new_store("one"))
    (folder := tmp_path / "parts").mkdir()
    writer = PartWriter(one.state.store, one.state.layout, folder, rows=70, seconds=1e9)
    accepted = refused = repeated = 0
    for transaction in bodies_of(one, log, draw):
        for told in one.state.add(transaction):
            refused += isinstance(told, BadRequestError)
            accepted += getattr(told, "added", 0)
            repeated += getattr(told, "repeated", 0)
        if draw.random() < 0.5:
            writer.step()
    assert min(refused, repeated) > 5 and one.state.position == accepted > COUNT / 2
    assert 0 < writer.waiting < 70 or accepted % 70 == 0
    writer.flush()
    writer.close()
    assert not list(one.state.store.scan(b"o")) and writer.waiting == 0
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) > 3 and names[-1].endswith(f"-{accepted - 1:020d}.parquet")
    assert sum(pq.read_metadata(folder / name).num_rows for name in names) == accepted
    other = replay_of(log, case, tmp_path / "other", new_store("other"))
    told = fed(other, folder)
    assert [sum(getattr(each, name) for each in told) for name in ("added", "repeated", "late")] == [accepted, 0, 0]
    assert contents(other.state) == contents(one.state)
    assert_same_requests(one, other, log)
    assert fed(other, folder) == []
    rows = [row | {"timestamp": log[-1]["timestamp"] + 10 + n} for n, row in enumerate(log[:9])]
    (told,) = other.state.add([other.events(other.body(rows))])  # it goes on with the log that it was fed
    PartWriter(other.state.store, other.state.layout, folder).flush()
    assert rows_of(folder) == list(range(accepted + told.added)) and told.added > 5


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_parts_of_others_give_the_same_state_whatever_the_order_of_their_rows(log, tmp_path, new_store, monkeypatch):
    """The rows of a part are added in the order of time, in transactions of bounded size."""
    monkeypatch.setattr("jfi.follow.feed._AT_ONCE", 37)
    log = sorted(log, key=lambda row: (row["timestamp"], row["user_id"], str(row["item_id"])))
    one = replay_of(log, "labels", tmp_path / "one", new_store("one"))
    new_time = [n for n, (row, before) in enumerate(pairwise(log), 1) if row["timestamp"] != before["timestamp"]]
    for begin, end in pairwise([0, *new_time[60::90], len(log)]):  # rows of one time do not count for each other
        one.state.add([one.events(one.body(log[begin:end]))])
    for name, order in (("reversed", log[::-1]), ("shuffled", random.Random(0).sample(log, len(log)))):
        (folder := tmp_path / f"parts {name}").mkdir()
        pq.write_table(pa.Table.from_pylist(order, KINDS), folder / "a.parquet")
        other = replay_of(log, "labels", tmp_path / name, new_store(name))
        assert len(fed(other, folder)) > 10
        assert other.state.position == len(log)
        assert_same_requests(one, other, log)


def sent(replay: Replay, rows: list[dict], at_once: int = 20) -> None:
    for begin in range(0, len(rows), at_once):
        (told,) = replay.state.add([replay.events(replay.body(rows[begin : begin + at_once]))])
        assert told.added


def rows_of(folder) -> list[int]:
    """The positions of all rows of the parts of a folder."""
    found = []
    for path in sorted(folder.glob("*.parquet")):
        first, last = map(int, path.stem.split("-"))
        assert pq.read_metadata(path).num_rows == last - first + 1
        found += range(first, last + 1)
    return found


@pytest.fixture
def logged(log, tmp_path, new_store):
    """A state with a log, its folder, and what makes a writer."""
    replay = replay_of(log, "labels", tmp_path / "one", new_store("one"))
    (folder := tmp_path / "parts").mkdir()
    yield replay, folder, lambda **options: PartWriter(replay.state.store, replay.state.layout, folder, **options)


@pytest.mark.parametrize("new_store", ["lmdb", "redis"], indirect=True)
def test_a_kill_between_the_rename_of_a_part_and_the_removal_of_its_rows_repeats_none(logged, log, monkeypatch):
    replay, folder, writer_of = logged
    for number in range(4):
        sent(replay, log[number * 100 : number * 100 + 100])
        killed = writer_of(rows=60)
        with monkeypatch.context() as patched:
            patched.setattr(PartWriter, "_remove", lambda self: None)  # what it would write when it is killed
            killed.step()
        killed.close()
        writer = writer_of(rows=60)
        writer.step()
        assert len(rows_of(folder)) >= 100 * number + 60
        writer.close()
    writer_of().flush()
    assert rows_of(folder) == list(range(400)) and not list(replay.state.store.scan(b"o"))


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_a_full_disk_or_a_folder_that_is_gone_loses_nothing(logged, log, monkeypatch, caplog):
    replay, folder, writer_of = logged
    now, failures = [0.0], []
    writer = writer_of(rows=50, clock=lambda: now[0])
    writer.failed = lambda: failures.append(now[0])

    def full(table, path):
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(pq, "write_table", full)
        for number in range(5):
            sent(replay, log[number * 40 : number * 40 + 40])
            writer.step()
            now[0] += 20
    assert len(failures) == 4 and rows_of(folder) == [] and not list(folder.iterdir())
    lines = [one.getMessage() for one in caplog.records]
    assert [line.split(": ", 1)[1] for line in lines] == [
        f"{count} rows wait in the state: [Errno 28] no space left on device: '{folder / name}'"
        for count, name in ((80, f"{0:020d}-{59:020d}.parquet"), (200, f"{0:020d}-{59:020d}.parquet"))
    ]
    folder.rename(folder.with_name("moved"))
    sent(replay, log[200:240])
    writer.step()
    assert len(failures) == 5
    folder.with_name("moved").rename(folder)
    writer.flush()
    assert rows_of(folder) == list(range(240)) and writer.waiting == 0


@pytest.mark.parametrize("new_store", ["lmdb", "redis"], indirect=True)
def test_one_process_writes_a_folder_and_another_takes_its_place(logged, log, tmp_path, new_store):
    replay, folder, writer_of = logged
    sent(replay, log[:100])
    first, second = writer_of(rows=10), writer_of(rows=10)
    elsewhere = replay_of(log, "labels", tmp_path / "two", new_store("two"))
    third = PartWriter(elsewhere.state.store, elsewhere.state.layout, folder, rows=10)
    first.step()
    sent(replay, log[100:200])
    sent(elsewhere, log[:40])
    for other in (second, third):
        other.step()
        assert rows_of(folder) == list(range(100))
    assert second.waiting == 100
    first.close()
    second.step()
    assert rows_of(folder) == list(range(200))
    with pytest.raises(StateError, match=r"--log .*: 0.*\.parquet has rows of another state, or of one that was newer"):
        PartWriter(elsewhere.state.store, elsewhere.state.layout, folder)


def _write(name: str, folder, go_on) -> None:
    from jfi.state.state import read_layout
    from jfi.state.stores import open_store

    store = open_store(name, timeout=10.0)
    writer = PartWriter(store, read_layout(store), folder, rows=7, seconds=0.0)
    go_on.wait()
    for _ in range(40):
        writer.step()


@pytest.mark.parametrize("new_store", ["lmdb", "redis"], indirect=True)
def test_processes_with_the_same_folder_do_not_both_write(logged, log, new_store):
    replay, folder, _ = logged
    context = multiprocessing.get_context("spawn")
    go_on = context.Event()
    writers = [context.Process(target=_write, args=(new_store.names[0], folder, go_on)) for _ in range(2)]
    for one in writers:
        one.start()
    go_on.set()
    sent(replay, log[:300])
    for one in writers:
        one.join()
        assert one.exitcode == 0
    PartWriter(replay.state.store, replay.state.layout, folder).flush()
    done = rows_of(folder)
    assert done == list(range(len(done)))
    if new_store.names[0].startswith("unix"):  # until a name that is held on a server expires, nobody else writes
        return
    assert len(done) == 300


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_rows_that_come_while_a_part_is_written_do_not_keep_the_writer_busy(logged, log, monkeypatch):
    """The part has rows of later positions than the one that was read before."""
    replay, folder, writer_of = logged
    sent(replay, log[:20])
    writer, write, calls = writer_of(seconds=0.0), PartWriter._write, []

    def adding(self, position):
        calls.append(position)
        assert len(calls) < 5
        sent(replay, log[20:40] if len(calls) == 1 else [])
        write(self, position)

    monkeypatch.setattr(PartWriter, "_write", adding)
    failures = []
    writer.failed = lambda: failures.append(1)
    writer.step()
    assert (calls, failures) == ([20], []) and rows_of(folder) == list(range(40))


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_a_column_of_another_type_begins_another_part(logged, log):
    """A label that is a number in one body and a text in the next, and dates after numbers."""
    replay, folder, writer_of = logged
    rows = replay.body(log[:60])
    sent(replay, rows[:10])
    for own in (
        [row | {"rating": str(row["rating"])} for row in rows[10:20]],
        [row | {"timestamp": str(np.datetime64(int(row["timestamp"]), "s"))} for row in rows[20:40]],
    ):
        sent(replay, own)
    writer_of().flush()
    assert rows_of(folder) == list(range(40))
    types = [pq.read_schema(path) for path in sorted(folder.iterdir())]
    assert [str(one.field("rating").type) for one in types] == ["int64", "string", "int64"]
    assert [str(one.field("timestamp").type) for one in types] == ["double", "double", "timestamp[us, tz=UTC]"]
    assert {str(one.field(name).type) for one in types for name in ("user_id", "item_id", "brand")} == {"string"}


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_integers_that_no_float_has_hold_up_no_part(logged, log):
    """In bodies of their own, so that a part may join them with fractions; one has more than 64 bits."""
    replay, folder, writer_of = logged
    rows = replay.body(log[:30])
    for begin, label in ((0, 2**60 + 1), (10, 0.5), (20, 10**30)):
        sent(replay, [row | {"rating": label} for row in rows[begin : begin + 10]])
    writer_of().flush()
    assert rows_of(folder) == list(range(30))
    found = [pq.read_table(path)["rating"].to_pylist() for path in sorted(folder.iterdir())]
    assert list(chain(*found)) == [str(2**60 + 1)] * 10 + [0.5] * 10 + [str(10**30)] * 10


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_rows_that_were_accepted_without_a_log_are_named(logged, log, caplog):
    replay, folder, writer_of = logged
    sent(replay, log[:40])
    (first := writer_of()).flush()
    first.close()
    UserState(replay.state.store, replay.reader).add([replay.events(replay.body(log[40:50]))])
    sent(replay, log[50:60])
    with caplog.at_level(logging.WARNING):
        writer_of().flush()
    assert caplog.messages == [f"--log {folder}: rows 40 to 49 were accepted by a server without --log"]
    assert rows_of(folder) == [*range(40), *range(50, 60)]


@pytest.fixture
def feeding(log, tmp_path, new_store):
    """An empty state, and a folder of parts that others write."""
    (folder := tmp_path / "feed").mkdir()
    return replay_of(log, "labels", tmp_path / "fed", new_store("fed")), folder


def write_part(folder, name: str, rows: list[dict]) -> None:
    pq.write_table(pa.Table.from_pylist(rows, KINDS), folder / f".{name}")
    (folder / f".{name}").rename(folder / f"{name}.parquet")


@pytest.mark.parametrize("new_store", ["lmdb", "redis"], indirect=True)
def test_a_part_that_was_added_in_part_goes_on_where_it_was(feeding, log, tmp_path, new_store, monkeypatch):
    """It is killed after each transaction, and another server feeds the same state meanwhile."""
    monkeypatch.setattr("jfi.follow.feed._AT_ONCE", 40)
    replay, folder = feeding
    for number in range(3):
        write_part(folder, f"part-{number}", log[number * 150 : number * 150 + 150])

    def killed(added) -> None:
        totals.append(added)
        raise KeyboardInterrupt

    totals, feeds = [], [Feed(folder), Feed(folder)]
    for number in range(200):
        feed = feeds[number % 2] if number % 5 else Feed(folder)
        try:
            if not feed.step(replay.state, replay.events, killed):
                break
        except KeyboardInterrupt:
            pass
    assert [sum(getattr(each, name) for each in totals) for name in ("added", "repeated", "late")] == [450, 0, 0]
    assert len(totals) > 10 and replay.state.position == 450
    whole = replay_of(log, "labels", tmp_path / "whole", new_store("whole"))
    assert len(fed(whole, folder)) > 10
    assert contents(whole.state) == contents(replay.state)


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_late_and_repeated_rows_are_left_out_and_counted(feeding, log):
    replay, folder = feeding
    write_part(folder, "a", log[600:])
    write_part(folder, "b", log[:50] + log[600:640])
    told = fed(replay, folder)
    newest = max(row["timestamp"] for row in log[600:])
    late = sum(row["timestamp"] < newest - 86400 for row in log[:50])
    assert sum(one.added for one in told) == 100 and late == 50
    assert [sum(getattr(one, name) for one in told) for name in ("repeated", "late")] == [40, 50]
    assert replay.state.position == 190


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda row: {"rating": 4.5}, None),
        (lambda row: {"timestamp": 4e9}, r"b\.parquet:8: 'timestamp' is 2096-10-02.* more than 600 s in the future"),
        (lambda row: {"user_id": None}, r"b\.parquet:8: empty 'user_id'"),
        (
            lambda row: {"user_id": "x" * 481},
            r"b\.parquet:8: 'user_id' has 481 bytes, and an id of a state has at most 480",
        ),
    ],
)
@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_a_damaged_part_stops_the_feed_until_its_file_changes(feeding, log, spoil, why):
    replay, folder = feeding
    write_part(folder, "a", log[:50])
    rows = log[50:60]
    write_part(folder, "c", log[60:70])
    kinds = KINDS.set(3, pa.field("rating", pa.float64()))
    rows[7] = rows[7] | spoil(rows[7])
    pq.write_table(pa.Table.from_pylist(rows, kinds), folder / "b.parquet")
    feed = Feed(folder)
    assert feed.step(replay.state, replay.events)
    if why is not None:
        before = contents(replay.state)
        with pytest.raises(DataError, match=why):
            feed.step(replay.state, replay.events)
        assert not feed.step(replay.state, replay.events) and contents(replay.state) == before
        write_part(folder, "b", log[50:60])
    for _ in range(2):
        assert feed.step(replay.state, replay.events)
    assert not feed.step(replay.state, replay.events) and replay.state.position == 70


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_a_part_without_a_column_or_with_an_earlier_name_is_named(feeding, log):
    replay, folder = feeding
    pq.write_table(pa.Table.from_pylist(log[:5], KINDS).drop_columns(["rating"]), folder / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet: no column 'rating'"):
        Feed(folder).step(replay.state, replay.events)
    pq.write_table(pa.Table.from_pylist([row | {"tags": "a"} for row in log[:5]]), folder / "b.parquet")
    with pytest.raises(DataError, match=r"column 'tags' has one value a row, but in training it had lists of values"):
        Feed(folder).step(replay.state, replay.events)
    write_part(folder, "b", log[:5])
    assert len(fed(replay, folder)) == 1
    feed = Feed(folder)
    assert not feed.step(replay.state, replay.events)
    write_part(folder, "a", log[5:9])
    with pytest.raises(DataError, match=r"a\.parquet: its name sorts before b\.parquet"):
        feed.step(replay.state, replay.events)
    restarted = Feed(folder)
    with pytest.raises(DataError, match=r"has 2 parts up to b\.parquet, of which 1 were there when that was added"):
        restarted.step(replay.state, replay.events)
    (folder / "a.parquet").rename(folder / "c.parquet")
    assert restarted.step(replay.state, replay.events) and replay.state.position == 9


def test_columns_that_rows_do_not_carry_are_those_of_the_state(by_id, tmp_path):
    """A part has the columns of users that no row was sent with; a part without columns of items is fed with these."""
    items, users, reader, store = by_id
    state = UserState(store, reader, max_late=np.inf, is_logged=True)
    events, item, user = EventReader(state.layout), {row["item_id"]: row for row in items}, users
    own = [
        {"user_id": f"u{n % 10}", "item_id": items[n]["item_id"], "timestamp": 5000 + n, "rating": 5} for n in range(9)
    ]
    rows = [{**item[row["item_id"]], **row} for row in own]
    (told,) = state.add([events([{name: row.get(name) for name in events.required} for row in rows])])
    assert told.added == 9
    (folder := tmp_path / "parts").mkdir()
    PartWriter(store, state.layout, folder).flush()
    (path,) = folder.iterdir()
    found = pq.read_table(path).to_pylist()
    for name in [one.name for one in state.layout.log.others]:
        if name in ("city", "likes", "income"):
            assert [row[name] for row in found] == [user[n % 10][name] for n in range(9)]
        elif name != "rating":
            assert [row[name] for row in found] == [items[n].get(name) for n in range(9)], name
    for name in ("brand", "kind", "slot"):
        assert [row[name] for row in found] == [items[n][name] for n in range(9)]
    with closing(LmdbStore(tmp_path / "plain", create=True)) as other:
        other.put(store.scan(b"I"))
        other.put(pair for key in (b"t", b"n", b"c", b"d") for pair in store.scan(key))
        write_layout(other, state.layout)
        plain = UserState(other, reader, max_late=np.inf)
        (folder / path.name).unlink()
        pq.write_table(pa.Table.from_pylist(own), folder / "a.parquet")
        assert Feed(folder).step(plain, EventReader(plain.layout))
        for number in range(9):
            name = own[number]["user_id"]
            (a,), (b,) = records_of(state, [name]), records_of(plain, [name])
            assert a[-1:].tobytes() == b[-1:].tobytes()


def test_a_server_writes_its_log_and_another_is_fed_from_it(exported, store, tmp_path):
    (folder := tmp_path / "log").mkdir()
    settings = StateSettings(store, max_events=20, is_logged=True)
    scorer = Scorer(exported.path, state=settings)
    writer = PartWriter(store, scorer.state.layout, folder, rows=5)
    rows = [EVENT | {"event_id": number, "time": NOW + number, "user": f"u{number % 3}"} for number in range(8)]

    async def write(client):
        await added(client, *rows[:6])
        while (await samples(client))["jfi_log_written_rows_total"] < 6:
            await asyncio.sleep(0.02)
        await added(client, *rows[6:])
        return await asked(client, "u1")

    wanted = serve(scorer, write, tasks=[partial(write_parts, writer)])
    assert rows_of(folder) == list(range(8))  # the last ones are written when it ends
    second = LmdbStore(tmp_path / "second", create=True)
    write_layout(second, scorer.state.layout)
    fed_scorer = Scorer(exported.path, state=StateSettings(second))

    async def read(client):
        while (await samples(client))['jfi_feed_rows_total{result="added"}'] < 8:
            await asyncio.sleep(0.02)
        status, told = await answer(await client.post("/events", json=rows))
        assert status == 403 and told["error"] == f"events are read from --feed {folder}: write them to parts there"
        assert await asked(client, "u1") == wanted
        (folder / "1.parquet").write_bytes(b"no part")
        while not (await samples(client))["jfi_feed_stopped"]:
            await asyncio.sleep(0.02)
        (folder / "1.parquet").unlink()
        while (await samples(client))["jfi_feed_stopped"]:
            await asyncio.sleep(0.02)
        return (await (await client.get("/health")).json())["state"]

    assert serve(fed_scorer, read, tasks=[Feed(folder).run], feed=folder) == {"log_position": 8}
    second.close()
