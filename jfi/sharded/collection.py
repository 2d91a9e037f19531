"""A sharded EmbeddingCollection to whose rows attention goes, and its sharder."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection

from jfi.modules import SequenceFeatureConfig
from jfi.sharded.planning import make_routes
from jfi.sharded.routed import RoutedCollection, by_rows, group_of


class ShardedAttentionCollection(RoutedCollection, ShardedEmbeddingCollection):
    """A ShardedEmbeddingCollection whose histories are read where their rows lie.

    The tables, their names in state_dict() and their optimizer are TorchRec's: a checkpoint of one collection loads in
    the other. What differs is the way of a batch. Ids travel to the owners of their rows, each event with what the
    attention reads beside its row, while the batch before it computes. A history comes out as `SpreadRows`: the layer
    sends its queries to the owners, and no row of a history travels, nor a gradient of one. Rows of other keys are
    fetched. Tables of at most `replicate_below` rows are summed up on every rank in each step, and their gradients
    likewise, so that their rows are read where they are needed.

    Created by `AttentionCollectionSharder`, whose arguments are described there.
    """

    def __init__(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None,
        device: torch.device | None,
        module_fqn: str | None,
        features: list[SequenceFeatureConfig],
        replicate_below: int,
        dtype: torch.dtype | None,
        dedup: bool,
    ) -> None:
        plan, group = by_rows(params, env), group_of(env)
        super().__init__(module, plan, env, fused_params, device, module_fqn=module_fqn)
        first = torch.distributed.get_global_rank(group, 0)
        routes = make_routes(module.embedding_configs(), plan, features, replicate_below, first, dedup)
        self._begin(routes, group, dtype)


class AttentionCollectionSharder(EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection so that attention goes to its rows.

    DistributedModelParallel takes it in the place of TorchRec's EmbeddingCollectionSharder, and so do planners and
    train pipelines. It shards the collection and not the layer, since a target shares its history's table, and since
    TorchRec's pipelines send what they find in a batch, the ids, but not what a model computes, the targets.

    Args:
        features: the sequence features whose histories the collection looks up.
        fused_params: as of TorchRec's sharder.
        replicate_below: tables of at most so many rows are summed up on every rank in each step.
        dedup: whether a row that is fetched for several events of a rank travels to it once, and its gradient is summed
            before it is sent back; a key comes out as `TableRows` then. Steps are not captured.
        dtype: of queries, partial outputs and fetched rows, and of the rows as attention reads them; None for that of
            the tables.

    Raises:
        ValueError: in `shard`: a plan that divides columns; a feature whose histories lie in two tables that are not
            replicated, or whose fields are concatenated. At the first batch: tables of several data types or
            optimizers, or of one that `jfi.ops.step_rows` has not.

    Example:
        >>> from jfi import SequenceFeatureConfig
        >>> taste = SequenceFeatureConfig("taste", ["history_item"], ["item"])
        >>> AttentionCollectionSharder([taste]).sharding_types("cuda")
        ['table_wise', 'row_wise']
    """

    def __init__(
        self,
        features: list[SequenceFeatureConfig],
        fused_params: dict[str, Any] | None = None,
        *,
        replicate_below: int = 100_000,
        dtype: torch.dtype | None = None,
        dedup: bool = False,
    ) -> None:
        super().__init__(fused_params)
        self._features, self._options = features, (replicate_below, dtype, dedup)

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedAttentionCollection:
        own = (self._features, *self._options)
        return ShardedAttentionCollection(module, params, env, self.fused_params, device, module_fqn, *own)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        return ShardedAttentionCollection
