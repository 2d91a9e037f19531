"""The progress of a run, which a checkpoint stores beside the tensors."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jfi.data.config import FILES
from jfi.training.checkpoints.checkpoint import (
    PROGRESS,
    DamagedCheckpointError,
    checkpoint_name,
    latest_checkpoint,
    read_progress,
)
from jfi.training.config import Config, ConfigError, TrainingConfig
from jfi.training.metrics.label_metrics import LESS_IS_BETTER
from jfi.training.run.recorder import parse_metrics
from jfi.training.run.run_folder import RunFolder


@dataclass
class Progress:
    """The position of a run.

    Args:
        epoch: finished epochs.
        batch: finished batches of the next epoch, those before it was started anew included.
        first_batch: of these, the ones before it was started anew.
        step: finished steps.
        best_epoch: the epoch with the best validation metric, counted from 1; 0 before the first.
        best: its metric, with the sign that makes a larger value better.
        log_length: bytes of metrics.jsonl.
        log_sha256: SHA-256 of these bytes.
        train_seconds: time spent in training steps.
        world_size: number of processes; 0 for a run without torchrun.
        config: all fields of the config.
        calibration: of the best epoch, see `jfi.training.metrics.calibration`.
        batches: what the batches of an epoch follow from, see `run_data.describe_batches`.
        files: see `run_data.learnt_files`.
        unknown: by column the share of the test split without a known value, see `jfi.training.metrics.unknown_values`.
    """

    epoch: int = 0
    batch: int = 0
    first_batch: int = 0
    step: int = 0
    best_epoch: int = 0
    best: float = -math.inf
    log_length: int = 0
    log_sha256: str = hashlib.sha256().hexdigest()
    train_seconds: float = 0.0
    world_size: int = 0
    config: dict = field(default_factory=dict)
    calibration: dict = field(default_factory=dict)
    batches: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    unknown: dict = field(default_factory=dict)

    @property
    def position(self) -> int:
        """The number of the next batch of the epoch."""
        return self.batch - self.first_batch

    def finished(self, training: TrainingConfig) -> str | None:
        """Returns why there is nothing to train, and which field to change; None if there is."""
        if self.epoch >= training.epochs:
            return f"epoch {self.epoch} was the last one; for more, raise training.epochs"
        if training.patience is not None and self.epoch - self.best_epoch >= training.patience:
            return f"training.patience has ended the run after epoch {self.epoch}; for more, raise it"
        return None

    def warn_of_best_epoch(self, metrics: dict[str, float], monitor: str) -> list[str]:
        """Warns of a best epoch that is the first of several, or whose NE of a single binary label is above 1.

        Args:
            metrics: those of the best epoch on the validation split.
            monitor: the metric that selected it.

        Example:
            >>> for line in Progress(epoch=3, best_epoch=1).warn_of_best_epoch({"auc": 0.7, "ne": 1.2}, "auc"):
            ...     print(line)
            warning: the validation NE of epoch 1, the best by auc, is 1.2000: above 1 the probabilities are worse \
than a constant; try lower learning rates or training.monitor: ne
            warning: the best of 3 epochs is the first: try lower learning rates, a larger model.dropout or min_count
        """
        lines, other = [], "" if monitor == "ne" else " or training.monitor: ne"
        # Of several labels "ne" is a mean, beside "ne_<label>" of each one.
        if metrics.get("ne", 0) > 1 and not any(name.startswith("ne_") for name in metrics):
            lines.append(
                f"warning: the validation NE of epoch {self.best_epoch}, the best by {monitor}, is {metrics['ne']:.4f}:"
                f" above 1 the probabilities are worse than a constant; try lower learning rates{other}"
            )
        if self.best_epoch == 1 < self.epoch:
            lines.append(
                f"warning: the best of {self.epoch} epochs is the first: try lower learning rates, a larger "
                "model.dropout or min_count"
            )
        return lines

    def end_epoch(self, metrics: dict[str, float], monitor: str, calibration: dict) -> None:
        """Goes on to the next epoch, and remembers the one that ends if it is the best so far."""
        self.epoch, self.batch, self.first_batch = self.epoch + 1, 0, 0
        score = -metrics[monitor] if monitor.split("_")[0] in LESS_IS_BETTER else metrics[monitor]
        if self.epoch == 1 or score > self.best:
            self.best, self.best_epoch, self.calibration = score, self.epoch, calibration

    def use_batches(self, batches: dict) -> str | None:
        """Sets `batches`; an epoch that has begun with other ones starts anew, and the result is a line that says so.

        `batch` goes on, so that a later checkpoint never has the name of an earlier one.
        """
        old, self.batches = self.batches, batches
        if not self.position or old == batches:
            return None
        what = ", ".join(
            f"{name} was {old.get(name)} and is {now}" for name, now in batches.items() if now != old.get(name)
        )
        line = f"epoch {self.epoch + 1} starts anew after {self.position} batches, with the weights so far: {what}"
        self.first_batch = self.batch
        return line


def last_progress(run: RunFolder) -> tuple[Path | None, Progress]:
    """The last complete checkpoint of `run`, or None, and its progress.

    Raises:
        ConfigError: its progress.json is missing or damaged, or metrics.jsonl is not what it was at the checkpoint.
    """
    path = latest_checkpoint(run.checkpoints)
    if path is None:
        return None, Progress()
    try:
        progress = load_progress(path)
    except DamagedCheckpointError as fault:
        raise ConfigError(f"--resume {run.path}: {fault}; remove that checkpoint to continue without it") from None
    _check_metrics(run, progress)
    return path, progress


#: Where the run and its data are.
_PLACES = {"training.run_dir", "data.prepared", *(f"data.{name}" for name in FILES)}


def check_config(run: RunFolder, config: Config) -> None:
    """Raises ConfigError if the config of the run's config.yaml has changed since the last checkpoint.

    The run folder and the data may have moved; whether the data itself has changed is checked by its fingerprint.
    """
    _, progress = last_progress(run)
    if changed := describe_changes(config, progress):
        raise ConfigError(f"--resume {run.path}: {changed}, or continue with the new values: --config-changed accept")


def describe_changes(config: Config, progress: Progress, matters: Callable[[str], bool] = bool) -> str | None:
    """Returns a line about the fields of config.yaml that were changed since a checkpoint, or None if none was.

    Args:
        config: that config.yaml has now.
        progress: of the checkpoint.
        matters: whether a field of this name matters; by default all do.
    """
    changes = [text for name, text in config_changes(progress.config, config) if matters(name)]
    return f"config.yaml has changed since the checkpoint: {', '.join(changes)}; restore it" if changes else None


def config_changes(old: dict, section: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The fields of the dataclass `section` that differ from `old`, each with both values; but for paths of tables.

    `old` may be of another version of jfi.
    """
    for name in [item.name for item in dataclasses.fields(section) if item.name in old]:
        value, key = getattr(section, name), f"{prefix}{name}"
        if dataclasses.is_dataclass(value):
            yield from config_changes(old[name], value, f"{key}.")
        elif key not in _PLACES:
            was, now = json.dumps(old[name]), json.dumps(dataclasses.asdict(section)[name])
            if was != now:
                yield key, f"{key} was {was} and is {now}"


def load_progress(checkpoint: Path) -> Progress:
    """The progress in a checkpoint.

    Raises:
        DamagedCheckpointError: progress.json is missing or damaged, or the folder has the name of another checkpoint.
    """
    path, values = checkpoint / PROGRESS, read_progress(checkpoint)
    kinds = {item.name: item.type for item in dataclasses.fields(Progress)}
    for name, value in values.items():
        kind = kinds.get(name)
        if kind is None:
            raise DamagedCheckpointError(f"{path} is damaged: {name} is not known")
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits or (kind is int and value < 0):
            raise DamagedCheckpointError(f"{path} is damaged: {name} is {value!r}, must be of type {kind.__name__}")
    progress = Progress(**values)
    if checkpoint_name(progress.epoch, progress.batch) != path.parent.name or progress.best_epoch > progress.epoch:
        raise DamagedCheckpointError(f"{path} is damaged: it is not of a checkpoint of this name")
    return progress


def _check_metrics(run: RunFolder, progress: Progress) -> None:
    length = progress.log_length
    content = b""
    if run.metrics.is_file():
        with run.metrics.open("rb") as file:
            content = file.read(length)
    if len(content) < length:
        raise ConfigError(
            f"--resume {run.path}: {run.metrics} is missing or shorter than the {length} bytes in the checkpoint"
        )
    if hashlib.sha256(content).hexdigest() != progress.log_sha256:
        parse_metrics(run.metrics, content)  # names the line if it is no JSON
        raise ConfigError(
            f"--resume {run.path}: the first {length} bytes of {run.metrics} are not those at the checkpoint"
        )
