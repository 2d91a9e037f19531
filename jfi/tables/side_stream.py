"""A stream of a GPU for work that nothing needs at once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream beside the current one, which waits for its work where this is needed.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        #: The end of its last work, until the current stream waits for it, and what this work reads: memory of other
        #: streams, which they may use again afterwards.
        self._done: torch.cuda.Event | None = None
        self.kept: list[object] = []

    @contextmanager
    def work(self, *read: object) -> Iterator[None]:
        """Does the work of the block, which begins after that of the current stream and reads these objects."""
        kept = [*self.kept, *read]
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield
            self._done = self.stream.record_event()
        self.kept = kept

    def wait(self) -> None:
        """Makes the current stream wait for the work."""
        if self._done is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self._done)
            self.forget()

    def forget(self) -> None:
        """Lets nothing wait for the work any more, as after a capture that failed."""
        self._done, self.kept = None, []
