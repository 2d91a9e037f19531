"""Tables sharded over ranks, to which attention goes."""

from jfi.sharded.collection import AttentionCollectionSharder, ShardedAttentionCollection

__all__ = ["AttentionCollectionSharder", "ShardedAttentionCollection"]
