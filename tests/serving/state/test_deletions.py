"""Users who are deleted from a log of parts and from a state: which rows and which bytes are left."""

import asyncio
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("lmdb")
pytest.importorskip("aiohttp")

from jfi.follow.feed import Feed
from jfi.serving.request_log import RequestLog, read_lines
from jfi.serving.scorer import Scorer, StateSettings
from jfi.serving.server.events import write_parts
from jfi.state import deletions
from jfi.state.deletions import (
    DELETIONS,
    LIST,
    Deletion,
    append_deletions,
    deletion_of,
    info_of,
    keys_of_users,
    read_deletions,
    rows_left,
    users_without,
)
from jfi.state.layout import digest, other_key
from jfi.state.outbox import PartWriter
from jfi.state.retention import Retention
from jfi.state.state import UserState
from jfi.state.stores import LmdbStore, StateError

from ..test_server import serve
from .adding import records_of
from .conftest import EVENT, NOW, added, answer, request
from .test_state_statistics import CASES, KINDS, Replay, log  # noqa: F401


def ids(replay: Replay, user: str = "u3") -> list[int]:
    return records_of(replay.state, [user])[0]["jfi id"].tolist()


def rows_of(log, user: str) -> int:  # noqa: F811
    return sum(row["user_id"] == user for row in log)


def test_which_rows_of_a_part_do_not_count():
    def name(first: int, last: int) -> str:
        return f"{first:020d}-{last:020d}.parquet"

    lines = [Deletion(digest("a").hex(), f"{10:020d}"), Deletion(digest("b").hex(), f"{name(4, 9)}~")]
    lines.append(Deletion(digest("a").hex(), f"{12:020d}"))
    without = {one: users_without(lines, one) for one in (name(0, 3), name(4, 9), name(10, 15), name(12, 13), "part 7")}
    a, b = digest("a"), digest("b")
    assert list(without.values()) == [{a: 12, b: np.inf}, {a: 8, b: np.inf}, {a: 2}, {}, {}]
    users, rows = ["a", "c", "a", "a", "b"], np.arange(5)
    assert rows_left(users, rows, without[name(10, 15)]).tolist() == [False, True, True, True, True]
    assert rows_left(users, rows + 1, without[name(10, 15)]).tolist() == [False, True, True, True, True]
    assert rows_left(users, rows, {a: np.inf, b: 1}).tolist() == [False, True, False, False, True]
    assert rows_left([], rows[:0], without[name(10, 15)]).tolist() == []
    assert users_without([Deletion("00", "b.parquet~")], "a.parquet") == {b"\0": np.inf}


def test_lines_of_several_processes_are_all_kept_and_a_damaged_list_is_named(tmp_path):
    assert read_deletions(tmp_path) == []
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(
                lambda number: append_deletions(tmp_path, deletion_of(tmp_path, f"u{number}", number)), range(200)
            )
        )
    found = read_deletions(tmp_path)
    assert {(one.user, one.before) for one in found} == {(digest(f"u{n}").hex(), f"{n:020d}") for n in range(200)}
    (tmp_path / "b.parquet").touch()
    (tmp_path / "a.parquet").touch()
    append_deletions(tmp_path, deletion_of(tmp_path, "v", None))
    assert read_deletions(tmp_path)[-1] == Deletion(digest("v").hex(), "b.parquet~")
    with (tmp_path / LIST).open("ab") as file:
        file.write(b'{"user": "00')  # of a full disk
    assert len(read_deletions(tmp_path)) == 201
    append_deletions(tmp_path, deletion_of(tmp_path, "w", 3))
    assert read_deletions(tmp_path)[-1].user == digest("w").hex() and len(read_deletions(tmp_path)) == 202
    (tmp_path / LIST).write_text('{"user": "00"}\n')
    with pytest.raises(StateError, match=f"the list of deleted users .*{LIST}: .*before"):
        read_deletions(tmp_path)


def logged(log, folder, store):  # noqa: F811
    """A state that is logged to a folder of parts, and what writes them."""
    (parts := folder / "parts").mkdir()
    replay = Replay(log, CASES["labels"], folder, store, 0)
    retention = Retention(parts=parts)
    replay.state = UserState(store, replay.reader, retention=retention, is_logged=True)
    return replay, PartWriter(store, replay.state.layout, parts, rows=70, seconds=1e9), parts


def table(parts: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(one) for one in sorted(parts.glob("0*.parquet"))])


def test_parts_are_written_anew_and_later_ones_without_the_rows_of_deleted_users(log, tmp_path, new_store):  # noqa: F811
    """Rows that were accepted before the deletion are in no part, those of the time since then are."""
    replay, writer, parts = logged(log, tmp_path, new_store())

    def add(rows: list[dict]) -> None:
        for begin in range(0, len(rows), 30):
            replay.state.add([replay.events(replay.body(rows[begin : begin + 30]))])

    add(log[:270])
    writer.step()
    assert len([*parts.iterdir()]) == 3 and writer.waiting == 0
    add(log[270:350])  # rows that wait for a part
    assert replay.state.delete("user", "u3") and not replay.state.delete("user", "nobody")
    add(log[350:500])  # in which the user comes back
    writer.flush()
    found = table(parts)
    left = [row for row in log[:350] if row["user_id"] != "u3"] + log[350:500]
    assert found["user_id"].to_pylist() == [row["user_id"] for row in left]
    assert found["timestamp"].to_pylist() == [row["timestamp"] for row in left]
    assert replay.state.position == 500 and max(parts.glob("0*")).name.endswith(f"{499:020d}.parquet")
    infos = [info_of(one) for one in parts.glob("0*")]
    assert sum(sum(map(sum, one.bodies)) for one in infos) == 500
    assert sum(len(one.removed) for one in infos) == rows_of(log[:350], "u3")
    now = {path.name: path.stat().st_ino for path in parts.glob("0*")}
    again = PartWriter(replay.state.store, replay.state.layout, parts, rows=70, seconds=1e9)
    writer.close()
    again.step()
    assert {path.name: path.stat().st_ino for path in parts.glob("0*")} == now  # what is done is not done again
    other = Replay(log, CASES["labels"], (tmp_path / "other").mkdir() or tmp_path / "other", new_store("fed"), 0)
    feed = Feed(parts)
    while feed.step(other.state, other.events):
        pass
    assert all(ids(replay, user) == ids(other, user) != [] for user in ("u3", "u4"))


def test_a_state_that_is_fed_removes_users_as_the_list_grows(log, tmp_path, new_store):  # noqa: F811
    parts, draw = tmp_path / "parts", random.Random(1)
    parts.mkdir()
    states = []
    for name in ("early", "late", "never"):
        (folder := tmp_path / name).mkdir()
        states.append((Replay(log, CASES["labels"], folder, new_store(name), 0), Feed(parts)))
    early, late, never = states

    def step(replay, feed) -> None:
        while feed.step(replay.state, replay.events):
            pass

    def write(number: int, rows: list[dict]) -> None:
        pq.write_table(pa.Table.from_pylist(draw.sample(rows, len(rows)), KINDS), parts / f"{number}.parquet")

    for number in range(3):
        write(number, log[number * 100 : number * 100 + 100])
    step(*early)
    append_deletions(parts, deletion_of(parts, "u3", None))
    write(3, log[300:400])
    step(*early)
    step(*late)
    assert ids(early[0]) == ids(late[0])
    times = [row["timestamp"] for row in log[300:400] if row["user_id"] == "u3"]
    assert sorted(set(records_of(early[0].state, ["u3"])[0]["jfi time"].tolist())) == sorted({*times})
    for number in range(3):
        write(number, [row for row in log[number * 100 : number * 100 + 100] if row["user_id"] != "u3"])
    step(*never)
    assert ids(late[0]) == ids(never[0])
    counters = [{k: v for k, v in one.state.store.scan(b"k") if digest("u3") in k} for one, _ in states]
    assert counters[0].keys() == counters[1].keys() == counters[2].keys() and counters[1] == counters[2]


def test_a_user_who_is_deleted_over_http_is_in_no_file_of_the_server(exported, store, tmp_path):
    """State, log and log of requests, where the user has rows in a part, rows that wait, and requests."""
    (parts := tmp_path / "parts").mkdir()
    scorer = Scorer(exported.path, state=StateSettings(store, retention=Retention(parts=parts), is_logged=True))
    writer = PartWriter(store, scorer.state.layout, parts, rows=4)
    names = ["the-deleted-one", "another-one"]
    rows = [EVENT | {"user": names[n % 2], "event_id": n, "time": NOW + n} for n in range(6)]

    async def talk(client):
        await added(client, *rows[:4])
        while not [*parts.glob("0*")]:
            await asyncio.sleep(0.02)
        await added(client, *rows[4:])
        for name in names * 3:
            assert (await client.post("/score", json=request(name))).status == 200
        while len(b"".join(path.read_bytes() for path in (tmp_path / "requests").iterdir()).splitlines()) < 4:
            await asyncio.sleep(0.02)
        deleted = [await answer(await client.delete(f"/users/{names[0]}")) for _ in range(2)]
        assert deleted == [(200, {"deleted": True}), (200, {"deleted": False})]

    requests = partial(RequestLog, tmp_path / "requests", 1.0, 1 << 20)
    serve(scorer, talk, log=requests, tasks=[partial(write_parts, writer)])
    files = [path for folder in ("parts", "requests") for path in (tmp_path / folder).iterdir()]
    assert not any(names[0].encode() in path.read_bytes() for path in files)
    assert table(parts)["user"].to_pylist() == [names[1]] * 3
    assert [json.loads(bytes(line.request))["user"] for line in read_lines(tmp_path / "requests")] == [names[1]] * 3
    assert not any(names[0].encode() in key for key, _ in store.scan(b""))


@pytest.mark.parametrize("step", ["before the line", "before its removal from the state"])
def test_a_kill_within_a_deletion_leaves_the_user_nowhere_after_a_restart(log, tmp_path, new_store, monkeypatch, step):  # noqa: F811
    replay, writer, parts = logged(log, tmp_path, new_store())
    replay.state.add([replay.events(replay.body(log[:100]))])
    writer.flush()
    replay.state.add([replay.events(replay.body(log[100:150]))])  # rows that wait for a part
    assert "u3" in table(parts)["user_id"].to_pylist()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if step == "before the line":
            patch.setattr(deletions, "append_deletions", killed)
        else:
            patch.setattr(deletions.os, "fsync", killed)
        replay.state.delete("user", "u3")
    writer.close()
    PartWriter(replay.state.store, replay.state.layout, parts).flush()
    left = [row["user_id"] for row in log[:150] if row["user_id"] != "u3"]
    assert table(parts)["user_id"].to_pylist() == left and not ids(replay)
    assert {one.user for one in read_deletions(parts)} == {digest("u3").hex()}
    assert not list(replay.state.store.scan(DELETIONS))


def test_the_keys_of_users_are_found_by_digests(log, tmp_path, new_store):  # noqa: F811
    """Of another process than the one that was told the id: what is left is what a deletion by the id leaves."""
    stores = [new_store(name) for name in ("one", "other")]
    states = []
    for number, store in enumerate(stores):
        (folder := tmp_path / f"f{number}").mkdir()
        states.append(Replay(log, CASES["labels"], folder, store, 400).state)
        store.put([(other_key("u3"), bytes(17)), (b"qu3", bytes(16))])
    one, other = states
    before = {key for key, _ in stores[0].scan(b"")}
    gone = keys_of_users(stores[0].pages, {digest("u3"), digest("u4"), digest("nobody")}, one.counters)
    assert {b"uu3", b"iu3", b"qu3", b"uu4"} < {*gone} <= before and len({*gone}) == len(gone)
    stores[0].update(lambda get: dict.fromkeys(gone))
    assert all(other.delete("user", user) for user in ("u3", "u4"))
    left = [{key: value for key, value in store.scan(b"") if key != b"m"} for store in stores]
    assert left[0] == left[1]


def test_no_file_has_a_byte_of_a_deleted_user(log, tmp_path):  # noqa: F811
    """Of the log, and of the state once it is rewritten by the commands of docs/operations.md.

    Until then LMDB has what deleted records leave in its pages, and so has a compact copy alone.
    """
    named, name = (
        [row | {"user_id": "the-deleted-one"} if row["user_id"] == "u3" else row for row in log],
        "the-deleted-one",
    )
    store = LmdbStore(tmp_path / "state", create=True, max_bytes=1 << 26)
    replay, writer, parts = logged(named, tmp_path, store)
    for begin in range(0, 300, 50):
        replay.state.add([replay.events(replay.body(named[begin : begin + 50]))])
        if begin < 200:
            writer.step()
    assert name in table(parts)["user_id"].to_pylist() and replay.state.delete("user", name)
    writer.flush()
    assert name not in table(parts)["user_id"].to_pylist() and len(table(parts)) > 200
    left = dict(store.scan(b""))
    writer.close()
    store.close()
    for command in (["rewrite", "-e", "state", "-E", "new"], ["copy", "--compact", "-e", "new", "copy"]):
        subprocess.run([sys.executable, "-m", "lmdb", *command, "-S", "64"], cwd=tmp_path, check=True)
    before, after = ((tmp_path / name / "data.mdb").read_bytes() for name in ("state", "copy"))
    assert digest(name) in before  # if LMDB ever overwrites what is deleted, the docs may say less
    for content in (after, *(path.read_bytes() for path in parts.iterdir())):
        assert name.encode() not in content and digest(name) not in content
    assert b"u4" in after and len(after) <= len(before)
    store = LmdbStore(tmp_path / "copy", max_bytes=1 << 26)
    assert dict(store.scan(b"")) == left
    store.close()


@pytest.mark.parametrize("kind", ["a server", "others"])
def test_a_part_that_is_written_anew_while_it_is_fed_loses_no_row(log, tmp_path, new_store, monkeypatch, kind):  # noqa: F811
    """Killed after each transaction, with a part in between that has lost rows before and after the place."""
    monkeypatch.setattr("jfi.follow.feed._AT_ONCE", 40)
    replay, writer, parts = logged(log, tmp_path, new_store())
    fed = Replay(log, CASES["labels"], (tmp_path / "fed").mkdir() or tmp_path / "fed", new_store("fed"), 0)
    rows = log[:300]
    if kind == "a server":
        for begin in range(0, len(rows), 4):
            replay.state.add([replay.events(replay.body(rows[begin : begin + 4]))])
        writer.flush()
        assert len([*parts.glob("0*")]) > 1
        first = min(parts.glob("0*"))
        for path in parts.glob("0*"):
            if path != first:
                path.unlink()
        rows = rows[: info_of(first).num_rows]
    else:
        pq.write_table(pa.Table.from_pylist(rows, KINDS), parts / "a.parquet")

    def killed(_) -> None:
        raise KeyboardInterrupt

    deleted = ("u3", "u4")
    with pytest.raises(KeyboardInterrupt):
        Feed(parts).step(fed.state, fed.events, killed)
    assert 0 < fed.state.position < len(rows)
    for user in deleted:
        if kind == "a server":
            assert replay.state.delete("user", user)
        else:
            append_deletions(parts, deletion_of(parts, user, None))
    if kind == "a server":
        writer._delete()
    else:
        left = [row for row in rows if row["user_id"] not in deleted]
        pq.write_table(pa.Table.from_pylist(left, KINDS), parts / "a.parquet")
    while Feed(parts).step(fed.state, fed.events):
        pass
    counts = {user: rows_of(rows, user) for user in {row["user_id"] for row in rows}}
    assert {user: len(ids(fed, user)) for user in counts} == {
        user: 0 if user in deleted else count for user, count in counts.items()
    }
