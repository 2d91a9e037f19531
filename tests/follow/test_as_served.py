"""Random logs, read by a run that follows them and sent to a server's state: both keep the same, bit for bit."""

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jfi.data import load_dataset
from jfi.follow.parts import Part
from jfi.follow.rows import PartRows, Reading
from jfi.follow.state import LogState, open_state, requests_of
from jfi.serving.requests import RequestReader
from jfi.serving.schema import Limits, Schema
from jfi.state.columns import layouts_of
from jfi.state.dictionaries import Dictionaries
from jfi.state.events import EventReader
from jfi.state.state import Added, UserState, read_layout, scan_records
from jfi.state.stores import LmdbStore, Store

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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
def test_a_log_that_is_followed_and_sent_leaves_the_same_state(case, seed, tmp_path):
    draw = np.random.default_rng(seed)
    rows = [row | {"event": f"e{number}"} for number, row in enumerate(make_rows(500, seed))]
    rows = [row | {"timestamp": row["timestamp"] // 40 * 40} for row in rows]  # many of one time
    write(tmp_path / "log.parquet", rows[:KNOWN], ALL)
    config = replace(config_of(tmp_path / "log.parquet", tmp_path).data, features=FEATURES, **CASES[case])
    if config.items is not None:
        items = {row["item_id"]: {name: row[name] for name in ("item_id", "tags", "brand")} for row in rows[::2]}
        config = replace(config, items=str(tmp_path / config.items))
        write(Path(config.items), list(items.values()), pa.schema([ALL.field(name) for name in items[0]]))
    config = config.resolved()
    schema, bodies = load_dataset(config).schema, stream(rows[KNOWN:], draw)
    with closing(open_state(tmp_path / "followed", config, schema)) as state:
        follow_bodies(state, Reading(config, schema, None, LATE), bodies, tmp_path)
    open_state(tmp_path / "sent", config, schema).close()
    with closing(LmdbStore(tmp_path / "followed")) as one, closing(LmdbStore(tmp_path / "sent")) as other:
        repeated, late = send(other, requests_of(config, schema), without(bodies, config.items))
        assert repeated > 20 and late > 5
        found, wanted = kept(one), kept(other)
    assert {key for key in found.keys() ^ wanted.keys() if key[0] not in ("item", "user")} == set()
    for key, value in wanted.items():
        assert found[key] == value, key


def follow_bodies(state: LogState, reading: Reading, bodies: list[list[dict]], folder: Path) -> None:
    for number, body in enumerate(bodies):
        path = folder / f"{number}.parquet"
        write(path, body, ALL)
        (work := folder / f"work-{number}").mkdir()
        found = PartRows(Part(path.name, path, 0, 0), state, reading, work)
        state.end_part(path.name, found.newest)
    state.commit()


def without(bodies: list[list[dict]], items: str | None) -> list[list[dict]]:
    """Bodies without the columns of a table of items."""
    apart = set() if items is None else {"tags", "brand"}
    return [[{name: row[name] for name in row if name not in apart} for row in body] for body in bodies]


def send(store: LmdbStore, requests: Schema, bodies: list[list[dict]]) -> tuple[int, int]:
    """Sends bodies, without the rows that are too late; returns how many rows were there, and too late."""
    layout = read_layout(store)
    reader = RequestReader(requests, Limits(10, layout.max_history), state=layout.info)
    state, events, repeated, late = UserState(store, reader, LATE), EventReader(layout), 0, 0
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
    return repeated, late
