"""Training of a SequenceDLRM on an InteractionDataset: typed config, loop, metrics, checkpoints, plots."""

from jfi.training.config import (
    Config,
    ConfigError,
    EncoderConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerGroup,
    ShardingConfig,
    TrainingConfig,
)
from jfi.training.metrics.label_metrics import Result
from jfi.training.run.interrupt import Interrupted
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
