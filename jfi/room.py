"""Whether jagged tensors have room: more values than their lengths count, as the buffers of a captured step have."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Here(threading.local):
    """What holds for the code that runs now in this thread: attributes, since a call would cost every forward more."""

    #: Whether jagged tensors may have room behind their last sample.
    has_room: bool = False
    #: The keys that have one value a sample, though their lengths are not read; they have no room.
    singles: frozenset[str] = frozenset()


here = _Here()


@contextmanager
def with_room(singles: frozenset[str] = frozenset()) -> Iterator[None]:
    """Jagged tensors may have room within the block, but for the keys ``singles``, which have one value a sample."""
    outer = here.has_room, here.singles
    here.has_room, here.singles = True, singles
    try:
        yield
    finally:
        here.has_room, here.singles = outer
