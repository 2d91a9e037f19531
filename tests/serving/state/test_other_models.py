"""One state, and models with other vocabularies, intervals, hash buckets and crosses: each reads it as its own."""

import random
from dataclasses import replace

import commands
import numpy as np
import pyarrow.parquet as pq
import pytest

from jfi.events.groups import HALF_LIVES, StatisticsSettings
from jfi.serving.requests import RequestReader
from jfi.serving.schema import Field, Limits, PolicyFields, Schema
from jfi.state.dictionaries import text_key
from jfi.state.events import EventReader
from jfi.state.export import export_events
from jfi.state.layout import layout_of
from jfi.state.state import UserState, write_layout
from jfi.state.stores import StateError

from ..test_columns import assert_same
from .adding import LOG, records_of

NOW = 1_700_000_000.0
FIELDS = [
    Field("item", "category", ["history_item"]),
    Field("action", "category", ["history_action"], default="view"),
    Field("tags", "slots", ["history_tags_0", "history_tags_1"]),
    Field("both", "cross", ["history_both"], columns=["item", "action"]),
    Field("seconds", "quantile", ["history_seconds"], edges=[1.0, 5.0]),
    Field("city", "category", ["history_city"], num_buckets=7),
    Field("age", "age", num_buckets=8),
]
KNOWN = {"item": ["1", "2", "3"], "action": ["view", "buy"], "tags": ["a", "b"], "both": ["1\x1fview", "2\x1fbuy"]}
SCHEMA = Schema(user=[], candidate=[], event=FIELDS, vocabularies=KNOWN, user_id="user", item_id="item")
#: Columns of the requests' events.
NAMES = ["item", "action", "tags", "seconds", "city"]


def changed(name: str, **change) -> Schema:
    """The schema with another field."""
    return replace(SCHEMA, event=[replace(one, **change) if one.name == name else one for one in FIELDS])


def knowing(**values: list[str]) -> Schema:
    return replace(SCHEMA, vocabularies=KNOWN | values)


def rows(count: int = 200) -> list[dict]:
    draw, found = random.Random(0), []
    for number in range(count):
        row = {"user": f"u{draw.randrange(4)}", "time": NOW + number // 2, "event_id": number}
        row |= {"item": draw.choice([1, 2, 3, 4, 50, 60]), "action": draw.choice(["view", "buy", "share", None])}
        tags = draw.choice([None, [], ["a"], ["new", "b"], ["b", "x y", "a"]])
        row |= {"tags": tags, "seconds": draw.choice([0, 3, 9, None]), "city": draw.choice(["Bonn", "Köln", None])}
        found.append(row)
    return found


def reader(schema: Schema, max_history: int = 100) -> RequestReader:
    return RequestReader(schema, Limits(1, max_history), state=layout_of(SCHEMA, max_history).info)


def filled(store, schema: Schema, events: list[dict], max_history: int = 100) -> UserState:
    layout = layout_of(schema, max_history, LOG)
    write_layout(store, layout)
    state, read = UserState(store, reader(schema, max_history), max_late=np.inf), EventReader(layout)
    for begin in range(0, len(events), 50):
        state.add([read(events[begin : begin + 50])])
    return state


SCHEMAS = {
    "the same": SCHEMA,
    "grown": knowing(
        item=[*KNOWN["item"], "4", "9"], tags=[*KNOWN["tags"], "x y"], both=[*KNOWN["both"], "50\x1fshare"]
    ),
    "another order": knowing(item=["50", "3", "4", "1", "2"], action=["share", "buy", "view"]),
    "shrunk": knowing(item=["2"], action=["buy"], tags=[], both=[]),
    "none in common": knowing(item=["x"], action=["y"], tags=["z"]),
    "buckets": changed("item", num_buckets=5),
    "other buckets": changed("city", num_buckets=11),
    "no buckets": replace(changed("city", num_buckets=0), vocabularies=KNOWN | {"city": ["Bonn"]}),
    "a table that grows": changed("item", capacity=10),
    "buckets of lists": changed("tags", num_buckets=9),
    "buckets of crosses": changed("both", num_buckets=11),
    "another cross": changed("both", columns=["item", "city"]),
    "another default": changed("action", default="share"),
    "no default": changed("action", default=None),
    "other intervals": changed("seconds", edges=[0.0, 1.0, 6.0], default=7.0),
    "fewer fields": replace(SCHEMA, event=[one for one in FIELDS if one.name not in ("tags", "city")]),
    "fewer slots": changed("tags", keys=["history_tags_0"]),
}


def histories(read: RequestReader, sent: list[dict], now: float) -> dict[str, object]:
    """By user the request with the events, in the order of the state, as a caller would send it."""
    names = [name for name in NAMES if any(one.name == name for one in read.schema.event)]
    found = {}
    for user in sorted({row["user"] for row in sent}):
        own = [row for row in sent if row["user"] == user]
        own.sort(key=lambda row: (row["time"], row["item"] or 0) if all(r["item"] for r in own) else row["time"])
        found[user] = [{name: row[name] for name in names} | {"age": now - row["time"]} for row in own]
    return found


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_model_reads_what_its_own_requests_say(new_store, name):
    """Also of events that come later, with new values, through the model that the state was not made for."""
    schema, events, now = SCHEMAS[name], [row | {"time": NOW + i} for i, row in enumerate(rows())], NOW + 1000
    state = filled(new_store(), SCHEMA, events[:150])
    other = UserState(state.store, reader(schema), max_late=np.inf)
    other.add([EventReader(other.layout)([*events[150:], events[0] | {"item": "late", "event_id": "x", "user": "v"}])])
    events.append(events[0] | {"item": "late", "user": "v"})
    for one in (other, state):
        for user, history in histories(one.reader, events, now).items():
            (found,) = one.fill([one.reader({"user": user, "candidates": [{}], "time": now})])
            assert_same(
                replace(found, stored=None), one.reader({"user": {}, "candidates": [{}], "history": history}), []
            )


def test_a_shorter_history_keeps_the_newest(new_store):
    events = [row | {"user": "u", "time": NOW + i} for i, row in enumerate(rows(160))]
    state = filled(new_store(), SCHEMA, events)
    short = UserState(state.store, reader(SCHEMA, 10))
    (found,) = short.fill([short.reader({"user": "u", "candidates": [{}], "time": NOW + 1000})])
    (whole,) = state.fill([state.reader({"user": "u", "candidates": [{}], "time": NOW + 1000})])
    assert found.num_events == 10 and found.ids["history_item"].tolist() == whole.ids["history_item"][-10:].tolist()
    short.add([EventReader(short.layout)([events[0] | {"time": NOW + 500, "event_id": "new"}])])
    assert len(records_of(state, ["u"])[0]) == 161  # a server that reads less keeps as much


@pytest.mark.parametrize(
    ("schema", "max_history", "why"),
    [
        (SCHEMA, 101, "the state keeps 100 events of a user, and the model reads 101; load it"),
        (
            replace(
                SCHEMA, event=[*FIELDS, Field("shop", "category", ["history_shop"])], vocabularies=KNOWN | {"shop": []}
            ),
            100,
            "the events of the state have no field 'shop', which the model reads; load them",
        ),
        (
            replace(SCHEMA, policy=PolicyFields("dwell", None, None)),
            100,
            "the events of the state have no field 'dwell' that is the dwell of the model's policy",
        ),
        (
            changed("tags", keys=["history_tags_0", "history_tags_1", "history_tags_2"]),
            100,
            "the field 'tags' of the state's events has the first 2 values of a list, and the model reads 3; load them",
        ),
        (
            changed("seconds", kind="category", edges=[], num_buckets=3),
            100,
            "the field 'seconds' of the state's events has numbers, and the model reads texts; load them",
        ),
    ],
    ids=["longer", "new field", "policy", "more slots", "another kind"],
)
def test_what_the_state_does_not_have_is_refused_by_name(new_store, schema, max_history, why):
    state = filled(new_store(), SCHEMA, rows(20))
    with pytest.raises(StateError, match=why) as fault:
        UserState(state.store, reader(schema, max_history))
    assert "\n" not in str(fault.value)


def test_statistics_of_another_model_are_read_or_refused_by_name(new_store):
    past = StatisticsSettings("user", "item", ["popularity"], 10, list(HALF_LIVES), True, 3, [], {})
    counted = new_store()
    write_layout(counted, layout_of(replace(SCHEMA, statistics=past), 100, LOG))
    grown = replace(past, num_known=5)
    assert UserState(counted, reader(replace(SCHEMAS["grown"], statistics=grown))).counters.settings == grown
    assert UserState(counted, reader(SCHEMA)).counters is not None  # of a model that reads none: they are counted
    other = replace(past, half_lives=[60.0, *HALF_LIVES[1:]])
    with pytest.raises(StateError, match=r"has other statistics of the past, half_lives .* and not \[60.0, "):
        UserState(counted, reader(replace(SCHEMA, statistics=other)))


def test_a_policy_reads_the_columns_that_the_model_reads_too(new_store):
    policy = replace(SCHEMA, policy=PolicyFields("dwell", "action", "session"))
    events = [row | {"dwell": i / 7, "session": f"s{i // 5}"} for i, row in enumerate(rows(60))]
    layout = layout_of(policy, 100, LOG)
    assert [one.kind for one in layout.columns.values()] == [
        "text",
        "text",
        "texts",
        "number",
        "text",
        "number",
        "session",
    ]
    records = EventReader(layout)(events).records
    assert records["dwell"].tolist() == [row["dwell"] for row in events]
    assert len(np.unique(records["session"])) == 12 and new_store


def test_an_export_has_the_values_that_were_sent(new_store, tmp_path, monkeypatch):
    """Also values that get their number after the export has begun."""
    state = filled(new_store(), SCHEMA, rows(50))
    scan = type(state.store).scan
    more = [row | {"item": f"late {i}", "event_id": f"x{i}"} for i, row in enumerate(rows(9))]

    def writing(store, prefix):
        if prefix == b"u" and more:
            state.add([EventReader(state.layout)(more)])
            more.clear()
        return scan(store, prefix)

    monkeypatch.setattr(type(state.store), "scan", writing)
    assert export_events(state.store, tmp_path / "events.parquet") == (4, 59)
    found = pq.read_table(tmp_path / "events.parquet").to_pylist()

    def shown(row: dict, item: str | None) -> tuple:
        seconds = None if row["seconds"] is None else float(row["seconds"])
        return row["user"], row["time"], item, row["action"], tuple((row["tags"] or [])[:2]), seconds, row["city"]

    wanted = [shown(row, str(row["item"])) for row in rows(50)]
    wanted += [shown(row, f"late {i}") for i, row in enumerate(rows(9))]
    assert sorted(map(str, (shown(row, row["item"]) for row in found))) == sorted(map(str, wanted))


#: What is done to a state, by keys and values, and what is said of it.
DAMAGE = {
    "description": (lambda store: {b"m": b"{}"}, "its description: "),
    "length": (lambda store: {b"uu1": store.get([b"uu1"])[0] + b"x"}, "the events of user 'u1': "),
    "number": (
        lambda store: {b"uu1": b"\x7f" * len(store.get([b"uu1"])[0])},
        "the values of 'item': there is none of number ",
    ),
    "user": (lambda store: {b"u\xff": b""}, "the id of a user: "),
    "lost text": (lambda store: {text_key("item", 1): None}, "the values of 'item': "),
    "text": (lambda store: {text_key("item", 1): b"\xff"}, "the values of 'item': "),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_is_exported_by_nobody(new_store, tmp_path, capsys, name):
    state, (damage, why) = filled(new_store("state"), SCHEMA, rows()), DAMAGE[name]
    changes = damage(state.store)
    state.store.update(lambda get: changes)
    if "text" in name:  # nor is a request answered with it
        fresh = UserState(state.store, reader(SCHEMA))
        with pytest.raises(StateError, match=r"^the state of users is damaged: the values of 'item': [^\n]*$"):
            fresh.fill([fresh.reader({"user": user, "candidates": [{}], "time": NOW + 999}) for user in ("u0", "u1")])
    state.store.close()
    out = tmp_path / "events.parquet"
    assert commands.call("state", "export", "--state", new_store.names[0], "--out", out) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: the state of users is damaged: {why}") and said.count("\n") == 1
    assert not out.exists()


def test_a_number_is_given_to_no_second_value_where_the_count_of_values_is_lost(new_store):
    def event(user: str, action: str) -> list[dict]:
        return [
            {
                "user": user,
                "time": NOW + len(action),
                "item": 1,
                "action": action,
                "tags": [],
                "seconds": 0,
                "city": None,
            }
        ]

    state, read = filled(new_store("state"), SCHEMA, []), EventReader(layout_of(SCHEMA, 100, LOG))
    state.add([read(event("u", "maybe"))])
    before = dict(state.store.scan(b"")) | {b"caction": None}
    state.store.update(lambda get: before)
    again = UserState(state.store, state.reader)
    assert len(again.add([read(event("v", "maybe"))])) == 1  # a value that has a number
    with pytest.raises(StateError, match="it has lost the number of values of 'action'; restore a backup"):
        again.add([read(event("v", "perhaps"))])
    (records,) = records_of(again, ["u"])
    assert again.texts("action", records["action"].tolist()) == ["maybe"]
    assert state.store.get([b"caction"]) == [None]
