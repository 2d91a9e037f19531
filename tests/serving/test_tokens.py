"""A server with tokens: who may do what, how tokens are changed without a restart, and that none is ever shown."""

import asyncio
import hashlib
import logging
import os
import urllib.error
import urllib.request

import pytest

pytest.importorskip("aiohttp")

from jfi.serving.scorer import Scorer, StateSettings
from jfi.serving.server import tokens as own
from jfi.utils.errors import InputError

from .state.conftest import EVENT, request, store  # noqa: F401
from .test_commands import said, server
from .test_server import serve

READ, WRITE, DELETE, ALL, NEW = (f"{name}-0123456789" for name in ("reading", "writing", "deleting", "all-of", "later"))
LINES = f"""# of the callers
read {READ}  # the page
write sha256:{hashlib.sha256(WRITE.encode()).hexdigest()}

delete {DELETE}
read write {ALL}
delete {ALL}
"""
CALLS = {
    "read": [("POST", "/score"), *(("GET", f"/{one}") for one in ("schema", "schema/events", "metrics", "health"))],
    "write": [("POST", "/events"), ("PUT", "/users/u"), ("PUT", "/items/i")],
    "delete": [("DELETE", "/users/u"), ("DELETE", "/items/i")],
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(LINES)
    path.chmod(0o600)
    return path


@pytest.fixture
def stateful(exported, store):  # noqa: F811
    return Scorer(exported.path, state=StateSettings(store, max_events=20))


async def call(client, method: str, path: str, token: str | None, scheme: str = "Bearer"):
    headers = {"X-Request-ID": "mine"} | ({} if token is None else {"Authorization": f"{scheme} {token}"})
    bodies = {"/score": request(), "/events": [EVENT]}
    return await client.request(method, path, json=bodies.get(path, {} if method == "PUT" else None), headers=headers)


def test_a_token_does_what_its_scopes_say_and_nothing_else(stateful, path):
    async def talk(client):
        for scope, calls in CALLS.items():
            for method, where in calls:
                for name, token in {"read": READ, "write": WRITE, "delete": DELETE, "all": ALL}.items():
                    got = await call(client, method, where, token)
                    if name in (scope, "all"):
                        assert got.status in (200, 400), (method, where, name)  # this state has no columns of users
                        continue
                    assert got.status == 403, (method, where, name)
                    assert got.headers["WWW-Authenticate"] == f'Bearer error="insufficient_scope", scope="{scope}"'
                    assert await got.json() == {"error": f"the token is not for the scope {scope}"}
                for token in (None, "unknown-0123456789", "", READ[:-1], f"{READ} x", "ü" * 16):
                    got = await call(client, method, where, token)
                    assert got.status == 401 and got.headers["WWW-Authenticate"].startswith("Bearer"), token
                    assert got.headers["X-Request-ID"] == "mine" and set(await got.json()) == {"error"}
        for where in ("/health/live", "/health/ready"):
            assert (await call(client, "GET", where, None)).status == 200
        assert (await call(client, "GET", "/health", READ, "bearer")).status == 200
        assert (await call(client, "GET", "/health", READ, "Basic")).status == 401
        assert [(await call(client, "GET", "/nowhere", one)).status for one in (None, READ)] == [401, 404]

    serve(stateful, talk, tokens=path, pace=1e9)


def test_without_tokens_no_caller_needs_one(stateful):
    async def talk(client):
        for calls in CALLS.values():
            for method, where in calls:
                assert (await call(client, method, where, None)).status in (200, 400)

    serve(stateful, talk)


def test_a_body_without_a_token_is_not_read(stateful, path):
    """The answer comes before the body, of which the client has sent nothing."""

    async def talk(client):
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(b"POST /events HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        async with asyncio.timeout(60):
            assert (await reader.readline()).split()[1] == b"401"
        writer.close()
        headers = {"Authorization": f"Bearer {READ}"}
        found = await (await client.get("/metrics", headers=headers)).text()
        assert 'jfi_refused_total{reason="no_token"} 1.0' in found and "jfi_bodies_arriving 0.0" in found

    serve(stateful, talk, tokens=path)


def replaced(path, text: str) -> None:
    """Replaces a file as an operator does, by a rename."""
    new = path.with_name("new")
    new.write_text(text)
    new.chmod(0o600)
    os.replace(new, path)


def test_tokens_change_without_a_restart_and_a_malformed_file_changes_nothing(stateful, path, monkeypatch, caplog):
    monkeypatch.setattr(own, "_LOOK_SECONDS", 0.0)

    async def talk(client):
        async def statuses() -> list[int]:
            return [(await call(client, "GET", "/schema", token)).status for token in (READ, NEW)]

        assert await statuses() == [200, 401]
        replaced(path, f"read {READ}\nread {NEW}\n")
        assert await statuses() == [200, 200]
        replaced(path, f"read {NEW}\n")
        assert await statuses() == [401, 200]
        for text in (f"read {READ}\nreed {NEW}", "read short", "", None):
            path.unlink() if text is None else replaced(path, text)
            assert await statuses() == [401, 200]
        replaced(path, f"read {READ}\n")
        assert await statuses() == [200, 401]
        found = await (await client.get("/metrics", headers={"Authorization": f"Bearer {READ}"})).text()
        assert "jfi_tokens_refused_total 4.0" in found

    serve(stateful, talk, tokens=path)
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert len(said) == 4 and f"{path}:2: must be some of read, write and delete" in said[0]
    assert not any(token in caplog.text for token in (READ, NEW, "short"))


@pytest.mark.parametrize(
    "line", [READ, f"{READ} read", f"read {READ[:15]}", "read sha256:12", f"raed {READ}", "read 'x y z' 12345678"]
)
def test_a_malformed_line_is_named_without_its_words(line, path):
    path.write_text(f"{LINES}{line}\n")
    with pytest.raises(InputError) as fault:
        own.read_tokens(path)
    assert str(fault.value).startswith(f"--tokens {path}:8: must be ") and READ[:15] not in str(fault.value)


def test_the_command_reads_the_file_and_warns_of_one_that_all_may_read(exported, path, tmp_path, capsys):
    (empty := tmp_path / "empty").write_text("# none\n")
    for file, why in ((tmp_path / "none", "no such file"), (empty, f"--tokens {empty}: has no token")):
        code, text = said("serve", capsys, "--artifact", exported.path, "--tokens", file)
        assert code == 2 and why in text and text.count("\n") == 1
    path.chmod(0o644)
    options = "--artifact", exported.path, "--tokens", path, "--access-log"
    with server(*options) as (process, address):
        for token, status in ((READ, 200), ("unknown-0123456789", 401)):
            one = urllib.request.Request(f"{address}/health", headers={"Authorization": f"Bearer {token}"})
            try:
                found = urllib.request.urlopen(one).status
            except urllib.error.HTTPError as refused:
                found = refused.code
            assert found == status
        process.terminate()
        told = "".join(process.communicate())
    assert "all users of this machine may read it" in told and "401 no_token" in told
    assert not any(token in told for token in (READ, WRITE, "unknown-0123456789"))
