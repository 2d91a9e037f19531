"""Whether jagged tensors have room: more values than their lengths count, as the buffers of a captured step have."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from jfi.compat import set_thread_state, thread_state

_KEY = "jfi.room"


class _Block(NamedTuple):
    has_room: bool = False
    singles: frozenset[str] = frozenset()


_OUTSIDE = _Block()


class _Here:
    """State of the code that runs now: of its thread, and within a backward pass of the thread that began it.

    A backward pass runs in threads of its own, and activation checkpointing runs a part of the forward pass there.
    """

    def __init__(self) -> None:
        #: The `with_room` blocks that threads are in.
        self.blocks: list[_Block] = []

    def _block(self) -> _Block:
        if not self.blocks:
            return _OUTSIDE
        if torch.compiler.is_compiling():  # its guards see a change of `blocks`, not one of a thread's state
            return self.blocks[-1]
        return thread_state(_KEY, _OUTSIDE)

    @property
    def has_room(self) -> bool:
        """Whether jagged tensors may have room behind their last sample."""
        return self._block().has_room

    @property
    def singles(self) -> frozenset[str]:
        """The keys that have one value a sample, though their lengths are not read; they have no room."""
        return self._block().singles


here = _Here()


@contextmanager
def with_room(singles: frozenset[str] = frozenset()) -> Iterator[None]:
    """Jagged tensors may have room within the block, but for the keys ``singles``, which have one value a sample."""
    outer, block = thread_state(_KEY, _OUTSIDE), _Block(True, singles)
    here.blocks.append(block)
    set_thread_state(_KEY, block)
    try:
        yield
    finally:
        set_thread_state(_KEY, outer)
        here.blocks.remove(block)
