"""The progress of a run, which a checkpoint stores beside the tensors."""

import math
from dataclasses import dataclass
from pathlib import Path

from jfi.training.checkpoint import latest_checkpoint, read_progress
from jfi.training.config import ConfigError
from jfi.training.run_folder import RunFolder


@dataclass
class Progress:
    """The position of a run.

    Args:
        epoch: finished epochs.
        batch: finished batches of the next epoch.
        step: finished steps.
        best_epoch: the epoch with the best validation metric, counted from 1; 0 before the first.
        best: its metric, with the sign that makes a larger value better.
        log_length: bytes of metrics.jsonl.
        train_seconds: time spent in training steps.
        world_size: number of processes; 0 for a run without torchrun.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    best_epoch: int = 0
    best: float = -math.inf
    log_length: int = 0
    train_seconds: float = 0.0
    world_size: int = 0


def last_progress(run: RunFolder) -> tuple[Path | None, Progress]:
    """The last complete checkpoint of `run`, or None, and its progress.

    Raises:
        ConfigError: its progress.json is missing or damaged, or metrics.jsonl is shorter than at the checkpoint.
    """
    path = latest_checkpoint(run.checkpoints)
    if path is None:
        return None, Progress()
    try:
        progress = Progress(**read_progress(path))
    except (OSError, TypeError, ValueError):
        fault = f"{path / 'progress.json'} is missing or damaged; remove that checkpoint to continue without it"
        raise ConfigError(f"--resume {run.path}: {fault}") from None
    run.check_metrics(progress.log_length)
    return path, progress
