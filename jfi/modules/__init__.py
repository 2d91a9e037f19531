"""Layers over TorchRec's jagged tensors."""

from jfi.modules.jagged_feature_interaction import JaggedFeatureInteraction
from jfi.modules.jagged_mean_pooling import JaggedMeanPooling
from jfi.modules.sequence_configs import SequenceFeatureConfig

__all__ = ["JaggedFeatureInteraction", "JaggedMeanPooling", "SequenceFeatureConfig"]
