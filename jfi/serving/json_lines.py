"""Answers JSON lines: one request per line in, one answer per line out, in the same order."""

import asyncio
import json
import threading
from typing import BinaryIO

from jfi.serving.batcher import Batcher
from jfi.serving.requests import BadRequestError
from jfi.serving.scorer import Scorer


async def answer_lines(
    scorer: Scorer,
    lines: BinaryIO,
    out: BinaryIO,
    *,
    max_batch: int,
    max_wait: float = 0.0,
    queue: int = 64,
    max_body: int = 2**23,
    stop: asyncio.Event | None = None,
) -> None:
    """Reads to the end of `lines`, or until `stop` is set, and answers all requests that it has read.

    Args:
        scorer: scores the requests.
        lines: the requests.
        out: the answers, {"scores": [...]} or {"error": reason}.
        max_batch, max_wait: as in Batcher.
        queue: most requests without an answer; reading waits while there are so many.
        max_body: most bytes of a line; a longer one gets an error, and the rest of it is skipped.
        stop: stops reading when set.
    """
    loop, batcher = asyncio.get_running_loop(), Batcher(scorer.score, max_batch, max_wait)
    answers: asyncio.Queue[asyncio.Task | None] = asyncio.Queue()
    room = threading.Semaphore(queue)
    stop = stop or asyncio.Event()

    async def answer(line: bytes) -> dict:
        try:
            if len(line) > max_body:
                raise BadRequestError(f"a line must be at most {max_body} bytes")
            return {"scores": await batcher.score(scorer.reader.read(line))}
        except BadRequestError as fault:
            return {"error": str(fault)}
        except Exception as error:
            return {"error": f"the model failed on this request: {type(error).__name__}"}

    def accept(line: bytes | None) -> None:
        if stop.is_set():
            return
        if line is None:
            stop.set()
        else:
            answers.put_nowait(asyncio.create_task(answer(line)))

    def read() -> None:
        while line := lines.readline(max_body + 1):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = lines.readline(max_body)
            room.acquire()
            loop.call_soon_threadsafe(accept, line)
        loop.call_soon_threadsafe(accept, None)

    async def write() -> None:
        while (task := await answers.get()) is not None:
            out.write(json.dumps(await task).encode() + b"\n")
            out.flush()
            room.release()

    # A daemon thread, since a blocking read cannot be interrupted.
    threading.Thread(target=read, daemon=True).start()
    writing = asyncio.create_task(write())
    await stop.wait()
    answers.put_nowait(None)
    await writing
    await batcher.close()
