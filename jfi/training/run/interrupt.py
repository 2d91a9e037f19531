"""Ctrl-C and SIGTERM as requests to stop, which the loop checks between batches."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jfi.training.distributed.processes import World


class Interrupted(Exception):
    """A signal stopped training; the state of a run has been saved."""

    def __init__(self, signum: int, run_dir: object):
        super().__init__(f"stopped by {signal.Signals(signum).name}; continue with --resume {run_dir}")
        self.exit_code = 128 + signum


class StopRequest:
    """The signal that requests a stop, if any."""

    signum: int = 0

    def check(self, run_dir: object, world: World) -> None:
        """Raises Interrupted, which names the folder of the run, on all processes of `world` if one got a signal.

        All processes must call it together.
        """
        signum = world.max(self.signum)
        if signum:
            raise Interrupted(signum, run_dir)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Records the first SIGINT or SIGTERM; the second one has its previous handler."""
    request = StopRequest()
    previous: dict[int, Any] = {}

    def ask(signum: int, frame: object) -> None:
        request.signum = signum
        restore()

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, ask)
    try:
        yield request
    finally:
        restore()
