"""Joins requests that wait into one call of the model, in a thread of its own, and refuses what is beyond capacity.

While a call runs, requests gather; the next call takes as many as fit, in the order in which they came.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jfi.serving.fields import Request

Score = Callable[[list[Request]], list[list[float]]]


class FullError(Exception):
    """As many requests as fit are in the house."""


@dataclass(frozen=True)
class _Waiting:
    request: Request
    answer: asyncio.Future


class Batcher:
    """Scores requests in batches.

    Args:
        score: of a batch; called in one thread.
        max_batch: candidates of a batch; a request with more goes alone.
        max_wait: seconds that a call is put off for more requests to come, where it is not full.
    """

    def __init__(self, score: Score, max_batch: int, max_wait: float = 0.0) -> None:
        self._score, self._max_batch, self._max_wait = score, max_batch, max_wait
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "score")
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run())

    async def score(self, request: Request) -> list[float]:
        """The scores of a request's candidates; a failure of the model on it is raised here."""
        waiting = _Waiting(request, self._loop.create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        return await waiting.answer

    async def close(self) -> None:
        """Ends, when nobody waits any more."""
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
                # One that fails must not take the others along.
                for waiting in batch:
                    await self._answer([waiting])

    def _candidates(self) -> int:
        return sum(waiting.request.num_candidates for waiting in self._waiting)

    def _take(self) -> list[_Waiting]:
        """The first of those who still wait, as many as fit."""
        batch, candidates = [], 0
        while self._waiting:
            first = self._waiting[0]
            candidates += first.request.num_candidates
            if batch and candidates > self._max_batch:
                break
            self._waiting.popleft()
            if first.answer.done():  # whoever asked has gone
                candidates -= first.request.num_candidates
            else:
                batch.append(first)
        return batch

    async def _answer(self, batch: list[_Waiting]) -> bool:
        """Whether the call went well; a batch of one is told what went wrong."""
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
    """At most `capacity` requests at a time, from the first byte of a body to the last of its answer."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.inside = capacity, 0

    def __enter__(self) -> None:
        if self.inside >= self.capacity:
            raise FullError
        self.inside += 1

    def __exit__(self, *_: object) -> None:
        self.inside -= 1
