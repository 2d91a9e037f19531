"""An EmbeddingCollection whose processes exchange each row once, however many events of a batch have it.

TorchRec's `use_index_dedup` does this for GPUs, and then expands the unique rows to one for each event. Here the rows
stay unique: each key gets `TableRows` of them, which attention reads through the ids, so that `[S, D]` is never made
and its gradient is summed by row before it is sent back. Keys of one table share its unique rows.
"""

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.modules import lookups
from jfi.modules.table_rows import TableRows
from jfi.ops.rows_by_id import bounded_rows_by_id


class UniqueContext(EmbeddingCollectionContext):
    """What a batch's ids leave for its embeddings.

    Attributes:
        places: by key `[S]` int64, which of its table's unique rows each event has.
        lengths: by key `[B]`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, Tensor] = {}
        self.lengths: dict[str, Tensor] = {}

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        for one in (*self.places.values(), *self.lengths.values()):
            one.record_stream(stream)


class UniqueRows(LazyAwaitable[dict[str, JaggedTensor]]):
    """By key the rows of a batch, as TableRows of the unique rows that were received.

    Args:
        received: by the first key of each table its unique rows.
        context: of the batch.
        tables: of the collection.
    """

    def __init__(
        self,
        received: LazyAwaitable[dict[str, JaggedTensor]],
        context: UniqueContext,
        tables: list[EmbeddingConfig],
    ) -> None:
        super().__init__()
        self._received, self._context, self._tables = received, context, tables

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        received, rows = self._received.wait(), {}
        for table in self._tables:
            unique = received[table.feature_names[0]].values()
            for key in table.feature_names:
                by_id = bounded_rows_by_id((unique,), (self._context.places[key],), unique.dtype)
                lengths = self._context.lengths[key]
                rows[key] = TableRows(by_id.tables[0], by_id.indices[0], by_id.rows, lengths)
        return rows


class UniqueEmbeddingCollection(ShardedEmbeddingCollection):
    """A ShardedEmbeddingCollection that sends the unique ids of a batch, and returns TableRows of their rows."""

    def __init__(self, module: EmbeddingCollection, *arguments: object, **options: object) -> None:
        self._tables = module.embedding_configs()
        super().__init__(module, *arguments, **options)

    def create_context(self) -> UniqueContext:
        return UniqueContext()

    def input_dist(self, ctx: UniqueContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        lookups.allow_no_samples(features)
        with torch.no_grad():
            return super().input_dist(ctx, unique_ids(features, self._tables, ctx))

    def output_dist(self, ctx: UniqueContext, output: list[Tensor]) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return UniqueRows(super().output_dist(ctx, output), ctx, self._tables)

    def compute_and_output_dist(self, ctx: UniqueContext, input: KJTList) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return UniqueRows(super().compute_and_output_dist(ctx, input), ctx, self._tables)


class UniqueEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """Shards an EmbeddingCollection as UniqueEmbeddingCollection."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> UniqueEmbeddingCollection:
        options = {"qcomm_codecs_registry": self.qcomm_codecs_registry, "module_fqn": module_fqn}
        return UniqueEmbeddingCollection(module, params, env, self.fused_params, device, **options)

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        return UniqueEmbeddingCollection


def unique_ids(features: KeyedJaggedTensor, tables: list[EmbeddingConfig], context: UniqueContext) -> KeyedJaggedTensor:
    """The ids of a collection's keys, each once by table: the first key of a table has them all, the others none.

    Args:
        features: B samples of these and other keys.
        tables: of the collection.
        context: gets the places and the lengths of the events.

    Returns:
        B samples, among which the unique ids are spread evenly, as kernels that go by sample like them.

    Example:
        >>> ids = KeyedJaggedTensor(
        ...     ["item", "history"], torch.tensor([4, 7, 7, 4, 4]), lengths=torch.tensor([1, 1, 2, 1])
        ... )
        >>> table = EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["item", "history"])
        >>> context = UniqueContext()
        >>> unique_ids(ids, [table], context).to_dict()["item"].values(), context.places["history"]
        (tensor([4, 7]), tensor([1, 0, 0]))
    """
    by_key, keys, batch = features.to_dict(), [], features.stride()
    values, lengths = [], []
    for table in tables:
        own = [by_key[key] for key in table.feature_names]
        events = [one.values() for one in own]
        unique, places = torch.unique(torch.cat(events), return_inverse=True)
        split = places.split([one.numel() for one in events])
        context.places |= zip(table.feature_names, split, strict=True)
        context.lengths |= {key: one.lengths() for key, one in zip(table.feature_names, own, strict=True)}
        ends = torch.arange(batch + 1, device=unique.device) * unique.numel() // max(batch, 1)
        spread = ends.diff().to(own[0].lengths().dtype)
        keys += table.feature_names
        values.append(unique)
        lengths += [spread, *(torch.zeros_like(spread) for _ in own[1:])]
    return KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths), stride=batch)
