"""Interaction tables -> samples with histories -> batches of KeyedJaggedTensors."""

import jfi.utils.lockstep  # noqa: F401  # before TorchRec: a wrong pair of torch and fbgemm is said in one line
from jfi.data.batches.batch import Batch
from jfi.data.batches.dataset import InteractionDataset
from jfi.data.config import DataConfig, FeatureConfig, LabelConfig, SyntheticConfig
from jfi.data.errors import DataError
from jfi.data.prepared.load import load_dataset
from jfi.data.schema.schema import DataSchema, FeatureSpec

__all__ = [
    "Batch",
    "DataConfig",
    "DataError",
    "DataSchema",
    "FeatureConfig",
    "FeatureSpec",
    "InteractionDataset",
    "LabelConfig",
    "SyntheticConfig",
    "load_dataset",
]
