"""Ctrl-C and SIGTERM as requests to stop, which the loop checks between batches."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jfi.training.distributed.processes import World


class Interrupted(Exception):
    """A signal stopped training; the state of a run has been saved."""

    def __init__(self, signum: int, run_dir: object):
        super().__init__(f"stopped by {signal.Signals(signum).name}; continue with --resume {run_dir}")
        self.exit_code = 128 + signum


@contextmanager
def stop_on_signals(run_dir: object, world: World) -> Iterator[Callable[[], None]]:
    """Records the first SIGINT or SIGTERM; the second one has its previous handler.

    It yields what raises Interrupted, which names the folder of the run, on all processes of `world` if one got a
    signal. All processes must call that together.
    """
    signals: list[int] = []
    previous: dict[int, Any] = {}

    def record(signum: int, frame: object) -> None:
        signals.append(signum)
        restore()

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def check() -> None:
        if signum := world.max(max(signals, default=0)):
            raise Interrupted(signum, run_dir)

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, record)
    try:
        yield check
    finally:
        restore()
