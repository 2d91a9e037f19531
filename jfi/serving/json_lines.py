"""Answers JSON lines: one request per line in, one answer per line out, in the same order."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import orjson

from jfi.serving.batcher import Batcher
from jfi.serving.requests import BadRequestError
from jfi.serving.scorer import Scorer
from jfi.utils.files import naming


async def answer_lines(
    scorer: Scorer,
    lines: BinaryIO,
    out: BinaryIO,
    *,
    max_batch: int,
    max_wait: float = 0.0,
    queue: int = 64,
    max_body: int = 2**21,
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

    Raises:
        OSError: `out` cannot be written, and no other request is answered; or `lines` cannot be read, and those before
            are answered.
    """
    loop, batcher = asyncio.get_running_loop(), Batcher(scorer.score, max_batch, max_wait)
    incoming: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
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

    async def accept() -> None:
        try:
            while (line := await incoming.get()) is not None:
                if isinstance(line, Exception):
                    raise line
                answers.put_nowait(asyncio.create_task(answer(line)))
        finally:
            answers.put_nowait(None)

    async def write() -> None:
        while (task := await answers.get()) is not None:
            line = orjson.dumps(await task) + b"\n"
            with naming(Path(getattr(out, "name", "the output"))):
                out.write(line)
                out.flush()
            room.release()

    async def end_at_stop() -> None:
        await stop.wait()
        incoming.put_nowait(None)

    # A daemon thread, since a blocking read cannot be interrupted. At the process's end it may still read, so it refers
    # to nothing that has to be released before.
    hand_over = partial(loop.call_soon_threadsafe, incoming.put_nowait)
    threading.Thread(target=_read, args=(lines, max_body, room, hand_over), daemon=True).start()
    accepting, writing = asyncio.create_task(accept()), asyncio.create_task(write())
    stopping = asyncio.create_task(end_at_stop())
    try:
        await asyncio.wait((accepting, writing), return_when=asyncio.FIRST_COMPLETED)
        await writing  # ends before `accepting` only where it fails
        await accepting
        await batcher.close()
    finally:
        accepting.cancel()
        stopping.cancel()
        while not answers.empty():
            if (task := answers.get_nowait()) is not None:
                task.cancel()


def _read(
    lines: BinaryIO, max_body: int, room: threading.Semaphore, hand_over: Callable[[bytes | Exception | None], object]
) -> None:
    """Hands over the lines, and at the end None or the error that ended the reading."""
    with suppress(RuntimeError):  # the event loop is closed, and nobody waits for more
        try:
            while line := lines.readline(max_body + 1):
                rest = line
                while rest and not rest.endswith(b"\n"):
                    rest = lines.readline(max_body)
                room.acquire()
                hand_over(line)
        except Exception as error:
            hand_over(error)
        else:
            hand_over(None)
