"""Metrics to an experiment tracker: a logger of Lightning that the config names, or one that code gives.

A logger gets `log_hyperparams(params)` once with all fields of the config, `log_metrics(metrics, step)` with each line
of metrics.jsonl, and `finalize(status)` with "success" or "failed".
"""

import importlib
import importlib.util
import logging
import math
import os
import sys
from typing import Any, Protocol

from jfi.training.config import ConfigError, TrainingConfig

_log = logging.getLogger(__name__)

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
