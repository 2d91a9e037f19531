"""The server that follows published versions: each answer is of exactly one, and says which."""

import asyncio
import json
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import commands
import pytest

from jfi.serving.artifact import INFO
from jfi.serving.published import ARTIFACT, CONSTANTS, ROWS, path_of
from jfi.serving.scorer import Scorer
from jfi.serving.version_chain import VersionChain

pytest.importorskip("aiohttp")
from jfi.serving.server import follow as following
from jfi.serving.server.follow import VersionFollower

from .conftest import as_sent
from .publishing import add, bodies, damage, half_applied, huge, new_base
from .test_server import samples, serve


@pytest.fixture(autouse=True)
def _polls_quickly(monkeypatch):
    monkeypatch.setattr(following, "POLL_SECONDS", 0.01)


def expected(source: Path, tmp_path: Path, versions: range) -> dict[int, list]:
    """By version the answers to `bodies`, each alone, by a scorer that begins with it."""
    found = {}
    for number in versions:
        add(tmp_path / "one", source, number)
        scorer = VersionChain(tmp_path / "one", Scorer).start()
        found[number] = [scorer.score([scorer.reader(body)])[0] for body in bodies()]
    return found


async def until(client, version: int, refuses: bool = False) -> dict:
    """The health of a server once it has a version, and refuses the next one if asked for."""
    for _ in range(2000):
        health = await (await client.get("/health")).json()
        if health["version"] == version and (not refuses or health["refused_reason"] is not None):
            return health
        await asyncio.sleep(0.01)
    raise AssertionError(health)


def test_requests_while_versions_are_applied_are_each_answered_by_one(published, tmp_path):
    wanted, folder, asked = expected(published.folder, tmp_path, range(1, 7)), tmp_path / "copy", bodies()
    add(folder, published.folder, 1)
    follower = VersionFollower(folder, Scorer)

    async def ask(client, number: int, answers: list) -> None:
        while not answers or answers[-1][1]["version"] < 6:
            answer = await client.post("/score", json=asked[number])
            answers.append((number, await answer.json() | {"status": answer.status}))

    async def talk(client):
        answers = [[] for _ in asked]
        clients = [asyncio.create_task(ask(client, i, answers[i])) for i in range(len(asked))]
        for version in range(2, 7):
            counts = [len(one) for one in answers]
            while any(len(one) < count + 2 for one, count in zip(answers, counts, strict=True)):
                await asyncio.sleep(0.005)
            add(folder, published.folder, version)
            await until(client, version)
        await asyncio.gather(*clients)
        return answers, await until(client, 6), await samples(client)

    answers, health, metrics = serve(follower.start(), talk, follower=follower)
    for one in answers:
        versions = [answer["version"] for _, answer in one]
        assert versions == sorted(versions) and {1, 6} <= set(versions)
        for number, answer in one:
            assert answer.keys() == {"scores", "version", "status"} and answer["status"] == 200
            own = wanted[answer["version"]][number]
            # Batches with others change the last digits alone; the scores of other versions differ by more.
            assert answer["scores"] == pytest.approx(own, abs=1e-6)
            others = [version[number] for version in wanted.values() if version[number] != own]
            assert len(others) >= 4 and all(answer["scores"] != pytest.approx(one, abs=2e-5) for one in others)
    assert len({answer["version"] for one in answers for _, answer in one}) >= 4
    assert health["log_position"] == {"steps": 5} and health["refused_reason"] is None
    assert metrics["jfi_version"] == 6 and metrics["jfi_version_refused"] == 0
    assert metrics['jfi_versions_total{result="applied"}'] == 5 and metrics['jfi_versions_total{result="refused"}'] == 0
    assert metrics["jfi_version_published_seconds"] == pytest.approx(health["published"])


def test_a_broken_chain_is_said_once_and_the_next_whole_version_goes_on(published, tmp_path, log):
    folder = tmp_path / "copy"
    for number in (1, 2):
        add(folder, published.folder, number)
    follower = VersionFollower(folder, Scorer)

    async def talk(client):
        shutil.copytree(path_of(published.folder, 3), tmp_path / "3")
        damage(tmp_path / "3" / ROWS)
        (tmp_path / "3").rename(path_of(folder, 3))
        while (await samples(client))["jfi_version_refused"] == 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # many polls
        answer = await (await client.post("/score", json=bodies()[0])).json()
        health, found = await (await client.get("/health")).json(), await samples(client)
        add(folder, published.folder, 5)
        return answer, health, found, await until(client, 5), await samples(client)

    answer, broken, found, whole, after = serve(follower.start(), talk, follower=follower)
    assert answer["version"] == broken["version"] == 2 and f"{ROWS} is damaged" in broken["refused_reason"]
    assert found['jfi_versions_total{result="refused"}'] == after['jfi_versions_total{result="refused"}'] == 1
    assert log().count("version 2 answers on: ") == 1
    assert log().count("version 5 answers, of artifact ") == 1
    assert whole["refused_reason"] is None and after["jfi_version_refused"] == 0


def test_a_version_whose_scores_are_not_finite_is_refused_and_the_one_before_answers(published, tmp_path, log):
    wanted, folder = expected(published.folder, tmp_path, range(1, 3)), tmp_path / "copy"
    for number in (1, 2):
        add(folder, published.folder, number)
    follower = VersionFollower(folder, Scorer)

    async def talk(client):
        add(tmp_path / "3", published.folder, 3)
        huge(path_of(tmp_path / "3", 3) / CONSTANTS)
        path_of(tmp_path / "3", 3).rename(path_of(folder, 3))
        health = await until(client, 2, refuses=True)
        answer = await client.post("/score", json=bodies()[3])
        found = answer.status, await answer.json(), await samples(client)
        add(folder, published.folder, 5)
        return health, *found, await until(client, 5)

    health, status, answer, metrics, _ = serve(follower.start(), talk, follower=follower)
    assert health["refused_reason"].endswith("0000000003: the scores of version 3 are not finite")
    assert (status, answer) == (200, {"scores": as_sent(wanted[2][3]), "version": 2})
    assert metrics["jfi_version_refused"] == metrics['jfi_versions_total{result="refused"}'] == 1
    assert "version 2 answers on: " in log()


@pytest.mark.parametrize("can_be_undone", [True, False])
def test_a_version_that_fails_half_way_is_answered_from_by_nobody(published, tmp_path, log, monkeypatch, can_be_undone):
    """If it cannot be undone, the newest whole version takes its place, with the change to version 2."""
    wanted, folder = expected(published.folder, tmp_path, range(1, 6)), tmp_path / "copy"
    for number in (1, 2):
        add(folder, published.folder, number)
    follower, request, answers = VersionFollower(folder, Scorer), bodies()[3], []
    half_applied(monkeypatch, 3, can_be_undone)

    async def ask(client) -> dict:
        answer = await client.post("/score", json=request)
        answers.append((answer.status, await answer.json()))
        return answers[-1][1]

    async def talk(client):
        add(folder, published.folder, 3)
        while (found := await samples(client))["jfi_version_refused"] == 0 or (await ask(client)).get("version") != 2:
            await asyncio.sleep(0.01)
        health = await until(client, 2, refuses=True)
        add(folder, published.folder, 5)
        return health, found, await until(client, 5), await ask(client)

    health, found, whole, last = serve(follower.start(), talk, follower=follower)
    known = [{"scores": as_sent(wanted[number][3]), "version": number} for number in (1, 2)]
    assert all(status == 500 or answer in known for status, answer in answers[:-1])
    assert not can_be_undone or all(answer == known[1] for _, answer in answers[:-1])
    assert "0000000003: it could not be applied: KeyError" in health["refused_reason"]
    assert found['jfi_versions_total{result="refused"}'] == 1 and found["jfi_version_refused"] == 1
    assert whole["refused_reason"] is None and last == {"scores": as_sent(wanted[5][3]), "version": 5}
    assert ("version 1 answers, of artifact " in log()) == (not can_be_undone)


def test_what_takes_long_of_a_version_is_not_done_between_calls_of_the_model(published, tmp_path, monkeypatch):
    for number in (1, 2):
        add(tmp_path / "copy", published.folder, number)
    follower, threads, prepare = VersionFollower(tmp_path / "copy", Scorer), [], Scorer.prepare
    scorer = follower.start()

    def named(self, change):
        threads.append(threading.current_thread().name)
        apply = prepare(self, change)
        return lambda: (threads.append(threading.current_thread().name), apply())

    monkeypatch.setattr(Scorer, "prepare", named)

    async def talk(client):
        add(tmp_path / "copy", published.folder, 3)
        return await until(client, 3)

    serve(scorer, talk, follower=follower)
    prepared, applied = threads
    assert applied.startswith("score") and not prepared.startswith("score") and prepared != "MainThread"


def test_a_new_base_takes_the_place_of_the_artifact(published, tmp_path, log):
    wanted, folder = expected(published.folder, tmp_path, range(1, 2))[1], tmp_path / "copy"
    for number in (1, 2):
        add(folder, published.folder, number)
    follower = VersionFollower(folder, Scorer)

    async def talk(client):
        before = (await (await client.get("/health")).json())["artifact"]
        new_base(folder, published.folder, 3, run="another")
        after = (await until(client, 3))["artifact"]
        answer = await (await client.post("/score", json=bodies()[3])).json()
        # One that takes other requests is refused, and the server stays.
        schema = json.loads((path_of(folder, 3) / ARTIFACT / INFO).read_text())["schema"]
        next(one for one in schema["event"] if one["kind"] == "age")["name"] = "seconds ago"
        new_base(folder, published.folder, 4, schema=schema)
        while (await samples(client))["jfi_version_refused"] == 0:
            await asyncio.sleep(0.01)
        last = await (await client.post("/score", json=bodies()[3])).json()
        return before, after, answer, last

    before, after, answer, last = serve(follower.start(), talk, follower=follower)
    assert before["run"] is None and after["run"] == "another" and before["id"] != after["id"]
    assert answer == last == {"scores": as_sent(wanted[3]), "version": 3}
    assert "has other fields of requests" in log()


def test_an_artifact_alone_names_no_version(exported, request_body):
    async def talk(client):
        health = await (await client.get("/health")).json()
        return await (await client.post("/score", json=request_body)).json(), health, await samples(client)

    answer, health, metrics = serve(Scorer(exported.path), talk)
    assert "version" not in answer and "version" not in health and metrics["jfi_version"] == 0


def test_the_command_follows_and_refuses_by_name(published, tmp_path, capsys):
    def refuse(*arguments: object) -> str:
        assert commands.call("serve", *arguments) == 2
        return capsys.readouterr().err

    gone = tmp_path / "gone"
    assert f"--follow {gone}: no such folder" in refuse("--follow", gone)
    assert "has no whole version to start from" in refuse("--follow", tmp_path)
    assert "--artifact" in refuse("--follow", tmp_path, "--artifact", tmp_path)
    assert "--follow" in refuse()
    assert "--at is a version of --follow FOLDER" in refuse("--artifact", tmp_path, "--at", 3)
    assert "has no version 9 that can be served" in refuse("--follow", published.folder, "--at", 9)
    command = [sys.executable, "-m", "jfi", "serve", "--follow", str(published.folder), "--at", "4", "--port", "0"]
    command += ["--drain-seconds", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        assert line.startswith("serving on http://127.0.0.1:")
        with urllib.request.urlopen(line.split()[2].rstrip(";") + "/health") as answer:
            assert json.load(answer)["version"] == 4
    finally:
        server.terminate()
        assert server.wait(60) == 0
