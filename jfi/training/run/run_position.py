"""The progress of a run, which a checkpoint stores with the tensors."""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from jfi.data.config import FILES
from jfi.training.checkpoints.checkpoint import (
    PROGRESS,
    DamagedCheckpointError,
    checkpoint_name,
    latest_checkpoint,
    read_progress,
)
from jfi.training.config import Config, ConfigError, TrainingConfig
from jfi.training.metrics.calibration import Calibration
from jfi.training.metrics.label_metrics import LESS_IS_BETTER
from jfi.training.run.recorder import DATA, read_metrics
from jfi.training.run.run_folder import RunFolder

#: Above this AUC of explicit labels an input usually reveals the label.
_LARGEST_AUC = 0.98
#: A smaller change of AUC, or of AUC per user, over several evaluations is noise.
_LEAST_MOVE = 0.002

Count = Annotated[int, msgspec.Meta(ge=0)]


class RunPosition(msgspec.Struct, forbid_unknown_fields=True):
    """The position of a run.

    Args:
        epoch: finished epochs.
        batch: finished batches of the next epoch, those before it was started anew and evaluations within it included.
        first_batch: of these, evaluations and the batches before the epoch was started anew.
        step: finished steps.
        evaluated_epoch: number of epochs trained at the last evaluation on the validation split, such as 1.25.
        evaluated_step: finished steps then.
        best_epoch, best_batch, best_step: epochs, `batch` and `step` at the evaluation with the best metric; 0 before
            the first one.
        since_best: evaluations since then.
        best: the best metric, with the sign that makes a larger value better.
        log_length: bytes of metrics.jsonl.
        log_sha256: SHA-256 of these bytes.
        train_seconds: time spent in training steps.
        world_size: number of processes; 0 for a run without torchrun.
        config: all fields of the config.
        calibration: of the best evaluation, see `jfi.training.metrics.calibration`.
        batches: what the batches of an epoch follow from, see `run_data.describe_batches`.
        files: see `run_data.learnt_files`.
        unknown: by column the share of the test split without a known value, see `jfi.training.metrics.unknown_values`.
        start: by split the metrics of a warm start before its first step.
        newest: time of the newest training sample.
        follow: the position in the log that the run follows, see `jfi.follow.loop`; empty for a run that follows none.
    """

    epoch: Count = 0
    batch: Count = 0
    first_batch: Count = 0
    step: Count = 0
    evaluated_epoch: int | float = 0
    evaluated_step: Count = 0
    best_epoch: int | float = 0
    best_batch: Count = 0
    best_step: Count = 0
    since_best: Count = 0
    best: float = -math.inf
    log_length: Count = 0
    log_sha256: str = hashlib.sha256().hexdigest()
    train_seconds: float = 0.0
    world_size: Count = 0
    config: dict = {}
    calibration: Calibration = {}
    batches: dict = {}
    files: dict[str, str] = {}
    unknown: dict[str, float] = {}
    start: dict[str, dict] = {}
    newest: float = -math.inf
    follow: dict = {}

    @property
    def position(self) -> int:
        """The number of the next batch of the epoch."""
        return self.batch - self.first_batch

    @property
    def best_checkpoint(self) -> str:
        """The name of the checkpoint with the best parameters; there is none if `best_step` is 0."""
        return checkpoint_name(int(self.best_epoch), self.best_batch)

    def next_evaluation(self, every: int, num_batches: int) -> int:
        """Returns the position in an epoch of this number of batches where the next evaluation is due.

        Args:
            every: steps between evaluations within an epoch, or 0 for none.
            num_batches: of the epoch.

        Example:
            >>> position = RunPosition(batch=3, step=103)
            >>> position.next_evaluation(50, 60), position.next_evaluation(0, 60)
            (50, 60)
        """
        if not every or self.position == num_batches:
            return num_batches
        ahead = -self.step % every
        if not ahead and self.evaluated_step == self.step:  # else a signal came before the evaluation
            ahead = every
        return min(num_batches, self.position + ahead)

    def epochs_at(self, position: int, num_batches: int) -> float:
        """Returns how many epochs are trained at a position in the next one: an int at its end.

        Example:
            >>> RunPosition(epoch=2).epochs_at(3, 4), RunPosition(epoch=2).epochs_at(4, 4)
            (2.75, 3)
        """
        return self.epoch + (1 if position == num_batches else math.floor(1e6 * position / num_batches) / 1e6)

    def finished(self, training: TrainingConfig) -> str | None:
        """Returns why there is nothing to train, and which field to change; None if there is."""
        if self.epoch >= training.epochs:
            return f"epoch {self.epoch} was the last one; for more, raise training.epochs"
        if training.patience is not None and self.since_best >= training.patience:
            return f"training.patience has ended the run after epoch {self.evaluated_epoch:.4g}; for more, raise it"
        return None

    def warn_of_best_epoch(self, metrics: dict[str, float], monitor: str, is_implicit: bool = False) -> list[str]:
        """Warns of a best epoch that is the first of several or has no metric, and of an NE or AUC that is rarely good.

        Args:
            metrics: those of the best epoch on the validation split.
            monitor: the metric that selected it.
            is_implicit: whether negatives are random items, of which an AUC near 1 is no surprise.

        Example:
            >>> progress = RunPosition(evaluated_epoch=3, best_epoch=1)
            >>> for line in progress.warn_of_best_epoch({"auc": 0.7, "ne": 1.2}, "auc"):
            ...     print(line)
            warning: the validation NE of epoch 1, the best by auc, is 1.2000: above 1 the probabilities are worse \
than a constant; try lower learning rates or training.monitor: ne
            warning: the best of 3 epochs is epoch 1: try lower learning rates, a larger model.dropout or min_count
        """
        lines, other, epoch = [], "" if monitor == "ne" else " or training.monitor: ne", f"epoch {self.best_epoch:.4g}"
        # Of several labels "ne" is the mean of "ne_<label>" of each one.
        if metrics.get("ne", 0) > 1 and not any(name.startswith("ne_") for name in metrics):
            lines.append(
                f"warning: the validation NE of {epoch}, the best by {monitor}, is {metrics['ne']:.4f}:"
                f" above 1 the probabilities are worse than a constant; try lower learning rates{other}"
            )
        if math.isnan(metrics.get(monitor, 0)):
            lines.append(
                f"warning: the validation {monitor} is NaN, since all labels, or those of each user, are equal: the "
                "first evaluation counts as the best; set another training.monitor"
            )
        high = [name for name, value in metrics.items() if name.split("_")[0] == "auc" and value > _LARGEST_AUC]
        if high and not is_implicit:
            lines.append(
                f"warning: the validation {high[0]} of {epoch} is {metrics[high[0]]:.4f}: above {_LARGEST_AUC} "
                "an input usually reveals the label, such as a column that is known only afterwards, or the view just "
                "before each purchase where both are rows; jfi evaluate --importance shows which"
            )
        if self.best_epoch <= 1 < self.evaluated_epoch:
            lines.append(
                f"warning: the best of {self.evaluated_epoch:.4g} epochs is {epoch}: try lower "
                "learning rates, a larger model.dropout or min_count"
            )
        before = self.start.get("validation", {}).get(monitor, math.nan)
        if _score({monitor: before}, monitor) >= self.best:
            lines.append(
                f"warning: the validation {monitor} was {before:.4f} at the start, and is {metrics[monitor]:.4f}: "
                "training has not improved on the run of training.warm_start"
            )
        return lines

    def warn_of_opposite_metrics(self, log: list[dict], data: str, monitor: str) -> list[str]:
        """Warns of AUC and AUC per user of validation that moved in opposite directions in two evaluations in a row.

        Args:
            log: the lines of metrics.jsonl.
            data: names the data that the run ended with; metrics of other data are left out.
            monitor: the metric that selected the best epoch.

        Example:
            >>> values = enumerate([(0.7307, 0.6562), (0.7151, 0.6927), (0.683, 0.6961)], 1)
            >>> log = [{"split": "validation", "epoch": n, "auc": a, "user_auc": b} for n, (a, b) in values]
            >>> print(*RunPosition(best_epoch=1).warn_of_opposite_metrics(log, "", "auc"))
            warning: over epochs 1, 2, 3 validation AUC and AUC per user move in opposite directions: AUC 0.7307, \
0.7151, 0.6830, AUC per user 0.6562, 0.6927, 0.6961; the run keeps epoch 1, the best by auc; to rank the items of a \
user, set training.monitor: user_auc
        """
        lines = [line for line in log if line["split"] == "validation" and line.get(DATA, data) == data]
        names = [name for name in (lines[0] if lines else ()) if name.startswith("user_auc")]
        if len(names) > 1:  # the means over several labels may move as no label does
            names.remove("user_auc")
        windows = zip(lines, lines[1:], lines[2:], strict=False)
        for name, some in itertools.product(names, windows):
            of_label = name.removeprefix("user_auc")
            values = np.array([(line.get(f"auc{of_label}"), line.get(name)) for line in some], np.float64)
            moves = np.diff(values, axis=0)  # in each of two evaluations of AUC and AUC per user
            are_steady = (moves.prod(axis=0) > 0) & (np.abs(moves.sum(axis=0)) >= _LEAST_MOVE)
            if are_steady.all() and moves[0].prod() < 0:
                break
        else:
            return []
        epochs = ", ".join(f"{line['epoch']:.4g}" for line in some)
        auc, user_auc = (", ".join(f"{value:.4f}" for value in of) for of in values.T)
        other = f"to rank the items of a user, set training.monitor: {name}"
        if monitor.startswith("user_auc"):
            other = f"to compare samples of different users, set training.monitor: auc{of_label}"
        return [
            f"warning: over epochs {epochs} validation AUC and AUC per user"
            f"{of_label and f' of {of_label[1:]}'} move in opposite directions: "
            f"AUC {auc}, AUC per user {user_auc}; the run keeps epoch {self.best_epoch:.4g}, the best by {monitor}; "
            f"{other}"
        ]

    def forget_best(self, log: list[dict], data: str, config: Config) -> str | None:
        """Forgets the best metric if it is of other data or another monitor; returns a line that says so, or None.

        The best checkpoint, with its calibration, stays until the next evaluation replaces it.

        Args:
            log: the lines of metrics.jsonl.
            data: names the data that the run goes on with.
            config: that it goes on with.
        """
        names = {line["step"]: line.get(DATA, data) for line in log if line["split"] == "validation"}
        if names.get(0, data) != data:
            self.start = {}
        auto = config.with_training(monitor="auto").monitor
        before = self.config.get("training", {}).get("monitor", config.monitor)
        changed = [] if names.get(self.best_step, data) == data else ["the data"]
        changed += [] if config.monitor == (auto if before == "auto" else before) else ["training.monitor"]
        if not self.best_step or not changed:
            return None
        self.best, self.since_best = -math.inf, 0
        taken = "the next evaluation takes its place, and training.patience counts from there"
        return f"{' and '.join(changed)} changed after epoch {self.best_epoch:.4g}, the best so far: {taken}"

    def end_evaluation(self, epoch: float, metrics: dict[str, float], monitor: str, calibration: dict) -> None:
        """Counts an evaluation after so many epochs, as the best if it is; at the end of one, goes on to the next."""
        if epoch > self.epoch and isinstance(epoch, int):
            self.epoch, self.batch, self.first_batch = epoch, 0, 0
        else:  # another checkpoint than one that a signal made before the evaluation
            self.batch, self.first_batch = self.batch + 1, self.first_batch + 1
        self.evaluated_epoch, self.evaluated_step = epoch, self.step
        score = _score(metrics, monitor)
        self.since_best += 1
        if self.best == -math.inf or score > self.best:
            self.best, self.calibration, self.since_best = score, calibration, 0
            self.best_epoch, self.best_batch, self.best_step = epoch, self.batch, self.step

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


def _score(metrics: dict[str, float], monitor: str) -> float:
    """Returns the metric with the sign that makes a larger value better."""
    return -metrics[monitor] if monitor.split("_")[0] in LESS_IS_BETTER else metrics[monitor]


def last_progress(run: RunFolder) -> tuple[Path | None, RunPosition]:
    """The last complete checkpoint of `run`, or None, and its progress.

    Raises:
        ConfigError: its progress.json is missing or damaged, or metrics.jsonl is not what it was at the checkpoint.
    """
    path = latest_checkpoint(run.checkpoints)
    if path is None:
        return None, RunPosition()
    try:
        progress = load_progress(path)
    except DamagedCheckpointError as fault:
        raise ConfigError(f"--resume {run.path}: {fault}; remove that checkpoint to continue without it") from None
    _check_metrics(run, progress)
    return path, progress


#: Where the run and its data are, and when versions are published: what is no matter of the run's state.
_FREE = {f"training.{name}" for name in ("run_dir", "publish_every", "publish_if")}
_FREE |= {"data.prepared", *(f"data.{name}" for name in FILES)}


def check_config(
    run: RunFolder, config: Config, advice: str = ", or continue with the new values: --config-changed accept"
) -> None:
    """Raises ConfigError if the config of the run's config.yaml has changed since the last checkpoint.

    The run folder and the data may have moved; whether the data itself has changed is checked by its fingerprint.
    """
    _, progress = last_progress(run)
    if changed := describe_changes(config, progress):
        raise ConfigError(f"--resume {run.path}: {changed}{advice}")


def describe_changes(config: Config, progress: RunPosition, matters: Callable[[str], bool] = bool) -> str | None:
    """Returns a line about the fields of config.yaml that were changed since a checkpoint, or None if none was.

    Args:
        config: that config.yaml has now.
        progress: of the checkpoint.
        matters: whether a field of this name matters; by default all do.
    """
    changes = [text for name, text in config_changes(progress.config, config) if matters(name)]
    return f"config.yaml has changed since the checkpoint: {', '.join(changes)}; restore it" if changes else None


def config_changes(old: dict, section: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The fields of the dataclass `section` that differ from `old`, each with both values; but for paths of tables."""
    for name in [item.name for item in dataclasses.fields(section) if item.name in old]:
        value, key = getattr(section, name), f"{prefix}{name}"
        if dataclasses.is_dataclass(value):
            yield from config_changes(old[name], value, f"{key}.")
        elif key not in _FREE and (key, old[name]) != ("sharding.exchange", "auto"):  # resolved since
            was, now = json.dumps(old[name]), json.dumps(dataclasses.asdict(section)[name])
            if json.loads(was) != json.loads(now):  # 1 is 1.0: the YAML of a whole number is that of a float
                yield key, f"{key} was {was} and is {now}"


def load_progress(checkpoint: Path) -> RunPosition:
    """The progress in a checkpoint.

    Raises:
        DamagedCheckpointError: progress.json is missing or damaged, or the folder has the name of another checkpoint.
    """
    progress = read_progress(checkpoint, RunPosition)
    is_named = checkpoint_name(progress.epoch, progress.batch) == checkpoint.name
    if not is_named or not 0 <= progress.best_epoch < progress.epoch + 1:
        raise DamagedCheckpointError(f"{checkpoint / PROGRESS} is damaged: it is not of a checkpoint of this name")
    return progress


def _check_metrics(run: RunFolder, progress: RunPosition) -> None:
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
        read_metrics(run.metrics, length)  # names the line if it is no JSON
        raise ConfigError(
            f"--resume {run.path}: the first {length} bytes of {run.metrics} are not those at the checkpoint"
        )
