"""A state in the encoding of another artifact: values keep their meaning, and what cannot be encoded is refused."""

import random
from dataclasses import replace

import commands
import numpy as np
import pyarrow.parquet as pq
import pytest

from jfi.events.groups import HALF_LIVES
from jfi.serving.requests import RequestReader
from jfi.serving.schema import Field, Limits, PastFields, PolicyFields, Schema
from jfi.serving.user_state.dictionaries import text_key
from jfi.serving.user_state.events import EventReader
from jfi.serving.user_state.layout import EventLayout
from jfi.serving.user_state.state import UserState, is_empty, scan_records, write_layout
from jfi.serving.user_state.stores import StateError, open_store
from jfi.serving.user_state.transfer import export_events, migrate

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


def changed(name: str, **change) -> Schema:
    """The schema with another field."""
    return replace(SCHEMA, event=[replace(one, **change) if one.name == name else one for one in FIELDS])


def knowing(**values: list[str]) -> Schema:
    return replace(SCHEMA, vocabularies=KNOWN | values)


def rows(count: int = 200) -> list[dict]:
    draw, found = random.Random(0), []
    for number in range(count):
        row = {"user": f"u{draw.randrange(4)}", "time": NOW + number // 2, "event_id": number}
        row |= {"item": draw.choice([1, 2, 3, 4, 50, None]), "action": draw.choice(["view", "buy", "share", None])}
        row |= {
            "tags": draw.choice([None, [], ["a"], ["new", "b"], ["b", "x y", "a"]]),
            "seconds": draw.choice([0, 3, 9]),
        }
        found.append(row | {"city": draw.choice(["Bonn", "Köln", None])})
    return found


def reader(schema: Schema, max_history: int = 100) -> EventReader:
    return EventReader(EventLayout(schema, max_history), RequestReader(schema, Limits(1, max_history)))


def filled(store, schema: Schema, events: list[dict], max_history: int = 100) -> UserState:
    read = reader(schema, max_history)
    write_layout(store, read.layout)
    state = UserState(store, read.layout)
    for begin in range(0, len(events), 50):
        state.add([read(events[begin : begin + 50])])
    return state


def moved(new_store, state: UserState, schema: Schema, max_history: int = 100) -> tuple[UserState, tuple[int, int]]:
    target, layout = new_store("target"), EventLayout(schema, max_history)
    counts = migrate(state.store, target, layout)
    write_layout(target, layout)
    return UserState(target, layout), counts


def decoded(state: UserState) -> dict[str, list[tuple]]:
    """By user the times and the values of all events; the numbers of a column that has no values."""
    found = {}
    for user, records in scan_records(state.store, state.layout):
        columns = [records["time"].tolist(), records["event_id"].tolist()]
        for column in state.layout.columns:
            numbers = records[column.name].tolist()
            columns.append([state.text(column, one) for one in numbers] if column.values else numbers)
        found[user] = list(zip(*columns, strict=True))
        if state.layout.item is None:  # nothing says in which order events of one time are
            found[user].sort(key=lambda row: row[:2])
    return found


SCHEMAS = {
    "the same": SCHEMA,
    "grown": knowing(
        item=[*KNOWN["item"], "4", "9"], tags=[*KNOWN["tags"], "x y"], both=[*KNOWN["both"], "50\x1fshare"]
    ),
    "another order": knowing(item=["50", "3", "4", "1", "2"], action=["share", "buy", "view"]),
    "shrunk": knowing(item=["2"], action=["buy"], tags=[], both=[]),
    "none in common": knowing(item=["x"], action=["y"], tags=["z"]),
    "buckets": replace(changed("item", num_buckets=5), vocabularies={k: v for k, v in KNOWN.items() if k != "item"}),
    "buckets of lists": changed("tags", num_buckets=9),
    "buckets of crosses": changed("both", num_buckets=11),
    "another default": changed("action", default="share"),
    "no default": changed("action", default=None),
    "fewer fields": replace(SCHEMA, event=[one for one in FIELDS if one.name not in ("tags", "city")]),
    "fewer slots": changed("tags", keys=["history_tags_0"]),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_state_is_as_if_its_events_had_been_sent_to_the_other_one(new_store, name):
    """Events that come after it too, with values that the first vocabulary lacked."""
    schema, events = SCHEMAS[name], rows()
    state = filled(new_store("old"), SCHEMA, events)
    before = decoded(state)
    new, counts = moved(new_store, state, schema)
    wanted = filled(new_store("wanted"), schema, [row_of(schema, row) for row in events])
    for _ in range(2):
        got, expected = decoded(new), decoded(wanted)
        if name in ("another default", "no default"):  # a missing value was kept as the first default
            got, expected = (
                {user: without(own, "action", schema) for user, own in one.items()} for one in (got, expected)
            )
        assert got == expected
        more = [row | {"time": NOW + 500, "event_id": row["event_id"] + 1000} for row in rows(30)]
        added = [one.add([reader(schema)([row_of(schema, row) for row in more])]) for one in (new, wanted)]
        assert added[0] == added[1]
    assert counts == (4, 200) and decoded(state) == before


def row_of(schema: Schema, row: dict) -> dict:
    names = {"user", "time", "event_id", *(one.name for one in schema.event)}
    return {name: value for name, value in row.items() if name in names}


def without(own: list[tuple], name: str, schema: Schema) -> list[tuple]:
    at = 2 + [column.field.name for column in EventLayout(schema, 1).columns].index(name)
    return [row[:at] + row[at + 1 :] for row in own]


def test_a_value_that_the_first_vocabulary_lacked_is_known_where_the_other_has_it(new_store):
    state = filled(new_store("old"), SCHEMA, rows())
    grown = knowing(item=[*KNOWN["item"], "4", "50"])
    new, _ = moved(new_store, state, grown)
    read = RequestReader(grown, Limits(1, 100), has_state=True)
    asked = read({"user": "u1", "candidates": [{}], "time": NOW + 1000})
    (found,) = new.fill([asked], read)
    own = [row for row in rows() if row["user"] == "u1"]
    own.sort(key=lambda row: row["time"])
    ids = {None: 0, 1: 1, 2: 2, 3: 3, 4: 4, 50: 5}
    assert sorted(found.ids["history_item"].tolist()) == sorted(ids[row["item"]] for row in own)
    (before,) = state.fill([asked], RequestReader(SCHEMA, Limits(1, 100), has_state=True))
    assert before.ids["history_item"].max() == 3 and found.ids["history_item"].max() == 5
    # A vocabulary that shrinks and grows again has lost nothing.
    back, _ = moved(
        lambda name: new_store("back"), moved(lambda name: new_store("less"), new, SCHEMAS["shrunk"])[0], grown
    )
    assert decoded(back) == decoded(new)


def test_a_shorter_history_keeps_the_newest(new_store):
    state = filled(new_store("old"), SCHEMA, [row | {"user": "u"} for row in rows(160)])
    new, counts = moved(new_store, state, SCHEMA, max_history=10)
    assert counts == (1, 74)
    assert decoded(new) == {"u": decoded(state)["u"][-74:]}


@pytest.mark.parametrize(
    ("schema", "max_history", "why"),
    [
        (SCHEMA, 101, "the state keeps 100 events of a user, and the artifact reads 101; load it from the log"),
        (
            changed("seconds", edges=[1.0, 6.0]),
            100,
            "the field 'seconds' is encoded otherwise, and the state does not have",
        ),
        (changed("city", num_buckets=8), 100, "the field 'city' is encoded otherwise"),
        (replace(changed("city", num_buckets=0), vocabularies=KNOWN | {"city": ["Bonn"]}), 100, "the field 'city' is"),
        (
            replace(
                SCHEMA, event=[*FIELDS, Field("shop", "category", ["history_shop"])], vocabularies=KNOWN | {"shop": []}
            ),
            100,
            "the events of the state have no field 'shop'; load them",
        ),
        (replace(SCHEMA, policy=PolicyFields(None, "city", None)), 100, "the events of the state have no field 'city'"),
        (changed("tags", keys=["history_tags_0", "history_tags_1", "history_tags_2"]), 100, "have no field 'tags'"),
        (changed("both", columns=["item", "city"]), 100, "the field 'both' is encoded otherwise"),
    ],
    ids=["longer", "edges", "buckets", "no buckets", "new field", "policy", "more slots", "another cross"],
)
def test_what_cannot_be_encoded_otherwise_is_refused_by_name(new_store, schema, max_history, why):
    state, target = filled(new_store("old"), SCHEMA, rows(20)), new_store("target")
    with pytest.raises(StateError, match=why) as fault:
        migrate(state.store, target, EventLayout(schema, max_history))
    assert "\n" not in str(fault.value) and is_empty(target)


def test_statistics_are_copied_or_missed_by_name(new_store):
    past = PastFields("user", "item", NOW, ["popularity"], 10, list(HALF_LIVES), True, {}, 3, [], {})
    with_past, other = (
        replace(SCHEMA, past=past),
        replace(SCHEMA, past=replace(past, half_lives=[60.0, *HALF_LIVES[1:]])),
    )
    plain, counted = filled(new_store("plain"), SCHEMA, rows(20)), new_store("counted")
    write_layout(counted, EventLayout(with_past, 100))
    counters = {b"k a": b"1", b"k b": b"2", b"iu1": bytes(16)}
    counted.put(counters.items())
    for store, schema, why in (
        (plain.store, with_past, "has no statistics of the past, which the artifact has; load it"),
        (counted, SCHEMA, "has statistics of the past that the artifact does not have"),
        (counted, other, "or computes otherwise; load it from the log"),
    ):
        target = new_store(f"target of {why}")
        with pytest.raises(StateError, match=why):
            migrate(store, target, EventLayout(schema, 100))
        assert is_empty(target)
    target, layout = new_store("target"), EventLayout(replace(SCHEMAS["grown"], past=past), 100)
    migrate(counted, target, layout)
    assert {key: value for key, value in target.scan(b"") if key in counters} == counters
    write_layout(target, layout)
    state = UserState(target, layout)
    assert state.delete("u1") and not state.delete("u1")  # its ids alone were there
    assert target.get([b"iu1", b"k a"]) == [None, b"1"]


def test_what_a_policy_reads_is_kept(new_store):
    policy = replace(SCHEMA, policy=PolicyFields("dwell", "action", "session"))
    events = [row | {"dwell": i / 7, "session": f"s{i // 5}"} for i, row in enumerate(rows())]
    state = filled(new_store("old"), policy, events)
    grown = replace(SCHEMAS["grown"], policy=policy.policy)
    new, _ = moved(new_store, state, grown)
    assert decoded(new) == decoded(filled(new_store("wanted"), grown, events))


def test_an_export_of_a_state_that_is_written_to_has_right_values(new_store, tmp_path, monkeypatch):
    """Values that get their number after the export has begun."""
    state = filled(new_store("old"), SCHEMA, rows(50))
    scan, more = (
        type(state.store).scan,
        [row | {"item": f"late {i}", "event_id": f"x{i}"} for i, row in enumerate(rows(9))],
    )

    def writing(store, prefix):
        if prefix == b"u" and more:
            state.add([reader(SCHEMA)(more)])
            more.clear()
        return scan(store, prefix)

    monkeypatch.setattr(type(state.store), "scan", writing)
    assert export_events(state.store, tmp_path / "events.parquet") == (4, 59)
    items = pq.read_table(tmp_path / "events.parquet")["item"].to_pylist()
    wanted = [str(row["item"]) for row in rows(50) if row["item"] is not None] + [f"late {i}" for i in range(9)]
    assert sorted(item for item in items if item is not None) == sorted(wanted)


def test_a_migration_of_a_state_that_is_written_to_is_refused(new_store, monkeypatch):
    state, target = filled(new_store("old"), SCHEMA, rows(50)), new_store("target")
    scan, late = type(state.store).scan, rows(1)[0] | {"item": "late", "event_id": "x"}

    def writing(store, prefix):
        if prefix == b"u":
            state.add([reader(SCHEMA)([late])])
        return scan(store, prefix)

    monkeypatch.setattr(type(state.store), "scan", writing)
    with pytest.raises(StateError, match="the state is written to; stop the servers that use it"):
        migrate(state.store, target, EventLayout(SCHEMAS["grown"], 100))


def test_the_command_takes_only_an_empty_place(exported, new_store, capsys):
    store, names = new_store("old"), new_store.names
    from jfi.serving.artifact import read

    info, _ = read(exported.path)
    layout = EventLayout(info.schema, info.limits.max_history)
    write_layout(store, layout)
    store.put([(b"uu", np.zeros(3, layout.dtype).tobytes())])
    left = new_store("left")  # of a load that was killed
    left.put([(b"usomeone", b"")])
    if "://" not in names[0]:
        store.close()
    arguments = "state", "migrate", "--state", names[0], "--artifact", exported.path, "--out"
    with pytest.raises(StateError, match=r"has a state already, or what is left of one|exists already") as fault:
        commands.run(*arguments, names[1])
    assert f"--out {names[1]}: " in str(fault.value)
    out = names[0] + "-2"
    commands.run(*arguments, out)
    assert "3 events of 1 users" in capsys.readouterr().out
    state = UserState(open_store(out, timeout=10.0), layout)
    assert [len(one) for one in state.histories(["u", "someone"])] == [3, 0]
    state.store.close()


#: What is done to a state, by keys and values, and what is said of it.
DAMAGE = {
    "vocabularies cut off": (lambda store: {b"v": store.get([b"v"])[0][:-1]}, "its vocabularies: "),
    "vocabularies changed": (lambda store: {b"v": store.get([b"v"])[0].replace(b"buy", b"bux")}, "its vocabularies: "),
    "vocabularies lost": (lambda store: {b"v": None}, "its vocabularies: "),
    "description": (lambda store: {b"m": b"{}"}, "its description: "),
    "length": (lambda store: {b"uu1": store.get([b"uu1"])[0] + b"x"}, "the events of user 'u1': "),
    "id": (lambda store: {b"uu1": b"\x7f" * len(store.get([b"uu1"])[0])}, "an event has no known value of 'item'"),
    "user": (lambda store: {b"u\xff": b""}, "the id of a user: "),
    "lost text": (lambda store: {text_key("item", -1): None}, "the values of 'item': "),
    "text": (lambda store: {text_key("item", -1): b"\xff"}, "the values of 'item': "),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_is_exported_and_migrated_by_nobody(new_store, tmp_path, capsys, name):
    state, (damage, why) = filled(new_store("state"), SCHEMA, rows()), DAMAGE[name]
    changes = damage(state.store)
    state.store.update(lambda get: changes)
    with pytest.raises(StateError, match=f"^the state of users is damaged: {why}[^\n]*$"):
        migrate(state.store, new_store("target"), EventLayout(SCHEMA, 100))
    state.store.close()
    out = tmp_path / "events.parquet"
    assert commands.call("state", "export", "--state", new_store.names[0], "--out", out) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: the state of users is damaged: {why}") and said.count("\n") == 1
    assert not out.exists()


def test_a_number_is_given_to_no_second_value_where_the_count_of_values_is_lost(new_store):
    def event(user: str, action: str) -> list[dict]:
        return [{"user": user, "time": NOW, "item": 1, "action": action, "tags": [], "seconds": 0, "city": None}]

    state, read = filled(new_store("state"), SCHEMA, []), reader(SCHEMA)
    state.add([read(event("u", "maybe"))])
    before = dict(state.store.scan(b"")) | {b"caction": None}
    state.store.update(lambda get: before)
    again = UserState(state.store, state.layout)
    assert len(again.add([read(event("v", "maybe"))])) == 1  # a value that has a number
    with pytest.raises(StateError, match="it has lost the number of values of 'action'; restore a backup"):
        again.add([read(event("v", "perhaps"))])
    assert decoded(again)["u"][0][3] == "maybe" and state.store.get([b"caction"]) == [None]
