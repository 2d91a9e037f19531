"""Content of items -> semantic IDs (SIDs), one int64 an item, and back. The codecs need PyTorch alone."""

from jfi.sid.codec import Codec
from jfi.sid.discrete_pca import DiscretePCA
from jfi.sid.finite_scalar import FiniteScalar
from jfi.sid.packing import UNKNOWN_SID, pack_codes, pack_trits, pack_words, sid_words, unpack_codes, unpack_trits
from jfi.sid.quality import LabelAccuracy, SIDQuality, sid_quality
from jfi.sid.raw_embeddings import RawEmbeddings
from jfi.sid.residual_kmeans import ResidualKMeans
from jfi.sid.vq_fusion import VQFusion

__all__ = [
    "UNKNOWN_SID",
    "Codec",
    "DiscretePCA",
    "FiniteScalar",
    "LabelAccuracy",
    "RawEmbeddings",
    "ResidualKMeans",
    "SIDQuality",
    "VQFusion",
    "pack_codes",
    "pack_trits",
    "pack_words",
    "sid_quality",
    "sid_words",
    "unpack_codes",
    "unpack_trits",
]
