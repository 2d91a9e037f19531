"""What sharded collections have in common whose ids take our routes to the owners of their rows."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingModule
from torchrec.distributed.types import Awaitable, LazyAwaitable, LazyNoWait, ParameterSharding, ShardingEnv
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from jfi.modules.id_counts import OutsideIds
from jfi.modules.spread_rows import SpreadRows
from jfi.modules.table_rows import TableRows
from jfi.ops.gather_rows import bound_ids, check_indices
from jfi.ops.rows_by_id import RowsById, bounded_rows_by_id, sum_rows
from jfi.sharded.attention import EventsAtOwners
from jfi.sharded.ownership import row_wise_shards
from jfi.sharded.planning import RoutingPlan
from jfi.sharded.routes import Arrived, ArrivedIds, IdsRequest, Route
from jfi.sharded.rows import Replicate, Scaled, fetch_rows
from jfi.sharded.shards import RankRows, rank_rows
from jfi.utils.padding import padding_state


def group_of(env: ShardingEnv) -> dist.ProcessGroup:
    """The ranks that share tables."""
    return getattr(env, "sharding_pg", env.process_group)  # of ShardingEnv2D, which has several of them


def by_rows(params: dict[str, ParameterSharding], env: ShardingEnv) -> dict[str, ParameterSharding]:
    """A plan whose tables are all sharded by rows, as the routes need it.

    Raises:
        ValueError: the plan divides columns, or keeps rows elsewhere than in device memory.
    """
    group = group_of(env)
    where = group.size(), dist.get_global_rank(group, 0), get_local_size(env.world_size)
    return {table: row_wise_shards(table, sharding, *where) for table, sharding in params.items()}


class RoutedCollection:
    """The first base of a sharded collection of TorchRec's, whose tables, names and optimizers it leaves as they are.

    Ids travel to the owners of their rows. A history comes out as `SpreadRows`, rows of other keys are fetched. Tables
    of at most `replicate_below` rows are summed up on every rank in each step, and their gradients likewise, so that
    their rows are read where they are needed.
    """

    def _begin(self, plan: RoutingPlan, group: dist.ProcessGroup, dtype: torch.dtype | None) -> None:
        """Called at the end of the construction.

        Args:
            plan: what to do with each embedding.
            group: the ranks that share the tables.
            dtype: of rows that are sent; None for that of the tables.
        """
        self._plan, self._group, self._dtype = plan, group, dtype
        self._own: RankRows | None = None
        #: Where the ids of a batch are, and what has arrived of them.
        self._given: tuple[int, ArrivedIds] | None = None
        self._places: Tensor | None = None
        self._outside = OutsideIds([table for *_, table in plan.local])
        self._has_uninitialized_input_dist = False  # it has none of TorchRec's, which its pipelines look at

    @property
    def local_keys(self) -> list[str]:
        """The keys of ids whose rows every rank reads itself."""
        return [key for _, key, _ in self._plan.local]

    @property
    def routes(self) -> list[Route]:
        """The sequences of ids that travel together."""
        return self._plan.routes

    @property
    def outside_ids(self) -> tuple[OutsideIds, ...]:
        """The counts of this rank's ids outside of their tables."""
        return self._outside, *[route.outside for route in self.routes]

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The processes that share the rows."""
        return self._group

    def follow_rate(self) -> None:
        """Takes the learning rate that the tables' optimizer has set, as each look-up does that is not replayed."""
        if self._own is not None:
            self._own.follow_rate()

    @contextmanager
    def given(self, ids: KeyedJaggedTensor, arrived: ArrivedIds) -> Iterator[None]:
        """Within the block a call with these ids takes what has arrived of them, and any other ids are refused."""
        self._given = ids.values().data_ptr(), arrived
        try:
            yield
            self._own_rows().wait_sorted()  # of look-ups without a backward pass: no stream may be left in a capture
        finally:
            self._given = None

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable:
        if self._given is None:
            return super().forward(features)
        place, arrived = self._given
        if features.values().data_ptr() != place:
            raise ValueError(
                "features must be the ids of the batch, which were sent ahead of a captured step, got others"
            )
        return LazyNoWait(self._output(self._embeddings(arrived)))

    def input_dist(self, ctx: Multistreamable, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        return KJTListSplitsAwaitable([IdsRequest(self._plan.routes, features, self._group)], ctx)

    def compute_and_output_dist(self, ctx: Multistreamable, input: KJTList) -> LazyAwaitable:
        return LazyNoWait(self._output(self._embeddings(input[0])))

    def _output(self, found: dict[str, JaggedTensor]) -> dict[str, JaggedTensor] | KeyedTensor:
        """What the collection returns, of the rows by embedding."""
        return found

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
            fetched = fetch_rows(handle, memory, one)
            unique: dict[str, Tensor] = {}  # by table
            embeddings = zip(plan.embeddings[one.route], one.route.keys, one.route.tables, strict=True)
            for place, (embedding, key, table) in enumerate(embeddings):
                parts = by_key[key].lengths_or_none(), by_key[key].offsets_or_none()
                if one.positions is None:
                    found[embedding] = JaggedTensor(fetched[place], None, *parts)
                    continue
                rows = unique.setdefault(table, fetched[place].to(memory.dtype))
                by_id = bounded_rows_by_id((rows,), (one.positions[place],), rows.dtype)
                found[embedding] = TableRows(by_id.tables[0], by_id.indices[0], by_id.rows, *parts)
        scaled = {table: Scaled.apply(one, self._group) for table, one in whole.items()}
        for (embedding, key, table), ids in zip(plan.local, self._local_ids(by_key), strict=True):
            by_id = bounded_rows_by_id((scaled[table],), (ids,), self._dtype or memory.dtype)
            parts = by_key[key].lengths_or_none(), by_key[key].offsets_or_none()
            found[embedding] = TableRows(by_id.tables[0], by_id.indices[0], by_id.rows, *parts)
        return found

    def _local_ids(self, by_key: dict[str, JaggedTensor]) -> list[Tensor]:
        """The ids of replicated tables, with -1 for those outside of them."""
        ids, sizes = [], []
        for _, key, table in self._plan.local:
            own, size = by_key[key].values(), self._plan.owners[table].num_rows
            check_indices(f"features['{key}']", own, size, f"table '{table}'", padded=padding_state.is_padded)
            ids.append(own)
            sizes.append(size)
        return bound_ids(ids, sizes, self._outside.on(ids[0].device)) if ids else []

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
            fields.append(bounded_rows_by_id((whole[table],), (arrived.field_ids(place),), handle.dtype))
        events = EventsAtOwners(arrived, sum_rows(fields), lambda: fetch_rows(handle, memory, arrived))
        for feature, embedding, key in zip(route.features, self._plan.embeddings[route], route.keys, strict=True):
            ids, known = by_key[key], found.get(embedding)
            by_feature = {feature.name: events} if known is None else known.events | {feature.name: events}
            rows = handle.new_zeros(()).expand(ids.values().size(0), memory.size(1))
            found[embedding] = SpreadRows(by_feature, rows, ids.lengths_or_none(), ids.offsets_or_none())


@contextmanager
def defer_sharded_steps(model: nn.Module) -> Iterator[None]:
    """Makes one step of the model's sharded tables at the end of the block, by the gradients of all backward passes.

    Until then the gradients of the rows that were looked up stay in memory; activations do not. An error within the
    block drops them.

    Args:
        model: with any number of sharded collections, or none.

    Raises:
        ValueError: FBGEMM steps tables of a collection in each backward pass.
    """
    collections = [module for module in model.modules() if isinstance(module, ShardedEmbeddingModule)]
    with ExitStack() as stack:
        for collection in collections:
            if not isinstance(collection, RoutedCollection):
                raise ValueError(
                    f"gradients cannot accumulate over the tables of a {type(collection).__name__}, which FBGEMM steps "
                    "in each backward pass: shard them by AttentionCollectionSharder and FetchedBagsSharder, or use a "
                    "FusedEmbeddingCollection on every process"
                )
            stack.enter_context(collection.deferring())
        yield
