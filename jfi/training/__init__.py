"""Training of a SequenceDLRM on an InteractionDataset: typed config, loop, metrics, checkpoints, plots."""

import importlib
from typing import TYPE_CHECKING

from jfi.training.config import Config, TrainingConfig
from jfi.training.model_config import (
    ConfigError,
    EncoderConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerGroup,
    ShardingConfig,
)

if TYPE_CHECKING:
    from jfi.training.distributed.processes import Interrupted
    from jfi.training.metrics.label_metrics import Result
    from jfi.training.start import resume, train

__all__ = [
    "Config",
    "ConfigError",
    "EncoderConfig",
    "Interrupted",
    "ModelConfig",
    "OptimizerConfig",
    "OptimizerGroup",
    "Result",
    "ShardingConfig",
    "TrainingConfig",
    "resume",
    "train",
]

#: Imported on first use, since they need torch: a command refuses wrong settings without it.
_LAZY = {
    "Interrupted": "jfi.training.distributed.processes",
    "Result": "jfi.training.metrics.label_metrics",
    "resume": "jfi.training.start",
    "train": "jfi.training.start",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
