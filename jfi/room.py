"""Whether jagged tensors have room: more values than their lengths count, as the buffers of a captured step have."""

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


def has_room() -> bool:
    """Whether the code that runs now must expect room behind a jagged tensor's last sample."""
    return _depth > 0


@contextmanager
def with_room() -> Iterator[None]:
    """Jagged tensors may have room within the block."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
