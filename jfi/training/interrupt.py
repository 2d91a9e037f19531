"""Ctrl-C and SIGTERM as a request that the loop honours between two batches."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from jfi.training.distributed import World


class Interrupted(Exception):
    """Training stopped on a signal after its state was saved."""

    def __init__(self, signum: int, run_dir: object):
        super().__init__(f"stopped by {signal.Signals(signum).name}; continue with --resume {run_dir}")
        self.exit_code = 128 + signum


class StopRequest:
    """Whether a signal has asked to stop."""

    signum: int = 0

    def check(self, run_dir: object, world: World) -> None:
        """Raises Interrupted on every process of `world` if any has been asked; all call this together."""
        signum = world.max(self.signum)
        if signum:
            raise Interrupted(signum, run_dir)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Collects the first SIGINT or SIGTERM; the second one acts as if this were not here."""
    request = StopRequest()
    previous = {}

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
