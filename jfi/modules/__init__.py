"""Layers over TorchRec's jagged tensors."""

import jfi.utils.lockstep  # noqa: F401  # before TorchRec: a wrong pair of torch and fbgemm is said in one line
from jfi.modules.jagged_encoder import JaggedEncoder
from jfi.modules.jagged_feature_interaction import JaggedFeatureInteraction
from jfi.modules.jagged_pooling import JaggedPooling
from jfi.modules.semantic_id_embedding import SemanticIDEmbedding
from jfi.modules.sequence_configs import (
    KeyBias,
    PositionBias,
    SequenceFeatureConfig,
    TimeBias,
    WeightBias,
)
from jfi.tables.fused_embedding_collections import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    defer_steps,
)
from jfi.tables.growing_ids import GrowingIds, GrowingTable
from jfi.tables.id_counts import outside_ids
from jfi.tables.table_rows import TableRows

__all__ = [
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingCollection",
    "GrowingIds",
    "GrowingTable",
    "JaggedEncoder",
    "JaggedFeatureInteraction",
    "JaggedPooling",
    "KeyBias",
    "PositionBias",
    "SemanticIDEmbedding",
    "SequenceFeatureConfig",
    "TableRows",
    "TimeBias",
    "WeightBias",
    "defer_steps",
    "outside_ids",
]
