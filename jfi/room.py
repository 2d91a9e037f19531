"""Whether jagged tensors have room: more values than their lengths count, as the buffers of a captured step have."""

from collections.abc import Iterator
from contextlib import contextmanager

#: Of each block that is entered, the keys that have one value a sample.
_entered: list[frozenset[str]] = []


def has_room() -> bool:
    """Whether the code that runs now must expect room behind a jagged tensor's last sample."""
    return bool(_entered)


def is_single(key: str) -> bool:
    """Whether each sample is known to have one value of this key, though its lengths are not read."""
    return bool(_entered) and key in _entered[-1]


@contextmanager
def with_room(singles: frozenset[str] = frozenset()) -> Iterator[None]:
    """Jagged tensors may have room within the block; the keys ``singles`` have one value a sample, and no room."""
    _entered.append(singles)
    try:
        yield
    finally:
        _entered.pop()
