"""The server with a state of users: bad input, freshness, and users who are removed."""

import json
import time
from urllib.parse import quote

import pytest

pytest.importorskip("aiohttp")

from yarl import URL

from ..test_server import samples, serve
from .conftest import CANDIDATES, EVENT, NOW, added, answer, asked, request

BAD = {
    "unknown": ({"colour": 1}, "has an unknown field 'colour'"),
    "lacking": ({"rating": ...}, "lacks the field 'rating'"),
    "future": ({"time": time.time() + 3600}, "more than 600 s in the future"),
    "milliseconds": ({"time": NOW * 1000}, "more than 600 s in the future"),
    "text": ({"time": "2023-11-14"}, "must be a number as that of row 0, got '2023-11-14'"),
    "no time": ({"time": None}, "must be float | str, got null"),
    "no date": ({"time": "yesterday"}, "must be str matching regex"),
    "no user": ({"user": None}, "must be bool | int | float | str, got null"),
    "empty user": ({"user": ""}, "must be str of length >= 1"),
    "list": ({"user": ["u"]}, "must be bool | int | float | str, got array"),
    "longer": ({"user": "x" * 481}, "must be str of length <= 480"),
    "long": ({"user": "ü" * 241}, "must be at most 480 bytes, got 482"),
    "item": ({"item": {}}, "must be bool | int | float | str, got object"),
    "no item": ({"item": None}, "must be bool | int | float | str, got null"),
    "rating": ({"rating": [5]}, "must be bool | int | float | str | null, got array"),
    "id": ({"event_id": {}}, "must be bool | int | float | str | null, got object"),
    "late": ({"time": NOW - 90000, "event_id": "late"}, "and at most 86400 s are allowed"),
}


@pytest.mark.parametrize("form", ["rows", "columns"])
def test_bad_events_are_named_and_nothing_of_their_body_is_written(stateful, store, form):
    """The last event alone is wrong."""

    async def talk(client):
        await added(client, EVENT)
        before = dict(store.scan(b""))
        for name, (change, why) in BAD.items():
            if form == "columns" and ... in change.values():
                continue
            good = [EVENT | {"event_id": f"{name} {i}", "user": f"u{i}", "item": f"new of {name}"} for i in range(3)]
            last = {key: value for key, value in (EVENT | change).items() if value is not ...}
            body, place = [*good, last], "events[3]"
            if form == "columns":
                body = {key: [one.get(key, EVENT["item"]) for one in body] for key in last}
            status, told = await answer(await client.post("/events", json=body))
            assert status == 400 and why in told["error"], (name, told)
            if "unknown" not in name:
                field = "time" if name == "late" else next(iter(change))
                place = place if form == "rows" else f"events.{field}[3]"
                assert told["error"].startswith(place), told
            assert dict(store.scan(b"")) == before, name
        found = await samples(client)
        assert found['jfi_state_events_total{result="refused"}'] == 4  # those that the state knows to be late
        assert found['jfi_state_events_total{result="added"}'] == 1

    serve(stateful, talk)


def test_bad_bodies_of_events_are_named(stateful, store):
    rows = [EVENT | {"event_id": i} for i in range(21)]
    twice = json.dumps([EVENT]).replace('"rating": 5', '"rating": 5, "rating": 4')
    bodies = {
        "the request is not JSON": b"",
        "events must be array of length >= 1": b"[]",
        "events must be array of length <= 20": json.dumps(rows),
        "events.time must be array of length <= 20": json.dumps({"user": [1], "time": [1] * 30}),
        "has an object with the field 'rating' twice": twice,
        "events must be object | array, got str": b'"x"',
        "events[0] must be object, got null": b"[null]",
        "events lacks the field": b"{}",
        "must be array, got": json.dumps(EVENT),
        "events must have as many values of each field": json.dumps(
            {key: [EVENT[key]] for key in EVENT} | {"time": [NOW] * 2}
        ),
        "events[1] lacks the field 'event_id'": json.dumps([EVENT, {k: EVENT[k] for k in EVENT if k != "event_id"}]),
    }

    async def talk(client):
        before = dict(store.scan(b""))
        for why, body in bodies.items():
            status, told = await answer(await client.post("/events", data=body))
            assert status == 400 and why in told["error"], (why, told)
        large = json.dumps([EVENT] * 100_000)
        assert (await client.post("/events", data=large)).status == 413
        assert dict(store.scan(b"")) == before

    serve(stateful, talk)


def test_bad_requests_with_a_user_are_named(stateful):
    bodies = {
        "must be the id of a user, got None": request(None),
        "the request lacks the field 'user'": {"candidates": CANDIDATES},
        "the request lacks the field 'candidates'": {"user": "u"},
        "unknown field 'tiem'; did you mean 'time'?": request() | {"tiem": NOW},
        "unknown field 'x'; known: candidates, context, history, time, user": request() | {"x": 1},
        "user must be bool | int | float | str | object | null, got array": request([1]),
        "user must be at most 480 bytes, got 481": request("x" * 481),
        "user.user must be at most 480 bytes, got 500": request({"user": "x" * 500}),
        "user lacks the field 'user'": request({}),
        "user has an unknown field 'name'": request({"user": 1, "name": "x"}),
        "time must be float < 100000000000.0": request(now=NOW * 1000),
        "context must be object, got array": request() | {"context": []},
        "context has an unknown field 'colour'": request() | {"context": {"colour": 1}},
        "context has the field 'item', and the candidates have it too": request() | {"context": {"item": 1}},
    }

    async def talk(client):
        for why, body in bodies.items():
            status, told = await answer(await client.post("/score", json=body))
            assert status == 400 and why in told["error"], (why, told)

    serve(stateful, talk)


def test_an_acknowledged_event_counts_in_the_next_request(stateful):
    async def talk(client):
        assert await asked(client) == {"events": 0, "time": None, "available": True}
        for number in range(12):
            told = await added(client, EVENT | {"time": NOW + number, "event_id": number})
            assert told == {"added": 1, "repeated": 0}
            found = await asked(client)
            assert found == {"events": number + 1, "time": NOW + number, "available": True}
        assert (await asked(client, now=NOW + 3.5))["events"] == 4
        assert (await asked(client, {"user": "u"}))["events"] == 12
        found = await samples(client)
        assert found['jfi_state_requests_total{found="none"}'] == 1
        assert found['jfi_state_requests_total{found="events"}'] == 14
        assert found['jfi_state_events_total{result="added"}'] == 12

    serve(stateful, talk)


def test_the_position_is_the_number_of_rows_that_were_accepted(stateful, store):
    row = EVENT | {"user": "v"}

    async def position(client):
        return (await (await client.get("/health")).json())["state"]["log_position"]

    async def talk(client):
        assert await position(client) == 0
        for bodies, end in (([row] * 3, 1), ([row], 1), ([row | {"event_id": one} for one in "abc"], 4)):
            await added(client, *bodies)
            assert await position(client) == end
        late = EVENT | {"user": "v", "time": NOW - 90000, "event_id": "late"}
        assert (await client.post("/events", json=[row | {"event_id": "d"}, late])).status == 400
        assert await position(client) == 4 and store.get([b"p"]) == [(4).to_bytes(8, "little")]
        filled = stateful.state.fill([stateful.reader.read(json.dumps(request(user)).encode()) for user in "uv"])
        assert [one.stored.position for one in filled] == [4, 4]
        (unread,) = stateful.state.fill([stateful.reader.read(json.dumps(request()).encode())], is_available=False)
        assert unread.stored.position == 0

    serve(stateful, talk)


def test_fields_of_the_context_are_those_of_each_candidate(stateful):
    bodies = [
        request() | {"candidates": {"item": [3, 17]}, "context": {"category": 3}},
        request() | {"candidates": [{"item": 3}, {"item": 17}], "context": {"category": 3}},
        request(),
    ]

    async def talk(client):
        await added(client, EVENT)
        answers = [await answer(await client.post("/score", json=body)) for body in bodies]
        assert answers[0] == answers[1] == answers[2] and answers[0][0] == 200

    serve(stateful, talk)


def test_a_user_is_removed_by_any_id(stateful):
    users = [
        "a/b",
        "/",
        "ü日",
        "a%2Fb",
        "%",
        "a b+c",
        "a?b#c",
        "..",
        ".",
        "x" * 480,
        "a\0b",
        '"',
        "\\",
        "{user}",
        "7.5",
    ]

    async def talk(client):
        await added(client, *(EVENT | {"user": user} for user in [*users, "other"]))
        for user in users:
            path = URL(f"/users/{quote(user, safe='').replace('.', '%2E')}", encoded=True)
            for is_there in (True, False):
                status, told = await answer(await client.delete(path))
                assert (status, told) == (200, {"deleted": is_there}), user
            assert (await asked(client, user))["events"] == 0
        assert (await asked(client, "other"))["events"] == 1
        status, told = await answer(await client.delete(f"/users/{'x' * 481}"))
        assert status == 400 and told["error"] == "the user in the path must be at most 480 bytes, got 481"
        assert (await client.delete("/users/")).status == 404
        assert (await client.get("/users/u")).status == 405
        found = await samples(client)
        assert found['jfi_requests_total{path="/users/{user}",status="200"}'] == 2 * len(users)

    serve(stateful, talk)


def test_a_number_names_the_user_that_its_text_names(stateful):
    async def talk(client):
        await added(client, *(EVENT | {"user": user, "event_id": i} for i, user in enumerate([7, "7", 7.0, "7.0"])))
        assert [(await asked(client, user))["events"] for user in (7, "7", "007")] == [4, 4, 0]
        assert await answer(await client.delete("/users/7.0")) == (200, {"deleted": True})

    serve(stateful, talk)


def test_a_server_without_a_state_has_no_paths_of_one(scorer, request_body):
    async def talk(client):
        found = [await client.post("/events", json=[EVENT]), await client.delete("/users/u")]
        found.append(await client.get("/schema/events"))
        assert [one.status for one in found] == [404] * 3
        status, told = await answer(await client.post("/score", json=request()))
        assert status == 400 and "lacks the field 'history'" in told["error"]

    serve(scorer, talk)
