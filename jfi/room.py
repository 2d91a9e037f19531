"""Whether jagged tensors have room: more values than their lengths count, as the buffers of a captured step have."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

#: The keys that have one value a sample, within a block with room; None outside.
_singles: ContextVar[frozenset[str] | None] = ContextVar("_singles", default=None)


def has_room() -> bool:
    """Whether the code that runs now, in this thread, must expect room behind a jagged tensor's last sample."""
    # A compiler cannot trace ContextVar.get, and a captured step is not compiled as a whole.
    return not torch.compiler.is_compiling() and _singles.get() is not None


def is_single(key: str) -> bool:
    """Whether each sample is known to have one value of this key, though its lengths are not read."""
    return has_room() and key in _singles.get()


@contextmanager
def with_room(singles: frozenset[str] = frozenset()) -> Iterator[None]:
    """Jagged tensors may have room within the block; the keys ``singles`` have one value a sample, and no room."""
    token = _singles.set(singles)
    try:
        yield
    finally:
        _singles.reset(token)
