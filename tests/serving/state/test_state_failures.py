"""The server with a state of users whose store fails or waits, whose artifact changes, and whose clients leave."""

import asyncio
import json
import math
import threading

import pytest

pytest.importorskip("aiohttp")

from jfi.serving.artifact import INFO, VOCABULARIES, ArtifactError
from jfi.serving.scorer import Scorer, StateSettings
from jfi.serving.server import events as server_events
from jfi.serving.server.events import WRITER
from jfi.serving.server.live import LIVE
from jfi.state.layout import TIME
from jfi.state.state import write_layout
from jfi.state.stores import StoreUnavailableError

from ..conftest import as_sent, rewriting
from ..test_server import samples, serve
from .adding import records_of
from .conftest import CANDIDATES, EVENT, NOW, added, answer, asked, request


def test_a_store_that_fails_is_a_503_or_a_cold_user(exported, store, scorer, request_body):
    cold = scorer.score([scorer.reader({"user": {}, "history": [], "candidates": CANDIDATES})])[0]

    async def talk(client, is_cold: bool):
        await added(client, EVENT)
        store.fault = "the disk is gone"
        for _ in range(2):
            response = await client.post("/score", json=request())
            status, told = await answer(response)
            if is_cold:
                assert (status, told["state"]) == (200, {"events": 0, "time": None, "available": False})
                assert told["scores"] == as_sent(cold)
            else:
                assert (status, response.headers["Retry-After"]) == (503, "1")
                assert told["error"] == "the state of users does not answer: the disk is gone; try again"
        for response in (await client.post("/events", json=[EVENT] * 3), await client.delete("/users/u")):
            status, told = await answer(response)
            assert status == 503 and "the disk is gone" in told["error"] and response.headers["Retry-After"]
        assert (await client.post("/score", json=request_body)).status == 200  # it has its own events
        store.fault = None
        assert (await asked(client))["events"] == 1
        found = await samples(client)
        assert found['jfi_state_requests_total{found="unavailable"}'] == 2
        assert found['jfi_state_events_total{result="failed"}'] == 3
        assert found.get('jfi_refused_total{reason="state"}', 0) == (2 if is_cold else 4)

    for is_cold in (False, True):
        scorer_of_state = Scorer(exported.path, state=StateSettings(store, cold_if_unavailable=is_cold))
        serve(scorer_of_state, lambda client, is_cold=is_cold: talk(client, is_cold))
        store.update(lambda get: {b"uu": None})


def test_a_store_that_fails_between_two_reads_has_found_nothing(exported, store, monkeypatch):
    scorer = Scorer(exported.path, state=StateSettings(store, cold_if_unavailable=True))
    scorer.state.add([scorer.events([EVENT])])
    fill, read = scorer.state.fill, scorer.reader(request())

    def fail_after_one(requests, is_available=True):
        found = fill(requests, is_available)
        if is_available:
            raise StoreUnavailableError("slow")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(scorer.state, "fill", fail_after_one)
        scorer.score([read])
    assert read.stored.answer() == {"events": 0, "time": None, "available": False}
    scorer.score([read])  # as after another fault of a batch
    assert read.stored.answer() == {"events": 1, "time": NOW, "available": True}


def test_requests_with_events_are_scored_though_those_beside_them_need_the_store(stateful, store, request_body):
    async def talk(client):
        store.fault = "slow"
        bodies = [request_body, request(), request_body, request("v")]
        found = await asyncio.gather(*(client.post("/score", json=body) for body in bodies))
        assert [one.status for one in found] == [200, 503, 200, 503]
        assert (await samples(client))['jfi_state_requests_total{found="unavailable"}'] == 2

    serve(stateful, talk, max_wait=0.3)


def test_requests_with_events_do_not_wait_for_a_store_that_hangs(stateful, store, request_body, monkeypatch):
    go_on, get = threading.Event(), store.get
    monkeypatch.setattr(store, "get", lambda keys: go_on.wait(60) and get(keys))

    async def talk(client):
        stored = asyncio.create_task(client.post("/score", json=request()))
        while not len(client.app[LIVE].now.batcher):
            await asyncio.sleep(0.01)
        assert (await client.post("/score", json=request_body)).status == 200 and not stored.done()
        go_on.set()
        assert (await stored).status == 200

    serve(stateful, talk, max_batch=4, max_wait=60.0)  # both in one batch, which is full then


def test_a_write_that_hangs_takes_no_place_of_requests(stateful, store, request_body):
    async def talk(client):
        store.go_on = threading.Event()
        post = asyncio.create_task(client.post("/events", json=[EVENT]))
        while not client.app[WRITER]._is_writing:
            await asyncio.sleep(0.01)
        assert (await client.post("/score", json=request_body)).status == 200
        store.go_on.set()
        assert await answer(await post) == (200, {"added": 1, "repeated": 0})

    serve(stateful, talk, queue=1)


def test_a_request_that_waits_for_a_slow_store_until_its_deadline_has_found_nothing(stateful, store, monkeypatch):
    go_on, get = threading.Event(), store.get

    def slow(keys):
        assert go_on.wait(60)
        return get(keys)

    async def talk(client):
        await added(client, EVENT)
        monkeypatch.setattr(store, "get", slow)
        first = asyncio.create_task(client.post("/score", json=request()))
        while not client.app[LIVE].now.batcher._calling:
            await asyncio.sleep(0.01)
        status, told = await answer(await client.post("/score", json=request()))
        assert (status, told["error"]) == (503, "the request has waited until its deadline; try again")
        go_on.set()
        assert (await answer(await first))[1]["state"]["events"] == 1
        found = await samples(client)
        counted = {
            name: found[f'jfi_state_requests_total{{found="{name}"}}'] for name in ("events", "none", "unavailable")
        }
        assert counted == {"events": 1, "none": 0, "unavailable": 0}

    serve(stateful, talk, deadline=1.0)


def rewritten(path, source, change):
    with rewriting(path, source) as folder:
        parts = [json.loads((folder / name).read_text()) for name in (INFO, VOCABULARIES)]
        change(*parts)
        for name, part in zip((INFO, VOCABULARIES), parts, strict=True):
            (folder / name).write_text(json.dumps(part))
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda _, known: known["item"].reverse(),
        lambda _, known: known["item"].__setitem__(slice(3), ["new 1", "new 2", "991"]),
        lambda info, _: info["limits"].update(max_history=2),
        lambda info, _: info["schema"]["event"][0].update(default="3"),
    ],
    ids=["another order", "new values", "shorter", "default"],
)
def test_an_artifact_of_other_values_is_swapped_in_and_reads_the_same_events(
    exported, stateful, store, tmp_path, change
):
    other = rewritten(tmp_path / "other", exported.path, change)
    plain, events = Scorer(other), [EVENT | {"event_id": i, "item": item, "time": NOW + i} for i, item in
                                    enumerate((3, 991, "new", 17))]  # fmt: skip

    async def talk(client):
        await added(client, *events[:3])
        await asked(client)
        await client.app[LIVE].replace(Scorer(other, state=StateSettings(store)))
        assert await added(client, events[0], events[3]) == {"added": 1, "repeated": 1}
        status, told = await answer(await client.post("/score", json=request()))
        history = [{"age": NOW + 60 - one["time"]} | {name: one[name] for name in ("item", "category", "rating")}
                   for one in events]  # fmt: skip
        wanted = {"user": {}, "candidates": CANDIDATES, "history": history}
        assert (status, told["scores"]) == (200, as_sent(plain.score([plain.reader(wanted)])[0]))

    serve(stateful, talk)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda info, _: info["limits"].update(max_history=31),
            "the state keeps 30 events of a user, and the model reads 31",
        ),
        (
            lambda info, _: info["schema"]["event"][0].update(kind="quantile", edges=[2.0]),
            "the field 'item' of the state's events has texts, and the model reads numbers",
        ),
    ],
    ids=["longer", "another kind"],
)
def test_an_artifact_that_reads_what_the_state_does_not_have_is_refused(
    exported, stateful, store, tmp_path, change, why
):
    other = rewritten(tmp_path / "other", exported.path, change)
    with pytest.raises(ArtifactError) as fault:
        Scorer(other, state=StateSettings(store))
    assert f"{other} cannot be served with this state of users: " in str(fault.value) and why in str(fault.value)

    async def talk(client):
        assert await added(client, EVENT) == {"added": 1, "repeated": 0}

    serve(stateful, talk)


def test_a_longer_history_than_the_state_keeps_is_refused(exported, store):
    with pytest.raises(ArtifactError, match="the state keeps 30 events of a user, and the model reads 31"):
        Scorer(exported.path, max_history=31, state=StateSettings(store))
    shorter = Scorer(exported.path, max_history=2, state=StateSettings(store))
    shorter.state.add([shorter.events([EVENT | {"event_id": i} for i in range(5)])])
    (found,) = shorter.state.fill([shorter.reader(request())])
    assert found.num_events == found.stored.events == 2


def test_bodies_that_wait_are_written_together_each_whole_or_not(stateful, store):
    """64 at a time to one user, some of them with a late event."""

    async def talk(client):
        await added(client, EVENT)
        store.go_on, before = threading.Event(), store.updates
        bodies = []
        for number in range(64):
            rows = [
                EVENT | {"event_id": f"{number}-{i}", "item": number, "time": NOW + number}
                for i in range(1 + number % 2)
            ]
            if number % 8 == 7:
                rows[1]["time"] = NOW - 90_000
            bodies.append([*rows, EVENT])
        posts = [asyncio.create_task(client.post("/events", json=body)) for body in bodies]
        while len(client.app[WRITER]._waiting) < 63:
            await asyncio.sleep(0.01)
        store.go_on.set()
        answers = [await answer(await post) for post in posts]
        for number, (status, told) in enumerate(answers):
            if number % 8 == 7:
                assert status == 400 and "s older than the newest row of the user" in told["error"]
            else:
                assert (status, told) == (200, {"added": 1 + number % 2, "repeated": 1})
        assert store.updates - before == 2  # the first body, and all that waited while it was written
        (records,) = records_of(stateful.state, ["u"])
        wanted = [NOW + number for number in range(64) if number % 8 != 7 for _ in range(1 + number % 2)]
        assert records[TIME].tolist() == [NOW, *wanted]

    serve(stateful, talk, queue=100)


@pytest.mark.parametrize(
    ("quick", "updates"),
    [
        pytest.param(0.0, 4, id="slow"),  # of one, two, two and one body
        pytest.param(math.inf, 3, id="quick"),  # of one, two and, as the number doubles, three bodies
    ],
)
def test_a_write_takes_a_bounded_number_of_events(stateful, store, monkeypatch, quick, updates):
    monkeypatch.setattr(server_events, "_AT_ONCE", 3)
    monkeypatch.setattr(server_events, "_QUICK", quick)

    async def talk(client):
        store.go_on, before = threading.Event(), store.updates
        posts = [
            asyncio.create_task(client.post("/events", json=[EVENT | {"event_id": f"{body}-{i}"} for i in range(2)]))
            for body in range(6)
        ]
        while len(client.app[WRITER]._waiting) < 5:
            await asyncio.sleep(0.01)
        store.go_on.set()
        assert [await answer(await post) for post in posts] == [(200, {"added": 2, "repeated": 0})] * 6
        assert store.updates - before == updates
        assert (await asked(client))["events"] == 12

    serve(stateful, talk)


def test_after_a_write_that_failed_half_of_its_events_are_written_together(stateful, store, monkeypatch):
    monkeypatch.setattr(server_events, "_FEWEST", 2)

    async def talk(client):
        store.fault = "slow"
        status, told = await answer(await client.post("/events", json=[EVENT] * 8))
        assert (status, told["error"]) == (503, "the state of users does not answer: slow; try again")
        store.fault, store.go_on, before = None, threading.Event(), store.updates
        posts = [asyncio.create_task(client.post("/events", json=[EVENT | {"event_id": i}])) for i in range(9)]
        while len(client.app[WRITER]._waiting) < 8:
            await asyncio.sleep(0.01)
        store.go_on.set()
        assert {(await one).status for one in posts} == {200}
        assert store.updates - before == 3  # of one, four and four events

    serve(stateful, talk)


def test_a_body_of_more_events_that_fails_lets_no_more_be_written_together(stateful, store, monkeypatch):
    monkeypatch.setattr(server_events, "_AT_ONCE", 4)
    monkeypatch.setattr(server_events, "_FEWEST", 1)

    async def talk(client):
        store.fault = "slow"
        assert (await client.post("/events", json=[EVENT] * 20)).status == 503
        assert client.app[WRITER]._at_once == 2

    serve(stateful, talk)


def test_a_user_whose_events_are_damaged_is_refused_alone_and_by_name(stateful, store):
    """Other users are answered, though their bodies and requests are joined with the damaged one's."""

    async def talk(client):
        users = ["u", "damaged", "v"]
        await added(client, *(EVENT | {"user": user} for user in users))
        store.put([(b"udamaged", store.get([b"udamaged"])[0][:-1])])
        store.go_on = threading.Event()
        bodies = [[EVENT | {"user": "w"}], *([EVENT | {"user": user, "event_id": "new"}] for user in users)]
        posts = [asyncio.create_task(client.post("/events", json=body)) for body in bodies]
        while len(client.app[WRITER]._waiting) < 3:
            await asyncio.sleep(0.01)
        store.go_on.set()
        _, *posted = [await answer(await one) for one in posts]
        scored = await asyncio.gather(*(client.post("/score", json=request(user)) for user in users))
        for found in (posted, [await answer(one) for one in scored]):
            assert [status for status, _ in found] == [200, 500, 200]
            assert "the state of users is damaged: the events of user 'damaged': " in found[1][1]["error"]
        found = await samples(client)
        assert found['jfi_state_events_total{result="failed"}'] == 1
        assert found['jfi_state_requests_total{found="unavailable"}'] == 1
        assert found['jfi_requests_total{path="/score",status="500"}'] == 1

    serve(stateful, talk, max_wait=0.1)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_state_that_was_removed_or_replaced_below_a_server_answers_nobody(stateful, store, replaced):
    """The server knows the numbers of the first one's values."""

    async def talk(client):
        await added(client, EVENT)
        await asked(client)
        store.update(lambda get: {key: None for key, _ in store.scan(b"")})
        if replaced:  # by one of the same columns
            write_layout(store, stateful.state.layout)
        before = dict(store.scan(b""))
        calls = client.post("/events", json=[EVENT]), client.delete("/users/u"), client.post("/score", json=request())
        for response in calls:
            status, told = await answer(await response)
            assert (status, told["error"][:42]) == (500, "the state of users was removed or replaced")
        assert dict(store.scan(b"")) == before

    serve(stateful, talk)


def test_what_a_client_sent_who_has_left_is_whole(stateful, store):
    async def talk(client):
        store.go_on = threading.Event()
        posts = [asyncio.create_task(client.post("/events", json=[EVENT | {"event_id": i}] * 2)) for i in range(3)]
        while len(client.app[WRITER]._waiting) < 2:
            await asyncio.sleep(0.01)
        for post in posts[:2]:
            post.cancel()
        store.go_on.set()
        assert await answer(await posts[2]) == (200, {"added": 1, "repeated": 1})
        assert (await asked(client))["events"] == 3

    serve(stateful, talk)


def test_a_server_that_stops_writes_what_it_has_begun(stateful, store):
    async def talk(client):
        store.go_on = threading.Event()
        posts = [asyncio.create_task(client.post("/events", json=[EVENT | {"event_id": i}])) for i in range(3)]
        while len(client.app[WRITER]._waiting) < 2:
            await asyncio.sleep(0.01)
        for post in posts:
            post.cancel()
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().call_later(0.1, store.go_on.set)

    serve(stateful, talk)
    (records,) = records_of(stateful.state, ["u"])
    assert len(records) == 3
