"""Tables sharded over ranks, to which attention goes."""

from jfi.distributed.averages import average_gradients
from jfi.distributed.captured_step import CapturedShardedStep
from jfi.distributed.sharders import (
    AttentionCollectionSharder,
    FetchedBagsSharder,
    ShardedAttentionCollection,
    ShardedFetchedBags,
)

__all__ = [
    "AttentionCollectionSharder",
    "CapturedShardedStep",
    "FetchedBagsSharder",
    "ShardedAttentionCollection",
    "ShardedFetchedBags",
    "average_gradients",
]
