"""Interaction tables -> samples with histories -> batches of KeyedJaggedTensors."""

import importlib
from typing import TYPE_CHECKING

from jfi.data.config import DataConfig, LabelConfig
from jfi.data.errors import DataError
from jfi.data.feature_config import FeatureConfig, HistoryConfig

if TYPE_CHECKING:
    from jfi.data.batches.batch import Batch as Batch
    from jfi.data.batches.dataset import InteractionDataset as InteractionDataset
    from jfi.data.prepared.prepare import load_dataset as load_dataset
    from jfi.data.schema.schema import DataSchema as DataSchema
    from jfi.data.schema.schema import FeatureSpec as FeatureSpec

#: Imported on first use, since they need torch: a command refuses wrong settings without it.
_LAZY = {
    "Batch": "jfi.data.batches.batch",
    "DataSchema": "jfi.data.schema.schema",
    "FeatureSpec": "jfi.data.schema.schema",
    "InteractionDataset": "jfi.data.batches.dataset",
    "load_dataset": "jfi.data.prepared.prepare",
}
__all__ = ["DataConfig", "DataError", "FeatureConfig", "HistoryConfig", "LabelConfig", *_LAZY]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
