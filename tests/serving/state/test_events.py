"""Events of the state of users are encoded as those of a request, and kept in one order however they come."""

import json
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfi.serving.requests import BadRequestError, RequestReader
from jfi.serving.schema import Field, Limits, Schema
from jfi.state.events import EventReader
from jfi.state.layout import TIME, layout_of
from jfi.state.state import UserState, write_layout
from jfi.state.stores import LmdbStore

from ..test_columns import assert_same, by_columns
from ..test_json_schema import LAYOUT, changed, validator
from ..test_policy_requests import ALL, LONG, SHORT, fitted, history, removing
from ..test_policy_requests import reader as policy_reader
from .adding import LOG, records_of

NOW = 1_700_000_000.0
#: A field of each kind.
SCHEMA = Schema(
    user=[],
    candidate=[Field("item", "category", ["item"])],
    event=[
        Field("item", "category", ["history_item"]),
        Field("kind", "category", ["history_kind"], num_buckets=7),
        Field("wide", "category", ["history_wide"], num_buckets=2**33),
        Field("action", "category", ["history_action"], default="v"),
        Field("other", "category", ["history_other"], default="not known"),
        Field("bucket", "category", ["history_bucket"], num_buckets=5, default="v"),
        Field("tags", "slots", ["history_tags_0", "history_tags_1"]),
        Field("labels", "slots", ["history_labels_0", "history_labels_1", "history_labels_2"], num_buckets=9),
        Field("marks", "slots", ["history_marks_0", "history_marks_1"]),
        Field("both", "cross", ["history_both"], columns=["item", "action"]),
        Field("crossed", "cross", ["history_crossed"], columns=["item", "kind", "action"], num_buckets=11),
        Field("seconds", "quantile", ["history_seconds"], edges=[1.0, 5.0]),
        Field("price", "quantile", ["history_price"], edges=[-1.0, 0.0, 9.0], default=3.0),
        Field("sid", "sid", ["history_sid"], layout=LAYOUT),
        Field("age", "age", num_buckets=24),
    ],
    vocabularies={
        "item": ["1", "2", "-3", "a b", "null", "true", "日本語の値"],
        "action": ["v", "b" * 40],
        "other": ["v"],
        "tags": ["t", "-3", "true"],
        "marks": ["t", "u"],
        "both": ["1\x1fv", "2\x1fv"],
    },
    codec="abc",
    user_id="user",
    item_id="item",
)
LIMITS = Limits(max_candidates=3, max_history=20)


def events_of(reader: RequestReader, **options) -> EventReader:
    return EventReader(layout_of(reader.schema, reader.limits.max_history, LOG), clock=lambda: NOW, **options)


@pytest.fixture
def new_state(tmp_path):
    """Makes an empty state for a reader of requests."""
    opened = []

    def make(reader: RequestReader, **options) -> UserState:
        opened.append(LmdbStore(tmp_path / f"state-{len(opened)}", create=True, max_bytes=1 << 24))
        write_layout(opened[-1], layout_of(reader.schema, reader.limits.max_history, LOG))
        return UserState(opened[-1], reader, **options)

    yield make
    for store in opened:
        store.close()


def with_state(reader: RequestReader) -> RequestReader:
    return RequestReader(reader.schema, reader.limits, reader.policy, state=layout_of(reader.schema, 1).info)


def row(draw: random.Random, odd: float = 0.0) -> dict:
    """An event without its user and time."""

    def value(*usual: object) -> object:
        strange = [None, -3, 1.5, "z" * 70, "z" * 600, 'q"', [], [1], {}, True, "a\0", "", 12345678901234567890, 1e39]
        return draw.choice(strange if draw.random() < odd else usual)

    tags = (None, [], ["t"], [1, "t", None, "", True], ["-3", "new", "more", "t"], ["", None], [7.0])
    return {
        "item": value(1, "2", 2.0, "-3", "a b", "null", True, "日本語の値", "new", 991),
        "kind": value("k", "ü", 5, None),
        "wide": value("k", 5, None),
        "action": value("v", "b" * 40, "new", None),
        "other": value("v", "new", "not known", None, ""),
        "bucket": value("v", 3, None),
        "tags": value(*tags),
        "labels": value(*tags),
        "marks": value(*tags, ["u"]),
        "seconds": value(0, 1, 0.5, 5, 7.5, None, -1e300),
        "price": value(-2, -1, 0, 8.9, 9, None),
        "sid": value(5, 5.0, "77", None, "", -1),
    }


def outcome(read, given: object) -> object:
    try:
        return read(given)
    except BadRequestError as fault:
        return str(fault)


def test_rows_and_columns_give_the_same_records():
    read, draw, good, bad = events_of(RequestReader(SCHEMA, LIMITS)), random.Random(0), 0, 0
    for number in range(150):
        rows = []
        for _ in range(draw.randrange(1, 6)):
            own = {"user": draw.choice(["a", 7, 7.5, "ü", True]), "time": NOW - draw.choice([0, 1, 1e6, 2.5])}
            rows.append(own | row(draw) | ({"event_id": draw.choice([1, "1", "x", None])} if number % 2 else {}))
        if draw.random() < 0.4:  # of several faults the first in the body is named
            draw.choice(rows)[draw.choice([*row(draw)])] = draw.choice([None, "z" * 70, [], [1], {}, True, 1e39, [{}]])
        one, other = outcome(read, rows), outcome(read, {name: [each[name] for each in rows] for name in rows[0]})
        if isinstance(one, str):
            bad += 1
            (at,) = [name for name in rows[0] if f".{name} " in one or f".{name}[" in one]
            i = int(one.split("[")[1].split("]")[0])
            assert other == one.replace(f"events[{i}].{at}", f"events.{at}[{i}]")
        else:
            good += 1
            assert (one.users, one.texts) == (other.users, other.texts)
            assert one.records.tobytes() == other.records.tobytes()
    assert good > 30 and bad > 15


def test_events_of_the_state_are_those_of_the_request(new_state):
    """Of each kind of field, one event at a time and several together."""
    plain, draw = RequestReader(SCHEMA, LIMITS), random.Random(1)
    events, state, read = events_of(plain), new_state(plain), with_state(plain)
    for number in range(60):
        rows = sorted(draw.sample(range(10**6), draw.choice([0, 1, 2, 5, 20, 26])), reverse=True)
        rows = [row(draw, odd=0.01) | {"age": age + 1 / 8} for age in rows]
        request = {"user": {}, "candidates": [{"item": 1}], "codec": "abc"}
        wanted = outcome(plain, request | {"history": rows})
        sent = [
            {"user": number, "time": NOW - each["age"]} | {k: v for k, v in each.items() if k != "age"} for each in rows
        ]
        read_events = outcome(events, sent) if sent else []
        if isinstance(wanted, str) or isinstance(read_events, str):
            # A request says nothing of the events that are older than those that it reads.
            assert isinstance(read_events, str) and (isinstance(wanted, str) or len(rows) > LIMITS.max_history)
            continue
        if sent:
            (added,) = state.add([read_events])
            assert added.added == len(sent)
        asked = read(request | {"user": str(number), "time": NOW})
        (found,) = state.fill([asked])
        assert (found.stored.events, found.stored.is_available) == (min(20, len(rows)), True)
        assert_same(replace(found, stored=None), wanted, rows)


@pytest.mark.parametrize("session", ["integers", "mixed", "texts", "long", None])
@pytest.mark.parametrize(
    ("policy", "surfaces"),
    [
        (lambda: removing(SHORT), SHORT),
        (lambda: removing(LONG, caps={"passive": 4, "active": 9}), LONG),
        (lambda: removing([*LONG[:2], "b"], boost=["active"], num_segments=2), LONG),
        (lambda: removing(SHORT, num_segments=4), SHORT),
        (lambda: fitted(SHORT, remove=0.0), SHORT),
    ],
    ids=["removes", "caps", "boosts", "four segments", "keeps all"],
)
def test_a_policy_keeps_the_events_that_it_keeps_of_a_request(policy, surfaces, session, new_state):
    plain = policy_reader(policy(), replace(ALL, session=session and "session"), num_buckets=7)
    plain = RequestReader(replace(plain.schema, user_id="user", item_id="item"), plain.limits, plain.policy)
    events, state, read = events_of(plain), new_state(plain, max_late=math.inf), with_state(plain)
    draw, weights, removed = random.Random(str(session)), 0, 0
    for number in range(25):
        rows = [each | {"age": float(int(each["age"])) + 0.5} for each in history(draw, surfaces, session)]
        rows = [each for each in rows if each["item"] is not None]
        rows.sort(key=lambda each: -each["age"])
        rows = [
            each for each, before in zip(rows, [None, *rows], strict=False) if not before or each["age"] < before["age"]
        ]
        sent = [
            {"user": number, "time": NOW - each["age"]} | {k: v for k, v in each.items() if k != "age"} for each in rows
        ]
        draw.shuffle(sent)
        for begin in range(0, len(sent), 9):
            state.add([events(sent[begin : begin + 9])])
        request = {"user": {}, "candidates": [{"item": 3}]}
        wanted = plain(request | {"history": rows})
        (found,) = state.fill([read(request | {"user": number, "time": NOW})])
        assert_same(replace(found, stored=None), wanted, rows)
        removed += min(30, len(rows)) - found.num_events
        weights += found.weights is not None
    assert (removed > 20) == (not plain.policy.policy.keeps_all)
    assert weights or "b" not in surfaces


ITEM = Schema(
    [], [], [Field("item", "category", ["history_item"])], {"item": ["1", "2", "10"]}, user_id="user", item_id="item"
)
ROWS = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["1", "2", "10", "9", "30", "x", "y"])), max_size=40)


@settings(max_examples=60)
@given(st.data())
def test_events_in_any_order_are_the_newest_by_time_and_item(data):
    """Against a plain sort; items that the vocabulary lacks among them."""
    by_number = data.draw(st.booleans())
    rows = data.draw(ROWS)
    rows = [one for one in rows if not by_number or one[1].isdigit()]
    keep, ids = data.draw(st.integers(1, 12)), {"1": 1, "2": 2, "10": 3, "9": 4, "30": 5, "x": 6, "y": 7}
    texts = {number: text for text, number in ids.items()}
    schema = ITEM if by_number else replace(ITEM, vocabularies={"item": ["1", "2", "10", "a"]})
    layout = layout_of(schema, 1, LOG)
    layout.keep = keep
    records = np.zeros(len(rows), layout.dtype)
    records[TIME], records["item"] = [time for time, _ in rows], [ids[text] for _, text in rows]
    order, kept, begin = data.draw(st.permutations(range(len(rows)))), np.zeros(0, layout.dtype), 0
    while begin < len(rows):
        end = begin + data.draw(st.integers(1, 8))
        joined = np.concatenate([kept, records[order[begin:end]]])
        is_new, user = np.arange(len(joined)) >= len(kept), np.zeros(len(joined), np.int64)
        (kept,) = layout.merge(user, joined, is_new, 1, lambda of: [texts[one] for one in of])
        begin = end
    wanted = sorted(rows, key=lambda one: (one[0], int(one[1]) if by_number else one[1]))[-keep:]
    assert [(time, texts[item]) for time, item in kept[[TIME, "item"]].tolist()] == wanted


def test_events_of_one_time_and_item_with_ids_stay_in_the_order_in_which_they_came(new_state):
    read = RequestReader(replace(SCHEMA, user_id="user"), LIMITS)
    state, events, draw = new_state(read), events_of(read), random.Random(2)
    sent = [{"user": "u", "time": NOW, "event_id": i} | row(draw) | {"item": 2, "seconds": i % 3} for i in range(9)]
    for begin, end in ((0, 4), (4, 5), (5, 9)):
        state.add([events(sent[begin:end])])
    (found,) = records_of(state, ["u"])
    assert found["seconds"].tolist() == [0.0, 1.0, 2.0] * 3


def test_more_events_than_are_kept_leave_the_newest(new_state):
    read = RequestReader(ITEM, Limits(1, 5))
    state, events = new_state(read, max_late=math.inf), events_of(read)
    sent = [{"user": "u", "time": NOW - i, "item": i, "event_id": i} for i in range(200)]
    random.Random(3).shuffle(sent)
    for begin in range(0, 200, 30):
        state.add([events(sent[begin : begin + 30])])
    (again,) = state.add([events(sent)])
    assert (again.added, again.repeated) == (0, 200)  # an id that was forgotten counts as one that was there
    (found,) = records_of(state, ["u"])
    assert found[TIME].tolist() == [NOW - i for i in range(68, -1, -1)]


def test_a_repeated_event_counts_once_wherever_it_is(new_state):
    read = RequestReader(ITEM, LIMITS)
    state, events = new_state(read), events_of(read)

    def event(name: object, user: str = "u", **other) -> dict:
        return {"user": user, "time": NOW, "item": 1, "event_id": name} | other

    def add(*bodies: list) -> list[tuple[int, int]]:
        return [(one.added, one.repeated) for one in state.add(list(map(events, bodies)))]

    assert add([event("a"), event("a"), event("b"), event(None), event(None)]) == [(3, 2)]  # of one item and time
    assert add([event(None, item=2), event(None, time=NOW - 1), event(None)]) == [(2, 1)]
    assert add([event("a"), event("c")], [event("c"), event("b", time=NOW - 9, item=2)]) == [(1, 1), (0, 2)]
    assert add([event("a", user="v"), event("7"), event(7), event(7.0)]) == [(2, 2)]
    assert [len(one) for one in records_of(state, ["u", "v", "w"])] == [7, 1, 0]


def test_values_above_the_bounds_of_numbers_and_of_memory(new_state, monkeypatch):
    monkeypatch.setattr("jfi.state.dictionaries.MAX_NUMBERS", 3)
    monkeypatch.setattr("jfi.state.dictionaries._MAX_CACHED", 1)
    read = RequestReader(ITEM, LIMITS)
    state, events = new_state(read), events_of(read)
    for item in ("x", "y", "x", "z", "w", "y", "w"):
        state.add([events([{"user": item, "time": NOW, "item": item}])])
        (found,) = records_of(state, [item])
        number = found["item"][-1].item()
        assert number == {"x": 1, "y": 2, "z": 3, "w": 0}[item]
        assert state.texts("item", [number]) == [None if item == "w" else item]
        assert sum(map(len, state._cache.numbers.values())) <= 3 and sum(map(len, state._cache.texts.values())) <= 1


def test_long_texts_have_numbers_too(new_state):
    """Longer than a key of the store; two that begin alike."""
    read = RequestReader(replace(ITEM, vocabularies={"item": ["x" * 1000, "x" * 1001]}), LIMITS)
    state, events = new_state(read), events_of(read)
    for number, item in enumerate(("x" * 1000, "x" * 1001, "x" * 1002, "x" * 1000)):
        state.add([events([{"user": "u", "time": NOW + number / 8, "item": item}])])
    (found,) = state.fill([with_state(read)({"user": "u", "candidates": [{}], "time": NOW + 1})])
    assert found.ids["history_item"].tolist() == [1, 2, 0, 1]
    with pytest.raises(BadRequestError, match=r"events\[0\].item must be str of length <= 1024"):
        events([{"user": "u", "time": NOW, "item": "x" * 1025}])


@pytest.mark.parametrize("form", ["rows", "columns"])
@pytest.mark.parametrize("policy", [False, True], ids=["fields of each kind", "a policy"])
def test_the_schema_of_events_accepts_what_the_reader_accepts(form, policy):
    plain = RequestReader(SCHEMA, LIMITS)
    one = row(random.Random(0)) | {"tags": ["t"]}
    if policy:
        plain = policy_reader(removing(SHORT), ALL)
        one = {"item": 3, "kind": "k", "surface": "feed", "dwell": 1.5, "session": "s"}
    read = events_of(plain, max_events=3)
    valid, outcomes = validator(read), set()
    whole = [{"user": "u", "time": NOW, "event_id": "e"} | one]
    if form == "columns":
        whole = {name: [value] for name, value in whole[0].items()}
    for body in [whole, *changed(whole), *([whole * 3, whole * 4] if form == "rows" else [])]:
        outcome = accepts(read, body)
        if outcome is not None:
            assert valid.is_valid(body) == outcome, (body, outcome)
        outcomes.add(outcome)
    assert accepts(read, whole) and valid.is_valid(whole) and outcomes >= {True, False}
    if form == "rows":
        rest = {name: value for name, value in whole[0].items() if name != "event_id"}
        for body, is_good in (([rest] * 2, True), ([rest, *whole], False), ([*whole, rest], False)):
            assert accepts(read, body) == is_good


def accepts(reader: EventReader, body: object) -> bool | None:
    """Whether the reader does; None for a fault of which no JSON Schema says anything."""
    try:
        reader.read(json.dumps(body).encode())
    except BadRequestError as fault:
        unsaid = r"as many values of each field|in the future|no ID of|not be empty|be the id of|too$|\[0\] is not$"
        return None if re.search(rf"{unsaid}|^(candidates|user)\S* lacks|480 bytes", str(fault)) else False
    return True


@pytest.mark.parametrize("form", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("reads_user", [False, True], ids=["a user's id alone", "fields of the user"])
def test_the_schema_of_requests_with_a_state_accepts_what_the_reader_accepts(form, reads_user):
    user = [Field("user", "category", ["user"]), Field("income", "number")] if reads_user else []
    candidate, event = [*SCHEMA.candidate, Field("price", "number")], [SCHEMA.event[0], SCHEMA.event[-1]]
    vocabularies = SCHEMA.vocabularies | {"user": ["u"]}
    schema = replace(SCHEMA, user=user, candidate=candidate, event=event, vocabularies=vocabularies, codec=None)
    reader = RequestReader(schema, LIMITS, state=layout_of(schema, 1).info)
    valid, outcomes = validator(reader), set()
    own = {"user": "u", "income": 1.5} if reads_user else "u"
    of_state = {"user": own, "candidates": [{"item": 1}, {"item": None}], "context": {"price": 3}, "time": NOW}
    explicit = {"candidates": [{"item": 1, "price": 3}], "history": [{"item": 2, "age": 5}], "time": NOW}
    explicit["user"] = own if reads_user else {}
    for whole in (of_state, explicit):
        whole = by_columns(whole) if form else whole
        assert valid.is_valid(whole) and accepts(reader, whole)
        for body in changed(whole):
            outcome = accepts(reader, body)
            if outcome is not None:
                assert valid.is_valid(body) == outcome, (body, outcome)
            outcomes.add(outcome)
    if not reads_user:
        users = {7: True, 7.5: True, "": False, None: False, "x" * 480: True, "x" * 481: False, False: True}
        for user, is_known in users.items():
            for body in (of_state | {"user": {"user": user}}, of_state | {"user": user}):
                assert accepts(reader, body) or not is_known, user
                assert valid.is_valid(body)
        bodies = {"neither": of_state | {"user": {}}, "both": explicit | {"user": "u"}}
        for name, body in (bodies | {"object": explicit | {"user": {"user": "u"}}}).items():
            assert bool(accepts(reader, body)) == (name != "neither") and valid.is_valid(body)
    assert outcomes >= {True, False}
