"""A sharded EmbeddingCollection to whose rows attention goes, and its sharder."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    LazyNoWait,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.modules import SequenceFeatureConfig
from jfi.modules.spread_rows import SpreadRows
from jfi.modules.table_rows import TableRows
from jfi.ops.rows_by_id import RowsById, rows_by_id, sum_rows
from jfi.sharded.attention import EventsAtOwners
from jfi.sharded.ownership import row_wise_shards
from jfi.sharded.planning import make_routes
from jfi.sharded.routes import Arrived, ArrivedIds, IdsRequest, Route
from jfi.sharded.rows import Replicate, Scaled, fetch_rows
from jfi.sharded.shards import RankRows, rank_rows


class ShardedAttentionCollection(ShardedEmbeddingCollection):
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
    ) -> None:
        group = getattr(env, "sharding_pg", env.process_group)  # of ShardingEnv2D, which has several of them
        where = group.size(), dist.get_global_rank(group, 0), get_local_size(env.world_size)
        plan = {table: row_wise_shards(table, sharding, *where) for table, sharding in params.items()}
        super().__init__(module, plan, env, fused_params, device, module_fqn=module_fqn)
        self._group, self._dtype = group, dtype
        self._plan = make_routes(module, plan, features, replicate_below, where[1])
        self._own: RankRows | None = None
        self._given: ArrivedIds | None = None
        self._places: Tensor | None = None
        self._has_uninitialized_input_dist = False  # it has none of TorchRec's, which its pipelines look at

    @property
    def routes(self) -> list[Route]:
        """The sequences of ids that travel together."""
        return self._plan.routes

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The processes that share the rows."""
        return self._group

    def follow_rate(self) -> None:
        """Takes the learning rate that the tables' optimizer has set, as each look-up does that is not replayed."""
        if self._own is not None:
            self._own.follow_rate()

    @contextmanager
    def given(self, arrived: ArrivedIds) -> Iterator[None]:
        """Within the block a call takes these ids, which are at their owners, in the place of a batch's."""
        self._given = arrived
        try:
            yield
        finally:
            self._given = None

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[dict[str, JaggedTensor]]:
        if self._given is None:
            return super().forward(features)
        return LazyNoWait(self._embeddings(self._given))

    def input_dist(self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        return KJTListSplitsAwaitable([IdsRequest(self._plan.routes, features, self._group)], ctx)

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return LazyNoWait(self._embeddings(input[0]))

    def deferring(self) -> AbstractContextManager[None]:
        """Backward passes within make one step of the tables together, at the end of the block."""
        return self._own_rows().deferring()

    def _own_rows(self) -> RankRows:
        if self._own is None:  # not at construction: TorchRec may move a module to another device after it
            self._own = rank_rows(self._lookups, list(self._plan.owners))
        return self._own

    def _embeddings(self, arrived: ArrivedIds) -> dict[str, JaggedTensor]:
        """By embedding what the collection looks up for this rank's samples."""
        own = self._own_rows()
        plan, memory, by_key = self._plan, own.memory, arrived.by_key
        handles = own.look_up([one.rows for one in arrived.routes], self._dtype)
        whole: dict[str, Tensor] = {}
        if plan.replicated:
            # Their gradients are sums of all ranks', and are not rounded.
            (handle,) = own.look_up([self._own_places(memory.device)], None)
            tables = Replicate.apply(handle, memory, self._group, [plan.owners[table] for table in plan.replicated])
            whole = dict(zip(plan.replicated, tables, strict=True))
        found: dict[str, JaggedTensor] = {}
        for one, handle in zip(arrived.routes, handles, strict=True):
            if one.route.features:
                self._spread(found, one, handle, whole, by_key)
                continue
            rows_by_key = zip(plan.embeddings[one.route], one.route.keys, fetch_rows(handle, memory, one), strict=True)
            for embedding, key, rows in rows_by_key:
                parts = {"lengths": by_key[key].lengths_or_none(), "offsets": by_key[key].offsets_or_none()}
                found[embedding] = JaggedTensor(rows, **parts)
        scaled = {table: Scaled.apply(one, self._group) for table, one in whole.items()}
        for embedding, key, table in plan.local:
            ids = by_key[key]
            by_id = rows_by_id(scaled[table], ids.values(), self._dtype or memory.dtype, f"table '{table}'")
            parts = ids.lengths_or_none(), ids.offsets_or_none()
            found[embedding] = TableRows(by_id.tables[0], by_id.indices[0], by_id.rows, *parts)
        return found

    def _own_places(self, device: torch.device) -> Tensor:
        """[r] int32: where this rank's rows of the replicated tables lie in its memory, table by table."""
        if self._places is None:
            owners = [self._plan.owners[table] for table in self._plan.replicated]
            places = [place for one in owners for place in one.memory_of(self._group.rank())]
            self._places = torch.tensor(places, dtype=torch.int32, device=device)
        return self._places

    def _spread(
        self,
        found: dict[str, JaggedTensor],
        arrived: Arrived,
        handle: Tensor,
        whole: dict[str, Tensor],
        by_key: dict[str, JaggedTensor],
    ) -> None:
        """Adds the histories of a route's features to what was found."""
        route, memory = arrived.route, self._own.memory
        fields = [RowsById(handle, (memory,), (arrived.rows,))]
        for place, table in enumerate(route.field_tables):
            fields.append(rows_by_id(whole[table], arrived.field_ids(place), handle.dtype, f"table '{table}'"))
        events = EventsAtOwners(arrived, sum_rows(fields), lambda: fetch_rows(handle, memory, arrived))
        for feature, embedding, key in zip(route.features, self._plan.embeddings[route], route.keys, strict=True):
            ids, known = by_key[key], found.get(embedding)
            by_feature = {feature.name: events} if known is None else known.events | {feature.name: events}
            rows = handle.new_zeros(()).expand(ids.values().size(0), memory.size(1))
            found[embedding] = SpreadRows(by_feature, rows, ids.lengths_or_none(), ids.offsets_or_none())


class AttentionCollectionSharder(EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection so that attention goes to its rows.

    DistributedModelParallel takes it in the place of TorchRec's EmbeddingCollectionSharder, and so do planners and
    train pipelines. It shards the collection and not the layer, since a target shares its history's table, and since
    TorchRec's pipelines send what they find in a batch, the ids, but not what a model computes, the targets.

    Args:
        features: the sequence features whose histories the collection looks up.
        fused_params: as of TorchRec's sharder.
        replicate_below: tables of at most so many rows are summed up on every rank in each step.
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
    ) -> None:
        super().__init__(fused_params)
        self._features, self._replicate_below, self._dtype = features, replicate_below, dtype

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedAttentionCollection:
        own = (self._features, self._replicate_below, self._dtype)
        return ShardedAttentionCollection(module, params, env, self.fused_params, device, module_fqn, *own)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        return ShardedAttentionCollection
