"""The run folder.

config.yaml     every field of the resolved config
metrics.jsonl   one JSON object a line: training lines, one validation line an epoch, one test line at the end
checkpoints/    the last and the best checkpoint, see `jfi.training.checkpoint`
tensorboard/    the same metrics, and the speed, for TensorBoard
curves.png      metrics over the epochs
attention.png   what a few test samples attended to, unless none of them has a history
"""

import json
import math
import os
from datetime import datetime
from pathlib import Path

from jfi.training.cli import load_config, save_config
from jfi.training.config import Config, ConfigError


class RunFolder:
    """Paths of a run. `create` for a new one, `open` for one to continue."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.curves = path / "curves.png"
        self.attention = path / "attention.png"

    @classmethod
    def create(cls, config: Config) -> "RunFolder":
        """Makes the folder of `config.training.run_dir` and writes the config into it.

        Raises:
            ConfigError: it holds something already.
        """
        path = Path(config.training.run_dir or new_run_dir())
        check_new(path)
        path.mkdir(parents=True, exist_ok=True)
        run = cls(path)
        save_config(config, run.config)
        return run

    @classmethod
    def open(cls, path: str | Path) -> "tuple[RunFolder, Config]":
        """A run that was started before, and its config.

        Raises:
            ConfigError: `path` is no run folder.
        """
        run = cls(Path(path))
        if not run.config.is_file():
            raise ConfigError(f"--resume {path}: no run folder, {run.config} is missing")
        config = load_config(run.config)
        return run, config.with_training(run_dir=str(path))

    @classmethod
    def holds(cls, config: Config) -> bool:
        """Whether the folder of `config.training.run_dir` is that of a run with this very config."""
        path = config.training.run_dir
        if path is None or not cls(Path(path)).config.is_file():
            return False
        return load_config(cls(Path(path)).config) == config

    def check_metrics(self, length: int) -> None:
        """Refuses a metrics.jsonl without the first `length` bytes, which a checkpoint goes with.

        Raises:
            ConfigError: it is missing or too short.
        """
        if (self.metrics.stat().st_size if self.metrics.is_file() else 0) < length:
            raise ConfigError(
                f"--resume {self.path}: {self.metrics} is missing or shorter than the {length} bytes of its checkpoint"
            )


def new_run_dir(prefix: str = "") -> str:
    """`runs/<prefix><date>-<time>`."""
    return f"runs/{prefix}{datetime.now():%Y%m%d-%H%M%S}"


def check_new(path: Path) -> None:
    """Refuses a folder that holds something."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"training.run_dir: {path} is not empty; name a new folder, or continue with --resume {path}")


class Recorder:
    """Writes metrics to `metrics.jsonl`, cut back to the length that a checkpoint remembers, and to TensorBoard.

    The file holds nothing that differs from one execution to the next, so that a resumed run ends with the same file.

    Args:
        run: the folder.
        length: bytes of metrics.jsonl to keep.
        step: TensorBoard forgets what it has from this step on.
    """

    def __init__(self, run: RunFolder, length: int, step: int):
        # Seconds of import, which a fault of the input need not wait for.
        from torch.utils.tensorboard import SummaryWriter

        run.metrics.touch()
        self._file = run.metrics.open("r+b")
        self._file.truncate(length)
        self._file.seek(length)
        self._board = SummaryWriter(str(run.tensorboard), purge_step=step)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._board.close()

    def metrics(self, split: str, epoch: int, step: int, metrics: dict[str, float]) -> None:
        """Appends a line; a metric that is not a number becomes null."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        record = {"split": split, "epoch": epoch, "step": step, **finite}
        self._file.write((json.dumps(record) + "\n").encode())
        self._file.flush()
        for name, value in metrics.items():
            self._board.add_scalar(f"{name}/{split}", value, step)

    def speed(self, samples_per_second: float, step: int) -> None:
        """Notes the speed of training, for TensorBoard alone."""
        self._board.add_scalar("samples_per_second", samples_per_second, step)

    def length(self) -> int:
        """Bytes of metrics.jsonl, all of them on the disk."""
        os.fsync(self._file.fileno())
        return self._file.tell()


class SilentRecorder:
    """Takes the place of a Recorder in the processes that write nothing."""

    def __enter__(self) -> "SilentRecorder":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def metrics(self, split: str, epoch: int, step: int, metrics: dict[str, float]) -> None:
        pass

    def speed(self, samples_per_second: float, step: int) -> None:
        pass

    def length(self) -> int:
        return 0


def read_metrics(path: Path) -> list[dict]:
    """The lines of a `metrics.jsonl`."""
    return [json.loads(line) for line in path.read_text().splitlines()]
