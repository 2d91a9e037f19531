"""Metrics to an experiment tracker, through the loggers of Lightning or any class with their three methods.

The class gets the options as keyword arguments, and then `log_hyperparams(params)` once with all fields of the config,
`log_metrics(metrics, step)` with each line of metrics.jsonl, and `finalize(status)` with "success" or "failed".
"""

import importlib
import importlib.util
import logging
import math
import sys
from typing import Any, Protocol

from jfi.training.config import ConfigError, TrainingConfig

_log = logging.getLogger(__name__)

_LIGHTNING = "lightning.pytorch.loggers"
#: By short name the logger, and the packages that it needs.
_KNOWN = {
    "wandb": (f"{_LIGHTNING}:WandbLogger", ("lightning", "wandb")),
    "mlflow": (f"{_LIGHTNING}:MLFlowLogger", ("lightning", "mlflow")),
}


class Logger(Protocol):
    """What a logger does, see lightning.pytorch.loggers.Logger."""

    def log_hyperparams(self, params: dict[str, Any]) -> None: ...
    def log_metrics(self, metrics: dict[str, float], step: int) -> None: ...
    def finalize(self, status: str) -> None: ...


def find_logger(config: TrainingConfig) -> type | None:
    """What `training.logger` names; None without one.

    Raises:
        ConfigError: a package is not installed, or there is no such class.
    """
    if config.logger is None:
        return None
    name, packages = _KNOWN.get(config.logger, (config.logger, ()))
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        have = f"{' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        raise ConfigError(f"training.logger: {config.logger} needs {have}: pip install {' '.join(missing)}")
    module, _, attribute = name.partition(":")
    if not attribute:
        known = ", ".join(_KNOWN)
        raise ConfigError(f"training.logger: got {name!r}, must be {known}, null, or a class as module:Class")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"training.logger: {name!r} cannot be imported: {error}") from None
    kind = getattr(found, attribute, None)
    if not callable(kind):
        raise ConfigError(f"training.logger: {module} has no class '{attribute}'")
    return kind


class Tracker:
    """A logger that cannot end the training: once it has refused metrics it gets no more, and a line says so.

    Args:
        kind: the result of `find_logger`; None for no logger.
        options: `training.logger_options`.
        params: all fields of the config.

    Raises:
        ConfigError: the logger refuses its options.
    """

    def __init__(self, kind: type | None, options: dict[str, Any], params: dict[str, Any]) -> None:
        self._logger: Logger | None = None
        #: The run of W&B that the logger has opened, which Lightning leaves open until the process ends.
        self._run: Any = None
        if kind is None:
            return
        before = _wandb_run()
        try:
            self._logger = kind(**options)
        except Exception as error:
            raise ConfigError(f"training.logger_options: the logger cannot be made: {_shown(error)}") from error
        try:  # MLflow refuses params that have changed since the run was first logged; its metrics can go on
            self._logger.log_hyperparams(params)
        except Exception as error:
            _log.warning("training.logger failed, and does not get the config: %s", _shown(error))
        self._keep_run(before)

    def metrics(self, split: str, metrics: dict[str, float], step: int) -> None:
        """Sends the finite metrics of a line, named like validation/auc."""
        finite = {f"{split}/{name}": value for name, value in metrics.items() if math.isfinite(value)}
        self._send("log_metrics", finite, step)

    def close(self, failed: bool) -> None:
        """Ends the logger, and a run of W&B that it has opened: another training in the process would go on with it."""
        self._send("finalize", "failed" if failed else "success")
        if self._run is None or self._run is not _wandb_run():
            return
        try:
            self._run.finish(exit_code=int(failed))
        except Exception as error:
            _log.warning("training.logger: the run of W&B does not end: %s", _shown(error))

    def _send(self, method: str, *arguments: object) -> None:
        if self._logger is None:
            return
        before = _wandb_run()
        try:
            getattr(self._logger, method)(*arguments)
        except Exception as error:
            self._logger = None
            _log.warning("training.logger failed, and gets no more metrics: %s", _shown(error))
        self._keep_run(before)

    def _keep_run(self, before: Any) -> None:
        """Keeps the run that is open now and was not before the logger was called."""
        run = _wandb_run()
        if run is not None and run is not before:
            self._run = run


def _wandb_run() -> Any:
    """The open run of W&B in this process, or None."""
    return getattr(sys.modules.get("wandb"), "run", None)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
