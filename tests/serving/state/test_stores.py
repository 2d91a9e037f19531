"""Both stores: what they keep, under writers that meet, and what they say when they are full, down or slow."""

import os
import signal
import subprocess
import sys
import threading
from itertools import count

import pytest
from processes import context

from jfi.state import stores
from jfi.state.stores import LmdbStore, StateError, StoreUnavailableError, open_store

from .conftest import running_redis

#: Bytes that mean something to a glob, to a protocol, or to nobody.
ODD = [b"u*", b"u?", b"u[a]", b"u\\", b"u^", b"u\0", b"u\xff\xfe", b"u\r\n", b"u ", "uü日".encode(), b"u" + b"x" * 480]


@pytest.fixture(autouse=True)
def _no_pauses(request, monkeypatch):
    if "pause" not in request.node.name:
        monkeypatch.setattr(stores, "_PAUSE", 0.0)


@pytest.fixture
def store(new_store):
    return new_store()


def add_one(store, key: bytes) -> None:
    def change(get):
        (found,) = get([key])
        return {key: str(int(found or 0) + 1).encode()}

    store.update(change)


def test_values_are_those_written_last(store):
    assert store.get([]) == [] and store.get([b"a", b"b"]) == [None, None]
    store.put([(b"a", b"1"), (b"b", b""), (b"a", b"\0\xff" * 3000)])
    assert store.get([b"b", b"c", b"a", b"b"]) == [b"", None, b"\0\xff" * 3000, b""]
    seen = []

    def change(get):
        seen[:] = [get([]), get([b"a", b"c"]), get([b"b"])]
        return {b"a": None, b"b": None, b"c": b"3", b"never there": None}

    store.update(change)
    assert seen == [[], [b"\0\xff" * 3000, None], [b""]]
    assert store.get([b"a", b"b", b"c", b"never there"]) == [None, None, b"3", None]
    store.update(lambda get: {})
    assert store.get([b"c"]) == [b"3"]


def test_keys_of_odd_bytes_are_found_by_their_prefix_alone(new_store):
    store, other = new_store("s*[a]?^\\"), new_store("s")
    store.put((key, key[::-1]) for key in ODD)
    other.put([(b"u1", b"another store's"), (b"ux", b"")])
    assert store.get(ODD) == [key[::-1] for key in ODD]
    assert dict(store.scan(b"u")) == {key: key[::-1] for key in ODD}
    assert dict(store.scan(b"")) == {key: key[::-1] for key in ODD}
    for key in ODD:
        wanted = {one: one[::-1] for one in ODD if one.startswith(key)}
        assert dict(store.scan(key)) == wanted
    assert dict(store.scan(b"v")) == {} and dict(other.scan(b"u1")) == {b"u1": b"another store's"}


def test_many_keys_are_written_and_scanned_once_each(store):
    wanted = {b"u%d" % number: os.urandom(number % 50) for number in range(12_345)}
    store.put(wanted.items())
    store.put([(b"t", b"of another prefix")])
    found = list(store.scan(b"u"))
    assert len(found) == len(wanted) and dict(found) == wanted


def test_a_scan_of_redis_gives_each_key_once(redis_socket, tmp_path, monkeypatch):
    """Redis gives some several times while its table of keys grows or shrinks."""
    store = open_store(f"unix://{redis_socket}?prefix={tmp_path.name}", timeout=10.0)
    wanted = {b"u%d" % number: b"%d" % number for number in range(2500)}
    store.put(wanted.items())
    once = list(store._reads.own.scan_iter(match=f"{tmp_path.name}:*"))
    assert len(once) == 2500
    monkeypatch.setattr(store._reads.own, "scan_iter", lambda **_: iter([*once[:1100], *once[:1100], *once]))
    found = list(store.scan(b"u"))
    assert len(found) == 2500 and dict(found) == wanted
    store.close()


def test_a_large_value_is_whole(store):
    value = os.urandom(3 << 20)
    store.update(lambda get: {b"a": value})
    assert store.get([b"a"]) == [value]


def test_an_update_that_fails_writes_nothing(store):
    store.put([(b"a", b"1")])

    def change(get):
        assert get([b"a"]) == [b"1"]
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        store.update(change)
    assert dict(store.scan(b"")) == {b"a": b"1"}
    add_one(store, b"a")  # nothing is held by the one that failed
    assert store.get([b"a"]) == [b"2"]


def test_updates_of_threads_lose_nothing(store):
    threads = [threading.Thread(target=lambda: [add_one(store, b"n") for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.get([b"n"]) == [b"100"]


def add_many(name: str, times: int) -> None:
    store = open_store(name, timeout=10.0)
    for _ in range(times):
        add_one(store, b"n")
    store.close()


def test_updates_of_processes_lose_nothing(new_store):
    store = new_store()
    processes = [context().Process(target=add_many, args=(new_store.names[0], 150)) for _ in range(2)]
    for process in processes:
        process.start()
    for _ in range(150):
        add_one(store, b"n")
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert store.get([b"n"]) == [b"450"]


def test_an_update_of_redis_is_tried_again_on_a_conflict(redis_socket, tmp_path):
    name = f"unix://{redis_socket}?prefix={tmp_path.name}"
    store, other, tries = open_store(name, timeout=10.0), open_store(name, timeout=10.0), count(1)
    store.put([(b"a", b"1")])

    def change(get):
        found, number = get([b"a"]), next(tries)
        if number <= 2:
            other.put([(b"a", b"written meanwhile %d" % number)])
        return {b"b": found[0], b"a": None}

    store.update(change)
    assert next(tries) == 4 and dict(store.scan(b"")) == {b"b": b"written meanwhile 2"}

    def always(get):
        get([b"b"])
        other.put([(b"b", b"again")])
        return {b"c": b""}

    with pytest.raises(StoreUnavailableError, match="Redis: other servers have written the same keys 100 times"):
        store.update(always)
    assert dict(store.scan(b"")) == {b"b": b"again"}
    store.close()
    other.close()


def test_an_update_of_redis_whose_answer_is_lost_is_not_tried_again(redis_socket, tmp_path, monkeypatch):
    """It may have been written: what it adds would be there twice."""
    valkey = pytest.importorskip("valkey")
    pipeline = valkey.client.Pipeline
    execute, tries = pipeline._execute_transaction, []

    def lose_answer(self, *given):
        execute(self, *given)
        self.watching = True  # the answer to EXEC has not come
        raise valkey.ConnectionError("the answer was lost")

    def change(get):
        tries.append(get([b"a"]))
        return {b"a": b"1"}

    monkeypatch.setattr(pipeline, "_execute_transaction", lose_answer)
    store = open_store(f"unix://{redis_socket}?prefix={tmp_path.name}", timeout=10.0)
    with pytest.raises(StoreUnavailableError, match="Redis: the answer was lost"):
        store.update(change)
    assert tries == [[None]] and store.get([b"a"]) == [b"1"]
    store.close()


def one_line(fault: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(fault.value)
    return str(fault.value)


def test_a_full_folder_keeps_what_it_has(tmp_path):
    store = LmdbStore(tmp_path / "small", create=True, max_bytes=1 << 18)
    store.put([(b"a", b"1")])
    with pytest.raises(StoreUnavailableError) as fault:
        store.update(lambda get: {b"a": b"2", **{b"u%d" % number: bytes(5000) for number in range(60)}})
    assert "LMDB: " in one_line(fault) and "MDB_MAP_FULL" in str(fault.value)
    with pytest.raises(StoreUnavailableError, match="MDB_MAP_FULL"):
        store.put((b"u%d" % number, bytes(5000)) for number in range(60))
    assert dict(store.scan(b"")) == {b"a": b"1"}
    add_one(store, b"a")
    store.close()
    store = LmdbStore(tmp_path / "small", max_bytes=1 << 22)  # a larger limit is enough to go on
    store.put((b"u%d" % number, bytes(5000)) for number in range(60))
    assert store.get([b"a"]) == [b"2"] and len(list(store.scan(b"u"))) == 60
    store.close()


def test_a_full_redis_keeps_what_it_has(tmp_path):
    with running_redis(tmp_path) as (socket, _):
        store = open_store(f"unix://{socket}", timeout=10.0)
        store.put([(b"a", b"1")])
        store._reads.own.config_set("maxmemory", "1kb")
        with pytest.raises(StoreUnavailableError) as fault:
            store.update(lambda get: {b"a": b"2", b"b": b"what the user did\n) of pipeline"})
        assert one_line(fault) == "Redis: command not allowed when used memory > 'maxmemory'"  # and no user's events
        with pytest.raises(StoreUnavailableError, match="maxmemory"):
            store.put([(b"b", b"")])
        assert dict(store.scan(b"")) == {b"a": b"1"}
        store._reads.own.config_set("maxmemory", "0")
        add_one(store, b"a")
        assert dict(store.scan(b"")) == {b"a": b"2"}
        store.close()


def test_the_password_of_a_redis_is_that_of_the_environment(tmp_path, monkeypatch):
    secret = "p@ss:w/rd#%20"
    with running_redis(tmp_path) as (socket, _):
        before = open_store(f"unix://{socket}", timeout=10.0)
        before._reads.own.config_set("requirepass", secret)
        with pytest.raises(StoreUnavailableError, match="Authentication"):
            open_store(f"unix://{socket}", timeout=10.0).get([b"a"])
        monkeypatch.setenv("JFI_STATE_PASSWORD", secret)
        store = open_store(f"unix://{socket}", timeout=10.0)
        store.put([(b"a", b"1")])
        assert store.get([b"a"]) == [b"1"]
        for one in (before, store):
            one.close()


def test_a_redis_that_is_stopped_or_gone_is_named_and_comes_back(tmp_path):
    calls = {
        "get": lambda store: store.get([b"a"]),
        "update": lambda store: add_one(store, b"b"),
        "put": lambda store: store.put([(b"c", b"")]),
        "scan": lambda store: list(store.scan(b"")),
    }
    with running_redis(tmp_path) as (socket, process):
        store = open_store(f"unix://{socket}", timeout=0.1, write_timeout=0.2)
        store.put([(b"a", b"1")])
        process.send_signal(signal.SIGSTOP)
        for name, call in calls.items():
            seconds = 0.1 if name in ("get", "scan") else 0.2
            with pytest.raises(StoreUnavailableError, match=f"^Redis did not answer in {seconds} s$") as fault:
                call(store)
            one_line(fault)
        process.send_signal(signal.SIGCONT)
        assert store.get([b"a"]) == [b"1"]
        process.kill()
        process.wait()
        for call in calls.values():
            with pytest.raises(StoreUnavailableError, match="Redis: ") as fault:
                call(store)
            one_line(fault)
    with running_redis(tmp_path) as (again, _):
        assert again == socket
        add_one(store, b"b")  # the same client goes on
        assert store.get([b"b"]) == [b"1"]
    store.close()


def test_a_redis_that_has_not_answered_is_not_called_in_a_pause_after_it(tmp_path, monkeypatch):
    with running_redis(tmp_path) as (socket, process):
        store = open_store(f"unix://{socket}", timeout=0.1, write_timeout=0.1)
        store.put([(b"a", b"1")])
        process.send_signal(signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match=r"^Redis did not answer in 0\.1 s$"):
                store.get([b"a"])
        process.send_signal(signal.SIGCONT)
        add_one(store, b"a")  # writes have a pause of their own
        with pytest.raises(StoreUnavailableError, match=r"^Redis did not answer in 0\.1 s$"):
            store.get([b"a"])
        monkeypatch.setattr(stores.time, "monotonic", lambda: store._reads._until)
        assert store.get([b"a"]) == [b"2"]
        store.close()


def test_a_redis_that_evicts_users_is_refused(tmp_path):
    with running_redis(tmp_path) as (socket, _):
        store = open_store(f"unix://{socket}", timeout=10.0)
        for policy in ("noeviction", "volatile-lru"):
            store._reads.own.config_set("maxmemory-policy", policy)
            store.check()
        store._reads.own.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(
            StateError, match=r"socket: its maxmemory-policy is allkeys-lru.*set it to noeviction"
        ) as fault:
            store.check()
        one_line(fault)
        store.close()


def test_a_folder_that_is_no_store_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/data.mdb").write_bytes(b"no store" * 5000)
    for name in ("nothing", "empty", "file"):
        why = f"{name} is not a state of users: it has no data.mdb; `jfi state load` makes one"
        with pytest.raises(StateError, match=why) as fault:
            open_store(str(tmp_path / name))
        one_line(fault)
    with pytest.raises(StateError, match="damaged cannot be opened: ") as fault:
        open_store(str(tmp_path / "damaged"))
    one_line(fault)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://localhost:port/0", "cannot be used: "),
        ("redis://localhost/0?prefx=clicks", "cannot be used: .*prefx"),
        ("unix:///nowhere/socket?db=first", "cannot be used: "),
        ("redis://localhost/0?prefix=jfi:users", "cannot be used: prefix is 'jfi:users', must have no colon"),
    ],
)
def test_a_wrong_url_is_named(url, why):
    with pytest.raises(StateError, match=why) as fault:
        open_store(url)
    assert one_line(fault).startswith(url)


@pytest.mark.parametrize(("package", "name"), [("lmdb", "state"), ("valkey", "redis://localhost/0")])
def test_a_missing_package_is_named(package, name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StateError, match=rf"{package}.*pip install 'jfi\[serve\]'") as fault:
        open_store(name, create=True)
    one_line(fault)
    assert not list(tmp_path.iterdir())


_READS_AND_DIES = """
import os, sys
from jfi.state.stores import LmdbStore
rows = LmdbStore(__import__("pathlib").Path(sys.argv[1])).scan(b"")
next(rows)
os.kill(os.getpid(), 9)
"""


def test_the_next_write_forgets_a_reader_that_was_killed(tmp_path):
    """Its snapshot would keep all pages that are freed from then on: the file would only grow."""
    store = LmdbStore(tmp_path / "state", create=True)
    store.put([(b"a", b"1")])
    for write in (lambda: store.put([(b"a", b"2")]), lambda: add_one(store, b"a")):
        process = subprocess.run([sys.executable, "-c", _READS_AND_DIES, str(tmp_path / "state")], check=False)
        assert process.returncode == -signal.SIGKILL
        assert len(store._environment.readers().splitlines()) == 2  # a title, and the reader
        write()
        assert "no active readers" in store._environment.readers()
    store.close()
