"""The best epoch of a run, as it lies in its folder: where its parameters are, and what they belong to."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from jfi.data import DataError, DataSchema
from jfi.data.prepared.manifest import check_fits
from jfi.training.checkpoints.checkpoint import (
    DamagedCheckpointError,
    latest_checkpoint,
    load_checkpoint,
)
from jfi.training.config import Config, ConfigError
from jfi.training.metrics.calibration import Calibration
from jfi.training.run.run_data import load_schema
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.run_position import describe_changes, load_progress

#: Sections and fields of the config that the scores of a run depend on, and those fields that they do not depend on.
_SCORES = ("data.", "model.", "encoder", "optimizer.ema_decay", "training.ranking")
_NOT_SCORES = ("data.batching",)


def _matters(field: str) -> bool:
    return field.startswith(_SCORES) and field not in _NOT_SCORES


@dataclass(frozen=True)
class BestEpoch:
    """Location of the parameters of a run's best epoch.

    Args:
        path: of the checkpoint.
        module, prefix: the parameter `name` of the model is saved under `prefix + name` of `module`, which is the
            average where the run has one.
        config: of the run.
        schema: of the run's data.
        name: of the run, for messages.
        calibration: see `jfi.training.metrics.calibration`; empty if the run has none.
        unknown: by column the share of the test split without a known value.
        epoch: finished epochs at the best evaluation, such as 0.25.
        newest: the parameters were trained on all training rows up to this time; -inf if it is unknown.
    """

    path: Path
    module: str
    prefix: str
    config: Config
    schema: DataSchema
    name: str
    calibration: Calibration = field(default_factory=dict)
    unknown: dict[str, float] = field(default_factory=dict)
    epoch: float = 0
    newest: float = -math.inf

    @classmethod
    def of(cls, path: str | Path, setting: str = "run") -> "BestEpoch":
        """The best epoch of the run in the folder `path`; no table of the run is read.

        Args:
            path: the folder.
            setting: what gave the path, for messages.

        Raises:
            ConfigError: not a run folder, no epoch is finished, or its config has changed since.
            DataError: the schema is missing or damaged.
        """
        name = f"{setting} {path}"
        if not RunFolder(Path(path)).config.is_file():
            raise ConfigError(f"{name}: not a run folder, config.yaml is missing")
        run, config = RunFolder.open(path)
        last = latest_checkpoint(run.checkpoints)
        if last is None:
            raise ConfigError(f"{name}: the run has no checkpoint yet")
        try:
            progress = load_progress(last)
            best = run.checkpoints / progress.best_checkpoint
            is_finished = best.is_dir()
            if is_finished:
                newest = load_progress(best).newest  # a folder of the name of another checkpoint is refused
            changed = describe_changes(config, progress, _matters)
        except DamagedCheckpointError as fault:
            raise ConfigError(f"{name}: {fault}") from None
        if not is_finished:
            raise ConfigError(f"{name}: the run has not finished an epoch yet")
        if changed:
            raise ConfigError(f"{name}: {changed}")
        if progress.best_epoch < 1:  # the parameters have seen only part of the rows after those of an earlier run
            after = config.training.rows_after
            newest = -math.inf if after in (None, "auto") else after
        module, prefix = ("model", "") if config.optimizer.ema_decay is None else ("average", "module.")
        schema = load_schema(run)
        try:
            check_fits(schema, config.data.resolved())
        except DataError as fault:
            raise ConfigError(f"{name}: {run.config.name}: {fault}") from fault
        found = progress.calibration, progress.unknown, progress.best_epoch, newest
        return cls(best, module, prefix, config, schema, name, *found)

    def read(self, parameters: dict[str, torch.Tensor]) -> None:
        """Fills tensors with the parameters of their names, in place.

        Raises:
            ConfigError: the checkpoint is damaged.
        """
        try:
            load_checkpoint(self.path, {self.module: {self.prefix + name: p for name, p in parameters.items()}})
        except DamagedCheckpointError as fault:
            raise ConfigError(f"{self.name}: {fault}") from fault
