"""The common base of sharded collections whose ids go to the owner ranks of their rows by jfi's own input dist."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingModule
from torchrec.distributed.types import Awaitable, LazyAwaitable, LazyNoWait, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from jfi.distributed.input_dist import GroupInput, InputDist, InputDistOutput, bounded_ids
from jfi.distributed.local_shard import LocalShard, add_stepped_at
from jfi.distributed.output_dist import Replicate, copy_tables, fetch_rows, scaled
from jfi.distributed.planning import feature_groups_of, plan_tables, row_wise_shards
from jfi.distributed.remote_attention import AttentionAtOwners
from jfi.modules import lookups
from jfi.modules.jagged_pooling import pool
from jfi.tables.rows_by_id import RowsById, bounded_rows_by_id, sum_rows
from jfi.tables.table_rows import RemoteRows, TableRows, UnreadRows, parts_of


class ShardedTables(nn.Module):
    """The first base of a sharded collection of TorchRec's, whose tables, names and optimizers it leaves as they are.

    Ids go to the owner ranks of their rows. A history comes out as `RemoteRows`, rows of other keys are fetched; of an
    EmbeddingBagCollection they are pooled then. Replicated tables are summed up on every rank in each step, and their
    gradients likewise, so that their rows are read where they are needed. The arguments are those of TorchRec's
    collection, then of `AttentionCollectionSharder`.
    """

    def __init__(
        self,
        module: EmbeddingCollection | EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None,
        device: torch.device | None,
        module_fqn: str | None,
        model: nn.Module | None,
        replicate_below: int,
        dtype: torch.dtype | None,
    ) -> None:
        pooled = isinstance(module, EmbeddingBagCollection)
        if pooled:
            check_bags(module)
        # Of ShardingEnv2D, which has several process groups, the one that shares tables.
        pg = getattr(env, "sharding_pg", env.process_group)
        first = dist.get_global_rank(pg, 0)
        ranks = pg.size(), first, get_local_size(env.world_size)
        plan = {table: row_wise_shards(table, sharding, *ranks) for table, sharding in params.items()}
        super().__init__(module, plan, env, fused_params, device, module_fqn=module_fqn)
        kernels = [kernel for lookup in self._lookups for kernel in lookup._emb_modules]
        batched = [kernel.emb_module for kernel in kernels]
        decaying = [kernel for kernel in kernels if getattr(kernel.emb_module.optimizer_args, "weight_decay", 0.0)]
        self._stepped_at = [add_stepped_at(kernel, pg) for kernel in decaying]
        # Stochastic rounding and weight decay read the number of steps, which checkpoints have then.
        rounds = any([one.stochastic_rounding and one.weights_precision.bit_rate() == 16 for one in batched])
        counts = rounds or bool(decaying)
        on = batched[0].current_device if batched else device
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=on), persistent=counts)
        if counts:
            self.register_load_state_dict_pre_hook(_keep_steps)
        configs = module.embedding_bag_configs() if pooled else module.embedding_configs()
        #: The ranks that share the rows.
        self.pg = pg
        # `groups` are the sequences of ids that travel together, `local` those of replicated tables.
        features = feature_groups_of(model, module)
        self._shardings, self.groups, self.local = plan_tables(configs, plan, features, replicate_below, first)
        self._replicated = [sharding for sharding in self._shardings if sharding.num_rows <= replicate_below]
        self._dtype = dtype
        #: The counts of this rank's ids outside of their tables.
        self.outside_ids = tuple([group.outside for group in (self.local, *self.groups)])
        #: By name of each pooled embedding the key of its ids.
        self._pooled = {name: key for name, key, _ in lookups.names_of(module)} if pooled else {}
        self._is_mean = pooled and configs[0].pooling == PoolingType.MEAN
        #: The address of a batch's ids, and the output of their input dist.
        self._given: tuple[int, InputDistOutput] | None = None
        self._has_uninitialized_input_dist = False  # it has none of TorchRec's, which its pipelines look at

    @cached_property
    def local_shard(self) -> LocalShard:
        """The rows that this rank owns; not made at construction, after which TorchRec may move a module."""
        tables, stepped_at = [sharding.table for sharding in self._shardings], next(iter(self._stepped_at), None)
        return LocalShard(self._lookups, tables, self.steps, stepped_at)

    @contextmanager
    def given(self, ids: KeyedJaggedTensor, output: InputDistOutput) -> Iterator[None]:
        """Lets calls with these ids take the output of their input dist, and refuses any other ids within the block."""
        self._given = ids.values().data_ptr(), output
        try:
            yield
            self.local_shard.wait_sorted()  # of look-ups without a backward pass: a capture must join all streams
        finally:
            self._given = None

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable:
        if self._given is None:
            return super().forward(features)
        address, output = self._given
        if features.values().data_ptr() != address:
            raise ValueError(
                "features must be the ids of the batch, which were sent ahead of a captured step, got others"
            )
        return LazyNoWait(self._output(output))

    def input_dist(self, ctx: Multistreamable, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        return KJTListSplitsAwaitable([InputDist(self.groups, features, self.pg)], ctx)

    def compute_and_output_dist(self, ctx: Multistreamable, input: KJTList) -> LazyAwaitable:
        return LazyNoWait(self._output(input[0]))

    def _output(self, arrived: InputDistOutput) -> dict[str, JaggedTensor] | KeyedTensor:
        """Returns what the collection looks up for this rank's samples."""
        found = self._embeddings(arrived)
        if not self._pooled:
            return found
        dtype = self.local_shard.memory.dtype
        pooled = [pool(key, found[name], None, self._is_mean).to(dtype) for name, key in self._pooled.items()]
        return KeyedTensor(list(self._pooled), [x.size(1) for x in pooled], torch.cat(pooled, 1))

    def _embeddings(self, arrived: InputDistOutput) -> dict[str, JaggedTensor]:
        shard, by_key, local = self.local_shard, arrived.by_key, self.local
        handles = shard.handles([group.columns[0] for group in arrived.groups], self._dtype)
        whole: dict[str, Tensor] = {}
        local_ids = list(zip(local.shardings, bounded_ids(local, by_key) if local.keys else [], strict=True))
        if self._replicated:
            tables, is_read = copy_tables(shard.memory, self.pg, self._replicated, local_ids)
            # In their dtype, in which the gradients are summed up over all ranks; without rows that no rank reads.
            (handle,) = shard.handles([torch.where(is_read, self._replicated_positions, -1)], None)
            tables = Replicate.apply(handle, self.pg, self._replicated, *tables)
            whole = {sharding.table: rows for sharding, rows in zip(self._replicated, tables, strict=True)}
        found: dict[str, JaggedTensor] = {}
        outputs: dict[str, Tensor] = {}  # the placeholders of what is found
        for group, handle in zip(arrived.groups, handles, strict=True):
            if group.group.features:
                self._add_histories(found, group, handle, whole, by_key, outputs)
            else:
                self._add_fetched(found, group, handle, by_key)
        whole = {table: scaled(rows, self.pg) for table, rows in whole.items()}
        for embedding, key, (sharding, ids) in zip(local.embeddings, local.keys, local_ids, strict=True):
            rows, dtype = whole[sharding.table], self._dtype or shard.memory.dtype
            found[embedding] = _rows_by_id(rows, ids, dtype, by_key[key])
        outputs |= {embedding: one.rows for embedding, one in found.items() if isinstance(one, UnreadRows)}
        return found

    def _add_fetched(
        self, found: dict[str, JaggedTensor], arrived: GroupInput, handle: Tensor, by_key: dict[str, JaggedTensor]
    ) -> None:
        """Adds the rows of a group whose rows are fetched."""
        group, fetched = arrived.group, fetch_rows(handle, self.local_shard.memory, arrived)
        for embedding, key, rows in zip(group.embeddings, group.keys, fetched, strict=True):
            ids = by_key[key]
            found[embedding] = JaggedTensor(rows, None, ids.lengths_or_none(), ids.offsets_or_none())

    def _add_histories(
        self,
        found: dict[str, JaggedTensor],
        arrived: GroupInput,
        handle: Tensor,
        whole: dict[str, Tensor],
        by_key: dict[str, JaggedTensor],
        outputs: dict[str, Tensor],
    ) -> None:
        """Adds the histories of a group's features."""
        group, memory = arrived.group, self.local_shard.memory
        fields = [RowsById(handle, (memory,), (arrived.columns[0],))]
        for sharding, ids in zip(group.field_shardings, arrived.columns[1:], strict=False):
            fields.append(bounded_rows_by_id((whole[sharding.table],), (ids,), handle.dtype))
        fetch = partial(fetch_rows, handle, memory, arrived)
        attention = AttentionAtOwners(arrived, sum_rows(fields), fetch, by_key, outputs)
        for feature, embedding, key in zip(group.features, group.embeddings, group.keys, strict=True):
            ids, known = by_key[key], found.get(embedding)
            by_feature = ({} if known is None else known.events) | {feature.name: attention}
            rows = handle.new_zeros(()).expand(ids.values().size(0), memory.size(1))
            found[embedding] = RemoteRows(by_feature, rows, **parts_of(ids))

    @cached_property
    def _replicated_positions(self) -> Tensor:
        """The positions [r] int32 of this rank's rows of the replicated tables in its memory."""
        owned = [sharding.owned_by(self.pg.rank()) for sharding in self._replicated]
        positions = [position for _, positions in owned for position in positions]
        return torch.tensor(positions, dtype=torch.int32, device=self.local_shard.memory.device)


def _keep_steps(tables: ShardedTables, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Lets a checkpoint without the number of steps, as TorchRec's collections have, leave it as it is."""
    state_dict.setdefault(f"{prefix}steps", tables.steps)


def _rows_by_id(table: Tensor, ids: Tensor, dtype: torch.dtype, parts: JaggedTensor) -> TableRows:
    """Returns rows of a table by checked ids, with the lengths of `parts`."""
    by_id = bounded_rows_by_id((table,), (ids,), dtype)
    return TableRows(by_id.tables[0], by_id.indices[0], by_id.rows, parts.lengths_or_none(), parts.offsets_or_none())


def check_bags(module: EmbeddingBagCollection) -> None:
    """Raises a ValueError for bags whose rows cannot be fetched and pooled together."""
    tables = module.embedding_bag_configs()
    if module.is_weighted():
        raise ValueError("bags whose rows are fetched must have no weights by id; use TorchRec's sharder")
    if len({table.embedding_dim for table in tables}) > 1:
        widths = {table.name: table.embedding_dim for table in tables}
        raise ValueError(f"bags whose rows are fetched must have tables of one width, got {widths}")
    if len({table.pooling for table in tables}) > 1:
        poolings = {table.name: table.pooling.value for table in tables}
        raise ValueError(f"bags whose rows are fetched must all be summed or all averaged, got {poolings}")


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
            if not isinstance(collection, ShardedTables):
                raise ValueError(
                    f"gradients cannot accumulate over the tables of a {type(collection).__name__}, which FBGEMM steps "
                    "in each backward pass: shard them by AttentionCollectionSharder and FetchedBagsSharder, or use a "
                    "FusedEmbeddingCollection on every process"
                )
            stack.enter_context(collection.local_shard.deferring())
        yield
