"""Tables sharded over ranks, to which attention goes."""

from jfi.distributed.captured_step import CapturedShardedStep, average_gradients
from jfi.distributed.sharded_tables import (
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
