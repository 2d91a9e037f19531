"""Whether jagged tensors have room: more values than their lengths count, as the buffers of a captured step have."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Here(threading.local):
    """What holds for the code that runs now in this thread."""

    #: The keys that have one value a sample, within a block with room; None outside, where no jagged tensor has room.
    singles: frozenset[str] | None = None


here = _Here()


def is_single(key: str) -> bool:
    """Whether each sample is known to have one value of this key, though its lengths are not read."""
    return here.singles is not None and key in here.singles


@contextmanager
def with_room(singles: frozenset[str] = frozenset()) -> Iterator[None]:
    """Jagged tensors may have room within the block; the keys ``singles`` have one value a sample, and no room."""
    outer, here.singles = here.singles, singles
    try:
        yield
    finally:
        here.singles = outer
