"""Random logs that a run follows, and that a server's state is sent or fed: all keep the same, bit for bit."""
# ruff: noqa: F811

import re
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from serving.state.conftest import new_store, redis_socket  # noqa: F401

from jfi.data import DataConfig, load_dataset
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
    "statistics": {"statistics": ["item", "user", "user_category", "popularity"], "history": "position >= 3"},
    "sessions": {"statistics": ["session", "similar", "user_item"], "session": "visit"},
    "ids of events": {"event_id": "event", "statistics": ["item", "event_values"]},
    "items": {"items": "items.parquet", "statistics": ["user_category"]},
}


def stream(rows: list[dict], draw: np.random.Generator) -> list[list[dict]]:
    """Rows as they come: some late, again, at one time, or before their labels, in bodies of any size and order."""
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
        if 0.7 < kind < 0.8:  # again with the id of the event, at another time
            sent.append((number, row | {"timestamp": row["timestamp"] + 100.0 * int(draw.integers(-2, 3))}))
        if kind > 0.8:
            later.append((number + int(draw.integers(0, 90)), row | {"rating": 1, "device": "again"}))
    order = [row for _, row in sorted([*sent, *later], key=lambda pair: pair[0])]
    bodies = []
    while order:
        count = int(draw.choice([1, 2, 7, 40]))
        bodies.append(order[:count][:: draw.choice([1, -1])])
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
    rows = rows_of(seed, draw)
    config = run_of(case, rows, tmp_path)
    schema, bodies = load_dataset(config).schema, stream(rows[KNOWN:], draw)
    requests = requests_of(config, schema)
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_a_log_that_is_followed_leaves_the_state_of_the_whole_log(case, seed, tmp_path):
    rows = rows_of(seed, np.random.default_rng(seed))
    config = run_of(case, rows, tmp_path)
    schema = load_dataset(config).schema
    with closing(open_state(tmp_path / "followed", config, schema)) as state:
        times = [row["timestamp"] for row in rows]
        cuts = [number for number in range(KNOWN, len(rows)) if times[number] != times[number - 1]][3::5]
        bodies = [rows[begin:end] for begin, end in pairwise([KNOWN, *cuts, len(rows)])]
        follow_bodies(state, Reading(config, schema, None, LATE), bodies, tmp_path)
    write(tmp_path / "whole.parquet", rows, schema_of_rows(rows))
    open_state(tmp_path / "whole", replace(config, interactions=str(tmp_path / "whole.parquet")), schema).close()
    with closing(LmdbStore(tmp_path / "followed")) as one, closing(LmdbStore(tmp_path / "whole")) as other:
        found, wanted = kept(one), kept(other)
    assert found.keys() == wanted.keys()
    names = [] if state.counters is None else state.counters.live.names.values()
    of_users = [one for one in names if "order" in one.dtype.names]
    for key, value in wanted.items():
        if key[0] != "statistics":
            assert found[key] == value, key
        for one in of_users:  # sums are rounded in another order
            if key[0] == "statistics" and key[1].startswith(one.prefix):
                was, whole = (np.frombuffer(own, one.dtype)[["time", "order"]] for own in (found[key], value))
                assert was.tolist() == whole.tolist(), key


def rows_of(seed: int, draw: np.random.Generator) -> list[dict]:
    """Rows of which many have one time, and whose items and users change their columns; ids are integers or texts."""
    rows = [row | changing(row, draw) | {"event": f"e{n}"} for n, row in enumerate(make_rows(500, seed))]
    for row in rows:
        row["timestamp"] = row["timestamp"] // 400 * 400
        user = row["user_id"][1:]
        row["user_id"], row["item_id"] = (user, row["item_id"]) if seed else (f"u{user}", f"number {row['item_id']}")
    assert any(row["brand"] is row["tags"] is None for row in rows)
    is_number = isinstance(rows[0]["item_id"], int)
    rows = list({(row["user_id"], row["item_id"], row["timestamp"]): row for row in rows}.values())
    assert len({(row["user_id"], row["timestamp"]) for row in rows}) < len(rows) - 20
    return sorted(rows, key=lambda row: (row["timestamp"], row["user_id"].zfill(3 * is_number), row["item_id"]))


def schema_of_rows(rows: list[dict]) -> pa.Schema:
    """The types of rows, whose items are integers or texts."""
    kind = pa.array([rows[0]["item_id"]]).type
    return ALL.set(ALL.get_field_index("item_id"), pa.field("item_id", kind))


def run_of(case: str, rows: list[dict], folder: Path) -> DataConfig:
    """Writes the first rows and a table of items; returns the section `data` of their run."""
    write(folder / "log.parquet", rows[:KNOWN], schema_of_rows(rows))
    config = replace(config_of(folder / "log.parquet", folder).data, features=FEATURES, **CASES[case])
    if config.items is not None:
        names = ("item_id", "tags", "brand")
        items = {row["item_id"]: {name: row[name] for name in names} for row in rows[::2]}
        config = replace(config, items=str(folder / config.items))
        write(Path(config.items), list(items.values()), pa.schema([schema_of_rows(rows).field(one) for one in names]))
    return config.resolved()


def changing(row: dict, draw: np.random.Generator) -> dict:
    """Columns of an item and a user that are other ones in each row, and often missing."""
    tags = [f"t{one}" for one in draw.choice(6, draw.integers(1, 4), replace=False)]
    columns = {"brand": f"b{draw.integers(5)}", "tags": tags, "age": f"a{draw.integers(4)}"}
    lacks = draw.random() < 0.4
    return {name: None if lacks or draw.random() < 0.2 else value for name, value in columns.items()}


def follow_bodies(state: LogState, reading: Reading, bodies: list[list[dict]], folder: Path) -> None:
    for number, body in enumerate(bodies):
        path = folder / "parts" / f"{number:04d}.parquet"
        write(path, body, schema_of_rows(body))
        (work := folder / f"work-{number}").mkdir()
        found = PartRows(Part(path.name, path, 0, 0), state, reading, work)
        state.end_part(path.name, found.newest)
    state.commit()


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
