"""A sharded EmbeddingBagCollection whose rows are fetched from their owners, and its sharder."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from jfi.modules.fused_embedding_collections import pool
from jfi.sharded.planning import make_routes
from jfi.sharded.routed import RoutedCollection, by_rows, group_of


class ShardedFetchedBags(RoutedCollection, ShardedEmbeddingBagCollection):
    """A ShardedEmbeddingBagCollection that fetches the rows of its samples' ids and pools them itself.

    Where `ShardedAttentionCollection` has the histories it has the rest: the same routes, optimizer steps and captured
    steps. Of a key with one id a sample it sends what TorchRec's collection sends or less; of one with several ids a
    row for each of them. Tables, names in state_dict() and optimizer are TorchRec's.

    Created by `FetchedBagsSharder`, whose arguments are described there.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None,
        device: torch.device | None,
        module_fqn: str | None,
        replicate_below: int,
        dtype: torch.dtype | None,
    ) -> None:
        tables = module.embedding_bag_configs()
        if module.is_weighted():
            raise ValueError("bags whose rows are fetched must have no weights by id; use TorchRec's sharder")
        if len({table.embedding_dim for table in tables}) > 1:
            widths = {table.name: table.embedding_dim for table in tables}
            raise ValueError(f"bags whose rows are fetched must have tables of one width, got {widths}")
        if len({table.pooling for table in tables}) > 1:
            poolings = {table.name: table.pooling.value for table in tables}
            raise ValueError(f"bags whose rows are fetched must all be summed or all averaged, got {poolings}")
        plan, group = by_rows(params, env), group_of(env)
        super().__init__(module, plan, env, fused_params, device, module_fqn=module_fqn)
        first = torch.distributed.get_global_rank(group, 0)
        self._begin(make_routes(tables, plan, [], replicate_below, first), group, dtype)
        #: Name, key, and whether the mean is taken, of each embedding.
        self._bags = [
            (name, key, table.pooling == PoolingType.MEAN)
            for table, names in zip(tables, get_embedding_names_by_table(tables), strict=True)
            for name, key in zip(names, table.feature_names, strict=True)
        ]

    def _output(self, found: dict[str, JaggedTensor]) -> KeyedTensor:
        dtype = self._own_rows().memory.dtype
        pooled = [pool(key, found[name], None, mean).to(dtype) for name, key, mean in self._bags]
        names = [name for name, *_ in self._bags]
        return KeyedTensor(names, [one.size(1) for one in pooled], torch.cat(pooled, 1))


class FetchedBagsSharder(EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection so that the rows of a sample's ids are fetched from their owners.

    DistributedModelParallel takes it in the place of TorchRec's EmbeddingBagCollectionSharder, beside an
    `AttentionCollectionSharder`.

    Args:
        fused_params: as of TorchRec's sharder.
        replicate_below: tables of at most so many rows are summed up on every rank in each step.
        dtype: of rows that are sent; None for that of the tables, which is that of the output.

    Raises:
        ValueError: in `shard`: a plan that divides columns, bags with weights, tables of several widths or poolings. At
            the first batch: tables of several data types or optimizers, or of one that `jfi.ops.step_rows` has not.

    Example:
        >>> FetchedBagsSharder().sharding_types("cuda")
        ['table_wise', 'row_wise']
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        *,
        replicate_below: int = 100_000,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(fused_params)
        self._replicate_below, self._dtype = replicate_below, dtype

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFetchedBags:
        own = self._replicate_below, self._dtype
        return ShardedFetchedBags(module, params, env, self.fused_params, device, module_fqn, *own)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        return ShardedFetchedBags
