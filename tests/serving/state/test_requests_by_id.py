"""A request by ids is read as one that carries the columns of the run's tables."""

import contextlib
import dataclasses
import json
import random

import commands
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("aiohttp")

from jfi.data import DataConfig, DataError, FeatureConfig, load_dataset
from jfi.data.io.blocks import find_table
from jfi.serving.audit import Audit
from jfi.serving.dataset_schema import schema_of
from jfi.serving.rebuild import Rebuilder
from jfi.serving.request_log import RequestLog
from jfi.serving.requests import BadRequestError, RequestReader
from jfi.serving.schema import Limits, Served
from jfi.serving.scorer import Scorer, StateSettings
from jfi.state.events import EventReader
from jfi.state.load import fill
from jfi.state.state import UserState, read_layout
from jfi.state.stores import StateError, open_store
from jfi.state.tables import write_tables

from ..test_server import serve
from .conftest import NOW, added, answer

ITEM = ("brand", "tags", "price", "kind", "slot")
USER = ("city", "likes", "income")
FEATURES = [
    *(FeatureConfig("brand", "item"), FeatureConfig("tags", "item"), FeatureConfig("price", "item", type="number")),
    *(FeatureConfig("kind", "item", hash_buckets=7), FeatureConfig("slot", "item", default="none")),
    *(FeatureConfig("city", "user"), FeatureConfig("likes", "user"), FeatureConfig("income", "user", type="number")),
    FeatureConfig("page", "context"),
]


def tables(folder) -> tuple[list[dict], list[dict], list[dict]]:
    """Writes a log of events and tables of items and users; returns their rows."""
    draw = random.Random(0)
    items = [
        {
            "item_id": f"i{number}",
            "brand": draw.choice(["b1", "b2", "ü", None]),
            "tags": [f"t{draw.randrange(5)}" for _ in range(draw.choice([0, 1, 3]))],
            "price": draw.choice([None, 1.5, -7.0, 1e6]),
            "kind": draw.choice(["k1", "k2", None]),
            "slot": draw.choice(["s", None]),
        }
        for number in range(20)
    ]
    users = [
        {"user_id": f"u{number}", "city": draw.choice(["a", None]), "likes": ["x", "y"][: number % 3], "income": number}
        for number in range(10)
    ]
    log = [
        {
            "user_id": f"u{draw.randrange(10)}",
            "item_id": f"i{draw.randrange(20)}",
            "timestamp": row,
            "rating": row % 6,
            "page": "top",
        }
        for row in range(200)
    ]
    for name, rows in (("items", items), ("users", users), ("log", log)):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    joined = [{**users[int(row["user_id"][1:])], **items[int(row["item_id"][1:])], **row} for row in log]
    pq.write_table(pa.Table.from_pylist(joined), folder / "joined.parquet")
    return items, users, log


@pytest.fixture(params=["tables", "the log alone"])
def learnt(request, tmp_path):
    """Rows of items and users, the section `data` of a run with or without tables of them, and what it has learnt."""
    items, users, log = tables(tmp_path)
    own = {name: str(tmp_path / f"{name}.parquet") for name in ("items", "users")}
    has_tables = request.param == "tables"
    config = DataConfig(
        interactions=str(tmp_path / ("log.parquet" if has_tables else "joined.parquet")),
        **(own if has_tables else {}),
        label="rating >= 4",
        features=FEATURES,
        statistics=[],
        max_history=20,
        max_slots=2,
    ).resolved()
    known = {row["item_id"] for row in log}
    items = items if has_tables else [row for row in items if row["item_id"] in known]
    return items, users, config, load_dataset(config).schema


@pytest.fixture
def by_id(learnt, new_store):
    """Rows of items and users, a reader of a state that was filled with them, and the state."""
    items, users, config, data = learnt
    schema, store = schema_of(config, data, True, False), new_store()
    fill(store, schema, config, data, None)
    return items, users, RequestReader(schema, Limits(100, 20), state=read_layout(store).info), store


def carrying(user: dict, items: list[dict]) -> dict:
    return {"user": user, "candidates": items, "context": {"page": "top"}, "time": 1000.0}


def assert_same(one, other) -> None:
    assert one.ids.keys() == other.ids.keys() and one.counts.keys() == other.counts.keys()
    for name in one.ids:
        np.testing.assert_array_equal(one.ids[name], other.ids[name], name)
    for name in one.counts:
        np.testing.assert_array_equal(one.counts[name], other.counts[name], name)
    np.testing.assert_array_equal(one.dense, other.dense)


def test_a_request_by_ids_is_that_which_carries_the_columns(by_id):
    items, users, reader, store = by_id
    state = UserState(store, reader)
    unknown = {"item_id": "new"} | dict.fromkeys(ITEM)
    for user in [*users, {"user_id": "new"} | dict.fromkeys(USER)]:
        rows = [*items, unknown]
        ids = [row["item_id"] for row in rows]
        (whole,) = state.fill([reader(carrying(user, rows))])
        forms = (ids, {"item_id": ids}, [{"item_id": one} for one in ids])
        for candidates in forms:
            for own in (user["user_id"], {"user_id": user["user_id"]}):
                (found,) = state.fill([reader(carrying(own, candidates))])
                assert_same(found, whole)
                assert found.stored.answer()["unknown_items"] == 1
                assert found.num_events == whole.num_events


def test_new_ids_without_a_table_get_the_columns_of_their_first_row(by_id):
    *_, reader, store = by_id
    state = UserState(store, reader, max_late=np.inf)
    events = EventReader(state.layout)
    full = {"brand": "b1", "tags": ["t1", "t2", "t3"], "price": 1.5, "kind": "k1", "slot": "s"}
    full |= {"city": "a", "likes": ["x", "y"], "income": 3.0}
    full = {name: value for name, value in full.items() if name in events.optional}
    later = {name: {str: "b2", float: 7.0, list: ["t4"]}[type(value)] for name, value in full.items()}
    assert set(ITEM) & full.keys()
    for new, first in {"full": full, "null": dict.fromkeys(full), "without": {}}.items():
        ids = {"item_id": new, "user_id": new}
        keys = [f"I{new}".encode(), f"U{new}".encode()]
        for number, columns in enumerate([first, later]):
            row = dict.fromkeys(events.required) | columns | ids | {"timestamp": 5000.0 + number}
            assert state.add([events([row])])[0].added == 1
        has_table = [of in state.layout.log.tables for of in ("item", "user")]
        assert [value is None for value in store.get(keys)] == has_table
        kept = [{} if is_table else first for is_table in has_table]
        user = {name: kept[1].get(name) for name in USER} | {"user_id": new}
        item = {name: kept[0].get(name) for name in ITEM} | {"item_id": new}
        (found,) = state.fill([reader(carrying(new, [new]))])
        (wanted,) = state.fill([reader(carrying(user, [item]))])
        assert_same(found, wanted)


def test_a_column_that_the_request_gives_wins(by_id):
    items, users, reader, store = by_id
    state, given = UserState(store, reader), {"price": 3.25, "tags": ["t9", "t1", "t2"]}
    (whole,) = state.fill([reader(carrying(users[1] | {"city": "b"}, [one | given for one in items]))])
    rows = [{"item_id": one["item_id"]} | given for one in items]
    (found,) = state.fill([reader(carrying({"user_id": "u1", "city": "b"}, rows))])
    assert_same(found, whole)
    by_ids = carrying({"user_id": "u1", "city": "b"}, [one["item_id"] for one in items])
    (found,) = state.fill([reader(by_ids | {"context": {"page": "top"} | given})])
    assert_same(found, whole)


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_the_training_code_reads_what_was_logged(learnt, by_id, tmp_path):
    """Of requests by id, with the columns that the tables have, and of times amid the log; items and users are new."""
    items, users, config, data = learnt
    *_, reader, store = by_id
    state, draw = UserState(store, reader), random.Random(0)
    log = RequestLog(tmp_path / "requests", 1.0, 1 << 30, lambda *_: None)
    for number in range(60):
        rows = [*draw.sample(items, draw.randrange(1, 4)), {"item_id": "new"} | dict.fromkeys(ITEM)]
        user = draw.choice([*users, {"user_id": "nobody"} | dict.fromkeys(USER)])
        whole = number % 2 == 0
        if number % 4 == 0:
            rows[0] = rows[0] | {"price": 2**60 + 1}
        body = carrying(user, rows) if whole else carrying(user["user_id"], [row["item_id"] for row in rows])
        body |= {
            "time": draw.choice([0.0, 40.0, 41.5, 199.0, 1e4]),
            "context": {"page": draw.choice(["top", "other", None])},
        }
        (read,) = state.fill([reader(body)])
        read.model = Served("a", "run", "c", "logits")
        log.add(str(number), json.dumps(body).encode(), [0.0] * len(rows), read, reader)
    log.close()
    score = lambda batch: np.zeros((len(batch.labels), 1), np.float32)  # noqa: E731
    rebuild = Rebuilder(data, config, None, score, find_table(config.interactions, "--log", config), [], batch_size=16)
    found = Audit(rebuild, "c", lambda logits, _: logits, 0.0, 20)(tmp_path / "requests")
    assert (found.compared, found.scores, found.features) == (60, 60, {})


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_requests_that_lack_what_no_state_has_are_named(by_id):
    _, _, reader, _ = by_id
    faults = {
        "candidates[0] lacks the field 'page'": {"context": {}},
        "candidates[0] lacks the field 'item_id'": {"candidates": [{}]},
        "user lacks the field 'user_id', by which the server knows the user": {"user": {"city": "a"}},
        "candidates[1] must be the id of an item, got None": {"candidates": ["i1", None]},
        "user must be the id of a user, got None": {"user": None},
        "candidates[1] must be at most 480 bytes, got 481": {"candidates": ["i1", "x" * 481]},
        "candidates[1] is an object, and candidates[0] is not": {"candidates": ["i1", {}]},
    }
    for why, change in faults.items():
        with pytest.raises(BadRequestError) as fault:
            reader(carrying("u1", ["i1", "i2"]) | change)
        assert str(fault.value).startswith(why)
    plain = RequestReader(reader.schema, reader.limits)
    with pytest.raises(BadRequestError, match="serve with a state that has it"):
        plain(carrying("u1", ["i1"]) | {"history": []})


@pytest.fixture
def rows_of_tiny(exported) -> dict[int, int]:
    """The category of each item of the tiny run's table."""
    rows = pq.read_table(exported.run.parent / "tables/items.parquet").to_pylist()
    return {row["item"]: row["category"] for row in rows}


async def scored(client, candidates) -> dict:
    body = {"user": "u", "candidates": candidates, "time": NOW + 60}
    status, told = await answer(await client.post("/score", json=body))
    assert status == 200, told
    return told


def test_a_server_knows_what_was_loaded_and_put(exported, tmp_path, rows_of_tiny, capsys):
    """The tiny run has a table of items, and no columns of users."""
    name, of = tmp_path / "users", rows_of_tiny
    options = ["state", "load", "--run", exported.run, "--state", name]
    carried = {"item": [3, 17], "category": [of[3], of[17]]}

    async def put(client):
        await added(client, {"user": "u", "timestamp": NOW, "item": 3, "category": 3, "rating": 5})
        by_ids, whole = await scored(client, [3, 17]), await scored(client, carried)
        assert by_ids["scores"] == whole["scores"] and "unknown_items" not in whole["state"]
        assert by_ids["state"] == {"events": 1, "time": NOW, "unknown_items": 0, "available": True}
        assert (await scored(client, [3, "new"]))["state"]["unknown_items"] == 1
        assert await answer(await client.put("/items/new", json={"category": 3})) == (200, {"stored": True})
        found = await scored(client, ["new"])
        assert found["scores"] == (await scored(client, {"item": ["new"], "category": [3]}))["scores"]
        assert found["state"]["unknown_items"] == 0
        status, told = await answer(await client.put("/items/new", json={"colour": 3}))
        assert status == 400 and told["error"].startswith("the item has an unknown field 'colour'")
        status, told = await answer(await client.put("/users/u", json={}))
        assert (status, told["error"]) == (400, "this state has no columns of users")
        assert (await client.put("/items/" + "x" * 481, json={})).status == 400
        for was_there in (True, False):
            assert await answer(await client.delete("/items/new")) == (200, {"deleted": was_there})
        assert (await scored(client, ["new"]))["state"]["unknown_items"] == 1

    async def after(client):
        found = (await scored(client, [3, 1000, 17]))["scores"]
        rows = {"item": [3, 1000, 17], "category": [of[17], of[17], of[17]]}
        assert found == (await scored(client, rows))["scores"]

    commands.run(*options, "--interactions", "none")
    pq.write_table(pa.table({"item": [3, 1000], "category": [of[17]] * 2}), tmp_path / "more.parquet")
    for talk in (put, after):
        with contextlib.closing(open_store(str(name))) as store:
            serve(Scorer(exported.path, state=StateSettings(store)), talk)
        commands.run(*options, "--items", tmp_path / "more.parquet")
        assert f"wrote {name}: columns of 2 items" in capsys.readouterr().out
    with pytest.raises(StateError, match=r"--users: the state .* has no columns of users"):
        commands.run(*options, "--users", tmp_path / "more.parquet")
    with pytest.raises(StateError, match="--interactions: a state that is there gets events by POST /events"):
        commands.run(*options, "--items", tmp_path / "more.parquet", "--interactions", "none")


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([{"brand": ["a", "b"]}, {"brand": []}], "'brand' has lists of values, but in training it had one value a row"),
        ([{"tags": "a"}] * 2, "'tags' has one value a row, but in training it had lists of values"),
    ],
)
def test_a_table_with_lists_in_place_of_values_is_refused(learnt, by_id, tmp_path, changes, why):
    """As many values as rows would be those of other items."""
    items, _, config, data = learnt
    *_, store = by_id
    path, before = tmp_path / "other.parquet", dict(store.scan(b"I"))
    pq.write_table(pa.Table.from_pylist([one | own for one, own in zip(items, changes, strict=False)]), path)
    with pytest.raises(DataError, match=f"other.parquet: column {why}"):
        write_tables(store, read_layout(store).info, dataclasses.replace(config, items=str(path)), data, ["item"])
    assert dict(store.scan(b"I")) == before
