"""Whether jagged tensors have room: more values than their lengths count, as the buffers of a captured step have."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from jfi.utils.compat import current_backward


class _Block(NamedTuple):
    has_room: bool = False
    singles: frozenset[str] = frozenset()


_OUTSIDE = _Block()


class _Here:
    """State of the code that runs now: of its thread, and in a backward pass of the newest block of all threads.

    A backward pass runs in threads of its own, and activation checkpointing runs a part of the forward pass there.
    """

    def __init__(self) -> None:
        #: The `with_room` blocks that threads are in.
        self.blocks: list[_Block] = []
        self.of_thread = threading.local()

    def _block(self) -> _Block:
        if not self.blocks:
            return _OUTSIDE
        if torch.compiler.is_compiling():  # its guards see a change of `blocks`, not one of a thread's state
            return self.blocks[-1]
        default = self.blocks[-1] if current_backward() != -1 else _OUTSIDE
        return getattr(self.of_thread, "block", default)

    @property
    def has_room(self) -> bool:
        """Returns whether jagged tensors may be padded behind their last sample."""
        return self._block().has_room

    @property
    def singles(self) -> frozenset[str]:
        """The keys that have one value a sample, though their lengths are not read; they have no room."""
        return self._block().singles


here = _Here()


@contextmanager
def with_room(singles: frozenset[str] = frozenset()) -> Iterator[None]:
    """Jagged tensors may have room within the block, but for the keys ``singles``, which have one value a sample.

    Backward passes and compiled functions of other threads see the block as well: they cannot be told from its own.
    """
    outer, block = getattr(here.of_thread, "block", None), _Block(True, singles)
    here.blocks.append(block)
    here.of_thread.block = block
    try:
        yield
    finally:
        if outer is None:
            del here.of_thread.block
        else:
            here.of_thread.block = outer
        last = max(i for i, one in enumerate(here.blocks) if one is block)
        del here.blocks[last]
