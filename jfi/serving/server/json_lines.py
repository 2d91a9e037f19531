"""Answers JSON lines: one request per line in, one answer per line out, in the same order."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

from jfi.serving.requests import BadRequestError, Request, RequestReader
from jfi.serving.scorer import Answer, NotFiniteError, Scorer, check_finite
from jfi.serving.server.body import write_answer
from jfi.serving.user_state.stores import StoreUnavailableError
from jfi.utils.errors import InputError
from jfi.utils.files import naming


def answer_lines(
    scorer: Scorer,
    lines: BinaryIO,
    out: BinaryIO,
    *,
    max_batch: int,
    max_wait: float = 0.0,
    queue: int = 64,
    max_body: int = 2**21,
    incoming: SimpleQueue | None = None,
) -> None:
    """Reads to the end of `lines` and answers all requests; a thread reads while the model scores.

    Args:
        scorer: scores the requests.
        lines: the requests.
        out: the answers, {"scores": [...]} or {"error": reason}.
        max_batch, max_wait: as in Batcher.
        queue: most requests without an answer; reading waits while there are so many.
        max_body: most bytes of a line; a longer one gets an error, and the rest of it is skipped.
        incoming: the queue from the thread that reads, where a None ends the reading; None makes one.

    Raises:
        OSError: `out` cannot be written, and no other request is answered; or `lines` cannot be read, and those before
            are answered.
    """
    incoming, capacity = incoming or SimpleQueue(), threading.Semaphore(queue)
    arguments = scorer.reader, lines, max_body, capacity, incoming
    threading.Thread(target=_read, args=arguments, daemon=True).start()  # nothing can interrupt it
    for batch in _batches(incoming, max_batch, max_wait):
        scores = iter(_scores(scorer, [one for one in batch if isinstance(one, Request)]))
        for one in batch:
            answer = {"error": one} if isinstance(one, str) else next(scores)
            with naming(Path(getattr(out, "name", "the output"))):
                out.write(write_answer(answer) + b"\n")
                out.flush()
            capacity.release()


def _read(
    reader: RequestReader, lines: BinaryIO, max_body: int, capacity: threading.Semaphore, incoming: SimpleQueue
) -> None:
    """Puts the requests into a queue, as texts those that have a fault, and at the end None or the error in reading."""
    try:
        while line := lines.readline(max_body + 1):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = lines.readline(max_body)
            capacity.acquire()
            try:
                if len(line) > max_body:
                    raise BadRequestError(f"a line must be at most {max_body} bytes")
                incoming.put(reader.read(line))
            except BadRequestError as fault:
                incoming.put(str(fault))
    except Exception as error:
        incoming.put(error)
    else:
        incoming.put(None)


def _batches(incoming: SimpleQueue, max_batch: int, max_wait: float) -> Iterator[list[Request | str]]:
    """Yields what waits in the queue, as many candidates at a time as fit a batch; raises the error in reading."""
    line, nothing = incoming.get(), object()
    while line is not None:
        if isinstance(line, Exception):
            raise line
        batch, candidates, until = [], 0, time.monotonic() + max_wait
        while isinstance(line, Request | str) and (not batch or candidates + _size(line) <= max_batch):
            batch.append(line)
            candidates += _size(line)
            try:
                line = incoming.get(timeout=max(0.0, until - time.monotonic()) if candidates < max_batch else 0.0)
            except Empty:
                line = nothing
        yield batch
        line = incoming.get() if line is nothing else line


def _size(line: Request | str) -> int:
    return line.num_candidates if isinstance(line, Request) else 0


def _scores(scorer: Scorer, requests: list[Request]) -> list[dict]:
    """The answers to requests; if the model fails, each is scored alone, so that it fails no other."""
    try:
        scored = zip(requests, scorer.score(requests), strict=True) if requests else []
        return [_answer(request, scores) for request, scores in scored]
    except StoreUnavailableError as error:
        failed = {"error": f"the state of users does not answer: {error}"}
        others = iter(_scores(scorer, [one for one in requests if one.stored is None]))
        return [next(others) if one.stored is None else failed for one in requests]
    except Exception as error:
        if len(requests) > 1:
            return [_scores(scorer, [one])[0] for one in requests]
        is_state = isinstance(error, InputError)  # of users
        return [{"error": str(error) if is_state else f"the model failed on this request: {type(error).__name__}"}]


def _answer(request: Request, scores: Answer) -> dict:
    try:
        check_finite(scores, request.version)
    except NotFiniteError as fault:
        return {"error": str(fault)}
    return {"scores": scores} | ({} if request.stored is None else {"state": request.stored.answer()})
