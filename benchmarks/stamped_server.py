"""`jfi serve` with time stamps: the same server, which says where the time of a request went.

python -m benchmarks.stamped_server --artifact ARTIFACT --port 0     with the options of `jfi serve`

GET /stages answers the stamps of each request to /score since the last time, in their order: the name of what has just
ended, nanoseconds of CLOCK_MONOTONIC, which is the same in all processes of a machine, nanoseconds of CPU that the
thread has used, and the thread. Requests must come one at a time. On a GPU the look-up and the model are waited for.
"""

import sys
import threading
import time
from collections.abc import Awaitable, Callable

import torch
from aiohttp import web

from jfi import cli
from jfi.serving.scorer import Scorer
from jfi.serving.server import app as server
from jfi.serving.server.admission import Bodies
from jfi.serving.server.batcher import Batcher
from jfi.serving.validation import BodyType


class Stamps:
    """Those of the request that is being answered, and of the ones before it."""

    def __init__(self) -> None:
        self._requests: list[list[tuple[str, int, int, int]]] = []
        self._now: list[tuple[str, int, int, int]] = []

    def add(self, name: str) -> None:
        self._now.append((name, time.perf_counter_ns(), time.thread_time_ns(), threading.get_ident()))

    def after(self, function: Callable, name: str, before: str | None = None, wait: bool = False) -> Callable:
        """The function, with a stamp at its end, and one at its beginning if that has a name.

        Args:
            function: that is called.
            name, before: of the stamps.
            wait: whether a GPU's work is waited for.
        """

        def call(*args: object, **kwargs: object) -> object:
            if before:
                self.add(before)
            result = function(*args, **kwargs)
            if wait and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.add(name)
            return result

        return call

    def after_awaited(self, function: Callable[..., Awaitable], name: str) -> Callable[..., Awaitable]:
        async def call(*args: object, **kwargs: object) -> object:
            result = await function(*args, **kwargs)
            self.add(name)
            return result

        return call

    def on(self, scorer: Scorer) -> None:
        """Stamps the parts of a scorer."""
        scorer.reader.read = self.after(scorer.reader.read, "values")
        scorer.tables = self.after(scorer.tables, "look-up", before="arrays", wait=True)
        scorer.package = self.after(scorer.package, "model", before="inputs", wait=True)
        scorer.score = self.after(scorer.score, "scores", before="to the thread")

    @web.middleware
    async def middleware(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        if request.path != "/score":
            return await handler(request)
        self._now = []
        self.add("headers")
        answer = await handler(request)
        self.add("answer")
        self._requests.append(self._now)
        return answer

    async def give(self, _: web.Request) -> web.Response:
        found, self._requests = self._requests, []
        return web.json_response(found)


def main() -> None:
    stamps, make_app = Stamps(), server.make_app
    Bodies.receive = stamps.after_awaited(Bodies.receive, "body")
    Batcher.score = stamps.after_awaited(Batcher.score, "from the thread")
    BodyType.read = stamps.after(BodyType.read, "parsed")

    def make_stamped_app(scorer: Scorer, **options: object) -> web.Application:
        stamps.on(scorer)
        app = make_app(scorer, **options)
        app.middlewares.insert(0, stamps.middleware)
        app.router.add_get("/stages", stamps.give)
        return app

    server.make_app = make_stamped_app
    sys.exit(cli.main(["serve", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
