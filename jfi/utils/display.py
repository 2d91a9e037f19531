"""Shows how far a long task is: a bar on a terminal, and elsewhere a line every 30 seconds."""

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

#: Seconds between two lines.
INTERVAL = 30.0


class Display:
    """A progress bar of a task over `total` samples.

    On a terminal it is tqdm's bar. In a log file, which shows no bar, a line is written every `interval` seconds, so
    that a long epoch is not silent. A task that is shorter writes no line.

    Args:
        task: what it does, such as "epoch 3".
        total: samples of the whole task, or None if nobody knows.
        done: samples that were done before, by a run that is resumed.
        clock: seconds that only grow; another one in tests.
        stream: where to write; stderr by default.
        interval: seconds between two lines.
        unit: what is counted.
        silent: True shows nothing, for all processes but the first.
        ticking: also writes lines while no `update` comes, for a task with long steps such as reading a file.

    Example:
        >>> seconds = iter([0.0, 20.0, 40.0])
        >>> with Display("epoch 1", 800, clock=lambda: next(seconds), stream=sys.stdout) as display:
        ...     display.update(100)
        ...     display.update(100, lambda: {"step": 2, "loss": 0.25})
        epoch 1: 25% of 800 samples, 5.0 samples/s, step 2, loss 0.2500, 02:00 left
    """

    def __init__(
        self,
        task: str,
        total: int | None,
        done: int = 0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        stream: TextIO | None = None,
        interval: float = INTERVAL,
        unit: str = "samples",
        silent: bool = False,
        ticking: bool = False,
    ) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.task, self.total, self.done, self.unit, self.interval = task, total, done, unit, interval
        self.clock, self.silent = clock, silent
        self.bar: tqdm | None = None
        if self.stream.isatty() and not silent:
            look = {"desc": task, "unit": f" {unit}", "unit_scale": True, "leave": False}
            self.bar = tqdm(total=total, initial=done, file=self.stream, **look)
        self._first, self._begin = done, clock()
        self._shown = self._begin
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True) if ticking and not silent else None

    def __enter__(self) -> "Display":
        if self._ticker is not None:
            self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._ticker is not None:
            self._ticker.join()
        if self.bar is not None:
            self.bar.close()

    def update(self, count: int, details: Callable[[], dict[str, int | float]] | None = None) -> None:
        """Adds `count` samples, and shows them if it is time.

        Args:
            count: samples done since the last call.
            details: gives numbers to show; called only for a line, since a loss on a GPU has to be waited for.
        """
        with self._lock:
            self.done += count
            if self.bar is not None:
                self.bar.update(count)
            if self.silent or self.bar is not None:
                return
            now = self.clock()
            if now - self._shown >= self.interval:
                self._shown = now
                print(self._line(now, {} if details is None else details()), file=self.stream, flush=True)

    def _tick(self) -> None:
        while not self._ended.wait(min(1.0, max(0.01, self.interval / 4))):
            self.update(0)
            if self.bar is not None:
                self.bar.refresh()

    def _line(self, now: float, details: dict[str, int | float]) -> str:
        speed = (self.done - self._first) / max(now - self._begin, 1e-9)
        if self.total is None:
            parts = [f"{self.done:,} {self.unit}"] if self.done else []
        else:
            # Every rank's part of a batch is counted alike, so the sum may pass the total by a few samples.
            parts = [f"{min(1.0, self.done / max(1, self.total)):.0%} of {self.total:,} {self.unit}"]
        if self.total is not None or self.done:
            parts.append(f"{speed:{',.0f' if speed >= 100 else '.1f'}} {self.unit}/s")
        parts += [
            f"{name} {value:,}" if type(value) is int else f"{name} {value:.4f}" for name, value in details.items()
        ]
        if self.total is None:
            parts.append(f"{tqdm.format_interval(round(now - self._begin))} so far")
        elif speed > 0:
            parts.append(f"{tqdm.format_interval(round(max(0, self.total - self.done) / speed))} left")
        return f"{self.task}: {', '.join(parts)}"
