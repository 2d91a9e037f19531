"""Batches waiting requests into calls of the model, which run in their own thread, and limits concurrent requests.

While a call runs, requests queue up; the next call takes as many as fit, in the order of their arrival.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jfi.serving.requests import Request

Score = Callable[[list[Request]], list[list[float]]]


class FullError(Exception):
    """The server is at capacity."""


@dataclass(frozen=True)
class _Waiting:
    request: Request
    answer: asyncio.Future


class Batcher:
    """Scores requests in batches.

    Args:
        score: scores a batch of requests; all calls run in one thread.
        max_batch: most candidates of a batch; a request with more is a batch of its own.
        max_wait: seconds that a call waits for more requests if its batch is not full.
    """

    def __init__(self, score: Score, max_batch: int, max_wait: float = 0.0) -> None:
        self._score, self._max_batch, self._max_wait = score, max_batch, max_wait
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "score")
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run())

    async def score(self, request: Request) -> list[float]:
        """The scores of a request's candidates; raises the model's exception if the model fails on this request."""
        waiting = _Waiting(request, self._loop.create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        return await waiting.answer

    async def close(self) -> None:
        """Stops the batcher; call it when no request is waiting."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown()

    async def _run(self) -> None:
        while True:
            self._arrived.clear()
            if not self._waiting:
                await self._arrived.wait()
            if self._max_wait and self._candidates() < self._max_batch:
                await asyncio.sleep(self._max_wait)
            batch = self._take()
            if batch and not await self._answer(batch) and len(batch) > 1:
                # Score each request alone, so that one that fails does not fail the others.
                for waiting in batch:
                    await self._answer([waiting])

    def _candidates(self) -> int:
        return sum(waiting.request.num_candidates for waiting in self._waiting)

    def _take(self) -> list[_Waiting]:
        """Removes the next batch from the queue."""
        batch, candidates = [], 0
        while self._waiting:
            first = self._waiting[0]
            candidates += first.request.num_candidates
            if batch and candidates > self._max_batch:
                break
            self._waiting.popleft()
            if first.answer.done():  # the client has disconnected
                candidates -= first.request.num_candidates
            else:
                batch.append(first)
        return batch

    async def _answer(self, batch: list[_Waiting]) -> bool:
        """Scores a batch; returns whether the call succeeded. A batch of one gets the exception as its answer."""
        try:
            scores = await self._loop.run_in_executor(self._thread, self._score, [one.request for one in batch])
        except Exception as error:
            if len(batch) == 1 and not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return False
        for waiting, answer in zip(batch, scores, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(answer)
        return True


class Admission:
    """Admits at most `capacity` concurrent requests, each from the start of its body to the end of its answer.

    Raises:
        FullError: on entering, when `capacity` requests have been admitted.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.inside = capacity, 0

    def __enter__(self) -> None:
        if self.inside >= self.capacity:
            raise FullError
        self.inside += 1

    def __exit__(self, *_: object) -> None:
        self.inside -= 1
