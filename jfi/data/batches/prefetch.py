"""Batches that threads assemble while the steps before them run."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import cache
from typing import TypeVar

import torch

from jfi.data.batches.batch import Batch

T = TypeVar("T")
#: More threads share the bandwidth of the memory.
_MAX_THREADS = 12


def prefetch(
    assemble: Callable[[T], Batch | list[Batch]],
    items: Iterable[T],
    device: torch.device | None = None,
    num_threads: int = 1,
) -> Iterator[Batch | list[Batch]]:
    """Yields `assemble(item)` for each item in order, like `map`, but assembled ahead by threads.

    At most `num_threads + 1` batches are assembled or being assembled beyond the one that was yielded last. An error of
    `assemble` is raised where its batch would have been yielded. The threads end when the iterator is exhausted, closed
    or collected, and after an error; use `contextlib.closing` to end them at once.

    Args:
        assemble: makes a batch, or the parts of one, on the host. Several threads call it at the same time.
        items: its arguments, such as the numbers of the batches of an epoch; read by the caller's thread.
        device: where each batch is copied when it is yielded. A GPU copies batches in pinned memory on a stream of its
            own, for which the caller's stream waits, and the host does not. None leaves batches on the host.
        num_threads: number of threads, see `loader_threads`.

    Example:
        >>> list(prefetch(lambda number: 10 * number, range(4)))
        [0, 10, 20, 30]
    """
    batches = _assembled(assemble, items, num_threads)
    return batches if device is None or device.type == "cpu" else _copied(batches, device)


def loader_threads(device: torch.device) -> int:
    """Returns how many threads should assemble batches for a device of this process.

    A CPU that trains gets one. A GPU gets up to twelve, if the processes of this host have as many cores and one more.
    """
    if device.type != "cuda":
        return 1
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(_MAX_THREADS, cores - 1))


def _assembled(assemble: Callable[[T], Batch], items: Iterable[T], num_threads: int) -> Iterator[Batch]:
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="jfi-prefetch")
    ahead: deque[Future[Batch]] = deque()
    try:
        for item in items:
            ahead.append(pool.submit(assemble, item))
            if len(ahead) > num_threads + 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


@cache
def _copy_stream(device: int) -> torch.cuda.Stream:
    """The stream of all copies to a device; torch has 32 streams, and gives them out again when all are in use."""
    return torch.cuda.Stream(device)


def _copied(batches: Iterator[Batch | list[Batch]], device: torch.device) -> Iterator[Batch | list[Batch]]:
    stream = _copy_stream(torch.cuda.current_device() if device.index is None else device.index)

    def copy(batch: Batch) -> Batch:
        # The memory of a batch belongs to the stream of the copies, and is used again after the steps that read it.
        with torch.cuda.stream(stream):
            copied = batch.to(device, non_blocking=True)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        copied.record_stream(current)
        return copied

    with closing(batches):
        for batch in batches:
            yield list(map(copy, batch)) if isinstance(batch, list) else copy(batch)
