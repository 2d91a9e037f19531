"""The backward passes that are running, with what their nodes keep for the end of the pass."""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from jfi.utils import compat


class BackwardPass:
    """One that is running. Autograd owns it as a callback: it calls it at the end, and drops it on an error.

    Args:
        finish: takes all that was kept.
        outer: the pass in which a reentrant checkpoint has made this one.

    Attributes:
        kept: by nodes of this pass, and of those within it.
        recomputes: whether a checkpoint computes a part of the forward pass again within it.
    """

    def __init__(self, finish: Callable[[list[Any]], None], outer: "BackwardPass | None") -> None:
        self._finish, self._outer = finish, outer
        self.kept: list[Any] = []
        self.recomputes = False

    def __call__(self) -> None:
        if self._outer is None:
            self._finish(self.kept)
        else:
            self._outer.kept += self.kept
        self.kept = []


class BackwardPasses(WeakValueDictionary[int, BackwardPass]):
    """The running passes by their number."""

    def current(self, finish: Callable[[list[Any]], None]) -> BackwardPass:
        """Returns the pass in which this is called; at its end, or that of the outermost pass, calls `finish`."""
        number = compat.current_backward()
        current = self.get(number)
        if current is None:
            outer = [other for _, other in sorted(self.items()) if other.recomputes]
            current = self[number] = BackwardPass(finish, outer[-1] if outer else None)
            compat.call_after_backward(current)
        return current
