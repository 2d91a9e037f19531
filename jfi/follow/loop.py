"""The loop of a run that follows a log: each part is scored, trained on, and added to the state of the log.

A checkpoint lies at the end of a part and has its place in the log. When it is written influences no bit of the run:
what a part changes follows from the state before it and its rows alone.
"""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any, Protocol

import msgspec
import numpy as np

from jfi.data import DataSchema, InteractionDataset
from jfi.data.batches.batch import Arrays
from jfi.data.batches.dataset import Batches
from jfi.events.events import SortedEvents
from jfi.follow.parts import Part
from jfi.follow.rows import SAMPLES, PartRows, Reading
from jfi.follow.state import LogState
from jfi.follow.windows import Windows
from jfi.training.config import Config
from jfi.training.distributed.processes import World
from jfi.training.loop.steps import Steps
from jfi.training.run.recorder import SPEED, LineFile
from jfi.training.run.run_folder import RunFolder
from jfi.utils.display import Display
from jfi.utils.files import temporary_folder


class LogPlace(msgspec.Struct):
    """The place in the log of a checkpoint.

    Args:
        part: name of the last part that was trained on.
        parts: number of parts that were trained on.
        rows: number of their rows that count.
        newest: time of the newest row, in seconds.
        log_length: bytes of the file of metrics.
        log_sha256: SHA-256 of these bytes.
    """

    part: str
    sha256: str
    parts: int
    rows: int
    newest: float
    log_length: int = 0
    log_sha256: str = ""

    def named(self) -> dict:
        """Returns the fields that hooks and published versions get."""
        return {"part": self.part, "sha256": self.sha256, "newest": self.newest}


class Hook(Protocol):
    """An object that is called after each step and each part, such as one that publishes changes."""

    def after_step(self) -> None:
        """Follows each optimizer step."""

    def after_part(self, place: dict) -> None:
        """Follows each part, whose end is a place in the log: its name, SHA-256 and the time of the newest row."""

    def while_waiting(self) -> None:
        """Is called again and again while no further part is there."""

    def close(self) -> None:
        """Follows the end at a part: of the log, by a signal or at a part that is refused."""


class LogTrainer(Steps):
    """The state of a run that follows a log, and its steps on parts.

    Args:
        config: of the run. Its learning rates are the base rates from now on: a log has no end to decay to.
        clock: seconds that only grow; another one in tests.
    """

    def __init__(
        self,
        config: Config,
        schema: DataSchema,
        world: World,
        reading: Reading,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        constant = replace(config.optimizer, schedule="constant", warmup_steps=0)
        own = replace(config.with_training(rows_after=None), optimizer=constant)
        super().__init__(own, _empty(schema), world, clock=clock)
        self.config = config
        self._reading = reading
        self.windows = Windows(schema.labels)
        #: Gets the lines of metrics.
        self.lines: LineFile | None = None
        self.hook: Hook | None = None
        #: Whether the parameters and the state are those of the middle of a part.
        self.is_within_part = False

    @property
    def place(self) -> LogPlace | None:
        """The place of the last part; None before the first one."""
        return msgspec.convert(self.progress.follow, LogPlace) if self.progress.follow else None

    def run_part(self, part: Part, state: LogState, check: Callable[[], None]) -> dict:
        """Scores a part, trains on it, and ends it in the state, which `checkpoint` writes.

        Returns:
            The line of its metrics.

        Raises:
            DataError: a fault in the part; nothing has changed.
            ConfigError: a batch has more distinct values than a table that grows has rows.
            FloatingPointError: training has diverged.
            Interrupted: a signal stopped it in the middle, and the state is of no use any more.
        """
        before, begin = self.place, self.clock()
        with temporary_folder(".jfi-") as folder:
            rows = PartRows(part, state, self._reading, folder)
            self.is_within_part = True
            metrics, closed = {}, []
            if rows.dataset is not None:
                self.dataset = rows.dataset
                metrics, closed = self._score(rows.times(), check)
                metrics |= self._train(check)
                self.dataset = _empty(self.dataset.schema)
        state.end_part(part.name, rows.newest)
        counts = rows.counts
        count = counts.rows - counts.repeated - counts.too_old - counts.late_labels
        known = (before.parts, before.rows) if before else (0, 0)
        counted = known[0] + 1, known[1] + count, state.place.newest
        place = LogPlace(part.name, part.sha256, *counted)
        self.progress.batch += 1  # the checkpoint of a part without steps has a name of its own
        self.progress.newest = max(self.progress.newest, place.newest)
        speed = counts.labeled / max(self.clock() - begin, 1e-9)
        line = {"part": part.name, "sha256": part.sha256, "size": part.size, "modified": part.modified}
        line |= {"late_seconds": self._reading.late_seconds, **asdict(counts), "step": self.progress.step}
        line |= {"begin": rows.oldest, "end": rows.newest} if np.isfinite(rows.newest) else {}
        line |= {name: value if np.isfinite(value) else None for name, value in metrics.items()}
        attempts = {f"publish_{name}": getattr(self.hook, name, 0) for name in ("failures", "held_back")}
        line |= {name: count for name, count in attempts.items() if count}
        line |= {SPEED: round(speed, 1)}
        for one in (*closed, line):
            self.lines.append(one)
        place.log_length, place.log_sha256 = self.lines.length(), self.lines.sha256()
        self.progress.follow = msgspec.to_builtins(place)
        self.is_within_part = False
        if self.hook is not None:
            self.hook.after_part(place.named())
        return line

    def checkpoint(self, run: RunFolder, state: LogState) -> None:
        """Writes a checkpoint at the end of a part, and then the state of the log."""
        progress = self.progress
        # The run is that of the newest parameters from now on, for `jfi predict` and `jfi export`, too.
        progress.best_epoch, progress.best_batch, progress.best_step = progress.epoch, progress.batch, progress.step
        progress.calibration = {}
        self.save(run, None)  # metrics.jsonl stays as it is
        state.commit()

    def _score(self, times: np.ndarray, check: Callable[[], None]) -> tuple[dict[str, float], list[dict]]:
        """The metrics of a part's samples before they are trained on, and those of windows that have ended."""
        predictions = self._predict(SAMPLES, check)
        weights = [one.weight for one in self.config.data.targets()]
        metrics = predictions.metrics(self._labels, weights)
        (logits,), (labels,) = predictions.logits, predictions.labels
        wide = (one.reshape(len(times), -1) for one in (logits, labels))
        closed = self.windows.add(times, *wide)
        so_far = self.windows.metrics("all")
        return metrics | {f"all_{name}": one for name, one in so_far.items() if isinstance(one, float)}, closed

    def _train(self, check: Callable[[], None]) -> dict[str, float]:
        """One pass over a part's samples in the order of time; returns the mean loss of the steps."""
        with closing(self._steps(SAMPLES, "train")) as steps:
            for _ in steps:
                if self.hook is not None:
                    self.hook.after_step()
                check()
        self._flush_average()
        loss, _, samples = self.window.tolist()
        self.window.zero_()
        self.check_finite(loss)
        return {"train_loss": loss / samples}

    def _parts(self, split: str, size: int) -> list[Batches]:
        """Returns the batches of a part in the order of time, by part of a step."""
        count = self.config.training.gradient_accumulation_steps if self.model.training else 1
        options: dict[str, Any] = {"pin_memory": self.device.type == "cuda", "seed": self.config.training.seed}
        options["epoch"] = self.place.parts if self.place else 0
        return [self.dataset.batches(split, size, rank=part, world_size=count, **options) for part in range(count)]

    def _display(self, label: str, total: int, done: int) -> Display:
        return Display(label, total, done, silent=True)  # a line of each part says more

    def _state(self) -> dict:
        found = super()._state()
        return found | ({"follow": self.windows.state} if self.progress.follow else {})


def _empty(schema: DataSchema) -> InteractionDataset:
    """A dataset without samples."""
    none = np.zeros(0, np.int64)
    events = SortedEvents(none, none, np.zeros(0), np.zeros(0, np.float32), np.zeros(0, np.int8))
    dense = np.zeros((0, 0), np.float32)
    return InteractionDataset(Arrays(events, [], (dense, dense, []), {SAMPLES: none}, None), schema)
