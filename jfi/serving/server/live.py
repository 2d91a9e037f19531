"""The model that answers requests, and how another version takes its place without a restart."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web

from jfi.serving.artifact import ArtifactError
from jfi.serving.published import Change
from jfi.serving.requests import Request
from jfi.serving.scorer import Answer, Scorer
from jfi.serving.server.batcher import Batcher, DeadlineExceededError
from jfi.serving.server.metrics import Metrics
from jfi.state.stores import StoreUnavailableError
from jfi.utils.errors import InputError

T = TypeVar("T")

#: Bytes of a body that is read in a thread; a smaller one takes less than 2 ms.
LARGE = 2**14
#: Bytes of a body that is read in another thread, so that smaller ones do not wait for it.
_LARGEST = 2**18
#: Seconds for the model to score a request of one candidate, before the server says that it is not ready.
PROBE_SECONDS = 5.0


class Loaded:
    """An artifact in use, from its first request to its last answer.

    Args:
        max_batch, max_wait: as in Batcher.
    """

    def __init__(self, scorer: Scorer, metrics: Metrics, max_batch: int, max_wait: float) -> None:
        self.scorer, self.batcher = scorer, Batcher(scorer.score, max_batch, max_wait, metrics.called)
        self._users, self._unused = 0, asyncio.Event()
        self._unused.set()

    def __enter__(self) -> "Loaded":
        self._users += 1
        self._unused.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if not self._users:
            self._unused.set()

    async def close(self) -> None:
        """Waits for the last answer."""
        await self._unused.wait()
        await self.batcher.close()


class Live:
    """Scores bodies with the artifact that is loaded.

    Args:
        batching: `max_batch` and `max_wait` of each Batcher.
    """

    def __init__(self, scorer: Scorer, metrics: Metrics, **batching: float) -> None:
        self._metrics, self._batching = metrics, batching
        self.now = Loaded(scorer, metrics, **batching)
        self._threads = [ThreadPoolExecutor(1, name) for name in ("read", "read large")]
        self._probe: asyncio.Task | None = None

    async def score(self, body: bytes, deadline: float) -> tuple[Answer, Request]:
        """The scores of a body, and its request, which says what was read of the state of users, and by which version.

        Args:
            deadline: time of the event loop by which a call of the model must have begun.

        Raises:
            BadRequestError: a fault of the request.
            DeadlineExceededError: the deadline has passed.
            NotFiniteError: a score is not finite.
            StoreUnavailableError: the store of the users' events does not answer.
            InputError: the state of users is damaged.
        """
        with self.now as loaded:
            request = await self.read(loaded.scorer.reader.read, body, deadline)
            self._metrics.read(loaded.scorer.reader.unknown(request))
            try:
                scores = await loaded.batcher.score(request, deadline)
            except (StoreUnavailableError, InputError):
                if request.stored is not None:
                    self._metrics.read_stored(request.stored)
                raise
            if request.stored is not None:
                self._metrics.read_stored(request.stored)
            return scores, request

    async def read(self, read: Callable[[bytes], T], body: bytes, deadline: float) -> T:
        """Reads a body, a large one in a thread.

        Raises:
            DeadlineExceededError: the deadline has passed.
        """
        if len(body) < LARGE:
            return read(body)
        thread = self._threads[len(body) >= _LARGEST]
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.get_running_loop().run_in_executor(thread, read, body)
        except TimeoutError:
            raise DeadlineExceededError from None

    async def probe(self) -> None:
        """Scores a request of one candidate, before all that wait, once for all who call this meanwhile.

        Raises:
            Exception: the model fails; TimeoutError, if it does not answer in `PROBE_SECONDS`.
        """
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._score_example())
            self._probe.add_done_callback(lambda one: one.cancelled() or one.exception())  # read, if all have left
        await asyncio.shield(self._probe)

    async def _score_example(self) -> None:
        with self.now as loaded:
            async with asyncio.timeout(PROBE_SECONDS):
                await loaded.batcher.score(loaded.scorer.example(), first=True)

    async def apply(self, change: Change) -> None:
        """Changes the artifact that answers to that of a published version, between two calls of the model.

        Raises:
            Exception: the version cannot be applied or its scores are not finite; see `Scorer.prepare`.
        """
        apply = await asyncio.to_thread(self.now.scorer.prepare, change)
        await self.now.batcher.between(apply)

    async def replace(self, scorer: Scorer) -> None:
        """Lets an artifact answer all requests that come from now on; returns after the last answer of the one before.

        Raises:
            ArtifactError: it cannot answer the same requests; the artifact stays that answers now.
        """
        check(scorer, self.now.scorer)
        old, self.now = self.now, Loaded(scorer, self._metrics, **self._batching)
        await old.close()

    async def close(self) -> None:
        """Waits for the last answer, and releases the artifact."""
        await self.now.close()
        for thread in self._threads:
            await asyncio.to_thread(thread.shutdown)
        del self.now


#: The artifact of an application.
LIVE = web.AppKey("live", Live)


def check(new: Scorer, old: Scorer) -> None:
    """Checks that an artifact takes the requests of another."""
    got, want = ((one.reader.fields, one.reader.schema.codec) for one in (new, old))
    if got != want:
        raise ArtifactError(f"{new.identity} has other fields of requests, {got} and not {want}; start another server")
    if (got := new.info.schema.labels) != (want := old.info.schema.labels):
        raise ArtifactError(f"{new.identity} answers for other labels, {got} and not {want}; start another server")
