"""Batches waiting requests into calls of the model, which run in their own thread.

While a call runs, requests queue up; the next call takes as many as fit, in the order of their arrival.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from jfi.serving.requests import Request
from jfi.serving.schema import Answer, check_finite
from jfi.state.stores import StoreUnavailableError

Score = Callable[[list[Request]], list[Answer]]
#: Gets the requests, the candidates and the seconds of each call.
Observe = Callable[[int, int, float], None]


class DeadlineExceededError(Exception):
    """A request that has waited until its deadline."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    request: Request
    answer: asyncio.Future


class Batcher:
    """Scores requests in batches.

    Args:
        score: scores a batch of requests; all calls run in one thread.
        max_batch: most candidates of a batch; a request with more is a batch of its own.
        max_wait: seconds that a call waits for more requests if its batch is not full.
        observe: called after each call that succeeded.
    """

    def __init__(self, score: Score, max_batch: int, max_wait: float = 0.0, observe: Observe = lambda *_: None) -> None:
        self._score, self._max_batch, self._max_wait, self._observe = score, max_batch, max_wait, observe
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, "score")
        self._loop = asyncio.get_running_loop()
        #: Whether a call runs, and what ends the wait for more requests.
        self._calling, self._timer = False, None

    def __len__(self) -> int:
        """The requests that wait for a call."""
        return len(self._waiting)

    async def score(self, request: Request, deadline: float | None = None, first: bool = False) -> Answer:
        """The scores of a request's candidates; raises the model's exception if the model fails on this request.

        Args:
            deadline: time of the event loop at which it is given up if it still waits.
            first: puts it before all that wait.

        Raises:
            DeadlineExceededError: the deadline has passed.
            NotFiniteError: a score is not finite.
        """
        waiting = _Waiting(request, self._loop.create_future())
        (self._waiting.appendleft if first else self._waiting.append)(waiting)
        self._begin()
        alarm = None if deadline is None else self._loop.call_at(deadline, self._give_up, waiting)
        try:
            scores = await waiting.answer
        finally:
            if alarm is not None:
                alarm.cancel()
            if waiting in self._waiting:  # the client has left
                self._waiting.remove(waiting)
        check_finite(scores, request.version)
        return scores

    def _give_up(self, waiting: _Waiting) -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            waiting.answer.set_exception(DeadlineExceededError())

    async def between(self, work: Callable[[], object]) -> None:
        """Does some work between two calls of the model, after a call that runs."""
        await self._loop.run_in_executor(self._thread, work)

    async def close(self) -> None:
        """Stops the batcher; call it when no request is waiting."""
        if self._timer is not None:
            self._timer.cancel()
        # A call whose clients have all left may still run.
        await asyncio.to_thread(self._thread.shutdown)

    def _begin(self) -> None:
        """Starts the next call, or the wait for more requests, unless a call runs."""
        if self._calling or not self._waiting:
            return
        if self._max_wait and self._candidates() < self._max_batch:
            if self._timer is None:
                self._timer = self._loop.call_later(self._max_wait, self._call)
        else:
            self._call()

    def _call(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if batch := self._take():
            self._calling = True
            # Those that need no state first: they do not wait for a store that does not answer.
            parts = [[one for one in batch if (one.request.stored is not None) == reads] for reads in (False, True)]
            self._thread.submit(self._in_thread, [part for part in parts if part])

    def _in_thread(self, batches: list[list[_Waiting]]) -> None:
        """Scores batches one after the other; if one fails, each of its requests alone, so that it fails no other.

        If the state of users does not answer, all of a batch fail at once.
        """
        while batches:
            batch = batches.pop(0)
            requests, start, answers, error = [one.request for one in batch], time.perf_counter(), None, None
            try:
                answers = self._score(requests)
            except Exception as fault:
                error = fault
                if not isinstance(fault, StoreUnavailableError) and len(batch) > 1:
                    batches[:0] = [[one] for one in batch]
            # Straight to those who wait: a future of the thread's would be a turn of the loop more.
            spent = time.perf_counter() - start
            self._loop.call_soon_threadsafe(self._answer, batch, answers, error, spent, not batches)

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
            if first.answer.done():  # the client has just left
                candidates -= first.request.num_candidates
            else:
                batch.append(first)
        return batch

    def _answer(
        self, batch: list[_Waiting], answers: list[Answer] | None, error: Exception | None, seconds: float, last: bool
    ) -> None:
        """Passes on the answers of a call, or its error: to the only one who waits for it, or the store's to all."""
        if answers is not None:
            self._observe(len(batch), sum(one.request.num_candidates for one in batch), seconds)
            for waiting, answer in zip(batch, answers, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)
        elif len(batch) == 1 or isinstance(error, StoreUnavailableError):
            for waiting in batch:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
        if last:
            self._calling = False
            self._begin()
