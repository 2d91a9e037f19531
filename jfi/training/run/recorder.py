"""Records the metrics of a run, in `metrics.jsonl`, for TensorBoard and for an experiment tracker.

A tracker is a logger of Lightning that the config names, or one that code gives. It gets `log_hyperparams(params)` once
with all fields of the config, `log_metrics(metrics, step)` with each line of metrics.jsonl, and `finalize(status)` with
"success" or "failed".
"""

import hashlib
import importlib
import importlib.util
import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any, Protocol

from jfi.training.config import ConfigError, TrainingConfig
from jfi.training.run.run_folder import RunFolder
from jfi.utils.files import naming

_log = logging.getLogger(__name__)
#: The key of a line's speed; all other values of a line are the same in every repetition of a run.
SPEED = "samples_per_second"
#: The key that names a line's data, see `jfi.training.run.run_data.name_data`.
DATA = "data"
_MODULE = "lightning.pytorch.loggers"
#: By name in `training.logger` the logger, and its arguments by the variable of the environment that gives each; W&B
#: reads its own. No config has them: it may be somebody else's.
_LOGGERS: dict[str, tuple[str, dict[str, str]]] = {
    "wandb": ("WandbLogger", {}),
    "mlflow": (
        "MLFlowLogger",
        {
            "tracking_uri": "MLFLOW_TRACKING_URI",
            "experiment_name": "MLFLOW_EXPERIMENT_NAME",
            "run_name": "MLFLOW_RUN_NAME",
            "run_id": "MLFLOW_RUN_ID",
        },
    ),
}


class LineFile:
    """A file of JSON objects, one a line, that is appended to.

    Args:
        path: of the file, which is made if it is not there.
        length: bytes of it to keep.
    """

    def __init__(self, path: Path, length: int) -> None:
        self._path = path
        path.touch()
        self._file = path.open("r+b")
        self._digest = hashlib.sha256(self._file.read(length))
        self._file.truncate(length)
        self._file.seek(length)

    def append(self, record: dict) -> None:
        """Appends a line."""
        line = (json.dumps(record) + "\n").encode()
        with naming(self._path):
            self._file.write(line)
            self._file.flush()
        self._digest.update(line)

    def length(self) -> int:
        """Flushes the file to the disk and returns its length in bytes."""
        with naming(self._path):
            os.fsync(self._file.fileno())
        return self._file.tell()

    def sha256(self) -> str:
        """Returns the checksum of the file, in hexadecimal."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Logger(Protocol):
    """The interface of a logger, see lightning.pytorch.loggers.Logger."""

    def log_hyperparams(self, params: dict[str, Any]) -> None: ...
    def log_metrics(self, metrics: dict[str, float], step: int) -> None: ...
    def finalize(self, status: str) -> None: ...


def check_packages(config: TrainingConfig) -> None:
    """Raises ConfigError if the tracker `training.logger` lacks a package."""
    if config.logger is None:
        return
    missing = [package for package in ("lightning", config.logger) if importlib.util.find_spec(package) is None]
    if missing:
        have = f"{' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        raise ConfigError(f"training.logger: {config.logger} needs {have}: pip install {' '.join(missing)}")


def _make_logger(config: TrainingConfig) -> Logger | None:
    """The logger that the config names; None without one."""
    if config.logger is None:
        return None
    check_packages(config)
    try:
        name, arguments = _LOGGERS[config.logger]
        given = {argument: os.environ[one] for argument, one in arguments.items() if one in os.environ}
        return getattr(importlib.import_module(_MODULE), name)(**given)
    except Exception as error:
        raise ConfigError(f"training.logger: {config.logger} cannot be started: {_shown(error)}") from error


class Tracker:
    """A logger that cannot end the training: once it has refused metrics it gets no more, and a line says so.

    Args:
        config: names the logger, or none.
        params: all fields of the config.
        logger: replaces the one that the config names.

    Raises:
        ConfigError: a package is not installed, or the logger refuses its options.
    """

    def __init__(self, config: TrainingConfig, params: dict[str, Any], logger: Logger | None = None) -> None:
        self._open_before, self._has_failed = _wandb_run(), False
        self._logger = _make_logger(config) if logger is None else logger
        if self._logger is None:
            return
        try:  # MLflow refuses params that have changed since the run was first logged; its metrics can go on
            self._logger.log_hyperparams(params)
        except Exception as error:
            _log.warning("training.logger failed, and does not get the config: %s", _shown(error))

    def metrics(self, split: str, metrics: dict[str, float], step: int) -> None:
        """Sends the finite metrics of a line, named like validation/auc."""
        finite = {f"{split}/{name}": value for name, value in metrics.items() if math.isfinite(value)}
        self._send("log_metrics", finite, step)

    def close(self, failed: bool) -> None:
        """Ends the logger, and a run of W&B that it has opened: another training in the process would go on with it."""
        self._send("finalize", "failed" if failed else "success")
        run = _wandb_run()  # Lightning leaves it open until the process ends
        if run is None or run is self._open_before or getattr(self._logger, "experiment", None) is not run:
            return
        try:
            run.finish(exit_code=int(failed))
        except Exception as error:
            _log.warning("training.logger: the run of W&B does not end: %s", _shown(error))

    def _send(self, method: str, *arguments: object) -> None:
        if self._logger is None or self._has_failed:
            return
        try:
            getattr(self._logger, method)(*arguments)
        except Exception as error:
            self._has_failed = True
            _log.warning("training.logger failed, and gets no more metrics: %s", _shown(error))


def _wandb_run() -> Any:
    """The open run of W&B in this process, or None."""
    return getattr(sys.modules.get("wandb"), "run", None)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class Recorder:
    """Appends metrics to `metrics.jsonl`, truncated to the length in the checkpoint first, and to TensorBoard.

    A resumed run ends with the same file as an uninterrupted one, but for the speeds (`SPEED`).

    Args:
        run: the run folder.
        length: bytes of metrics.jsonl to keep.
        step: TensorBoard's events from this step on are discarded.
        data: names the data that the metrics are of; each line has it.
        tracker: gets the metrics too.
    """

    def __init__(self, run: RunFolder, length: int, step: int, data: str, tracker: Tracker | None = None):
        # Imported here: it takes seconds, and faults in the input should be reported before.
        from torch.utils.tensorboard import SummaryWriter

        self._data, self._tracker = data, tracker
        #: metrics.jsonl.
        self.file = LineFile(run.metrics, length)
        self._board = SummaryWriter(str(run.tensorboard), purge_step=step)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, fault: object, *_: object) -> None:
        self.file.close()
        self._board.close()
        if self._tracker is not None:
            self._tracker.close(fault is not None)

    def metrics(self, split: str, epoch: float, step: int, metrics: dict[str, float], speed: float) -> None:
        """Appends a line; a metric that is not finite becomes null. `speed` is in samples a second."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        record = {"split": split, "epoch": epoch, "step": step, **finite, SPEED: round(speed, 1), DATA: self._data}
        self.file.append(record)
        for name, value in {**metrics, SPEED: speed}.items():
            self._board.add_scalar(f"{name}/{split}", value, step)
        if self._tracker is not None:
            self._tracker.metrics(split, {**metrics, SPEED: speed}, step)


def read_metrics(path: Path, length: int | None = None) -> list[dict]:
    """The lines of a `metrics.jsonl`, of its first `length` bytes if that is given; 0 bytes need no file.

    Raises:
        ConfigError: a line is damaged; the message names the file and the line.
    """
    records, content = [], b"" if length == 0 else path.read_bytes()[:length]
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not {"split", "epoch", "step"} <= record.keys():
            raise ConfigError(f"{path}:{number}: damaged, not a line of metrics")
        records.append(record)
    return records


def describe_earlier(log: list[dict], data: str) -> str | None:
    """A line about the epochs that were validated on other data than `data`, None if there are none.

    Example:
        >>> log = [{"split": "validation", "epoch": epoch, "data": name} for epoch, name in enumerate("aab", 1)]
        >>> print(describe_earlier(log, "b"))
        the data has changed: the metrics of epochs 1, 2 are of the data before, not comparable with others or a test
    """
    epochs = [f"{line['epoch']:.4g}" for line in log if line["split"] == "validation" and line.get(DATA, data) != data]
    if not epochs:
        return None
    which = f"epoch{'s' * (len(epochs) > 1)} {', '.join(epochs)}"
    return f"the data has changed: the metrics of {which} are of the data before, not comparable with others or a test"
