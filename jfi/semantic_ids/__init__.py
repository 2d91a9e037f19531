"""Content of items -> semantic IDs (SIDs), one int64 an item, and back. The codecs need PyTorch alone."""

from jfi.semantic_ids.codec import Codec
from jfi.semantic_ids.discrete_pca import DiscretePCA
from jfi.semantic_ids.packing import UNKNOWN_SID, Layout, pack_words
from jfi.semantic_ids.quality import LabelAccuracy, SIDQuality, sid_quality
from jfi.semantic_ids.residual_kmeans import ResidualKMeans
from jfi.semantic_ids.vq_fusion import VQFusion

__all__ = [
    "UNKNOWN_SID",
    "Codec",
    "DiscretePCA",
    "LabelAccuracy",
    "Layout",
    "ResidualKMeans",
    "SIDQuality",
    "VQFusion",
    "pack_words",
    "sid_quality",
]
