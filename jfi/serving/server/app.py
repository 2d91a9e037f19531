"""The HTTP server, with aiohttp.

POST /score          a request -> {"scores": [...]}
POST /events         with a state of users: events -> {"added": 1, "repeated": 0}, once they are stored; with a quota of
                     users also "over_quota", how many are left out
PUT /items/ID        with a state of users: columns, in place of the item's -> {"stored": true}; so too /users/ID
DELETE /users/ID     with a state of users: removes a user's events and columns -> {"deleted": true}; so too /items/ID
GET  /schema         the JSON Schema of a request
GET  /schema/events  with a state of users: the JSON Schema of events
GET  /health         {"status": "ok", ...}: what serves, and how much of it is in use
GET  /health/live    200 while the process answers at all
GET  /health/ready   200 if the model scores now, otherwise 503, from the signal to stop on
GET  /metrics        counts and latencies for Prometheus

A fault is answered by {"error": reason}: 400 for a request that does not match the schema, 404, 405, 408 for a body
that does not arrive in time, 413 for one that is too large, 415 for one that is compressed, 500 if the model fails or
the state of users is damaged, and 503 with Retry-After if the server is at capacity, a request has waited until its
deadline, or the state of users does not answer. Every answer has the header X-Request-ID, which is the request's own if
it has one. With a file of tokens a request other than of a probe gets a 401 without a token of it, and a 403 with one
for other scopes, before its body is read; see `jfi.serving.server.tokens`.
"""

import asyncio
import logging
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from jfi.serving.request_log import RequestLog
from jfi.serving.requests import BadRequestError
from jfi.serving.schema import NotFiniteError
from jfi.serving.scorer import Scorer
from jfi.serving.server.admission import Admission, Bodies, Connections, OverloadedError, Pace, Runner
from jfi.serving.server.batcher import DeadlineExceededError
from jfi.serving.server.events import LOG, WRITER, EventWriter, json_response, state_routes
from jfi.serving.server.follow import VersionFollower
from jfi.serving.server.live import LIVE, Live
from jfi.serving.server.metrics import Metrics
from jfi.serving.server.tokens import Tokens
from jfi.state.stores import StoreUnavailableError
from jfi.utils.errors import InputError

_RETRY_SECONDS = "1"
_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_REASONS = {400: "bad_request", 401: "no_token", 403: "other_scope", 404: "not_found", 405: "method", 408: "slow_body"}
_REASONS |= {413: "too_large", 415: "compressed"}
_log = logging.getLogger("jfi.serving")
_requests = logging.getLogger("jfi.serving.requests")

_METRICS = web.AppKey("metrics", Metrics)
_BODIES = web.AppKey("bodies", Bodies)
_CONNECTIONS = web.AppKey("connections", Connections)
_FAULTS, _PROBES = web.AppKey("faults", Pace), web.AppKey("probes", Pace)
_TOKENS = web.AppKey("tokens", Tokens)
#: What runs beside the answers until it is cancelled.
Task = Callable[[Live, Metrics], Awaitable[None]]
#: The id of the request that is answered.
_NAME: ContextVar[str] = ContextVar("id")
#: Set once the server is about to stop.
_STOPPING = web.AppKey("stopping", asyncio.Event)


def make_app(
    scorer: Scorer,
    *,
    max_batch: int,
    max_wait: float = 0.0,
    queue: int = 64,
    max_body: int = 2**21,
    bodies: int = 256,
    connections: int = 1024,
    body_seconds: float = 10.0,
    pace: float = 200.0,
    deadline: float = 5.0,
    follower: VersionFollower | None = None,
    tasks: Sequence[Task] = (),
    feed: Path | None = None,
    log: Callable[[Callable[[str, int], None]], RequestLog] | None = None,
    tokens: Path | None = None,
) -> web.Application:
    """The application, which `run` serves.

    Args:
        max_batch, max_wait: as in Batcher.
        queue: most requests that are read, wait or are scored; more get a 503.
        max_body: most bytes of a request's body.
        bodies: most bodies that are arriving, which have at most `queue * max_body` bytes together.
        connections: most connections; a further one takes the place of one that waits for its next request.
        body_seconds: for a body to arrive, or the headers of a request.
        pace: as of Pace.
        deadline: seconds that a request may wait until a call of the model begins.
        follower: keeps it at the newest published version, which each answer names; `scorer` is what it started.
        tasks: run while it serves, such as what writes the log; they are cancelled after the last event is written.
        feed: folder that the state is fed from; events are not taken otherwise then.
        log: opens a log of requests, given what counts its lines; None without one.
        tokens: a file of callers' tokens; None answers all.

    Raises:
        InputError: the file of tokens is malformed.
    """
    admission, metrics = Admission(queue), Metrics()
    arriving = Bodies(bodies, queue * max_body, max_body, body_seconds)
    app = web.Application(middlewares=[_answer])
    app[_METRICS], app[_BODIES], app[_STOPPING] = metrics, arriving, asyncio.Event()
    app[_FAULTS], app[_PROBES] = Pace(pace), Pace(pace)
    app[_CONNECTIONS] = Connections(connections, body_seconds, metrics)
    if tokens is not None:
        app[_TOKENS] = Tokens(tokens, metrics.tokens_refused)

    async def running(app: web.Application):
        nonlocal scorer
        app[LIVE] = live = Live(scorer, metrics, max_batch=max_batch, max_wait=max_wait)
        metrics.inside.set_function(lambda: admission.inside)
        metrics.queue_length.set_function(lambda: len(live.now.batcher))
        metrics.queue_capacity.set(queue)
        metrics.bodies_arriving.set_function(lambda: arriving.arriving)
        metrics.connections.set_function(lambda: len(app[_CONNECTIONS].open))
        app[WRITER] = EventWriter(lambda: app[LIVE].now.scorer.state, metrics, queue)
        app[LOG] = None if log is None else log(metrics.logged_lines)
        own = [*tasks] if follower is None else [*tasks, follower.run]
        if scorer.state is not None and scorer.state.retention.is_bounded:
            own.append(app[WRITER].expire)
        del scorer  # an artifact in use is held by Live alone, which releases it for another
        running = [asyncio.create_task(task(live, metrics)) for task in own]
        yield
        await app[WRITER].close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await app[LIVE].close()
        if app[LOG] is not None:
            await asyncio.to_thread(app[LOG].close)

    async def score(request: web.Request) -> web.Response:
        start = time.perf_counter()
        admission.check()
        body = await arriving.receive(request)
        with admission:
            until = asyncio.get_running_loop().time() + deadline
            scores, scored = await app[LIVE].score(body, until)
            answer = {"scores": scores} | ({} if scored.version is None else {"version": scored.version})
            if scored.stored is not None:
                answer["state"] = scored.stored.answer()
        if app[LOG] is not None:
            app[LOG].add(_NAME.get(), body, scores, scored, app[LIVE].now.scorer.reader)
        metrics.request_seconds.observe(time.perf_counter() - start)
        return json_response(answer)

    async def health(_: web.Request) -> web.Response:
        found = _describe(app[LIVE].now.scorer, admission.inside)
        return web.json_response(found if follower is None else found | follower.health())

    app.cleanup_ctx.append(running)
    paths = {"health": health, "health/live": _alive, "health/ready": _ready}
    paths |= {"schema": _schema, "metrics": _show_metrics}
    routes = [web.post("/score", score), *(web.get(f"/{path}", handler) for path, handler in paths.items())]
    if scorer.state is not None:
        routes += state_routes(admission, arriving, deadline, feed)
    app.add_routes(routes)
    return app


def _describe(now: Scorer, requests: int) -> dict:
    """Returns what `/health` says of the artifact that answers, while so many requests are inside."""
    info = now.info
    artifact = {"id": now.identity, "run": info.run, "trained": info.trained, "exported": info.exported}
    artifact |= {"versions": info.versions, "tables": info.quantization}
    state = None if now.state is None else {"log_position": now.state.position}
    return {"status": "ok", "artifact": artifact, "requests": requests, "device": info.device, "state": state}


async def _alive(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def _ready(request: web.Request) -> web.Response:
    if request.app[_STOPPING].is_set():
        return _error(503, "the server is about to stop")
    try:
        await request.app[LIVE].probe()
    except Exception as error:
        _log.warning("not ready: %r", error)
        return _error(503, "the model does not answer; see the server's log")
    return web.json_response({"status": "ok", "artifact": request.app[LIVE].now.scorer.identity})


async def _show_metrics(request: web.Request) -> web.Response:
    metrics = request.app[_METRICS]
    metrics.artifact.info({"id": request.app[LIVE].now.scorer.identity})
    return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


async def _schema(request: web.Request) -> web.Response:
    return web.json_response(request.app[LIVE].now.scorer.reader.json_schema())


def make_runner(app: web.Application) -> Runner:
    """Returns what runs an application of `make_app` within its bounds."""
    return Runner(app, app[_CONNECTIONS])


async def run(app: web.Application, host: str, port: int, stop: asyncio.Event, drain_seconds: float = 0.0) -> None:
    """Serves until `stop` is set, and then answers all requests that it has accepted.

    Args:
        stop: begins the end; set again, it ends `drain_seconds`, or after them the wait for bodies and answers.
        drain_seconds: time in which it still accepts requests, but is not ready and closes each connection after an
            answer, so that a load balancer chooses others.

    Raises:
        OSError, OverflowError: it cannot listen there.
    """
    runner = make_runner(app)
    try:
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        print(f"serving on {site.name}; SIGTERM or Ctrl-C stops it", flush=True)
        await stop.wait()
        stop.clear()
        app[_STOPPING].set()
        if drain_seconds:
            _log.warning("the server stops in %g s, on another signal at once", drain_seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                await stop.wait()
        stop.clear()  # another signal from now on ends the wait for bodies and answers
        await site.stop()
    except BaseException:
        stop.clear()  # a server that has not begun has no connections to close
        raise
    finally:
        hurry = asyncio.create_task(_close_connections(runner, stop))
        await app[_BODIES].wait()  # aiohttp would drop what arrives after its cleanup has begun
        await runner.cleanup()
        hurry.cancel()


async def _close_connections(runner: Runner, stop: asyncio.Event) -> None:
    """Ends all requests once `stop` is set."""
    await stop.wait()
    for connection in [*runner.connections.open]:
        if connection.transport is not None:
            connection.transport.abort()


def without_traceback(record: logging.LogRecord) -> bool:
    """A filter for the logger "aiohttp.server": of what is not HTTP one line."""
    if record.exc_info and isinstance(fault := record.exc_info[1], HttpProcessingError | web.RequestPayloadError):
        record.msg, record.args = "a client's fault in HTTP: %s", (" ".join(str(fault).split())[:200],)
        record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
        return logging.getLogger("jfi.serving").isEnabledFor(logging.INFO)
    return True


def once_a_minute() -> Callable[[logging.LogRecord], bool]:
    """Returns a filter for the logger "asyncio": of connections that lack a file descriptor, one line a minute.

    While there is none, asyncio writes a traceback for each try to accept one, thousands in a second.
    """
    last = -math.inf

    def passes(record: logging.LogRecord) -> bool:
        nonlocal last
        if not record.getMessage().startswith("socket.accept() out of system resource"):
            return True
        record.msg, record.args, record.exc_info = "no connection can be accepted: too many open files", (), None
        if is_due := record.created - last >= 60:
            last = record.created
        return is_due

    return passes


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers a request, whatever happens, counts the answer, and logs it with the request's id."""
    metrics, start = request.app[_METRICS], time.perf_counter()
    given = request.headers.get("X-Request-ID", "")
    name = given if _ID.fullmatch(given) else uuid.uuid4().hex
    _NAME.set(name)
    # Of what clients make up nothing may become a label: each value would be kept.
    path = "other" if request.match_info.http_exception is not None else request.match_info.route.resource.canonical
    request.protocol.begin()
    try:
        if (tokens := request.app.get(_TOKENS)) is not None:
            tokens.check(request, path)
        answer, refused = await handler(request), None
    except (asyncio.CancelledError, ConnectionError):
        metrics.left.inc()
        _requests.info("id=%s %s %s: the client has left", name, request.method, path)
        raise
    except Exception as error:
        answer, refused = _fault(error, name)
    if refused is not None:
        metrics.refused.labels(refused).inc()
    metrics.requests.labels(path, answer.status).inc()
    answer.headers["X-Request-ID"] = name
    if request.app[_STOPPING].is_set():
        answer.force_close()  # with the header Connection: close
    elif answer.status in _REASONS or answer.status == 500:
        await request.app[_FAULTS].pause(request.content.total_bytes)
    elif request.method == "GET" and path != "/health/live":
        await request.app[_PROBES].pause()
    if request.content.is_eof():
        request.protocol.end()
    else:
        answer.force_close()  # once the rest of a body that was refused is skipped
    spent = (time.perf_counter() - start) * 1e3
    why = "" if refused is None else f" {refused}"
    _requests.info("id=%s %s %s %d%s %.1f ms", name, request.method, path, answer.status, why, spent)
    return answer


def _fault(error: Exception, name: str) -> tuple[web.Response, str | None]:
    """The answer to a request that failed, and why it was refused, if it was."""
    retry = {"Retry-After": _RETRY_SECONDS}
    match error:
        case BadRequestError():
            return _error(400, str(error)), _REASONS[400]
        case web.RequestPayloadError():
            answer = _error(400, "the body does not match the encoding in its headers")
            answer.force_close()  # as aiohttp does: nobody knows where the next request begins
            return answer, _REASONS[400]
        case OverloadedError():
            return _error(503, "the server is at capacity; try again", retry), f"full_{error}"
        case DeadlineExceededError():
            return _error(503, "the request has waited until its deadline; try again", retry), "deadline"
        case StoreUnavailableError():
            _log.warning("request id=%s: the state of users: %s", name, error)
            return _error(503, f"the state of users does not answer: {error}; try again", retry), "state"
        case NotFiniteError() | InputError():  # of the version that answers, of the state of users
            _log.error("request id=%s: %s", name, error)
            return _error(500, str(error)), None
        case web.HTTPException():
            kept = {name: error.headers[name] for name in ("Allow", "WWW-Authenticate") if name in error.headers}
            return _error(error.status, error.text or error.reason, kept), _REASONS.get(error.status, "other")
    _log.error("request id=%s failed", name, exc_info=error)
    return _error(500, "the model failed on this request; see the server's log"), None


def _error(status: int, reason: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": reason}, status=status, headers=headers)
