"""A run as it lies in its folder: the model of its best epoch, and all that encodes other data for it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from jfi.data import DataError, DataSchema
from jfi.data.load import check_fits
from jfi.data.source import column_settings
from jfi.models import SequenceDLRM
from jfi.training.build import build_model
from jfi.training.checkpoint import (
    DamagedCheckpointError,
    checkpoint_name,
    latest_checkpoint,
    load_checkpoint,
    read_progress,
)
from jfi.training.config import Config, ConfigError
from jfi.training.run_data import load_schema
from jfi.training.run_folder import RunFolder


@dataclass(frozen=True)
class BestEpoch:
    """Where the parameters of a run's best epoch are.

    Args:
        path: of the checkpoint.
        module, prefix: the parameter `name` of the model is saved under `prefix + name` of `module`, which is the
            average where the run has one.
        config: of the run.
        schema: of the run's data.
    """

    path: Path
    module: str
    prefix: str
    config: Config
    schema: DataSchema

    @classmethod
    def of(cls, path: str | Path) -> "BestEpoch":
        """The best epoch of the run in the folder `path`; no table of the run is read.

        Raises:
            ConfigError: not a run folder, or no epoch is finished.
            DataError: the schema is missing or damaged.
        """
        if not RunFolder(Path(path)).config.is_file():
            raise ConfigError(f"run {path}: not a run folder, config.yaml is missing")
        run, config = RunFolder.open(path)
        last = latest_checkpoint(run.checkpoints)
        if last is None:
            raise ConfigError(f"run {path}: the run has no checkpoint yet")
        try:
            best = run.checkpoints / checkpoint_name(read_progress(last)["best_epoch"], 0)
        except (OSError, KeyError, ValueError):
            raise ConfigError(f"run {path}: {last / 'progress.json'} is missing or damaged") from None
        if not best.is_dir():
            raise ConfigError(f"run {path}: the run has not finished an epoch yet")
        module, prefix = ("model", "") if config.optimizer.average is None else ("average", "module.")
        schema = load_schema(run)
        try:
            check_fits(schema, column_settings(config.data))
        except DataError as fault:
            raise ConfigError(f"run {path}: {run.config.name}: {fault}") from fault
        return cls(best, module, prefix, config, schema)

    def read(self, parameters: dict[str, torch.Tensor]) -> None:
        """Fills tensors with the parameters of their names, in place.

        Raises:
            ConfigError: the checkpoint is damaged.
        """
        try:
            load_checkpoint(self.path, {self.module: {self.prefix + name: p for name, p in parameters.items()}})
        except DamagedCheckpointError as fault:
            raise ConfigError(f"run {self.path.parents[1]}: {fault}") from fault


@dataclass(frozen=True)
class SavedRun:
    """A trained run, loaded by `load_run`.

    Args:
        path: the run folder.
        config: the whole config, with absolute paths.
        schema: the keys of the model's batches and the encodings of their values.
        model: with the parameters of the best epoch, those that the run's test metrics are of; in evaluation mode.
    """

    path: Path
    config: Config
    schema: DataSchema
    model: SequenceDLRM


def load_run(path: str | Path, device: str | torch.device = "cpu") -> SavedRun:
    """The model of the best epoch of a run, and what the run has learnt from its data.

    It reads the run folder alone. The run's tables may have grown, moved or vanished.

    Args:
        path: the folder of a run.
        device: of the model.

    Raises:
        ConfigError, DataError: not a run folder, no epoch is finished, or a file is damaged.

    Example::

        run = jfi.load_run("runs/20250101-120000")
        scores = run.predict("new.parquet")
    """
    best = BestEpoch.of(path)
    model = build_model(best.config.model, best.config.encoder, best.schema)
    best.read(model.state_dict())
    return SavedRun(Path(path), best.config, best.schema, model.to(device).eval())
