"""Bounds of what clients may take: connections, bodies that are arriving, requests inside, answers to faults."""

import asyncio
from contextlib import suppress

from aiohttp import web

from jfi.serving.server.metrics import Metrics

#: Seconds that a connection may wait for its next request; proxies close theirs after 60.
_IDLE_SECONDS = 75.0
#: Seconds that it must have waited to be closed for another connection.
_CLOSED_AFTER = 1.0
#: Most seconds that an answer is held back.
_LONGEST_PAUSE = 5.0
#: Bytes of a body for which its answer counts as one more.
_BYTES_OF_ONE = 2**14


class OverloadedError(Exception):
    """The server is at capacity; the message says which limit.

    Args:
        limit: its name in the metrics.
    """


class Admission:
    """Admits at most `capacity` concurrent requests, each from the end of its body to the end of its answer.

    Raises:
        OverloadedError: on entering, when `capacity` requests have been admitted.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.inside = capacity, 0

    def check(self) -> None:
        """Raises OverloadedError if no request would be admitted now."""
        if self.inside >= self.capacity:
            raise OverloadedError("queue")

    def __enter__(self) -> None:
        self.check()
        self.inside += 1

    def __exit__(self, *_: object) -> None:
        self.inside -= 1


class Bodies:
    """Receives the bodies of requests. A body that arrives slowly takes no place among the requests that can be scored.

    Args:
        most: bodies that arrive at a time.
        most_bytes: that they have together.
        max_body: most bytes of one.
        seconds: for one to arrive.
    """

    def __init__(self, most: int, most_bytes: int, max_body: int, seconds: float) -> None:
        self.most, self.most_bytes, self.max_body, self.seconds = most, most_bytes, max_body, seconds
        self.arriving, self._bytes, self._none_arrives = 0, 0, asyncio.Event()
        self._none_arrives.set()

    async def receive(self, request: web.Request) -> bytes:
        """The body of a request.

        Raises:
            web.HTTPUnsupportedMediaType: it is compressed: a body of 2 MB may hold 2 GB.
            web.HTTPRequestEntityTooLarge: more than `max_body` bytes.
            web.HTTPRequestTimeout: it has not arrived in `seconds`.
            OverloadedError: `most` bodies are arriving, or these have `most_bytes` already.
        """
        if (encoding := request.headers.get("Content-Encoding", "identity")).lower() != "identity":
            text = f"Content-Encoding is {encoding[:60]!r}; send the body uncompressed"
            raise web.HTTPUnsupportedMediaType(text=text)
        if (request.content_length or 0) > self.max_body:
            raise web.HTTPRequestEntityTooLarge(self.max_body, request.content_length)
        if self.arriving >= self.most:
            raise OverloadedError("bodies")
        chunks, size = [], 0
        self.arriving += 1
        self._none_arrives.clear()
        try:
            async with asyncio.timeout(self.seconds):
                async for chunk in request.content.iter_any():
                    chunks.append(chunk)
                    size += len(chunk)
                    self._bytes += len(chunk)
                    if size > self.max_body:
                        raise web.HTTPRequestEntityTooLarge(self.max_body, size)
                    if self._bytes > self.most_bytes:
                        raise OverloadedError("bodies")
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"the body did not arrive within {self.seconds:g} s") from None
        finally:
            self.arriving -= 1
            self._bytes -= size
            if not self.arriving:
                self._none_arrives.set()
        return b"".join(chunks)

    async def wait(self) -> None:
        """Waits until no body is arriving, for as long as one may take."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.seconds):
                await self._none_arrives.wait()


class Pace:
    """Paces the answers to faulty requests, or to probes, so that a client that sends many leaves time to others.

    Args:
        rate: answers a second; as many more are given at once. One to a large body counts as several.
    """

    def __init__(self, rate: float) -> None:
        self._seconds, self._next = 1 / rate, 0.0

    async def pause(self, num_bytes: int = 0) -> None:
        """Waits until a request may be answered whose body had so many bytes."""
        now = asyncio.get_running_loop().time()
        then = max(self._next, now - 1.0) + self._seconds * (1 + num_bytes // _BYTES_OF_ONE)
        self._next = min(then, now + _LONGEST_PAUSE)
        await asyncio.sleep(max(0.0, self._next - now))


class Connections:
    """Bounds the connections of a server.

    Args:
        most: connections at a time. A further one replaces the one that has waited longest for a request; if none has
            waited for a second, it is closed itself.
        seconds: for the headers of a request to arrive.
    """

    def __init__(self, most: int, seconds: float, metrics: Metrics) -> None:
        self.most, self.seconds, self._metrics = most, seconds, metrics
        #: Those that are open.
        self.open: set[Connection] = set()

    def add(self, connection: "Connection") -> None:
        """Counts a connection that has been opened, and closes one if there are too many."""
        self.open.add(connection)
        if len(self.open) > self.most:
            waiting = [one for one in self.open if one.waits_since is not None]
            oldest = min(waiting, key=lambda one: one.waits_since)
            is_idle = connection.waits_since - oldest.waits_since > _CLOSED_AFTER
            self.close(oldest if is_idle else connection, "full_connections")

    def close(self, connection: "Connection", reason: str) -> None:
        """Closes a connection, and counts the reason."""
        self._metrics.refused.labels(reason).inc()
        self.open.discard(connection)
        connection.force_close()


class Connection(web.RequestHandler):
    """A connection of a client. It is closed if the headers of a request do not arrive in time."""

    def __init__(self, connections: Connections, *settings: object, **more: object) -> None:
        super().__init__(*settings, **more)
        self._connections, self._alarm, self.loop = connections, None, asyncio.get_running_loop()
        #: Time of the event loop since when it waits for a request; None while it answers one.
        self.waits_since: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.end()
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.waits_since is not None and self._alarm is None:
            # In two steps: after the first, what has arrived while the event loop was late is read.
            self._alarm = self.loop.call_later(self._connections.seconds, self._give_up, 0.1)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.begin()
        self._connections.open.discard(self)
        super().connection_lost(exc)

    def begin(self) -> None:
        """Notes that the headers of a request have arrived."""
        self.waits_since = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def end(self) -> None:
        """Notes that the request is answered."""
        self.waits_since = self.loop.time()

    def _give_up(self, seconds: float | None = None) -> None:
        self._alarm = None if seconds is None else self.loop.call_later(seconds, self._give_up)
        if seconds is None and self.waits_since is not None:
            self._connections.close(self, "slow_headers")


class Runner(web.AppRunner):
    """Runs an application whose connections are bounded and whose bodies are left as they are sent."""

    def __init__(self, app: web.Application, connections: Connections) -> None:
        super().__init__(app, handler_cancellation=True)
        self.connections = connections

    @property
    def server(self):
        """Makes the protocol of a connection; None before `setup`."""
        return None if super().server is None else self._connect

    def _connect(self) -> Connection:
        how = {"keepalive_timeout": _IDLE_SECONDS, "auto_decompress": False, "access_log": None}
        return Connection(self.connections, super().server, loop=asyncio.get_running_loop(), **how)
