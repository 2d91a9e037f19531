"""The server as those who operate it meet it: probes, metrics, ids, deadlines, and artifacts that change."""

import asyncio
import gc
import json
import re
import weakref
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import jfi
from jfi.serving import artifact
from jfi.serving.artifact import ArtifactError
from jfi.serving.scorer import Scorer
from jfi.serving.server import live

pytest.importorskip("aiohttp")
from aiohttp.test_utils import TestClient

from jfi.serving.server.app import make_app
from jfi.serving.server.live import LIVE

from .conftest import rewriting
from .test_server import Server, Slow, samples, serve


def variant(path: Path, source: Path, factor: float = 2.0, **info: object) -> Path:
    """A copy of an artifact with other tables and other contents of artifact.json, and right checksums."""
    with rewriting(path, source) as folder:
        tables = load_file(folder / artifact.TABLES)
        save_file({name: weight * factor for name, weight in tables.items()}, folder / artifact.TABLES)
        file = folder / artifact.INFO
        file.write_text(json.dumps(json.loads(file.read_text()) | info))
    return path


def test_metrics_count_what_was_answered(scorer, request_body):
    async def talk(client):
        for body in (request_body, request_body, {}):
            await client.post("/score", json=body)
        await client.get("/nothing")
        return await samples(client)

    found = serve(scorer, talk)
    assert found['jfi_requests_total{path="/score",status="200"}'] == 2
    assert found['jfi_requests_total{path="other",status="404"}'] == 1
    assert found['jfi_refused_total{reason="bad_request"}'] == found['jfi_refused_total{reason="not_found"}'] == 1
    assert found["jfi_request_seconds_count"] == found['jfi_request_seconds_bucket{le="+Inf"}'] == 2
    assert found["jfi_batch_requests_sum"] == 2 and found["jfi_batch_candidates_sum"] == 4
    assert found["jfi_call_seconds_sum"] > 0 and found["jfi_queue_length"] == 0
    assert found[f'jfi_artifact_info{{id="{scorer.identity}"}}'] == 1


def test_scores_that_are_not_finite_are_a_fault_of_the_model(exported, tmp_path, request_body, log):
    not_finite = Scorer(variant(tmp_path / "nan", exported.path, float("nan")))

    async def talk(client):
        answer = await client.post("/score", json=request_body)
        return answer.status, await answer.json(), await samples(client)

    status, told, found = serve(not_finite, talk)
    assert (status, told) == (500, {"error": "the scores of the model are not finite"})
    assert found['jfi_requests_total{path="/score",status="500"}'] == 1
    assert "the scores of the model are not finite" in log() and "Traceback" not in log()


def test_metrics_count_values_that_the_vocabulary_lacks(scorer, request_body):
    """Of two candidates one item is new and one category null."""

    async def talk(client):
        for body in (request_body, request_body, {}):
            await client.post("/score", json=body)
        await client.get("/health/ready")  # its example has unknown values, which no client has sent
        return await samples(client)

    found = serve(scorer, talk)
    counted = {
        field: tuple(found[f'jfi_{name}_total{{field="{field}"}}'] for name in ("unknown_values", "values"))
        for field in ("candidates.item", "candidates.category", "history.item", "history.category")
    }
    assert counted == {
        "candidates.item": (2, 4),
        "candidates.category": (2, 4),
        "history.item": (0, 6),
        "history.category": (0, 6),
    }


def test_it_is_ready_only_while_the_model_scores(exported, scorer, request_body, monkeypatch, log):
    monkeypatch.setattr(live, "PROBE_SECONDS", 0.2)
    slow = Slow(scorer)

    async def talk(client):
        waiting = asyncio.create_task(client.post("/score", json=request_body))
        paths = ("/health/live", "/health/ready", "/health")
        stuck = [(await client.get(path)).status for path in paths]
        monkeypatch.setattr(live, "PROBE_SECONDS", 120)
        slow.let_go.set()
        assert (await waiting).status == 200
        ready = await client.get("/health/ready")
        assert await ready.json() == {"status": "ok", "artifact": scorer.identity}
        health = await (await client.get("/health")).json()
        assert health["artifact"]["id"] == scorer.identity and "torch" in health["artifact"]["versions"]
        assert health["artifact"]["run"] == "run" and health["artifact"]["versions"]["jfi"] == jfi.__version__
        assert health["artifact"]["trained"] == json.loads((exported.run / "versions.json").read_text())
        age = datetime.now(UTC) - datetime.fromisoformat(health["artifact"]["exported"])
        assert timedelta(0) <= age < timedelta(hours=3)
        return stuck, ready.status

    assert serve(slow, talk) == ([200, 503, 200], 200)
    assert "not ready: TimeoutError" in log()


def test_probes_that_come_together_are_one_call_of_the_model(scorer, monkeypatch):
    slow, called, probe = Slow(scorer), [], live.Live.probe
    monkeypatch.setattr(live.Live, "probe", lambda self: called.append(self) or probe(self))

    async def talk(client):
        probes = [asyncio.create_task(client.get("/health/ready")) for _ in range(64)]
        while len(called) < 64 or not slow.batches:
            await asyncio.sleep(0.01)
        probes.pop().cancel()  # others need the probe that it has begun
        assert (await client.get("/health/live")).status == 200
        slow.let_go.set()
        return {(await one).status for one in probes}

    assert serve(slow, talk) == {200} and slow.batches == [1]


def test_a_request_is_found_in_the_log_by_its_id(scorer, request_body, log):
    async def talk(client):
        bad = request_body | {"candidates": request_body["candidates"][:1] * 3}  # on which Slow fails
        ids = [None, "a1-B:2", "new\tline", "x" * 129]
        answers = [
            await client.post("/score", json=body, headers={} if given is None else {"X-Request-ID": given})
            for given, body in zip(ids, (request_body, bad, {}, request_body), strict=True)
        ]
        return [(answer.status, answer.headers["X-Request-ID"]) for answer in answers]

    slow = Slow(scorer)
    slow.let_go.set()
    (made, kept, *replaced) = serve(slow, talk)
    assert kept == (500, "a1-B:2") and [status for status, _ in (made, *replaced)] == [200, 400, 200]
    assert all(re.fullmatch("[0-9a-f]{32}", name) for _, name in (made, *replaced))
    assert f"id={made[1]} POST /score 200 " in log() and "id=a1-B:2 POST /score 500 " in log()
    assert "request id=a1-B:2 failed" in log() and f"id={replaced[0][1]} POST /score 400 bad_request " in log()


def test_who_waits_until_the_deadline_is_told(scorer, request_body):
    slow = Slow(scorer)

    async def talk(client):
        first = asyncio.create_task(client.post("/score", json=request_body))
        while not slow.batches:
            await asyncio.sleep(0.01)
        late = await client.post("/score", json=request_body)
        assert late.status == 503 and late.headers["Retry-After"] and "deadline" in (await late.json())["error"]
        found = await samples(client)
        assert found['jfi_refused_total{reason="deadline"}'] == 1 and found["jfi_queue_length"] == 0
        slow.let_go.set()
        return (await first).status  # what has begun is finished

    assert serve(slow, talk, deadline=0.2) == 200 and slow.batches == [1]


def test_an_artifact_is_replaced_under_load_without_a_failed_request(exported, scorer, request_body, tmp_path):
    other = variant(tmp_path / "other", exported.path)
    wanted = {one.identity: one.score([one.reader(request_body)])[0] for one in (scorer, Scorer(other))}
    assert len(wanted) == 2 and not np.allclose(*wanted.values(), atol=1e-3)

    async def talk(client):
        answers, over = [], asyncio.Event()

        async def ask():
            while not over.is_set():
                answer = await client.post("/score", json=request_body)
                answers.append((answer.status, (await answer.json()).get("scores")))

        clients = [asyncio.create_task(ask()) for _ in range(8)]
        for path in (other, exported.path, other):
            await client.app[LIVE].replace(Scorer(path))
            count = len(answers)
            while len(answers) < count + 20:
                await asyncio.sleep(0.01)
            now = (await (await client.get("/health")).json())["artifact"]["id"]
            assert now == artifact.sha256_of(path)[:12]
        over.set()
        await asyncio.gather(*clients)
        return answers

    answers = serve(scorer, talk)
    assert {status for status, _ in answers} == {200}
    by_artifact = [sum(np.allclose(scores, want, atol=1e-5) for _, scores in answers) for want in wanted.values()]
    # Of the 20 answers after another artifact has come, 8 may be to requests from before it.
    assert min(by_artifact) >= 12 and sum(by_artifact) == len(answers)


def test_the_first_artifact_is_released_when_it_is_replaced(exported, request_body, tmp_path):
    other = variant(tmp_path / "other", exported.path)

    async def run():
        app = make_app(Scorer(exported.path), max_batch=100)
        async with TestClient(Server(app)) as client:
            assert (await client.post("/score", json=request_body)).status == 200
            first = weakref.ref(app[LIVE].now.scorer)
            await app[LIVE].replace(Scorer(other))
            gc.collect()
            assert first() is None
            assert (await client.post("/score", json=request_body)).status == 200
            last = weakref.ref(app[LIVE].now.scorer)
        gc.collect()
        assert last() is None

    asyncio.run(run())


def test_an_artifact_that_takes_other_requests_is_refused(exported, scorer, request_body, tmp_path):
    fields = json.loads((exported.path / "artifact.json").read_text())["schema"]
    fields |= {"user": [{"name": "city", "kind": "number"}]}
    other = Scorer(variant(tmp_path / "fields", exported.path, schema=fields))

    async def talk(client):
        with pytest.raises(ArtifactError, match="other fields of requests"):
            await client.app[LIVE].replace(other)
        assert (await client.post("/score", json=request_body)).status == 200
        return await samples(client)

    assert serve(scorer, talk)[f'jfi_artifact_info{{id="{scorer.identity}"}}'] == 1
