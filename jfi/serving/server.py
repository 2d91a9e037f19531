"""The HTTP server, with aiohttp.

POST /score     a request -> {"scores": [...]}
GET  /schema    the fields and limits of a request
GET  /health    {"status": "ok", ...}

A fault is answered by {"error": reason}: 400 for a request that does not match the schema, 404, 405, 408 for a body
that does not arrive in time, 413 for one that is too large, 500 if the model fails, and 503 with Retry-After if the
server is at capacity, before the body is read.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from jfi.serving.batcher import Admission, Batcher, FullError
from jfi.serving.requests import BadRequestError, parse
from jfi.serving.scorer import Scorer

#: Seconds for a body to arrive.
BODY_SECONDS = 10.0
_RETRY_SECONDS = "1"
_log = logging.getLogger(__name__)


def make_app(
    scorer: Scorer, *, max_batch: int, max_wait: float = 0.0, queue: int = 64, max_body: int = 2**23
) -> web.Application:
    """The application.

    Args:
        scorer: scores the requests.
        max_batch, max_wait: as in Batcher.
        queue: most concurrent requests, including those being read or scored; more get a 503.
        max_body: most bytes of a request's body.
    """
    admission = Admission(queue)
    app = web.Application(client_max_size=max_body, middlewares=[_faults])

    async def batching(app: web.Application):
        app[_BATCHER] = Batcher(scorer.score, max_batch, max_wait)
        yield
        await app[_BATCHER].close()

    async def score(request: web.Request) -> web.Response:
        if (request.content_length or 0) > max_body:
            raise web.HTTPRequestEntityTooLarge(max_body, request.content_length)
        with admission:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
            encoded = scorer.reader(parse(body))
            return web.json_response({"scores": await request.app[_BATCHER].score(encoded)})

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "requests": admission.inside, "device": scorer.info["device"]})

    async def schema(_: web.Request) -> web.Response:
        return web.json_response(scorer.reader.describe())

    app.cleanup_ctx.append(batching)
    app.add_routes([web.post("/score", score), web.get("/health", health), web.get("/schema", schema)])
    return app


_BATCHER = web.AppKey("batcher", Batcher)


@web.middleware
async def _faults(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequestError as fault:
        return _error(400, str(fault))
    except web.RequestPayloadError:
        return _error(400, "the body does not match the encoding in its headers")
    except TimeoutError:
        return _error(408, f"the body did not arrive within {BODY_SECONDS:g} s")
    except FullError:
        return _error(503, "the server is at capacity; try again", {"Retry-After": _RETRY_SECONDS})
    except web.HTTPException as fault:
        allow = {"Allow": fault.headers["Allow"]} if "Allow" in fault.headers else None
        return _error(fault.status, fault.text or fault.reason, allow)
    except Exception:
        _log.exception("a request failed")
        return _error(500, "the model failed on this request; see the server's log")


def _error(status: int, reason: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": reason}, status=status, headers=headers)
