"""The common base of sharded collections whose ids go to the owner ranks of their rows by jfi's own input dist."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    LazyNoWait,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from jfi.distributed.input_dist import InputDist, InputDistOutput, bounded_ids
from jfi.distributed.local_shard import LocalShard, Replicate, add_stepped_at, copy_tables, fetch_rows, scaled
from jfi.distributed.planning import in_rows, plan_tables, rows_by_rank
from jfi.distributed.remote_attention import AttentionAtOwners
from jfi.modules import JaggedFeatureInteraction, lookups
from jfi.modules.jagged_pooling import pool
from jfi.modules.validation import require_keys
from jfi.tables.rows_by_id import RowsById, bounded_rows_by_id, sum_rows
from jfi.tables.table_rows import RemoteRows, TableRows, UnreadRows, parts_of
from jfi.utils.arguments import check_int, check_type


class ShardedTables(nn.Module):
    """The first base of a sharded collection of TorchRec's, whose tables, names and optimizers it leaves as they are.

    Ids go to the owner ranks of their rows. A history comes out as `RemoteRows`, rows of other keys are fetched; of an
    EmbeddingBagCollection they are pooled then. Replicated tables are copied to every rank in each step, and their
    gradients summed, so that their rows are read where they are needed. The arguments are those of TorchRec's
    collection, then of `AttentionCollectionSharder`.
    """

    steps: Tensor
    _lookups: list[Any]  # TorchRec's

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
        pg = getattr(env, "sharding_pg", env.process_group)  # of ShardingEnv2D the one that shares tables
        first = dist.get_global_rank(pg, 0)
        rows = {table: rows_by_rank(table, sharding, pg.size(), first) for table, sharding in params.items()}
        local_size = get_local_size(env.world_size)
        plan = {table: in_rows(rows[table], sharding, first, local_size) for table, sharding in params.items()}
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
        names = lookups.names_of(module)
        self.pg = pg  # the ranks that share the rows
        # `groups` are the sequences of ids that travel together, `local` those of replicated tables.
        layers = [] if model is None else [x for x in model.modules() if isinstance(x, JaggedFeatureInteraction)]
        # A layer with a collection of its own reads no other one; what reads one outside of it is found by keys.
        layers = [layer for layer in layers if layer.embedding_collection in (None, module)]
        features = [group for layer in layers for group in layer.groups]
        self._shardings, self.groups, self.local = plan_tables(names, rows, features, replicate_below)
        self._replicated = [sharding for sharding in self._shardings if sharding.num_rows <= replicate_below]
        self._dtype = dtype
        #: The counts of this rank's ids outside of their tables.
        self.outside_ids = tuple([group.outside for group in (self.local, *self.groups)])
        #: By name of each pooled embedding the key of its ids.
        self._pooled = {name: key for name, key, _ in names} if pooled else {}
        self._is_mean = pooled and names[0][2].pooling == PoolingType.MEAN
        #: The address of a batch's ids, and the output of their input dist.
        self._given: tuple[int, InputDistOutput] | None = None
        self._has_uninitialized_input_dist = False  # it has none of TorchRec's, which its pipelines look at

    @cached_property
    def local_shard(self) -> LocalShard:
        """The rows that this rank owns; not made at construction, after which TorchRec may move a module."""
        tables, stepped_at = [sharding.table for sharding in self._shardings], next(iter(self._stepped_at), None)
        return LocalShard(self._lookups, tables, self.steps, stepped_at)

    def freeze_rows(self, table: str, rows: Tensor) -> None:
        """Excludes rows of a table from steps, from the next look-up on.

        Args:
            table: name of the table.
            rows: [N] bool, True for rows that stay as they are, the same on every rank.
        """
        require_keys("tables", shardings := {one.table: one for one in self._shardings}, [table])
        check_type("rows", rows, Tensor, "a Tensor")
        shard, sharding, got = self.local_shard, shardings[table], [*rows.shape]
        if rows.dtype != torch.bool or got != [sharding.num_rows]:
            raise ValueError(f"rows must be bool of shape [{sharding.num_rows}], got {rows.dtype} of shape {got}")
        own, positions = sharding.owned_by(self.pg.rank())
        frozen = shard.frozen.setdefault("rows", torch.zeros_like(shard.memory[:, 0], dtype=torch.bool))
        frozen[positions.start : positions.stop] = rows[own.start : own.stop]

    @contextmanager
    def given(self, ids: KeyedJaggedTensor, output: InputDistOutput) -> Iterator[None]:
        """Lets calls with these ids take the output of their input dist, and refuses any other ids within the block."""
        self._given = ids.values().data_ptr(), output
        try:
            yield
        finally:
            self._given = None

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable:
        if self._given is None:
            return super().forward(features)
        address, output = self._given
        if features.values().data_ptr() != address:
            raise ValueError("features must be the ids of the batch, sent ahead of a captured step, got others")
        return LazyNoWait(self._output(output))

    def input_dist(self, ctx: Multistreamable, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        return KJTListSplitsAwaitable([InputDist(self.groups, features, self.pg)], ctx)

    def compute_and_output_dist(self, ctx: Multistreamable, input: KJTList) -> LazyAwaitable:
        return LazyNoWait(self._output(input[0]))

    def _output(self, output: InputDistOutput) -> dict[str, JaggedTensor] | KeyedTensor:
        """Returns what the collection looks up for this rank's samples."""
        found = self._embeddings(output)
        if not self._pooled:
            return found
        dtype = self.local_shard.memory.dtype
        pooled = [pool(key, found[name], None, self._is_mean).to(dtype) for name, key in self._pooled.items()]
        return KeyedTensor(list(self._pooled), [x.size(1) for x in pooled], torch.cat(pooled, 1))

    def _embeddings(self, output: InputDistOutput) -> dict[str, JaggedTensor]:
        shard, by_key, local = self.local_shard, output.by_key, self.local
        handles = shard.handles([arrived.columns[0] for arrived in output.groups], self._dtype)
        whole: dict[str, Tensor] = {}
        counts = local.outside.on(shard.memory.device)
        local_ids = list(zip(local.shardings, bounded_ids(local, by_key, counts) if local.keys else [], strict=True))
        if self._replicated:
            tables, is_read = copy_tables(shard.memory, self.pg, self._replicated, local_ids)
            # In their dtype, in which the gradients are summed up over all ranks; without rows that no rank reads.
            (handle,) = shard.handles([torch.where(is_read, self._replicated_positions, -1)], None)
            tables = Replicate.apply(handle, self.pg, self._replicated, *tables)
            whole = {sharding.table: rows for sharding, rows in zip(self._replicated, tables, strict=True)}
        found, outputs = dict[str, JaggedTensor](), dict[str, Tensor]()  # and the placeholders of what is found
        for arrived, handle in zip(output.groups, handles, strict=True):
            group, fetch = arrived.group, partial(fetch_rows, handle, shard.memory, arrived)
            if not group.features:
                for embedding, key, rows in zip(group.embeddings, group.keys, fetch(), strict=True):
                    ids = by_key[key]
                    found[embedding] = JaggedTensor(rows, None, ids.lengths_or_none(), ids.offsets_or_none())
                continue
            fields = [RowsById(handle, (shard.memory,), (arrived.columns[0],))]
            for sharding, ids in zip(group.field_shardings, arrived.columns[1:], strict=False):
                fields.append(bounded_rows_by_id((whole[sharding.table],), (ids,), handle.dtype))
            attention = AttentionAtOwners(arrived, sum_rows(fields), fetch, by_key, outputs)
            for feature, embedding, key in zip(group.features, group.embeddings, group.keys, strict=True):
                ids, known = by_key[key], found.get(embedding)
                by_feature = ({} if known is None else known.events) | {feature.name: attention}
                rows = handle.new_zeros(()).expand(ids.values().size(0), shard.memory.size(1))
                found[embedding] = RemoteRows(by_feature, rows, **parts_of(ids))
        whole = {table: scaled(rows, self.pg) for table, rows in whole.items()}
        for embedding, key, (sharding, ids) in zip(local.embeddings, local.keys, local_ids, strict=True):
            by_id = bounded_rows_by_id((whole[sharding.table],), (ids,), self._dtype or shard.memory.dtype)
            parts = by_key[key].lengths_or_none(), by_key[key].offsets_or_none()
            found[embedding] = TableRows(by_id.tables[0], by_id.indices[0], by_id.rows, *parts)
        outputs |= {embedding: one.rows for embedding, one in found.items() if isinstance(one, UnreadRows)}
        return found

    @cached_property
    def _replicated_positions(self) -> Tensor:
        """The positions [r] int32 of this rank's rows of the replicated tables in its memory."""
        owned = [sharding.owned_by(self.pg.rank()) for sharding in self._replicated]
        positions = [position for _, positions in owned for position in positions]
        return torch.tensor(positions, dtype=torch.int32, device=self.local_shard.memory.device)


def _keep_steps(tables: ShardedTables, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Lets a checkpoint without the number of steps, as TorchRec's collections have, leave it as it is."""
    state_dict.setdefault(f"{prefix}steps", tables.steps)


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


class ShardedAttentionCollection(ShardedTables, ShardedEmbeddingCollection):
    """A ShardedEmbeddingCollection whose histories are read at the owner ranks of their rows.

    The tables, their names in state_dict() and their optimizer are TorchRec's: a checkpoint of one collection loads in
    the other. What differs is the path of a batch. Ids go to the owner ranks of their rows while the batch before it
    computes. A history comes out as `RemoteRows`: the layer sends its queries to the owners, and no row of a history
    travels, nor a gradient of one. Rows of other keys are fetched.

    Created by `AttentionCollectionSharder`, whose arguments are described there.
    """


class ShardedFetchedBags(ShardedTables, ShardedEmbeddingBagCollection):
    """A ShardedEmbeddingBagCollection that fetches the rows of its samples' ids and pools them itself.

    It shares input dist, optimizer steps and captured steps with `ShardedAttentionCollection`. Of a key with one id a
    sample it sends what TorchRec's collection sends or less; of one with several ids a row for each of them. Tables,
    names in state_dict() and optimizer are TorchRec's.

    Created by `FetchedBagsSharder`, whose arguments are described there.
    """


class _Sharder:
    _sharded: type[ShardedTables]  # the class that `shard` makes
    fused_params: dict[str, Any] | None  # TorchRec's

    def __init__(self, fused_params: dict[str, Any] | None, *options: Any) -> None:
        super().__init__(fused_params)  # type: ignore[call-arg] # TorchRec's
        self._options, (_, replicate_below, dtype) = options, options
        check_int("replicate_below", replicate_below, least=0, most=2**63 - 1)
        if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
            raise TypeError(f"dtype must be a floating torch.dtype or None, got {dtype!r}")

    def shard(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTables:
        return self._sharded(module, params, env, self.fused_params, device, module_fqn, *self._options)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    @property
    def sharded_module_type(self) -> type[ShardedTables]:
        return self._sharded


class AttentionCollectionSharder(_Sharder, EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection so that attention goes to its rows.

    DistributedModelParallel takes it instead of TorchRec's EmbeddingCollectionSharder, and so do planners and
    train pipelines. It shards the collection and not the layer, since a target shares its history's table, and since
    TorchRec's pipelines send what they find in a batch, the ids, but not what a model computes, the targets.

    Args:
        model: the model, or another module that contains the layers which read the collection. Their features are those
            whose histories attention goes to, found by name.
        fused_params: as of TorchRec's sharder.
        replicate_below: tables of at most so many rows are copied to every rank in each step.
        dtype: of queries, partial outputs and fetched rows, and of the rows as attention reads them; None for that of
            the tables.

    Raises:
        ValueError, TypeError: a wrong argument; `model` has no JaggedFeatureInteraction. In `shard`: a plan that
            divides columns; a feature whose histories lie in two tables that are not replicated, or whose fields are
            concatenated, or that two layers read differently. At the first batch: as of FetchedBagsSharder.

    Example:
        >>> from jfi import JaggedFeatureInteraction, SequenceFeatureConfig
        >>> layer = JaggedFeatureInteraction([SequenceFeatureConfig("taste", ["history_item"], ["item"])], 8)
        >>> AttentionCollectionSharder(layer).sharding_types("cuda")
        ['table_wise', 'row_wise']
    """

    _sharded = ShardedAttentionCollection

    def __init__(
        self,
        model: nn.Module,
        fused_params: dict[str, Any] | None = None,
        *,
        replicate_below: int = 100_000,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(fused_params, model, replicate_below, dtype)
        must = "an nn.Module with the JaggedFeatureInteraction that reads the collection"
        check_type("model", model, nn.Module, must)
        if not any(isinstance(module, JaggedFeatureInteraction) for module in model.modules()):
            raise ValueError(f"model must be {must}, got {type(model).__name__} without one")


class FetchedBagsSharder(_Sharder, EmbeddingBagCollectionSharder):
    """Shards an EmbeddingBagCollection so that the rows of a sample's ids are fetched from their owners.

    DistributedModelParallel takes it instead of TorchRec's EmbeddingBagCollectionSharder, together with an
    `AttentionCollectionSharder`.

    Args:
        fused_params: as of TorchRec's sharder.
        replicate_below: tables of at most so many rows are copied to every rank in each step.
        dtype: of rows that are sent; None for that of the tables, which is that of the output.

    Raises:
        ValueError, TypeError: a wrong argument; in `shard` a plan that divides columns, bags with weights, tables of
            several widths or poolings; at the first batch tables of several data types or optimizers, or of one that
            `jfi.tables.step_rows` has not.

    Example:
        >>> FetchedBagsSharder().sharding_types("cuda")
        ['table_wise', 'row_wise']
    """

    _sharded = ShardedFetchedBags

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        *,
        replicate_below: int = 100_000,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(fused_params, None, replicate_below, dtype)
