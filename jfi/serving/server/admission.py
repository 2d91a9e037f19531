"""Bounds of the requests inside the server: how many, and the bodies that are still arriving."""

import asyncio
from contextlib import suppress

from aiohttp import web


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
            web.HTTPRequestEntityTooLarge: more than `max_body` bytes.
            web.HTTPRequestTimeout: it has not arrived in `seconds`.
            OverloadedError: `most` bodies are arriving, or these have `most_bytes` already.
        """
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
