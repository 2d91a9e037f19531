"""The bodies that docs/user_state.md shows are accepted; tests/test_docs.py checks the rest of the page."""

import json
import re

import pytest

from jfi.serving.requests import RequestReader
from jfi.serving.schema import Field, Limits, PastFields, Schema
from jfi.serving.user_state.events import EventReader
from jfi.serving.user_state.layout import EventLayout

from ..conftest import ROOT

TEXT = (ROOT / "docs/user_state.md").read_text()
BODIES = {path: body for path, body in re.findall(r"127\.0\.0\.1:8000/(\w+) --data '(\{.*?\})'", TEXT, flags=re.DOTALL)}


@pytest.fixture
def reader(scorer):
    return RequestReader(scorer.info.schema, Limits(100, 30), has_state=True)


def events_of(reader):
    return EventReader(EventLayout(reader.schema, 30), reader)


def test_its_request_is_of_a_user_of_the_state(reader):
    request = reader.read(BODIES["score"].encode())
    assert (request.stored.user, request.stored.now) == ("u1", 1767225600)


def test_its_events_are_read_by_columns_and_by_rows(reader):
    by_columns = events_of(reader).read(BODIES["events"].encode())
    assert by_columns.users == ["u1"] * 3
    by_rows = re.search(r"```json\n(\[.*?\])\n```", TEXT, flags=re.DOTALL)[1]
    events = events_of(reader).read(by_rows.encode())
    assert events.users == ["u1", "u2"]
    assert events.records[0] == by_columns.records[0]  # the first event is the same in both


def test_the_fields_of_its_event_are_those_of_a_run_with_statistics():
    (event,) = re.findall(r"```json\n(\{\"user\": \"u3\".*?\})\n```", TEXT)
    past = PastFields("user", "item_id", 0.0, ["item"], 8, [], False, {}, 1, [], {})
    schema = Schema(
        user=[],
        candidate=[Field("item_id", "category", ["item_id"])],
        event=[Field(name, "category", [f"history_{name}"]) for name in ("item_id", "action")],
        vocabularies={"item_id": ["12"], "action": ["view"]},
        user_id="user",
        item_id="item_id",
    )
    reader = RequestReader(schema, Limits(100, 30), has_state=True)
    events = EventReader(EventLayout(schema, 30), reader, past=past).read(f"[{event}]".encode())
    assert (events.items, events.labels.tolist(), events.in_history.tolist()) == (["12"], [0.0], [True])
    assert set(json.loads(event)) == {"user", "time", "event_id", "item_id", "action", "label", "in_history"}
