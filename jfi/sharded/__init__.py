"""Tables sharded over ranks, to which attention goes."""

from jfi.sharded.averages import average_gradients
from jfi.sharded.bags import FetchedBagsSharder, ShardedFetchedBags
from jfi.sharded.captured import CapturedShardedStep
from jfi.sharded.collection import AttentionCollectionSharder, ShardedAttentionCollection

__all__ = [
    "AttentionCollectionSharder",
    "CapturedShardedStep",
    "FetchedBagsSharder",
    "ShardedAttentionCollection",
    "ShardedFetchedBags",
    "average_gradients",
]
