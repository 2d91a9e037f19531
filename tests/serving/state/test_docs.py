"""What docs/user_state.md and docs/operations.md show of the state of users works; tests/test_docs.py has the rest."""

import json
import re
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("aiohttp")

from jfi.events.groups import StatisticsSettings
from jfi.serving.requests import RequestReader
from jfi.serving.schema import Field, Limits, Schema
from jfi.serving.scorer import Scorer, StateSettings
from jfi.state.events import EventReader
from jfi.state.layout import TIME, Log, layout_of
from jfi.state.state import UserState, write_layout
from jfi.state.stores import LmdbStore
from jfi.state.user_rows import scan_records

from ..conftest import ROOT
from ..test_server import serve
from .conftest import EVENT, NOW

TEXT = (ROOT / "docs/user_state.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()
#: Path, body and answer of each request in the order of the page.
SHOWN = re.findall(
    r"```sh\ncurl http://127.0.0.1:8000(/\w+) --data '(.*?)'\n```\n.*?```json\n(.*?)\n```", TEXT, flags=re.DOTALL
)
BODIES = {path: body for path, body in re.findall(r"127\.0\.0\.1:8000/(\w+) --data '(\{.*?\})'", TEXT, flags=re.DOTALL)}


@pytest.fixture
def reader(scorer):
    return RequestReader(scorer.info.schema, Limits(100, 30), state=layout_of(scorer.info.schema, 30).info)


#: What the page's run says of its log.
OF_PAGE = Log("user", "item", "timestamp")


def events_of(reader):
    return EventReader(layout_of(reader.schema, 30, OF_PAGE))


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
    (body,) = re.findall(r"```json\n(\[\{\"user_id\": \"u3\".*?\}\])\n```", TEXT)
    past = StatisticsSettings("user", "item_id", ["item"], 8, [], False, 1, [], {})
    schema = Schema(
        user=[],
        candidate=[Field("item_id", "category", ["item_id"])],
        event=[Field(name, "category", [f"history_{name}"]) for name in ("item_id", "action")],
        vocabularies={"item_id": ["12"], "action": ["view"]},
        user_id="user",
        item_id="item_id",
        statistics=past,
    )
    log = Log(label="action == buy")
    events = EventReader(layout_of(schema, 30, log)).read(body.encode())
    assert (events.texts["item_id"], events.labels.tolist(), events.in_history.tolist()) == (["12"], [0.0], [True])


def test_the_requests_that_the_page_shows_get_the_answers_that_it_shows(scorer, exported, tmp_path):
    store = LmdbStore(tmp_path / "state", create=True)
    write_layout(store, layout_of(scorer.info.schema, 30, OF_PAGE))
    stateful = Scorer(exported.path, state=StateSettings(store))
    assert [path for path, _, _ in SHOWN] == ["/events", "/score"]
    deleted, item = re.findall(r"^curl -X DELETE http://127.0.0.1:8000(\S+)$", TEXT, flags=re.MULTILINE)
    ((put, columns),) = re.findall(r"^curl -X PUT http://127.0.0.1:8000(\S+) --data '(.*)'$", TEXT, flags=re.MULTILINE)
    assert deleted.startswith("/users/") and item == put

    async def talk(client):
        for path, body, shown in SHOWN:
            answer = await client.post(path, data=body)
            found, wanted = await answer.json(), json.loads(shown)
            assert answer.status == 200 and found.keys() == wanted.keys()
            if path == "/events":
                assert found == wanted
            else:  # its scores are of another training
                assert found["state"] == wanted["state"] and len(found["scores"]) == len(wanted["scores"])
        stored = await client.put(put, data=columns)
        assert (stored.status, await stored.json()) == (200, {"stored": True})
        for path in (deleted, item):
            assert await (await client.delete(path)).json() == {"deleted": True}
            assert await (await client.delete(path)).json() == {"deleted": False}

    serve(stateful, talk)


def test_sizes_are_those_of_the_records(stateful):
    layout = stateful.state.layout
    assert f"Three categories make {layout.dtype.itemsize} bytes an event" in OPERATIONS
    assert f"at most `data.max_history` + {layout.keep - layout.max_history} events" in " ".join(OPERATIONS.split())


def body(number: int) -> list[dict]:
    user = {"user": f"u{number % 400}", "time": NOW + number}
    return [EVENT | user | {"event_id": f"{number} {row}"} for row in range(2)]


def test_a_copy_that_is_made_while_events_are_written_is_the_state_of_a_moment(stateful, tmp_path):
    (command,) = re.findall(r"^python -m lmdb (copy .*) -e users \S+$", OPERATIONS, flags=re.MULTILINE)
    state, written, stop = stateful.state, [], threading.Event()

    def write():
        while not stop.is_set():
            state.add([stateful.events(body(len(written)))])
            written.append(len(written))

    def wait_until(count: int):
        while len(written) < count:
            assert writer.is_alive()
            time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_until(before := 100)
        arguments = [*command.split(), "-e", tmp_path / "state", tmp_path / "copy"]
        subprocess.run([sys.executable, "-m", "lmdb", *map(str, arguments)], check=True, capture_output=True)
        wait_until((after := len(written)) + 100)
    finally:
        stop.set()
        writer.join()
    copy = LmdbStore(tmp_path / "copy")
    times = [one for _, own in scan_records(copy, state.layout) for one in own[TIME].tolist()]
    count = len(times) // 2
    assert before <= count <= after + 1 < len(written)
    assert sorted(times) == sorted([NOW + number for number in range(count)] * 2)  # whole bodies, up to one
    # A server on the copy gets all events again, and is where the first is.
    restored = UserState(copy, stateful.reader)
    added = [restored.add([stateful.events(body(number))])[0].added for number in written]
    assert added == [0] * count + [2] * (len(written) - count)
    assert dict(copy.scan(b"u")) == dict(state.store.scan(b"u"))
    copy.close()
