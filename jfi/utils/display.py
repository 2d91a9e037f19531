"""Shows how far a long task is: tqdm's bar on a terminal, and elsewhere a line every 30 seconds."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

#: Seconds between two lines.
INTERVAL = 30.0
_WHOLE = "{desc}: {percentage:.0f}% of {total}{unit}, {rate_noinv_fmt}{postfix}, {remaining} left"
_UNKNOWN = "{desc}: {n}{unit}, {rate_noinv_fmt}{postfix}, {elapsed} so far"


class Display(tqdm):
    """A progress bar of a task over `total` samples; in a log file, which shows no bar, lines are written.

    Args:
        task: what it does, such as "epoch 3".
        total: samples of the whole task, or None if nobody knows.
        done: samples that were done before, by a run that is resumed.
        unit: what is counted.
        silent: True shows nothing, for all processes but the first.
        ticking: also writes lines while no `update` comes, for a task with long steps such as reading a file.

    Example:
        >>> with Display("epoch 1", 800) as display:
        ...     display.update(100, lambda: {"step": 2, "loss": 0.25})  # shown if it is time
    """

    monitor_interval = 0  # no thread of tqdm's that looks after bars

    def __init__(
        self,
        task: str,
        total: int | None,
        done: int = 0,
        *,
        unit: str = "samples",
        silent: bool = False,
        ticking: bool = False,
    ) -> None:
        self._is_bar, self._details, self._ended = sys.stderr.isatty(), None, threading.Event()
        # A line has the mean speed so far; a task that is shorter than the interval writes none.
        own: dict[str, Any] = {"smoothing": 0, "delay": max(INTERVAL, 1e-9), "mininterval": INTERVAL, "miniters": 0}
        own["bar_format"] = _UNKNOWN if total is None else _WHOLE
        look: dict[str, Any] = {"unit_scale": True} if self._is_bar else own
        look |= {"desc": task, "unit": f" {unit}", "disable": silent, "leave": False, "file": sys.stderr}
        super().__init__(total=total, initial=done, **look)
        self._ticker = threading.Thread(target=self._tick, daemon=True) if ticking and not silent else None
        if self._ticker is not None:
            self._ticker.start()

    def update(self, n: float = 1, details: Callable[[], dict[str, int | float]] | None = None) -> None:
        """Adds `n` samples, and shows them if it is time.

        Args:
            n: samples done since the last call.
            details: gives numbers to show; called only for a line, since a loss on a GPU has to be waited for.
        """
        self._details = details
        # Every rank's part of a batch is counted alike, so the sum may pass the total by a few samples.
        super().update(n if self.total is None else min(n, self.total - self.n))

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draws the bar, or writes a line."""
        if self._is_bar:
            return super().display(msg, pos)
        if msg is None:
            if self._details is not None:
                self.set_postfix(self._details(), refresh=False)
            print(self, file=self.fp, flush=True)
        return False

    def close(self) -> None:
        """Ends the display."""
        self._ended.set()
        if self._ticker is not None and self._ticker is not threading.current_thread():
            self._ticker.join()
        super().close()

    def _tick(self) -> None:
        while not self._ended.wait(1.0 if self._is_bar else min(1.0, max(0.01, INTERVAL / 4))):
            if self._is_bar or time.time() - self.last_print_t >= INTERVAL:
                self.refresh()
                self.last_print_t = time.time()  # as tqdm counts
