"""examples/serve.py with time stamps, for benchmarks/serving_stages.py: the same server, which says where its time went.

python -m benchmarks.stamped_server --artifact ARTIFACT --port 0     options as of examples/serve.py

GET /stages answers the stamps of each request since the last time: [[name, wall ns, CPU ns of the thread, thread], ...].
Requests come one at a time. Stamps are of CLOCK_MONOTONIC, which a client on the same machine can compare with its own.
"""

import functools
import runpy
import sys
import threading
import time
from pathlib import Path

from aiohttp import web

from jfi.serving import scorer, server
from jfi.serving.batcher import Batcher
from jfi.serving.limits import Bodies
from jfi.serving.requests import RequestReader

SERVE = Path(__file__).parents[1] / "examples/serve.py"


class Stamps:
    """Those of the request that is being answered, and of all before it."""

    def __init__(self) -> None:
        self.requests: list[list[tuple]] = []
        self._now: list[tuple] = []

    def add(self, name: str) -> None:
        self._now.append((name, time.perf_counter_ns(), time.thread_time_ns(), threading.get_ident()))

    def after(self, owner: object, method: str, name: str, before: str | None = None) -> None:
        """Stamps the end of a function, and its beginning if that has a name too."""
        function = getattr(owner, method)

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            if before:
                self.add(before)
            result = function(*args, **kwargs)
            self.add(name)
            return result

        @functools.wraps(function)
        async def call_async(*args: object, **kwargs: object) -> object:
            if before:
                self.add(before)
            result = await function(*args, **kwargs)
            self.add(name)
            return result

        import inspect

        setattr(owner, method, call_async if inspect.iscoroutinefunction(function) else call)

    @web.middleware
    async def middleware(self, request: web.Request, handler: object) -> web.StreamResponse:
        if request.path != "/score":
            return await handler(request)
        self._now = []
        self.add("headers")
        answer = await handler(request)
        self.add("answer")
        self.requests.append(self._now)
        return answer

    async def give(self, _: web.Request) -> web.Response:
        found, self.requests = self.requests, []
        return web.json_response(found)


def main() -> None:
    stamps = Stamps()
    stamps.after(Bodies, "receive", "body")
    stamps.after(RequestReader, "read", "encoded")
    stamps.after(Batcher, "score", "resumed")
    stamps.after(scorer.Scorer, "score", "scored", "thread")
    stamps.after(scorer, "batch_inputs", "inputs")
    make = server.make_app

    def make_app(loaded: scorer.Scorer, **how: object) -> web.Application:
        package = loaded.package

        def model(*inputs: object) -> object:
            out = package(*inputs)
            stamps.add("model")
            return out

        loaded.package = model
        app = make(loaded, **how)
        app.middlewares.insert(0, stamps.middleware)
        app.router.add_get("/stages", stamps.give)
        return app

    server.make_app = make_app
    sys.argv[0] = str(SERVE)
    runpy.run_path(str(SERVE), run_name="__main__")


if __name__ == "__main__":
    main()
