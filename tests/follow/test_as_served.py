"""Random logs that a run follows, and that a server's state is sent or fed: all keep the same, bit for bit."""
# ruff: noqa: F811

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from serving.state.conftest import new_store, redis_socket  # noqa: F401

from jfi.data import load_dataset
from jfi.follow.feed import Feed
from jfi.follow.parts import Part
from jfi.follow.rows import PartRows, Reading
from jfi.follow.state import LogState, open_state, requests_of
from jfi.serving.requests import RequestReader
from jfi.serving.schema import Limits, Schema
from jfi.state.columns import layouts_of
from jfi.state.dictionaries import Dictionaries
from jfi.state.events import EventReader
from jfi.state.layout import CURSOR
from jfi.state.state import Added, UserState, read_layout
from jfi.state.stores import LmdbStore, Store
from jfi.state.user_rows import scan_records

from .followed_log import FEATURES, KINDS, config_of, make_rows, write

KNOWN, LATE = 150, 600.0
ALL = pa.schema([(one.name, pa.float64() if one.name == "price" else one.type) for one in KINDS])
ALL = ALL.append(pa.field("event", pa.string()))
CASES = {
    "plain": {},
    "statistics": {"statistics": ["item", "user", "user_item", "popularity"], "history": "position >= 3"},
    "sessions": {"statistics": ["session", "similar"], "session": "visit"},
    "ids of events": {"event_id": "event", "statistics": ["item", "event_values"]},
    "items": {"items": "items.parquet", "statistics": ["user_category"]},
}


def stream(rows: list[dict], draw: np.random.Generator) -> list[list[dict]]:
    """Rows as they come: some late, again, at one time, or before their labels, in bodies of any size."""
    sent, later = [], []
    for number, row in enumerate(rows):
        kind = draw.random()
        if kind < 0.2:
            later.append((number + int(draw.integers(1, 60)), row))
        elif kind < 0.4:
            later.append((number + int(draw.integers(1, 60)), row))
            sent.append((number, row | {"rating": None}))
        else:
            sent.append((number, row))
        if kind > 0.8:
            later.append((number + int(draw.integers(0, 90)), row | {"rating": 1, "device": "again"}))
    order = [row for _, row in sorted([*sent, *later], key=lambda pair: pair[0])]
    bodies = []
    while order:
        count = int(draw.choice([1, 2, 7, 40]))
        bodies.append(order[:count])
        order = order[count:]
    return bodies


def kept(store: Store) -> dict:
    """All that a state has, with texts in place of the store's numbers."""
    layout, names = read_layout(store), Dictionaries(store.get)
    found = {("statistics", key): value for key, value in store.scan(b"k")}
    for user, own in scan_records(store, layout):
        found["events", user] = [
            names.texts(one, own[one].ravel().tolist())
            if one in layout.columns and layout.columns[one].kind in ("text", "texts")
            else own[one].tobytes()
            for one in own.dtype.names
        ]
    found |= {("others", key): value for key, value in store.scan(b"i")}
    for of, table in layouts_of(layout.info).items():
        for key, value in store.scan(table.key("")):
            for name, values in table.decode([value]).items():
                flat = values[0] if isinstance(values, tuple) else values
                is_text = table.columns[name].kind in ("text", "texts")
                found[of, key, name] = names.texts(name, flat.tolist()) if is_text else flat.tobytes()
    return found


@pytest.mark.parametrize(
    ("case", "seed", "new_store"),
    [*((case, seed, "lmdb") for case in CASES for seed in range(2)), ("plain", 0, "redis")],
    indirect=["new_store"],
)
def test_a_log_that_is_followed_sent_and_fed_leaves_the_same_state(case, seed, tmp_path, new_store):
    draw = np.random.default_rng(seed)
    rows = [row | {"event": f"e{number}"} for number, row in enumerate(make_rows(500, seed))]
    if case == "plain":  # statistics are counted by an item's columns when training, and by a row's own in a server
        rows = [row | changing(row, draw) for row in rows]
    rows = [row | {"timestamp": row["timestamp"] // 40 * 40} for row in rows]  # many of one time
    write(tmp_path / "log.parquet", rows[:KNOWN], ALL)
    config = replace(config_of(tmp_path / "log.parquet", tmp_path).data, features=FEATURES, **CASES[case])
    if config.items is not None:
        items = {row["item_id"]: {name: row[name] for name in ("item_id", "tags", "brand")} for row in rows[::2]}
        config = replace(config, items=str(tmp_path / config.items))
        write(Path(config.items), list(items.values()), pa.schema([ALL.field(name) for name in items[0]]))
    config = config.resolved()
    schema, bodies = load_dataset(config).schema, stream(rows[KNOWN:], draw)
    bodies, requests = without(bodies, config.items), requests_of(config, schema)
    sent, fed = new_store("sent"), new_store("fed")
    open_state(tmp_path / "followed", config, schema).close()
    with closing(LmdbStore(tmp_path / "followed")) as store:
        for other in (sent, fed):
            other.put(pair for pair in store.scan(b"") if pair[0] != CURSOR)  # the place of the run that follows
        known = kept(store)
    with closing(open_state(tmp_path / "followed", config, schema)) as state:
        follow_bodies(state, Reading(config, schema, None, LATE), bodies, tmp_path)
    assert send(sent, requests, bodies) == feed(fed, requests, tmp_path / "parts")
    with closing(LmdbStore(tmp_path / "followed")) as store:
        wanted = kept(store)
    new = {key[:2] for key in wanted.keys() - known.keys() if key[0] in ("item", "user")}
    assert len(new) > 10 if config.items is None else not new
    for found in (kept(sent), kept(fed)):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert found[key] == value, key


def changing(row: dict, draw: np.random.Generator) -> dict:
    """Columns of an item and a user that are other ones in each row, and often missing."""
    columns = {"brand": f"b{draw.integers(5)}", "tags": row["tags"], "age": f"a{draw.integers(4)}"}
    lacks = draw.random() < 0.4
    return {name: None if lacks or draw.random() < 0.2 else value for name, value in columns.items()}


def follow_bodies(state: LogState, reading: Reading, bodies: list[list[dict]], folder: Path) -> None:
    for number, body in enumerate(bodies):
        path = folder / "parts" / f"{number:04d}.parquet"
        write(path, body, pa.schema([one for one in ALL if one.name in body[0]]))
        (work := folder / f"work-{number}").mkdir()
        found = PartRows(Part(path.name, path, 0, 0), state, reading, work)
        state.end_part(path.name, found.newest)
    state.commit()


def without(bodies: list[list[dict]], items: str | None) -> list[list[dict]]:
    """Bodies without the columns of a table of items."""
    apart = set() if items is None else {"tags", "brand"}
    return [[{name: row[name] for name in row if name not in apart} for row in body] for body in bodies]


def state_of(store: Store, requests: Schema) -> tuple[UserState, EventReader]:
    layout = read_layout(store)
    reader = RequestReader(requests, Limits(10, layout.max_history), state=layout.info)
    return UserState(store, reader, LATE), EventReader(layout)


def feed(store: Store, requests: Schema, folder: Path) -> tuple[int, int]:
    """Feeds parts; returns how many rows were there, and too late."""
    (state, events), parts, told = state_of(store, requests), Feed(folder), []
    while parts.step(state, events, told.append):
        pass
    assert len(told) == len(list(folder.iterdir()))
    return sum(one.repeated for one in told), sum(one.late for one in told)


def send(store: Store, requests: Schema, bodies: list[list[dict]]) -> tuple[int, int]:
    """Sends bodies, without the rows that are too late; returns how many rows were there, and too late."""
    (state, events), repeated, late = state_of(store, requests), 0, 0
    names = {*events.required, *events.optional}
    for body in bodies:
        rows = [{name: row[name] for name in row if name in names} for row in body]
        while rows:
            (result,) = state.add([events(rows)])
            if isinstance(result, Added):
                repeated += result.repeated
                break
            assert "older than the newest row of the user" in str(result)
            late += 1
            del rows[int(re.match(r"events\[(\d+)\]", str(result))[1])]
    assert repeated > 20 and late > 5
    return repeated, late
