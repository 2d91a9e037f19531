"""Users who are deleted from a log of parts and from a state: which rows and which bytes are left."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("lmdb")

from jfi.data import DataError
from jfi.state.deletions import LIST, Deletions, keys_of_users, read_deletions, rows_left, users_without
from jfi.state.layout import digest, other_key
from jfi.state.stores import LmdbStore

from .test_state_statistics import CASES, Replay, log  # noqa: F401

USERS = {
    "texts": (pa.array(["a", "b", None, "b", "c"]), ["b"], [0, 2, 4]),
    "large texts": (pa.array(["a", "7"], pa.large_string()), ["7"], [0]),
    "numbers": (pa.array([7, 8, None, 7]), ["7", "x"], [1, 2]),
    "dictionary": (pa.array(["a", "b", "b", None]).dictionary_encode(), ["b"], [0, 3]),
    "none": (pa.array([], pa.string()), ["b"], []),
    "nulls": (pa.nulls(2), ["b"], [0, 1]),
}


@pytest.mark.parametrize("name", USERS)
def test_rows_of_users_are_found_by_digests(name):
    ids, users, left = USERS[name]
    assert np.flatnonzero(rows_left(ids, {digest(user) for user in users})).tolist() == left


def part(folder, name: str, users: list, **options) -> list[int]:
    """Writes a part whose rows have numbers, which are returned."""
    numbers = [random.randrange(1 << 40) for _ in users]
    table = pa.table({"user": users, "n": numbers, "tags": [[f"t{one}"] for one in numbers]})
    pq.write_table(table.replace_schema_metadata({"of": name}), folder / name, **options)
    return numbers


def test_parts_are_written_anew_without_the_rows_of_deleted_users(tmp_path):
    users = [random.choice(["ann", "bob", "cid"]) for _ in range(1000)]
    one = part(tmp_path, "1.parquet", users, row_group_size=64)
    part(tmp_path, "2.parquet", ["cid"] * 3)
    part(tmp_path, "3.parquet", ["ann", "ann"])
    part(tmp_path, "_writing.parquet", ["ann"])
    deletions = Deletions(tmp_path, "user")
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert deletions.rewrite() == 0 and not (tmp_path / LIST).exists()
    deletions.add("ann")
    part(tmp_path, "4.parquet", ["ann", "bob"])  # who comes back
    deletions.add("bob")
    part(tmp_path, "5.parquet", ["ann", "bob"])
    found = read_deletions(tmp_path)
    assert [(one.user, one.last) for one in found] == [
        (digest("ann").hex(), "3.parquet"),
        (digest("bob").hex(), "4.parquet"),
    ]
    assert users_without(found, "3.parquet") == {digest("ann"), digest("bob")}
    assert users_without(found, "4.parquet") == {digest("bob")} and not users_without(found, "5.parquet")
    assert deletions.rewrite() == 3 and deletions.rewrite() == 0
    tables = {path.name: pq.read_table(path) for path in tmp_path.glob("*.parquet")}
    assert tables["1.parquet"]["n"].to_pylist() == [n for n, user in zip(one, users, strict=True) if user == "cid"]
    assert tables["1.parquet"].schema.metadata[b"of"] == b"1.parquet" and len(tables["3.parquet"]) == 0
    assert tables["3.parquet"].schema.equals(tables["1.parquet"].schema)
    assert [tables[f"{name}.parquet"]["user"].to_pylist() for name in (4, 5)] == [["ann"], ["ann", "bob"]]
    now = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert now["2.parquet"] == before["2.parquet"] and now["_writing.parquet"] == before["_writing.parquet"]
    again = read_deletions(tmp_path)
    assert users_without(again, "3.parquet") == {digest("ann"), digest("bob")} and all(
        one.is_rewritten for one in again
    )
    left = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.name[0] in "123" or path.name == LIST)
    assert b"ann" not in left and b"bob" not in left and b"cid" in left


def test_a_rewrite_that_was_stopped_is_done_by_the_next_one(tmp_path, monkeypatch):
    for number in range(3):
        part(tmp_path, f"{number}.parquet", ["ann", "cid"])
    Deletions(tmp_path, "user").add("ann")
    names, replace = [], Path.replace

    def stopped(path: Path, to: Path) -> None:
        names.append(to.name)
        if len(names) == 3:
            raise OSError(28, "No space left on device")
        replace(path, to)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "replace", stopped)
        Deletions(tmp_path, "user").rewrite()
    assert not read_deletions(tmp_path)[0].is_rewritten and Deletions(tmp_path, "user").rewrite() == 1
    assert all(pq.read_table(tmp_path / f"{number}.parquet")["user"].to_pylist() == ["cid"] for number in range(3))
    assert read_deletions(tmp_path)[0].is_rewritten


def test_a_damaged_list_is_named(tmp_path):
    (tmp_path / LIST).write_text('{"user": "00"}\n')
    with pytest.raises(DataError, match=f"{LIST}: the list of deleted users is damaged: .*last"):
        read_deletions(tmp_path)


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


def test_a_rewritten_folder_has_no_byte_of_a_deleted_user(log, tmp_path):  # noqa: F811
    """By the commands of docs/operations.md; a compact copy alone has what deleted records leave in their pages."""
    store = LmdbStore(tmp_path / "state", create=True, max_bytes=1 << 26)
    named = [row | {"user_id": "the-deleted-one"} if row["user_id"] == "u3" else row for row in log]
    state = Replay(named, CASES["labels"], tmp_path, store, 400).state
    assert state.delete("user", "the-deleted-one")
    left = dict(store.scan(b""))
    store.close()
    for command in (["rewrite", "-e", "state", "-E", "new"], ["copy", "--compact", "-e", "new", "copy"]):
        subprocess.run([sys.executable, "-m", "lmdb", *command, "-S", "64"], cwd=tmp_path, check=True)
    before, after = ((tmp_path / name / "data.mdb").read_bytes() for name in ("state", "copy"))
    assert digest("the-deleted-one") in before  # if LMDB ever overwrites what is deleted, the docs may say less
    assert b"the-deleted-one" not in after and digest("the-deleted-one") not in after and b"u4" in after
    assert len(after) <= len(before)
    store = LmdbStore(tmp_path / "copy", max_bytes=1 << 26)
    assert dict(store.scan(b"")) == left
    store.close()
