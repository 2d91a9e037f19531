"""Writes events to the state of users: those that wait while a write runs are written together by the next one."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import orjson
from aiohttp import web

from jfi.serving.request_log import RequestLog
from jfi.serving.server.admission import Admission, Bodies, OverloadedError
from jfi.serving.server.live import LIVE, Live
from jfi.serving.server.metrics import Metrics
from jfi.state.columns import Entity, read_columns
from jfi.state.events import names_of
from jfi.state.outbox import PartWriter
from jfi.state.state import Added, UserState
from jfi.state.stores import StoreUnavailableError
from jfi.state.user_rows import LogRows
from jfi.utils.errors import InputError

T = TypeVar("T")

#: Events after which no further body is written with them, at first, at least and at most: a store on a server has to
#: answer in time. After a write that failed they are half of its events, or half of themselves if it had more; a full
#: write of less than `_QUICK` seconds doubles them.
_AT_ONCE, _FEWEST, _MOST = 1000, 100, 10_000
_QUICK = 0.25
#: Seconds between two looks for rows that wait for a part.
LOG_SECONDS = 0.5
#: Seconds after a step of a pass that removes rows, which has removed none or some, and from one pass to the next: a
#: user who has rows of each day is written once in a pass.
_STEP_SECONDS, _PASS_SECONDS = (0.01, 0.5), 86400.0
_log = logging.getLogger("jfi.serving")


class EventWriter:
    """Writes bodies of events, each whole or not at all, in one thread.

    Args:
        state: gives the state of users that is written to now.
        capacity: most bodies that wait, those too whose client has left.
    """

    def __init__(self, state: Callable[[], UserState], metrics: Metrics, capacity: int = 64) -> None:
        self._state, self._metrics = state, metrics
        self._capacity = capacity
        self._waiting: deque[tuple[LogRows, asyncio.Future]] = deque()
        self._at_once = _AT_ONCE
        self._thread, self._is_writing = ThreadPoolExecutor(1, "write"), False

    async def add(self, events: LogRows) -> Added:
        """Writes a body of events.

        Raises:
            BadRequestError: a fault, with its place; nothing of the body was written.
            StoreUnavailableError: the store does not answer.
            StateError: the state is damaged, such as the events of a user.
            OverloadedError: too many bodies wait.
        """
        if len(self._waiting) >= self._capacity:
            raise OverloadedError("events")
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((events, answer))
        if not self._is_writing:
            self._begin()
        return await asyncio.shield(answer)  # what has begun is written, even if the client has left

    async def change(self, change: Callable[[UserState], T]) -> T:
        """Changes the state in the thread that writes events."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: change(self._state()))

    async def expire(self, *_: object) -> None:
        """Removes the rows that are kept no longer, of a few users at a time, until it is cancelled."""
        while True:
            begin, steps = asyncio.get_running_loop().time(), self._state().expire()
            try:
                while (removed := await self.change(lambda _, steps=steps: next(steps, None))) is not None:
                    self._metrics.expired.inc(removed)
                    await asyncio.sleep(_STEP_SECONDS[removed > 0])
            except (StoreUnavailableError, InputError) as error:
                _log.error("rows that are kept no longer stay until the next pass: %s", error)
            await asyncio.sleep(max(_PASS_SECONDS + begin - asyncio.get_running_loop().time(), 1.0))

    async def close(self) -> None:
        """Waits for the last write, of those too whose client has left."""
        while self._is_writing:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self._thread.shutdown)

    def _begin(self) -> None:
        waiting, bodies, self._is_writing = [], [], True
        while self._waiting and sum(map(len, bodies)) < self._at_once:
            waiting.append(self._waiting.popleft())
            bodies.append(waiting[-1][0])
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._thread, self._write, bodies)
        writing.add_done_callback(lambda done: self._end(waiting, done))

    def _write(self, bodies: list[LogRows]) -> list[Added | Exception]:
        """Writes bodies together; if that fails, each alone, so that it fails no other, unless the store has failed."""
        count, start = sum(map(len, bodies)), time.monotonic()
        try:
            results = self._state().add(bodies)
        except StoreUnavailableError as error:
            self._at_once = max(_FEWEST, min(count, self._at_once) // 2)
            return [error] * len(bodies)  # it is unknown whether they were written: their clients send them again
        except Exception as error:  # nothing was written
            results = [error]
        if len(results) < len(bodies):
            return [self._write([body])[0] for body in bodies]
        if count >= self._at_once and time.monotonic() - start < _QUICK:
            self._at_once = min(2 * self._at_once, _MOST)
        return results

    def _end(self, waiting: list[tuple[LogRows, asyncio.Future]], done: asyncio.Future) -> None:
        self._is_writing = False
        if self._waiting:
            self._begin()
        for (events, answer), result in zip(waiting, done.result(), strict=True):
            self._metrics.wrote(len(events), result)
            if answer.done():
                continue
            if isinstance(result, BaseException):
                answer.set_exception(result)
                answer.exception()  # read, if the client has left
            else:
                answer.set_result(result)


#: What writes events, and the log of requests, or None, from which users are removed too.
WRITER = web.AppKey("writer", EventWriter)
LOG = web.AppKey[RequestLog | None]("log", RequestLog)


def state_routes(admission: Admission, bodies: Bodies, deadline: float, feed: Path | None) -> list[web.RouteDef]:
    """Returns the routes of a server with a state of users.

    Args:
        deadline: seconds that a body may wait until it is read.
        feed: folder that the state is fed from, or None; with one, bodies of events are refused.
    """

    async def add(request: web.Request) -> web.Response:
        if feed is not None:
            raise web.HTTPForbidden(text=f"events are read from --feed {feed}: write them to parts there")
        admission.check()
        body = await bodies.receive(request)
        with admission:
            until = asyncio.get_running_loop().time() + deadline
            events = await request.app[LIVE].read(request.app[LIVE].now.scorer.events.read, body, until)
        added = await request.app[WRITER].add(events)  # outside of the admission: a slow store holds up no others
        answer = {"added": added.added, "repeated": added.repeated}
        if request.app[LIVE].now.scorer.state.retention.quota is not None:
            answer["over_quota"] = added.over_quota
        return json_response(answer)

    async def put(of: Entity, request: web.Request) -> web.Response:
        admission.check()
        name, body = _name(of, request), await bodies.receive(request)
        with admission:
            until = asyncio.get_running_loop().time() + deadline
            live = request.app[LIVE]
            scorer = live.now.scorer
            columns = await live.read(partial(read_columns, scorer.state.tables[of], scorer.events), body, until)
        await request.app[WRITER].change(lambda state: state.put(of, name, columns))
        return json_response({"stored": True})

    async def delete(of: Entity, request: web.Request) -> web.Response:
        name = _name(of, request)
        with admission:
            found = await request.app[WRITER].change(lambda state: state.delete(of, name))
            if of == "user" and (requests := request.app[LOG]) is not None:
                user_id = request.app[LIVE].now.scorer.reader.schema.user_id
                found |= await asyncio.to_thread(requests.remove_user, name, user_id) > 0
            return json_response({"deleted": found})

    async def schema(request: web.Request) -> web.Response:
        return web.json_response(request.app[LIVE].now.scorer.events.json_schema())

    routes = [web.post("/events", add), web.get("/schema/events", schema)]
    for of in ("item", "user"):
        path = f"/{of}s/{{{of}:[^/]+}}"
        routes += [web.put(path, partial(put, of)), web.delete(path, partial(delete, of))]
    return routes


async def write_parts(writer: PartWriter, _: Live, metrics: Metrics) -> None:
    """Writes the parts of a log until it is cancelled, and then the rows that wait."""
    writer.wrote, writer.failed = metrics.log_written.inc, metrics.log_failures.inc
    try:
        while True:
            await asyncio.to_thread(writer.step)
            metrics.log_waiting.set(writer.waiting)
            await asyncio.sleep(LOG_SECONDS)
    finally:
        await asyncio.to_thread(writer.flush)
        writer.close()


def _name(of: Entity, request: web.Request) -> str:
    """The id in the path of a request."""
    (name,) = names_of(
        [request.match_info[of]], lambda *_: f"the {of} in the path", "an item" if of == "item" else "a user"
    )
    return name


def json_response(answer: dict) -> web.Response:
    """Returns an answer as JSON."""
    return web.Response(body=write_answer(answer), content_type="application/json", charset="utf-8")


def write_answer(answer: dict) -> bytes:
    """Returns the JSON of an answer, whose scores have the shortest text of their float32.

    >>> write_answer({"scores": [0.10000000149011612]})
    b'{"scores":[0.1]}'
    """
    scores = answer.get("scores")
    if isinstance(scores, dict):  # by label
        answer = answer | {"scores": {name: np.array(one, np.float32) for name, one in scores.items()}}
    elif scores is not None:
        answer = answer | {"scores": np.array(scores, np.float32)}
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
